/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arena.h - the RAM tier: one sealed memfd on huge pages, cut in chunks and pieces.
 *
 * Every byte of file data that the engine keeps is in here, so the budget is exact. A chunk is one
 * block (the block size); a piece is a power of two from MOMENT_UNIT up to half a chunk. Pieces
 * live only in chunks set aside for them (at most `small_max` chunks; a chunk whose pieces are all
 * free returns), so a whole block needs one free chunk and nothing else, and fragmentation cannot
 * happen to it.
 *
 * Loop thread only after creation, except arena_ptr(), arena_fd() and the sizes, which never
 * change. No allocation from the heap after arena_create().
 */
#ifndef ENGINE_ARENA_H
#define ENGINE_ARENA_H

#include "engine/types.h"

struct arena;

enum arena_huge { ARENA_HUGE_AUTO, ARENA_HUGE_HUGETLB, ARENA_HUGE_OFF };

struct arena_opts {
	uint64_t size;	    /* bytes, rounded down to whole chunks; at least 4 chunks */
	uint32_t chunk;	    /* bytes, a power of two from 64 KiB to 64 MiB */
	uint32_t small_max; /* most chunks used for pieces; 0: a quarter of all, at least 1 */
	enum arena_huge huge;
	/* Called every ARENA_PROGRESS seconds while memory is taken, `done` bytes of `size` so far.
	 * A virtual machine may give memory that it has not used before at some 0.4 GB/s. */
	void (*progress)(void *arg, uint64_t done, uint64_t size);
	void *arg;
};

#define ARENA_PROGRESS 3

struct arena_info {
	uint64_t size;
	uint32_t chunk;
	uint32_t chunks, chunks_free, chunks_small, small_max;
	uint64_t used;	    /* bytes allocated, as pieces rounded up */
	uint64_t huge;	    /* bytes on huge pages (measured: AnonHugePages/ShmemPmdMapped of the
			       mapping, or hugetlb) */
	const char *kind;   /* "collapsed", "hugetlb", "small pages" */
	const char *reason; /* why not huge, "" otherwise */
};

/*
 * Creates, maps, populates (all memory is touched; a budget that the machine cannot give fails
 * here with -ENOMEM, not later) and seals. 0 or -errno.
 */
int arena_create(const struct arena_opts *opts, struct arena **out);
void arena_destroy(struct arena *a);

int arena_fd(const struct arena *a);
void *arena_base(const struct arena *a);
uint64_t arena_size(const struct arena *a);
uint32_t arena_chunk(const struct arena *a);

static inline void *arena_ptr_at(void *base, struct aoff o)
{
	return (char *)base + o.o;
}
void *arena_ptr(const struct arena *a, struct aoff o);

/* The bytes that an allocation of `len` really takes: a power of two >= MOMENT_UNIT, at most a
 * chunk. */
uint32_t arena_piece_size(const struct arena *a, uint32_t len);

/* True if `len` needs a whole chunk, false if it needs a piece. */
bool arena_is_whole(const struct arena *a, uint32_t len);

/*
 * Allocates len bytes (1 .. chunk). -ENOMEM: nothing free of that class now; evict a block of that
 * class (whole or small) and retry. The memory holds old bytes: the caller fills it before anybody
 * reads it.
 */
int arena_alloc(struct arena *a, uint32_t len, struct aoff *out);

/* `len` as given to arena_alloc. */
void arena_free(struct arena *a, struct aoff off, uint32_t len);

/* Chunks that could be handed out whole right now. */
uint32_t arena_free_chunks(const struct arena *a);

/* Bytes allocated, as pieces rounded up. */
uint64_t arena_used(const struct arena *a);

void arena_get_info(const struct arena *a, struct arena_info *info);

#endif
