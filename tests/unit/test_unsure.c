/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_unsure.c - after an fdatasync that failed, a commit that succeeds has written everything
 * again: what is still in memory, what had left it, what was under way. The power goes out right
 * after it, and the drive then has nothing of what it was given before the failed sync but by
 * chance. Where the drive has dropped blocks that memory no longer has, no commit succeeds before
 * they are overwritten, rolled back or removed, and the error is there for all to see.
 */
#include <stdatomic.h>

#include "session_fixture.h"

#include "drive_faults.h"

#define BLOCKS 60u /* more than twice what memory holds */
#define FULL   22u /* not more, but so much that some are written to make room */

static enum io_engine engines[] = {IO_AUTO, IO_THREADS};
static enum io_engine engine;
static char content[BLOCKS * BLOCK];

static void begin(void)
{
	struct engine_opts o = {.ram = RAM,
				.io = engine,
				.block = BLOCK,
				.commit_seconds = ENGINE_COMMIT_OFF,
				.faults = "seed=7,journal",
				.holder = "test_unsure"};
	char err[1024];

	if (engine_open(dir, &o, &e, err, sizeof(err)))
		fail_msg("%s", err);
}

static int setup_faults(void **state)
{
	engine = *(enum io_engine *)*state;
	snprintf(dir, sizeof(dir), "%s/momentfs-unsure-XXXXXX",
		 getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
	assert_non_null(mkdtemp(dir));
	begin();
	return 0;
}

static void cut_now(void *arg)
{
	assert_int_equal(io_fault_cut(e->io, *(uint64_t *)arg), 0);
}

/* The power goes out and comes back. */
static void cut(uint64_t seed)
{
	loop_call(engine_loop(e), cut_now, &seed);
	engine_abandon(e);
	begin();
}

static uint64_t make(const char *name)
{
	struct ns_attr a;

	assert_int_equal(ns_create(engine_ns(e), NS_ROOT, name, 0644, 0, 0, true, &a), 0);
	return a.ino;
}

/* Blocks n .. stop - 1 with words that tell the place and the version. */
static void put(uint64_t ino, uint32_t n, uint32_t stop, uint32_t version)
{
	uint64_t *x = (uint64_t *)content, words = (stop - n) * (BLOCK / 8);

	for (uint64_t i = 0; i < words; i++)
		x[i] = (uint64_t)version << 32 | (n * (BLOCK / 8) + i);
	assert_int_equal(engine_pwrite(e, ino, content, words * 8, (uint64_t)n * BLOCK), words * 8);
}

static void is(uint64_t ino, uint32_t n, uint32_t stop, uint32_t version)
{
	uint64_t *x = (uint64_t *)content, words = (stop - n) * (BLOCK / 8);

	assert_int_equal(engine_pread(e, ino, content, words * 8, (uint64_t)n * BLOCK), words * 8);
	for (uint64_t i = 0; i < words; i++)
		assert_int_equal(x[i], (uint64_t)version << 32 | (n * (BLOCK / 8) + i));
}

static int64_t sync_file(uint64_t ino)
{
	return engine_call(e, ENGINE_FSYNC, ino, 0, 0, 0);
}

static uint64_t written(void)
{
	struct io_info i;

	io_get_info(e->io, &i);
	return i.write_bytes;
}

static bool status_says(const char *what)
{
	char *json = engine_status_json(e);
	bool there = strstr(json, what);

	free(json);
	return there;
}

static void count_clean(void *arg)
{
	struct file *f = file_find(&e->c, ino_of("p/exp_avg"));

	*(bool *)arg = f && f->dirty < f->cached && f->cached == FULL && !e->c.writing;
}

/* Some blocks of the parameter have been written, and are still in memory. */
static bool written_back(void)
{
	bool yes;

	loop_call(engine_loop(e), count_clean, &yes);
	return yes;
}

/* All of it in memory, written to make room before the sync that failed, or by its commit. */
static void test_in_memory(void **state)
{
	uint64_t ino, before;

	(void)state;
	for (uint64_t seed = 1; seed <= 4; seed++) {
		char name[16];

		snprintf(name, sizeof(name), "f%llu", (unsigned long long)seed);
		ino = make(name);
		put(ino, 0, 8, 1);
		assert_int_equal(sync_file(ino), 0);
		put(ino, 0, 8, 2);
		faults(seed % 2 ? "journal,sync.error=EIO:1" : "drop,sync.error=EIO:1");
		assert_int_equal(sync_file(ino), -EIO);
		before = written();
		assert_int_equal(sync_file(ino), -EIO); /* and once more */
		assert_in_range(written() - before, 8 * BLOCK, 9 * BLOCK);
		assert_true(status_says("fdatasync"));
		faults("journal");
		assert_int_equal(sync_file(ino), 0);
		/* Nothing is written twice once it is stored. */
		before = written();
		put(ino, 8, 9, 2);
		assert_int_equal(sync_file(ino), 0);
		assert_in_range(written() - before, BLOCK, 2 * BLOCK);
		cut(seed);
		is(ino_of(name), 0, 9, 2);
	}
}

struct noted {
	struct engine_op op;
	uint64_t written;
	atomic_bool done;
};

static void note_written(struct engine_op *op)
{
	struct noted *x = (struct noted *)op;

	x->written = written();
	atomic_store(&x->done, true);
}

/* Syncs; *at: bytes written when it was answered, before anything else is. */
static int64_t sync_noted(uint64_t ino, uint64_t *at)
{
	struct noted x = {.op = {.kind = ENGINE_FSYNC, .ino = ino, .done = note_written}};

	engine_submit(e, &x.op);
	while (!atomic_load(&x.done))
		usleep(200);
	*at = x.written;
	return x.op.res;
}

/* Most of it has left memory when the sync fails. */
static void test_evicted(void **state)
{
	uint64_t ino;

	(void)state;
	for (uint64_t seed = 1; seed <= 3; seed++) {
		uint64_t before;

		ino = seed == 1 ? make("a") : ino_of("a");
		put(ino, 0, BLOCKS, (uint32_t)seed);
		faults("journal,sync.error=EIO:1");
		/* Blocks that the cleaner writes from then on have been written again. */
		assert_int_equal(sync_noted(ino, &before), -EIO);
		faults("journal");
		if (seed == 2) /* some of it comes back to memory, and one block is changed */
			is(ino, 0, 10, 2);
		if (seed == 3)
			put(ino, 3, 4, 3);
		assert_int_equal(sync_file(ino), 0);
		assert_true(written() - before >= BLOCKS * BLOCK);
		cut(seed);
		is(ino_of("a"), 0, BLOCKS, (uint32_t)seed);
	}
}

static atomic_int asked; /* 1: under way, else how it ended */

static void asked_done(struct engine_op *op)
{
	atomic_store(&asked, (int)op->res);
}

/*
 * Writes that are under way when the sync fails, of another file, to make room; they end when the
 * next commit has begun and waits for them.
 */
static void test_under_way(void **state)
{
	struct engine_op op;
	uint64_t a, b;

	(void)state;
	a = make("a");
	b = make("b");
	put(a, 0, 2, 1);
	put(b, 0, FULL, 1);
	assert_int_equal(sync_file(a), 0);
	for (uint32_t round = 2; round < 6; round++) {
		cut(round);
		a = ino_of("a");
		b = ino_of("b");
		is(a, 0, 2, round - 1);
		is(b, 0, FULL, round - 1);
		put(a, 0, 2, round);
		op = (struct engine_op){.kind = ENGINE_FSYNC, .ino = a, .done = asked_done};
		atomic_store(&asked, 1);
		faults("journal,sync.error=EIO:1,sync.delay=60ms:1,write.delay=1ms:1");
		engine_submit(e, &op);
		usleep(20000);
		faults("journal,sync.error=EIO:1,sync.delay=60ms:1,write.delay=100ms:1");
		put(b, 0, FULL, round);
		while (atomic_load(&asked) == 1)
			usleep(1000);
		assert_int_equal(atomic_load(&asked), -EIO);
		faults("journal,write.delay=100ms:1");
		assert_int_equal(sync_file(b), 0);
	}
	cut(6);
	is(ino_of("b"), 0, FULL, 5);
}

/* The drive has dropped what it was given, and memory no longer has all of it. */
static void test_lost(void **state)
{
	uint64_t ino, other;

	(void)state;
	ino = make("a");
	other = make("b");
	put(ino, 0, BLOCKS, 1);
	put(other, 0, 1, 1);
	assert_int_equal(sync_file(ino), 0);
	for (uint32_t round = 2; round < 6; round++) {
		put(ino, 0, BLOCKS, round);
		put(other, 0, 1, round);
		faults("drop,sync.error=EIO:1");
		assert_int_equal(sync_file(ino), -EIO);
		faults("journal");
		for (int i = 0; i < 3; i++)
			assert_int_equal(sync_file(other), -EIO);
		assert_true(status_says("lost by a failed fdatasync"));
		assert_true(status_says("Input/output error"));
		if (round == 2) { /* never cured: what is found is the last commit */
			cut(1);
			ino = ino_of("a");
			other = ino_of("b");
			is(ino, 0, BLOCKS, 1);
			is(other, 0, 1, 1);
			continue;
		}
		if (round == 3)
			put(ino, 0, BLOCKS, round);
		else if (round == 4)
			assert_int_equal(engine_call(e, ENGINE_ROLLBACK, 0, 0, 0, 0), 0);
		else
			assert_int_equal(ns_unlink(engine_ns(e), NS_ROOT, "a"), 0);
		assert_int_equal(sync_file(other), 0);
		cut(round);
		ino = ino_of("a");
		other = ino_of("b");
		if (round == 5)
			assert_int_equal(ino, 0);
		else
			is(ino, 0, BLOCKS, 3);
		is(other, 0, 1, round == 4 ? 3 : round);
	}
}

/*
 * A step is open, so its blocks are in no commit. Some were written to make room, and are out for
 * writing when the sync fails; they come back unchanged. Memory has them, the drive need not.
 */
static void test_open_step(void **state)
{
	uint64_t plain;

	(void)state;
	attach(&w);
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("p", FULL * BLOCK / 4)), 0);
	plain = make("plain");
	do_step(1, 0, 1);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 2), 0);
	for (uint32_t n = 0; n < FULL; n++) {
		assert_int_equal(adv(&w, true, 0, n, 1, MOMENT_RANGE_WRITE), 0);
		memset(w.l->base + wire_leases(&w)->arena, 2, BLOCK);
		assert_int_equal(adv(&w, false, 0, n, 1, 0), 0);
	}
	while (!written_back())
		usleep(1000);
	assert_int_equal(adv(&w, true, 0, 0, 6, MOMENT_RANGE_WRITE), 0);
	put(plain, 0, 1, 9);
	faults("drop,sync.error=EIO:1");
	assert_int_equal(sync_file(plain), -EIO);
	faults("journal");
	assert_int_equal(adv(&w, false, 0, 0, 6, MOMENT_RANGE_CLEAN), 0);
	assert_int_equal(sync_file(plain), 0);
	assert_int_equal(send_steps(0, 2), 0);
	assert_int_equal(wire_step(&w, MOMENT_MSG_POST_STEP, 2), 0);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
	detach(&w);
	cut(5);
	for (uint32_t n = 0; n < FULL; n++)
		assert_int_equal(byte_at("p/exp_avg", n * BLOCK + 77), 2);
	is(ino_of("plain"), 0, 1, 9);
}

#define BOTH(name) \
	{#name " auto", name, setup_faults, teardown, &engines[0]}, \
	{ \
#name " threads", name, setup_faults, teardown, &engines[1] \
	}

int main(void)
{
	const struct CMUnitTest tests[] = {
		BOTH(test_in_memory), BOTH(test_evicted),   BOTH(test_under_way),
		BOTH(test_lost),      BOTH(test_open_step),
	};

	alarm(180); /* a hang is a failure */
	return cmocka_run_group_tests(tests, NULL, NULL);
}
