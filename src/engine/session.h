/* SPDX-License-Identifier: Apache-2.0 */
/*
 * session.h - what the files of the session share. The messages are protocol.h's; the entry points
 * are engine.h's.
 */
#ifndef ENGINE_SESSION_H
#define ENGINE_SESSION_H

#include "engine/engine_impl.h"
#include "moment/protocol.h"

struct param {
	uint64_t dir;		     /* inode of its directory */
	uint32_t file[MOMENT_ROLES]; /* handles; UINT32_MAX: none */
	uint64_t next_step;	     /* by STEPS, until POST_STEP; STEP_NONE: unchanged */
	uint64_t reserved, pinned;   /* its part of the session's */
	bool removed;
};

struct lease {
	uint64_t key; /* handle << 32 | block */
	struct want want;
	uint32_t piece, loose; /* bytes of memory; of these, not pinned anyway */
	bool granted;
	struct list link;
};
#define LEASE_HASH 256u

struct session {
	struct engine *e;
	struct session_opts opts;
	struct list link; /* in engine.sessions */
	char client[48];
	bool hello, greeting, readonly, dead; /* greeting: HELLO is under way */
	unsigned int busy;		      /* requests under way that will come back to it */
	unsigned int registering;	      /* of these, REGISTERs */
	bool stepping;			      /* between PRE_STEP and POST_STEP */
	uint64_t step;
	struct param *params;
	uint32_t nparams, params_cap;
	struct file **files; /* by handle; NULL: removed */
	uint32_t nfiles, files_cap;
	struct list leases[LEASE_HASH];
	uint64_t leased, leased_small, nleases, quota, quota_small;
	uint64_t reserved;   /* bytes of disk */
	uint64_t pinned;     /* bytes of memory of tier=ram */
	struct list commits; /* COMMIT requests that wait for the boundary */
	unsigned int ncommits;
};

/* Replies. status < 0 with a text for people. */
void session_reply(struct session *s, const struct moment_msg *req, void *reply, size_t len);
void session_error(struct session *s, const struct moment_msg *req, int status, const char *fmt,
		   ...) __attribute__((format(printf, 4, 5)));
void session_info_reply(struct session *s, const struct moment_msg *req);
/* The same, when the kernel has been told of what changed (engine_invalidate). */
void session_reply_told(struct session *s, const struct moment_msg *req);
void session_revert_error(struct session *s, const struct moment_msg *req, int res);

/* A session that ended while requests were under way is freed when the last one comes back. */
void session_busy_begin(struct session *s);
/* False: it has ended; do not touch it any more. */
bool session_busy_end(struct session *s);

/* session_register.c */
void session_register(struct session *s, const struct moment_msg *msg);

/* adopt.c: directories of parameters that plain tools brought get their attributes back. done() may
 * be called at once. */
void session_adopt_all(struct engine *e, void (*done)(void *arg), void *arg);

/* session_params.c */
#define SESSION_DTYPES 4u
#define NO_DTYPE       0xff
struct session_dtype {
	const char *name;
	uint32_t size; /* bytes of an element */
};
extern const struct session_dtype session_dtype[SESSION_DTYPES]; /* by enum moment_dtype */
extern const char *const session_role[MOMENT_ROLES];		 /* file names */
/* An attribute as a string, "" when it is not there. */
int64_t session_get_text(struct ns *ns, uint64_t ino, const char *name, char *out, size_t len);
void session_list(struct session *s, const struct moment_msg *msg);
void session_remove(struct session *s, const struct moment_msg *msg);
/* The session has ended: its files are anybody's, as soon as they are not held. */
void session_unregister_all(struct session *s);
/* And nothing under way uses them any more: their references go. */
void session_forget_all(struct session *s);

/* session_step.c */
void session_pre_step(struct session *s, const struct moment_msg *msg);
void session_steps(struct session *s, const struct moment_msg *msg);
void session_post_step(struct session *s, const struct moment_msg *msg);
void session_commit(struct session *s, const struct moment_msg *msg);
void session_rollback(struct session *s, const struct moment_msg *msg);
void session_commit_free(struct list *l); /* a member of session.commits */

/* session_lease.c */
void session_advance(struct session *s, const struct moment_msg *msg);
void session_prefetch(struct session *s, const struct moment_msg *msg);
void session_drop_leases(struct session *s);

#endif
