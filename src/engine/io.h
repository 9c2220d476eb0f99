/* SPDX-License-Identifier: Apache-2.0 */
/*
 * io.h - asynchronous reads and writes of the pool file, and nothing else.
 *
 * Two implementations with one interface: io_uring with registered buffers (io_uring.c) and a
 * pool of pread/pwrite threads (io_threads.c). A third, fault injection (io_fault.c), wraps either.
 * All calls are made by the loop thread; completions run on the loop thread, from io_reap().
 *
 * Promises of every implementation:
 * - an op completes once, with res = 0 when all `len` bytes were transferred, else -errno;
 *   short transfers are resumed at the (aligned) offset reached, EINTR and EAGAIN are retried, a
 * read that meets the end of the file fails with -EIO; requests above 1 GiB are split;
 * - buffers, offsets and lengths are multiples of MOMENT_UNIT, so O_DIRECT is possible; where it is
 *   not (probed by a real write and read, not by the flag), the same calls run buffered, and
 * written pages are dropped behind the writes. After submission the op belongs to the io object
 * until its done() is entered.
 */
#ifndef ENGINE_IO_H
#define ENGINE_IO_H

#include "engine/types.h"
#include "engine/list.h"

struct io;

enum io_kind { IO_READ, IO_WRITE, IO_SYNC /* fdatasync of everything completed so far */ };

struct io_op {
	enum io_kind kind;
	void *buf;
	uint64_t off;
	uint64_t len;
	int res; /* 0 or -errno, set before done() */
	void (*done)(struct io_op *);
	/* the io object's: */
	uint64_t moved;
	uint64_t start_ns;
	unsigned int parts;
	struct list link;
	void *priv;
};

enum io_engine { IO_AUTO, IO_URING, IO_THREADS };
enum io_direct { IO_DIRECT_AUTO, IO_DIRECT_ON, IO_DIRECT_OFF };

struct io_opts {
	enum io_engine engine; /* IO_AUTO falls back to threads when the ring cannot be set up;
				  IO_URING fails instead */
	enum io_direct direct; /* likewise */
	int fd; /* the pool file, open read-write (or read-only), without O_DIRECT; io dups it */
	bool readonly;
	uint64_t probe_off; /* a MOMENT_UNIT-sized place in the file that the O_DIRECT probe may
			       write and read (its content is restored); unused when readonly */
	unsigned int depth; /* most requests in flight at the drive, 0: 64; more are queued here */
	unsigned int threads; /* of the fallback, 0: 8 */
	void *buf;	      /* the arena, to be registered with the ring (may be NULL) */
	size_t buf_len;
	const char *faults; /* fault injection spec, NULL or "": none; io_fault_spec.c */
	char *why;	    /* NULL, or where io_create() says in words why it failed */
	size_t why_len;
};

struct io_info {
	const char *engine; /* "io_uring" or "threads" */
	const char
		*engine_reason; /* why not io_uring, "" if it is: errno text and how to allow it */
	bool direct;
	const char *direct_reason; /* why buffered, "" if direct */
	bool registered;	   /* buffers are registered (pinned) */
	const char *registered_reason;
	uint32_t align; /* what the file asks for O_DIRECT, bytes (statx STATX_DIOALIGN or 4096) */
	uint64_t reads, read_bytes, writes, write_bytes, syncs, errors, retries, inflight;
	uint64_t read_ns, write_ns; /* sum of latencies */
};

int io_create(const struct io_opts *opts, struct io **out);
void io_destroy(struct io *io);

/* Queues an op; it starts at the latest in io_kick(). The completion is never run inside this call.
 */
void io_submit(struct io *io, struct io_op *op);

/* Like io_submit but goes before everything that is queued and not started: a lease waits for it.
 */
void io_submit_urgent(struct io *io, struct io_op *op);

/* Hands queued ops to the kernel (one system call for all of them). */
void io_kick(struct io *io);

/* Runs the completions that are there; returns how many. Never waits. */
unsigned int io_reap(struct io *io);

/* A descriptor that polls readable when io_reap() would find something. Loop's. */
int io_event_fd(const struct io *io);

/* Ops submitted and not completed. */
unsigned int io_pending(const struct io *io);

/* Any thread may read this; figures are approximate while io is running. Strings live as long as
 * io. */
void io_get_info(const struct io *io, struct io_info *info);

/*
 * The same promises, synchronously, for start-up, fsck and scrub tools without a loop: 0 or
 * -errno, all or nothing. O_DIRECT alignment is handled by the callee opening buffered.
 */
int io_pread_all(int fd, void *buf, size_t len, uint64_t off);
int io_pwrite_all(int fd, const void *buf, size_t len, uint64_t off);

#endif
