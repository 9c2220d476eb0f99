/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_catalog.c - what was committed comes back, whole, and nothing else does: after reopening,
 * failed commits, reverts and power cuts. Damage is in test_catalog_damage.c. Options: --seed=N.
 */
#include "catalog_fixture.h"

#include "engine/sqlite_fault.h"

static uint64_t seed = 1;
static struct sqlite_fault *fault;

static int setup_fault(void **state)
{
	*state = fx_new("fault");
	sqlite_fault_dirsync(fault);
	return 0;
}

static int teardown_fault(void **state)
{
	fx_free(*state);
	sqlite_fault_restore(fault);
	return 0;
}

static void set_faults(const char *spec)
{
	char why[300];

	if (sqlite_fault_set(fault, spec, why, sizeof(why)))
		fail_msg("%s", why);
}

/* --- opening -------------------------------------------------------------------------------- */

static void a_new_catalog_is_an_empty_tree(void **state)
{
	struct fixture *fx = *state;
	struct catalog_meta m;
	struct ns_counts c;
	struct ns_attr a;
	struct stat st;
	char path[128];

	catalog_get_meta(fx->c, &m);
	assert_int_equal(m.version, 2);
	assert_int_equal(m.block, BLOCK);
	assert_int_equal(m.uuid[15], 16);
	assert_int_equal(m.commit_seq, 1);
	assert_false(m.has_step);
	ns_count(fx->ns, &c);
	assert_int_equal(c.files, 0);
	assert_int_equal(c.dirs, 1);
	assert_int_equal(ns_getattr(fx->ns, NS_ROOT, &a), 0);
	assert_int_equal(a.uid, geteuid());
	assert_int_equal(a.mode, S_IFDIR | 0755);
	snprintf(path, sizeof(path), "%s/catalog.sqlite", fx->dir);
	assert_int_equal(stat(path, &st), 0);
	assert_int_equal(st.st_mode & 0777, 0600);
}

static void opening_errors(void **state)
{
	struct fixture *fx = *state;
	char path[128];

	fx_close(fx);
	assert_int_equal(fx_open(fx, true, false), -EEXIST);
	snprintf(path, sizeof(path), "%s/catalog.sqlite", fx->dir);
	assert_int_equal(unlink(path), 0);
	assert_int_equal(fx_open(fx, false, false), -ENOENT);
	assert_non_null(strstr(fx->err, "catalog.sqlite"));
	/* A half-made one is in nobody's way. */
	snprintf(path, sizeof(path), "%s/catalog.sqlite.new", fx->dir);
	close(open(path, O_CREAT | O_WRONLY, 0600));
	assert_int_equal(fx_open(fx, false, false), -ENOENT);
	assert_int_equal(fx_open(fx, true, false), 0);
	assert_int_equal(access(path, F_OK), -1);
	fx_close(fx);
	/* Some other file. */
	snprintf(path, sizeof(path), "%s/catalog.sqlite", fx->dir);
	assert_int_equal(truncate(path, 0), 0);
	assert_int_equal(fx_open(fx, false, false), -EUCLEAN);
	assert_int_equal(truncate(path, 8192), 0);
	assert_int_equal(fx_open(fx, false, false), -EUCLEAN);
}

/* Odd characters in the path, a link on the way; but the catalog itself is no link. */
static void the_path_may_be_odd(void **state)
{
	struct fixture *fx = *state;
	char home[64], link[80], path[128], target[128], *before;

	mkfile(fx, NS_ROOT, "f");
	before = dump(fx);
	assert_int_equal(fx_commit(fx, 0), 0);
	fx_close(fx);
	strcpy(home, fx->dir);
	snprintf(link, sizeof(link), "%.55s?a%%20#", home);
	assert_int_equal(symlink(home, link), 0);
	assert_true(strlen(link) < sizeof(fx->dir));
	strcpy(fx->dir, link);
	for (int readonly = 0; readonly < 2; readonly++) {
		if (fx_open(fx, false, readonly))
			fail_msg("%s", fx->err);
		assert_same_dump(strdup(before), dump(fx));
		fx_close(fx);
	}
	free(before);
	assert_int_equal(unlink(link), 0);
	strcpy(fx->dir, home);
	snprintf(path, sizeof(path), "%s/catalog.sqlite", home);
	snprintf(target, sizeof(target), "%s/elsewhere", home);
	assert_int_equal(rename(path, target), 0);
	assert_int_equal(symlink(target, path), 0);
	assert_int_equal(fx_open(fx, false, false), -ELOOP);
	assert_non_null(strstr(fx->err, "symbolic link"));
}

static void a_newer_format_is_refused_politely(void **state)
{
	struct fixture *fx = *state;
	char path[128];
	sqlite3 *db;

	fx_close(fx);
	snprintf(path, sizeof(path), "%s/catalog.sqlite", fx->dir);
	assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
	assert_int_equal(sqlite3_exec(db, "PRAGMA user_version = 3", NULL, NULL, NULL), SQLITE_OK);
	assert_int_equal(fx_open(fx, false, false), -EBUSY); /* we have it open */
	sqlite3_close(db);
	assert_int_equal(fx_open(fx, false, false), -EUCLEAN); /* only one of the two places */
	assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
	assert_int_equal(sqlite3_exec(db, "UPDATE meta SET version = 3", NULL, NULL, NULL),
			 SQLITE_OK);
	sqlite3_close(db);
	assert_int_equal(fx_open(fx, false, false), -EPROTONOSUPPORT);
	assert_non_null(strstr(fx->err, "newer"));
}

static void everything_comes_back(void **state)
{
	struct fixture *fx = *state;
	struct catalog_meta m;
	struct ns_attr a = {.mtime = {-5, 999999999}};
	uint64_t d = mkdir_in(fx, NS_ROOT, "d"), f = mkfile(fx, d, "f\xff\n"), big;
	char *before;
	int res;

	fill(fx, f, 5 * BLOCK + 1, NULL);
	assert_int_equal(ns_setattr(fx->ns, f, NS_SET_MTIME, &a, &a), 0);
	assert_int_equal(ns_setxattr(fx->ns, f, "user.empty", "", 0, 0), 0);
	assert_int_equal(ns_setxattr(fx->ns, f, "user.a", "\0b", 2, 0), 0);
	big = mkfile(fx, d, "big");
	fill(fx, big, 1 << 30, NULL);
	ns_publish(fx->ns, big, NS_FILE_SIZE_MAX, UINT64_MAX, true);
	assert_int_equal(ns_make_meta(fx->ns, d, 0), 0);
	before = dump(fx);
	assert_int_equal(fx_commit(fx, 41), 0);
	fx_reopen(fx);
	assert_same_dump(before, dump(fx));
	catalog_get_meta(fx->c, &m);
	assert_true(m.has_step);
	assert_int_equal(m.step, 41);
	assert_int_equal(m.commit_seq, 2);
	/* A number is not used again, also not that of the last inode. */
	f = mkfile(fx, NS_ROOT, "last");
	assert_int_equal(fx_commit(fx, 42), 0);
	res = ns_unlink(fx->ns, NS_ROOT, "last");
	assert_int_equal(res, 0);
	assert_int_equal(fx_commit(fx, 42), 0);
	fx_reopen(fx);
	assert_true(mkfile(fx, NS_ROOT, "next") > f);
}

static void what_was_not_committed_does_not(void **state)
{
	struct fixture *fx = *state;
	char *before;

	fill(fx, mkfile(fx, NS_ROOT, "f"), 100, NULL);
	mkfile(fx, NS_ROOT, "g");
	assert_int_equal(fx_commit(fx, 0), 0);
	before = dump(fx);
	fill(fx, mkfile(fx, NS_ROOT, "h"), 200, NULL);
	assert_int_equal(ns_unlink(fx->ns, NS_ROOT, "f"), 0);
	assert_int_equal(ns_rename(fx->ns, NS_ROOT, "g", NS_ROOT, "f", 0), 0);
	fx_reopen(fx);
	assert_same_dump(before, dump(fx));
}

static void changed_tells_whether_a_commit_is_due(void **state)
{
	struct fixture *fx = *state;
	struct catalog_txn *t, *u;
	struct ns_attr a;
	bool changed;

	assert_int_equal(catalog_freeze(fx->c, 0, false, &t, &changed), 0);
	assert_false(changed);
	assert_int_equal(catalog_freeze(fx->c, 0, false, &u, &changed), -EALREADY);
	assert_int_equal(catalog_revert(fx->c, NULL, 0, NULL, NULL), -EBUSY);
	catalog_txn_end(fx->c, t, -ECANCELED);
	assert_int_equal(catalog_freeze(fx->c, 5, true, &t, &changed), 0);
	assert_true(changed); /* the step */
	catalog_txn_end(fx->c, t, -ECANCELED);
	/* What is made and removed in between leaves no trace but its directory's time. */
	mkfile(fx, NS_ROOT, "f");
	assert_int_equal(ns_unlink(fx->ns, NS_ROOT, "f"), 0);
	assert_int_equal(fx_commit(fx, 0), 0);
	/* Attributes that only RAM knows. */
	assert_int_equal(ns_lookup(fx->ns, NS_ROOT, "f", &a), -ENOENT);
	ns_publish(fx->ns, NS_ROOT, UINT64_MAX, 512, false);
	assert_int_equal(catalog_freeze(fx->c, 0, false, &t, &changed), 0);
	assert_false(changed);
	catalog_txn_end(fx->c, t, 0);
}

static void changes_during_a_commit_are_for_the_next(void **state)
{
	struct fixture *fx = *state;
	uint64_t f = mkfile(fx, NS_ROOT, "f");
	struct catalog_txn *t;
	char *frozen, *later;

	mkfile(fx, NS_ROOT, "g");
	fill(fx, f, 3 * BLOCK, NULL);
	frozen = dump(fx);
	assert_int_equal(fx_freeze(fx, 0, &t), 0);
	assert_int_equal(ns_rename(fx->ns, NS_ROOT, "f", mkdir_in(fx, NS_ROOT, "d"), "x", 0), 0);
	assert_int_equal(ns_unlink(fx->ns, NS_ROOT, "g"), 0);
	fill(fx, f, BLOCK, NULL);
	fill(fx, mkfile(fx, NS_ROOT, "h"), BLOCK, NULL);
	later = dump(fx);
	assert_int_equal(fx_finish(fx, t), 0);
	fx_reopen(fx);
	assert_same_dump(frozen, dump(fx));
	/* Again, this time with the next commit. */
	assert_int_equal(fx_freeze(fx, 0, &t), 0);
	assert_int_equal(ns_rename(fx->ns, NS_ROOT, "f", mkdir_in(fx, NS_ROOT, "d"), "x", 0), 0);
	free(later);
	later = dump(fx);
	assert_int_equal(fx_finish(fx, t), 0);
	assert_int_equal(fx_commit(fx, 0), 0);
	fx_reopen(fx);
	assert_same_dump(later, dump(fx));
}

/* --- maps ----------------------------------------------------------------------------------- */

static void maps_are_handed_over_with_care(void **state)
{
	struct fixture *fx = *state;
	uint64_t f = mkfile(fx, NS_ROOT, "f"), g = mkfile(fx, NS_ROOT, "g");
	struct extent e[3] = {{0}, {65536, 4096, 4096, 7}, {0}}, *in;
	struct catalog_txn *t;
	bool changed;
	uint32_t n;
	char *before;

	ns_publish(fx->ns, f, 3 * BLOCK, 0, true);
	assert_int_equal(fx_commit(fx, 0), 0);
	/* A map alone: attributes stay at what is committed, even if they have changed since. */
	before = dump(fx);
	assert_int_equal(catalog_freeze(fx->c, 0, false, &t, &changed), 0);
	assert_false(changed);
	assert_int_equal(ns_rename(fx->ns, NS_ROOT, "f", NS_ROOT, "moved", 0), 0);
	assert_int_equal(fx_txn_map(t, f, e, 3), 0);
	assert_true(catalog_txn_has(t, f));
	assert_false(catalog_txn_has(t, g));
	in = catalog_txn_segment_get(t, f, 0, &n);
	assert_int_equal(n, 3);
	in[1].hash = 8;
	assert_int_equal(fx_txn_map(t, 999, e, 3), -ENOENT);
	assert_null(catalog_txn_segment_get(t, g, 0, &n));
	assert_int_equal(fx_finish(fx, t), 0);
	fx_reopen(fx);
	assert_int_equal(fx->maps[f].n, 2);
	assert_int_equal(fx->maps[f].e[1].hash, 8);
	map_set(fx, f, NULL, 0);
	assert_same_dump(before, dump(fx));
	/* Removed: no map any more. Trimmed to nothing: no map either. */
	assert_int_equal(ns_unlink(fx->ns, NS_ROOT, "g"), 0);
	assert_int_equal(catalog_freeze(fx->c, 0, false, &t, &changed), 0);
	assert_int_equal(fx_txn_map(t, g, e, 1), -ENOENT);
	assert_int_equal(fx_txn_map(t, f, e, 1), 0);
	assert_int_equal(fx_finish(fx, t), 0);
	fx_reopen(fx);
	assert_int_equal(fx->maps[f].n, 0);
}

static void a_map_that_no_mount_would_accept_is_refused(void **state)
{
	struct fixture *fx = *state;
	uint64_t f = mkfile(fx, NS_ROOT, "f");
	struct extent e[2] = {{65536, 4096, 4096, 7}, {131072, 4096, 4096, 7}};
	struct catalog_txn *t;
	bool changed;
	char *before;

	ns_publish(fx->ns, f, BLOCK, 0, true);
	before = dump(fx);
	assert_int_equal(fx_commit(fx, 0), 0);
	assert_int_equal(catalog_freeze(fx->c, 0, false, &t, &changed), 0);
	assert_int_equal(fx_txn_map(t, f, e, 2), 0);
	assert_int_equal(fx_finish(fx, t), -EINVAL); /* more blocks than the file */
	e[0].len = 5000;
	assert_int_equal(catalog_freeze(fx->c, 0, false, &t, &changed), 0);
	assert_int_equal(fx_txn_map(t, f, e, 1), 0);
	assert_int_equal(fx_finish(fx, t), -EINVAL);
	fx_reopen(fx);
	assert_same_dump(before, dump(fx));
}

/* --- steps ---------------------------------------------------------------------------------- */

static void held_inodes_stay_at_their_committed_row(void **state)
{
	struct fixture *fx = *state;
	uint64_t d = mkdir_in(fx, NS_ROOT, "w"), old = mkfile(fx, d, "exp_avg"), young;
	struct extent e = {65536, 4096, 4096, 1};
	struct catalog_txn *t;
	struct ns_attr a;
	bool changed;

	fill(fx, old, 2 * BLOCK, NULL);
	assert_int_equal(fx_commit(fx, 1), 0);
	young = mkfile(fx, d, "exp_avg_sq");
	fill(fx, young, 2 * BLOCK, NULL);
	assert_int_equal(ns_register(fx->ns, old), 0);
	assert_int_equal(ns_register(fx->ns, young), 0);
	ns_hold(fx->ns, old, true);
	ns_hold(fx->ns, young, true);
	fill(fx, old, BLOCK, NULL);
	/* Others are committed meanwhile. */
	fill(fx, mkfile(fx, NS_ROOT, "plain"), 10, NULL);
	assert_int_equal(catalog_freeze(fx->c, 1, true, &t, &changed), 0);
	assert_true(changed);
	assert_int_equal(fx_txn_map(t, old, &e, 1), -EINVAL);
	assert_int_equal(fx_txn_map(t, young, &e, 1), -EINVAL);
	assert_false(catalog_txn_has(t, old));
	assert_true(catalog_txn_has(t, young));
	catalog_txn_end(fx->c, t, -ECANCELED);
	assert_int_equal(fx_commit(fx, 1), 0);
	/* The boundary: now they are committed, without another change to them. */
	ns_hold(fx->ns, old, false);
	ns_hold(fx->ns, young, false);
	assert_int_equal(catalog_freeze(fx->c, 2, true, &t, &changed), 0);
	assert_true(catalog_txn_has(t, old));
	assert_true(catalog_txn_has(t, young));
	catalog_txn_end(fx->c, t, -ECANCELED);
	/* But the process dies first. */
	fx_reopen(fx);
	assert_int_equal(ns_walk(fx->ns, "w/exp_avg", &a), 0);
	assert_int_equal(a.size, 2 * BLOCK);
	assert_int_equal(fx->maps[old].n, 2);
	assert_int_equal(ns_walk(fx->ns, "w/exp_avg_sq", &a), 0);
	assert_int_equal(a.size, 2 * BLOCK);
	assert_int_equal(fx->maps[young].n, 0);
	assert_int_equal(ns_walk(fx->ns, "plain", &a), 0);
}

/* A name given before the step began must be written, or it could be there twice. */
static void a_held_inode_takes_its_new_name_along(void **state)
{
	struct fixture *fx = *state;
	uint64_t d = mkdir_in(fx, NS_ROOT, "d"), f = mkfile(fx, d, "a");
	struct ns_attr a;

	fill(fx, f, BLOCK, NULL);
	assert_int_equal(ns_setxattr(fx->ns, f, "user.x", "1", 1, 0), 0);
	assert_int_equal(fx_commit(fx, 0), 0);
	assert_int_equal(ns_rename(fx->ns, d, "a", NS_ROOT, "b", 0), 0);
	assert_int_equal(ns_setxattr(fx->ns, f, "user.x", "2", 1, 0), 0);
	fill(fx, f, 3 * BLOCK, NULL);
	assert_int_equal(ns_register(fx->ns, f), 0);
	ns_hold(fx->ns, f, true);
	assert_int_equal(ns_rmdir(fx->ns, NS_ROOT, "d"), 0);
	assert_int_equal(fx_commit(fx, 0), 0);
	fx_reopen(fx);
	assert_int_equal(ns_walk(fx->ns, "b", &a), 0);
	assert_int_equal(a.ino, f);
	assert_int_equal(a.size, BLOCK);
	assert_int_equal(fx->maps[f].n, 1);
	assert_int_equal(ns_walk(fx->ns, "d", &a), -ENOENT);
}

/* --- reverts -------------------------------------------------------------------------------- */

static void single_inodes_go_back(void **state)
{
	struct fixture *fx = *state;
	uint64_t d = mkdir_in(fx, NS_ROOT, "w"), f = mkfile(fx, d, "f"), g = mkfile(fx, d, "g");
	uint64_t inos[3] = {f, g, 0}, none = 999;
	struct ns_counts before, after;
	struct ns_attr a;
	char buf[8], *text;

	fill(fx, f, 3 * BLOCK, NULL);
	fill(fx, g, 2 * BLOCK, NULL);
	assert_int_equal(ns_setxattr(fx->ns, f, "user.step", "1", 1, 0), 0);
	assert_int_equal(fx_commit(fx, 1), 0);
	ns_count(fx->ns, &before);
	text = dump(fx);
	inos[2] = mkfile(fx, d, "new");
	fill(fx, inos[2], BLOCK, NULL);
	fill(fx, f, 10 * BLOCK, NULL);
	fill(fx, g, 0, NULL);
	assert_int_equal(ns_setxattr(fx->ns, f, "user.step", "2", 1, 0), 0);
	assert_int_equal(ns_setxattr(fx->ns, f, "user.more", "2", 1, 0), 0);
	assert_int_equal(ns_register(fx->ns, f), 0);
	assert_int_equal(catalog_revert(fx->c, inos, 3, fx_on_map, fx), 0);
	assert_int_equal(ns_getxattr(fx->ns, f, "user.step", buf, sizeof(buf)), 1);
	assert_int_equal(buf[0], '1');
	assert_int_equal(ns_getxattr(fx->ns, f, "user.more", buf, sizeof(buf)), -ENODATA);
	assert_int_equal(fx->maps[f].n, 3);
	assert_int_equal(fx->maps[g].n, 2);
	/* One that was never committed keeps its name and size and has no data. */
	assert_int_equal(fx->maps[inos[2]].n, 0);
	assert_int_equal(ns_getattr(fx->ns, inos[2], &a), 0);
	assert_int_equal(a.size, BLOCK);
	assert_int_equal(ns_getattr(fx->ns, f, &a), 0);
	assert_int_equal(a.flags, NS_REGISTERED);
	ns_publish(fx->ns, inos[2], 0, 0, false);
	ns_count(fx->ns, &after);
	assert_int_equal(before.bytes, after.bytes);
	ns_unregister(fx->ns, f);
	assert_int_equal(ns_unlink(fx->ns, d, "new"), 0);
	assert_int_equal(catalog_revert(fx->c, &d, 1, fx_on_map, fx), 0);
	assert_same_dump(text, dump(fx));
	assert_int_equal(catalog_revert(fx->c, &none, 1, fx_on_map, fx), 0); /* is gone: nothing to put back */
}

static void the_whole_tree_goes_back(void **state)
{
	struct fixture *fx = *state;
	uint64_t d = mkdir_in(fx, NS_ROOT, "d"), f = mkfile(fx, d, "f"), kept, lost, held;
	struct ns_attr a;
	char *before;

	fill(fx, f, 3 * BLOCK, NULL);
	held = mkfile(fx, d, "held");
	assert_int_equal(fx_commit(fx, 7), 0);
	before = dump(fx);
	/* Removed while referenced; made and referenced; made and not. */
	assert_int_equal(ns_lookup(fx->ns, d, "held", &a), 0);
	assert_int_equal(ns_open(fx->ns, held, false), 0);
	assert_int_equal(ns_unlink(fx->ns, d, "held"), 0);
	assert_int_equal(ns_unlink(fx->ns, d, "f"), 0);
	assert_int_equal(ns_rmdir(fx->ns, NS_ROOT, "d"), 0);
	kept = mkfile(fx, NS_ROOT, "kept");
	lost = mkfile(fx, NS_ROOT, "lost");
	fill(fx, kept, BLOCK, NULL);
	fill(fx, lost, BLOCK, NULL);
	assert_int_equal(ns_lookup(fx->ns, NS_ROOT, "kept", &a), 0);
	assert_int_equal(catalog_revert(fx->c, NULL, 0, fx_on_map, fx), 0);
	assert_same_dump(before, dump(fx));
	assert_int_equal(ns_getattr(fx->ns, kept, &a), 0);
	assert_int_equal(a.nlink, 0);
	assert_int_equal(fx->maps[kept].n, 1);
	ns_forget(fx->ns, kept, 1);
	assert_int_equal(ns_getattr(fx->ns, kept, &a), -ESTALE);
	assert_int_equal(fx->maps[kept].n, 0);
	assert_int_equal(ns_getattr(fx->ns, lost, &a), -ESTALE);
	assert_int_equal(fx->maps[lost].n, 0);
	/* The references to what came back still count. */
	assert_int_equal(ns_unlink(fx->ns, d, "held"), 0);
	ns_forget(fx->ns, held, 1);
	assert_int_equal(ns_getattr(fx->ns, held, &a), 0);
	ns_release(fx->ns, held, false);
	assert_int_equal(ns_getattr(fx->ns, held, &a), -ESTALE);
	/* And life goes on. */
	mkfile(fx, NS_ROOT, "more");
	before = dump(fx);
	assert_int_equal(fx_commit(fx, 8), 0);
	fx_reopen(fx);
	assert_same_dump(before, dump(fx));
}

/* --- random, with reopening, failures and reverts ------------------------------------------------
 */

static void random_commits(struct fixture *fx, uint64_t rounds, uint64_t *rng)
{
	char *committed = dump(fx);
	unsigned int failed = 0;

	for (uint64_t round = 1; round <= rounds; round++) {
		struct catalog_txn *t;
		char *frozen;
		int res;

		for (uint64_t n = rnd(rng, 30); n; n--)
			random_change(fx, rng);
		frozen = dump(fx);
		assert_int_equal(fx_freeze(fx, round, &t), 0);
		for (uint64_t n = rnd(rng, 10); n; n--)
			random_change(fx, rng);
		if (fx->vfs && !rnd(rng, 3)) {
			char spec[100];

			snprintf(spec, sizeof(spec), "seed=%lu,%s", rnd(rng, 1000) + 1,
				 (const char *[]){"write.error=ENOSPC:0.3", "write.error=EIO:0.2",
						  "sync.error=EIO:0.5", "write.short=0.3",
						  "write.error=EDQUOT:0.4"}[rnd(rng, 5)]);
			set_faults(spec);
		}
		res = fx_finish(fx, t);
		if (fx->vfs)
			set_faults("");
		failed += res != 0;
		if (!res) {
			free(committed);
			committed = frozen;
		} else {
			assert_true(res == -ENOSPC || res == -EIO);
			free(frozen);
		}
		switch (rnd(rng, 6)) {
		case 0:
			fx_reopen(fx);
			assert_same_dump(strdup(committed), dump(fx));
			break;
		case 1:
			assert_int_equal(catalog_revert(fx->c, NULL, 0, fx_on_map, fx), 0);
			assert_same_dump(strdup(committed), dump(fx));
			break;
		}
	}
	if (fx->vfs)
		assert_true(failed > rounds / 20);
	free(committed);
}

static void random_commits_come_back(void **state)
{
	uint64_t rng = seed * 0x9e3779b97f4a7c15u + 1;

	random_commits(*state, 300, &rng);
}

static void failed_commits_leave_the_last_one(void **state)
{
	uint64_t rng = seed * 0x9e3779b97f4a7c15u + 2;

	random_commits(*state, 300, &rng);
}

/*
 * The power goes out at a random write of a commit, or between commits. What comes back is the
 * last commit that was told to be durable, or the one that was under way, whole.
 */
static void power_cuts_leave_a_whole_commit(void **state)
{
	struct fixture *fx = *state;
	uint64_t rng = seed * 0x9e3779b97f4a7c15u + 3;
	char *committed = dump(fx);
	unsigned int during = 0;

	for (int round = 0; round < 150; round++) {
		char *frozen = NULL, *found, spec[64];
		int res = 0;

		snprintf(spec, sizeof(spec), "seed=%lu,cut=%lu", rnd(&rng, 100000) + 1,
			 1 + rnd(&rng, 60));
		set_faults(spec);
		for (int commits = 0; commits < 4 && !res; commits++) {
			struct catalog_txn *t;

			for (uint64_t n = 1 + rnd(&rng, 40); n; n--)
				random_change(fx, &rng);
			free(frozen);
			frozen = dump(fx);
			assert_int_equal(fx_freeze(fx, (uint64_t)round + 1, &t), 0);
			res = fx_finish(fx, t);
			if (!res) {
				free(committed);
				committed = strdup(frozen);
			}
		}
		if (!rnd(&rng, 4))
			fx_close(fx); /* with its checkpoint */
		sqlite_fault_cut(fault, rnd(&rng, 100000) + 1);
		fx_close(fx);
		sqlite_fault_restore(fault);
		if (fx_open(fx, false, false))
			fail_msg("round %d: %s", round, fx->err);
		found = dump(fx);
		if (res && !strcmp(found, frozen)) {
			during++;
			free(committed);
			committed = strdup(frozen);
		}
		assert_same_dump(strdup(committed), found);
		free(frozen);
	}
	printf("%u of 150 cuts kept the commit under way\n", during);
	free(committed);
}

/* --- threads -------------------------------------------------------------------------------- */

struct busy {
	struct ns *ns;
	uint64_t rng;
	bool stop;
};

static void *keep_busy(void *arg)
{
	struct busy *b = arg;
	char name[16], to[16];
	struct ns_attr a;

	while (!__atomic_load_n(&b->stop, __ATOMIC_RELAXED)) {
		uint64_t dir = rnd(&b->rng, 2) ? NS_ROOT : NS_FIRST + rnd(&b->rng, 4);

		snprintf(name, sizeof(name), "n%lu", rnd(&b->rng, 30));
		snprintf(to, sizeof(to), "n%lu", rnd(&b->rng, 30));
		switch (rnd(&b->rng, 5)) {
		case 0:
			ns_create(b->ns, dir, name, 0644, 0, 0, false, &a);
			break;
		case 1:
			ns_mkdir(b->ns, dir, name, 0755, 0, 0, false, &a);
			break;
		case 2:
			if (ns_unlink(b->ns, dir, name))
				ns_rmdir(b->ns, dir, name);
			break;
		case 3:
			ns_rename(b->ns, dir, name, NS_FIRST + rnd(&b->rng, 4), to, 0);
			break;
		case 4:
			if (!ns_peek(b->ns, dir, name, &a))
				ns_setxattr(b->ns, a.ino, "user.a", to, strlen(to), 0);
			break;
		}
	}
	return NULL;
}

/* What is frozen is one instant of the tree: every commit is one that a mount accepts. */
static void commits_beside_busy_threads(void **state)
{
	struct fixture *fx = *state, *copy = calloc(1, sizeof(*copy));
	struct busy busy[3];
	pthread_t threads[3];
	char *text;

	for (int d = 0; d < 4; d++)
		mkdir_in(fx, NS_ROOT, (const char *[]){"a", "b", "c", "d"}[d]);
	for (uint64_t t = 0; t < 3; t++) {
		busy[t] = (struct busy){fx->ns, seed * 3 + t + 1, false};
		assert_int_equal(pthread_create(&threads[t], NULL, keep_busy, &busy[t]), 0);
	}
	for (int n = 0; n < 40; n++) {
		struct catalog_txn *t;
		bool changed;
		int res;

		/* Numbers go beyond what the fixture's maps hold. */
		assert_int_equal(catalog_freeze(fx->c, 0, false, &t, &changed), 0);
		res = catalog_commit(fx->c, t);
		catalog_txn_end(fx->c, t, res);
		assert_int_equal(res, 0);
		if (n % 5)
			continue;
		copy_running(fx, copy);
		if (fx_open(copy, false, false))
			fail_msg("%s", copy->err);
		fx_close(copy);
		remove_all(copy->dir);
	}
	for (int t = 0; t < 3; t++) {
		__atomic_store_n(&busy[t].stop, true, __ATOMIC_RELAXED);
		pthread_join(threads[t], NULL);
	}
	text = dump(fx);
	assert_int_equal(fx_commit(fx, 0), 0);
	fx_reopen(fx);
	assert_same_dump(text, dump(fx));
	free(copy);
}

/* --- a full disk ---------------------------------------------------------------------------- */

static void the_ballast_saves_a_commit(void **state)
{
	struct fixture *fx = *state;
	char path[128], spec[200], *before;
	struct stat st;

	snprintf(path, sizeof(path), "%s/ballast", fx->dir);
	assert_int_equal(stat(path, &st), 0);
	assert_int_equal(st.st_size, 1 << 20);
	assert_int_equal(catalog_ballast(fx->c), 1 << 20);
	/* No space as long as the ballast is there. */
	snprintf(spec, sizeof(spec), "write.error=ENOSPC:1,file=%s", path);
	set_faults(spec);
	mkfile(fx, NS_ROOT, "f");
	before = dump(fx);
	assert_int_equal(fx_commit(fx, 0), 0);
	/* It is made anew afterwards, as there is room in truth. */
	assert_int_equal(stat(path, &st), 0);
	assert_int_equal(catalog_ballast(fx->c), 1 << 20);
	set_faults("");
	fx_reopen(fx);
	assert_same_dump(before, dump(fx));
	/* No space at all. */
	set_faults("write.error=ENOSPC:1");
	mkfile(fx, NS_ROOT, "g");
	before = dump(fx);
	assert_int_equal(fx_commit(fx, 0), -ENOSPC);
	assert_int_equal(stat(path, &st), -1);
	assert_int_equal(catalog_ballast(fx->c), 0);
	assert_int_equal(fx_commit(fx, 0), -ENOSPC);
	set_faults("");
	assert_int_equal(fx_commit(fx, 0), 0);
	assert_int_equal(catalog_ballast(fx->c), 1 << 20);
	fx_reopen(fx);
	assert_same_dump(before, dump(fx));
}

static uint64_t allocated(struct fixture *fx, const char *name)
{
	char path[128];
	struct stat st;

	snprintf(path, sizeof(path), "%s/%s", fx->dir, name);
	return stat(path, &st) ? 0 : (uint64_t)st.st_blocks * 512;
}

/* What the WAL has is its own: neither a commit nor a failed one gives it back to other programs. */
static void the_wal_keeps_its_room(void **state)
{
	struct fixture *fx = *state;
	char name[32];

	assert_true(allocated(fx, "catalog.sqlite-wal") >= 1 << 20);
	for (int i = 0; i < 300; i++) {
		snprintf(name, sizeof(name), "f%d", i);
		mkfile(fx, NS_ROOT, name);
		assert_int_equal(fx_commit(fx, 0), 0);
		assert_true(allocated(fx, "catalog.sqlite-wal") >= 1 << 20);
	}
	set_faults("write.error=ENOSPC:1");
	mkfile(fx, NS_ROOT, "g");
	assert_int_equal(fx_commit(fx, 0), -ENOSPC);
	set_faults("");
	assert_true(allocated(fx, "catalog.sqlite-wal") >= 1 << 20);
	assert_int_equal(fx_commit(fx, 0), 0);
	set_faults("sync.error=EIO:1");
	mkfile(fx, NS_ROOT, "h");
	assert_int_equal(fx_commit(fx, 0), -EIO);
	set_faults("");
	assert_int_equal(fx_commit(fx, 0), 0);
	assert_true(allocated(fx, "catalog.sqlite-wal") >= 1 << 20);
}

static void the_true_error_is_told(void **state)
{
	struct fixture *fx = *state;

	mkfile(fx, NS_ROOT, "f");
	set_faults("write.error=EDQUOT:1");
	assert_int_equal(fx_commit(fx, 0), -ENOSPC);
	set_faults("write.error=EROFS:1");
	assert_int_equal(fx_commit(fx, 0), -EROFS);
	set_faults("sync.error=EIO:1");
	assert_int_equal(fx_commit(fx, 0), -EIO);
	set_faults("");
	assert_int_equal(fx_commit(fx, 0), 0);
}

/*
 * The sync of a commit fails, so it is reported as failed; but all of it may be on the drive.
 * Either the catalog says that it may come back, or it does not, after a kill or a power cut.
 */
static void a_failed_commit_does_not_come_back_unsaid(void **state)
{
	struct fixture *fx = *state;
	unsigned int certain = 0, back = 0;

	for (uint64_t round = 0; round < 60; round++) {
		struct fixture *killed = calloc(1, sizeof(*killed));
		char spec[64], *committed, *frozen, *found;
		uint64_t rng = seed * 1000 + round + 1;
		struct catalog_txn *t;
		bool uncertain, failed;

		for (int n = 0; n < 10; n++)
			random_change(fx, &rng);
		assert_int_equal(fx_commit(fx, 0), 0);
		committed = dump(fx);
		mkfile(fx, NS_ROOT, "f");
		frozen = dump(fx);
		assert_int_equal(fx_freeze(fx, 0, &t), 0);
		snprintf(spec, sizeof(spec), "seed=%lu,sync.error=EIO:0.6", round + 1);
		set_faults(spec);
		failed = fx_finish(fx, t) != 0;
		set_faults("");
		uncertain = catalog_uncertain(fx->c);
		assert_true(failed || !uncertain);
		certain += failed && !uncertain;
		copy_running(fx, killed);
		assert_int_equal(fx_open(killed, false, false), 0);
		found = dump(killed);
		if (uncertain && !strcmp(found, frozen)) {
			back++;
			free(found);
		} else {
			assert_same_dump(strdup(failed ? committed : frozen), found);
		}
		fx_free(killed);
		if (failed) {
			sqlite_fault_cut(fault, round + 1);
			fx_close(fx);
			sqlite_fault_restore(fault);
			assert_int_equal(fx_open(fx, false, false), 0);
			found = dump(fx);
			if (uncertain && !strcmp(found, frozen))
				free(found);
			else
				assert_same_dump(strdup(committed), found);
		}
		ns_unlink(fx->ns, NS_ROOT, "f");
		free(committed);
		free(frozen);
	}
	assert_in_range(certain, 1, 59);
	assert_in_range(back, 1, 59);
	/* A success makes certain again. */
	assert_int_equal(fx_commit(fx, 0), 0);
	mkfile(fx, NS_ROOT, "last");
	set_faults("sync.error=EIO:1");
	assert_int_equal(fx_commit(fx, 0), -EIO);
	assert_true(catalog_uncertain(fx->c));
	set_faults("");
	assert_int_equal(fx_commit(fx, 0), 0);
	assert_false(catalog_uncertain(fx->c));
}

/* What was written before a sync that failed may be missing whatever later syncs say. */
static void a_commit_after_failed_syncs_is_durable(void **state)
{
	struct fixture *fx = *state;
	unsigned int failures = 0;

	for (uint64_t round = 0; round < 60; round++) {
		uint64_t rng = seed * 1000 + round + 1;
		char spec[64], *committed = NULL;
		int res = -EIO;

		for (unsigned int n = 0; n < 3 || res; n++) {
			for (int k = 0; k < 5; k++)
				random_change(fx, &rng);
			snprintf(spec, sizeof(spec), "seed=%lu,sync.error=EIO:0.5",
				 rnd(&rng, 1u << 30));
			set_faults(n < 8 ? spec : "");
			res = fx_commit(fx, 0);
			failures += res != 0;
			assert_true(res == 0 || n < 8);
		}
		set_faults("");
		committed = dump(fx);
		sqlite_fault_cut(fault, round + 1);
		fx_close(fx);
		sqlite_fault_restore(fault);
		assert_int_equal(fx_open(fx, false, false), 0);
		assert_same_dump(committed, dump(fx));
	}
	assert_true(failures > 60);
}

static void the_wal_stays_bounded(void **state)
{
	struct fixture *fx = *state;
	char path[128];
	struct stat st;

	snprintf(path, sizeof(path), "%s/catalog.sqlite-wal", fx->dir);
	for (int round = 0; round < 300; round++) {
		for (int n = 0; n < 20; n++) {
			char name[16];

			snprintf(name, sizeof(name), "%d", round * 20 + n);
			mkfile(fx, NS_ROOT, name);
		}
		assert_int_equal(fx_commit(fx, 0), 0);
		assert_int_equal(stat(path, &st), 0);
		assert_true(st.st_size < 12 << 20);
	}
	/* After a clean end there is none. */
	fx_close(fx);
	assert_int_equal(stat(path, &st), -1);
}

/* --- read-only ------------------------------------------------------------------------------ */

static void read_only_changes_nothing(void **state)
{
	struct fixture *fx = *state, *copy = calloc(1, sizeof(*copy));
	struct catalog_txn *t;
	uint64_t before;
	char *text;
	bool changed;

	fill(fx, mkfile(fx, NS_ROOT, "f"), 3 * BLOCK, NULL);
	assert_int_equal(fx_commit(fx, 3), 0);
	text = dump(fx);
	/* With a WAL to recover. */
	copy_running(fx, copy);
	before = folder_state(copy->dir);
	if (fx_open(copy, false, true))
		fail_msg("%s", copy->err);
	assert_same_dump(strdup(text), dump(copy));
	assert_int_equal(catalog_freeze(copy->c, 0, false, &t, &changed), -EROFS);
	assert_int_equal(catalog_revert(copy->c, NULL, 0, NULL, NULL), -EROFS);
	assert_int_equal(folder_state(copy->dir), before);
	fx_free(copy);
	/* Without. */
	fx_close(fx);
	before = folder_state(fx->dir);
	assert_int_equal(fx_open(fx, false, true), 0);
	assert_same_dump(text, dump(fx));
	fx_close(fx);
	assert_int_equal(folder_state(fx->dir), before);
	/* The private copy has no place to go. */
	copy = calloc(1, sizeof(*copy));
	assert_int_equal(fx_open(fx, false, false), 0);
	mkfile(fx, NS_ROOT, "g");
	assert_int_equal(fx_commit(fx, 3), 0);
	copy_running(fx, copy);
	setenv("TMPDIR", "/nonexistent", 1);
	assert_int_equal(fx_open(copy, false, true), -ENOENT);
	assert_non_null(strstr(copy->err, "TMPDIR"));
	unsetenv("TMPDIR");
	fx_free(copy);
}

#define test(f)	      cmocka_unit_test_setup_teardown(f, setup, teardown)
#define test_fault(f) cmocka_unit_test_setup_teardown(f, setup_fault, teardown_fault)

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		test(a_new_catalog_is_an_empty_tree),
		test(opening_errors),
		test(the_path_may_be_odd),
		test(a_newer_format_is_refused_politely),
		test(everything_comes_back),
		test(what_was_not_committed_does_not),
		test(changed_tells_whether_a_commit_is_due),
		test(changes_during_a_commit_are_for_the_next),
		test(maps_are_handed_over_with_care),
		test(a_map_that_no_mount_would_accept_is_refused),
		test(held_inodes_stay_at_their_committed_row),
		test(a_held_inode_takes_its_new_name_along),
		test(single_inodes_go_back),
		test(the_whole_tree_goes_back),
		test(random_commits_come_back),
		test_fault(failed_commits_leave_the_last_one),
		test_fault(power_cuts_leave_a_whole_commit),
		test(commits_beside_busy_threads),
		test_fault(the_ballast_saves_a_commit),
		test_fault(the_wal_keeps_its_room),
		test_fault(the_true_error_is_told),
		test_fault(a_failed_commit_does_not_come_back_unsaid),
		test_fault(a_commit_after_failed_syncs_is_durable),
		test(the_wal_stays_bounded),
		test(read_only_changes_nothing),
	};
	int res;

	if (argc > 1)
		sscanf(argv[1], "--seed=%lu", &seed);
	printf("seed %lu\n", seed);
	if (sqlite_fault_create("fault", &fault))
		return 1;
	res = cmocka_run_group_tests(tests, NULL, NULL);
	sqlite_fault_destroy(fault);
	return res;
}
