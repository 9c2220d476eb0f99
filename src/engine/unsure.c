/* SPDX-License-Identifier: Apache-2.0 */
/*
 * unsure.c - after an fdatasync that failed.
 *
 * It does not say which writes are lost, and nobody says so again: the kernel counts pages that it
 * could not write as clean, a drive may have dropped what its cache held. A later sync that
 * succeeds speaks only for what is written from then on. So all that was written since the last
 * good sync, for a commit or to make room, becomes unsure: slot.unsure, until a write of the block
 * begins that is not caught by another failed sync. A commit is recorded only when each extent in
 * its maps was written after the last sync that failed, or was synced before it:
 *
 *	CLEAN in memory		becomes DIRTY and is written as dirty blocks are
 *	being written		is written once more (write_done() in blockio.c)
 *	not in memory		the commit that takes its file reads it, compares its hash and
 *				writes the same bytes to the same place, after the freeze
 *
 * Since the bytes are written again in any case, it does not matter whether the read came from the
 * drive or from somebody's cache: the hash says that they are the right ones. A place that the
 * freeze has put in a commit is written by nobody else, and equal bytes harm no commit and no
 * reader; so no block and no memory of the cache is needed, and no lease can hold it up.
 *
 * What cannot be helped: bytes that are lost and no longer in memory. Their hash is wrong; the
 * commit fails with EIO and names the block, and so does every later one, until the block is
 * overwritten, cut off, removed or rolled back. And a drive that reports a sync done that it has
 * not done is not found out here.
 *
 * Loop thread, except hash_run.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/hash.h"
#include "engine/unsure.h"

/* ---- marking ---- */

static void mark_slot(struct cache *c, struct file *f, struct slot *s, uint32_t n,
		      uint64_t seq)
{
	struct block *b = s->b;

	if (!(b && b->state == BLOCK_WRITING) &&
	    (extent_is_hole(&s->live) || (s->seq != 0 && s->seq != seq)))
		return;
	s->unsure = true;
	slot_changed(c, f, n);
	/* In place, if no commit may have it. Without a place to write to it is read back later. */
	if (b && b->state == BLOCK_CLEAN &&
	    (s->seq == 0 || slot_reserve(c, f, s, block_write_len(b)) == 0))
		block_set_state(b, BLOCK_DIRTY);
}

void unsure_mark(struct cache *c, uint64_t seq)
{
	struct file *f;
	struct slot *s;
	size_t pos = 0;

	while ((f = file_next(c, &pos)))
		for (uint32_t n = 0; (s = file_slot_next(f, &n)); n++)
			mark_slot(c, f, s, n, seq);
}

/* ---- writing again ---- */

int unsure_room(struct unsure_run *u, size_t more)
{
	size_t cap = max_u64(u->n + more, 2 * u->cap);
	struct unsure_place *v;

	if (u->n + more <= u->cap)
		return 0;
	v = realloc(u->v, cap * sizeof(*v));
	if (!v)
		return -ENOMEM;
	u->v = v;
	u->cap = cap;
	return 0;
}

void unsure_add(struct unsure_run *u, const struct file *f, uint32_t n, const struct extent *e)
{
	u->v[u->n++] = (struct unsure_place){.ino = f->ino, .n = n, .e = *e};
}

void unsure_fini(struct unsure_run *u)
{
	free(u->buf);
	free(u->v);
	u->buf = u->v = NULL;
	u->n = u->cap = 0;
}

static void next(struct unsure_run *u);

static void place_done(struct unsure_run *u, int res, const char *what)
{
	struct unsure_place *p = &u->v[u->i++];
	struct file *f = file_find(u->c, p->ino);
	struct slot *s = f ? file_slot(f, p->n) : NULL;

	if (res) {
		if (!u->res) {
			u->res = res;
			u->res_ino = p->ino;
			u->res_what = what;
		}
		u->c->report(u->c->arg, res, p->ino, (uint64_t)p->n * u->c->block, p->e.valid,
			     what);
	} else {
		u->bytes += p->e.len;
		/* Not if it has been written, dropped or brought into memory meanwhile. */
		if (s && s->live.off == p->e.off)
			s->unsure = false;
	}
	next(u);
}

static void write_done(struct io_op *io)
{
	place_done(container_of(io, struct unsure_run, io), io->res, "write error");
}

static void hash_run(struct loop_work *w)
{
	struct unsure_run *u = container_of(w, struct unsure_run, work);

	u->hash = hash_block(u->buf, u->v[u->i].e.len);
}

static void start_io(struct unsure_run *u, enum io_kind kind, void (*done)(struct io_op *))
{
	const struct extent *e = &u->v[u->i].e;

	u->io = (struct io_op){
		.kind = kind, .buf = u->buf, .off = e->off, .len = e->len, .done = done};
	list_init(&u->io.link);
	io_submit(u->c->io, &u->io);
}

static void hash_done(struct loop_work *w)
{
	struct unsure_run *u = container_of(w, struct unsure_run, work);

	if (u->hash == u->v[u->i].e.hash) {
		start_io(u, IO_WRITE, write_done);
		return;
	}
	u->c->stats.checksum_errors++;
	u->lost = true;
	place_done(u, -EIO, "lost by a failed fdatasync");
}

static void read_done(struct io_op *io)
{
	struct unsure_run *u = container_of(io, struct unsure_run, io);

	if (io->res) {
		u->c->stats.read_errors++;
		place_done(u, io->res, "read error after a failed fdatasync");
		return;
	}
	u->work = (struct loop_work){.run = hash_run, .done = hash_done};
	list_init(&u->work.link);
	loop_work(u->c->loop, &u->work);
}

static void next(struct unsure_run *u)
{
	if (u->i < u->n) {
		start_io(u, IO_READ, read_done);
		return;
	}
	free(u->buf);
	u->buf = NULL;
	u->n = 0;
	u->done(u);
}

void unsure_start(struct unsure_run *u)
{
	u->i = 0;
	u->res = 0;
	u->res_ino = 0;
	u->res_what = "no memory to write again what a failed fdatasync left unsure";
	u->lost = false;
	u->bytes = 0;
	if (u->n && posix_memalign(&u->buf, MOMENT_UNIT, u->c->block)) {
		u->buf = NULL;
		u->n = 0;
		u->res = -ENOMEM;
	}
	if (u->buf) /* valgrind does not see what io_uring writes */
		memset(u->buf, 0, u->c->block);
	next(u);
}
