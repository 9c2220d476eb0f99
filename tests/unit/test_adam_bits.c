/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every instruction set that this CPU has writes the same bits as the scalar kernels: all
 * optimizers, flags and types, lengths 1 to 300 and around powers of two, any alignment, hostile
 * values; and so does any cutting into slices and any number of threads. A digest of a fixed run is
 * the same on all machines. test_adam_qemu.sh runs this, with the argument "small", on CPUs that
 * lack AVX-512 and AVX2. Prints the levels it compared.
 */
#ifdef __x86_64__
#include <xmmintrin.h>
#endif

#include "test_adam.h"

struct types {
	uint32_t p, g;
	bool master;
};

static const struct types all_types[] = {
	{MOMENT_F32, MOMENT_F32, false},   {MOMENT_F32, MOMENT_BF16, false},
	{MOMENT_F32, MOMENT_F16, false},   {MOMENT_BF16, MOMENT_F32, false},
	{MOMENT_BF16, MOMENT_BF16, false}, {MOMENT_BF16, MOMENT_F16, false},
	{MOMENT_F16, MOMENT_F32, false},   {MOMENT_F16, MOMENT_BF16, false},
	{MOMENT_F16, MOMENT_F16, false},   {MOMENT_BF16, MOMENT_F32, true},
	{MOMENT_BF16, MOMENT_BF16, true},  {MOMENT_BF16, MOMENT_F16, true},
	{MOMENT_F16, MOMENT_F32, true},	   {MOMENT_F16, MOMENT_BF16, true},
	{MOMENT_F16, MOMENT_F16, true},
};
#define TYPES (sizeof(all_types) / sizeof(all_types[0]))

static const uint32_t kind_flags[KERNEL_KINDS] = {
	[MOMENT_ADAM] =
		MOMENT_DECOUPLED | MOMENT_BIAS_CORRECTION | MOMENT_MAXIMIZE | MOMENT_AMSGRAD | MOMENT_TAKE_P,
	[MOMENT_LION] = MOMENT_DECOUPLED | MOMENT_MAXIMIZE | MOMENT_TAKE_P,
	[MOMENT_ADAGRAD] = MOMENT_DECOUPLED | MOMENT_MAXIMIZE | MOMENT_TAKE_P,
	[MOMENT_SGD] = MOMENT_DECOUPLED | MOMENT_MAXIMIZE | MOMENT_NESTEROV | MOMENT_TAKE_P,
};
#define ALL_FLAGS 64u

static const double scales[] = {0, 1, 1024, 3, 0x1p-126, 0x1p127};
#define SCALES (sizeof(scales) / sizeof(scales[0]))

static bool fp16_subnormals = true;

static struct moment_optim optim_of(uint32_t kind, uint32_t flags, uint64_t variant)
{
	return (struct moment_optim){
		.kind = kind,
		.flags = flags,
		.lr = variant % 7 == 0 ? 1e-30 : 0.01,
		.beta1 = kind == MOMENT_SGD && variant % 3 == 0 ? 0 : 0.9,
		.beta2 = 0.99,
		.eps = variant % 5 == 0 ? 0 : 1e-8,
		.weight_decay = variant % 2 ? 0.1 : 0,
		.dampening = variant % 4 == 1 ? 0.5 : 0,
		.grad_scale = scales[variant % SCALES],
	};
}

static void check_same_extras(const struct moment_extras *a, const struct moment_extras *b,
			      const char *what)
{
	CHECK(memcmp(a, b, sizeof(*a)) == 0,
	      "%s: found %u %u, g %a %a, m %a %a, v %a %a, p %a %a, update %a %a", what, a->found,
	      b->found, a->sum_g, b->sum_g, a->sum_m, b->sum_m, a->sum_v, b->sum_v, a->sum_p,
	      b->sum_p, a->sum_update, b->sum_update);
}

/* Where the emulator gets them wrong, fp16 subnormals in p count as the zero that they nearly are.
 */
static void forgive_fp16_subnormals(struct param *p)
{
	uint16_t h;

	if (fp16_subnormals || p->p_dtype != MOMENT_F16)
		return;
	for (size_t i = 0; i < p->numel; i++) {
		memcpy(&h, p->at[ARRAY_P] + 2 * i, 2);
		if ((h & 0x7fff) <=
		    0x0400) /* the least normal one too: it may have been rounded up to */
			h &= 0x8000;
		memcpy(p->at[ARRAY_P] + 2 * i, &h, 2);
	}
}

/* Scalar and each other level, from the same start, two steps. */
static void compare_levels(const struct moment_optim *o, const struct types *types, size_t numel,
			   enum values values, bool want, uint64_t *seed)
{
	const struct kernel_level *scalar = kernel_level_choose("scalar");
	struct moment_extras e_ref = {0}, e;
	struct param start, ref, p;
	char what[200];

	/* There it depends on fp16 subnormals what the master is, and not only what the weights are. */
	if (!fp16_subnormals && types->p == MOMENT_F16 && types->master && o->flags & MOMENT_TAKE_P)
		return;
	param_init(&start, numel, types->p, types->g, types->master, seed);
	param_fill(&start, values, fp16_subnormals, seed);
	param_copy(&ref, &start, seed);
	for (uint64_t step = 1; step <= 2; step++) {
		struct moment_slice s = param_slice(&ref, 0, numel);

		CHECK(kernel_update(scalar, o, step, &s, 1, want ? &e_ref : NULL) == 0, "scalar");
		forgive_fp16_subnormals(&ref);
	}
	for (const struct kernel_level *l = kernel_levels; l != scalar; l++) {
		if (!l->usable())
			continue;
		snprintf(what, sizeof(what),
			 "%s, kind %u, flags %x, p %u, g %u, master %d, numel %zu, %s", l->name,
			 o->kind, o->flags, types->p, types->g, types->master, numel,
			 values == HOSTILE ? "hostile" : "friendly");
		param_copy(&p, &start, seed);
		memset(&e, 0, sizeof(e));
		for (uint64_t step = 1; step <= 2; step++) {
			struct moment_slice s = param_slice(&p, 0, numel);

			CHECK(kernel_update(l, o, step, &s, 1, want ? &e : NULL) == 0, "%s", what);
			forgive_fp16_subnormals(&p);
		}
		param_check_same(&ref, &p, what);
		check_same_extras(&e_ref, &e, what);
		param_fini(&p);
	}
	param_check_guards(&ref, "scalar");
	param_fini(&ref);
	param_fini(&start);
}

/* Every combination meets some 20 of the lengths, every length some 100 of the combinations. */
static size_t compare_all_combinations(uint64_t *seed)
{
	size_t combination = 0, done = 0;

	for (uint32_t kind = 0; kind < KERNEL_KINDS; kind++)
		for (uint32_t flags = 0; flags < ALL_FLAGS; flags++)
			for (size_t t = 0; t < TYPES; t++) {
				if (flags & ~kind_flags[kind])
					continue;
				combination++;
				for (size_t numel = 1 + combination % 15; numel <= 300;
				     numel += 15) {
					uint64_t variant = random64(seed);
					struct moment_optim o = optim_of(kind, flags, variant);

					compare_levels(&o, &all_types[t], numel,
						       variant >> 32 & 1 ? HOSTILE : FRIENDLY,
						       variant >> 33 & 1, seed);
					done++;
				}
			}
	return done;
}

/* All bf16 and fp16 values as gradients and weights; conversions at their limits as stored weights.
 */
static void compare_all_16_bit_values(uint64_t *seed)
{
	static const uint32_t kinds[] = {MOMENT_BF16, MOMENT_F16};
	const struct kernel_level *scalar = kernel_level_choose("scalar");

	for (int k = 0; k < 2; k++)
		for (int master = 0; master < 2; master++) {
			struct moment_optim o = {.kind = MOMENT_SGD, .lr = 1};
			struct param start, ref, p;
			struct moment_slice s;

			param_init(&start, 65536, kinds[k], kinds[k], master, seed);
			param_fill(&start, HOSTILE, fp16_subnormals, seed);
			for (uint32_t i = 0; i < 65536; i++) {
				uint16_t h = (uint16_t)i, zero = 0;

				/* master: a 16-bit value in fp32's upper half and the bits about
				 * its rounding */
				uint32_t u =
					i << 16 | (uint32_t)(random64(seed) % 4 ? 0x8000 : 0x7fff);

				if (k == 1 && !fp16_subnormals && (h & 0x7c00) == 0)
					h &= 0x8000;
				if (k == 1 && !fp16_subnormals && (u & 0x7fffffff) < 0x38800000)
					u &= 0x80000000;
				memcpy(start.at[ARRAY_P] + 2 * i, master ? &zero : &h, 2);
				memcpy(start.at[ARRAY_G] + 2 * i, master ? &zero : &h, 2);
				memcpy(start.at[ARRAY_MASTER] + 4 * i, &u, 4);
			}
			param_copy(&ref, &start, seed);
			s = param_slice(&ref, 0, 65536);
			CHECK(kernel_update(scalar, &o, 1, &s, 1, NULL) == 0, "scalar");
			for (const struct kernel_level *l = kernel_levels; l != scalar; l++) {
				if (!l->usable())
					continue;
				param_copy(&p, &start, seed);
				s = param_slice(&p, 0, 65536);
				CHECK(kernel_update(l, &o, 1, &s, 1, NULL) == 0, "%s", l->name);
				param_check_same(&ref, &p, l->name);
				param_fini(&p);
			}
			param_fini(&ref);
			param_fini(&start);
		}
}

/* One slice on one thread; cut anywhere; on several threads: the same bits, and the same extras per
 * slice. */
static void compare_cuts_and_threads(size_t numel, const struct types *types, uint64_t *seed)
{
	static const int threads[] = {1, 2, 3, 7, 0};
	const struct kernel_level *best = kernel_level_choose(NULL);
	struct moment_optim o = optim_of(MOMENT_ADAM, MOMENT_DECOUPLED | MOMENT_BIAS_CORRECTION, 1);
	struct moment_extras e_ref = {0}, e;
	struct param start, ref, p;
	struct moment_slice s;
	char what[100];

	param_init(&start, numel, types->p, types->g, types->master, seed);
	param_fill(&start, numel % 2 ? HOSTILE : FRIENDLY, fp16_subnormals, seed);
	param_copy(&ref, &start, seed);
	s = param_slice(&ref, 0, numel);
	CHECK(kernel_update(best, &o, 5, &s, 1, &e_ref) == 0, "numel %zu", numel);

	for (size_t t = 0; t < sizeof(threads) / sizeof(threads[0]); t++) {
		snprintf(what, sizeof(what), "numel %zu, %d threads", numel, threads[t]);
		param_copy(&p, &start, seed);
		s = param_slice(&p, 0, numel);
		memset(&e, 0, sizeof(e));
		CHECK(kernel_update(best, &o, 5, &s, threads[t], &e) == 0, "%s", what);
		param_check_same(&ref, &p, what);
		check_same_extras(&e_ref, &e, what);
		param_fini(&p);
	}
	param_copy(&p, &start, seed);
	memset(&e, 0, sizeof(e));
	for (size_t at = 0, len; at < numel; at += len) {
		len = 1 + random64(seed) % (numel / 3 + 1);
		if (len > numel - at)
			len = numel - at;
		s = param_slice(&p, at, len);
		CHECK(kernel_update(best, &o, 5, &s, 2, &e) == 0, "numel %zu", numel);
	}
	snprintf(what, sizeof(what), "numel %zu, in slices", numel);
	param_check_same(&ref, &p, what);
	CHECK(e.found == e_ref.found, "%s", what);
	param_fini(&p);
	param_fini(&ref);
	param_fini(&start);
}

/*
 * A run whose bytes are the same on every machine and in every later version: 40 steps of each
 * optimizer. If this changes, resumed trainings change: say so in the release notes, or better, do
 * not change it.
 */
static uint64_t digest(const struct kernel_level *level)
{
	uint64_t seed = 42, hash = UINT64_C(0xcbf29ce484222325);

	for (uint32_t kind = 0; kind < KERNEL_KINDS; kind++)
		for (size_t t = 0; t < TYPES; t++) {
			struct moment_optim o = optim_of(kind, kind_flags[kind] & ~MOMENT_TAKE_P, 1 + t);
			struct param p;

			o.lr = 0.01;
			o.grad_scale = t % 2 ? 3 : 1;
			param_init(&p, 77, all_types[t].p, all_types[t].g, all_types[t].master,
				   &seed);
			param_fill(&p, FRIENDLY, true, &seed);
			for (uint64_t step = 1; step <= 40; step++) {
				struct moment_slice s = param_slice(&p, 0, 77);

				CHECK(kernel_update(level, &o, step, &s, 1, NULL) == 0, "digest");
			}
			for (int a = 0; a < ARRAYS; a++)
				for (size_t i = 0; i < p.size[a]; i++)
					hash = (hash ^ p.at[a][i]) * UINT64_C(0x100000001b3);
			param_fini(&p);
		}
	return hash;
}

#define DIGEST UINT64_C(0x8ad70bfacc24eccb)

/*
 * The manual says that DAZ and FTZ do not matter to F16C's conversions of fp16 subnormals;
 * emulators may not know. Asked with the instruction itself, on the CPUs that have it.
 */
#ifdef __x86_64__
__attribute__((target("f16c"))) static bool keeps_fp16_subnormals(void)
{
	typedef short half8 __attribute__((vector_size(16)));
	typedef float float4 __attribute__((vector_size(16)));
	volatile short one = 1;
	half8 h = {one};
	unsigned int saved = _mm_getcsr();
	float4 f;
	half8 back;

	_mm_setcsr(0x9fc0);
	f = __builtin_ia32_vcvtph2ps(h);
	back = __builtin_ia32_vcvtps2ph(f, 0);
	__asm__ volatile("" : "+x"(f), "+x"(back));
	_mm_setcsr(saved);
	return f[0] == 0x1p-24f && back[0] == 1;
}
#endif

int main(int argc, char **argv)
{
	/* An emulator is slow. */
	const size_t limit = argc > 1 && strcmp(argv[1], "small") == 0 ? 1 << 17 : SIZE_MAX;
	static const size_t large[] = {
		(1 << 12) - 1, 1 << 12,	      (1 << 12) + 1, (1 << 14) - 1,  1 << 14,
		(1 << 14) + 1, (1 << 16) - 1, 1 << 16,	     (1 << 16) + 1,  (1 << 18) + 1,
		(1 << 20) - 1, 1 << 20,	      (1 << 20) + 1, (1 << 22) + 17,
	};
	const struct kernel_level *best = kernel_level_choose(NULL);
	uint64_t seed = 20240229;
	size_t compared;

#ifdef __x86_64__
	if (strcmp(best->name, "scalar") != 0 && !keeps_fp16_subnormals()) {
		printf("this CPU (an emulator?) loses fp16 subnormals under DAZ or FTZ: left out\n");
		fp16_subnormals = false;
	}
#endif
	for (const struct kernel_level *l = kernel_levels; l->name; l++) {
		if (!l->usable())
			continue;
		printf("level %s, digest %016llx\n", l->name, (unsigned long long)digest(l));
		CHECK(digest(l) == DIGEST, "%s: the bits of a fixed run changed", l->name);
	}
	compared = compare_all_combinations(&seed);
	compare_all_16_bit_values(&seed);
	for (size_t i = 0; i < sizeof(large) / sizeof(large[0]); i++)
		if (large[i] < limit)
			compare_cuts_and_threads(large[i], &all_types[i % TYPES], &seed);
	printf("%zu runs compared, best level %s\n", compared, best->name);
	return 0;
}
