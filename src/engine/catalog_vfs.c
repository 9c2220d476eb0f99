/* SPDX-License-Identifier: Apache-2.0 */
/*
 * catalog_vfs.c - by which path SQLite opens the catalog, its WAL and its journal.
 *
 * SQLite opens files by path, takes none of more than 512 bytes, and follows symbolic links. So it
 * gets the path /proc/self/fd/N/NAME, where N is the descriptor of the directory: it is short
 * however deep the backing lies, and leads to the directory that was checked whatever has become
 * of its path. This VFS is SQLite's own but for two methods: that path is taken as it is (its
 * second to last part is a link, which is to be followed), and each file is checked by ours_check()
 * when it is opened. The last part is never followed: SQLite opens with O_NOFOLLOW.
 *
 * Registered once a process, never as the default. Any thread.
 */
#include "engine/catalog_impl.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/ours.h"

#define PREFIX	 "/proc/self/fd/"
#define VFS_NAME "momentfs"

static sqlite3_vfs vfs;
static sqlite3_vfs *inner;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* The name below the directory, and the directory's descriptor; NULL: not such a path. */
static const char *split(const char *path, int *dirfd)
{
	char *end;

	if (!path || strncmp(path, PREFIX, strlen(PREFIX)))
		return NULL;
	*dirfd = (int)strtol(path + strlen(PREFIX), &end, 10);
	return *end == '/' ? end + 1 : NULL;
}

static int vfs_full_pathname(sqlite3_vfs *v, const char *path, int len, char *out)
{
	int dirfd;

	(void)v;
	if (!split(path, &dirfd))
		return inner->xFullPathname(inner, path, len, out);
	return snprintf(out, (size_t)len, "%s", path) < len ? SQLITE_OK : SQLITE_CANTOPEN;
}

static int vfs_open(sqlite3_vfs *v, const char *path, sqlite3_file *file, int flags, int *out)
{
	const char *name, *why;
	int dirfd, rc;

	(void)v;
	rc = inner->xOpen(inner, path, file, flags, out);
	name = split(path, &dirfd);
	if (rc != SQLITE_OK || !name ||
	    !ours_check(dirfd, name, flags & SQLITE_OPEN_READONLY, &why))
		return rc;
	file->pMethods->xClose(file);
	file->pMethods = NULL;
	errno = EPERM;
	return SQLITE_CANTOPEN;
}

static void register_vfs(void)
{
	inner = sqlite3_vfs_find(NULL);
	if (!inner)
		return;
	vfs = *inner;
	vfs.pNext = NULL;
	vfs.zName = VFS_NAME;
	vfs.xFullPathname = vfs_full_pathname;
	vfs.xOpen = vfs_open;
	sqlite3_vfs_register(&vfs, 0);
}

const char *cat_vfs(void)
{
	if (sqlite3_initialize() == SQLITE_OK)
		pthread_once(&once, register_vfs);
	return vfs.zName;
}

int cat_check_files(int dirfd, const char *dir, bool readonly, char *err, size_t errlen)
{
	static const char *const names[] = {
		CATALOG_FILE,	 CATALOG_FILE "-wal", CATALOG_FILE "-shm", CATALOG_FILE "-journal",
		CATALOG_BALLAST,
	};

	for (size_t n = 0; n < sizeof(names) / sizeof(*names); n++) {
		const char *why = NULL;
		int res = ours_check(dirfd, names[n], readonly, &why);

		if (!res)
			continue;
		cat_message(err, errlen, "%s/%s: %s", dir, names[n], why ? why : strerror(-res));
		return res;
	}
	return 0;
}
