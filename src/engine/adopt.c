/* SPDX-License-Identifier: Apache-2.0 */
/*
 * adopt.c - a parameter's directory that came by cp, tar or rsync, which drop extended attributes:
 * its meta.json, an ordinary file there, says what they were.
 *
 * Done when a writing session begins. The file is read like any other (an op), understood on a work
 * thread, and its attributes are set from there; then it becomes the generated one. SQLite reads
 * the JSON. Nothing is believed that registration does not check against the files afterwards.
 */
#include <errno.h>
#include <sqlite3.h>
#include <stdlib.h>
#include <string.h>

#include "engine/names.h"
#include "engine/session.h"

#define META_MAX (64u * 1024)

struct adopt {
	struct engine_op op;
	struct loop_task task;
	struct engine *e;
	uint64_t dir;
	char dirname[NS_NAME_MAX + 1];
	void (*done)(void *arg, int res);
	void *arg;
	int res;
	char text[META_MAX + 1];
};

/* One value of the document as text, malloc'ed; NULL: not there. */
static char *extract(sqlite3 *db, const char *text, const char *path)
{
	sqlite3_stmt *st;
	char *out = NULL;

	if (sqlite3_prepare_v2(db, "SELECT json_extract(?1, ?2)", -1, &st, NULL) != SQLITE_OK)
		return NULL;
	sqlite3_bind_text(st, 1, text, -1, SQLITE_STATIC);
	sqlite3_bind_text(st, 2, path, -1, SQLITE_STATIC);
	if (sqlite3_step(st) == SQLITE_ROW && sqlite3_column_type(st, 0) != SQLITE_NULL)
		out = strdup((const char *)sqlite3_column_text(st, 0));
	sqlite3_finalize(st);
	return out;
}

static int set(struct ns *ns, uint64_t ino, const char *name, const char *value, size_t len)
{
	struct ns_moment m = {name, value, len};

	return ns_set_moment(ns, ino, &m, 1);
}

static int understand(struct adopt *a)
{
	struct ns *ns = a->e->c.ns;
	sqlite3 *db = NULL;
	char *format = NULL, *shape = NULL, *step = NULL, *hyper = NULL, *name = NULL;
	char decoded[NAMES_MAX], encoded[NAMES_MAX + 1];
	size_t name_len = sizeof(decoded);
	int r = -EINVAL;

	if (sqlite3_open_v2(":memory:", &db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX, NULL) !=
	    SQLITE_OK)
		goto out;
	format = extract(db, a->text, "$.format");
	shape = extract(db, a->text, "$.shape");
	step = extract(db, a->text, "$.step");
	hyper = extract(db, a->text, "$.hyper");
	if (!format || strcmp(format, "momentfs-param") || !shape || !step ||
	    strspn(step, "0123456789") != strlen(step))
		goto out;
	/* The directory's name tells the parameter's, but for long ones. */
	if (names_decode(a->dirname, decoded, &name_len) == 0) {
		name = malloc(name_len);
		if (name)
			memcpy(name, decoded, name_len);
	} else {
		name = extract(db, a->text, "$.name");
		name_len = name ? strlen(name) : 0;
	}
	if (!name || names_encode(name, name_len, encoded) || strcmp(encoded, a->dirname))
		goto out;
	r = set(ns, a->dir, "user.moment.shape", shape, strlen(shape));
	if (!r)
		r = set(ns, a->dir, "user.moment.step", step, strlen(step));
	if (!r && hyper)
		r = set(ns, a->dir, "user.moment.hyper", hyper, strlen(hyper));
	for (unsigned int k = 0; k < MOMENT_ROLES && !r; k++) {
		struct ns_attr at;
		char path[64], *dtype;

		if (ns_peek(ns, a->dir, session_role[k], &at))
			continue;
		snprintf(path, sizeof(path), "$.files.%s.dtype", session_role[k]);
		dtype = extract(db, a->text, path);
		if (dtype)
			r = set(ns, at.ino, "user.moment.dtype", dtype, strlen(dtype));
		if (!r)
			r = set(ns, at.ino, "user.moment.step", step, strlen(step));
		if (!r)
			r = set(ns, at.ino, "user.moment.shape", shape, strlen(shape));
		if (!r)
			r = set(ns, at.ino, "user.moment.name", name, name_len);
		free(dtype);
	}
	/* Last: with a name it counts as a parameter. */
	if (!r)
		r = set(ns, a->dir, "user.moment.name", name, name_len);
	if (!r)
		r = ns_make_meta(ns, a->dir);
out:
	free(format);
	free(shape);
	free(step);
	free(hyper);
	free(name);
	sqlite3_close(db);
	return r;
}

static void adopt_end(struct loop_task *t)
{
	struct adopt *a = container_of(t, struct adopt, task);

	a->done(a->arg, a->res);
	free(a);
}

/* Work thread. */
static void adopt_read(struct engine_op *op)
{
	struct adopt *a = container_of(op, struct adopt, op);
	size_t n = 0;

	for (int i = 0; i < op->iovcnt && n + op->iov[i].iov_len <= META_MAX; i++) {
		memcpy(a->text + n, op->iov[i].iov_base, op->iov[i].iov_len);
		n += op->iov[i].iov_len;
	}
	a->text[n] = 0;
	a->res = op->res < 0 ? (int)op->res : understand(a);
	a->task.run = adopt_end;
	loop_post(a->e->loop, &a->task);
}

/* True: done() will be called. */
static bool adopt_start(struct engine *e, uint64_t dir, const char *dirname,
			void (*done)(void *arg, int res), void *arg)
{
	struct ns *ns = e->c.ns;
	struct ns_attr at;
	struct adopt *a;

	if (ns_getxattr(ns, dir, "user.moment.name", NULL, 0) >= 0 ||
	    ns_peek(ns, dir, "meta.json", &at) || !S_ISREG(at.mode) || (at.flags & NS_GENERATED) ||
	    at.size > META_MAX)
		return false;
	a = calloc(1, sizeof(*a));
	if (!a)
		return false;
	snprintf(a->dirname, sizeof(a->dirname), "%s", dirname);
	a->e = e;
	a->dir = dir;
	a->done = done;
	a->arg = arg;
	a->op.kind = ENGINE_READ;
	a->op.ino = at.ino;
	a->op.len = META_MAX;
	a->op.done = adopt_read;
	engine_submit(e, &a->op);
	return true;
}

/* ---- all of them, one after the other ---- */

struct sweep {
	struct engine *e;
	uint64_t cookie, dir;
	char dirname[NS_NAME_MAX + 1];
	void (*done)(void *arg);
	void *arg;
};

static bool sweep_one(void *arg, const char *name, const struct ns_attr *a, uint64_t cookie)
{
	struct sweep *s = arg;

	s->cookie = cookie;
	if (!S_ISDIR(a->mode))
		return true;
	s->dir = a->ino;
	snprintf(s->dirname, sizeof(s->dirname), "%s", name);
	return false;
}

static void sweep_next(void *arg, int res)
{
	struct sweep *s = arg;

	if (res)
		engine_log(s->e, ENGINE_LOG_WARNING,
			   "params/%s/meta.json does not describe a parameter: it is left as it is",
			   s->dirname);
	for (;;) {
		s->dir = 0;
		ns_readdir(s->e->c.ns, NS_ROOT, s->cookie, false, sweep_one, s);
		if (!s->dir)
			break;
		if (adopt_start(s->e, s->dir, s->dirname, sweep_next, s))
			return;
	}
	s->done(s->arg);
	free(s);
}

void session_adopt_all(struct engine *e, void (*done)(void *arg), void *arg)
{
	struct sweep *s = calloc(1, sizeof(*s));

	if (!s) {
		done(arg);
		return;
	}
	s->e = e;
	s->done = done;
	s->arg = arg;
	sweep_next(s, 0);
}
