/* SPDX-License-Identifier: Apache-2.0 */
/*
 * file.c - the data side of inodes: sizes, slots, and which extent may be reused when.
 *
 * Loop thread only. The rules that keep a committed byte safe are here and nowhere else:
 * - slot_reserve() picks the place of the next write; never a live extent with seq != 0;
 * - an extent that a commit knows is only ever put on a freed list; commit.c releases the list when
 *   a commit that does not refer to it is durable;
 * - the list is the file's own, because a file of an open step is left out of commits: what it
 *   replaced is still its committed state.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/blockmap.h"
#include "engine/cache.h"
#include "engine/commit.h"

struct file *file_find(struct cache *c, uint64_t ino)
{
	return u64map_get(&c->files, ino);
}

struct file *file_next(struct cache *c, size_t *pos)
{
	return u64map_next(&c->files, pos);
}

static void file_destroy(struct cache *c, struct file *f)
{
	slots_fini(c, f);
	freed_fini(c, &f->frees);
	list_remove(&f->changed_link);
	list_remove(&f->held_link);
	c->heap -= heap_cost(sizeof(*f));
	free(f);
}

struct file *file_get(struct cache *c, uint64_t ino)
{
	struct file *f = file_find(c, ino);
	struct ns_attr a;

	if (f)
		return f;
	if (ns_getattr(c->ns, ino, &a) || !S_ISREG(a.mode))
		return NULL;
	f = calloc(1, sizeof(*f));
	if (!f)
		return NULL;
	c->heap += heap_cost(sizeof(*f));
	f->ino = ino;
	f->generated = a.flags & NS_GENERATED;
	f->size = f->generated ? 0 : a.size;
	list_init(&f->changed_link);
	list_init(&f->held_link);
	if (u64map_put(&c->files, ino, f)) {
		file_destroy(c, f);
		return NULL;
	}
	return f;
}


/* Forgets a file without blocks and live extents. */
void file_free(struct cache *c, struct file *f)
{
	u64map_del(&c->files, f->ino);
	file_destroy(c, f);
}

void files_fini(struct cache *c)
{
	struct file *f;
	struct slot *s;
	size_t pos = 0;

	while ((f = u64map_next(&c->files, &pos))) {
		for (uint32_t n = 0; (s = file_slot_next(f, &n)); n++)
			block_free(c, s->b);
		file_destroy(c, f);
	}
	u64map_fini(&c->files);
}

int file_load_map(struct cache *c, struct file *f, const struct map_copy *map, uint64_t seq)
{
	for (uint32_t i = 0; i < map->n; i++) {
		uint32_t n = map->v[i].block;
		struct slot *s = file_slot_make(c, f, n);

		if (!s)
			return -ENOMEM;
		s->live = map->v[i].e;
		/* A block may have been written with bytes past the committed size. */
		s->live.valid = (uint32_t)min_u64(s->live.valid, file_content(c, f, n));
		s->seq = seq;
		s->unsure = false;
		slot_account(c, f, n);
	}
	return 0;
}

uint64_t file_size_max(const struct cache *c)
{
	return min_u64(NS_FILE_SIZE_MAX, (uint64_t)(UINT32_MAX - BLOCKMAP_SEGMENT) * c->block);
}

uint32_t file_nblocks(const struct cache *c, const struct file *f)
{
	return (uint32_t)((f->size + c->block - 1) / c->block);
}

uint32_t file_content(const struct cache *c, const struct file *f, uint32_t n)
{
	uint64_t start = (uint64_t)n * c->block;

	return start >= f->size ? 0 : (uint32_t)min_u64(c->block, f->size - start);
}

void file_changed(struct cache *c, struct file *f)
{
	if (f->changed)
		return;
	f->changed = true;
	list_push_back(&c->changed, &f->changed_link);
}

void file_hold(struct cache *c, struct file *f, bool held)
{
	list_remove(&f->held_link);
	if (held)
		list_push_back(&c->held, &f->held_link);
	f->held = held;
	ns_hold(c->ns, f->ino, held);
}

void slot_account(struct cache *c, struct file *f, uint32_t n)
{
	struct slot *s = file_slot(f, n);
	uint32_t bytes;

	if (!s)
		return;
	bytes = extent_is_hole(&s->live) ? 0 : s->live.len;
	if (s->b && (s->b->state == BLOCK_DIRTY || s->b->state == BLOCK_WRITING)) {
		uint32_t dirty = block_write_len(s->b);

		if (dirty > bytes)
			bytes = dirty;
	}
	/* A place that is kept for the block is taken from the drive, written or not. */
	if (s->keep && s->nspare && s->spare_len > bytes)
		bytes = s->spare_len;
	f->bytes += bytes;
	f->bytes -= s->acct;
	s->acct = bytes;
	(void)c;
}

void file_publish(struct cache *c, struct file *f, bool touch)
{
	ns_publish(c->ns, f->ino, f->size, f->bytes, touch);
}

/* In a quiet section. */
static int make_meta(struct cache *c, uint64_t dir, struct waiter *w)
{
	struct ns_attr a = {0};
	struct file *f;
	int r;

	do {
		f = NULL;
		if (!ns_peek(c->ns, dir, NS_META_NAME, &a) && S_ISREG(a.mode) &&
		    !(a.flags & NS_GENERATED)) {
			if (ns_open_writers(c->ns, a.ino))
				return -EBUSY;
			f = file_get(c, a.ino);
			if (!f) {
				if (ns_getattr(c->ns, a.ino, &a) == 0)
					return -ENOMEM;
				r = -EAGAIN; /* it has just been removed */
				continue;
			}
			if (!file_settle(c, f, 0, UINT32_MAX, w))
				return 1;
		}
		r = ns_make_meta(c->ns, dir, f ? f->ino : 0);
	} while (r == -EAGAIN); /* another file has just got the name */
	if (r || !f)
		return r;
	file_holes(c, f, 0, UINT32_MAX, false);
	f->size = 0;
	f->generated = true;
	file_changed(c, f);
	return 0;
}

int file_make_meta(struct cache *c, uint64_t dir, struct waiter *w)
{
	int r;

	cache_quiet(c);
	r = make_meta(c, dir, w);
	cache_loud(c);
	return r;
}

/* ---- freed lists ---- */

void freed_push(struct cache *c, struct freed_list *l, struct freed fr)
{
	if (l->n == l->cap) {
		size_t cap = l->cap ? l->cap * 2 : 1; /* most files replace one block */
		struct freed *v = realloc(l->v, cap * sizeof(*v));

		if (!v)
			return; /* not reused before the next mount finds it free: safe */
		if (l->cap)
			c->heap -= heap_cost(l->cap * sizeof(*v));
		c->heap += heap_cost(cap * sizeof(*v));
		l->v = v;
		l->cap = cap;
	}
	l->v[l->n++] = fr;
}

void freed_fini(struct cache *c, struct freed_list *l)
{
	if (l->cap)
		c->heap -= heap_cost(l->cap * sizeof(*l->v));
	free(l->v);
	*l = (struct freed_list){0};
}

void freed_move(struct cache *c, struct freed_list *to, struct freed_list *from)
{
	for (size_t i = 0; i < from->n; i++)
		freed_push(c, to, from->v[i]);
	freed_fini(c, from);
}

/* A place nobody refers to: to the kept slot that wants a second one, else to the pool. */
static void place_release(struct cache *c, struct slot *s, struct poff off, uint32_t len)
{
	if (s && s->keep) {
		unsigned int have = s->nspare + (extent_is_hole(&s->live) ? 0 : 1);

		if (have < 2 && s->nspare < 2 && (s->nspare == 0 || s->spare_len <= len)) {
			if (s->nspare == 0)
				s->spare_len = len;
			s->spare[s->nspare++] = off;
			if (len > s->spare_len)
				pool_free(c->pool, (struct poff){off.o + s->spare_len},
					  len - s->spare_len);
			return;
		}
	}
	pool_free(c->pool, off, len);
}

void freed_release(struct cache *c, const struct freed *fr)
{
	struct file *f = file_find(c, fr->ino);

	place_release(c, f ? file_slot(f, fr->n) : NULL, fr->off, fr->len);
	if (f)
		slot_account(c, f, fr->n);
}

/* ---- places of a slot ---- */

static void slot_free_spares(struct cache *c, struct slot *s)
{
	while (s->nspare)
		pool_free(c->pool, s->spare[--s->nspare], s->spare_len);
	s->spare_len = 0;
}

void slot_give_up(struct cache *c, struct slot *s)
{
	s->keep = false;
	if (!s->b || s->b->state != BLOCK_WRITING)
		slot_free_spares(c, s);
}

static bool slot_in_place(const struct slot *s, uint32_t len)
{
	return !extent_is_hole(&s->live) && s->seq == 0 && slot_place_len(s) >= len;
}

static void slot_free_tail(struct cache *c, struct slot *s)
{
	if (s->tail)
		pool_free(c->pool, (struct poff){s->live.off + s->live.len}, s->tail);
	s->tail = 0;
}

void slot_take_tail(struct cache *c, struct slot *s, uint32_t tail)
{
	s->tail = tail;
	if (!s->keep)
		slot_free_tail(c, s);
}

int slot_reserve(struct cache *c, struct file *f, struct slot *s, uint32_t len)
{
	struct poff off;
	int r;

	(void)f;
	if (slot_in_place(s, len) || (s->nspare && s->spare_len >= len))
		return 0;
	/* A write under way uses the first spare: it cannot be exchanged for a longer one now. */
	if (s->b && s->b->state == BLOCK_WRITING)
		return -EBUSY;
	/* The old ones go when the new one is there: a dirty block always has a place. */
	r = pool_alloc(c->pool, len, &off);
	if (r)
		return r;
	slot_free_spares(c, s);
	s->spare[0] = off;
	s->nspare = 1;
	s->spare_len = len;
	return 0;
}

unsigned int slot_places(const struct slot *s, uint32_t len)
{
	return (s->spare_len >= len ? s->nspare : 0) +
	       (!extent_is_hole(&s->live) && slot_place_len(s) >= len);
}

int slot_keep(struct cache *c, struct file *f, struct slot *s, uint32_t len)
{
	(void)f;
	if (s->b && s->b->state == BLOCK_WRITING)
		return -EBUSY;
	while (slot_places(s, len) < 2) {
		struct poff off;
		uint32_t want = s->nspare && s->spare_len >= len ? s->spare_len : len;
		int r = pool_alloc(c->pool, want, &off);

		if (r)
			return r;
		if (s->spare_len < len)
			slot_free_spares(c, s);
		s->spare_len = want;
		s->spare[s->nspare++] = off;
	}
	s->keep = true;
	return 0;
}

void slot_trim(struct cache *c, struct slot *s)
{
	unsigned int need = 0;

	if (s->keep)
		return;
	/* Whoever writes the block has reserved for what it will become; its end calls again. */
	if (s->b && (s->b->writer || s->b->state == BLOCK_WRITING))
		return;
	if (s->b && s->b->state == BLOCK_DIRTY && !slot_in_place(s, block_write_len(s->b)))
		need = 1;
	while (s->nspare > need)
		pool_free(c->pool, s->spare[--s->nspare], s->spare_len);
	if (!s->nspare)
		s->spare_len = 0;
	/* Unless a dirty block is to be written over it. */
	if (need || !s->b || s->b->state != BLOCK_DIRTY)
		slot_free_tail(c, s);
}

void slot_written(struct cache *c, struct file *f, struct slot *s, uint32_t n,
		  const struct extent *e, bool from_spare, struct freed_list *frees)
{
	struct extent old = s->live;
	uint64_t old_seq = s->seq;
	uint32_t old_tail = s->tail, place = from_spare ? s->spare_len : slot_place_len(s);

	if (from_spare) {
		s->spare[0] = s->spare[1];
		s->nspare--;
	}
	s->live = *e;
	s->seq = 0;
	if (frees == &f->frees) /* else the commit that has it frozen takes it */
		slot_changed(c, f, n);
	s->tail = place - e->len;
	if (!s->keep)
		slot_free_tail(c, s);
	if (!from_spare || extent_is_hole(&old))
		return;
	if (old_seq == 0)
		place_release(c, s, (struct poff){old.off}, old.len + old_tail);
	else
		freed_push(c, frees, (struct freed){{old.off}, old.len + old_tail, old_tail, n, f->ino});
}

void slot_drop_live(struct cache *c, struct file *f, struct slot *s, uint32_t n)
{
	struct extent e = s->live;
	uint32_t tail = s->tail;
	uint64_t seq = s->seq;

	if (extent_is_hole(&e))
		return;
	memset(&s->live, 0, sizeof(s->live));
	s->tail = 0;
	s->seq = 0;
	s->unsure = false;
	if (seq == 0)
		place_release(c, s, (struct poff){e.off}, e.len + tail);
	else
		freed_push(c, &f->frees, (struct freed){{e.off}, e.len + tail, tail, n, f->ino});
	slot_changed(c, f, n);
}
