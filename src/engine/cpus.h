/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpus.h - how many CPUs this process may use: its affinity, and the quotas of its control groups
 * (v1 and v2), rounded up.
 */
#ifndef ENGINE_CPUS_H
#define ENGINE_CPUS_H

/* At least 1. `root` is put before /proc and /sys ("" but for tests). */
unsigned int cpus_read(const char *root);

/* cpus_read("") */
unsigned int cpus_available(void);

#endif
