/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_hints.c - what moment_pre_update() announces is read before it is asked for. The trace shows
 * it: the reads of the next parameter start before this one is done; with hints off, after it.
 */
#include <stdbool.h>

#include "lib_fixture.h"

#define PARAMS 6u
#define NUMEL  (256u * 1024) /* 1 MiB an array, 2 MiB of state a parameter */

struct event {
	char what[16];
	unsigned long ino;
};

static struct event events[65536];
static uint64_t numel; /* of each parameter */

/* The events of the last step in the trace. */
static size_t last_step(const char *path, struct event *e, size_t cap)
{
	FILE *f = fopen(path, "r");
	char line[256];
	size_t n = 0;

	assert_non_null(f);
	while (fgets(line, sizeof(line), f)) {
		if (n == cap || line[0] == '#' ||
		    sscanf(line, "%*s %15s %lu", e[n].what, &e[n].ino) != 2)
			continue;
		if (!strcmp(e[n].what, "step"))
			n = 0;
		else
			n++;
	}
	fclose(f);
	return n;
}

static struct moment_session *begin(const char *dir, uint32_t flags, char trace[512],
				    struct moment_param p[PARAMS])
{
	struct moment_open_opts o = {.size = sizeof(o),
				     .flags = flags,
				     .backing = dir,
				     .data = "embedded",
				     .ram = RAM,
				     .block = BLOCK,
				     .commit_seconds = -1,
				     .message = hear};
	static char names[PARAMS][8];
	struct moment_session *s;

	snprintf(trace, 512, "%s.trace", dir);
	setenv("MOMENT_TRACE", trace, 1);
	ok(moment_open(&o, &s));
	unsetenv("MOMENT_TRACE");
	for (unsigned int i = 0; i < PARAMS; i++) {
		snprintf(names[i], sizeof(names[i]), "p%u", i);
		p[i] = (struct moment_param){.name = names[i], .ndim = 1, .shape = &numel};
	}
	ok(moment_register(s, p, PARAMS));
	return s;
}

/* Three steps over everything, a parameter at a time; returns the events of the third. */
static size_t train(const char *dir, uint32_t flags, struct event *e, size_t cap)
{
	struct moment_optim adam = {
		.kind = MOMENT_ADAM, .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8};
	struct moment_param p[PARAMS];
	char trace[512];
	float *w = calloc(numel, sizeof(*w)), *g = calloc(numel, sizeof(*g));
	struct moment_session *s;
	size_t n;

	assert_true(w && g);
	s = begin(dir, flags, trace, p);
	for (uint64_t step = 1; step <= 3; step++) {
		ok(moment_pre_step(s, step));
		for (unsigned int i = 0; i < PARAMS; i++) {
			struct moment_item item = {
				.param = p[i].handle,
				.p = w,
				.g = g,
				.p_numel = p[i].numel,
				.g_numel = p[i].numel,
				.optim = &adam};

			ok(moment_pre_update(s, p[i].handle));
			ok(moment_apply(s, &item));
			ok(moment_post_update(s, p[i].handle));
		}
		ok(moment_post_step(s, step, 0));
	}
	ok(moment_close(s));
	free(w);
	free(g);
	n = last_step(trace, e, cap);
	remove(trace);
	return n;
}

/* Inodes in the order of their first lease: two of each parameter. */
static void lease_order(size_t n, unsigned long order[2 * PARAMS])
{
	size_t k = 0;

	for (size_t i = 0; i < n; i++) {
		bool known = strcmp(events[i].what, "lease") != 0;

		for (size_t j = 0; j < k; j++)
			known = known || order[j] == events[i].ino;
		if (!known && k < 2 * PARAMS)
			order[k++] = events[i].ino;
	}
	assert_int_equal(k, 2 * PARAMS);
}

static size_t first_of(size_t n, unsigned long ino, const char *a, const char *b)
{
	for (size_t i = 0; i < n; i++) {
		if (events[i].ino == ino &&
		    (!strcmp(events[i].what, a) || !strcmp(events[i].what, b)))
			return i;
	}
	return n;
}

static size_t last_release(size_t n, unsigned long ino)
{
	while (n-- > 0) {
		if (events[n].ino == ino && !strcmp(events[n].what, "release"))
			return n;
	}
	return 0;
}

static void the_next_parameter_is_read_while_this_one_is_computed(void **state)
{
	size_t n;
	unsigned int early = 0;

	unsigned long order[2 * PARAMS];

	numel = NUMEL;
	n = train(*state, 0, events, 65536);
	lease_order(n, order);
	/* pre_update of the first told what comes next before any of its blocks was done. */
	assert_true(first_of(n, order[2], "hint", "ahead") < first_of(n, order[0], "release", "-"));
	/* Most: where the drive is slow to take what is dirty there is no memory to read into. */
	for (size_t p = 1; p < PARAMS; p++)
		early += first_of(n, order[2 * p], "read", "ahead") <
			 last_release(n, order[2 * p - 2]);
	if (early < PARAMS / 2)
		fail_msg("only %u of %u were read before the one before was done", early,
			 PARAMS - 1);
}

static void with_hints_off_nothing_is_read_ahead(void **state)
{
	size_t n;

	unsigned long order[2 * PARAMS];

	numel = NUMEL;
	n = train(*state, MOMENT_OPEN_NO_HINTS, events, 65536);
	lease_order(n, order);
	for (size_t i = 0; i < n; i++) {
		assert_string_not_equal(events[i].what, "hint");
		assert_string_not_equal(events[i].what, "ahead");
	}
	for (size_t p = 1; p < PARAMS; p++)
		assert_true(first_of(n, order[2 * p], "read", "-") >
			    last_release(n, order[2 * p - 2]));
}

/* Nothing but pre_step and pre_update of the first parameter, on a backing that was just opened.
 * Returns the bytes read from the drive when `enough` have been, or after a while. */
static uint64_t announce(const char *dir, uint32_t flags, uint64_t enough, size_t *n)
{
	float *w = calloc(numel, sizeof(*w)), *g = calloc(numel, sizeof(*g));
	struct moment_optim adam = {
		.kind = MOMENT_ADAM, .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8};
	struct moment_param p[PARAMS];
	struct moment_info info = {0};
	char trace[512];
	struct moment_session *s = begin(dir, flags | MOMENT_OPEN_RESUME, trace, p);
	struct moment_item item = {.param = p[0].handle,
				   .p = w,
				   .g = g,
				   .p_numel = numel,
				   .g_numel = numel,
				   .optim = &adam};

	assert_true(w && g);
	ok(moment_pre_step(s, 4));
	ok(moment_pre_update(s, p[0].handle));
	for (int i = 0; i < (enough ? 2000 : 20); i++) {
		moment_get_info(s, &info);
		if (enough && info.read_bytes >= enough)
			break;
		usleep(10000);
	}
	ok(moment_apply(s, &item));
	ok(moment_post_update(s, p[0].handle));
	ok(moment_post_step(s, 4, 0));
	ok(moment_close(s));
	free(w);
	free(g);
	*n = last_step(trace, events, 65536);
	remove(trace);
	return info.read_bytes;
}

/* In that call: the optimizer has done nothing else yet, and has leased nothing. */
static void pre_update_of_one_parameter_reads_the_next(void **state)
{
	unsigned long order[2 * PARAMS];
	size_t n, lease;

	numel = BLOCK / sizeof(float); /* so that several fit into the read-ahead */
	n = train(*state, 0, events, 65536);
	lease_order(n, order);
	assert_true(announce(*state, 0, 4ull * BLOCK, &n) >= 4ull * BLOCK);
	lease = first_of(n, order[0], "lease", "-");
	assert_true(lease < n);
	for (int k = 0; k < 4; k++)
		assert_true(first_of(n, order[k], "ahead", "-") < lease);
	assert_int_equal(announce(*state, MOMENT_OPEN_NO_HINTS, 0, &n), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(
			the_next_parameter_is_read_while_this_one_is_computed, make_folder,
			drop_folder),
		cmocka_unit_test_setup_teardown(pre_update_of_one_parameter_reads_the_next,
						make_folder, drop_folder),
		cmocka_unit_test_setup_teardown(with_hints_off_nothing_is_read_ahead, make_folder,
						drop_folder),
	};

	return cmocka_run_group_tests_name("hints", tests, NULL, NULL);
}
