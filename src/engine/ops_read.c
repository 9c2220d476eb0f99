/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ops_read.c - READ: all its blocks at once, without a copy; or one after the other.
 *
 * Loop thread, except the functions named *_run. A READ pins its blocks while its done() copies
 * from them on a work thread. Where that would be too much of the RAM tier at once (a small tier,
 * or most of it out on leases) it copies block after block into memory of its own, so that one
 * block of free memory is enough for any READ.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/ops_impl.h"

/* What holes read as. */
static const char zeros[ENGINE_OP_MAX];

static void read_run(struct loop_work *w)
{
	struct op_run *r = container_of(w, struct op_run, work);

	r->op->done(r->op);
}

static void read_release(struct loop_work *w)
{
	struct op_run *r = container_of(w, struct op_run, work);
	struct cache *c = &r->e->c;

	for (unsigned int i = 0; i < r->n; i++)
		cache_put(c, &r->want[i], false);
	run_free(r);
}

/* Hands the data over; op may be gone when this returns, r goes when done() has. */
static void read_give(struct op_run *r)
{
	r->op->run = NULL;
	list_remove(&r->link); /* from here on it cannot be cancelled */
	r->work.run = read_run;
	r->work.done = read_release;
	loop_work_urgent(r->e->loop, &r->work);
}

/* ---- block by block ---- */

static void piece_next(struct op_run *r);

static void piece_run(struct loop_work *w)
{
	struct op_run *r = container_of(w, struct op_run, work);
	struct block *b = r->want[0].b;
	uint64_t start = (uint64_t)b->n * b->c->block;
	uint64_t stop = min_u64(r->end, start + b->piece);

	/* What lies behind the piece is zeros, and there already. */
	if (r->pos < stop)
		memcpy(r->own + (r->pos - r->op->off),
		       block_mem(b, r->pos - start, stop - r->pos), stop - r->pos);
}

static void piece_done(struct loop_work *w)
{
	struct op_run *r = container_of(w, struct op_run, work);
	struct cache *c = &r->e->c;

	r->pos = min_u64(r->end, ((uint64_t)r->want[0].n + 1) * c->block);
	cache_put(c, &r->want[0], false);
	piece_next(r);
}

static void piece_ready(struct get *g, int res)
{
	struct op_run *r = container_of(g, struct op_run, g);

	if (res) {
		r->op->res = res;
		r->op->iovcnt = 0;
		r->n = 0;
		read_give(r);
		return;
	}
	r->work.run = piece_run;
	r->work.done = piece_done;
	if (r->want[0].b)
		loop_work_urgent(r->e->loop, &r->work);
	else
		piece_done(&r->work);
}

static void piece_next(struct op_run *r)
{
	struct cache *c = &r->e->c;
	struct engine_op *op = r->op;

	/* Holes are there already. */
	while (r->pos < r->end) {
		uint32_t n = (uint32_t)(r->pos / c->block);
		struct slot *s = file_slot(r->f, n);

		if (s && (s->b || !extent_is_hole(&s->live)))
			break;
		r->pos = min_u64(r->end, ((uint64_t)n + 1) * c->block);
	}
	if (r->pos == r->end) {
		op->iov[0] = (struct iovec){r->own, r->end - op->off};
		op->iovcnt = 1;
		op->res = (int64_t)(r->end - op->off);
		c->stats.op_read_bytes += r->end - op->off;
		r->n = 0;
		read_give(r);
		return;
	}
	r->want[0] = (struct want){.f = r->f, .n = (uint32_t)(r->pos / c->block), .mode = GET_READ};
	r->g = (struct get){.want = r->want, .n = 1, .done = piece_ready};
	cache_get(c, &r->g);
}

static void piece_begin(struct op_run *r)
{
	r->own = calloc(1, r->end - r->op->off);
	if (!r->own) {
		op_end(r->op, -ENOMEM);
		return;
	}
	r->pos = r->op->off;
	piece_next(r);
}

/* ---- all at once ---- */

static void read_ready(struct get *g, int res)
{
	struct op_run *r = container_of(g, struct op_run, g);
	struct engine_op *op = r->op;
	struct cache *c = &r->e->c;
	uint64_t pos = op->off, end = r->end;

	if (res == -ENOBUFS) {
		piece_begin(r);
		return;
	}
	op->iovcnt = 0;
	if (res) {
		op->res = res;
		r->n = 0;
	} else {
		for (unsigned int i = 0; i < r->n; i++) {
			struct want *w = &r->want[i];
			uint64_t start = (uint64_t)w->n * c->block;
			uint64_t stop = min_u64(end, start + c->block);
			uint32_t in = (uint32_t)(pos - start);
			uint32_t len = (uint32_t)(stop - pos);
			uint32_t have = len;

			/* A block's memory may end before the file does: the rest is zeros. */
			if (w->b)
				have = in >= w->b->piece ? 0
							 : (uint32_t)min_u64(len, w->b->piece - in);
			if (w->b && have)
				op->iov[op->iovcnt++] =
					(struct iovec){block_mem(w->b, in, have), have};
			if (!w->b)
				have = 0;
			if (have < len)
				op->iov[op->iovcnt++] =
					(struct iovec){(void *)(uintptr_t)zeros, len - have};
			pos = stop;
		}
		op->res = (int64_t)(end - op->off);
		c->stats.op_read_bytes += end - op->off;
	}
	read_give(r);
}

/*
 * A file that is read from front to back: the kernel asks for little ahead, and a block has to be
 * read whole for its hash. So that the drive is kept busy, the next blocks are read before they are
 * asked for. Requests may come a little out of order.
 */
static void read_ahead(struct cache *c, struct file *f, uint64_t off, uint64_t end)
{
	uint32_t next = (uint32_t)((end + c->block - 1) / c->block);
	uint32_t stop = (uint32_t)min_u64(file_nblocks(c, f), next + c->window / 2 / c->block);
	bool follows = off <= f->read_end + c->block && end + c->block >= f->read_end;

	f->read_end = end;
	if (!follows || next > f->read_ahead || f->read_ahead > stop)
		f->read_ahead = next;
	if (follows && off && stop > f->read_ahead) {
		cache_prefetch(c, f->ino, f->read_ahead, stop - f->read_ahead);
		f->read_ahead = stop;
	}
}

void op_read(struct engine *e, struct engine_op *op)
{
	struct cache *c = &e->c;
	struct file *f = file_get(c, op->ino);
	uint64_t end;
	uint32_t first, last;
	struct op_run *r;

	if (!f || op->len > ENGINE_OP_MAX) {
		op_end(op, f ? -EINVAL : -ESTALE);
		return;
	}
	end = op->off >= f->size ? op->off : op->off + min_u64(op->len, f->size - op->off);
	first = (uint32_t)(op->off / c->block);
	last = end == op->off ? first : (uint32_t)((end - 1) / c->block);
	r = run_new(e, op, end == op->off ? 0 : last - first + 1);
	if (!r) {
		op_end(op, -ENOMEM);
		return;
	}
	r->f = f;
	r->end = end;
	if (r->n > arena_size(c->arena) / c->block / 4) {
		piece_begin(r);
		return;
	}
	for (uint32_t i = 0; i < r->n; i++)
		r->want[i] = (struct want){.f = f, .n = first + i, .mode = GET_READ};
	r->g = (struct get){.want = r->want, .n = r->n, .done = read_ready};
	if (r->n)
		read_ahead(c, f, op->off, end);
	cache_get(c, &r->g);
	cache_pump(c);
}
