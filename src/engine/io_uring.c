/* SPDX-License-Identifier: Apache-2.0 */
/*
 * io_uring.c - io with one io_uring; the arena is registered as fixed buffers.
 *
 * One part is one SQE, and there are as many SQEs as parts (be.depth), so the submission queue
 * cannot run over, nor the completion queue, which is twice as long. user_data is the part. The
 * ring's own descriptor polls readable while a completion is there, so waiting needs no eventfd and
 * no read; an empty reap() is a look at shared memory.
 *
 * The ring is created by one thread and used by another (the loop), one after the other. That
 * is why SINGLE_ISSUER is not set: it would tie the ring to one of them and gains nothing without
 * DEFER_TASKRUN, which in turn does not wake a thread that sleeps in epoll.
 */
#include <errno.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "engine/bug.h"
#include "engine/io_impl.h"

#define BUF_MAX (UINT64_C(1) << 30) /* the kernel's limit for one registered buffer */

struct io_uring_be {
	struct io_backend be;
	struct io_uring ring;
	int fd;
	char *buf; /* the registered memory, in pieces of BUF_MAX; NULL if it is not */
	uint64_t buf_len;
};

int io_uring_buf_index(const char *arena, uint64_t arena_len, const char *p, uint64_t len)
{
	uint64_t at;

	if (!arena || p < arena || !len)
		return -1;
	at = (uint64_t)(p - arena);
	if (at >= arena_len || len > arena_len - at || at / BUF_MAX != (at + len - 1) / BUF_MAX)
		return -1;
	return (int)(at / BUF_MAX);
}

static void uring_start(struct io_backend *be, struct io_part *part)
{
	struct io_uring_be *u = container_of(be, struct io_uring_be, be);
	struct io_uring_sqe *sqe = io_uring_get_sqe(&u->ring);
	unsigned int len = (unsigned int)part->count;
	int idx = io_uring_buf_index(u->buf, u->buf_len, part->buf, part->count);

	assert(sqe); /* no more parts than be.depth */
	switch (part->call) {
	case IO_CALL_READ:
		if (idx >= 0)
			io_uring_prep_read_fixed(sqe, u->fd, part->buf, len, part->off, idx);
		else
			io_uring_prep_read(sqe, u->fd, part->buf, len, part->off);
		break;
	case IO_CALL_WRITE:
		if (idx >= 0)
			io_uring_prep_write_fixed(sqe, u->fd, part->buf, len, part->off, idx);
		else
			io_uring_prep_write(sqe, u->fd, part->buf, len, part->off);
		break;
	case IO_CALL_SYNC:
		io_uring_prep_fsync(sqe, u->fd, IORING_FSYNC_DATASYNC);
		break;
	case IO_CALL_RANGE:
		io_uring_prep_sync_file_range(sqe, u->fd, len, part->off,
					      SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
						      SYNC_FILE_RANGE_WAIT_AFTER);
		break;
	case IO_CALL_DROP:
		io_uring_prep_fadvise(sqe, u->fd, part->off, (off_t)len, POSIX_FADV_DONTNEED);
		break;
	}
	io_uring_sqe_set_data(sqe, part);
}

static void uring_kick(struct io_backend *be)
{
	struct io_uring_be *u = container_of(be, struct io_uring_be, be);

	/* More than once only if the kernel took a part of them, or none for want of memory. */
	while (io_uring_sq_ready(&u->ring)) {
		int ret = io_uring_submit(&u->ring);

		if (ret >= 0 || ret == -EINTR)
			continue;
		if (ret == -EAGAIN || ret == -EBUSY || ret == -ENOMEM) {
			/* Requests in flight free memory as they end, without our help. */
			nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
			continue;
		}
		/* Not about a request but about the ring: nothing will ever be done again. */
		bug_stop(strerror(-ret), __FILE__, __LINE__, "io_uring_enter");
	}
}

static void uring_reap(struct io_backend *be)
{
	struct io_uring_be *u = container_of(be, struct io_uring_be, be);
	struct io_uring_cqe *cqe;

	/* part_done() may start parts again, which touches the submission queue only. */
	while (io_uring_peek_cqe(&u->ring, &cqe) == 0 && cqe) {
		struct io_part *part = io_uring_cqe_get_data(cqe);
		int res = cqe->res;

		io_uring_cqe_seen(&u->ring, cqe);
		/* We cancel nothing: the kernel wanted a thread for it, and the process may have no
		 * more of them (ulimit -u). Slow on this thread, but done. */
		if (res == -ECANCELED || res == -EAGAIN)
			res = io_part_call(u->fd, part);
		be->part_done(be->owner, part, res);
	}
}

static int uring_event_fd(const struct io_backend *be)
{
	return container_of(be, struct io_uring_be, be)->ring.ring_fd;
}

static void uring_destroy(struct io_backend *be)
{
	struct io_uring_be *u = container_of(be, struct io_uring_be, be);

	io_uring_queue_exit(&u->ring);
	free(u);
}

static const struct io_backend_ops uring_ops = {
	.name = "io_uring",
	.destroy = uring_destroy,
	.start = uring_start,
	.kick = uring_kick,
	.reap = uring_reap,
	.event_fd = uring_event_fd,
};

static unsigned long long memlock_kib(void)
{
	struct rlimit rl;

	return getrlimit(RLIMIT_MEMLOCK, &rl) ? 0 : (unsigned long long)rl.rlim_cur / 1024;
}

static void say_why(int err, const char *call, char *why, size_t why_len)
{
	const char *text = strerror(-err);

	switch (err) {
	case -EPERM:
	case -EACCES:
		snprintf(why, why_len,
			 "%s: %s: a seccomp filter (container) or sysctl kernel.io_uring_disabled "
			 "forbids it; allow io_uring_setup, io_uring_enter and io_uring_register "
			 "in the container's seccomp profile, or set that sysctl to 0",
			 call, text);
		break;
	case -ENOSYS:
		snprintf(
			why, why_len,
			"%s: %s: the kernel has no io_uring (Linux 5.6 or later has), or a seccomp "
			"filter (container) hides it; allow io_uring_setup, io_uring_enter and "
			"io_uring_register in its profile",
			call, text);
		break;
	case -ENOMEM:
		snprintf(
			why, why_len,
			"%s: %s: the limit of locked memory is %llu KiB; raise it with ulimit -l or "
			"LimitMEMLOCK=",
			call, text, memlock_kib());
		break;
	default:
		snprintf(why, why_len, "%s: %s", call, text);
	}
}

/* Pins the arena. Without it things work too, at some cost per request, so this cannot fail. */
static void register_arena(struct io_uring_be *u, const struct io_opts *opts)
{
	size_t n = (opts->buf_len + BUF_MAX - 1) / BUF_MAX;
	struct iovec *iov;
	int ret;

	if (!opts->buf || !n) {
		snprintf(u->be.registered_reason, sizeof(u->be.registered_reason),
			 "no arena given");
		return;
	}
	iov = calloc(n, sizeof(*iov));
	if (!iov) {
		ret = -ENOMEM;
		goto out_reason;
	}
	for (size_t i = 0; i < n; i++) {
		iov[i].iov_base = (char *)opts->buf + i * BUF_MAX;
		iov[i].iov_len = min_u64(BUF_MAX, opts->buf_len - i * BUF_MAX);
	}
	ret = io_uring_register_buffers(&u->ring, iov, (unsigned int)n);
	free(iov);
	if (!ret) {
		u->buf = opts->buf;
		u->buf_len = opts->buf_len;
		u->be.registered = true;
		return;
	}
out_reason:
	if (ret == -ENOMEM)
		snprintf(
			u->be.registered_reason, sizeof(u->be.registered_reason),
			"%zu KiB are more than the limit of locked memory (%llu KiB); raise it with "
			"ulimit -l or LimitMEMLOCK=, or grant CAP_IPC_LOCK",
			opts->buf_len / 1024, memlock_kib());
	else
		snprintf(u->be.registered_reason, sizeof(u->be.registered_reason),
			 "io_uring_register: %s", strerror(-ret));
}

/* One NOP there and back: a filter may allow io_uring_setup and forbid io_uring_enter. */
static int try_ring(struct io_uring *ring)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(ring);
	struct io_uring_cqe *cqe;
	int ret;

	io_uring_prep_nop(sqe);
	do
		ret = io_uring_submit_and_wait(ring, 1);
	while (ret == -EINTR);
	if (ret < 0)
		return ret;
	ret = io_uring_wait_cqe(ring, &cqe);
	if (ret)
		return ret;
	io_uring_cqe_seen(ring, cqe);
	return 0;
}

int io_uring_backend_create(const struct io_opts *opts, int fd, struct io_backend **out, char *why,
			    size_t why_len)
{
	const char *call = "io_uring_setup";
	struct io_uring_params params = {.flags = IORING_SETUP_COOP_TASKRUN | IORING_SETUP_CLAMP};
	struct io_uring_be *u;
	int ret;

	u = calloc(1, sizeof(*u));
	if (!u)
		return -ENOMEM;
	u->be.ops = &uring_ops;
	u->be.depth = opts->depth ? opts->depth : IO_DEPTH;
	u->fd = fd;
	ret = io_uring_queue_init_params(u->be.depth, &u->ring, &params);
	if (ret == -EINVAL) { /* before Linux 5.19 */
		params = (struct io_uring_params){.flags = IORING_SETUP_CLAMP};
		ret = io_uring_queue_init_params(u->be.depth, &u->ring, &params);
	}
	if (ret)
		goto out_free;
	if (!(params.features & IORING_FEAT_RW_CUR_POS)) { /* as old as IORING_OP_READ */
		ret = -ENOSYS;
		goto out_ring;
	}
	if (params.sq_entries < u->be.depth)
		u->be.depth = params.sq_entries;
	ret = try_ring(&u->ring);
	if (ret) {
		call = "io_uring_enter";
		goto out_ring;
	}
	register_arena(u, opts);
	*out = &u->be;
	return 0;

out_ring:
	io_uring_queue_exit(&u->ring);
out_free:
	say_why(ret, call, why, why_len);
	free(u);
	return ret;
}
