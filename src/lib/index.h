/* SPDX-License-Identifier: Apache-2.0 */
/*
 * index.h - names to numbers: a hash table, so that finding a parameter costs the same however many
 * there are.
 */
#ifndef LIB_INDEX_H
#define LIB_INDEX_H

#include <stddef.h>
#include <stdint.h>

#define INDEX_NONE UINT32_MAX

struct index {
	struct index_entry {
		const char *name; /* the caller's, which outlives the index; NULL: free */
		uint32_t value;	  /* INDEX_NONE: taken out */
	} * entry;
	size_t n, cap;	 /* cap is 0 or a power of two */
	uint64_t probes; /* entries looked at, for tests */
};

void index_fini(struct index *x);

/* INDEX_NONE: there is no such name. */
uint32_t index_get(struct index *x, const char *name);

/* Sets or replaces; with INDEX_NONE takes out. 0 or -ENOMEM, which can be only if the name is new. */
int index_put(struct index *x, const char *name, uint32_t value);

#endif
