/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_scale.c - what a piece of work costs does not grow with what else there is. Work is counted,
 * in nodes of the policy that are looked at and in entries of a table; time would depend on who
 * else uses the machine.
 */
#include "lib/index.h"
#include "marks.h"
#include "session_fixture.h"

#define UNIT 4096u

/* In place of the fixture's: a tier of this many blocks. */
static void open_tier(uint64_t blocks)
{
	struct engine_opts o = {.ram = blocks * BLOCK,
				.block = BLOCK,
				.commit_seconds = ENGINE_COMMIT_OFF,
				.holder = "test_scale"};
	char err[1024];

	stop(false);
	if (engine_open(dir, &o, &e, err, sizeof(err)))
		fail_msg("%s", err);
	attach(&w);
}

static uint64_t make_file(const char *name, uint64_t bytes)
{
	static char data[BLOCK];
	struct ns_attr a;

	assert_int_equal(ns_create(engine_ns(e), NS_ROOT, name, 0600, 0, 0, true, &a), 0);
	for (uint64_t at = 0; at < bytes; at += sizeof(data)) {
		uint64_t len = min_u64(bytes - at, sizeof(data));

		assert_int_equal(engine_pwrite(e, a.ino, data, len, at), (int64_t)len);
	}
	return a.ino;
}

/* Nodes looked at in a read of 4 KiB that hits, in a full tier with n small blocks. */
static uint64_t visits_of_a_read(unsigned int n)
{
	uint64_t ino = 0, before;
	char name[32], buf[UNIT];

	open_tier(256);
	for (unsigned int i = 0; i < n; i++) {
		snprintf(name, sizeof(name), "small%u", i);
		ino = make_file(name, UNIT);
	}
	make_file("large", 256ull * BLOCK);
	assert_int_equal(engine_call(e, ENGINE_SYNC, 0, 0, 0, 0), 0);
	before = marks_visits(e);
	for (int i = 0; i < 100; i++)
		assert_int_equal(engine_pread(e, ino, buf, sizeof(buf), 0), UNIT);
	marks_check(e); /* walks: after the count */
	return (marks_visits(e) - before) / 100;
}

static void a_read_that_hits_costs_the_same_beside_many_blocks(void **state)
{
	(void)state;
	/* A few ways from a leaf to the root; a walk over the blocks would be 1,000 and more. */
	assert_in_range(visits_of_a_read(50), 1, 300);
	teardown(NULL);
	setup(NULL);
	assert_in_range(visits_of_a_read(1000), 1, 300);
}

/* Small parameters [first, first + n), each of two files of one small block. */
static void lease(uint32_t first, uint32_t n, bool take)
{
	wire_adv_begin(&w);
	for (uint32_t i = 2 * first; i < 2 * (first + n); i++)
		wire_adv_add(&w, take,
			     (struct moment_range){i, 0, 1, take ? MOMENT_RANGE_WRITE : 0});
	assert_int_equal(wire_call(&w), 0);
}

/* Nodes looked at for each block in a step over n parameters that the tier does not hold. */
static uint64_t visits_of_a_step(uint32_t n)
{
	char name[32];
	uint64_t before;

	open_tier(24);
	assert_int_equal(wire_hello(&w, 0), 0);
	for (uint32_t i = 0; i < n; i++) {
		struct wire_param p;

		snprintf(name, sizeof(name), "p%u", i);
		p = vec(name, 16);
		if (i % 100 == 0)
			wire_reg_begin(&w, 0);
		wire_reg_add(&w, &p);
		if (i % 100 == 99)
			assert_int_equal(wire_call(&w), 0);
	}
	before = 0;
	for (uint64_t step = 1; step <= 2; step++) {
		before = marks_visits(e);
		assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, step), 0);
		for (uint32_t i = 0; i < n; i += 10) {
			lease(i, 10, true);
			lease(i, 10, false);
		}
		assert_int_equal(wire_step(&w, MOMENT_MSG_POST_STEP, step), 0);
	}
	before = marks_visits(e) - before;
	marks_check(e);
	return before / (2 * n);
}

static void a_step_over_many_small_parameters_costs_by_their_number(void **state)
{
	uint64_t few, many;

	(void)state;
	few = visits_of_a_step(200);
	teardown(NULL);
	setup(NULL);
	many = visits_of_a_step(1200);
	assert_in_range(many, 1, 2 * few);
}

static void a_name_is_found_in_a_few_looks(void **state)
{
	enum { N = 100000 };
	struct index x = {.n = 0};
	char(*name)[16] = calloc(N, sizeof(*name));

	(void)state;
	assert_non_null(name);
	for (uint32_t i = 0; i < N; i++) {
		snprintf(name[i], sizeof(name[i]), "p%u", i);
		assert_int_equal(index_put(&x, name[i], i), 0);
	}
	x.probes = 0;
	for (uint32_t i = 0; i < N; i++)
		assert_int_equal(index_get(&x, name[i]), i);
	assert_in_range(x.probes, N, 3 * N);
	assert_int_equal(index_put(&x, name[5], INDEX_NONE), 0);
	assert_int_equal(index_get(&x, "p5"), INDEX_NONE);
	assert_int_equal(index_put(&x, name[5], 7), 0);
	assert_int_equal(index_get(&x, "p5"), 7);
	assert_int_equal(index_get(&x, "other"), INDEX_NONE);
	assert_int_equal(x.n, N);
	index_fini(&x);
	assert_int_equal(index_get(&x, "p5"), INDEX_NONE);
	free(name);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(a_read_that_hits_costs_the_same_beside_many_blocks),
		T(a_step_over_many_small_parameters_costs_by_their_number),
		cmocka_unit_test(a_name_is_found_in_a_few_looks),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
