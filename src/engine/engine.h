/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engine.h - what the edges (the FUSE daemon, its session socket, libmoment embedded) see of the
 * engine.
 *
 * An engine is one backing directory opened by one process: catalog + cache + pool + io + arena +
 * the loop thread. Names and attributes are namespace.h's (engine_ns()), synchronous; everything
 * that touches file data or the drive is an op, asynchronous.
 *
 * Threads and locks, written once, here:
 * - the loop thread (loop.h) owns cache, policy, pool allocation, io, sessions, commits: no locks
 * inside;
 * - the namespace has one mutex, a leaf: taken by any thread, also the loop's, for microseconds,
 * with nothing else taken inside it and no I/O under it;
 * - the catalog's SQLite connection is used by one work thread at a time, handed over by the loop
 * thread;
 * - work threads touch block memory only while the loop thread has the block pinned for them.
 * There is no lock order to remember because no thread ever holds two.
 *
 * Errors are 0 or -errno everywhere.
 */
#ifndef ENGINE_ENGINE_H
#define ENGINE_ENGINE_H

#include <sys/types.h>
#include <sys/uio.h>

#include "engine/arena.h"
#include "engine/io.h"
#include "engine/loop.h"
#include "engine/namespace.h"
#include "engine/types.h"

struct engine;
struct session;

#define ENGINE_COMMIT_OFF (-1)

enum engine_log_level { ENGINE_LOG_ERROR, ENGINE_LOG_WARNING, ENGINE_LOG_NOTICE, ENGINE_LOG_DEBUG };

/* What ns_stale_take() gives is to be told to the kernel; then call done(). */
struct engine_boundary {
	void (*done)(struct engine_boundary *); /* the engine's */
};

struct engine_opts {
	uint64_t ram; /* bytes of the RAM tier, 0: a quarter of what this process may use (cgroups
			 counted) */
	bool ram_forced; /* the user named it: more than the cgroup allows is an error, not a clamp
			  */
	uint32_t block;	 /* bytes, when making the backing, 0: 2 MiB; if set and the backing has
			    another: an error */
	uint64_t size;	 /* most bytes of the pool, 0: as the host allows */
	int commit_seconds; /* ENGINE_COMMIT_OFF; 60 is the default of the front ends */
	enum io_engine io;
	enum io_direct direct;
	enum arena_huge huge;
	bool readonly;
	bool wait; /* the backing is in use by a holder that is committing: wait for it (and say so
		      by log) */
	unsigned int wait_ms; /* else: how long to wait for a holder to go, 0: fail at once */
	const char *holder; /* "momentfs on /mnt/x" or "train.py (embedded)": what a refused second
			       holder is told */
	const char *trace;  /* file for the trace of blocks and I/O, NULL: none */
	const char *faults; /* fault injection, NULL: from the environment variable MOMENT_FAULTS */
	const char *vfs;    /* SQLite VFS, NULL: the default (fault injection in tests) */
	bool no_learn;	    /* debug: do not learn the order of steps (hints only) */
	/* hooks, may be NULL */
	void (*log)(void *arg, enum engine_log_level level, const char *msg); /* any thread */
	void (*boundary)(void *arg,
			 struct engine_boundary *b); /* loop thread: must not block; see above */
	void *arg;
};

/*
 * Opens (making it if absent or empty, unless readonly) the backing directory. err gets a message
 * for people that names the thing, the amount and the way out. -ENOTDIR, -ENOTEMPTY (not empty and
 * not ours), -EACCES, -EROFS, -EBUSY (in use, by whom), -EPROTONOSUPPORT (newer format), -EUCLEAN
 * (damaged), -ENOMEM, -EINVAL (ram too small: what would do), -ENOSPC.
 */
int engine_open(const char *backing, const struct engine_opts *opts, struct engine **out, char *err,
		size_t errlen);

/*
 * Ends: drops sessions, commits (unless torn, readonly or !commit), releases the backing. Returns
 * the commit's result; the engine is gone in any case. No op may be outstanding. Not from the loop
 * thread.
 */
int engine_close(struct engine *e, bool commit);
/* The same. `dropped` gets what of a step that was begun and not ended is lost by it, or "". */
int engine_end(struct engine *e, bool commit, char *dropped, size_t len);

/* A name is about to be changed by who has to do with the plain step that is open. Any thread. */
void engine_step_names(struct engine *e);

/* Like a kill -9 of the process as far as the backing goes, for tests: no commit, nothing more is
 * written. */
void engine_abandon(struct engine *e);

/* In a forked child, from a fork handler: lets go of the backing's lock, which else would outlive
 * the parent in the child's copy of it. Nothing else of the engine may be used there. */
void engine_forked(struct engine *e);

struct ns *engine_ns(struct engine *e);
struct loop *engine_loop(struct engine *e);
/* An error that is about bytes of a file, for status and the log. Loop thread. */
void engine_report(struct engine *e, int err, uint64_t ino, uint64_t off, uint64_t len,
		   const char *what);
struct arena *engine_arena(struct engine *e);
uint32_t engine_block(const struct engine *e);
bool engine_readonly(const struct engine *e);
const char *engine_backing(const struct engine *e); /* absolute path */
int engine_dirfd(const struct engine *e);	    /* of the backing; the engine's */

/* The number of this process's pid namespace, 0 where /proc does not tell: a pid means something only
 * to who is in the same one. */
uint64_t holder_pid_namespace(void);
/* "pid 42 on this host"; of a process that this one cannot see, whose pid is 0 to it, where it is. */
const char *holder_who(char buf[64], long pid);

/* ---- ops -------------------------------------------------------------------------------- */

/* Of a file that is removed and open, and whose bytes a rollback has dropped: all of its own end with
 * -ESTALE. */
enum engine_op_kind {
	ENGINE_READ,  /* ino off len -> res: bytes (0 at or past the end), iov/iovcnt point at them
		       */
	ENGINE_WRITE, /* ino off len data -> res: bytes or -errno; extends the file. Fewer bytes than
			 len: those before a block that found no room, say; not with arg 1 */
	ENGINE_TRUNCATE, /* ino, len: the new size */
	ENGINE_PUNCH,	 /* ino off len: zeros, size unchanged, space given back */
	ENGINE_ALLOCATE, /* ino off len: reserves space so that writes there cannot fail; arg 1:
			    keep size */
	ENGINE_SEEK,	 /* ino off, arg SEEK_DATA or SEEK_HOLE -> res: offset or -ENXIO */
	ENGINE_FSYNC,	 /* ino (0: names): durable on return; a file of a session's open step, or
			    inside a plain one by its writer: at once, durable with the step; by another:
			    waits for its end, -EBUSY when it does not come; -ESTALE: the step is torn */
	ENGINE_SYNC, /* everything that may be committed now, durable on return (momentctl commit,
			unmount) */
	ENGINE_PREFETCH,   /* ino off len: a hint; completes at once */
	ENGINE_STEP_BEGIN, /* arg: step. A plain bracket (.moment/step): until the end no commit
			      takes anything plain. -EBUSY. When commits have been failing: that
			      commit's error, with a text */
	ENGINE_STEP_END,   /* arg: step; -EINVAL if another one is open. If its writer has asked for an fsync
			      inside, it is done when that is durable; another error: it has ended, and is not
			      durable */
	ENGINE_STEP_TEAR,  /* arg: step: who began it is gone. -EINVAL if it is not open */
	ENGINE_ROLLBACK,   /* everything back to the last commit, or what is torn; -EBUSY while anything
			      is open for writing, a session writes, or somebody else's plain step is open */
	ENGINE_SCRUB,	   /* reads and verifies every extent, low priority; result in status; res:
			      number of damaged extents */
	ENGINE_TRIM,	   /* the pool's free tail back to the host, after a commit; res: bytes */
	ENGINE_RESIDENT,   /* ino -> res 0, out.resident/out.dirty/out.bytes */
};

#define ENGINE_OP_SEGS 34 /* blocks that one op may touch */
#define ENGINE_OP_MAX \
	(1024u * 1024) /* bytes that one READ or WRITE may carry; larger: -EINVAL, split it */

/*
 * Filled in by the caller, embedded in its request. Belongs to the engine from engine_submit()
 * until done() is entered. done() runs on a work thread for READ (it may copy and make system
 * calls; iov is valid until it returns), on a work thread or the loop thread for WRITE, on the loop
 * thread for the others; there it must not block (replying to FUSE is fine).
 */
struct engine_op {
	enum engine_op_kind kind;
	uint64_t ino, off, len, arg;
	const void *data;
	void (*done)(struct engine_op *);
	bool foreign; /* made by somebody who has nothing to do with the plain step that is open */
	/* Optional, for WRITE: res is settled, and whoever asks from now on finds the bytes there;
	 * but `data` is used until done(). On the loop thread, before done(), and not always. */
	void (*accepted)(struct engine_op *);
	int64_t res;
	const char *text; /* an error's, for people, or NULL; valid in done() */
	struct {
		uint64_t resident, dirty, bytes;
	} out;
	int iovcnt;
	struct iovec iov[ENGINE_OP_SEGS];
	/* the engine's: */
	struct engine *e;
	uint64_t id, start_ns;
	struct loop_task task;
	struct list link;
	void *run; /* what the loop thread keeps for it */
};

void engine_submit(struct engine *e, struct engine_op *op);

/* Submits and waits. Not from the loop thread. For READ, data is copied to `buf` (len bytes). Ops
 * of any length: split here. Returns op's res. */
int64_t engine_call(struct engine *e, enum engine_op_kind kind, uint64_t ino, uint64_t off,
		    uint64_t len, uint64_t arg);
int64_t engine_pread(struct engine *e, uint64_t ino, void *buf, uint64_t len, uint64_t off);
int64_t engine_pwrite(struct engine *e, uint64_t ino, const void *buf, uint64_t len, uint64_t off);

/*
 * If the op is still waiting it completes with -EINTR (a commit it asked for goes on); else
 * nothing. The op's memory must stay until this returns. Any thread, but not with a lock that
 * done() takes; an edge whose done() frees the op posts a task to the loop thread and calls this
 * there.
 */
void engine_cancel(struct engine *e, struct engine_op *op);

/* ---- status ----------------------------------------------------------------------------- */

/*
 * JSON object text, malloc'ed: backing, version, block, ram {...}, io {...}, pool {...}, catalog,
 * commit {seq, step, age, running, error}, session {...}, step {open, torn}, counters, errors
 * [...], scrub {...}. Not from the loop thread.
 */
char *engine_status_json(struct engine *e);
/* Prometheus text exposition of the counters, malloc'ed. Not from the loop thread. */
char *engine_stats_text(struct engine *e);

/* A number that changes whenever something moves: I/O, an op, a commit. Not from the loop thread. */
uint64_t engine_moved(struct engine *e);
/* The end is near: what only takes time (a scrub) ends now and does not begin again. Not from the
 * loop thread. */
void engine_hurry(struct engine *e);

struct engine_statfs {
	uint64_t block, total, free, files;
};
void engine_get_statfs(struct engine *e, struct engine_statfs *s); /* any thread but the loop's */

struct engine_step_state {
	uint64_t committed, open, boundary; /* UINT64_MAX: none */
	bool torn;
	int error;
};
void engine_get_step(struct engine *e, struct engine_step_state *s); /* any thread but the loop's */

/* ---- sessions (protocol.h), for the socket edge and for libmoment embedded ------------------ */

struct session_opts {
	pid_t pid;
	uid_t uid;
	gid_t gid;
	/*
	 * Sends a reply: loop thread; must not block and must take the bytes (queue them if the
	 * socket is full). pass_arena: this is the HELLO reply, send the arena's fd with it.
	 */
	void (*reply)(void *arg, const void *msg, size_t len, bool pass_arena);
	void *arg;
};

/* Loop thread. */
int session_create(struct engine *e, const struct session_opts *opts, struct session **out);
/* Loop thread: one whole message. A malformed one: returns -EPROTO, and the edge should end the
 * session. */
int session_receive(struct session *s, const void *msg, size_t len);
/* Loop thread: the client has gone. Leases are dropped; an open step is torn. */
void session_destroy(struct session *s);

#endif
