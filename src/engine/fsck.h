/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fsck.h - checks a backing that nobody has open: the superblock, the catalog, every block map
 * against the pool, and the bytes against their checksums.
 *
 * Without `repair` nothing is changed, not even a WAL recovered. With it, only what loses nothing
 * that could be read: see fsck_problem.fix.
 */
#ifndef ENGINE_FSCK_H
#define ENGINE_FSCK_H

#include "engine/types.h"

struct fsck_problem {
	const char *kind; /* "leftover", "superblock", "pool", "catalog", "inode", "extent", "data",
			     "commit" */
	uint64_t ino;	  /* 0: of no inode */
	const char *path; /* below params/, "" when not known or of no inode */
	const char *text; /* what is wrong */
	const char *fix;  /* what repair does, or did; "" when there is nothing safe */
	bool fixed;
};

struct fsck_opts {
	const char *dir;
	bool repair;
	bool no_data; /* leave out reading the pool: only what the catalog says is checked */
	void (*problem)(void *arg, const struct fsck_problem *p);
	void (*progress)(void *arg, uint64_t done, uint64_t total); /* bytes; may be NULL */
	void *arg;
};

struct fsck_result {
	uint64_t problems, fixed;
	uint64_t files, dirs, extents, bytes; /* bytes in extents */
	uint64_t checked;		      /* bytes whose checksum was compared */
	bool has_catalog;		      /* the three below count */
	uint64_t commit_seq, step;
	bool has_step;
};

/*
 * 0: it ran to the end, problems or not (those that prevented a part of it are problems too).
 * -errno: it could not run, err says why: -ENOENT no backing there, -EBUSY in use, -EACCES, -EROFS,
 * -EPROTONOSUPPORT a newer format, -ENOMEM.
 */
int fsck_run(const struct fsck_opts *opts, struct fsck_result *res, char *err, size_t errlen);

#endif
