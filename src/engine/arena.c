/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arena.c - hands out the memory of the RAM tier. Where that memory comes from (memfd, huge pages)
 * is arena_map.c.
 *
 * Whole chunks lie on a stack. A chunk set aside for pieces occupies a "slot": a row of one record
 * per MOMENT_UNIT in `units`. There are small_max slots, so the table has a fixed size and nothing
 * is allocated after creation. The records are outside the arena: attached clients can write to
 * all of the arena, and must not be able to confuse the allocator.
 *
 * Pieces are a buddy system within each small chunk: a piece of order k (MOMENT_UNIT << k) begins
 * at a multiple of its size, so its buddy is found by flipping one bit. Free pieces of one order,
 * of all small chunks together, are in one list; an allocation takes from the lowest order that
 * has something, so big pieces stay whole as long as possible. When the merging of a freed piece
 * arrives at the whole chunk, the chunk goes back to the stack.
 *
 * Invariants: each chunk is free (on the stack), whole, or small (has a slot); in a small chunk the
 * records that are heads of pieces tile it exactly; two free buddies are never both there (they
 * would have merged).
 *
 * Loop thread only. Violations (freeing what is not allocated) are bugs of the caller: assert.
 */
#include "engine/arena.h"
#include "engine/bug.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/arena_map.h"

#define CHUNK_MIN  (64u << 10)
#define CHUNK_MAX  (64u << 20)
#define ORDERS	   14 /* MOMENT_UNIT << 13 is half of CHUNK_MAX */
#define NONE	   UINT32_MAX
#define CHUNK_FREE UINT32_MAX
#define CHUNK_USED (UINT32_MAX - 1) /* whole; anything below is the slot of a small chunk */

_Static_assert((uint64_t)MOMENT_UNIT << ORDERS == CHUNK_MAX, "orders reach half a chunk");

enum unit_state { UNIT_INSIDE, UNIT_FREE, UNIT_USED };

/* One per MOMENT_UNIT of the small chunks. prev and next only count in the head of a free piece. */
struct unit {
	uint32_t prev, next;
	uint8_t order;
	uint8_t state; /* INSIDE: not the first unit of a piece */
};

struct arena {
	struct arena_map map;
	uint32_t chunk, chunk_shift;
	uint32_t chunks;
	uint32_t small_max, small;
	uint32_t unit_shift; /* log2 of units in a chunk */
	uint64_t used;

	uint32_t *chunk_state; /* [chunks] */
	uint32_t *free_chunks; /* [chunks], a stack */
	uint32_t free_count;

	struct unit *units;	/* [small_max << unit_shift] */
	uint32_t *slot_chunk;	/* [small_max] */
	uint32_t *free_slots;	/* [small_max], a stack */
	uint32_t heads[ORDERS]; /* of the lists of free pieces */
};

static uint32_t log2_exact(uint32_t v)
{
	return (uint32_t)__builtin_ctz(v);
}

static bool is_power_of_two(uint64_t v)
{
	return v && !(v & (v - 1));
}

int arena_create(const struct arena_opts *opts, struct arena **out)
{
	struct arena *a;
	uint64_t size;
	int rc;

	if (!is_power_of_two(opts->chunk) || opts->chunk < CHUNK_MIN || opts->chunk > CHUNK_MAX)
		return -EINVAL;
	size = opts->size / opts->chunk * opts->chunk;
	if (size / opts->chunk < 4 || size / opts->chunk >= CHUNK_USED)
		return -EINVAL;

	a = calloc(1, sizeof(*a));
	if (!a)
		return -ENOMEM;
	rc = arena_map_create(&a->map, size, opts);
	if (rc)
		goto out_free;

	a->chunk = opts->chunk;
	a->chunk_shift = log2_exact(opts->chunk);
	a->unit_shift = log2_exact(opts->chunk / MOMENT_UNIT);
	a->chunks = (uint32_t)(a->map.size >> a->chunk_shift);
	a->small_max = opts->small_max ? opts->small_max : a->chunks / 4;
	if (a->small_max > a->chunks)
		a->small_max = a->chunks;
	rc = -E2BIG; /* unit numbers are 32 bits wide: 16 TiB of small chunks */
	if ((uint64_t)a->small_max << a->unit_shift >= NONE)
		goto out_unmap;

	rc = -ENOMEM;
	a->chunk_state = calloc(a->chunks, sizeof(*a->chunk_state));
	a->free_chunks = calloc(a->chunks, sizeof(*a->free_chunks));
	a->units = calloc((size_t)a->small_max << a->unit_shift, sizeof(*a->units));
	a->slot_chunk = calloc(a->small_max, sizeof(*a->slot_chunk));
	a->free_slots = calloc(a->small_max, sizeof(*a->free_slots));
	if (!a->chunk_state || !a->free_chunks || !a->units || !a->slot_chunk || !a->free_slots)
		goto out_tables;

	/* The lowest addresses on top. */
	a->free_count = a->chunks;
	for (uint32_t i = 0; i < a->chunks; i++) {
		a->chunk_state[i] = CHUNK_FREE;
		a->free_chunks[i] = a->chunks - 1 - i;
	}
	for (uint32_t i = 0; i < a->small_max; i++)
		a->free_slots[i] = a->small_max - 1 - i;
	for (unsigned int k = 0; k < ORDERS; k++)
		a->heads[k] = NONE;
	*out = a;
	return 0;

out_tables:
	free(a->free_slots);
	free(a->slot_chunk);
	free(a->units);
	free(a->free_chunks);
	free(a->chunk_state);
out_unmap:
	arena_map_destroy(&a->map);
out_free:
	free(a);
	return rc;
}

void arena_destroy(struct arena *a)
{
	if (!a)
		return;
	arena_map_destroy(&a->map);
	free(a->free_slots);
	free(a->slot_chunk);
	free(a->units);
	free(a->free_chunks);
	free(a->chunk_state);
	free(a);
}

int arena_fd(const struct arena *a)
{
	return a->map.fd;
}

void *arena_base(const struct arena *a)
{
	return a->map.base;
}

uint64_t arena_size(const struct arena *a)
{
	return a->map.size;
}

uint32_t arena_chunk(const struct arena *a)
{
	return a->chunk;
}

void *arena_ptr(const struct arena *a, struct aoff o)
{
	assert(o.o < a->map.size);
	return arena_ptr_at(a->map.base, o);
}

/* The least k with MOMENT_UNIT << k >= len. */
static unsigned int order_of(uint32_t len)
{
	if (len <= MOMENT_UNIT)
		return 0;
	return 32 - (unsigned int)__builtin_clz((len - 1) / MOMENT_UNIT);
}

uint32_t arena_piece_size(const struct arena *a, uint32_t len)
{
	assert(len && len <= a->chunk);
	return MOMENT_UNIT << order_of(len);
}

bool arena_is_whole(const struct arena *a, uint32_t len)
{
	return len > a->chunk / 2;
}

/* --- whole chunks ------------------------------------------------------------------------- */

static uint32_t chunk_pop(struct arena *a, uint32_t state)
{
	uint32_t c = a->free_chunks[--a->free_count];

	assert(a->chunk_state[c] == CHUNK_FREE);
	a->chunk_state[c] = state;
	return c;
}

static void chunk_push(struct arena *a, uint32_t c)
{
	assert(a->chunk_state[c] != CHUNK_FREE);
	a->chunk_state[c] = CHUNK_FREE;
	a->free_chunks[a->free_count++] = c;
}

/* --- pieces ------------------------------------------------------------------------------- */

static void piece_list(struct arena *a, uint32_t u, unsigned int order)
{
	struct unit *h = &a->units[u];

	h->state = UNIT_FREE;
	h->order = (uint8_t)order;
	h->prev = NONE;
	h->next = a->heads[order];
	if (h->next != NONE)
		a->units[h->next].prev = u;
	a->heads[order] = u;
}

static void piece_unlist(struct arena *a, uint32_t u)
{
	struct unit *h = &a->units[u];

	assert(h->state == UNIT_FREE);
	if (h->prev != NONE)
		a->units[h->prev].next = h->next;
	else
		a->heads[h->order] = h->next;
	if (h->next != NONE)
		a->units[h->next].prev = h->prev;
	h->state = UNIT_INSIDE;
}

/* Sets a chunk aside for pieces. Returns it as one piece of the full order, in no list. */
static int small_begin(struct arena *a, uint32_t *unit)
{
	uint32_t slot;

	if (a->small == a->small_max || !a->free_count)
		return -ENOMEM;
	slot = a->free_slots[a->small_max - ++a->small];
	a->slot_chunk[slot] = chunk_pop(a, slot);
	*unit = slot << a->unit_shift;
	return 0;
}

static void small_end(struct arena *a, uint32_t unit)
{
	uint32_t slot = unit >> a->unit_shift;

	chunk_push(a, a->slot_chunk[slot]);
	a->free_slots[a->small_max - a->small--] = slot;
}

static int piece_alloc(struct arena *a, unsigned int order, struct aoff *out)
{
	unsigned int k = order;
	uint32_t u;

	while (k < a->unit_shift && a->heads[k] == NONE)
		k++;
	if (k < a->unit_shift) {
		u = a->heads[k];
		piece_unlist(a, u);
	} else {
		int rc = small_begin(a, &u);

		if (rc)
			return rc;
	}
	/* Keep the lower half, list the upper one. */
	while (k > order) {
		k--;
		piece_list(a, u + (1u << k), k);
	}
	a->units[u].state = UNIT_USED;
	a->units[u].order = (uint8_t)order;
	out->o = ((uint64_t)a->slot_chunk[u >> a->unit_shift] << a->chunk_shift) +
		 (uint64_t)(u & ((1u << a->unit_shift) - 1)) * MOMENT_UNIT;
	return 0;
}

static void piece_free(struct arena *a, uint32_t u, unsigned int order)
{
	assert(a->units[u].state == UNIT_USED && a->units[u].order == order);
	a->units[u].state = UNIT_INSIDE;
	for (; order < a->unit_shift; order++) {
		uint32_t buddy = u ^ (1u << order);

		if (a->units[buddy].state != UNIT_FREE || a->units[buddy].order != order) {
			piece_list(a, u, order);
			return;
		}
		piece_unlist(a, buddy);
		u &= ~(1u << order);
	}
	small_end(a, u);
}

/* ------------------------------------------------------------------------------------------ */

int arena_alloc(struct arena *a, uint32_t len, struct aoff *out)
{
	int rc;

	if (!len || len > a->chunk)
		return -EINVAL;
	if (arena_is_whole(a, len)) {
		if (!a->free_count)
			return -ENOMEM;
		out->o = (uint64_t)chunk_pop(a, CHUNK_USED) << a->chunk_shift;
	} else {
		rc = piece_alloc(a, order_of(len), out);
		if (rc)
			return rc;
	}
	a->used += arena_piece_size(a, len);
	return 0;
}

void arena_free(struct arena *a, struct aoff off, uint32_t len)
{
	uint32_t c = (uint32_t)(off.o >> a->chunk_shift);
	uint32_t within = (uint32_t)(off.o & (a->chunk - 1));

	assert(off.o < a->map.size && off.o % MOMENT_UNIT == 0);
	a->used -= arena_piece_size(a, len);
	if (arena_is_whole(a, len)) {
		assert(!within && a->chunk_state[c] == CHUNK_USED);
		chunk_push(a, c);
		return;
	}
	assert(a->chunk_state[c] < a->small_max);
	piece_free(a, (a->chunk_state[c] << a->unit_shift) + within / MOMENT_UNIT, order_of(len));
}

uint32_t arena_free_chunks(const struct arena *a)
{
	return a->free_count;
}

uint64_t arena_used(const struct arena *a)
{
	return a->used;
}

void arena_get_info(const struct arena *a, struct arena_info *info)
{
	*info = (struct arena_info){
		.size = a->map.size,
		.chunk = a->chunk,
		.chunks = a->chunks,
		.chunks_free = a->free_count,
		.chunks_small = a->small,
		.small_max = a->small_max,
		.used = a->used,
		.huge = a->map.huge,
		.kind = a->map.kind,
		.reason = a->map.reason,
	};
}
