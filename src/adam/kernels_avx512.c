/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels for AVX-512 without its bf16 instructions: Skylake-X to Ice Lake. */
#include "adam/vec_avx512.h"

/* As in the scalar kernels. */
static inline vh v_to_bf16(vf x)
{
	__m512i u = _mm512_castps_si512(x);
	__m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));

	u = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
	return _mm512_cvtepi32_epi16(_mm512_srli_epi32(u, 16));
}

#include "adam/body.h"

kernel_fn *const kernels_avx512[KERNEL_KINDS] = KERNEL_TABLE;
