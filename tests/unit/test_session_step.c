/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_session_step.c - leases, hints, steps, commits, rollbacks and removals of a session. By
 * hand-made messages to an engine in this process.
 */
#include <malloc.h>
#include <sqlite3.h>

#include "catalog_handle.h"
#include "engine/sqlite_fault.h"
#include "session_fixture.h"

/* ---- leases ---- */

static void test_leases(void **state)
{
	static char big[3 * BLOCK];
	const struct moment_advance_reply *r = (const struct moment_advance_reply *)w.in;
	uint32_t len;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 2 * BLOCK / 4 + 100)), 0);
	assert_int_equal(adv(&w, true, 0, 0, 3, MOMENT_RANGE_WRITE), -EPERM);
	says(&w, "pre_step");
	assert_int_equal(adv(&w, true, 2, 0, 1, 0), -EINVAL);
	assert_int_equal(adv(&w, true, 0, 3, 1, 0), -EINVAL);
	assert_int_equal(adv(&w, true, 0, 1, 3, 0), -EINVAL);
	assert_int_equal(adv(&w, true, 0, 0, 0, 0), -EINVAL);
	assert_int_equal(adv(&w, true, 0, 1, UINT32_MAX, 0), -EINVAL);
	assert_int_equal(adv(&w, false, 0, 0, 1, 0), -EINVAL);
	says(&w, "not leased");
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 1), 0);
	assert_int_equal(adv(&w, true, 0, 0, 3, MOMENT_RANGE_WRITE), 0);
	assert_int_equal(r->n, 3);
	assert_int_equal(r->l[0].len, BLOCK);
	assert_int_equal(r->l[2].len, 400);
	for (unsigned int i = 0; i < 3; i++) {
		len = r->l[i].len;
		assert_true(r->l[i].arena + len <= RAM);
		for (uint32_t k = 0; k < len; k++)
			assert_int_equal(w.l->base[r->l[i].arena + k], 0);
		memset(w.l->base + r->l[i].arena, (int)i + 1, len);
	}
	/* Not twice, neither beside nor in the same message. */
	assert_int_equal(adv(&w, true, 0, 1, 1, 0), -EINVAL);
	says(&w, "already");
	wire_adv_begin(&w);
	wire_adv_add(&w, true, (struct moment_range){1, 0, 2, 0});
	wire_adv_add(&w, true, (struct moment_range){1, 1, 1, 0});
	assert_int_equal(wire_call(&w), -EINVAL);
	says(&w, "twice");
	assert_int_equal(adv(&w, true, 1, 0, 2, 0), 0);
	assert_int_equal(adv(&w, false, 1, 0, 2, 0), 0);
	assert_int_equal(adv(&w, false, 1, 0, 1, 0), -EINVAL);
	assert_int_equal(adv(&w, false, 0, 0, 3, MOMENT_RANGE_COOL), 0);
	assert_int_equal(adv(&w, false, 0, 2, 1, 0), -EINVAL);
	/* Release and lease in one message, of the same block. */
	assert_int_equal(adv(&w, true, 0, 2, 1, MOMENT_RANGE_WRITE), 0);
	wire_adv_begin(&w);
	wire_adv_add(&w, false, (struct moment_range){0, 2, 1, 0});
	wire_adv_add(&w, true, (struct moment_range){0, 2, 1, 0});
	assert_int_equal(wire_call(&w), 0);
	assert_int_equal(w.l->base[r->l[0].arena + 399], 3);
	assert_int_equal(adv(&w, false, 0, 2, 1, 0), 0);
	assert_int_equal(wire_step(&w, MOMENT_MSG_POST_STEP, 1), 0);
	for (int pass = 0; pass < 2; pass++) {
		assert_int_equal(engine_pread(e, ino_of("a/exp_avg"), big, sizeof(big), 0),
				 2 * BLOCK + 400);
		for (uint32_t k = 0; k < 2 * BLOCK + 400; k++)
			assert_int_equal(big[k], k / BLOCK + 1);
		remount(true);
	}
}

/* A lease that was given back unchanged changes nothing: neither bytes nor times. */
static void test_clean_release(void **state)
{
	struct ns_attr a, b;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 1000)), 0);
	do_step(1, 0, 3);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
	assert_int_equal(ns_walk(engine_ns(e), "a/exp_avg", &a), 0);
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 2), 0);
	assert_int_equal(adv(&w, true, 0, 0, 1, MOMENT_RANGE_WRITE), 0);
	assert_int_equal(adv(&w, false, 0, 0, 1, MOMENT_RANGE_CLEAN), 0);
	assert_int_equal(wire_step(&w, MOMENT_MSG_POST_STEP, 2), 0);
	assert_int_equal(ns_walk(engine_ns(e), "a/exp_avg", &b), 0);
	assert_int_equal(a.mtime.tv_sec, b.mtime.tv_sec);
	assert_int_equal(a.mtime.tv_nsec, b.mtime.tv_nsec);
	assert_int_equal(byte_at("a/exp_avg", 9), 3);
	do_step(3, 0, 4);
	assert_int_equal(ns_walk(engine_ns(e), "a/exp_avg", &b), 0);
	assert_true(a.mtime.tv_sec != b.mtime.tv_sec || a.mtime.tv_nsec != b.mtime.tv_nsec);
}

static void test_quota(void **state)
{
	const struct moment_hello_reply *h = (const struct moment_hello_reply *)w.in;
	uint32_t most, small;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	most = (uint32_t)(h->quota / BLOCK);
	small = (uint32_t)(h->quota_small / 4096);
	assert_int_equal(reg(&w, 0, vec("a", (most + 1) * (BLOCK / 4))), 0);
	assert_int_equal(adv(&w, true, 0, 0, most + 1, 0), -E2BIG);
	says(&w, "quota");
	assert_int_equal(adv(&w, true, 0, 0, most, 0), 0);
	assert_int_equal(adv(&w, true, 0, most, 1, 0), -E2BIG);
	/* Release first, then lease: in one message. */
	wire_adv_begin(&w);
	wire_adv_add(&w, false, (struct moment_range){0, 0, 1, 0});
	wire_adv_add(&w, true, (struct moment_range){0, most, 1, 0});
	assert_int_equal(wire_call(&w), 0);
	assert_int_equal(adv(&w, false, 0, 1, most, 0), 0);
	/* Small blocks have a quota of their own. */
	for (uint32_t i = 0; i <= small; i += 50) {
		wire_reg_begin(&w, 0);
		for (uint32_t k = i; k < i + 50; k++) {
			char name[16];
			struct wire_param p;

			snprintf(name, sizeof(name), "s%u", k);
			p = vec(name, 3);
			wire_reg_add(&w, &p);
		}
		assert_int_equal(wire_call(&w), 0);
	}
	for (uint32_t k = 0; k < small; k++)
		assert_int_equal(adv(&w, true, 2 + 2 * k, 0, 1, 0), 0);
	assert_int_equal(adv(&w, true, 2 + 2 * small, 0, 1, 0), -E2BIG);
	/* A plain file gets its share beside all that. */
	{
		struct ns_attr a;
		static char buf[2 * BLOCK];

		assert_int_equal(ns_create(engine_ns(e), NS_ROOT, "f", 0644, 0, 0, false, &a), 0);
		assert_int_equal(engine_pwrite(e, a.ino, buf, sizeof(buf), 0), sizeof(buf));
		assert_int_equal(engine_pread(e, a.ino, buf, sizeof(buf), 0), sizeof(buf));
	}
}

static void send_prefetch(uint32_t file, uint32_t first, uint32_t count)
{
	struct moment_prefetch *m = wire_begin(&w, MOMENT_MSG_PREFETCH, 0, sizeof(*m));

	m->n = 1;
	*(struct moment_range *)wire_more(&w, sizeof(struct moment_range)) =
		(struct moment_range){file, first, count, 0};
	assert_int_equal(wire_send(&w), 0);
}

static void test_prefetch(void **state)
{
	struct moment_prefetch *m;
	uint64_t misses;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 4 * BLOCK / 4)), 0);
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 1), 0);
	assert_int_equal(adv(&w, true, 0, 0, 4, MOMENT_RANGE_WRITE), 0);
	for (int i = 0; i < 4; i++)
		memset(w.l->base + wire_leases(&w)[i].arena, 1, BLOCK);
	assert_int_equal(adv(&w, false, 0, 0, 4, 0), 0);
	assert_int_equal(wire_step(&w, MOMENT_MSG_POST_STEP, 1), 0);
	remount(true);
	assert_int_equal(reg(&w, 0, vec("a", 4 * BLOCK / 4)), 0);
	m = wire_begin(&w, MOMENT_MSG_PREFETCH, 0, sizeof(*m));
	m->n = 3;
	*(struct moment_range *)wire_more(&w, sizeof(struct moment_range)) =
		(struct moment_range){0, 0, 4, 0};
	/* Nonsense is passed over. */
	*(struct moment_range *)wire_more(&w, sizeof(struct moment_range)) =
		(struct moment_range){9, 0, 4, 0};
	*(struct moment_range *)wire_more(&w, sizeof(struct moment_range)) =
		(struct moment_range){1, 2, UINT32_MAX, 0};
	assert_int_equal(wire_send(&w), 0);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_INFO, 0), 0);
	misses = info_reply(&w)->misses;
	assert_int_equal(adv(&w, true, 0, 0, 4, 0), 0);
	assert_int_equal(w.l->base[wire_leases(&w)[3].arena + BLOCK - 1], 1);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_INFO, 0), 0);
	assert_int_equal(info_reply(&w)->misses, misses);
}

/* A read that failed says so, and is tried again when asked again. */
static void test_read_error(void **state)
{
	char faults[400], flag[300];
	int fd;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 3 * BLOCK / 4)), 0);
	do_step(1, 0, 1);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
	stop(true);
	snprintf(flag, sizeof(flag), "%s.fail", dir);
	snprintf(faults, sizeof(faults), "read.error=EIO:1,file=%s", flag);
	setenv("MOMENT_FAULTS", faults, 1);
	start(false);
	unsetenv("MOMENT_FAULTS");
	attach(&w);
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 3 * BLOCK / 4)), 0);
	fd = open(flag, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
	assert_true(fd >= 0);
	close(fd);
	for (int i = 0; i < 3; i++) {
		char b;

		assert_int_equal(adv(&w, true, 0, 0, 3, 0), -EIO);
		assert_int_equal(engine_pread(e, ino_of("a/exp_avg"), &b, 1, 5), -EIO);
	}
	unlink(flag);
	assert_int_equal(adv(&w, true, 0, 0, 3, 0), 0);
	assert_int_equal(w.l->base[wire_leases(&w)->arena + 9], 1);
	assert_int_equal(byte_at("a/exp_avg", 5), 1);
}

/* What is released with COOL goes before what was used earlier. */
static void test_cool(void **state)
{
	uint64_t misses;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 24 * BLOCK / 4)), 0);
	for (uint32_t n = 0; n < 16; n++) {
		assert_int_equal(adv(&w, true, 0, n, 1, 0), 0);
		assert_int_equal(adv(&w, false, 0, n, 1, n < 8 ? 0 : MOMENT_RANGE_COOL), 0);
	}
	for (uint32_t n = 0; n < 14; n++) {
		assert_int_equal(adv(&w, true, 1, n, 1, 0), 0);
		assert_int_equal(adv(&w, false, 1, n, 1, 0), 0);
	}
	assert_int_equal(wire_simple(&w, MOMENT_MSG_INFO, 0), 0);
	misses = info_reply(&w)->misses;
	assert_int_equal(adv(&w, true, 0, 0, 8, 0), 0);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_INFO, 0), 0);
	assert_int_equal(info_reply(&w)->misses, misses);
}

/* ---- steps ---- */

static void test_steps(void **state)
{
	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 1000)), 0);
	assert_int_equal(send_steps(0, 1), -EPERM);
	assert_int_equal(wire_step(&w, MOMENT_MSG_POST_STEP, 1), -EINVAL);
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, MOMENT_STEP_NONE), -EINVAL);
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 42), 0);
	assert_int_equal(info_reply(&w)->open_step, 42);
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 43), -EBUSY);
	says(&w, "42");
	assert_int_equal(wire_step(&w, MOMENT_MSG_POST_STEP, 43), -EINVAL);
	assert_int_equal(send_steps(1, 1), -EINVAL);
	assert_int_equal(send_steps(0, MOMENT_STEP_NONE), -EINVAL);
	assert_int_equal(send_steps(0, 17), 0);
	xattr_is("a", "user.moment.step", "0");
	assert_int_equal(adv(&w, true, 0, 0, 1, 0), 0);
	assert_int_equal(wire_step(&w, MOMENT_MSG_POST_STEP, 42), -EBUSY);
	says(&w, "1 leases");
	assert_int_equal(adv(&w, false, 0, 0, 1, 0), 0);
	assert_int_equal(reg(&w, 0, vec("b", 10)), -EBUSY);
	assert_int_equal(send_remove(0), -EBUSY);
	assert_int_equal(wire_step(&w, MOMENT_MSG_POST_STEP, 42), 0);
	assert_true(info_reply(&w)->open_step == MOMENT_STEP_NONE);
	assert_int_equal(info_reply(&w)->step, 42);
	assert_true(info_reply(&w)->committed_step == MOMENT_STEP_NONE);
	xattr_is("a", "user.moment.step", "17");
	xattr_is("a/exp_avg", "user.moment.step", "17");
	xattr_is("a/exp_avg_sq", "user.moment.step", "17");
	/* A step that says nothing leaves the counts; labels need not grow. */
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 7), 0);
	assert_int_equal(wire_step(&w, MOMENT_MSG_POST_STEP, 7), 0);
	xattr_is("a", "user.moment.step", "17");
	remount(true);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_INFO, 0), 0);
	assert_int_equal(info_reply(&w)->committed_step, 7);
	assert_int_equal(reg(&w, 0, vec("a", 1000)), 0);
	assert_int_equal(reg_reply()->e[0].step, 17);
}

/* A plain bracket and a session exclude each other. */
static void test_plain_bracket(void **state)
{
	(void)state;
	assert_int_equal(engine_call(e, ENGINE_STEP_BEGIN, 0, 0, 0, 5), 0);
	assert_int_equal(wire_hello(&w, 0), -EBUSY);
	says(&w, "step 5");
	assert_int_equal(engine_call(e, ENGINE_STEP_END, 0, 0, 0, 5), 0);
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(engine_call(e, ENGINE_STEP_BEGIN, 0, 0, 0, 6), -EBUSY);
	assert_int_equal(engine_call(e, ENGINE_ROLLBACK, 0, 0, 0, 0), -EBUSY);
}

static void test_commit(void **state)
{
	uint64_t commit;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 1000)), 0);
	do_step(1, 0, 1);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
	assert_int_equal(info_reply(&w)->committed_step, 1);
	do_step(2, 0, 2);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, 0), 0);
	/* Inside a step: replies with the boundary. */
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 3), 0);
	wire_begin(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT, sizeof(struct moment_simple));
	commit = w.id;
	assert_int_equal(wire_send(&w), 0);
	assert_null(wire_recv(&w, 100));
	/* One that need not wait does not. */
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, 0), 0);
	assert_int_equal(info_reply(&w)->open_step, 3);
	/* The engine's own commit meanwhile takes the plain files only. */
	assert_int_equal(engine_call(e, ENGINE_SYNC, 0, 0, 0, 0), 0);
	assert_null(wire_recv(&w, 50));
	assert_int_equal(adv(&w, true, 0, 0, 1, MOMENT_RANGE_WRITE), 0);
	memset(w.l->base + wire_leases(&w)->arena, 3, 4000);
	assert_int_equal(adv(&w, false, 0, 0, 1, 0), 0);
	{
		struct moment_post_step *m = wire_begin(&w, MOMENT_MSG_POST_STEP, 0, sizeof(*m));
		bool post = false, done = false;
		uint64_t id = w.id;

		m->step = 3;
		assert_int_equal(wire_send(&w), 0);
		while (!post || !done) {
			struct moment_reply *r = wire_recv(&w, LINK_WAIT_MS);

			assert_non_null(r);
			assert_int_equal(r->status, 0);
			post = post || r->h.id == id;
			if (r->h.id == commit) {
				done = true;
				assert_int_equal(info_reply(&w)->committed_step, 3);
			}
		}
	}
	do_step(4, 0, 4);
	remount(false);
	assert_int_equal(byte_at("a/exp_avg", 10), 3);
	assert_int_equal(reg(&w, 0, vec("a", 1000)), 0);
	/* MOMENT_POST_COMMIT: a commit behind the reply. */
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 5), 0);
	assert_int_equal(adv(&w, true, 0, 0, 1, MOMENT_RANGE_WRITE), 0);
	memset(w.l->base + wire_leases(&w)->arena, 5, 4000);
	assert_int_equal(adv(&w, false, 0, 0, 1, 0), 0);
	{
		struct moment_post_step *m =
			wire_begin(&w, MOMENT_MSG_POST_STEP, MOMENT_POST_COMMIT, sizeof(*m));

		m->step = 5;
		assert_int_equal(wire_call(&w), 0);
	}
	for (int i = 0; i < 500 && info_reply(&w)->committed_step != 5; i++) {
		usleep(10000);
		assert_int_equal(wire_simple(&w, MOMENT_MSG_INFO, 0), 0);
	}
	assert_int_equal(info_reply(&w)->committed_step, 5);
}

/*
 * Commits asked for at a boundary, one behind the other, while the next step begins: a reply says
 * that that boundary is durable, or a later one.
 */
static void test_commit_then_step(void **state)
{
	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 20 * BLOCK / 4)), 0);
	for (uint64_t s = 1; s < 20; s++) {
		uint64_t wait, post;
		struct moment_post_step *m;

		do_step(2 * s, 0, 2 * (int)s);
		assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, 0), 0);
		do_step(2 * s + 1, 1, 2 * (int)s + 1);
		wire_begin(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT, sizeof(struct moment_simple));
		wait = w.id;
		assert_int_equal(wire_send(&w), 0);
		m = wire_begin(&w, MOMENT_MSG_PRE_STEP, 0, sizeof(*m));
		m->step = 2 * s + 2;
		assert_int_equal(wire_send(&w), 0);
		wire_adv_begin(&w);
		wire_adv_add(&w, true, (struct moment_range){0, 5, 1, MOMENT_RANGE_WRITE});
		assert_int_equal(wire_send(&w), 0);
		wire_adv_begin(&w);
		post = 0;
		for (int k = 0; k < 3 && !post; k++) {
			struct moment_reply *r = wire_recv(&w, k < 2 ? LINK_WAIT_MS : 300);

			if (!r)
				break; /* the commit waits for the next boundary: allowed */
			assert_int_equal(r->status, 0);
			if (r->h.id == wait) {
				assert_true(info_reply(&w)->committed_step >= 2 * s + 1);
				wait = 0;
			}
		}
		wire_adv_begin(&w);
		wire_adv_add(&w, false, (struct moment_range){0, 5, 1, 0});
		assert_int_equal(wire_send(&w), 0);
		m = wire_begin(&w, MOMENT_MSG_POST_STEP, 0, sizeof(*m));
		m->step = 2 * s + 2;
		post = w.id;
		assert_int_equal(wire_send(&w), 0);
		while (post || wait) {
			struct moment_reply *r = wire_recv(&w, LINK_WAIT_MS);

			assert_non_null(r);
			assert_int_equal(r->status, 0);
			if (r->h.id == post)
				post = 0;
			if (r->h.id == wait) {
				assert_true(info_reply(&w)->committed_step >= 2 * s + 1);
				wait = 0;
			}
		}
	}
}

/* ---- rollback, torn ---- */

static void test_rollback(void **state)
{
	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 20000)), 0);
	do_step(1, 0, 1);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
	do_step(2, 0, 2);
	xattr_is("a", "user.moment.step", "2");
	/* With leases out it is refused; in a step it closes it. */
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 3), 0);
	assert_int_equal(adv(&w, true, 0, 0, 1, MOMENT_RANGE_WRITE), 0);
	memset(w.l->base + wire_leases(&w)->arena, 3, 100);
	assert_int_equal(send_steps(0, 33), 0);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_ROLLBACK, 0), -EBUSY);
	says(&w, "1 leases are out");
	assert_int_equal(adv(&w, false, 0, 0, 1, 0), 0);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_ROLLBACK, 0), 0);
	assert_int_equal(info_reply(&w)->committed_step, 1);
	assert_int_equal(info_reply(&w)->step, 1);
	assert_true(info_reply(&w)->open_step == MOMENT_STEP_NONE);
	assert_int_equal(byte_at("a/exp_avg", 50), 1);
	xattr_is("a/exp_avg", "user.moment.step", "1");
	xattr_is("a", "user.moment.step", "1");
	/* Life goes on, and what that step would have counted is forgotten. */
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 3), 0);
	assert_int_equal(wire_step(&w, MOMENT_MSG_POST_STEP, 3), 0);
	xattr_is("a", "user.moment.step", "1");
	do_step(2, 0, 9);
	assert_int_equal(byte_at("a/exp_avg", 50), 9);
	remount(true);
	assert_int_equal(byte_at("a/exp_avg", 50), 9);
	assert_int_equal(reg(&w, 0, vec("a", 20000)), 0);
	assert_int_equal(reg_reply()->e[0].step, 2);
}

/* A commit asked for inside a step that is then rolled back is answered. */
static void test_rollback_answers_commit(void **state)
{
	uint64_t commit;
	bool done = false, back = false;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 20000)), 0);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 1), 0);
	wire_begin(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT, sizeof(struct moment_simple));
	commit = w.id;
	assert_int_equal(wire_send(&w), 0);
	wire_begin(&w, MOMENT_MSG_ROLLBACK, 0, sizeof(struct moment_simple));
	assert_int_equal(wire_send(&w), 0);
	while (!done || !back) {
		struct moment_reply *r = wire_recv(&w, 5000);

		assert_non_null(r);
		assert_int_equal(r->status, 0);
		done = done || r->h.id == commit;
		back = back || r->h.id == commit + 1;
	}
}

/* What was never committed goes back to what it was when made: zeros, step 0. */
static void test_rollback_of_new(void **state)
{
	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 20000)), 0);
	do_step(1, 0, 1);
	do_step(2, 0, 2);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_ROLLBACK, 0), 0);
	assert_int_equal(byte_at("a/exp_avg", 50), 0);
	xattr_is("a/exp_avg", "user.moment.step", "0");
	xattr_is("a", "user.moment.step", "0");
	do_step(1, 0, 7);
	remount(true);
	assert_int_equal(byte_at("a/exp_avg", 50), 7);
	assert_int_equal(reg(&w, 0, vec("a", 20000)), 0);
	assert_int_equal(reg_reply()->e[0].step, 1);
}

static void test_torn(void **state)
{
	const struct moment_hello_reply *h = (const struct moment_hello_reply *)w.in;
	struct engine_step_state st;
	struct ns_attr a;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 4 * BLOCK / 4)), 0);
	do_step(1, 0, 1);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 2), 0);
	assert_int_equal(adv(&w, true, 0, 0, 4, MOMENT_RANGE_WRITE), 0);
	memset(w.l->base + wire_leases(&w)->arena, 2, BLOCK);
	/* More leases under way when it dies. */
	wire_adv_begin(&w);
	wire_adv_add(&w, true, (struct moment_range){1, 0, 4, MOMENT_RANGE_WRITE});
	assert_int_equal(wire_send(&w), 0);
	detach(&w);
	engine_get_step(e, &st);
	assert_true(st.torn);
	assert_int_equal(st.open, 2);
	/* Others may look, nobody may change or commit it. */
	assert_int_equal(byte_at("a/exp_avg", 9), 2);
	assert_int_equal(engine_pwrite(e, ino_of("a/exp_avg"), "x", 1, 0), -EBUSY);
	assert_int_equal(ns_open(engine_ns(e), ino_of("a/exp_avg"), true), -EBUSY);
	assert_int_equal(ns_unlink(engine_ns(e), ino_of("a"), "exp_avg"), -EBUSY);
	assert_int_equal(ns_create(engine_ns(e), NS_ROOT, "plain", 0644, 0, 0, false, &a), 0);
	assert_int_equal(engine_pwrite(e, a.ino, "plain", 5, 0), 5);
	assert_int_equal(engine_call(e, ENGINE_SYNC, 0, 0, 0, 0), 0);
	attach(&w);
	assert_int_equal(wire_hello(&w, 0), -ESTALE);
	says(&w, "step 2");
	assert_int_equal(wire_hello(&w, MOMENT_HELLO_ROLLBACK), 0);
	assert_int_equal(h->rolled_back, 2);
	assert_int_equal(h->committed_step, 1);
	assert_int_equal(byte_at("a/exp_avg", 9), 1);
	assert_int_equal(byte_at("plain", 0), 'p');
	engine_get_step(e, &st);
	assert_false(st.torn);
	assert_int_equal(reg(&w, 0, vec("a", 4 * BLOCK / 4)), 0);
	do_step(2, 0, 3);
	/* Torn again, and unmounted: the mount finds the last commit. */
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 3), 0);
	assert_int_equal(adv(&w, true, 0, 0, 1, MOMENT_RANGE_WRITE), 0);
	memset(w.l->base + wire_leases(&w)->arena, 4, 10);
	link_local_gone(w.l);
	assert_int_equal(engine_close(e, true), 0);
	detach(&w);
	start(false);
	attach(&w);
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(byte_at("a/exp_avg", 9), 1);
	assert_int_equal(byte_at("plain", 4), 'n');
	assert_int_equal(engine_call(e, ENGINE_SCRUB, 0, 0, 0, 0), 0);
}

/* momentctl rollback of a torn state lets the files go. */
static void test_torn_rollback_op(void **state)
{
	uint64_t used;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 20000)), 0);
	do_step(1, 0, 1);
	detach(&w);
	assert_int_equal(engine_call(e, ENGINE_SYNC, 0, 0, 0, 0), 0);
	used = pool_used();
	attach(&w);
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 20000)), 0);
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 2), 0);
	assert_int_equal(adv(&w, true, 0, 0, 1, MOMENT_RANGE_WRITE), 0);
	detach(&w);
	assert_int_equal(engine_call(e, ENGINE_ROLLBACK, 0, 0, 0, 0), 0);
	assert_int_equal(byte_at("a/exp_avg", 9), 1);
	assert_int_equal(engine_pwrite(e, ino_of("a/exp_avg"), "x", 1, 0), 1);
	assert_int_equal(engine_call(e, ENGINE_ROLLBACK, 0, 0, 0, 0), 0);
	assert_int_equal(byte_at("a/exp_avg", 0), 1);
	assert_int_equal(pool_used(), used);
}

/* A rollback that cannot read the catalog changes nothing, and works when that is cured. */
static void test_rollback_fails(void **state)
{
	struct engine_opts o = {.ram = RAM,
				.commit_seconds = ENGINE_COMMIT_OFF,
				.vfs = "test_session_step",
				.holder = "test_session"};
	struct sqlite_fault *f;
	struct engine_step_state st;
	char err[1024];

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 20000)), 0);
	stop(true);
	assert_int_equal(sqlite_fault_create("test_session_step", &f), 0);
	sqlite3_auto_extension((void (*)(void))note_db);
	if (engine_open(dir, &o, &e, err, sizeof(err)))
		fail_msg("%s", err);
	attach(&w);
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 20000)), 0);
	do_step(1, 0, 1);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
	do_step(2, 0, 2);
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 3), 0);
	detach(&w);
	sqlite3_cancel_auto_extension((void (*)(void))note_db);
	assert_int_equal(sqlite3_db_release_memory(catalog_db), SQLITE_OK);
	assert_int_equal(sqlite_fault_set(f, "error=EIO:1", NULL, 0), 0);
	assert_int_equal(engine_call(e, ENGINE_ROLLBACK, 0, 0, 0, 0), -EIO);
	engine_get_step(e, &st);
	assert_true(st.torn);
	assert_int_equal(byte_at("a/exp_avg", 50), 2);
	assert_int_equal(sqlite_fault_set(f, "", NULL, 0), 0);
	assert_int_equal(engine_call(e, ENGINE_ROLLBACK, 0, 0, 0, 0), 0);
	assert_int_equal(byte_at("a/exp_avg", 50), 1);
	xattr_is("a", "user.moment.step", "1");
	assert_int_equal(engine_close(e, true), 0);
	sqlite_fault_destroy(f);
	start(false);
	assert_int_equal(byte_at("a/exp_avg", 50), 1);
}

/* Nor does one that has read a part of it: attributes are those of the bytes, as long as they stay. */
static void test_rollback_fails_half_way(void **state)
{
	struct engine_opts o = {.ram = RAM,
				.commit_seconds = ENGINE_COMMIT_OFF,
				.vfs = "test_session_half",
				.holder = "test_session"};
	static const char *const name[] = {"a", "b", "c", "d"};
	static char big[60000];
	unsigned int failed = 0;
	struct sqlite_fault *f;
	char err[1024], spec[64];
	int r = -EIO;

	(void)state;
	stop(true);
	assert_int_equal(sqlite_fault_create("test_session_half", &f), 0);
	sqlite3_auto_extension((void (*)(void))note_db);
	if (engine_open(dir, &o, &e, err, sizeof(err)))
		fail_msg("%s", err);
	sqlite3_cancel_auto_extension((void (*)(void))note_db);
	attach(&w);
	assert_int_equal(wire_hello(&w, 0), 0);
	for (uint32_t i = 0; i < 4; i++) {
		assert_int_equal(reg(&w, 0, vec(name[i], 1000)), 0);
		assert_int_equal(ns_setxattr(engine_ns(e), ino_of(name[i]), "user.big", big,
					     sizeof(big), 0),
				 0);
	}
	for (uint64_t step = 1; step <= 2; step++) {
		assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, step), 0);
		for (uint32_t i = 0; i < 4; i++)
			assert_int_equal(send_steps(i, step), 0);
		assert_int_equal(wire_step(&w, MOMENT_MSG_POST_STEP, step), 0);
		if (step == 1)
			assert_int_equal(
				wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
	}
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 3), 0);
	detach(&w);
	for (unsigned int seed = 1; r && seed < 30; seed++) {
		assert_int_equal(sqlite3_db_release_memory(catalog_db), SQLITE_OK);
		snprintf(spec, sizeof(spec), "seed=%u,read.error=EIO:0.05", seed);
		assert_int_equal(sqlite_fault_set(f, spec, NULL, 0), 0);
		r = (int)engine_call(e, ENGINE_ROLLBACK, 0, 0, 0, 0);
		for (uint32_t i = 0; i < 4; i++)
			xattr_is(name[i], "user.moment.step", r ? "2" : "1");
		failed += r == -EIO;
	}
	assert_true(failed > 0);
	assert_int_equal(sqlite_fault_set(f, "", NULL, 0), 0);
	assert_int_equal(engine_call(e, ENGINE_ROLLBACK, 0, 0, 0, 0), 0);
	for (uint32_t i = 0; i < 4; i++)
		xattr_is(name[i], "user.moment.step", "1");
	assert_int_equal(engine_close(e, true), 0);
	sqlite_fault_destroy(f);
	start(false);
}

/* A reader's leases hold a rollback up, and what it gets meanwhile is never a mix-up. */
static void test_reader_in_rollback(void **state)
{
	struct wire *x = calloc(1, sizeof(*x));
	uint64_t id;
	int r;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 2 * BLOCK / 4)), 0);
	do_step(1, 0, 1);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
	attach(x);
	assert_int_equal(wire_hello(x, MOMENT_HELLO_READONLY), 0);
	assert_int_equal(reg(x, 0, vec("a", 2 * BLOCK / 4)), 0);
	for (int i = 0; i < 50; i++) {
		do_step(2, 0, 2);
		assert_int_equal(adv(x, true, 0, 0, 1, 0), 0);
		wire_begin(&w, MOMENT_MSG_ROLLBACK, 0, sizeof(struct moment_simple));
		id = w.id;
		assert_int_equal(wire_send(&w), 0);
		/* Nothing may begin now. */
		assert_int_equal(wire_step(x, MOMENT_MSG_PRE_STEP, 9), -EPERM);
		if (i % 2)
			usleep(1000);
		assert_int_equal(adv(x, false, 0, 0, 1, 0), 0);
		do {
			r = adv(x, true, 0, 0, 1, 0);
		} while (r == -EBUSY);
		assert_int_equal(r, 0);
		assert_int_equal(x->l->base[wire_leases(x)->arena + 5], 1);
		assert_int_equal(adv(x, false, 0, 0, 1, 0), 0);
		assert_non_null(wire_wait(&w, id));
		assert_int_equal(((struct moment_reply *)w.in)->status, 0);
		assert_int_equal(byte_at("a/exp_avg", 7), 1);
	}
	detach(x);
	free(x);
}

/* ---- remove ---- */

static void test_remove(void **state)
{
	uint64_t used = pool_used();
	struct ns_attr a;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 20000)), 0);
	assert_int_equal(reg(&w, 0, vec("b", 20000)), 0);
	assert_int_equal(adv(&w, true, 0, 0, 1, 0), 0);
	assert_int_equal(send_remove(0), -EBUSY);
	assert_int_equal(adv(&w, false, 0, 0, 1, 0), 0);
	do_step(1, 0, 1);
	assert_int_equal(send_remove(2), -EINVAL);
	assert_int_equal(send_remove(0), 0);
	assert_int_equal(send_remove(0), -EINVAL);
	assert_int_equal(ino_of("a"), 0);
	assert_int_equal(adv(&w, true, 0, 0, 1, 0), -EINVAL);
	send_prefetch(0, 0, 1);
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 2), 0);
	assert_int_equal(send_steps(0, 2), -EINVAL);
	assert_int_equal(wire_step(&w, MOMENT_MSG_POST_STEP, 2), 0);
	assert_int_equal(reg(&w, 0, vec("a", 30)), 0);
	assert_int_equal(reg_reply()->e[0].param, 2);
	/* Two arrays, twice: of b 80,000 bytes each, of a one unit. */
	assert_int_equal(reg_reply()->reserved, 4 * (20 * 4096 + 4096));
	assert_int_equal(send_remove(2), 0);
	/* A directory in which somebody put a file stays, with that file. */
	assert_int_equal(ns_walk(engine_ns(e), "b", &a), 0);
	assert_int_equal(ns_create(engine_ns(e), a.ino, "notes", 0644, 0, 0, false, &a), 0);
	assert_int_equal(send_remove(1), 0);
	assert_int_equal(ino_of("b/exp_avg"), 0);
	assert_true(ino_of("b/notes") != 0);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
	assert_int_equal(pool_used(), used);
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		T(test_leases),
		T(test_clean_release),
		T(test_quota),
		T(test_prefetch),
		T(test_read_error),
		T(test_cool),
		T(test_steps),
		T(test_plain_bracket),
		T(test_commit),
		T(test_commit_then_step),
		T(test_rollback),
		T(test_rollback_answers_commit),
		T(test_rollback_of_new),
		T(test_torn),
		T(test_torn_rollback_op),
		T(test_rollback_fails),
		T(test_rollback_fails_half_way),
		T(test_reader_in_rollback),
		T(test_remove),
	};

	mallopt(M_PERTURB, 0xa5); /* what nobody has set must not be looked at */
	alarm(300);		  /* something hangs */
	return cmocka_run_group_tests(tests, NULL, NULL);
}
