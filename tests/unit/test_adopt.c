/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_adopt.c - parameters that plain tools have copied in are taken over when a session begins:
 * their meta.json becomes the generated one, and its size, blocks and places go together, whatever
 * state they are in. By hand-made messages to an engine in this process.
 */
#include <malloc.h>

#include "session_fixture.h"

#include "drive_faults.h"

#define NUMEL 1000

static const char meta_text[] = "{\"format\":\"momentfs-param\",\"version\":1,\"name\":\"a\","
				"\"shape\":[1000],\"step\":3,\"files\":{"
				"\"exp_avg\":{\"dtype\":\"float32\",\"bytes\":4000},"
				"\"exp_avg_sq\":{\"dtype\":\"float32\",\"bytes\":4000}}}";

static uint64_t plain_file(uint64_t parent, const char *name, const void *data, size_t len)
{
	struct ns_attr a;

	assert_int_equal(ns_create(engine_ns(e), parent, name, 0644, 0, 0, false, &a), 0);
	if (len)
		assert_int_equal(engine_pwrite(e, a.ino, data, len, 0), len);
	return a.ino;
}

/* What `cp -r w mnt/params/a` leaves; the inode of meta.json. */
static uint64_t copy_in(uint64_t *d)
{
	static char data[4 * NUMEL];
	struct ns_attr a;

	memset(data, 7, sizeof(data));
	assert_int_equal(ns_mkdir(engine_ns(e), NS_ROOT, "a", 0755, 0, 0, false, &a), 0);
	*d = a.ino;
	plain_file(a.ino, "exp_avg", data, sizeof(data));
	plain_file(a.ino, "exp_avg_sq", data, sizeof(data));
	return plain_file(a.ino, "meta.json", meta_text, strlen(meta_text));
}

static int sync_all(void)
{
	return (int)engine_call(e, ENGINE_SYNC, 0, 0, 0, 0);
}

static uint32_t flags_of(uint64_t ino)
{
	struct ns_attr a;

	assert_int_equal(ns_getattr(engine_ns(e), ino, &a), 0);
	return a.flags;
}

/* The session goes on as with its own parameters, and what it commits is there after a mount. */
static void train_and_look(uint64_t meta)
{
	char text[64];
	struct ns_attr a;

	assert_int_equal(flags_of(meta), NS_GENERATED);
	assert_int_equal(engine_pread(e, meta, text, sizeof(text), 0), 0);
	assert_int_equal(reg(&w, MOMENT_REG_EXIST, vec("a", NUMEL)), 0);
	assert_int_equal(reg_reply()->e[0].step, 3);
	do_step(4, 0, 1);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
	assert_int_equal(sync_all(), 0);
	remount(true);
	assert_int_equal(byte_at("a/exp_avg", 50), 1);
	assert_int_equal(byte_at("a/exp_avg_sq", 50), 7);
	xattr_is("a", "user.moment.step", "4");
	assert_int_equal(ns_walk(engine_ns(e), "a/meta.json", &a), 0);
	assert_int_equal(a.flags, NS_GENERATED);
	assert_int_equal(engine_call(e, ENGINE_SCRUB, 0, 0, 0, 0), 0);
}

static void test_never_committed(void **state)
{
	uint64_t d, meta = copy_in(&d);

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	train_and_look(meta);
}

static void test_committed(void **state)
{
	uint64_t d, meta = copy_in(&d), used;

	(void)state;
	assert_int_equal(sync_all(), 0);
	used = pool_used();
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(sync_all(), 0);
	assert_int_equal(pool_used(), used - MOMENT_UNIT);
	train_and_look(meta);
}

static void test_committed_and_changed(void **state)
{
	uint64_t d, meta = copy_in(&d);

	(void)state;
	assert_int_equal(sync_all(), 0);
	assert_int_equal(engine_pwrite(e, meta, meta_text, strlen(meta_text), 0),
			 strlen(meta_text));
	assert_int_equal(engine_pwrite(e, meta, "  \n", 3, strlen(meta_text)), 3);
	assert_int_equal(wire_hello(&w, 0), 0);
	train_and_look(meta);
}

static void open_with_faults(void)
{
	stop(true);
	setenv("MOMENT_FAULTS", "seed=7,journal", 1);
	start(false);
	unsetenv("MOMENT_FAULTS");
	attach(&w);
}

static void op_noted(struct engine_op *op)
{
	__atomic_store_n((bool *)(uintptr_t)op->arg, true, __ATOMIC_SEQ_CST);
}

/* Somebody reads it, and the drive is slow; or its own block is being written by a commit. */
static void test_in_use(void **state)
{
	bool done[4] = {false};
	uint64_t d, meta = copy_in(&d);
	struct engine_op op[4];

	(void)state;
	open_with_faults();
	faults("read.delay=30ms:1");
	for (int i = 0; i < 4; i++) {
		op[i] = (struct engine_op){.kind = i == 3 ? ENGINE_SYNC : ENGINE_READ,
					   .ino = i == 3 ? 0 : meta,
					   .len = i == 3 ? 0 : 100,
					   .arg = (uint64_t)(uintptr_t)&done[i],
					   .done = op_noted};
		engine_submit(e, &op[i]);
	}
	assert_int_equal(wire_hello(&w, 0), 0);
	faults("read.delay=0us:0");
	train_and_look(meta);
	for (int i = 0; i < 4; i++)
		assert_true(__atomic_load_n(&done[i], __ATOMIC_SEQ_CST));
	stop(true);
	start(false);
	/* Dirty, and a commit writes it while it is adopted. */
	assert_int_equal(ns_unlink(engine_ns(e), ino_of("a"), "meta.json"), 0);
	assert_int_equal(ns_removexattr(engine_ns(e), ino_of("a"), "user.moment.name"), 0);
	open_with_faults();
	meta = plain_file(ino_of("a"), "meta.json", meta_text, strlen(meta_text));
	faults("write.delay=30ms:1");
	done[3] = false;
	engine_submit(e, &op[3]);
	assert_int_equal(wire_hello(&w, 0), 0);
	faults("write.delay=0us:0");
	train_and_look(meta);
}

/* Whoever has it open for writing would write into a file that has no data: nothing is changed. */
static void test_open_for_writing(void **state)
{
	uint64_t d, meta = copy_in(&d);
	char text[64];

	(void)state;
	assert_int_equal(ns_open(engine_ns(e), meta, true), 0);
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(flags_of(meta), 0);
	assert_int_equal(ns_getxattr(engine_ns(e), d, "user.moment.name", text, sizeof(text)),
			 -ENODATA);
	assert_int_equal(engine_pread(e, meta, text, sizeof(text), 0), sizeof(text));
	assert_int_equal(sync_all(), 0);
	ns_release(engine_ns(e), meta, true);
	detach(&w);
	attach(&w);
	assert_int_equal(wire_hello(&w, 0), 0);
	train_and_look(meta);
}

/* What a session has adopted is known to a commit before its first step: so it can go back to that. */
static void test_rolled_back(void **state)
{
	uint64_t d, meta;

	(void)state;
	for (int committed = 0; committed < 2; committed++) {
		meta = copy_in(&d);
		if (committed) /* as plain files */
			assert_int_equal(sync_all(), 0);
		assert_int_equal(wire_hello(&w, 0), 0);
		assert_int_equal(reg(&w, MOMENT_REG_EXIST, vec("a", NUMEL)), 0);
		do_step(4, 0, 1);
		assert_int_equal(wire_simple(&w, MOMENT_MSG_ROLLBACK, 0), 0);
		assert_int_equal(byte_at("a/exp_avg", 50), 7);
		xattr_is("a", "user.moment.step", "3");
		xattr_is("a", "user.moment.shape", "[1000]");
		assert_int_equal(flags_of(meta), NS_GENERATED);
		detach(&w);
		for (int i = 0; i < 3; i++)
			assert_int_equal(
				ns_unlink(engine_ns(e), d, (const char *[]){"exp_avg", "exp_avg_sq", "meta.json"}[i]),
				0);
		assert_int_equal(ns_rmdir(engine_ns(e), NS_ROOT, "a"), 0);
		attach(&w);
	}
}

/* A fresh start on a directory that never was a parameter's. */
static void test_fresh_over_a_plain_file(void **state)
{
	uint64_t d, meta;

	(void)state;
	meta = copy_in(&d);
	assert_int_equal(engine_pwrite(e, meta, "not JSON", 8, 0), 8);
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(flags_of(meta), 0);
	assert_int_equal(reg(&w, MOMENT_REG_FRESH, vec("a", NUMEL)), 0);
	assert_int_equal(flags_of(meta), NS_GENERATED);
	do_step(1, 0, 5);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
	remount(true);
	assert_int_equal(byte_at("a/exp_avg", 50), 5);
	assert_int_equal(byte_at("a/exp_avg_sq", 50), 0);
}

/* The directory goes, with the meta.json that had data once: nothing of it stays. */
static void test_removed(void **state)
{
	uint64_t d, used = pool_used();

	(void)state;
	for (int committed = 0; committed < 2; committed++) {
		copy_in(&d);
		assert_int_equal(sync_all(), 0);
		assert_int_equal(wire_hello(&w, 0), 0);
		if (committed)
			assert_int_equal(sync_all(), 0);
		assert_int_equal(ns_unlink(engine_ns(e), d, "exp_avg"), 0);
		assert_int_equal(ns_unlink(engine_ns(e), d, "exp_avg_sq"), 0);
		assert_int_equal(ns_rmdir(engine_ns(e), NS_ROOT, "a"), 0);
		assert_int_equal(sync_all(), 0);
		assert_int_equal(pool_used(), used);
		detach(&w);
		attach(&w);
	}
}

/* ---- removed while its adoption waits for memory ---- */

#define ALL 24

static struct want taken[ALL];
static struct get take;

static void take_done(struct get *g, int res)
{
	(void)g;
	assert_int_equal(res, 0);
}

static void take_memory(void *ino)
{
	for (uint32_t n = 0; n < ALL; n++)
		taken[n] = (struct want){.f = file_get(&e->c, *(uint64_t *)ino),
					 .n = n,
					 .mode = GET_LEASE};
	take = (struct get){.want = taken, .n = ALL, .session = true, .done = take_done};
	cache_get(&e->c, &take);
}

static void give_memory(void *arg)
{
	(void)arg;
	for (unsigned int n = 0; n < ALL; n++)
		cache_put(&e->c, &taken[n], false);
}

static void nothing(void *arg)
{
	(void)arg;
}

static void test_removed_while_it_waits(void **state)
{
	static char page[BLOCK];
	uint64_t d, big, id;
	struct moment_hello *m;
	struct moment_reply *r;

	(void)state;
	copy_in(&d);
	big = plain_file(NS_ROOT, "big", page, sizeof(page));
	assert_int_equal(engine_call(e, ENGINE_TRUNCATE, big, 0, ALL * BLOCK, 0), 0);
	stop(true); /* after it nothing is in memory */
	start(false);
	attach(&w);
	mallopt(M_PERTURB, 0x5a); /* what is used after it was freed is noticed */
	loop_call(engine_loop(e), take_memory, &big);
	m = wire_begin(&w, MOMENT_MSG_HELLO, 0, sizeof(*m));
	m->version = MOMENT_PROTOCOL_VERSION;
	id = w.id;
	assert_int_equal(wire_send(&w), 0);
	assert_null(wire_recv(&w, 50));
	assert_int_equal(ns_unlink(engine_ns(e), d, "meta.json"), 0);
	loop_call(engine_loop(e), nothing, NULL);
	loop_call(engine_loop(e), give_memory, NULL);
	r = wire_wait(&w, id);
	assert_non_null(r);
	assert_int_equal(r->status, 0);
	mallopt(M_PERTURB, 0);
	assert_int_equal(sync_all(), 0);
	xattr_is("a", "user.moment.step", "3");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(test_never_committed),
		T(test_committed),
		T(test_committed_and_changed),
		T(test_in_use),
		T(test_open_for_writing),
		T(test_rolled_back),
		T(test_fresh_over_a_plain_file),
		T(test_removed),
		T(test_removed_while_it_waits),
	};

	return cmocka_run_group_tests_name("adopt", tests, NULL, NULL);
}
