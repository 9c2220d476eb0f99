/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernels in plain C: the reference for all others, and what other CPUs run. Conversions are
 * done on the bits, for no machine's conversion instructions or floating-point mode to matter.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "adam/kernel.h"

#if FLT_EVAL_METHOD != 0
#error "fp32 arithmetic must be done in fp32 (on 32-bit x86: -msse2 -mfpmath=sse)"
#endif

#define VW 1

typedef float vf;
typedef bool vf_mask;
typedef uint16_t vh;

struct vd {
	double sum;
};

static inline uint32_t bits_of(float x)
{
	uint32_t u;

	memcpy(&u, &x, 4);
	return u;
}

static inline float of_bits(uint32_t u)
{
	float x;

	memcpy(&x, &u, 4);
	return x;
}

static inline vh v_load16(const void *from)
{
	vh h;

	memcpy(&h, from, 2);
	return h;
}

static inline void v_store16(void *to, vh x)
{
	memcpy(to, &x, 2);
}

static inline vf v_load(const void *from)
{
	float x;

	memcpy(&x, from, 4);
	return x;
}

static inline void v_store(void *to, vf x)
{
	memcpy(to, &x, 4);
}

static inline vf v_from_bf16(vh x)
{
	return of_bits((uint32_t)x << 16);
}

/* Adds just under half of the last place that stays, and the half itself where that place is odd.
 */
static inline vh v_to_bf16(vf x)
{
	uint32_t u = bits_of(x);

	return (vh)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static inline vf v_from_f16(vh x)
{
	uint32_t h = x, sign = (h & 0x8000) << 16, magnitude = h & 0x7fff;
	int shift;

	if (magnitude >= 0x7c00) /* infinity, NaN */
		return of_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
	if (magnitude >= 0x400) /* the exponent's bias is 15 there and 127 here */
		return of_bits(sign | ((magnitude << 13) + ((127 - 15) << 23)));
	if (magnitude == 0)
		return of_bits(sign);
	shift = __builtin_clz(magnitude) - 21; /* a subnormal: move its first 1 to bit 10 */
	return of_bits(sign | ((uint32_t)(127 - 15 + 1 - shift) << 23) |
		       (magnitude << shift & 0x3ff) << 13);
}

static inline vh v_to_f16(vf x)
{
	uint32_t u = bits_of(x), magnitude = u & 0x7fffffff, h, rest, half;

	if (magnitude > 0x7f800000) {
		h = 0x7e00;
	} else if (magnitude >= 0x477ff000) { /* from 65520 up it rounds to infinity */
		h = 0x7c00;
	} else if (magnitude >=
		   0x38800000) { /* from 2^-14: normal; a carry out of the fraction is right */
		h = (magnitude - ((127 - 15) << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
	} else if (magnitude >= 0x33000000) { /* from 2^-25: a subnormal, or rounds to one */
		unsigned int drop = 126 - (magnitude >> 23);

		magnitude = (magnitude & 0x7fffff) | 0x800000;
		h = magnitude >> drop;
		rest = magnitude & ((1u << drop) - 1);
		half = 1u << (drop - 1);
		h += rest > half || (rest == half && (h & 1));
	} else {
		h = 0;
	}
	return (vh)(h | (u >> 16 & 0x8000));
}

static inline vf_mask v_differ16(vh x, vh y)
{
	return x != y;
}

static inline vf v_set1(float x)
{
	return x;
}

static inline vf v_add(vf x, vf y)
{
	return x + y;
}

static inline vf v_sub(vf x, vf y)
{
	return x - y;
}

static inline vf v_mul(vf x, vf y)
{
	return x * y;
}

static inline vf v_div(vf x, vf y)
{
	return x / y;
}

static inline vf v_sqrt(vf x)
{
	return sqrtf(x);
}

static inline vf v_fma(vf x, vf y, vf z)
{
	return fmaf(x, y, z);
}

static inline vf_mask v_gt(vf x, vf y)
{
	return x > y;
}

static inline vf_mask v_unordered(vf x, vf y)
{
	return x != x || y != y;
}

static inline vf_mask v_or(vf_mask x, vf_mask y)
{
	return x || y;
}

static inline vf v_select(vf_mask mask, vf yes, vf no)
{
	return mask ? yes : no;
}

static inline vf v_keep(vf x, size_t n)
{
	return n ? x : 0.0f;
}

static inline bool v_any(vf_mask mask)
{
	return mask;
}

static inline struct vd vd_zero(void)
{
	return (struct vd){0.0};
}

static inline struct vd vd_add(struct vd sum, vf x)
{
	return (struct vd){sum.sum + (double)x};
}

static inline void vd_store(double *to, struct vd sum)
{
	*to = sum.sum;
}

#include "adam/body.h"

kernel_fn *const kernels_scalar[KERNEL_KINDS] = KERNEL_TABLE;
