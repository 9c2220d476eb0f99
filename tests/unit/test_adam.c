/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the kernels compute: next to the formulas in double; the extras; subnormals and the caller's
 * floating-point mode; what is refused. That the levels agree to the bit is test_adam_bits.c's
 * matter.
 */
#include <errno.h>
#include <fenv.h>
#include <math.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef __x86_64__
#include <xmmintrin.h>
#endif

#include "test_adam.h"

#define N 1000

static const struct moment_optim adamw = {
	.kind = MOMENT_ADAM,
	.flags = MOMENT_DECOUPLED | MOMENT_BIAS_CORRECTION,
	.lr = 1e-3,
	.beta1 = 0.9,
	.beta2 = 0.999,
	.eps = 1e-8,
	.weight_decay = 0.01,
};

/* One element in double. */
struct element {
	double p, m, v, vmax, update;
};

static void reference(struct element *e, const struct moment_optim *o, uint64_t step, double g)
{
	double bc1 = 1, bc2 = 1;

	if (o->grad_scale != 0)
		g /= o->grad_scale;
	if (o->flags & MOMENT_MAXIMIZE)
		g = -g;
	if (!(o->flags & MOMENT_DECOUPLED))
		g += o->weight_decay * e->p;
	switch (o->kind) {
	case MOMENT_ADAM:
		if (o->flags & MOMENT_BIAS_CORRECTION) {
			bc1 = 1 - pow(o->beta1, (double)step);
			bc2 = 1 - pow(o->beta2, (double)step);
		}
		e->m = o->beta1 * e->m + (1 - o->beta1) * g;
		e->v = o->beta2 * e->v + (1 - o->beta2) * g * g;
		e->vmax = e->v > e->vmax ? e->v : e->vmax;
		e->update = o->lr / bc1 * e->m /
			    (sqrt(o->flags & MOMENT_AMSGRAD ? e->vmax : e->v) / sqrt(bc2) + o->eps);
		break;
	case MOMENT_LION:
		e->update = o->beta1 * e->m + (1 - o->beta1) * g;
		e->update = o->lr * ((e->update > 0) - (e->update < 0));
		e->m = o->beta2 * e->m + (1 - o->beta2) * g;
		break;
	case MOMENT_ADAGRAD:
		e->v += g * g;
		e->update = o->lr * g / (sqrt(e->v) + o->eps);
		break;
	default:
		e->m = step == 1 || o->beta1 == 0 ? g : o->beta1 * e->m + (1 - o->dampening) * g;
		e->update = o->lr * (o->flags & MOMENT_NESTEROV ? g + o->beta1 * e->m : e->m);
	}
	if (o->flags & MOMENT_DECOUPLED)
		e->p *= (float)(1.0 - o->lr * o->weight_decay);
	e->p -= e->update;
}

static double relative(double got, double want, double floor)
{
	return fabs(got - want) / (fabs(want) + floor);
}

/* Fresh state, three steps with new gradients, fp32. */
static void check_reference(const struct moment_optim *o, uint64_t seed)
{
	static struct element e[N];
	struct moment_extras extras;
	struct param p;

	param_init(&p, N, MOMENT_F32, MOMENT_F32, false, &seed);
	param_fill(&p, FRIENDLY, true, &seed);
	for (size_t i = 0; i < N; i++)
		e[i] = (struct element){.p = (double)get_float(&p, ARRAY_P, i)};
	/* SGD must not look at m in its first step; the others start from zeros. */
	memset(p.at[ARRAY_M], o->kind == MOMENT_SGD ? 0xff : 0, 4 * N);
	memset(p.at[ARRAY_V], 0, 4 * N);
	memset(p.at[ARRAY_VMAX], 0, 4 * N);
	for (uint64_t step = 1; step <= 3; step++) {
		struct moment_slice s = param_slice(&p, 0, N);
		double sum[5] = {0};

		memset(&extras, 0, sizeof(extras));
		for (size_t i = 0; i < N; i++)
			put_element(&p, ARRAY_G, i, friendly(ARRAY_G, random64(&seed)));
		CHECK(moment_update(o, step, &s, 1, &extras) == 0, "kind %u", o->kind);
		for (size_t i = 0; i < N; i++) {
			double g = (double)get_float(&p, ARRAY_G, i) /
				   (o->grad_scale != 0 ? o->grad_scale : 1);
			double got_p = (double)get_float(&p, ARRAY_P, i);

			reference(&e[i], o, step, (double)get_float(&p, ARRAY_G, i));
			CHECK(fabs(got_p - e[i].p) < 1e-6,
			      "kind %u flags %x step %d element %zu: p %.9g, %.9g expected",
			      o->kind, o->flags, (int)step, i, got_p, e[i].p);
			sum[0] += g * g;
			sum[3] += got_p * got_p;
			sum[4] += e[i].update * e[i].update;
			if (o->kind != MOMENT_ADAGRAD &&
			    !(o->kind == MOMENT_SGD && o->beta1 == 0)) {
				double m = (double)get_float(&p, ARRAY_M, i);

				CHECK(relative(m, e[i].m, 1e-3) < 1e-5,
				      "kind %u flags %x step %d element %zu: m %.9g, %.9g expected",
				      o->kind, o->flags, (int)step, i, m, e[i].m);
				sum[1] += m * m;
			}
			if (o->kind == MOMENT_ADAM || o->kind == MOMENT_ADAGRAD) {
				double v = (double)get_float(&p, ARRAY_V, i);

				CHECK(relative(v, e[i].v, 1e-6) < 1e-5,
				      "kind %u flags %x step %d element %zu: v %.9g, %.9g expected",
				      o->kind, o->flags, (int)step, i, v, e[i].v);
				sum[2] += v * v;
			}
			if (o->flags & MOMENT_AMSGRAD)
				CHECK(relative((double)get_float(&p, ARRAY_VMAX, i), e[i].vmax,
					       1e-6) < 1e-5,
				      "vmax, element %zu", i);
		}
		CHECK(extras.found == 0, "found %u", extras.found);
		/* g was divided in fp32; the update is compared with the reference's; the others
		 * were read back. */
		CHECK(relative(extras.sum_g, sum[0], 0) < 2e-6, "sum_g %g %g", extras.sum_g,
		      sum[0]);
		CHECK(relative(extras.sum_m, sum[1], 1e-300) < 2e-6, "sum_m %g %g", extras.sum_m,
		      sum[1]);
		CHECK(relative(extras.sum_v, sum[2], 1e-300) < 2e-6, "sum_v %g %g", extras.sum_v,
		      sum[2]);
		CHECK(relative(extras.sum_p, sum[3], 0) < 2e-6, "sum_p %g %g", extras.sum_p,
		      sum[3]);
		CHECK(relative(extras.sum_update, sum[4], 0) < 1e-4, "sum_update %g %g",
		      extras.sum_update, sum[4]);
	}
	param_fini(&p);
}

static void test_reference(void)
{
	static const uint32_t choices[] = {
		0,
		MOMENT_DECOUPLED,
		MOMENT_BIAS_CORRECTION,
		MOMENT_DECOUPLED | MOMENT_BIAS_CORRECTION,
		MOMENT_MAXIMIZE,
		MOMENT_AMSGRAD | MOMENT_BIAS_CORRECTION,
		MOMENT_NESTEROV,
		MOMENT_MAXIMIZE | MOMENT_DECOUPLED,
	};
	int checked = 0;

	for (uint32_t kind = 0; kind < KERNEL_KINDS; kind++)
		for (size_t c = 0; c < sizeof(choices) / sizeof(choices[0]); c++)
			for (int variant = 0; variant < 8; variant++) {
				struct moment_optim o = adamw;
				struct moment_slice none = {0};

				o.kind = kind;
				o.flags = choices[c];
				o.lr = 0.01;
				o.weight_decay = variant & 1 ? 0.1 : 0;
				o.grad_scale = variant & 2 ? (variant & 4 ? 1000 : 256) : 0;
				o.beta1 = kind == MOMENT_SGD && variant & 4 ? 0 : 0.9;
				o.dampening = variant & 1 ? 0.25 : 0;
				if (moment_update(&o, 1, &none, 1, NULL) != 0)
					continue; /* a flag that this kind does not have */
				check_reference(&o, (uint64_t)checked++);
			}
	CHECK(checked >= 100, "only %d combinations are accepted", checked);
}

/* Bias correction at step numbers far off: against pow(). */
static void test_large_steps(void)
{
	static const uint64_t steps[] = {1, 2, 3, 1000, 123457, UINT64_C(1) << 40, UINT64_MAX};

	for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++)
		for (int b = 0; b < 2; b++) {
			struct moment_optim o = adamw;
			float p = 1, g = 1, m = 0, v = 0;
			struct moment_slice s = {.p = &p, .g = &g, .m = &m, .v = &v, .numel = 1};
			struct element e = {.p = 1};

			o.beta2 = b ? 0.9999999 : 0.999;
			reference(&e, &o, steps[i], 1);
			CHECK(moment_update(&o, steps[i], &s, 1, NULL) == 0, "step");
			CHECK(fabs((double)p - e.p) < 1e-5 * (1 + fabs(e.update)),
			      "step %llu: %.9g %.9g", (unsigned long long)steps[i], (double)p, e.p);
		}
}

static void expect_invalid(const char *what, const struct moment_optim *o, uint64_t step,
			   const struct moment_slice *s, int nthreads)
{
	CHECK(moment_update(o, step, s, nthreads, NULL) == -EINVAL, "%s was not refused", what);
}

static void test_refusals(void)
{
	float p = 1, g = 1, m = 0, v = 0, vmax = 0, master = 1;
	const struct moment_slice good = {.p = &p, .g = &g, .m = &m, .v = &v, .numel = 1};
	struct moment_slice s;
	struct moment_optim o;

#define REFUSED_OPTIM(change) \
	do { \
		o = adamw; \
		s = good; \
		change; \
		expect_invalid(#change, &o, 1, &s, 1); \
	} while (0)

	REFUSED_OPTIM(o.kind = KERNEL_KINDS);
	REFUSED_OPTIM(o.flags = 1u << 31);
	REFUSED_OPTIM(o.flags |= MOMENT_NESTEROV);
	REFUSED_OPTIM((o.kind = MOMENT_LION, o.flags = MOMENT_AMSGRAD));
	REFUSED_OPTIM(o.lr = (double)NAN);
	REFUSED_OPTIM(o.lr = (double)INFINITY);
	REFUSED_OPTIM(o.beta1 = 1);
	REFUSED_OPTIM(o.beta1 = -0.1);
	REFUSED_OPTIM(o.beta2 = 1);
	REFUSED_OPTIM(o.beta2 = (double)NAN);
	REFUSED_OPTIM(o.eps = -1);
	REFUSED_OPTIM(o.eps = 1e-40); /* subnormal: it would count as 0 */
	REFUSED_OPTIM(o.weight_decay = -1);
	REFUSED_OPTIM(o.grad_scale = -1);
	REFUSED_OPTIM(o.grad_scale = 1e-40);
	REFUSED_OPTIM(o.grad_scale = 1e39);
	REFUSED_OPTIM((o.kind = MOMENT_SGD, o.flags = 0, o.beta1 = -1));
	REFUSED_OPTIM((o.kind = MOMENT_SGD, o.flags = 0, s.m = NULL));
	REFUSED_OPTIM((o.kind = MOMENT_ADAGRAD, o.flags = 0, s.v = NULL));
	REFUSED_OPTIM(s.p = NULL);
	REFUSED_OPTIM(s.g = NULL);
	REFUSED_OPTIM(s.m = NULL);
	REFUSED_OPTIM(s.v = NULL);
	REFUSED_OPTIM(o.flags |= MOMENT_AMSGRAD);
	REFUSED_OPTIM(s.p_dtype = MOMENT_F64);
	REFUSED_OPTIM(s.g_dtype = MOMENT_F64);
	REFUSED_OPTIM(s.master = &master);
	expect_invalid("step 0", &adamw, 0, &good, 1);
	expect_invalid("nthreads -1", &adamw, 1, &good, -1);
	expect_invalid("no optimizer", NULL, 1, &good, 1);
	expect_invalid("no slice", &adamw, 1, NULL, 1);
	CHECK(p == 1 && g == 1 && m == 0 && v == 0 && vmax == 0 && master == 1,
	      "a refused call wrote");

	s = (struct moment_slice){0};
	CHECK(moment_update(&adamw, 1, &s, 0, NULL) == 0, "nothing to do is no error");
	o = (struct moment_optim){.kind = MOMENT_SGD, .lr = 0.5};
	s = (struct moment_slice){.p = &p, .g = &g, .numel = 1};
	CHECK(moment_update(&o, 1, &s, 0, NULL) == 0 && p == 0.5f, "plain SGD needs no state: %g",
	      (double)p);
}

/* False where subnormals are not flushed whatever is asked (valgrind). */
static bool cpu_flushes(void)
{
#if defined(__SSE__)
	unsigned int csr = _mm_getcsr();
	volatile float tiny = 1.5e-38f, half;

	_mm_setcsr(csr | 0x8040);
	half = tiny * 0.5f;
	_mm_setcsr(csr);
	return half == 0;
#else
	return true;
#endif
}

/* Gradient 1 once, then zeros: m and v fall below 2^-126, become 0, and the weights stay put. */
static void test_decayed_moments_become_zero(void)
{
	float p[40], g[40], m[40], v[40], before;
	struct moment_slice s = {.p = p, .g = g, .m = m, .v = v, .numel = 40};
	struct moment_optim o = adamw;
	uint64_t step, m_zero = 0;

	if (!cpu_flushes()) {
		puts("not looked at: subnormals are not flushed here");
		return;
	}
	o.weight_decay = 0;
	o.beta2 = 0.99;
	for (int i = 0; i < 40; i++)
		p[i] = g[i] = 1, m[i] = v[i] = 0;
	for (step = 1; step <= 9000; step++) {
		CHECK(moment_update(&o, step, &s, 1, NULL) == 0, "step");
		for (int i = 0; i < 40; i++) {
			g[i] = 0;
			CHECK(fpclassify(m[i]) != FP_SUBNORMAL && fpclassify(v[i]) != FP_SUBNORMAL,
			      "step %d: m %g, v %g", (int)step, (double)m[i], (double)v[i]);
		}
		if (m[0] == 0 && !m_zero)
			m_zero = step;
	}
	CHECK(m_zero > 790 && m_zero < 820, "m was 0 after %d steps", (int)m_zero);
	CHECK(v[39] == 0, "v is %g", (double)v[39]);

	/* Subnormals that are handed in count as zero and come back as zero with their sign. */
	for (int i = 0; i < 40; i++) {
		p[i] = i % 2 ? -1e-40f : 1e-40f;
		m[i] = p[i];
		v[i] = 1e-40f;
		g[i] = 1e-40f;
	}
	before = p[0];
	CHECK(moment_update(&o, 1, &s, 1, NULL) == 0 && before != 0, "step");
	for (int i = 0; i < 40; i++)
		CHECK(p[i] == 0 && m[i] == 0 && v[i] == 0, "element %d: %g %g %g", i, (double)p[i],
		      (double)m[i], (double)v[i]);
}

/* Whatever mode the caller is in: the same bits, and the mode is as it was. */
static void test_callers_mode(void)
{
	static const int rounding[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
	uint64_t seed = 7;
	struct param start, ref, p;
	struct moment_slice s;

	if (!cpu_flushes())
		return; /* the mode is not kept either */
	param_init(&start, 100000, MOMENT_BF16, MOMENT_F16, true, &seed);
	param_fill(&start, HOSTILE, true, &seed);
	param_copy(&ref, &start, &seed);
	s = param_slice(&ref, 0, 100000);
	CHECK(moment_update(&adamw, 3, &s, 2, NULL) == 0, "update");
	for (int r = 0; r < 4; r++) {
		param_copy(&p, &start, &seed);
		s = param_slice(&p, 0, 100000);
		CHECK(fesetround(rounding[r]) == 0, "fesetround");
		feclearexcept(FE_ALL_EXCEPT);
#ifdef __x86_64__
		unsigned int mode = _mm_getcsr() | (r % 2 ? 0x8040 : 0), after;

		if (r == 2)
			mode &= ~0x0280u; /* division by zero and invalid would trap */
		_mm_setcsr(mode);
		CHECK(moment_update(&adamw, 3, &s, 2, NULL) == 0, "update");
		after = _mm_getcsr();
		_mm_setcsr(0x1f80);
		CHECK(after == mode, "MXCSR was %x, is %x", mode, after);
#else
		CHECK(moment_update(&adamw, 3, &s, 2, NULL) == 0, "update");
		CHECK(fegetround() == rounding[r], "rounding mode changed");
		fesetround(FE_TONEAREST);
#endif
		param_check_same(&ref, &p, "caller's rounding mode");
		param_fini(&p);
	}
	param_fini(&ref);
	param_fini(&start);
}

static void test_found(void)
{
	static const float bad[] = {INFINITY, -INFINITY, NAN, 1};
	static const uint32_t found[] = {MOMENT_FOUND_INF, MOMENT_FOUND_INF, MOMENT_FOUND_NAN, 0};
	static float p[100000], g[100000], m[100000], v[100000];
	struct moment_slice s = {.p = p, .g = g, .m = m, .v = v};

	for (size_t numel = 1; numel <= 100000; numel = numel * 3 + 1)
		for (size_t at = 0; at < numel; at += numel / 5 + 1)
			for (int b = 0; b < 4; b++) {
				struct moment_extras e = {0};

				s.numel = numel;
				memset(g, 0, 4 * numel);
				memset(p, 0, 4 * numel);
				g[at] = bad[b];
				CHECK(moment_update(&adamw, 1, &s, 2, &e) == 0, "update");
				CHECK(e.found == found[b], "%g at %zu of %zu: found %u",
				      (double)bad[b], at, numel, e.found);
				CHECK(b == 3   ? e.sum_g == 1
				      : b == 2 ? isnan(e.sum_g)
					       : isinf(e.sum_g),
				      "sum_g %g", e.sum_g);
				CHECK(b == 3 || bits_of_float(p[at]) == 0x7fc00000, "p %x",
				      bits_of_float(p[at]));
				m[at] = v[at] = 0;
			}
}

/*
 * Whatever NaN comes in, by any array, one and the same is written to all that it reaches; and what
 * SGD's first step takes over from the gradient is no subnormal.
 */
static void test_what_is_written(void)
{
	static const uint32_t bad[] = {0x7fc00123, 0xffc00001, 0x7f800001, 0x7f800000, 0x00000123};
	static const struct {
		uint32_t kind;
		bool m, v;
	} has[] = {{MOMENT_ADAM, true, true},
		   {MOMENT_LION, true, false},
		   {MOMENT_ADAGRAD, false, true},
		   {MOMENT_SGD, true, false}};
	enum { LEN = 37 };
	enum { P, G, M, V };

	for (const struct kernel_level *l = kernel_levels; l->name; l++)
		for (int n = 0; l->usable() && n < 4 * 4 * 5; n++) {
			int k = n / 20, in = n / 5 % 4, b = n % 5;
			float a[4][LEN];
			float *at[] = {[P] = a[0], [G] = a[1], [M] = a[2], [V] = a[3]};
			struct moment_optim o = adamw;
			struct moment_slice s = {.p = at[P],
						 .g = at[G],
						 .m = has[k].m ? at[M] : NULL,
						 .v = has[k].v ? at[V] : NULL,
						 .numel = LEN};
			const float *out[] = {s.p, s.m, s.v};

			if (b == 4 && (in != G || !cpu_flushes()))
				continue;
			o.kind = has[k].kind;
			o.flags = o.kind == MOMENT_ADAM ? adamw.flags : 0;
			o.weight_decay = 0;
			if (o.kind == MOMENT_LION) /* 0 * inf: a NaN that p does not see */
				o.beta2 = 0;
			for (int i = 0; i < LEN; i++) {
				for (int j = P; j <= V; j++)
					at[j][i] = j == G && b == 4 ? 0 : 1;
				if (i % 11 == 3)
					memcpy(&at[in][i], &bad[b], 4);
			}
			CHECK(kernel_update(l, &o, 1, &s, 1, NULL) == 0, "kind %u", o.kind);
			for (int i = 0; i < 3 * LEN; i++) {
				const float *x = out[i / LEN] ? out[i / LEN] + i % LEN : at[G];

				CHECK(x == at[G] || !isnan(*x) || bits_of_float(*x) == 0x7fc00000,
				      "%s, kind %u: %x", l->name, o.kind, bits_of_float(*x));
				CHECK(x == at[G] || fpclassify(*x) != FP_SUBNORMAL,
				      "%s, kind %u: subnormal", l->name, o.kind);
			}
		}
}

/* Only the gradient's: the same bits as when all is asked for, and nothing else is touched. */
static void test_extras_of_the_gradient_alone(void)
{
	static float p[2][70001], g[70001], m[2][70001], v[2][70001];

	for (int numel = 1; numel <= 70001; numel = numel * 7 + 1) {
		struct moment_extras e[2] = {{.only = MOMENT_EXTRAS_GRADIENT}, {0}};
		struct moment_extras bad = {.only = 7};

		for (int i = 0; i < numel; i++)
			g[i] = (float)(i % 97) - (i == numel / 2 ? INFINITY : 40);
		e[0].sum_m = e[0].sum_v = e[0].sum_p = e[0].sum_update = -3;
		for (int k = 0; k < 2; k++) {
			struct moment_slice s = {
				.p = p[k], .g = g, .m = m[k], .v = v[k], .numel = (size_t)numel};

			CHECK(moment_update(&adamw, 1, &s, 1, &bad) == -EINVAL,
			      "only = 7 is accepted");
			CHECK(moment_update(&adamw, 1, &s, 2, &e[k]) == 0, "update");
		}
		CHECK(e[0].found == MOMENT_FOUND_INF && e[1].found == MOMENT_FOUND_INF,
		      "found %u %u", e[0].found, e[1].found);
		CHECK(!memcmp(&e[0].sum_g, &e[1].sum_g, sizeof(double)), "sum_g %g %g", e[0].sum_g,
		      e[1].sum_g);
		CHECK(e[0].sum_m == -3 && e[0].sum_v == -3 && e[0].sum_p == -3 &&
			      e[0].sum_update == -3,
		      "a sum that was not asked for has moved");
		CHECK(!memcmp(p[0], p[1], sizeof(p[0])) && !memcmp(m[0], m[1], sizeof(m[0])) &&
			      !memcmp(v[0], v[1], sizeof(v[0])),
		      "the update differs");
	}
}

/* The sums of g, m and v have the range of double; large finite gradients are not "found". */
static void test_sums_of_large_values(void)
{
	static const float size[] = {1e-12f, 1e-6f, 1e6f, 1e12f, 1e18f, 1e25f};
	static float p[777], g[777], m[777], v[777];
	struct moment_slice s = {.p = p, .g = g, .m = m, .v = v, .numel = 777};

	for (size_t k = 0; k < sizeof(size) / sizeof(size[0]); k++) {
		struct moment_extras e = {0};
		double sum_g = 0, sum_m = 0, sum_v = 0;

		for (int i = 0; i < 777; i++) {
			g[i] = i % 100 == 99 ? size[k] : 0;
			m[i] = v[i] = p[i] = 0;
		}
		CHECK(moment_update(&adamw, 1, &s, 1, &e) == 0, "update");
		for (int i = 0; i < 777; i++) {
			sum_g += (double)g[i] * (double)g[i];
			sum_m += (double)m[i] * (double)m[i];
			sum_v += (double)v[i] * (double)v[i];
		}
		CHECK(e.found == 0, "%g: found %u", (double)size[k], e.found);
		CHECK(relative(e.sum_g, sum_g, 0) < 2e-6, "%g: sum_g %g, %g expected",
		      (double)size[k], e.sum_g, sum_g);
		CHECK(relative(e.sum_m, sum_m, 0) < 2e-6, "%g: sum_m %g, %g expected",
		      (double)size[k], e.sum_m, sum_m);
		CHECK(isinf(sum_v) ? isinf(e.sum_v) : relative(e.sum_v, sum_v, 1e-45) < 2e-6,
		      "%g: sum_v %g, %g expected", (double)size[k], e.sum_v, sum_v);
	}
}

/* Many callers at once, with helpers and without, and a fork among them. */
static void *caller(void *arg)
{
	uint64_t seed = 99;
	struct param start, ref, p;
	struct moment_slice s;
	int nthreads = 1 + (int)(intptr_t)arg % 3;

	param_init(&start, 200001, MOMENT_F32, MOMENT_BF16, false, &seed);
	param_fill(&start, FRIENDLY, true, &seed);
	param_copy(&ref, &start, &seed);
	s = param_slice(&ref, 0, start.numel);
	CHECK(moment_update(&adamw, 1, &s, 1, NULL) == 0, "update");
	for (int i = 0; i < 8; i++) {
		param_copy(&p, &start, &seed);
		s = param_slice(&p, 0, start.numel);
		CHECK(moment_update(&adamw, 1, &s, nthreads, NULL) == 0, "update");
		param_check_same(&ref, &p, "concurrent callers");
		param_fini(&p);
	}
	param_fini(&ref);
	param_fini(&start);
	return NULL;
}

static void test_concurrent_callers(void)
{
	pthread_t thread[6];

	for (intptr_t i = 0; i < 6; i++)
		CHECK(pthread_create(&thread[i], NULL, caller, (void *)i) == 0, "pthread_create");
	for (int i = 0; i < 6; i++)
		CHECK(pthread_join(thread[i], NULL) == 0, "pthread_join");
}

#if defined(__SANITIZE_THREAD__)
#define NO_THREADS_AFTER_FORK /* ThreadSanitizer ends a forked child that starts a thread */
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define NO_THREADS_AFTER_FORK
#endif
#endif

#ifndef NO_THREADS_AFTER_FORK
/* A child has none of its parent's threads, and gets its own: this must neither hang nor differ. */
static void test_fork(void)
{
	int status;
	pid_t pid;

	caller((void *)1);
	for (int i = 0; i < 5; i++) {
		pid = fork();
		CHECK(pid >= 0, "fork");
		if (pid == 0) {
			alarm(60);
			caller((void *)1);
			_exit(0);
		}
		caller((void *)2);
		CHECK(waitpid(pid, &status, 0) == pid, "waitpid");
		CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with %x",
		      status);
	}
}

#else
static void test_fork(void)
{
}
#endif

static uint16_t weight_of(const struct param *p, size_t i)
{
	uint16_t h;

	memcpy(&h, p->at[ARRAY_P] + 2 * i, 2);
	return h;
}

/*
 * With MOMENT_TAKE_P a 16-bit weight that was written since the last step becomes its master's truth,
 * whichever element it is, and all others keep every bit of theirs.
 */
static void test_weights_that_were_written_become_their_masters(void)
{
	static const uint16_t halves[] = {0x3f80, 0x3c00}; /* 1.0 */
	static const uint32_t dtypes[] = {MOMENT_BF16, MOMENT_F16};
	struct moment_optim o = adamw;
	uint64_t seed = 7, step = 0;
	struct param p;

	o.lr = 0;
	o.flags |= MOMENT_TAKE_P;
	for (const struct kernel_level *l = kernel_levels; l->name; l++)
		for (size_t t = 0; l->usable() && t < 2; t++)
			for (size_t numel = 1; numel < 70; numel++) {
				size_t at = random64(&seed) % numel;
				struct moment_slice s;

				param_init(&p, numel, dtypes[t], MOMENT_F32, true, &seed);
				param_fill(&p, FRIENDLY, true, &seed);
				memset(p.at[ARRAY_MASTER], 0, p.size[ARRAY_MASTER]); /* never filled */
				for (size_t i = 0; i < numel; i++)
					memcpy(p.at[ARRAY_P] + 2 * i, &halves[t], 2);
				s = param_slice(&p, 0, numel);
				CHECK(kernel_update(l, &o, ++step, &s, 1, NULL) == 0, "%s", l->name);
				for (size_t i = 0; i < numel; i++) {
					float exact = 1.0f + 0x1p-14f; /* rounds to 1.0 */

					CHECK(get_float(&p, ARRAY_MASTER, i) == 1.0f, "%s, %zu of %zu",
					      l->name, i, numel);
					memcpy(p.at[ARRAY_MASTER] + 4 * i, &exact, 4);
				}
				memset(p.at[ARRAY_P] + 2 * at, 0, 2);
				CHECK(kernel_update(l, &o, ++step, &s, 1, NULL) == 0, "%s", l->name);
				for (size_t i = 0; i < numel; i++)
					CHECK(get_float(&p, ARRAY_MASTER, i) ==
							      (i == at ? 0 : 1.0f + 0x1p-14f) &&
						      weight_of(&p, i) == (i == at ? 0 : halves[t]),
					      "%s, %zu of %zu, written: %zu", l->name, i, numel, at);
				param_check_guards(&p, l->name);
				param_fini(&p);
			}
}

static void test_levels(void)
{
	const struct kernel_level *best = kernel_level_choose(NULL), *l;

	CHECK(strcmp(kernel_level_choose("scalar")->name, "scalar") == 0, "scalar");
	CHECK(kernel_level_choose("no such level") == best, "an unknown name limits nothing");
	/* Naming a level never gives a higher one than named or than usable. */
	for (const struct kernel_level *limit = kernel_levels; limit->name; limit++) {
		l = kernel_level_choose(limit->name);
		CHECK(l >= limit && l >= best && l->usable(), "%s gave %s", limit->name, l->name);
	}
	CHECK(strcmp(moment_simd_level(), kernel_level_choose(getenv("MOMENT_SIMD"))->name) == 0,
	      "%s", moment_simd_level());
	printf("level in use: %s\n", moment_simd_level());
}

int main(int argc, char **argv)
{
	test_levels();
	test_reference();
	test_large_steps();
	test_refusals();
	test_decayed_moments_become_zero();
	test_callers_mode();
	test_found();
	test_weights_that_were_written_become_their_masters();
	test_what_is_written();
	test_extras_of_the_gradient_alone();
	test_sums_of_large_values();
	test_concurrent_callers();
	/* qemu-user 7.2 ends a forked child that starts a thread; test_adam_qemu.sh says "nofork".
	 */
	if (argc < 2 || strcmp(argv[1], "nofork") != 0)
		test_fork();
	return 0;
}
