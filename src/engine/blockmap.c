/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blockmap.c - see blockmap.h. Pure functions: any thread. Input of blockmap_decode() is what a
 * disk gave back: nothing in it is believed.
 */
#include "engine/blockmap.h"

#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

uint32_t blockmap_trim(const struct extent *map, uint32_t n)
{
	while (n && extent_is_hole(&map[n - 1]))
		n--;
	return n;
}

void blockmap_encode(const struct extent *map, uint32_t n, uint8_t *blob)
{
	for (uint32_t i = 0; i < n; i++, blob += BLOCKMAP_ENTRY) {
		uint64_t off = htole64(map[i].off), hash = htole64(map[i].hash);
		uint32_t len = htole32(map[i].len), valid = htole32(map[i].valid);

		memcpy(blob, &off, 8);
		memcpy(blob + 8, &len, 4);
		memcpy(blob + 12, &valid, 4);
		memcpy(blob + 16, &hash, 8);
	}
}

const char *blockmap_check(const struct extent *e, uint32_t block)
{
	if (extent_is_hole(e))
		return e->len || e->valid || e->hash ? "a hole with a length or a checksum" : NULL;
	if (e->off % MOMENT_UNIT || e->len % MOMENT_UNIT)
		return "not on a 4096-byte boundary";
	if (!e->len || e->len > block)
		return "length 0 or above the block size";
	if (!e->valid || e->valid > e->len)
		return "valid bytes 0 or above the length";
	if (e->off > (uint64_t)INT64_MAX - e->len)
		return "offset beyond any file";
	return NULL;
}

/* Room for `more` further blocks. */
static int map_copy_reserve(struct map_copy **map, uint32_t more)
{
	struct map_copy *m = *map;
	uint64_t cap = max_u64((uint64_t)m->n + more, (uint64_t)m->cap * 2);

	if (m->n + (uint64_t)more <= m->cap)
		return 0;
	m = realloc(m, sizeof(*m) + cap * sizeof(m->v[0]));
	if (!m)
		return -ENOMEM;
	m->cap = (uint32_t)min_u64(cap, UINT32_MAX);
	list_init(&m->link);
	*map = m;
	return 0;
}

int blockmap_decode(const void *blob, size_t len, uint32_t first, uint32_t block,
		    struct map_copy **map, const char **why, uint32_t *at)
{
	const uint8_t *p = blob;
	uint64_t size = (*map)->size;
	uint32_t count, there = 0;

	*at = 0;
	*why = "length of the block map is not a multiple of 24";
	if (len % BLOCKMAP_ENTRY)
		return -EUCLEAN;
	*why = "the block map has more blocks than the file";
	if (len / BLOCKMAP_ENTRY + first > size / block + (size % block != 0))
		return -EUCLEAN;
	*why = "more than 2^32 blocks";
	if (len / BLOCKMAP_ENTRY + first > UINT32_MAX)
		return -EUCLEAN;
	*why = NULL;
	count = (uint32_t)(len / BLOCKMAP_ENTRY);
	for (uint32_t i = 0; i < count; i++) {
		uint64_t off;

		memcpy(&off, p + (size_t)i * BLOCKMAP_ENTRY, 8);
		there += off != 0;
	}
	if (map_copy_reserve(map, there))
		return -ENOMEM;
	for (uint32_t i = 0; i < count; i++, p += BLOCKMAP_ENTRY) {
		struct extent e;

		memcpy(&e.off, p, 8);
		memcpy(&e.len, p + 8, 4);
		memcpy(&e.valid, p + 12, 4);
		memcpy(&e.hash, p + 16, 8);
		e.off = le64toh(e.off);
		e.len = le32toh(e.len);
		e.valid = le32toh(e.valid);
		e.hash = le64toh(e.hash);
		*why = blockmap_check(&e, block);
		if (!*why && i == count - 1 && extent_is_hole(&e))
			*why = "the last block is a hole";
		if (*why) {
			*at = i;
			return -EUCLEAN;
		}
		if (!extent_is_hole(&e))
			(*map)->v[(*map)->n++] = (struct mapped){e, first + i};
	}
	return 0;
}

/* ---- copies ---- */

struct map_copy *map_copy_new(uint64_t ino, uint64_t size, uint32_t cap)
{
	struct map_copy *m = malloc(sizeof(*m) + cap * sizeof(m->v[0]));

	if (!m)
		return NULL;
	*m = (struct map_copy){.ino = ino, .size = size, .cap = cap};
	list_init(&m->link);
	return m;
}

void map_copies_free(struct list *copies)
{
	while (!list_empty(copies)) {
		struct map_copy *m = list_first(copies, struct map_copy, link);

		list_remove(&m->link);
		free(m);
	}
}
