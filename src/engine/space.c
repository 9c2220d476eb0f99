/* SPDX-License-Identifier: Apache-2.0 */
/*
 * space.c - room in the pool: who waits for it, when the file grows, and when it is made shorter.
 *
 * Loop thread, except grow_run (a work thread). The file grows when a place is wanted and there is
 * none; the host's disk is taken for that and for nothing else:
 * - whoever wants much (an fallocate, a registration) has the total compared with all there is
 *   before the first place is taken: space_check();
 * - what a refusal had the file grow by, and at unmount the free tail, goes back to the host:
 *   space_trim(), space_trim_all(); but at unmount what the trainer that comes back will ask for
 *   stays free, two places for each block of its state, since others may fill the disk meanwhile.
 *   It is found by trying: a sum of bytes would not do, since places are runs.
 * - where a registration finds enough bytes, but not in runs that are long enough, the places of
 *   the whole state in which nothing is written yet are dealt out anew: space_repack().
 * Free places in the middle stay: free space in the pool is reserved, that is a promise.
 */
#include <errno.h>
#include <stdlib.h>

#include "engine/bug.h"
#include "engine/cache.h"
#include "engine/commit.h"

static void grow_run(struct loop_work *w)
{
	struct cache *c = container_of(w, struct cache, grow_work);

	pool_grow_run(c->pool, &c->grow);
}

static void grow_done(struct loop_work *w)
{
	struct cache *c = container_of(w, struct cache, grow_work);

	bool shrunk = c->grow.to < c->grow.from;

	pool_grow_end(c->pool, &c->grow);
	c->growing = false;
	if (!shrunk)
		c->grow_error = c->grow.res;
	space_wake(c);
	cache_pump(c); /* what waits for memory may have waited because this was under way */
}

static void grow_start(struct cache *c)
{
	c->growing = true;
	c->grow_work = (struct loop_work){.run = grow_run, .done = grow_done};
	list_init(&c->grow_work.link);
	loop_work_urgent(c->loop, &c->grow_work);
}

int space_grow(struct cache *c, uint64_t need)
{
	int r;

	if (c->growing)
		return 0;
	if (c->readonly)
		return -EROFS;
	r = pool_grow_begin(c->pool, need, &c->grow);
	if (r == -EALREADY)
		return 0;
	if (r)
		return r;
	grow_start(c);
	return 0;
}

int space_wait(struct cache *c, struct waiter *w, uint32_t len, bool kept)
{
	bool committing = commit_running(c);

	if (!(kept && committing)) {
		int r = c->grow_error == 0 ? space_grow(c, len) : -ENOSPC;

		if (r == -ENOSPC) {
			/* The host is full or the limit reached: what was freed comes back with a
			 * commit. */
			if (!committing && commit_frees_pending(c)) {
				if (c->space_error)
					return c->space_error;
				commit_start(c);
				committing = commit_running(c);
			}
			if (!committing) {
				c->grow_error = 0; /* the next one may try again */
				return -ENOSPC;
			}
		} else if (r) {
			return r;
		}
	}
	list_push_back(&c->space, &w->link);
	return 0;
}

void space_wake(struct cache *c)
{
	struct list todo;

	list_init(&todo);
	list_splice_back(&todo, &c->space);
	while (!list_empty(&todo)) {
		struct waiter *w = list_first(&todo, struct waiter, link);

		list_remove(&w->link);
		w->wake(w);
	}
}

/* ---- totals ---- */

int space_check(struct cache *c, struct waiter *w, uint64_t need, unsigned int *waits)
{
	struct pool_info pi;

	pool_get_info(c->pool, &pi);
	if (need <= pi.available)
		return 0;
	/* While the file grows the new room is on neither side; a commit may free some. Not for
	 * ever: others take and free meanwhile. */
	if (++*waits > 4)
		return -ENOSPC;
	if (!c->growing && !commit_running(c)) {
		if (!commit_frees_pending(c))
			return -ENOSPC;
		if (c->space_error)
			return c->space_error;
		commit_start(c);
		if (!commit_running(c))
			return space_check(c, w, need, waits);
	}
	list_push_back(&c->space, &w->link);
	return 1;
}

/* ---- giving back ---- */

bool space_trim(struct cache *c, uint64_t floor)
{
	/* A commit reads places that are free meanwhile, when a sync has failed before it. */
	if (c->readonly || c->growing || commit_running(c) ||
	    pool_trim_begin(c->pool, floor, &c->grow))
		return false;
	grow_start(c);
	return true;
}

/* ---- all places of the state, at once ---- */

struct places {
	struct pool_place *v;
	size_t n, cap;
};

static int places_add(struct places *t, struct poff off, uint32_t len, uint64_t tag)
{
	if (t->n == t->cap) {
		size_t cap = max_u64(256, 2 * t->cap);
		struct pool_place *v = realloc(t->v, cap * sizeof(*v));

		if (!v)
			return -ENOMEM;
		t->v = v;
		t->cap = cap;
	}
	t->v[t->n++] = (struct pool_place){off, len, tag};
	return 0;
}

static uint32_t place_len(const struct cache *c, const struct file *f, uint32_t n)
{
	return (uint32_t)round_up_u64(file_content(c, f, n), MOMENT_UNIT);
}

/* What the file's blocks want beside their live extents; what they have of that already goes to
 * `old`, if that is asked for. */
static int file_wants(struct cache *c, struct file *f, struct places *want, struct places *old)
{
	uint32_t blocks = file_nblocks(c, f);
	int r = 0;

	for (uint32_t n = 0; !r && n < blocks; n++) {
		struct slot *s = old ? file_slot_make(c, f, n) : file_slot(f, n);
		uint32_t len = place_len(c, f, n);
		unsigned int wants = 2;

		if (old && !s)
			return -ENOMEM;
		if (old && s->b && s->b->state == BLOCK_WRITING)
			continue;
		if (s && !extent_is_hole(&s->live) && slot_place_len(s) >= len)
			wants = 1;
		for (unsigned int k = 0; old && !r && k < s->nspare; k++)
			r = places_add(old, s->spare[k], s->spare_len, 0);
		for (unsigned int k = 0; !r && k < wants; k++)
			r = places_add(want, (struct poff){0}, len, (uint64_t)(uintptr_t)s);
	}
	return r;
}

int space_repack(struct cache *c)
{
	struct places want = {0}, old = {0};
	struct file *f;
	size_t pos = 0;
	int r = 0;

	while (!r && (f = file_next(c, &pos)))
		if (f->session)
			r = file_wants(c, f, &want, &old);
	if (r)
		goto out;
	for (size_t i = 0; i < old.n; i++)
		pool_free(c->pool, old.v[i].off, old.v[i].len);
	r = pool_pack(c->pool, want.v, want.n);
	for (size_t i = 0; r && i < old.n; i++) {
		int x = pool_mark(c->pool, &(struct extent){.off = old.v[i].off.o,
							    .len = old.v[i].len});

		assert(!x);
		(void)x;
	}
	for (size_t i = 0; !r && i < want.n; i++)
		((struct slot *)(uintptr_t)want.v[i].tag)->nspare = 0;
	for (size_t i = 0; !r && i < want.n; i++) {
		struct slot *s = (struct slot *)(uintptr_t)want.v[i].tag;

		s->spare[s->nspare++] = want.v[i].off;
		s->spare_len = want.v[i].len;
		s->keep = true;
	}
out:
	free(want.v);
	free(old.v);
	return r;
}

/*
 * Free room that should be beside the places of the state. Runs are cut up by places of many lengths,
 * and without any room to spare there may be no way to deal them out again; with the longest place
 * four times there is (tried on random lengths: two of them were always enough).
 */
static uint64_t slack(uint32_t longest)
{
	return 4ull * longest;
}

void space_keep_slack(struct cache *c, uint32_t longest)
{
	struct pool_info pi;

	pool_get_info(c->pool, &pi);
	if (pi.free < slack(longest))
		space_grow(c, slack(longest) - pi.free); /* if it can be had */
}

/* The size of the file in which all state finds its places again; UINT64_MAX: none was found. */
static uint64_t size_for_state(struct cache *c)
{
	uint64_t end = POOL_SUPER_SIZE;
	struct places want = {0};
	struct file *f;
	size_t pos = 0;
	int r = 0;

	while (!r && (f = file_next(c, &pos)))
		if (ns_getxattr(c->ns, f->ino, "user.moment.dtype", NULL, 0) > 0)
			r = file_wants(c, f, &want, NULL);
	if (!r)
		r = pool_pack(c->pool, want.v, want.n);
	for (size_t i = 0; !r && i < want.n; i++) {
		end = max_u64(end, want.v[i].off.o + want.v[i].len);
		pool_free(c->pool, want.v[i].off, want.v[i].len);
	}
	if (want.n)
		end += slack(want.v[0].len); /* the longest is first now */
	free(want.v);
	return r ? UINT64_MAX : end;
}

uint64_t space_trim_all(struct cache *c)
{
	struct pool_grow g;
	size_t pos = 0;
	struct file *f;

	if (c->readonly || c->growing || commit_running(c))
		return 0;
	while ((f = file_next(c, &pos))) {
		struct slot *s;

		for (uint32_t n = 0; (s = file_slot_next(f, &n)); n++)
			slot_give_up(c, s);
	}
	if (pool_trim_begin(c->pool, size_for_state(c), &g))
		return 0;
	pool_grow_run(c->pool, &g);
	pool_grow_end(c->pool, &g);
	return g.res ? 0 : g.from - g.to;
}
