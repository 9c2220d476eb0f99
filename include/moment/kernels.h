/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The optimizer kernels: one pass over a parameter's weights, gradient and state in plain memory.
 *
 * They know nothing of files, mounts or sessions, and can be used on any memory. moment.h includes
 * this header; a program that wants only the kernels may include it alone.
 *
 * Same bits everywhere. For the same inputs the bytes written are the same with AVX-512, AVX2 or
 * plain scalar code, with any number of threads, for any alignment, and however a parameter is cut
 * into slices. Arithmetic is fp32 whatever the storage types are (Adam and decoupled decay, per
 * element):
 *
 *	g  = grad / grad_scale, negated for MOMENT_MAXIMIZE;
 *	     plus weight_decay * p where decay is not decoupled
 *	m  = fma(1 - beta1, g, beta1 * m)
 *	v  = fma((1 - beta2) * g, g, beta2 * v)
 *	p *= 1 - lr * weight_decay			where decay is decoupled (AdamW)
 *	p -= (lr / bc1) * m / (sqrt(v) / sqrt(bc2) + eps)
 *
 * where bc1 = 1 - beta1^step and bc2 = 1 - beta2^step, or both 1 without bias correction.
 * The scalars are computed in double and rounded to fp32 once, 1 - lr * weight_decay as a whole, as
 * torch does. Stores to bf16 and fp16 round to nearest even.
 *
 * Special values:
 *  - Subnormals. fp32 and bf16 inputs below 2^-126 are read as zero, and a result that would be
 * below is zero of the same sign: a moment that has decayed that far becomes exactly 0 and does not
 * slow later steps. fp16 gradients and weights keep their subnormals (they are ordinary fp32
 * numbers). On x86 the kernels use the FTZ and DAZ modes for this, on arm64 FPCR.FZ; elsewhere
 * subnormals are kept.
 *  - NaN. Every NaN written is the one quiet NaN 0x7fc00000 (bf16 0x7fc0, fp16 0x7e00); payloads
 * and signs of NaN inputs do not survive. A NaN gradient makes m, v and p of that element NaN.
 *  - Infinities and overflow follow IEEE 754.
 *
 * The caller's floating-point mode (rounding, FTZ/DAZ, exception masks and flags) does not matter,
 * and is as it was on return.
 *
 * Threads. Every function may be called from any thread, also at the same time, on slices that do
 * not overlap. A call with nthreads > 1 is helped by threads that the library keeps for that. They
 * sleep in the kernel between calls, they never spin, so they take no time from OpenMP, BLAS or a
 * training framework's own pool; the caller's thread starts on the work at once and never waits for
 * a helper to wake up. One call at a time has the helpers; another one at that moment runs on its
 * own thread only. Slices under MOMENT_PARALLEL_MIN elements are not worth waking a thread and are
 * done by the caller. fork() is safe: the child has no helpers until it needs some.
 */
#ifndef MOMENT_KERNELS_H
#define MOMENT_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "moment/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The library is built with everything else hidden. */
#pragma GCC visibility push(default)

/*
 * MOMENT_ADAM: as above (Kingma and Ba 2014; Loshchilov and Hutter 2017 for decoupled decay).
 *	State: m, v.
 * MOMENT_LION: p -= lr * sign(fma(1 - beta1, g, beta1 * m)); m = fma(1 - beta2, g, beta2 * m).
 *	sign(0) is 0, sign(NaN) is NaN. The paper's decay (Chen et al. 2023) is the decoupled one:
 *	set MOMENT_DECOUPLED. State: m.
 * MOMENT_ADAGRAD: v = fma(g, g, v); p -= (lr * g) / (sqrt(v) + eps). For torch's lr_decay pass
 *	lr / (1 + (step - 1) * lr_decay). State: v.
 * MOMENT_SGD: m = g at step 1, then fma(1 - dampening, g, beta1 * m); p = fma(-lr, m, p), or with
 *	MOMENT_NESTEROV p = fma(-lr, fma(beta1, m, g), p). beta1 is the momentum; with beta1 = 0 the
 *	gradient takes the place of m and there is no state. State: m.
 */
enum moment_optim_kind {
	MOMENT_ADAM = 0,
	MOMENT_LION = 1,
	MOMENT_ADAGRAD = 2,
	MOMENT_SGD = 3,
};

/*
 * moment_optim.flags. DECOUPLED: weight decay acts on the weights (AdamW), not on the gradient.
 * BIAS_CORRECTION (Adam): divide by 1 - beta^step. MAXIMIZE: go up the gradient. AMSGRAD (Adam):
 * the denominator uses the largest v so far, kept in vmax. NESTEROV (SGD): see above. TAKE_P: weights
 * that were written since the last step are noticed, all of them, see struct moment_slice.
 */
#define MOMENT_DECOUPLED       (1u << 0)
#define MOMENT_BIAS_CORRECTION (1u << 1)
#define MOMENT_MAXIMIZE	       (1u << 2)
#define MOMENT_AMSGRAD	       (1u << 3)
#define MOMENT_NESTEROV	       (1u << 4)
#define MOMENT_TAKE_P	       (1u << 5)

/* What is done to every element. Zero what you do not use. */
struct moment_optim {
	uint32_t kind;	/* enum moment_optim_kind */
	uint32_t flags; /* MOMENT_DECOUPLED ... */
	double lr;
	double beta1; /* SGD: momentum */
	double beta2;
	double eps;
	double weight_decay;
	double dampening;  /* SGD */
	double grad_scale; /* gradients are divided by this (a loss scale); 0 means 1 */
};

/*
 * Some elements of one parameter, and where their parts are. All arrays have numel elements, need
 * no alignment, and must not overlap. Pointers that the optimizer has no use for may be NULL.
 *
 * p is written always. With `master` the weights are taken from there and p, bf16 or fp16, gets a
 * rounded copy in the same pass. What p held does not matter, but with MOMENT_TAKE_P: there each
 * element of p that is not its master rounded has been written by somebody since, and the master
 * becomes what p has before the update. (So a master that begins as zeros is filled by its first
 * step.) Without master 16-bit weights are updated in place.
 */
struct moment_slice {
	void *p;       /* weights, p_dtype */
	const void *g; /* gradient, g_dtype */
	float *m;      /* first moment: Adam, Lion, SGD with momentum */
	float *v;      /* second moment: Adam, Adagrad */
	float *master; /* fp32 weights behind a 16-bit p, or NULL */
	float *vmax;   /* largest second moment: MOMENT_AMSGRAD */
	size_t numel;
	uint32_t p_dtype; /* enum moment_dtype */
	uint32_t g_dtype;
};

/* moment_extras.found */
#define MOMENT_FOUND_INF (1u << 0)
#define MOMENT_FOUND_NAN (1u << 1)

/* moment_extras.only */
#define MOMENT_EXTRAS_ALL      0u
#define MOMENT_EXTRAS_GRADIENT 1u /* `found` and sum_g: what loss scaling and clipping ask for */

/*
 * What a pass can tell on the way. moment_update() adds to what is there, so that the slices of one
 * parameter (or all parameters) can be summed up: zero it before the first.
 *
 * `found` tells of infinities and NaN in the gradient after division by grad_scale; the update has
 * then been made with them. The sums are of squares, in double: of that gradient (without L2
 * decay), of m and v as written, of the new weights in fp32 (before rounding to 16 bits), and of
 * what was taken off the weights, without decoupled decay. What the optimizer does not have adds 0.
 *
 * Squares are added up in fp32 for runs of 128 and from there in double: a sum is within 8e-6 of the
 * exact one, and nearly always much closer. Values under 2^-63 (v: 2^-83) count as 0; of p and the
 * update a value from 2^63 on makes the sum infinite. A sum that met a NaN is NaN.
 *
 * What is not asked for costs nothing: `only` says so, the other sums then stay as they are.
 *
 * For one slice the sums are the same bits at every instruction set and thread count. They depend,
 * in the last bits, on how a parameter is cut into slices.
 */
struct moment_extras {
	uint32_t found;
	uint32_t only; /* set by the caller; an unknown value: -EINVAL */
	double sum_g;
	double sum_m;
	double sum_v;
	double sum_p;
	double sum_update;
};

/* Slices of fewer elements than this are done by the calling thread whatever nthreads says. */
#define MOMENT_PARALLEL_MIN 65536

/*
 * Makes one optimizer step on a slice.
 *
 * step is the step number of this parameter, the first being 1; it matters for bias correction and
 * for SGD's first step. nthreads is the number of threads to use, the caller's included; 0 means as
 * many as the calling thread may run on (its affinity mask). extras may be NULL.
 *
 * Returns 0, or -EINVAL, having touched nothing: an unknown kind, flag or type; a flag that the
 * kind does not have; a pointer missing that the optimizer needs; an fp32 p with a master; step 0;
 * nthreads < 0; a hyperparameter that is not finite or outside its range (lr any, 0 <= beta < 1,
 * SGD's momentum any >= 0, eps 0 or from 2^-126 on, fp32's smallest normal number: less counts as 0,
 * weight_decay >= 0, grad_scale > 0 and within fp32's normal range). There is no other error: where
 * a helper thread cannot be had, the caller does the work alone.
 */
int moment_update(const struct moment_optim *optim, uint64_t step, const struct moment_slice *slice,
		  int nthreads, struct moment_extras *extras);

/*
 * The instruction set in use: "scalar", "avx2", "avx512" or "avx512-bf16"; the best this CPU has,
 * or what the environment variable MOMENT_SIMD names if that is lower (another word changes
 * nothing). It is read once, at the first call. Never NULL, static.
 */
const char *moment_simd_level(void);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
