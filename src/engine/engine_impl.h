/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engine_impl.h - what the files of the engine proper (engine.c, ops.c, session*.c, status.c)
 * share.
 */
#ifndef ENGINE_ENGINE_IMPL_H
#define ENGINE_ENGINE_IMPL_H

#include <pthread.h>
#include <stdio.h>

#include "engine/cache.h"
#include "engine/commit.h"
#include "engine/engine.h"

#define STEP_NONE UINT64_MAX

struct engine_error {
	uint64_t time_ns; /* CLOCK_REALTIME */
	uint64_t ino, off, len, step;
	int err;
	char what[48];
	char path[200];
};
#define ENGINE_ERRORS 64u /* the last ones are kept */

struct scrub {
	bool running;
	uint64_t done, total; /* bytes */
	uint64_t extents, damaged;
	uint64_t finished_ns; /* CLOCK_REALTIME; 0: never */
	struct engine_op *op;
	struct scrub_run *run;
	bool stopped; /* none begins any more */
};

/* Somebody who waits for a block, but not for ever if it is a lease that it waits for: patience.c.
 */
struct patience {
	struct list link; /* in engine.patience */
	uint64_t until_ns;
	struct file *f;
	struct waiter *w; /* linked while it waits */
	/* The session keeps a block of the file. False: it is something else that is waited for. */
	bool (*give_up)(struct patience *p, const struct session *by);
};

/* Errors that are alike, counted together in the log: report.c. */
struct report_kind {
	int err;
	uint64_t n; /* since it was first said; 0: unused */
	char what[48];
	char path[200]; /* of the last */
};
#define REPORT_KINDS 8u

/* A file of the backing, as it was when it was opened. */
struct kept_file {
	const char *name;
	dev_t dev;
	ino_t ino; /* 0: not there yet */
};
#define KEPT_FILES 3u

struct engine {
	struct cache c;
	struct engine_opts opts;
	struct loop *loop;
	struct io *io;
	struct arena *arena;
	struct pool *pool;
	struct catalog *cat;
	char *path; /* absolute */
	char *holder;
	bool made_dir, cache_ready, closing;
	struct list loaded; /* maps, while opening */
	int dirfd, lockfd;
	uint8_t uuid[16];
	uint64_t ram_available; /* when it was opened */

	/* steps; loop thread */
	uint64_t open_step; /* of the writing session or of a plain bracket; STEP_NONE */
	bool plain;	    /* it is a plain bracket */
	bool torn;	    /* who began open_step died inside it; its files are held */
	bool step_changed;  /* bytes, by the plain step that is open */
	bool sync_at_end;   /* its writer asked for an fsync inside it */
	atomic_bool names_in_step;  /* it has changed names; set by any thread */
	struct list bracket_waits;  /* waiters for its end */
	struct loop_timer torn_timer; /* bracket.c */
	unsigned int telling; /* ways back that are done, while the kernel may show what was before: torn */
	bool reverting;
	struct session *writer; /* the one writing session */
	bool adopted; /* parameters were taken over (adopt.c), and no commit has been asked for since */
	struct list sessions;
	struct list parked;    /* ops that came while reverting */
	struct list after;     /* waiters for its end */
	struct list runs;      /* ops under way */
	struct loop_timer watch; /* oldest.c */
	uint64_t watched;	 /* number of the op of which it was said that it waits */
	struct list patience;  /* who waits for blocks that a session may keep */
	struct loop_timer patience_timer;
	unsigned int promises; /* WRITEs whose last bytes are still being copied */
	_Atomic uint64_t next_id;

	struct scrub scrub;
	struct engine_error errors[ENGINE_ERRORS];
	uint64_t nerrors;
	struct report_kind kinds[REPORT_KINDS];
	struct loop_timer repeat;
	struct kept_file kept[KEPT_FILES];
	bool told_gone; /* that one of them is gone */
	uint64_t start_ns;
};

/* Logging: to opts.log. Any thread. */
void engine_log(struct engine *e, enum engine_log_level level, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

/* ops.c: loop thread */
void ops_unpark(struct engine *e);
void ops_fini(struct engine *e);
void ops_drop_file(struct engine *e, uint64_t ino); /* the inode is gone */

/* report.c: what was only counted is told */
void report_flush(struct engine *e);

/* bracket.c: no plain step is open any more; who waited for that asks again */
void bracket_over(struct engine *e);
/* The engine closes: a step that is open is torn. `dropped` gets what is lost by it, if anything. */
void bracket_close(struct engine *e, char *dropped, size_t len);

/* holder.c: one process a backing */
int holder_take(int dirfd, const char *path, const struct engine_opts *opts, bool readonly,
		int *lockfd, char *err, size_t errlen);
void holder_closing(int lockfd);
void holder_release(int dirfd, int lockfd);

/*
 * revert.c: back to the last commit. `all`: everything, names too; else the held files. done() on
 * the loop thread. The caller made sure that nobody has a lease or an open step.
 */
void engine_revert(struct engine *e, bool all, void (*done)(void *arg, int res), void *arg);

/* session.c */
void session_destroy_all(struct engine *e);
void session_status(struct engine *e, FILE *f);
/* A live session that has leases, or waits for some; `held`: of blocks of held files. Or NULL. */
struct session *session_lessee(struct engine *e, bool held);
struct session *session_lessee_of(struct engine *e, const struct file *f); /* of blocks of one file */
/* "NAME (pid N) keeps K blocks ..." for people. */
void session_lessee_text(const struct session *s, char *out, size_t len);
/* The last commit's state is back: a step that was open is not any more. */
void session_reverted(struct engine *e);
/* done() runs when the kernel has been told of all that is noted as stale now: from then on readers
 * see what a step, a registration or a revert changed. */
void engine_invalidate(struct engine *e, void (*done)(void *arg), void *arg);

/* patience.c: from now on, if it does not run already; ends with patience_end(). */
#define PATIENCE_NS 2000000000ull
void patience_begin(struct engine *e, struct patience *p, struct file *f, struct waiter *w);
void patience_end(struct patience *p);

/* status.c */
void status_string(FILE *f, const char *s); /* as a JSON string */

/* oldest.c: the request that waits longest */
void oldest_status(struct engine *e, FILE *f);
void oldest_watch(struct engine *e); /* there is one */

/* scrub.c */
void scrub_start(struct engine *e, struct engine_op *op);
void scrub_stop(struct engine *e); /* for good: the engine is about to close */

#endif
