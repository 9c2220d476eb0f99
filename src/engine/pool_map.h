/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool_map.h - which units of the pool file are used: a bitmap, and a summary of it by groups.
 * Internal to pool.c. All positions and lengths are in units of MOMENT_UNIT.
 */
#ifndef ENGINE_POOL_MAP_H
#define ENGINE_POOL_MAP_H

#include "engine/types.h"

#define POOL_GROUP 4096u /* units: 16 MiB of the file */

/* Runs of free units within a group. */
struct pool_group {
	uint16_t prefix, suffix; /* at its two ends */
	uint16_t longest;
	uint16_t stale; /* the bits changed since this was worked out */
};

struct pool_map {
	uint64_t *bits; /* 1: used; also all beyond `units` up to the end of the last group */
	struct pool_group *groups;
	uint64_t units;
	uint64_t capacity; /* groups that there is memory for */
	uint64_t used;
};

void pool_map_fini(struct pool_map *m);

/* Makes it longer; the new units are free. -ENOMEM: nothing changed. */
int pool_map_grow(struct pool_map *m, uint64_t units);

/* Makes it shorter: the units from there on are free, and are gone. */
void pool_map_shrink(struct pool_map *m, uint64_t units);
/* Where the free units at the end begin. */
uint64_t pool_map_tail(const struct pool_map *m);

bool pool_map_all_free(const struct pool_map *m, uint64_t at, uint64_t n);
bool pool_map_all_used(const struct pool_map *m, uint64_t at, uint64_t n);

/* The range must be all free, or all used; n is at least 1. */
void pool_map_take(struct pool_map *m, uint64_t at, uint64_t n);
void pool_map_give(struct pool_map *m, uint64_t at, uint64_t n);

/* The first run of n free units that begins at `from` or later. */
bool pool_map_find(struct pool_map *m, uint64_t from, uint64_t n, uint64_t *at);

/* The first run of free units that begins at `from` or later, all of it. */
bool pool_map_run(const struct pool_map *m, uint64_t from, uint64_t *at, uint64_t *n);

#endif
