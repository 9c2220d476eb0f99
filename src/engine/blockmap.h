/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blockmap.h - a file's block map as bytes: the blobs in the catalog (momentfs-format.5).
 *
 * A map is stored in segments of 32 blocks. A commit writes those that changed, and a segment of
 * holes is not stored at all: so the cost is that of what changed, and of what is there.
 *
 * One entry of 24 bytes a block, in block order, little-endian: u64 off, u32 len, u32 valid, u64
 * hash. A hole is all zeros; holes at the end are cut. (Version 1 of the catalog had one blob a
 * file, which is the same with one segment that holds all blocks.)
 */
#ifndef ENGINE_BLOCKMAP_H
#define ENGINE_BLOCKMAP_H

#include "engine/list.h"
#include "engine/types.h"

#define BLOCKMAP_ENTRY	 24u
#define BLOCKMAP_SEGMENT 32u /* blocks of a segment */

/* Entries that count: without the holes at the end. */
uint32_t blockmap_trim(const struct extent *map, uint32_t n);

/* Writes n entries to blob, which has room for n * BLOCKMAP_ENTRY bytes. */
void blockmap_encode(const struct extent *map, uint32_t n, uint8_t *blob);

/*
 * What must hold for an entry by itself: a hole is all zeros; otherwise off a multiple of
 * MOMENT_UNIT and not 0, len a multiple of MOMENT_UNIT from 1 unit to the block size, valid from 1
 * to len, off + len within int64. NULL, or a text that says what is wrong.
 */
const char *blockmap_check(const struct extent *e, uint32_t block);

/* A block that is not a hole. */
struct mapped {
	struct extent e;
	uint32_t block;
};

/* A file's map as it is read from the catalog, kept until it becomes the file's own: what is not a
 * hole, in order. */
struct map_copy {
	struct list link;
	uint64_t ino, size;
	uint32_t n, cap;
	struct mapped v[];
};

/* One with room for `cap` blocks, in no list; NULL: no memory. */
struct map_copy *map_copy_new(uint64_t ino, uint64_t size, uint32_t cap);
void map_copies_free(struct list *copies);

/* Entries of the whole map: the last block that is there, and 1. */
static inline uint32_t map_copy_len(const struct map_copy *m)
{
	return m && m->n ? m->v[m->n - 1].block + 1 : 0;
}

/*
 * Reads a blob whose first entry is that of block `first`, of a file in blocks of `block`, and adds
 * it to *map, which may move. -EUCLEAN: not a map of a file of that size; *why says what is wrong
 * and *at in which entry. -ENOMEM.
 */
int blockmap_decode(const void *blob, size_t len, uint32_t first, uint32_t block,
		    struct map_copy **map, const char **why, uint32_t *at);

#endif
