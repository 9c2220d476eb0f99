/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moment.h - libmoment: training with the optimizer's state on a drive.
 *
 * A session is one trainer's hold on one backing directory. It reaches the state by one of three
 * data paths, with the same results bit for bit:
 *	session   through the momentfs daemon's socket: it works in the daemon's RAM tier, without
 *		  copies;
 *	mmap	  through the mounted files themselves, where the socket cannot be reached;
 *	embedded  nobody has the backing mounted: the engine runs in this process.
 *
 *	struct moment_open_opts o = { .size = sizeof(o), .backing = "/nvme/job7" };
 *	struct moment_session *s;
 *	uint64_t shape[] = { 4096, 4096 };
 *	struct moment_param w = { .name = "w", .ndim = 2, .shape = shape };
 *	...
 *	if (moment_open(&o, &s) || moment_register(s, &w, 1))
 *		die(moment_error());
 *	for (step = 1; ...; step++) {
 *		struct moment_item it = { .param = w.handle, .p = weights, .g = gradient,
 *					  .p_numel = 4096 * 4096, .g_numel = 4096 * 4096,
 *					  .optim = &adamw };
 *		if (moment_step(s, step, &it, 1, 0))
 *			die(moment_error());
 *	}
 *	moment_close(s);	commits
 *
 * Errors. Functions return 0 or a negative errno value; moment_error() then has a sentence that
 * names the thing, the amount and the way out. Whatever the call, these can come back:
 *	-EINVAL	     an argument is wrong, or the session belongs to the parent of this (forked)
 *		     process
 *	-ECONNRESET  the daemon has ended; what is on disk is its last commit. Only moment_close()
 *		     works now
 *	-ESTALE	     a step failed part-way, the state is torn: moment_rollback() or moment_close()
 *
 * Threads. Any thread may call; calls on one session wait for each other. A step is one thread's
 * from moment_pre_step() to moment_post_step(): the others must keep off in between. Signals are
 * blocked while moment_step() runs, so their handlers run before or after a whole step.
 *
 * fork(). The child's copy of a session is dead: every call on it returns -EINVAL at once,
 * moment_close() only frees memory, and nothing the child does, its exit included, is noticed by the
 * parent's session.
 */
#ifndef MOMENT_MOMENT_H
#define MOMENT_MOMENT_H

#include <stddef.h>
#include <stdint.h>

#include "moment/kernels.h"
#include "moment/types.h"

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

struct moment_session;

/* ---- the library ------------------------------------------------------------------------ */

/* "momentfs 0.1.0, avx512": version and instruction set in use. Static, never NULL. */
const char *moment_version(void);

/* What went wrong in this thread's last call that failed; "" if none did. Valid until this thread's
 * next call of the library. */
const char *moment_error(void);

/* ---- sessions --------------------------------------------------------------------------- */

enum moment_message {
	MOMENT_WARNING = 1, /* something the user should change or know */
	MOMENT_NOTICE = 2,  /* what was done: space reserved, a torn step dropped */
};

/* moment_open_opts.flags */
#define MOMENT_OPEN_RESUME \
	1u /* go on from the state that is there; names and shapes are checked \
	    */
#define MOMENT_OPEN_FRESH    2u /* drop the state that is there and start at zero, as of step 0 */
#define MOMENT_OPEN_NEW_OK   4u /* with RESUME: parameters that the backing lacks start at zero */
#define MOMENT_OPEN_READONLY 8u /* look only: list, read, map */
#define MOMENT_OPEN_NO_HINTS \
	16u /* look ahead at nothing (for measuring); also MOMENT_HINTS=off \
	     */

/* Zero it, set `size`, fill in what matters. */
struct moment_open_opts {
	/*
	 * sizeof(struct moment_open_opts). It is compared: a program that was built with another
	 * version's structs, of whichever function, is refused here and not misread later.
	 */
	uint32_t size;
	uint32_t flags;
	/*
	 * Where. mount: a live mount point. backing: a directory; the daemon that has it mounted is
	 * joined, or else the engine runs embedded. Neither: a temporary backing under $TMPDIR or
	 * /var/tmp, removed by moment_close(), or after a crash by the next such open. Not both.
	 */
	const char *mount;
	const char *backing;
	const char *temp_dir; /* where temporary backings are made instead, or NULL */
	/* "session", "mmap", "embedded" or NULL: what MOMENT_DATA says, or the best that works. */
	const char *data;
	uint64_t ram; /* embedded: bytes of the RAM tier. 0: as much as state_bytes needs, at most a
		       * quarter of the memory that this process may use */
	uint64_t state_bytes;	/* embedded: what will be registered, about; 0: not known, 1 GiB */
	uint32_t block;		/* embedded, new backing: bytes of a block, 0: 2 MiB */
	int32_t commit_seconds; /* embedded: commit at the first step end after this long; 0: 60,
				 * -1: never
				 */
	int32_t threads; /* for computing, to 1024; 0: MOMENT_THREADS, or the CPUs that we may use */
	uint32_t reserved;
	/* Gets messages for people, in the thread that called. NULL: they go to stderr. */
	void (*message)(void *arg, enum moment_message kind, const char *text);
	void *message_arg;
	uint64_t reserved2; /* makes the size another than before struct moment_item had counts */
};

/*
 * Opens a session. Errors: -ENOENT (no such mount or directory), -ENOTCONN (a dead mount: how to
 * clear it), -ENOTDIR, -EACCES (another user's), -EBUSY (another session writes, or another process
 * has the backing: which), -ESTALE (the state is torn; RESUME and FRESH return to the last commit),
 * -EROFS, -ENOSPC, -ENOMEM, -EPROTO (daemon of another version).
 */
int moment_open(const struct moment_open_opts *opts, struct moment_session **out);

/*
 * Ends the session and frees it. Embedded: commits first. Through a daemon: the daemon keeps the
 * state and commits it in its own time. Returns the commit's error; s is gone in any case. With a
 * step open, the state is torn and the next session starts from the last commit. NULL is allowed.
 */
int moment_close(struct moment_session *s);

/* "session", "mmap" or "embedded". Static. */
const char *moment_data_path(const struct moment_session *s);

struct moment_info {
	const char *data_path;
	const char *mount;	     /* NULL: not mounted, or not known. The session's */
	const char *backing;	     /* the session's */
	uint32_t holder_pid;	     /* the daemon's, or ours */
	uint32_t block;		     /* bytes */
	uint64_t ram, quota, window; /* bytes: RAM tier, most leased at once, read ahead */
	uint64_t committed_step, step, open_step; /* MOMENT_STEP_NONE: none */
	uint64_t rolled_back; /* the torn step that opening dropped, or MOMENT_STEP_NONE */
	uint64_t reserved_bytes, free_bytes; /* disk: held for this session's parameters; left */
	uint64_t read_bytes, written_bytes;  /* of the pool file since the engine started */
	uint64_t hits, misses;		     /* blocks */
	int32_t error;			     /* a write error that is not cured yet, 0 or -errno */
	int32_t threads;
	int32_t temporary, hints;
};
int moment_get_info(struct moment_session *s, struct moment_info *info);

/* ---- parameters ------------------------------------------------------------------------- */

#define MOMENT_ARRAY(role) (1u << (role)) /* for moment_param.arrays */

enum moment_tier {
	MOMENT_TIER_AUTO = 0,
	MOMENT_TIER_RAM = 1,  /* stays in the RAM tier; on the drive only by commits */
	MOMENT_TIER_NVME = 2, /* first to leave the RAM tier */
};

/* Zero it, fill in the first part; moment_register() fills in the second. */
struct moment_param {
	const char
		*name;	 /* any bytes but NUL, at most 65,000; ordinary names make ordinary files */
	uint32_t ndim;	 /* 0: a scalar; at most 64 */
	uint32_t arrays; /* MOMENT_ARRAY(role) | ..., 0: exp_avg and exp_avg_sq */
	const uint64_t *shape;
	uint8_t dtype[MOMENT_ROLES]; /* enum moment_dtype, by role. 0 is MOMENT_F32 */
	uint8_t tier;		     /* enum moment_tier */
	uint8_t pad[3];
	const char *hyper; /* a JSON object for meta.json, or NULL */

	uint32_t handle; /* for the other calls; dense from 0 */
	uint32_t found;	 /* 1: its state was there; 0: starts at zero */
	uint64_t numel;
	uint64_t step; /* updates that this parameter has had */
};

/*
 * Makes or finds the files of n parameters, all or nothing, and reserves their disk space, about
 * twice their size. A notice tells how much, and of which step the state is that was found. A
 * backing that holds stepped state is refused with -EEXIST unless it was opened with RESUME or
 * FRESH. RESUME compares names, shapes and types first: -ENOENT (missing ones; see
 * MOMENT_OPEN_NEW_OK), -EINVAL (other shape or type), all named in moment_error(). In later calls
 * of the same session, parameters that the backing lacks are simply made. Also: -ENOSPC (bytes
 * needed and free), -ENOMEM (MOMENT_TIER_RAM parameters do not fit: how much is missing), -EBUSY (a
 * file is open for writing), -EEXIST (a name is registered already).
 */
int moment_register(struct moment_session *s, struct moment_param *params, size_t n);

enum moment_difference {
	MOMENT_MISSING = 1,  /* asked for, not in the backing */
	MOMENT_EXTRA = 2,    /* in the backing, not asked for */
	MOMENT_RESHAPED = 3, /* other shape; detail: "have 4x4, want 4x5" */
	MOMENT_RETYPED = 4,  /* other types or arrays */
};
/* Compares what the backing held when it was opened with n parameters; calls fn for each
 * difference, in the calling thread. Returns their number. */
int moment_compare(struct moment_session *s, const struct moment_param *params, size_t n,
		   void (*fn)(void *arg, enum moment_difference kind, const char *name,
			      const char *detail),
		   void *arg);

/* What the backing held when it was opened. The param's name, shape, arrays, dtype, numel and step
 * are set; it is valid during the call. Stops when fn returns non-zero and returns that. */
int moment_list(struct moment_session *s, int (*fn)(void *arg, const struct moment_param *param),
		void *arg);

/* The handle of a registered name, or -ENOENT. */
int64_t moment_find(struct moment_session *s, const char *name);

/* Deletes a registered parameter's files. Its handle is dead, its name free. -EBUSY: inside a step.
 */
int moment_remove(struct moment_session *s, uint32_t param);

/* Updates that a parameter has had. Setting it outside a step is a small step of its own. */
int moment_param_step(struct moment_session *s, uint32_t param, uint64_t *step);
int moment_set_param_step(struct moment_session *s, uint32_t param, uint64_t step);

/*
 * Which parameters live on the drive for an nvme_offload_fraction: the quota is floor(total *
 * fraction) elements; in order, first fit, never revisited. total counts all n; only those with
 * cpu[i] != 0 (NULL: all) are offloaded: offload[i] becomes 1, else 0. Returns the number of
 * elements offloaded. (Rule and name are ColossalAI's, colossalai/nn/optimizer/nvme_optimizer.py.)
 */
uint64_t moment_offload_select(const uint64_t *numel, const uint8_t *cpu, size_t n, double fraction,
			       uint8_t *offload);

/* ---- steps ------------------------------------------------------------------------------ */

/* A piece of one parameter, for a callback. Pointers are valid, and writable but for g, during the
 * call. */
struct moment_block {
	void *state[MOMENT_ROLES]; /* NULL: the parameter has no such array */
	void *p;		   /* as the item's p, advanced to this piece; NULL if that was */
	const void *g;
	uint64_t first; /* number of this piece's first element */
	size_t numel;
	uint64_t step; /* the parameter's step count, this update included */
	uint32_t param;
	uint32_t reserved;
};

/*
 * One parameter's part in a step. p and g are contiguous; p_numel and g_numel say how many elements
 * there are. Counts other than the registered parameter's are refused, so say what is really there:
 * the tensor's own count, not once more the registered one.
 */
struct moment_item {
	uint32_t param;
	uint32_t flags; /* 0 */
	void *p;
	const void *g;
	uint64_t p_numel, g_numel;
	uint32_t p_dtype, g_dtype; /* enum moment_dtype */
	/* Either the library's kernels do it, with m, v, master and vmax taken from the state ...
	 */
	const struct moment_optim *optim;
	struct moment_extras *extras; /* added to; NULL: not wanted */
	/* ... or fn, called for every piece in order in the calling thread. Non-zero ends the step.
	 * For fn p or g may be NULL; its count is then 0, or the right one.
	 */
	int (*fn)(void *arg, const struct moment_block *block);
	void *arg;
	uint64_t step; /* the parameter's step count after this; 0: one more than before */
};

#define MOMENT_STEP_FINITE \
	1u		      /* look at all gradients first; not finite: -EDOM, nothing changed \
			       */
#define MOMENT_STEP_COMMIT 2u /* start a commit of this step, behind the reply */

/*
 * A whole step: pre_step, all updates in the order of the list, post_step. `step` is the label
 * under which it is committed; MOMENT_STEP_NEXT: one more than moment_last_step(), 1 where there is
 * none. Reads ahead and computes at the same time. Not listed: not touched.
 * Everything about all items is looked at before anything is changed: -EINVAL names the parameter,
 * what was registered and what came, and weights, state and labels are as before. So they are after
 * any error before the first write. After it the state is torn (-ESTALE from then on) and the
 * weights p are partly updated; moment_rollback() returns the state, not the weights. Errors:
 * -EINVAL, -EDOM, -EIO (the drive or a checksum: which file), -EROFS, -EBUSY (a step is open),
 * -E2BIG (a block's arrays exceed the session's quota), and what an fn returned.
 */
int moment_step(struct moment_session *s, uint64_t step, const struct moment_item *items, size_t n,
		uint32_t flags);

/*
 * The same piece by piece, for optimizers that update a parameter at a time:
 *	moment_pre_step(s, step);
 *	for each parameter, in any order:
 *		moment_pre_update(s, param);	hints what comes next, so that it is read meanwhile
 *		moment_apply(s, &item);		the update
 *		moment_post_update(s, param);
 *	moment_post_step(s, step, flags);
 * A call that is refused for its arguments (-EINVAL) leaves the step open and as it was.
 * What comes next is the rest of this parameter, then those that followed it in the last step (in
 * the first step: in the order of registering). moment_pre_update and moment_post_update may be left
 * out. moment_abort_step() ends a step without a new step's label if nothing was changed yet, else
 * tears it.
 */
int moment_pre_step(struct moment_session *s, uint64_t step);
int moment_pre_update(struct moment_session *s, uint32_t param);
int moment_apply(struct moment_session *s, const struct moment_item *item);
int moment_post_update(struct moment_session *s, uint32_t param);
int moment_post_step(struct moment_session *s, uint64_t step, uint32_t flags);
int moment_abort_step(struct moment_session *s);

/*
 * The label of the last step that ended in this session; before that, of the state that was found
 * (when it was opened); MOMENT_STEP_NONE: none. No I/O. As the session itself counts, nobody has to
 * keep a number beside it that an exception or another user of the session could part from it.
 */
int moment_last_step(struct moment_session *s, uint64_t *step);

/* 1: all numel elements are finite, 0: not, -EINVAL: a type without a check. */
int moment_is_finite(const void *x, size_t numel, uint32_t dtype);

/* ---- commits ---------------------------------------------------------------------------- */

/* Makes the last whole step durable (of an open step: when it ends). wait: returns when it is.
 * Errors: -ESTALE, -EIO, -ENOSPC: not durable; the state in RAM is as it was and a later commit may
 * succeed. */
int moment_commit(struct moment_session *s, int wait);

/* The step that a crash would return to, MOMENT_STEP_NONE: none yet. */
int moment_committed_step(struct moment_session *s, uint64_t *step);

/* Returns all registered state and step counts to the last commit, ending an open step. The weights
 * are the caller's to restore. */
int moment_rollback(struct moment_session *s);

/* ---- content ---------------------------------------------------------------------------- */

/* Reads or replaces numel elements from the first-th on; buf has the array's own type. Writing
 * outside a step is a small step of its own. -EINVAL: beyond the end, or no such array. */
int moment_read_state(struct moment_session *s, uint32_t param, uint32_t role, uint64_t first,
		      uint64_t numel, void *buf);
int moment_write_state(struct moment_session *s, uint32_t param, uint32_t role, uint64_t first,
		       uint64_t numel, const void *buf);

/*
 * One array as contiguous read-only memory, for as long as it is mapped. Where the backing is
 * mounted this is a mapping of the file, filled on touch (after a later step it may show old or new
 * bytes); embedded it is a copy made now. Empty arrays give a pointer that must not be read.
 */
int moment_map_state(struct moment_session *s, uint32_t param, uint32_t role, const void **out,
		     size_t *bytes);
int moment_unmap_state(const void *map, size_t bytes);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
