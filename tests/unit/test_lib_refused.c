/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_lib_refused.c - what a step is handed is compared with what was registered before anything
 * is touched: a call with bad arguments is refused in words, and weights, state, update counts and
 * labels stay as they were, whether it was a step of its own or a part of an open one.
 */
#include "lib_fixture.h"

#define N 40000u /* elements: more than two blocks */

enum { PLAIN, SIXTEEN, WIDE, NOTHING, PARAMS };

/*
 * Four parameters and what is handed over for them in a step: fp32 weights, bf16 weights with a
 * master, arrays of float64 for a function, and no elements at all.
 */
struct bench {
	struct moment_session *s;
	struct moment_param param[PARAMS];
	struct moment_item item[PARAMS];
	struct moment_optim optim[PARAMS];
	struct moment_extras extras[PARAMS];
	float *p, *g;
	uint16_t *p16;
};

static int add_one(void *arg, const struct moment_block *b)
{
	double *x = b->state[MOMENT_ROLE_EXP_AVG];
	size_t i;

	(void)arg;
	for (i = 0; i < b->numel; i++)
		x[i] += 1;
	return 0;
}

/* What a step should bring; the changes of a case are made to this. */
static void bench_items(struct bench *b)
{
	uint32_t i;

	for (i = 0; i < PARAMS; i++) {
		b->optim[i] = adamw;
		b->extras[i] = (struct moment_extras){.only = MOMENT_EXTRAS_ALL};
		b->item[i] = (struct moment_item){.param = b->param[i].handle,
						  .p = b->p,
						  .g = b->g,
						  .p_numel = b->param[i].numel,
						  .g_numel = b->param[i].numel,
						  .optim = &b->optim[i],
						  .extras = &b->extras[i]};
	}
	b->item[SIXTEEN].p = b->p16;
	b->item[SIXTEEN].p_dtype = MOMENT_BF16;
	b->item[WIDE].optim = NULL;
	b->item[WIDE].extras = NULL;
	b->item[WIDE].fn = add_one;
	b->item[WIDE].p = NULL; /* a function may do without weights */
	b->item[WIDE].p_numel = 0;
	b->item[NOTHING].p = NULL;
	b->item[NOTHING].g = NULL;
}

static void bench_open(struct bench *b, const char *dir)
{
	static const uint64_t shape = N, none = 0;
	uint32_t moments = MOMENT_ARRAY(MOMENT_ROLE_EXP_AVG) | MOMENT_ARRAY(MOMENT_ROLE_EXP_AVG_SQ);

	*b = (struct bench){.s = open_in(dir, 0)};
	b->param[PLAIN] = (struct moment_param){.name = "plain", .ndim = 1, .shape = &shape};
	b->param[SIXTEEN] = (struct moment_param){
		.name = "sixteen",
		.ndim = 1,
		.shape = &shape,
		.arrays = moments | MOMENT_ARRAY(MOMENT_ROLE_MASTER)};
	b->param[WIDE] = (struct moment_param){.name = "wide",
					       .ndim = 1,
					       .shape = &shape,
					       .arrays = MOMENT_ARRAY(MOMENT_ROLE_EXP_AVG),
					       .dtype = {MOMENT_F64}};
	b->param[NOTHING] = (struct moment_param){.name = "nothing", .ndim = 1, .shape = &none};
	ok(moment_register(b->s, b->param, PARAMS));
	b->p = calloc(N, sizeof(float));
	b->g = calloc(N, sizeof(float));
	b->p16 = calloc(N, sizeof(uint16_t));
	fill(b->p, N, 1, 0);
	fill(b->g, N, 2, 0);
	bench_items(b);
	ok(moment_step(b->s, 7, b->item, PARAMS, 0));
}

static void bench_close(struct bench *b)
{
	ok(moment_close(b->s));
	free(b->p);
	free(b->g);
	free(b->p16);
}

/* All that a refused call must leave alone. */
struct picture {
	float p[N], m[2][N], v[2][N], master[N];
	double wide[N];
	uint16_t p16[N];
	uint64_t count[PARAMS], label, committed, open;
};

static struct picture *picture_of(struct bench *b)
{
	struct picture *x = calloc(1, sizeof(*x));
	struct moment_info info;
	uint32_t i;

	memcpy(x->p, b->p, sizeof(x->p));
	memcpy(x->p16, b->p16, sizeof(x->p16));
	for (i = PLAIN; i <= SIXTEEN; i++) {
		ok(moment_read_state(b->s, b->param[i].handle, MOMENT_ROLE_EXP_AVG, 0, N, x->m[i]));
		ok(moment_read_state(b->s, b->param[i].handle, MOMENT_ROLE_EXP_AVG_SQ, 0, N,
				     x->v[i]));
	}
	ok(moment_read_state(b->s, b->param[SIXTEEN].handle, MOMENT_ROLE_MASTER, 0, N, x->master));
	ok(moment_read_state(b->s, b->param[WIDE].handle, MOMENT_ROLE_EXP_AVG, 0, N, x->wide));
	for (i = 0; i < PARAMS; i++)
		ok(moment_param_step(b->s, b->param[i].handle, &x->count[i]));
	ok(moment_get_info(b->s, &info));
	x->label = info.step;
	x->committed = info.committed_step;
	x->open = info.open_step;
	return x;
}

static void same_picture(struct bench *b, const struct picture *before, const char *what)
{
	struct picture *now = picture_of(b);

	if (memcmp(now, before, sizeof(*now)))
		fail_msg("%s: the refused call changed something (label %llu, open %lld)", what,
			 (unsigned long long)now->label, (long long)now->open);
	free(now);
}

/*
 * A change to what is handed over, and words of its refusal. The change is to the last but one of
 * the items, or to all, so that others are in order before it.
 */
struct wrong {
	const char *what, *said;
	void (*change)(struct bench *b);
	uint32_t item;
};

#define WRONG(name, index, ...) \
	static void name(struct bench *b) \
	{ \
		struct moment_item *it = &b->item[index]; \
\
		(void)it; \
		__VA_ARGS__; \
	}

WRONG(fewer_weights, PLAIN, it->p_numel = 2048)
WRONG(more_weights, PLAIN, it->p_numel = 2 * N)
WRONG(no_count, PLAIN, it->p_numel = 0)
WRONG(fewer_gradients, SIXTEEN, it->g_numel = N - 1)
WRONG(null_weights, PLAIN, it->p = NULL)
WRONG(null_gradient, PLAIN, it->g = NULL)
WRONG(wide_gradient_count, WIDE, it->g_numel = 5)
WRONG(wide_count_alone, WIDE, it->p_numel = N + 1)
WRONG(wide_to_a_kernel, WIDE, it->fn = NULL; it->optim = &b->optim[WIDE]; it->p = b->p; it->p_numel = N)
WRONG(full_for_nothing, NOTHING, it->p = b->p; it->p_numel = N)
WRONG(float_weights_with_master, SIXTEEN, it->p = b->p; it->p_dtype = MOMENT_F32)
WRONG(float64_weights, PLAIN, it->p_dtype = MOMENT_F64)
WRONG(unknown_type, PLAIN, it->g_dtype = 9)
WRONG(unknown_flag, PLAIN, it->flags = 1)
WRONG(no_updater, PLAIN, it->optim = NULL)
WRONG(two_updaters, PLAIN, it->fn = add_one)
WRONG(unknown_handle, PLAIN, it->param = 77)
WRONG(unknown_extras, PLAIN, b->extras[PLAIN].only = 9)
WRONG(amsgrad, PLAIN, b->optim[PLAIN].flags |= MOMENT_AMSGRAD)
WRONG(foreign_flag, PLAIN, b->optim[PLAIN].flags |= MOMENT_NESTEROV)
WRONG(unknown_kind, PLAIN, b->optim[PLAIN].kind = 9)
WRONG(subnormal_eps, PLAIN, b->optim[PLAIN].eps = 1e-40)
WRONG(negative_eps, PLAIN, b->optim[PLAIN].eps = -1e-8)
WRONG(beta_of_one, PLAIN, b->optim[PLAIN].beta2 = 1)
WRONG(endless_lr, PLAIN, b->optim[PLAIN].lr = 1e308 * 10)
WRONG(negative_decay, PLAIN, b->optim[PLAIN].weight_decay = -1)
WRONG(no_such_count, PLAIN, it->step = UINT64_MAX)
WRONG(no_scale, PLAIN, b->optim[PLAIN].grad_scale = -2)

static const struct wrong wrongs[] = {
	{"fewer weights", "plain was registered with 40000 elements, and its weights came with 2048",
	 fewer_weights, PLAIN},
	{"more weights", "its weights came with 80000", more_weights, PLAIN},
	{"no count", "its weights came with 0", no_count, PLAIN},
	{"fewer gradients", "sixteen was registered with 40000 elements, and its gradient came with 39999",
	 fewer_gradients, SIXTEEN},
	{"NULL weights", "plain: no weights", null_weights, PLAIN},
	{"NULL gradient", "plain: no gradient", null_gradient, PLAIN},
	{"a function's gradient", "wide was registered with 40000 elements, and its gradient came with 5",
	 wide_gradient_count, WIDE},
	{"a function's count", "its weights came with 40001", wide_count_alone, WIDE},
	{"float64 state", "wide: the kernels update float32 state only", wide_to_a_kernel, WIDE},
	{"elements for none", "nothing was registered with 0 elements, and its weights came with 40000",
	 full_for_nothing, NOTHING},
	{"float32 with a master", "sixteen: the optimizer cannot do this: float32 weights have no master",
	 float_weights_with_master, SIXTEEN},
	{"float64 weights", "float64 weights and a float32 gradient", float64_weights, PLAIN},
	{"an unknown type", "plain: unknown type", unknown_type, PLAIN},
	{"an unknown flag", "plain: unknown flags", unknown_flag, PLAIN},
	{"no updater", "either an optimizer or a function", no_updater, PLAIN},
	{"two updaters", "either an optimizer or a function", two_updaters, PLAIN},
	{"an unknown handle", "parameter 77 is not registered", unknown_handle, PLAIN},
	{"unknown extras", "plain: the optimizer cannot do this: extras.only", unknown_extras, PLAIN},
	{"amsgrad", "amsgrad needs max_exp_avg_sq", amsgrad, PLAIN},
	{"a foreign flag", "a flag that this kind of optimizer does not have", foreign_flag, PLAIN},
	{"an unknown kind", "no such kind", unknown_kind, PLAIN},
	{"a subnormal eps", "eps is neither 0 nor from 2^-126", subnormal_eps, PLAIN},
	{"a negative eps", "eps -1e-08", negative_eps, PLAIN},
	{"a beta of 1", "beta2 1,", beta_of_one, PLAIN},
	{"an infinite lr", "lr is not finite", endless_lr, PLAIN},
	{"a negative decay", "weight_decay -1", negative_decay, PLAIN},
	{"a count that is none", "plain: this step count means 'none'", no_such_count, PLAIN},
	{"a negative scale", "grad_scale -2", no_scale, PLAIN},
};

static void a_refused_step_leaves_everything_as_it_was(void **state)
{
	struct picture *before;
	struct bench b;
	size_t i;

	bench_open(&b, *state);
	before = picture_of(&b);
	for (i = 0; i < sizeof(wrongs) / sizeof(wrongs[0]); i++) {
		struct moment_item order[PARAMS];
		uint32_t k, n = 0;

		bench_items(&b);
		wrongs[i].change(&b);
		for (k = 0; k < PARAMS; k++) /* the wrong one comes last */
			if (k != wrongs[i].item)
				order[n++] = b.item[k];
		order[n++] = b.item[wrongs[i].item];
		refused(moment_step(b.s, 8, order, n, MOMENT_STEP_COMMIT), -EINVAL, wrongs[i].said);
		same_picture(&b, before, wrongs[i].what);
	}
	bench_items(&b);
	refused(moment_step(b.s, 8, NULL, 1, 0), -EINVAL, "no items");
	refused(moment_step(b.s, 8, b.item, PARAMS, 8), -EINVAL, "unknown flags");
	refused(moment_step(b.s, UINT64_MAX, b.item, PARAMS, 0), -EINVAL, "means 'none'");
	b.item[1] = b.item[0];
	refused(moment_step(b.s, 8, b.item, PARAMS, 0), -EINVAL, "plain is in the list twice");
	same_picture(&b, before, "the call itself");
	bench_items(&b);
	ok(moment_step(b.s, 8, b.item, PARAMS, 0));
	free(before);
	bench_close(&b);
}

/* What was refused inside a step in which something was updated already: that step goes on. */
static void a_refused_part_leaves_the_open_step_whole(void **state)
{
	struct picture *before;
	struct bench b;
	size_t i;
	float x;

	bench_open(&b, *state);
	ok(moment_pre_step(b.s, 8));
	ok(moment_apply(b.s, &b.item[PLAIN]));
	before = picture_of(&b);
	for (i = 0; i < sizeof(wrongs) / sizeof(wrongs[0]); i++) {
		bench_items(&b);
		wrongs[i].change(&b);
		refused(moment_apply(b.s, &b.item[wrongs[i].item]), -EINVAL, wrongs[i].said);
	}
	bench_items(&b);
	refused(moment_apply(b.s, NULL), -EINVAL, "no items");
	refused(moment_step(b.s, 9, b.item, PARAMS, 0), -EBUSY, "step 8 is open");
	refused(moment_pre_update(b.s, 77), -EINVAL, "77");
	refused(moment_post_update(b.s, 77), -EINVAL, "77");
	refused(moment_write_state(b.s, b.param[PLAIN].handle, MOMENT_ROLE_EXP_AVG, N, 1, &x),
		-EINVAL, "elements");
	refused(moment_write_state(b.s, b.param[PLAIN].handle, MOMENT_ROLE_EXP_AVG, 0, 1, NULL),
		-EINVAL, "no buffer");
	refused(moment_read_state(b.s, b.param[PLAIN].handle, MOMENT_ROLE_EXP_AVG, 0, 1, NULL),
		-EINVAL, "no buffer");
	refused(moment_set_param_step(b.s, 77, 3), -EINVAL, "77");
	refused(moment_set_param_step(b.s, b.param[PLAIN].handle, UINT64_MAX), -EINVAL, "'none'");
	refused(moment_post_step(b.s, 8, MOMENT_STEP_FINITE), -EINVAL, "step 8 is still open");
	refused(moment_post_step(b.s, 9, 0), -EINVAL, "step 8 is open, not 9");
	same_picture(&b, before, "inside a step");
	ok(moment_apply(b.s, &b.item[SIXTEEN]));
	ok(moment_post_step(b.s, 8, 0));
	ok(moment_commit(b.s, 1));
	free(before);
	bench_close(&b);
}

/* eps 0 is torch's, and the smallest normal number is exact. */
static void the_smallest_eps_that_counts_is_taken(void **state)
{
	struct bench b;

	bench_open(&b, *state);
	b.optim[PLAIN].eps = 0x1p-126;
	ok(moment_step(b.s, 8, b.item, PARAMS, 0));
	b.optim[PLAIN].eps = 0;
	ok(moment_step(b.s, 9, b.item, PARAMS, 0));
	bench_close(&b);
}

/* As the struct was before items had counts: what follows would be misread, so nothing follows. */
static void a_program_built_with_other_structs_is_refused(void **state)
{
	struct moment_open_opts o = opts_for(*state, 0);
	struct moment_session *s;

	o.size = offsetof(struct moment_open_opts, reserved2);
	refused(moment_open(&o, &s), -EINVAL, "build the program with this library's moment.h");
	o.size = sizeof(o) + 8;
	refused(moment_open(&o, &s), -EINVAL, "moment_open_opts.size");
}

static void resuming_tells_of_which_step_the_state_is(void **state)
{
	struct model *m = model_new();
	struct moment_item items[TENSORS];
	struct moment_session *s = open_in(*state, 0);
	uint64_t step;

	ok(moment_register(s, m->param, TENSORS));
	assert_null(strstr(said, "of state of step"));
	ok(moment_step(s, 41, items, model_items(m, 1, items), 0));
	ok(moment_close(s));

	said[0] = 0;
	s = open_in(*state, MOMENT_OPEN_RESUME);
	ok(moment_register(s, m->param, 2));
	assert_non_null(strstr(said, "2 parameters"));
	assert_non_null(strstr(said, "of state of step 41 on"));
	ok(moment_step(s, 42, items, 2, 0));
	said[0] = 0;
	ok(moment_register(s, &m->param[2], 1)); /* later ones: the step that it is now */
	assert_non_null(strstr(said, "of state of step 42 on"));
	ok(moment_close(s));

	/* A fresh start drops the label with the state. */
	said[0] = 0;
	s = open_in(*state, MOMENT_OPEN_FRESH);
	ok(moment_register(s, m->param, TENSORS));
	assert_null(strstr(said, "of state of step"));
	ok(moment_committed_step(s, &step));
	assert_int_equal(step, 0);
	ok(moment_close(s));
	said[0] = 0;
	s = open_in(*state, MOMENT_OPEN_RESUME);
	ok(moment_register(s, m->param, TENSORS));
	assert_non_null(strstr(said, "of state of step 0 on"));
	ok(moment_close(s));
	model_free(m);
}

static void last_is(struct moment_session *s, uint64_t want)
{
	uint64_t step;

	ok(moment_last_step(s, &step));
	assert_int_equal(step, want);
}

/* Nobody has to keep a number beside the session's own. */
static void the_session_numbers_its_steps(void **state)
{
	struct model *m = model_new();
	struct moment_item items[TENSORS];
	struct moment_session *s = open_in(*state, 0);

	ok(moment_register(s, m->param, TENSORS));
	last_is(s, MOMENT_STEP_NONE);
	ok(moment_step(s, MOMENT_STEP_NEXT, items, model_items(m, 1, items), 0));
	last_is(s, 1);
	ok(moment_commit(s, 1));
	ok(moment_pre_step(s, MOMENT_STEP_NEXT));
	last_is(s, 1);
	ok(moment_abort_step(s));
	last_is(s, 1);
	ok(moment_pre_step(s, MOMENT_STEP_NEXT));
	refused(moment_post_step(s, 3, 0), -EINVAL, "step 2 is open, not 3");
	ok(moment_post_step(s, MOMENT_STEP_NEXT, 0));
	last_is(s, 2);
	ok(moment_set_param_step(s, m->param[0].handle, 7)); /* a small step of its own */
	last_is(s, 2);
	ok(moment_step(s, 40, items, model_items(m, 2, items), 0));
	ok(moment_step(s, MOMENT_STEP_NEXT, items, model_items(m, 3, items), 0));
	last_is(s, 41);
	ok(moment_rollback(s));
	last_is(s, 1);
	ok(moment_close(s));

	s = open_in(*state, MOMENT_OPEN_RESUME);
	last_is(s, 1);
	ok(moment_close(s));
	s = open_in(*state, MOMENT_OPEN_FRESH);
	last_is(s, MOMENT_STEP_NONE);
	ok(moment_close(s));
	model_free(m);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_folder, drop_folder)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(a_refused_step_leaves_everything_as_it_was),
		TEST(a_refused_part_leaves_the_open_step_whole),
		TEST(the_smallest_eps_that_counts_is_taken),
		TEST(a_program_built_with_other_structs_is_refused),
		TEST(resuming_tells_of_which_step_the_state_is),
		TEST(the_session_numbers_its_steps),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
