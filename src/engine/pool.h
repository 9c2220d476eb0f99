/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool.h - the pool file: extents, redirect on write, and the superblock.
 *
 * Allocation only; the bytes are moved by io. What is free is not stored: it is derived at mount
 * from the block maps (pool_mark), so it cannot be wrong. When an extent may be reused is the
 * caller's (commit.c) decision: pool_free() makes it reusable at once.
 *
 * Allocation is next-fit at MOMENT_UNIT granularity and wraps before the file grows, so that a
 * sweep over the parameters writes, and later reads, long sequential runs on blocks of disk already
 * written once. The file grows by fallocate in large steps, off the loop thread, and never beyond
 * the limit.
 *
 * Loop thread only, except pool_grow_run() (a work thread) and the fd.
 */
#ifndef ENGINE_POOL_H
#define ENGINE_POOL_H

#include "engine/types.h"

#define POOL_SUPER_SIZE (64u * 1024) /* reserved at the start of the pool file */
#define POOL_PROBE_OFF	(32u * 1024) /* a place in it for the O_DIRECT probe of io */

struct pool;

struct pool_opts {
	int dirfd;	  /* the backing directory */
	const char *name; /* file name within it, "pool" */
	uint64_t limit;	  /* most bytes the file may grow to; 0: as the host allows */
	uint32_t block;	  /* block size, when creating; checked against the superblock when opening
			     (0: take it from there) */
	bool create;	  /* make it; -EEXIST if there */
	bool readonly;
	uint8_t uuid[16]; /* of the backing: written when creating, compared when opening */
};

/* Read from the superblock. Two slots with checksums; the newer valid one counts. */
struct pool_super {
	uint32_t version;
	uint32_t block;
	uint8_t uuid[16];
	uint64_t commit_seq; /* hint: a commit that was durable; the catalog may be newer, never
				older */
};

struct pool_info {
	uint64_t size; /* of the file, all of it allocated on the host where the host can */
	uint64_t limit;
	uint64_t used;	    /* bytes in extents, whoever holds them */
	uint64_t free;	    /* size - used - superblock */
	uint64_t available; /* free plus what the file can still grow by (host free space, limit) */
	uint64_t unreserved; /* of these, holes that the host had no room for at the mount */
	uint64_t grown;	    /* number of growth steps */
	bool reserves; /* false: the host file system cannot reserve (copy on write) and ENOSPC may
			  come late */
	const char *host_fs; /* "ext4", "xfs", "btrfs", "tmpfs", ... or hex magic */
};

/*
 * 0 or -errno; *why (may be NULL) gets a static text that says what is wrong with the file, to be
 * put after its name; "" where errno says it all. -EINVAL: not a pool, or another block size than
 * asked for; -EPROTONOSUPPORT: written by a newer version; -ESTALE: another uuid; -EUCLEAN:
 * damaged or cut off.
 */
int pool_open(const struct pool_opts *opts, struct pool **out, const char **why);
void pool_close(struct pool *p);
int pool_fd(const struct pool *p);
void pool_get_super(const struct pool *p, struct pool_super *s);
void pool_get_info(const struct pool *p, struct pool_info *info);

/* Marks an extent of a block map as used, at mount. -EUCLEAN if it is out of bounds, misaligned or
 * overlaps. */
int pool_mark(struct pool *p, const struct extent *e);

/*
 * Allocates `len` bytes (a multiple of MOMENT_UNIT) in one run, next-fit, from the file as it is.
 * -EAGAIN: no run that long now; the file may grow (pool_grow_begin). Never blocks.
 */
int pool_alloc(struct pool *p, uint32_t len, struct poff *out);

/* The run becomes reusable now. */
void pool_free(struct pool *p, struct poff off, uint32_t len);
/* The first free run at *off or behind it; true: *off and *len are set to it, in bytes. */
bool pool_next_free(const struct pool *p, uint64_t *off, uint64_t *len);
/*
 * pool_pack.c: a place for each of v[0..n), whose lengths are given (bytes, multiples of
 * MOMENT_UNIT); the order of v changes, `tag` is the caller's. All or none: -ENOSPC when no way was
 * found in the free runs that there are, -ENOMEM.
 */
struct pool_place {
	struct poff off;
	uint32_t len;
	uint64_t tag;
};
int pool_pack(struct pool *p, struct pool_place *v, size_t n);

/* True if all of the range is in extents: allocated or marked. For fsck and tests. */
bool pool_is_allocated(const struct pool *p, struct poff off, uint64_t len);

/*
 * Growth in three parts, one growth at a time: begin (loop thread) decides the new size, at least
 * `need` bytes more, in large steps (max of 256 MiB and an eighth of the size, less when the limit
 * or the host says so); -ENOSPC: at the limit or the host's free space (statvfs) is short;
 * -EALREADY: one is under way. run (work thread) does the fallocate, trying smaller steps down to
 * `need` on ENOSPC or EDQUOT (both give -ENOSPC). end (loop thread) publishes the new space.
 */
struct pool_grow {
	uint64_t from, to, need; /* sizes of the file; to < from: a trim */
	int res; /* 0 or -errno */
};
int pool_grow_begin(struct pool *p, uint64_t need, struct pool_grow *g);
/*
 * The other way, with the same run and end: the free tail goes back to the host, but the file stays
 * `floor` bytes long at least. -ENODATA: there is none; -EALREADY: a growth is under way. Safe at
 * any moment: what is free here is referred to by no commit that a mount may find, and where the
 * file ends is written down nowhere else.
 */
int pool_trim_begin(struct pool *p, uint64_t floor, struct pool_grow *g);
void pool_grow_run(struct pool *p, struct pool_grow *g);
void pool_grow_end(struct pool *p, struct pool_grow *g);

/*
 * Writes the superblock's other slot with the given commit number. Work thread; no sync of its own
 * (it is a hint that lets a mount notice a catalog that lost commits). Uses a descriptor of its own
 * (buffered).
 */
int pool_write_super(struct pool *p, uint64_t commit_seq);

#endif
