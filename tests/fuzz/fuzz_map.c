/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_map.c - any bytes as the block map in a catalog row: refused with a reason, or a map whose
 * entries all keep the rules and which writes itself back as the same bytes. The first nine bytes
 * are the block size (as a power of two) and the size of the file.
 */
#include <errno.h>

#include "engine/blockmap.h"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct extent *all;
	uint32_t block, n, at;
	struct map_copy *map;
	const char *why;
	uint64_t file;
	uint8_t *again;
	int res;

	if (size < 9)
		return 0;
	block = MOMENT_UNIT << (data[0] % 15);
	memcpy(&file, data + 1, 8);
	data += 9;
	size -= 9;
	map = map_copy_new(3, file, 0);
	must(map);
	res = blockmap_decode(data, size, 0, block, &map, &why, &at);
	if (res < 0) {
		must(res == -EUCLEAN && why);
		free(map);
		return 0;
	}
	n = map_copy_len(map);
	must(size == (size_t)n * BLOCKMAP_ENTRY);
	must(!n || (uint64_t)(n - 1) * block < file);
	all = calloc(n + 1, sizeof(*all));
	must(all);
	for (uint32_t b = 0; b < map->n; b++) {
		const struct extent *e = &map->v[b].e;

		must(!b || map->v[b].block > map->v[b - 1].block);
		must(!extent_is_hole(e) && !blockmap_check(e, block));
		must(e->len <= block && e->valid <= e->len);
		must(e->off + e->len >= e->off);
		all[map->v[b].block] = *e;
	}
	must(blockmap_trim(all, n) == n);
	again = malloc(size + 1);
	must(again);
	blockmap_encode(all, n, again);
	must(!size || !memcmp(again, data, size));
	/* As a later segment of the same file, it must end within the file too. */
	if (blockmap_decode(data, size, n, block, &map, &why, &at) == 0)
		must(!n || (uint64_t)(2 * (uint64_t)n - 1) * block < file);
	free(again);
	free(all);
	free(map);
	return 0;
}

#ifndef FUZZ_ENGINE
int main(int argc, char **argv)
{
	return fuzz_main(argc, argv, "corpus-map", 20000);
}
#endif
