/* SPDX-License-Identifier: Apache-2.0 */
/* lib_fixture.h - what the tests of libmoment share: a folder, a quiet session, values for
 * everything. */
#ifndef TESTS_LIB_FIXTURE_H
#define TESTS_LIB_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "moment/moment.h"

#define BLOCK 65536u
#define RAM   ((uint64_t)4 << 20) /* far less than the state of most tests */

static char said[16384]; /* what the library told, one line each */

static inline void hear(void *arg, enum moment_message kind, const char *text)
{
	size_t n = strlen(said);

	(void)arg;
	snprintf(said + n, sizeof(said) - n, "%s%s\n", kind == MOMENT_WARNING ? "warning: " : "",
		 text);
}

/* rc 0, or the library's words in the failure. */
#define ok(call) \
	do { \
		int ok_res = (int)(call); \
		if (ok_res < 0) \
			fail_msg("%s: %d: %s", #call, ok_res, moment_error()); \
	} while (0)

/* Fails with this code and a text that has this in it. */
#define refused(call, code, part) \
	do { \
		int64_t refused_res = (call); \
		assert_int_equal(refused_res, code); \
		if (!strstr(moment_error(), part)) \
			fail_msg("%s: no '%s' in '%s'", #call, part, moment_error()); \
	} while (0)

static inline int remove_it(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
	(void)st;
	(void)type;
	(void)ftw;
	return remove(path);
}

static inline int make_folder(void **state)
{
	const char *root = getenv("TMPDIR");
	char *dir;

	if (asprintf(&dir, "%s/test-lib-XXXXXX", root ? root : "/tmp") < 0 || !mkdtemp(dir))
		return -1;
	said[0] = 0;
	*state = dir;
	return 0;
}

static inline int drop_folder(void **state)
{
	nftw(*state, remove_it, 16, FTW_DEPTH | FTW_PHYS);
	free(*state);
	return 0;
}

static inline struct moment_open_opts opts_for(const char *dir, uint32_t flags)
{
	static char backing[4096];

	snprintf(backing, sizeof(backing), "%s/backing", dir);
	return (struct moment_open_opts){.size = sizeof(struct moment_open_opts),
					 .flags = flags,
					 .backing = backing,
					 .data = "embedded",
					 .ram = RAM,
					 .block = BLOCK,
					 .commit_seconds = -1,
					 .threads = 1,
					 .message = hear};
}

static inline struct moment_session *open_in(const char *dir, uint32_t flags)
{
	struct moment_open_opts o = opts_for(dir, flags);
	struct moment_session *s = NULL;

	ok(moment_open(&o, &s));
	return s;
}

/* A value for element i of a tensor, in a step: the same everywhere, never twice the same. */
static inline float value(uint32_t tensor, uint64_t step, uint64_t i)
{
	uint64_t x = (tensor + 1) * 0x9e3779b97f4a7c15u ^ (step + 7) * 0xbf58476d1ce4e5b9u ^ i;

	x = (x ^ x >> 31) * 0x94d049bb133111ebu;
	x = (x ^ x >> 29) * 0xbf58476d1ce4e5b9u;
	return ((float)(x >> 40) / (float)(1 << 24) - 0.5f) * 0.2f;
}

static inline void fill(float *x, size_t n, uint32_t tensor, uint64_t step)
{
	size_t i;

	for (i = 0; i < n; i++)
		x[i] = value(tensor, step, i);
}

static const struct moment_optim adamw = {.kind = MOMENT_ADAM,
					  .flags = MOMENT_DECOUPLED | MOMENT_BIAS_CORRECTION,
					  .lr = 1e-2,
					  .beta1 = 0.9,
					  .beta2 = 0.99,
					  .eps = 1e-8,
					  .weight_decay = 0.1};

/* A few parameters, trained twice: through a session, and in plain memory by the same kernel. */
#define TENSORS 6u
static const uint64_t sizes[TENSORS] = {300000, 1, 16384, 0, 70001, 5};

struct model {
	struct moment_param param[TENSORS];
	char name[TENSORS][32];
	float *p[TENSORS], *g[TENSORS];
	float *want_p[TENSORS], *want_m[TENSORS], *want_v[TENSORS];
	uint64_t steps[TENSORS];
};

static inline struct model *model_new(void)
{
	struct model *m = calloc(1, sizeof(*m));
	uint32_t t;

	for (t = 0; t < TENSORS; t++) {
		size_t bytes = sizes[t] * sizeof(float) + 4;

		snprintf(m->name[t], sizeof(m->name[t]), "layer.%u.weight", t);
		m->param[t] = (struct moment_param){
			.name = m->name[t], .ndim = t == 1 ? 0 : 1, .shape = &sizes[t]};
		m->p[t] = malloc(bytes);
		m->g[t] = malloc(bytes);
		m->want_p[t] = malloc(bytes);
		m->want_m[t] = calloc(1, bytes);
		m->want_v[t] = calloc(1, bytes);
		fill(m->p[t], sizes[t], t, 0);
		fill(m->want_p[t], sizes[t], t, 0);
	}
	return m;
}

static inline void model_free(struct model *m)
{
	uint32_t t;

	for (t = 0; t < TENSORS; t++) {
		free(m->p[t]);
		free(m->g[t]);
		free(m->want_p[t]);
		free(m->want_m[t]);
		free(m->want_v[t]);
	}
	free(m);
}

/* Gradients of a step, the reference's update of tensor t, and the item for it. */
static inline struct moment_item model_item(struct model *m, uint32_t t, uint64_t step)
{
	struct moment_slice sl = {.p = m->want_p[t],
				  .g = m->g[t],
				  .m = m->want_m[t],
				  .v = m->want_v[t],
				  .numel = sizes[t]};

	fill(m->g[t], sizes[t], t, step);
	assert_int_equal(moment_update(&adamw, ++m->steps[t], &sl, 1, NULL), 0);
	return (struct moment_item){
		.param = m->param[t].handle,
		.p = m->p[t],
		.g = m->g[t],
		.p_numel = sizes[t],
		.g_numel = sizes[t],
		.optim = &adamw};
}

static inline uint32_t model_items(struct model *m, uint64_t step, struct moment_item *items)
{
	uint32_t t;

	for (t = 0; t < TENSORS; t++)
		items[t] = model_item(m, t, step);
	return TENSORS;
}

static inline void same_floats(const float *a, const float *b, size_t n, const char *what)
{
	size_t i;

	for (i = 0; i < n; i++)
		if (memcmp(&a[i], &b[i], sizeof(float)))
			fail_msg("%s: element %zu is %g, should be %g", what, i, a[i], b[i]);
}

static inline void model_check_state(struct moment_session *s, struct model *m)
{
	uint32_t t;

	for (t = 0; t < TENSORS; t++) {
		float *x = malloc(sizes[t] * sizeof(float) + 4);
		uint64_t step = 99;

		ok(moment_read_state(s, m->param[t].handle, MOMENT_ROLE_EXP_AVG, 0, sizes[t], x));
		same_floats(x, m->want_m[t], sizes[t], m->name[t]);
		ok(moment_read_state(s, m->param[t].handle, MOMENT_ROLE_EXP_AVG_SQ, 0, sizes[t],
				     x));
		same_floats(x, m->want_v[t], sizes[t], m->name[t]);
		ok(moment_param_step(s, m->param[t].handle, &step));
		assert_int_equal(step, m->steps[t]);
		free(x);
	}
}

static inline void model_check(struct moment_session *s, struct model *m)
{
	uint32_t t;

	for (t = 0; t < TENSORS; t++)
		same_floats(m->p[t], m->want_p[t], sizes[t], m->name[t]);
	model_check_state(s, m);
}

#endif
