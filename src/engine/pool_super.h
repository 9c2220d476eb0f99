/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool_super.h - the superblock of the pool file on disk. Internal to pool.c, and to tools that
 * look at a pool which pool_open() refuses.
 */
#ifndef ENGINE_POOL_SUPER_H
#define ENGINE_POOL_SUPER_H

#include "engine/pool.h"

#define POOL_VERSION   1u
#define POOL_SLOT_SIZE 4096u
#define POOL_SLOTS     2u /* at offsets 0 and POOL_SLOT_SIZE */
#define POOL_MAGIC     "MOMENTFS"

#define POOL_BLOCK_MIN (64u << 10)
#define POOL_BLOCK_MAX (64u << 20)

/* What counts of the superblock, and which slot it is in. */
struct pool_super_slot {
	struct pool_super super;
	uint64_t generation;
	unsigned int slot;
};

/* Reads both slots of the file and picks the newer valid one. 0 or -errno, *why as pool_open(). */
int pool_super_read(int fd, struct pool_super_slot *s, const char **why);

/* Writes slot `s->slot`. No sync. */
int pool_super_write(int fd, const struct pool_super_slot *s);

#endif
