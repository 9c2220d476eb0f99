/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels for AVX-512 with BF16: Cooper Lake, Sapphire Rapids, Zen 4 and later. */
#include "adam/vec_avx512.h"

#ifndef __AVX512BF16__
#error "compile with -mavx512bf16"
#endif

/*
 * Rounds to nearest even whatever MXCSR says, and takes subnormals for zero: what is stored is
 * never one. A NaN keeps its upper bits, which for the one that is stored gives 0x7fc0, as at the
 * other levels.
 */
static inline vh v_to_bf16(vf x)
{
	return (vh)_mm512_cvtneps_pbh(x);
}

#include "adam/body.h"

kernel_fn *const kernels_avx512_bf16[KERNEL_KINDS] = KERNEL_TABLE;
