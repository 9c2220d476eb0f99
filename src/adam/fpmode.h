/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The floating-point mode that kernels run in, one for each thread: round to nearest, no traps,
 * subnormal inputs and results are zero. enter() gives what leave() needs to put the caller's mode
 * back, its exception flags included.
 *
 * The compiler does not know that arithmetic depends on the mode, so nothing inlined may compute
 * between the two: callers only make calls through function pointers or to noinline functions
 * there.
 */
#ifndef ADAM_FPMODE_H
#define ADAM_FPMODE_H

#if defined(__SSE2__)

#include <xmmintrin.h>

struct fpmode {
	unsigned int mxcsr;
};

static inline void fpmode_enter(struct fpmode *saved)
{
	saved->mxcsr = _mm_getcsr();
	/* 0x1f80: all exceptions masked, round to nearest; 0x8000 FTZ; 0x0040 DAZ. */
	_mm_setcsr(0x1f80 | 0x8000 | 0x0040);
}

static inline void fpmode_leave(const struct fpmode *saved)
{
	_mm_setcsr(saved->mxcsr);
}

#elif defined(__aarch64__)

#include <stdint.h>

struct fpmode {
	uint64_t fpcr, fpsr;
};

static inline void fpmode_enter(struct fpmode *saved)
{
	uint64_t fz = UINT64_C(1) << 24;

	__asm__ volatile("mrs %0, fpcr" : "=r"(saved->fpcr));
	__asm__ volatile("mrs %0, fpsr" : "=r"(saved->fpsr));
	__asm__ volatile("msr fpcr, %0" : : "r"(fz));
}

static inline void fpmode_leave(const struct fpmode *saved)
{
	__asm__ volatile("msr fpcr, %0" : : "r"(saved->fpcr));
	__asm__ volatile("msr fpsr, %0" : : "r"(saved->fpsr));
}

#else

#include <fenv.h>

struct fpmode {
	fenv_t env;
};

static inline void fpmode_enter(struct fpmode *saved)
{
	feholdexcept(&saved->env);
	fesetround(FE_TONEAREST);
}

static inline void fpmode_leave(const struct fpmode *saved)
{
	fesetenv(&saved->env);
}

#endif

#endif
