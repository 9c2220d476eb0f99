/* SPDX-License-Identifier: Apache-2.0 */
/*
 * commit.h - one whole step, or nothing: what is on disk moves from one commit to the next.
 *
 * Loop thread only. One commit at a time:
 *
 *	freeze	an instant: the rows that changed (catalog_freeze), a copy of each changed file's
 *		map, and the dirty blocks of these files. Files of an open or torn step are left out
 *	write	the frozen blocks go to their places; a writer that wants one waits for it, and it
 *		goes first. What a failed sync made unsure is written again (unsure.h)
 *	sync	fdatasync of the pool
 *	record	one SQLite transaction, on a work thread; when it returns the commit is durable
 *	free	the places that only the previous commit referred to may be reused
 *
 * If any of it fails, the previous commit stays, everything is still dirty, and the next commit
 * takes it again. Who asked for it is told; who only steps would go on into nothing: so when commits
 * keep failing (commit_stalled) no step begins before one has succeeded.
 */
#ifndef ENGINE_COMMIT_H
#define ENGINE_COMMIT_H

#include "engine/cache.h"

struct commit_wait {
	void (*done)(struct commit_wait *, int res); /* loop thread */
	struct list link;
};

struct commit_info {
	uint64_t seq;		      /* of the last durable one */
	uint64_t step;		      /* committed; UINT64_MAX: none */
	uint64_t count;		      /* since the engine started */
	uint64_t time_ns;	      /* CLOCK_REALTIME of the last one */
	uint64_t last_bytes, last_ns; /* what the last one wrote, how long it took */
	uint64_t pending;	      /* frozen blocks of the one under way */
	bool running;
	bool full; /* the last one that ended left no file out for an open step */
	int error; /* of the last one, 0 when it succeeded */
	unsigned int failures; /* in a row */
	uint64_t failing_ns;   /* loop_now_ns() at the first of them */
	bool hopeless;	       /* waiting does not cure it */
	char cause[320];       /* of the last one: what failed, of which file */
};

int commit_init(struct cache *c, int seconds);
void commit_fini(struct cache *c);

/* Starts a commit of what may be committed now, if there is anything and none runs. */
void commit_start(struct cache *c);
bool commit_running(const struct cache *c);
bool commit_frees_pending(const struct cache *c);

/*
 * done() is called when everything that had changed before this call, except files of an open step,
 * is durable; with an error if that failed. Joins with others.
 */
void commit_request(struct cache *c, struct commit_wait *w);
bool commit_cancel(struct cache *c, struct commit_wait *w); /* true: done() will not be called */

/* A frozen block has been written (or could not be). Called by blockio.c after the slot was
 * updated. */
void commit_block_done(struct cache *c, struct block *b, int res);
/* Where the extent that a frozen block replaced goes. */
struct freed_list *commit_frees(struct cache *c);

/* The label of what the next commit contains: the last boundary's step. */
void commit_set_boundary(struct cache *c, uint64_t step);
uint64_t commit_boundary(const struct cache *c); /* UINT64_MAX: none since the mount */
/* While held, no commit starts (plain bracket; rollback under way). Counted. */
void commit_block(struct cache *c);
void commit_unblock(struct cache *c);
bool commit_blocked(const struct cache *c);
void commit_timer_start(struct cache *c);
void commit_stop(struct cache *c); /* no commit starts any more */
/* Every commit from now on fails at once: what is in memory is not what it should be. `what`: static. */
void commit_refuse(struct cache *c, int res, const char *what);
/*
 * Steps must not go on: the last commit failed for a cause that waiting does not cure, or
 * COMMIT_PATIENCE in a row have failed, over commit=SECONDS at least (a full disk, a sick drive). Who
 * wants to begin a step asks for a commit first then, so that a cure is noticed by itself.
 */
#define COMMIT_PATIENCE 3u
bool commit_stalled(const struct cache *c);
/*
 * Places are kept beside the two of a block, because a commit failed in such a way that a crash may
 * yet bring it back: until a commit succeeds a block may need a third. commit_owes() says so.
 */
void commit_owes(struct cache *c);
bool commit_owing(const struct cache *c);
/* For people: what fails, since when, what is stored, what to do. */
void commit_explain(const struct cache *c, char *buf, size_t len);
/* commit_fails.c, for commit.c. `lost`: bytes that it would have to store are nowhere any more. */
void commit_info_failed(struct commit_info *i, struct ns *ns, int err, bool lost, uint64_t ino,
			const char *what);
void commit_info_well(struct commit_info *i);
bool commit_info_stalled(const struct commit_info *i, int seconds);
/* Call at a boundary: starts a commit if commit=SECONDS says it is due. */
void commit_maybe(struct cache *c);
uint64_t commit_memory(const struct cache *c); /* bytes, with the transaction under way */
void commit_get_info(const struct cache *c, struct commit_info *i);
/* Calls fn when no commit is running (at once, or when the running one ends). */
void commit_when_idle(struct cache *c, struct waiter *w);

#endif
