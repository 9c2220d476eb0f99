/* SPDX-License-Identifier: Apache-2.0 */
/*
 * session_lease.c - leases of blocks, and hints.
 *
 * Loop thread only. A lease is a want (cache.h) that its session holds until it releases it. The
 * table of leases says what a session has, so that nothing is leased twice and all can be taken
 * back when its process dies.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/session.h"

#define LEASES_MOST \
	((MOMENT_MSG_MAX - sizeof(struct moment_advance_reply)) / sizeof(struct moment_lease))

struct advance {
	struct session *s;
	struct moment_msg req;
	struct get g;
	unsigned int n;
	struct lease **lease;
	struct want *want;
};

static struct list *lease_bucket(struct session *s, uint64_t key)
{
	return &s->leases[(key * 0x9e3779b97f4a7c15ull >> 40) % LEASE_HASH];
}

static struct lease *lease_find(struct session *s, uint64_t key)
{
	list_for_each(l, lease_bucket(s, key))
	{
		struct lease *x = list_entry(l, struct lease, link);

		if (x->key == key)
			return x;
	}
	return NULL;
}

static void lease_free(struct session *s, struct lease *l)
{
	list_remove(&l->link);
	s->nleases--;
	s->leased -= l->piece;
	s->e->c.leased -= l->piece;
	s->e->c.leased_loose -= l->loose;
	if (s->readonly)
		s->e->c.leased_readers -= l->piece;
	if (l->piece < s->e->c.block)
		s->leased_small -= l->piece;
	free(l);
}

static void lease_release(struct session *s, struct lease *l, uint32_t flags)
{
	struct cache *c = &s->e->c;
	struct block *b = l->want.b;

	if ((flags & MOMENT_RANGE_COOL) && b)
		policy_cool(c->policy, &b->pol);
	TRACE(c, "release", l->want.f->ino, l->want.n, l->piece);
	cache_put(c, &l->want, !(flags & MOMENT_RANGE_CLEAN));
	lease_free(s, l);
}

void session_drop_leases(struct session *s)
{
	for (unsigned int i = 0; i < LEASE_HASH; i++) {
		struct list *l = s->leases[i].next;

		while (l != &s->leases[i]) {
			struct lease *x = list_entry(l, struct lease, link);

			l = l->next;
			if (!x->granted)
				continue; /* its advance is under way and finds the session dead */
			lease_release(s, x, 0);
			l = s->leases[i].next; /* that may have ended an advance, and its leases */
		}
	}
}

static struct session *lessee(struct engine *e, bool held, const struct file *f)
{
	list_for_each(k, &e->sessions)
	{
		struct session *s = list_entry(k, struct session, link);

		for (unsigned int i = 0; s->nleases && i < LEASE_HASH; i++) {
			list_for_each(l, &s->leases[i])
			{
				const struct file *x = list_entry(l, struct lease, link)->want.f;

				if ((!held || x->held) && (!f || x == f))
					return s;
			}
		}
	}
	return NULL;
}

struct session *session_lessee(struct engine *e, bool held)
{
	return lessee(e, held, NULL);
}

struct session *session_lessee_of(struct engine *e, const struct file *f)
{
	return lessee(e, false, f);
}

void session_lessee_text(const struct session *s, char *out, size_t len)
{
	char who[64];

	snprintf(out, len, "%s (%s) keeps %llu blocks leased to %s: end it first",
		 s->client[0] ? s->client : "a session", holder_who(who, s->opts.pid),
		 (unsigned long long)s->nleases, s->readonly ? "read" : "change");
}

static void advance_free(struct advance *a)
{
	free(a->lease);
	free(a->want);
	free(a);
}

static void advance_done(struct get *g, int res)
{
	struct advance *a = container_of(g, struct advance, g);
	struct session *s = a->s;
	struct engine *e = s->e;
	struct cache *c = &e->c;

	if (res || s->dead) {
		/* On an error the cache holds nothing for us any more. */
		for (unsigned int i = 0; i < a->n; i++) {
			if (!res)
				cache_put(c, &a->want[i], true);
			lease_free(s, a->lease[i]);
		}
		if (session_busy_end(s)) {
			if (res == -E2BIG)
				session_error(
					s, &a->req, res,
					"no room in the RAM tier between this session's own leases (%llu KiB are out): "
					"release some and ask again",
					(unsigned long long)(s->leased >> 10));
			else
				session_error(s, &a->req, res, "lease: %s; status has the details",
					      strerror(-res));
		}
		advance_free(a);
		return;
	}
	{
		size_t len =
			sizeof(struct moment_advance_reply) + a->n * sizeof(struct moment_lease);
		struct moment_advance_reply *m = calloc(1, len);

		if (!m) {
			for (unsigned int i = 0; i < a->n; i++) {
				cache_put(c, &a->want[i], true);
				lease_free(s, a->lease[i]);
			}
			session_error(s, &a->req, -ENOMEM, "lease: no memory for the reply");
		} else {
			m->n = a->n;
			for (unsigned int i = 0; i < a->n; i++) {
				struct lease *l = a->lease[i];
				struct want *w = &a->want[i];

				l->want = *w;
				l->granted = true;
				TRACE(c, "lease", w->f->ino, w->n, l->piece);
				m->l[i].arena = w->b->mem.o;
				/* A plain file may have grown while its reader waited. */
				m->l[i].len = (uint32_t)min_u64(file_content(c, w->f, w->n),
								w->b->piece);
			}
			session_reply(s, &a->req, m, len);
			free(m);
		}
	}
	session_busy_end(s);
	advance_free(a);
}

/* Checks a range's form against the session's files. */
static const char *bad_range(const struct session *s, const struct moment_range *r)
{
	if (r->file >= s->nfiles || !s->files[r->file])
		return "unknown file handle";
	if (!r->count || r->first + r->count < r->first ||
	    r->first + r->count > file_nblocks(&s->e->c, s->files[r->file]))
		return "not blocks of the file";
	return NULL;
}

static int release_all(struct session *s, const struct moment_msg *msg,
		       const struct moment_range *r, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		const char *why = bad_range(s, &r[i]);

		for (uint32_t k = 0; !why && k < r[i].count; k++) {
			struct lease *l =
				lease_find(s, (uint64_t)r[i].file << 32 | (r[i].first + k));

			if (!l || !l->granted)
				why = "not leased";
		}
		if (why) {
			session_error(s, msg, -EINVAL, "release of file %u, blocks %u+%u: %s",
				      r[i].file, r[i].first, r[i].count, why);
			return -EINVAL;
		}
		for (uint32_t k = 0; k < r[i].count; k++)
			lease_release(s,
				      lease_find(s, (uint64_t)r[i].file << 32 | (r[i].first + k)),
				      r[i].flags);
	}
	return 0;
}

static int lease_add(struct session *s, struct advance *a, const struct moment_range *r, uint32_t k)
{
	struct cache *c = &s->e->c;
	struct file *f = s->files[r->file];
	uint32_t n = r->first + k;
	uint64_t key = (uint64_t)r->file << 32 | n;
	struct lease *l = calloc(1, sizeof(*l));
	uint32_t content = file_content(c, f, n);

	if (!l)
		return -ENOMEM;
	l->key = key;
	l->want.f = f;
	l->piece = cache_piece(c, content ? content : 1);
	list_push_back(lease_bucket(s, key), &l->link);
	s->nleases++;
	s->leased += l->piece;
	c->leased += l->piece;
	l->loose = f->pinned ? 0 : l->piece;
	c->leased_loose += l->loose;
	if (s->readonly)
		c->leased_readers += l->piece;
	if (l->piece < c->block)
		s->leased_small += l->piece;
	a->want[a->n] = (struct want){
		.f = f,
		.n = n,
		.mode = r->flags & MOMENT_RANGE_WRITE ? GET_WRITE : GET_LEASE,
	};
	a->lease[a->n++] = l;
	return 0;
}

/*
 * Whatever sessions hold, an eighth of the tier goes round: a plain op, or the next lease, gets
 * its block without waiting for a session to give one back. All readers share a sixteenth.
 */
static bool leaves_room(const struct session *s)
{
	const struct cache *c = &s->e->c;
	uint64_t size = arena_size(c->arena), held = c->leased_loose;

	if (s->e->writer)
		held += s->e->writer->pinned;
	return held <= size - max_u64(size / 8, 2ull * c->block) &&
	       (!s->readonly || c->leased_readers <= max_u64(size / 16, c->block));
}

void session_advance(struct session *s, const struct moment_msg *msg)
{
	const struct moment_advance *m = (const struct moment_advance *)msg;
	struct cache *c = &s->e->c;
	uint64_t bytes, small, before = s->leased, before_small = s->leased_small;
	/* What the quota has room for and the reply too; looked at before any work is done. */
	uint64_t total = 0, most = min_u64(s->quota / MOMENT_UNIT, LEASES_MOST);
	struct advance *a;
	int r = 0;

	if (msg->len != sizeof(*m) + ((uint64_t)m->n_release + m->n_lease) * sizeof(m->r[0])) {
		session_error(s, msg, -EPROTO,
			      "advance: the message's length does not fit its ranges");
		return;
	}
	if (release_all(s, msg, m->r, m->n_release))
		return;
	if (m->n_lease && s->e->reverting) {
		session_error(s, msg, -EBUSY, "lease: a rollback is under way: ask again");
		return;
	}
	for (uint32_t i = 0; i < m->n_lease; i++) {
		const struct moment_range *x = &m->r[m->n_release + i];
		const char *why = bad_range(s, x);

		if (!why) {
			total += x->count;
			if (total > most) {
				session_error(s, msg, -E2BIG,
					      "lease of more than %llu blocks at once",
					      (unsigned long long)most);
				return;
			}
		}
		if (!why && (x->flags & MOMENT_RANGE_WRITE) && !s->stepping) {
			session_error(s, msg, -EPERM,
				      "a lease for writing outside a step: call pre_step first");
			return;
		}
		for (uint32_t k = 0; !why && k < x->count; k++) {
			if (lease_find(s, (uint64_t)x->file << 32 | (x->first + k)))
				why = "already leased";
		}
		if (why) {
			session_error(s, msg, -EINVAL, "lease of file %u, blocks %u+%u: %s",
				      x->file, x->first, x->count, why);
			return;
		}
	}
	a = calloc(1, sizeof(*a));
	if (a) {
		a->s = s;
		a->req = *msg;
		a->lease = calloc(total ? total : 1, sizeof(struct lease *));
		a->want = calloc(total ? total : 1, sizeof(*a->want));
	}
	if (!a || !a->lease || !a->want) {
		if (a)
			advance_free(a);
		session_error(s, msg, -ENOMEM, "lease: out of memory");
		return;
	}
	for (uint32_t i = 0; i < m->n_lease && !r; i++) {
		const struct moment_range *x = &m->r[m->n_release + i];

		for (uint32_t k = 0; k < x->count && !r; k++) {
			/* The same block twice in one message. */
			if (lease_find(s, (uint64_t)x->file << 32 | (x->first + k)))
				r = -EINVAL;
			else
				r = lease_add(s, a, x, k);
			cache_prefetch_reached(c, s->files[x->file]->ino, x->first + k);
		}
	}
	bytes = s->leased - before;
	small = s->leased_small - before_small;
	if (!r && (s->leased > s->quota || s->leased_small > s->quota_small || !leaves_room(s)))
		r = -E2BIG;
	if (r) {
		for (unsigned int i = 0; i < a->n; i++)
			lease_free(s, a->lease[i]);
		if (r == -E2BIG)
			session_error(
				s, msg, r,
				"leases of %llu KiB (%llu KiB in small blocks) beside %llu KiB (%llu) that are out "
				"are above the quota of %llu KiB (%llu), or of what pinned state and other sessions "
				"leave of it: release some first, or use a larger ram=",
				(unsigned long long)bytes >> 10, (unsigned long long)small >> 10,
				(unsigned long long)before >> 10,
				(unsigned long long)before_small >> 10,
				(unsigned long long)s->quota >> 10,
				(unsigned long long)s->quota_small >> 10);
		else
			session_error(s, msg, r, "lease: %s",
				      r == -EINVAL ? "a block twice" : strerror(-r));
		advance_free(a);
		return;
	}
	session_busy_begin(s);
	a->g = (struct get){.want = a->want, .n = a->n, .done = advance_done, .session = true};
	cache_get(c, &a->g);
	cache_pump(c);
}

void session_prefetch(struct session *s, const struct moment_msg *msg)
{
	const struct moment_prefetch *m = (const struct moment_prefetch *)msg;
	struct cache *c = &s->e->c;

	if (msg->len != sizeof(*m) + (uint64_t)m->n * sizeof(m->r[0]))
		return; /* no reply to say it in; hints are hints */
	for (uint32_t i = 0; i < m->n; i++) {
		if (!bad_range(s, &m->r[i]))
			cache_prefetch(c, s->files[m->r[i].file]->ino, m->r[i].first,
				       m->r[i].count);
	}
	cache_pump(c);
}
