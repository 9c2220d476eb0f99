/* SPDX-License-Identifier: Apache-2.0 */
/*
 * catalog_upgrade.c - a catalog of version 1 becomes one of this version.
 *
 * In version 1 each row of table inode had its whole block map in a column. One transaction moves
 * the maps to a table of segments and writes the hashes anew; the state itself, and the number of
 * its commit, stay. After a crash it is there in the one form or the other. Main thread, while the
 * catalog is opened for writing; one that is opened to be read is only read.
 */
#include "engine/catalog_impl.h"

#include <errno.h>
#include <string.h>

static int run_text(sqlite3 *db, sqlite3_stmt **st, const char *text)
{
	return cat_errno(db, sqlite3_prepare_v2(db, text, -1, st, NULL));
}

/* Writes the segments of one map. *sum: of their hashes. */
static int write_map(sqlite3_stmt *put, const struct map_copy *m, uint64_t *sum)
{
	uint32_t at = 0;
	int res = 0;

	while (!res && at < m->n) {
		struct extent e[BLOCKMAP_SEGMENT] = {0};
		uint32_t seg = m->v[at].block / BLOCKMAP_SEGMENT, n = 0;

		for (; at < m->n && m->v[at].block / BLOCKMAP_SEGMENT == seg; at++) {
			n = m->v[at].block % BLOCKMAP_SEGMENT + 1;
			e[n - 1] = m->v[at].e;
		}
		res = cat_write_segment(put, m->ino, seg, e, n, sum);
	}
	return res;
}

static int write_all(sqlite3 *db, struct cat_image *img)
{
	sqlite3_stmt *put = NULL, *hash = NULL, *meta = NULL;
	int res = run_text(db, &put, cat_sql[ST_MAP_PUT]);

	if (!res)
		res = run_text(db, &hash, "UPDATE inode SET hash = ?2 WHERE ino = ?1");
	if (!res)
		res = run_text(db, &meta, cat_sql[ST_META]);
	for (size_t r = 0; !res && r < img->n; r++) {
		struct cat_rec *rec = &img->recs[r];

		if (!rec->map)
			continue;
		img->meta.sum -= cat_hash_row(&rec->hashes);
		rec->hashes.map = 0;
		res = write_map(put, rec->map, &rec->hashes.map);
		img->meta.sum += cat_hash_row(&rec->hashes);
		sqlite3_bind_int64(hash, 1, (int64_t)rec->row.ino);
		sqlite3_bind_int64(hash, 2, (int64_t)cat_hash_row(&rec->hashes));
		if (!res)
			res = cat_run(hash);
	}
	img->meta.m.version = CATALOG_VERSION;
	if (!res)
		res = cat_write_meta(meta, &img->meta);
	sqlite3_finalize(put);
	sqlite3_finalize(hash);
	sqlite3_finalize(meta);
	return res;
}

static int try_upgrade(sqlite3 *db, struct cat_image *img)
{
	int res = cat_exec(db, "BEGIN IMMEDIATE");

	if (res < 0)
		return res;
	res = cat_exec(db, cat_schema_map);
	if (!res)
		res = write_all(db, img);
	if (!res)
		res = cat_exec(db, "ALTER TABLE inode DROP COLUMN map");
	if (!res)
		res = cat_exec(db, "PRAGMA user_version = " CATALOG_STR(CATALOG_VERSION));
	if (!res)
		res = cat_exec(db, "COMMIT");
	if (res < 0 && !sqlite3_get_autocommit(db))
		cat_exec(db, "ROLLBACK");
	return res;
}

int cat_upgrade(struct catalog *c, struct cat_image *img)
{
	int res = try_upgrade(c->db, img);

	if (res == -ENOSPC && cat_ballast_drop(c))
		res = try_upgrade(c->db, img);
	return res;
}
