/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_memory.c - the limits of memory and CPUs, read from a made-up /proc and /sys.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/cpus.h"
#include "engine/memory.h"

#define GIB (1ull << 30)

static char root[] = "/tmp/test_memory.XXXXXX";

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
	(void)st;
	(void)type;
	(void)ftw;
	return remove(path);
}

static int setup(void **state)
{
	(void)state;
	strcpy(root + strlen(root) - 6, "XXXXXX");
	return mkdtemp(root) ? 0 : -1;
}

static int teardown(void **state)
{
	(void)state;
	return nftw(root, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

static void put(const char *path, const char *text)
{
	char full[512];
	FILE *f;

	snprintf(full, sizeof(full), "%s%s", root, path);
	for (char *p = full + strlen(root) + 1; (p = strchr(p, '/')); p++) {
		*p = '\0';
		mkdir(full, 0700);
		*p = '/';
	}
	f = fopen(full, "w");
	assert_non_null(f);
	assert_true(fputs(text, f) >= 0);
	assert_int_equal(fclose(f), 0);
}

static void put_meminfo(void)
{
	put("/proc/meminfo", "MemTotal:       16777216 kB\n"
			     "MemFree:         1048576 kB\n"
			     "MemAvailable:    8388608 kB\n");
}

static void expect(uint64_t total, uint64_t available)
{
	struct memory m;

	memory_read(root, &m);
	assert_int_equal(m.total, total);
	assert_int_equal(m.available, available);
}

static void nothing_known_is_no_limit(void **state)
{
	(void)state;
	expect(UINT64_MAX, UINT64_MAX);
}

static void machine_without_groups(void **state)
{
	(void)state;
	put_meminfo();
	expect(16 * GIB, 8 * GIB);
}

static void v2_group_limits(void **state)
{
	(void)state;
	put_meminfo();
	put("/proc/self/cgroup", "0::/user.slice/job\n");
	put("/sys/fs/cgroup/user.slice/job/memory.max", "4294967296\n");
	put("/sys/fs/cgroup/user.slice/job/memory.current", "3221225472\n");
	expect(4 * GIB, GIB);
	/* Page cache goes when memory is wanted. */
	put("/sys/fs/cgroup/user.slice/job/memory.stat",
	    "anon 1\nfile 1610612736\ninactive_file 1073741824\nactive_file 536870912\n");
	expect(4 * GIB, 2 * GIB + GIB / 2);
}

static void v2_ancestor_may_be_tighter(void **state)
{
	(void)state;
	put_meminfo();
	put("/proc/self/cgroup", "0::/user.slice/job\n");
	put("/sys/fs/cgroup/user.slice/job/memory.max", "max\n");
	put("/sys/fs/cgroup/user.slice/memory.max", "2147483648\n");
	put("/sys/fs/cgroup/user.slice/memory.current", "0\n");
	expect(2 * GIB, 2 * GIB);
}

static void v1_group_limits(void **state)
{
	(void)state;
	put_meminfo();
	put("/proc/self/cgroup", "5:cpu,cpuacct:/elsewhere\n4:memory:/job\n0::/\n");
	put("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "3221225472\n");
	put("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "2147483648\n");
	put("/sys/fs/cgroup/memory/job/memory.stat",
	    "inactive_file 0\ntotal_inactive_file 536870912\ntotal_active_file 0\n");
	/* v1 says "no limit" with a huge number. */
	put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
	put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1\n");
	expect(3 * GIB, GIB + GIB / 2);
}

static void container_sees_its_group_as_the_root(void **state)
{
	(void)state;
	put_meminfo();
	/* The path is the host's; what is mounted is the container's own group. */
	put("/proc/self/cgroup", "4:memory:/docker/0123456789abcdef\n");
	put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n");
	put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "268435456\n");
	expect(GIB, GIB - GIB / 4);
}

static void usage_over_the_limit_leaves_nothing(void **state)
{
	(void)state;
	put_meminfo();
	put("/proc/self/cgroup", "0::/\n");
	put("/sys/fs/cgroup/memory.max", "1073741824\n");
	put("/sys/fs/cgroup/memory.current", "1073745920\n");
	expect(GIB, 0);
}

static void this_machine_has_some(void **state)
{
	struct memory m;

	(void)state;
	memory_read("", &m);
	assert_true(m.total >= m.available);
	assert_true(m.available > 0 && m.total != UINT64_MAX);
}

/* A quota counts only where it is below what the machine has. */
static void expect_cpus(unsigned int quota)
{
	unsigned int machine = cpus_read("/nonexistent");

	assert_true(machine >= 1);
	assert_int_equal(cpus_read(root), quota < machine ? quota : machine);
}

static void cpu_quota_of_v2_is_rounded_up(void **state)
{
	(void)state;
	put("/proc/self/cgroup", "0::/job\n");
	put("/sys/fs/cgroup/job/cpu.max", "max 100000\n");
	expect_cpus(~0u);
	put("/sys/fs/cgroup/job/cpu.max", "50000 100000\n");
	expect_cpus(1);
	put("/sys/fs/cgroup/job/cpu.max", "150000 100000\n");
	expect_cpus(2);
}

static void cpu_quota_of_v1_or_of_a_group_above(void **state)
{
	(void)state;
	put("/proc/self/cgroup", "5:cpu,cpuacct:/a/b\n4:memory:/job\n0::/\n");
	put("/sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us", "-1\n");
	put("/sys/fs/cgroup/cpu/a/b/cpu.cfs_period_us", "100000\n");
	expect_cpus(~0u);
	put("/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "100000\n");
	put("/sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n");
	expect_cpus(1);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(nothing_known_is_no_limit),
		T(machine_without_groups),
		T(v2_group_limits),
		T(v2_ancestor_may_be_tighter),
		T(v1_group_limits),
		T(container_sees_its_group_as_the_root),
		T(usage_over_the_limit_leaves_nothing),
		T(cpu_quota_of_v2_is_rounded_up),
		T(cpu_quota_of_v1_or_of_a_group_above),
		cmocka_unit_test(this_machine_has_some),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
