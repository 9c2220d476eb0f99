/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shared by the tests of the kernels: parameters in guarded memory at chosen alignments, and values
 * from friendly to hostile. Plain checks, no test library, so that these programs run in an
 * emulator too.
 */
#ifndef TEST_ADAM_H
#define TEST_ADAM_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "adam/kernel.h"

#define CHECK(condition, ...) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
			fprintf(stderr, __VA_ARGS__); \
			fputc('\n', stderr); \
			exit(1); \
		} \
	} while (0)

#define GUARD	   128 /* bytes before and after each array, which no kernel may touch */
#define GUARD_BYTE 0xa5

enum array { ARRAY_P, ARRAY_G, ARRAY_M, ARRAY_V, ARRAY_MASTER, ARRAY_VMAX, ARRAYS };

static const char *const array_names[ARRAYS] = {"p", "g", "m", "v", "master", "vmax"};

/* One parameter: all arrays of moment_slice in one allocation. */
struct param {
	unsigned char *memory;
	size_t bytes;
	unsigned char *at[ARRAYS];
	size_t size[ARRAYS];
	size_t numel;
	uint32_t p_dtype, g_dtype;
	bool master;
};

static inline uint64_t random64(uint64_t *state)
{
	uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);

	z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
	return z ^ z >> 31;
}

static inline uint32_t bits_of_float(float x)
{
	uint32_t u;

	memcpy(&u, &x, 4);
	return u;
}

static inline float float_of_bits(uint32_t u)
{
	float x;

	memcpy(&x, &u, 4);
	return x;
}

static inline void param_init(struct param *p, size_t numel, uint32_t p_dtype, uint32_t g_dtype,
			      bool master, uint64_t *seed)
{
	*p = (struct param){
		.numel = numel, .p_dtype = p_dtype, .g_dtype = g_dtype, .master = master};
	for (int a = 0; a < ARRAYS; a++)
		p->size[a] = 4 * numel;
	if (p_dtype != MOMENT_F32)
		p->size[ARRAY_P] = 2 * numel;
	if (g_dtype != MOMENT_F32)
		p->size[ARRAY_G] = 2 * numel;
	for (int a = 0; a < ARRAYS; a++)
		p->bytes += p->size[a] + 2 * GUARD + 64;
	p->memory = malloc(p->bytes);
	CHECK(p->memory, "%zu bytes", p->bytes);
	memset(p->memory, GUARD_BYTE, p->bytes);
	for (size_t a = 0, off = 0; a < ARRAYS; a++) {
		p->at[a] = p->memory + off + GUARD + random64(seed) % 64;
		off += p->size[a] + 2 * GUARD + 64;
	}
}

static inline void param_fini(struct param *p)
{
	free(p->memory);
}

/* The same parameter elsewhere, at other alignments. */
static inline void param_copy(struct param *to, const struct param *from, uint64_t *seed)
{
	param_init(to, from->numel, from->p_dtype, from->g_dtype, from->master, seed);
	for (int a = 0; a < ARRAYS; a++)
		memcpy(to->at[a], from->at[a], from->size[a]);
}

/* The elements [begin, begin + numel) as the kernels want them. */
static inline struct moment_slice param_slice(const struct param *p, size_t begin, size_t numel)
{
	size_t p_size = p->p_dtype == MOMENT_F32 ? 4 : 2, g_size = p->g_dtype == MOMENT_F32 ? 4 : 2;

	return (struct moment_slice){
		.p = p->at[ARRAY_P] + p_size * begin,
		.g = p->at[ARRAY_G] + g_size * begin,
		.m = (float *)(void *)(p->at[ARRAY_M] + 4 * begin),
		.v = (float *)(void *)(p->at[ARRAY_V] + 4 * begin),
		.master = p->master ? (float *)(void *)(p->at[ARRAY_MASTER] + 4 * begin) : NULL,
		.vmax = (float *)(void *)(p->at[ARRAY_VMAX] + 4 * begin),
		.numel = numel,
		.p_dtype = p->p_dtype,
		.g_dtype = p->g_dtype,
	};
}

static inline void check_guard(const unsigned char *at, const unsigned char *end, const char *what)
{
	size_t n = (size_t)(end - at);

	CHECK(n == 0 || (at[0] == GUARD_BYTE && memcmp(at, at + 1, n - 1) == 0),
	      "%s: written outside of the arrays", what);
}

/* Nothing outside the arrays was written. */
static inline void param_check_guards(const struct param *p, const char *what)
{
	const unsigned char *at = p->memory;

	for (int a = 0; a < ARRAYS; a++) {
		check_guard(at, p->at[a], what);
		at = p->at[a] + p->size[a];
	}
	check_guard(at, p->memory + p->bytes, what);
}

static inline void param_check_same(const struct param *a, const struct param *b, const char *what)
{
	for (int i = 0; i < ARRAYS; i++) {
		size_t j = 0;

		if (memcmp(a->at[i], b->at[i], a->size[i]) == 0)
			continue;
		while (a->at[i][j] == b->at[i][j])
			j++;
		CHECK(false, "%s: %s differs at byte %zu of %zu", what, array_names[i], j,
		      a->size[i]);
	}
	param_check_guards(a, what);
	param_check_guards(b, what);
}

static const uint32_t hostile32[] = {
	0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff, 0x807fffff, 0x00800000,
	0x80800000, 0x00800001, 0x00ffffff, 0x01000000, 0x3f800000, 0xbf800000, 0x3f7fffff,
	0x33d6bf95, 0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00000,
	0x7f800001, 0xff812345, 0x7fffffff, 0x1f800000, 0x20000000, 0x5f000000, 0x5f800000,
	0x477fe000, 0x477ff000, 0x38800000, 0x387fc000, 0x33000000, 0x33000001, 0x32ffffff,
	0x3f808000, 0x3f818000, 0x3f817fff, 0x3f818001, 0x00008000,
};

static const uint16_t hostile16[] = {
	0x0000, 0x8000, 0x0001, 0x8001, 0x007f, 0x0080, 0x03ff, 0x0400, 0x3c00,
	0x3f80, 0xbf80, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7c01, 0x7e00, 0xfe01,
	0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7fc0, 0x7f81, 0xffff, 0x0008,
};

/*
 * FRIENDLY: what training has, v not negative. HOSTILE: subnormals, infinities, NaNs, huge and tiny
 * values and random bits, in every array.
 */
enum values { FRIENDLY, HOSTILE };

static inline float friendly(enum array a, uint64_t r)
{
	float x = (float)((double)(r >> 11) / 4503599627370496.0 - 1.0); /* [-1, 1) */

	switch (a) {
	case ARRAY_G:
		return x * 0.1f;
	case ARRAY_M:
		return x * 0.01f;
	case ARRAY_V:
	case ARRAY_VMAX:
		return x * x * 0.001f;
	default:
		return x;
	}
}

static inline void put_element(struct param *p, enum array a, size_t i, float x)
{
	uint32_t dtype = a == ARRAY_P	? p->p_dtype
			 : a == ARRAY_G ? p->g_dtype
					: (uint32_t)MOMENT_F32;
	uint32_t u = bits_of_float(x);
	uint16_t h = (uint16_t)(u >> 16); /* a bf16 by cutting */

	if (dtype == MOMENT_F16) /* likewise, of the values that friendly() gives; below 2^-14: 0 */
		h = (uint16_t)((u >> 16 & 0x8000) |
			       ((u & 0x7fffffff) < 0x38800000
					? 0
					: ((u & 0x7fffffff) - 0x38000000) >> 13));
	if (dtype == MOMENT_F32)
		memcpy(p->at[a] + 4 * i, &u, 4);
	else
		memcpy(p->at[a] + 2 * i, &h, 2);
}

/* fp16_subnormals: some emulators get the conversions of these wrong under DAZ and FTZ. */
static inline void param_fill(struct param *p, enum values values, bool fp16_subnormals,
			      uint64_t *seed)
{
	for (int a = 0; a < ARRAYS; a++) {
		size_t size = p->size[a] / (p->numel ? p->numel : 1);
		bool f16 = size == 2 && (a == ARRAY_P ? p->p_dtype : p->g_dtype) == MOMENT_F16;

		for (size_t i = 0; i < p->numel; i++) {
			uint64_t r = random64(seed);
			uint32_t u;
			uint16_t h;

			if (values == FRIENDLY || r % 4 == 0) {
				put_element(p, (enum array)a, i,
					    friendly((enum array)a, random64(seed)));
				continue;
			}
			u = r % 4 == 1 ? (uint32_t)(r >> 32)
				       : hostile32[(r >> 32) % (sizeof(hostile32) / 4)];
			h = r % 4 == 1 ? (uint16_t)(r >> 32)
				       : hostile16[(r >> 32) % (sizeof(hostile16) / 2)];
			if (f16 && !fp16_subnormals && (h & 0x7c00) == 0)
				h &= 0x8000;
			if (size == 4)
				memcpy(p->at[a] + 4 * i, &u, 4);
			else
				memcpy(p->at[a] + 2 * i, &h, 2);
		}
	}
}

static inline float get_float(const struct param *p, enum array a, size_t i)
{
	float x;

	memcpy(&x, p->at[a] + 4 * i, 4);
	return x;
}

#endif
