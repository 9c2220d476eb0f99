/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blockmap.h - a file's block map as bytes: the blob in the catalog (momentfs-format.5).
 *
 * One entry of 24 bytes a block, in block order, little-endian: u64 off, u32 len, u32 valid, u64
 * hash. A hole is all zeros; holes at the end are cut, so a file without data has no blob.
 */
#ifndef ENGINE_BLOCKMAP_H
#define ENGINE_BLOCKMAP_H

#include "engine/list.h"
#include "engine/types.h"

#define BLOCKMAP_ENTRY 24u
#define BLOCKMAP_MAX   41666666u /* entries: a blob of SQLite has at most 10^9 bytes */

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

/*
 * Reads the blob of a file of `size` bytes in blocks of `block`. *out is malloc'ed (NULL when *n is
 * 0). -EUCLEAN: not a map; *why says what is wrong and *at in which block. -ENOMEM.
 */
int blockmap_decode(const void *blob, size_t len, uint32_t block, uint64_t size,
		    struct extent **out, uint32_t *n, const char **why, uint32_t *at);

/* A file's map taken out of the catalog, kept until it becomes the file's own. */
struct map_copy {
	struct list link;
	uint64_t ino, size;
	uint32_t n;
	struct extent map[];
};

/* Puts a copy at the end of `copies`. 0 or -ENOMEM. */
int map_copy_add(struct list *copies, uint64_t ino, uint64_t size, const struct extent *map,
		 uint32_t n);
void map_copies_free(struct list *copies);

#endif
