/* SPDX-License-Identifier: Apache-2.0 */
/*
 * adopt.c - a parameter's directory that came by cp, tar or rsync, which drop extended attributes:
 * its meta.json, an ordinary file there, says what they were.
 *
 * Done when a writing session begins. The file is read like any other (an op), understood on a work
 * thread, and the attributes of what it describes are set from there; then, in one turn of the loop
 * thread, the directory gets the name that makes it a parameter's and the file becomes the generated
 * one. SQLite reads the JSON. Nothing is believed that registration does not check against the files
 * afterwards. From the first look to the last the file's inode is referenced: whoever removes it
 * meanwhile takes only its name.
 *
 * The last commit has plain files there, and a session's rollback would make them that again: so
 * registration asks for a commit first (engine.adopted), as for what it makes.
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
	struct waiter w;
	struct engine *e;
	uint64_t dir;
	char dirname[NS_NAME_MAX + 1];
	char *name; /* the parameter's */
	size_t name_len;
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
	char *format = NULL, *shape = NULL, *step = NULL, *hyper = NULL;
	char decoded[NAMES_MAX], encoded[NAMES_MAX + 1];
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
	a->name_len = sizeof(decoded);
	if (names_decode(a->dirname, decoded, &a->name_len) == 0) {
		a->name = malloc(a->name_len);
		if (a->name)
			memcpy(a->name, decoded, a->name_len);
	} else {
		a->name = extract(db, a->text, "$.name");
		a->name_len = a->name ? strlen(a->name) : 0;
	}
	if (!a->name || names_encode(a->name, a->name_len, encoded) || strcmp(encoded, a->dirname))
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
			r = set(ns, at.ino, "user.moment.name", a->name, a->name_len);
		free(dtype);
	}
out:
	free(format);
	free(shape);
	free(step);
	free(hyper);
	sqlite3_close(db);
	return r;
}

static void adopt_done(struct adopt *a)
{
	ns_forget(a->e->c.ns, a->op.ino, 1);
	a->done(a->arg, a->res);
	free(a->name);
	free(a);
}

/*
 * With a name the directory counts as a parameter's, and a commit may come between any two turns of
 * the loop thread: so it gets the name in the turn in which the file becomes the generated one.
 */
static void adopt_make(struct waiter *w)
{
	struct adopt *a = container_of(w, struct adopt, w);
	struct cache *c = &a->e->c;
	struct ns_moment none = {.name = "user.moment.name"};
	int r = a->res;

	if (!r)
		r = set(c->ns, a->dir, "user.moment.name", a->name, a->name_len);
	if (!r) {
		r = file_make_meta(c, a->dir, &a->w);
		if (r)
			ns_set_moment(c->ns, a->dir, &none, 1);
	}
	if (r == 1)
		return;
	a->res = r;
	if (!r)
		a->e->adopted = true;
	/* Who has looked at the file knows another length and another text: told with the rest, before
	 * the session's HELLO is answered. */
	adopt_done(a);
}

static void adopt_end(struct loop_task *t)
{
	adopt_make(&container_of(t, struct adopt, task)->w);
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
	    ns_ref(ns, dir, NS_META_NAME, &at))
		return false;
	a = S_ISREG(at.mode) && !(at.flags & NS_GENERATED) && at.size <= META_MAX
		    ? calloc(1, sizeof(*a))
		    : NULL;
	if (!a) {
		ns_forget(ns, at.ino, 1);
		return false;
	}
	snprintf(a->dirname, sizeof(a->dirname), "%s", dirname);
	a->e = e;
	a->dir = dir;
	a->done = done;
	a->arg = arg;
	a->w.wake = adopt_make;
	list_init(&a->w.link);
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

	if (res == -EBUSY)
		engine_log(s->e, ENGINE_LOG_WARNING,
			   "params/%s/meta.json is open for writing in another program, so the "
			   "parameter is not taken over: close it, then begin again",
			   s->dirname);
	else if (res == -EINVAL)
		engine_log(s->e, ENGINE_LOG_WARNING,
			   "params/%s/meta.json does not describe a parameter: it is left as it is",
			   s->dirname);
	else if (res)
		engine_log(s->e, ENGINE_LOG_WARNING,
			   "params/%s/meta.json: the parameter could not be taken over: %s",
			   s->dirname, strerror(-res));
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
