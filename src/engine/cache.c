/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cache.c - blocks in memory: who gets them, who waits, who is evicted.
 *
 * Loop thread only. A get asks for a set of blocks, all or nothing:
 *
 * 1. Memory. In one go it pins the blocks that are there and takes memory for those that are not;
 * if there is not enough it keeps nothing and waits in `starving`, first come first served. So
 * nobody holds memory while waiting for memory.
 * 2. Content. Missing blocks are filled, all at once.
 * 3. Access. Block by block, it waits until the block may be read or written.
 *
 * cache_pump() is the one place that turns free and clean memory into progress; it runs after
 * everything that may have changed the answer.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/bug.h"
#include "engine/cache.h"
#include "engine/commit.h"

#define DEAD_ROUNDS 5u /* of writes, a second apart */

int cache_init(struct cache *c)
{
	struct arena_info ai;
	int r;

	list_init(&c->held);
	list_init(&c->changed);
	list_init(&c->starving);
	list_init(&c->woken);
	list_init(&c->space);
	list_init(&c->write_queue);
	list_init(&c->errors);
	list_init(&c->retry.link);
	arena_get_info(c->arena, &ai);
	c->base = arena_base(c->arena);
	/* Enough in flight for the drive, not so much that a small tier is all in writing. In
	 * bytes: small blocks would leave it idle. Drives (of virtual machines above all) report
	 * writes done by the dozen: with half of this one idles while the next are hashed. */
	c->write_most = max_u64(2ull * c->block, min_u64(128u << 20, ai.size / 4));
	c->window = min_u64(64u << 20, ai.size / 3);
	r = readahead_init(c);
	if (!r)
		r = policy_create(&c->policy, ai.chunks);
	if (r)
		readahead_fini(c);
	return r;
}

/* Nothing is in flight any more. */
void cache_fini(struct cache *c)
{
	files_fini(c);
	policy_destroy(c->policy);
	freed_fini(c, &c->orphans);
	readahead_fini(c);
}

/* ---- memory ---- */

/* Evicts one clean block of the class that `len` belongs to. False: there is none. */
static bool evict_one(struct cache *c, enum policy_class class, bool spare_ahead)
{
	unsigned int mark = spare_ahead ? POLICY_SPENT : POLICY_EVICT;
	struct policy_node *p = policy_victim(c->policy, class, mark, NULL);

	for (; p; p = policy_victim(c->policy, class, mark, p)) {
		struct block *b = container_of(p, struct block, pol);

		assert(b->state == BLOCK_CLEAN && !b->pins && !b->frozen && !b->f->pinned);
		if (!list_empty(&b->waiters)) /* they are about to be woken */
			continue;
		c->stats.evictions++;
		TRACE(c, "evict", b->f->ino, b->n, b->piece);
		block_remove(b, true);
		return true;
	}
	return false;
}

uint32_t cache_piece(const struct cache *c, uint32_t len)
{
	return arena_piece_size(c->arena, len);
}

/*
 * Memory for `len` bytes, evicting clean blocks if need be; `gentle`: not what was read ahead and
 * is still to be used. A small piece first makes the small area grow at the cost of a whole block,
 * then evicts small ones; in the last resort it gets a chunk of its own, so that it cannot be kept
 * out by pieces that are pinned here and there.
 */
static int take_memory(struct cache *c, uint32_t len, bool gentle, struct aoff *out,
		       uint32_t *piece)
{
	bool small = !arena_is_whole(c->arena, len);
	bool grow = small;

	for (;;) {
		int r = arena_alloc(c->arena, len, out);

		if (!r) {
			*piece = arena_piece_size(c->arena, len);
			return 0;
		}
		if (grow) {
			/* With a chunk free and still no piece, the small area is as large as it
			 * may be. */
			grow = !arena_free_chunks(c->arena) && evict_one(c, POLICY_WHOLE, true);
			continue;
		}
		if (evict_one(c, small ? POLICY_SMALL : POLICY_WHOLE, true))
			continue;
		if (gentle)
			return -ENOMEM;
		if (evict_one(c, small ? POLICY_SMALL : POLICY_WHOLE, false))
			continue;
		if (small && (arena_free_chunks(c->arena) || evict_one(c, POLICY_WHOLE, true)) &&
		    !arena_alloc(c->arena, arena_chunk(c->arena), out)) {
			*piece = arena_chunk(c->arena);
			return 0;
		}
		return -ENOMEM;
	}
}

/* By what the file has when it is asked: while a get waits, others write. */
static bool replaces_all(const struct cache *c, const struct want *w)
{
	return w->replaces && w->replaces >= file_content(c, w->f, w->n);
}

/*
 * Bytes of memory that block n needs now. Never less than its live extent has, also for a getter
 * that replaces all of it: if that one gives up, the block is filled from there after all.
 */
static uint32_t need_len(const struct cache *c, const struct want *w, const struct slot *s)
{
	uint32_t len = file_content(c, w->f, w->n);

	if (w->len > len)
		len = w->len;
	len = (uint32_t)round_up_u64(len, MOMENT_UNIT);
	if (s && s->live.len > len)
		len = s->live.len;
	return len ? len : MOMENT_UNIT;
}

static void pin(struct block *b)
{
	if (!b->pins++)
		block_mark(b);
}

static void unpin(struct block *b)
{
	assert(b->pins);
	if (!--b->pins)
		block_mark(b);
}

/* A growing file: the block moves to a larger piece. It is idle. */
static int block_regrow(struct cache *c, struct block *b, uint32_t len)
{
	struct block old;
	struct aoff mem;
	uint32_t piece;
	int r;

	pin(b);
	r = take_memory(c, len, false, &mem, &piece);
	unpin(b);
	if (r)
		return r;
	policy_remove(c->policy, &b->pol, false);
	if (b->ahead)
		c->ahead_bytes += piece - b->piece;
	if (b->state == BLOCK_DIRTY)
		c->dirty_bytes += piece - b->piece;
	old = *b;
	b->mem = mem;
	b->piece = piece;
	/* The new piece is the larger one. */
	memcpy(block_mem(b, 0, old.piece), block_mem(&old, 0, old.piece), old.piece);
	memset(block_mem(b, old.piece, piece - old.piece), 0, piece - old.piece);
	arena_free(c->arena, old.mem, old.piece);
	b->pol.bytes = piece;
	b->pol.class = piece == arena_chunk(c->arena) ? POLICY_WHOLE : POLICY_SMALL;
	policy_insert(c->policy, &b->pol);
	block_mark(b);
	return 0;
}

/* The want lets go of its block. */
static struct block *want_unpin(struct cache *c, struct want *w)
{
	struct block *b = w->b;

	w->b = NULL;
	unpin(b);
	if (w->op)
		c->op_pins--;
	w->op = false;
	return b;
}

static void get_continue(struct get *g);

static void get_wake(struct waiter *w)
{
	get_continue(container_of(w, struct get, w));
}

/* A pin has gone. */
static void unpinned(struct block *b)
{
	/* Its read failed and the last one who waited for it has gone: the next one reads again. */
	if (b->state == BLOCK_EMPTY && !b->pins)
		block_drop(b);
	else
		block_wake(b);
}

static void get_finish(struct get *g, int res)
{
	struct cache *c = g->c;

	if (res && g->pinned) {
		for (unsigned int i = 0; i < g->n; i++) {
			struct want *w = &g->want[i];

			if (!w->b)
				continue;
			if (w->granted)
				cache_put(c, w, false);
			else if (w->fresh) { /* its filler goes away: nobody has seen the memory */
				struct block *b = want_unpin(c, w);

				w->fresh = false;
				b->filler = false;
				block_set_state(b, BLOCK_EMPTY);
				if (!b->pins) {
					list_splice_back(&c->woken, &b->waiters);
					block_remove(b, false);
				} else {
					block_set_state(b, BLOCK_READING);
					block_fill(b, true);
				}
			} else {
				unpinned(want_unpin(c, w));
			}
		}
	}
	g->res = res;
	g->done(g, res);
	cache_pump(c);
}

enum attempt { ATTEMPT_OK, ATTEMPT_WAIT_BLOCK, ATTEMPT_NO_MEMORY, ATTEMPT_FAIL };

/* Step 1: pins and memory, all or nothing. */
static enum attempt get_attempt(struct get *g, struct block **busy, int *err)
{
	struct cache *c = g->c;
	unsigned int i;
	enum attempt why = ATTEMPT_OK;

	/* Pin what is there first, so that making room does not evict our own. */
	for (i = 0; i < g->n; i++) {
		struct want *w = &g->want[i];
		struct slot *s = file_slot(w->f, w->n);

		w->b = s ? s->b : NULL;
		w->fresh = w->granted = w->op = false;
		if (w->b)
			pin(w->b);
	}
	for (i = 0; i < g->n && why == ATTEMPT_OK; i++) {
		struct want *w = &g->want[i];
		struct slot *s = file_slot_make(c, w->f, w->n);
		uint32_t len;
		struct aoff mem;
		uint32_t piece;

		if (!s) {
			*err = -ENOMEM;
			why = ATTEMPT_FAIL;
			break;
		}
		len = need_len(c, w, s);
		if (w->b) {
			bool alone = w->b->pins == 1;

			if (w->b->piece >= len || w->mode == GET_READ)
				continue;
			unpin(w->b);
			if (!alone || block_busy(w->b) || w->b->writer) {
				pin(w->b);
				*busy = w->b;
				why = ATTEMPT_WAIT_BLOCK;
			} else {
				int r = block_regrow(c, w->b, len);

				pin(w->b);
				if (r)
					why = ATTEMPT_NO_MEMORY;
			}
			continue;
		}
		if (w->mode == GET_READ && extent_is_hole(&s->live))
			continue;
		if (s->b) { /* another want of the same get made it */
			*err = -EINVAL;
			why = ATTEMPT_FAIL;
			break;
		}
		if (take_memory(c, len, g->background, &mem, &piece)) {
			why = ATTEMPT_NO_MEMORY;
			break;
		}
		w->b = block_new(c, w->f, s, w->n);
		if (!w->b) {
			arena_free(c->arena, mem, piece);
			*err = -ENOMEM;
			why = ATTEMPT_FAIL;
			break;
		}
		w->b->mem = mem;
		w->b->piece = piece;
		w->b->pol.bytes = piece;
		w->b->pol.class = piece == arena_chunk(c->arena) ? POLICY_WHOLE : POLICY_SMALL;
		policy_insert(c->policy, &w->b->pol);
		pin(w->b);
		w->fresh = true; /* made by this attempt */
	}
	if (why == ATTEMPT_OK)
		return why;
	for (i = 0; i < g->n; i++) {
		struct want *w = &g->want[i];

		if (!w->b)
			continue;
		unpin(w->b);
		if (w->fresh)
			block_remove(w->b, false);
		w->b = NULL;
		w->fresh = false;
	}
	return why;
}

/* Step 2: fill what step 1 made. */
static void get_fill(struct get *g)
{
	struct cache *c = g->c;

	for (unsigned int i = 0; i < g->n; i++) {
		struct want *w = &g->want[i];
		struct slot *s;

		if (!w->b)
			continue;
		if (!g->session && !g->background) {
			w->op = true;
			c->op_pins++;
		}
		if (!w->fresh) {
			c->stats.hits++;
			if (w->b->ahead && !g->background) {
				w->b->ahead = false; /* pinned: no mark changes */
				c->ahead_bytes -= w->b->piece;
				c->stats.prefetch_hits++;
			}
			policy_touch(c->policy, &w->b->pol);
			continue;
		}
		c->stats.misses++;
		s = file_slot(w->f, w->n);
		block_set_state(w->b, BLOCK_READING);
		if (w->can_fill && (replaces_all(c, w) || extent_is_hole(&s->live))) {
			w->b->filler = true; /* the getter is the one that fills it */
			continue;
		}
		w->fresh = false;
		block_fill(w->b, !g->background);
	}
}

/* Step 3 for one want: 0 granted, 1 waits, -errno. */
static int get_grant(struct get *g, struct want *w)
{
	struct cache *c = g->c;
	struct block *b = w->b;
	struct slot *s;
	uint32_t len;
	int r;

	if (!b) { /* a hole, read */
		w->granted = true;
		return 0;
	}
	if (b->state == BLOCK_EMPTY)
		return b->error ? b->error : -EIO; /* its read failed */
	if (b->state == BLOCK_READING && !(b->filler && w->fresh)) {
		block_wait(b, &g->w);
		return 1;
	}
	if (w->mode != GET_WRITE) {
		if (b->promised) {
			block_wait(b, &g->w);
			return 1;
		}
		w->granted = true;
		return 0;
	}
	if (b->frozen && b->state == BLOCK_DIRTY)
		block_write(b, true);
	if (b->writer || b->frozen || b->state == BLOCK_WRITING) {
		block_wait(b, &g->w);
		return 1;
	}
	list_remove(&b->write_link); /* queued to be written: later, then; it is pinned */
	s = file_slot(w->f, w->n);
	/* A kept place is as long as the content; else all that the memory can grow to, cut at the
	 * write. */
	len = s->keep ? (uint32_t)round_up_u64(max_u64(w->len, block_write_len(b)), MOMENT_UNIT)
		      : b->piece;
	r = slot_reserve(c, w->f, s, len);
	if (r == -EAGAIN) {
		r = space_wait(c, &g->w, len, s->keep);
		if (!r)
			return 1;
	}
	if (r)
		return r;
	w->was_clean = b->state == BLOCK_CLEAN;
	b->writer = true;
	w->granted = true;
	if (b->state == BLOCK_CLEAN)
		block_set_state(b, BLOCK_DIRTY);
	file_changed(c, w->f);
	return 0;
}

static void get_begin(struct get *g);

static void get_continue(struct get *g)
{
	while (g->i < g->n) {
		int r;

		if (!g->pinned) {
			get_begin(g);
			return;
		}
		r = get_grant(g, &g->want[g->i]);
		if (r == 1)
			return;
		if (r) {
			get_finish(g, r);
			return;
		}
		g->i++;
	}
	get_finish(g, 0);
}

/* Behind those who wait for memory already. */
static void starve(struct get *g)
{
	list_push_back(&g->c->starving, &g->link);
	cache_pump(g->c);
}

static void get_begin(struct get *g)
{
	struct cache *c = g->c;
	struct block *busy = NULL;
	int err = 0;

	if (!list_empty(&c->starving) && !g->background) {
		/* Others wait for memory: only a get that needs none may pass. */
		for (unsigned int i = 0; i < g->n; i++) {
			struct slot *s = file_slot(g->want[i].f, g->want[i].n);

			if (s && s->b &&
			    (g->want[i].mode == GET_READ ||
			     s->b->piece >= need_len(c, &g->want[i], s)))
				continue;
			if (g->want[i].mode == GET_READ && (!s || extent_is_hole(&s->live)))
				continue;
			starve(g);
			return;
		}
	}
	switch (get_attempt(g, &busy, &err)) {
	case ATTEMPT_OK:
		break;
	case ATTEMPT_WAIT_BLOCK:
		if (g->background) {
			g->done(g, -EAGAIN);
			return;
		}
		if (busy->frozen && busy->state == BLOCK_DIRTY)
			block_write(busy, true);
		block_wait(busy, &g->w);
		return;
	case ATTEMPT_NO_MEMORY:
		if (g->background) {
			g->done(g, -EAGAIN);
			return;
		}
		starve(g);
		return;
	case ATTEMPT_FAIL:
		g->done(g, err);
		return;
	}
	g->pinned = true;
	get_fill(g);
	get_continue(g);
}

void cache_get(struct cache *c, struct get *g)
{
	g->c = c;
	g->i = 0;
	g->pinned = false;
	g->failed_rounds = c->failed_rounds;
	g->w.wake = get_wake;
	list_init(&g->w.link);
	list_init(&g->link);
	get_begin(g);
}

bool cache_get_cancel(struct cache *c, struct get *g)
{
	(void)c;
	if (g->pinned || !(list_linked(&g->link) || list_linked(&g->w.link)))
		return false;
	list_remove(&g->link);
	list_remove(&g->w.link);
	return true;
}

void cache_promise(struct cache *c, struct want *w)
{
	struct block *b = w->b;

	assert(w->granted && b->writer);
	b->promised = true;
	if (b->filler) {
		b->filler = false;
		block_set_state(b, BLOCK_DIRTY);
	}
	file_changed(c, b->f);
}

void cache_put(struct cache *c, struct want *w, bool changed)
{
	struct block *b = w->b;

	if (!b)
		return;
	want_unpin(c, w);
	if (w->granted && w->mode == GET_WRITE) {
		assert(b->writer);
		b->writer = b->promised = false;
		if (changed)
			b->f->touched = true;
		if (b->state == BLOCK_READING && b->filler) {
			/* The first writer has filled it; a commit may have gone past meanwhile. */
			b->filler = false;
			block_set_state(b, BLOCK_DIRTY);
			file_changed(c, b->f);
		} else if (!changed && w->was_clean && b->state == BLOCK_DIRTY && !b->frozen &&
			   !file_slot(b->f, b->n)->unsure) {
			block_set_state(b, BLOCK_CLEAN);
		}
		slot_trim(c, file_slot(b->f, b->n));
		if (b->frozen && b->state == BLOCK_DIRTY)
			block_write(b, true);
		block_mark(b); /* nobody writes to it any more */
	}
	w->granted = false;
	unpinned(b);
	cache_pump(c);
}

/* Starts reading a block that nobody has asked for yet. False: it cannot be done now. */
bool cache_fill_ahead(struct cache *c, struct file *f, uint32_t n)
{
	struct want w = {.f = f, .n = n, .mode = GET_LEASE};
	struct get g = {.want = &w, .n = 1, .background = true, .c = c};
	struct block *busy;
	int err;

	if (get_attempt(&g, &busy, &err) != ATTEMPT_OK)
		return false;
	get_fill(&g);
	w.b->ahead = true;
	c->ahead_bytes += w.b->piece;
	c->stats.prefetches++;
	unpin(w.b);
	return true;
}

/* ---- the pump ---- */

/* Nothing moves, nothing will: memory comes only from sessions that give leases back. */
static bool stuck(struct cache *c)
{
	return !c->reading && !c->writing && !c->op_pins && list_empty(&c->write_queue) &&
	       !commit_running(c) && !c->growing && !c->error_blocks;
}

/*
 * Memory is full of what cannot be written, and has been for seconds: who needs memory is told so
 * rather than made to wait until somebody cures the drive; but not before it has been tried once
 * more since it asked, for it may be cured now. What is in memory is still served.
 */
static bool drive_dead(const struct cache *c, const struct get *g)
{
	return c->error_blocks && c->failed_rounds >= DEAD_ROUNDS &&
	       c->failed_rounds != g->failed_rounds;
}

/* Bytes of memory that the first in line wants. */
static uint64_t starving_bytes(struct cache *c)
{
	uint64_t sum = 0;
	struct get *g;

	if (list_empty(&c->starving))
		return 0;
	g = list_first(&c->starving, struct get, link);
	for (unsigned int i = 0; i < g->n; i++) {
		const struct want *w = &g->want[i];
		struct slot *s = file_slot(w->f, w->n);

		if (s && s->b)
			continue;
		if (w->mode == GET_READ && (!s || extent_is_hole(&s->live)))
			continue;
		sum += cache_piece(c, (uint32_t)min_u64(need_len(c, w, s), c->block));
	}
	return sum;
}

/* As much as the first in line wants is free or can be evicted: else it need not even be tried. */
static bool may_suffice(struct cache *c)
{
	uint64_t room = arena_size(c->arena) - arena_used(c->arena);

	for (unsigned int class = 0; class < POLICY_CLASSES; class ++)
		room += policy_evictable(c->policy, class);
	return starving_bytes(c) <= room;
}

/*
 * Keeps the next victims clean: as many as the drive can take at once, and what the first in line
 * wants. If that has not helped it and nothing moves any more, everything.
 */
static void clean_ahead(struct cache *c)
{
	uint64_t want = starving_bytes(c);
	uint64_t target = c->write_most + want;
	bool all = want && stuck(c);

	for (unsigned int class = 0; class < POLICY_CLASSES; class ++) {
		uint64_t covered = (uint64_t)arena_free_chunks(c->arena) * c->block;
		uint64_t goal = class == POLICY_WHOLE ? target : target / 4 + want;
		struct policy_node *p = NULL;

		/* Pieces may be short while chunks are free. */
		if (class == POLICY_SMALL && want)
			covered = 0;
		while ((all || covered < goal) &&
		       (p = policy_victim(c->policy, class, POLICY_WRITE, p))) {
			if (!all && covered + policy_counts_before(c->policy, p) >= goal)
				break;
			block_write(container_of(p, struct block, pol), false);
		}
	}
}

/*
 * The first in line waits for memory that only leases could give back. A session's get is told
 * so, rather than waiting for its own session. An op gives up what it wants at once for one block
 * after the other, or else waits for the leases, and is passed by those who may have to be served
 * before any lease comes back. True: the line has changed.
 */
static bool get_unstick(struct cache *c, struct get *g)
{
	if (g->session || g->n > 1) {
		list_remove(&g->link);
		g->done(g, g->session ? -E2BIG : -ENOBUFS);
		return true;
	}
	list_for_each(l, &c->starving)
	{
		if (!list_entry(l, struct get, link)->session)
			continue;
		list_remove(l);
		list_push_front(&c->starving, l);
		return true;
	}
	return false;
}

void cache_quiet(struct cache *c)
{
	c->quiet++;
}

void cache_loud(struct cache *c)
{
	assert(c->quiet);
	c->quiet--;
	cache_pump(c);
}

void cache_pump(struct cache *c)
{
	if (c->quiet)
		return;
	if (c->pumping) {
		c->pump_again = true;
		return;
	}
	c->pumping = true;
	do {
		c->pump_again = false;
		while (!list_empty(&c->woken)) {
			struct waiter *w = list_first(&c->woken, struct waiter, link);

			list_remove(&w->link);
			w->wake(w);
		}
		while (!list_empty(&c->starving)) {
			struct get *g = list_first(&c->starving, struct get, link);
			struct block *busy = NULL;
			int err = 0;
			enum attempt a = may_suffice(c) ? get_attempt(g, &busy, &err)
							: ATTEMPT_NO_MEMORY;

			if (a == ATTEMPT_NO_MEMORY && drive_dead(c, g)) {
				list_remove(&g->link);
				g->done(g, c->write_error);
				continue;
			}
			if (a == ATTEMPT_NO_MEMORY) {
				clean_ahead(c);
				if (stuck(c) && get_unstick(c, g))
					continue;
				break;
			}
			list_remove(&g->link);
			if (a == ATTEMPT_WAIT_BLOCK) {
				if (busy->frozen && busy->state == BLOCK_DIRTY)
					block_write(busy, true);
				block_wait(busy, &g->w);
			} else if (a == ATTEMPT_FAIL) {
				g->done(g, err);
			} else {
				g->pinned = true;
				get_fill(g);
				get_continue(g);
			}
		}
		if (list_empty(&c->starving))
			readahead_pump(c);
		clean_ahead(c);
		block_write_pump(c);
	} while (c->pump_again);
	c->pumping = false;
}
