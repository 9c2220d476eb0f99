/* SPDX-License-Identifier: Apache-2.0 */
/*
 * readahead.c - what will be used next, as hints told it, read before it is asked for.
 *
 * Loop thread only. A ring of ranges in the order of use. The pump takes from its head as long as
 * less than the window is read ahead and unused, and memory can be had without evicting what was
 * read ahead itself. What a lease has reached is not ahead any more: it and what lies before it is
 * forgotten, so that late hints do not read what was used already.
 */
#include <errno.h>
#include <stdlib.h>

#include "engine/cache.h"

#define RING	65536u
#define LOOK_UP 64u   /* entries from the head in which a lease is looked for */
#define STEPS	4096u /* blocks looked at in one go: a range may have millions, all holes */

int readahead_init(struct cache *c)
{
	c->ahead_cap = RING;
	c->ahead = calloc(c->ahead_cap, sizeof(*c->ahead));
	return c->ahead ? 0 : -ENOMEM;
}

void readahead_fini(struct cache *c)
{
	free(c->ahead);
	c->ahead = NULL;
}

void cache_prefetch(struct cache *c, uint64_t ino, uint32_t n, uint32_t count)
{
	if (c->ahead_n == c->ahead_cap || !count)
		return; /* a hint */
	TRACE(c, "hint", ino, n, (uint64_t)count * c->block);
	c->ahead[(c->ahead_head + c->ahead_n++) % c->ahead_cap] =
		(struct prefetch){.ino = ino, .n = n, .count = count};
}

void cache_prefetch_clear(struct cache *c)
{
	c->ahead_n = 0;
}

static void pop(struct cache *c, uint32_t n)
{
	c->ahead_head = (c->ahead_head + n) % c->ahead_cap;
	c->ahead_n -= n;
}

void cache_prefetch_reached(struct cache *c, uint64_t ino, uint32_t n)
{
	for (uint32_t i = 0; i < c->ahead_n && i < LOOK_UP; i++) {
		struct prefetch *p = &c->ahead[(c->ahead_head + i) % c->ahead_cap];

		if (p->ino != ino || n < p->n || n - p->n >= p->count)
			continue;
		pop(c, i);
		p->count -= n + 1 - p->n;
		p->n = n + 1;
		if (!p->count)
			pop(c, 1);
		return;
	}
}

void readahead_pump(struct cache *c)
{
	for (uint32_t i = 0; c->ahead_n && i < STEPS; i++) {
		struct prefetch *p = &c->ahead[c->ahead_head];
		struct file *f = file_find(c, p->ino);
		struct slot *s = f ? file_slot(f, p->n) : NULL;
		uint32_t n = 1, next = p->n;

		if (!f) {
			pop(c, 1);
			continue;
		}
		/* A hole costs nothing to read, and what is cached is there. */
		if (s && !s->b && !extent_is_hole(&s->live)) {
			if (c->ahead_bytes + cache_piece(c, s->live.len) > c->window ||
			    !cache_fill_ahead(c, f, p->n))
				return;
		}
		if (!s) /* nor does any of its neighbours */
			n = !file_slot_next(f, &next) ? p->count : (uint32_t)min_u64(p->count, next - p->n);
		p->n += n;
		p->count -= n;
		if (!p->count)
			pop(c, 1);
	}
}
