/* SPDX-License-Identifier: Apache-2.0 */
/*
 * session_step.c - steps, commits and rollbacks of a session.
 *
 * Loop thread only. From PRE_STEP to POST_STEP all files of the session are held: no commit takes
 * them. POST_STEP is the boundary: the files are let go, the parameters' step counts become
 * attributes, readers' caches are invalidated, and a commit that is due starts behind the reply.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/session.h"

/* A COMMIT that waits: for the boundary (in session.commits), then for the commit. */
struct commit_msg {
	struct list link; /* in session.commits */
	struct commit_wait w;
	struct session *s;
	struct moment_msg req;
	bool reply; /* when it is durable; else it was answered at once */
};

void session_commit_free(struct list *l)
{
	free(list_entry(l, struct commit_msg, link));
}

static void commit_begin(struct commit_msg *m);

/* It waits for the boundary. */
static void commit_later(struct commit_msg *m)
{
	m->s->ncommits++;
	list_push_back(&m->s->commits, &m->link);
}

static void commit_end(struct commit_wait *w, int res)
{
	struct commit_msg *m = container_of(w, struct commit_msg, w);
	struct session *s = m->s;
	struct commit_info ci;
	bool alive;

	commit_get_info(&s->e->c, &ci);
	alive = session_busy_end(s);
	if (alive && !res && !ci.full) {
		/* The next step had begun when its turn came, and its files were left out. */
		if (s->stepping)
			commit_later(m);
		else
			commit_begin(m);
		return;
	}
	if (alive && m->reply) {
		if (res)
			session_error(
				s, &m->req, res,
				"the commit failed: %s; the state stays in memory and the next commit tries again "
				"(momentctl status has the details)",
				strerror(-res));
		else
			session_info_reply(s, &m->req);
	}
	free(m);
}

static void commit_begin(struct commit_msg *m)
{
	struct session *s = m->s;

	session_busy_begin(s);
	m->w.done = commit_end;
	commit_request(&s->e->c, &m->w);
}

/* At a boundary: those that waited for it. */
static void commits_begin(struct session *s)
{
	struct list todo;

	list_init(&todo);
	list_splice_back(&todo, &s->commits);
	while (!list_empty(&todo)) {
		struct commit_msg *m = list_first(&todo, struct commit_msg, link);

		list_remove(&m->link);
		s->ncommits--;
		commit_begin(m);
	}
}

void session_commit(struct session *s, const struct moment_msg *msg)
{
	struct commit_msg *m = calloc(1, sizeof(*m));

	if (!m) {
		session_error(s, msg, -ENOMEM, "commit: out of memory");
		return;
	}
	m->s = s;
	m->req = *msg;
	m->reply = msg->flags & MOMENT_COMMIT_WAIT;
	list_init(&m->link);
	list_init(&m->w.link);
	/* Not only when it begins: inside a step that is after what the client does next. */
	if (!m->reply)
		session_info_reply(s, msg);
	if (s->stepping)
		commit_later(m);
	else
		commit_begin(m);
}

/* ---- steps ---- */

/* The directories have the step counts: committed with the files they count for, never before them.
 */
static void hold_dirs(struct session *s, bool held)
{
	for (uint32_t i = 0; i < s->nparams; i++)
		if (!s->params[i].removed)
			ns_hold(s->e->c.ns, s->params[i].dir, held);
}

/* A PRE_STEP that waits for a commit: commits have been failing. */
struct pre_msg {
	struct commit_wait w;
	struct session *s;
	struct moment_pre_step m;
};

static void pre_step_tried(struct commit_wait *w, int res)
{
	struct pre_msg *p = container_of(w, struct pre_msg, w);
	struct session *s = p->s;
	char why[768];

	if (session_busy_end(s)) {
		if (!res) {
			session_pre_step(s, &p->m.h);
		} else {
			commit_explain(&s->e->c, why, sizeof(why));
			session_error(s, &p->m.h, res, "step %llu is not begun, it could not be stored: %s",
				      (unsigned long long)p->m.step, why);
		}
	}
	free(p);
}

static void pre_step_try(struct session *s, const struct moment_pre_step *m)
{
	struct pre_msg *p = calloc(1, sizeof(*p));

	if (!p) {
		session_error(s, &m->h, -ENOMEM, "pre_step: out of memory");
		return;
	}
	*p = (struct pre_msg){.s = s, .m = *m, .w.done = pre_step_tried};
	list_init(&p->w.link);
	session_busy_begin(s);
	commit_request(&s->e->c, &p->w);
}

/* A step would be torn half way by blocks that need a third place (commit_owes). */
static bool no_third_places(const struct session *s)
{
	struct pool_info pi;

	if (!commit_owing(&s->e->c) || !list_empty(&s->e->c.held))
		return false;
	pool_get_info(s->e->pool, &pi);
	return pi.available < s->reserved / 2;
}

void session_pre_step(struct session *s, const struct moment_msg *msg)
{
	const struct moment_pre_step *m = (const struct moment_pre_step *)msg;
	struct engine *e = s->e;
	struct cache *c = &e->c;
	struct commit_info ci;

	if (e->open_step != STEP_NONE || e->reverting) {
		session_error(s, msg, -EBUSY, "step %llu is open",
			      (unsigned long long)e->open_step);
		return;
	}
	if (s->registering) {
		session_error(s, msg, -EBUSY, "parameters are being registered");
		return;
	}
	commit_get_info(c, &ci);
	if (c->error_blocks) {
		session_error(
			s, msg, ci.error ? ci.error : -EIO,
			"%u blocks could not be written to %s and wait in memory: cure the drive (see momentctl "
			"status), they are retried every second",
			c->error_blocks, e->path);
		return;
	}
	if (m->step == STEP_NONE) {
		session_error(s, msg, -EINVAL, "not a step number");
		return;
	}
	if (commit_stalled(c) || no_third_places(s)) {
		pre_step_try(s, m);
		return;
	}
	TRACE(c, "step", 0, m->step, 0);
	s->stepping = true;
	s->step = e->open_step = m->step;
	for (uint32_t i = 0; i < s->nfiles; i++) {
		struct file *f = s->files[i];

		if (!f)
			continue;
		f->touched = false;
		file_hold(c, f, true);
	}
	for (uint32_t i = 0; i < s->nparams; i++)
		s->params[i].next_step = STEP_NONE;
	hold_dirs(s, true);
	session_info_reply(s, msg);
}

void session_steps(struct session *s, const struct moment_msg *msg)
{
	const struct moment_steps *m = (const struct moment_steps *)msg;

	if (msg->len != sizeof(*m) + (uint64_t)m->n * sizeof(m->p[0])) {
		session_error(s, msg, -EPROTO, "steps: the message's length does not fit");
		return;
	}
	if (!s->stepping) {
		session_error(s, msg, -EPERM, "steps outside a step: call pre_step first");
		return;
	}
	for (uint32_t i = 0; i < m->n; i++) {
		if (m->p[i].param >= s->nparams || s->params[m->p[i].param].removed ||
		    m->p[i].step == STEP_NONE) {
			session_error(s, msg, -EINVAL, "steps: no parameter %u, or no step",
				      m->p[i].param);
			return;
		}
	}
	for (uint32_t i = 0; i < m->n; i++)
		s->params[m->p[i].param].next_step = m->p[i].step;
	session_info_reply(s, msg);
}

struct boundary_msg {
	struct session *s;
	struct moment_msg req;
};

static void boundary_seen(void *arg)
{
	struct boundary_msg *b = arg;

	if (session_busy_end(b->s))
		session_info_reply(b->s, &b->req);
	free(b);
}

void session_reply_told(struct session *s, const struct moment_msg *msg)
{
	struct boundary_msg *b = calloc(1, sizeof(*b));

	if (!b) {
		session_info_reply(s, msg);
		return;
	}
	b->s = s;
	b->req = *msg;
	session_busy_begin(s);
	engine_invalidate(s->e, boundary_seen, b);
}

static int set_step(struct session *s, struct param *p)
{
	struct ns *ns = s->e->c.ns;
	char text[24];
	struct ns_moment x = {.name = "user.moment.step", .value = text};
	int r;

	x.size = (size_t)snprintf(text, sizeof(text), "%llu", (unsigned long long)p->next_step);
	r = ns_set_moment(ns, p->dir, &x, 1);
	for (unsigned int k = 0; k < MOMENT_ROLES && !r; k++) {
		if (p->file[k] != UINT32_MAX)
			r = ns_set_moment(ns, s->files[p->file[k]]->ino, &x, 1);
	}
	p->next_step = STEP_NONE;
	return r;
}

void session_post_step(struct session *s, const struct moment_msg *msg)
{
	const struct moment_post_step *m = (const struct moment_post_step *)msg;
	struct engine *e = s->e;
	struct cache *c = &e->c;
	struct boundary_msg *b;
	int r = 0;

	if (!s->stepping || m->step != s->step) {
		session_error(s, msg, -EINVAL, "step %llu is not open",
			      (unsigned long long)m->step);
		return;
	}
	if (s->nleases) {
		session_error(s, msg, -EBUSY,
			      "%llu leases are out: release them before the step ends",
			      (unsigned long long)s->nleases);
		return;
	}
	b = calloc(1, sizeof(*b));
	if (!b) {
		session_error(s, msg, -ENOMEM, "post_step: out of memory; the step is still open");
		return;
	}
	for (uint32_t i = 0; i < s->nparams && !r; i++) {
		if (s->params[i].next_step != STEP_NONE && !s->params[i].removed)
			r = set_step(s, &s->params[i]);
	}
	if (r) {
		free(b);
		session_error(s, msg, r, "post_step: a step count could not be noted: %s",
			      strerror(-r));
		return;
	}
	for (uint32_t i = 0; i < s->nfiles; i++) {
		struct file *f = s->files[i];

		if (!f)
			continue;
		file_hold(c, f, false);
		if (f->touched) {
			f->touched = false;
			file_publish(c, f, true);
			ns_stale(c->ns, f->ino, NS_STALE_DATA);
		}
	}
	hold_dirs(s, false);
	s->stepping = false;
	e->open_step = STEP_NONE;
	TRACE(c, "end", 0, m->step, 0);
	commit_set_boundary(c, m->step);
	if (list_empty(&s->commits) && (msg->flags & MOMENT_POST_COMMIT))
		commit_start(c);
	commits_begin(s);
	commit_maybe(c);
	b->s = s;
	b->req = *msg;
	session_busy_begin(s);
	engine_invalidate(e, boundary_seen, b);
}

/* ---- rollback ---- */

static void hold_all(struct session *s, bool held)
{
	for (uint32_t i = 0; i < s->nfiles; i++) {
		if (s->files[i])
			file_hold(&s->e->c, s->files[i], held);
	}
	hold_dirs(s, held);
}

void session_reverted(struct engine *e)
{
	if (e->writer)
		e->writer->stepping = false;
}

static void rolled_back(void *arg, int res)
{
	struct boundary_msg *b = arg;
	struct session *s = b->s;

	if (res && !s->stepping) {
		hold_all(s, false);
		if (s->dead) /* being held, they were not let go when it ended */
			session_unregister_all(s);
	}
	if (session_busy_end(s)) {
		if (!s->stepping)
			commits_begin(s);
		if (res)
			session_revert_error(s, &b->req, res);
		else
			session_info_reply(s, &b->req);
	}
	free(b);
}

void session_rollback(struct session *s, const struct moment_msg *msg)
{
	struct engine *e = s->e;
	struct boundary_msg *b;

	if (s->nleases || e->reverting) {
		session_error(s, msg, -EBUSY, "%llu leases are out: release them before a rollback",
			      (unsigned long long)s->nleases);
		return;
	}
	b = calloc(1, sizeof(*b));
	if (!b) {
		session_error(s, msg, -ENOMEM, "rollback: out of memory");
		return;
	}
	b->s = s;
	b->req = *msg;
	hold_all(s, true);
	session_busy_begin(s);
	engine_revert(e, false, rolled_back, b);
}
