/* SPDX-License-Identifier: Apache-2.0 */
/*
 * session_check.c - what a REGISTER asks for: reading its entries, and comparing them with what the
 * backing holds. Changes nothing.
 *
 * Loop thread only.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/session_reg.h"

int reg_error(struct reg *r, int res, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(r->err, sizeof(r->err), fmt, ap);
	va_end(ap);
	return res;
}

/* ---- reading the message ---- */

int reg_parse(struct reg *r, struct entry *e, const char *at, size_t left)
{
	const struct moment_reg_entry *m = (const struct moment_reg_entry *)at;
	uint64_t numel = 1;
	bool any = false;
	size_t want;
	int k;

	if (left < sizeof(*m) || m->size % 8 || m->size > left || m->ndim > MOMENT_NDIM_MAX ||
	    m->name_len > left || m->hyper_len > left)
		return reg_error(r, -EPROTO, "register: a malformed entry");
	want = sizeof(*m) + m->ndim * sizeof(uint64_t) + m->name_len + m->hyper_len;
	if (m->size < want)
		return reg_error(r, -EPROTO, "register: an entry shorter than its parts");
	e->m = m;
	e->shape = (const uint64_t *)(m + 1);
	e->name = (const char *)(e->shape + m->ndim);
	e->hyper = e->name + m->name_len;
	snprintf(e->label, sizeof(e->label), "%.*s%s", (int)min_u64(m->name_len, 100), e->name,
		 m->name_len > 100 ? "..." : "");
	k = names_encode(e->name, m->name_len, e->dirname);
	if (k)
		return reg_error(r, k, "parameter name \"%s\": empty, or with a NUL byte in it",
				 e->label);
	for (uint32_t d = 0; d < m->ndim; d++) {
		if (__builtin_mul_overflow(numel, e->shape[d], &numel))
			return reg_error(r, -EFBIG,
					 "parameter %s: its shape has more than 2^64 elements",
					 e->label);
	}
	if (numel != m->numel)
		return reg_error(r, -EINVAL,
				 "parameter %s: its shape has %llu elements, numel says %llu",
				 e->label, (unsigned long long)numel, (unsigned long long)m->numel);
	for (k = 0; k < MOMENT_ROLES; k++) {
		if (m->dtype[k] == NO_DTYPE)
			continue;
		if (m->dtype[k] >= SESSION_DTYPES)
			return reg_error(r, -EINVAL, "parameter %s: unknown dtype %u of %s",
					 e->label, m->dtype[k], session_role[k]);
		if (numel > file_size_max(&r->s->e->c) / session_dtype[m->dtype[k]].size)
			return reg_error(
				r, -EFBIG,
				"parameter %s: %llu elements make a file above the largest of %llu bytes",
				e->label, (unsigned long long)numel,
				(unsigned long long)file_size_max(&r->s->e->c));
		any = true;
	}
	if (!any)
		return reg_error(r, -EINVAL, "parameter %s: no array asked for", e->label);
	return 0;
}

uint64_t reg_bytes(const struct entry *e, unsigned int role)
{
	return e->m->numel * session_dtype[e->m->dtype[role]].size;
}

void reg_shape(const struct entry *e, char out[SHAPE_TEXT])
{
	size_t n = 0;

	n += (size_t)snprintf(out, SHAPE_TEXT, "[");
	for (uint32_t d = 0; d < e->m->ndim; d++)
		n += (size_t)snprintf(out + n, SHAPE_TEXT - n, "%s%llu", d ? "," : "",
				      (unsigned long long)e->shape[d]);
	snprintf(out + n, SHAPE_TEXT - n, "]");
}

/* ---- checking ---- */

int reg_in_use(struct reg *r, const struct entry *e, const char *file)
{
	return reg_error(r, -EBUSY,
			 "params/%s/%s is open for writing in another program: close it first",
			 e->dirname, file);
}

static int check_existing(struct reg *r, struct entry *e)
{
	struct ns *ns = r->s->e->c.ns;
	char want[SHAPE_TEXT], have[SHAPE_TEXT], *name;
	struct ns_attr a;
	int64_t n;
	bool fresh = r->flags & MOMENT_REG_FRESH;

	name = malloc(NS_XATTR_VALUE_MAX);
	if (!name)
		return reg_error(r, -ENOMEM, "register: out of memory");
	n = ns_getxattr(ns, e->dir, "user.moment.name", name, NS_XATTR_VALUE_MAX);
	if (n >= 0 && ((uint64_t)n != e->m->name_len || memcmp(name, e->name, (size_t)n))) {
		free(name);
		return reg_error(r, -EEXIST,
				 "parameter %s: params/%s belongs to a parameter of another name",
				 e->label, e->dirname);
	}
	free(name);
	if (n < 0 && !fresh)
		return reg_error(
			r, -EINVAL,
			"params/%s was made by other programs and does not say what it holds: set its attributes "
			"(user.moment.name, .shape; .dtype of its files), move it away, or ask for a fresh state",
			e->dirname);
	if (!fresh) {
		reg_shape(e, want);
		session_get_text(ns, e->dir, "user.moment.shape", have, sizeof(have));
		if (strcmp(want, have))
			return reg_error(
				r, -EINVAL,
				"parameter %s: its shape is %s, the state on disk is of shape %s",
				e->label, want, have);
	}
	if (fresh && !ns_peek(ns, e->dir, "meta.json", &a) && ns_open_writers(ns, a.ino))
		return reg_in_use(r, e, "meta.json");
	session_get_text(ns, e->dir, "user.moment.step", have, sizeof(have));
	e->step = strtoull(have, NULL, 10);
	for (unsigned int k = 0; k < MOMENT_ROLES; k++) {
		bool wanted = e->m->dtype[k] != NO_DTYPE;
		int x = ns_peek(ns, e->dir, session_role[k], &a);

		if (x == -ENOENT) {
			if (wanted && !fresh)
				return reg_error(r, -EINVAL,
						 "parameter %s: the state on disk has no %s",
						 e->label, session_role[k]);
			continue;
		}
		if (x)
			return reg_error(r, x, "parameter %s: %s: %s", e->label, session_role[k],
					 strerror(-x));
		if (!wanted && !fresh)
			return reg_error(
				r, -EINVAL,
				"parameter %s: the state on disk has %s too, which was not asked for",
				e->label, session_role[k]);
		if (!wanted)
			continue;
		if (!S_ISREG(a.mode))
			return reg_error(r, -EINVAL, "params/%s/%s is not a file", e->dirname,
					 session_role[k]);
		if (file_find(&r->s->e->c, a.ino) && file_find(&r->s->e->c, a.ino)->session == r->s)
			return reg_error(r, -EINVAL, "parameter %s is registered already",
					 e->label);
		e->ino[k] = a.ino;
		/* Seen here already, so that nothing is dropped for what is then refused (MOMENT_REG_CHECK). */
		if (!r->s->readonly && ns_open_writers(ns, a.ino))
			return reg_in_use(r, e, session_role[k]);
		session_get_text(ns, a.ino, "user.moment.dtype", have, sizeof(have));
		if (!fresh &&
		    (strcmp(have, session_dtype[e->m->dtype[k]].name) || a.size != reg_bytes(e, k)))
			return reg_error(
				r, -EINVAL,
				"parameter %s: %s on disk is %s with %llu bytes, asked for is %s with %llu",
				e->label, session_role[k], have[0] ? have : "of no known dtype",
				(unsigned long long)a.size, session_dtype[e->m->dtype[k]].name,
				(unsigned long long)reg_bytes(e, k));
	}
	return 0;
}

static int by_dirname(const void *a, const void *b)
{
	return strcmp((*(struct entry *const *)a)->dirname, (*(struct entry *const *)b)->dirname);
}

static int check_twice(struct reg *r)
{
	struct entry **sorted = calloc(r->n + 1ul, sizeof(struct entry *));
	int x = 0;

	if (!sorted)
		return reg_error(r, -ENOMEM, "register: out of memory");
	for (uint32_t i = 0; i < r->n; i++)
		sorted[i] = &r->e[i];
	qsort(sorted, r->n, sizeof(struct entry *), by_dirname);
	for (uint32_t i = 1; i < r->n && !x; i++) {
		if (!by_dirname(&sorted[i - 1], &sorted[i]))
			x = reg_error(r, -EINVAL, "parameter %s is named twice", sorted[i]->label);
	}
	free(sorted);
	return x;
}

int reg_check(struct reg *r)
{
	struct ns *ns = r->s->e->c.ns;
	bool must = (r->flags & MOMENT_REG_EXIST) || r->s->readonly;
	int x = check_twice(r);

	if (x)
		return x;
	for (uint32_t i = 0; i < r->n; i++) {
		struct entry *e = &r->e[i];
		struct ns_attr a;

		x = ns_peek(ns, NS_ROOT, e->dirname, &a);
		if (x == -ENOENT) {
			if (must)
				return reg_error(r, -ENOENT, "parameter %s has no state in %s",
						 e->label, r->s->e->path);
			continue;
		}
		if (x || !S_ISDIR(a.mode))
			return reg_error(r, x ? x : -ENOTDIR, "params/%s is not a directory",
					 e->dirname);
		if (r->flags & MOMENT_REG_NEW)
			return reg_error(r, -EEXIST, "parameter %s has a state in %s already",
					 e->label, r->s->e->path);
		e->dir = a.ino;
		x = check_existing(r, e);
		if (x)
			return x;
	}
	return 0;
}
