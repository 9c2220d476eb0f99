/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_settle.c - what a process that died had written and not synced is in the kernel's cache, and
 * the next one reads it as committed: so it is durable before anything else is written, or the
 * backing does not open.
 */
#include "engine/sqlite_fault.h"
#include "session_fixture.h"

#define N 12u /* blocks of a file */

static struct sqlite_fault *fault;

static int try_open(char *err, size_t errlen)
{
	struct engine_opts o = {.ram = RAM,
				.block = BLOCK,
				.commit_seconds = ENGINE_COMMIT_OFF,
				.vfs = "test_settle",
				.holder = "test_settle"};

	return engine_open(dir, &o, &e, err, errlen);
}

static void open_engine(void)
{
	char err[1024];

	if (try_open(err, sizeof(err)))
		fail_msg("%s", err);
}

static void put(const char *name, int fill)
{
	static char buf[BLOCK];
	struct ns_attr a;

	if (ns_walk(engine_ns(e), name, &a))
		assert_int_equal(ns_create(engine_ns(e), NS_ROOT, name, 0644, 0, 0, false, &a), 0);
	memset(buf, fill, sizeof(buf));
	for (uint64_t n = 0; n < N; n++)
		assert_int_equal(engine_pwrite(e, a.ino, buf, sizeof(buf), n * BLOCK), BLOCK);
}

static int64_t commit(void)
{
	return engine_call(e, ENGINE_SYNC, 0, 0, 0, 0);
}

/* Version `first` of "a" is durable; of the next one a process has written all, and dies in the sync. */
static void die_in_commit(int first)
{
	put("a", first);
	assert_int_equal(commit(), 0);
	put("a", first + 1);
	sqlite_fault_die_in_sync(fault, 1);
	assert_int_equal(commit(), -EIO);
	engine_abandon(e);
	e = NULL;
	sqlite_fault_revive(fault);
}

static void test_killed_mounted_cut(void **state)
{
	(void)state;
	stop(true);
	open_engine();
	for (uint64_t round = 0; round < 24; round++) {
		int v = (int)(2 * round) + 1;

		die_in_commit(v);
		/* The places of the version before are free now, and others get them. */
		open_engine();
		assert_int_equal(byte_at("a", N * BLOCK - 1), v + 1);
		put("b", 100);
		put("c", 101);
		put("d", 102);
		sqlite_fault_cut(fault, round);
		engine_abandon(e);
		e = NULL;
		sqlite_fault_restore(fault);
		open_engine();
		for (uint64_t n = 0; n < N; n++)
			assert_int_equal(byte_at("a", n * BLOCK), v + 1);
		assert_int_equal(ino_of("b"), 0);
	}
}

/* As long as the drive takes no sync there is nothing to go on from. */
static void test_cannot_settle(void **state)
{
	char err[1024];

	(void)state;
	stop(true);
	open_engine();
	die_in_commit(1);
	assert_int_equal(sqlite_fault_set(fault, "sync.error=EIO:1", NULL, 0), 0);
	assert_int_equal(try_open(err, sizeof(err)), -EIO);
	e = NULL;
	if (!strstr(err, "could not be made durable"))
		fail_msg("\"%s\" does not say what could not be done", err);
	assert_int_equal(sqlite_fault_set(fault, "", NULL, 0), 0);
	open_engine();
	assert_int_equal(byte_at("a", 0), 2);
	put("a", 3);
	assert_int_equal(commit(), 0);
}

static int make_fault(void **state)
{
	(void)state;
	return sqlite_fault_create("test_settle", &fault);
}

static int drop_fault(void **state)
{
	(void)state;
	sqlite_fault_destroy(fault);
	return 0;
}

static int teardown_cured(void **state)
{
	int r;

	sqlite_fault_revive(fault);
	r = teardown(state);
	sqlite_fault_restore(fault); /* all files are closed now */
	return r;
}

#define S(f) cmocka_unit_test_setup_teardown(f, setup, teardown_cured)

int main(void)
{
	const struct CMUnitTest tests[] = {
		S(test_killed_mounted_cut),
		S(test_cannot_settle),
	};

	return cmocka_run_group_tests_name("settle", tests, make_fault, drop_fault);
}
