/* SPDX-License-Identifier: Apache-2.0 */
/*
 * session.h - inside a session: what session.c, register.c, step.c, ahead.c and state.c share.
 *
 * All of it is under the session's lock, taken by session_enter() at each public function. `pid`
 * never changes and is looked at first, without the lock: a forked child must touch nothing else.
 */
#ifndef LIB_SESSION_H
#define LIB_SESSION_H

#include <pthread.h>
#include <sys/types.h>

#include "lib/index.h"
#include "lib/path.h"
#include "lib/temp.h"

#define ARRAYS_DEFAULT (MOMENT_ARRAY(MOMENT_ROLE_EXP_AVG) | MOMENT_ARRAY(MOMENT_ROLE_EXP_AVG_SQ))

/* A registered parameter. */
struct param {
	char *name;
	uint64_t *shape;
	uint32_t ndim;
	uint64_t numel;
	uint32_t handle;	     /* the path's */
	uint32_t file[MOMENT_ROLES]; /* the path's */
	uint8_t dtype[MOMENT_ROLES]; /* 0xff: no such array */
	uint8_t tier;
	uint32_t role[MOMENT_ROLES]; /* those that there are ... */
	uint32_t roles;		     /* ... and how many */
	uint32_t itemsize;	     /* of its arrays, all alike */
	uint32_t blocks;	     /* of each array */
	uint64_t per_block;	     /* elements */
	uint64_t step;		     /* updates, this step's included */
	bool step_moved;	     /* to be told at the end of the step */
	bool dead;		     /* removed */
	bool seen;		     /* updated in the open step */
	bool in_list;		     /* of a call that is being checked */
	uint32_t place;		     /* in the order of the step; UINT32_MAX: not in it */
};

/* What the backing held when it was opened. */
struct listed {
	char *name;
	uint64_t *shape;
	struct path_param p;
};

enum step_state { STEP_NONE, STEP_OPEN, STEP_TORN };

/*
 * What the session knows of the future: the parameters in the order in which they will be updated,
 * and what it has hinted of that. A position is a place in the order and a block of that parameter.
 * See ahead.c.
 */
struct ahead {
	uint32_t *order; /* handles of the session */
	uint32_t n, cap;
	uint32_t *seen; /* the order of the step that runs; becomes `order` at its end */
	uint32_t n_seen, cap_seen;
	uint32_t from_place, from_block; /* the first that is hinted and not yet used */
	uint32_t place, block;		 /* the next to be hinted */
	uint64_t bytes;			 /* between the two */
};

struct moment_session {
	pid_t pid;
	bool forked;
	struct moment_session *next; /* all sessions of the process; under session.c's own lock */

	pthread_mutex_t lock;
	struct path *path;
	struct temp temp;
	uint32_t flags; /* MOMENT_OPEN_ */
	bool hints;
	int threads; /* 0: as many as the affinity mask allows */
	void (*message)(void *arg, enum moment_message kind, const char *text);
	void *message_arg;

	struct listed *listed; /* sorted by name */
	size_t n_listed;
	struct param *param;
	uint32_t n_params, cap_params;
	struct index names; /* of the parameters that are registered: their handles */
	bool registered; /* once at least: what the backing held has been judged */

	enum step_state state;
	bool touched; /* the open step has changed something */
	uint64_t open_step;
	uint64_t last_step; /* the last boundary, MOMENT_STEP_NONE */
	uint64_t pinned;    /* bytes of the RAM tier, of MOMENT_TIER_RAM parameters */
	struct ahead ahead;
};

/* 0 with the lock held, or -EINVAL (NULL, or a forked child's). */
int session_enter(struct moment_session *s);
static inline int session_leave(struct moment_session *s, int res)
{
	pthread_mutex_unlock(&s->lock);
	return res;
}

void session_say(struct moment_session *s, enum moment_message kind, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

/* The registered parameter, or NULL with the text set. */
struct param *session_param(struct moment_session *s, uint32_t handle);

/* register.c */
int listed_load(struct moment_session *s);
void listed_free(struct moment_session *s);
void params_free(struct moment_session *s);
/* Step counts as the backing has them, after a rollback. */
int params_reload(struct moment_session *s);

/* ahead.c */
uint64_t unit_bytes(const struct moment_session *s, const struct param *p, uint32_t block);
uint32_t unit_len(const struct moment_session *s, const struct param *p, uint32_t block);
int ahead_add(struct moment_session *s, uint32_t handle); /* registered: at the end of the order */
void ahead_expect(struct moment_session *s, const struct moment_item *items, size_t n);
int ahead_saw(struct moment_session *s, uint32_t handle); /* updated now */
void ahead_used(struct moment_session *s, const struct param *p, uint32_t block);
void ahead_goto(struct moment_session *s, const struct param *p); /* about to be updated */
void ahead_hint(struct moment_session *s);
void ahead_end(struct moment_session *s);
void ahead_reset(struct moment_session *s);
void ahead_free(struct moment_session *s);

/* step.c: the steps as state.c and register.c use them, lock held. */
int step_begin(struct moment_session *s, uint64_t step);
int step_end(struct moment_session *s, uint32_t flags);
/* Ends an open step after an error: without a trace if nothing was touched, else torn. Returns res.
 */
int step_fail(struct moment_session *s, int res);
/* Runs fn inside the open step, or inside a small one of its own that keeps the last step's label.
 */
int step_within(struct moment_session *s, int (*fn)(struct moment_session *s, void *arg),
		void *arg);

/* where.c: finds and opens the data path. */
int where_open(const struct moment_open_opts *o, struct moment_session *s);

#endif
