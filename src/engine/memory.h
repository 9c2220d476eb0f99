/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.h - how much memory this process may have: the machine's, and the limits of its control
 * groups (v1 and v2).
 */
#ifndef ENGINE_MEMORY_H
#define ENGINE_MEMORY_H

#include "engine/types.h"

struct memory {
	uint64_t total;	    /* the machine's, or the smallest limit of the control groups */
	uint64_t available; /* what could be had now without swapping or the OOM killer */
};

/*
 * `root` is put before /proc and /sys ("" but for tests). A limit that cannot be read does not
 * count; without /proc/meminfo both are UINT64_MAX.
 */
void memory_read(const char *root, struct memory *m);

/* memory_read("").available */
uint64_t memory_available(void);

#endif
