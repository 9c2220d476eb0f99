/* SPDX-License-Identifier: Apache-2.0 */
/*
 * u64map.h - hash map from a non-zero 64-bit number to a pointer: open addressing, linear
 * probing, deletion by shifting back, so that there are no tombstones and lookups stay short.
 *
 * No lock of its own. Iterate with u64map_next(); do not change the map meanwhile.
 */
#ifndef ENGINE_U64MAP_H
#define ENGINE_U64MAP_H

#include <stddef.h>
#include <stdint.h>

struct u64slot {
	uint64_t key; /* 0: empty */
	void *val;
};

struct u64map {
	struct u64slot *slots;
	size_t n, cap; /* cap is 0 or a power of two */
};

static inline uint64_t u64map_heap(const struct u64map *m) /* bytes of memory */
{
	return m->cap * sizeof(*m->slots);
}

void u64map_fini(struct u64map *m);

/* NULL when there is no such key. */
void *u64map_get(const struct u64map *m, uint64_t key);

/* Makes room for `more` further keys, so that as many puts cannot fail. 0 or -ENOMEM. */
int u64map_reserve(struct u64map *m, size_t more);

/* Sets or replaces. 0 or -ENOMEM. */
int u64map_put(struct u64map *m, uint64_t key, void *val);

/* Removes; returns what was there, or NULL. */
void *u64map_del(struct u64map *m, uint64_t key);

/* The first value at or after position *pos, which moves behind it; NULL at the end. Start at 0. */
void *u64map_next(const struct u64map *m, size_t *pos);

#endif
