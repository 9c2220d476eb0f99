/* SPDX-License-Identifier: Apache-2.0 */
/*
 * transport_embedded.c - the same messages to an engine in this process.
 *
 * A message is copied and posted to the engine's loop thread; a reply, which the loop thread hands
 * to embedded_reply(), is copied to a queue that recv() waits on. So the two threads share the
 * queue and nothing else; its lock is a leaf, held for a few instructions.
 */
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "engine/engine.h"
#include "lib/error.h"
#include "lib/transport.h"

struct packet {
	struct loop_task task; /* on the way in */
	struct transport_emb *t;
	struct packet *next; /* on the way out */
	size_t len;
	char data[];
};

struct transport_emb {
	struct transport t;
	struct engine *engine;
	struct session *session; /* loop thread */
	pthread_mutex_t lock;
	pthread_cond_t cond;
	struct packet *head, **tail; /* replies; under lock */
	bool dead;		     /* under lock */
};

static struct transport_emb *emb_of(struct transport *t)
{
	return (struct transport_emb *)t;
}

static void emb_die(struct transport_emb *k)
{
	pthread_mutex_lock(&k->lock);
	k->dead = true;
	pthread_cond_signal(&k->cond);
	pthread_mutex_unlock(&k->lock);
}

/* Loop thread. */
static void emb_deliver(struct loop_task *task)
{
	struct packet *p = container_of(task, struct packet, task);
	struct transport_emb *k = p->t;

	if (session_receive(k->session, p->data, p->len) < 0)
		emb_die(k);
	free(p);
}

/* Loop thread. */
static void emb_reply(void *arg, const void *msg, size_t len, bool pass_arena)
{
	struct transport_emb *k = arg;
	struct packet *p = malloc(sizeof(*p) + len);

	(void)pass_arena; /* it is our own memory */
	if (!p) {
		emb_die(k);
		return;
	}
	p->next = NULL;
	p->len = len;
	memcpy(p->data, msg, len);
	pthread_mutex_lock(&k->lock);
	*k->tail = p;
	k->tail = &p->next;
	pthread_cond_signal(&k->cond);
	pthread_mutex_unlock(&k->lock);
}

static int emb_send(struct transport *t, const void *msg, size_t len)
{
	struct transport_emb *k = emb_of(t);
	struct packet *p = malloc(sizeof(*p) + len);

	if (!p)
		return -ENOMEM;
	p->task.run = emb_deliver;
	p->t = k;
	p->len = len;
	memcpy(p->data, msg, len);
	loop_post(engine_loop(k->engine), &p->task);
	return 0;
}

static int64_t emb_recv(struct transport *t, void *buf, size_t cap)
{
	struct transport_emb *k = emb_of(t);
	struct packet *p;
	int64_t n;

	pthread_mutex_lock(&k->lock);
	while (!k->head && !k->dead)
		pthread_cond_wait(&k->cond, &k->lock);
	p = k->head;
	if (p) {
		k->head = p->next;
		if (!k->head)
			k->tail = &k->head;
	}
	pthread_mutex_unlock(&k->lock);
	if (!p)
		return -ECONNRESET;
	n = p->len > cap ? -EPROTO : (int64_t)p->len;
	if (n > 0)
		memcpy(buf, p->data, p->len);
	free(p);
	return n;
}

static int emb_attach(struct transport *t, uint64_t arena_size, void **base)
{
	struct transport_emb *k = emb_of(t);

	*base = arena_base(engine_arena(k->engine));
	madvise(*base, arena_size, MADV_DONTFORK);
	return 0;
}

struct emb_session {
	struct transport_emb *k;
	int res;
};

static void emb_create(void *arg)
{
	struct emb_session *c = arg;
	struct session_opts so = {
		.pid = getpid(), .uid = geteuid(), .gid = getegid(), .reply = emb_reply, .arg = c->k};

	c->res = session_create(c->k->engine, &so, &c->k->session);
}

static void emb_destroy(void *arg)
{
	struct transport_emb *k = arg;

	session_destroy(k->session);
}

static void emb_free(struct transport_emb *k)
{
	while (k->head) {
		struct packet *p = k->head;

		k->head = p->next;
		free(p);
	}
	pthread_cond_destroy(&k->cond);
	pthread_mutex_destroy(&k->lock);
	free(k);
}

static int emb_close(struct transport *t, bool commit)
{
	struct transport_emb *k = emb_of(t);
	int res;

	loop_call(engine_loop(k->engine), emb_destroy, k);
	res = engine_close(k->engine, commit);
	emb_free(k);
	return res;
}

/* The engine's threads do not exist here and its locks may be held for ever: all but the backing's
 * lock is left. */
static void emb_forked(struct transport *t)
{
	engine_forked(emb_of(t)->engine);
}

static const struct transport_ops emb_ops = {
	.name = "embedded",
	.send = emb_send,
	.recv = emb_recv,
	.attach = emb_attach,
	.close = emb_close,
	.forked = emb_forked,
};

/* Any thread. */
static void emb_log(void *arg, enum engine_log_level level, const char *msg)
{
	(void)arg;
	if (level <= ENGINE_LOG_WARNING)
		fprintf(stderr, "momentfs (embedded): %s\n", msg);
}

int transport_embedded(const struct path_opts *o, struct transport **out)
{
	char holder[80], err[2 * PATH_MAX + 1024] = "";
	struct transport_emb *k = calloc(1, sizeof(*k));
	struct emb_session create = {.k = k};
	struct engine_opts eo = {
		.ram = o->ram,
		.ram_forced = o->ram_forced,
		.block = o->block,
		.commit_seconds = o->commit_seconds < 0 ? ENGINE_COMMIT_OFF : o->commit_seconds,
		.readonly = o->readonly,
		.wait = true,
		.holder = holder,
		.log = emb_log,
	};
	int res;

	if (!k)
		return err_set(-ENOMEM, "out of memory");
	k->t.ops = &emb_ops;
	k->tail = &k->head;
	pthread_mutex_init(&k->lock, NULL);
	pthread_cond_init(&k->cond, NULL);
	snprintf(holder, sizeof(holder), "%s, process %d", o->client, (int)getpid());
	res = engine_open(o->backing, &eo, &k->engine, err, sizeof(err));
	if (res < 0) {
		err_write("%s", err[0] ? err : strerror(-res));
		goto out_free;
	}
	loop_call(engine_loop(k->engine), emb_create, &create);
	if (create.res < 0) {
		res = err_set(create.res, "%s: no session: %s", o->backing, strerror(-create.res));
		goto out_close;
	}
	*out = &k->t;
	return 0;
out_close:
	engine_close(k->engine, false);
out_free:
	emb_free(k);
	return res;
}
