/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_session_hostile.c - sessions whose client dies at the worst moment, does not wait for its
 * replies, keeps what it should give back, or asks for more than anybody needs. By hand-made
 * messages to an engine in this process.
 */
#include <sqlite3.h>

#include "catalog_handle.h"
#include "engine/sqlite_fault.h"
#include "session_fixture.h"

/* Several messages in one turn of the loop thread, so that nothing happens in between. */
struct burst {
	struct link *l;
	struct {
		_Alignas(8) char bytes[128];
		size_t len;
		int res;
	} m[2];
	bool then_dies;
};

static void burst_add(struct burst *b, int i, struct wire *x)
{
	((struct moment_msg *)x->out)->len = (uint32_t)x->at;
	memcpy(b->m[i].bytes, x->out, x->at);
	b->m[i].len = x->at;
}

static void burst_fn(void *arg)
{
	struct burst *b = arg;
	struct link_local *k = (struct link_local *)b->l;

	for (int i = 0; i < 2 && b->m[i].len; i++)
		b->m[i].res = session_receive(k->s, b->m[i].bytes, b->m[i].len);
	if (b->then_dies) {
		session_destroy(k->s);
		k->s = NULL;
	}
}

static void make_hello(struct wire *x, uint16_t flags)
{
	struct moment_hello *m = wire_begin(x, MOMENT_MSG_HELLO, flags, sizeof(*m));

	m->version = MOMENT_PROTOCOL_VERSION;
}

static void reopen(struct engine_opts o)
{
	char err[1024];

	stop(true);
	o.ram = RAM;
	o.commit_seconds = ENGINE_COMMIT_OFF;
	o.holder = "test_session";
	if (engine_open(dir, &o, &e, err, sizeof(err)))
		fail_msg("%s", err);
	attach(&w);
}

/* ---- hello ---- */

/* A second HELLO while the first is under way, which would turn a writer into a reader. */
static void hello_twice(struct link *l)
{
	struct burst b = {.l = l};

	make_hello(&w, 0);
	burst_add(&b, 0, &w);
	make_hello(&w, MOMENT_HELLO_READONLY);
	burst_add(&b, 1, &w);
	loop_call(engine_loop(e), burst_fn, &b);
	assert_int_equal(b.m[0].res, 0);
	assert_int_equal(b.m[1].res, -EPROTO);
	assert_non_null(wire_recv(&w, LINK_WAIT_MS));
	assert_int_equal(((struct moment_reply *)w.in)->status, 0);
	assert_null(wire_recv(&w, 100));
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 1), 0);
	assert_int_equal(wire_step(&w, MOMENT_MSG_POST_STEP, 1), 0);
}

static void op_nothing(struct engine_op *op)
{
	(void)op;
}

static void test_hello_twice(void **state)
{
	static const char meta[] = "{\"format\":\"momentfs-param\",\"version\":1,\"name\":\"a\","
				   "\"shape\":[8],\"step\":3,\"files\":{}}";
	struct engine_op op = {.kind = ENGINE_ROLLBACK, .done = op_nothing};
	struct ns_attr a;

	(void)state;
	/* It waits for a parameter to be adopted. */
	assert_int_equal(ns_mkdir(engine_ns(e), NS_ROOT, "a", 0755, 0, 0, false, &a), 0);
	assert_int_equal(ns_create(engine_ns(e), a.ino, "meta.json", 0644, 0, 0, false, &a), 0);
	assert_int_equal(engine_pwrite(e, a.ino, meta, strlen(meta), 0), strlen(meta));
	hello_twice(w.l);
	xattr_is("a", "user.moment.step", "3");
	detach(&w);
	/* It waits for a rollback. */
	attach(&w);
	engine_submit(e, &op);
	hello_twice(w.l);
}

/* What a client calls itself must not make the status unreadable. */
static void test_client_name(void **state)
{
	static const char name[48] = "a\"\\\n\xff\xc3\xa9\xe5\xb1";
	struct moment_hello *m;
	char *json;

	(void)state;
	make_hello(&w, 0);
	m = (struct moment_hello *)w.out;
	memcpy(m->client, name, sizeof(m->client));
	assert_int_equal(wire_call(&w), 0);
	json = engine_status_json(e);
	assert_non_null(
		strstr(json, "\"client\":\"a\\\"\\\\\\u000a\\ufffd\xc3\xa9\\ufffd\\ufffd\""));
	free(json);
}

/* ---- register ---- */

/* State that was changed behind the sessions' back is not taken for what it was. */
static void test_changed_state(void **state)
{
	struct wire_param p = vec("a", 1000);
	uint64_t ino, dir_ino;
	struct ns_attr a;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	p.dtype[1] = MOMENT_BF16;
	assert_int_equal(reg(&w, 0, p), 0);
	do_step(1, 0, 1);
	remount(true);
	/* As many bytes, but of another type. */
	p.dtype[1] = MOMENT_F16;
	assert_int_equal(reg(&w, 0, p), -EINVAL);
	says(&w, "bfloat16");
	says(&w, "float16");
	p.dtype[1] = MOMENT_BF16;
	/* Shorter, longer. */
	ino = ino_of("a/exp_avg");
	assert_int_equal(engine_call(e, ENGINE_TRUNCATE, ino, 0, 3996, 0), 0);
	assert_int_equal(reg(&w, 0, p), -EINVAL);
	says(&w, "3996");
	assert_int_equal(engine_call(e, ENGINE_TRUNCATE, ino, 0, 4004, 0), 0);
	assert_int_equal(reg(&w, 0, p), -EINVAL);
	assert_int_equal(engine_call(e, ENGINE_TRUNCATE, ino, 0, 4000, 0), 0);
	/* A directory where an array should be, also for a fresh start. */
	dir_ino = ino_of("a");
	assert_int_equal(ns_rename(engine_ns(e), dir_ino, "exp_avg", dir_ino, "x", 0), 0);
	assert_int_equal(ns_mkdir(engine_ns(e), dir_ino, "exp_avg", 0755, 0, 0, false, &a), 0);
	assert_int_equal(reg(&w, 0, p), -EINVAL);
	assert_int_equal(reg(&w, MOMENT_REG_FRESH, p), -EINVAL);
	says(&w, "not a file");
	assert_int_equal(ns_rmdir(engine_ns(e), dir_ino, "exp_avg"), 0);
	assert_int_equal(ns_rename(engine_ns(e), dir_ino, "x", dir_ino, "exp_avg", 0), 0);
	assert_int_equal(reg(&w, 0, p), 0);
	assert_int_equal(reg_reply()->e[0].step, 1);
	assert_int_equal(byte_at("a/exp_avg", 3995), 1);
	assert_int_equal(byte_at("a/exp_avg", 3999), 0);
	/* Nobody may have it for writing who had it before. */
	assert_int_equal(ns_open(engine_ns(e), ino, true), -EBUSY);
}

/* A REGISTER that fails leaves what was there to others, and to the next one. */
static void test_register_undone(void **state)
{
	struct wire_param p = vec("a", 1000), q = vec("b", 1000);
	struct ns_attr a, before, after;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, p), 0);
	assert_int_equal(reg(&w, 0, q), 0);
	remount(true);
	assert_int_equal(ns_walk(engine_ns(e), "b/exp_avg_sq", &a), 0);
	assert_int_equal(ns_open(engine_ns(e), a.ino, true), 0);
	for (int i = 0; i < 2; i++) {
		wire_reg_begin(&w, 0);
		wire_reg_add(&w, &p);
		wire_reg_add(&w, &q);
		assert_int_equal(wire_call(&w), -EBUSY);
	}
	/* Between steps a plain program may write them, and move them. */
	assert_int_equal(engine_pwrite(e, ino_of("a/exp_avg"), "\2", 1, 0), 1);
	assert_int_equal(ns_rename(engine_ns(e), NS_ROOT, "a", NS_ROOT, "c", 0), 0);
	assert_int_equal(ns_rename(engine_ns(e), NS_ROOT, "c", NS_ROOT, "a", 0), 0);
	ns_release(engine_ns(e), a.ino, true);
	wire_reg_begin(&w, 0);
	wire_reg_add(&w, &p);
	wire_reg_add(&w, &q);
	assert_int_equal(wire_call(&w), 0);
	assert_int_equal(byte_at("a/exp_avg", 0), 2);
	/* What plain programs wrote before is not counted as written in a step. */
	assert_int_equal(ns_walk(engine_ns(e), "a/exp_avg", &before), 0);
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 1), 0);
	assert_int_equal(wire_step(&w, MOMENT_MSG_POST_STEP, 1), 0);
	assert_int_equal(ns_walk(engine_ns(e), "a/exp_avg", &after), 0);
	assert_memory_equal(&before.mtime, &after.mtime, sizeof(after.mtime));
	/* Removed for good: nobody holds on to it, so its space comes back. */
	assert_int_equal(send_remove(0), 0);
	assert_int_equal(send_remove(1), 0);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
	assert_int_equal(ns_getattr(engine_ns(e), a.ino, &a), -ESTALE);
}

/* ---- leases ---- */

static void pass_over(struct wire *x, const struct moment_reply *r)
{
	(void)x;
	(void)r;
}

/* A reader dies while its lease waits for memory, and the file that it wants is removed. */
static void test_death_in_line(void **state)
{
	static char buf[RAM];
	struct wire *x = calloc(1, sizeof(*x));
	struct ns_attr a;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 2 * BLOCK / 4)), 0);
	setenv("MOMENT_FAULTS", "write.delay=300ms:1", 1);
	reopen((struct engine_opts){0});
	unsetenv("MOMENT_FAULTS");
	attach(x);
	assert_int_equal(wire_hello(x, MOMENT_HELLO_READONLY), 0);
	assert_int_equal(reg(x, 0, vec("a", 2 * BLOCK / 4)), 0);
	/* All memory is dirty, and clean again only when the slow drive has it. */
	assert_int_equal(ns_create(engine_ns(e), NS_ROOT, "plain", 0644, 0, 0, false, &a), 0);
	assert_int_equal(engine_pwrite(e, a.ino, buf, sizeof(buf), 0), sizeof(buf));
	wire_adv_begin(x);
	wire_adv_add(x, true, (struct moment_range){0, 0, 1, 0});
	assert_int_equal(wire_send(x), 0);
	assert_null(wire_recv(x, 20));
	/* What is asked for is not leased yet. */
	x->other = pass_over;
	assert_int_equal(adv(x, false, 0, 0, 1, 0), -EINVAL);
	says(x, "not leased");
	assert_int_equal(ns_walk(engine_ns(e), "a", &a), 0);
	assert_int_equal(ns_unlink(engine_ns(e), a.ino, "exp_avg"), 0);
	assert_int_equal(ns_unlink(engine_ns(e), a.ino, "exp_avg_sq"), 0);
	detach(x);
	assert_int_equal(engine_call(e, ENGINE_SYNC, 0, 0, 0, 0), 0);
	assert_int_equal(byte_at("plain", sizeof(buf) - 1), 0);
	/* Nothing of it is left: not its memory, not its place on disk. */
	assert_int_equal(engine_call(e, ENGINE_SYNC, 0, 0, 0, 0), 0);
	assert_true(pool_used() < sizeof(buf) + BLOCK);
	free(x);
}

/* Thousands of ranges of millions of blocks cost an error message, not the loop thread's time. */
static void test_huge_ranges(void **state)
{
	enum { RANGES = 4000 };
	const uint64_t size = 2ull << 40;
	const uint32_t blocks = (uint32_t)(size / BLOCK);
	struct wire_param p = vec("big", size / 4);
	struct moment_prefetch *m;
	uint64_t start = loop_now_ns();
	struct ns_attr a, f;

	(void)state;
	assert_int_equal(ns_mkdir(engine_ns(e), NS_ROOT, "big", 0755, 0, 0, false, &a), 0);
	assert_int_equal(ns_create(engine_ns(e), a.ino, "exp_avg", 0644, 0, 0, false, &f), 0);
	assert_int_equal(engine_call(e, ENGINE_TRUNCATE, f.ino, 0, size, 0), 0);
	assert_int_equal(
		ns_set_moment(engine_ns(e), a.ino,
			      (struct ns_moment[]){{"user.moment.name", "big", 3},
						   {"user.moment.shape", "[549755813888]", 14}},
			      2),
		0);
	assert_int_equal(ns_set_moment(engine_ns(e), f.ino,
				       &(struct ns_moment){"user.moment.dtype", "float32", 7}, 1),
			 0);
	p.dtype[1] = NONE;
	assert_int_equal(wire_hello(&w, MOMENT_HELLO_READONLY), 0);
	assert_int_equal(reg(&w, 0, p), 0);
	wire_adv_begin(&w);
	for (int i = 0; i < RANGES; i++)
		wire_adv_add(&w, true, (struct moment_range){0, 0, blocks, 0});
	assert_int_equal(wire_call(&w), -E2BIG);
	says(&w, "at once");
	m = wire_begin(&w, MOMENT_MSG_PREFETCH, 0, sizeof(*m));
	for (int i = 0; i < RANGES; i++)
		*(struct moment_range *)wire_more(&w, sizeof(struct moment_range)) =
			(struct moment_range){0, 0, blocks, 0};
	m->n = RANGES;
	assert_int_equal(wire_send(&w), 0);
	assert_int_equal(adv(&w, true, 0, blocks - 1, 1, 0), 0);
	assert_int_equal(wire_leases(&w)->len, BLOCK);
	assert_int_equal(adv(&w, true, 0, blocks, 1, 0), -EINVAL);
	assert_true(loop_now_ns() - start < 20000000000ull);
}

/* More requests that have to wait than anybody needs: told so, and those before are answered. */
static void test_too_many_requests(void **state)
{
	enum { N = 1500, MOST = 1024 };
	unsigned int refused = 0, ok = 0;
	struct moment_post_step *m;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 100)), 0);
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 1), 0);
	for (int i = 0; i < N; i++) {
		wire_begin(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT, sizeof(struct moment_simple));
		assert_int_equal(wire_send(&w), 0);
	}
	while (refused + MOST < N) {
		assert_non_null(wire_recv(&w, LINK_WAIT_MS));
		assert_int_equal(((struct moment_reply *)w.in)->status, -EBUSY);
		refused++;
	}
	says(&w, "wait for replies");
	assert_null(wire_recv(&w, 50));
	/* There is a way out: the step ends, and with it what waited for that. */
	m = wire_begin(&w, MOMENT_MSG_POST_STEP, 0, sizeof(*m));
	m->step = 1;
	assert_int_equal(wire_send(&w), 0);
	while (ok < MOST + 1) {
		assert_non_null(wire_recv(&w, LINK_WAIT_MS));
		assert_int_equal(((struct moment_reply *)w.in)->status, 0);
		ok++;
	}
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
}

/* ---- rollbacks ---- */

/* The edge's part of a boundary, which takes as long as the test likes. */
static struct edge {
	pthread_mutex_t lock;
	bool hold;
	unsigned int n;
	struct engine_boundary *b[8];
} edge = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void on_boundary(void *arg, struct engine_boundary *b)
{
	bool hold;

	(void)arg;
	pthread_mutex_lock(&edge.lock);
	hold = edge.hold;
	if (hold)
		edge.b[edge.n++] = b;
	pthread_mutex_unlock(&edge.lock);
	if (!hold)
		b->done(b);
}

static unsigned int edge_held(void)
{
	unsigned int n;

	pthread_mutex_lock(&edge.lock);
	n = edge.n;
	pthread_mutex_unlock(&edge.lock);
	return n;
}

static void edge_hold(bool hold)
{
	pthread_mutex_lock(&edge.lock);
	edge.hold = hold;
	for (unsigned int i = 0; !hold && i < edge.n; i++)
		edge.b[i]->done(edge.b[i]);
	if (!hold)
		edge.n = 0;
	pthread_mutex_unlock(&edge.lock);
}

/* As the kernel does for somebody who reads the file. */
static void kernel_looks(const char *path)
{
	struct ns_attr a;

	assert_int_equal(ns_look(engine_ns(e), ino_of(path), true, &a), 0);
	ns_set_paged(engine_ns(e), a.ino);
}

/* Step 1 committed, step 2 after it; step 3 begun and rolled back, the reply held up. */
static uint64_t rollback_in_the_air(void)
{
	uint64_t id;

	reopen((struct engine_opts){.boundary = on_boundary});
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 20000)), 0);
	do_step(1, 0, 1);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
	do_step(2, 0, 2);
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 3), 0);
	kernel_looks("a/exp_avg");
	edge_hold(true);
	wire_begin(&w, MOMENT_MSG_ROLLBACK, 0, sizeof(struct moment_simple));
	id = w.id;
	assert_int_equal(wire_send(&w), 0);
	for (int i = 0; i < 5000 && !edge_held(); i++)
		usleep(1000);
	assert_int_equal(edge_held(), 1);
	return id;
}

/* A step's reply comes when the edge has dropped what is stale: of the files that were written. */
static void test_boundary(void **state)
{
	struct moment_post_step *m;
	struct ns_stale stale[4];

	(void)state;
	reopen((struct engine_opts){.boundary = on_boundary});
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 20000)), 0);
	kernel_looks("a/exp_avg");
	kernel_looks("a/exp_avg_sq");
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 1), 0);
	assert_int_equal(adv(&w, true, 1, 0, 1, MOMENT_RANGE_WRITE), 0);
	assert_int_equal(adv(&w, false, 1, 0, 1, 0), 0);
	edge_hold(true);
	m = wire_begin(&w, MOMENT_MSG_POST_STEP, 0, sizeof(*m));
	m->step = 1;
	assert_int_equal(wire_send(&w), 0);
	assert_null(wire_recv(&w, 50));
	assert_int_equal(edge_held(), 1);
	assert_int_equal(ns_stale_take(engine_ns(e), stale, 4), 1);
	assert_int_equal(stale[0].ino, ino_of("a/exp_avg_sq"));
	assert_true(stale[0].data);
	edge_hold(false);
	assert_non_null(wire_recv(&w, LINK_WAIT_MS));
	assert_int_equal(((struct moment_reply *)w.in)->status, 0);
}

/* The step that is rolled back is over at once; a new one may begin before the reply has come. */
static void test_rollback_then_step(void **state)
{
	uint64_t id;
	struct moment_post_step *m;

	(void)state;
	id = rollback_in_the_air();
	assert_int_equal(wire_step(&w, MOMENT_MSG_POST_STEP, 3), -EINVAL);
	assert_int_equal(send_steps(0, 9), -EPERM);
	assert_int_equal(adv(&w, true, 0, 0, 1, MOMENT_RANGE_WRITE), -EPERM);
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 4), 0);
	assert_int_equal(send_steps(0, 4), 0);
	edge_hold(false);
	assert_non_null(wire_wait(&w, id));
	assert_int_equal(((struct moment_reply *)w.in)->status, 0);
	/* It is still open. */
	assert_int_equal(adv(&w, true, 0, 0, 1, MOMENT_RANGE_WRITE), 0);
	assert_int_equal(w.l->base[wire_leases(&w)->arena], 1);
	memset(w.l->base + wire_leases(&w)->arena, 4, 100);
	assert_int_equal(adv(&w, false, 0, 0, 1, 0), 0);
	m = wire_begin(&w, MOMENT_MSG_POST_STEP, 0, sizeof(*m));
	m->step = 4;
	assert_int_equal(wire_call(&w), 0);
	xattr_is("a", "user.moment.step", "4");
	remount(true);
	assert_int_equal(byte_at("a/exp_avg", 50), 4);
	assert_int_equal(reg(&w, 0, vec("a", 20000)), 0);
	assert_int_equal(reg_reply()->e[0].step, 4);
}

/* A client that dies before it hears that its rollback is done leaves nothing torn. */
static void test_rollback_then_death(void **state)
{
	struct engine_step_state st;

	(void)state;
	rollback_in_the_air();
	detach(&w);
	edge_hold(false);
	engine_get_step(e, &st);
	assert_false(st.torn);
	assert_true(st.open == MOMENT_STEP_NONE);
	attach(&w);
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 20000)), 0);
	assert_int_equal(reg_reply()->e[0].step, 1);
	do_step(2, 0, 2);
}

/* A client dies while its rollback, between steps, fails: its files are anybody's all the same. */
static void test_death_in_failing_rollback(void **state)
{
	struct wire *dead = calloc(1, sizeof(*dead));
	struct burst b = {.then_dies = true};
	struct sqlite_fault *f;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 20000)), 0);
	assert_int_equal(sqlite_fault_create("test_session_hostile", &f), 0);
	sqlite3_auto_extension((void (*)(void))note_db);
	reopen((struct engine_opts){.vfs = "test_session_hostile"});
	sqlite3_cancel_auto_extension((void (*)(void))note_db);
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 20000)), 0);
	do_step(1, 0, 1);
	assert_int_equal(sqlite3_db_release_memory(catalog_db), SQLITE_OK);
	assert_int_equal(sqlite_fault_set(f, "error=EIO:1", NULL, 0), 0);
	b.l = dead->l = w.l;
	wire_begin(&w, MOMENT_MSG_ROLLBACK, 0, sizeof(struct moment_simple));
	burst_add(&b, 0, &w);
	loop_call(engine_loop(e), burst_fn, &b);
	/* A writer that comes now waits for its end. */
	attach(&w);
	assert_int_equal(wire_hello(&w, 0), 0);
	/* Nobody is told of it: the edge has let go of the session. */
	assert_null(wire_recv(dead, 0));
	detach(dead);
	free(dead);
	assert_int_equal(sqlite_fault_set(f, "", NULL, 0), 0);
	assert_int_equal(engine_pwrite(e, ino_of("a/exp_avg"), "\1", 1, 0), 1);
	assert_int_equal(reg(&w, 0, vec("a", 20000)), 0);
	assert_int_equal(reg_reply()->e[0].step, 1);
	do_step(2, 0, 2);
	stop(true);
	sqlite_fault_destroy(f);
	start(false);
	assert_int_equal(byte_at("a/exp_avg", 50), 2);
}

/* A reader that does not give back what it leases cannot hold up a rollback, and all else, for
 * ever. */
static void test_reader_keeps_lease(void **state)
{
	struct wire *x = calloc(1, sizeof(*x));
	struct engine_op op = {.kind = ENGINE_ROLLBACK, .done = op_nothing};
	struct engine_step_state st;
	char pid[32];

	(void)state;
	snprintf(pid, sizeof(pid), "pid %d", getpid());
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 20000)), 0);
	assert_int_equal(reg(&w, 0, vec("b", 20000)), 0);
	remount(true);
	assert_int_equal(reg(&w, 0, vec("a", 20000)), 0);
	do_step(1, 0, 1);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
	do_step(2, 0, 2);
	attach(x);
	assert_int_equal(wire_hello(x, MOMENT_HELLO_READONLY), 0);
	assert_int_equal(reg(x, 0, vec("a", 20000)), 0);
	assert_int_equal(reg(x, 0, vec("b", 20000)), 0);
	/* One of a file that does not go back is none of its business. */
	assert_int_equal(adv(x, true, 2, 0, 1, 0), 0);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_ROLLBACK, 0), 0);
	do_step(2, 0, 2);
	assert_int_equal(adv(x, false, 2, 0, 1, 0), 0);
	assert_int_equal(adv(x, true, 0, 0, 1, 0), 0);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_ROLLBACK, 0), -EBUSY);
	says(&w, "test client");
	says(&w, pid);
	/* Nothing has changed. */
	assert_int_equal(byte_at("a/exp_avg", 50), 2);
	do_step(3, 0, 3);
	/* The same for a session that comes to a torn state. */
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 4), 0);
	detach(&w);
	attach(&w);
	assert_int_equal(wire_hello(&w, MOMENT_HELLO_ROLLBACK), -EBUSY);
	says(&w, pid);
	engine_get_step(e, &st);
	assert_true(st.torn);
	assert_int_equal(engine_call(e, ENGINE_ROLLBACK, 0, 0, 0, 0), -EBUSY);
	/* It comes in time when the reader gives it back. */
	make_hello(&w, MOMENT_HELLO_ROLLBACK);
	assert_int_equal(wire_send(&w), 0);
	assert_null(wire_recv(&w, 300));
	assert_int_equal(adv(x, false, 0, 0, 1, 0), 0);
	assert_non_null(wire_recv(&w, LINK_WAIT_MS));
	assert_int_equal(((struct moment_reply *)w.in)->status, 0);
	assert_int_equal(byte_at("a/exp_avg", 50), 1);
	/* One that comes while all goes back waits for that, torn or not. */
	assert_int_equal(adv(x, true, 0, 0, 1, 0), 0);
	detach(&w);
	attach(&w);
	engine_submit(e, &op);
	make_hello(&w, 0);
	assert_int_equal(wire_send(&w), 0);
	assert_null(wire_recv(&w, 300));
	assert_int_equal(adv(x, false, 0, 0, 1, 0), 0);
	assert_non_null(wire_recv(&w, LINK_WAIT_MS));
	assert_int_equal(((struct moment_reply *)w.in)->status, 0);
	detach(x);
	free(x);
}

/* While a rollback waits, nothing else begins; when it is done the step is over. */
static void test_while_rolling_back(void **state)
{
	struct wire *x = calloc(1, sizeof(*x));
	uint64_t id;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 20000)), 0);
	attach(x);
	assert_int_equal(wire_hello(x, MOMENT_HELLO_READONLY), 0);
	assert_int_equal(reg(x, 0, vec("a", 20000)), 0);
	for (int stepping = 0; stepping < 2; stepping++) {
		assert_int_equal(adv(x, true, 0, 0, 1, 0), 0);
		if (stepping)
			assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 1), 0);
		wire_begin(&w, MOMENT_MSG_ROLLBACK, 0, sizeof(struct moment_simple));
		id = w.id;
		assert_int_equal(wire_send(&w), 0);
		assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 1), -EBUSY);
		assert_int_equal(send_steps(0, 1), -EBUSY);
		assert_int_equal(wire_step(&w, MOMENT_MSG_POST_STEP, 1), -EBUSY);
		assert_int_equal(adv(&w, true, 1, 0, 1, 0), -EBUSY);
		assert_int_equal(adv(x, true, 1, 0, 1, 0), -EBUSY);
		assert_int_equal(send_remove(0), -EBUSY);
		assert_int_equal(reg(&w, 0, vec("b", 8)), -EBUSY);
		assert_int_equal(wire_simple(&w, MOMENT_MSG_ROLLBACK, 0), -EBUSY);
		assert_int_equal(adv(x, false, 0, 0, 1, 0), 0);
		assert_non_null(wire_wait(&w, id));
		assert_int_equal(((struct moment_reply *)w.in)->status, 0);
		assert_int_equal(wire_step(&w, MOMENT_MSG_POST_STEP, 1), -EINVAL);
	}
	do_step(1, 0, 1);
	detach(x);
	free(x);
}

/* ---- shares of the memory ---- */

/* A number in the status, behind `key` in part `part`. */
static uint64_t status_number(const char *part, const char *key)
{
	char *json = engine_status_json(e);
	const char *at = strstr(json, part);
	uint64_t v;

	at = at ? strstr(at, key) : NULL;
	assert_non_null(at);
	v = strtoull(strchr(at, ':') + 1, NULL, 10);
	free(json);
	return v;
}

static uint64_t resident(const char *path)
{
	struct engine_op op = {.kind = ENGINE_RESIDENT, .ino = ino_of(path), .done = op_nothing};
	struct burst b = {.m[0].len = 0};

	engine_submit(e, &op);
	loop_call(engine_loop(e), burst_fn, &b); /* after it in line */
	return op.out.resident;
}

/* What is pinned and what is leased leave an eighth; all readers together have a sixteenth. */
static void test_shares(void **state)
{
	struct wire *x = calloc(1, sizeof(*x)), *y = calloc(1, sizeof(*y));
	struct wire_param p = vec("pinned", 13 * BLOCK / 4);
	static char buf[RAM];
	struct ns_attr a;
	uint64_t used;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	p.dtype[1] = NONE;
	p.tier = 1;
	assert_int_equal(reg(&w, 0, p), 0);
	assert_int_equal(reg(&w, 0, vec("a", 12 * BLOCK / 4)), 0);
	assert_int_equal(adv(&w, true, 1, 0, 9, 0), -E2BIG);
	says(&w, "pinned");
	assert_int_equal(adv(&w, true, 1, 0, 8, 0), 0);
	assert_int_equal(status_number("\"sessions\"", "\"leases\""), 8);
	assert_int_equal(status_number("\"ram\"", "\"leased_bytes\""), 8 * BLOCK);
	assert_int_equal(adv(&w, false, 1, 0, 8, 0), 0);
	attach(x);
	assert_int_equal(wire_hello(x, MOMENT_HELLO_READONLY), 0);
	assert_int_equal(reg(x, 0, vec("a", 12 * BLOCK / 4)), 0);
	attach(y);
	assert_int_equal(wire_hello(y, MOMENT_HELLO_READONLY), 0);
	assert_int_equal(reg(y, 0, vec("a", 12 * BLOCK / 4)), 0);
	for (int i = 0; i < 3; i++) {
		assert_int_equal(adv(x, true, 0, 0, 1, 0), 0);
		assert_int_equal(adv(x, true, 0, 1, 1, 0), -E2BIG);
		assert_int_equal(adv(y, true, 0, 2, 1, 0), -E2BIG);
		assert_int_equal(adv(x, false, 0, 0, 1, 0), 0);
		assert_int_equal(adv(y, true, 0, 2, 1, 0), 0);
		assert_int_equal(adv(y, false, 0, 2, 1, 0), 0);
	}
	assert_int_equal(status_number("\"sessions\"", "\"leases\""), 0);
	assert_int_equal(status_number("\"ram\"", "\"leased_bytes\""), 0);
	/* A reader that dies gives its share back. */
	assert_int_equal(adv(x, true, 0, 0, 1, 0), 0);
	detach(x);
	assert_int_equal(adv(y, true, 0, 2, 1, 0), 0);
	detach(y);
	assert_int_equal(status_number("\"ram\"", "\"leased_bytes\""), 0);
	/* Nothing is pinned for a session that has gone. */
	assert_int_equal(adv(&w, true, 0, 0, 9, 0), 0);
	assert_int_equal(adv(&w, false, 0, 0, 9, 0), 0);
	assert_int_equal(resident("pinned/exp_avg"), 9 * BLOCK);
	detach(&w);
	assert_int_equal(ns_create(engine_ns(e), NS_ROOT, "plain", 0644, 0, 0, false, &a), 0);
	assert_int_equal(engine_pwrite(e, a.ino, buf, sizeof(buf), 0), sizeof(buf));
	assert_true(resident("pinned/exp_avg") < 9 * BLOCK);
	/* A reader that goes leaves a file what it has reserved. */
	assert_int_equal(engine_call(e, ENGINE_ALLOCATE, ino_of("a/exp_avg"), 0, 12 * BLOCK, 0), 0);
	used = pool_used();
	attach(x);
	assert_int_equal(wire_hello(x, MOMENT_HELLO_READONLY), 0);
	assert_int_equal(reg(x, 0, vec("a", 12 * BLOCK / 4)), 0);
	detach(x);
	assert_int_equal(pool_used(), used);
	free(x);
	free(y);
}

/* ---- a drive that fails ---- */

/* Who asks for a commit, makes parameters or begins a step is told that the drive fails. */
static void test_write_error(void **state)
{
	char faults[400], flag[300];
	int fd, r = -1;

	(void)state;
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 20000)), 0);
	snprintf(flag, sizeof(flag), "%s.fail", dir);
	snprintf(faults, sizeof(faults), "write.error=EIO:1,file=%s", flag);
	setenv("MOMENT_FAULTS", faults, 1);
	reopen((struct engine_opts){0});
	unsetenv("MOMENT_FAULTS");
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 20000)), 0);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_INFO, 0), 0);
	assert_int_equal(info_reply(&w)->error, 0);
	do_step(1, 0, 1);
	fd = open(flag, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
	assert_true(fd >= 0);
	close(fd);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), -EIO);
	says(&w, "stays in memory");
	assert_int_equal(wire_simple(&w, MOMENT_MSG_INFO, 0), 0);
	assert_int_equal(info_reply(&w)->error, -EIO);
	assert_true(info_reply(&w)->committed_step == MOMENT_STEP_NONE);
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, 2), -EIO);
	says(&w, "cure the drive");
	assert_int_equal(reg(&w, 0, vec("b", 8)), -EIO);
	says(&w, "register again");
	assert_int_equal(ino_of("b"), 0);
	unlink(flag);
	for (int i = 0; i < 100 && r; i++) {
		usleep(50000);
		r = wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT);
	}
	assert_int_equal(r, 0);
	assert_int_equal(info_reply(&w)->error, 0);
	assert_int_equal(info_reply(&w)->committed_step, 1);
	assert_int_equal(reg(&w, 0, vec("b", 8)), 0);
	do_step(2, 0, 2);
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		T(test_hello_twice),
		T(test_client_name),
		T(test_changed_state),
		T(test_register_undone),
		T(test_death_in_line),
		T(test_huge_ranges),
		T(test_too_many_requests),
		T(test_boundary),
		T(test_rollback_then_step),
		T(test_rollback_then_death),
		T(test_death_in_failing_rollback),
		T(test_reader_keeps_lease),
		T(test_while_rolling_back),
		T(test_shares),
		T(test_write_error),
	};

	alarm(300); /* something hangs */
	return cmocka_run_group_tests(tests, NULL, NULL);
}
