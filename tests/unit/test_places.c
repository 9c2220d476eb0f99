/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_places.c - places on disk, and moments in between: what a writer has reserved while others
 * fail, a place given back that is too short, a file removed while a commit begins, a drive that is
 * cured while memory is full. Most of it is made to happen by hand, on the loop thread.
 */
#include <pthread.h>
#include <semaphore.h>

#include "session_fixture.h"

#include "drive_faults.h"

static char buf[BLOCK];

static uint64_t make(const char *name)
{
	struct ns_attr a;

	assert_int_equal(ns_create(engine_ns(e), NS_ROOT, name, 0644, 0, 0, true, &a), 0);
	return a.ino;
}

static void put(uint64_t ino, uint64_t off, uint64_t len, int fill)
{
	memset(buf, fill, len);
	assert_int_equal(engine_pwrite(e, ino, buf, len, off), len);
}

static void is(uint64_t ino, uint64_t off, uint64_t len, int fill)
{
	assert_int_equal(engine_pread(e, ino, buf, len, off), len);
	for (uint64_t i = 0; i < len; i++)
		assert_int_equal((unsigned char)buf[i], fill);
}

static void sync_all(void)
{
	assert_int_equal(engine_call(e, ENGINE_SYNC, 0, 0, 0, 0), 0);
}

/* Through more blocks than memory has: everything else is written and leaves. */
static void push_out(uint64_t other, unsigned int blocks)
{
	for (unsigned int n = 0; n < blocks; n++)
		put(other, (uint64_t)n * BLOCK, BLOCK, 9);
}

/* ---- a writer's place ---- */

static struct want want;
static struct get get;
static sem_t granted;

static void get_done(struct get *g, int res)
{
	(void)g;
	assert_int_equal(res, 0);
	sem_post(&granted);
}

static void write_begin(void *ino)
{
	want = (struct want){.f = file_get(&e->c, *(uint64_t *)ino),
			     .mode = GET_WRITE,
			     .len = BLOCK,
			     .can_fill = true};
	get = (struct get){.want = &want, .n = 1, .done = get_done};
	cache_get(&e->c, &get);
}

static void write_end(void *unused)
{
	(void)unused;
	memset(arena_ptr_at(e->c.base, want.b->mem), 5, BLOCK);
	want.f->size = BLOCK;
	ns_grow(e->c.ns, want.f->ino, BLOCK);
	cache_put(&e->c, &want, true);
}

/*
 * The pool has no room for an fallocate that covers a block which somebody is writing, and which
 * grows by that: what he has reserved stays his.
 */
static void test_failed_fallocate_leaves_a_writer_its_place(void **state)
{
	uint64_t a, other;

	(void)state;
	sem_init(&granted, 0, 0);
	stop(false);
	pool_limit = 4u << 20;
	start(false);
	attach(&w);
	for (int fresh = 0; fresh < 2; fresh++) {
		a = make(fresh ? "fresh" : "a");
		other = make(fresh ? "other fresh" : "other");
		if (!fresh) { /* of the next commit: it is written in place as far as it goes */
			put(a, 0, 16384, 1);
			push_out(other, 25);
			is(a, 0, 16384, 1);
		}
		loop_call(engine_loop(e), write_begin, &a);
		while (sem_wait(&granted))
			;
		assert_int_equal(engine_call(e, ENGINE_ALLOCATE, a, 0, 8u << 20, 1), -ENOSPC);
		loop_call(engine_loop(e), write_end, NULL);
		sync_all();
		push_out(other, 25);
		sync_all();
		is(a, 0, BLOCK, 5);
	}
}

/* What an earlier fallocate has reserved is not given up when a later one finds no room. */
static void test_failed_fallocate_leaves_an_earlier_one(void **state)
{
	uint64_t a, other;
	int64_t r;

	(void)state;
	stop(false);
	pool_limit = 4u << 20;
	start(false);
	attach(&w);
	a = make("a");
	other = make("other");
	assert_int_equal(engine_call(e, ENGINE_ALLOCATE, a, 0, 8 * BLOCK, 0), 0);
	assert_int_equal(engine_call(e, ENGINE_ALLOCATE, a, 4 * BLOCK, 8u << 20, 0), -ENOSPC);
	memset(buf, 9, BLOCK);
	for (uint64_t n = 0; (r = engine_pwrite(e, other, buf, BLOCK, n * BLOCK)) == BLOCK; n++)
		assert_true(n < 100);
	assert_int_equal(r, -ENOSPC);
	for (int version = 1; version < 4; version++) {
		for (uint64_t n = 0; n < 8; n++)
			put(a, n * BLOCK, BLOCK, version);
		sync_all();
	}
	for (uint64_t n = 0; n < 8; n++)
		is(a, n * BLOCK, BLOCK, 3);
}

/* A finished commit gives a kept block a place that is shorter than what it holds. */
static void give_short(void *ino)
{
	struct file *f = file_find(&e->c, *(uint64_t *)ino);
	struct freed fr = {.len = 16384, .ino = f->ino};

	file_slot(f, 0)->keep = true;
	assert_int_equal(file_slot(f, 0)->nspare, 0);
	assert_int_equal(file_slot(f, 0)->seq, 0);
	assert_int_equal(pool_alloc(e->c.pool, fr.len, &fr.off), 0);
	freed_release(&e->c, &fr);
	assert_int_equal(file_slot(f, 0)->nspare, 1);
}

static void test_short_place_is_not_written_to(void **state)
{
	uint64_t a = make("a"), other = make("other");

	(void)state;
	put(a, 0, 40960, 1);
	push_out(other, 40);
	loop_call(engine_loop(e), give_short, &a);
	put(a, 0, 100, 1);
	assert_int_equal(engine_call(e, ENGINE_TRUNCATE, a, 0, BLOCK, 0), 0);
	push_out(other, 40);
	is(a, 0, 40960, 1);
	is(a, 40960, BLOCK - 40960, 0);
}

/* ---- a full pool ---- */

static struct engine_op race[2];
static unsigned char race_got[8192];
static sem_t race_ended;

static void race_done(struct engine_op *op)
{
	size_t at = 0;

	for (int i = 0; op->kind == ENGINE_READ && i < op->iovcnt; i++) {
		memcpy(race_got + at, op->iov[i].iov_base, op->iov[i].iov_len);
		at += op->iov[i].iov_len;
	}
	sem_post(&race_ended);
}

/* In one instant for the loop: the reader comes while the writer fills the block. */
static void race_begin(void *unused)
{
	(void)unused;
	for (int i = 0; i < 2; i++) {
		race[i].done = race_done;
		engine_submit(e, &race[i]);
	}
}

/* Takes all of the pool's free places. */
static void fill_pool(const char *name)
{
	uint64_t f = make(name), n = 0;

	while (!engine_call(e, ENGINE_ALLOCATE, f, n++ * BLOCK, BLOCK, 1))
		;
	for (n *= BLOCK; !engine_call(e, ENGINE_ALLOCATE, f, n, 4096, 1); n += BLOCK)
		;
}

#define VICTIMS 14

/*
 * A block that has become short is to be overwritten, all of it, and the pool has no room: then a
 * reader gets it from the drive after all, where it is still long. Nobody else's memory is hit.
 */
static void test_refused_writer_leaves_a_reader_the_block(void **state)
{
	uint64_t a, x, v[VICTIMS];
	char name[16];

	(void)state;
	sem_init(&race_ended, 0, 0);
	stop(false);
	pool_limit = 4u << 20;
	start(false);
	attach(&w);
	a = make("a");
	put(a, 0, BLOCK, 0xaa);
	sync_all();
	assert_int_equal(engine_call(e, ENGINE_TRUNCATE, a, 0, 8192, 0), 0);
	/* `x` leaves `a` its piece of memory, with others of 4 KiB behind it. */
	put(make("x"), 0, 8192, 1);
	for (int i = 0; i < VICTIMS; i++) {
		snprintf(name, sizeof(name), "v%d", i);
		v[i] = make(name);
		put(v[i], 0, 4096, i + 1);
	}
	remount(true);
	a = ino_of("a");
	x = ino_of("x");
	is(x, 0, 8192, 1);
	assert_int_equal(engine_call(e, ENGINE_ALLOCATE, x, 0, 8192, 0), 0);
	for (int i = 0; i < VICTIMS; i++) {
		snprintf(name, sizeof(name), "v%d", i);
		v[i] = ino_of(name);
		is(v[i], 0, 4096, i + 1);
	}
	fill_pool("one");
	sync_all();
	fill_pool("two");
	assert_int_equal(engine_call(e, ENGINE_PUNCH, x, 0, 8192, 0), 0);
	memset(buf, 0x33, 8192);
	race[0] = (struct engine_op){.kind = ENGINE_WRITE, .ino = a, .len = 8192, .data = buf};
	race[1] = (struct engine_op){.kind = ENGINE_READ, .ino = a, .len = 8192};
	loop_call(engine_loop(e), race_begin, NULL);
	for (int i = 0; i < 2; i++) {
		while (sem_wait(&race_ended))
			;
	}
	assert_int_equal(race[0].res, -ENOSPC);
	assert_int_equal(race[1].res, 8192);
	for (int i = 0; i < 8192; i++)
		assert_int_equal(race_got[i], 0xaa);
	for (int i = 0; i < VICTIMS; i++)
		is(v[i], 0, 4096, i + 1);
	is(a, 0, 8192, 0xaa);
}

/* A write that finds room for its first blocks only says how much of it is there. */
static void test_write_is_short_where_the_room_ends(void **state)
{
	static char big[4 * BLOCK];
	uint64_t a, b;

	(void)state;
	stop(false);
	pool_limit = 4u << 20;
	start(false);
	attach(&w);
	a = make("a");
	b = make("b");
	assert_int_equal(engine_call(e, ENGINE_ALLOCATE, a, 0, 2 * BLOCK, 1), 0);
	fill_pool("full");
	memset(big, 5, sizeof(big));
	assert_int_equal(engine_pwrite(e, a, big, sizeof(big), 0), 2 * BLOCK);
	assert_int_equal(engine_pwrite(e, a, big, sizeof(big), 2 * BLOCK), -ENOSPC);
	assert_int_equal(engine_pwrite(e, b, big, 1, 0), -ENOSPC);
	is(a, 0, BLOCK, 5);
	is(a, BLOCK, BLOCK, 5);
	assert_int_equal(engine_pread(e, a, buf, 1, 2 * BLOCK), 0);
}

/* ---- what the pool takes from the host ---- */

static uint64_t pool_file(void)
{
	char path[300];
	struct stat st;

	snprintf(path, sizeof(path), "%s/pool", dir);
	assert_int_equal(stat(path, &st), 0);
	return (uint64_t)st.st_size;
}

/* A range takes two places a block. If both cannot be had for all of it, none is taken. */
static void test_refused_fallocate_takes_nothing(void **state)
{
	uint64_t a, before;

	(void)state;
	stop(false);
	pool_limit = 64u << 20;
	start(false);
	attach(&w);
	a = make("a");
	put(a, 0, BLOCK, 1);
	sync_all();
	before = pool_file();
	assert_int_equal(engine_call(e, ENGINE_ALLOCATE, a, 0, 40u << 20, 0), -ENOSPC);
	assert_int_equal(engine_call(e, ENGINE_ALLOCATE, a, 0, 1ull << 40, 1), -ENOSPC);
	assert_int_equal(pool_file(), before);
	/* What is there counts. */
	assert_int_equal(engine_call(e, ENGINE_ALLOCATE, a, 0, 20u << 20, 0), 0);
	assert_int_equal(engine_call(e, ENGINE_ALLOCATE, a, 0, 31u << 20, 0), 0);
	is(a, 0, BLOCK, 1);
}

/* What was removed goes back to the host: on request, and at unmount. What is there stays. */
static void test_free_tail_goes_back(void **state)
{
	uint64_t a = make("a"), before, after;
	char name[16];

	(void)state;
	put(a, 0, BLOCK, 1);
	sync_all();
	for (int round = 0; round < 3; round++) {
		uint64_t b;

		snprintf(name, sizeof(name), "b%d", round);
		b = make(name);
		push_out(b, 100);
		sync_all();
		before = pool_file();
		assert_true(before > 100 * BLOCK);
		assert_int_equal(ns_unlink(engine_ns(e), NS_ROOT, name), 0);
		ns_forget(engine_ns(e), b, 1);
		if (round == 0) {
			int64_t given = engine_call(e, ENGINE_TRIM, 0, 0, 0, 0);

			assert_int_equal(pool_file(), before - (uint64_t)given);
			assert_true(given > 0);
			assert_int_equal(engine_call(e, ENGINE_TRIM, 0, 0, 0, 0), 0);
		}
		if (round == 1) { /* an end without a commit: as it was, and nothing is lost */
			remount(false);
			assert_int_equal(pool_file(), before);
			assert_int_equal(ns_unlink(engine_ns(e), NS_ROOT, name), 0);
		}
		if (round)
			remount(true);
		after = pool_file();
		assert_true(after < 10 * BLOCK);
		a = ino_of("a");
		is(a, 0, BLOCK, 1);
	}
	assert_int_equal(engine_call(e, ENGINE_SCRUB, 0, 0, 0, 0), 0);
}

/* What was reserved behind the end is there, however small the writes that come, and when. */
static void test_allocated_room_is_kept_whatever_is_written(void **state)
{
	struct ns_attr at;
	uint64_t a, used;

	(void)state;
	stop(false);
	pool_limit = 4u << 20;
	start(false);
	attach(&w);
	a = make("a");
	sync_all();
	used = pool_used();
	assert_int_equal(engine_call(e, ENGINE_ALLOCATE, a, 0, BLOCK, 1), 0);
	assert_int_equal(pool_used(), used + 2 * BLOCK);
	fill_pool("full");
	for (int i = 0; i < 16; i++) {
		put(a, (uint64_t)i * 4096, 4096, i + 1);
		if (i % 3)
			sync_all();
		if (i % 4 == 3)
			fill_pool(i == 3 ? "f3" : i == 7 ? "f7" : i == 11 ? "f11" : "f15");
	}
	for (int i = 0; i < 16; i++)
		is(a, (uint64_t)i * 4096, 4096, i + 1);
	/* Nothing is kept of it for ever: not after a way back, nor when it is gone. */
	stop(true);
	pool_limit = 0;
	start(false);
	attach(&w);
	assert_int_equal(ns_create(engine_ns(e), NS_ROOT, "b", 0644, 0, 0, false, &at), 0);
	a = at.ino;
	sync_all();
	used = pool_used();
	assert_int_equal(engine_call(e, ENGINE_ALLOCATE, a, 0, BLOCK, 1), 0);
	put(a, 0, 4096, 1);
	sync_all();
	put(a, 4096, 4096, 1);
	sync_all();
	put(a, 4096, 4096, 2);
	assert_int_equal(pool_used(), used + 2 * BLOCK);
	assert_int_equal(engine_call(e, ENGINE_ROLLBACK, 0, 0, 0, 0), 0);
	assert_int_equal(pool_used(), used + 8192);
	assert_int_equal(ns_unlink(engine_ns(e), NS_ROOT, "b"), 0);
	sync_all();
	assert_int_equal(pool_used(), used);
}

/* Behind the end of a file there is nothing to punch, however far behind. */
static void test_punch_behind_the_end_is_nothing(void **state)
{
	uint64_t a = make("a");

	(void)state;
	put(a, 0, 4096, 1);
	assert_int_equal(engine_call(e, ENGINE_PUNCH, a, 1ull << 60, 1ull << 60, 0), 0);
	assert_int_equal(engine_call(e, ENGINE_PUNCH, a, 100, INT64_MAX - 100, 0), 0);
	is(a, 0, 100, 1);
	is(a, 100, 3996, 0);
}

/* ---- while a commit begins ---- */

#define MANY 400

static void *remove_all(void *arg)
{
	char name[32];

	for (int i = 0; i < MANY; i++) {
		snprintf(name, sizeof(name), "f%d", i);
		if (ns_unlink(engine_ns(e), NS_ROOT, name))
			*(int *)arg = -1;
	}
	return NULL;
}

/* Files that have become shorter are removed by others while their commit is being put together. */
static void test_removed_while_a_commit_begins(void **state)
{
	uint64_t ino[MANY];
	pthread_t t;
	int res = 0;

	(void)state;
	for (int round = 0; round < 20; round++) {
		for (int i = 0; i < MANY; i++) {
			char name[32];

			snprintf(name, sizeof(name), "f%d", i);
			ino[i] = make(name);
			put(ino[i], 0, 1, 1);
			put(ino[i], BLOCK, 1, 1);
		}
		sync_all();
		for (int i = 0; i < MANY; i++)
			assert_int_equal(engine_call(e, ENGINE_TRUNCATE, ino[i], 0, 1, 0), 0);
		assert_int_equal(pthread_create(&t, NULL, remove_all, &res), 0);
		for (int i = 0; i < 5; i++)
			sync_all();
		pthread_join(t, NULL);
		assert_int_equal(res, 0);
		for (int i = 0; i < MANY; i++)
			ns_forget(engine_ns(e), ino[i], 1);
		sync_all();
	}
}

/* ---- a drive that is cured ---- */

/* Memory is full of what the drive does not take. The first writer after the cure finds room. */
static void test_cured_drive_is_tried_before_memory_is_refused(void **state)
{
	uint64_t a = make("a"), b = make("b");
	uint64_t n = 0;
	int64_t r;

	(void)state;
	faults("write.error=EIO:1");
	put(b, 0, 1000, 3);
	memset(buf, 3, BLOCK);
	do {
		assert_true(n < 100);
		r = engine_pwrite(e, a, buf, BLOCK, n++ * BLOCK);
	} while (r == BLOCK);
	assert_int_equal(r, -EIO);
	/* Tried again since, and it still fails; also for one that waits for a block, too. */
	assert_int_equal(engine_pwrite(e, a, buf, BLOCK, n * BLOCK), -EIO);
	assert_int_equal(engine_pwrite(e, b, buf, BLOCK, 0), -EIO);
	faults("write.error=EIO:0");
	assert_int_equal(engine_pwrite(e, a, buf, BLOCK, n * BLOCK), BLOCK);
	sync_all();
	is(a, n * BLOCK, BLOCK, 3);
	is(a, 0, BLOCK, 3);
}

/* ---- the end ---- */

static void write_whole(uint32_t file, uint32_t blocks, int fill)
{
	for (uint32_t n = 0; n < blocks; n++) {
		assert_int_equal(adv(&w, true, file, n, 1, MOMENT_RANGE_WRITE), 0);
		memset(w.l->base + wire_leases(&w)->arena, fill, wire_leases(&w)->len);
		assert_int_equal(adv(&w, false, file, n, 1, 0), 0);
	}
}

/* In an order of which `first` is the first. */
static void registers_all(const char (*name)[8], const uint64_t *numel, unsigned int n,
			  unsigned int first)
{
	wire_reg_begin(&w, 0);
	for (unsigned int i = 0; i < n; i++) {
		unsigned int k = (first + 3 * i) % n;
		struct wire_param p = vec(name[k], numel[k]);

		wire_reg_add(&w, &p);
	}
	if (wire_call(&w))
		fail_msg("%s", wire_text(&w));
}

/*
 * What others take of the disk between two runs does not matter: the pool keeps so much that all
 * places of the state are found in it again, whatever order steps and commits have left them in.
 */
static void test_state_is_registered_again_without_growth(void **state)
{
	enum { PARAMS = 10 };
	char name[PARAMS][8], path[300];
	uint64_t numel[PARAMS], step = 0;
	struct stat st;

	(void)state;
	for (unsigned int i = 0; i < PARAMS; i++)
		snprintf(name[i], sizeof(name[i]), "p%u", i);
	for (unsigned int seed = 1; seed <= 12; seed++) {
		srand(seed);
		assert_int_equal(wire_hello(&w, 0), 0);
		for (unsigned int i = 0; i < PARAMS; i++)
			numel[i] = 1 + (uint64_t)rand() % 60000;
		registers_all(name, numel, PARAMS, 0);
		for (unsigned int round = 0; round < 8; round++) {
			assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, ++step), 0);
			for (unsigned int k = 0; k < 2 * PARAMS; k++)
				if (rand() % 3)
					write_whole(k, (uint32_t)((numel[k / 2 * 3 % PARAMS] * 4 + BLOCK - 1) / BLOCK),
						    (int)step);
			assert_int_equal(wire_step(&w, MOMENT_MSG_POST_STEP, step), 0);
			if (rand() % 2)
				assert_int_equal(
					wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
		}
		stop(true);
		snprintf(path, sizeof(path), "%s/pool", dir);
		assert_int_equal(stat(path, &st), 0);
		pool_limit = (uint64_t)st.st_size;
		start(false);
		attach(&w);
		assert_int_equal(wire_hello(&w, 0), 0);
		registers_all(name, numel, PARAMS, seed);
		stop(true);
		pool_limit = 0;
		teardown(NULL);
		setup(NULL);
	}
}

static int setup_faults(void **state)
{
	setenv("MOMENT_FAULTS", "seed=7", 1);
	return setup(state);
}

static int teardown_faults(void **state)
{
	unsetenv("MOMENT_FAULTS");
	return teardown(state);
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		T(test_failed_fallocate_leaves_a_writer_its_place),
		T(test_failed_fallocate_leaves_an_earlier_one),
		T(test_short_place_is_not_written_to),
		T(test_refused_writer_leaves_a_reader_the_block),
		T(test_write_is_short_where_the_room_ends),
		T(test_punch_behind_the_end_is_nothing),
		T(test_allocated_room_is_kept_whatever_is_written),
		T(test_refused_fallocate_takes_nothing),
		T(test_free_tail_goes_back),
		T(test_removed_while_a_commit_begins),
		T(test_state_is_registered_again_without_growth),
		cmocka_unit_test_setup_teardown(test_cured_drive_is_tried_before_memory_is_refused,
						setup_faults, teardown_faults),
	};

	alarm(120); /* something hangs */
	return cmocka_run_group_tests(tests, NULL, NULL);
}
