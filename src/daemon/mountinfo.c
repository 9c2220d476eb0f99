/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mountinfo.c - reads /proc/self/mountinfo. Shared by the daemon and momentctl. No state; any
 * thread.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/mountinfo.h"

/* Copies one field, undoing the kernel's octal escapes (space, tab, newline, backslash). */
static void copy_field(char *to, size_t size, const char *from)
{
	size_t n = 0;

	while (*from && *from != ' ' && *from != '\n' && n + 1 < size) {
		if (from[0] == '\\' && from[1] >= '0' && from[1] <= '3' && from[2] >= '0' &&
		    from[2] <= '7' && from[3] >= '0' && from[3] <= '7') {
			to[n++] = (char)((from[1] - '0') << 6 | (from[2] - '0') << 3 |
					 (from[3] - '0'));
			from += 4;
		} else {
			to[n++] = *from++;
		}
	}
	to[n] = '\0';
}

static const char *next_field(const char *p)
{
	p += strcspn(p, " \n");
	return *p == ' ' ? p + 1 : p;
}

/* 36 35 98:0 /root /mnt rw,noatime shared:1 - fuse.momentfs /backing rw,... */
static bool parse_line(const char *line, struct mountinfo *m)
{
	const char *p = next_field(next_field(line));
	const char *dash = strstr(p, " - ");

	if (!dash)
		return false;
	copy_field(m->device, sizeof(m->device), p);
	p = next_field(next_field(p));
	copy_field(m->point, sizeof(m->point), p);
	p = dash + 3;
	copy_field(m->type, sizeof(m->type), p);
	copy_field(m->source, sizeof(m->source), next_field(p));
	return true;
}

bool mountinfo_each_in(const char *file, bool (*fn)(void *arg, const struct mountinfo *m),
		       void *arg)
{
	FILE *f = fopen(file, "re");
	struct mountinfo m;
	char *line = NULL;
	size_t size = 0;
	bool found = false;

	if (!f)
		return false;
	while (!found && getline(&line, &size, f) > 0)
		if (parse_line(line, &m))
			found = fn(arg, &m);
	free(line);
	fclose(f);
	return found;
}

bool mountinfo_each(bool (*fn)(void *arg, const struct mountinfo *m), void *arg)
{
	return mountinfo_each_in("/proc/self/mountinfo", fn, arg);
}

struct search {
	bool (*matches)(const struct mountinfo *m, const char *key);
	const char *key;
	struct mountinfo *out;
	bool found;
	bool longest; /* the longest mount point wins, else the latest mount */
};

static bool search_fn(void *arg, const struct mountinfo *m)
{
	struct search *s = arg;

	if (s->matches(m, s->key) &&
	    (!s->found || !s->longest || strlen(m->point) >= strlen(s->out->point))) {
		*s->out = *m;
		s->found = true;
	}
	return false;
}

static bool search(bool (*matches)(const struct mountinfo *, const char *), const char *key,
		   bool longest, struct mountinfo *out)
{
	struct search s = {.matches = matches, .key = key, .out = out, .longest = longest};

	mountinfo_each(search_fn, &s);
	return s.found;
}

static bool matches_point(const struct mountinfo *m, const char *path)
{
	return !strcmp(m->point, path);
}

static bool contains_path(const struct mountinfo *m, const char *path)
{
	size_t len = strlen(m->point);

	return !strncmp(m->point, path, len) &&
	       (path[len] == '\0' || path[len] == '/' || m->point[len - 1] == '/');
}

static bool matches_backing(const struct mountinfo *m, const char *backing)
{
	return !strcmp(m->type, MOMENTFS_TYPE) && !strcmp(m->source, backing);
}

static bool matches_device(const struct mountinfo *m, const char *device)
{
	return !strcmp(m->device, device);
}

bool mountinfo_at(const char *path, struct mountinfo *out)
{
	return search(matches_point, path, false, out);
}

bool mountinfo_containing(const char *path, struct mountinfo *out)
{
	return search(contains_path, path, true, out) && !strcmp(out->type, MOMENTFS_TYPE);
}

bool mountinfo_of_backing(const char *backing, struct mountinfo *out)
{
	return search(matches_backing, backing, false, out);
}

bool mountinfo_of_device(const char *device, struct mountinfo *out)
{
	return search(matches_device, device, false, out);
}
