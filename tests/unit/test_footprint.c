/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_footprint.c - memory beside the RAM tier: so much a file as momentfs(8) says, all of it counted
 * in status, and none of it left when the files have gone. 20,000 small files; 1,000,000 with
 * MOMENT_CRASH=full (tools/check).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <ftw.h>
#include <malloc.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/engine_impl.h"

/* What momentfs(8) says, in bytes; names are short here. */
#define A_FILE	 800 /* with data of one block */
#define A_COMMIT 500 /* and so much while a commit of it runs */
#define A_BLOCK	 80  /* each further one */
#define A_CHANGE 50  /* while a commit of it runs */
#define A_CACHED 350 /* each that is in the RAM tier */
#define AN_INODE 200 /* of the most that there were, in tables */
#define RAM	 (32u << 20)
#define BLOCK	 (64u << 10)
#define UNIT	 4096u
#define ALWAYS	 (8u << 20) /* what is there without files, SQLite's buffers among it */

static char dir[] = "/tmp/test_footprint.XXXXXX";
static struct engine *e;
static unsigned int files = 20000;
static const unsigned int few = 20000;

static void start(void)
{
	struct engine_opts o = {.ram = RAM,
				.block = BLOCK,
				.commit_seconds = ENGINE_COMMIT_OFF,
				.holder = "test_footprint"};
	char err[1024];

	if (engine_open(dir, &o, &e, err, sizeof(err)))
		fail_msg("%s", err);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
	(void)st;
	(void)type;
	(void)ftw;
	return remove(path);
}

static int setup(void **state)
{
	(void)state;
	strcpy(dir + strlen(dir) - 6, "XXXXXX");
	if (!mkdtemp(dir))
		return -1;
	start();
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	engine_close(e, false);
	return nftw(dir, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

/* "RssAnon": of the RAM tier nothing, that is shared memory. "VmHWM": the most there was, with it. */
static uint64_t resident(const char *what)
{
	FILE *f = fopen("/proc/self/status", "r");
	unsigned long long kib = 0;
	char line[256];

	assert_non_null(f);
	while (fgets(line, sizeof(line), f))
		if (!strncmp(line, what, strlen(what)) &&
		    sscanf(line + strlen(what), ": %llu", &kib) == 1)
			break;
	fclose(f);
	return kib << 10;
}

/* What malloc has given out, but for SQLite's. 0 with a sanitizer's allocator. */
static uint64_t taken(void)
{
	struct mallinfo2 m = mallinfo2();

	return m.uordblks ? m.uordblks + m.hblkhd - (uint64_t)sqlite3_memory_used() : 0;
}

/* What status says. */
static uint64_t counted(void)
{
	char *text = engine_status_json(e), *at;
	unsigned long long n, bytes;

	assert_non_null(text);
	at = strstr(text, "\"memory\":{");
	assert_non_null(at);
	assert_int_equal(sscanf(at, "\"memory\":{\"files\":%llu,\"bytes\":%llu", &n, &bytes), 2);
	free(text);
	return bytes;
}

static struct {
	uint64_t resident, taken, counted;
} base;

static void begin(void)
{
	malloc_trim(0);
	base.resident = resident("RssAnon");
	base.taken = taken();
	base.counted = counted();
}

/* Since begin() memory has grown by no more than `most` for n files or blocks, and status has noticed. */
static void check(const char *when, unsigned int n, uint64_t most)
{
	uint64_t grown = resident("RssAnon") - base.resident, told = counted() - base.counted;
	uint64_t real = taken() - base.taken;

	print_message("%s: %.0f bytes each resident, %.0f taken, %.0f counted\n", when,
		      (double)grown / n, (double)real / n, (double)told / n);
	if (!taken())
		return;
	assert_in_range(grown, 0, most + ALWAYS);
	assert_in_range(told, real * 7 / 10, real * 13 / 10);
}

static void peak_reset(void)
{
	FILE *f = fopen("/proc/self/clear_refs", "w");

	if (f) {
		fputs("5", f);
		fclose(f);
	}
}

static void commit(void)
{
	assert_int_equal(engine_call(e, ENGINE_SYNC, 0, 0, 0, 0), 0);
}

static uint64_t make(unsigned int n)
{
	struct ns_attr a;
	char name[32];

	snprintf(name, sizeof(name), "f%u", n);
	assert_int_equal(ns_create(engine_ns(e), NS_ROOT, name, 0600, 0, 0, true, &a), 0);
	return a.ino;
}

static void drop(unsigned int n)
{
	char name[32];

	snprintf(name, sizeof(name), "f%u", n);
	assert_int_equal(ns_unlink(engine_ns(e), NS_ROOT, name), 0);
}

static void nothing(void *arg)
{
	(void)arg;
}

/* What was posted to the loop thread before is done. */
static void settle(void)
{
	loop_call(engine_loop(e), nothing, NULL);
}

static void small_files_take_what_the_manual_says(void **state)
{
	const uint64_t cached = RAM / UNIT * A_CACHED;
	uint64_t peak;

	(void)state;
	begin();
	for (unsigned int n = 0; n < files; n++) {
		uint64_t ino = make(n);

		assert_int_equal(engine_pwrite(e, ino, "data", 4, 0), 4);
		ns_forget(engine_ns(e), ino, 1);
	}
	check("files made", files, (uint64_t)files * A_FILE + cached);
	commit();
	check("files committed", files, (uint64_t)files * (A_FILE + A_COMMIT) + cached);
	assert_int_equal(engine_close(e, true), 0);
	e = NULL;
	malloc_trim(0);
	base.resident = resident("RssAnon");
	base.taken = taken();
	base.counted = 0;
	peak_reset();
	peak = resident("VmHWM");
	start();
	peak = resident("VmHWM") - peak - RAM;
	check("files opened", files, (uint64_t)files * A_FILE);
	print_message("files opened: %.0f bytes each at most\n", (double)peak / files);
	if (taken())
		assert_in_range(peak, 0, (uint64_t)files * (A_FILE + A_COMMIT) + ALWAYS);
	for (unsigned int n = 0; n < files; n++)
		drop(n);
	commit();
	settle();
	malloc_trim(0);
	print_message("removed: %.0f bytes a file taken, %.0f counted\n",
		      (double)(taken() - base.taken) / files, (double)counted() / files);
	if (taken())
		assert_in_range(taken() - base.taken, 0, (uint64_t)files * AN_INODE + ALWAYS);
}

static void blocks_take_what_the_manual_says(void **state)
{
	const unsigned int n = few;
	uint64_t ino = make(0);

	(void)state;
	begin();
	for (uint64_t i = 0; i < n; i++)
		assert_int_equal(engine_pwrite(e, ino, "data", 4, i * BLOCK), 4);
	check("blocks made", n, (uint64_t)n * A_BLOCK + RAM / UNIT * A_CACHED);
	commit();
	check("blocks committed", n, (uint64_t)n * (A_BLOCK + A_CHANGE) +
			        RAM / UNIT * A_CACHED);
}

static void names_and_attributes_are_counted(void **state)
{
	static char value[3000];
	struct ns *ns = engine_ns(e);
	struct ns_counts before, after;
	struct ns_attr a, d;
	char name[NS_NAME_MAX + 1];

	(void)state;
	ns_count(ns, &before);
	assert_int_equal(ns_mkdir(ns, NS_ROOT, "d", 0700, 0, 0, false, &d), 0);
	for (int i = 0; i < 1000; i++) {
		snprintf(name, sizeof(name), "%0250d", i);
		assert_int_equal(ns_create(ns, d.ino, name, 0600, 0, 0, false, &a), 0);
		assert_int_equal(ns_setxattr(ns, a.ino, "user.x", value, sizeof(value), 0), 0);
		assert_int_equal(ns_setxattr(ns, a.ino, "user.x", value, 10, 0), 0);
		assert_int_equal(ns_setxattr(ns, a.ino, "user.y", value, sizeof(value), 0), 0);
	}
	ns_count(ns, &after);
	assert_in_range(after.memory - before.memory, 1000 * 3250, 1000 * 4000);
	commit();
	/* Everything goes back to it, and is counted as it was. */
	for (int i = 0; i < 1000; i += 2) {
		snprintf(name, sizeof(name), "%0250d", i);
		assert_int_equal(ns_peek(ns, d.ino, name, &a), 0);
		assert_int_equal(ns_removexattr(ns, a.ino, "user.y"), 0);
		assert_int_equal(ns_rename(ns, d.ino, name, NS_ROOT, name + 245, 0), 0);
	}
	assert_int_equal(engine_call(e, ENGINE_ROLLBACK, 0, 0, 0, 0), 0);
	ns_count(ns, &before);
	assert_in_range(before.memory, after.memory * 99 / 100, after.memory * 101 / 100);
	for (int i = 0; i < 1000; i++) {
		snprintf(name, sizeof(name), "%0250d", i);
		assert_int_equal(ns_unlink(ns, d.ino, name), 0);
	}
	assert_int_equal(ns_rmdir(ns, NS_ROOT, "d"), 0);
	ns_count(ns, &after);
	assert_in_range(after.memory, 0, 100000); /* the tables keep their length */
}

static void a_file_that_comes_and_goes_leaves_no_memory(void **state)
{
	uint64_t after, told;

	(void)state;
	for (int round = 0; round < 3; round++) {
		for (unsigned int n = 0; n < few; n++) {
			uint64_t ino = make(0);

			assert_int_equal(ns_open(engine_ns(e), ino, true), 0);
			if (n % 4 == 0)
				assert_int_equal(engine_pwrite(e, ino, "data", 4, 0), 4);
			drop(0);
			ns_release(engine_ns(e), ino, true);
			ns_forget(engine_ns(e), ino, 1);
		}
		commit();
		settle();
		if (round == 0)
			begin();
	}
	after = taken();
	told = counted();
	print_message("%u files came and went: %.2f bytes each\n", 2 * few,
		      ((double)after - (double)base.taken) / (2 * few));
	assert_in_range(told, 0, base.counted + few / 2);
	assert_in_range(after, 0, base.taken + few / 2);
	malloc_trim(0);
	if (after)
		assert_in_range(resident("RssAnon"), 0, base.resident + few / 2 + (1u << 20));
}

#define test(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void)
{
	const char *full = getenv("MOMENT_CRASH");
	const struct CMUnitTest tests[] = {
		test(small_files_take_what_the_manual_says),
		test(blocks_take_what_the_manual_says),
		test(names_and_attributes_are_counted),
		test(a_file_that_comes_and_goes_leaves_no_memory),
	};

	if (full && !strcmp(full, "full"))
		files = 1000000;
	return cmocka_run_group_tests(tests, NULL, NULL);
}
