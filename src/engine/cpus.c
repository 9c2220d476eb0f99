/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpus.c - a quota of 150 ms in each 100 ms is one and a half CPUs: two threads can use it, a third
 * would only wait for its turn, and have the others wait for it at the end of each block.
 */
#include "engine/cpus.h"

#include <inttypes.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

#include "engine/cgroup.h"

static void quota_apply(void *arg, const char *dir, int version)
{
	uint64_t quota = 0, period = 0, cpus;
	unsigned int *n = arg;
	char path[4200];
	FILE *f;

	if (version == 1) {
		/* "-1" is no limit; as an unsigned number it is larger than any machine. */
		if (!cgroup_number(dir, "cpu.cfs_quota_us", &quota) ||
		    !cgroup_number(dir, "cpu.cfs_period_us", &period))
			return;
	} else {
		snprintf(path, sizeof(path), "%s/cpu.max", dir);
		f = fopen(path, "re");
		if (!f)
			return;
		if (fscanf(f, "%" SCNu64 " %" SCNu64, &quota, &period) != 2)
			quota = 0; /* "max" */
		fclose(f);
	}
	if (!quota || !period || quota > INT64_MAX)
		return;
	cpus = quota / period + (quota % period != 0);
	if (cpus < *n)
		*n = (unsigned int)cpus;
}

unsigned int cpus_read(const char *root)
{
	unsigned int n;
	cpu_set_t allowed;
	long online;

	if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) {
		n = (unsigned int)CPU_COUNT(&allowed);
	} else { /* more than a cpu_set_t holds */
		online = sysconf(_SC_NPROCESSORS_ONLN);
		n = online > 0 ? (unsigned int)online : 1;
	}
	cgroup_walk(root, "cpu", quota_apply, &n);
	return n ? n : 1;
}

unsigned int cpus_available(void)
{
	return cpus_read("");
}
