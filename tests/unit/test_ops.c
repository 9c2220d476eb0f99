/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ops.c - ops and leases in corners that random operations seldom reach: places on disk that
 * are shorter than what the file became, read-ahead of a tail that grows, memory that is all out
 * on leases while others want some.
 */
#include <signal.h>
#include <sys/wait.h>

#include "session_fixture.h"
#include "engine/cache.h"
#include "early_write.h"

static uint64_t make(const char *name)
{
	struct ns_attr a;

	assert_int_equal(ns_create(engine_ns(e), NS_ROOT, name, 0644, 0, 0, true, &a), 0);
	return a.ino;
}

static void put(uint64_t ino, uint64_t off, uint64_t len, int fill)
{
	char *buf = malloc(len);

	memset(buf, fill, len);
	assert_int_equal(engine_pwrite(e, ino, buf, len, off), len);
	free(buf);
}

static void is(uint64_t ino, uint64_t off, uint64_t len, int fill)
{
	char *buf = malloc(len);

	assert_int_equal(engine_pread(e, ino, buf, len, off), len);
	for (uint64_t i = 0; i < len; i++)
		assert_int_equal((unsigned char)buf[i], fill);
	free(buf);
}

static void sync_all(void)
{
	assert_int_equal(engine_call(e, ENGINE_SYNC, 0, 0, 0, 0), 0);
}

/* A dirty block whose reserved place is as long as the content was, in a file that grows elsewhere.
 */
static void test_grown_elsewhere(void **state)
{
	uint64_t a = make("a"), b = make("b");

	(void)state;
	assert_int_equal(engine_call(e, ENGINE_ALLOCATE, a, 0, 9000, 1), 0);
	put(a, 0, 9000, 1);
	put(a, 3 * BLOCK, 10, 2);
	assert_int_equal(engine_call(e, ENGINE_ALLOCATE, b, 0, 9000, 0), 0);
	put(b, 0, 9000, 1);
	assert_int_equal(engine_call(e, ENGINE_TRUNCATE, b, 0, 16384, 0), 0);
	for (int pass = 0; pass < 2; pass++) {
		sync_all();
		is(a, 0, 9000, 1);
		is(a, 9000, 3 * BLOCK - 9000, 0);
		is(a, 3 * BLOCK, 10, 2);
		is(b, 0, 9000, 1);
		is(b, 9000, 16384 - 9000, 0);
		/* Written in place now, and grown again. */
		put(a, 0, 9000, 1);
		put(b, 100, 100, 1);
		assert_int_equal(engine_call(e, ENGINE_TRUNCATE, b, 0, 16384, 0), 0);
	}
	stop(true);
	start(false);
	is(ino_of("a"), 0, 9000, 1);
	is(ino_of("a"), 9000, 3 * BLOCK - 9000, 0);
	is(ino_of("b"), 9000, 16384 - 9000, 0);
	assert_int_equal(engine_call(e, ENGINE_SCRUB, 0, 0, 0, 0), 0);
}

/* Read-ahead goes on after the tail that it had fetched has grown into a larger piece. */
static void test_prefetched_tail_grows(void **state)
{
	uint64_t ino;
	char *before, *after;

	(void)state;
	ino = make("a");
	put(ino, 0, 5000, 1);
	put(make("b"), 0, 4 * BLOCK, 2);
	stop(true);
	start(false);
	ino = ino_of("a");
	assert_int_equal(engine_call(e, ENGINE_PREFETCH, ino, 0, 5000, 0), 0);
	put(ino, 5000, 40000, 3);
	is(ino, 0, 5000, 1);
	is(ino, 5000, 40000, 3);
	before = engine_status_json(e);
	assert_int_equal(engine_call(e, ENGINE_PREFETCH, ino_of("b"), 0, 4 * BLOCK, 0), 0);
	is(ino_of("b"), 0, 4 * BLOCK, 2);
	after = engine_status_json(e);
	assert_non_null(strstr(before, "\"prefetch_hits\":1,"));
	assert_non_null(strstr(after, "\"prefetch_hits\":5,"));
	free(before);
	free(after);
}

struct reader {
	pthread_t thread;
	uint64_t ino;
	int64_t res;
};

static void *read_mib(void *arg)
{
	struct reader *r = arg;
	char *buf = malloc(1 << 20);

	r->res = engine_pread(e, r->ino, buf, 1 << 20, 100);
	for (int i = 0; i < 1 << 20; i++) {
		if (buf[i] != 7)
			r->res = -EBADMSG;
	}
	free(buf);
	return NULL;
}

/*
 * A session holds all that it may, a reader its share, and does not give it back; plain reads of
 * more blocks than are left go on beside it, and so does the session.
 */
static void test_reads_beside_leases(void **state)
{
	const struct moment_hello_reply *h = (const void *)w.in;
	struct wire *x = calloc(1, sizeof(*x));
	struct reader r[8];
	uint32_t most;
	uint64_t ino = make("f");

	(void)state;
	put(ino, 0, 2 << 20, 7);
	sync_all();
	assert_int_equal(wire_hello(&w, 0), 0);
	most = (uint32_t)(h->quota / BLOCK);
	assert_int_equal(reg(&w, 0, vec("a", 2 * most * (BLOCK / 4))), 0);
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 1), 0);
	attach(x);
	assert_int_equal(wire_hello(x, MOMENT_HELLO_READONLY), 0);
	assert_int_equal(reg(x, 0, vec("a", 2 * most * (BLOCK / 4))), 0);
	assert_int_equal(adv(x, true, 0, most, 1, 0), 0);
	assert_int_equal(adv(&w, true, 0, 0, most, MOMENT_RANGE_WRITE), 0);
	for (int round = 0; round < 20; round++) {
		for (int i = 0; i < 8; i++) {
			r[i].ino = ino;
			assert_int_equal(pthread_create(&r[i].thread, NULL, read_mib, &r[i]), 0);
		}
		wire_adv_begin(&w);
		wire_adv_add(&w, false, (struct moment_range){0, (uint32_t)round % most, 1, 0});
		wire_adv_add(
			&w, true,
			(struct moment_range){0, (uint32_t)round % most, 1, MOMENT_RANGE_WRITE});
		assert_int_equal(wire_call(&w), 0);
		for (int i = 0; i < 8; i++) {
			pthread_join(r[i].thread, NULL);
			assert_int_equal(r[i].res, 1 << 20);
		}
	}
	detach(x);
	free(x);
}

/* Readers without number cannot take the tier from those who work. */
static void test_many_readers(void **state)
{
	enum { N = 30 };
	struct wire *x = calloc(N, sizeof(*x));
	uint64_t ino = make("f");
	unsigned int got = 0;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", N * (BLOCK / 4))), 0);
	for (uint32_t i = 0; i < N; i++) {
		int res;

		attach(&x[i]);
		assert_int_equal(wire_hello(&x[i], MOMENT_HELLO_READONLY), 0);
		assert_int_equal(reg(&x[i], 0, vec("a", N * (BLOCK / 4))), 0);
		res = adv(&x[i], true, 0, i, 1, 0);
		assert_true(res == 0 || res == -E2BIG);
		got += res == 0;
	}
	assert_true(got >= 1);
	put(ino, 0, 1 << 20, 7);
	is(ino, 0, 1 << 20, 7);
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 1), 0);
	assert_int_equal(adv(&w, true, 0, 0, 8, MOMENT_RANGE_WRITE), 0);
	assert_int_equal(adv(&w, false, 0, 0, 8, 0), 0);
	for (int i = 0; i < N; i++)
		detach(&x[i]);
	free(x);
}

/* A WRITE that was answered before its bytes were copied: whatever is asked then finds them. */
static void test_answered_early(void **state)
{
	static char buf[BLOCK], got[BLOCK];
	uint64_t ino = make("early");

	(void)state;
	for (int i = 0; i < 300; i++) {
		uint64_t len = i % 7 ? BLOCK : 20000 + (uint64_t)i;
		uint64_t off =
			i % 3 ? 0 : BLOCK; /* a hole, a block of the last commit, a dirty one */

		memset(buf, 1 + i % 100, sizeof(buf));
		assert_int_equal(early_pwrite(e, ino, buf, len, off), len);
		switch (i % 4) {
		case 0:
			assert_int_equal(engine_call(e, ENGINE_SEEK, ino, off, 0, SEEK_DATA), off);
			break;
		case 1: /* a crash after it loses nothing */
			assert_int_equal(engine_call(e, ENGINE_FSYNC, ino, 0, 0, 0), 0);
			stop(false);
			start(false);
			break;
		case 2:
			assert_int_equal(engine_call(e, ENGINE_TRUNCATE, ino, 0, off + len - 1, 0),
					 0);
			assert_int_equal(engine_pread(e, ino, got, len, off), len - 1);
			assert_memory_equal(got, buf, len - 1);
			assert_int_equal(engine_call(e, ENGINE_TRUNCATE, ino, 0, off, 0), 0);
			continue;
		}
		memset(got, 0, sizeof(got));
		assert_int_equal(engine_pread(e, ino, got, len, off), len);
		assert_memory_equal(got, buf, len);
		if (i % 5 == 0)
			assert_int_equal(engine_call(e, ENGINE_PUNCH, ino, 0, 2 * BLOCK, 0), 0);
	}
}

/* A session that reads and keeps its lease holds up nobody for long: who cannot go round it is told. */
static void test_lease_that_is_kept(void **state)
{
	struct wire *x = calloc(1, sizeof(*x));
	uint64_t ino;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", BLOCK / 4 + 100)), 0);
	do_step(1, 0, 1);
	detach(&w);
	ino = ino_of("a/exp_avg");
	attach(x);
	assert_int_equal(wire_hello(x, MOMENT_HELLO_READONLY), 0);
	assert_int_equal(reg(x, 0, vec("a", BLOCK / 4 + 100)), 0);
	assert_int_equal(adv(x, true, 0, 0, 1, 0), 0);
	assert_int_equal(engine_call(e, ENGINE_TRUNCATE, ino, 0, 100, 0), -EBUSY);
	assert_int_equal(engine_call(e, ENGINE_PUNCH, ino, 0, BLOCK, 0), -EBUSY);
	is(ino, 0, BLOCK, 1);
	/* What the lease is not in the way of goes on. */
	put(ino, 10, 100, 2);
	assert_int_equal(engine_call(e, ENGINE_PUNCH, ino, BLOCK, 400, 0), 0);
	sync_all();
	/* A block that has to move to grow. */
	assert_int_equal(adv(x, false, 0, 0, 1, 0), 0);
	assert_int_equal(adv(x, true, 0, 1, 1, 0), 0);
	assert_int_equal(engine_pwrite(e, ino, "x", 1, 2 * BLOCK - 1), -EBUSY);
	/* A fresh start. */
	attach(&w);
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, MOMENT_REG_FRESH, vec("a", BLOCK / 4 + 100)), -EBUSY);
	says(&w, "keeps");
	assert_int_equal(byte_at("a/exp_avg", 10), 2);
	assert_int_equal(adv(x, false, 0, 1, 1, 0), 0);
	assert_int_equal(reg(&w, MOMENT_REG_FRESH, vec("a", BLOCK / 4 + 100)), 0);
	assert_int_equal(byte_at("a/exp_avg", 10), 0);
	detach(x);
	free(x);
}

/*
 * A fresh start while hints still wait for room: as the first file is dropped there is room, but of
 * none of the other files may anything begin to be read or written before all are zeros.
 */
static void test_fresh_beside_hints(void **state)
{
	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("b", 10 * BLOCK / 4)), 0);
	detach(&w);
	put(ino_of("b/exp_avg"), 0, 10 * BLOCK, 1);
	put(ino_of("b/exp_avg_sq"), 0, 10 * BLOCK, 2);
	attach(&w);
	remount(true);
	for (int i = 0; i < 3; i++) {
		assert_int_equal(engine_call(e, ENGINE_PREFETCH, ino_of("b/exp_avg"), 0, 10 * BLOCK, 0), 0);
		assert_int_equal(engine_call(e, ENGINE_PREFETCH, ino_of("b/exp_avg_sq"), 0, 10 * BLOCK, 0),
				 0);
	}
	assert_int_equal(reg(&w, MOMENT_REG_FRESH, vec("b", 10 * BLOCK / 4)), 0);
	is(ino_of("b/exp_avg"), 0, 10 * BLOCK, 0);
	is(ino_of("b/exp_avg_sq"), 0, 10 * BLOCK, 0);
}

static uint64_t open_one(const char *name)
{
	struct ns_attr a;

	assert_int_equal(ns_peek(engine_ns(e), NS_ROOT, name, &a), 0);
	assert_int_equal(ns_open(engine_ns(e), a.ino, false), 0);
	return a.ino;
}

static void is_stale(uint64_t ino)
{
	struct ns_attr a;
	char buf[16];

	assert_int_equal(engine_pread(e, ino, buf, sizeof(buf), 0), -ESTALE);
	assert_int_equal(engine_pwrite(e, ino, buf, sizeof(buf), 0), -ESTALE);
	assert_int_equal(engine_call(e, ENGINE_TRUNCATE, ino, 0, 10, 0), -ESTALE);
	assert_int_equal(engine_call(e, ENGINE_ALLOCATE, ino, 0, 10, 0), -ESTALE);
	assert_int_equal(engine_call(e, ENGINE_PUNCH, ino, 0, 10, 0), -ESTALE);
	assert_int_equal(engine_call(e, ENGINE_SEEK, ino, 0, 0, SEEK_DATA), -ESTALE);
	assert_int_equal(engine_call(e, ENGINE_FSYNC, ino, 0, 0, 0), -ESTALE);
	assert_int_equal(ns_getattr(engine_ns(e), ino, &a), 0);
	assert_int_equal(a.nlink, 0);
	assert_int_equal(a.size, 5000);
}

/* A rollback drops the bytes of files that no commit has. Who has one open never reads zeros for them. */
static void test_rolled_back_while_open(void **state)
{
	struct ns *ns = engine_ns(e);
	uint64_t gone, never, back, unnamed;

	(void)state;
	put(make("gone"), 0, 5000, 1);
	put(make("back"), 0, 5000, 2);
	sync_all();
	gone = open_one("gone");
	back = open_one("back");
	assert_int_equal(ns_unlink(ns, NS_ROOT, "gone"), 0);
	sync_all();
	is(gone, 0, 5000, 1);
	assert_int_equal(ns_unlink(ns, NS_ROOT, "back"), 0);
	put(make("never"), 0, 5000, 3);
	never = open_one("never");
	put(make("unnamed"), 0, 5000, 4);
	unnamed = open_one("unnamed");
	assert_int_equal(ns_unlink(ns, NS_ROOT, "unnamed"), 0);
	assert_int_equal(engine_call(e, ENGINE_ROLLBACK, 0, 0, 0, 0), 0);
	is_stale(gone);
	is_stale(never);
	is_stale(unnamed);
	is(back, 0, 5000, 2);
	put(back, 0, 10, 9);
	sync_all();
	assert_int_equal(engine_call(e, ENGINE_ROLLBACK, 0, 0, 0, 0), 0);
	is_stale(gone);
	is(back, 0, 10, 9);
	ns_release(ns, gone, false);
	ns_release(ns, back, false);
	put(make("never"), 0, 5000, 5); /* a name of it is another file's */
	sync_all();
	is_stale(never);
}

/* In a child: what a broken invariant does to the process that meets it. */
static void test_broken_invariant(void **state)
{
	char text[1024] = "";
	int fds[2], status;
	pid_t child;

	(void)state;
	put(make("kept"), 0, 5000, 1);
	sync_all();
	assert_int_equal(pipe(fds), 0);
	child = fork();
	if (child == 0) {
		struct cache c = {0}; /* not quiet */

		signal(SIGABRT, SIG_DFL);
		dup2(fds[1], STDERR_FILENO);
		file_holes(&c, NULL, 0, 1, false);
		_exit(0);
	}
	close(fds[1]);
	assert_true(read(fds[0], text, sizeof(text) - 1) > 0);
	close(fds[0]);
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
	assert_non_null(strstr(text, "c->quiet does not hold in file_holes() (block.c:"));
	assert_non_null(strstr(text, "the last commit"));
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		T(test_grown_elsewhere), T(test_prefetched_tail_grows), T(test_reads_beside_leases),
		T(test_many_readers),	 T(test_answered_early),
		T(test_lease_that_is_kept),
		T(test_fresh_beside_hints),
		T(test_rolled_back_while_open),
		T(test_broken_invariant),
	};

	alarm(120); /* something hangs */
	return cmocka_run_group_tests(tests, NULL, NULL);
}
