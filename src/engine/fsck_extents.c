/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fsck_extents.c - the block maps against the pool file, and the bytes against their checksums.
 *
 * The extents are read in the order in which they lie in the file, so that a large pool is one
 * sweep over the drive. What was read is dropped from the page cache behind the sweep.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "engine/fsck_impl.h"
#include "engine/io.h"

struct found {
	struct extent e;
	uint64_t ino;
	uint32_t block; /* its number in the file */
};

static int by_offset(const void *pa, const void *pb)
{
	const struct found *a = pa, *b = pb;

	return a->e.off < b->e.off ? -1 : a->e.off > b->e.off;
}

/* Takes the extent in the pool's map. false: it cannot be what the file's bytes are in. */
static bool mark(struct fsck *f, const struct found *x)
{
	uint64_t from = (uint64_t)x->block * f->img.meta.m.block;
	struct pool_info info;

	if (pool_mark(f->pool, &x->e) == 0)
		return true;
	pool_get_info(f->pool, &info);
	if (x->e.off < POOL_SUPER_SIZE || x->e.off >= info.size || x->e.len > info.size - x->e.off)
		fsck_tell(
			f, "extent", x->ino, NULL, false,
			"bytes from %llu on are at %llu in the pool, which ends at %llu: the pool file "
			"was cut",
			(unsigned long long)from, (unsigned long long)x->e.off,
			(unsigned long long)info.size);
	else
		fsck_tell(f, "extent", x->ino, NULL, false,
			  "bytes from %llu on are at %llu in the pool, where other bytes are too",
			  (unsigned long long)from, (unsigned long long)x->e.off);
	return false;
}

static int collect(struct fsck *f, struct found **out, size_t *n_out)
{
	size_t n = 0, cap = 0;
	struct found *all;

	for (size_t r = 0; r < f->img.n; r++)
		cap += f->img.recs[r].map ? f->img.recs[r].map->n : 0;
	all = calloc(cap + 1, sizeof(*all));
	if (!all)
		return -ENOMEM;
	for (size_t r = 0; r < f->img.n; r++) {
		const struct cat_rec *rec = &f->img.recs[r];

		for (uint32_t b = 0; rec->map && b < rec->map->n; b++)
			all[n++] = (struct found){rec->map->v[b].e, rec->row.ino,
						  rec->map->v[b].block};
	}
	qsort(all, n, sizeof(*all), by_offset);
	*out = all;
	*n_out = n;
	return 0;
}

static void check_data(struct fsck *f, const struct found *x, void *buf)
{
	uint64_t from = (uint64_t)x->block * f->img.meta.m.block;
	int res = io_pread_all(pool_fd(f->pool), buf, x->e.len, x->e.off);

	if (res < 0)
		fsck_tell(f, "data", x->ino, NULL, false,
			  "bytes %llu to %llu (at %llu in the pool) cannot be read: %s",
			  (unsigned long long)from, (unsigned long long)(from + x->e.valid - 1),
			  (unsigned long long)x->e.off, strerror(-res));
	else if (cat_hash_bytes(buf, x->e.len) != x->e.hash)
		fsck_tell(
			f, "data", x->ino, NULL, false,
			"bytes %llu to %llu (at %llu in the pool) do not match their checksum: reading "
			"them is an error",
			(unsigned long long)from, (unsigned long long)(from + x->e.valid - 1),
			(unsigned long long)x->e.off);
	f->res->checked += x->e.len;
}

int fsck_extents(struct fsck *f)
{
	struct found *all;
	void *buf = NULL;
	size_t n, kept = 0;
	int res = collect(f, &all, &n);

	if (res < 0)
		return res;
	for (size_t x = 0; x < n; x++) {
		if (!mark(f, &all[x]))
			continue;
		f->res->extents++;
		f->res->bytes += all[x].e.len;
		all[kept++] = all[x];
	}
	if (f->opts->no_data)
		goto out_free;
	res = -ENOMEM;
	buf = malloc(f->img.meta.m.block);
	if (!buf)
		goto out_free;
	res = 0;
	posix_fadvise(pool_fd(f->pool), 0, 0, POSIX_FADV_SEQUENTIAL);
	for (size_t x = 0; x < kept; x++) {
		check_data(f, &all[x], buf);
		posix_fadvise(pool_fd(f->pool), (off_t)all[x].e.off, all[x].e.len,
			      POSIX_FADV_DONTNEED);
		if (f->opts->progress)
			f->opts->progress(f->opts->arg, f->res->checked, f->res->bytes);
	}
out_free:
	free(buf);
	free(all);
	return res;
}
