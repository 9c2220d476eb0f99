/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The vector operations for AVX-512 F, BW, DQ and VL, without rounding to bf16, which the two levels
 * that include this do differently.
 */
#include <immintrin.h>

#include "adam/kernel.h"

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || \
	!defined(__AVX512VL__)
#error "compile with -mavx512f -mavx512bw -mavx512dq -mavx512vl"
#endif

#define VW 16

typedef __m512 vf;
typedef __mmask16 vf_mask;
typedef __m256i vh;

/* The sums of lanes 0-7 and 8-15. */
struct vd {
	__m512d lo, hi;
};

static inline vf v_load(const void *from)
{
	return _mm512_loadu_ps(from);
}

static inline void v_store(void *to, vf x)
{
	_mm512_storeu_ps(to, x);
}

static inline vh v_load16(const void *from)
{
	return _mm256_loadu_si256(from);
}

static inline void v_store16(void *to, vh x)
{
	_mm256_storeu_si256(to, x);
}

static inline vf v_from_bf16(vh x)
{
	return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

static inline vf v_from_f16(vh x)
{
	return _mm512_cvtph_ps(x);
}

static inline vh v_to_f16(vf x)
{
	return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline vf_mask v_differ16(vh x, vh y)
{
	return _mm256_cmpneq_epi16_mask(x, y);
}

static inline vf v_set1(float x)
{
	return _mm512_set1_ps(x);
}

static inline vf v_add(vf x, vf y)
{
	return _mm512_add_ps(x, y);
}

static inline vf v_sub(vf x, vf y)
{
	return _mm512_sub_ps(x, y);
}

static inline vf v_mul(vf x, vf y)
{
	return _mm512_mul_ps(x, y);
}

static inline vf v_div(vf x, vf y)
{
	return _mm512_div_ps(x, y);
}

static inline vf v_sqrt(vf x)
{
	return _mm512_sqrt_ps(x);
}

static inline vf v_fma(vf x, vf y, vf z)
{
	return _mm512_fmadd_ps(x, y, z);
}

static inline vf_mask v_gt(vf x, vf y)
{
	return _mm512_cmp_ps_mask(x, y, _CMP_GT_OQ);
}

static inline vf_mask v_unordered(vf x, vf y)
{
	return _mm512_cmp_ps_mask(x, y, _CMP_UNORD_Q);
}

static inline vf_mask v_or(vf_mask x, vf_mask y)
{
	return (vf_mask)(x | y);
}

static inline vf v_select(vf_mask mask, vf yes, vf no)
{
	return _mm512_mask_mov_ps(no, mask, yes);
}

static inline vf v_keep(vf x, size_t n)
{
	return _mm512_maskz_mov_ps((__mmask16)((1u << n) - 1), x);
}

static inline bool v_any(vf_mask mask)
{
	return mask != 0;
}

static inline struct vd vd_zero(void)
{
	return (struct vd){_mm512_setzero_pd(), _mm512_setzero_pd()};
}

static inline struct vd vd_add(struct vd sum, vf x)
{
	__m512d lo = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
	__m512d hi = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));

	return (struct vd){_mm512_add_pd(sum.lo, lo), _mm512_add_pd(sum.hi, hi)};
}

static inline void vd_store(double *to, struct vd sum)
{
	_mm512_storeu_pd(to, sum.lo);
	_mm512_storeu_pd(to + 8, sum.hi);
}
