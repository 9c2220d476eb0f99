/* SPDX-License-Identifier: Apache-2.0 */
/*
 * types.h - the names shared by moment.h, kernels.h and protocol.h. The numbers are part of the
 * session protocol.
 */
#ifndef MOMENT_TYPES_H
#define MOMENT_TYPES_H

#include <stdint.h>

/* Element types of weights, gradients and state. The kernels compute on the first three; the
 * moments and master weights that they update are MOMENT_F32. */
enum moment_dtype {
	MOMENT_F32 = 0,
	MOMENT_BF16 = 1,
	MOMENT_F16 = 2,
	MOMENT_F64 = 3,
};

/* The arrays of one parameter. */
enum moment_role {
	MOMENT_ROLE_EXP_AVG = 0,
	MOMENT_ROLE_EXP_AVG_SQ = 1,
	MOMENT_ROLE_MASTER = 2,
	MOMENT_ROLE_MAX_EXP_AVG_SQ = 3,
	MOMENT_ROLES = 4,
};

/* In place of a step number: there is none. */
#define MOMENT_STEP_NONE UINT64_MAX
/* Where a step's label is asked for: one more than the last. */
#define MOMENT_STEP_NEXT (UINT64_MAX - 1)

#endif
