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
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/session_reg.h"

static void reg_free(struct reg *r)
{
	patience_end(&r->patience);
	free(r->msg);
	free(r->reply);
	free(r->e);
	free(r);
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

	reg_shape(e, shape);
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
		x = file_make_meta(&r->s->e->c, e->dir, &r->w);
	return x < 0 ? reg_error(r, x, "parameter %s: its attributes cannot be set: %s", e->label,
				 strerror(-x))
		     : x;
}

/* The file becomes zeros of the right size. It is settled, and what that needs is reserved. */
static void make_zeros(struct cache *c, struct file *f, uint64_t size)
{
	file_holes(c, f, 0, UINT32_MAX, true);
	file_unkeep(c, f, size_blocks(c, size));
	f->size = size;
	file_changed(c, f);
	file_publish(c, f, true);
	ns_stale(c->ns, f->ino, NS_STALE_DATA);
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
			return reg_error(r, x, "parameter %s: cannot make %s: %s", e->label,
					 session_role[k], strerror(-x));
		e->ino[k] = a.ino;
		e->made_file[k] = true;
	} else {
		x = ns_ref(c->ns, e->dir, session_role[k], &a);
		if (x)
			return reg_error(r, x, "parameter %s: %s: %s", e->label, session_role[k],
					 strerror(-x));
	}
	e->ref[k] = true;
	e->f[k] = file_get(c, a.ino);
	if (!e->f[k])
		return reg_error(r, -ENOMEM, "register: out of memory");
	if (s->readonly)
		return 0;
	x = e->f[k]->session ? -EBUSY : ns_register(c->ns, a.ino);
	if (x)
		return reg_in_use(r, e, session_role[k]);
	e->registered[k] = true;
	e->f[k]->session = s;
	if (e->made_file[k]) {
		e->f[k]->size = reg_bytes(e, k);
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
				return reg_error(r, x, "parameter %s: cannot make params/%s: %s",
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
		if (x == 1) { /* somebody was quick to make a meta.json in the new directory */
			list_remove(&r->w.link);
			x = reg_error(r, -EBUSY, "params/%s/meta.json is in use by another program",
				      e->dirname);
		}
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

			if (e->registered[k]) {
				file_unkeep(c, f, 0);
				file_pin(f, false);
				f->session = NULL;
				ns_unregister(c->ns, e->ino[k]);
			}
			if (e->made_file[k])
				ns_remove(c->ns, e->dir, session_role[k], false);
			if (e->ref[k])
				ns_forget(c->ns, e->ino[k], 1);
		}
		if (e->made)
			ns_remove(c->ns, NS_ROOT, e->dirname, true);
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
				r->e[i].pinned += pin_bytes(c, reg_bytes(&r->e[i], k));
		}
		r->pinned += r->e[i].pinned;
	}
	if (s->pinned + r->pinned > room)
		return reg_error(
			r, -ENOMEM,
			"state that is to stay in RAM does not fit: %llu MiB pinned, room for %llu MiB in a RAM tier of "
			"%llu MiB, %llu MiB are missing: use a larger ram= or offload more",
			(unsigned long long)(s->pinned + r->pinned) >> 20,
			(unsigned long long)room >> 20, (unsigned long long)size >> 20,
			(unsigned long long)(s->pinned + r->pinned - room + (1 << 20) - 1) >> 20);
	for (uint32_t i = 0; i < r->n; i++) {
		for (unsigned int k = 0; k < MOMENT_ROLES; k++) {
			if (r->e[i].f[k])
				file_pin(r->e[i].f[k], r->e[i].m->tier == 1);
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

			uint64_t size = f ? reg_bytes(&r->e[i], k) : 0;

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
	if (r->checked && x == -ENOSPC)
		space_trim(&s->e->c, r->pool_size);
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

			/* Others may have taken some of it since. */
			x = space_check(c, &r->w, need, &r->waits);
			if (x)
				return x;
			if (!c->grow_error)
				space_grow(c, need);
			x = space_wait(c, &r->w, len, false);
			if (x == -ENOSPC) /* there is enough: not in such runs, then */
				x = space_repack(c);
			else if (!x)
				return 1;
			if (x)
				return x;
			r->block--; /* once more: it has its places now */
			continue;
		}
		if (x)
			return x;
		slot->keep = true;
	}
	for (uint32_t n = 0; n < blocks; n++)
		slot_account(c, f, n);
	file_publish(c, f, false);
	r->block = 0;
	return 0;
}

static void no_space(struct reg *r, int x, const struct entry *e)
{
	struct engine *en = r->s->e;
	uint64_t need = still_needed(r);
	struct pool_info pi;

	pool_get_info(en->pool, &pi);
	reg_error(
		r, x,
		"not enough disk space under %s for parameter %s and what follows: %llu bytes (%llu MiB) more are "
		"needed (state is kept twice), %llu (%llu MiB) are free%s%s; nothing was made",
		en->path, e->label, (unsigned long long)need, (unsigned long long)need >> 20,
		(unsigned long long)pi.available, (unsigned long long)pi.available >> 20,
		pi.limit ? " within size=" : "",
		need <= pi.available ? ", but in runs that are too short: make room, or raise size="
				     : "");
}

static void reserve(struct waiter *w)
{
	struct reg *r = container_of(w, struct reg, w);
	struct session *s = r->s;
	uint64_t longest = 0;

	if (s->dead) {
		reg_fail(r, -ECANCELED);
		return;
	}
	if (!r->checked && r->n) {
		int x = space_check(&s->e->c, &r->w, still_needed(r), &r->waits);
		struct pool_info pi;

		if (x == 1)
			return;
		pool_get_info(s->e->pool, &pi);
		r->pool_size = pi.size;
		r->checked = true;
		if (x) {
			no_space(r, x, &r->e[0]);
			reg_fail(r, x);
			return;
		}
	}
	for (; r->i < r->n; r->i++, r->role = 0) {
		for (; r->role < MOMENT_ROLES; r->role++) {
			struct entry *e = &r->e[r->i];
			struct file *f = e->f[r->role];
			int x;

			if (!f)
				continue;
			x = reserve_file(r, f, reg_bytes(e, r->role));
			if (x == 1)
				return;
			if (x) {
				no_space(r, x, e);
				reg_fail(r, x);
				return;
			}
			longest = max_u64(longest, min_u64(f->size, s->e->c.block));
		}
	}
	space_keep_slack(&s->e->c, (uint32_t)round_up_u64(longest, MOMENT_UNIT));
	make_durable(r);
}

/* ---- the end ---- */

static void committed(struct commit_wait *w, int res)
{
	struct reg *r = container_of(w, struct reg, cw);

	if (res)
		reg_error(
			r, res,
			"the parameters are made, but the commit that records them failed: %s; cure the drive "
			"(momentctl status has the details) and register again",
			strerror(-res));
	else
		r->s->e->adopted = false;
	if (res || r->s->dead)
		reg_fail(r, res ? res : -ECANCELED);
	else
		reply_done(r);
}

static bool reg_give_up(struct patience *p, const struct session *by)
{
	struct reg *r = container_of(p, struct reg, patience);
	char who[160];

	list_remove(&r->w.link);
	session_lessee_text(by, who, sizeof(who));
	reg_error(r, -EBUSY, "a fresh start is not possible: %s", who);
	reg_fail(r, -EBUSY);
	return true;
}

/*
 * A fresh start of what is there, when nothing can stand in its way any more: first all is idle,
 * then, in an instant, all becomes zeros, and arrays that were not asked for go. 0, 1 (waits),
 * -errno. In a quiet section, so that what was found idle stays so.
 */
static int fresh(struct reg *r)
{
	struct cache *c = &r->s->e->c;
	struct ns_attr a;
	int x = 0;

	for (uint32_t i = 0; i < r->n; i++) {
		x = r->e[i].made ? 0 : file_make_meta(c, r->e[i].dir, &r->w);
		if (x < 0)
			reg_error(r, x, "params/%s/meta.json cannot become the parameter's: %s%s",
				  r->e[i].dirname, strerror(-x),
				  x == -EBUSY ? " (it is open for writing in another program: close it first)"
					      : "");
		if (x)
			return x;
	}
	for (uint32_t i = 0; i < r->n; i++) {
		for (unsigned int k = 0; k < MOMENT_ROLES; k++) {
			struct file *f = r->e[i].f[k];

			if (!f || file_settle(c, f, 0, UINT32_MAX, &r->w))
				continue;
			r->patience.give_up = reg_give_up;
			patience_begin(r->s->e, &r->patience, f, &r->w);
			return 1;
		}
	}
	for (uint32_t i = 0; i < r->n && !x; i++) {
		struct entry *e = &r->e[i];

		if (e->made)
			continue;
		for (unsigned int k = 0; k < MOMENT_ROLES; k++) {
			if (e->f[k])
				make_zeros(c, e->f[k], reg_bytes(e, k));
			else if (!ns_peek(c->ns, e->dir, session_role[k], &a) && S_ISREG(a.mode))
				ns_remove(c->ns, e->dir, session_role[k], false);
		}
		e->step = 0;
		x = set_attrs(r, e);
	}
	return x;
}

/* No commit knows it as it is registered: made here, adopted, or copied in with its attributes. */
static bool is_new(const struct reg *r, const struct entry *e)
{
	bool new = !ns_is_stored(r->s->e->c.ns, e->dir);

	for (unsigned int k = 0; k < MOMENT_ROLES; k++)
		new = new || e->made_file[k] ||
		      (e->f[k] && !ns_is_stored(r->s->e->c.ns, e->f[k]->ino));
	return new;
}

/*
 * What is new is committed before the first step: a parameter that no commit knows could not be
 * left out of a commit, nor taken back to its last one.
 */
static void make_durable(struct reg *r)
{
	bool made = r->flags & MOMENT_REG_FRESH || r->s->e->adopted;
	struct cache *c = &r->s->e->c;
	int x = 0;

	if (r->flags & MOMENT_REG_FRESH) {
		cache_quiet(c);
		x = fresh(r);
		cache_loud(c);
	}
	if (x == 1)
		return;
	for (uint32_t i = 0; i < r->n && !made; i++)
		made = is_new(r, &r->e[i]);
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

		*p = (struct param){.dir = e->dir, .next_step = STEP_NONE};
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

static void reply_told(void *arg)
{
	struct reg *r = arg;
	struct session *s = r->s;

	s->registering--;
	if (session_busy_end(s))
		session_reply(s, r->msg, r->reply, r->reply_len);
	reg_free(r);
}

/* Nobody sees what was there before, pages of it included, when the client hears of it. */
static void reply_done(struct reg *r)
{
	struct session *s = r->s;
	struct cache *c = &s->e->c;
	size_t len =
		sizeof(struct moment_register_reply) + r->n * sizeof(struct moment_reg_reply_entry);
	struct moment_register_reply *m = calloc(1, len);
	struct pool_info pi;
	int x = m ? 0 : reg_error(r, -ENOMEM, "register: out of memory");

	if (!x && take_handles(r, m))
		x = reg_error(r, -ENOMEM, "register: out of memory");
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
	r->reply = m;
	r->reply_len = len;
	engine_invalidate(s->e, reply_told, r);
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
	int x = s->dead ? reg_error(r, -ECANCELED, "the session has ended") : 0;

	if (!x)
		x = reg_check(r);
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
		list_init(&r->patience.link);
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
		x = reg_parse(r, &r->e[i], (const char *)r->msg + at, msg->len - at);
		if (!x)
			at += r->e[i].m->size;
	}
	if (x) {
		reg_fail(r, x);
		return;
	}
	proceed(r);
}
