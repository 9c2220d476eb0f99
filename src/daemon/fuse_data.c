/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuse_data.c - the FUSE handlers for file data: each hands an op to the engine and returns; the
 * op's callback replies.
 *
 * A READ is answered straight from the RAM tier's memory, a WRITE is taken straight from the buffer
 * it came in, often after its answer (on_accepted). READ answers are short only at the end of the
 * file, because that is what a short one means to the kernel.
 *
 * Interrupts: a signal to the caller makes the kernel send INTERRUPT; interrupt.c finds out whether
 * the caller is to die, and only then request_give_up() posts a task; on the loop thread the task
 * cancels the op if the engine still has it. The task holds a reference, so the request stays until
 * it has run.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "daemon/daemon.h"
#include "moment/protocol.h"

/* ---- requests ------------------------------------------------------------------------------- */

void request_put(struct request *r)
{
	struct daemon *d = r->d;

	if (atomic_fetch_sub(&r->refs, 1) != 1)
		return;
	pthread_mutex_destroy(&r->lock);
	free(r);
	pthread_mutex_lock(&d->lock);
	if (--d->requests == 0)
		pthread_cond_broadcast(&d->drained);
	pthread_mutex_unlock(&d->lock);
}

/* Loop thread. The lock is not held: engine_cancel() may complete the op right here. */
static void cancel_run(struct loop_task *task)
{
	struct request *r = container_of(task, struct request, cancel);
	bool cancel;

	pthread_mutex_lock(&r->lock);
	cancel = r->with_engine;
	pthread_mutex_unlock(&r->lock);
	if (cancel)
		engine_cancel(r->d->e, &r->op);
	request_put(r);
}

bool request_give_up(struct request *r)
{
	bool with_engine;

	pthread_mutex_lock(&r->lock);
	with_engine = r->with_engine;
	if (with_engine && !r->cancel.run) {
		r->cancel.run = cancel_run;
		atomic_fetch_add(&r->refs, 1);
		loop_post(engine_loop(r->d->e), &r->cancel);
	}
	pthread_mutex_unlock(&r->lock);
	return with_engine;
}

/* A receive thread, with libfuse's lock of the request held. */
static void on_interrupt(fuse_req_t req, void *arg)
{
	struct request *r = arg;

	(void)req;
	if (!atomic_exchange(&r->interrupted, true))
		interrupts_add(r->d->interrupts, r);
}

/* True: somebody has resubmitted it. */
static bool request_answer(struct request *r)
{
	pthread_mutex_lock(&r->lock);
	r->with_engine = false;
	pthread_mutex_unlock(&r->lock);
	/* Waits for an on_interrupt() that is running; none starts afterwards. */
	fuse_req_interrupt_func(r->req, NULL, NULL);
	return r->finish(r, r->op.res);
}

static void on_accepted(struct engine_op *op)
{
	struct request *r = container_of(op, struct request, op);

	r->answered = true;
	request_answer(r);
}

static void on_done(struct engine_op *op)
{
	struct request *r = container_of(op, struct request, op);

	if (r->answered || !request_answer(r))
		request_destroy(r);
}

struct request *request_create(fuse_req_t req, enum engine_op_kind kind, uint64_t ino,
			       bool (*finish)(struct request *, int64_t))
{
	struct request *r = calloc(1, sizeof(*r));

	if (!r) {
		reply_err(req, -ENOMEM);
		return NULL;
	}
	r->op.kind = kind;
	r->op.ino = ino;
	r->op.done = on_done;
	r->req = req;
	r->tid = fuse_req_ctx(req)->pid;
	r->d = daemon_of(req);
	r->finish = finish;
	list_init(&r->interrupt_link);
	atomic_init(&r->refs, 1);
	pthread_mutex_init(&r->lock, NULL);
	pthread_mutex_lock(&r->d->lock);
	r->d->requests++;
	pthread_mutex_unlock(&r->d->lock);
	return r;
}

void request_submit(struct request *r)
{
	/* Only for what changes or syncs files does it make a difference. */
	if (r->op.kind != ENGINE_READ)
		r->op.foreign = bracket_foreign(r->d, r->tid, r->op.kind == ENGINE_FSYNC);
	fuse_req_interrupt_func(r->req, on_interrupt, r);
	pthread_mutex_lock(&r->lock);
	r->with_engine = true;
	engine_submit(r->d->e, &r->op);
	pthread_mutex_unlock(&r->lock);
}

void request_destroy(struct request *r)
{
	rx_put(r->d->receive, r->buf);
	r->buf = NULL;
	free(r->text);
	r->text = NULL;
	pthread_mutex_lock(&r->lock);
	r->ended = true;
	pthread_mutex_unlock(&r->lock);
	request_put(r);
}

bool requests_drain(struct daemon *d, unsigned int stalled_seconds)
{
	uint64_t moved = engine_moved(d->e);
	unsigned int stalled = 0;
	bool done;

	pthread_mutex_lock(&d->lock);
	while (d->requests && stalled < stalled_seconds) {
		struct timespec until;
		uint64_t now;

		clock_gettime(CLOCK_MONOTONIC, &until);
		until.tv_sec++;
		if (pthread_cond_timedwait(&d->drained, &d->lock, &until) != ETIMEDOUT)
			continue;
		pthread_mutex_unlock(&d->lock);
		now = engine_moved(d->e);
		stalled = now == moved ? stalled + 1 : 0;
		moved = now;
		pthread_mutex_lock(&d->lock);
	}
	done = !d->requests;
	pthread_mutex_unlock(&d->lock);
	return done;
}

/* ---- open and release ----------------------------------------------------------------------- */

static bool opens_for_writing(const struct fuse_file_info *fi)
{
	return (fi->flags & O_ACCMODE) != O_RDONLY;
}

#define FH_WRITABLE 1u

static struct text *text_of(const struct fuse_file_info *fi)
{
	return fi && fi->fh != FH_WRITABLE ? (struct text *)(uintptr_t)fi->fh : NULL;
}

void data_create_handle(struct daemon *d, uint64_t ino, struct fuse_file_info *fi)
{
	fi->fh = opens_for_writing(fi) ? FH_WRITABLE : 0;
	/* Without it an open beside a dirty mapping writes it back 4 KiB at a time. */
	fi->keep_cache = 1;
	(void)ino;
	atomic_fetch_add(&d->handles, 1);
}

static void close_handle(struct daemon *d, uint64_t ino, bool write)
{
	ns_release(d->ns, ino, write);
	if (atomic_fetch_sub(&d->handles, 1) == 1 && atomic_load(&d->detaching))
		daemon_raise(d, EVENT_IDLE);
}

/* A generated file is what it is now; it is read past the kernel's cache, as it changes by itself.
 */
static int open_generated(struct daemon *d, uint64_t ino, struct text **out)
{
	char *data;
	size_t len;
	int res = ns_generate(d->ns, ino, &data, &len);

	if (res < 0)
		return res;
	*out = text_create(data, len);
	return *out ? 0 : -ENOMEM;
}

static int open_file(struct daemon *d, uint64_t ino, struct fuse_file_info *fi, struct text **t)
{
	bool write = opens_for_writing(fi);
	struct ns_attr a;
	int res;

	*t = NULL;
	if (ino_is_virtual(ino))
		return virt_open(d, ino, t);
	res = ns_open(d->ns, ino, write);
	if (res < 0)
		return res;
	res = ns_getattr(d->ns, ino, &a);
	if (!res && a.flags & NS_GENERATED)
		res = open_generated(d, ino, t);
	if (res < 0)
		ns_release(d->ns, ino, write);
	else
		data_create_handle(d, ino, fi);
	return res;
}

void data_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	struct daemon *d = daemon_of(req);
	struct text *t;
	int res = open_file(d, ino, fi, &t);

	if (res < 0) {
		reply_err(req, res);
		return;
	}
	if (t)
		fi->fh = (uint64_t)(uintptr_t)t;
	fi->direct_io = t != NULL;
	/* splice(2) and copy_file_range(2), and so cp, fill and read pages all the same: of this opening only. */
	if (t)
		fi->keep_cache = 0;
	if (fuse_reply_open(req, fi) < 0) {
		if (!ino_is_virtual(ino))
			close_handle(d, ino, opens_for_writing(fi));
		text_destroy(t);
	}
}

void data_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	struct daemon *d = daemon_of(req);
	struct text *t = text_of(fi);

	if (ino == VIRT_INO(VIRT_STEP))
		bracket_released(d, t);
	if (ino_is_virtual(ino))
		virt_flush(d, ino, t);
	else
		close_handle(d, ino, opens_for_writing(fi));
	text_destroy(t);
	reply_err(req, 0);
}

void data_ioctl(fuse_req_t req, fuse_ino_t ino, unsigned int cmd, void *arg,
		struct fuse_file_info *fi, unsigned int flags, const void *in_buf, size_t in_size,
		size_t out_size)
{
	int res;

	(void)arg;
	(void)flags;
	(void)in_buf;
	(void)in_size;
	(void)out_size;
	if (ino_is_virtual(ino) || (cmd != MOMENT_IOC_CLAIM && cmd != MOMENT_IOC_UNCLAIM))
		res = -ENOTTY;
	else if (fi->fh != FH_WRITABLE)
		res = -EBADF;
	else
		res = ns_claim(daemon_of(req)->ns, ino, cmd == MOMENT_IOC_CLAIM);
	if (res < 0)
		reply_err(req, res);
	else
		fuse_reply_ioctl(req, 0, NULL, 0);
}

/* Data that came through write() is with the engine already; that it is durable, fsync says. */
void data_flush(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	reply_err(req, ino_is_virtual(ino) ? virt_flush(daemon_of(req), ino, text_of(fi)) : 0);
}

/* ---- read and write ------------------------------------------------------------------------- */

static bool finish_read(struct request *r, int64_t res)
{
	if (res < 0)
		reply_err(r->req, (int)res);
	else if (res == 0)
		fuse_reply_buf(r->req, NULL, 0);
	else
		fuse_reply_iov(r->req, r->op.iov, r->op.iovcnt);
	return false;
}

/*
 * Does this READ or WRITE go past the kernel's pages? A mapping made with an O_DIRECT descriptor has
 * pages all the same; but only what comes straight from a call has an owner of locks.
 */
static bool past_pages(const struct fuse_file_info *fi)
{
	return fi->flags & O_DIRECT && fi->lock_owner && !fi->writepage;
}

void data_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi)
{
	struct request *r;

	if (text_of(fi)) {
		text_read(text_of(fi), req, size, off);
		return;
	}
	if (!past_pages(fi))
		ns_set_paged(daemon_of(req)->ns, ino);
	r = request_create(req, ENGINE_READ, ino, finish_read);
	if (!r)
		return;
	r->op.off = (uint64_t)off;
	r->op.len = size;
	request_submit(r);
}

static void answer_write(struct request *r)
{
	if (r->result < 0)
		reply_err(r->req, (int)r->result);
	else
		fuse_reply_write(r->req, (size_t)r->result);
}

static void write_seen(struct notify_job *j)
{
	struct request *r = container_of(j, struct request, notify);

	answer_write(r);
	request_put(r);
}

static void pages_dropped(struct notify_job *j)
{
	request_put(container_of(j, struct request, notify));
}

/* Drops the kernel's pages of the request's range from `from` on, and then does what `run` says. */
static bool drop_pages(struct request *r, uint64_t from, void (*run)(struct notify_job *))
{
	r->notify = (struct notify_job){.run = run,
					.ino = r->op.ino,
					.off = r->op.off + from,
					.len = r->op.len - from};
	atomic_fetch_add(&r->refs, 1);
	if (notify_pages(r->d->notify, &r->notify))
		return true;
	atomic_fetch_sub(&r->refs, 1);
	return false;
}

static bool finish_write(struct request *r, int64_t res)
{
	if (res >= 0)
		lost_found(r->d, r->op.ino, r->op.off, r->op.off + (uint64_t)res);
	r->result = res;
	/* One that failed may have written a part. */
	if (r->direct && drop_pages(r, 0, write_seen))
		return false;
	answer_write(r);
	/*
	 * The kernel puts the bytes in its pages before it asks, and who has those mapped goes on seeing
	 * what was refused. It holds the pages until it has the answer.
	 */
	if (!r->op.arg && res < (int64_t)r->op.len)
		drop_pages(r, res > 0 ? (uint64_t)res : 0, pages_dropped);
	return false;
}

/* One that was refused may have zeroed a part, and only after one that succeeds the kernel drops its pages. */
static bool finish_punch(struct request *r, int64_t res)
{
	r->result = res;
	if (res >= 0 || !drop_pages(r, 0, write_seen))
		reply_err(r->req, (int)res);
	return false;
}

/* Of pages that were dirty through a mapping: the kernel will not offer them again. */
static bool finish_writepage(struct request *r, int64_t res)
{
	/* Only the loop thread fails an op. */
	if (res < 0 && lost_add(r->d, r->op.ino, r->op.off, r->op.len, (int)res))
		engine_report(r->d->e, (int)res, r->op.ino, r->op.off, r->op.len,
			      "stored through a mapping and lost");
	return finish_write(r, res);
}

void data_write(fuse_req_t req, fuse_ino_t ino, const char *buf, size_t size, off_t off,
		struct fuse_file_info *fi)
{
	struct request *r;

	if (ino_is_virtual(ino)) {
		virt_write(daemon_of(req), req, ino, text_of(fi), buf, size);
		return;
	}
	r = request_create(req, ENGINE_WRITE, ino, fi->writepage ? finish_writepage : finish_write);
	if (!r)
		return;
	r->direct = past_pages(fi);
	if (!r->direct)
		ns_set_paged(r->d->ns, ino);
	setid_changed(req, ino, SETID_KERNEL_SAYS);
	r->buf = rx_take(); /* `buf` lies in it */
	/* All or an error: pages are not offered again, and a short O_DIRECT write the kernel calls EIO. */
	r->op.arg = fi->writepage || r->direct;
	r->op.accepted = on_accepted;
	r->op.data = buf;
	r->op.off = (uint64_t)off;
	r->op.len = size;
	request_submit(r);
}

/* ---- the others ----------------------------------------------------------------------------- */

static bool finish_plain(struct request *r, int64_t res)
{
	reply_err(r->req, res < 0 ? (int)res : 0);
	return false;
}

static bool finish_fsync(struct request *r, int64_t res)
{
	return finish_plain(r, res < 0 ? res : lost_error(r->d, r->op.ino));
}

void data_fsync(fuse_req_t req, fuse_ino_t ino, int datasync, struct fuse_file_info *fi)
{
	struct request *r;

	(void)datasync;
	if (ino_is_virtual(ino) || text_of(fi)) {
		reply_err(req, 0);
		return;
	}
	r = request_create(req, ENGINE_FSYNC, ino, finish_fsync);
	if (r)
		request_submit(r);
}

/* Names are part of every commit. */
void data_fsyncdir(fuse_req_t req, fuse_ino_t ino, int datasync, struct fuse_file_info *fi)
{
	struct request *r;

	(void)datasync, (void)fi;
	if (ino_is_virtual(ino)) {
		reply_err(req, 0);
		return;
	}
	r = request_create(req, ENGINE_FSYNC, 0, finish_plain);
	if (r)
		request_submit(r);
}

static bool finish_truncate(struct request *r, int64_t res)
{
	struct stat st;
	double timeout;
	int err = res < 0 ? (int)res : daemon_getattr(r->d, r->op.ino, &st, &timeout);

	if (res >= 0)
		lost_found(r->d, r->op.ino, r->op.len, UINT64_MAX);
	if (err < 0)
		reply_err(r->req, err);
	else
		fuse_reply_attr(r->req, &st, timeout);
	return false;
}

/* Is the content the session's, or made up? */
static int check_changeable(struct daemon *d, uint64_t ino)
{
	struct ns_attr a;
	int res = ns_getattr(d->ns, ino, &a);

	if (!res && a.flags & NS_REGISTERED)
		res = -EBUSY;
	if (!res && a.flags & NS_GENERATED)
		res = -EACCES;
	return res;
}

void data_truncate(fuse_req_t req, uint64_t ino, uint64_t size, bool by_handle)
{
	struct daemon *d = daemon_of(req);
	struct request *r;
	int res = size > NS_FILE_SIZE_MAX ? -EFBIG : check_changeable(d, ino);

	/* The one handle through which a claimed file can be written is its owner's. */
	if (!res && !by_handle && ns_is_claimed(d->ns, ino))
		res = -EBUSY;
	if (res < 0) {
		reply_err(req, res);
		return;
	}
	r = request_create(req, ENGINE_TRUNCATE, ino, finish_truncate);
	if (!r)
		return;
	r->op.len = size;
	request_submit(r);
}

void data_fallocate(fuse_req_t req, fuse_ino_t ino, int mode, off_t off, off_t len,
		    struct fuse_file_info *fi)
{
	bool punch = mode == (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE);
	struct request *r;
	int res = 0;

	(void)fi;
	if (!punch && mode != 0 && mode != FALLOC_FL_KEEP_SIZE)
		res = -EOPNOTSUPP;
	else if (ino_is_virtual(ino))
		res = -EOPNOTSUPP;
	else if (!punch && (uint64_t)off + (uint64_t)len > NS_FILE_SIZE_MAX)
		res = -EFBIG;
	else
		res = check_changeable(daemon_of(req), ino);
	if (res < 0) {
		reply_err(req, res);
		return;
	}
	setid_changed(req, ino, SETID_ALLOCATE);
	r = request_create(req, punch ? ENGINE_PUNCH : ENGINE_ALLOCATE, ino,
			   punch ? finish_punch : finish_plain);
	if (!r)
		return;
	r->op.off = (uint64_t)off;
	r->op.len = (uint64_t)len;
	r->op.arg = mode == FALLOC_FL_KEEP_SIZE;
	request_submit(r);
}

static bool finish_lseek(struct request *r, int64_t res)
{
	if (res < 0)
		reply_err(r->req, (int)res);
	else
		fuse_reply_lseek(r->req, res);
	return false;
}

/* As if there were no holes: right for any file, and all that can be said of some. */
static void lseek_dense(fuse_req_t req, uint64_t size, off_t off, int whence)
{
	if (off < 0 || (uint64_t)off >= size)
		reply_err(req, -ENXIO);
	else
		fuse_reply_lseek(req, whence == SEEK_DATA ? off : (off_t)size);
}

void data_lseek(fuse_req_t req, fuse_ino_t ino, off_t off, int whence, struct fuse_file_info *fi)
{
	struct daemon *d = daemon_of(req);
	struct request *r;
	struct ns_attr a;
	int res;

	if (whence != SEEK_DATA && whence != SEEK_HOLE) {
		reply_err(req, -EINVAL);
		return;
	}
	if (text_of(fi)) {
		lseek_dense(req, text_of(fi)->len, off, whence);
		return;
	}
	res = ns_getattr(d->ns, ino, &a);
	if (res < 0) {
		reply_err(req, res);
		return;
	}
	/* Pages dirty through a mapping are unknown here: with a writer about there are no holes.
	 */
	if (off < 0 || (uint64_t)off >= a.size || ns_open_writers(d->ns, ino)) {
		lseek_dense(req, a.size, off, whence);
		return;
	}
	r = request_create(req, ENGINE_SEEK, ino, finish_lseek);
	if (!r)
		return;
	r->op.off = (uint64_t)off;
	r->op.arg = (uint64_t)whence;
	request_submit(r);
}

static bool finish_residency(struct request *r, int64_t res)
{
	char text[128];
	int n;

	if (res < 0) {
		reply_err(r->req, (int)res);
		return false;
	}
	n = snprintf(text, sizeof(text), "resident=%llu dirty=%llu bytes=%llu",
		     (unsigned long long)r->op.out.resident, (unsigned long long)r->op.out.dirty,
		     (unsigned long long)r->op.out.bytes);
	if (r->size == 0)
		fuse_reply_xattr(r->req, (size_t)n);
	else if (r->size < (size_t)n)
		reply_err(r->req, -ERANGE);
	else
		fuse_reply_buf(r->req, text, (size_t)n);
	return false;
}

void data_residency(fuse_req_t req, uint64_t ino, size_t size)
{
	struct ns_attr a;
	struct request *r;
	int res = ns_getattr(daemon_of(req)->ns, ino, &a);

	if (!res && (!S_ISREG(a.mode) || a.flags & NS_GENERATED))
		res = -ENODATA;
	if (res < 0) {
		reply_err(req, res);
		return;
	}
	r = request_create(req, ENGINE_RESIDENT, ino, finish_residency);
	if (!r)
		return;
	r->size = size;
	request_submit(r);
}
