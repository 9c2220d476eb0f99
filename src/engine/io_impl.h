/* SPDX-License-Identifier: Apache-2.0 */
/*
 * io_impl.h - between io.c and the implementations; nobody else includes it (except their test).
 *
 * io.c cuts ops into parts and keeps every promise of io.h (queueing, splitting, resuming,
 * retrying, dropping written pages). A backend does one kernel call per part and reports what the
 * kernel said, nothing more. Fault injection is a backend that wraps another one: it
 * therefore sits below the resume logic, which is how short results can be injected at all.
 *
 *   io.c  --start(part)-->  backend  --part_done(part, res)-->  io.c       (all on the loop thread)
 */
#ifndef ENGINE_IO_IMPL_H
#define ENGINE_IO_IMPL_H

#include <stdatomic.h>

#include "engine/io.h"

#define IO_PART_MAX	(UINT64_C(1) << 30) /* one kernel call moves less than 2 GiB */
#define IO_DEPTH	64
#define IO_THREADS_DFLT 8
#define IO_REASON_LEN	320

enum io_call {
	IO_CALL_READ,
	IO_CALL_WRITE,
	IO_CALL_SYNC,  /* fdatasync */
	IO_CALL_RANGE, /* buffered only: write back a range and wait */
	IO_CALL_DROP,  /* buffered only: forget the pages of a range */
};

/* One kernel call's worth of an op. */
struct io_part {
	enum io_call call;
	unsigned int idx; /* its place in io->parts */
	struct io_op *op;
	char *buf; /* what remains: buf, off, len */
	uint64_t off, len;
	uint64_t count;	     /* how much of it to ask for now, <= len */
	uint64_t base, size; /* the whole part */
	unsigned int stalls; /* calls in a row that moved nothing */
	int res;	     /* for the backend's use, as is link */
	struct list link;
};

struct io_backend;

struct io_backend_ops {
	const char *name;
	void (*destroy)(struct io_backend *be);
	/* Takes the part; the kernel sees it at the latest in kick(). Never completes it inside. */
	void (*start)(struct io_backend *be, struct io_part *part);
	void (*kick)(struct io_backend *be);
	/* Calls part_done() for every part that is finished; that may start() parts again. */
	void (*reap)(struct io_backend *be);
	int (*event_fd)(const struct io_backend *be);
};

struct io_backend {
	const struct io_backend_ops *ops;
	unsigned int depth; /* the parts it takes at a time */
	bool registered;
	char registered_reason[IO_REASON_LEN];
	/* res: bytes moved, 0, or -errno */
	void (*part_done)(void *owner, struct io_part *part, int res);
	void *owner;
};

/* fd stays the caller's and outlives the backend. On failure `why` says why and what to do. */
int io_uring_backend_create(const struct io_opts *opts, int fd, struct io_backend **out, char *why,
			    size_t why_len);
/* Which registered buffer holds all of [p, p + len): one per GiB of the arena. -1: none does. */
int io_uring_buf_index(const char *arena, uint64_t arena_len, const char *p, uint64_t len);
int io_threads_backend_create(const struct io_opts *opts, int fd, struct io_backend **out,
			      char *why, size_t why_len);
/* The system call of a part, on the thread that calls: bytes moved, 0, or -errno. (io.c) */
int io_part_call(int fd, const struct io_part *part);
/* Takes `inner` over if it succeeds. */
int io_fault_backend_create(const char *spec, struct io_backend *inner, int fd,
			    struct io_backend **out, char *why, size_t why_len);

struct io {
	struct io_backend *be;
	int fd; /* our own description of the file, O_DIRECT if `direct` */
	bool direct;
	uint32_t align;
	uint64_t part_max; /* IO_PART_MAX; tests make it smaller */

	struct io_part *parts;
	unsigned int nparts;
	struct list free;   /* parts not in use */
	struct list urgent; /* ops not wholly cut into parts yet, in this order: urgent, queue */
	struct list queue;
	struct list done; /* ops finished, done() not entered yet */

	const char *engine;
	bool registered;
	char engine_reason[IO_REASON_LEN];
	char direct_reason[IO_REASON_LEN];
	char registered_reason[IO_REASON_LEN];

	/* written by the loop thread, read by any (io_get_info) */
	_Atomic uint64_t reads, read_bytes, writes, write_bytes, syncs, errors, retries;
	_Atomic uint64_t read_ns, write_ns;
	_Atomic unsigned int pending;
};

/*
 * Opens our own description of opts->fd, with O_DIRECT where that really works, and sets fd,
 * direct, align and direct_reason. 0 or -errno with `why`. (io_probe.c)
 */
int io_probe_open(struct io *io, const struct io_opts *opts, char *why, size_t why_len);

#endif
