/* SPDX-License-Identifier: Apache-2.0 */
/*
 * catalog_ballast.c - space put aside for the catalog, so that a commit still succeeds on a full
 * disk: the pool reserves for data, this is for the rows.
 *
 * Two parts, both at least 1 MiB, but not more than a sixteenth of what was free when it was made:
 * - room in the WAL, for a commit of all rows: blocks of the file behind its end. A commit that finds
 *   no space empties the WAL into the database and writes it from its start, where nobody else can have
 *   taken the room; so this is what a commit on a full disk lives on, and 256 KiB of it are taken also
 *   where little is free. It goes when the file goes, at unmounting, and becomes ballast then if there
 *   is not enough of that;
 * - the ballast, a file of preallocated zeros, a quarter of the catalog, for what needs new blocks all
 *   the same: a database that grows, a WAL where there was no room when it was made. It is removed, and
 *   whoever is quickest has its space: another program that is writing just then may be.
 * Both are made anew after a later commit, when there is room. Work thread (main thread at open).
 */
#include "engine/catalog_impl.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "engine/ours.h"

#define BALLAST_MIN   ((uint64_t)1 << 20)
#define BALLAST_SHARE 16u /* of the free space */
#define WAL_ROOM_MIN  ((uint64_t)256 << 10)

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

static uint64_t whole_mib(uint64_t bytes)
{
	return round_up_u64(max_u64(bytes, BALLAST_MIN), BALLAST_MIN);
}

static uint64_t host_free(const struct catalog *c)
{
	struct statvfs vfs;

	return fstatvfs(c->dirfd, &vfs) < 0 ? 0 : (uint64_t)vfs.f_bavail * vfs.f_frsize;
}

/* The WAL gets the room it should have, or `most` bytes more than it has. */
static void wal_room(struct catalog *c, uint64_t most)
{
	uint64_t want = whole_mib(file_size(c->dirfd, CATALOG_FILE));
	int fd;

	want = min_u64(min_u64(want, CATALOG_WAL_LIMIT),
		       c->wal_room + most / MOMENT_UNIT * MOMENT_UNIT);
	if (want <= c->wal_room)
		return;
	fd = openat(c->dirfd, CATALOG_WAL, O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0)
		return;
	if (fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, (off_t)want) == 0)
		c->wal_room = want;
	close(fd);
}

void cat_wal_from_ballast(struct catalog *c)
{
	static const char wiped[32]; /* a WAL without a header is an empty one */
	uint64_t have = file_size(c->dirfd, CATALOG_BALLAST);
	struct stat st;
	int fd;

	if (!have || host_free(c) / BALLAST_SHARE >= BALLAST_MIN ||
	    fstatat(c->dirfd, CATALOG_WAL, &st, AT_SYMLINK_NOFOLLOW) == 0)
		return;
	fd = ours_open(c->dirfd, CATALOG_BALLAST, O_WRONLY, NULL);
	if (fd < 0)
		return;
	if (pwrite(fd, wiped, sizeof(wiped), 0) == sizeof(wiped) && fdatasync(fd) == 0 &&
	    renameat(c->dirfd, CATALOG_BALLAST, c->dirfd, CATALOG_WAL) == 0)
		c->wal_room = min_u64(have, CATALOG_WAL_LIMIT);
	close(fd);
}

/* The ballast gets the size it should have, or `most` bytes more than it has. */
static void ballast(struct catalog *c, uint64_t most)
{
	uint64_t have = file_size(c->dirfd, CATALOG_BALLAST);
	uint64_t want = whole_mib(
		(file_size(c->dirfd, CATALOG_FILE) + file_size(c->dirfd, CATALOG_WAL)) / 4);
	int fd;

	if (have < want)
		want = min_u64(want, have + most) / MOMENT_UNIT * MOMENT_UNIT;
	if (have >= want) {
		if (have != c->ballast)
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

void cat_ballast_restore(struct catalog *c)
{
	uint64_t room = host_free(c);

	wal_room(c, c->wal_room < WAL_ROOM_MIN
			    ? max_u64(room / BALLAST_SHARE, min_u64(room / 2, WAL_ROOM_MIN))
			    : room / BALLAST_SHARE);
	ballast(c, room / BALLAST_SHARE);
}

void cat_ballast_keep(struct catalog *c, uint64_t freed)
{
	uint64_t room = host_free(c);

	ballast(c, max_u64(room / BALLAST_SHARE, min_u64(room, freed)));
}

bool cat_ballast_drop(struct catalog *c)
{
	uint64_t have = file_size(c->dirfd, CATALOG_BALLAST);

	set_ballast(c, 0);
	if (!have || unlinkat(c->dirfd, CATALOG_BALLAST, 0))
		return false;
	wal_room(c, have / 2);
	return true;
}
