/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.c - reads /proc/meminfo and the control groups. Stateless; any thread.
 *
 * Page cache counts as used in a group but goes when memory is wanted, so it is taken as available.
 */
#include "engine/memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "engine/cgroup.h"

#define PATH_LEN 4096

/* The names of one version of control groups. */
struct cgroup_files {
	const char *limit, *usage;
	const char *cache[2]; /* fields of memory.stat */
};

static const struct cgroup_files v1 = {
	"memory.limit_in_bytes",
	"memory.usage_in_bytes",
	{"total_inactive_file", "total_active_file"},
};

static const struct cgroup_files v2 = {
	"memory.max",
	"memory.current",
	{"inactive_file", "active_file"},
};

/* The value after `name` in a file of "name value" lines; a colon after the name is fine. */
static bool read_field(const char *path, const char *name, uint64_t *out)
{
	char line[256], field[64];
	uint64_t value;
	bool found = false;
	FILE *f = fopen(path, "re");

	if (!f)
		return false;
	while (!found && fgets(line, sizeof(line), f)) {
		if (sscanf(line, "%63[^: ]%*[: ]%" SCNu64, field, &value) == 2 &&
		    !strcmp(field, name)) {
			*out = value;
			found = true;
		}
	}
	fclose(f);
	return found;
}

static void group_apply(void *arg, const char *dir, int version)
{
	const struct cgroup_files *v = version == 1 ? &v1 : &v2;
	struct memory *m = arg;
	char stat[PATH_LEN + 64];
	uint64_t limit, usage, cache = 0;

	if (!cgroup_number(dir, v->limit, &limit))
		return;
	m->total = min_u64(m->total, limit);
	if (!cgroup_number(dir, v->usage, &usage))
		return;
	snprintf(stat, sizeof(stat), "%s/memory.stat", dir);
	for (int i = 0; i < 2; i++) {
		uint64_t bytes;

		if (read_field(stat, v->cache[i], &bytes))
			cache += bytes;
	}
	usage -= min_u64(usage, cache);
	m->available = min_u64(m->available, limit - min_u64(limit, usage));
}

void memory_read(const char *root, struct memory *m)
{
	char path[PATH_LEN];
	uint64_t kib;

	*m = (struct memory){UINT64_MAX, UINT64_MAX};
	snprintf(path, sizeof(path), "%s/proc/meminfo", root);
	if (read_field(path, "MemTotal", &kib))
		m->total = kib << 10;
	m->available = m->total;
	if (read_field(path, "MemAvailable", &kib))
		m->available = kib << 10;

	cgroup_walk(root, "memory", group_apply, m);
}

uint64_t memory_available(void)
{
	struct memory m;

	memory_read("", &m);
	return m.available;
}
