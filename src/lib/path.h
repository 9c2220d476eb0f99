/* SPDX-License-Identifier: Apache-2.0 */
/*
 * path.h - the three ways to the state, seen as one.
 *
 * A data path gives memory for blocks of files, and steps and commits around that. client.c
 * implements it with the messages of protocol.h (over a socket, or to an engine in this process);
 * path_mmap.c with the mounted files. Everything above (session.c, register.c, step.c, state.c)
 * knows only this.
 *
 * Calls are made with the session's lock held, one at a time. Errors are 0 or -errno, with the text
 * set (error.h). After -ECONNRESET only close() is called.
 */
#ifndef LIB_PATH_H
#define LIB_PATH_H

#include <stdbool.h>

#include "moment/moment.h"
#include "moment/protocol.h"

struct path;

/* A request in flight on a client; see client.c. */
struct call {
	struct call *next;
	uint64_t id;
	void *reply; /* the caller's buffer */
	size_t cap, len;
	int status;
	bool done;
	char text[512]; /* of an error */
};

struct path_mem {
	void *ptr;
	uint32_t len;
};

/*
 * One exchange of leases: r[0 .. n_release) are released, then r[n_release .. n_release + n_lease)
 * leased, one block each. The arrays are the caller's, and untouched by him between ask() and
 * wait().
 */
struct path_ask {
	const struct moment_range *r;
	uint32_t n_release, n_lease;
	struct path_mem *mem; /* n_lease entries, filled in by wait() */
	/* the path's */
	struct call call;
	void *scratch;
	size_t scratch_cap;
};

/* A parameter as the path knows it. */
struct path_param {
	/* in */
	const char *name;
	uint64_t numel;
	uint32_t ndim;
	const uint64_t *shape;
	uint8_t dtype[MOMENT_ROLES]; /* 0xff: no such array */
	uint8_t tier;
	const char *hyper;
	/* out */
	uint32_t handle;
	uint32_t found; /* MOMENT_REG_CREATED or MOMENT_REG_FOUND */
	uint64_t step;
	uint32_t file[MOMENT_ROLES];
};

typedef int path_list_fn(void *arg, const struct path_param *p);

struct path_ops {
	const char *name;
	/* What the backing holds. `p` and what it points to are valid during the call of fn. */
	int (*list)(struct path *path, path_list_fn *fn, void *arg);
	/* flags: MOMENT_REG_FRESH, MOMENT_REG_CHECK. All or nothing. */
	int (*add)(struct path *path, struct path_param *p, size_t n, uint32_t flags);
	int (*remove)(struct path *path, const uint32_t *handles, size_t n);

	int (*ask)(struct path *path, struct path_ask *ask);
	int (*wait)(struct path *path,
		    struct path_ask *ask); /* once for each ask() that returned 0 */
	/* A hint: nobody waits for it, and what goes wrong is found out later. */
	void (*prefetch)(struct path *path, const struct moment_range *r, size_t n);

	int (*pre_step)(struct path *path, uint64_t step);
	int (*steps)(struct path *path, const struct moment_param_step *p, size_t n);
	int (*post_step)(struct path *path, uint64_t step, uint32_t flags);
	int (*commit)(struct path *path, bool wait);
	int (*rollback)(struct path *path);
	int (*info)(struct path *path, struct moment_info *info);

	/* commit: embedded, before it ends. Frees the path. */
	int (*close)(struct path *path, bool commit);
	/* In a forked child: lets go of what was inherited, touching nothing shared.
	 * Async-signal-safe. */
	void (*forked)(struct path *path);
};

/* Embedded in each path's own struct; the sizes are set when it opens. */
struct path {
	const struct path_ops *ops;
	uint32_t block;
	uint64_t quota,
		quota_small; /* bytes leased at a time; of these, in blocks below the block size */
	uint64_t window, ram;
	uint64_t rolled_back;
	uint64_t reserved, free;
	uint32_t holder_pid;
	char *mount, *backing; /* absolute; NULL: unknown */
};

struct path_opts {
	const char *mount, *backing;
	const char *client; /* for status */
	uint64_t ram;
	bool ram_forced;
	uint32_t block;
	int commit_seconds; /* -1: never */
	bool readonly, rollback;
};

/* -ENOENT, -ECONNREFUSED, -EACCES: the socket cannot be reached (no text is set then). */
int path_open_session(const struct path_opts *o, struct path **out);
int path_open_embedded(const struct path_opts *o, struct path **out);
int path_open_mmap(const struct path_opts *o, struct path **out);
/* -EBUSY, told: a trainer works through the files of this mount. 0: none, or that cannot be seen.
 */
int path_mmap_held(const char *mount);

/* The bytes of RAM tier that a block of len bytes takes. */
static inline uint64_t path_piece(uint64_t len)
{
	uint64_t p = 4096;

	while (p < len)
		p *= 2;
	return p;
}

static inline uint32_t dtype_size(uint32_t dtype)
{
	return dtype == MOMENT_F64 ? 8 : dtype == MOMENT_F32 ? 4 : 2;
}

#endif
