/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_catalog_v1.c - catalogs of version 1, which had a file's whole block map in a column of table
 * inode: read as they are, and turned into version 2 by the first one that opens them for writing.
 */
#include "catalog_fixture.h"

/* The blob that version 1 had for the map of a file, or NULL without data. */
static uint8_t *v1_blob(struct fixture *fx, uint64_t ino, size_t *len)
{
	const struct map *m = &fx->maps[ino];
	uint8_t *blob;

	*len = (size_t)m->n * BLOCKMAP_ENTRY;
	if (!*len)
		return NULL;
	blob = malloc(*len);
	assert_non_null(blob);
	blockmap_encode(m->e, m->n, blob);
	return blob;
}

/* What the fixture committed becomes what a momentfs of before would have written. */
static void make_v1(struct fixture *fx)
{
	struct cat_check check = {.problem = count_only};
	sqlite3 *db = db_open(fx);
	struct cat_image img;
	sqlite3_stmt *st;

	assert_int_equal(cat_load(db, &img, &check), 0);
	db_exec(db, "BEGIN; ALTER TABLE inode ADD COLUMN map BLOB; DROP TABLE map");
	sqlite3_prepare_v2(db, "UPDATE inode SET map = ?2, hash = ?3 WHERE ino = ?1", -1, &st, NULL);
	img.meta.sum = 0;
	for (size_t r = 0; r < img.n; r++) {
		struct cat_row hashes = img.recs[r].hashes;
		size_t len;
		uint8_t *blob = v1_blob(fx, hashes.ino, &len);

		hashes.map = cat_hash_bytes(blob, len);
		img.meta.sum += cat_hash_row(&hashes);
		sqlite3_bind_int64(st, 1, (int64_t)hashes.ino);
		if (blob)
			sqlite3_bind_blob(st, 2, blob, (int)len, SQLITE_TRANSIENT);
		else
			sqlite3_bind_null(st, 2);
		sqlite3_bind_int64(st, 3, (int64_t)cat_hash_row(&hashes));
		assert_int_equal(sqlite3_step(st), SQLITE_DONE);
		sqlite3_reset(st);
		free(blob);
	}
	sqlite3_finalize(st);
	img.meta.m.version = 1;
	sqlite3_prepare_v2(db, cat_sql[ST_META], -1, &st, NULL);
	assert_int_equal(cat_write_meta(st, &img.meta), 0);
	sqlite3_finalize(st);
	db_exec(db, "PRAGMA user_version = 1; COMMIT");
	sqlite3_close(db);
	cat_image_fini(&img);
}

static void a_tree(struct fixture *fx)
{
	uint64_t rng = 88172645463325252u, d = mkdir_in(fx, NS_ROOT, "d");

	for (int i = 0; i < 300; i++)
		random_change(fx, &rng);
	fill(fx, mkfile(fx, d, "long"), 1000 * (uint64_t)BLOCK, &rng);
	fill(fx, mkfile(fx, d, "small"), 1, NULL);
	mkfile(fx, d, "without data");
	assert_int_equal(ns_setxattr(fx->ns, d, "user.a", "1", 1, 0), 0);
	assert_int_equal(fx_commit(fx, 7), 0);
}

static int version(struct fixture *fx)
{
	sqlite3 *db = db_open(fx);
	sqlite3_stmt *st;
	int v;

	sqlite3_prepare_v2(db, "PRAGMA user_version", -1, &st, NULL);
	assert_int_equal(sqlite3_step(st), SQLITE_ROW);
	v = sqlite3_column_int(st, 0);
	sqlite3_finalize(st);
	sqlite3_close(db);
	return v;
}

static void one_to_read_is_read_and_left_as_it_is(void **state)
{
	struct fixture *fx = *state;
	uint64_t files;
	char *before;

	a_tree(fx);
	before = dump(fx);
	fx_close(fx);
	/* The maps of the fixture are what was committed. */
	make_v1(fx);
	files = folder_state(fx->dir);
	assert_int_equal(fx_open(fx, false, true), 0);
	assert_same_dump(before, dump(fx));
	assert_true(files == folder_state(fx->dir));
	assert_int_equal(version(fx), 1);
}

static void one_to_write_is_of_this_version_afterwards(void **state)
{
	struct fixture *fx = *state;
	struct catalog_meta m;
	struct ns_attr a;
	char *before;

	a_tree(fx);
	before = dump(fx);
	fx_close(fx);
	make_v1(fx);
	assert_int_equal(fx_open(fx, false, false), 0);
	assert_same_dump(before, dump(fx));
	catalog_get_meta(fx->c, &m);
	assert_int_equal(m.version, CATALOG_VERSION);
	assert_int_equal(m.step, 7);
	before = dump(fx);
	assert_int_equal(catalog_revert(fx->c, NULL, 0, fx_on_map, fx), 0);
	assert_same_dump(before, dump(fx));
	assert_int_equal(ns_walk(fx->ns, "d/long", &a), 0);
	fill(fx, a.ino, 900 * (uint64_t)BLOCK, NULL);
	assert_int_equal(fx_commit(fx, 8), 0);
	before = dump(fx);
	fx_reopen(fx);
	assert_same_dump(before, dump(fx));
	fx_close(fx);
	assert_int_equal(version(fx), CATALOG_VERSION);
}

#define test(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		test(one_to_read_is_read_and_left_as_it_is),
		test(one_to_write_is_of_this_version_afterwards),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
