/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool_map.c - the bitmap of the pool and the search for free runs.
 *
 * A search steps over groups of 16 MiB by their summary (free run at the start, at the end, longest
 * inside) and reads bits only in the first and the last group: a full or badly fragmented pool of
 * 1 TiB costs 64 Ki steps, and a sequential allocation costs none. A summary goes stale when bits
 * of its group change and is worked out again when a search comes by.
 *
 * Memory: 32 MiB of bits and 0.5 MiB of summaries per TiB of the file, at most twice that since
 * the capacity doubles.
 *
 * Invariant: bits from `units` to the end of the last group are 1, so a search needs no end check.
 * Loop thread only.
 */
#include "engine/bug.h"
#include "engine/pool_map.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define WORD_BITS   64u
#define GROUP_WORDS (POOL_GROUP / WORD_BITS)

static uint64_t groups_for(uint64_t units)
{
	return (units + POOL_GROUP - 1) / POOL_GROUP;
}

void pool_map_fini(struct pool_map *m)
{
	free(m->bits);
	free(m->groups);
	*m = (struct pool_map){0};
}

/* Bits [at, at + n) of one word. */
static uint64_t mask(uint64_t at, uint64_t n)
{
	return (n == WORD_BITS ? ~0ull : (1ull << n) - 1) << at;
}

enum bits { BITS_FREE, BITS_USED };

static void set_bits(struct pool_map *m, uint64_t at, uint64_t n, enum bits to)
{
	if (n) {
		for (uint64_t g = at / POOL_GROUP; g <= (at + n - 1) / POOL_GROUP; g++)
			m->groups[g].stale = 1;
	}
	while (n) {
		uint64_t bit = at % WORD_BITS, k = min_u64(n, WORD_BITS - bit);

		if (to == BITS_USED)
			m->bits[at / WORD_BITS] |= mask(bit, k);
		else
			m->bits[at / WORD_BITS] &= ~mask(bit, k);
		at += k;
		n -= k;
	}
}

static bool all_bits(const struct pool_map *m, uint64_t at, uint64_t n, enum bits want)
{
	uint64_t flip = want == BITS_USED ? ~0ull : 0;

	while (n) {
		uint64_t bit = at % WORD_BITS, k = min_u64(n, WORD_BITS - bit);

		if ((m->bits[at / WORD_BITS] ^ flip) & mask(bit, k))
			return false;
		at += k;
		n -= k;
	}
	return true;
}

bool pool_map_all_free(const struct pool_map *m, uint64_t at, uint64_t n)
{
	return at <= m->units && n <= m->units - at && all_bits(m, at, n, BITS_FREE);
}

bool pool_map_all_used(const struct pool_map *m, uint64_t at, uint64_t n)
{
	return at <= m->units && n <= m->units - at && all_bits(m, at, n, BITS_USED);
}

void pool_map_take(struct pool_map *m, uint64_t at, uint64_t n)
{
	assert(n && pool_map_all_free(m, at, n));
	set_bits(m, at, n, BITS_USED);
	m->used += n;
}

void pool_map_give(struct pool_map *m, uint64_t at, uint64_t n)
{
	assert(n && pool_map_all_used(m, at, n));
	set_bits(m, at, n, BITS_FREE);
	m->used -= n;
}

int pool_map_grow(struct pool_map *m, uint64_t units)
{
	uint64_t have = groups_for(m->units), want = groups_for(units);

	assert(units >= m->units);
	if (want > m->capacity) {
		uint64_t capacity = max_u64(want, 2 * m->capacity);
		struct pool_group *groups;
		uint64_t *bits;

		bits = realloc(m->bits, capacity * GROUP_WORDS * sizeof(*bits));
		if (!bits)
			return -ENOMEM;
		m->bits = bits;
		groups = realloc(m->groups, capacity * sizeof(*groups));
		if (!groups)
			return -ENOMEM;
		m->groups = groups;
		m->capacity = capacity;
	}
	/* The new groups are all used at first, like the rest of the last one was. */
	if (want > have) {
		memset(m->bits + have * GROUP_WORDS, 0xff,
		       (want - have) * GROUP_WORDS * sizeof(*m->bits));
		memset(m->groups + have, 0, (want - have) * sizeof(*m->groups));
	}
	set_bits(m, m->units, units - m->units, BITS_FREE);
	m->units = units;
	return 0;
}

uint64_t pool_map_tail(const struct pool_map *m)
{
	uint64_t at = m->units;

	while (at && at % WORD_BITS && !(m->bits[at / WORD_BITS] & mask((at - 1) % WORD_BITS, 1)))
		at--;
	if (at % WORD_BITS)
		return at;
	while (at && !m->bits[at / WORD_BITS - 1])
		at -= WORD_BITS;
	if (at)
		at -= (uint64_t)__builtin_clzll(m->bits[at / WORD_BITS - 1]);
	return at;
}

void pool_map_shrink(struct pool_map *m, uint64_t units)
{
	assert(units <= m->units && pool_map_all_free(m, units, m->units - units));
	set_bits(m, units, m->units - units, BITS_USED);
	m->units = units;
}

/* --- search ------------------------------------------------------------------------------- */

/* The first bit of the kind at or after `at` and before `end`; `end` if there is none. */
static uint64_t next_bit(const struct pool_map *m, uint64_t at, uint64_t end, enum bits kind)
{
	uint64_t flip = kind == BITS_USED ? 0 : ~0ull;

	while (at < end) {
		uint64_t w = (m->bits[at / WORD_BITS] ^ flip) >> at % WORD_BITS;

		if (w)
			return min_u64(at + (uint64_t)__builtin_ctzll(w), end);
		at = (at / WORD_BITS + 1) * WORD_BITS;
	}
	return end;
}

static const struct pool_group *summary(struct pool_map *m, uint64_t group)
{
	struct pool_group *g = &m->groups[group];
	uint64_t start = group * POOL_GROUP, end = start + POOL_GROUP, at = start;

	if (!g->stale)
		return g;
	*g = (struct pool_group){0};
	while (at < end) {
		uint64_t from = next_bit(m, at, end, BITS_FREE);
		uint64_t to = next_bit(m, from, end, BITS_USED);
		uint16_t run = (uint16_t)(to - from);

		if (from == start)
			g->prefix = run;
		if (to == end)
			g->suffix = run;
		if (run > g->longest)
			g->longest = run;
		at = to;
	}
	return g;
}

bool pool_map_run(const struct pool_map *m, uint64_t from, uint64_t *at, uint64_t *n)
{
	*at = next_bit(m, from, m->units, BITS_FREE);
	*n = *at < m->units ? next_bit(m, *at, m->units, BITS_USED) - *at : 0;
	return *n > 0;
}

/*
 * The first run of n within [from, end). If there is none, *open becomes the start of the free run
 * that reaches `end` (or `end`): it may go on behind.
 */
static bool find_within(const struct pool_map *m, uint64_t from, uint64_t end, uint64_t n,
			uint64_t *open)
{
	while (from < end) {
		uint64_t start = next_bit(m, from, end, BITS_FREE);
		uint64_t stop = next_bit(m, start, min_u64(end, start + n), BITS_USED);

		*open = start;
		if (stop - start >= n)
			return true;
		if (stop == end)
			return false;
		from = stop;
	}
	*open = end;
	return false;
}

bool pool_map_find(struct pool_map *m, uint64_t from, uint64_t n, uint64_t *at)
{
	uint64_t groups = groups_for(m->units), g = from / POOL_GROUP;
	uint64_t open; /* the free run that ends where group g begins */

	if (from >= m->units || n > m->units - from)
		return false;
	/* The rest of the group of `from` has no summary. */
	if (find_within(m, from, (g + 1) * POOL_GROUP, n, at))
		return true;
	open = *at;
	for (g++; g < groups; g++) {
		uint64_t start = g * POOL_GROUP;
		const struct pool_group *s = summary(m, g);

		if (start + s->prefix - open >= n) {
			*at = open;
			return true;
		}
		if (s->longest >= n)
			return find_within(m, start, start + POOL_GROUP, n, at);
		if (s->prefix < POOL_GROUP)
			open = start + POOL_GROUP - s->suffix;
	}
	return false;
}
