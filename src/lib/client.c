/* SPDX-License-Identifier: Apache-2.0 */
/*
 * client.c - the client of protocol.h: one thread at a time, several requests in flight.
 *
 * A request is numbered, put on the pending list and sent; whoever waits for one reads replies and
 * gives each to the pending call of its number until his own is there. A call belongs to its
 * caller, who must wait for it before letting it go. When the other side dies every pending call
 * ends with -ECONNRESET, with a text that says who died and what to do, and nothing is sent any
 * more.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "lib/client.h"
#include "lib/error.h"

static int client_died(struct client *c)
{
	char step[64] = "there was none yet";

	c->dead = true;
	if (c->committed != MOMENT_STEP_NONE)
		snprintf(step, sizeof(step), "step %llu", (unsigned long long)c->committed);
	if (c->t->ops->forked && strcmp(c->t->ops->name, "embedded") == 0)
		return err_set(-ECONNRESET,
			       "the engine in this process ended the session on %s "
			       "(a message it could not read)",
			       c->path.backing ? c->path.backing : "its backing");
	return err_set(
		-ECONNRESET,
		"the momentfs daemon (process %u) that serves %s has ended or dropped this "
		"session. The state on disk is the last commit that is known here: %s, or a later "
		"one. Start `momentfs %s %s` again and open a new session with resume",
		c->path.holder_pid, c->path.backing ? c->path.backing : "the backing", step,
		c->path.backing ? c->path.backing : "BACKING",
		c->path.mount ? c->path.mount : "MOUNTPOINT");
}

int client_send(struct client *c, struct moment_msg *m, struct call *call, void *reply, size_t cap)
{
	int res;

	if (c->dead)
		return client_died(c);
	m->id = ++c->last_id;
	if (call) {
		call->id = m->id;
		call->reply = reply;
		call->cap = cap;
		call->len = 0;
		call->status = 0;
		call->done = false;
		call->text[0] = 0;
	}
	res = c->t->ops->send(c->t, m, m->len);
	if (res == -ECONNRESET)
		return client_died(c);
	if (res < 0)
		return err_set(res, "cannot send to %s: %s", c->t->ops->name, strerror(-res));
	if (call) {
		call->next = c->pending;
		c->pending = call;
	}
	return 0;
}

static void client_complete(struct client *c, const struct moment_reply *r, size_t len)
{
	struct call **at, *call;

	for (at = &c->pending; (call = *at) != NULL; at = &call->next)
		if (call->id == r->h.id)
			break;
	if (!call)
		return;
	*at = call->next;
	call->status = r->status > 0 ? 0 : r->status;
	call->done = true;
	if (r->status < 0) {
		size_t n = len - sizeof(*r);

		if (n > r->text_len)
			n = r->text_len;
		if (n >= sizeof(call->text))
			n = sizeof(call->text) - 1;
		memcpy(call->text, r + 1, n);
		call->text[n] = 0;
	} else {
		call->len = len < call->cap ? len : call->cap;
		memcpy(call->reply, r, call->len);
	}
}

int client_wait(struct client *c, struct call *call)
{
	while (!call->done) {
		const struct moment_reply *r = (const void *)c->in;
		int64_t n = c->dead ? -ECONNRESET : c->t->ops->recv(c->t, c->in, MOMENT_MSG_MAX);

		if (n < (int64_t)sizeof(*r)) {
			c->pending = NULL; /* whoever waits for one of them comes here again */
			return client_died(c);
		}
		client_complete(c, r, (size_t)n);
	}
	if (call->status < 0)
		return err_set(call->status, "%s",
			       call->text[0] ? call->text : strerror(-call->status));
	return 0;
}

int client_call(struct client *c, struct moment_msg *m, void *reply, size_t cap)
{
	struct call call;
	int res = client_send(c, m, &call, reply, cap);

	return res < 0 ? res : client_wait(c, &call);
}

/* ---- leases ----------------------------------------------------------------------------- */

static int client_ask(struct path *p, struct path_ask *ask)
{
	struct client *c = client_of(p);
	struct moment_advance *m = (void *)c->out;
	size_t n = (size_t)ask->n_release + ask->n_lease;
	size_t need =
		sizeof(struct moment_advance_reply) + ask->n_lease * sizeof(struct moment_lease);
	size_t len = sizeof(*m) + n * sizeof(ask->r[0]);

	if (len > MOMENT_MSG_MAX || need > MOMENT_MSG_MAX)
		return err_set(-E2BIG, "%zu ranges do not fit a message", n);
	if (ask->scratch_cap < need) {
		void *s = realloc(ask->scratch, need);

		if (!s)
			return err_set(-ENOMEM, "out of memory");
		ask->scratch = s;
		ask->scratch_cap = need;
	}
	*m = (struct moment_advance){.h = {.type = MOMENT_MSG_ADVANCE, .len = (uint32_t)len},
				     .n_release = ask->n_release,
				     .n_lease = ask->n_lease};
	memcpy(m->r, ask->r, n * sizeof(ask->r[0]));
	return client_send(c, &m->h, &ask->call, ask->scratch, ask->scratch_cap);
}

static int client_wait_ask(struct path *p, struct path_ask *ask)
{
	struct client *c = client_of(p);
	const struct moment_advance_reply *r;
	int res = client_wait(c, &ask->call);
	uint32_t i;

	if (res < 0)
		return res;
	r = ask->scratch;
	if (ask->call.len < sizeof(*r) + ask->n_lease * sizeof(r->l[0]) || r->n != ask->n_lease)
		return err_set(-EPROTO, "%u leases were asked for, the reply has others",
			       ask->n_lease);
	for (i = 0; i < r->n; i++) {
		const struct moment_lease *l = &r->l[i];

		if (l->arena > c->arena_size || l->len > c->arena_size - l->arena)
			return err_set(-EPROTO, "a lease lies outside the RAM tier");
		ask->mem[i] = (struct path_mem){.ptr = c->arena + l->arena, .len = l->len};
	}
	return 0;
}

static void client_prefetch(struct path *p, const struct moment_range *r, size_t n)
{
	struct client *c = client_of(p);
	struct moment_prefetch *m = (void *)c->out;
	size_t most = (MOMENT_MSG_MAX - sizeof(*m)) / sizeof(*r);

	while (n > 0) {
		size_t k = n < most ? n : most;

		*m = (struct moment_prefetch){
			.h = {.type = MOMENT_MSG_PREFETCH,
			      .len = (uint32_t)(sizeof(*m) + k * sizeof(*r))},
			.n = (uint32_t)k,
		};
		memcpy(m->r, r, k * sizeof(*r));
		if (client_send(c, &m->h, NULL, NULL, 0) < 0)
			return; /* the next request that matters tells */
		r += k;
		n -= k;
	}
}

/* ---- steps and commits ------------------------------------------------------------------ */

static int client_simple(struct client *c, struct moment_msg *m, struct moment_info_reply *r)
{
	struct moment_info_reply mine;
	int res;

	if (!r)
		r = &mine;
	*r = (struct moment_info_reply){.committed_step = c->committed};
	res = client_call(c, m, r, sizeof(*r));
	if (res == 0)
		c->committed = r->committed_step;
	return res;
}

static int client_pre_step(struct path *p, uint64_t step)
{
	struct moment_pre_step m = {.h = {.type = MOMENT_MSG_PRE_STEP, .len = sizeof(m)},
				    .step = step};

	return client_simple(client_of(p), &m.h, NULL);
}

static int client_steps(struct path *p, const struct moment_param_step *s, size_t n)
{
	struct client *c = client_of(p);
	struct moment_steps *m = (void *)c->out;
	size_t most = (MOMENT_MSG_MAX - sizeof(*m)) / sizeof(*s);
	int res = 0;

	while (n > 0 && res == 0) {
		size_t k = n < most ? n : most;

		*m = (struct moment_steps){
			.h = {.type = MOMENT_MSG_STEPS,
			      .len = (uint32_t)(sizeof(*m) + k * sizeof(*s))},
			.n = (uint32_t)k,
		};
		memcpy(m->p, s, k * sizeof(*s));
		res = client_simple(c, &m->h, NULL);
		s += k;
		n -= k;
	}
	return res;
}

static int client_post_step(struct path *p, uint64_t step, uint32_t flags)
{
	struct moment_post_step m = {
		.h = {.type = MOMENT_MSG_POST_STEP, .len = sizeof(m), .flags = (uint16_t)flags},
		.step = step,
	};
	struct client *c = client_of(p);
	int res = client_simple(c, &m.h, NULL);

	if (!res && c->t->ops->rest)
		c->t->ops->rest(c->t);
	return res;
}

static int client_commit(struct path *p, bool wait)
{
	struct moment_simple m = {.h = {.type = MOMENT_MSG_COMMIT,
					.len = sizeof(m),
					.flags = wait ? MOMENT_COMMIT_WAIT : 0}};

	return client_simple(client_of(p), &m.h, NULL);
}

static int client_rollback(struct path *p)
{
	struct moment_simple m = {.h = {.type = MOMENT_MSG_ROLLBACK, .len = sizeof(m)}};

	return client_simple(client_of(p), &m.h, NULL);
}

static int client_info(struct path *p, struct moment_info *info)
{
	struct moment_simple m = {.h = {.type = MOMENT_MSG_INFO, .len = sizeof(m)}};
	struct moment_info_reply r;
	int res = client_simple(client_of(p), &m.h, &r);

	if (res < 0)
		return res;
	info->committed_step = r.committed_step;
	info->step = r.step;
	info->open_step = r.open_step;
	info->read_bytes = r.read_bytes;
	info->written_bytes = r.written_bytes;
	info->hits = r.hits;
	info->misses = r.misses;
	info->error = r.error;
	return 0;
}

/* ---- life ------------------------------------------------------------------------------- */

static int client_close(struct path *p, bool commit)
{
	struct client *c = client_of(p);
	int res = c->t->ops->close(c->t, commit);

	free(p->mount);
	free(p->backing);
	free(c->out);
	free(c->in);
	free(c);
	return res;
}

static void client_forked(struct path *p)
{
	struct client *c = client_of(p);

	c->t->ops->forked(c->t);
}

static const struct path_ops session_ops = {
	.name = "session",
	.list = client_list,
	.add = client_add,
	.remove = client_remove,
	.ask = client_ask,
	.wait = client_wait_ask,
	.prefetch = client_prefetch,
	.pre_step = client_pre_step,
	.steps = client_steps,
	.post_step = client_post_step,
	.commit = client_commit,
	.rollback = client_rollback,
	.info = client_info,
	.close = client_close,
	.forked = client_forked,
};

static int client_hello(struct client *c, const struct path_opts *o)
{
	struct moment_hello m = {
		.h = {.type = MOMENT_MSG_HELLO,
		      .len = sizeof(m),
		      .flags = (uint16_t)((o->readonly ? MOMENT_HELLO_READONLY : 0) |
					  (o->rollback ? MOMENT_HELLO_ROLLBACK : 0))},
		.version = MOMENT_PROTOCOL_VERSION,
		.pid = (uint32_t)getpid(),
	};
	struct moment_hello_reply r = {.block = 0};
	void *base = NULL;
	int res;

	snprintf(m.client, sizeof(m.client), "%s", o->client);
	res = client_call(c, &m.h, &r, sizeof(r));
	if (res < 0)
		return res;
	if (r.version != MOMENT_PROTOCOL_VERSION)
		return err_set(
			-EPROTO,
			"the daemon speaks protocol %u, this library %u: install the same version of both",
			r.version, MOMENT_PROTOCOL_VERSION);
	if (r.block < 4096 || (r.block & (r.block - 1)) || r.arena_size == 0)
		return err_set(-EPROTO,
			       "the daemon's greeting makes no sense (block %u, RAM tier %llu)",
			       r.block, (unsigned long long)r.arena_size);
	res = c->t->ops->attach(c->t, r.arena_size, &base);
	if (res < 0)
		return res;
	c->arena = base;
	c->arena_size = r.arena_size;
	c->committed = r.committed_step;
	c->path.block = r.block;
	c->path.quota = r.quota;
	c->path.quota_small = r.quota_small;
	c->path.window = r.window;
	c->path.ram = r.ram;
	c->path.rolled_back = r.rolled_back;
	c->path.holder_pid = r.daemon_pid;
	return 0;
}

/* Takes the transport. */
static int client_open(struct transport *t, const struct path_ops *ops, const struct path_opts *o,
		       struct path **out)
{
	struct client *c = calloc(1, sizeof(*c));
	int res;

	if (!c) {
		t->ops->close(t, false);
		return err_set(-ENOMEM, "out of memory");
	}
	c->t = t;
	c->path.ops = ops;
	c->committed = MOMENT_STEP_NONE;
	c->out = malloc(MOMENT_MSG_MAX);
	c->in = malloc(MOMENT_MSG_MAX);
	c->path.backing = o->backing ? realpath(o->backing, NULL) : NULL;
	c->path.mount = o->mount ? realpath(o->mount, NULL) : NULL;
	if (!c->out || !c->in) {
		res = err_set(-ENOMEM, "out of memory");
		goto out_close;
	}
	res = client_hello(c, o);
	if (res < 0)
		goto out_close;
	*out = &c->path;
	return 0;
out_close:
	client_close(&c->path, false);
	return res;
}

int path_open_session(const struct path_opts *o, struct path **out)
{
	struct transport *t;
	int res = transport_socket(o->backing, &t);

	return res < 0 ? res : client_open(t, &session_ops, o, out);
}

int path_open_embedded(const struct path_opts *o, struct path **out)
{
	static struct path_ops embedded_ops;
	struct transport *t;
	int res = transport_embedded(o, &t);

	if (res < 0)
		return res;
	embedded_ops = session_ops;
	embedded_ops.name = "embedded";
	return client_open(t, &embedded_ops, o, out);
}
