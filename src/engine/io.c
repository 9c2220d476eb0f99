/* SPDX-License-Identifier: Apache-2.0 */
/*
 * io.c - what every implementation of io.h has in common: the queue, cutting ops into parts,
 * resuming and retrying, and the choice of implementation.
 *
 * An op waits in `urgent` or `queue` (first in, first out; urgent first) until it is wholly cut
 * into parts. A part is one kernel call; there are as many as the backend takes at a time, so
 * having a part is the permission to be in flight, and nothing is allocated after io_create().
 *
 *   op:    queued -> (all parts cut) -> (all parts done) -> done list -> done() entered
 *   part:  free -> READ | WRITE | SYNC, again until all is moved -> free
 *          WRITE, buffered: -> RANGE -> DROP -> free    written pages leave the page cache
 *
 * An op that fails is cut no further, and completes when the parts in flight have come back: until
 * then the kernel may still use its buffer. An op is in one list at most: urgent or queue, or done.
 *
 * Everything runs on the loop thread, but io_get_info() and the synchronous helpers.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/io_impl.h"

/* A part that moves nothing this many times in a row fails instead of being tried again. */
#define IO_STALLS_MAX 1000

static uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

int io_part_call(int fd, const struct io_part *part)
{
	ssize_t n = 0;

	switch (part->call) {
	case IO_CALL_READ:
		n = pread(fd, part->buf, part->count, (off_t)part->off);
		break;
	case IO_CALL_WRITE:
		n = pwrite(fd, part->buf, part->count, (off_t)part->off);
		break;
	case IO_CALL_SYNC:
		n = fdatasync(fd);
		break;
	case IO_CALL_RANGE:
		n = sync_file_range(fd, (off_t)part->off, (off_t)part->count,
				    SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
					    SYNC_FILE_RANGE_WAIT_AFTER);
		break;
	case IO_CALL_DROP:
		return -posix_fadvise(fd, (off_t)part->off, (off_t)part->count,
				      POSIX_FADV_DONTNEED);
	}
	return n < 0 ? -errno : (int)n;
}

/* One writer, so a plain add will do; atomic for those who read meanwhile. */
static void count(_Atomic uint64_t *c, uint64_t n)
{
	uint64_t v = atomic_load_explicit(c, memory_order_relaxed);

	atomic_store_explicit(c, v + n, memory_order_relaxed);
}

/* --- parts ------------------------------------------------------------------------------------ */

static void part_start(struct io *io, struct io_part *part)
{
	part->count = part->len;
	io->be->ops->start(io->be, part);
}

/* Cuts the next part off an op and starts it. */
static void op_cut(struct io *io, struct io_op *op, uint64_t now)
{
	struct io_part *part = list_first(&io->free, struct io_part, link);

	list_remove(&part->link);
	if (!op->start_ns)
		op->start_ns = now;
	part->op = op;
	part->call = op->kind == IO_READ    ? IO_CALL_READ
		     : op->kind == IO_WRITE ? IO_CALL_WRITE
					    : IO_CALL_SYNC;
	part->buf = op->buf ? (char *)op->buf + op->moved : NULL;
	part->off = part->base = op->off + op->moved;
	part->len = part->size = min_u64(op->len - op->moved, io->part_max);
	part->stalls = 0;
	op->moved += part->len;
	op->parts++;
	if (op->moved == op->len)
		list_remove(&op->link);
	part_start(io, part);
}

/* Whatever queue the next op is in, it is the first there. NULL: none waits. */
static struct io_op *op_next(struct io *io)
{
	if (!list_empty(&io->urgent))
		return list_first(&io->urgent, struct io_op, link);
	if (!list_empty(&io->queue))
		return list_first(&io->queue, struct io_op, link);
	return NULL;
}

/* The part is through, with error `err` or 0. */
static void part_end(struct io *io, struct io_part *part, int err)
{
	struct io_op *op = part->op;

	part->op = NULL;
	list_push_back(&io->free, &part->link);
	op->parts--;
	if (err && !op->res) {
		op->res = err;
		list_remove(&op->link); /* harmless if all of it was cut */
	}
	if (!op->parts && !list_linked(&op->link))
		list_push_back(&io->done, &op->link);
}

static void part_again(struct io *io, struct io_part *part)
{
	count(&io->retries, 1);
	part_start(io, part);
}

/* READ or WRITE moved `res` bytes, 0 <= res. */
static void part_moved(struct io *io, struct io_part *part, uint64_t res)
{
	if (res < part->len) {
		if (res == 0) { /* end of file, or a drive that takes nothing */
			part_end(io, part, -EIO);
			return;
		}
		/* O_DIRECT cannot go on in the middle of a sector: move that once more. */
		if (io->direct)
			res -= res % io->align;
		part->stalls = res ? 0 : part->stalls + 1;
		if (part->stalls > IO_STALLS_MAX) {
			part_end(io, part, -EIO);
			return;
		}
		part->buf += res;
		part->off += res;
		part->len -= res;
		part_again(io, part);
		return;
	}
	if (part->call == IO_CALL_WRITE && !io->direct && part->size) {
		part->call = IO_CALL_RANGE;
		part->off = part->base;
		part->len = part->size;
		part_start(io, part);
		return;
	}
	part_end(io, part, 0);
}

static void io_part_done(void *owner, struct io_part *part, int res)
{
	struct io *io = owner;

	if ((res == -EINTR || res == -EAGAIN) && ++part->stalls <= IO_STALLS_MAX) {
		part_again(io, part);
		return;
	}
	switch (part->call) {
	case IO_CALL_READ:
	case IO_CALL_WRITE:
		if (res >= 0)
			part_moved(io, part, (uint64_t)res);
		else
			part_end(io, part, res);
		break;
	case IO_CALL_SYNC:
		part_end(io, part, res < 0 ? res : 0);
		break;
	case IO_CALL_RANGE:
		/*
		 * This is where a buffered write meets the drive; the kernel reports its failure
		 * once, so it must not get lost here. Any other error means that the file system
		 * cannot do it, and then there is nothing to drop early.
		 */
		if (res == -EIO || res == -ENOSPC || res == -EDQUOT || res == -EROFS) {
			part_end(io, part, res);
			break;
		}
		part->call = IO_CALL_DROP;
		part_start(io, part);
		break;
	case IO_CALL_DROP:
		part_end(io, part, 0); /* advice */
		break;
	}
}

/* --- the interface ---------------------------------------------------------------------------- */

static void submit_to(struct io *io, struct io_op *op, struct list *queue)
{
	op->res = 0;
	op->moved = 0;
	op->start_ns = 0;
	op->parts = 0;
	if (op->kind == IO_SYNC) {
		op->buf = NULL;
		op->off = op->len = 0;
	}
	list_init(&op->link);
	list_push_back(queue, &op->link);
	atomic_fetch_add_explicit(&io->pending, 1, memory_order_relaxed);
}

void io_submit(struct io *io, struct io_op *op)
{
	submit_to(io, op, &io->queue);
}

/* Urgent ops keep their order among themselves: the earlier one has waited longer. */
void io_submit_urgent(struct io *io, struct io_op *op)
{
	submit_to(io, op, &io->urgent);
}

void io_kick(struct io *io)
{
	struct io_op *op;
	uint64_t now = 0;

	while (!list_empty(&io->free) && (op = op_next(io)) != NULL) {
		if (!now)
			now = now_ns();
		op_cut(io, op, now);
	}
	io->be->ops->kick(io->be);
}

static void op_account(struct io *io, const struct io_op *op, uint64_t now)
{
	if (op->res)
		count(&io->errors, 1);
	switch (op->kind) {
	case IO_READ:
		count(&io->reads, 1);
		count(&io->read_bytes, op->res ? 0 : op->len);
		count(&io->read_ns, now - op->start_ns);
		break;
	case IO_WRITE:
		count(&io->writes, 1);
		count(&io->write_bytes, op->res ? 0 : op->len);
		count(&io->write_ns, now - op->start_ns);
		break;
	case IO_SYNC:
		count(&io->syncs, 1);
		break;
	}
}

unsigned int io_reap(struct io *io)
{
	unsigned int n = 0;
	uint64_t now;

	io->be->ops->reap(io->be);
	if (list_empty(&io->done))
		return 0;
	now = now_ns();
	while (!list_empty(&io->done)) {
		struct io_op *op = list_first(&io->done, struct io_op, link);

		list_remove(&op->link);
		op_account(io, op, now);
		atomic_fetch_sub_explicit(&io->pending, 1, memory_order_relaxed);
		op->done(op); /* the op is the caller's again, and may be gone */
		n++;
	}
	return n;
}

int io_event_fd(const struct io *io)
{
	return io->be->ops->event_fd(io->be);
}

unsigned int io_pending(const struct io *io)
{
	return atomic_load_explicit(&io->pending, memory_order_relaxed);
}

void io_get_info(const struct io *io, struct io_info *info)
{
	*info = (struct io_info){
		.engine = io->engine,
		.engine_reason = io->engine_reason,
		.direct = io->direct,
		.direct_reason = io->direct_reason,
		.registered = io->registered,
		.registered_reason = io->registered_reason,
		.align = io->align,
	};
#define GET(field) info->field = atomic_load_explicit(&io->field, memory_order_relaxed)
	GET(reads);
	GET(read_bytes);
	GET(writes);
	GET(write_bytes);
	GET(syncs);
	GET(errors);
	GET(retries);
	GET(read_ns);
	GET(write_ns);
#undef GET
	info->inflight = io_pending(io);
}

/* --- creation --------------------------------------------------------------------------------- */

static int backend_create(struct io *io, const struct io_opts *opts, char *why, size_t why_len)
{
	int ret;

	if (opts->engine != IO_THREADS) {
		ret = io_uring_backend_create(opts, io->fd, &io->be, io->engine_reason,
					      sizeof(io->engine_reason));
		if (!ret)
			return 0;
		if (opts->engine == IO_URING) {
			snprintf(why, why_len, "%s", io->engine_reason);
			return ret;
		}
	} else {
		snprintf(io->engine_reason, sizeof(io->engine_reason), "threads were asked for");
	}
	return io_threads_backend_create(opts, io->fd, &io->be, why, why_len);
}

int io_create(const struct io_opts *opts, struct io **out)
{
	char scrap[IO_REASON_LEN];
	char *why = opts->why ? opts->why : scrap;
	size_t why_len = opts->why ? opts->why_len : sizeof(scrap);
	struct io_backend *wrapped;
	struct io *io;
	int ret;

	*out = NULL;
	if (why_len)
		why[0] = '\0';
	io = calloc(1, sizeof(*io));
	if (!io)
		return -ENOMEM;
	io->part_max = IO_PART_MAX;
	list_init(&io->free);
	list_init(&io->urgent);
	list_init(&io->queue);
	list_init(&io->done);

	ret = io_probe_open(io, opts, why, why_len);
	if (ret)
		goto out_free;
	ret = backend_create(io, opts, why, why_len);
	if (ret)
		goto out_close;
	io->engine = io->be->ops->name;
	io->registered = io->be->registered;
	memcpy(io->registered_reason, io->be->registered_reason, sizeof(io->registered_reason));

	if (opts->faults && opts->faults[0]) {
		ret = io_fault_backend_create(opts->faults, io->be, io->fd, &wrapped, why, why_len);
		if (ret)
			goto out_backend;
		io->be = wrapped;
	}
	io->be->part_done = io_part_done;
	io->be->owner = io;

	io->nparts = io->be->depth;
	io->parts = calloc(io->nparts, sizeof(*io->parts));
	if (!io->parts) {
		ret = -ENOMEM;
		goto out_backend;
	}
	for (unsigned int i = 0; i < io->nparts; i++) {
		io->parts[i].idx = i;
		list_push_back(&io->free, &io->parts[i].link);
	}
	*out = io;
	return 0;

out_backend:
	io->be->ops->destroy(io->be);
out_close:
	close(io->fd);
out_free:
	free(io);
	return ret;
}

void io_destroy(struct io *io)
{
	if (!io)
		return;
	/* The kernel writes into the callers' buffers until the last op is back. */
	while (io_pending(io)) {
		struct pollfd p = {.fd = io_event_fd(io), .events = POLLIN};

		io_kick(io);
		poll(&p, 1, -1);
		io_reap(io);
	}
	io->be->ops->destroy(io->be);
	close(io->fd);
	free(io->parts);
	free(io);
}

/* --- the synchronous helpers ----------------------------------------------------------------- */

/* All of it, in as many calls as that takes; -EIO where the file ends before. */
static int call_all(int fd, bool write, char *p, size_t len, uint64_t off)
{
	while (len) {
		size_t count = min_u64(len, IO_PART_MAX);
		ssize_t n =
			write ? pwrite(fd, p, count, (off_t)off) : pread(fd, p, count, (off_t)off);

		if (n < 0 && (errno == EINTR || errno == EAGAIN))
			continue;
		if (n < 0)
			return -errno;
		if (n == 0)
			return -EIO;
		p += n;
		len -= (size_t)n;
		off += (uint64_t)n;
	}
	return 0;
}

int io_pread_all(int fd, void *buf, size_t len, uint64_t off)
{
	return call_all(fd, false, buf, len, off);
}

int io_pwrite_all(int fd, const void *buf, size_t len, uint64_t off)
{
	return call_all(fd, true, (char *)(uintptr_t)buf, len, off);
}
