/* SPDX-License-Identifier: Apache-2.0 */
/*
 * io_fault.c - a drive that fails on purpose. Wraps a backend; active only with a spec, which
 * comes from io_opts.faults (the engine takes it from MOMENT_FAULTS) or io_fault_set(); its grammar
 * is in io_fault_spec.c.
 *
 * A part is with the inner backend (counted in `inner_parts`), or in `delayed`, or in `ready` with
 * its result in part->res. Inner completions always pass through `ready`: so a power cut can wait
 * for the inner backend at any time, without io.c being entered.
 *
 * The journal has an entry per write, the newest last, from its start until a sync that began
 * after it completed has succeeded. A cut walks it backwards. Where two writes overlap, a
 * piece ends as any of its versions since the last sync, which is what drives do.
 *
 * A sync that fails makes everything in the journal doubtful for good, whatever later syncs say:
 * the kernel may have forgotten pages that it could not write, a drive the content of its cache. A
 * doubtful sector is safe only when a later write of it is.
 *
 * Loop thread only. Allocates, reads and writes synchronously: this is for tests.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "engine/io_fault.h"
#include "engine/io_fault_spec.h"
#include "engine/io_impl.h"

#define SECTOR	  512u
#define EXIT_CODE 70

struct journal_entry {
	struct list link;
	uint64_t off, len;
	uint64_t done_seq; /* when it completed; 0: in flight */
	bool doubtful;	   /* a sync has failed since it began */
	char *old;
	bool safe[]; /* by sector, of a doubtful one: written again since, and synced */
};

/* What was decided for a part, by part->idx. */
struct fault_part {
	uint64_t due;
	uint64_t sync_seq;
	unsigned int unsaid; /* bytes moved but not reported */
	int error;
	bool flip, doubtful;
	struct journal_entry *entry;
};

struct io_fault {
	struct io_backend be;
	struct io_backend *inner;
	int fd;
	int epfd, timer_fd; /* epfd polls inner's descriptor and the timer */
	struct fault_spec spec;
	uint64_t rng;
	struct list delayed; /* by due */
	struct list ready;
	unsigned int inner_parts;
	struct list journal;
	uint64_t seq, writes;
	bool dead;
	struct fault_part parts[];
};

static const struct io_backend_ops fault_ops;

/* --- chance ----------------------------------------------------------------------------------- */

/* splitmix64 */
static uint64_t rng_next(uint64_t *state)
{
	uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);

	z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
	return z ^ (z >> 31);
}

static bool roll(struct io_fault *f, double rate)
{
	return rate > 0 && (double)(rng_next(&f->rng) >> 11) * 0x1p-53 < rate;
}

/* --- parts in and out ------------------------------------------------------------------------ */

static uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* The timer fires when something is to be done in reap(): at once if a part is ready. */
static void arm(struct io_fault *f)
{
	struct itimerspec its = {0};
	uint64_t when = 0;

	if (!list_empty(&f->ready))
		when = 1; /* long ago, and not the 0 that disarms */
	else if (!list_empty(&f->delayed)) {
		struct io_part *p = list_first(&f->delayed, struct io_part, link);

		when = f->parts[p->idx].due;
	}
	its.it_value.tv_sec = (time_t)(when / 1000000000u);
	its.it_value.tv_nsec = (long)(when % 1000000000u);
	timerfd_settime(f->timer_fd, TFD_TIMER_ABSTIME, &its, NULL);
}

static void make_ready(struct io_fault *f, struct io_part *part, int res)
{
	part->res = res;
	list_push_back(&f->ready, &part->link);
	arm(f);
}

/* Reads [off, off + len), with zeros for what is beyond the end of the file. */
static int read_padded(int fd, char *buf, uint64_t len, uint64_t off)
{
	memset(buf, 0, len);
	while (len) {
		ssize_t n = pread(fd, buf, len, (off_t)off);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		n -= n % SECTOR; /* O_DIRECT: the end of the file, nothing more will come */
		if (n == 0)
			return 0;
		buf += n;
		off += (uint64_t)n;
		len -= (uint64_t)n;
	}
	return 0;
}

static void *alloc_aligned(uint64_t len)
{
	void *p;

	return posix_memalign(&p, MOMENT_UNIT, len) ? NULL : p;
}

static void entry_free(struct journal_entry *e)
{
	list_remove(&e->link);
	free(e->old);
	free(e);
}

static int journal_add(struct io_fault *f, struct io_part *part)
{
	struct journal_entry *e;
	int ret;

	if (!part->count)
		return 0;
	e = calloc(1, sizeof(*e) + part->count / SECTOR);
	if (!e)
		return -ENOMEM;
	e->off = part->off;
	e->len = part->count;
	e->old = alloc_aligned(e->len);
	e->doubtful = f->parts[part->idx].doubtful;
	list_init(&e->link);
	ret = e->old ? read_padded(f->fd, e->old, e->len, e->off) : -ENOMEM;
	if (ret) {
		entry_free(e);
		return ret;
	}
	list_push_back(&f->journal, &e->link);
	f->parts[part->idx].entry = e;
	return 0;
}

/* `e` is on the drive for good, and so are the sectors that older, doubtful ones share with it. */
static void journal_settle(struct io_fault *f, const struct journal_entry *e)
{
	list_for_each_safe(pos, tmp, &f->journal)
	{
		struct journal_entry *d = list_entry(pos, struct journal_entry, link);
		uint64_t left = 0;

		if (d == e)
			break;
		if (!d->doubtful)
			continue;
		for (uint64_t i = 0; i < d->len / SECTOR; i++) {
			uint64_t at = d->off + i * SECTOR;

			if (at >= e->off && at < e->off + e->len)
				d->safe[i] = true;
			left += !d->safe[i];
		}
		if (!left)
			entry_free(d);
	}
}

/* A sync that began at `seq` has succeeded: what had completed by then is safe, unless doubtful. */
static void journal_retire(struct io_fault *f, uint64_t seq)
{
	list_for_each_safe(pos, tmp, &f->journal)
	{
		struct journal_entry *e = list_entry(pos, struct journal_entry, link);

		if (e->doubtful || !e->done_seq || e->done_seq > seq)
			continue;
		journal_settle(f, e);
		entry_free(e);
	}
}

/* Gives a random part of what the write replaced back to the drive. */
static int entry_undo(struct io_fault *f, const struct journal_entry *e, uint64_t *rng)
{
	char *now = alloc_aligned(e->len);
	int ret;

	if (!now)
		return -ENOMEM;
	ret = read_padded(f->fd, now, e->len, e->off);
	if (!ret) {
		for (uint64_t at = 0; at < e->len; at += SECTOR) {
			if (!e->safe[at / SECTOR] && (rng_next(rng) & 1))
				memcpy(now + at, e->old + at, SECTOR);
		}
		ret = io_pwrite_all(f->fd, now, e->len, e->off);
	}
	free(now);
	return ret;
}

/* A sync has failed. */
static void journal_doubt(struct io_fault *f)
{
	for (struct list *pos = f->journal.prev; pos != &f->journal;) {
		struct journal_entry *e = list_entry(pos, struct journal_entry, link);

		pos = pos->prev;
		/* What is in flight is still to reach the drive. */
		if (f->spec.drop && e->done_seq) {
			entry_undo(f, e, &f->rng);
			entry_free(e);
		} else {
			e->doubtful = true;
		}
	}
	list_for_each(pos, &f->delayed)
	{
		f->parts[list_entry(pos, struct io_part, link)->idx].doubtful = true;
	}
}

/* Rots one bit on the drive, within the `len` bytes at `off`. */
static void flip_on_drive(struct io_fault *f, uint64_t off, uint64_t len)
{
	uint64_t bit = rng_next(&f->rng) % (len * 8);
	uint64_t at = off + bit / 8, unit = at - at % MOMENT_UNIT;
	char *buf = alloc_aligned(MOMENT_UNIT);

	if (buf && !read_padded(f->fd, buf, MOMENT_UNIT, unit)) {
		buf[at - unit] ^= (char)(1 << (bit % 8));
		io_pwrite_all(f->fd, buf, MOMENT_UNIT, unit);
	}
	free(buf);
}

/* From the inner backend; it may be in the middle of a power cut. */
static void inner_done(void *owner, struct io_part *part, int res)
{
	struct io_fault *f = owner;
	struct fault_part *fp = &f->parts[part->idx];

	f->inner_parts--;
	if (fp->entry) {
		fp->entry->done_seq = ++f->seq;
		fp->entry = NULL;
	}
	if (part->call == IO_CALL_SYNC) {
		if (res == 0)
			journal_retire(f, fp->sync_seq);
		else
			journal_doubt(f);
	}
	if (fp->flip && res > 0 && !f->dead) {
		uint64_t bit = rng_next(&f->rng) % ((uint64_t)res * 8);

		if (part->call == IO_CALL_READ)
			part->buf[bit / 8] ^= (char)(1 << (bit % 8));
		else
			flip_on_drive(f, part->off, (uint64_t)res);
	}
	if (fp->unsaid && res > (int)fp->unsaid)
		res -= (int)fp->unsaid;
	make_ready(f, part, res);
}

/* --- power cut -------------------------------------------------------------------------------- */

static int power_cut(struct io_fault *f, uint64_t seed)
{
	int ret = 0;

	f->dead = true;
	f->inner->ops->kick(f->inner);
	while (f->inner_parts) {
		struct pollfd p = {.fd = f->inner->ops->event_fd(f->inner), .events = POLLIN};

		poll(&p, 1, -1);
		f->inner->ops->reap(f->inner);
	}
	list_splice_back(&f->ready, &f->delayed);
	while (!list_empty(&f->journal)) {
		struct journal_entry *e = list_entry(f->journal.prev, struct journal_entry, link);
		int err = entry_undo(f, e, &seed);

		if (!ret)
			ret = err;
		entry_free(e);
	}
	if (f->spec.cut_exit) {
		fsync(f->fd);
		_exit(EXIT_CODE);
	}
	arm(f);
	return ret;
}

/* --- the backend ------------------------------------------------------------------------------ */

static void pass_on(struct io_fault *f, struct io_part *part)
{
	struct fault_part *fp = &f->parts[part->idx];
	int ret;

	if (fp->error) {
		if (part->call == IO_CALL_SYNC)
			journal_doubt(f);
		make_ready(f, part, -fp->error);
		return;
	}
	if (part->call == IO_CALL_WRITE) {
		if (f->spec.cut && f->writes >= f->spec.cut_after && !f->dead)
			power_cut(f, rng_next(&f->rng));
		if (f->dead) {
			make_ready(f, part, -EIO);
			return;
		}
		f->writes++;
		ret = f->spec.journal ? journal_add(f, part) : 0;
		if (ret) {
			make_ready(f, part, ret);
			return;
		}
	}
	fp->sync_seq = f->seq;
	f->inner_parts++;
	f->inner->ops->start(f->inner, part);
}

static void delay(struct io_fault *f, struct io_part *part, uint64_t ns)
{
	struct list *at = f->delayed.prev;

	f->parts[part->idx].due = now_ns() + ns;
	while (at != &f->delayed &&
	       f->parts[list_entry(at, struct io_part, link)->idx].due > f->parts[part->idx].due)
		at = at->prev;
	list_insert_between(&part->link, at, at->next);
	arm(f);
}

/* Less than asked for, but something; then maybe not even all of that is admitted. */
static void make_short(struct io_fault *f, struct io_part *part)
{
	uint64_t units = part->count / MOMENT_UNIT;

	if (units > 1)
		part->count = (1 + rng_next(&f->rng) % (units - 1)) * MOMENT_UNIT;
	if (rng_next(&f->rng) & 1)
		f->parts[part->idx].unsaid = (unsigned int)(rng_next(&f->rng) % MOMENT_UNIT);
}

static void fault_start(struct io_backend *be, struct io_part *part)
{
	struct io_fault *f = container_of(be, struct io_fault, be);
	struct fault_part *fp = &f->parts[part->idx];
	const struct fault_kind *k;

	*fp = (struct fault_part){0};
	if (f->dead) {
		make_ready(f, part, -EIO);
		return;
	}
	if (part->call > IO_CALL_SYNC || (f->spec.file[0] && access(f->spec.file, F_OK))) {
		pass_on(f, part);
		return;
	}
	k = &f->spec.kind[part->call];
	if (roll(f, k->error)) {
		fp->error = k->errnum;
	} else {
		if (roll(f, k->shorten))
			make_short(f, part);
		fp->flip = roll(f, k->flip);
	}
	if (roll(f, k->delay))
		delay(f, part, k->delay_ns);
	else
		pass_on(f, part);
}

static void fault_kick(struct io_backend *be)
{
	struct io_fault *f = container_of(be, struct io_fault, be);

	f->inner->ops->kick(f->inner);
}

static void fault_reap(struct io_backend *be)
{
	struct io_fault *f = container_of(be, struct io_fault, be);
	struct list ready;
	uint64_t v, now;

	if (read(f->timer_fd, &v, sizeof(v)) < 0 && errno != EAGAIN && errno != EINTR)
		abort(); /* a bug: it is our own descriptor */
	f->inner->ops->reap(f->inner);
	now = now_ns();
	while (!list_empty(&f->delayed)) {
		struct io_part *part = list_first(&f->delayed, struct io_part, link);

		if (f->parts[part->idx].due > now)
			break;
		list_remove(&part->link);
		pass_on(f, part);
	}
	/* Those that become ready while these are handed up are for the next time. */
	list_init(&ready);
	list_splice_back(&ready, &f->ready);
	while (!list_empty(&ready)) {
		struct io_part *part = list_first(&ready, struct io_part, link);

		list_remove(&part->link);
		be->part_done(be->owner, part, f->dead ? -EIO : part->res);
	}
	/* Delayed parts were handed to the inner backend, perhaps with no kick() to follow soon. */
	f->inner->ops->kick(f->inner);
	arm(f);
}

static int fault_event_fd(const struct io_backend *be)
{
	return container_of(be, struct io_fault, be)->epfd;
}

static void fault_destroy(struct io_backend *be)
{
	struct io_fault *f = container_of(be, struct io_fault, be);

	f->inner->ops->destroy(f->inner);
	while (!list_empty(&f->journal))
		entry_free(list_first(&f->journal, struct journal_entry, link));
	close(f->timer_fd);
	close(f->epfd);
	free(f);
}

static const struct io_backend_ops fault_ops = {
	.name = "faults",
	.destroy = fault_destroy,
	.start = fault_start,
	.kick = fault_kick,
	.reap = fault_reap,
	.event_fd = fault_event_fd,
};

static int watch_in(int epfd, int fd)
{
	struct epoll_event ev = {.events = EPOLLIN};

	return epoll_ctl(epfd, EPOLL_CTL_ADD, fd, &ev) ? -errno : 0;
}

int io_fault_backend_create(const char *spec, struct io_backend *inner, int fd,
			    struct io_backend **out, char *why, size_t why_len)
{
	struct io_fault *f;
	int ret;

	f = calloc(1, sizeof(*f) + inner->depth * sizeof(f->parts[0]));
	if (!f)
		return -ENOMEM;
	f->be.ops = &fault_ops;
	f->be.depth = inner->depth;
	f->inner = inner;
	f->fd = fd;
	list_init(&f->delayed);
	list_init(&f->ready);
	list_init(&f->journal);
	ret = io_fault_spec_parse(spec, &f->spec, why, why_len);
	if (ret)
		goto out_free;
	f->rng = f->spec.seed;
	f->epfd = epoll_create1(EPOLL_CLOEXEC);
	if (f->epfd < 0) {
		ret = -errno;
		goto out_free;
	}
	f->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
	if (f->timer_fd < 0) {
		ret = -errno;
		goto out_epfd;
	}
	ret = watch_in(f->epfd, f->timer_fd);
	if (!ret)
		ret = watch_in(f->epfd, inner->ops->event_fd(inner));
	if (ret)
		goto out_timer;
	inner->part_done = inner_done;
	inner->owner = f;
	*out = &f->be;
	return 0;

out_timer:
	close(f->timer_fd);
out_epfd:
	close(f->epfd);
out_free:
	free(f);
	return ret;
}

static struct io_fault *fault_of(struct io *io)
{
	return io->be->ops == &fault_ops ? container_of(io->be, struct io_fault, be) : NULL;
}

int io_fault_set(struct io *io, const char *text, char *why, size_t why_len)
{
	struct io_fault *f = fault_of(io);
	struct fault_spec spec;
	char scrap[IO_REASON_LEN];
	int ret;

	if (!why) {
		why = scrap;
		why_len = sizeof(scrap);
	}
	if (!f) {
		snprintf(why, why_len, "this io was created without fault injection");
		return -ENOTSUP;
	}
	ret = io_fault_spec_parse(text, &spec, why, why_len);
	if (ret)
		return ret;
	spec.journal |= f->spec.journal;
	f->spec = spec;
	f->rng = spec.seed;
	f->writes = 0;
	return 0;
}

int io_fault_cut(struct io *io, uint64_t seed)
{
	struct io_fault *f = fault_of(io);

	if (!f)
		return -ENOTSUP;
	if (!f->spec.journal)
		return -EINVAL;
	return f->dead ? 0 : power_cut(f, seed);
}
