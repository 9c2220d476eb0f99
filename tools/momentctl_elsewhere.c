/* SPDX-License-Identifier: Apache-2.0 */
/*
 * momentctl_elsewhere.c - mounts that other processes see. A mount namespace that was made from
 * ours (a container, unshare -m) has its own copies of our mounts, and a bind mount is one more of
 * the same; the daemon serves until the last of them has gone, wherever it is.
 *
 * /proc/PID/mountinfo of one process stands for its whole namespace. What may not be read (another
 * user's process) is not seen.
 */
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/mountinfo.h"
#include "momentctl.h"

#define NAMESPACES_MOST 4096u

struct scan {
	struct ctl_elsewhere e; /* of the process that is looked at */
	bool (*matches)(const struct mountinfo *m, const char *key);
	const char *key;
	void (*fn)(void *arg, const struct ctl_elsewhere *e);
	void *arg;
	bool any;
	ino_t seen[NAMESPACES_MOST];
	size_t n_seen;
};

static bool look_at_mount(void *arg, const struct mountinfo *m)
{
	struct scan *s = arg;

	if (!s->matches(m, s->key))
		return false;
	s->e.point = m->point;
	s->any = true;
	s->fn(s->arg, &s->e);
	return false;
}

/* True: the process's namespace was not looked at before. */
static bool is_new(struct scan *s, ino_t ns)
{
	for (size_t i = 0; i < s->n_seen; i++)
		if (s->seen[i] == ns)
			return false;
	if (s->n_seen < NAMESPACES_MOST)
		s->seen[s->n_seen++] = ns;
	return true;
}

static void look_at_process(struct scan *s, const char *pid)
{
	char path[64];
	struct stat st;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%.16s/ns/mnt", pid);
	if (stat(path, &st) || !is_new(s, st.st_ino))
		return;
	s->e = (struct ctl_elsewhere){.pid = atoi(pid), .here = s->n_seen == 1};
	snprintf(path, sizeof(path), "/proc/%.16s/comm", pid);
	f = fopen(path, "re");
	if (f && fgets(s->e.comm, sizeof(s->e.comm), f))
		s->e.comm[strcspn(s->e.comm, "\n")] = '\0';
	if (f)
		fclose(f);
	snprintf(path, sizeof(path), "/proc/%.16s/mountinfo", pid);
	mountinfo_each_in(path, look_at_mount, s);
}

static bool scan(bool (*matches)(const struct mountinfo *, const char *), const char *key,
		 void (*fn)(void *arg, const struct ctl_elsewhere *e), void *arg)
{
	struct scan *s = calloc(1, sizeof(*s));
	DIR *proc = opendir("/proc");
	struct dirent *de;
	bool any = false;

	if (s && proc) {
		*s = (struct scan){.matches = matches, .key = key, .fn = fn, .arg = arg};
		look_at_process(s, "self"); /* the first: our own */
		while ((de = readdir(proc)))
			if (isdigit((unsigned char)de->d_name[0]))
				look_at_process(s, de->d_name);
		any = s->any;
	}
	if (proc)
		closedir(proc);
	free(s);
	return any;
}

static bool is_device(const struct mountinfo *m, const char *device)
{
	return !strcmp(m->device, device);
}

static bool is_backing(const struct mountinfo *m, const char *backing)
{
	return !strcmp(m->type, MOMENTFS_TYPE) && !strcmp(m->source, backing);
}

bool ctl_each_of_device(const char *device, void (*fn)(void *, const struct ctl_elsewhere *),
			void *arg)
{
	return scan(is_device, device, fn, arg);
}

bool ctl_each_of_backing(const char *backing, void (*fn)(void *, const struct ctl_elsewhere *),
			 void *arg)
{
	return scan(is_backing, backing, fn, arg);
}
