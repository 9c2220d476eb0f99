/* SPDX-License-Identifier: Apache-2.0 */
/*
 * session_link.h - a bare client of the session protocol, for tests: messages are put together by
 * hand and replies looked at as they come, so that what libmoment would never send can be sent.
 *
 * A link moves whole messages: link_local() to an engine in this process, link_socket() to a
 * mounted daemon. A wire is a link with a message being made and the last reply. One thread.
 */
#ifndef TESTS_SESSION_LINK_H
#define TESTS_SESSION_LINK_H

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "engine/engine.h"
#include "moment/protocol.h"

#define LINK_WAIT_MS 60000 /* no reply in this time: something hangs */

struct link {
	int (*send)(struct link *l, const void *msg, size_t len); /* 0 or -errno */
	/* The next reply; 0: none came in time; -errno: the other side has gone. */
	ssize_t (*recv)(struct link *l, void *buf, size_t cap, int ms);
	void (*close)(struct link *l);
	char *base; /* the arena, after HELLO */
};

/* ---- to an engine in this process ---- */

struct link_reply {
	struct link_reply *next;
	size_t len;
	char bytes[];
};

struct link_local {
	struct link l;
	struct engine *e;
	struct session *s;
	pthread_mutex_t lock; /* of the queue */
	pthread_cond_t more;
	struct link_reply *first, **last;
	/* an argument and result of a loop_call */
	const void *msg;
	size_t len;
	int res;
};

static inline void link_local_reply(void *arg, const void *msg, size_t len, bool pass_arena)
{
	struct link_local *k = arg;
	struct link_reply *r = malloc(sizeof(*r) + len);

	(void)pass_arena;
	r->next = NULL;
	r->len = len;
	memcpy(r->bytes, msg, len);
	pthread_mutex_lock(&k->lock);
	*k->last = r;
	k->last = &r->next;
	pthread_cond_signal(&k->more);
	pthread_mutex_unlock(&k->lock);
}

static inline void link_local_send_fn(void *arg)
{
	struct link_local *k = arg;

	k->res = session_receive(k->s, k->msg, k->len);
}

static inline int link_local_send(struct link *l, const void *msg, size_t len)
{
	struct link_local *k = (struct link_local *)l;

	k->msg = msg;
	k->len = len;
	loop_call(engine_loop(k->e), link_local_send_fn, k);
	return k->res;
}

static inline ssize_t link_local_recv(struct link *l, void *buf, size_t cap, int ms)
{
	struct link_local *k = (struct link_local *)l;
	struct link_reply *r;
	struct timespec until;
	ssize_t len = 0;
	int x = 0;

	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += ms / 1000;
	until.tv_nsec += ms % 1000 * 1000000L;
	if (until.tv_nsec >= 1000000000L) {
		until.tv_nsec -= 1000000000L;
		until.tv_sec++;
	}
	pthread_mutex_lock(&k->lock);
	while (!k->first && x != ETIMEDOUT)
		x = pthread_cond_timedwait(&k->more, &k->lock, &until);
	r = k->first;
	if (r) {
		k->first = r->next;
		if (!k->first)
			k->last = &k->first;
		len = (ssize_t)r->len;
		memcpy(buf, r->bytes, r->len < cap ? r->len : cap);
		free(r);
	}
	pthread_mutex_unlock(&k->lock);
	return len;
}

static inline void link_local_close_fn(void *arg)
{
	struct link_local *k = arg;

	if (k->s)
		session_destroy(k->s);
}

/* The session ended with its engine. */
static inline void link_local_gone(struct link *l)
{
	((struct link_local *)l)->e = NULL;
}

static inline void link_local_close(struct link *l)
{
	struct link_local *k = (struct link_local *)l;

	if (k->e)
		loop_call(engine_loop(k->e), link_local_close_fn, k);
	while (k->first) {
		struct link_reply *r = k->first;

		k->first = r->next;
		free(r);
	}
	pthread_mutex_destroy(&k->lock);
	pthread_cond_destroy(&k->more);
	free(k);
}

static inline void link_local_open_fn(void *arg)
{
	struct link_local *k = arg;
	struct session_opts o = {.pid = getpid(),
				 .uid = getuid(),
				 .gid = getgid(),
				 .reply = link_local_reply,
				 .arg = k};

	k->res = session_create(k->e, &o, &k->s);
}

static inline struct link *link_local(struct engine *e)
{
	struct link_local *k = calloc(1, sizeof(*k));

	k->l = (struct link){link_local_send, link_local_recv, link_local_close,
			     arena_base(engine_arena(e))};
	k->e = e;
	k->last = &k->first;
	pthread_mutex_init(&k->lock, NULL);
	pthread_cond_init(&k->more, NULL);
	loop_call(engine_loop(e), link_local_open_fn, k);
	return k->res ? (link_local_close(&k->l), NULL) : &k->l;
}

/* ---- to a daemon ---- */

struct link_socket {
	struct link l;
	int fd;
	uint64_t arena;
};

static inline int link_socket_send(struct link *l, const void *msg, size_t len)
{
	struct link_socket *k = (struct link_socket *)l;

	return send(k->fd, msg, len, MSG_NOSIGNAL) < 0 ? -errno : 0;
}

/* The first reply with a descriptor has the arena: it is mapped here. */
static inline ssize_t link_socket_recv(struct link *l, void *buf, size_t cap, int ms)
{
	struct link_socket *k = (struct link_socket *)l;
	union {
		struct cmsghdr align;
		char space[CMSG_SPACE(sizeof(int))];
	} control;
	struct iovec iov = {buf, cap};
	struct msghdr m = {.msg_iov = &iov,
			   .msg_iovlen = 1,
			   .msg_control = control.space,
			   .msg_controllen = sizeof(control.space)};
	struct pollfd p = {.fd = k->fd, .events = POLLIN};
	struct cmsghdr *c;
	ssize_t n;
	int fd;

	if (poll(&p, 1, ms) == 0)
		return 0;
	n = recvmsg(k->fd, &m, MSG_CMSG_CLOEXEC);
	if (n <= 0)
		return n < 0 ? -errno : -ECONNRESET;
	c = CMSG_FIRSTHDR(&m);
	if (c && !l->base) {
		const struct moment_hello_reply *h = buf;

		memcpy(&fd, CMSG_DATA(c), sizeof(fd));
		k->arena = h->arena_size;
		l->base = mmap(NULL, k->arena, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		close(fd);
		if (l->base == MAP_FAILED)
			return -errno;
	}
	return n;
}

static inline void link_socket_close(struct link *l)
{
	struct link_socket *k = (struct link_socket *)l;

	if (l->base)
		munmap(l->base, k->arena);
	close(k->fd);
	free(k);
}

/* `backing`: a path of up to 90 bytes. NULL with errno set. */
static inline struct link *link_socket(const char *backing)
{
	struct sockaddr_un sa = {.sun_family = AF_UNIX};
	struct link_socket *k = calloc(1, sizeof(*k));

	k->l = (struct link){link_socket_send, link_socket_recv, link_socket_close, NULL};
	k->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	snprintf(sa.sun_path, sizeof(sa.sun_path), "%s/%s", backing, MOMENT_SOCKET_NAME);
	if (k->fd >= 0 && !connect(k->fd, (struct sockaddr *)&sa, sizeof(sa)))
		return &k->l;
	free(k);
	return NULL;
}

/* ---- messages ---- */

struct wire {
	struct link *l;
	uint64_t id;
	/* Replies that are not the one waited for; NULL: there may be none. */
	void (*other)(struct wire *w, const struct moment_reply *r);
	void *arg;
	size_t at; /* end of the message being made */
	_Alignas(8) char out[MOMENT_MSG_MAX];
	_Alignas(8) char in[MOMENT_MSG_MAX];
};

static inline void *wire_begin(struct wire *w, uint16_t type, uint16_t flags, size_t len)
{
	struct moment_msg *m = (struct moment_msg *)w->out;

	memset(w->out, 0, len);
	m->type = type;
	m->flags = flags;
	m->id = ++w->id;
	w->at = len;
	return m;
}

/* Room for another part of `len` bytes at the end. */
static inline void *wire_more(struct wire *w, size_t len)
{
	void *p = w->out + w->at;

	if (w->at + len > sizeof(w->out)) {
		fputs("test: the message is too long\n", stderr);
		abort();
	}
	memset(p, 0, len);
	w->at += len;
	return p;
}

static inline int wire_send(struct wire *w)
{
	struct moment_msg *m = (struct moment_msg *)w->out;

	m->len = (uint32_t)w->at;
	return w->l->send(w->l, w->out, w->at);
}

/* One reply, whichever comes. NULL: none in time, or the other side has gone. */
static inline struct moment_reply *wire_recv(struct wire *w, int ms)
{
	return w->l->recv(w->l, w->in, sizeof(w->in), ms) > 0 ? (struct moment_reply *)w->in : NULL;
}

/* The reply to message `id`. */
static inline struct moment_reply *wire_wait(struct wire *w, uint64_t id)
{
	for (;;) {
		struct moment_reply *r = wire_recv(w, LINK_WAIT_MS);

		if (!r || r->h.id == id)
			return r;
		if (!w->other) {
			fprintf(stderr, "test: reply to message %llu, not %llu\n",
				(unsigned long long)r->h.id, (unsigned long long)id);
			abort();
		}
		w->other(w, r);
	}
}

/* Sends what was made and waits: its status; -EPIPE: no reply came. */
static inline int wire_call(struct wire *w)
{
	uint64_t id = w->id;
	struct moment_reply *r;
	int x = wire_send(w);

	if (x)
		return x;
	r = wire_wait(w, id);
	return r ? r->status : -EPIPE;
}

/* The text of the last reply, an error. */
static inline const char *wire_text(struct wire *w)
{
	struct moment_reply *r = (struct moment_reply *)w->in;

	if (r->status == 0)
		return "";
	w->in[sizeof(*r) + r->text_len] = 0;
	return w->in + sizeof(*r);
}

static inline int wire_hello(struct wire *w, uint16_t flags)
{
	struct moment_hello *m = wire_begin(w, MOMENT_MSG_HELLO, flags, sizeof(*m));

	m->version = MOMENT_PROTOCOL_VERSION;
	m->pid = (uint32_t)getpid();
	snprintf(m->client, sizeof(m->client), "test client");
	return wire_call(w);
}

static inline int wire_simple(struct wire *w, uint16_t type, uint16_t flags)
{
	wire_begin(w, type, flags, sizeof(struct moment_simple));
	return wire_call(w);
}

static inline int wire_step(struct wire *w, uint16_t type, uint64_t step)
{
	struct moment_pre_step *m = wire_begin(w, type, 0, sizeof(*m));

	m->step = step;
	return wire_call(w);
}

struct wire_param {
	const char *name;
	size_t name_len; /* 0: strlen */
	uint64_t shape[MOMENT_NDIM_MAX];
	uint32_t ndim;
	uint8_t dtype[MOMENT_ROLES];
	uint8_t tier;
	const char *hyper;
};

static inline void wire_reg_begin(struct wire *w, uint32_t flags)
{
	struct moment_register *m = wire_begin(w, MOMENT_MSG_REGISTER, 0, sizeof(*m));

	m->flags = flags;
}

static inline struct moment_reg_entry *wire_reg_add(struct wire *w, const struct wire_param *p)
{
	size_t name = p->name_len ? p->name_len : strlen(p->name);
	size_t hyper = p->hyper ? strlen(p->hyper) : 0;
	size_t size = (sizeof(struct moment_reg_entry) + p->ndim * 8 + name + hyper + 7) / 8 * 8;
	struct moment_reg_entry *e = wire_more(w, size);
	char *tail = (char *)(e + 1);

	e->size = (uint32_t)size;
	e->name_len = (uint32_t)name;
	e->hyper_len = (uint32_t)hyper;
	e->ndim = p->ndim;
	e->numel = 1;
	for (uint32_t d = 0; d < p->ndim; d++)
		e->numel *= p->shape[d];
	memcpy(e->dtype, p->dtype, sizeof(e->dtype));
	e->tier = p->tier;
	memcpy(tail, p->shape, p->ndim * 8);
	memcpy(tail + p->ndim * 8, p->name, name);
	if (hyper)
		memcpy(tail + p->ndim * 8 + name, p->hyper, hyper);
	((struct moment_register *)w->out)->n++;
	return e;
}

static inline void wire_adv_begin(struct wire *w)
{
	wire_begin(w, MOMENT_MSG_ADVANCE, 0, sizeof(struct moment_advance));
}

/* Releases come first. */
static inline void wire_adv_add(struct wire *w, bool lease, struct moment_range r)
{
	struct moment_advance *m = (struct moment_advance *)w->out;

	*(struct moment_range *)wire_more(w, sizeof(r)) = r;
	if (lease)
		m->n_lease++;
	else
		m->n_release++;
}

static inline const struct moment_lease *wire_leases(struct wire *w)
{
	return ((struct moment_advance_reply *)w->in)->l;
}

#endif
