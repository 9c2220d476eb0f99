/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cgroup.c - reads /proc/self/cgroup and walks up from there.
 */
#include "engine/cgroup.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define PATH_LEN 4096

bool cgroup_number(const char *dir, const char *name, uint64_t *out)
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

/* Whether a comma-separated list has this word. */
static bool has_word(const char *list, const char *word)
{
	size_t len = strlen(word);

	for (const char *p = list; (p = strstr(p, word)); p += len) {
		if ((p == list || p[-1] == ',') && (!p[len] || p[len] == ','))
			return true;
	}
	return false;
}

void cgroup_walk(const char *root, const char *controller,
		 void (*fn)(void *arg, const char *dir, int version), void *arg)
{
	char path[PATH_LEN], line[PATH_LEN], dir[PATH_LEN];
	FILE *f;

	snprintf(path, sizeof(path), "%s/proc/self/cgroup", root);
	f = fopen(path, "re");
	if (!f)
		return;
	/* number:controllers:path; no controllers is version 2 */
	while (fgets(line, sizeof(line), f)) {
		char *controllers = strchr(line, ':'), *group;
		int version;
		size_t base;

		line[strcspn(line, "\n")] = '\0';
		group = controllers ? strchr(controllers + 1, ':') : NULL;
		if (!group)
			continue;
		controllers++;
		*group++ = '\0';
		version = *controllers ? 1 : 2;
		if (version == 1 && !has_word(controllers, controller))
			continue;
		base = (size_t)snprintf(dir, sizeof(dir), "%s/sys/fs/cgroup%s%s", root,
					version == 1 ? "/" : "", version == 1 ? controller : "");
		if (base + strlen(group) >= sizeof(dir))
			continue;
		if (strcmp(group, "/"))
			strcpy(dir + base, group);
		for (;;) {
			fn(arg, dir, version);
			if (strlen(dir) <= base)
				break;
			*strrchr(dir, '/') = '\0';
		}
	}
	fclose(f);
}
