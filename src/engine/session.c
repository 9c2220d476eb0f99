/* SPDX-License-Identifier: Apache-2.0 */
/*
 * session.c - a client of the RAM tier: hello, good-bye, and handing messages on.
 *
 * Loop thread only. The same code serves the daemon's socket and libmoment embedded: the edge
 * brings whole messages and takes replies. A request that waits (for the drive, a commit) holds
 * session.busy, so the session's memory outlives its end until the last of them has come back.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/session.h"

#define REQUESTS_MOST 1024u /* under way in one session */

static void session_free(struct session *s)
{
	session_forget_all(s);
	free(s->params);
	free(s->files);
	free(s);
}

void session_busy_begin(struct session *s)
{
	s->busy++;
}

bool session_busy_end(struct session *s)
{
	s->busy--;
	if (!s->dead)
		return true;
	if (!s->busy)
		session_free(s);
	return false;
}

/* ---- replies ---- */

void session_reply(struct session *s, const struct moment_msg *req, void *reply, size_t len)
{
	struct moment_reply *r = reply;

	r->h = (struct moment_msg){.type = req->type, .len = (uint32_t)len, .id = req->id};
	if (!s->dead)
		s->opts.reply(s->opts.arg, reply, len,
			      req->type == MOMENT_MSG_HELLO && r->status == 0);
}

void session_error(struct session *s, const struct moment_msg *req, int status, const char *fmt,
		   ...)
{
	struct {
		struct moment_reply r;
		char text[1024];
	} m = {.r.status = status};
	va_list ap;
	int n;

	va_start(ap, fmt);
	n = vsnprintf(m.text, sizeof(m.text), fmt, ap);
	va_end(ap);
	m.r.text_len = n < 0 ? 0 : (uint32_t)min_u64((uint64_t)n, sizeof(m.text) - 1);
	session_reply(s, req, &m, sizeof(m.r) + m.r.text_len);
}

void session_revert_error(struct session *s, const struct moment_msg *req, int res)
{
	const struct session *by = res == -EBUSY ? session_lessee(s->e, false) : NULL;

	if (by) {
		char who[160];

		session_lessee_text(by, who, sizeof(who));
		session_error(s, req, res, "cannot go back to the last commit: %s", who);
	} else
		session_error(
			s, req, res,
			"going back to the last commit failed: %s; nothing has changed, try again",
			strerror(-res));
}

void session_info_reply(struct session *s, const struct moment_msg *req)
{
	struct engine *e = s->e;
	struct commit_info ci;
	struct io_info io;
	struct moment_info_reply m = {0};

	commit_get_info(&e->c, &ci);
	io_get_info(e->io, &io);
	m.committed_step = ci.step;
	m.step = commit_boundary(&e->c);
	m.open_step = e->open_step;
	m.read_bytes = io.read_bytes;
	m.written_bytes = io.write_bytes;
	m.hits = e->c.stats.hits;
	m.misses = e->c.stats.misses;
	m.error = e->c.error_blocks ? (ci.error ? ci.error : -EIO) : ci.error;
	session_reply(s, req, &m, sizeof(m));
}

/* ---- hello ---- */

static void hello_reply(struct session *s, const struct moment_msg *req, uint64_t rolled_back)
{
	struct engine *e = s->e;
	struct commit_info ci;
	struct moment_hello_reply m = {0};

	s->hello = true;
	commit_get_info(&e->c, &ci);
	m.version = MOMENT_PROTOCOL_VERSION;
	m.block = e->c.block;
	m.arena_size = arena_size(e->arena);
	m.quota = s->quota;
	m.quota_small = s->quota_small;
	m.window = e->c.window;
	m.committed_step = ci.step;
	m.rolled_back = rolled_back;
	m.ram = arena_size(e->arena);
	m.daemon_pid = (uint32_t)getpid();
	session_reply(s, req, &m, sizeof(m));
}

struct hello_ok {
	struct session *s;
	struct moment_msg req;
	uint64_t rolled_back;
};

static void hello_told(void *arg)
{
	struct hello_ok *h = arg;

	if (session_busy_end(h->s)) {
		h->s->greeting = false;
		hello_reply(h->s, &h->req, h->rolled_back);
	}
	free(h);
}

static void hello_adopted(void *arg)
{
	struct hello_ok *h = arg;

	engine_invalidate(h->s->e, hello_told, h);
}

static void hello_ok(struct session *s, const struct moment_msg *req, uint64_t rolled_back)
{
	struct hello_ok *h = calloc(1, sizeof(*h));

	if (!s->readonly)
		s->e->writer = s;
	if (!h || s->readonly) {
		free(h);
		hello_reply(s, req, rolled_back);
		return;
	}
	*h = (struct hello_ok){s, *req, rolled_back};
	session_busy_begin(s);
	s->greeting = true;
	session_adopt_all(s->e, hello_adopted, h);
}

struct hello_revert {
	struct session *s;
	struct moment_msg req;
	uint64_t torn;
};

static void hello_reverted(void *arg, int res)
{
	struct hello_revert *h = arg;
	struct session *s = h->s;

	if (session_busy_end(s)) {
		s->greeting = false;
		if (res)
			s->e->writer = NULL;
		if (res)
			session_revert_error(s, &h->req, res);
		else
			hello_ok(s, &h->req, h->torn);
	}
	free(h);
}

static void hello(struct session *s, const struct moment_msg *msg);

/* A HELLO that came while the state goes back to the last commit. */
struct hello_wait {
	struct waiter w;
	struct session *s;
	struct moment_hello m;
};

static void hello_again(struct waiter *w)
{
	struct hello_wait *h = container_of(w, struct hello_wait, w);

	if (session_busy_end(h->s)) {
		h->s->greeting = false;
		hello(h->s, &h->m.h);
	}
	free(h);
}

static void hello_later(struct session *s, const struct moment_hello *m)
{
	struct hello_wait *h = calloc(1, sizeof(*h));

	if (!h) {
		session_error(s, &m->h, -ENOMEM, "out of memory");
		return;
	}
	h->w.wake = hello_again;
	h->s = s;
	h->m = *m;
	session_busy_begin(s);
	s->greeting = true;
	list_push_back(&s->e->after, &h->w.link);
}

static void hello(struct session *s, const struct moment_msg *msg)
{
	const struct moment_hello *m = (const struct moment_hello *)msg;
	struct engine *e = s->e;
	struct hello_revert *h;
	char who[64];

	if (m->version != MOMENT_PROTOCOL_VERSION) {
		session_error(
			s, msg, -EPROTO,
			"the client speaks protocol version %u, the engine %u: use libmoment and momentfs of the "
			"same release",
			m->version, MOMENT_PROTOCOL_VERSION);
		return;
	}
	memcpy(s->client, m->client, sizeof(s->client));
	s->client[sizeof(s->client) - 1] = 0;
	s->readonly = msg->flags & MOMENT_HELLO_READONLY;
	if (s->readonly) {
		s->quota = arena_size(e->arena) / 16;
		s->quota_small = s->quota;
		hello_ok(s, msg, STEP_NONE);
		return;
	}
	if (e->c.readonly) {
		session_error(s, msg, -EROFS, "%s is mounted read-only", e->path);
		return;
	}
	if (e->reverting && !e->writer) {
		hello_later(s, m);
		return;
	}
	if (e->writer || e->plain) {
		if (e->writer)
			session_error(
				s, msg, -EBUSY,
				"%s already has a writing session: %s (%s); one at a time, end that one "
				"first",
				e->path, e->writer->client, holder_who(who, e->writer->opts.pid));
		else
			session_error(
				s, msg, -EBUSY,
				"step %llu was begun through .moment/step and is open: end it or roll back first",
				(unsigned long long)e->open_step);
		return;
	}
	{
		struct arena_info ai;

		arena_get_info(e->arena, &ai);
		s->quota = (uint64_t)(ai.chunks / 2) * ai.chunk;
		s->quota_small = min_u64(s->quota, (uint64_t)ai.small_max * ai.chunk * 3 / 4);
	}
	if (!e->torn) {
		hello_ok(s, msg, STEP_NONE);
		return;
	}
	if (!(msg->flags & MOMENT_HELLO_ROLLBACK)) {
		session_error(
			s, msg, -ESTALE,
			"step %llu was not finished by its process: the state must go back to the last commit first "
			"(momentctl rollback, or ask for it when opening)",
			(unsigned long long)e->open_step);
		return;
	}
	h = calloc(1, sizeof(*h));
	if (!h || e->reverting) {
		free(h);
		session_error(s, msg, e->reverting ? -EBUSY : -ENOMEM, "cannot roll back now");
		return;
	}
	h->s = s;
	h->req = *msg;
	h->torn = e->open_step;
	session_busy_begin(s);
	s->greeting = true;
	e->writer = s; /* nobody else may come meanwhile */
	engine_revert(e, false, hello_reverted, h);
}

/* ---- messages ---- */

int session_create(struct engine *e, const struct session_opts *opts, struct session **out)
{
	struct session *s = calloc(1, sizeof(*s));

	if (!s)
		return -ENOMEM;
	s->e = e;
	s->opts = *opts;
	list_init(&s->commits);
	for (unsigned int i = 0; i < LEASE_HASH; i++)
		list_init(&s->leases[i]);
	list_push_back(&e->sessions, &s->link);
	*out = s;
	return 0;
}

static size_t min_len(uint16_t type)
{
	switch (type) {
	case MOMENT_MSG_HELLO:
		return sizeof(struct moment_hello);
	case MOMENT_MSG_REGISTER:
		return sizeof(struct moment_register);
	case MOMENT_MSG_LIST:
		return sizeof(struct moment_list);
	case MOMENT_MSG_ADVANCE:
		return sizeof(struct moment_advance);
	case MOMENT_MSG_PREFETCH:
		return sizeof(struct moment_prefetch);
	case MOMENT_MSG_PRE_STEP:
	case MOMENT_MSG_POST_STEP:
		return sizeof(struct moment_pre_step);
	case MOMENT_MSG_STEPS:
		return sizeof(struct moment_steps);
	case MOMENT_MSG_REMOVE:
		return sizeof(struct moment_remove);
	case MOMENT_MSG_COMMIT:
	case MOMENT_MSG_ROLLBACK:
	case MOMENT_MSG_INFO:
		return sizeof(struct moment_simple);
	default:
		return SIZE_MAX;
	}
}

/* Messages that change something; a read-only session may not send them. */
static bool needs_writer(uint16_t type)
{
	return type != MOMENT_MSG_LIST && type != MOMENT_MSG_ADVANCE &&
	       type != MOMENT_MSG_PREFETCH && type != MOMENT_MSG_INFO &&
	       type != MOMENT_MSG_REGISTER;
}

/* Messages of which any number could wait, and be kept. What ADVANCEs wait for is in the quota. */
static bool may_pile_up(uint16_t type)
{
	return type == MOMENT_MSG_REGISTER || type == MOMENT_MSG_COMMIT;
}

int session_receive(struct session *s, const void *buf, size_t len)
{
	const struct moment_msg *m = buf;

	if ((uintptr_t)buf % 8 || len < sizeof(*m) || len > MOMENT_MSG_MAX || m->len != len ||
	    len < min_len(m->type) || s->greeting || s->hello == (m->type == MOMENT_MSG_HELLO))
		return -EPROTO;
	if (s->hello && s->readonly && needs_writer(m->type)) {
		session_error(s, m, -EPERM, "this session is read-only");
		return 0;
	}
	if (may_pile_up(m->type) && s->busy + s->ncommits >= REQUESTS_MOST) {
		session_error(s, m, -EBUSY,
			      "%u requests of this session are under way: wait for replies first",
			      REQUESTS_MOST);
		return 0;
	}
	if (s->e->reverting && (m->type == MOMENT_MSG_STEPS || m->type == MOMENT_MSG_POST_STEP ||
				m->type == MOMENT_MSG_REMOVE)) {
		session_error(s, m, -EBUSY, "a rollback is under way");
		return 0;
	}
	switch (m->type) {
	case MOMENT_MSG_HELLO:
		hello(s, m);
		break;
	case MOMENT_MSG_REGISTER:
		session_register(s, m);
		break;
	case MOMENT_MSG_LIST:
		session_list(s, m);
		break;
	case MOMENT_MSG_ADVANCE:
		session_advance(s, m);
		break;
	case MOMENT_MSG_PREFETCH:
		session_prefetch(s, m);
		break;
	case MOMENT_MSG_PRE_STEP:
		session_pre_step(s, m);
		break;
	case MOMENT_MSG_STEPS:
		session_steps(s, m);
		break;
	case MOMENT_MSG_POST_STEP:
		session_post_step(s, m);
		break;
	case MOMENT_MSG_COMMIT:
		session_commit(s, m);
		break;
	case MOMENT_MSG_ROLLBACK:
		session_rollback(s, m);
		break;
	case MOMENT_MSG_INFO:
		session_info_reply(s, m);
		break;
	case MOMENT_MSG_REMOVE:
		session_remove(s, m);
		break;
	}
	return 0;
}

/* ---- good-bye ---- */

static void nothing_more(void *arg)
{
	(void)arg;
}

void session_destroy(struct session *s)
{
	struct engine *e = s->e;

	if (s->dead)
		return;
	s->dead = true;
	session_busy_begin(s); /* what ends here must not free it under our feet */
	list_remove(&s->link);
	session_drop_leases(s);
	if (s->stepping) {
		char who[64];

		/* Its files stay held: no commit takes them before a rollback. */
		e->torn = true;
		engine_log(
			e, ENGINE_LOG_WARNING,
			"%s (%s) ended inside step %llu: the state is torn; the next session or momentctl "
			"rollback returns to the last commit",
			s->client[0] ? s->client : "the session", holder_who(who, s->opts.pid),
			(unsigned long long)s->step);
	}
	session_unregister_all(s);
	if (e->writer == s)
		e->writer = NULL;
	while (!list_empty(&s->commits)) {
		struct list *l = s->commits.next;

		list_remove(l);
		session_commit_free(l);
	}
	session_busy_end(s);
	cache_pump(&e->c);
	engine_invalidate(e, nothing_more, NULL);
}

void session_destroy_all(struct engine *e)
{
	while (!list_empty(&e->sessions))
		session_destroy(list_first(&e->sessions, struct session, link));
}

void session_status(struct engine *e, FILE *f)
{
	bool first = true;

	fputc('[', f);
	list_for_each(l, &e->sessions)
	{
		struct session *s = list_entry(l, struct session, link);

		if (!s->hello)
			continue;
		fprintf(f, "%s{\"client\":", first ? "" : ",");
		status_string(f, s->client);
		fprintf(f,
			",\"pid\":%ld,\"uid\":%ld,\"writes\":%s,\"parameters\":%u,\"leases\":%llu,"
			"\"leased_bytes\":%llu,\"quota_bytes\":%llu,\"reserved_bytes\":%llu,"
			"\"pinned_bytes\":%llu,\"in_step\":%s}",
			(long)s->opts.pid, (long)s->opts.uid, s->readonly ? "false" : "true",
			s->nparams, (unsigned long long)s->nleases, (unsigned long long)s->leased,
			(unsigned long long)s->quota, (unsigned long long)s->reserved,
			(unsigned long long)s->pinned, s->stepping ? "true" : "false");
		first = false;
	}
	fputc(']', f);
}
