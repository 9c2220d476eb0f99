/* SPDX-License-Identifier: Apache-2.0 */
/*
 * momentctl_ls.c - momentctl ls: the files below a directory, what they mean and where their bytes
 * are.
 *
 * What they mean is in extended attributes; where they are is in user.moment.cache, which the
 * daemon answers for each file ("resident=N dirty=N bytes=N") and which no listing shows.
 */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>

#include "momentctl.h"

struct totals {
	uint64_t files, size, bytes, resident, dirty;
};

struct ls {
	bool json, first;
	size_t strip; /* bytes of each path that are the mount and params/ */
	struct totals sum;
	int failed;
};

static void get_attr(const char *path, const char *name, char *out, size_t len)
{
	ssize_t n = getxattr(path, name, out, len - 1);

	out[n < 0 ? 0 : n] = '\0';
}

static int percent(uint64_t part, uint64_t whole)
{
	if (part >= whole) /* holes may be in RAM, too, and take no space elsewhere */
		return 100;
	return (int)((double)part * 100 / (double)whole);
}

static void put_json(const char *s)
{
	putchar('"');
	for (; *s; s++) {
		if (*s == '"' || *s == '\\')
			printf("\\%c", *s);
		else if ((unsigned char)*s < 0x20)
			printf("\\u%04x", *s);
		else
			putchar(*s);
	}
	putchar('"');
}

static void print_json(struct ls *l, const char *path, const struct totals *f, const char *dtype,
		       const char *shape, const char *step)
{
	fputs(l->first ? "[" : ",\n ", stdout);
	fputs("{\"path\": ", stdout);
	put_json(path + l->strip);
	printf(", \"size\": %llu, \"bytes\": %llu, \"resident\": %llu, \"dirty\": %llu",
	       (unsigned long long)f->size, (unsigned long long)f->bytes,
	       (unsigned long long)f->resident, (unsigned long long)f->dirty);
	fputs(", \"dtype\": ", stdout);
	*dtype ? put_json(dtype) : (void)fputs("null", stdout);
	fputs(", \"shape\": ", stdout);
	*shape ? put_json(shape) : (void)fputs("null", stdout);
	printf(", \"step\": %s}", *step ? step : "null");
}

static void print_file(struct ls *l, const char *path, const struct stat *st, const char *shape,
		       const char *step)
{
	unsigned long long resident = 0, dirty = 0, bytes = 0;
	char cache[128], dtype[32];
	struct totals f;
	bool has_cache;

	get_attr(path, "user.moment.dtype", dtype, sizeof(dtype));
	get_attr(path, "user.moment.cache", cache, sizeof(cache));
	has_cache = sscanf(cache, "resident=%llu dirty=%llu bytes=%llu", &resident, &dirty,
			   &bytes) == 3;
	if (!has_cache)
		return; /* generated text: no bytes of its own */
	/* A file that nobody has touched since the mount is all on the drive. */
	if (!bytes)
		bytes = (unsigned long long)st->st_blocks * 512;
	/* The rounding of the last piece is nobody's data. */
	if (bytes > (unsigned long long)st->st_size)
		bytes = (unsigned long long)st->st_size;
	f = (struct totals){1, (uint64_t)st->st_size, bytes, resident, dirty};
	if (!*dtype)
		shape = step = ""; /* an ordinary file beside a parameter's */
	if (l->json) {
		print_json(l, path, &f, dtype, shape, step);
	} else {
		if (l->first)
			printf("%14s  %-5s %-16s %8s %5s %6s  %s\n", "BYTES", "DTYPE", "SHAPE",
			       "STEP", "RAM%", "DIRTY%", "PATH");
		printf("%14llu  %-5s %-16s %8s %5d %6d  %s\n", (unsigned long long)f.size,
		       *dtype ? dtype : "-", *shape ? shape : "-", *step ? step : "-",
		       percent(resident, bytes), bytes ? percent(dirty, bytes) : 0,
		       path + l->strip);
	}
	l->first = false;
	l->sum.files++;
	l->sum.size += f.size;
	l->sum.bytes += f.bytes;
	l->sum.resident += f.resident;
	l->sum.dirty += f.dirty;
}

static int not_dots(const struct dirent *e)
{
	return strcmp(e->d_name, ".") && strcmp(e->d_name, "..");
}

static void walk(struct ls *l, const char *path)
{
	char shape[512], step[32], child[PATH_MAX];
	struct dirent **list;
	struct stat st;
	int n = scandir(path, &list, not_dots, versionsort);

	if (n < 0) {
		ctl_error("%s: %s", path, strerror(errno));
		l->failed = CTL_FAILED;
		return;
	}
	get_attr(path, "user.moment.shape", shape, sizeof(shape));
	get_attr(path, "user.moment.step", step, sizeof(step));
	for (int i = 0; i < n; i++) {
		if ((size_t)snprintf(child, sizeof(child), "%s/%s", path, list[i]->d_name) >=
		    sizeof(child)) {
			ctl_error("%s/%s: the path is too long", path, list[i]->d_name);
			l->failed = CTL_FAILED;
		} else if (lstat(child, &st)) {
			if (errno != ENOENT) { /* removed meanwhile */
				ctl_error("%s: %s", child, strerror(errno));
				l->failed = CTL_FAILED;
			}
		} else if (S_ISDIR(st.st_mode)) {
			walk(l, child);
		} else {
			print_file(l, child, &st, shape, step);
		}
		free(list[i]);
	}
	free(list);
}

static void list_one(struct ls *l, char *path)
{
	char shape[512], step[32], *slash;
	struct stat st;

	if (stat(path, &st)) {
		ctl_error("%s: %s", path, strerror(errno));
		l->failed = CTL_CANNOT;
		return;
	}
	if (S_ISDIR(st.st_mode)) {
		walk(l, path);
		return;
	}
	slash = strrchr(path, '/');
	*slash = '\0';
	get_attr(path, "user.moment.shape", shape, sizeof(shape));
	get_attr(path, "user.moment.step", step, sizeof(step));
	*slash = '/';
	print_file(l, path, &st, shape, step);
}

int cmd_ls(int argc, char **argv)
{
	struct ls l = {.first = true};
	const struct ctl_option options[] = {{"json", &l.json, "for programs"}, {NULL, NULL, NULL}};
	struct ctl_target t;
	const char *arg;
	char params[PATH_MAX + 8];
	int res = ctl_parse(
		argc, argv, "PATH",
		"The files below PATH (default: the current directory): bytes, type, shape and step, "
		"and how\nmuch of each is in the RAM tier, and not yet committed.",
		options, ".", &arg);

	if (res >= 0)
		return res;
	res = ctl_find(arg, &t);
	if (res)
		return res;
	snprintf(params, sizeof(params), "%s/params", t.mount);
	l.strip = strlen(params) + 1;
	if (!strcmp(t.path, t.mount))
		list_one(&l, params);
	else if (!strncmp(t.path, params, l.strip - 1) &&
		 (t.path[l.strip - 1] == '/' || !t.path[l.strip - 1]))
		list_one(&l, t.path);
	else {
		ctl_error("%s: only what is below %s can be listed", arg, params);
		return CTL_CANNOT;
	}
	if (l.json)
		puts(l.first ? "[]" : "]");
	else if (!l.first)
		printf("%llu files, %s; on the drive or in RAM %s, in RAM %s (%d%%), not committed %s\n",
		       (unsigned long long)l.sum.files, ctl_size(l.sum.size), ctl_size(l.sum.bytes),
		       ctl_size(l.sum.resident), percent(l.sum.resident, l.sum.bytes),
		       ctl_size(l.sum.dirty));
	return l.failed;
}
