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
	uint32_t block, n, at;
	struct extent *map;
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
	res = blockmap_decode(data, size, block, file, &map, &n, &why, &at);
	if (res < 0) {
		must(res == -EUCLEAN && why && !map && !n);
		return 0;
	}
	must(size == (size_t)n * BLOCKMAP_ENTRY);
	must(!n || (uint64_t)(n - 1) * block < file);
	must(blockmap_trim(map, n) == n);
	for (uint32_t b = 0; b < n; b++) {
		must(!blockmap_check(&map[b], block));
		must(map[b].len <= block && map[b].valid <= map[b].len);
		must(map[b].off + map[b].len >= map[b].off);
	}
	again = malloc(size + 1);
	must(again);
	blockmap_encode(map, n, again);
	must(!size || !memcmp(again, data, size));
	free(again);
	free(map);
	return 0;
}

#ifndef FUZZ_ENGINE
int main(int argc, char **argv)
{
	return fuzz_main(argc, argv, "corpus-map", 20000);
}
#endif
