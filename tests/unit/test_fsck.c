/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_fsck.c - a backing with known contents, damaged in one way at a time: fsck names the damage,
 * repairs what it says it repairs, and changes nothing otherwise. With `--make DIR` it only makes
 * such a backing, for test_fsck.sh. Options: --seed=N.
 */
#include "catalog_fixture.h"

#include "engine/fsck.h"
#include "engine/io.h"
#include "engine/pool.h"

static uint64_t seed = 1;

static const uint8_t uuid[15] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* --- a backing ------------------------------------------------------------------------------ */

static struct pool *open_pool(struct fixture *fx, bool create, uint8_t last_of_uuid)
{
	int dirfd = open(fx->dir, O_RDONLY | O_DIRECTORY);
	struct pool_opts opts = {.dirfd = dirfd, .name = "pool", .block = BLOCK, .create = create};
	struct pool *pool;
	const char *why;

	memcpy(opts.uuid, uuid, sizeof(uuid));
	opts.uuid[15] = last_of_uuid;
	if (pool_open(&opts, &pool, &why))
		fail_msg("pool: %s", why);
	close(dirfd);
	return pool;
}

/* A file with `n` blocks of bytes that its number decides. */
static void make_data(struct fixture *fx, struct pool *pool, uint64_t ino, uint32_t n)
{
	struct extent *e = calloc(n, sizeof(*e));
	uint8_t buf[MOMENT_UNIT * 2];

	for (uint32_t b = 0; b < n; b++) {
		struct poff off;

		memset(buf, (int)(ino * 7 + b), sizeof(buf));
		assert_int_equal(pool_alloc(pool, sizeof(buf), &off), 0);
		assert_int_equal(io_pwrite_all(pool_fd(pool), buf, sizeof(buf), off.o), 0);
		e[b] = (struct extent){off.o, sizeof(buf), sizeof(buf) - 5,
				       cat_hash_bytes(buf, sizeof(buf))};
	}
	ns_publish(fx->ns, ino, (uint64_t)n * BLOCK, 0, true);
	map_set(fx, ino, e, n);
	fx->maps[ino].changed = true;
	free(e);
}

/* d 3 (f 4 of 3 blocks, sub 5 (g 6 of 2 blocks)), h 7 of 1 block */
static void populate(struct fixture *fx)
{
	struct pool *pool = open_pool(fx, true, 16);
	struct pool_grow g;
	struct catalog_meta m;
	uint64_t d, sub;

	assert_int_equal(pool_grow_begin(pool, 1 << 20, &g), 0);
	g.to = g.from + (1 << 20); /* less than pool.c would, for the test's sake */
	pool_grow_run(pool, &g);
	assert_int_equal(g.res, 0);
	pool_grow_end(pool, &g);
	d = mkdir_in(fx, NS_ROOT, "d");
	make_data(fx, pool, mkfile(fx, d, "f"), 3);
	assert_int_equal(ns_setxattr(fx->ns, 4, "user.a", "1", 1, 0), 0);
	sub = mkdir_in(fx, d, "sub");
	make_data(fx, pool, mkfile(fx, sub, "g"), 2);
	make_data(fx, pool, mkfile(fx, NS_ROOT, "h"), 1);
	assert_int_equal(fx_commit(fx, 41), 0);
	catalog_get_meta(fx->c, &m);
	assert_int_equal(pool_write_super(pool, m.commit_seq), 0);
	pool_close(pool);
}

static int setup_backing(void **state)
{
	struct fixture *fx = fx_new(NULL);

	populate(fx);
	fx_close(fx);
	*state = fx;
	return 0;
}

/* --- running it ----------------------------------------------------------------------------- */

struct seen {
	char text[8192]; /* a line each: kind: path: text [fix] */
	uint64_t last_done, last_total;
};

static struct seen seen;
static struct fsck_result result;
static char err[800];

static void note_problem(void *arg, const struct fsck_problem *p)
{
	struct seen *s = arg;
	size_t used = strlen(s->text);

	snprintf(s->text + used, sizeof(s->text) - used, "%s: %s: %s%s%s%s\n", p->kind, p->path,
		 p->text, *p->fix ? " [" : "", p->fix, p->fixed ? " DONE" : "");
}

static void note_progress(void *arg, uint64_t done, uint64_t total)
{
	struct seen *s = arg;

	assert_true(done > s->last_done && done <= total);
	s->last_done = done;
	s->last_total = total;
}

static int run_fsck(struct fixture *fx, bool repair)
{
	struct fsck_opts opts = {
		.dir = fx->dir,
		.repair = repair,
		.problem = note_problem,
		.progress = note_progress,
		.arg = &seen,
	};

	seen = (struct seen){0};
	return fsck_run(&opts, &result, err, sizeof(err));
}

static void expect_clean(struct fixture *fx)
{
	assert_int_equal(run_fsck(fx, false), 0);
	if (result.problems)
		fail_msg("%s", seen.text);
	assert_int_equal(result.files, 3);
	assert_int_equal(result.dirs, 3);
	assert_int_equal(result.extents, 6);
	assert_int_equal(result.bytes, 6 * 8192);
	assert_int_equal(result.checked, 6 * 8192);
	assert_true(result.has_step);
	assert_int_equal(result.step, 41);
	assert_int_equal(seen.last_done, 6 * 8192);
}

/* One problem, with this text in its line; nothing was changed. */
static void expect_problem(struct fixture *fx, const char *text)
{
	uint64_t before = folder_state(fx->dir);

	assert_int_equal(run_fsck(fx, false), 0);
	if (result.problems != 1 || !strstr(seen.text, text))
		fail_msg("expected one problem with \"%s\" in:\n%s", text, seen.text);
	assert_int_equal(result.fixed, 0);
	assert_int_equal(folder_state(fx->dir), before);
}

static void expect_repair(struct fixture *fx, const char *text)
{
	assert_int_equal(run_fsck(fx, true), 0);
	if (result.fixed != result.problems || !strstr(seen.text, text) ||
	    !strstr(seen.text, "DONE"))
		fail_msg("expected a repair of \"%s\" in:\n%s", text, seen.text);
}

static void expect_no_repair(struct fixture *fx)
{
	assert_int_equal(run_fsck(fx, true), 0);
	assert_int_equal(result.fixed, 0);
	assert_true(result.problems > 0);
}

static void overwrite(struct fixture *fx, const char *name, uint64_t off, const void *p, size_t len)
{
	char path[128];
	int fd;

	snprintf(path, sizeof(path), "%s/%s", fx->dir, name);
	fd = open(path, O_WRONLY);
	assert_true(fd >= 0);
	assert_int_equal(pwrite(fd, p, len, (off_t)off), len);
	close(fd);
}

static void tamper(struct fixture *fx, const char *sql)
{
	sqlite3 *db = db_open(fx);

	db_exec(db, sql);
	db_rehash(db);
	sqlite3_close(db);
}

/* --- tests ---------------------------------------------------------------------------------- */

static void a_good_backing_is_clean_and_untouched(void **state)
{
	struct fixture *fx = *state;
	uint64_t before = folder_state(fx->dir);

	expect_clean(fx);
	assert_int_equal(folder_state(fx->dir), before);
	assert_int_equal(run_fsck(fx, true), 0);
	assert_int_equal(result.problems, 0);
}

static void a_wal_is_read_and_left_alone(void **state)
{
	struct fixture *fx = *state, *killed = calloc(1, sizeof(*killed));
	char cmd[200];
	uint64_t before;

	assert_int_equal(fx_open(fx, false, false), 0);
	assert_int_equal(ns_setxattr(fx->ns, 4, "user.b", "1", 1, 0), 0);
	assert_int_equal(fx_commit(fx, 41), 0);
	copy_running(fx, killed);
	snprintf(cmd, sizeof(cmd), "cp %s/pool %s/", fx->dir, killed->dir);
	assert_int_equal(system(cmd), 0);
	before = folder_state(killed->dir);
	expect_clean(killed);
	assert_int_equal(result.commit_seq, 3);
	assert_int_equal(folder_state(killed->dir), before);
	fx_free(killed);
}

static void it_says_when_it_cannot_run(void **state)
{
	struct fixture *fx = *state;
	char path[128], dir[64];
	struct flock lk = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
	int fd;

	snprintf(path, sizeof(path), "%s/lock", fx->dir);
	fd = open(path, O_RDWR | O_CREAT, 0600);
	assert_int_equal(write(fd, "pid 77\nhost h\nstate running\nname somebody\n", 43), 43);
	assert_int_equal(fcntl(fd, F_OFD_SETLK, &lk), 0);
	assert_int_equal(run_fsck(fx, false), -EBUSY);
	assert_non_null(strstr(err, "somebody"));
	assert_int_equal(run_fsck(fx, true), -EBUSY);
	close(fd);
	expect_clean(fx);
	tamper(fx, "PRAGMA user_version = 2");
	{
		sqlite3 *db = db_open(fx);

		db_exec(db, "PRAGMA user_version = 3; UPDATE meta SET version = 3");
		sqlite3_close(db);
	}
	assert_int_equal(run_fsck(fx, false), -EPROTONOSUPPORT);
	assert_non_null(strstr(err, "newer"));
	strcpy(dir, fx->dir);
	strcpy(fx->dir, "/nonexistent");
	assert_int_equal(run_fsck(fx, false), -ENOENT);
	make_dir(fx->dir);
	assert_int_equal(run_fsck(fx, false), -ENOENT);
	assert_non_null(strstr(err, "not a momentfs backing"));
	rmdir(fx->dir);
	strcpy(fx->dir, dir);
}

static void damaged_data_are_named(void **state)
{
	struct fixture *fx = *state;

	/* The second block of d/f, in its second half. */
	overwrite(fx, "pool", 65536 + 8192 + 5000, "X", 1);
	expect_problem(fx, "data: d/f: bytes 65536 to 73722 (at 73728 in the pool) do not match");
	expect_no_repair(fx);
}

static void extents_must_be_in_the_pool_and_alone(void **state)
{
	struct fixture *fx = *state;
	char path[128];

	/* h's only block now claims d/f's first one, with its checksum. */
	tamper(fx, "UPDATE map SET data = substr((SELECT data FROM map WHERE ino = 4), 1, 24)"
		   " WHERE ino = 7");
	expect_problem(fx, "where other bytes are too");
	expect_no_repair(fx);
	/* The superblock is no place either. */
	tamper(fx, "UPDATE map SET data = x'001000000000000000100000001000000000000000000000'"
		   " WHERE ino = 7");
	expect_problem(fx, "extent: h: bytes from 0 on are at 4096 in the pool");
	tamper(fx, "DELETE FROM map WHERE ino = 7");
	/* A pool that was cut: the last blocks are gone. */
	snprintf(path, sizeof(path), "%s/pool", fx->dir);
	assert_int_equal(truncate(path, 65536 + 4 * 8192 + 4096), 0);
	expect_problem(fx, "extent: d/sub/g: bytes from 65536 on are at 98304 in the pool");
}

static void missing_parts_are_named(void **state)
{
	struct fixture *fx = *state;
	char path[128], away[128];

	snprintf(path, sizeof(path), "%s/pool", fx->dir);
	snprintf(away, sizeof(away), "%s/away", fx->dir);
	assert_int_equal(rename(path, away), 0);
	expect_problem(fx, "pool: : the pool file cannot be opened");
	assert_int_equal(rename(away, path), 0);
	snprintf(path, sizeof(path), "%s/catalog.sqlite", fx->dir);
	assert_int_equal(rename(path, away), 0);
	expect_problem(fx, "catalog: : there is no catalog.sqlite");
	assert_int_equal(rename(away, path), 0);
	/* The pool of some other backing. */
	snprintf(path, sizeof(path), "%s/pool", fx->dir);
	assert_int_equal(unlink(path), 0);
	pool_close(open_pool(fx, true, 17));
	expect_problem(fx, "pool: : the pool: belongs to another backing");
}

static void a_damaged_superblock_is_mended(void **state)
{
	struct fixture *fx = *state;
	uint8_t junk[4096];

	memset(junk, 0x5a, sizeof(junk));
	for (int slot = 0; slot < 2; slot++) {
		overwrite(fx, "pool", (uint64_t)slot * 4096 + 100, junk, 50);
		expect_problem(fx, "of the superblock is damaged");
		expect_repair(fx, "of the superblock is damaged");
		expect_clean(fx);
	}
	overwrite(fx, "pool", 0, junk, 4096);
	overwrite(fx, "pool", 4096, junk, 4096);
	assert_int_equal(run_fsck(fx, false), 0);
	assert_non_null(strstr(seen.text, "superblock: "));
	expect_no_repair(fx);
}

static void leftovers_are_removed(void **state)
{
	struct fixture *fx = *state;
	char path[128];

	snprintf(path, sizeof(path), "%s/catalog.sqlite.new", fx->dir);
	close(open(path, O_CREAT | O_WRONLY, 0600));
	expect_problem(fx, "leftover: : catalog.sqlite.new");
	expect_repair(fx, "leftover: : catalog.sqlite.new");
	expect_clean(fx);
	assert_int_equal(access(path, F_OK), -1);
}

static void attributes_of_nobody_are_dropped(void **state)
{
	struct fixture *fx = *state;
	sqlite3 *db = db_open(fx);

	db_exec(db, "INSERT INTO xattr VALUES(1, x'757365722e61', x'31');"
		    "INSERT INTO xattr VALUES(99, x'757365722e61', x'31')");
	sqlite3_close(db);
	assert_int_equal(run_fsck(fx, false), 0);
	assert_int_equal(result.problems, 2);
	assert_int_equal(fx_open(fx, false, false), -EUCLEAN);
	expect_repair(fx, "extended attributes, but no row");
	expect_clean(fx);
	assert_int_equal(fx_open(fx, false, false), 0);
	assert_int_equal(ns_getxattr(fx->ns, 4, "user.a", NULL, 0), 1);
}

static void all_bad_rows_are_listed(void **state)
{
	struct fixture *fx = *state;
	sqlite3 *db = db_open(fx);

	db_exec(db, "UPDATE inode SET uid = 9 WHERE ino = 7; DELETE FROM inode WHERE ino = 5");
	sqlite3_close(db);
	assert_int_equal(run_fsck(fx, false), 0);
	assert_non_null(strstr(seen.text, "inode: : inode 7: the row does not match"));
	assert_non_null(strstr(seen.text, "inode: ?/g: inode 6"));
	assert_non_null(strstr(seen.text, "5 inodes where the meta row says 6"));
	assert_int_equal(result.problems, 3);
	/* What can still be told of the rest is. */
	assert_int_equal(result.checked, 5 * 8192);
	expect_no_repair(fx);
}

static void a_lost_commit_is_noticed(void **state)
{
	struct fixture *fx = *state;
	struct pool *pool = open_pool(fx, false, 16);

	assert_int_equal(pool_write_super(pool, 9), 0);
	pool_close(pool);
	expect_problem(fx, "commit: : commit 9 was durable, but the catalog is at commit 2");
	/* What is there might be half overwritten: then there is no way back. */
	overwrite(fx, "pool", 65536, "X", 1);
	expect_no_repair(fx);
	overwrite(fx, "pool", 65536, (uint8_t[]){4 * 7}, 1);
	expect_repair(fx, "go back to commit 2");
	expect_clean(fx);
	pool = open_pool(fx, false, 16);
	pool_close(pool);
}

/* Bytes flipped anywhere: what fsck calls clean is exactly what was there. */
static void clean_means_the_same_as_before(void **state)
{
	struct fixture *fx = *state;
	static const char *const names[] = {"catalog.sqlite", "pool"};
	uint64_t rng = seed * 0x9e3779b97f4a7c15u + 5;
	unsigned int clean = 0;
	char *want, path[128];

	assert_int_equal(fx_open(fx, false, false), 0);
	want = dump(fx);
	fx_close(fx);
	for (int round = 0; round < 300; round++) {
		const char *name = names[round % 2];
		uint64_t off;
		struct stat st;
		uint8_t was, is;
		int fd;

		snprintf(path, sizeof(path), "%s/%s", fx->dir, name);
		fd = open(path, O_RDWR);
		assert_int_equal(fstat(fd, &st), 0);
		/* In the pool: where the superblock and the extents are. */
		off = rnd(&rng, round % 2 ? 65536 + 6 * 8192 : (uint64_t)st.st_size);
		assert_int_equal(pread(fd, &was, 1, (off_t)off), 1);
		is = was ^ (uint8_t)(1 + rnd(&rng, 255));
		assert_int_equal(pwrite(fd, &is, 1, (off_t)off), 1);
		if (run_fsck(fx, false))
			fail_msg("%s +%lu: %s", name, off, err);
		if (!result.problems) {
			clean++;
			expect_clean(fx);
			assert_true(round % 2 == 0 || off < 65536);
			assert_int_equal(fx_open(fx, false, true), 0);
			assert_same_dump(strdup(want), dump(fx));
			fx_close(fx);
		}
		assert_int_equal(pwrite(fd, &was, 1, (off_t)off), 1);
		close(fd);
	}
	printf("%u of 300 clean\n", clean);
	assert_in_range(clean, 1, 299);
	expect_clean(fx);
	free(want);
}

static int make_only(const char *dir)
{
	struct fixture *fx = calloc(1, sizeof(*fx));

	if (!fx || strlen(dir) >= sizeof(fx->dir))
		return 1;
	strcpy(fx->dir, dir);
	if (fx_open(fx, true, false)) {
		fprintf(stderr, "%s\n", fx->err);
		return 1;
	}
	populate(fx);
	fx_close(fx);
	for (unsigned int i = 0; i < MAX_INO; i++)
		map_set(fx, i, NULL, 0);
	free(fx);
	return 0;
}

#define test(f) cmocka_unit_test_setup_teardown(f, setup_backing, teardown)

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		test(a_good_backing_is_clean_and_untouched),
		test(a_wal_is_read_and_left_alone),
		test(it_says_when_it_cannot_run),
		test(damaged_data_are_named),
		test(extents_must_be_in_the_pool_and_alone),
		test(missing_parts_are_named),
		test(a_damaged_superblock_is_mended),
		test(leftovers_are_removed),
		test(attributes_of_nobody_are_dropped),
		test(all_bad_rows_are_listed),
		test(a_lost_commit_is_noticed),
		test(clean_means_the_same_as_before),
	};

	if (argc == 3 && !strcmp(argv[1], "--make"))
		return make_only(argv[2]);
	if (argc > 1)
		sscanf(argv[1], "--seed=%lu", &seed);
	printf("seed %lu\n", seed);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
