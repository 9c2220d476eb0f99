/* SPDX-License-Identifier: Apache-2.0 */
/*
 * session_register.c - parameters: finding or making their files, reserving their disk space,
 * pinning them to the session.
 *
 * Loop thread only. A REGISTER message is all or nothing: everything is checked, then made, then
 * reserved (which may wait for the pool to grow); any failure undoes what this message made.
 *
 * What a state file means is in its extended attributes: user.moment.dtype, .shape, .step, .name,
 * .tier; the parameter's directory has name, shape, step and hyper.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/names.h"
#include "engine/session.h"

#define SHAPE_TEXT (MOMENT_NDIM_MAX * 21 + 3) /* "[", numbers of up to 20 digits, "," or "]" */

struct entry {
	const struct moment_reg_entry *m;
	const uint64_t *shape;
	const char *name, *hyper;
	char dirname[NAMES_MAX + 1];
	char label[128]; /* the name, for messages */
	uint64_t dir;
	bool made;
	uint64_t pinned; /* bytes of memory */
	uint64_t step;
	uint64_t ino[MOMENT_ROLES]; /* 0: does not have it */
	bool made_file[MOMENT_ROLES];
	bool ref[MOMENT_ROLES]; /* a reference is held */
	bool registered[MOMENT_ROLES];
	struct file *f[MOMENT_ROLES];
};

struct reg {
	struct session *s;
	struct moment_msg *msg; /* a copy */
	uint32_t flags, n;
	struct entry *e;
	struct waiter w;
	struct commit_wait cw;
	/* where reserving has got to */
	uint32_t i, block;
	unsigned int role;
	uint64_t reserved, need;
	uint64_t pinned;
	char err[768];
};

static void reg_free(struct reg *r)
{
	free(r->msg);
	free(r->e);
	free(r);
}

__attribute__((format(printf, 3, 4))) static int fail(struct reg *r, int res, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(r->err, sizeof(r->err), fmt, ap);
	va_end(ap);
	return res;
}

/* ---- reading the message ---- */

static int parse_entry(struct reg *r, struct entry *e, const char *at, size_t left)
{
	const struct moment_reg_entry *m = (const struct moment_reg_entry *)at;
	uint64_t numel = 1;
	bool any = false;
	size_t want;
	int k;

	if (left < sizeof(*m) || m->size % 8 || m->size > left || m->ndim > MOMENT_NDIM_MAX ||
	    m->name_len > left || m->hyper_len > left)
		return fail(r, -EPROTO, "register: a malformed entry");
	want = sizeof(*m) + m->ndim * sizeof(uint64_t) + m->name_len + m->hyper_len;
	if (m->size < want)
		return fail(r, -EPROTO, "register: an entry shorter than its parts");
	e->m = m;
	e->shape = (const uint64_t *)(m + 1);
	e->name = (const char *)(e->shape + m->ndim);
	e->hyper = e->name + m->name_len;
	snprintf(e->label, sizeof(e->label), "%.*s%s", (int)min_u64(m->name_len, 100), e->name,
		 m->name_len > 100 ? "..." : "");
	k = names_encode(e->name, m->name_len, e->dirname);
	if (k)
		return fail(r, k, "parameter name \"%s\": empty, or with a NUL byte in it",
			    e->label);
	for (uint32_t d = 0; d < m->ndim; d++) {
		if (__builtin_mul_overflow(numel, e->shape[d], &numel))
			return fail(r, -EFBIG,
				    "parameter %s: its shape has more than 2^64 elements",
				    e->label);
	}
	if (numel != m->numel)
		return fail(r, -EINVAL,
			    "parameter %s: its shape has %llu elements, numel says %llu", e->label,
			    (unsigned long long)numel, (unsigned long long)m->numel);
	for (k = 0; k < MOMENT_ROLES; k++) {
		if (m->dtype[k] == NO_DTYPE)
			continue;
		if (m->dtype[k] >= SESSION_DTYPES)
			return fail(r, -EINVAL, "parameter %s: unknown dtype %u of %s", e->label,
				    m->dtype[k], session_role[k]);
		if (numel > file_size_max(&r->s->e->c) / session_dtype[m->dtype[k]].size)
			return fail(
				r, -EFBIG,
				"parameter %s: %llu elements make a file above the largest of %llu bytes",
				e->label, (unsigned long long)numel,
				(unsigned long long)file_size_max(&r->s->e->c));
		any = true;
	}
	if (!any)
		return fail(r, -EINVAL, "parameter %s: no array asked for", e->label);
	return 0;
}

static uint64_t file_bytes(const struct entry *e, unsigned int role)
{
	return e->m->numel * session_dtype[e->m->dtype[role]].size;
}

static void shape_text(const struct entry *e, char out[SHAPE_TEXT])
{
	size_t n = 0;

	n += (size_t)snprintf(out, SHAPE_TEXT, "[");
	for (uint32_t d = 0; d < e->m->ndim; d++)
		n += (size_t)snprintf(out + n, SHAPE_TEXT - n, "%s%llu", d ? "," : "",
				      (unsigned long long)e->shape[d]);
	snprintf(out + n, SHAPE_TEXT - n, "]");
}

/* Of a file of `size` bytes: its blocks, and the bytes in block n as its place on disk has them. */
static uint32_t size_blocks(const struct cache *c, uint64_t size)
{
	return (uint32_t)((size + c->block - 1) / c->block);
}

static uint32_t size_place(const struct cache *c, uint64_t size, uint32_t n)
{
	return (uint32_t)round_up_u64(min_u64(c->block, size - (uint64_t)n * c->block),
				      MOMENT_UNIT);
}

/* ---- checking ---- */

static int check_existing(struct reg *r, struct entry *e)
{
	struct ns *ns = r->s->e->c.ns;
	char want[SHAPE_TEXT], have[SHAPE_TEXT], *name;
	struct ns_attr a;
	int64_t n;
	bool fresh = r->flags & MOMENT_REG_FRESH;

	name = malloc(NS_XATTR_VALUE_MAX);
	if (!name)
		return fail(r, -ENOMEM, "register: out of memory");
	n = ns_getxattr(ns, e->dir, "user.moment.name", name, NS_XATTR_VALUE_MAX);
	if (n >= 0 && ((uint64_t)n != e->m->name_len || memcmp(name, e->name, (size_t)n))) {
		free(name);
		return fail(r, -EEXIST,
			    "parameter %s: params/%s belongs to a parameter of another name",
			    e->label, e->dirname);
	}
	free(name);
	if (n < 0 && !fresh)
		return fail(
			r, -EINVAL,
			"params/%s was made by other programs and does not say what it holds: set its attributes "
			"(user.moment.name, .shape; .dtype of its files), move it away, or ask for a fresh state",
			e->dirname);
	if (!fresh) {
		shape_text(e, want);
		session_get_text(ns, e->dir, "user.moment.shape", have, sizeof(have));
		if (strcmp(want, have))
			return fail(
				r, -EINVAL,
				"parameter %s: its shape is %s, the state on disk is of shape %s",
				e->label, want, have);
	}
	session_get_text(ns, e->dir, "user.moment.step", have, sizeof(have));
	e->step = strtoull(have, NULL, 10);
	for (unsigned int k = 0; k < MOMENT_ROLES; k++) {
		bool wanted = e->m->dtype[k] != NO_DTYPE;
		int x = ns_peek(ns, e->dir, session_role[k], &a);

		if (x == -ENOENT) {
			if (wanted && !fresh)
				return fail(r, -EINVAL, "parameter %s: the state on disk has no %s",
					    e->label, session_role[k]);
			continue;
		}
		if (x)
			return fail(r, x, "parameter %s: %s: %s", e->label, session_role[k],
				    strerror(-x));
		if (!wanted && !fresh)
			return fail(
				r, -EINVAL,
				"parameter %s: the state on disk has %s too, which was not asked for",
				e->label, session_role[k]);
		if (!wanted)
			continue;
		if (!S_ISREG(a.mode))
			return fail(r, -EINVAL, "params/%s/%s is not a file", e->dirname,
				    session_role[k]);
		if (file_find(&r->s->e->c, a.ino) && file_find(&r->s->e->c, a.ino)->session == r->s)
			return fail(r, -EINVAL, "parameter %s is registered already", e->label);
		e->ino[k] = a.ino;
		session_get_text(ns, a.ino, "user.moment.dtype", have, sizeof(have));
		if (!fresh && (strcmp(have, session_dtype[e->m->dtype[k]].name) ||
			       a.size != file_bytes(e, k)))
			return fail(
				r, -EINVAL,
				"parameter %s: %s on disk is %s with %llu bytes, asked for is %s with %llu",
				e->label, session_role[k], have[0] ? have : "of no known dtype",
				(unsigned long long)a.size, session_dtype[e->m->dtype[k]].name,
				(unsigned long long)file_bytes(e, k));
	}
	return 0;
}

static int check(struct reg *r)
{
	struct ns *ns = r->s->e->c.ns;
	bool must = (r->flags & MOMENT_REG_EXIST) || r->s->readonly;

	for (uint32_t i = 0; i < r->n; i++) {
		struct entry *e = &r->e[i];
		struct ns_attr a;
		int x;

		for (uint32_t k = 0; k < i; k++) {
			if (!strcmp(r->e[k].dirname, e->dirname))
				return fail(r, -EINVAL, "parameter %s is named twice", e->label);
		}
		x = ns_peek(ns, NS_ROOT, e->dirname, &a);
		if (x == -ENOENT) {
			if (must)
				return fail(r, -ENOENT, "parameter %s has no state in %s", e->label,
					    r->s->e->path);
			continue;
		}
		if (x || !S_ISDIR(a.mode))
			return fail(r, x ? x : -ENOTDIR, "params/%s is not a directory",
				    e->dirname);
		if (r->flags & MOMENT_REG_NEW)
			return fail(r, -EEXIST, "parameter %s has a state in %s already", e->label,
				    r->s->e->path);
		e->dir = a.ino;
		x = check_existing(r, e);
		if (x)
			return x;
	}
	return 0;
}

/* ---- making ---- */

static int set_attrs(struct reg *r, struct entry *e)
{
	struct ns *ns = r->s->e->c.ns;
	static const char *const tiers[] = {"auto", "ram", "nvme"};
	char shape[SHAPE_TEXT], step[24];
	const char *tier = tiers[e->m->tier < 3 ? e->m->tier : 0];
	size_t step_len = (size_t)snprintf(step, sizeof(step), "%llu", (unsigned long long)e->step);
	struct ns_moment dir[] = {
		{"user.moment.name", e->name, e->m->name_len},
		{"user.moment.shape", shape, 0},
		{"user.moment.step", step, step_len},
		{"user.moment.hyper", e->hyper, e->m->hyper_len},
	};
	int x;

	shape_text(e, shape);
	dir[1].size = strlen(shape);
	x = ns_set_moment(ns, e->dir, dir, e->m->hyper_len ? 4 : 3);
	for (unsigned int k = 0; k < MOMENT_ROLES && !x; k++) {
		struct ns_moment file[] = {
			{"user.moment.name", e->name, e->m->name_len},
			{"user.moment.shape", shape, strlen(shape)},
			{"user.moment.step", step, step_len},
			{"user.moment.dtype", NULL, 0},
			{"user.moment.tier", tier, strlen(tier)},
		};

		if (!e->ino[k])
			continue;
		file[3].value = session_dtype[e->m->dtype[k]].name;
		file[3].size = strlen(file[3].value);
		x = ns_set_moment(ns, e->ino[k], file, 5);
	}
	if (!x)
		x = ns_make_meta(ns, e->dir);
	return x ? fail(r, x, "parameter %s: its attributes cannot be set: %s", e->label,
			strerror(-x))
		 : 0;
}

/* True: a block of the file is busy, the waiter will be woken. */
static bool wait_idle(struct reg *r, struct file *f)
{
	for (uint32_t i = 0; i < f->nslots * SLOT_CHUNK; i++) {
		struct slot *s = file_slot(f, i);

		if (!s) {
			i |= SLOT_CHUNK - 1;
		} else if (s->b) {
			if (!s->b->frozen)
				list_remove(&s->b->write_link);
			else
				block_write(s->b, true);
			if (block_busy(s->b)) {
				block_wait(s->b, &r->w);
				return true;
			}
		}
	}
	return false;
}

/* The file becomes zeros of the right size. It is idle, and what that needs is reserved. */
static void make_zeros(struct cache *c, struct file *f, uint64_t size)
{
	cache_quiet(c);
	for (uint32_t i = 0; i < f->nslots * SLOT_CHUNK; i++) {
		struct slot *s = file_slot(f, i);

		if (!s) {
			i |= SLOT_CHUNK - 1;
			continue;
		}
		if (s->b)
			block_drop(s->b);
		slot_drop_live(c, f, s, i);
		if (i >= size_blocks(c, size))
			s->keep = false;
		slot_trim(c, s);
		slot_account(c, f, i);
	}
	f->size = size;
	file_changed(c, f);
	file_publish(c, f, true);
	cache_loud(c);
}

static int make_file(struct reg *r, struct entry *e, unsigned int k)
{
	struct session *s = r->s;
	struct cache *c = &s->e->c;
	struct ns_attr a;
	int x;

	if (!e->ino[k]) {
		x = ns_create(c->ns, e->dir, session_role[k], 0600, s->opts.uid, s->opts.gid, true,
			      &a);
		if (x)
			return fail(r, x, "parameter %s: cannot make %s: %s", e->label,
				    session_role[k], strerror(-x));
		e->ino[k] = a.ino;
		e->made_file[k] = true;
	} else {
		x = ns_lookup(c->ns, e->dir, session_role[k], &a);
		if (x)
			return fail(r, x, "parameter %s: %s: %s", e->label, session_role[k],
				    strerror(-x));
	}
	e->ref[k] = true;
	e->f[k] = file_get(c, a.ino);
	if (!e->f[k])
		return fail(r, -ENOMEM, "register: out of memory");
	if (s->readonly)
		return 0;
	x = e->f[k]->session ? -EBUSY : ns_register(c->ns, a.ino);
	if (x)
		return fail(r, x,
			    "params/%s/%s is open for writing in another program: close it first",
			    e->dirname, session_role[k]);
	e->registered[k] = true;
	e->f[k]->session = s;
	if (e->made_file[k]) {
		e->f[k]->size = file_bytes(e, k);
		file_changed(c, e->f[k]);
		file_publish(c, e->f[k], true);
	}
	return 0;
}

static int make(struct reg *r)
{
	struct session *s = r->s;
	struct cache *c = &s->e->c;

	for (uint32_t i = 0; i < r->n; i++) {
		struct entry *e = &r->e[i];
		bool was = e->dir != 0;
		int x = 0;

		if (!was) {
			struct ns_attr a;

			x = ns_mkdir(c->ns, NS_ROOT, e->dirname, 0755, s->opts.uid, s->opts.gid,
				     false, &a);
			if (x)
				return fail(r, x, "parameter %s: cannot make params/%s: %s",
					    e->label, e->dirname, strerror(-x));
			e->dir = a.ino;
			e->made = true;
		}
		for (unsigned int k = 0; k < MOMENT_ROLES && !x; k++) {
			if (e->m->dtype[k] != NO_DTYPE)
				x = make_file(r, e, k);
		}
		if (!x && !s->readonly && !was)
			x = set_attrs(r, e);
		if (x)
			return x;
	}
	return 0;
}

static void undo(struct reg *r)
{
	struct cache *c = &r->s->e->c;

	for (uint32_t i = 0; i < r->n; i++) {
		struct entry *e = &r->e[i];

		for (unsigned int k = 0; k < MOMENT_ROLES; k++) {
			struct file *f = e->f[k];

			for (uint32_t b = 0; e->registered[k] && b < f->nslots * SLOT_CHUNK; b++) {
				struct slot *slot = file_slot(f, b);

				if (!slot) {
					b |= SLOT_CHUNK - 1;
					continue;
				}
				slot->keep = false;
				slot_trim(c, slot);
			}
			if (e->registered[k]) {
				f->pinned = false;
				f->session = NULL;
				ns_unregister(c->ns, e->ino[k]);
			}
			if (e->made_file[k])
				ns_unlink(c->ns, e->dir, session_role[k]);
			if (e->ref[k])
				ns_forget(c->ns, e->ino[k], 1);
		}
		if (e->made)
			ns_rmdir(c->ns, NS_ROOT, e->dirname);
	}
}

/* ---- reserving ---- */

static uint64_t pin_bytes(const struct cache *c, uint64_t size)
{
	uint64_t sum = 0;

	for (uint32_t b = 0; b < size_blocks(c, size); b++) {
		uint32_t piece = cache_piece(c, size_place(c, size, b));

		sum += piece > c->block / 4 ? c->block : piece;
	}
	return sum;
}

static int check_pins(struct reg *r)
{
	struct session *s = r->s;
	struct cache *c = &s->e->c;
	uint64_t size = arena_size(c->arena);
	uint64_t room = size - size / 8 - min_u64(size / 2, 8ull * c->block);

	for (uint32_t i = 0; i < r->n; i++) {
		if (r->e[i].m->tier != 1)
			continue;
		for (unsigned int k = 0; k < MOMENT_ROLES; k++) {
			if (r->e[i].f[k])
				r->e[i].pinned += pin_bytes(c, file_bytes(&r->e[i], k));
		}
		r->pinned += r->e[i].pinned;
	}
	if (s->pinned + r->pinned > room)
		return fail(
			r, -ENOMEM,
			"state that is to stay in RAM does not fit: %llu MiB pinned, room for %llu MiB in a RAM tier of "
			"%llu MiB, %llu MiB are missing: use a larger ram= or offload more",
			(unsigned long long)(s->pinned + r->pinned) >> 20,
			(unsigned long long)room >> 20, (unsigned long long)size >> 20,
			(unsigned long long)(s->pinned + r->pinned - room + (1 << 20) - 1) >> 20);
	for (uint32_t i = 0; i < r->n; i++) {
		for (unsigned int k = 0; k < MOMENT_ROLES; k++) {
			if (r->e[i].f[k])
				r->e[i].f[k]->pinned = r->e[i].m->tier == 1;
		}
	}
	return 0;
}

/* Bytes of disk that slots (i, role, block) and after still want. */
static uint64_t still_needed(struct reg *r)
{
	struct cache *c = &r->s->e->c;
	uint64_t sum = 0;

	for (uint32_t i = r->i; i < r->n; i++) {
		for (unsigned int k = 0; k < MOMENT_ROLES; k++) {
			struct file *f = r->e[i].f[k];

			uint64_t size = f ? file_bytes(&r->e[i], k) : 0;

			for (uint32_t b = 0; b < size_blocks(c, size); b++) {
				struct slot *slot = file_slot(f, b);
				uint32_t len = size_place(c, size, b);
				unsigned int have = slot ? slot_places(slot, len) : 0;

				if (have < 2)
					sum += (uint64_t)(2 - have) * len;
			}
		}
	}
	return sum;
}

static void reply_done(struct reg *r);
static void make_durable(struct reg *r);

static void reg_fail(struct reg *r, int x)
{
	struct session *s = r->s;

	undo(r);
	s->registering--;
	if (session_busy_end(s))
		session_error(s, r->msg, x, "%s", r->err);
	reg_free(r);
}

/*
 * Two passes over each file, so that the first places of all its blocks lie behind one another, and
 * then the second places: a sweep then writes and reads long runs.
 */
static int reserve_file(struct reg *r, struct file *f, uint64_t size)
{
	struct cache *c = &r->s->e->c;
	uint32_t blocks = size_blocks(c, size);

	for (; r->block < 2 * blocks; r->block++) {
		uint32_t n = r->block % blocks;
		bool second = r->block >= blocks;
		struct slot *slot = file_slot_make(c, f, n);
		uint32_t len = size_place(c, size, n);
		int x;

		if (!slot)
			return -ENOMEM;
		if (!second && (slot->nspare || !extent_is_hole(&slot->live))) {
			slot->keep = true;
			continue;
		}
		x = second ? slot_keep(c, f, slot, len) : slot_reserve(c, f, slot, len);
		if (x == -EBUSY) {
			block_wait(slot->b, &r->w);
			return 1;
		}
		if (x == -EAGAIN) {
			uint64_t need = still_needed(r);
			struct pool_info pi;

			/* Do not fill the host's disk with a pool that cannot hold it anyway. */
			pool_get_info(c->pool, &pi);
			if (need > pi.available && !commit_running(c) && !commit_frees_pending(c))
				return -ENOSPC;
			if (!c->grow_error)
				space_grow(c, need);
			x = space_wait(c, &r->w, len, false);
			return x ? x : 1;
		}
		if (x)
			return x;
		slot->keep = true;
	}
	r->block = 0;
	return 0;
}

static void reserve(struct waiter *w)
{
	struct reg *r = container_of(w, struct reg, w);
	struct session *s = r->s;
	struct cache *c = &s->e->c;

	if (s->dead) {
		reg_fail(r, -ECANCELED);
		return;
	}
	for (; r->i < r->n; r->i++, r->role = 0) {
		for (; r->role < MOMENT_ROLES; r->role++) {
			struct entry *e = &r->e[r->i];
			struct file *f = e->f[r->role];
			int x;

			if (!f)
				continue;
			x = reserve_file(r, f, file_bytes(e, r->role));
			if (x == 1)
				return;
			if (x) {
				struct pool_info pi;
				uint64_t need = still_needed(r);

				pool_get_info(c->pool, &pi);
				fail(r, x,
				     "not enough disk space under %s for parameter %s and what follows: %llu bytes (%llu MiB) "
				     "more are needed (state is kept twice), %llu (%llu MiB) are free%s; nothing was made",
				     s->e->path, e->label, (unsigned long long)need,
				     (unsigned long long)need >> 20,
				     (unsigned long long)pi.available,
				     (unsigned long long)pi.available >> 20,
				     pi.limit ? " within size=" : "");
				reg_fail(r, x);
				return;
			}
		}
	}
	make_durable(r);
}

/* ---- the end ---- */

static void committed(struct commit_wait *w, int res)
{
	struct reg *r = container_of(w, struct reg, cw);

	if (res)
		fail(r, res,
		     "the parameters are made, but the commit that records them failed: %s; cure the drive "
		     "(momentctl status has the details) and register again",
		     strerror(-res));
	if (res || r->s->dead)
		reg_fail(r, res ? res : -ECANCELED);
	else
		reply_done(r);
}

/*
 * A fresh start of what is there, when nothing can stand in its way any more: first all is idle,
 * then, in an instant, all becomes zeros, and arrays that were not asked for go. 0, 1 (waits),
 * -errno.
 */
static int fresh(struct reg *r)
{
	struct cache *c = &r->s->e->c;
	struct ns_attr a;
	int x = 0;

	for (uint32_t i = 0; i < r->n; i++) {
		for (unsigned int k = 0; k < MOMENT_ROLES; k++) {
			if (r->e[i].f[k] && wait_idle(r, r->e[i].f[k]))
				return 1;
		}
	}
	for (uint32_t i = 0; i < r->n && !x; i++) {
		struct entry *e = &r->e[i];

		if (e->made)
			continue;
		for (unsigned int k = 0; k < MOMENT_ROLES; k++) {
			if (e->f[k])
				make_zeros(c, e->f[k], file_bytes(e, k));
			else if (!ns_peek(c->ns, e->dir, session_role[k], &a) && S_ISREG(a.mode))
				ns_unlink(c->ns, e->dir, session_role[k]);
		}
		e->step = 0;
		x = set_attrs(r, e);
	}
	return x;
}

/*
 * What was made is committed before the first step: a parameter that no commit knows could not be
 * left out of a commit, nor taken back to its last one.
 */
static void make_durable(struct reg *r)
{
	bool made = r->flags & MOMENT_REG_FRESH;
	int x = made ? fresh(r) : 0;

	if (x == 1)
		return;
	for (uint32_t i = 0; i < r->n; i++) {
		for (unsigned int k = 0; k < MOMENT_ROLES; k++)
			made = made || r->e[i].made_file[k];
	}
	if (x) {
		reg_fail(r, x);
	} else if (made) {
		r->cw.done = committed;
		commit_request(&r->s->e->c, &r->cw);
	} else {
		reply_done(r);
	}
}

static int take_handles(struct reg *r, struct moment_register_reply *m)
{
	struct session *s = r->s;

	if (s->nparams + r->n > s->params_cap) {
		uint32_t cap = (s->nparams + r->n) * 2;
		struct param *v = realloc(s->params, cap * sizeof(*v));

		if (!v)
			return -ENOMEM;
		s->params = v;
		s->params_cap = cap;
	}
	if (s->nfiles + r->n * MOMENT_ROLES > s->files_cap) {
		uint32_t cap = (s->nfiles + r->n * MOMENT_ROLES) * 2;
		struct file **v = realloc(s->files, cap * sizeof(*v));

		if (!v)
			return -ENOMEM;
		s->files = v;
		s->files_cap = cap;
	}
	for (uint32_t i = 0; i < r->n; i++) {
		struct entry *e = &r->e[i];
		struct param *p = &s->params[s->nparams];

		*p = (struct param){.dir = e->dir, .step = e->step, .next_step = STEP_NONE};
		m->e[i].param = s->nparams++;
		m->e[i].flags = e->made ? MOMENT_REG_CREATED : MOMENT_REG_FOUND;
		m->e[i].step = e->step;
		for (unsigned int k = 0; k < MOMENT_ROLES; k++) {
			p->file[k] = UINT32_MAX;
			if (e->f[k]) {
				p->file[k] = s->nfiles;
				s->files[s->nfiles++] = e->f[k];
			}
			m->e[i].file[k] = p->file[k];
		}
	}
	return 0;
}

static void reply_done(struct reg *r)
{
	struct session *s = r->s;
	struct cache *c = &s->e->c;
	size_t len =
		sizeof(struct moment_register_reply) + r->n * sizeof(struct moment_reg_reply_entry);
	struct moment_register_reply *m = calloc(1, len);
	struct pool_info pi;
	int x = m ? 0 : fail(r, -ENOMEM, "register: out of memory");

	if (!x && take_handles(r, m))
		x = fail(r, -ENOMEM, "register: out of memory");
	if (x) {
		free(m);
		reg_fail(r, x);
		return;
	}
	for (uint32_t i = 0; i < r->n && !s->readonly; i++) {
		struct param *p = &s->params[m->e[i].param];

		for (unsigned int k = 0; k < MOMENT_ROLES; k++) {
			if (r->e[i].f[k])
				p->reserved += 2 * round_up_u64(r->e[i].f[k]->size, MOMENT_UNIT);
		}
		p->pinned = r->e[i].pinned;
		s->reserved += p->reserved;
	}
	s->pinned += r->pinned;
	pool_get_info(c->pool, &pi);
	m->n = r->n;
	m->reserved = s->reserved;
	m->free = pi.available;
	s->registering--;
	if (session_busy_end(s))
		session_reply(s, r->msg, m, len);
	free(m);
	reg_free(r);
}

static void reply_check(struct reg *r)
{
	size_t len =
		sizeof(struct moment_register_reply) + r->n * sizeof(struct moment_reg_reply_entry);
	struct moment_register_reply *m = calloc(1, len);
	struct pool_info pi;

	if (!m) {
		session_error(r->s, r->msg, -ENOMEM, "register: out of memory");
	} else {
		pool_get_info(r->s->e->pool, &pi);
		m->n = r->n;
		m->reserved = r->s->reserved;
		m->free = pi.available;
		for (uint32_t i = 0; i < r->n; i++) {
			m->e[i].param = UINT32_MAX;
			m->e[i].flags = r->e[i].dir ? MOMENT_REG_FOUND : MOMENT_REG_CREATED;
			m->e[i].step = r->e[i].step;
			memset(m->e[i].file, 0xff, sizeof(m->e[i].file));
		}
		session_reply(r->s, r->msg, m, len);
		free(m);
	}
	r->s->registering--;
	session_busy_end(r->s);
	reg_free(r);
}

/* Everything is read: check, make, reserve. */
static void proceed(struct reg *r)
{
	struct session *s = r->s;
	int x = s->dead ? fail(r, -ECANCELED, "the session has ended") : 0;

	if (!x)
		x = check(r);
	if (!x && (r->flags & MOMENT_REG_CHECK)) {
		reply_check(r);
		return;
	}
	if (!x)
		x = make(r);
	if (!x && !s->readonly)
		x = check_pins(r);
	if (x) {
		reg_fail(r, x);
		return;
	}
	if (s->readonly)
		reply_done(r);
	else
		reserve(&r->w);
}

void session_register(struct session *s, const struct moment_msg *msg)
{
	const struct moment_register *m = (const struct moment_register *)msg;
	struct reg *r = calloc(1, sizeof(*r));
	size_t at = sizeof(*m);
	int x = 0;

	if (s->stepping || s->e->reverting) {
		free(r);
		session_error(s, msg, -EBUSY, "parameters can be registered only between steps");
		return;
	}
	if (s->readonly && (m->flags & (MOMENT_REG_NEW | MOMENT_REG_FRESH))) {
		free(r);
		session_error(s, msg, -EPERM, "this session is read-only");
		return;
	}
	if (r) {
		r->s = s;
		r->w.wake = reserve;
		list_init(&r->w.link);
		list_init(&r->cw.link);
		r->msg = malloc(msg->len);
		r->flags = m->flags;
		r->n = m->n;
		r->e = m->n <= MOMENT_MSG_MAX / sizeof(struct moment_reg_entry)
			       ? calloc(m->n ? m->n : 1, sizeof(*r->e))
			       : NULL;
	}
	if (!r || !r->msg || !r->e) {
		if (r)
			reg_free(r);
		session_error(s, msg, -ENOMEM, "register: out of memory, or too many entries");
		return;
	}
	memcpy(r->msg, msg, msg->len);
	session_busy_begin(s);
	s->registering++;
	for (uint32_t i = 0; i < r->n && !x; i++) {
		x = parse_entry(r, &r->e[i], (const char *)r->msg + at, msg->len - at);
		if (!x)
			at += r->e[i].m->size;
	}
	if (x) {
		reg_fail(r, x);
		return;
	}
	proceed(r);
}
