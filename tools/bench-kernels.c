/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How fast the optimizer kernels are next to what the memory allows. tools/bench.d/kernels runs it.
 *
 * The measure is a plain loop over the same bytes (reads p, g, m, v; writes p, m, v), with a few
 * cheap operations an element, vectorised by the compiler. It runs in two ways, a contiguous part
 * for each thread and pieces claimed in turn, and the better one counts. All contenders of a line
 * take turns, round by round, on the same memory (huge pages where to be had, touched before); the
 * medians are compared.
 */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "adam/kernel.h"
#include "adam/team.h"

#define ROUNDS_MAX   101
#define PLAIN_PIECES 256

/* gcc vectorises only the cheapest loops at -O2; clang does all, and has no such attribute. */
#ifdef __clang__
#define VECTORISED
#else
#define VECTORISED __attribute__((optimize("O3")))
#endif
#ifdef __x86_64__
#define BEST_OF_CPU __attribute__((target_clones("avx512f", "avx2", "default"))) VECTORISED
#else
#define BEST_OF_CPU VECTORISED
#endif

struct memory {
	size_t numel;
	uint32_t dtype; /* of p and g */
	void *p, *g;
	float *m, *v, *master;
};

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* --- the plain loops --- */

BEST_OF_CPU static void plain_f32(float *restrict p, const float *restrict g, float *restrict m,
				  float *restrict v, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		m[i] = 0.9f * m[i] + 0.1f * g[i];
		v[i] = 0.999f * v[i] + 0.001f * g[i] * g[i];
		p[i] = p[i] - 1e-3f * m[i] * v[i];
	}
}

static inline float from_bf16(uint16_t h)
{
	union {
		uint32_t u;
		float f;
	} x = {.u = (uint32_t)h << 16};

	return x.f;
}

static inline uint16_t to_bf16(float f)
{
	union {
		float f;
		uint32_t u;
	} x = {.f = f};

	return (uint16_t)((x.u + 0x7fff + (x.u >> 16 & 1)) >> 16);
}

BEST_OF_CPU static void plain_bf16(uint16_t *restrict p, const uint16_t *restrict g,
				   float *restrict m, float *restrict v, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		float x = from_bf16(g[i]);

		m[i] = 0.9f * m[i] + 0.1f * x;
		v[i] = 0.999f * v[i] + 0.001f * x * x;
		p[i] = to_bf16(from_bf16(p[i]) - 1e-3f * m[i] * v[i]);
	}
}

struct plain {
	const struct memory *mem;
	unsigned int pieces;
};

static void plain_piece(void *arg, unsigned int piece)
{
	const struct plain *plain = arg;
	const struct memory *mem = plain->mem;
	size_t len = (mem->numel / plain->pieces + 1023) / 1024 * 1024;
	size_t at = piece * len;

	if (at >= mem->numel)
		return;
	if (len > mem->numel - at)
		len = mem->numel - at;
	if (mem->dtype == MOMENT_F32)
		plain_f32((float *)mem->p + at, (const float *)mem->g + at, mem->m + at,
			  mem->v + at, len);
	else
		plain_bf16((uint16_t *)mem->p + at, (const uint16_t *)mem->g + at, mem->m + at,
			   mem->v + at, len);
}

/* --- contenders --- */

enum contender { PLAIN_PARTS, PLAIN_PIECEWISE, OURS, OURS_GRADIENT, OURS_EXTRAS, CONTENDERS, OURS_TAKE };

static const struct moment_optim adamw = {
	.kind = MOMENT_ADAM,
	.flags = MOMENT_DECOUPLED | MOMENT_BIAS_CORRECTION,
	.lr = 1e-3,
	.beta1 = 0.9,
	.beta2 = 0.999,
	.eps = 1e-8,
	.weight_decay = 0.01,
};

static void must(int err, const char *what)
{
	if (err) {
		fprintf(stderr, "bench-kernels: %s: %s\n", what, strerror(-err));
		exit(1);
	}
}

static double run_one(enum contender who, const struct memory *mem,
		      const struct kernel_level *level, int threads, uint64_t step)
{
	struct moment_slice slice = {
		.p = mem->p,
		.g = mem->g,
		.m = mem->m,
		.v = mem->v,
		.master = mem->master,
		.numel = mem->numel,
		.p_dtype = mem->dtype,
		.g_dtype = mem->dtype,
	};
	struct plain plain = {mem, who == PLAIN_PARTS ? (unsigned int)threads : PLAIN_PIECES};
	struct moment_optim optim = adamw;
	struct moment_extras extras = {.only = who == OURS_GRADIENT ? MOMENT_EXTRAS_GRADIENT
								    : MOMENT_EXTRAS_ALL};
	double start = now();

	if (who == OURS_TAKE)
		optim.flags |= MOMENT_TAKE_P;
	if (who == PLAIN_PARTS || who == PLAIN_PIECEWISE)
		team_run(threads, plain_piece, &plain, plain.pieces);
	else
		must(kernel_update(level, &optim, step, &slice, threads,
				   who == OURS || who == OURS_TAKE ? NULL : &extras),
		     "update");
	return now() - start;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static double median(double *t, int n)
{
	qsort(t, (size_t)n, sizeof(*t), by_value);
	return t[n / 2];
}

/* --- memory --- */

static void *get(size_t bytes)
{
	size_t huge = 2u << 20, len = (bytes + huge - 1) / huge * huge;
	char *raw =
		mmap(NULL, len + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *at;

	if (raw == MAP_FAILED) {
		fprintf(stderr, "bench-kernels: cannot map %zu MiB: use a smaller --numel\n",
			bytes >> 20);
		exit(1);
	}
	at = raw + (huge - (uintptr_t)raw % huge) % huge;
	/* Where there are none the figures are lower, for all contenders alike. */
	madvise(at, len, MADV_HUGEPAGE);
	return at;
}

/* Gradients of about 1 with all kinds of fractions; no contender meets subnormals in the time it
 * runs. */
static void fill(struct memory *mem)
{
	uint32_t x = 12345;

	for (size_t i = 0; i < mem->numel; i++) {
		float g;

		x = x * 1664525 + 1013904223;
		g = (float)(int32_t)x / 2147483648.0f;
		mem->m[i] = 0;
		mem->v[i] = 0;
		if (mem->dtype == MOMENT_F32) {
			((float *)mem->p)[i] = g;
			((float *)mem->g)[i] = g;
		} else {
			((uint16_t *)mem->p)[i] = to_bf16(g);
			((uint16_t *)mem->g)[i] = to_bf16(g);
		}
	}
}

static void get_memory(struct memory *mem, size_t numel, uint32_t dtype)
{
	size_t size = dtype == MOMENT_F32 ? 4 : 2;

	*mem = (struct memory){
		numel,		 dtype,		 get(numel * size), get(numel * size),
		get(numel * 4), get(numel * 4), NULL};
	fill(mem);
}

/* --- reports --- */

static void compare(const struct memory *mem, const struct kernel_level *level, int threads,
		    int rounds, bool json)
{
	static double t[CONTENDERS][ROUNDS_MAX], ratio[ROUNDS_MAX], cost[ROUNDS_MAX],
		less[ROUNDS_MAX];
	double best, plain, ours,
		bytes = (mem->dtype == MOMENT_F32 ? 28.0 : 22.0) * (double)mem->numel;
	const char *type = mem->dtype == MOMENT_F32 ? "fp32" : "bf16";

	for (int who = 0; who < CONTENDERS; who++)
		run_one(who, mem, level, threads, 1);
	/* In another order each round: a neighbour's rhythm must not favour one. */
	for (int r = 0; r < rounds; r++)
		for (int who = 0; who < CONTENDERS; who++) {
			int turn = (who + r) % CONTENDERS;

			t[turn][r] = run_one(turn, mem, level, threads, (uint64_t)r + 2);
		}
	for (int r = 0; r < rounds; r++) {
		best = t[PLAIN_PARTS][r] < t[PLAIN_PIECEWISE][r] ? t[PLAIN_PARTS][r]
								 : t[PLAIN_PIECEWISE][r];
		ratio[r] = best / t[OURS][r];
		cost[r] = t[OURS_EXTRAS][r] / t[OURS][r];
		less[r] = t[OURS_GRADIENT][r] / t[OURS][r];
	}
	plain = median(t[PLAIN_PARTS], rounds);
	best = median(t[PLAIN_PIECEWISE], rounds);
	plain = best < plain ? best : plain;
	ours = median(t[OURS], rounds);
	if (json)
		printf("{\"types\": \"%s\", \"level\": \"%s\", \"threads\": %d, \"numel\": %zu, "
		       "\"params_per_s\": %.4g, \"bytes_per_s\": %.4g, \"plain_params_per_s\": %.4g, "
		       "\"of_plain\": %.4f, \"of_plain_by_round\": %.4f, \"extras_cost\": %.4f, "
		       "\"extras_gradient_cost\": %.4f}\n",
		       type, level->name, threads, mem->numel, (double)mem->numel / ours,
		       bytes / ours, (double)mem->numel / plain, plain / ours,
		       median(ratio, rounds), median(cost, rounds) - 1, median(less, rounds) - 1);
	else
		printf("%-5s %-12s %7d %11.0f %8.1f %11.0f %9.3f %9.3f %+8.1f%% %+8.1f%%\n", type,
		       level->name, threads, (double)mem->numel / ours * 1e-6, bytes / ours * 1e-9,
		       (double)mem->numel / plain * 1e-6, plain / ours, median(ratio, rounds),
		       100 * (median(less, rounds) - 1), 100 * (median(cost, rounds) - 1));
	fflush(stdout);
}

/* Gradient 1 once, then zeros: the moments decay, m to below 2^-126 at about step 800. */
static void decay(const struct kernel_level *level, size_t numel, int threads, bool json)
{
	struct memory mem;
	double early = 0, late = 0, took;

	get_memory(&mem, numel, MOMENT_F32);
	memset(mem.m, 0, 4 * numel);
	memset(mem.v, 0, 4 * numel);
	for (size_t i = 0; i < numel; i++)
		((float *)mem.g)[i] = 1.0f;
	for (uint64_t step = 1; step <= 950; step++) {
		took = run_one(OURS, &mem, level, threads, step);
		if (step == 1)
			memset(mem.g, 0, 4 * numel);
		if (step <= 10)
			early += took / 10;
		if (step > 850)
			late += took / 100;
	}
	if (json)
		printf("{\"decay\": \"%s\", \"threads\": %d, \"numel\": %zu, \"late_over_early\": %.4f}\n",
		       level->name, threads, numel, late / early);
	else
		printf("decay %-12s %7d   steps 851-950 take %.2f of steps 1-10 "
		       "(%zu elements, gradient 1 once, then 0)\n",
		       level->name, threads, late / early, numel);
	fflush(stdout);
}

/* What it costs to look at all 16-bit weights for those that were written since the last step. */
static void take(const struct kernel_level *level, size_t numel, int threads, int rounds, bool json)
{
	static double ratio[ROUNDS_MAX];
	struct memory mem;
	double cost;

	get_memory(&mem, numel, MOMENT_BF16);
	mem.master = get(4 * numel);
	run_one(OURS_TAKE, &mem, level, threads, 1);
	for (int r = 0; r < rounds; r++) {
		double t[2];

		for (int i = 0; i < 2; i++)
			t[(i + r) % 2] = run_one((i + r) % 2 ? OURS_TAKE : OURS, &mem, level, threads,
						 (uint64_t)(2 * r + i + 2));
		ratio[r] = t[1] / t[0];
	}
	cost = median(ratio, rounds) - 1;
	if (json)
		printf("{\"take_weights\": \"%s\", \"threads\": %d, \"numel\": %zu, \"cost\": %.4f}\n",
		       level->name, threads, numel, cost);
	else
		printf("master %-12s %6d   noticing bf16 weights that were written: %+.1f%%\n",
		       level->name, threads, 100 * cost);
	fflush(stdout);
}

static void usage(FILE *to)
{
	fprintf(to,
		"usage: bench-kernels [--numel N] [--rounds N] [--threads N] [--all-levels]\n"
		"                     [--no-decay] [--json]\n"
		"  --numel N      elements a parameter has (default 33554432)\n"
		"  --rounds N     turns each contender gets, at most %d (default 21)\n"
		"  --threads N    what \"all threads\" means (default: the affinity mask)\n"
		"  --all-levels   every instruction set this CPU has, not only the one in use\n"
		"  --no-decay     leave out the time of steps on moments that decayed to nothing\n"
		"  --json         one JSON object a line\n",
		ROUNDS_MAX);
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{"numel", required_argument, NULL, 'n'},   {"rounds", required_argument, NULL, 'r'},
		{"threads", required_argument, NULL, 't'}, {"all-levels", no_argument, NULL, 'a'},
		{"no-decay", no_argument, NULL, 'd'},	   {"json", no_argument, NULL, 'j'},
		{"help", no_argument, NULL, 'h'},	   {NULL, 0, NULL, 0},
	};
	size_t numel = 32u << 20;
	int rounds = 21, threads = team_default_size(), opt;
	bool all = false, json = false, with_decay = true;
	const struct kernel_level *in_use = kernel_level_choose(getenv("MOMENT_SIMD"));

	while ((opt = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		switch (opt) {
		case 'n':
			numel = strtoull(optarg, NULL, 0);
			break;
		case 'r':
			rounds = atoi(optarg);
			break;
		case 't':
			threads = atoi(optarg);
			break;
		case 'a':
			all = true;
			break;
		case 'd':
			with_decay = false;
			break;
		case 'j':
			json = true;
			break;
		case 'h':
			usage(stdout);
			return 0;
		default:
			usage(stderr);
			return 2;
		}
	}
	if (numel < 1024 || rounds < 1 || rounds > ROUNDS_MAX || threads < 1 || optind < argc) {
		usage(stderr);
		return 2;
	}
	if (!json)
		printf("AdamW, %zu elements, medians of %d rounds, level in use %s\n"
		       "%-5s %-12s %7s %11s %8s %11s %9s %9s %9s %9s\n",
		       numel, rounds, in_use->name, "p, g", "level", "threads", "Mparams/s", "GB/s",
		       "plain M/s", "of plain", "by round", "+gradient", "+all");
	for (uint32_t dtype = MOMENT_F32; dtype <= MOMENT_BF16; dtype++) {
		struct memory mem;

		get_memory(&mem, numel, dtype);
		for (const struct kernel_level *l = in_use; l->name; l++) {
			if (!l->usable() || (l != in_use && !all))
				continue;
			compare(&mem, l, 1, rounds, json);
			if (threads > 1)
				compare(&mem, l, threads, rounds, json);
		}
	}
	take(in_use, numel, 1, rounds, json);
	if (threads > 1)
		take(in_use, numel, threads, rounds, json);
	if (with_decay)
		decay(in_use, 16u << 20, threads, json);
	return 0;
}
