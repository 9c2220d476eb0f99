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

int blockmap_decode(const void *blob, size_t len, uint32_t block, uint64_t size,
		    struct extent **out, uint32_t *n, const char **why, uint32_t *at)
{
	const uint8_t *p = blob;
	struct extent *map;
	uint32_t count;

	*out = NULL;
	*n = 0;
	*at = 0;
	*why = "length of the block map is not a multiple of 24";
	if (len % BLOCKMAP_ENTRY)
		return -EUCLEAN;
	*why = "the block map has more blocks than the file";
	if (len / BLOCKMAP_ENTRY > size / block + (size % block != 0))
		return -EUCLEAN;
	*why = "more than 2^32 blocks";
	if (len / BLOCKMAP_ENTRY > UINT32_MAX)
		return -EUCLEAN;
	*why = NULL;
	count = (uint32_t)(len / BLOCKMAP_ENTRY);
	if (!count)
		return 0;
	map = malloc(count * sizeof(*map));
	if (!map)
		return -ENOMEM;
	for (uint32_t i = 0; i < count; i++, p += BLOCKMAP_ENTRY) {
		memcpy(&map[i].off, p, 8);
		memcpy(&map[i].len, p + 8, 4);
		memcpy(&map[i].valid, p + 12, 4);
		memcpy(&map[i].hash, p + 16, 8);
		map[i].off = le64toh(map[i].off);
		map[i].len = le32toh(map[i].len);
		map[i].valid = le32toh(map[i].valid);
		map[i].hash = le64toh(map[i].hash);
		*why = blockmap_check(&map[i], block);
		if (!*why && i == count - 1 && extent_is_hole(&map[i]))
			*why = "the last block is a hole";
		if (*why) {
			*at = i;
			free(map);
			return -EUCLEAN;
		}
	}
	*out = map;
	*n = count;
	return 0;
}

/* ---- copies ---- */

int map_copy_add(struct list *copies, uint64_t ino, uint64_t size, const struct extent *map,
		 uint32_t n)
{
	struct map_copy *m = malloc(sizeof(*m) + n * sizeof(*map));

	if (!m)
		return -ENOMEM;
	m->ino = ino;
	m->size = size;
	m->n = n;
	if (n)
		memcpy(m->map, map, n * sizeof(*map));
	list_push_back(copies, &m->link);
	return 0;
}

void map_copies_free(struct list *copies)
{
	while (!list_empty(copies)) {
		struct map_copy *m = list_first(copies, struct map_copy, link);

		list_remove(&m->link);
		free(m);
	}
}
