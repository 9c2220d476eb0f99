/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz.h - what a fuzz target has: one function for one input, which must abort on a broken
 * promise. With libFuzzer (clang -fsanitize=fuzzer -DFUZZ_ENGINE) that is all; otherwise
 * fuzz_main() runs the files of a corpus, and changed copies of them, from a seed.
 */
#ifndef TEST_FUZZ_H
#define TEST_FUZZ_H

#include <dirent.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define must(cond) \
	do { \
		if (!(cond)) { \
			fprintf(stderr, "%s:%d: broken: %s\n", __FILE__, __LINE__, #cond); \
			abort(); \
		} \
	} while (0)

#ifndef FUZZ_ENGINE

#define FUZZ_INPUT_MAX 65536u

static uint64_t fuzz_rng;

static inline uint64_t fuzz_random(uint64_t below)
{
	fuzz_rng ^= fuzz_rng << 13;
	fuzz_rng ^= fuzz_rng >> 7;
	fuzz_rng ^= fuzz_rng << 17;
	return fuzz_rng % below;
}

/* The input is copied to memory of just its size, so that a sanitizer sees a read beyond it. */
static void fuzz_one(const uint8_t *data, size_t size)
{
	uint8_t *exact = malloc(size ? size : 1);

	must(exact);
	if (size)
		memcpy(exact, data, size);
	LLVMFuzzerTestOneInput(exact, size);
	free(exact);
}

static void fuzz_mutate(uint8_t *data, size_t *size)
{
	for (uint64_t n = 1 + fuzz_random(4); n; n--) {
		size_t at = *size ? fuzz_random(*size) : 0, len;

		switch (fuzz_random(5)) {
		case 0: /* a random byte */
			if (*size)
				data[at] = (uint8_t)fuzz_random(256);
			break;
		case 1: /* a flipped bit */
			if (*size)
				data[at] ^= (uint8_t)(1u << fuzz_random(8));
			break;
		case 2: /* cut */
			*size = at;
			break;
		case 3: /* a piece again, behind the end */
			len = *size - at;
			if (*size + len <= FUZZ_INPUT_MAX) {
				memmove(data + *size, data + at, len);
				*size += len;
			}
			break;
		case 4: /* bytes that mean something somewhere */
			if (*size < FUZZ_INPUT_MAX)
				data[(*size)++] =
					(uint8_t) "%/.-~\0\n\x7f\x80\xff"[fuzz_random(10)];
			break;
		}
	}
}

/* Each file of the folder as it is, then `rounds` changed ones. Options: --seed=N, --rounds=N, or
 * files to run. */
static int fuzz_main(int argc, char **argv, const char *corpus, uint64_t rounds)
{
	static uint8_t data[FUZZ_INPUT_MAX], changed[FUZZ_INPUT_MAX];
	const char *srcdir = getenv("abs_srcdir");
	uint64_t seed = 1, files = 0;
	char folder[4096], path[8192];
	struct dirent *d;
	DIR *dir;

	for (int a = 1; a < argc; a++) {
		FILE *f;

		if (sscanf(argv[a], "--seed=%lu", &seed) == 1 ||
		    sscanf(argv[a], "--rounds=%lu", &rounds) == 1)
			continue;
		f = fopen(argv[a], "rb");
		must(f);
		fuzz_one(data, fread(data, 1, sizeof(data), f));
		fclose(f);
		return 0;
	}
	snprintf(folder, sizeof(folder), "%s/tests/fuzz/%s", srcdir ? srcdir : ".", corpus);
	dir = opendir(folder);
	if (!dir) {
		fprintf(stderr, "%s: cannot be read\n", folder);
		return 1;
	}
	while ((d = readdir(dir))) {
		size_t size, n;
		FILE *f;

		if (d->d_name[0] == '.')
			continue;
		snprintf(path, sizeof(path), "%s/%s", folder, d->d_name);
		f = fopen(path, "rb");
		must(f);
		size = fread(data, 1, sizeof(data), f);
		fclose(f);
		files++;
		fuzz_one(data, size);
		fuzz_rng = seed * 0x9e3779b97f4a7c15u + files;
		for (uint64_t r = 0; r < rounds; r++) {
			memcpy(changed, data, size);
			n = size;
			fuzz_mutate(changed, &n);
			fuzz_one(changed, n);
		}
	}
	closedir(dir);
	printf("%s: %lu files, %lu changed copies of each, seed %lu\n", corpus, files, rounds,
	       seed);
	return files ? 0 : 1;
}

#endif
#endif
