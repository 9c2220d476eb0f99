/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_session.c - a session's messages, one by one: hello, register, list, and what is no
 * message: what they do, what they refuse and how they say so. By hand-made messages to an engine
 * in this process.
 */
#include "session_fixture.h"

/* ---- hello ---- */

static void test_hello(void **state)
{
	struct moment_hello *m;
	const struct moment_hello_reply *r = (const struct moment_hello_reply *)w.in;

	(void)state;
	m = wire_begin(&w, MOMENT_MSG_HELLO, 0, sizeof(*m));
	m->version = MOMENT_PROTOCOL_VERSION + 1;
	assert_int_equal(wire_call(&w), -EPROTO);
	says(&w, "protocol version");
	m = wire_begin(&w, MOMENT_MSG_HELLO, 0, sizeof(*m));
	m->version = MOMENT_PROTOCOL_VERSION - 1;
	assert_int_equal(wire_call(&w), -EPROTO);
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(r->version, MOMENT_PROTOCOL_VERSION);
	assert_int_equal(r->block, BLOCK);
	assert_int_equal(r->arena_size, RAM);
	assert_int_equal(r->daemon_pid, getpid());
	assert_int_equal(r->quota, RAM / 2);
	assert_true(r->quota_small > 0 && r->quota_small <= r->quota);
	assert_true(r->committed_step == MOMENT_STEP_NONE);
	assert_true(r->rolled_back == MOMENT_STEP_NONE);
	wire_begin(&w, MOMENT_MSG_HELLO, 0, sizeof(*m));
	assert_int_equal(wire_send(&w), -EPROTO);
}

static void test_second_writer(void **state)
{
	struct wire *x = calloc(1, sizeof(*x));
	char pid[32];

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	attach(x);
	assert_int_equal(wire_hello(x, 0), -EBUSY);
	says(x, "test client");
	snprintf(pid, sizeof(pid), "pid %d", getpid());
	says(x, pid);
	/* A reader that goes does not make room for one. */
	assert_int_equal(wire_hello(x, MOMENT_HELLO_READONLY), 0);
	detach(x);
	attach(x);
	assert_int_equal(wire_hello(x, 0), -EBUSY);
	/* The refused one may still come to read, and to write when the first has gone. */
	detach(&w);
	assert_int_equal(wire_hello(x, 0), 0);
	detach(x);
	free(x);
}

static void test_reader(void **state)
{
	struct wire *x = calloc(1, sizeof(*x));

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 1000)), 0);
	attach(x);
	assert_int_equal(wire_hello(x, MOMENT_HELLO_READONLY), 0);
	assert_int_equal(wire_step(x, MOMENT_MSG_PRE_STEP, 1), -EPERM);
	assert_int_equal(wire_step(x, MOMENT_MSG_POST_STEP, 1), -EPERM);
	assert_int_equal(wire_simple(x, MOMENT_MSG_COMMIT, 0), -EPERM);
	assert_int_equal(wire_simple(x, MOMENT_MSG_ROLLBACK, 0), -EPERM);
	assert_int_equal(wire_simple(x, MOMENT_MSG_INFO, 0), 0);
	assert_int_equal(reg(x, 0, vec("b", 1000)), -ENOENT);
	assert_int_equal(ino_of("b"), 0);
	assert_int_equal(reg(x, MOMENT_REG_FRESH, vec("a", 500)), -EPERM);
	assert_int_equal(reg(x, 0, vec("a", 1000)), 0);
	assert_int_equal(adv(x, true, 0, 0, 1, MOMENT_RANGE_WRITE), -EPERM);
	/* During the writer's step a reader reads. */
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 1), 0);
	assert_int_equal(adv(&w, true, 0, 0, 1, MOMENT_RANGE_WRITE), 0);
	assert_int_equal(adv(x, true, 0, 0, 1, 0), 0);
	assert_int_equal(wire_leases(x)->len, 4000);
	memset(w.l->base + wire_leases(&w)->arena, 7, 4000);
	assert_int_equal(x->l->base[wire_leases(x)->arena + 3999], 7);
	assert_int_equal(adv(&w, false, 0, 0, 1, 0), 0);
	assert_int_equal(wire_step(&w, MOMENT_MSG_POST_STEP, 1), 0);
	assert_int_equal(byte_at("a/exp_avg", 3999), 7);
	/* It keeps its lease while the writer goes. */
	detach(&w);
	assert_int_equal(x->l->base[wire_leases(x)->arena], 7);
	assert_int_equal(adv(x, false, 0, 0, 1, 0), 0);
	detach(x);
	free(x);
}

static void test_readonly_engine(void **state)
{
	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 1000)), 0);
	stop(true);
	start(true);
	attach(&w);
	assert_int_equal(wire_hello(&w, 0), -EROFS);
	says(&w, "read-only");
	assert_int_equal(wire_hello(&w, MOMENT_HELLO_READONLY), 0);
	assert_int_equal(reg(&w, 0, vec("a", 1000)), 0);
	assert_int_equal(adv(&w, true, 0, 0, 1, 0), 0);
}

/* ---- register ---- */

static void test_register(void **state)
{
	const struct moment_register_reply *r = reg_reply();
	struct ns_attr a;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, MOMENT_REG_EXIST, vec("layer.0.weight", 30522)), -ENOENT);
	says(&w, "layer.0.weight");
	assert_int_equal(ino_of("layer.0.weight"), 0);
	assert_int_equal(reg(&w, MOMENT_REG_CHECK, vec("layer.0.weight", 30522)), 0);
	assert_int_equal(r->e[0].flags, MOMENT_REG_CREATED);
	assert_int_equal(ino_of("layer.0.weight"), 0);
	assert_int_equal(reg(&w, MOMENT_REG_NEW, vec("layer.0.weight", 30522)), 0);
	assert_int_equal(r->n, 1);
	assert_int_equal(r->e[0].param, 0);
	assert_int_equal(r->e[0].flags, MOMENT_REG_CREATED);
	assert_int_equal(r->e[0].step, 0);
	assert_int_equal(r->e[0].file[MOMENT_ROLE_MASTER], UINT32_MAX);
	assert_int_equal(r->e[0].file[MOMENT_ROLE_EXP_AVG_SQ], 1);
	assert_true(r->reserved >= 4 * 30522 * 4);
	assert_int_equal(ns_walk(engine_ns(e), "layer.0.weight/exp_avg", &a), 0);
	assert_int_equal(a.size, 30522 * 4);
	xattr_is("layer.0.weight", "user.moment.name", "layer.0.weight");
	xattr_is("layer.0.weight", "user.moment.shape", "[30522]");
	xattr_is("layer.0.weight/exp_avg_sq", "user.moment.dtype", "float32");
	xattr_is("layer.0.weight/exp_avg_sq", "user.moment.step", "0");
	assert_int_equal(byte_at("layer.0.weight/exp_avg", 122087), 0);
	/* Twice in a session, twice in a message. */
	assert_int_equal(reg(&w, 0, vec("layer.0.weight", 30522)), -EINVAL);
	says(&w, "registered already");
	{
		struct wire_param p = vec("b", 8);

		wire_reg_begin(&w, 0);
		wire_reg_add(&w, &p);
		wire_reg_add(&w, &p);
		assert_int_equal(wire_call(&w), -EINVAL);
		says(&w, "twice");
		assert_int_equal(ino_of("b"), 0);
	}
	/* While registered it is not for others. */
	assert_int_equal(ns_open(engine_ns(e), a.ino, true), -EBUSY);
	assert_int_equal(ns_unlink(engine_ns(e), a.parent, "exp_avg"), -EBUSY);
	assert_int_equal(engine_pwrite(e, a.ino, "x", 1, 0), -EBUSY);
	assert_int_equal(engine_call(e, ENGINE_TRUNCATE, a.ino, 0, 0, 0), -EBUSY);
	remount(true);
	assert_int_equal(reg(&w, MOMENT_REG_NEW, vec("layer.0.weight", 30522)), -EEXIST);
	assert_int_equal(reg(&w, MOMENT_REG_CHECK, vec("layer.0.weight", 30522)), 0);
	assert_int_equal(r->e[0].flags, MOMENT_REG_FOUND);
	assert_int_equal(reg(&w, 0, vec("layer.0.weight", 30522)), 0);
	assert_int_equal(r->e[0].flags, MOMENT_REG_FOUND);
}

static void test_mismatches(void **state)
{
	struct wire_param p = vec("a", 64);

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	p.ndim = 2;
	p.shape[0] = 4;
	p.shape[1] = 16;
	assert_int_equal(reg(&w, 0, p), 0);
	remount(true);
	assert_int_equal(reg(&w, 0, vec("a", 64)), -EINVAL);
	says(&w, "[64]");
	says(&w, "[4,16]");
	p.dtype[0] = MOMENT_BF16;
	assert_int_equal(reg(&w, 0, p), -EINVAL);
	says(&w, "float32");
	says(&w, "bfloat16");
	p.dtype[0] = MOMENT_F32;
	p.dtype[MOMENT_ROLE_MASTER] = MOMENT_F32;
	assert_int_equal(reg(&w, 0, p), -EINVAL);
	says(&w, "master");
	p.dtype[MOMENT_ROLE_MASTER] = NONE;
	p.dtype[MOMENT_ROLE_EXP_AVG_SQ] = NONE;
	assert_int_equal(reg(&w, 0, p), -EINVAL);
	says(&w, "exp_avg_sq");
	p.dtype[MOMENT_ROLE_EXP_AVG] = NONE;
	assert_int_equal(reg(&w, 0, p), -EINVAL);
	p.dtype[0] = 77;
	assert_int_equal(reg(&w, 0, p), -EINVAL);
	says(&w, "dtype");
	/* One bad entry: nothing of the message. */
	wire_reg_begin(&w, 0);
	p = vec("good", 8);
	wire_reg_add(&w, &p);
	p = vec("a", 65);
	wire_reg_add(&w, &p);
	assert_int_equal(wire_call(&w), -EINVAL);
	assert_int_equal(ino_of("good"), 0);
	/* numel that is not the shape's product; shapes too large. */
	p = vec("b", 8);
	wire_reg_begin(&w, 0);
	wire_reg_add(&w, &p)->numel = 9;
	assert_int_equal(wire_call(&w), -EINVAL);
	p.ndim = 2;
	p.shape[0] = p.shape[1] = 1ull << 33;
	assert_int_equal(reg(&w, 0, p), -EFBIG);
	p.shape[1] = 1 << 10;
	assert_int_equal(reg(&w, 0, p), -EFBIG);
	assert_int_equal(ino_of("b"), 0);
	/* A plain directory of that name; a plain file. */
	{
		struct ns_attr a;

		assert_int_equal(ns_mkdir(engine_ns(e), NS_ROOT, "d", 0755, 0, 0, false, &a), 0);
		assert_int_equal(ns_create(engine_ns(e), NS_ROOT, "f", 0644, 0, 0, false, &a), 0);
		assert_int_equal(reg(&w, 0, vec("d", 8)), -EINVAL);
		says(&w, "made by other programs");
		assert_int_equal(reg(&w, 0, vec("f", 8)), -ENOTDIR);
		/* A directory that was renamed is still that other parameter's. */
		assert_int_equal(ns_rename(engine_ns(e), NS_ROOT, "a", NS_ROOT, "c", 0), 0);
		assert_int_equal(reg(&w, 0, vec("c", 64)), -EEXIST);
		assert_int_equal(reg(&w, MOMENT_REG_FRESH, vec("c", 64)), -EEXIST);
		says(&w, "another name");
		assert_int_equal(ns_rename(engine_ns(e), NS_ROOT, "c", NS_ROOT, "ab", 0), 0);
		assert_int_equal(reg(&w, 0, vec("ab", 64)), -EEXIST);
	}
}

static void test_open_for_writing(void **state)
{
	struct ns_attr a;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 64)), 0);
	remount(true);
	assert_int_equal(ns_walk(engine_ns(e), "a/exp_avg_sq", &a), 0);
	assert_int_equal(ns_open(engine_ns(e), a.ino, true), 0);
	assert_int_equal(reg(&w, 0, vec("a", 64)), -EBUSY);
	says(&w, "a/exp_avg_sq");
	ns_release(engine_ns(e), a.ino, true);
	assert_int_equal(reg(&w, 0, vec("a", 64)), 0);
}

static void test_fresh(void **state)
{
	struct wire_param p = vec("a", 40000);
	struct ns_attr a;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	p.dtype[MOMENT_ROLE_MAX_EXP_AVG_SQ] = MOMENT_F32;
	assert_int_equal(reg(&w, 0, p), 0);
	do_step(9, 0, 5);
	remount(true);
	assert_int_equal(byte_at("a/exp_avg", 100), 5);
	/* Another shape, other arrays. */
	p = vec("a", 100);
	p.dtype[MOMENT_ROLE_MASTER] = MOMENT_F32;
	assert_int_equal(reg(&w, 0, p), -EINVAL);
	assert_int_equal(reg(&w, MOMENT_REG_FRESH, p), 0);
	assert_int_equal(reg_reply()->e[0].step, 0);
	xattr_is("a", "user.moment.shape", "[100]");
	xattr_is("a", "user.moment.step", "0");
	assert_int_equal(ns_walk(engine_ns(e), "a/exp_avg", &a), 0);
	assert_int_equal(a.size, 400);
	assert_int_equal(byte_at("a/exp_avg", 100), 0);
	assert_int_equal(ino_of("a/max_exp_avg_sq"), 0);
	do_step(1, 2, 6);
	remount(true);
	assert_int_equal(reg(&w, MOMENT_REG_EXIST, p), 0);
	assert_int_equal(reg_reply()->e[0].step, 1);
	assert_int_equal(byte_at("a/master", 399), 6);
	assert_int_equal(byte_at("a/exp_avg", 100), 0);
}

/* What a REGISTER made, fresh or new, is durable when its reply comes; steps after it are not. */
static void test_register_is_durable(void **state)
{
	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 40000)), 0);
	do_step(9, 0, 5);
	remount(false);
	assert_int_equal(reg(&w, MOMENT_REG_EXIST, vec("a", 40000)), 0);
	assert_int_equal(reg_reply()->e[0].step, 0);
	assert_int_equal(byte_at("a/exp_avg", 100), 0);
	do_step(9, 0, 5);
	remount(true);
	assert_int_equal(reg(&w, MOMENT_REG_FRESH, vec("a", 10)), 0);
	do_step(1, 0, 8);
	remount(false);
	assert_int_equal(reg(&w, MOMENT_REG_EXIST, vec("a", 10)), 0);
	assert_int_equal(reg_reply()->e[0].step, 0);
	assert_int_equal(byte_at("a/exp_avg", 39), 0);
	assert_int_equal(engine_call(e, ENGINE_SCRUB, 0, 0, 0, 0), 0);
}

/* Several REGISTERs under way at once, and a step that comes too early. */
static void test_register_pipelined(void **state)
{
	struct wire_param p = vec("a", 100);
	unsigned int ok = 0, bad = 0;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	for (int i = 0; i < 3; i++) {
		wire_reg_begin(&w, 0);
		wire_reg_add(&w, &p);
		assert_int_equal(wire_send(&w), 0);
	}
	{
		struct moment_pre_step *m = wire_begin(&w, MOMENT_MSG_PRE_STEP, 0, sizeof(*m));

		m->step = 1;
		assert_int_equal(wire_send(&w), 0);
	}
	for (int i = 0; i < 4; i++) {
		struct moment_reply *r = wire_recv(&w, LINK_WAIT_MS);

		assert_non_null(r);
		if (r->h.type == MOMENT_MSG_PRE_STEP)
			assert_int_equal(r->status, -EBUSY);
		else if (r->status)
			bad++;
		else
			ok++;
	}
	assert_int_equal(ok, 1);
	assert_int_equal(bad, 2);
	do_step(1, 0, 1);
	assert_int_equal(byte_at("a/exp_avg", 399), 1);
	/* The session goes while one is under way. */
	p = vec("b", 100);
	wire_reg_begin(&w, 0);
	wire_reg_add(&w, &p);
	assert_int_equal(wire_send(&w), 0);
	remount(true);
	assert_int_equal(reg(&w, 0, vec("b", 100)), 0);
}

static void test_shapes(void **state)
{
	struct wire_param p = vec("scalar", 0), q;
	struct ns_attr a;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	p.ndim = 0;
	assert_int_equal(reg(&w, 0, p), 0);
	assert_int_equal(ns_walk(engine_ns(e), "scalar/exp_avg", &a), 0);
	assert_int_equal(a.size, 4);
	xattr_is("scalar", "user.moment.shape", "[]");
	/* Nothing in it; and as many and as long dimensions as there may be. */
	q = vec("empty", 0);
	q.ndim = MOMENT_NDIM_MAX;
	for (uint32_t d = 1; d < q.ndim; d++)
		q.shape[d] = UINT64_MAX - d;
	assert_int_equal(reg(&w, 0, q), 0);
	assert_int_equal(ns_walk(engine_ns(e), "empty/exp_avg", &a), 0);
	assert_int_equal(a.size, 0);
	assert_int_equal(adv(&w, true, reg_reply()->e[0].file[0], 0, 1, 0), -EINVAL);
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 1), 0);
	assert_int_equal(adv(&w, true, 0, 0, 1, MOMENT_RANGE_WRITE), 0);
	assert_int_equal(wire_leases(&w)->len, 4);
	assert_int_equal(wire_leases(&w)->arena % 4096, 0);
	assert_int_equal(adv(&w, true, 0, 1, 1, 0), -EINVAL);
	assert_int_equal(adv(&w, false, 0, 0, 1, 0), 0);
	assert_int_equal(wire_step(&w, MOMENT_MSG_POST_STEP, 1), 0);
	remount(true);
	assert_int_equal(reg(&w, 0, p), 0);
	q.shape[63]++;
	assert_int_equal(reg(&w, 0, q), -EINVAL);
	q.shape[63]--;
	assert_int_equal(reg(&w, 0, q), 0);
}

/* Names of cases A6 and A7. */
static void test_names(void **state)
{
	static const char *const names[] = {
		"a",	       "a.b",
		"a/b",	       "a_b",
		"a%2Eb",       "A",
		"..",	       ".",
		"../../etc/x", ".hidden",
		"-rf",	       "exp_avg",
		"meta.json",   "\xe5\xb1\x82.0.weight",
		"\xc3\xa9",    "e\xcc\x81",
		"two words",   "new\nline",
		"\xff",
	};
	static const unsigned int lengths[] = {200, 244, 250, 255, 256, 1000, 5000};
	enum { N = sizeof(names) / sizeof(names[0]), L = sizeof(lengths) / sizeof(lengths[0]) };
	static char longer[L + 2][5001];
	struct wire_param p[N + L + 2];
	struct ns_counts nc;
	const struct moment_list_reply *r = (const struct moment_list_reply *)w.in;
	bool seen[N + L + 2] = {false};
	const char *at;

	(void)state;
	for (unsigned int i = 0; i < N; i++)
		p[i] = vec(names[i], 8);
	for (unsigned int i = 0; i < L + 2; i++) {
		unsigned int len = i < L ? lengths[i] : 400;

		memset(longer[i], 'x', len);
		if (i >= L)
			longer[i][300] = (char)('a' + i - L);
		p[N + i] = vec(longer[i], 8);
	}
	assert_int_equal(wire_hello(&w, 0), 0);
	wire_reg_begin(&w, MOMENT_REG_NEW);
	for (unsigned int i = 0; i < N + L + 2; i++)
		wire_reg_add(&w, &p[i]);
	assert_int_equal(wire_call(&w), 0);
	assert_int_equal(reg_reply()->n, N + L + 2);
	ns_count(engine_ns(e), &nc);
	assert_int_equal(nc.dirs, N + L + 2 + 1);
	/* A distinct fill each. */
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 1), 0);
	for (unsigned int i = 0; i < N + L + 2; i++) {
		assert_int_equal(adv(&w, true, 2 * i, 0, 1, MOMENT_RANGE_WRITE), 0);
		memset(w.l->base + wire_leases(&w)->arena, (int)i + 1, 32);
		assert_int_equal(adv(&w, false, 2 * i, 0, 1, 0), 0);
	}
	assert_int_equal(wire_step(&w, MOMENT_MSG_POST_STEP, 1), 0);
	remount(true);
	{
		struct moment_list *m = wire_begin(&w, MOMENT_MSG_LIST, 0, sizeof(*m));

		assert_int_equal(wire_call(&w), 0);
	}
	assert_int_equal(r->n, N + L + 2);
	assert_int_equal(r->cookie, 0);
	at = (const char *)(r + 1);
	for (unsigned int i = 0; i < r->n; i++) {
		const struct moment_list_entry *le = (const void *)at;
		const char *name = (const char *)(le + 1) + 8 * le->e.ndim;

		for (unsigned int k = 0; k < N + L + 2; k++) {
			if (strlen(p[k].name) == le->e.name_len &&
			    !memcmp(p[k].name, name, le->e.name_len)) {
				assert_false(seen[k]);
				seen[k] = true;
			}
		}
		assert_int_equal(le->e.ndim, 1);
		assert_int_equal(le->e.numel, 8);
		assert_int_equal(le->e.dtype[1], MOMENT_F32);
		assert_int_equal(le->e.dtype[2], NONE);
		at += sizeof(le->step) + le->e.size;
	}
	for (unsigned int k = 0; k < N + L + 2; k++)
		assert_true(seen[k]);
	wire_reg_begin(&w, MOMENT_REG_EXIST);
	for (unsigned int i = 0; i < N + L + 2; i++)
		wire_reg_add(&w, &p[i]);
	assert_int_equal(wire_call(&w), 0);
	for (unsigned int i = 0; i < N + L + 2; i++) {
		assert_int_equal(adv(&w, true, 2 * i, 0, 1, 0), 0);
		assert_int_equal(w.l->base[wire_leases(&w)->arena + 31], i + 1);
		assert_int_equal(adv(&w, false, 2 * i, 0, 1, 0), 0);
	}
	/* No name, and a NUL in it. */
	wire_reg_begin(&w, 0);
	wire_reg_add(&w, &p[0])->name_len = 0;
	assert_int_equal(wire_call(&w), -EINVAL);
	p[0].name = "a\0b";
	p[0].name_len = 3;
	assert_int_equal(reg(&w, 0, p[0]), -EINVAL);
	says(&w, "NUL");
}

static void test_pins(void **state)
{
	struct wire_param p = vec("a", 4 * BLOCK / 4);

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	p.tier = 1;
	p.dtype[1] = NONE;
	p.hyper = "{\"lr\":1}";
	assert_int_equal(reg(&w, 0, p), 0);
	xattr_is("a/exp_avg", "user.moment.tier", "ram");
	xattr_is("a", "user.moment.hyper", "{\"lr\":1}");
	p = vec("big", RAM);
	p.tier = 1;
	assert_int_equal(reg(&w, 0, p), -ENOMEM);
	says(&w, "does not fit");
	assert_int_equal(ino_of("big"), 0);
	p.tier = 2;
	assert_int_equal(reg(&w, 0, p), 0);
	/* What is pinned stays while all else passes by. */
	assert_int_equal(adv(&w, true, 0, 0, 4, 0), 0);
	assert_int_equal(adv(&w, false, 0, 0, 4, 0), 0);
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 1), 0);
	for (uint32_t n = 0; n < 64; n++) {
		assert_int_equal(adv(&w, true, 1, n, 1, MOMENT_RANGE_WRITE), 0);
		assert_int_equal(adv(&w, false, 1, n, 1, 0), 0);
	}
	{
		uint64_t hits;

		assert_int_equal(wire_simple(&w, MOMENT_MSG_INFO, 0), 0);
		hits = info_reply(&w)->hits;
		assert_int_equal(adv(&w, true, 0, 0, 4, 0), 0);
		assert_int_equal(wire_simple(&w, MOMENT_MSG_INFO, 0), 0);
		assert_int_equal(info_reply(&w)->hits, hits + 4);
	}
	assert_int_equal(adv(&w, false, 0, 0, 4, 0), 0);
	assert_int_equal(wire_step(&w, MOMENT_MSG_POST_STEP, 1), 0);
	/* Removing gives the room back. */
	assert_int_equal(send_remove(0), 0);
	p = vec("c", 12 * BLOCK / 4);
	p.dtype[1] = NONE;
	p.tier = 1;
	assert_int_equal(reg(&w, 0, p), 0);
}

static void test_no_space(void **state)
{
	uint64_t used;
	struct ns_counts nc;

	(void)state;
	detach(&w);
	assert_int_equal(engine_close(e, true), 0);
	pool_limit = 16u << 20;
	start(false);
	attach(&w);
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("small", 1000)), 0);
	used = pool_used();
	assert_int_equal(reg(&w, 0, vec("big", 3u << 20)), -ENOSPC);
	says(&w, "big");
	says(&w, "are needed");
	says(&w, "free");
	says(&w, "size=");
	ns_count(engine_ns(e), &nc);
	assert_int_equal(nc.dirs, 2);
	assert_int_equal(ino_of("big"), 0);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
	assert_int_equal(pool_used(), used);
	/* All entries of a message, or none. */
	{
		struct wire_param p = vec("one", 200000), q = vec("two", 2u << 20);

		wire_reg_begin(&w, 0);
		wire_reg_add(&w, &p);
		wire_reg_add(&w, &q);
		assert_int_equal(wire_call(&w), -ENOSPC);
		assert_int_equal(ino_of("one"), 0);
		assert_int_equal(reg(&w, 0, p), 0);
	}
	/* A fresh start that finds no room leaves the old state. */
	do_step(1, 2, 9);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
	remount(true);
	assert_int_equal(reg(&w, MOMENT_REG_FRESH, vec("one", 3u << 20)), -ENOSPC);
	assert_int_equal(reg(&w, MOMENT_REG_EXIST, vec("one", 200000)), 0);
	assert_int_equal(byte_at("one/exp_avg", 77), 9);
	/* What is registered can be written over and over, whatever else fills the pool. */
	{
		struct ns_attr a;
		char buf[4096] = {1};
		int64_t r = 0;

		assert_int_equal(ns_create(engine_ns(e), NS_ROOT, "fill", 0644, 0, 0, false, &a),
				 0);
		for (uint64_t off = 0; r >= 0 && off < 64u << 20; off += sizeof(buf))
			r = engine_pwrite(e, a.ino, buf, sizeof(buf), off);
		assert_int_equal(r, -ENOSPC);
		for (uint64_t s = 2; s < 8; s++) {
			do_step(s, 0, (int)s);
			if (s % 2)
				assert_int_equal(
					wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
		}
		assert_int_equal(byte_at("one/exp_avg", 77), 7);
	}
}

static void test_list_paging(void **state)
{
	enum { N = 400 };
	const struct moment_list_reply *r = (const struct moment_list_reply *)w.in;
	bool seen[N] = {false};
	unsigned int n = 0, pages = 0;
	uint64_t cookie = 0;
	struct ns_attr a;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	/* Directories that are no parameters in between. */
	for (unsigned int i = 0; i < 150; i++) {
		char name[32];

		snprintf(name, sizeof(name), "plain%u", i);
		assert_int_equal(ns_mkdir(engine_ns(e), NS_ROOT, name, 0755, 0, 0, false, &a), 0);
	}
	for (unsigned int i = 0; i < N; i += 50) {
		wire_reg_begin(&w, 0);
		for (unsigned int k = i; k < i + 50; k++) {
			char name[600];
			struct wire_param p;

			/* Long ones fill a reply before the engine's own batch does. */
			snprintf(name, sizeof(name), "%u.%0*d", k, k < 200 ? 3 : 500, 0);
			p = vec(name, k + 1);
			wire_reg_add(&w, &p);
		}
		assert_int_equal(wire_call(&w), 0);
	}
	do {
		struct moment_list *m = wire_begin(&w, MOMENT_MSG_LIST, 0, sizeof(*m));
		const char *at = (const char *)(r + 1);

		m->cookie = cookie;
		assert_int_equal(wire_call(&w), 0);
		for (unsigned int i = 0; i < r->n; i++) {
			const struct moment_list_entry *le = (const void *)at;
			uint64_t k = le->e.numel - 1;

			assert_true(k < N && !seen[k]);
			assert_int_equal(strtoull((const char *)(le + 1) + 8, NULL, 10), k);
			seen[k] = true;
			at += sizeof(le->step) + le->e.size;
			n++;
		}
		assert_true((size_t)(at - w.in) == r->r.h.len);
		cookie = r->cookie;
		assert_true(++pages < 100);
	} while (cookie);
	assert_int_equal(n, N);
}

/* ---- what is no message ---- */

static void test_malformed(void **state)
{
	_Alignas(8) static char buf[MOMENT_MSG_MAX + 8];
	struct moment_msg *m = (struct moment_msg *)buf;

	(void)state;
	/* Before HELLO nothing else. */
	for (uint16_t t = 0; t < 20; t++) {
		*m = (struct moment_msg){.type = t, .len = 64};
		if (t != MOMENT_MSG_HELLO)
			assert_int_equal(w.l->send(w.l, buf, 64), -EPROTO);
	}
	assert_int_equal(w.l->send(w.l, buf, 4), -EPROTO);
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 20000)), 0);
	*m = (struct moment_msg){.type = MOMENT_MSG_INFO, .len = sizeof(*m) + 8};
	assert_int_equal(w.l->send(w.l, buf, sizeof(*m)), -EPROTO);
	m->len = sizeof(*m) - 1;
	assert_int_equal(w.l->send(w.l, buf, sizeof(*m) - 1), -EPROTO);
	m->len = sizeof(buf);
	assert_int_equal(w.l->send(w.l, buf, sizeof(buf)), -EPROTO);
	m->len = sizeof(*m);
	memmove(buf + 4, buf, sizeof(*m));
	assert_int_equal(w.l->send(w.l, buf + 4, sizeof(*m)), -EPROTO);
	/* Too short for its type; unknown types. */
	for (uint16_t t = 0; t < 300; t++) {
		*m = (struct moment_msg){.type = t, .len = sizeof(*m)};
		if (t != MOMENT_MSG_COMMIT && t != MOMENT_MSG_ROLLBACK && t != MOMENT_MSG_INFO)
			assert_int_equal(w.l->send(w.l, buf, sizeof(*m)), -EPROTO);
	}
	/* Counts that do not fit the length. */
	for (uint32_t n = 1; n; n = n < 0x80000000u ? n * 2 + 1 : 0) {
		struct moment_advance *ad = wire_begin(&w, MOMENT_MSG_ADVANCE, 0, sizeof(*ad));
		struct moment_steps *st;
		struct moment_remove *rm;
		struct moment_register *rg;
		struct moment_prefetch *pf;

		ad->n_lease = n;
		assert_int_equal(wire_call(&w), -EPROTO);
		ad = wire_begin(&w, MOMENT_MSG_ADVANCE, 0, sizeof(*ad));
		ad->n_lease = n;
		ad->n_release = -n;
		assert_int_equal(wire_call(&w), -EPROTO);
		st = wire_begin(&w, MOMENT_MSG_STEPS, 0, sizeof(*st));
		st->n = n;
		assert_int_equal(wire_call(&w), -EPROTO);
		rm = wire_begin(&w, MOMENT_MSG_REMOVE, 0, sizeof(*rm));
		rm->n = n;
		assert_int_equal(wire_call(&w), -EPROTO);
		rg = wire_begin(&w, MOMENT_MSG_REGISTER, 0, sizeof(*rg));
		rg->n = n;
		assert_true(wire_call(&w) < 0);
		pf = wire_begin(&w, MOMENT_MSG_PREFETCH, 0, sizeof(*pf));
		pf->n = n;
		assert_int_equal(wire_send(&w), 0);
	}
	/* Entries with parts that do not fit. */
	for (int k = 0; k < 5; k++) {
		struct wire_param p = vec("b", 8);
		struct moment_reg_entry *en;

		wire_reg_begin(&w, 0);
		en = wire_reg_add(&w, &p);
		if (k == 0)
			en->size = 8;
		else if (k == 1)
			en->size += 8;
		else if (k == 2)
			en->name_len = UINT32_MAX;
		else if (k == 3)
			en->hyper_len = 60000;
		else
			en->ndim = UINT32_MAX;
		assert_int_equal(wire_call(&w), -EPROTO);
	}
	assert_int_equal(ino_of("b"), 0);
}

/* Random bytes in well-formed envelopes: any answer will do, none may harm. */
static void test_noise(void **state)
{
	uint64_t z = 12345;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 20000)), 0);
	for (int i = 0; i < 20000; i++) {
		struct moment_msg *m = (struct moment_msg *)w.out;
		size_t len;

		z = z * 6364136223846793005ull + 1442695040888963407ull;
		len = sizeof(*m) + (z >> 33) % 12 * 8;
		for (size_t k = 0; k < len; k++) {
			z = z * 6364136223846793005ull + 1442695040888963407ull;
			/* Small numbers are the likely ones. */
			w.out[k] = (char)(z >> 62 ? 0 : z >> 60 & 1 ? z >> 56 & 3 : z >> 50);
		}
		m->type = (uint16_t)(2 + (z >> 40) % (MOMENT_MSG_REMOVE - 1));
		if (m->type == MOMENT_MSG_REMOVE)
			m->type = MOMENT_MSG_INFO;
		m->len = (uint32_t)len;
		m->id = ++w.id;
		if (w.l->send(w.l, w.out, len))
			continue;
		while (wire_recv(&w, 0))
			;
	}
	detach(&w);
	attach(&w);
	assert_int_equal(wire_hello(&w, MOMENT_HELLO_ROLLBACK), 0);
	assert_int_equal(reg(&w, 0, vec("a", 20000)), 0);
	do_step(1, 0, 1);
	assert_int_equal(byte_at("a/exp_avg", 0), 1);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		T(test_hello),
		T(test_second_writer),
		T(test_reader),
		T(test_readonly_engine),
		T(test_register),
		T(test_mismatches),
		T(test_open_for_writing),
		T(test_fresh),
		T(test_register_is_durable),
		T(test_register_pipelined),
		T(test_shapes),
		T(test_names),
		T(test_pins),
		T(test_no_space),
		T(test_list_paging),
		T(test_malformed),
		T(test_noise),
	};

	alarm(300); /* something hangs */
	return cmocka_run_group_tests(tests, NULL, NULL);
}
