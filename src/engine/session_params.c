/* SPDX-License-Identifier: Apache-2.0 */
/*
 * session_params.c - a session's parameters after they were registered: removal, letting go at the
 * end; and the list of what the backing holds.
 *
 * Loop thread only.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/session.h"

const char *const session_role[MOMENT_ROLES] = {"exp_avg", "exp_avg_sq", "master",
						"max_exp_avg_sq"};
const struct session_dtype session_dtype[SESSION_DTYPES] = {
	[MOMENT_F32] = {"float32", 4},
	[MOMENT_BF16] = {"bfloat16", 2},
	[MOMENT_F16] = {"float16", 2},
	[MOMENT_F64] = {"float64", 8},
};

int64_t session_get_text(struct ns *ns, uint64_t ino, const char *name, char *out, size_t len)
{
	int64_t n = ns_getxattr(ns, ino, name, out, len - 1);

	out[n > 0 ? n : 0] = 0;
	return n;
}

/* ---- leaving ---- */

/* The file is no longer the session's; the reference to it stays. */
static void unregister_file(struct session *s, struct file *f)
{
	struct cache *c = &s->e->c;

	if (s->readonly || (f->session && f->session != s))
		return;
	f->session = NULL;
	file_pin(f, false);
	if (!f->held) { /* held: torn, and a rollback lets it go */
		file_unkeep(c, f, 0);
		file_publish(c, f, false);
		ns_unregister(c->ns, f->ino);
	}
}

static void forget_file(struct session *s, uint32_t handle)
{
	struct file *f = s->files[handle];

	s->files[handle] = NULL;
	if (f)
		ns_forget(s->e->c.ns, f->ino, 1);
}

void session_unregister_all(struct session *s)
{
	for (uint32_t i = 0; i < s->nfiles; i++) {
		if (s->files[i])
			unregister_file(s, s->files[i]);
	}
}

void session_forget_all(struct session *s)
{
	for (uint32_t i = 0; i < s->nfiles; i++)
		forget_file(s, i);
}

void session_remove(struct session *s, const struct moment_msg *msg)
{
	const struct moment_remove *m = (const struct moment_remove *)msg;
	struct cache *c = &s->e->c;

	if (msg->len != sizeof(*m) + (uint64_t)m->n * sizeof(m->param[0])) {
		session_error(s, msg, -EPROTO, "remove: the message's length does not fit");
		return;
	}
	if (s->stepping || s->nleases) {
		session_error(s, msg, -EBUSY,
			      "parameters can be removed only between steps, with no leases out");
		return;
	}
	for (uint32_t i = 0; i < m->n; i++) {
		if (m->param[i] >= s->nparams || s->params[m->param[i]].removed) {
			session_error(s, msg, -EINVAL, "remove: no parameter %u", m->param[i]);
			return;
		}
	}
	for (uint32_t i = 0; i < m->n; i++) {
		struct param *p = &s->params[m->param[i]];
		struct ns_attr a;
		char name[NS_NAME_MAX + 1];

		if (p->removed)
			continue;
		p->removed = true;
		s->reserved -= p->reserved;
		s->pinned -= p->pinned;
		for (unsigned int k = 0; k < MOMENT_ROLES; k++) {
			if (p->file[k] == UINT32_MAX)
				continue;
			unregister_file(s, s->files[p->file[k]]);
			forget_file(s, p->file[k]);
			ns_remove(c->ns, p->dir, session_role[k], false);
		}
		if (!ns_getattr(c->ns, p->dir, &a) && !ns_path(c->ns, p->dir, name, sizeof(name)))
			ns_remove(c->ns, NS_ROOT, name, true);
	}
	session_reply_told(s, msg);
}

/* ---- listing ---- */

#define LIST_BATCH 64u

struct lister {
	uint64_t ino[LIST_BATCH], cookie[LIST_BATCH];
	unsigned int n;
};

static bool list_one(void *arg, const char *name, const struct ns_attr *a, uint64_t cookie)
{
	struct lister *l = arg;

	(void)name;
	if (l->n == LIST_BATCH)
		return false;
	if (!S_ISDIR(a->mode))
		return true;
	l->ino[l->n] = a->ino;
	l->cookie[l->n++] = cookie;
	return true;
}

/* "[2,3]" -> shape; the number of dimensions. */
static uint32_t parse_shape(const char *text, uint64_t *shape, uint64_t *numel)
{
	uint32_t n = 0;

	*numel = 1;
	for (const char *p = text; *p && n < MOMENT_NDIM_MAX;) {
		if (*p >= '0' && *p <= '9') {
			char *end;

			shape[n] = strtoull(p, &end, 10);
			*numel *= shape[n++];
			p = end;
		} else {
			p++;
		}
	}
	return n;
}

/* 0: not a parameter; else the entry's bytes, or SIZE_MAX: does not fit. */
static size_t list_entry_put(struct ns *ns, uint64_t dir, char *out, size_t room)
{
	struct moment_list_entry le = {0};
	uint64_t shape[MOMENT_NDIM_MAX];
	char text[1500], *name = malloc(NS_XATTR_VALUE_MAX);
	int64_t n = name ? ns_getxattr(ns, dir, "user.moment.name", name, NS_XATTR_VALUE_MAX) : -1;
	size_t size;

	if (n < 0) {
		free(name);
		return 0;
	}
	session_get_text(ns, dir, "user.moment.shape", text, sizeof(text));
	le.e.ndim = parse_shape(text, shape, &le.e.numel);
	session_get_text(ns, dir, "user.moment.step", text, sizeof(text));
	le.step = strtoull(text, NULL, 10);
	le.e.name_len = (uint32_t)n;
	for (unsigned int k = 0; k < MOMENT_ROLES; k++) {
		struct ns_attr a;

		le.e.dtype[k] = NO_DTYPE;
		if (ns_peek(ns, dir, session_role[k], &a))
			continue;
		session_get_text(ns, a.ino, "user.moment.dtype", text, sizeof(text));
		for (unsigned int d = 0; d < SESSION_DTYPES; d++) {
			if (!strcmp(text, session_dtype[d].name))
				le.e.dtype[k] = (uint8_t)d;
		}
		session_get_text(ns, a.ino, "user.moment.tier", text, sizeof(text));
		le.e.tier = !strcmp(text, "ram") ? 1 : !strcmp(text, "nvme") ? 2 : 0;
	}
	le.e.size = (uint32_t)round_up_u64(
		sizeof(le.e) + le.e.ndim * sizeof(uint64_t) + le.e.name_len, 8);
	size = sizeof(le) - sizeof(le.e) + le.e.size;
	if (size > room) {
		free(name);
		return SIZE_MAX;
	}
	memset(out, 0, size);
	memcpy(out, &le, sizeof(le));
	memcpy(out + sizeof(le), shape, le.e.ndim * sizeof(uint64_t));
	memcpy(out + sizeof(le) + le.e.ndim * sizeof(uint64_t), name, le.e.name_len);
	free(name);
	return size;
}

void session_list(struct session *s, const struct moment_msg *msg)
{
	const struct moment_list *m = (const struct moment_list *)msg;
	struct ns *ns = s->e->c.ns;
	struct lister l = {.n = 0};
	struct moment_list_reply *out = calloc(1, MOMENT_MSG_MAX);
	size_t at = sizeof(*out);
	unsigned int i;

	if (!out) {
		session_error(s, msg, -ENOMEM, "list: out of memory");
		return;
	}
	ns_readdir(ns, NS_ROOT, m->cookie, false, list_one, &l);
	out->cookie = l.n == LIST_BATCH ? l.cookie[LIST_BATCH - 1] : 0;
	for (i = 0; i < l.n; i++) {
		size_t size = list_entry_put(ns, l.ino[i], (char *)out + at, MOMENT_MSG_MAX - at);

		if (size == SIZE_MAX) {
			if (out->n == 0) /* a name as long as a message: it cannot be told */
				continue;
			out->cookie = l.cookie[i - 1];
			break;
		}
		if (size) {
			out->n++;
			at += size;
		}
	}
	session_reply(s, msg, out, at);
	free(out);
}
