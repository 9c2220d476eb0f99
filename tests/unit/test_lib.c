/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_lib.c - steps through libmoment, embedded, with a RAM tier smaller than the state: the same
 * bits as the kernel in plain memory, whichever way a step is made; and what it refuses.
 */
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

#include "lib_fixture.h"

static void steps_equal_plain_memory(void **state)
{
	struct moment_session *s = open_in(*state, 0);
	struct model *m = model_new();
	struct moment_item items[TENSORS];
	uint64_t step;

	ok(moment_register(s, m->param, TENSORS));
	for (step = 1; step <= 7; step++)
		ok(moment_step(s, step, items, model_items(m, step, items), 0));
	model_check(s, m);
	assert_string_equal(moment_data_path(s), "embedded");
	assert_non_null(strstr(said, "6 parameters"));
	assert_non_null(strstr(said, "of disk reserved"));
	ok(moment_close(s));
	model_free(m);
}

static void no_hints_no_threads_no_difference(void **state)
{
	struct moment_session *s = open_in(*state, MOMENT_OPEN_NO_HINTS);
	struct model *m = model_new();
	struct moment_item items[TENSORS];
	struct moment_info info;
	uint64_t step;

	ok(moment_register(s, m->param, TENSORS));
	for (step = 1; step <= 3; step++)
		ok(moment_step(s, step, items, model_items(m, step, items), 0));
	model_check(s, m);
	ok(moment_get_info(s, &info));
	assert_int_equal(info.hints, 0);
	assert_int_equal(info.step, 3);
	ok(moment_close(s));
	model_free(m);
}

/* Hooks, in an order that changes from step to step, leaving some out. */
static void piece_by_piece(void **state)
{
	struct moment_session *s = open_in(*state, 0);
	struct model *m = model_new();
	uint64_t step;
	uint32_t i;

	ok(moment_register(s, m->param, TENSORS));
	for (step = 1; step <= 6; step++) {
		ok(moment_pre_step(s, step));
		for (i = 0; i < TENSORS; i++) {
			uint32_t t = step % 2 ? i : TENSORS - 1 - i;
			struct moment_item it;

			if (step % 3 == 0 && t == 4)
				continue;
			it = model_item(m, t, step);
			ok(moment_pre_update(s, m->param[t].handle));
			ok(moment_apply(s, &it));
			ok(moment_post_update(s, m->param[t].handle));
		}
		ok(moment_post_step(s, step, 0));
	}
	model_check(s, m);
	ok(moment_close(s));
	model_free(m);
}

/* The same Adam as a callback. */
static int adam_block(void *arg, const struct moment_block *b)
{
	struct moment_slice sl = {.p = b->p,
				  .g = b->g,
				  .m = b->state[MOMENT_ROLE_EXP_AVG],
				  .v = b->state[MOMENT_ROLE_EXP_AVG_SQ],
				  .numel = b->numel};

	(*(int *)arg)++;
	return moment_update(&adamw, b->step, &sl, 1, NULL);
}

static void any_update_as_a_callback(void **state)
{
	struct moment_session *s = open_in(*state, 0);
	struct model *m = model_new();
	struct moment_item items[TENSORS];
	uint64_t step;
	uint32_t t;
	int calls = 0;

	ok(moment_register(s, m->param, TENSORS));
	for (step = 1; step <= 3; step++) {
		model_items(m, step, items);
		for (t = 0; t < TENSORS; t++) {
			items[t].optim = NULL;
			items[t].fn = adam_block;
			items[t].arg = &calls;
		}
		ok(moment_step(s, step, items, TENSORS, 0));
	}
	model_check(s, m);
	/* 300000 x 4 bytes are 19 blocks of 64 KiB, 70001 are 5, the others one each but the empty
	 * one. */
	assert_int_equal(calls, 3 * (19 + 1 + 1 + 5 + 1));
	ok(moment_close(s));
	model_free(m);
}

static void kept_across_sessions(void **state)
{
	struct model *m = model_new();
	struct moment_item items[TENSORS];
	struct moment_session *s = open_in(*state, 0);
	uint64_t step, at = 0;
	uint32_t t;

	ok(moment_register(s, m->param, TENSORS));
	for (step = 1; step <= 3; step++)
		ok(moment_step(s, step, items, model_items(m, step, items), 0));
	ok(moment_commit(s, 1));
	ok(moment_committed_step(s, &at));
	assert_int_equal(at, 3);
	ok(moment_step(s, 4, items, model_items(m, 4, items), MOMENT_STEP_COMMIT));
	ok(moment_close(s)); /* which commits */

	s = open_in(*state, MOMENT_OPEN_RESUME);
	ok(moment_register(s, m->param, TENSORS));
	for (t = 0; t < TENSORS; t++) {
		assert_int_equal(m->param[t].found, 1);
		assert_int_equal(m->param[t].step, 4);
	}
	ok(moment_committed_step(s, &at));
	assert_int_equal(at, 4);
	ok(moment_step(s, 5, items, model_items(m, 5, items), 0));
	model_check(s, m);
	ok(moment_close(s));
	model_free(m);
}

static void stepped_state_is_not_taken_unasked(void **state)
{
	struct model *m = model_new();
	struct moment_item items[TENSORS];
	struct moment_session *s = open_in(*state, 0);
	float x = 1;
	uint32_t t;

	ok(moment_register(s, m->param, TENSORS));
	ok(moment_close(s));
	s = open_in(*state, 0); /* never stepped: nothing to lose */
	ok(moment_register(s, m->param, TENSORS));
	ok(moment_step(s, 1, items, model_items(m, 1, items), 0));
	ok(moment_close(s));

	s = open_in(*state, 0);
	refused(moment_register(s, m->param, TENSORS), -EEXIST, "resume");
	ok(moment_close(s));

	s = open_in(*state, MOMENT_OPEN_FRESH);
	ok(moment_register(s, m->param, 2));
	assert_non_null(strstr(said, "dropped the state of 4 parameters"));
	for (t = 0; t < 2; t++)
		assert_int_equal(m->param[t].step, 0);
	ok(moment_read_state(s, m->param[1].handle, MOMENT_ROLE_EXP_AVG, 0, 1, &x));
	assert_true(x == 0.0f);
	ok(moment_close(s));
	model_free(m);
}

static int count_listed(void *arg, const struct moment_param *p)
{
	assert_non_null(p->name);
	assert_int_equal(p->arrays, 3);
	(*(int *)arg)++;
	return 0;
}

static void note(void *arg, enum moment_difference kind, const char *name, const char *detail)
{
	char *text = arg;
	size_t n = strlen(text);

	snprintf(text + n, 1000 - n, "%d %s %s\n", kind, name, detail);
}

static void another_model_is_named(void **state)
{
	struct model *m = model_new();
	struct moment_item items[TENSORS];
	struct moment_session *s = open_in(*state, 0);
	uint64_t wrong[] = {128, 128};
	char text[1000] = "";
	int n = 0;

	ok(moment_register(s, m->param, TENSORS));
	ok(moment_step(s, 1, items, model_items(m, 1, items), 0));
	ok(moment_close(s));

	s = open_in(*state, MOMENT_OPEN_RESUME);
	ok(moment_list(s, count_listed, &n));
	assert_int_equal(n, TENSORS);
	m->param[2].ndim = 2;
	m->param[2].shape = wrong;
	m->param[4].arrays = MOMENT_ARRAY(MOMENT_ROLE_EXP_AVG);
	strcpy(m->name[5], "renamed");
	assert_int_equal(moment_compare(s, m->param, TENSORS, note, text), 4);
	assert_non_null(strstr(text, "3 layer.2.weight have 16384, want 128x128\n"));
	assert_non_null(strstr(
		text,
		"4 layer.4.weight have exp_avg float32, exp_avg_sq float32, want exp_avg float32\n"));
	assert_non_null(strstr(text, "1 renamed "));
	assert_non_null(strstr(text, "2 layer.5.weight "));
	refused(moment_register(s, m->param, TENSORS), -EINVAL,
		"layer.2.weight (have 16384, want 128x128)");
	m->param[2].ndim = 1;
	m->param[2].shape = &sizes[2];
	m->param[4].arrays = 0;
	refused(moment_register(s, m->param, TENSORS), -ENOENT, "missing: renamed");
	assert_non_null(strstr(moment_error(), "extra: layer.5.weight"));
	ok(moment_close(s));

	s = open_in(*state, MOMENT_OPEN_RESUME | MOMENT_OPEN_NEW_OK);
	ok(moment_register(s, m->param, TENSORS));
	assert_int_equal(m->param[5].found, 0);
	assert_int_equal(m->param[5].step, 0);
	assert_int_equal(m->param[0].step, 1);
	ok(moment_close(s));
	model_free(m);
}

static void rollback_returns_to_the_commit(void **state)
{
	struct model *m = model_new();
	struct moment_item items[TENSORS];
	struct moment_session *s = open_in(*state, 0);
	struct moment_info info;
	uint64_t before[TENSORS];
	float *m0 = malloc(sizes[0] * sizeof(float)), *got = malloc(sizes[0] * sizeof(float));

	ok(moment_register(s, m->param, TENSORS));
	ok(moment_step(s, 10, items, model_items(m, 1, items), 0));
	ok(moment_commit(s, 1));
	memcpy(before, m->steps, sizeof(before));
	memcpy(m0, m->want_m[0], sizes[0] * sizeof(float));
	ok(moment_step(s, 11, items, model_items(m, 2, items), 0));
	ok(moment_step(s, 12, items, model_items(m, 3, items), 0));
	ok(moment_rollback(s));
	ok(moment_get_info(s, &info));
	assert_int_equal(info.committed_step, 10);
	ok(moment_read_state(s, m->param[0].handle, MOMENT_ROLE_EXP_AVG, 0, sizes[0], got));
	same_floats(got, m0, sizes[0], "after rollback");
	ok(moment_param_step(s, m->param[0].handle, &before[0]));
	assert_int_equal(before[0], 1);
	ok(moment_step(s, 11, items, model_items(m, 4, items), 0));
	ok(moment_close(s));
	free(m0);
	free(got);
	model_free(m);
}

static int give_up(void *arg, const struct moment_block *b)
{
	int *left = arg;

	(void)b;
	return (*left)-- > 0 ? 0 : -ENOTSUP;
}

static void failing_inside_a_step_tears_it(void **state)
{
	struct model *m = model_new();
	struct moment_item items[TENSORS];
	struct moment_session *s = open_in(*state, 0);
	int left = 5;

	ok(moment_register(s, m->param, TENSORS));
	ok(moment_step(s, 1, items, model_items(m, 1, items), 0));
	ok(moment_commit(s, 1));
	items[0].optim = NULL;
	items[0].fn = give_up;
	items[0].arg = &left;
	refused(moment_step(s, 2, items, TENSORS, 0), -ENOTSUP, "layer.0.weight");
	refused(moment_step(s, 2, items, TENSORS, 0), -ESTALE, "torn");
	refused(moment_commit(s, 1), -ESTALE, "torn");
	ok(moment_rollback(s));
	model_check_state(s, m);
	ok(moment_close(s));
	model_free(m);
}

static void what_is_wrong_is_found_before_anything_changes(void **state)
{
	struct model *m = model_new();
	struct moment_item items[TENSORS], it;
	struct moment_session *s = open_in(*state, 0);
	struct moment_optim bad = adamw;
	struct moment_info info;
	uint64_t huge[] = {UINT64_MAX, 2};
	struct moment_param p = {.name = ""};

	refused(moment_register(s, &p, 1), -EINVAL, "without a name");
	p = (struct moment_param){.name = "x", .ndim = 2, .shape = huge};
	refused(moment_register(s, &p, 1), -EOVERFLOW, "x");
	p = (struct moment_param){.name = "x", .dtype = {MOMENT_F32, MOMENT_F16}};
	refused(moment_register(s, &p, 1), -EINVAL, "types of one size");
	ok(moment_register(s, m->param, TENSORS));
	refused(moment_register(s, m->param, 1), -EEXIST, "layer.0.weight is registered already");
	it = model_item(m, 0, 1);
	refused(moment_apply(s, &it), -EINVAL, "no step is open");
	refused(moment_post_step(s, 1, 0), -EINVAL, "no step is open");
	ok(moment_step(s, 1, items, model_items(m, 2, items),
		       0)); /* the first item's reference is ahead by one: */
	memset(m->want_m[0], 0, sizes[0] * 4);
	m->steps[0] = 1;

	items[2].param = 77;
	refused(moment_step(s, 2, items, TENSORS, 0), -EINVAL, "parameter 77 is not registered");
	it = items[2];
	items[2] = items[0];
	refused(moment_step(s, 2, items, TENSORS, 0), -EINVAL, "twice");
	items[2] = it;
	items[2].param = m->param[2].handle;
	items[4].g = NULL;
	refused(moment_step(s, 2, items, TENSORS, 0), -EINVAL,
		"layer.4.weight: no gradient");
	items[4].g = m->g[4];
	bad.beta1 = 1.5;
	items[4].optim = &bad;
	refused(moment_step(s, 2, items, TENSORS, 0), -EINVAL, "layer.4.weight");
	items[4].optim = &adamw;
	items[4].p_dtype = 9;
	refused(moment_step(s, 2, items, TENSORS, 0), -EINVAL, "unknown type");
	items[4].p_dtype = MOMENT_F32;
	m->g[4][70000] = (float)1e39; /* infinity */
	refused(moment_step(s, 2, items, TENSORS, MOMENT_STEP_FINITE), -EDOM, "layer.4.weight");
	m->g[4][70000] = 1;
	ok(moment_pre_step(s, 2));
	refused(moment_pre_step(s, 3), -EBUSY, "step 2 is open");
	/* Asked for, not waited for: nobody else would end the step. */
	ok(moment_commit(s, 0));
	refused(moment_commit(s, 1), -EBUSY, "step 2 is open");
	refused(moment_post_step(s, 3, 0), -EINVAL, "step 2 is open, not 3");
	refused(moment_remove(s, 0), -EBUSY, "open");
	ok(moment_abort_step(s));
	ok(moment_get_info(s, &info));
	assert_int_equal(info.step, 1); /* nothing of all that left a trace */
	assert_int_equal(info.open_step, MOMENT_STEP_NONE);
	ok(moment_step(s, 2, items, TENSORS, 0));
	ok(moment_close(s));
	model_free(m);
}

static void content_can_be_read_replaced_and_mapped(void **state)
{
	struct model *m = model_new();
	struct moment_session *s = open_in(*state, 0);
	float *x = malloc(sizes[0] * sizeof(float)), *y = malloc(sizes[0] * sizeof(float));
	const void *map;
	size_t bytes;
	uint64_t step;

	ok(moment_register(s, m->param, TENSORS));
	fill(x, sizes[0], 9, 9);
	ok(moment_write_state(s, m->param[0].handle, MOMENT_ROLE_EXP_AVG, 0, sizes[0], x));
	ok(moment_write_state(s, m->param[0].handle, MOMENT_ROLE_EXP_AVG, 16380, 9, x));
	memcpy(x + 16380, x, 9 * sizeof(float));
	ok(moment_read_state(s, m->param[0].handle, MOMENT_ROLE_EXP_AVG, 0, sizes[0], y));
	same_floats(y, x, sizes[0], "written and read");
	ok(moment_read_state(s, m->param[0].handle, MOMENT_ROLE_EXP_AVG, 16383, 3, y));
	same_floats(y, x + 16383, 3, "across a block's end");
	ok(moment_map_state(s, m->param[0].handle, MOMENT_ROLE_EXP_AVG, &map, &bytes));
	assert_int_equal(bytes, sizes[0] * sizeof(float));
	same_floats(map, x, sizes[0], "mapped");
	ok(moment_unmap_state(map, bytes));
	ok(moment_map_state(s, m->param[3].handle, MOMENT_ROLE_EXP_AVG, &map, &bytes));
	assert_int_equal(bytes, 0);
	assert_non_null(map);
	refused(moment_read_state(s, m->param[0].handle, MOMENT_ROLE_MASTER, 0, 1, y), -EINVAL,
		"no array");
	refused(moment_read_state(s, m->param[0].handle, 0, sizes[0], 1, y), -EINVAL, "elements");
	refused(moment_read_state(s, m->param[0].handle, 0, UINT64_MAX, 2, y), -EINVAL, "elements");
	ok(moment_set_param_step(s, m->param[0].handle, 16777217));
	ok(moment_param_step(s, m->param[0].handle, &step));
	assert_int_equal(step, 16777217);
	ok(moment_close(s));

	s = open_in(*state, MOMENT_OPEN_RESUME);
	ok(moment_register(s, m->param, TENSORS));
	assert_int_equal(m->param[0].step, 16777217);
	ok(moment_read_state(s, m->param[0].handle, MOMENT_ROLE_EXP_AVG, 0, sizes[0], y));
	same_floats(y, x, sizes[0], "after a new start");
	ok(moment_close(s));

	s = open_in(*state, MOMENT_OPEN_READONLY);
	ok(moment_register(s, m->param, TENSORS));
	ok(moment_read_state(s, m->param[0].handle, MOMENT_ROLE_EXP_AVG, 0, sizes[0], y));
	same_floats(y, x, sizes[0], "reading only");
	refused(moment_pre_step(s, 1), -EROFS, "look only");
	ok(moment_close(s));
	free(x);
	free(y);
	model_free(m);
}

static void removed_parameters_are_gone(void **state)
{
	struct model *m = model_new();
	struct moment_item items[TENSORS];
	struct moment_session *s = open_in(*state, 0);
	uint32_t old;
	float x;

	ok(moment_register(s, m->param, TENSORS));
	assert_int_equal(moment_find(s, "layer.2.weight"), m->param[2].handle);
	old = m->param[2].handle;
	ok(moment_step(s, 1, items, model_items(m, 1, items), 0));
	ok(moment_remove(s, old));
	refused(moment_find(s, "layer.2.weight"), -ENOENT, "layer.2.weight");
	refused(moment_read_state(s, old, 0, 0, 1, &x), -EINVAL, "not registered");
	ok(moment_register(s, &m->param[2], 1)); /* the name is free; it starts at zero */
	assert_int_not_equal(m->param[2].handle, old);
	assert_int_equal(m->param[2].step, 0);
	ok(moment_read_state(s, m->param[2].handle, 0, 0, 1, &x));
	assert_true(x == 0.0f);
	m->steps[2] = 0;
	memset(m->want_m[2], 0, sizes[2] * 4);
	memset(m->want_v[2], 0, sizes[2] * 4);
	ok(moment_step(s, 2, items, model_items(m, 2, items), 0));
	model_check(s, m);
	ok(moment_close(s));
	model_free(m);
}

static void a_forked_child_is_turned_away(void **state)
{
	struct model *m = model_new();
	struct moment_item items[TENSORS];
	struct moment_session *s = open_in(*state, 0), *again;
	int status, waited;
	pid_t child, lives_on;

	ok(moment_register(s, m->param, TENSORS));
	ok(moment_step(s, 1, items, model_items(m, 1, items), 0));
	child = fork();
	if (child == 0) {
		uint64_t step;
		int bad = moment_step(s, 2, items, 0, 0) != -EINVAL ||
			  moment_commit(s, 1) != -EINVAL ||
			  moment_committed_step(s, &step) != -EINVAL ||
			  !strstr(moment_error(), "forked") || moment_close(s) != 0;
#ifdef __SANITIZE_ADDRESS__
		_exit(bad); /* what the engine's threads have under way seems leaked without them */
#endif
		model_free(m);
		exit(bad); /* with all exit handlers */
	}
	waited = (int)waitpid(child, &status, 0);
	assert_int_equal(waited, child);
	assert_int_equal(status, 0);
	lives_on = fork();
	if (lives_on == 0) {
		pause();
		_exit(0);
	}
	ok(moment_step(s, 2, items, model_items(m, 2, items), 0));
	model_check(s, m);
	ok(moment_close(s));
	again = open_in(*state,
			MOMENT_OPEN_RESUME); /* the child that lives on does not hold the backing */
	ok(moment_close(again));
	kill(lives_on, SIGKILL);
	waitpid(lives_on, &status, 0);
	model_free(m);
}

static volatile sig_atomic_t alarms, alarm_inside;
static volatile sig_atomic_t inside;

static void on_alarm(int sig)
{
	(void)sig;
	alarms++;
	alarm_inside += inside;
}

static int raise_inside(void *arg, const struct moment_block *b)
{
	(void)arg;
	(void)b;
	inside = 1;
	kill(getpid(), SIGALRM);
	usleep(1000);
	inside = 0;
	return 0;
}

static void signals_wait_for_the_whole_step(void **state)
{
	struct model *m = model_new();
	struct moment_session *s = open_in(*state, 0);
	struct moment_item it = {.fn = raise_inside};

	signal(SIGALRM, on_alarm);
	ok(moment_register(s, m->param, TENSORS));
	it.param = m->param[0].handle;
	it.p = m->p[0];
	it.p_numel = sizes[0];
	ok(moment_step(s, 1, &it, 1, 0));
	signal(SIGALRM, SIG_DFL);
	assert_int_equal(alarms,
			 1); /* 19 were sent; they pend as one, and came when the step was over */
	assert_int_equal(alarm_inside, 0);
	ok(moment_close(s));
	model_free(m);
}

static void a_temporary_backing_goes_with_its_session(void **state)
{
	struct moment_open_opts o = opts_for(*state, 0);
	struct model *m = model_new();
	struct moment_item items[TENSORS];
	struct moment_session *s;
	struct moment_info info;
	struct stat st;
	char dir[4096], stale[4200];
	pid_t child;
	int status;

	o.backing = NULL;
	o.temp_dir = *state;
	child = fork(); /* one that crashes leaves its backing behind */
	if (child == 0) {
		if (moment_open(&o, &s) == 0 && moment_get_info(s, &info) == 0 && info.temporary)
			kill(getpid(), SIGKILL);
		_exit(1);
	}
	waitpid(child, &status, 0);
	assert_true(WIFSIGNALED(status));
	snprintf(stale, sizeof(stale), "ls -d %s/momentfs-tmp-* >/dev/null 2>&1", (char *)*state);
	assert_int_equal(system(stale), 0);

	ok(moment_open(&o, &s));
	ok(moment_register(s, m->param, TENSORS));
	ok(moment_step(s, 1, items, model_items(m, 1, items), 0));
	model_check(s, m);
	ok(moment_get_info(s, &info));
	assert_int_equal(info.temporary, 1);
	snprintf(dir, sizeof(dir), "%s", info.backing);
	assert_int_equal(stat(dir, &st), 0);
	snprintf(stale, sizeof(stale), "test $(ls -d %s/momentfs-tmp-* | wc -l) = 1",
		 (char *)*state);
	assert_int_equal(system(stale), 0); /* the crashed one's was swept */
	ok(moment_close(s));
	assert_int_equal(stat(dir, &st), -1);
	model_free(m);
}

static void tiers(void **state)
{
	struct model *m = model_new();
	struct moment_item items[TENSORS];
	struct moment_session *s = open_in(*state, 0);
	struct moment_param large = {.name = "large", .ndim = 1, .tier = MOMENT_TIER_RAM};
	uint64_t n = 1 << 20, step;

	large.shape = &n; /* 8 MiB of state to be kept in a tier of 4 */
	refused(moment_register(s, &large, 1), -ENOMEM, "missing");
	m->param[2].tier = m->param[4].tier = MOMENT_TIER_RAM;
	m->param[0].tier = MOMENT_TIER_NVME;
	ok(moment_register(s, m->param, TENSORS));
	for (step = 1; step <= 4; step++)
		ok(moment_step(s, step, items, model_items(m, step, items), 0));
	model_check(s, m);
	ok(moment_close(s));
	model_free(m);
}

static void wrong_options(void **state)
{
	struct moment_open_opts o = opts_for(*state, 0);
	struct moment_session *s = open_in(*state, 0), *t;
	char path[4096];

	refused(moment_open(&o, &t), -EBUSY, "in this process");
	ok(moment_close(s));
	o.size = 8;
	refused(moment_open(&o, &t), -EINVAL, "size is 8");
	o = opts_for(*state, MOMENT_OPEN_RESUME | MOMENT_OPEN_FRESH);
	refused(moment_open(&o, &t), -EINVAL, "exclude");
	o = opts_for(*state, 0);
	o.mount = "/";
	refused(moment_open(&o, &t), -EINVAL, "not both");
	o.backing = NULL;
	o.data = NULL;
	refused(moment_open(&o, &t), -ENOENT, "not a momentfs mount");
	o = opts_for(*state, 0);
	o.data = "carrier pigeon";
	refused(moment_open(&o, &t), -EINVAL, "session, mmap, embedded");
	o.data = "session";
	refused(moment_open(&o, &t), -ENOENT, "no daemon serves");
	o.data = "mmap";
	refused(moment_open(&o, &t), -ENOENT, "not mounted");
	snprintf(path, sizeof(path), "%s/file", (char *)*state);
	fclose(fopen(path, "w"));
	o.data = NULL;
	o.backing = path;
	refused(moment_open(&o, &t), -ENOTDIR, path);
	assert_int_equal(moment_close(NULL), 0);
	refused(moment_commit(NULL, 1), -EINVAL, "no session");
}

static void *commit_often(void *arg)
{
	int i;

	for (i = 0; i < 30; i++)
		ok(moment_commit(arg, i % 2));
	return NULL;
}

static void other_threads_wait_their_turn(void **state)
{
	struct model *m = model_new();
	struct moment_item items[TENSORS];
	struct moment_session *s = open_in(*state, 0);
	pthread_t thread;
	uint64_t step;

	ok(moment_register(s, m->param, TENSORS));
	assert_int_equal(pthread_create(&thread, NULL, commit_often, s), 0);
	for (step = 1; step <= 10; step++)
		ok(moment_step(s, step, items, model_items(m, step, items), 0));
	pthread_join(thread, NULL);
	model_check(s, m);
	ok(moment_close(s));
	model_free(m);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_folder, drop_folder)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(steps_equal_plain_memory),
		TEST(no_hints_no_threads_no_difference),
		TEST(piece_by_piece),
		TEST(any_update_as_a_callback),
		TEST(kept_across_sessions),
		TEST(stepped_state_is_not_taken_unasked),
		TEST(another_model_is_named),
		TEST(rollback_returns_to_the_commit),
		TEST(failing_inside_a_step_tears_it),
		TEST(what_is_wrong_is_found_before_anything_changes),
		TEST(content_can_be_read_replaced_and_mapped),
		TEST(removed_parameters_are_gone),
		TEST(a_forked_child_is_turned_away),
		TEST(signals_wait_for_the_whole_step),
		TEST(a_temporary_backing_goes_with_its_session),
		TEST(tiers),
		TEST(wrong_options),
		TEST(other_threads_wait_their_turn),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
