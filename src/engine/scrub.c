/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub.c - reads every extent and checks its hash, one at a time, behind everything else.
 *
 * Loop thread, except check_run (a work thread). It has a buffer of its own, outside the RAM tier,
 * of one block; it is there only while a scrub runs. An extent that changed while it was read is
 * read again.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/engine_impl.h"
#include "engine/hash.h"

struct scrub_run {
	struct engine *e;
	uint64_t *inos;
	size_t n, i;
	uint32_t block;
	void *buf;
	struct extent x;
	struct io_op io;
	struct loop_work work;
	bool bad, stop;
};

static void scrub_next(struct scrub_run *r);

static void scrub_end(struct scrub_run *r)
{
	struct engine *e = r->e;
	struct engine_op *op = e->scrub.op;
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	e->scrub.finished_ns = (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
	e->scrub.running = false;
	e->scrub.run = NULL;
	e->scrub.op = NULL;
	free(r->inos);
	free(r->buf);
	op->res = r->stop ? -ECANCELED : (int64_t)e->scrub.damaged;
	free(r);
	op->done(op);
}

static void checked(struct loop_work *w)
{
	struct scrub_run *r = container_of(w, struct scrub_run, work);
	struct engine *e = r->e;
	struct cache *c = &e->c;
	struct file *f = r->i < r->n ? file_find(c, r->inos[r->i]) : NULL;
	struct slot *s = f ? file_slot(f, r->block) : NULL;

	if (s && s->live.off == r->x.off && s->live.hash == r->x.hash &&
	    !(s->b && s->b->state == BLOCK_WRITING)) {
		if (r->bad) {
			e->scrub.damaged++;
			c->report(c->arg, r->io.res ? r->io.res : -EIO, f->ino,
				  (uint64_t)r->block * c->block, r->x.valid,
				  r->io.res ? "scrub: read error" : "scrub: checksum mismatch");
		}
		e->scrub.extents++;
		e->scrub.done += r->x.len;
		r->block++;
	} else if (!s || extent_is_hole(&s->live) || (s->b && s->b->state == BLOCK_WRITING)) {
		r->block++; /* being replaced: the new one was just hashed */
	}
	scrub_next(r);
}

static void check_run(struct loop_work *w)
{
	struct scrub_run *r = container_of(w, struct scrub_run, work);

	r->bad = hash_block(r->buf, r->x.len) != r->x.hash;
}

static void read_done(struct io_op *io)
{
	struct scrub_run *r = container_of(io, struct scrub_run, io);

	if (io->res) {
		r->bad = true;
		checked(&r->work);
		return;
	}
	r->work.run = check_run;
	r->work.done = checked;
	loop_work(r->e->loop, &r->work);
}

static void scrub_next(struct scrub_run *r)
{
	struct cache *c = &r->e->c;

	for (; !r->stop && r->i < r->n; r->i++, r->block = 0) {
		struct file *f = file_find(c, r->inos[r->i]);
		struct slot *s;

		for (; f && (s = file_slot_next(f, &r->block)); r->block++) {
			if (extent_is_hole(&s->live) || (s->b && s->b->state == BLOCK_WRITING))
				continue;
			r->x = s->live;
			r->bad = false;
			r->io = (struct io_op){.kind = IO_READ,
					       .buf = r->buf,
					       .off = s->live.off,
					       .len = s->live.len,
					       .done = read_done};
			list_init(&r->io.link);
			io_submit(c->io, &r->io);
			return;
		}
	}
	scrub_end(r);
}

void scrub_start(struct engine *e, struct engine_op *op)
{
	struct cache *c = &e->c;
	struct scrub_run *r;
	size_t n = c->files.n, pos = 0;
	struct file *f;

	if (e->scrub.running || e->scrub.stopped) {
		op->res = e->scrub.stopped ? -ECANCELED : -EBUSY;
		op->done(op);
		return;
	}
	r = calloc(1, sizeof(*r));
	if (r) {
		r->inos = calloc(n ? n : 1, sizeof(*r->inos));
		r->buf = aligned_alloc(MOMENT_UNIT, c->block);
	}
	if (!r || !r->inos || !r->buf) {
		if (r) {
			free(r->inos);
			free(r->buf);
		}
		free(r);
		op->res = -ENOMEM;
		op->done(op);
		return;
	}
	r->e = e;
	memset(r->buf, 0, c->block); /* touched now, not while reading */
	list_init(&r->work.link);
	e->scrub = (struct scrub){.running = true, .op = op, .run = r};
	while ((f = file_next(c, &pos))) {
		r->inos[r->n++] = f->ino;
		e->scrub.total += f->bytes;
	}
	scrub_next(r);
}

void scrub_stop(struct engine *e)
{
	e->scrub.stopped = true;
	if (e->scrub.run)
		e->scrub.run->stop = true;
}

static void hurry(void *arg)
{
	scrub_stop(arg);
}

void engine_hurry(struct engine *e)
{
	loop_call(e->loop, hurry, e);
}
