/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arithmetic of all optimizers, once. Each instruction set's file defines a vector of VW floats
 * (1, 8 or 16) and the operations on it, then includes this, and gets its kernels.
 *
 * An instruction set gives
 *	vf, vf_mask	a vector of VW floats; what a comparison of two gives
 *	vh		a vector of VW 16-bit numbers, bf16 or fp16
 *	struct vd	VW sums in double, for the lanes of one vf
 *	v_load v_load16, v_store v_store16	from and to unaligned memory
 *	v_from_bf16 v_from_f16, v_to_bf16 v_to_f16	vh to vf, and rounded back
 *	v_set1 v_add v_sub v_mul v_div v_sqrt v_fma
 *	v_gt v_unordered v_or(mask, mask) v_select(mask, a, b)
 *	v_differ16(x, y)	the lanes whose bits differ
 *	v_keep(x, n)	x with all lanes from n on made +0
 *	v_any(mask)
 *	vd_zero vd_add(sum, x) vd_store
 * Each is one correctly rounded IEEE operation or moves bits, so any two sets agree; only NaN
 * payloads differ, and those are made one at the stores. Types and options are looked at once for
 * each block: the branches are the same all through a call and cost nothing next to a division, and
 * so there is one copy for all of them.
 */
#include <string.h>

#include "adam/kernel.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* The arrays of one slice; or of its last few elements, copied to whole blocks. */
struct arrays {
	unsigned char *p;
	const unsigned char *g;
	unsigned char *m, *v, *master, *vmax;
};

ALWAYS_INLINE vf from16(vh x, uint32_t dtype)
{
	return dtype == MOMENT_BF16 ? v_from_bf16(x) : v_from_f16(x);
}

ALWAYS_INLINE vh to16(vf x, uint32_t dtype)
{
	return dtype == MOMENT_BF16 ? v_to_bf16(x) : v_to_f16(x);
}

ALWAYS_INLINE vf load_as(const unsigned char *base, size_t i, uint32_t dtype)
{
	if (dtype == MOMENT_F32)
		return v_load(base + 4 * i);
	return from16(v_load16(base + 2 * i), dtype);
}

ALWAYS_INLINE void store_as(unsigned char *base, size_t i, uint32_t dtype, vf x)
{
	if (dtype == MOMENT_F32)
		v_store(base + 4 * i, x);
	else
		v_store16(base + 2 * i, to16(x, dtype));
}

/*
 * MOMENT_TAKE_P: the master, but where it does not round to the weight, the weight. + 0 so that a
 * subnormal is rounded as the zero that it counts as; and a NaN in the master counts as another,
 * whatever its payload would round to.
 */
ALWAYS_INLINE vf master_or_weight(vf master, const unsigned char *p, size_t i, uint32_t dtype)
{
	vh weight = v_load16(p + 2 * i);
	vf_mask other = v_differ16(to16(v_add(master, v_set1(0.0f)), dtype), weight);

	other = v_or(other, v_unordered(master, master));
	if (__builtin_expect(v_any(other), false))
		master = v_select(other, from16(weight, dtype), master);
	return master;
}

ALWAYS_INLINE vf one_nan(vf x)
{
	return v_select(v_unordered(x, x), v_set1(__builtin_nanf("")), x);
}

/* max that keeps a NaN on either side; + 0 so that a subnormal which was stored there becomes zero.
 */
ALWAYS_INLINE vf max_nan(vf old, vf x)
{
	vf max = v_select(v_gt(x, old), x, old);

	max = v_select(v_unordered(x, old), v_set1(__builtin_nanf("")), max);
	return v_add(max, v_set1(0.0f));
}

/* 1, -1, 0 or NaN; zeros of either sign give +0. */
ALWAYS_INLINE vf sign(vf x)
{
	vf zero = v_set1(0.0f), one = v_set1(1.0f);
	vf s = v_select(v_gt(x, zero), one, zero);

	s = v_select(v_gt(zero, x), v_set1(-1.0f), s);
	return v_select(v_unordered(x, x), x, s);
}

/* Division by the loss scale, and the sign of maximize. */
ALWAYS_INLINE vf scaled(const struct kernel_consts *c, vf g)
{
	return c->flags & KERNEL_DIVIDE ? v_div(g, v_set1(c->g_div)) : v_mul(g, v_set1(c->g_mul));
}

/*
 * Sums of squares. Conversion to double and tests on each vector are what they would cost. So
 * squares are added up in fp32 for a run of elements, and in double from run to run; and infinities
 * and NaN are noticed in a run's sum, upon which the run, still in the cache, is gone through
 * again.
 */
#define SUM_RUN (128 * KERNEL_BLOCK)

/* v is a square itself: this keeps its own square within fp32 for gradients of 1e-12 to 1e6. */
#define V_SCALE 0x1p40f

struct sums {
	vf run[KERNEL_SUMS][KERNEL_BLOCK / VW];
	struct vd total[KERNEL_SUMS][KERNEL_BLOCK / VW];
	double scanned[KERNEL_SUMS];
	uint32_t found;
};

ALWAYS_INLINE void sums_init(struct sums *sums)
{
	for (int s = 0; s < KERNEL_SUMS; s++) {
		for (size_t k = 0; k < KERNEL_BLOCK / VW; k++) {
			sums->run[s][k] = v_set1(0.0f);
			sums->total[s][k] = vd_zero();
		}
		sums->scanned[s] = 0.0;
	}
	sums->found = 0;
}

/* Adds the squares of x, except those of its lanes from element n on; its first is element `from`.
 */
ALWAYS_INLINE void add_square(vf *sum, float scale, vf x, size_t from, size_t n)
{
	if (n < from + VW)
		x = v_keep(x, n > from ? n - from : 0);
	*sum = v_fma(scale == 1.0f ? x : v_mul(x, v_set1(scale)), x, *sum);
}

/* The exact sum of [begin, end) of an array, and what it has of infinities and NaN. */
static __attribute__((noinline)) double scan(const struct kernel_consts *c,
					     const unsigned char *base, uint32_t dtype,
					     bool gradient, size_t begin, size_t end,
					     uint32_t *found)
{
	double sum = 0.0;
	float x[VW];

	for (size_t i = begin; i < end; i += VW) {
		vf from = load_as(base, i, dtype);

		v_store(x, gradient ? scaled(c, from) : from);
		for (size_t k = 0; k < VW; k++) {
			sum += (double)x[k] * (double)x[k];
			if (x[k] != x[k])
				*found |= MOMENT_FOUND_NAN;
			else if (x[k] - x[k] != 0.0f)
				*found |= MOMENT_FOUND_INF;
		}
	}
	return sum;
}

/* Ends the run [begin, end), or a padded block: padding is zero in every array. */
ALWAYS_INLINE void sums_end_run(struct sums *sums, const struct kernel_consts *c,
				const struct kernel_args *a, const struct arrays *q, size_t begin,
				size_t end, enum kernel_want want)
{
	/* p and the update are not in memory as fp32 always: they stay as they are. */
	const unsigned char *again[KERNEL_SUMS] = {[SUM_G] = q->g, [SUM_M] = q->m, [SUM_V] = q->v};

	for (int s = 0; s < (want == WANT_ALL ? KERNEL_SUMS : SUM_G + 1); s++) {
		vf *run = sums->run[s], zero = v_sub(run[0], run[0]);

		if (KERNEL_BLOCK / VW > 1)
			for (size_t k = 1; k < KERNEL_BLOCK / VW; k++)
				zero = v_add(zero, v_sub(run[k], run[k]));
		if (again[s] && v_any(v_unordered(zero, zero))) {
			uint32_t found = 0;

			sums->scanned[s] += scan(c, again[s], s == SUM_G ? a->g_dtype : MOMENT_F32,
						 s == SUM_G, begin, end, &found);
			sums->found |= s == SUM_G ? found : 0;
		} else {
			for (size_t k = 0; k < KERNEL_BLOCK / VW; k++)
				sums->total[s][k] = vd_add(sums->total[s][k], run[k]);
		}
		for (size_t k = 0; k < KERNEL_BLOCK / VW; k++)
			run[k] = v_set1(0.0f);
	}
}

/* One block: n of its KERNEL_BLOCK elements are real, the others are padding that no sum may see.
 */
ALWAYS_INLINE void update_block(const struct kernel_consts *c, const struct kernel_args *a,
				const struct arrays *q, size_t at, size_t n, int kind,
				enum kernel_want want, struct sums *sums)
{
	const bool has_m =
		kind == MOMENT_ADAM || kind == MOMENT_LION || (kind == MOMENT_SGD && q->m);
	const bool has_v = kind == MOMENT_ADAM || kind == MOMENT_ADAGRAD;

#pragma GCC unroll 2
	for (size_t k = 0; k < KERNEL_BLOCK / VW; k++) {
		size_t from = k * VW, i = at + from;
		vf g = load_as(q->g, i, a->g_dtype);
		vf p = q->master ? v_load(q->master + 4 * i) : load_as(q->p, i, a->p_dtype);
		vf m = has_m ? v_load(q->m + 4 * i) : v_set1(0.0f);
		vf v = has_v ? v_load(q->v + 4 * i) : v_set1(0.0f);
		vf u;

		if (c->flags & KERNEL_TAKE_P)
			p = master_or_weight(p, q->p, i, a->p_dtype);
		/* SGD may store it: then as all arithmetic leaves it, without subnormals. */
		if (c->flags & KERNEL_SCALE || kind == MOMENT_SGD)
			g = scaled(c, g);
		if (want != WANT_NONE)
			add_square(&sums->run[SUM_G][k], 1.0f, g, from, n);
		if (c->flags & KERNEL_L2)
			g = v_fma(v_set1(c->decay_l2), p, g);

		if (kind == MOMENT_ADAM) {
			vf den;

			m = v_fma(v_set1(c->one_beta1), g, v_mul(v_set1(c->beta1), m));
			v = v_fma(v_mul(v_set1(c->one_beta2), g), g, v_mul(v_set1(c->beta2), v));
			den = v;
			if (c->flags & KERNEL_AMSGRAD) {
				den = max_nan(v_load(q->vmax + 4 * i), v);
				v_store(q->vmax + 4 * i, den);
			}
			den = v_add(v_div(v_sqrt(den), v_set1(c->bc2_sqrt)), v_set1(c->eps));
			u = v_div(v_mul(v_set1(c->step), m), den);
		} else if (kind == MOMENT_LION) {
			u = v_fma(v_set1(c->one_beta1), g, v_mul(v_set1(c->beta1), m));
			u = v_mul(v_set1(c->step), sign(u));
			m = v_fma(v_set1(c->one_beta2), g, v_mul(v_set1(c->beta2), m));
		} else if (kind == MOMENT_ADAGRAD) {
			v = v_fma(g, g, v);
			u = v_div(v_mul(v_set1(c->step), g), v_add(v_sqrt(v), v_set1(c->eps)));
		} else {
			if (c->flags & KERNEL_FIRST || !has_m)
				m = g;
			else
				m = v_fma(v_set1(c->one_beta1), g, v_mul(v_set1(c->beta1), m));
			u = c->flags & KERNEL_NESTEROV ? v_fma(v_set1(c->beta1), m, g) : m;
		}
		if (c->flags & KERNEL_DECOUPLED)
			p = v_mul(v_set1(c->keep_p), p);
		if (kind == MOMENT_SGD) {
			p = v_fma(v_set1(-c->step), u, p);
			u = v_mul(v_set1(c->step), u);
		} else {
			p = v_sub(p, u);
		}
		/* p is made of m and v, and has a NaN where they have one; but Lion's m. */
		if (kind == MOMENT_LION)
			m = one_nan(m);
		if (__builtin_expect(v_any(v_unordered(p, p)), false)) {
			p = one_nan(p);
			m = one_nan(m);
			v = one_nan(v);
		}

		if (has_m)
			v_store(q->m + 4 * i, m);
		if (has_v)
			v_store(q->v + 4 * i, v);
		if (q->master)
			v_store(q->master + 4 * i, p);
		store_as(q->p, i, a->p_dtype, p);
		if (want == WANT_ALL) {
			if (has_m)
				add_square(&sums->run[SUM_M][k], 1.0f, m, from, n);
			if (has_v)
				add_square(&sums->run[SUM_V][k], V_SCALE, v, from, n);
			add_square(&sums->run[SUM_P][k], 1.0f, p, from, n);
			add_square(&sums->run[SUM_UPDATE][k], 1.0f, u, from, n);
		}
	}
}

/* Copies the n < KERNEL_BLOCK elements at `at` into a block padded with zeros, or back. */
#define BOUNCE_IN(name, size) \
	do { \
		if (all->name) { \
			memset(name, 0, sizeof(name)); \
			memcpy(name, all->name + (size)*at, (size)*n); \
			q.name = name; \
		} \
	} while (0)
#define BOUNCE_OUT(name, size) \
	do { \
		if (all->name) \
			memcpy(all->name + (size)*at, name, (size)*n); \
	} while (0)

ALWAYS_INLINE void update_tail(const struct kernel_consts *c, const struct kernel_args *a,
			       const struct arrays *all, size_t at, size_t n, int kind,
			       enum kernel_want want, struct sums *sums)
{
	size_t p_size = a->p_dtype == MOMENT_F32 ? 4 : 2, g_size = a->g_dtype == MOMENT_F32 ? 4 : 2;
	unsigned char p[4 * KERNEL_BLOCK], g[4 * KERNEL_BLOCK], m[4 * KERNEL_BLOCK];
	unsigned char v[4 * KERNEL_BLOCK], master[4 * KERNEL_BLOCK], vmax[4 * KERNEL_BLOCK];
	struct arrays q = {0};

	BOUNCE_IN(p, p_size);
	BOUNCE_IN(g, g_size);
	BOUNCE_IN(m, 4);
	BOUNCE_IN(v, 4);
	BOUNCE_IN(master, 4);
	BOUNCE_IN(vmax, 4);
	update_block(c, a, &q, 0, n, kind, want, sums);
	if (want != WANT_NONE)
		sums_end_run(sums, c, a, &q, 0, KERNEL_BLOCK, want);
	BOUNCE_OUT(p, p_size);
	BOUNCE_OUT(m, 4);
	BOUNCE_OUT(v, 4);
	BOUNCE_OUT(master, 4);
	BOUNCE_OUT(vmax, 4);
}

/* One sum of the lanes, in an order that no level changes. */
static double sum_lanes(const struct vd sum[KERNEL_BLOCK / VW])
{
	double lane[KERNEL_BLOCK];

	for (size_t k = 0; k < KERNEL_BLOCK / VW; k++)
		vd_store(lane + k * VW, sum[k]);
	for (size_t width = KERNEL_BLOCK / 2; width > 0; width /= 2)
		for (size_t j = 0; j < width; j++)
			lane[j] += lane[j + width];
	return lane[0];
}

ALWAYS_INLINE void update(const struct kernel_args *a, size_t begin, size_t end,
			  struct kernel_sums *out, int kind, enum kernel_want want)
{
	/* Copies on the stack: a store to an array cannot change them, as far as the compiler is
	 * concerned. */
	const struct kernel_consts c = a->c;
	const struct arrays q = {
		.p = a->p,
		.g = a->g,
		.m = (unsigned char *)a->m,
		.v = (unsigned char *)a->v,
		.master = (unsigned char *)a->master,
		.vmax = (unsigned char *)a->vmax,
	};
	const size_t whole = begin + (end - begin) / KERNEL_BLOCK * KERNEL_BLOCK;
	struct sums sums;
	size_t i = begin;

	sums_init(&sums);
	while (i < whole) {
		size_t run = i, stop = whole - i < SUM_RUN ? whole : i + SUM_RUN;

		for (; i < stop; i += KERNEL_BLOCK)
			update_block(&c, a, &q, i, KERNEL_BLOCK, kind, want, &sums);
		if (want != WANT_NONE)
			sums_end_run(&sums, &c, a, &q, run, stop, want);
	}
	if (whole < end)
		update_tail(&c, a, &q, whole, end - whole, kind, want, &sums);
	if (want == WANT_NONE)
		return;
	for (int s = 0; s < KERNEL_SUMS; s++)
		out->sum[s] = sum_lanes(sums.total[s]);
	out->sum[SUM_V] /= (double)V_SCALE;
	for (int s = 0; s < KERNEL_SUMS; s++)
		out->sum[s] += sums.scanned[s];
	out->found = sums.found;
}

#define KERNEL(name, kind) \
	static void name(const struct kernel_args *a, size_t begin, size_t end, \
			 struct kernel_sums *sums) \
	{ \
		if (a->want == WANT_NONE) \
			update(a, begin, end, sums, kind, WANT_NONE); \
		else if (a->want == WANT_GRADIENT) \
			update(a, begin, end, sums, kind, WANT_GRADIENT); \
		else \
			update(a, begin, end, sums, kind, WANT_ALL); \
	}

KERNEL(update_adam, MOMENT_ADAM)
KERNEL(update_lion, MOMENT_LION)
KERNEL(update_adagrad, MOMENT_ADAGRAD)
KERNEL(update_sgd, MOMENT_SGD)

/* The file that includes this names its table. */
#define KERNEL_TABLE \
	{ \
		[MOMENT_ADAM] = update_adam, [MOMENT_LION] = update_lion, \
		[MOMENT_ADAGRAD] = update_adagrad, [MOMENT_SGD] = update_sgd, \
	}
