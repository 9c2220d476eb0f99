/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_stalled.c - commits that keep failing stop whoever steps, with the reason, and a cure is
 * noticed by itself; one that fails for a moment stops nobody.
 */
#include "engine/engine_impl.h"
#include "engine/sqlite_fault.h"
#include "session_fixture.h"

static struct sqlite_fault *fault;

/* In place of the fixture's. */
static void open_engine(int seconds)
{
	struct engine_opts o = {.ram = RAM,
				.block = BLOCK,
				.commit_seconds = seconds,
				.size = pool_limit,
				.vfs = "test_stalled",
				.holder = "test_stalled"};
	char err[1024];

	stop(true);
	if (engine_open(dir, &o, &e, err, sizeof(err)))
		fail_msg("%s", err);
	attach(&w);
}

static void fails_with(const char *spec)
{
	assert_int_equal(sqlite_fault_set(fault, spec, NULL, 0), 0);
}

static void get_info(void *i)
{
	commit_get_info(&e->c, i);
}

/* As a trainer that asks for commits behind its steps, and waits for none. */
static int step_and_commit(uint64_t step, int fill)
{
	struct moment_post_step *m;
	struct commit_info i;
	int r = wire_step(&w, MOMENT_MSG_PRE_STEP, step);

	if (r)
		return r;
	assert_int_equal(adv(&w, true, 0, 0, 1, MOMENT_RANGE_WRITE), 0);
	memset(w.l->base + wire_leases(&w)->arena, fill, wire_leases(&w)->len);
	assert_int_equal(adv(&w, false, 0, 0, 1, 0), 0);
	assert_int_equal(send_steps(0, step), 0);
	m = wire_begin(&w, MOMENT_MSG_POST_STEP, MOMENT_POST_COMMIT, sizeof(*m));
	m->step = step;
	assert_int_equal(wire_call(&w), 0);
	do
		loop_call(engine_loop(e), get_info, &i);
	while (i.running);
	return 0;
}

static void status_has(const char *what)
{
	char *json = engine_status_json(e);

	if (!strstr(json, what))
		fail_msg("status does not have %s: %s", what, strstr(json, "\"commit\":"));
	free(json);
}

static void test_full_disk(void **state)
{
	(void)state;
	open_engine(ENGINE_COMMIT_OFF);
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 1000)), 0);
	assert_int_equal(step_and_commit(1, 1), 0);
	/* Once is not enough, and is forgotten. */
	fails_with("write.error=ENOSPC:1");
	assert_int_equal(step_and_commit(2, 2), 0);
	status_has("\"failures\":1");
	status_has("\"steps_refused\":false");
	fails_with("");
	assert_int_equal(step_and_commit(3, 3), 0);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
	status_has("\"failures\":0,\"failing_seconds\":0.0,\"steps_refused\":false,\"cause\":null");
	fails_with("write.error=ENOSPC:1");
	for (uint64_t step = 4; step < 4 + COMMIT_PATIENCE; step++) {
		assert_int_equal(step_and_commit(step, (int)step), 0);
		assert_int_equal(wire_simple(&w, MOMENT_MSG_INFO, 0), 0);
		assert_int_equal(info_reply(&w)->error, -ENOSPC);
	}
	status_has("\"steps_refused\":true,\"cause\":\"the catalog could not be written\"");
	assert_int_equal(step_and_commit(7, 7), -ENOSPC);
	says(&w, "step 7 is not begun");
	says(&w, "the catalog could not be written: No space left on device");
	says(&w, "(step 3)");
	assert_int_equal(wire_simple(&w, MOMENT_MSG_INFO, 0), 0);
	assert_int_equal(info_reply(&w)->open_step, MOMENT_STEP_NONE);
	/* There is room again: the next step goes on, and what was held back is stored. */
	fails_with("");
	assert_int_equal(step_and_commit(7, 7), 0);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
	status_has("\"failures\":0");
	stop(false);
	start(false);
	assert_int_equal(byte_at("a/exp_avg", 5), 7);
}

/* With commit=SECONDS failures that follow one another in a moment are one. */
static void test_for_some_time(void **state)
{
	struct timespec nap = {.tv_nsec = 1000000};
	uint64_t step = 1, quick;

	(void)state;
	open_engine(1);
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 1000)), 0);
	fails_with("sync.error=EIO:1");
	for (; step <= 2 * COMMIT_PATIENCE; step++)
		assert_int_equal(step_and_commit(step, 1), 0);
	quick = step;
	/* Commits come by the clock from now on. Bounded by a time that no machine needs. */
	for (; step < quick + 60000; step++) {
		int r = wire_step(&w, MOMENT_MSG_PRE_STEP, step);

		if (r == -EIO)
			break;
		assert_int_equal(r, 0);
		assert_int_equal(wire_step(&w, MOMENT_MSG_POST_STEP, step), 0);
		nanosleep(&nap, NULL);
	}
	assert_true(step < quick + 60000);
	says(&w, "Input/output error");
	fails_with("");
	assert_int_equal(step_and_commit(step, 1), 0);
}

/* A cause that waiting does not cure: the very next step is refused. */
static void test_hopeless(void **state)
{
	(void)state;
	open_engine(60);
	assert_int_equal(wire_hello(&w, 0), 0);
	assert_int_equal(reg(&w, 0, vec("a", 1000)), 0);
	fails_with("write.error=EINVAL:1");
	assert_int_equal(step_and_commit(1, 1), 0);
	assert_int_equal(step_and_commit(2, 2), -EINVAL);
	says(&w, "waiting does not cure that");
	says(&w, "(no step)");
	fails_with("");
	assert_int_equal(step_and_commit(2, 2), 0);
	assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
}

static char bracket_text[1024];

static void begun(struct engine_op *op)
{
	snprintf(bracket_text, sizeof(bracket_text), "%s", op->text ? op->text : "");
	__atomic_store_n((int *)(uintptr_t)op->off, 1, __ATOMIC_SEQ_CST);
}

static int begin(uint64_t step)
{
	int done = 0;
	struct engine_op op = {.kind = ENGINE_STEP_BEGIN,
			       .arg = step,
			       .off = (uint64_t)(uintptr_t)&done,
			       .done = begun};

	engine_submit(e, &op);
	while (!__atomic_load_n(&done, __ATOMIC_SEQ_CST))
		;
	return (int)op.res;
}

/* A plain writer that brackets its steps is told in the same way. */
static void test_bracket(void **state)
{
	struct ns_attr a;

	(void)state;
	open_engine(ENGINE_COMMIT_OFF);
	assert_int_equal(ns_create(engine_ns(e), NS_ROOT, "m", 0644, 0, 0, false, &a), 0);
	assert_int_equal(engine_pwrite(e, a.ino, "x", 1, 0), 1);
	fails_with("write.error=ENOSPC:1");
	for (unsigned int i = 0; i < COMMIT_PATIENCE; i++) {
		assert_int_equal(begin(i), 0);
		assert_int_equal(engine_call(e, ENGINE_STEP_END, 0, 0, 0, i), 0);
		assert_int_equal(engine_call(e, ENGINE_SYNC, 0, 0, 0, 0), -ENOSPC);
	}
	assert_int_equal(begin(5), -ENOSPC);
	assert_non_null(strstr(bracket_text, "the catalog could not be written"));
	fails_with("");
	assert_int_equal(begin(5), 0);
	assert_int_equal(engine_call(e, ENGINE_STEP_END, 0, 0, 0, 5), 0);
}

/*
 * The catalog's sync fails, so that a crash might bring either side back; then the way back, the
 * cure, and a step on a pool that is full: what was registered has its two places again.
 */
static void test_places_after_a_doubtful_commit(void **state)
{
	struct ns_attr a;
	int64_t r = 0;

	(void)state;
	pool_limit = 8u << 20;
	for (int back = 0; back < 2; back++) {
		uint64_t at = 0, len = 1u << 20, step = 10 * (uint64_t)back;
		const char *name = back ? "b" : "a";

		open_engine(ENGINE_COMMIT_OFF);
		assert_int_equal(wire_hello(&w, 0), 0);
		assert_int_equal(reg(&w, 0, vec(name, 200000)), 0);
		assert_int_equal(step_and_commit(step + 1, 1), 0);
		assert_int_equal(ns_create(engine_ns(e), NS_ROOT, back ? "f" : "g", 0644, 0, 0, false,
					   &a),
				 0);
		for (; len >= MOMENT_UNIT; at += r ? 0 : len, len /= r ? 2 : 1)
			r = engine_call(e, ENGINE_ALLOCATE, a.ino, at, len, 0);
		assert_int_equal(r, -ENOSPC);
		assert_int_equal(engine_call(e, ENGINE_SYNC, 0, 0, 0, 0), 0);
		fails_with("sync.error=EIO:1");
		assert_int_equal(step_and_commit(step + 2, 2), 0);
		status_has("\"failures\":1");
		if (!back) {
			/* No room for a third place: the step is refused before it begins. */
			assert_int_equal(step_and_commit(step + 3, 3), -EIO);
			says(&w, "is not begun");
		} else {
			/* Not to a state that a crash might still change for a later one. */
			assert_int_equal(wire_simple(&w, MOMENT_MSG_ROLLBACK, 0), -EIO);
			fails_with("");
			assert_int_equal(wire_simple(&w, MOMENT_MSG_ROLLBACK, 0), 0);
			assert_int_equal(byte_at("b/exp_avg", 5), 1);
		}
		fails_with("");
		for (int i = 3; i < 6; i++)
			assert_int_equal(step_and_commit(step + (uint64_t)i, i), 0);
		assert_int_equal(wire_simple(&w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT), 0);
		assert_int_equal(byte_at(back ? "b/exp_avg" : "a/exp_avg", 5), 5);
		assert_int_equal(engine_call(e, ENGINE_SYNC, 0, 0, 0, 0), 0);
		assert_int_equal(ns_remove(engine_ns(e), NS_ROOT, back ? "f" : "g", false), 0);
		ns_forget(engine_ns(e), a.ino, 1);
		assert_int_equal(engine_call(e, ENGINE_SYNC, 0, 0, 0, 0), 0);
	}
}

static int make_fault(void **state)
{
	(void)state;
	return sqlite_fault_create("test_stalled", &fault);
}

static int drop_fault(void **state)
{
	(void)state;
	sqlite_fault_destroy(fault);
	return 0;
}

static int teardown_cured(void **state)
{
	sqlite_fault_set(fault, "", NULL, 0);
	return teardown(state);
}

#define S(f) cmocka_unit_test_setup_teardown(f, setup, teardown_cured)

int main(void)
{
	const struct CMUnitTest tests[] = {
		S(test_full_disk),
		S(test_for_some_time),
		S(test_hopeless),
		S(test_bracket),
		S(test_places_after_a_doubtful_commit),
	};

	return cmocka_run_group_tests_name("stalled", tests, make_fault, drop_fault);
}
