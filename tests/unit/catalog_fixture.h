/* SPDX-License-Identifier: Apache-2.0 */
/*
 * catalog_fixture.h - a catalog in a temporary folder, the block maps that the engine would hold
 * beside it, and a text that says everything about the tree, to compare states by.
 */
#ifndef TEST_CATALOG_FIXTURE_H
#define TEST_CATALOG_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/blockmap.h"
#include "engine/catalog_impl.h"

#define BLOCK	65536u
#define MAX_INO 65536u

struct map {
	struct extent *e;
	uint32_t n;
	bool changed; /* since the last freeze */
};

struct fixture {
	char dir[64];
	struct catalog *c;
	struct ns *ns;
	char err[600];
	const char *vfs;
	struct map maps[MAX_INO]; /* by number */
	uint64_t next_off;	  /* of a made-up extent */
};

static inline uint64_t rnd(uint64_t *rng, uint64_t below)
{
	*rng ^= *rng << 13;
	*rng ^= *rng >> 7;
	*rng ^= *rng << 17;
	return *rng % below;
}

static inline void map_set(struct fixture *fx, uint64_t ino, const struct extent *e, uint32_t n)
{
	struct map *m = &fx->maps[ino % MAX_INO];

	n = blockmap_trim(e, n);
	if (!n && !m->e)
		return;
	free(m->e);
	*m = (struct map){0};
	if (!n || !e)
		return;
	m->e = malloc(n * sizeof(*e));
	assert_non_null(m->e);
	memcpy(m->e, e, n * sizeof(*e));
	m->n = n;
}

static inline int fx_on_map(void *arg, struct map_copy *map)
{
	uint32_t n = map_copy_len(map);
	struct extent *e = calloc(n + 1, sizeof(*e));

	assert_non_null(e);
	assert_in_range(map->ino, NS_FIRST, MAX_INO - 1);
	for (uint32_t i = 0; i < map->n; i++)
		e[map->v[i].block] = map->v[i].e;
	map_set(arg, map->ino, e, n);
	free(e);
	free(map);
	return 0;
}

/* A whole map, as if all of it had changed; and what is stored beyond it is to go, up to block 1024. */
static inline int fx_txn_map(struct catalog_txn *t, uint64_t ino, const struct extent *e,
			     uint32_t n)
{
	int res = catalog_txn_map(t, ino, n);

	for (uint32_t seg = 0; !res && seg < max_u32(n, 1024) / BLOCKMAP_SEGMENT + 1; seg++) {
		uint32_t first = seg * BLOCKMAP_SEGMENT;
		uint32_t some = first < n ? (uint32_t)min_u64(n - first, BLOCKMAP_SEGMENT) : 0;

		res = catalog_txn_segment(t, ino, seg, some ? e + first : NULL, some);
	}
	return res;
}

static inline void fx_on_gone(void *arg, uint64_t ino)
{
	map_set(arg, ino, NULL, 0);
}

static inline int fx_open(struct fixture *fx, bool create, bool readonly)
{
	struct catalog_opts opts = {
		.dir = fx->dir,
		.create = create,
		.readonly = readonly,
		.block = BLOCK,
		.uuid = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16},
		.on_map = fx_on_map,
		.on_gone = fx_on_gone,
		.arg = fx,
		.vfs = fx->vfs,
	};
	int res;

	for (unsigned int i = 0; i < MAX_INO; i++)
		map_set(fx, i, NULL, 0);
	res = catalog_open(&opts, &fx->c, fx->err, sizeof(fx->err));
	fx->ns = res ? NULL : catalog_ns(fx->c);
	if (res)
		fx->c = NULL;
	return res;
}

static inline void fx_close(struct fixture *fx)
{
	catalog_close(fx->c);
	fx->c = NULL;
	fx->ns = NULL;
}

static inline void fx_reopen(struct fixture *fx)
{
	fx_close(fx);
	if (fx_open(fx, false, false))
		fail_msg("%s", fx->err);
}

static inline void remove_all(const char *dir)
{
	char path[512];
	struct dirent *d;
	DIR *dp = opendir(dir);

	while (dp && (d = readdir(dp))) {
		if (!strcmp(d->d_name, ".") || !strcmp(d->d_name, ".."))
			continue;
		snprintf(path, sizeof(path), "%s/%s", dir, d->d_name);
		unlink(path);
	}
	if (dp)
		closedir(dp);
	rmdir(dir);
}

/* In RAM where that is possible: what a sync is worth is sqlite_fault's to say here. */
static inline void make_dir(char dir[64])
{
	strcpy(dir, access("/dev/shm", W_OK) ? "/tmp/moment-test-XXXXXX"
					     : "/dev/shm/moment-test-XXXXXX");
	assert_non_null(mkdtemp(dir));
}

static inline struct fixture *fx_new(const char *vfs)
{
	struct fixture *fx = calloc(1, sizeof(*fx));

	assert_non_null(fx);
	fx->vfs = vfs;
	fx->next_off = 65536;
	make_dir(fx->dir);
	if (fx_open(fx, true, false))
		fail_msg("%s", fx->err);
	return fx;
}

static inline void fx_free(struct fixture *fx)
{
	fx_close(fx);
	for (unsigned int i = 0; i < MAX_INO; i++)
		map_set(fx, i, NULL, 0);
	remove_all(fx->dir);
	free(fx);
}

static inline int setup(void **state)
{
	*state = fx_new(NULL);
	return 0;
}

static inline int teardown(void **state)
{
	fx_free(*state);
	return 0;
}

/* The files of a running catalog, copied: what a kill would leave. */
static inline void copy_running(struct fixture *fx, struct fixture *to)
{
	static const char *const names[] = {"catalog.sqlite", "catalog.sqlite-wal"};
	char cmd[300];

	make_dir(to->dir);
	for (int n = 0; n < 2; n++) {
		snprintf(cmd, sizeof(cmd), "cp %s/%s %s/", fx->dir, names[n], to->dir);
		assert_int_equal(system(cmd), 0);
	}
}

/* A hash of what is in the folder, and how many files. */
static inline uint64_t folder_state(const char *dir)
{
	uint64_t sum = 0;
	struct dirent *d;
	DIR *dp = opendir(dir);

	assert_non_null(dp);
	while ((d = readdir(dp))) {
		static char buf[4 << 20];
		char path[512];
		int fd;

		snprintf(path, sizeof(path), "%s/%s", dir, d->d_name);
		fd = open(path, O_RDONLY);
		if (fd >= 0) {
			ssize_t n = read(fd, buf, sizeof(buf));

			sum += cat_hash_bytes(d->d_name, strlen(d->d_name)) *
			       (1 + cat_hash_bytes(buf, n > 0 ? (size_t)n : 0));
			close(fd);
		}
	}
	closedir(dp);
	return sum;
}

/* --- tampering ------------------------------------------------------------------------------ */

static inline sqlite3 *db_open(struct fixture *fx)
{
	char path[128];
	sqlite3 *db;

	snprintf(path, sizeof(path), "%s/catalog.sqlite", fx->dir);
	assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
	return db;
}

static inline void db_exec(sqlite3 *db, const char *sql)
{
	char *err = NULL;

	if (sqlite3_exec(db, sql, NULL, NULL, &err) != SQLITE_OK)
		fail_msg("%s: %s", sql, err);
}

/* The hash of the row that `st` is at, as it should be. */
static inline uint64_t db_row_hash(sqlite3 *db, sqlite3_stmt *st)
{
	struct ns_row row = {
		.ino = (uint64_t)sqlite3_column_int64(st, 0),
		.parent = (uint64_t)sqlite3_column_int64(st, 1),
		.name = (char *)sqlite3_column_blob(st, 2),
		.name_len = (uint32_t)sqlite3_column_bytes(st, 2),
		.mode = (uint32_t)sqlite3_column_int64(st, 3),
		.uid = (uint32_t)sqlite3_column_int64(st, 4),
		.gid = (uint32_t)sqlite3_column_int64(st, 5),
		.size = (uint64_t)sqlite3_column_int64(st, 6),
		.mtime = {sqlite3_column_int64(st, 7), sqlite3_column_int64(st, 8)},
		.ctime = {sqlite3_column_int64(st, 9), sqlite3_column_int64(st, 10)},
		.flags = (uint32_t)sqlite3_column_int64(st, 11),
	};
	struct cat_row hashes = {.ino = row.ino, .attr = cat_hash_attr(&row)};
	sqlite3_stmt *xattrs, *map;
	uint8_t packed[65536];
	size_t len = 0;

	row.name = row.name ? row.name : (char *)"";
	hashes.entry = cat_hash_entry(&row);
	sqlite3_prepare_v2(db, cat_sql[ST_SELECT_MAP], -1, &map, NULL);
	sqlite3_bind_int64(map, 1, (int64_t)row.ino);
	sqlite3_bind_int64(map, 2, (int64_t)row.ino);
	while (sqlite3_step(map) == SQLITE_ROW)
		hashes.map += (uint64_t)sqlite3_column_int64(map, 3);
	sqlite3_finalize(map);
	sqlite3_prepare_v2(db, cat_sql[ST_SELECT_XATTR], -1, &xattrs, NULL);
	sqlite3_bind_int64(xattrs, 1, (int64_t)row.ino);
	sqlite3_bind_int64(xattrs, 2, (int64_t)row.ino);
	while (sqlite3_step(xattrs) == SQLITE_ROW) {
		uint16_t n = (uint16_t)sqlite3_column_bytes(xattrs, 1);
		uint32_t v = (uint32_t)sqlite3_column_bytes(xattrs, 2);

		memcpy(packed + len, &n, 2);
		memcpy(packed + len + 2, &v, 4);
		memcpy(packed + len + 6, sqlite3_column_blob(xattrs, 1), n);
		if (v)
			memcpy(packed + len + 6 + n, sqlite3_column_blob(xattrs, 2), v);
		len += 6u + n + v;
	}
	sqlite3_finalize(xattrs);
	hashes.xattr = cat_hash_bytes(packed, len);
	return cat_hash_row(&hashes);
}

static inline bool count_only(void *arg, uint64_t ino, const char *text)
{
	(void)arg;
	(void)ino;
	(void)text;
	return true;
}

static inline void db_rehash_maps(sqlite3 *db)
{
	sqlite3_stmt *st, *up;

	sqlite3_prepare_v2(db, cat_sql[ST_SELECT_MAP], -1, &st, NULL);
	sqlite3_prepare_v2(db, "UPDATE map SET hash = ?3 WHERE ino = ?1 AND seg = ?2", -1, &up, NULL);
	sqlite3_bind_int64(st, 1, 0);
	sqlite3_bind_int64(st, 2, INT64_MAX);
	while (sqlite3_step(st) == SQLITE_ROW) {
		sqlite3_bind_int64(up, 1, sqlite3_column_int64(st, 0));
		sqlite3_bind_int64(up, 2, sqlite3_column_int64(st, 1));
		sqlite3_bind_int64(up, 3,
				   (int64_t)cat_hash_segment((uint64_t)sqlite3_column_int64(st, 0),
							     (uint32_t)sqlite3_column_int64(st, 1),
							     sqlite3_column_blob(st, 2),
							     (size_t)sqlite3_column_bytes(st, 2)));
		assert_int_equal(sqlite3_step(up), SQLITE_DONE);
		sqlite3_reset(up);
	}
	sqlite3_finalize(st);
	sqlite3_finalize(up);
}

/* Makes every checksum right again, so that only the shape of the tree is wrong. */
static inline void db_rehash(sqlite3 *db)
{
	struct cat_check check = {.problem = count_only};
	struct cat_meta meta;
	sqlite3_stmt *st, *up;

	db_rehash_maps(db);
	assert_int_equal(cat_load_meta(db, &meta, &check), 0);
	meta.inodes = meta.sum = 0;
	sqlite3_prepare_v2(db, cat_sql[ST_SELECT], -1, &st, NULL);
	sqlite3_prepare_v2(db, "UPDATE inode SET hash = ?2 WHERE ino = ?1", -1, &up, NULL);
	sqlite3_bind_int64(st, 1, 0);
	sqlite3_bind_int64(st, 2, INT64_MAX);
	while (sqlite3_step(st) == SQLITE_ROW) {
		uint64_t hash = db_row_hash(db, st);

		meta.inodes++;
		meta.sum += hash;
		sqlite3_bind_int64(up, 1, sqlite3_column_int64(st, 0));
		sqlite3_bind_int64(up, 2, (int64_t)hash);
		assert_int_equal(sqlite3_step(up), SQLITE_DONE);
		sqlite3_reset(up);
	}
	sqlite3_finalize(st);
	sqlite3_finalize(up);
	sqlite3_prepare_v2(db, "UPDATE meta SET inodes = ?, hash_sum = ?, hash = ?", -1, &up, NULL);
	sqlite3_bind_int64(up, 1, (int64_t)meta.inodes);
	sqlite3_bind_int64(up, 2, (int64_t)meta.sum);
	sqlite3_bind_int64(up, 3, (int64_t)cat_hash_meta(&meta));
	assert_int_equal(sqlite3_step(up), SQLITE_DONE);
	sqlite3_finalize(up);
}

/* --- commits -------------------------------------------------------------------------------- */

static inline int fx_freeze(struct fixture *fx, uint64_t step, struct catalog_txn **t)
{
	bool changed;
	int res = catalog_freeze(fx->c, step, step > 0, t, &changed);

	for (uint64_t ino = 0; !res && ino < MAX_INO; ino++) {
		struct ns_attr a;

		if (!fx->maps[ino].changed)
			continue;
		if (ns_getattr(fx->ns, ino, &a) || !a.nlink || a.flags & NS_HELD)
			continue;
		res = fx_txn_map(*t, ino, fx->maps[ino].e, fx->maps[ino].n);
		assert_int_equal(res, 0);
		fx->maps[ino].changed = false;
	}
	return res;
}

static inline int fx_finish(struct fixture *fx, struct catalog_txn *t)
{
	int res = catalog_commit(fx->c, t);

	for (uint64_t ino = 0; res && ino < MAX_INO; ino++)
		fx->maps[ino].changed |= catalog_txn_has(t, ino);
	catalog_txn_end(fx->c, t, res);
	return res;
}

static inline int fx_commit(struct fixture *fx, uint64_t step)
{
	struct catalog_txn *t;
	int res = fx_freeze(fx, step, &t);

	return res ? res : fx_finish(fx, t);
}

/* --- making things -------------------------------------------------------------------------- */

static inline uint64_t mkfile(struct fixture *fx, uint64_t dir, const char *name)
{
	struct ns_attr a;

	assert_int_equal(ns_create(fx->ns, dir, name, 0644, 1, 2, false, &a), 0);
	return a.ino;
}

static inline uint64_t mkdir_in(struct fixture *fx, uint64_t dir, const char *name)
{
	struct ns_attr a;

	assert_int_equal(ns_mkdir(fx->ns, dir, name, 0755, 1, 2, false, &a), 0);
	return a.ino;
}

/* As a write would: a new size and a map of new extents, some of them holes. */
static inline void fill(struct fixture *fx, uint64_t ino, uint64_t size, uint64_t *rng)
{
	uint32_t n = (uint32_t)((size + BLOCK - 1) / BLOCK);
	struct extent *e = calloc(n + 1, sizeof(*e));

	assert_non_null(e);
	for (uint32_t b = 0; b < n; b++) {
		if (rng && !rnd(rng, 4))
			continue;
		e[b] = (struct extent){fx->next_off, MOMENT_UNIT, 1 + (uint32_t)(ino % MOMENT_UNIT),
				       ino * 1000003 + b};
		fx->next_off += MOMENT_UNIT;
	}
	ns_publish(fx->ns, ino, size, (uint64_t)n * MOMENT_UNIT, true);
	map_set(fx, ino, e, n);
	fx->maps[ino].changed = true;
	free(e);
}

/* --- everything as a text ----------------------------------------------------------------------
 */

struct names {
	char **v;
	size_t n;
};

static inline bool collect(void *arg, const char *name, const struct ns_attr *a, uint64_t cookie)
{
	struct names *names = arg;

	(void)a;
	(void)cookie;
	names->v = realloc(names->v, (names->n + 1) * sizeof(*names->v));
	names->v[names->n++] = strdup(name);
	return true;
}

static inline int by_name(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

static inline void dump_one(struct fixture *fx, FILE *f, const char *path, const struct ns_attr *a)
{
	char list[4096], value[4096];
	int64_t len = ns_listxattr(fx->ns, a->ino, list, sizeof(list));

	fprintf(f, "%s ino %lu mode %o %u:%u links %u size %lu m %ld.%09ld c %ld.%09ld flags %x\n",
		path, a->ino, a->mode, a->uid, a->gid, a->nlink, a->size, a->mtime.tv_sec,
		a->mtime.tv_nsec, a->ctime.tv_sec, a->ctime.tv_nsec, a->flags & NS_STORED_FLAGS);
	assert_true(len >= 0);
	for (int64_t at = 0; at < len; at += (int64_t)strlen(list + at) + 1) {
		int64_t n = ns_getxattr(fx->ns, a->ino, list + at, value, sizeof(value));

		assert_true(n >= 0);
		fprintf(f, "  %s=%.*s\n", list + at, (int)n, value);
	}
	for (uint32_t b = 0; b < fx->maps[a->ino % MAX_INO].n; b++) {
		const struct extent *e = &fx->maps[a->ino % MAX_INO].e[b];

		fprintf(f, "  %u: %lu+%u/%u %lx\n", b, e->off, e->len, e->valid, e->hash);
	}
}

static inline void dump_dir(struct fixture *fx, FILE *f, const char *path, uint64_t ino)
{
	struct names names = {0};

	assert_int_equal(ns_readdir(fx->ns, ino, 0, false, collect, &names), 0);
	if (names.n)
		qsort(names.v, names.n, sizeof(*names.v), by_name);
	for (size_t n = 0; n < names.n; n++) {
		char child[8192];
		struct ns_attr a;

		snprintf(child, sizeof(child), "%.4000s/%s", path, names.v[n]);
		assert_int_equal(ns_peek(fx->ns, ino, names.v[n], &a), 0);
		dump_one(fx, f, child, &a);
		if (S_ISDIR(a.mode))
			dump_dir(fx, f, child, a.ino);
		free(names.v[n]);
	}
	free(names.v);
}

static inline char *dump(struct fixture *fx)
{
	char *text = NULL;
	size_t len;
	FILE *f = open_memstream(&text, &len);
	struct ns_attr a;

	assert_non_null(f);
	assert_int_equal(ns_getattr(fx->ns, NS_ROOT, &a), 0);
	dump_one(fx, f, "", &a);
	dump_dir(fx, f, "", NS_ROOT);
	fclose(f);
	return text;
}

/* Frees both. */
static inline void assert_same_dump(char *a, char *b)
{
	if (strcmp(a, b)) {
		size_t at = 0;

		while (a[at] == b[at])
			at++;
		while (at && a[at - 1] != '\n')
			at--;
		fail_msg("the trees differ:\n%.300s\n---\n%.300s", a + at, b + at);
	}
	free(a);
	free(b);
}

/* --- random changes -------------------------------------------------------------------------- */

static inline uint64_t random_inode(struct fixture *fx, uint64_t *rng, bool dir)
{
	for (int tries = 0; tries < 200; tries++) {
		uint64_t ino = rnd(rng, fx->ns->next_ino - 1) + NS_ROOT;
		struct ns_attr a = {0}; /* for valgrind: compilers read it too early */

		if (!ns_getattr(fx->ns, ino, &a) && a.nlink && !S_ISDIR(a.mode) == !dir &&
		    ino < MAX_INO && !(a.flags & NS_GENERATED))
			return ino;
	}
	return dir ? NS_ROOT : 0;
}

static inline void random_change(struct fixture *fx, uint64_t *rng)
{
	uint64_t dir = random_inode(fx, rng, true), file = random_inode(fx, rng, false);
	char name[16], to[16];
	struct ns_attr a = {0};

	snprintf(name, sizeof(name), "n%lu", rnd(rng, 15));
	snprintf(to, sizeof(to), "n%lu", rnd(rng, 15));
	switch (rnd(rng, 12)) {
	case 0:
	case 1:
		if (!ns_create(fx->ns, dir, name, 0600 + (uint32_t)rnd(rng, 64), 5, 6, false, &a))
			fill(fx, a.ino, rnd(rng, 10 * BLOCK), rng);
		break;
	case 2:
		ns_mkdir(fx->ns, dir, name, 0755, 7, 8, false, &a);
		break;
	case 3:
		ns_unlink(fx->ns, dir, name);
		break;
	case 4:
		ns_rmdir(fx->ns, dir, name);
		break;
	case 5:
	case 6:
		ns_rename(fx->ns, dir, name, random_inode(fx, rng, true), to, 0);
		break;
	case 7:
	case 8:
		if (file)
			fill(fx, file, rnd(rng, 10 * BLOCK), rng);
		break;
	case 9:
		snprintf(name, sizeof(name), "user.%lu", rnd(rng, 4));
		if (rnd(rng, 3))
			ns_setxattr(fx->ns, file ? file : dir, name, to, strlen(to), 0);
		else
			ns_removexattr(fx->ns, file ? file : dir, name);
		break;
	case 10:
		a.mode = (uint32_t)rnd(rng, 512);
		a.uid = (uint32_t)rnd(rng, 9);
		ns_setattr(fx->ns, file ? file : dir, NS_SET_MODE | NS_SET_UID, &a, &a);
		break;
	case 11:
		if (dir != NS_ROOT)
			ns_make_meta(fx->ns, dir, 0);
		break;
	}
}

#endif
