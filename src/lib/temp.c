/* SPDX-License-Identifier: Apache-2.0 */
/*
 * temp.c - temporary backings under $TMPDIR or /var/tmp.
 *
 *	momentfs-tmp-XXXXXX/	made by mkdtemp, 0700
 *		lock		flock'ed by the owner as long as he lives
 *		backing/	the engine's
 *
 * The lock, not a process number, says whether the owner lives: it is right across containers that
 * share the folder, and when numbers are used again. A folder without a lock file may be one that is
 * being made just now: it is left alone until it is an hour old.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "lib/error.h"
#include "lib/temp.h"

#define PREFIX	  "momentfs-tmp-"
#define STALE_SEC 3600

static const char *temp_root(void)
{
	const char *dir = getenv("TMPDIR");

	return dir && dir[0] == '/' ? dir : "/var/tmp";
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
	(void)st;
	(void)type;
	(void)ftw;
	remove(path);
	return 0;
}

static void remove_tree(const char *dir)
{
	nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS | FTW_MOUNT);
}

/* Takes the owner's lock if nobody has it. The descriptor, or -errno. */
static int lock_take(const char *dir, bool make)
{
	char path[4096];
	int fd;

	snprintf(path, sizeof(path), "%s/lock", dir);
	fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | (make ? O_CREAT | O_EXCL : 0), 0600);
	if (fd < 0)
		return -errno;
	if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
		int res = -errno;

		close(fd);
		return res;
	}
	return fd;
}

static void sweep(const char *root)
{
	DIR *d = opendir(root);
	struct dirent *e;

	if (!d)
		return;
	while ((e = readdir(d)) != NULL) {
		char dir[4096];
		struct stat st;
		int fd;

		if (strncmp(e->d_name, PREFIX, strlen(PREFIX)) != 0)
			continue;
		if (snprintf(dir, sizeof(dir), "%s/%s", root, e->d_name) >= (int)sizeof(dir))
			continue;
		if (lstat(dir, &st) < 0 || !S_ISDIR(st.st_mode) || st.st_uid != geteuid())
			continue;
		fd = lock_take(dir, false);
		if (fd >= 0 || (fd == -ENOENT && time(NULL) - st.st_mtime > STALE_SEC))
			remove_tree(dir);
		if (fd >= 0)
			close(fd);
	}
	closedir(d);
}

int temp_create(struct temp *t, const char *root, bool *on_tmpfs)
{
	struct statfs fs;
	int res;

	*t = (struct temp){.lock = -1};
	if (!root)
		root = temp_root();
	else if (mkdir(root, 0755) < 0 && errno != EEXIST)
		return err_set(-errno, "cannot make %s: %s", root, strerror(errno));
	sweep(root);
	if (asprintf(&t->dir, "%s/" PREFIX "XXXXXX", root) < 0) {
		t->dir = NULL;
		return err_set(-ENOMEM, "out of memory");
	}
	if (!mkdtemp(t->dir)) {
		res = err_set(
			-errno,
			"cannot make a temporary backing in %s: %s (set TMPDIR to a folder on the drive)",
			root, strerror(errno));
		free(t->dir);
		t->dir = NULL;
		return res;
	}
	t->lock = lock_take(t->dir, true);
	if (t->lock < 0) {
		res = err_set(t->lock, "cannot lock the temporary backing %s: %s", t->dir,
			      strerror(-t->lock));
		goto out_remove;
	}
	if (asprintf(&t->backing, "%s/backing", t->dir) < 0) {
		t->backing = NULL;
		res = err_set(-ENOMEM, "out of memory");
		goto out_remove;
	}
	*on_tmpfs = statfs(t->dir, &fs) == 0 &&
		    (fs.f_type == TMPFS_MAGIC || (unsigned long)fs.f_type == RAMFS_MAGIC);
	return 0;
out_remove:
	temp_remove(t);
	return res;
}

void temp_remove(struct temp *t)
{
	if (!t->dir)
		return;
	remove_tree(t->dir);
	if (t->lock >= 0)
		close(t->lock);
	free(t->dir);
	free(t->backing);
	*t = (struct temp){.lock = -1};
}

void temp_forked(struct temp *t)
{
	if (t->dir && t->lock >= 0)
		close(t->lock);
	t->lock = -1;
}
