/* SPDX-License-Identifier: Apache-2.0 */
/*
 * block.c - blocks as such: their states, their coming and going, and changes of many of a file at
 * once.
 *
 * Loop thread only. Who gets a block, and which is evicted, is cache.c's.
 */
#include <errno.h>
#include <stdlib.h>

#include "engine/bug.h"
#include "engine/cache.h"

const char *block_state_name(enum block_state s)
{
	static const char *const names[] = {"empty", "reading", "clean", "dirty", "writing"};

	return names[s];
}

void block_set_state(struct block *b, enum block_state to)
{
	static const uint8_t allowed[] = {
		[BLOCK_EMPTY] = 1 << BLOCK_READING,
		[BLOCK_READING] = 1 << BLOCK_CLEAN | 1 << BLOCK_DIRTY | 1 << BLOCK_EMPTY,
		[BLOCK_CLEAN] = 1 << BLOCK_DIRTY | 1 << BLOCK_EMPTY,
		[BLOCK_DIRTY] = 1 << BLOCK_WRITING | 1 << BLOCK_EMPTY | 1 << BLOCK_CLEAN,
		[BLOCK_WRITING] = 1 << BLOCK_CLEAN | 1 << BLOCK_DIRTY,
	};
	bool was = b->state == BLOCK_DIRTY || b->state == BLOCK_WRITING;
	bool is = to == BLOCK_DIRTY || to == BLOCK_WRITING;

	assert(allowed[b->state] & (1 << to));
	b->state = to;
	if (was != is) {
		b->f->dirty += is ? 1u : -1u;
		b->c->dirty_bytes += is ? b->piece : -(uint64_t)b->piece;
		slot_account(b->c, b->f, b->n);
	}
	if (to == BLOCK_DIRTY && !was)
		slot_changed(b->c, b->f, b->n);
	block_mark(b);
}

unsigned int block_marks(const struct block *b)
{
	bool queued = list_linked(&b->write_link);
	unsigned int marks = 0;

	if (b->pins || b->f->pinned)
		return 0;
	switch (b->state) {
	case BLOCK_CLEAN:
		if (!b->frozen)
			marks |= POLICY_EVICT | (b->ahead ? 0 : POLICY_SPENT);
		return marks | (b->ahead ? 0 : POLICY_COUNTS);
	case BLOCK_DIRTY:
		/* After an error it waits for the next round of retries. */
		if (!queued && !b->writer && !b->error)
			marks |= POLICY_WRITE;
		return marks | (queued || !b->error ? POLICY_COUNTS : 0);
	case BLOCK_WRITING:
		return POLICY_COUNTS;
	case BLOCK_READING:
	case BLOCK_EMPTY:
		break;
	}
	return 0;
}

void block_mark(struct block *b)
{
	policy_mark(b->c->policy, &b->pol, block_marks(b));
}

void block_unqueue(struct block *b)
{
	list_remove(&b->write_link);
	block_mark(b);
}

void block_wait(struct block *b, struct waiter *w)
{
	list_push_back(&b->waiters, &w->link);
}

void block_wake(struct block *b)
{
	struct list todo;

	list_init(&todo);
	list_splice_back(&todo, &b->waiters);
	while (!list_empty(&todo)) {
		struct waiter *w = list_first(&todo, struct waiter, link);

		list_remove(&w->link);
		w->wake(w);
	}
}

bool block_busy(const struct block *b)
{
	return b->pins || b->frozen || b->state == BLOCK_READING || b->state == BLOCK_WRITING ||
	       list_linked(&b->write_link);
}

uint32_t block_write_len(const struct block *b)
{
	uint64_t content = max_u64(file_content(b->c, b->f, b->n), 1);

	return (uint32_t)min_u64(round_up_u64(content, MOMENT_UNIT), b->piece);
}

void *block_mem(const struct block *b, uint64_t in, uint64_t len)
{
	if (in > b->piece || len > b->piece - in)
		return NULL;
	return (char *)arena_ptr_at(b->c->base, b->mem) + in;
}

int block_outside(const struct block *b, uint64_t in, uint64_t len)
{
	struct cache *c = b->c;

	c->report(c->arg, -EIO, b->f->ino, (uint64_t)b->n * c->block + in, len,
		  "bug: bytes outside the block's memory");
	return -EIO;
}

struct block *block_new(struct cache *c, struct file *f, struct slot *s, uint32_t n)
{
	struct block *b = calloc(1, sizeof(*b));

	if (!b)
		return NULL;
	c->heap += heap_cost(sizeof(*b));
	b->c = c;
	b->f = f;
	b->n = n;
	list_init(&b->waiters);
	list_init(&b->write_link);
	list_init(&b->error_link);
	list_init(&b->work.link);
	list_init(&b->io.link);
	b->pol.key = f->ino << 24 ^ n;
	s->b = b;
	f->cached++;
	return b;
}

void block_free(struct cache *c, struct block *b)
{
	if (b)
		c->heap -= heap_cost(sizeof(*b));
	free(b);
}

/* The block leaves the cache; nobody uses it. */
void block_remove(struct block *b, bool evicted)
{
	struct cache *c = b->c;
	struct file *f = b->f;
	struct slot *s = file_slot(f, b->n);

	if (b->state != BLOCK_EMPTY)
		block_set_state(b, BLOCK_EMPTY);
	if (b->ahead)
		c->ahead_bytes -= b->piece;
	if (b->error)
		c->error_blocks--;
	list_remove(&b->error_link);
	policy_remove(c->policy, &b->pol, evicted);
	arena_free(c->arena, b->mem, b->piece);
	assert(list_empty(&b->waiters));
	s->b = NULL;
	f->cached--;
	slot_trim(c, s);
	slot_account(c, f, b->n);
	block_free(c, b);
}

void block_drop(struct block *b)
{
	struct cache *c = b->c;

	assert(!block_busy(b));
	list_splice_back(&c->woken, &b->waiters);
	block_remove(b, false);
	cache_pump(c);
}

/* ---- many blocks of a file ---- */

void file_pin(struct file *f, bool pinned)
{
	uint32_t left = f->cached, n = 0;
	struct slot *s;

	if (f->pinned == pinned)
		return;
	f->pinned = pinned;
	for (; left && (s = file_slot_next(f, &n)); n++) {
		if (!s->b)
			continue;
		block_mark(s->b);
		left--;
	}
}

/* What is only queued to be written is not to be any more, what a commit waits for is written now. */
static struct block *first_busy(struct file *f, uint32_t n, uint32_t stop)
{
	struct slot *s;

	for (; (s = file_slot_next(f, &n)) && n < stop; n++) {
		struct block *b = s->b;

		if (!b)
			continue;
		if (!b->frozen)
			block_unqueue(b); /* only queued: not to be written any more */
		else if (b->state == BLOCK_DIRTY)
			block_write(b, true);
		if (block_busy(b))
			return b;
	}
	return NULL;
}

bool file_settle(struct cache *c, struct file *f, uint32_t n, uint32_t stop, struct waiter *w)
{
	struct block *b;

	assert(c->quiet);
	b = first_busy(f, n, stop);
	if (b)
		block_wait(b, w);
	return !b;
}

void file_holes(struct cache *c, struct file *f, uint32_t n, uint32_t stop, bool keep)
{
	struct slot *s;

	assert(c->quiet);
	for (; (s = file_slot_next(f, &n)) && n < stop; n++) {
		if (s->b)
			block_drop(s->b);
		slot_drop_live(c, f, s, n);
		if (!keep)
			s->keep = false;
		f->untidy |= !keep;
		slot_trim(c, s);
		slot_account(c, f, n);
	}
}

void file_unkeep(struct cache *c, struct file *f, uint32_t n)
{
	struct slot *s;

	for (; (s = file_slot_next(f, &n)); n++) {
		s->keep = false;
		slot_trim(c, s);
		slot_account(c, f, n);
	}
}
