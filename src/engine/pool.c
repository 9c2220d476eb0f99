/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool.c - the pool file: opening, allocation, growth. Its bitmap is pool_map.c, its superblock
 * pool_super.c.
 *
 * Invariants: the superblock region is used from the start and never freed. The bitmap covers
 * exactly `size`, the part of the file that is published; the file itself is that long, or longer
 * while it grows. The cursor is where the last allocation ended; a search goes from there to the
 * end, then once more from the start, and only then the answer is "grow".
 *
 * Threads: everything on the loop thread, except pool_grow_run(), which uses only the descriptor,
 * its argument and `sparse`, and pool_write_super(), which has the second descriptor and the
 * `super` of its own; commits come one after the other, so it needs no lock. The loop thread's view
 * of the commit number is atomic.
 */
#include "engine/bug.h"
#include "engine/pool.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "engine/ours.h"
#include "engine/pool_map.h"
#include "engine/pool_super.h"

#define GROW_FIRST (4ull << 20)
#define GROW_STEP  (256ull << 20)
#define GROW_SHARE 8 /* of the file's size */
#define HOST_SHARE 4 /* most of the host's free space that one step takes for itself */
#define FIRST_UNIT (POOL_SUPER_SIZE / MOMENT_UNIT)

/* Not in linux/magic.h */
#define ZFS_MAGIC      0x2fc12fc1
#define BCACHEFS_MAGIC 0xca451a4e

struct pool {
	int fd;
	int super_fd; /* a descriptor of its own: io sets O_DIRECT on the other */
	bool readonly;
	uint64_t limit; /* as given; 0: none */

	struct pool_map map;
	uint64_t cursor; /* in units */
	bool growing;
	uint64_t grown;

	struct pool_super_slot super; /* pool_write_super()'s after opening */
	_Atomic uint64_t commit_seq;

	atomic_bool sparse; /* the file grows by ftruncate(): nothing is reserved */
	bool cow;	    /* copy on write: a reserved block does not help the second write */
	uint64_t unreserved; /* bytes of the file that the host has no room set aside for */
	char host_fs[24];
};

static const struct {
	uint32_t magic;
	bool cow; /* or unknown, because something else is below */
	const char *name;
} host_kinds[] = {
	{EXT4_SUPER_MAGIC, false, "ext4"},  {XFS_SUPER_MAGIC, false, "xfs"},
	{TMPFS_MAGIC, false, "tmpfs"},	    {F2FS_SUPER_MAGIC, false, "f2fs"},
	{NFS_SUPER_MAGIC, false, "nfs"},    {FUSE_SUPER_MAGIC, true, "fuse"},
	{BTRFS_SUPER_MAGIC, true, "btrfs"}, {ZFS_MAGIC, true, "zfs"},
	{BCACHEFS_MAGIC, true, "bcachefs"}, {OVERLAYFS_SUPER_MAGIC, true, "overlay"},
};

static void look_at_host(struct pool *p)
{
	struct statfs st;

	if (fstatfs(p->fd, &st)) {
		snprintf(p->host_fs, sizeof(p->host_fs), "unknown");
		return;
	}
	for (size_t i = 0; i < sizeof(host_kinds) / sizeof(host_kinds[0]); i++) {
		if (host_kinds[i].magic == (uint32_t)st.f_type) {
			p->cow = host_kinds[i].cow;
			snprintf(p->host_fs, sizeof(p->host_fs), "%s", host_kinds[i].name);
			return;
		}
	}
	snprintf(p->host_fs, sizeof(p->host_fs), "0x%" PRIx32, (uint32_t)st.f_type);
}

/* Bytes that the host has left for us, whole units. */
static uint64_t host_free(const struct pool *p)
{
	struct statvfs st;

	if (fstatvfs(p->fd, &st))
		return 0;
	return (uint64_t)st.f_bavail * st.f_frsize / MOMENT_UNIT * MOMENT_UNIT;
}

static bool cannot_reserve(int err)
{
	return err == EOPNOTSUPP || err == ENOSYS;
}

/* Makes the file, which ends at `from` or later, reach to `to`; reserved where the host can. */
static int extend(struct pool *p, uint64_t from, uint64_t to)
{
	while (!atomic_load(&p->sparse)) {
		if (!fallocate(p->fd, 0, (off_t)from, (off_t)(to - from)))
			return 0;
		if (cannot_reserve(errno))
			atomic_store(&p->sparse, true);
		else if (errno == EDQUOT || errno == EFBIG)
			return -ENOSPC;
		else if (errno != EINTR)
			return -errno;
	}
	if (ftruncate(p->fd, (off_t)to))
		return errno == EFBIG ? -ENOSPC : -errno;
	return 0;
}

static bool block_is_valid(uint32_t block)
{
	return block >= POOL_BLOCK_MIN && block <= POOL_BLOCK_MAX && !(block & (block - 1));
}

static int create_file(struct pool *p, const struct pool_opts *o, const char **why)
{
	int rc;

	*why = "the superblock cannot be written";
	rc = extend(p, 0, POOL_SUPER_SIZE);
	if (rc)
		return rc;
	p->super.super = (struct pool_super){.version = POOL_VERSION, .block = o->block};
	memcpy(p->super.super.uuid, o->uuid, sizeof(o->uuid));
	for (p->super.slot = 0; p->super.slot < POOL_SLOTS; p->super.slot++) {
		p->super.generation++;
		rc = pool_super_write(p->super_fd, &p->super);
		if (rc)
			return rc;
	}
	p->super.slot = POOL_SLOTS - 1;
	if (fsync(p->super_fd) || fsync(o->dirfd))
		return -errno;
	return 0;
}

static uint64_t holes(const struct pool *p, uint64_t size)
{
	struct stat st;

	if (fstat(p->fd, &st) || (uint64_t)st.st_blocks * 512 >= size)
		return 0;
	return size - (uint64_t)st.st_blocks * 512;
}

/*
 * A file that was copied, or punched by somebody, has holes, and a write there can find the disk
 * full: the room is taken now, if there is enough for all of it.
 */
static void reserve_again(struct pool *p, uint64_t size)
{
	p->unreserved = holes(p, size);
	if (p->unreserved && p->unreserved <= host_free(p)) {
		int r = fallocate(p->fd, FALLOC_FL_KEEP_SIZE, 0, (off_t)size);

		p->unreserved = r ? holes(p, size) : 0;
	}
}

static int read_file(struct pool *p, const struct pool_opts *o, uint64_t *size, const char **why)
{
	struct stat st;
	int rc;

	if (fstat(p->fd, &st))
		return -errno;
	if (!S_ISREG(st.st_mode)) {
		*why = "not a regular file";
		return -EINVAL;
	}
	rc = pool_super_read(p->super_fd, &p->super, why);
	if (rc)
		return rc;
	if (o->block && o->block != p->super.super.block) {
		*why = "its block size is not the one asked for";
		return -EINVAL;
	}
	if (memcmp(o->uuid, p->super.super.uuid, sizeof(o->uuid))) {
		*why = "belongs to another backing: its uuid is not the catalog's";
		return -ESTALE;
	}
	if (st.st_size < (off_t)POOL_SUPER_SIZE) {
		*why = "cut off: shorter than its superblock region; restore it from a copy";
		return -EUCLEAN;
	}
	/* A process before us may have died before it synced what the catalog refers to, or somebody has
	 * just copied the file. */
	if (!p->readonly && fdatasync(p->fd)) {
		*why = "cannot be synced";
		return -errno;
	}
	/* Bytes of a last incomplete unit are of a growth that a crash cut short. */
	*size = (uint64_t)st.st_size / MOMENT_UNIT * MOMENT_UNIT;
	/* The region is there already, so this only asks whether the host can reserve at all; on a
	 * full disk it may fail otherwise, which does not matter. */
	if (!p->readonly && fallocate(p->fd, FALLOC_FL_KEEP_SIZE, 0, POOL_SUPER_SIZE) &&
	    cannot_reserve(errno))
		atomic_store(&p->sparse, true);
	if (!p->readonly && !p->cow && !atomic_load(&p->sparse))
		reserve_again(p, *size);
	return 0;
}

int pool_open(const struct pool_opts *o, struct pool **out, const char **why)
{
	int flags = o->readonly ? O_RDONLY : O_RDWR;
	uint64_t size = POOL_SUPER_SIZE;
	const char *unasked;
	struct pool *p;
	int rc;

	if (!why)
		why = &unasked;
	*why = "";
	if (o->create && (!block_is_valid(o->block) || o->readonly))
		return -EINVAL;
	p = calloc(1, sizeof(*p));
	if (!p)
		return -ENOMEM;
	p->readonly = o->readonly;
	p->limit = o->limit;
	p->fd = ours_open(o->dirfd, o->name, flags | (o->create ? O_CREAT | O_EXCL : 0), why);
	if (p->fd < 0) {
		rc = p->fd;
		goto out_free;
	}
	p->super_fd = ours_open(o->dirfd, o->name, flags, why);
	if (p->super_fd < 0) {
		rc = p->super_fd;
		goto out_fd;
	}
	look_at_host(p);
	rc = o->create ? create_file(p, o, why) : read_file(p, o, &size, why);
	if (rc)
		goto out_super_fd;
	atomic_store(&p->commit_seq, p->super.super.commit_seq);

	rc = pool_map_grow(&p->map, size / MOMENT_UNIT);
	if (rc)
		goto out_map;
	pool_map_take(&p->map, 0, FIRST_UNIT);
	p->cursor = FIRST_UNIT;
	*why = "";
	*out = p;
	return 0;

out_map:
	pool_map_fini(&p->map);
out_super_fd:
	close(p->super_fd);
out_fd:
	close(p->fd);
	if (o->create)
		unlinkat(o->dirfd, o->name, 0);
out_free:
	free(p);
	return rc;
}

void pool_close(struct pool *p)
{
	if (!p)
		return;
	assert(!p->growing);
	pool_map_fini(&p->map);
	close(p->super_fd);
	close(p->fd);
	free(p);
}

int pool_fd(const struct pool *p)
{
	return p->fd;
}

void pool_get_super(const struct pool *p, struct pool_super *s)
{
	/* Only commit_seq changes after opening, and only its atomic twin is read here. */
	s->version = p->super.super.version;
	s->block = p->super.super.block;
	memcpy(s->uuid, p->super.super.uuid, sizeof(s->uuid));
	s->commit_seq = atomic_load(&p->commit_seq);
}

int pool_write_super(struct pool *p, uint64_t commit_seq)
{
	struct pool_super_slot next = p->super;
	int rc;

	if (p->readonly)
		return -EROFS;
	next.super.commit_seq = commit_seq;
	next.generation++;
	next.slot = (next.slot + 1) % POOL_SLOTS;
	rc = pool_super_write(p->super_fd, &next);
	/* After a failure the same slot is tried again: the other one may be the only good one. */
	if (rc)
		return rc;
	p->super.super.commit_seq = commit_seq;
	p->super.generation = next.generation;
	p->super.slot = next.slot;
	atomic_store(&p->commit_seq, commit_seq);
	return 0;
}

/* --- allocation --------------------------------------------------------------------------- */

/* Whether [off, off + len) could be an extent: aligned, in bounds, not in the superblock. */
static bool range_is_valid(const struct pool *p, uint64_t off, uint64_t len)
{
	uint64_t size = p->map.units * MOMENT_UNIT;

	return len && off % MOMENT_UNIT == 0 && len % MOMENT_UNIT == 0 && off >= POOL_SUPER_SIZE &&
	       off < size && len <= size - off;
}

int pool_mark(struct pool *p, const struct extent *e)
{
	if (extent_is_hole(e))
		return e->len || e->valid ? -EUCLEAN : 0;
	if (!range_is_valid(p, e->off, e->len) || e->len > p->super.super.block ||
	    e->valid > e->len)
		return -EUCLEAN;
	if (!pool_map_all_free(&p->map, e->off / MOMENT_UNIT, e->len / MOMENT_UNIT))
		return -EUCLEAN;
	pool_map_take(&p->map, e->off / MOMENT_UNIT, e->len / MOMENT_UNIT);
	return 0;
}

bool pool_is_allocated(const struct pool *p, struct poff off, uint64_t len)
{
	return range_is_valid(p, off.o, len) &&
	       pool_map_all_used(&p->map, off.o / MOMENT_UNIT, len / MOMENT_UNIT);
}

int pool_alloc(struct pool *p, uint32_t len, struct poff *out)
{
	uint64_t n = len / MOMENT_UNIT, at;

	assert(len && len % MOMENT_UNIT == 0);
	if (p->readonly)
		return -EROFS;
	if (!pool_map_find(&p->map, p->cursor, n, &at) &&
	    !pool_map_find(&p->map, FIRST_UNIT, n, &at))
		return -EAGAIN;
	pool_map_take(&p->map, at, n);
	p->cursor = at + n;
	out->o = at * MOMENT_UNIT;
	return 0;
}

void pool_free(struct pool *p, struct poff off, uint32_t len)
{
	assert(range_is_valid(p, off.o, len));
	pool_map_give(&p->map, off.o / MOMENT_UNIT, len / MOMENT_UNIT);
}

bool pool_next_free(const struct pool *p, uint64_t *off, uint64_t *len)
{
	uint64_t at, n;

	if (!pool_map_run(&p->map, *off / MOMENT_UNIT, &at, &n))
		return false;
	*off = at * MOMENT_UNIT;
	*len = n * MOMENT_UNIT;
	return true;
}

/* --- growth ------------------------------------------------------------------------------- */

/* The most bytes that the limit lets the file grow by. */
static uint64_t limit_left(const struct pool *p)
{
	uint64_t size = p->map.units * MOMENT_UNIT;
	uint64_t limit = p->limit ? p->limit : INT64_MAX;

	limit = min_u64(limit, INT64_MAX) / MOMENT_UNIT * MOMENT_UNIT;
	return limit > size ? limit - size : 0;
}

int pool_grow_begin(struct pool *p, uint64_t need, struct pool_grow *g)
{
	uint64_t size = p->map.units * MOMENT_UNIT;
	uint64_t host = host_free(p), most = min_u64(limit_left(p), host);
	uint64_t step;

	if (p->readonly)
		return -EROFS;
	if (p->growing)
		return -EALREADY;
	if (!need || need > most)
		return need ? -ENOSPC : -EINVAL;
	need = round_up_u64(need, MOMENT_UNIT);
	/* Large steps for long runs; but a small state takes little, and on a small disk less. */
	step = min_u64(max_u64(size, GROW_FIRST), max_u64(GROW_STEP, size / GROW_SHARE));
	step = min_u64(step, host / HOST_SHARE);
	step = min_u64(max_u64(step / MOMENT_UNIT * MOMENT_UNIT, need), most);

	*g = (struct pool_grow){.from = size, .to = size + step, .need = need};
	p->growing = true;
	return 0;
}

int pool_trim_begin(struct pool *p, uint64_t floor, struct pool_grow *g)
{
	uint64_t size = p->map.units * MOMENT_UNIT, to;

	if (p->readonly)
		return -EROFS;
	if (p->growing)
		return -EALREADY;
	to = max_u64(pool_map_tail(&p->map) * MOMENT_UNIT,
		     min_u64(floor, size) / MOMENT_UNIT * MOMENT_UNIT);
	if (to >= size)
		return -ENODATA;
	*g = (struct pool_grow){.from = size, .to = to};
	p->growing = true;
	pool_map_shrink(&p->map, to / MOMENT_UNIT);
	p->cursor = min_u64(p->cursor, to / MOMENT_UNIT);
	return 0;
}

void pool_grow_run(struct pool *p, struct pool_grow *g)
{
	uint64_t step = g->to - g->from;
	struct stat st;

	if (g->to < g->from) {
		g->res = ftruncate(p->fd, (off_t)g->to) ? -errno : 0;
		return;
	}
	for (;;) {
		g->res = extend(p, g->from, g->from + step);
		if (g->res != -ENOSPC || step == g->need)
			break;
		step = max_u64(step / 2 / MOMENT_UNIT * MOMENT_UNIT, g->need);
	}
	g->to = g->res ? g->from : g->from + step;
	/* What a failed step got before it failed is given back. Should that fail too, the file is
	 * longer than it says, which the next growth or mount takes as it is. */
	if (!fstat(p->fd, &st) && st.st_size > (off_t)g->to && ftruncate(p->fd, (off_t)g->to))
		return;
}

void pool_grow_end(struct pool *p, struct pool_grow *g)
{
	assert(p->growing);
	p->growing = false;
	if (g->to < g->from) {
		/* Not made shorter after all: there is memory for what was there before. */
		if (g->res)
			pool_map_grow(&p->map, g->from / MOMENT_UNIT);
		return;
	}
	if (g->res)
		return;
	g->res = pool_map_grow(&p->map, g->to / MOMENT_UNIT);
	if (!g->res)
		p->grown++;
}

void pool_get_info(const struct pool *p, struct pool_info *info)
{
	uint64_t size = p->map.units * MOMENT_UNIT;
	uint64_t host = host_free(p), left = limit_left(p);
	bool sparse = atomic_load(&p->sparse);

	*info = (struct pool_info){
		.size = size,
		.limit = p->limit,
		.used = p->map.used * MOMENT_UNIT - POOL_SUPER_SIZE,
		.free = size - p->map.used * MOMENT_UNIT,
		.grown = p->grown,
		.reserves = !sparse && !p->cow,
		.host_fs = p->host_fs,
		.unreserved = p->unreserved,
	};
	if (p->readonly)
		info->available = info->free;
	else if (sparse) /* free space in the file is not backed by the host either */
		info->available = min_u64(info->free + left, host);
	else
		info->available = info->free + min_u64(left, host);
	info->available -= min_u64(info->available, p->unreserved);
}
