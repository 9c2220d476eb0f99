/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arena_map.h - the memory under the arena: a sealed memfd, mapped, populated, on huge pages where
 * the machine gives them. Internal to arena.c.
 */
#ifndef ENGINE_ARENA_MAP_H
#define ENGINE_ARENA_MAP_H

#include "engine/arena.h"

struct arena_map {
	int fd;
	void *base; /* 2 MiB-aligned */
	uint64_t size;
	uint64_t huge;	  /* bytes on huge pages */
	const char *kind; /* as in arena_info */
	char reason[192];
};

/*
 * `size` is a multiple of `chunk`; m->size may come out smaller, on hugetlb, which has only pages
 * of 2 MiB. 0 or -errno; -ENOMEM where the machine cannot give so much.
 */
int arena_map_create(struct arena_map *m, uint64_t size, const struct arena_opts *opts);
void arena_map_destroy(struct arena_map *m);

#endif
