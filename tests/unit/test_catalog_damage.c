/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_catalog_damage.c - whatever happens to the bytes of the catalog: it is refused with a
 * message that says what is wrong, or what it shows is exactly what was committed. Options:
 * --seed=N.
 */
#include "catalog_fixture.h"

static uint64_t seed = 1;

struct bytes {
	uint8_t *p;
	size_t len;
};

static struct bytes read_file(const char *dir, const char *name)
{
	struct bytes b = {0};
	char path[128];
	struct stat st;
	int fd;

	snprintf(path, sizeof(path), "%s/%s", dir, name);
	fd = open(path, O_RDONLY);
	if (fd < 0)
		return b;
	assert_int_equal(fstat(fd, &st), 0);
	b.len = (size_t)st.st_size;
	b.p = malloc(b.len + 1);
	assert_int_equal(read(fd, b.p, b.len), b.len);
	close(fd);
	return b;
}

static void write_file(const char *dir, const char *name, const struct bytes *b)
{
	char path[128];
	int fd;

	snprintf(path, sizeof(path), "%s/%s", dir, name);
	unlink(path);
	if (!b->p)
		return;
	fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
	assert_true(fd >= 0);
	assert_int_equal(write(fd, b->p, b->len), b->len);
	close(fd);
}

/* Some commits of random changes; returns what the last one holds. */
static char *populate(struct fixture *fx, uint64_t *rng, int commits)
{
	for (int n = 0; n < commits; n++) {
		for (int changes = 0; changes < 60; changes++)
			random_change(fx, rng);
		assert_int_equal(fx_commit(fx, (uint64_t)n + 1), 0);
	}
	return dump(fx);
}

/* --- single bytes --------------------------------------------------------------------------- */

static void no_flipped_byte_changes_what_is_shown(void **state)
{
	struct fixture *fx = *state;
	uint64_t rng = seed * 0x9e3779b97f4a7c15u + 11;
	char *want = populate(fx, &rng, 10);
	unsigned int refused = 0, harmless = 0;
	struct bytes whole, none = {0};

	fx_close(fx);
	whole = read_file(fx->dir, "catalog.sqlite");
	for (int round = 0; round < 1000; round++) {
		/* A third of them in the first page, where the header and the schema are. */
		size_t at = round % 3 ? rnd(&rng, whole.len) : rnd(&rng, 4096);
		uint8_t was = whole.p[at];
		int res;

		whole.p[at] ^= (uint8_t)(1 + rnd(&rng, 255));
		write_file(fx->dir, "catalog.sqlite", &whole);
		write_file(fx->dir, "catalog.sqlite-wal", &none);
		res = fx_open(fx, false, round % 2);
		if (res) {
			refused++;
			assert_true(res == -EUCLEAN);
			assert_non_null(strstr(fx->err, "damaged"));
		} else {
			char *later;

			harmless++;
			assert_same_dump(strdup(want), dump(fx));
			/* And it can be used. */
			if (round % 2 == 0) {
				for (int n = 0; n < 20; n++)
					random_change(fx, &rng);
				later = dump(fx);
				assert_int_equal(fx_commit(fx, 99), 0);
				fx_reopen(fx);
				assert_same_dump(later, dump(fx));
			}
			fx_close(fx);
		}
		whole.p[at] = was;
	}
	printf("%u refused, %u harmless\n", refused, harmless);
	assert_true(refused > 100);
	free(whole.p);
	free(want);
}

/*
 * The same with a WAL, which SQLite reads up to the first frame that is damaged: so an earlier
 * commit is shown, whole, and its number tells; the engine compares it with the pool's superblock.
 */
static void a_flipped_byte_of_the_wal_shows_a_whole_commit(void **state)
{
	struct fixture *fx = *state, *copy = calloc(1, sizeof(*copy));
	uint64_t rng = seed * 0x9e3779b97f4a7c15u + 12;
	unsigned int refused = 0, same = 0, earlier = 0;
	char *dumps[40] = {0};
	struct bytes db, wal;
	uint64_t last = 0;

	for (int n = 0; n < 12; n++) {
		struct catalog_meta m;
		char *text = populate(fx, &rng, 1);

		if (n == 5) /* part of the database is newer than the first frames */
			assert_int_equal(sqlite3_wal_checkpoint_v2(fx->c->db, NULL,
								   SQLITE_CHECKPOINT_PASSIVE, NULL,
								   NULL),
					 SQLITE_OK);
		catalog_get_meta(fx->c, &m);
		last = m.commit_seq;
		assert_true(last < 40);
		dumps[last] = text;
	}
	copy_running(fx, copy);
	db = read_file(copy->dir, "catalog.sqlite");
	wal = read_file(copy->dir, "catalog.sqlite-wal");
	assert_true(wal.len > 30000);
	for (int round = 0; round < 1000; round++) {
		struct bytes *b = rnd(&rng, 4) ? &wal : &db;
		size_t at = rnd(&rng, b->len);
		struct catalog_meta m;
		uint8_t was = b->p[at];
		int res;

		b->p[at] ^= (uint8_t)(1 + rnd(&rng, 255));
		write_file(copy->dir, "catalog.sqlite", &db);
		write_file(copy->dir, "catalog.sqlite-wal", &wal);
		b->p[at] = was;
		res = fx_open(copy, false, round % 2);
		if (res) {
			refused++;
			assert_true(res == -EUCLEAN);
			assert_non_null(strstr(copy->err, "damaged"));
			continue;
		}
		catalog_get_meta(copy->c, &m);
		assert_true(m.commit_seq <= last && dumps[m.commit_seq]);
		assert_same_dump(strdup(dumps[m.commit_seq]), dump(copy));
		same += m.commit_seq == last;
		earlier += m.commit_seq < last;
		fx_close(copy);
	}
	printf("%u refused, %u the last commit, %u an earlier one\n", refused, same, earlier);
	assert_true(same && earlier);
	fx_free(copy);
	for (int n = 0; n < 40; n++)
		free(dumps[n]);
	free(db.p);
	free(wal.p);
}

/* Pieces of zeros, pieces of another version, a file that is cut. */
static void no_damaged_piece_changes_what_is_shown(void **state)
{
	struct fixture *fx = *state;
	uint64_t rng = seed * 0x9e3779b97f4a7c15u + 13;
	struct bytes old, whole, none = {0};
	unsigned int refused = 0;
	char *want;

	free(populate(fx, &rng, 8));
	fx_close(fx);
	old = read_file(fx->dir, "catalog.sqlite");
	assert_int_equal(fx_open(fx, false, false), 0);
	want = populate(fx, &rng, 3);
	fx_close(fx);
	whole = read_file(fx->dir, "catalog.sqlite");
	for (int round = 0; round < 300; round++) {
		size_t piece = round % 2 ? 512 : 4096, at = rnd(&rng, whole.len / piece) * piece;
		struct bytes bad = {malloc(whole.len), whole.len};
		int res;

		memcpy(bad.p, whole.p, whole.len);
		if (round % 3 == 0)
			memset(bad.p + at, 0, piece);
		else if (round % 3 == 1 && at + piece <= old.len)
			memcpy(bad.p + at, old.p + at, piece);
		else
			bad.len = at;
		write_file(fx->dir, "catalog.sqlite", &bad);
		write_file(fx->dir, "catalog.sqlite-wal", &none);
		free(bad.p);
		res = fx_open(fx, false, false);
		refused += res != 0;
		if (res) {
			assert_int_equal(res, -EUCLEAN);
			continue;
		}
		assert_same_dump(strdup(want), dump(fx));
		fx_close(fx);
	}
	printf("%u of 300 refused\n", refused);
	assert_true(refused > 100);
	free(old.p);
	free(whole.p);
	free(want);
}

/* --- rows that are wrong together ----------------------------------------------------------------
 */

static void expect_refusal(struct fixture *fx, const char *text)
{
	assert_int_equal(fx_open(fx, false, false), -EUCLEAN);
	if (!strstr(fx->err, text))
		fail_msg("expected \"%s\" in: %s", text, fx->err);
}

/* root 2: d 3 (f 4, sub 5 (g 6)), h 7 */
static void small_tree(struct fixture *fx)
{
	uint64_t d = mkdir_in(fx, NS_ROOT, "d"), f = mkfile(fx, d, "f"), sub;

	sub = mkdir_in(fx, d, "sub");
	mkfile(fx, sub, "g");
	mkfile(fx, NS_ROOT, "h");
	fill(fx, f, 3 * BLOCK, NULL);
	assert_int_equal(ns_setxattr(fx->ns, f, "user.a", "1", 1, 0), 0);
	assert_int_equal(fx_commit(fx, 1), 0);
	fx_close(fx);
}

static void a_row_that_does_not_match_is_named(void **state)
{
	static const char *const changes[] = {
		"UPDATE inode SET size = size - 1 WHERE ino = 4",
		"UPDATE inode SET parent = 5 WHERE ino = 4",
		"UPDATE inode SET name = x'67' WHERE ino = 4",
		"UPDATE inode SET mtime_ns = (mtime_ns + 1) % 1000000000 WHERE ino = 4",
		"UPDATE inode SET flags = 1 WHERE ino = 4",
		"DELETE FROM map WHERE ino = 4",
		"UPDATE inode SET hash = hash + 1 WHERE ino = 4",
		"UPDATE xattr SET value = x'32' WHERE ino = 4",
		"DELETE FROM xattr WHERE ino = 4",
		"INSERT INTO xattr VALUES(4, x'757365722e62', x'')",
	};
	struct fixture *fx = *state;
	struct bytes whole;

	small_tree(fx);
	whole = read_file(fx->dir, "catalog.sqlite");
	for (size_t n = 0; n < sizeof(changes) / sizeof(*changes); n++) {
		sqlite3 *db;

		write_file(fx->dir, "catalog.sqlite", &whole);
		db = db_open(fx);
		db_exec(db, changes[n]);
		sqlite3_close(db);
		expect_refusal(fx, "inode 4: the row does not match its checksum");
	}
	free(whole.p);
}

static void wrong_shapes_are_named(void **state)
{
	static const struct {
		const char *sql, *text;
		bool keep_hashes;
	} cases[] = {
		{"DELETE FROM inode WHERE ino = 7; DELETE FROM map WHERE ino = 7", "5 inodes where the meta row says 6", true},
		{"DELETE FROM inode WHERE ino = 6; DELETE FROM map WHERE ino = 6", "5 inodes where the meta row says 6", true},
		{"UPDATE meta SET commit_seq = 9", "the meta row does not match", true},
		{"UPDATE meta SET step = NULL", "the meta row does not match", true},
		{"DELETE FROM meta", "the meta row is missing", true},
		{"DELETE FROM inode WHERE ino = 5",
		 "inode 6 (\"g\" in directory 5): its directory does", false},
		{"DELETE FROM inode WHERE ino = 2", "the root directory, is missing", false},
		{"UPDATE inode SET parent = 7 WHERE ino = 6", "its parent is not a directory",
		 false},
		{"UPDATE inode SET parent = 2, name = x'64' WHERE ino = 7",
		 "inodes 3 and 7 have the same name \"d\" in directory 2", false},
		{"UPDATE inode SET parent = 5 WHERE ino = 3", "a directory inside itself", false},
		{"UPDATE inode SET parent = 3 WHERE ino = 3", "a directory inside itself", false},
		{"UPDATE inode SET mode = 41471 WHERE ino = 7", "neither a file nor a directory",
		 false},
		{"UPDATE inode SET flags = 8 WHERE ino = 7", "unknown flags", false},
		{"UPDATE inode SET ino = 900 WHERE ino = 7; UPDATE map SET ino = 900 WHERE ino = 7", "a number that was never given out",
		 false},
		{"UPDATE inode SET name = x'2e2e' WHERE ino = 7", "a name that no file can have",
		 false},
		{"UPDATE inode SET name = x'' WHERE ino = 7", "a name that no file can have",
		 false},
		{"UPDATE inode SET name = x'612f62' WHERE ino = 7", "a name that no file can have",
		 false},
		{"UPDATE inode SET name = x'610062' WHERE ino = 7", "a name that no file can have",
		 false},
		{"UPDATE inode SET size = 5 WHERE ino = 3", "a directory with a size", false},
		{"UPDATE inode SET name = x'78' WHERE ino = 2", "not a root directory", false},
		{"UPDATE inode SET size = 70000 WHERE ino = 4", "more blocks than the file", false},
		{"UPDATE map SET data = x'00' WHERE ino = 4", "not a multiple of 24", false},
		{"UPDATE map SET data = substr(data, 1, 24) WHERE ino = 4",
		 "inode 4: the row has a segment of its block map that does not match its checksum",
		 true},
		{"UPDATE map SET seg = 1 WHERE ino = 4", "that does not match its checksum", true},
		{"UPDATE map SET seg = 1 WHERE ino = 4", "more blocks than the file", false},
		{"UPDATE map SET seg = -1 WHERE ino = 4", "out of range", false},
		{"UPDATE map SET data = zeroblob(792) WHERE ino = 4", "out of range", false},
		{"UPDATE map SET data = x'' WHERE ino = 4", "out of range", false},
		{"INSERT INTO map VALUES(99, 0, zeroblob(24), 0)",
		 "inode 99: a block map, but no row", false},
		{"DROP TABLE map", "cannot be read", true},
		{"UPDATE inode SET size = -1 WHERE ino = 4", "out of range", false},
		{"INSERT INTO xattr VALUES(99, x'757365722e62', x'')",
		 "inode 99: extended attributes, but no row", false},
		{"INSERT INTO xattr VALUES(3, x'', x'')", "extended attribute of the wrong type",
		 true},
		{"ALTER TABLE inode RENAME COLUMN mode TO mood", "cannot be read", true},
		{"DROP TABLE xattr", "cannot be read", true},
		{"DROP TABLE meta", "damaged", true},
		{"PRAGMA application_id = 5", "not a catalog", true},
	};
	struct fixture *fx = *state;
	struct bytes whole;

	small_tree(fx);
	whole = read_file(fx->dir, "catalog.sqlite");
	for (size_t n = 0; n < sizeof(cases) / sizeof(*cases); n++) {
		sqlite3 *db;

		write_file(fx->dir, "catalog.sqlite", &whole);
		db = db_open(fx);
		db_exec(db, cases[n].sql);
		if (!cases[n].keep_hashes)
			db_rehash(db);
		sqlite3_close(db);
		expect_refusal(fx, cases[n].text);
	}
	free(whole.p);
}

/* An older version of a row is right by itself; only the sum tells. */
static void a_stale_row_is_noticed(void **state)
{
	struct fixture *fx = *state;
	sqlite3 *db;

	small_tree(fx);
	db = db_open(fx);
	db_exec(db, "CREATE TABLE old AS SELECT * FROM inode;"
		    "CREATE TABLE old_map AS SELECT * FROM map");
	sqlite3_close(db);
	assert_int_equal(fx_open(fx, false, false), 0);
	fill(fx, 4, 2 * BLOCK, NULL);
	assert_int_equal(fx_commit(fx, 2), 0);
	fx_close(fx);
	db = db_open(fx);
	db_exec(db, "CREATE TABLE new AS SELECT * FROM inode;"
		    "DELETE FROM inode WHERE ino = 4;"
		    "INSERT INTO inode SELECT * FROM old WHERE ino = 4;"
		    "DELETE FROM map WHERE ino = 4;"
		    "INSERT INTO map SELECT * FROM old_map WHERE ino = 4");
	sqlite3_close(db);
	expect_refusal(fx, "do not add up");
	/* Of a segment alone the row of its file knows that it is not the one. */
	db = db_open(fx);
	db_exec(db, "DELETE FROM inode WHERE ino = 4; INSERT INTO inode SELECT * FROM new WHERE ino = 4");
	sqlite3_close(db);
	expect_refusal(fx, "inode 4: the row");
}

/* A revert reads the database again, and believes it as little. */
static void a_revert_notices_damage(void **state)
{
	struct fixture *fx = *state;
	uint64_t f = 4;
	char *before;

	small_tree(fx);
	assert_int_equal(fx_open(fx, false, false), 0);
	before = dump(fx);
	db_exec(fx->c->db, "UPDATE inode SET uid = 77 WHERE ino = 4");
	assert_int_equal(catalog_revert(fx->c, &f, 1, fx_on_map, fx), -EUCLEAN);
	assert_int_equal(catalog_revert(fx->c, NULL, 0, fx_on_map, fx), -EUCLEAN);
	/* Right by itself, but not what was committed. */
	db_rehash(fx->c->db);
	assert_int_equal(catalog_revert(fx->c, &f, 1, fx_on_map, fx), -EUCLEAN);
	assert_int_equal(catalog_revert(fx->c, NULL, 0, fx_on_map, fx), -EUCLEAN);
	db_exec(fx->c->db, "DELETE FROM inode WHERE ino = 4");
	assert_int_equal(catalog_revert(fx->c, &f, 1, fx_on_map, fx), -EUCLEAN);
	assert_same_dump(before, dump(fx));
	/* Nor does a commit write over what is not there. */
	fill(fx, 4, BLOCK, NULL);
	assert_int_equal(fx_commit(fx, 3), -EUCLEAN);
}

#define test(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		test(no_flipped_byte_changes_what_is_shown),
		test(a_flipped_byte_of_the_wal_shows_a_whole_commit),
		test(no_damaged_piece_changes_what_is_shown),
		test(a_row_that_does_not_match_is_named),
		test(wrong_shapes_are_named),
		test(a_stale_row_is_noticed),
		test(a_revert_notices_damage),
	};

	if (argc > 1)
		sscanf(argv[1], "--seed=%lu", &seed);
	printf("seed %lu\n", seed);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
