/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which instruction set to use: a const table, the best first, and what each needs of the CPU. This
 * file runs on any CPU, so it must not be compiled for a better one than the oldest.
 */
#include <string.h>

#include "adam/kernel.h"

#ifdef __AVX__
#error "levels.c runs on any CPU to ask what it can do: build without -march=native or -mavx"
#endif

static bool always(void)
{
	return true;
}

#ifdef __x86_64__

#include <cpuid.h>

/* Supported means also that the system saves the registers; f16c needs no others. */
static bool has_avx2(void)
{
	unsigned int a, b, c, d;

	return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
	       __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static bool has_avx512(void)
{
	return has_avx2() && __builtin_cpu_supports("avx512f") &&
	       __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
	       __builtin_cpu_supports("avx512vl");
}

static bool has_avx512_bf16(void)
{
	return has_avx512() && __builtin_cpu_supports("avx512bf16");
}

#endif

const struct kernel_level kernel_levels[] = {
#ifdef __x86_64__
	{"avx512-bf16", has_avx512_bf16, kernels_avx512_bf16},
	{"avx512", has_avx512, kernels_avx512},
	{"avx2", has_avx2, kernels_avx2},
#endif
	{"scalar", always, kernels_scalar},
	{NULL, NULL, NULL},
};

const struct kernel_level *kernel_level_choose(const char *limit)
{
	const struct kernel_level *level, *from = kernel_levels;

	/* A name that is not in the table limits nothing. */
	for (level = kernel_levels; limit && level->name; level++)
		if (strcmp(level->name, limit) == 0)
			from = level;
	for (level = from; !level->usable(); level++)
		;
	return level;
}
