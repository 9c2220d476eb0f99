/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernels for AVX2, FMA and F16C: CPUs since 2013. Compiled with those flags; nothing here runs
 * before the dispatch has seen that the CPU has them.
 */
#include <immintrin.h>

#include "adam/kernel.h"

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "compile with -mavx2 -mfma -mf16c"
#endif

#define VW 8

typedef __m256 vf;
typedef __m256 vf_mask;
typedef __m128i vh;

/* The sums of lanes 0-3 and 4-7. */
struct vd {
	__m256d lo, hi;
};

static inline vf v_load(const void *from)
{
	return _mm256_loadu_ps(from);
}

static inline void v_store(void *to, vf x)
{
	_mm256_storeu_ps(to, x);
}

static inline vh v_load16(const void *from)
{
	return _mm_loadu_si128(from);
}

static inline void v_store16(void *to, vh x)
{
	_mm_storeu_si128(to, x);
}

static inline vf v_from_bf16(vh x)
{
	return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}

/* As in the scalar kernels. */
static inline vh v_to_bf16(vf x)
{
	__m256i u = _mm256_castps_si256(x);
	__m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));

	u = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
	u = _mm256_srli_epi32(u, 16);
	return _mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1));
}

static inline vf v_from_f16(vh x)
{
	return _mm256_cvtph_ps(x);
}

static inline vh v_to_f16(vf x)
{
	return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline vf_mask v_differ16(vh x, vh y)
{
	__m256i same = _mm256_cvtepi16_epi32(_mm_cmpeq_epi16(x, y));

	return _mm256_castsi256_ps(_mm256_xor_si256(same, _mm256_set1_epi32(-1)));
}

static inline vf v_set1(float x)
{
	return _mm256_set1_ps(x);
}

static inline vf v_add(vf x, vf y)
{
	return _mm256_add_ps(x, y);
}

static inline vf v_sub(vf x, vf y)
{
	return _mm256_sub_ps(x, y);
}

static inline vf v_mul(vf x, vf y)
{
	return _mm256_mul_ps(x, y);
}

static inline vf v_div(vf x, vf y)
{
	return _mm256_div_ps(x, y);
}

static inline vf v_sqrt(vf x)
{
	return _mm256_sqrt_ps(x);
}

static inline vf v_fma(vf x, vf y, vf z)
{
	return _mm256_fmadd_ps(x, y, z);
}

static inline vf_mask v_gt(vf x, vf y)
{
	return _mm256_cmp_ps(x, y, _CMP_GT_OQ);
}

static inline vf_mask v_unordered(vf x, vf y)
{
	return _mm256_cmp_ps(x, y, _CMP_UNORD_Q);
}

static inline vf_mask v_or(vf_mask x, vf_mask y)
{
	return _mm256_or_ps(x, y);
}

static inline vf v_select(vf_mask mask, vf yes, vf no)
{
	return _mm256_blendv_ps(no, yes, mask);
}

static inline vf v_keep(vf x, size_t n)
{
	__m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);

	return _mm256_and_ps(
		x, _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), lane)));
}

static inline bool v_any(vf_mask mask)
{
	return !_mm256_testz_ps(mask, mask);
}

static inline struct vd vd_zero(void)
{
	return (struct vd){_mm256_setzero_pd(), _mm256_setzero_pd()};
}

static inline struct vd vd_add(struct vd sum, vf x)
{
	__m256d lo = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
	__m256d hi = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));

	return (struct vd){_mm256_add_pd(sum.lo, lo), _mm256_add_pd(sum.hi, hi)};
}

static inline void vd_store(double *to, struct vd sum)
{
	_mm256_storeu_pd(to, sum.lo);
	_mm256_storeu_pd(to + 4, sum.hi);
}

#include "adam/body.h"

kernel_fn *const kernels_avx2[KERNEL_KINDS] = KERNEL_TABLE;
