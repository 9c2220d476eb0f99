/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Between the parts of src/adam: what kernels.c prepares, what an instruction set's kernels do with
 * it, and the table of instruction sets.
 */
#ifndef ADAM_KERNEL_H
#define ADAM_KERNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "moment/kernels.h"

#define KERNEL_KINDS 4

/*
 * A block is what the arithmetic is written for: 16 elements, one AVX-512 vector, two of AVX2. Sums
 * are kept in 16 lanes at every level, so that they add up in the same order.
 */
#define KERNEL_BLOCK 16

/* In one word: as separate truth values they take more registers than there are. */
enum kernel_flag {
	KERNEL_SCALE = 1 << 0,	/* g_mul is not 1, or ... */
	KERNEL_DIVIDE = 1 << 1, /* ... g_div is to be used instead */
	KERNEL_L2 = 1 << 2,
	KERNEL_DECOUPLED = 1 << 3,
	KERNEL_AMSGRAD = 1 << 4,
	KERNEL_NESTEROV = 1 << 5,
	KERNEL_FIRST = 1 << 6, /* SGD's first step: m = g */
	KERNEL_TAKE_P = 1 << 7, /* there is a master, and p may be newer */
};

/* Hyperparameters, made ready: everything that is the same for all elements, rounded to fp32. */
struct kernel_consts {
	float g_mul; /* gradients are multiplied by this, an exact power of two with the sign of
			maximize ... */
	float g_div; /* ... or divided by this, where the scale is no power of two */
	float decay_l2;
	float keep_p; /* 1 - lr * weight_decay, rounded once: as torch does it, see kernels.h */
	float beta1, one_beta1;
	float beta2, one_beta2;
	float step; /* lr / bc1 for Adam, else lr */
	float bc2_sqrt;
	float eps;
	uint32_t flags;
};

/* Sums and found flags: none, those of the gradient, all. */
enum kernel_want { WANT_NONE, WANT_GRADIENT, WANT_ALL };

struct kernel_args {
	struct kernel_consts c;
	unsigned char *p;
	const unsigned char *g;
	float *m, *v, *master, *vmax;
	uint32_t p_dtype, g_dtype;
	enum kernel_want want;
};

enum kernel_sum { SUM_G, SUM_M, SUM_V, SUM_P, SUM_UPDATE, KERNEL_SUMS };

struct kernel_sums {
	double sum[KERNEL_SUMS];
	uint32_t found;
};

/*
 * Updates the elements [begin, end) of one optimizer kind; begin is a multiple of KERNEL_BLOCK.
 * Runs in the floating-point mode of fpmode.h. sums is written unless WANT_NONE.
 */
typedef void kernel_fn(const struct kernel_args *a, size_t begin, size_t end,
		       struct kernel_sums *sums);

struct kernel_level {
	const char *name;
	bool (*usable)(void);
	kernel_fn *const *kernels; /* by enum moment_optim_kind */
};

extern kernel_fn *const kernels_scalar[KERNEL_KINDS];
extern kernel_fn *const kernels_avx2[KERNEL_KINDS];
extern kernel_fn *const kernels_avx512[KERNEL_KINDS];
extern kernel_fn *const kernels_avx512_bf16[KERNEL_KINDS];

/* All levels that were built, the best first, ended by one without a name; scalar is always there.
 */
extern const struct kernel_level kernel_levels[];

/* The best usable level that is not above `limit`, a level's name or NULL for no limit. */
const struct kernel_level *kernel_level_choose(const char *limit);

/* Why moment_update() would refuse this, in words; NULL: it would not. Static. */
const char *kernel_refusal(const struct moment_optim *optim, uint64_t step,
			   const struct moment_slice *slice, const struct moment_extras *extras);

/* moment_update() at a given level: what the tests compare and the benchmark measures. */
int kernel_update(const struct kernel_level *level, const struct moment_optim *optim, uint64_t step,
		  const struct moment_slice *slice, int nthreads, struct moment_extras *extras);

#endif
