/* SPDX-License-Identifier: Apache-2.0 */
/*
 * catalog_ballast.c - space put aside for the catalog, so that a commit still succeeds on a full
 * disk: the pool reserves for data, this is for the rows.
 *
 * A file of preallocated zeros, a quarter of the catalog and at least 1 MiB, but never more than a
 * sixteenth of what was free when it was made. A commit that runs out of space frees it and is
 * tried again; it is made anew after a later commit, when there is room. Work thread (main thread
 * at open).
 */
#include "engine/catalog_impl.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "engine/ours.h"

#define BALLAST_MIN   ((uint64_t)1 << 20)
#define BALLAST_SHARE 16u /* of the free space */

static void set_ballast(struct catalog *c, uint64_t bytes)
{
	pthread_mutex_lock(&c->lock);
	c->ballast = bytes;
	pthread_mutex_unlock(&c->lock);
}

static uint64_t file_size(int dirfd, const char *name)
{
	struct stat st;

	return fstatat(dirfd, name, &st, AT_SYMLINK_NOFOLLOW) < 0 ? 0 : (uint64_t)st.st_size;
}

void cat_ballast_restore(struct catalog *c)
{
	uint64_t have = file_size(c->dirfd, CATALOG_BALLAST), want, room;
	struct statvfs vfs;
	int fd;

	want = (file_size(c->dirfd, CATALOG_FILE) + file_size(c->dirfd, CATALOG_FILE "-wal")) / 4;
	want = round_up_u64(max_u64(want, BALLAST_MIN), BALLAST_MIN);
	if (have >= want) {
		if (have != c->ballast)
			set_ballast(c, have);
		return;
	}
	if (fstatvfs(c->dirfd, &vfs) < 0)
		return;
	room = (uint64_t)vfs.f_bavail * vfs.f_frsize / BALLAST_SHARE;
	want = min_u64(want, have + room) / MOMENT_UNIT * MOMENT_UNIT;
	if (want <= have) {
		set_ballast(c, have);
		return;
	}
	fd = ours_open(c->dirfd, CATALOG_BALLAST, O_WRONLY | O_CREAT, NULL);
	if (fd < 0)
		return;
	if (fallocate(fd, 0, 0, (off_t)want) < 0)
		want = ftruncate(fd, (off_t)have) < 0 ? 0 : have;
	close(fd);
	set_ballast(c, want);
}

bool cat_ballast_drop(struct catalog *c)
{
	uint64_t have = file_size(c->dirfd, CATALOG_BALLAST);

	set_ballast(c, 0);
	return have && unlinkat(c->dirfd, CATALOG_BALLAST, 0) == 0;
}
