/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cgroup.h - the control groups (v1 and v2) that this process is in, for the limits that they set.
 * Stateless; any thread.
 */
#ifndef ENGINE_CGROUP_H
#define ENGINE_CGROUP_H

#include <stdbool.h>
#include <stdint.h>

/*
 * Calls fn() for the process's group of `controller` ("memory", "cpu") and for each group above it,
 * up to and with the root of the hierarchy: each may have a tighter limit. `dir` is the group's
 * folder, `version` 1 or 2. In a container the path in /proc/self/cgroup may be that of the host
 * and not exist here; the root of the hierarchy is the container's own group then, and it is asked
 * in any case. `root` is put before /proc and /sys ("" but for tests).
 */
void cgroup_walk(const char *root, const char *controller,
		 void (*fn)(void *arg, const char *dir, int version), void *arg);

/* The number at the start of a file; false if there is none ("max" is none). */
bool cgroup_number(const char *dir, const char *name, uint64_t *out);

#endif
