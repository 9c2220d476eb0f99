/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hash.h - XXH3-64 of a block, with the widest vectors that the CPU has (xxHash's own run-time
 * dispatch, where the library was built with it): on the test machine 25 to 30 GB/s a core instead
 * of 19. The same hash either way.
 */
#ifndef ENGINE_HASH_H
#define ENGINE_HASH_H

#include <xxhash.h>
#if defined(HAVE_XXH_X86DISPATCH_H) && defined(HAVE_XXH3_64BITS_DISPATCH)
#include <xxh_x86dispatch.h> /* makes XXH3_64bits() the dispatched one */
#endif

#include "engine/types.h"

static inline uint64_t hash_block(const void *p, size_t len)
{
	return XXH3_64bits(p, len);
}

#endif
