/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The public entry to the kernels: checks what is asked, prepares the constants, cuts the slice in
 * pieces and has them done on one or more threads, each in the kernels' own floating-point mode.
 *
 * Pieces depend on the slice's length only, never on the number of threads, and their sums are
 * added up in order: that is what makes the extras the same for any number of threads.
 */
#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "adam/fpmode.h"
#include "adam/kernel.h"
#include "adam/team.h"

/* Large enough to stream well and to be worth claiming, a multiple of every page and block. */
#define PIECE_MIN  16384
#define PIECES_MAX 256

#define ALL_FLAGS \
	(MOMENT_DECOUPLED | MOMENT_BIAS_CORRECTION | MOMENT_MAXIMIZE | MOMENT_AMSGRAD | \
	 MOMENT_NESTEROV | MOMENT_TAKE_P)

static const uint32_t kind_flags[KERNEL_KINDS] = {
	[MOMENT_ADAM] = ALL_FLAGS & ~MOMENT_NESTEROV,
	[MOMENT_LION] = MOMENT_DECOUPLED | MOMENT_MAXIMIZE | MOMENT_TAKE_P,
	[MOMENT_ADAGRAD] = MOMENT_DECOUPLED | MOMENT_MAXIMIZE | MOMENT_TAKE_P,
	[MOMENT_SGD] = MOMENT_DECOUPLED | MOMENT_MAXIMIZE | MOMENT_NESTEROV | MOMENT_TAKE_P,
};

struct pass {
	struct kernel_args args;
	kernel_fn *kernel;
	size_t numel, piece_len;
	struct kernel_sums sums[PIECES_MAX];
};

static bool is_beta(double x)
{
	return x >= 0 && x < 1;
}

/* Below fp32's normal numbers it would count as 0 in the kernels' mode, and 0 / 0 gives NaN. */
static bool is_eps(double x)
{
	return x == 0 || (x >= FLT_MIN && isfinite(x));
}

static const char *optim_refusal(const struct moment_optim *o)
{
	double scale = o->grad_scale;
	bool betas = o->kind == MOMENT_ADAM || o->kind == MOMENT_LION;

	if (o->kind >= KERNEL_KINDS)
		return "there is no such kind of optimizer";
	if (o->flags & ~kind_flags[o->kind])
		return "it has a flag that this kind of optimizer does not have";
	if (!isfinite(o->lr))
		return "lr is not finite";
	if (betas && !(is_beta(o->beta1) && is_beta(o->beta2)))
		return "a beta is not from 0 to below 1";
	if (o->kind == MOMENT_SGD && !(o->beta1 >= 0 && isfinite(o->beta1)))
		return "the momentum (beta1) is not finite or below 0";
	if (!isfinite(o->dampening))
		return "dampening is not finite";
	if (!is_eps(o->eps))
		return "eps is neither 0 nor from 2^-126 (1.18e-38, fp32's smallest normal number) on";
	if (!(o->weight_decay >= 0 && isfinite(o->weight_decay)))
		return "weight_decay is not finite or below 0";
	if (scale != 0 && !(scale >= FLT_MIN && scale <= FLT_MAX))
		return "grad_scale is not among fp32's normal numbers above 0";
	return NULL;
}

static const char *slice_refusal(const struct moment_optim *o, const struct moment_slice *s)
{
	bool needs_m = o->kind == MOMENT_ADAM || o->kind == MOMENT_LION ||
		       (o->kind == MOMENT_SGD && o->beta1 != 0);
	bool needs_v = o->kind == MOMENT_ADAM || o->kind == MOMENT_ADAGRAD;

	if (s->p_dtype > MOMENT_F16 || s->g_dtype > MOMENT_F16)
		return "weights and gradient have to be float32, bfloat16 or float16";
	if (s->master && s->p_dtype == MOMENT_F32)
		return "float32 weights have no master";
	if (s->numel == 0)
		return NULL;
	if (!s->p || !s->g)
		return "no weights or no gradient";
	if (needs_m && !s->m)
		return "it needs exp_avg";
	if (needs_v && !s->v)
		return "it needs exp_avg_sq";
	if ((o->flags & MOMENT_AMSGRAD) && !s->vmax)
		return "amsgrad needs max_exp_avg_sq";
	return NULL;
}

const char *kernel_refusal(const struct moment_optim *o, uint64_t step,
			   const struct moment_slice *slice, const struct moment_extras *extras)
{
	const char *why;

	if (!o || !slice)
		return "no optimizer or no slice";
	if (step == 0)
		return "steps are counted from 1";
	if (extras && extras->only > MOMENT_EXTRAS_GRADIENT)
		return "extras.only has an unknown value";
	why = optim_refusal(o);
	return why ? why : slice_refusal(o, slice);
}

/*
 * base^n by squaring, not pow(): that gives other last bits on other machines, even in two CPUs'
 * versions of one libm. The error grows with n to some n * 2^-53 of a value that shrinks with it:
 * far below fp32 always.
 */
static double power(double base, uint64_t n)
{
	double result = 1.0;

	for (; n > 0; n >>= 1) {
		if (n & 1)
			result *= base;
		base *= base;
	}
	return result;
}

/* Runs in the kernels' floating-point mode, so that the caller's rounding mode cannot show. */
__attribute__((noinline)) static void prepare(struct kernel_args *a, const struct moment_optim *o,
					      uint64_t step, const struct moment_slice *s)
{
	struct kernel_consts *c = &a->c;
	bool correct = o->kind == MOMENT_ADAM && (o->flags & MOMENT_BIAS_CORRECTION);
	double bc1 = correct ? 1.0 - power(o->beta1, step) : 1.0;
	double bc2 = correct ? 1.0 - power(o->beta2, step) : 1.0;
	double keep = o->kind == MOMENT_SGD ? o->dampening : o->beta1;
	float scale = o->grad_scale != 0 ? (float)o->grad_scale : 1.0f;
	float direction = o->flags & MOMENT_MAXIMIZE ? -1.0f : 1.0f;
	int exponent;

	*c = (struct kernel_consts){
		.g_mul = direction,
		.g_div = direction * scale,
		.decay_l2 = (float)o->weight_decay,
		.keep_p = (float)(1.0 - o->lr * o->weight_decay),
		.beta1 = (float)o->beta1,
		.one_beta1 = (float)(1.0 - keep),
		.beta2 = (float)o->beta2,
		.one_beta2 = (float)(1.0 - o->beta2),
		.step = (float)(o->lr / bc1),
		.bc2_sqrt = (float)sqrt(bc2),
		.eps = (float)o->eps,
	};
	/* Dividing by a power of two is multiplying by its inverse, where that is no subnormal. */
	if (frexpf(scale, &exponent) == 0.5f && exponent <= 127)
		c->g_mul = direction * ldexpf(1.0f, 1 - exponent);
	else
		c->flags |= KERNEL_SCALE | KERNEL_DIVIDE;
	if (c->g_mul != 1.0f)
		c->flags |= KERNEL_SCALE;
	if (o->weight_decay != 0)
		c->flags |= o->flags & MOMENT_DECOUPLED ? KERNEL_DECOUPLED : KERNEL_L2;
	if (o->flags & MOMENT_AMSGRAD)
		c->flags |= KERNEL_AMSGRAD;
	if (o->flags & MOMENT_NESTEROV)
		c->flags |= KERNEL_NESTEROV;
	if (step == 1)
		c->flags |= KERNEL_FIRST;
	if ((o->flags & MOMENT_TAKE_P) && s->master)
		c->flags |= KERNEL_TAKE_P;

	a->p = s->p;
	a->g = s->g;
	a->m = o->kind == MOMENT_SGD && o->beta1 == 0 ? NULL : s->m;
	a->v = s->v;
	a->master = s->master;
	a->vmax = c->flags & KERNEL_AMSGRAD ? s->vmax : NULL;
	a->p_dtype = s->p_dtype;
	a->g_dtype = s->g_dtype;
}

static void run_piece(void *arg, unsigned int piece)
{
	struct pass *pass = arg;
	size_t begin = piece * pass->piece_len, left = pass->numel - begin;
	size_t len = left < pass->piece_len ? left : pass->piece_len;
	struct fpmode mode;

	fpmode_enter(&mode);
	pass->kernel(&pass->args, begin, begin + len, &pass->sums[piece]);
	fpmode_leave(&mode);
}

static void add_extras(struct moment_extras *e, const struct pass *pass, unsigned int pieces)
{
	struct kernel_sums all = {0};
	double *to[KERNEL_SUMS] = {
		[SUM_G] = &e->sum_g, [SUM_M] = &e->sum_m,	    [SUM_V] = &e->sum_v,
		[SUM_P] = &e->sum_p, [SUM_UPDATE] = &e->sum_update,
	};

	for (unsigned int i = 0; i < pieces; i++) {
		all.found |= pass->sums[i].found;
		for (int s = 0; s < KERNEL_SUMS; s++)
			all.sum[s] += pass->sums[i].sum[s];
	}
	e->found |= all.found;
	for (int s = 0; s < KERNEL_SUMS; s++) {
		double sum = *to[s] + all.sum[s];

		*to[s] = isnan(sum) ? (double)NAN : sum;
	}
}

int kernel_update(const struct kernel_level *level, const struct moment_optim *optim, uint64_t step,
		  const struct moment_slice *slice, int nthreads, struct moment_extras *extras)
{
	struct pass pass;
	struct fpmode mode;
	unsigned int pieces;

	if (nthreads < 0 || kernel_refusal(optim, step, slice, extras))
		return -EINVAL;
	if (slice->numel == 0)
		return 0;

	pass.numel = slice->numel;
	pass.piece_len = PIECE_MIN;
	if ((slice->numel - 1) / PIECE_MIN >= PIECES_MAX)
		pass.piece_len = ((slice->numel - 1) / PIECES_MAX / PIECE_MIN + 1) * PIECE_MIN;
	pieces = (unsigned int)((slice->numel - 1) / pass.piece_len + 1);
	pass.kernel = level->kernels[optim->kind];
	pass.args.want = !extras				  ? WANT_NONE
			 : extras->only == MOMENT_EXTRAS_GRADIENT ? WANT_GRADIENT
								  : WANT_ALL;

	fpmode_enter(&mode);
	prepare(&pass.args, optim, step, slice);
	fpmode_leave(&mode);

	if (slice->numel < MOMENT_PARALLEL_MIN)
		nthreads = 1;
	else if (nthreads == 0)
		nthreads = team_default_size();
	team_run(nthreads, run_piece, &pass, pieces);
	if (extras)
		add_extras(extras, &pass, pieces);
	return 0;
}

static const struct kernel_level *level_in_use(void)
{
	static _Atomic(const struct kernel_level *) chosen;
	const struct kernel_level *level = atomic_load_explicit(&chosen, memory_order_relaxed);

	/* Two threads may both come here; both choose the same. */
	if (!level) {
		level = kernel_level_choose(getenv("MOMENT_SIMD"));
		atomic_store_explicit(&chosen, level, memory_order_relaxed);
	}
	return level;
}

int moment_update(const struct moment_optim *optim, uint64_t step, const struct moment_slice *slice,
		  int nthreads, struct moment_extras *extras)
{
	return kernel_update(level_in_use(), optim, step, slice, nthreads, extras);
}

const char *moment_simd_level(void)
{
	return level_in_use()->name;
}
