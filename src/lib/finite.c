/* SPDX-License-Identifier: Apache-2.0 */
/*
 * finite.c - is every element finite? An exponent of all ones says no, in each of the types.
 *
 * Integers, in pieces of a fixed length, which any compiler turns into vector code; the answer is
 * looked at once a chunk, so a bad element early in a large gradient ends the search early.
 */
#include <errno.h>
#include <string.h>

#include "lib/error.h"
#include "moment/moment.h"

#define PIECE 64
#define CHUNK (1024 * PIECE)

#define SEARCH(name, type, mask) \
	static int name(const unsigned char *x, size_t n) \
	{ \
		type piece[PIECE], bad = 0; \
		size_t i, k; \
\
		for (i = 0; i + PIECE <= n; i += PIECE) { \
			memcpy(piece, x + i * sizeof(type), sizeof(piece)); \
			for (k = 0; k < PIECE; k++) \
				bad |= (type) - ((piece[k] & (mask)) == (mask)); \
			if (i % CHUNK == 0 && bad) \
				return 0; \
		} \
		for (; i < n; i++) { \
			memcpy(piece, x + i * sizeof(type), sizeof(type)); \
			bad |= (type) - ((piece[0] & (mask)) == (mask)); \
		} \
		return bad == 0; \
	}

SEARCH(finite_f64, uint64_t, 0x7ff0000000000000u)
SEARCH(finite_f32, uint32_t, 0x7f800000u)
SEARCH(finite_bf16, uint16_t, 0x7f80u)
SEARCH(finite_f16, uint16_t, 0x7c00u)

int moment_is_finite(const void *x, size_t numel, uint32_t dtype)
{
	switch (dtype) {
	case MOMENT_F64:
		return finite_f64(x, numel);
	case MOMENT_F32:
		return finite_f32(x, numel);
	case MOMENT_BF16:
		return finite_bf16(x, numel);
	case MOMENT_F16:
		return finite_f16(x, numel);
	default:
		return err_set(-EINVAL, "type %u is not known", dtype);
	}
}
