/* SPDX-License-Identifier: Apache-2.0 */
/*
 * client_params.c - registering, listing and removing parameters: messages with entries of any
 * length.
 *
 * A message has 64 KiB, a model may need more. REGISTER is all or nothing a message; here it
 * becomes all or nothing a call: first every message is sent with CHECK, then for real, and should
 * one still fail, what this call made is removed again.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "lib/client.h"
#include "lib/error.h"

/* Writes p as an entry at `at` if it fits; its size or 0. */
static uint32_t entry_put(char *at, size_t room, const struct path_param *p)
{
	size_t name = strlen(p->name), hyper = p->hyper ? strlen(p->hyper) : 0;
	size_t shape = p->ndim * sizeof(uint64_t);
	size_t size = (sizeof(struct moment_reg_entry) + shape + name + hyper + 7) & ~(size_t)7;
	struct moment_reg_entry e = {
		.size = (uint32_t)size,
		.name_len = (uint32_t)name,
		.numel = p->numel,
		.ndim = p->ndim,
		.hyper_len = (uint32_t)hyper,
		.tier = p->tier,
	};

	if (size > room)
		return 0;
	memcpy(e.dtype, p->dtype, sizeof(e.dtype));
	memset(at, 0, size);
	memcpy(at, &e, sizeof(e));
	at += sizeof(e);
	if (shape)
		memcpy(at, p->shape, shape);
	memcpy(at + shape, p->name, name);
	if (hyper)
		memcpy(at + shape + name, p->hyper, hyper);
	return (uint32_t)size;
}

static int register_reply(struct client *c, struct path_param *pp, uint32_t n, size_t len)
{
	const struct moment_register_reply *r = (const void *)c->in;
	uint32_t i;

	if (len < sizeof(*r) + n * sizeof(r->e[0]) || r->n != n)
		return err_set(-EPROTO, "%u parameters were registered, the reply has others", n);
	c->path.reserved = r->reserved;
	c->path.free = r->free;
	for (i = 0; i < n; i++) {
		pp[i].handle = r->e[i].param;
		pp[i].found = r->e[i].flags;
		pp[i].step = r->e[i].step;
		memcpy(pp[i].file, r->e[i].file, sizeof(pp[i].file));
	}
	return 0;
}

/* One pass over all, as many messages as it takes. *done tells how many were answered well. */
static int register_pass(struct client *c, struct path_param *pp, size_t n, uint32_t flags,
			 size_t *done)
{
	struct moment_register *m = (void *)c->out;
	size_t most = (MOMENT_MSG_MAX - sizeof(struct moment_register_reply)) /
		      sizeof(struct moment_reg_reply_entry);

	*done = 0;
	while (*done < n) {
		struct call call;
		size_t len = sizeof(*m);
		uint32_t k = 0, size;
		int res;

		while (k < most && *done + k < n) {
			size = entry_put(c->out + len, MOMENT_MSG_MAX - len, &pp[*done + k]);
			if (size == 0)
				break;
			len += size;
			k++;
		}
		if (k == 0)
			return err_set(-ENAMETOOLONG, "the name of parameter %.80s... is too long",
				       pp[*done].name);
		*m = (struct moment_register){
			.h = {.type = MOMENT_MSG_REGISTER, .len = (uint32_t)len},
			.n = k,
			.flags = flags};
		/* The reply is read where it was received: nothing else is waited for in between.
		 */
		res = client_send(c, &m->h, &call, c->in, MOMENT_MSG_MAX);
		if (res == 0)
			res = client_wait(c, &call);
		if (res == 0 && !(flags & MOMENT_REG_CHECK))
			res = register_reply(c, pp + *done, k, call.len);
		if (res < 0)
			return res;
		*done += k;
	}
	return 0;
}

int client_add(struct path *p, struct path_param *pp, size_t n, uint32_t flags)
{
	struct client *c = client_of(p);
	size_t done, i, made = 0;
	uint32_t *handles;
	char text[1024];
	int res;

	res = register_pass(c, pp, n, flags | MOMENT_REG_CHECK, &done);
	if (res < 0 || (flags & MOMENT_REG_CHECK))
		return res;
	res = register_pass(c, pp, n, flags, &done);
	if (res == 0 || done == 0)
		return res;

	handles = calloc(done, sizeof(*handles));
	if (!handles)
		return res;
	for (i = 0; i < done; i++)
		if (pp[i].found & MOMENT_REG_CREATED)
			handles[made++] = pp[i].handle;
	strncpy(text, err_text(), sizeof(text) - 1);
	text[sizeof(text) - 1] = 0;
	client_remove(p, handles, made);
	free(handles);
	return err_set(res, "%s", text);
}

int client_remove(struct path *p, const uint32_t *handles, size_t n)
{
	struct client *c = client_of(p);
	struct moment_remove *m = (void *)c->out;
	size_t most = (MOMENT_MSG_MAX - sizeof(*m)) / sizeof(*handles);
	struct moment_info_reply r;
	int res = 0;

	while (n > 0 && res == 0) {
		size_t k = n < most ? n : most;

		*m = (struct moment_remove){
			.h = {.type = MOMENT_MSG_REMOVE,
			      .len = (uint32_t)(sizeof(*m) + k * sizeof(*handles))},
			.n = (uint32_t)k,
		};
		memcpy(m->param, handles, k * sizeof(*handles));
		res = client_call(c, &m->h, &r, sizeof(r));
		handles += k;
		n -= k;
	}
	return res;
}

/* Calls fn for the entry at `at` of `room` bytes. Its size, 0 if it is malformed, or fn's error. */
static int64_t entry_get(const char *at, size_t room, path_list_fn *fn, void *arg)
{
	struct moment_list_entry e;
	struct path_param p = {.found = MOMENT_REG_FOUND};
	size_t tail;
	char *copy, *name;
	int res;

	if (room < sizeof(e))
		return 0;
	memcpy(&e, at, sizeof(e));
	if (e.e.size < sizeof(e.e) || e.e.size > room - sizeof(e.step))
		return 0;
	tail = e.e.size - sizeof(e.e);
	if (e.e.ndim > MOMENT_NDIM_MAX || e.e.name_len > tail ||
	    e.e.ndim * sizeof(uint64_t) > tail - e.e.name_len)
		return 0;
	copy = malloc(tail + 1);
	if (!copy)
		return err_set(-ENOMEM, "out of memory");
	memcpy(copy, at + sizeof(e), tail);
	name = copy + e.e.ndim * sizeof(uint64_t);
	name[e.e.name_len] = 0;
	p.name = name;
	p.numel = e.e.numel;
	p.ndim = e.e.ndim;
	p.shape = (const void *)copy;
	p.tier = e.e.tier;
	p.step = e.step;
	memcpy(p.dtype, e.e.dtype, sizeof(p.dtype));
	res = fn(arg, &p);
	free(copy);
	return res != 0 ? (res < 0 ? res : -ECANCELED) : (int64_t)(sizeof(e.step) + e.e.size);
}

int client_list(struct path *p, path_list_fn *fn, void *arg)
{
	struct client *c = client_of(p);
	struct moment_list m = {.h = {.type = MOMENT_MSG_LIST, .len = sizeof(m)}};
	struct moment_list_reply *r = malloc(MOMENT_MSG_MAX);
	int res;

	if (!r)
		return err_set(-ENOMEM, "out of memory");
	do {
		struct call call;
		size_t at = sizeof(*r);
		uint32_t i;

		res = client_send(c, &m.h, &call, r, MOMENT_MSG_MAX);
		if (res == 0)
			res = client_wait(c, &call);
		if (res == 0 && call.len < sizeof(*r))
			res = err_set(-EPROTO, "a list that makes no sense");
		for (i = 0; res == 0 && i < r->n; i++) {
			int64_t size = entry_get((char *)r + at, call.len - at, fn, arg);

			if (size <= 0)
				res = size < 0 ? (int)size
					       : err_set(-EPROTO,
							 "a list entry that makes no sense");
			else
				at += (size_t)size;
		}
		m.cookie = r->cookie;
	} while (res == 0 && m.cookie != 0);
	free(r);
	return res;
}
