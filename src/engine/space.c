/* SPDX-License-Identifier: Apache-2.0 */
/*
 * space.c - room in the pool: who waits for it, when the file grows, and when it is made shorter.
 *
 * Loop thread, except grow_run (a work thread). The file grows when a place is wanted and there is
 * none; the host's disk is taken for that and for nothing else:
 * - whoever wants much (an fallocate, a registration) has the total compared with all there is
 *   before the first place is taken: space_check();
 * - what a refusal had the file grow by, and at unmount the free tail, goes back to the host:
 *   space_trim(), space_trim_all(); but at unmount as much stays free as is in use, since the
 *   trainer that comes back wants two places for each block, and others may have filled the disk.
 * Free places in the middle stay: free space in the pool is reserved, that is a promise.
 */
#include <errno.h>

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

uint64_t space_trim_all(struct cache *c)
{
	struct pool_info pi;
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
	pool_get_info(c->pool, &pi);
	if (pool_trim_begin(c->pool, POOL_SUPER_SIZE + 2 * pi.used, &g))
		return 0;
	pool_grow_run(c->pool, &g);
	pool_grow_end(c->pool, &g);
	return g.res ? 0 : g.from - g.to;
}
