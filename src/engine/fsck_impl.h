/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fsck_impl.h - what fsck.c (the order of things, superblock, leftovers, repairs) and
 * fsck_extents.c (block maps and data) share. One thread.
 */
#ifndef ENGINE_FSCK_IMPL_H
#define ENGINE_FSCK_IMPL_H

#include "engine/catalog_impl.h"
#include "engine/fsck.h"
#include "engine/pool.h"

struct fsck {
	const struct fsck_opts *opts;
	struct fsck_result *res;
	int dirfd;
	struct cat_image img;
	struct pool *pool; /* NULL: missing or refused, which was told */
};

/* Tells a problem. `fix` may be NULL; it counts as fixed when `fixed`. */
void fsck_tell(struct fsck *f, const char *kind, uint64_t ino, const char *fix, bool fixed,
	       const char *fmt, ...) __attribute__((format(printf, 6, 7)));

/* Every extent of every file: in bounds, nobody else's, and (unless no_data) its checksum. 0 or
 * -ENOMEM. */
int fsck_extents(struct fsck *f);

#endif
