/* SPDX-License-Identifier: Apache-2.0 */
/*
 * catalog_load.c - reads the catalog and believes nothing: every value is checked for type and
 * range, every row against its hash, all rows together against the sum, then catalog_tree.c looks
 * at the shape of the tree. What is wrong is told to a function, which decides whether to go on.
 *
 * Work or main thread; nobody else uses the connection meanwhile.
 */
#include "engine/catalog_impl.h"

#include <endian.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/blockmap.h"

/* Reports; 0 to go on, -EUCLEAN to stop. */
int cat_problem(struct cat_check *check, uint64_t ino, const char *fmt, ...)
{
	char text[600];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	check->problems++;
	return check->problem(check->arg, ino, text) ? 0 : -EUCLEAN;
}

/* --- typed columns -------------------------------------------------------------------------- */

/* An integer from 0 to max. */
static bool column_uint(sqlite3_stmt *st, int col, uint64_t max, uint64_t *v)
{
	if (sqlite3_column_type(st, col) != SQLITE_INTEGER)
		return false;
	*v = (uint64_t)sqlite3_column_int64(st, col);
	return *v <= max;
}

/* Any 64 bits. */
static bool column_bits(sqlite3_stmt *st, int col, uint64_t *v)
{
	return column_uint(st, col, UINT64_MAX, v);
}

static bool column_u32(sqlite3_stmt *st, int col, uint32_t *v)
{
	uint64_t wide;

	if (!column_uint(st, col, UINT32_MAX, &wide))
		return false;
	*v = (uint32_t)wide;
	return true;
}

static bool column_time(sqlite3_stmt *st, int col, struct timespec *t)
{
	uint64_t sec, nsec;

	if (!column_bits(st, col, &sec) || !column_uint(st, col + 1, 999999999, &nsec))
		return false;
	t->tv_sec = (time_t)sec;
	t->tv_nsec = (long)nsec;
	return true;
}

static bool column_blob(sqlite3_stmt *st, int col, size_t min, size_t max, const void **p,
			size_t *len)
{
	if (sqlite3_column_type(st, col) != SQLITE_BLOB)
		return false;
	*p = sqlite3_column_blob(st, col);
	*len = (size_t)sqlite3_column_bytes(st, col);
	return *len >= min && *len <= max && (*p || !*len);
}

/* --- meta ----------------------------------------------------------------------------------- */

/* The first column of the first row; 0 when there is none. */
static int query_int(sqlite3 *db, const char *text, int64_t *v)
{
	sqlite3_stmt *st = NULL;
	int rc = sqlite3_prepare_v2(db, text, -1, &st, NULL);

	*v = 0;
	if (rc == SQLITE_OK)
		rc = sqlite3_step(st);
	if (rc == SQLITE_ROW)
		*v = sqlite3_column_int64(st, 0);
	sqlite3_finalize(st);
	return cat_errno(db, rc);
}

/*
 * Is it a catalog, and of a format that we know? The version stands in two places, so that a
 * damaged one is not taken for a newer format.
 */
static int check_version(sqlite3 *db, struct cat_check *check)
{
	int64_t app, user, version;
	int res = query_int(db, "PRAGMA application_id", &app);

	if (!res)
		res = query_int(db, "PRAGMA user_version", &user);
	if (!res)
		res = query_int(db, "SELECT version FROM meta", &version);
	if (res == -EUCLEAN)
		cat_problem(check, 0, "not a catalog, or damaged: %s", sqlite3_errmsg(db));
	if (res < 0)
		return res;
	if (app == CATALOG_APP_ID && user == version && user > CATALOG_VERSION)
		return -EPROTONOSUPPORT;
	if (app == CATALOG_APP_ID && (user == CATALOG_VERSION || user == CATALOG_V1))
		return 0;
	cat_problem(check, 0,
		    "not a catalog, or damaged: the file header says application %lld, "
		    "version %lld",
		    (long long)app, (long long)user);
	return -EUCLEAN;
}

int cat_load_meta(sqlite3 *db, struct cat_meta *m, struct cat_check *check)
{
	sqlite3_stmt *st = NULL;
	const void *uuid;
	uint64_t hash;
	size_t len;
	int rc, res;

	*m = (struct cat_meta){0};
	res = check_version(db, check);
	if (res < 0)
		return res;
	rc = sqlite3_prepare_v2(
		db,
		"SELECT version, block, uuid, commit_seq, step, commit_time, next_ino,"
		" inodes, hash_sum, hash FROM meta WHERE id = 1",
		-1, &st, NULL);
	if (rc == SQLITE_OK)
		rc = sqlite3_step(st);
	res = cat_errno(db, rc);
	if (res < 0) {
		if (res == -EUCLEAN)
			cat_problem(check, 0, "the meta row cannot be read: %s",
				    sqlite3_errmsg(db));
		goto out_finalize;
	}
	if (rc != SQLITE_ROW) {
		cat_problem(check, 0, "the meta row is missing");
		res = -EUCLEAN;
		goto out_finalize;
	}
	res = -EUCLEAN;
	m->m.has_step = sqlite3_column_type(st, 4) != SQLITE_NULL;
	if (!column_u32(st, 0, &m->m.version) || !column_u32(st, 1, &m->m.block) ||
	    !column_blob(st, 2, sizeof(m->m.uuid), sizeof(m->m.uuid), &uuid, &len) ||
	    !column_bits(st, 3, &m->m.commit_seq) ||
	    (m->m.has_step && !column_bits(st, 4, &m->m.step)) ||
	    !column_bits(st, 5, &m->m.commit_time_ns) || !column_bits(st, 6, &m->next_ino) ||
	    !column_bits(st, 7, &m->inodes) || !column_bits(st, 8, &m->sum) ||
	    !column_bits(st, 9, &hash)) {
		cat_problem(check, 0, "the meta row has a value of the wrong type");
		goto out_finalize;
	}
	memcpy(m->m.uuid, uuid, sizeof(m->m.uuid));
	if (hash != cat_hash_meta(m)) {
		cat_problem(check, 0, "the meta row does not match its checksum");
		goto out_finalize;
	}
	if ((m->m.version != CATALOG_VERSION && m->m.version != CATALOG_V1) || m->m.block < MOMENT_UNIT ||
	    m->m.block & (m->m.block - 1) || m->next_ino < NS_FIRST || m->next_ino > NS_LAST) {
		cat_problem(check, 0, "the meta row has a value out of range");
		goto out_finalize;
	}
	res = 0;
out_finalize:
	sqlite3_finalize(st);
	return res;
}

int cat_quick_check(sqlite3 *db, struct cat_check *check)
{
	sqlite3_stmt *st = NULL;
	int rc, res = 0;

	rc = sqlite3_prepare_v2(db, "PRAGMA quick_check(20)", -1, &st, NULL);
	while (!res && rc == SQLITE_OK && (rc = sqlite3_step(st)) == SQLITE_ROW) {
		const char *text = (const char *)sqlite3_column_text(st, 0);

		rc = SQLITE_OK;
		if (!text)
			res = -ENOMEM;
		else if (strcmp(text, "ok"))
			res = cat_problem(check, 0, "SQLite: %s", text);
	}
	if (!res && rc != SQLITE_DONE) {
		res = cat_errno(db, rc);
		if (res == -EUCLEAN)
			cat_problem(check, 0, "SQLite: %s", sqlite3_errmsg(db));
	}
	sqlite3_finalize(st);
	return res;
}

/* --- rows ----------------------------------------------------------------------------------- */

void cat_rec_fini(struct cat_rec *rec)
{
	ns_row_fini(&rec->row);
	free(rec->map); /* in no list */
	rec->map = NULL;
}

void cat_image_fini(struct cat_image *img)
{
	for (size_t r = 0; r < img->n; r++)
		cat_rec_fini(&img->recs[r]);
	free(img->recs);
	*img = (struct cat_image){0};
}

/* Adds a blob to the map, whose first block is `first`. */
static int add_map(struct cat_rec *rec, uint32_t block, uint32_t first, const void *blob,
		   size_t len, const char **why)
{
	uint32_t at;

	if (!rec->map)
		rec->map = map_copy_new(rec->row.ino, rec->row.size, 1);
	return rec->map ? blockmap_decode(blob, len, first, block, &rec->map, why, &at) : -ENOMEM;
}

/* The row of a SELECT, without extended attributes; in version 1 with the map. -EUCLEAN: *why says what is wrong. */
static int read_row(sqlite3_stmt *st, uint32_t block, struct cat_rec *rec, uint64_t *hash,
		    const char **why)
{
	struct ns_row *row = &rec->row;
	const void *name, *map = NULL;
	size_t name_len, map_len = 0;
	int res = 0;

	*rec = (struct cat_rec){0};
	*why = "has a value of the wrong type or out of range";
	if (!column_uint(st, 0, NS_LAST - 1, &row->ino) || row->ino < NS_ROOT ||
	    !column_uint(st, 1, NS_LAST - 1, &row->parent) ||
	    !column_blob(st, 2, 0, NS_NAME_MAX, &name, &name_len) ||
	    !column_u32(st, 3, &row->mode) || !column_u32(st, 4, &row->uid) ||
	    !column_u32(st, 5, &row->gid) || !column_uint(st, 6, NS_FILE_SIZE_MAX, &row->size) ||
	    !column_time(st, 7, &row->mtime) || !column_time(st, 9, &row->ctime) ||
	    !column_u32(st, 11, &row->flags) || !column_bits(st, 12, hash))
		return -EUCLEAN;
	if (sqlite3_column_count(st) > 13 && sqlite3_column_type(st, 13) != SQLITE_NULL &&
	    !column_blob(st, 13, 1, SIZE_MAX, &map, &map_len))
		return -EUCLEAN;
	/* With any NUL that is in it: catalog_tree.c will not like it. */
	row->name = calloc(1, name_len + 1);
	if (!row->name)
		return -ENOMEM;
	if (name_len)
		memcpy(row->name, name, name_len);
	row->name_len = (uint32_t)name_len;
	rec->hashes.ino = row->ino;
	rec->hashes.entry = cat_hash_entry(row);
	rec->hashes.attr = cat_hash_attr(row);
	rec->hashes.map = cat_hash_bytes(map, map_len);
	rec->hashes.size = row->size;
	if (map_len)
		res = add_map(rec, block, 0, map, map_len, why);
	rec->hashes.n_map = map_copy_len(rec->map);
	if (res < 0)
		cat_rec_fini(rec);
	return res;
}

/* Appends one extended attribute to a packed list. */
static int pack_xattr(sqlite3_stmt *st, struct ns_row *row)
{
	const void *name, *value;
	size_t name_len, size, len = row->xattrs_len;
	uint16_t n;
	uint32_t v;
	uint8_t *p;

	if (!column_blob(st, 1, 1, NS_XATTR_NAME_MAX, &name, &name_len) ||
	    !column_blob(st, 2, 0, NS_XATTR_VALUE_MAX, &value, &size))
		return -EUCLEAN;
	p = realloc(row->xattrs, len + 6 + name_len + size);
	if (!p)
		return -ENOMEM;
	row->xattrs = p;
	row->xattrs_len = len + 6 + name_len + size;
	n = htole16((uint16_t)name_len);
	v = htole32((uint32_t)size);
	memcpy(p + len, &n, 2);
	memcpy(p + len + 2, &v, 4);
	memcpy(p + len + 6, name, name_len);
	if (size)
		memcpy(p + len + 6 + name_len, value, size);
	return 0;
}

/* A statement whose rows belong to inodes, several to one. */
struct side {
	sqlite3_stmt *st; /* NULL: this version has none */
	const char *what;
	int rc;
	uint64_t ino; /* of the row it is at; UINT64_MAX: none */
};

/* Statements over the same range of numbers, read side by side. */
struct cursor {
	sqlite3_stmt *rows;
	struct side xattrs, maps;
	struct cat_check *check; /* told of what is there without an inode */
};

static void next_side(struct side *s)
{
	s->rc = s->st ? sqlite3_step(s->st) : SQLITE_DONE;
	s->ino = UINT64_MAX;
	if (s->rc == SQLITE_ROW)
		s->ino = (uint64_t)sqlite3_column_int64(s->st, 0);
}

static void start(sqlite3_stmt *st, uint64_t first, uint64_t last)
{
	sqlite3_reset(st);
	sqlite3_bind_int64(st, 1, (int64_t)first);
	sqlite3_bind_int64(st, 2, (int64_t)last);
}

static void cursor_start(struct cursor *cur, uint64_t first, uint64_t last)
{
	start(cur->rows, first, last);
	start(cur->xattrs.st, first, last);
	if (cur->maps.st)
		start(cur->maps.st, first, last);
	cur->xattrs.what = "extended attributes";
	cur->maps.what = "a block map";
	next_side(&cur->xattrs);
	next_side(&cur->maps);
}

/* What belongs to numbers below `ino` is nobody's. */
static int skip_orphans(struct cursor *cur, struct side *s, uint64_t ino)
{
	uint64_t last = 0;
	int res = 0;

	while (!res && s->rc == SQLITE_ROW && s->ino < ino) {
		if (s->ino != last)
			res = cat_problem(cur->check, s->ino, "inode %lld: %s, but no row",
					  (long long)s->ino, s->what);
		last = s->ino;
		next_side(s);
	}
	return res;
}

/* The segment of the map that the statement is at. */
static int read_segment(sqlite3_stmt *st, uint32_t block, struct cat_rec *rec, const char **why)
{
	uint64_t seg, hash;
	const void *data;
	size_t len;

	*why = "has a segment of its block map of the wrong type or out of range";
	if (!column_uint(st, 1, UINT32_MAX / BLOCKMAP_SEGMENT - 1, &seg) ||
	    !column_blob(st, 2, 1, BLOCKMAP_SEGMENT * BLOCKMAP_ENTRY, &data, &len) ||
	    !column_bits(st, 3, &hash))
		return -EUCLEAN;
	*why = "has a segment of its block map that does not match its checksum";
	if (hash != cat_hash_segment(rec->row.ino, (uint32_t)seg, data, len))
		return -EUCLEAN;
	rec->hashes.map += hash;
	return add_map(rec, block, (uint32_t)seg * BLOCKMAP_SEGMENT, data, len, why);
}

/*
 * The next inode, complete and checked against its hash. 1, 0 at the end, -errno. -EUCLEAN with
 * *why: says what is wrong with inode *ino, and the cursor can go on. -ECANCELED: check said stop.
 */
static int cursor_next(struct cursor *cur, sqlite3 *db, uint32_t block, struct cat_rec *rec,
		       uint64_t *ino, const char **why)
{
	int rc = sqlite3_step(cur->rows), res;
	struct ns_xattr *list;
	uint64_t hash = 0;

	*ino = 0;
	*why = NULL;
	if (rc != SQLITE_ROW && rc != SQLITE_DONE)
		return cat_errno(db, rc);
	if (rc == SQLITE_ROW)
		*ino = (uint64_t)sqlite3_column_int64(cur->rows, 0);
	res = skip_orphans(cur, &cur->xattrs, rc == SQLITE_ROW ? *ino : UINT64_MAX);
	if (!res)
		res = skip_orphans(cur, &cur->maps, rc == SQLITE_ROW ? *ino : UINT64_MAX);
	if (res < 0)
		return -ECANCELED;
	if (rc == SQLITE_DONE)
		return 0;
	res = read_row(cur->rows, block, rec, &hash, why);
	for (; cur->xattrs.ino == *ino; next_side(&cur->xattrs)) {
		if (!res) {
			res = pack_xattr(cur->xattrs.st, &rec->row);
			*why = "has an extended attribute of the wrong type or size";
		}
	}
	for (; cur->maps.ino == *ino; next_side(&cur->maps))
		if (!res)
			res = read_segment(cur->maps.st, block, rec, why);
	if (!res && cur->xattrs.rc != SQLITE_ROW && cur->xattrs.rc != SQLITE_DONE)
		res = cat_errno(db, cur->xattrs.rc);
	if (!res && cur->maps.rc != SQLITE_ROW && cur->maps.rc != SQLITE_DONE)
		res = cat_errno(db, cur->maps.rc);
	if (res < 0)
		goto out_fini;
	rec->hashes.n_map = map_copy_len(rec->map);
	rec->hashes.xattr = cat_hash_bytes(rec->row.xattrs, rec->row.xattrs_len);
	*why = "does not match its checksum";
	res = -EUCLEAN;
	if (hash != cat_hash_row(&rec->hashes))
		goto out_fini;
	*why = "has extended attributes out of order";
	res = ns_xattrs_unpack(rec->row.xattrs, rec->row.xattrs_len, &list);
	if (res < 0)
		goto out_fini;
	ns_xattrs_free(list);
	return 1;

out_fini:
	cat_rec_fini(rec);
	return res;
}

static int append(struct cat_image *img, const struct cat_rec *rec)
{
	if (img->n == img->cap) {
		size_t cap = img->cap ? img->cap * 2 : 256;
		struct cat_rec *recs = realloc(img->recs, cap * sizeof(*recs));

		if (!recs)
			return -ENOMEM;
		img->recs = recs;
		img->cap = cap;
	}
	img->recs[img->n++] = *rec;
	return 0;
}

static int load_rows(sqlite3 *db, struct cursor *cur, struct cat_image *img,
		     struct cat_check *check)
{
	uint64_t ino, count = 0, sum = 0;
	struct cat_rec rec;
	const char *why;
	int res;

	cursor_start(cur, 0, INT64_MAX);
	do {
		res = cursor_next(cur, db, img->meta.m.block, &rec, &ino, &why);
		if (res > 0) {
			sum += cat_hash_row(&rec.hashes);
			if (append(img, &rec) < 0) {
				cat_rec_fini(&rec);
				return -ENOMEM;
			}
		} else if (res == -EUCLEAN && why) {
			res = cat_problem(check, ino, "inode %lld: the row %s", (long long)ino,
					  why);
			res = res < 0 ? res : 1;
		} else if (res == -EUCLEAN) {
			cat_problem(check, 0, "reading inodes: %s", sqlite3_errmsg(db));
		}
		count += res > 0;
		if (res < 0)
			return res == -ECANCELED ? -EUCLEAN : res;
	} while (res > 0);
	if (cur->xattrs.rc != SQLITE_DONE || cur->maps.rc != SQLITE_DONE) {
		const struct side *s = cur->xattrs.rc != SQLITE_DONE ? &cur->xattrs : &cur->maps;

		cat_problem(check, 0, "reading %s: %s", s->what, sqlite3_errmsg(db));
		return cat_errno(db, s->rc);
	}
	if (count != img->meta.inodes)
		return cat_problem(check, 0, "there are %llu inodes where the meta row says %llu",
				   (unsigned long long)count, (unsigned long long)img->meta.inodes);
	/* Where a row is bad anyway, the sum says nothing new. */
	if (sum != img->meta.sum && count == img->n)
		return cat_problem(check, 0,
				   "the checksums of the inodes do not add up to the sum "
				   "in the meta row: a row was replaced by an older one");
	return 0;
}

int cat_load(sqlite3 *db, struct cat_image *img, struct cat_check *check)
{
	struct cursor cur = {.check = check};
	bool v1;
	int rc, res;

	*img = (struct cat_image){0};
	res = cat_load_meta(db, &img->meta, check);
	if (res < 0)
		return res;
	v1 = img->meta.m.version == CATALOG_V1;
	rc = sqlite3_prepare_v2(db, v1 ? cat_select_v1 : cat_sql[ST_SELECT], -1, &cur.rows, NULL);
	if (rc == SQLITE_OK)
		rc = sqlite3_prepare_v2(db, cat_sql[ST_SELECT_XATTR], -1, &cur.xattrs.st, NULL);
	if (rc == SQLITE_OK && !v1)
		rc = sqlite3_prepare_v2(db, cat_sql[ST_SELECT_MAP], -1, &cur.maps.st, NULL);
	res = cat_errno(db, rc);
	if (res == -EUCLEAN)
		cat_problem(check, 0, "the tables cannot be read: %s", sqlite3_errmsg(db));
	if (!res)
		res = load_rows(db, &cur, img, check);
	sqlite3_finalize(cur.rows);
	sqlite3_finalize(cur.xattrs.st);
	sqlite3_finalize(cur.maps.st);
	if (!res)
		res = cat_check_tree(img, check);
	if (res < 0)
		cat_image_fini(img);
	return res;
}

static bool stop_at_problem(void *arg, uint64_t ino, const char *text)
{
	(void)arg;
	(void)ino;
	(void)text;
	return false;
}

int cat_load_one(struct catalog *c, uint64_t ino, struct cat_rec *rec)
{
	struct cat_check check = {.problem = stop_at_problem};
	struct cursor cur = {.rows = c->st[ST_SELECT],
			     .xattrs.st = c->st[ST_SELECT_XATTR],
			     .maps.st = c->st[ST_SELECT_MAP],
			     .check = &check};
	const char *why;
	uint64_t found;
	int res;

	cursor_start(&cur, ino, ino);
	res = cursor_next(&cur, c->db, c->meta.m.block, rec, &found, &why);
	sqlite3_reset(cur.rows);
	sqlite3_reset(cur.xattrs.st);
	sqlite3_reset(cur.maps.st);
	if (res < 0)
		return res == -ECANCELED ? -EUCLEAN : res;
	return res ? 0 : -ENOENT;
}
