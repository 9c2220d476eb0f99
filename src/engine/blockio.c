/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blockio.c - how a block's bytes get from the pool into memory and back.
 *
 * Loop thread, except the functions named *_run, which run on a work thread and touch nothing but
 * the block's memory (the block is READING or WRITING: nobody changes it, nobody drops it).
 *
 * Memory and length of each come from one place, block_io(), which sees to it that they agree.
 *
 *	read:	drive --> verify hash, zero the tail --> CLEAN
 *	hole:	zero --> CLEAN
 *	write:	hash --> drive --> the slot points to the new place --> CLEAN
 */
#include <errno.h>
#include <string.h>

#include "engine/bug.h"
#include "engine/cache.h"
#include "engine/commit.h"
#include "engine/hash.h"

#define RETRY_NS   1000000000ull /* after a write error */
#define WRITES_MAX 128u		 /* at once */

/* ---- the one way to the drive ---- */

static void nothing(struct loop_work *w)
{
	(void)w;
}

static void refused(struct loop_work *w)
{
	struct block *b = container_of(w, struct block, work);

	b->io.done(&b->io);
}

/* Reads or writes `next`, from or to the block's memory. done() is never called inside. */
static void block_io(struct block *b, enum io_kind kind, bool urgent, void (*done)(struct io_op *))
{
	struct cache *c = b->c;

	b->io = (struct io_op){
		.kind = kind,
		.buf = block_mem(b, 0, b->next.len),
		.off = b->next.off,
		.len = b->next.len,
		.done = done,
	};
	list_init(&b->io.link);
	if (!b->io.buf || b->next.valid > b->next.len) {
		b->io.res = block_outside(b, 0, b->next.len);
		b->work.run = nothing;
		b->work.done = refused;
		loop_work_urgent(c->loop, &b->work);
	} else if (urgent) {
		io_submit_urgent(c->io, &b->io);
	} else {
		io_submit(c->io, &b->io);
	}
}

/* ---- reading ---- */

static void fill_finish(struct block *b, int res)
{
	struct cache *c = b->c;

	c->reading--;
	block_set_state(b, res ? BLOCK_EMPTY : BLOCK_CLEAN);
	if (res) {
		c->stats.read_errors++;
		c->report(c->arg, res, b->f->ino, (uint64_t)b->n * c->block,
			  file_content(c, b->f, b->n),
			  b->next.hash ? "checksum mismatch" : "read error");
		if (!b->pins) {
			block_drop(b);
			return;
		}
	}
	block_wake(b);
	cache_pump(c);
}

static void verify_run(struct loop_work *w)
{
	struct block *b = container_of(w, struct block, work);

	/* block_io() has seen that both are within the piece. */
	if (hash_block(block_mem(b, 0, b->next.len), b->next.len) != b->next.hash) {
		b->io.res = -EIO;
		return;
	}
	memset(block_mem(b, b->next.valid, b->piece - b->next.valid), 0, b->piece - b->next.valid);
}

static void verify_done(struct loop_work *w)
{
	struct block *b = container_of(w, struct block, work);

	if (b->io.res) {
		b->c->stats.checksum_errors++;
		b->next.hash = 1; /* for the message */
	}
	fill_finish(b, b->io.res);
}

static void read_done(struct io_op *io)
{
	struct block *b = container_of(io, struct block, io);

	if (io->res) {
		b->next.hash = 0;
		fill_finish(b, io->res);
		return;
	}
	b->work.run = verify_run;
	b->work.done = verify_done;
	loop_work_urgent(b->c->loop, &b->work);
}

static void zero_run(struct loop_work *w)
{
	struct block *b = container_of(w, struct block, work);

	memset(block_mem(b, 0, b->piece), 0, b->piece);
}

static void zero_done(struct loop_work *w)
{
	fill_finish(container_of(w, struct block, work), 0);
}

void block_fill(struct block *b, bool urgent)
{
	struct cache *c = b->c;
	struct slot *s = file_slot(b->f, b->n);

	assert(b->state == BLOCK_READING);
	c->reading++;
	if (extent_is_hole(&s->live)) {
		TRACE(c, "zero", b->f->ino, b->n, b->piece);
		b->work.run = zero_run;
		b->work.done = zero_done;
		loop_work_urgent(c->loop, &b->work);
		return;
	}
	b->next = s->live;
	TRACE(c, urgent ? "read" : "ahead", b->f->ino, b->n, s->live.len);
	block_io(b, IO_READ, urgent, read_done);
}

/* ---- writing ---- */

static void retry_fire(struct loop_timer *t)
{
	struct cache *c = container_of(t, struct cache, retry);

	c->round_failed = false;
	list_for_each(l, &c->errors) block_write(list_entry(l, struct block, error_link), false);
	block_write_pump(c);
	/* One that somebody writes to just now has its turn in the next round. */
	if (!list_empty(&c->errors))
		loop_timer_set(c->loop, t, RETRY_NS);
}

static void write_failed(struct block *b, int res)
{
	struct cache *c = b->c;

	c->stats.write_errors++;
	if (!b->error) {
		c->error_blocks++;
		list_push_back(&c->errors, &b->error_link);
	}
	b->error = c->write_error = res;
	c->report(c->arg, res, b->f->ino, (uint64_t)b->n * c->block, b->next.len, "write error");
	c->failed_rounds += !c->round_failed;
	c->round_failed = true;
	if (list_linked(&c->retry.link))
		return;
	c->retry.fire = retry_fire;
	loop_timer_set(c->loop, &c->retry, RETRY_NS);
}

static void write_done(struct io_op *io)
{
	struct block *b = container_of(io, struct block, io);
	struct cache *c = b->c;
	struct file *f = b->f;
	struct slot *s = file_slot(f, b->n);
	bool frozen = b->frozen;

	if (!io->res && s->unsure) { /* a sync has failed meanwhile: once more */
		s->unsure = false;
		io_submit(c->io, io);
		return;
	}
	c->writing--;
	c->writing_bytes -= b->next.len;
	if (io->res) {
		write_failed(b, io->res);
		block_set_state(b, BLOCK_DIRTY);
	} else {
		c->stats.writebacks++;
		c->failed_rounds = 0;
		TRACE(c, "written", f->ino, b->n, b->next.len);
		if (b->error) {
			b->error = 0;
			c->error_blocks--;
			list_remove(&b->error_link);
		}
		slot_written(c, f, s, b->n, &b->next, b->next_spare,
			     frozen ? commit_frees(c) : &f->frees);
		block_set_state(b, BLOCK_CLEAN);
		slot_trim(c, s);
		slot_account(c, f, b->n);
	}
	if (frozen)
		commit_block_done(c, b, io->res);
	block_wake(b);
	cache_pump(c);
}

static void hash_run(struct loop_work *w)
{
	struct block *b = container_of(w, struct block, work);

	void *mem = block_mem(b, 0, b->next.len);

	if (mem) /* else block_io() will refuse */
		b->next.hash = hash_block(mem, b->next.len);
}

static void hash_done(struct loop_work *w)
{
	block_io(container_of(w, struct block, work), IO_WRITE, false, write_done);
}

static void write_start(struct block *b, bool urgent)
{
	struct cache *c = b->c;
	struct slot *s = file_slot(b->f, b->n);
	uint32_t len = block_write_len(b);
	bool in_place = !extent_is_hole(&s->live) && s->seq == 0;

	/* If it cannot be written, the block stays dirty, in memory: nothing more to remember. */
	s->unsure = false;
	/* A place is as long as the content was when the writer came. If the file has grown since,
	 * elsewhere, the rest is zeros and need not be written. In place, then, unless a spare
	 * holds more: one that a commit gave back may be too short even for what was written. */
	b->next_spare = !in_place || (s->nspare && s->spare_len > slot_place_len(s) &&
					slot_place_len(s) < len);
	assert(!b->next_spare || s->nspare);
	len = (uint32_t)min_u64(len, b->next_spare ? s->spare_len : slot_place_len(s));
	b->next = (struct extent){
		.off = b->next_spare ? s->spare[0].o : s->live.off,
		.len = len,
		.valid = (uint32_t)min_u64(file_content(c, b->f, b->n), len),
	};
	TRACE(c, "write", b->f->ino, b->n, len);
	block_set_state(b, BLOCK_WRITING);
	c->writing++;
	c->writing_bytes += len;
	b->work.run = hash_run;
	b->work.done = hash_done;
	if (urgent)
		loop_work_urgent(c->loop, &b->work);
	else
		loop_work(c->loop, &b->work);
}

void block_write(struct block *b, bool urgent)
{
	if (b->state != BLOCK_DIRTY || b->writer)
		return; /* the writer's cache_put() calls again if the block is frozen */
	if (urgent) {
		list_remove(&b->write_link);
		write_start(b, true);
	} else if (!list_linked(&b->write_link)) {
		list_push_back(&b->c->write_queue, &b->write_link);
		block_mark(b);
	}
}

void block_write_pump(struct cache *c)
{
	while (c->writing_bytes < c->write_most && c->writing < WRITES_MAX &&
	       !list_empty(&c->write_queue)) {
		struct block *b = list_first(&c->write_queue, struct block, write_link);

		block_unqueue(b);
		if (b->state == BLOCK_DIRTY && !b->writer)
			write_start(b, false);
	}
}
