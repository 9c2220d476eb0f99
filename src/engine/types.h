/* SPDX-License-Identifier: Apache-2.0 */
/*
 * types.h - the small types every module of the engine shares.
 *
 * Positions of different kinds are different types, so that a pool offset cannot be passed
 * where an arena offset is wanted.
 */
#ifndef ENGINE_TYPES_H
#define ENGINE_TYPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MOMENT_UNIT 4096u /* granularity of pool extents and of arena pieces, bytes */

/* A position in the pool, in bytes from the start of the pool file; a multiple of MOMENT_UNIT. */
struct poff {
	uint64_t o;
};

/* A position in the arena, in bytes from its start; a multiple of MOMENT_UNIT. */
struct aoff {
	uint64_t o;
};

/* The number of a block within its file. */
struct blkno {
	uint32_t n;
};

/*
 * Where one block of a file lies in the pool. This is the entry of a block map, in memory and
 * on disk (little-endian, see momentfs-format.5). An entry of all zeros is a hole: the block
 * reads as zeros.
 */
struct extent {
	uint64_t off;	/* pool offset in bytes; 0 for a hole (offset 0 holds the superblock) */
	uint32_t len;	/* bytes written, a multiple of MOMENT_UNIT, at most the block size */
	uint32_t valid; /* the first `valid` bytes count; whatever follows reads as zeros */
	uint64_t hash;	/* XXH3-64 of the `len` bytes at `off` */
};

_Static_assert(sizeof(struct extent) == 24, "extent is an on-disk format");

static inline bool extent_is_hole(const struct extent *e)
{
	return e->off == 0;
}

static inline uint64_t round_up_u64(uint64_t v, uint64_t to)
{
	return (v + to - 1) / to * to;
}

static inline uint64_t min_u64(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

static inline uint64_t max_u64(uint64_t a, uint64_t b)
{
	return a > b ? a : b;
}

static inline uint32_t max_u32(uint32_t a, uint32_t b)
{
	return a > b ? a : b;
}

/* What an allocation of so many bytes takes of glibc's heap, for accounts of memory. */
static inline uint64_t heap_cost(uint64_t size)
{
	return size <= 24 ? 32 : round_up_u64(size + 8, 16);
}

/* The object of type `type` whose `member` is at `ptr`. */
#define container_of(ptr, type, member) ((type *)((char *)(ptr)-offsetof(type, member)))

#endif
