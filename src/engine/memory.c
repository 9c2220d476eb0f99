/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.c - reads /proc/meminfo and the control groups. Stateless; any thread.
 *
 * A process is in one group per hierarchy, and each ancestor of that group may have a tighter
 * limit, so all of them are asked. In a container the path in /proc/self/cgroup may be that of the
 * host and not exist here; the root of the hierarchy is the container's own group then, and it is
 * asked in any case. Page cache counts as used in a group but goes when memory is wanted, so it is
 * taken as available.
 */
#include "engine/memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define PATH_LEN 4096

/* The names of one version of control groups. */
struct cgroup_files {
	const char *mount; /* of the hierarchy with the memory controller */
	const char *limit, *usage;
	const char *cache[2]; /* fields of memory.stat */
};

static const struct cgroup_files v1 = {
	"/sys/fs/cgroup/memory",
	"memory.limit_in_bytes",
	"memory.usage_in_bytes",
	{"total_inactive_file", "total_active_file"},
};

static const struct cgroup_files v2 = {
	"/sys/fs/cgroup",
	"memory.max",
	"memory.current",
	{"inactive_file", "active_file"},
};

/* The number at the start of a file; false if there is none ("max" is none). */
static bool read_number(const char *dir, const char *name, uint64_t *out)
{
	char path[PATH_LEN + 64];
	bool ok;
	FILE *f;

	snprintf(path, sizeof(path), "%s/%s", dir, name);
	f = fopen(path, "re");
	if (!f)
		return false;
	ok = fscanf(f, "%" SCNu64, out) == 1;
	fclose(f);
	return ok;
}

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

static void group_apply(const char *dir, const struct cgroup_files *v, struct memory *m)
{
	char stat[PATH_LEN + 64];
	uint64_t limit, usage, cache = 0;

	if (!read_number(dir, v->limit, &limit))
		return;
	m->total = min_u64(m->total, limit);
	if (!read_number(dir, v->usage, &usage))
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

/* The group and all above it, up to and with the root of the hierarchy. */
static void groups_apply(const char *root, const struct cgroup_files *v, const char *group,
			 struct memory *m)
{
	char dir[PATH_LEN];
	size_t base = strlen(root) + strlen(v->mount);

	if (snprintf(dir, sizeof(dir), "%s%s%s", root, v->mount, group) >= (int)sizeof(dir))
		return;
	for (;;) {
		group_apply(dir, v, m);
		if (strlen(dir) <= base)
			return;
		*strrchr(dir, '/') = '\0';
	}
}

/* Whether a comma-separated list has the word `memory`. */
static bool has_memory(const char *controllers)
{
	static const char word[] = "memory";
	const char *p = controllers;

	while ((p = strstr(p, word))) {
		const char *end = p + sizeof(word) - 1;

		if ((p == controllers || p[-1] == ',') && (!*end || *end == ','))
			return true;
		p = end;
	}
	return false;
}

void memory_read(const char *root, struct memory *m)
{
	char path[PATH_LEN], line[PATH_LEN];
	uint64_t kib;
	FILE *f;

	*m = (struct memory){UINT64_MAX, UINT64_MAX};
	snprintf(path, sizeof(path), "%s/proc/meminfo", root);
	if (read_field(path, "MemTotal", &kib))
		m->total = kib << 10;
	m->available = m->total;
	if (read_field(path, "MemAvailable", &kib))
		m->available = kib << 10;

	snprintf(path, sizeof(path), "%s/proc/self/cgroup", root);
	f = fopen(path, "re");
	if (!f)
		return;
	/* number:controllers:path; no controllers is version 2 */
	while (fgets(line, sizeof(line), f)) {
		char *controllers = strchr(line, ':'), *group;

		line[strcspn(line, "\n")] = '\0';
		group = controllers ? strchr(controllers + 1, ':') : NULL;
		if (!group)
			continue;
		controllers++;
		*group++ = '\0';
		if (!strcmp(group, "/"))
			group = "";
		if (!*controllers)
			groups_apply(root, &v2, group, m);
		else if (has_memory(controllers))
			groups_apply(root, &v1, group, m);
	}
	fclose(f);
}

uint64_t memory_available(void)
{
	struct memory m;

	memory_read("", &m);
	return m.available;
}
