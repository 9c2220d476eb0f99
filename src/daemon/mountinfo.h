/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mountinfo.h - what is mounted where, from /proc/self/mountinfo: asking the kernel this way
 * touches no file system, so it works on dead mounts and is safe on the daemon's own.
 */
#ifndef DAEMON_MOUNTINFO_H
#define DAEMON_MOUNTINFO_H

#include <limits.h>
#include <stdbool.h>

struct mountinfo {
	char device[24]; /* "major:minor" */
	char point[PATH_MAX];
	char type[64]; /* "fuse.momentfs" */
	char source[PATH_MAX];
};

#define MOMENTFS_TYPE "fuse.momentfs"

/*
 * Calls fn for each mount, oldest first, until it returns true. Returns what the last call
 * returned; false, too, where /proc cannot be read.
 */
bool mountinfo_each(bool (*fn)(void *arg, const struct mountinfo *m), void *arg);

/* The same of another process's, "/proc/PID/mountinfo". */
bool mountinfo_each_in(const char *file, bool (*fn)(void *arg, const struct mountinfo *m),
		       void *arg);

/* The mount that is on top at exactly this absolute path. */
bool mountinfo_at(const char *path, struct mountinfo *out);
/* The momentfs mount in which the absolute path lies (the path itself, or a folder above). */
bool mountinfo_containing(const char *path, struct mountinfo *out);
/* The momentfs mount of this backing (absolute path). */
bool mountinfo_of_backing(const char *backing, struct mountinfo *out);
/* The mount of this "major:minor". */
bool mountinfo_of_device(const char *device, struct mountinfo *out);

#endif
