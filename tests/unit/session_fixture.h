/* SPDX-License-Identifier: Apache-2.0 */
/*
 * session_fixture.h - an engine in a temporary directory and a client of it, anew for each test,
 * and the few messages that most tests send. For one test program, once.
 */
#ifndef TESTS_SESSION_FIXTURE_H
#define TESTS_SESSION_FIXTURE_H

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "session_link.h"

#define BLOCK (64u << 10)
#define RAM   (24u * BLOCK)
#define NONE  0xff

static char dir[256];
static struct engine *e;
static struct wire w;
static uint64_t pool_limit;

static inline void start(bool readonly)
{
	struct engine_opts o = {.ram = RAM,
				.block = readonly ? 0 : BLOCK,
				.size = pool_limit,
				.commit_seconds = ENGINE_COMMIT_OFF,
				.readonly = readonly,
				.holder = "test_session"};
	char err[1024];

	if (engine_open(dir, &o, &e, err, sizeof(err)))
		fail_msg("%s", err);
}

static inline void attach(struct wire *x)
{
	memset(x, 0, offsetof(struct wire, out));
	x->l = link_local(e);
	assert_non_null(x->l);
}

static inline void detach(struct wire *x)
{
	if (x->l)
		x->l->close(x->l);
	x->l = NULL;
}

static inline void stop(bool commit)
{
	detach(&w);
	assert_int_equal(engine_close(e, commit), 0);
	e = NULL;
}

static inline int setup(void **state)
{
	(void)state;
	snprintf(dir, sizeof(dir), "%s/momentfs-session-XXXXXX",
		 getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
	assert_non_null(mkdtemp(dir));
	start(false);
	attach(&w);
	return 0;
}

static inline int teardown(void **state)
{
	char cmd[512];

	(void)state;
	detach(&w);
	if (e)
		engine_close(e, false);
	e = NULL;
	pool_limit = 0;
	snprintf(cmd, sizeof(cmd), "rm -rf '%s'", dir);
	return system(cmd) ? -1 : 0;
}

static inline void remount(bool commit)
{
	stop(commit);
	start(false);
	attach(&w);
	assert_int_equal(wire_hello(&w, 0), 0);
}

static inline struct wire_param vec(const char *name, uint64_t numel)
{
	return (struct wire_param){.name = name,
				   .shape = {numel},
				   .ndim = 1,
				   .dtype = {MOMENT_F32, MOMENT_F32, NONE, NONE}};
}

static inline int reg(struct wire *x, uint32_t flags, struct wire_param p)
{
	wire_reg_begin(x, flags);
	wire_reg_add(x, &p);
	return wire_call(x);
}

static inline const struct moment_register_reply *reg_reply(void)
{
	return (const struct moment_register_reply *)w.in;
}

static inline const struct moment_info_reply *info_reply(struct wire *x)
{
	return (const struct moment_info_reply *)x->in;
}

static inline int adv(struct wire *x, bool lease, uint32_t file, uint32_t first, uint32_t count,
		      uint32_t flags)
{
	wire_adv_begin(x);
	wire_adv_add(x, lease, (struct moment_range){file, first, count, flags});
	return wire_call(x);
}

static inline void says(struct wire *x, const char *what)
{
	if (!strstr(wire_text(x), what))
		fail_msg("\"%s\" does not say \"%s\"", wire_text(x), what);
}

/* The file's inode, or 0. */
static inline uint64_t ino_of(const char *path)
{
	struct ns_attr a;

	return ns_walk(engine_ns(e), path, &a) ? 0 : a.ino;
}

static inline void xattr_is(const char *path, const char *name, const char *value)
{
	char text[1024];
	int64_t n = ns_getxattr(engine_ns(e), ino_of(path), name, text, sizeof(text) - 1);

	text[n < 0 ? 0 : n] = 0;
	assert_string_equal(text, value);
}

static inline unsigned char byte_at(const char *path, uint64_t off)
{
	unsigned char b = 0xee;

	assert_int_equal(engine_pread(e, ino_of(path), &b, 1, off), 1);
	return b;
}

static inline int send_steps(uint32_t param, uint64_t step)
{
	struct moment_steps *m = wire_begin(&w, MOMENT_MSG_STEPS, 0, sizeof(*m));
	struct moment_param_step *p = wire_more(&w, sizeof(*p));

	m->n = 1;
	*p = (struct moment_param_step){.param = param, .step = step};
	return wire_call(&w);
}

static inline int send_remove(uint32_t param)
{
	struct moment_remove *m = wire_begin(&w, MOMENT_MSG_REMOVE, 0, sizeof(*m));

	*(uint32_t *)wire_more(&w, 4) = param;
	m->n = 1;
	return wire_call(&w);
}

/* A whole step that fills block 0 of `file` with `fill`. */
static inline void do_step(uint64_t step, uint32_t file, int fill)
{
	assert_int_equal(wire_step(&w, MOMENT_MSG_PRE_STEP, step), 0);
	assert_int_equal(adv(&w, true, file, 0, 1, MOMENT_RANGE_WRITE), 0);
	memset(w.l->base + wire_leases(&w)->arena, fill, wire_leases(&w)->len);
	assert_int_equal(adv(&w, false, file, 0, 1, 0), 0);
	assert_int_equal(send_steps(0, step), 0);
	assert_int_equal(wire_step(&w, MOMENT_MSG_POST_STEP, step), 0);
}

static inline uint64_t pool_used(void)
{
	char *json = engine_status_json(e);
	const char *pool = strstr(json, "\"pool\":"), *used = pool ? strstr(pool, "\"used") : NULL;
	uint64_t v;

	assert_non_null(used);
	v = strtoull(strchr(used, ':') + 1, NULL, 10);
	free(json);
	return v;
}

#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

#endif
