/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ops.c - file data on request: the ops of engine.h, for the FUSE edge and tests.
 *
 * Everything here runs on the loop thread except the functions named *_run. Each op is a small
 * state machine: it asks for blocks (cache_get), or looks at blocks and waits for a busy one
 * (block_wait), and looks again when woken.
 *
 * A WRITE goes block by block and holds one block for writing at a time, so ops cannot wait for
 * each other in a circle. READ is in ops_read.c.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/bug.h"
#include "engine/ops_impl.h"

#define INLINE_COPY  16384u /* below, the loop thread copies itself: a hop costs more */
#define PROMISES_MAX 8u	    /* WRITEs answered and not yet copied */

struct op_run *run_new(struct engine *e, struct engine_op *op, unsigned int n)
{
	struct op_run *r = calloc(1, sizeof(*r) + n * sizeof(r->want[0]));

	if (!r)
		return NULL;
	r->e = e;
	r->op = op;
	r->n = n;
	list_init(&r->work.link);
	list_init(&r->w.link);
	list_init(&r->cw.link);
	list_init(&r->patience.link);
	list_init(&r->timer.link);
	list_push_back(&e->runs, &r->link);
	oldest_watch(e);
	if (op)
		op->run = r;
	return r;
}

void run_free(struct op_run *r)
{
	if (!r)
		return;
	list_remove(&r->link);
	list_remove(&r->w.link);
	loop_timer_clear(r->e->loop, &r->timer);
	patience_end(&r->patience);
	free(r->own);
	free(r);
}

void op_end(struct engine_op *op, int64_t res)
{
	run_free(op->run);
	op->run = NULL;
	op->res = res;
	op->done(op);
}

static void run_wake(struct waiter *w)
{
	struct op_run *r = container_of(w, struct op_run, w);

	r->resume(r);
}

/* ---- waiting for what a session has leased ---- */

static bool op_give_up(struct patience *p, const struct session *by)
{
	struct op_run *r = container_of(p, struct op_run, patience);
	struct engine *e = r->e;
	char who[160], path[200] = "a file";
	bool write = !list_linked(&r->w.link);

	if (write && !cache_get_cancel(&e->c, &r->g))
		return false;
	list_remove(&r->w.link);
	session_lessee_text(by, who, sizeof(who));
	ns_path(e->c.ns, r->f->ino, path, sizeof(path));
	engine_log(e, ENGINE_LOG_WARNING, "%s cannot be %s: %s", path,
		   r->op->kind == ENGINE_TRUNCATE ? "cut"
		   : r->op->kind == ENGINE_PUNCH  ? "given holes"
						  : "written",
		   who);
	if (write) {
		r->g.done(&r->g, -EBUSY);
		cache_pump(&e->c); /* those behind it in the line may be served now */
	} else {
		op_end(r->op, -EBUSY);
	}
	return true;
}

/* What is waited for through `w` may be a block that a session keeps. */
static void op_be_patient(struct op_run *r, struct waiter *w)
{
	if (!r->op || !r->e->c.leased)
		return;
	r->patience.give_up = op_give_up;
	patience_begin(r->e, &r->patience, r->f, w);
}

/* ---- write ---- */

static void write_next(struct op_run *r);

static uint64_t copy_end(const struct op_run *r)
{
	return min_u64(r->end, ((uint64_t)r->want[0].n + 1) * r->e->c.block);
}

/* Work thread, or loop thread for little. */
static void copy_run(struct loop_work *w)
{
	struct op_run *r = container_of(w, struct op_run, work);
	struct want *x = &r->want[0];
	struct block *b = x->b;
	uint64_t start = (uint64_t)x->n * b->c->block;
	uint64_t in = r->pos - start, len = copy_end(r) - r->pos, rest = b->piece - in - len;
	char *mem = block_mem(b, in, len); /* write_ready() has seen that it is there */

	if (x->fresh) {
		memset(block_mem(b, 0, in), 0, in);
		memset(block_mem(b, in + len, rest), 0, rest);
	}
	if (r->op->data)
		memcpy(mem, (const char *)r->op->data + (r->pos - r->op->off), len);
	else
		memset(mem, 0, len);
}

/*
 * The block has its bytes: let go of it. The namespace has been told of them before (ns_grow): a
 * commit that takes the block needs the size, and a time stamp set by hand after the answer must
 * stay.
 */
static void copied(struct op_run *r)
{
	struct want *x = &r->want[0];
	struct cache *c = &r->e->c;
	struct file *f = r->f;
	uint32_t n = x->n;

	r->pos = copy_end(r);
	if (r->pos > f->size)
		f->size = r->pos;
	file_changed(c, f);
	cache_put(c, x, true);
	slot_account(c, f, n);
	ns_publish(c->ns, f->ino, UINT64_MAX, f->bytes, false);
}

static void copy_done(struct loop_work *w)
{
	struct op_run *r = container_of(w, struct op_run, work);

	ns_grow(r->e->c.ns, r->f->ino, copy_end(r));
	copied(r);
	write_next(r);
}

static void last_done(struct loop_work *w)
{
	struct op_run *r = container_of(w, struct op_run, work);

	cache_put(&r->e->c, &r->want[0], true);
	r->e->promises--;
	run_free(r);
}

static void last_run(struct loop_work *w)
{
	struct op_run *r = container_of(w, struct op_run, work);

	copy_run(w);
	r->op->done(r->op);
}

/*
 * The last piece of a WRITE: nothing can fail any more, so it is answered before its bytes are
 * copied. Whoever asks for them, or for a commit, waits for the block. A few at a time, for the
 * caller's memory is not free again before done().
 */
static void write_last(struct op_run *r)
{
	struct engine *e = r->e;
	struct engine_op *op = r->op;

	op->run = NULL;
	list_remove(&r->link); /* from here on it cannot be cancelled */
	e->c.stats.op_write_bytes += op->len;
	op->res = (int64_t)op->len;
	ns_grow(e->c.ns, r->f->ino, r->end);
	r->f->size = max_u64(r->f->size, r->end);
	cache_promise(&e->c, &r->want[0]);
	slot_account(&e->c, r->f, r->want[0].n);
	ns_publish(e->c.ns, r->f->ino, UINT64_MAX, r->f->bytes, false);
	if (e->promises++ < PROMISES_MAX && op->accepted)
		op->accepted(op);
	r->work.run = last_run;
	r->work.done = last_done;
	loop_work_urgent(e->loop, &r->work);
}

static void write_ready(struct get *g, int res)
{
	struct op_run *r = container_of(g, struct op_run, g);
	struct want *x = &r->want[0];
	uint64_t start = (uint64_t)x->n * r->e->c.block, block_end = start + r->e->c.block;

	if (!res && !block_mem(x->b, r->pos - start, copy_end(r) - r->pos)) {
		res = block_outside(x->b, r->pos - start, copy_end(r) - r->pos);
		cache_put(&r->e->c, x, false);
	}
	if (res) {
		/* What is written stays: the bytes before this block, as a short write. */
		bool some = r->op->kind == ENGINE_WRITE && !r->op->arg && r->pos > r->op->off;

		if (some)
			r->e->c.stats.op_write_bytes += r->pos - r->op->off;
		op_end(r->op, some ? (int64_t)(r->pos - r->op->off) : res);
		return;
	}
	if (r->end - r->pos <= INLINE_COPY && !r->want[0].fresh) {
		copy_run(&r->work);
		copy_done(&r->work);
		return;
	}
	if (r->op->kind == ENGINE_WRITE && r->end <= block_end) {
		write_last(r);
		return;
	}
	r->work.run = copy_run;
	r->work.done = copy_done;
	loop_work_urgent(r->e->loop, &r->work);
}

static void write_next(struct op_run *r)
{
	struct cache *c = &r->e->c;
	uint32_t n = (uint32_t)(r->pos / c->block);
	uint64_t start = (uint64_t)n * c->block;
	uint64_t stop = min_u64(r->end, start + c->block);
	uint32_t len = (uint32_t)(stop - start);

	if (r->pos == r->end) {
		if (r->op->kind == ENGINE_PUNCH) {
			r->resume(r);
			return;
		}
		c->stats.op_write_bytes += r->op->len;
		op_end(r->op, (int64_t)r->op->len);
		return;
	}
	r->want[0] = (struct want){
		.f = r->f,
		.n = n,
		.mode = GET_WRITE,
		.len = len,
		.replaces = r->pos == start ? len : 0,
		.can_fill = true,
	};
	/* Growing in large writes: the rest of the block comes next, most likely. */
	if (stop > r->f->size && len >= c->block / 8)
		r->want[0].len = c->block;
	r->g = (struct get){.want = r->want, .n = 1, .done = write_ready};
	op_be_patient(r, &r->g.w);
	cache_get(c, &r->g);
}

/* Why this file's data may not be changed, or 0. */
static int refuse_change(const struct engine *e, const struct file *f, const struct engine_op *op)
{
	/* A punch makes nothing longer: behind the end, however far, there is nothing to do. */
	uint64_t end = op->kind == ENGINE_PUNCH ? 0 : op->off + op->len;

	if (!f)
		return -ESTALE;
	if (e->c.readonly)
		return -EROFS;
	if (f->generated)
		return -EACCES;
	if (f->session || f->held)
		return -EBUSY;
	return end > file_size_max(&e->c) ? -EFBIG : 0;
}

static void op_write(struct engine *e, struct engine_op *op)
{
	struct file *f = file_get(&e->c, op->ino);
	int res = refuse_change(e, f, op);
	struct op_run *r;

	if (!res && op->len > ENGINE_OP_MAX)
		res = -EINVAL;
	r = res ? NULL : run_new(e, op, 1);
	if (!r) {
		op_end(op, res ? res : -ENOMEM);
		return;
	}
	r->f = f;
	r->pos = op->off;
	r->end = op->off + op->len;
	bracket_changes(e, f, op);
	write_next(r);
}

/* ---- truncate, punch, drop ---- */

/* In a quiet section. False: waits for a busy block, run->resume will be called. */
static bool settle(struct op_run *r, uint32_t n, uint32_t stop)
{
	r->w.wake = run_wake;
	if (file_settle(&r->e->c, r->f, n, stop, &r->w))
		return true;
	op_be_patient(r, &r->w);
	return false;
}

/* What was allowed when the op began need not be any more when it has waited. */
static bool still_refused(struct op_run *r)
{
	int res = refuse_change(r->e, r->f, r->op);

	if (res)
		op_end(r->op, res);
	return res;
}

static void truncate_resume(struct op_run *r)
{
	struct cache *c = &r->e->c;
	struct file *f = r->f;
	uint64_t size = r->op->len;
	uint32_t part = (uint32_t)(size % c->block);
	uint32_t n = (uint32_t)(size / c->block);
	bool cut = size < f->size;

	if (still_refused(r))
		return;
	cache_quiet(c); /* a commit sees all of it or nothing */
	if (cut && !settle(r, n, UINT32_MAX)) {
		cache_loud(c);
		return;
	}
	f->size = size;
	if (cut) {
		struct slot *s = part ? file_slot(f, n) : NULL;

		file_holes(c, f, n + (part ? 1 : 0), UINT32_MAX, false);
		if (s && !extent_is_hole(&s->live) && s->live.valid > part) {
			s->live.valid = part;
			slot_changed(c, f, n);
		}
		if (s && s->b && s->b->piece > part)
			memset(block_mem(s->b, part, s->b->piece - part), 0, s->b->piece - part);
		if (s)
			slot_account(c, f, n);
	}
	file_changed(c, f);
	file_publish(c, f, true);
	cache_loud(c);
	op_end(r->op, 0);
}

static void punch_resume(struct op_run *r)
{
	struct cache *c = &r->e->c;
	struct file *f = r->f;
	uint64_t off = r->op->off, end = min_u64(off + r->op->len, f->size);
	uint32_t n = (uint32_t)((off + c->block - 1) / c->block);
	uint32_t stop = (uint32_t)(end / c->block);

	if (still_refused(r))
		return;
	if (end == f->size)
		stop = file_nblocks(c, f);
	if (n < stop) {
		bool idle;

		cache_quiet(c);
		idle = settle(r, n, stop);
		if (idle)
			file_holes(c, f, n, stop, true);
		cache_loud(c);
		if (!idle)
			return;
	}
	file_changed(c, f);
	file_publish(c, f, true);
	op_end(r->op, 0);
}

static bool is_hole(struct file *f, uint32_t n)
{
	struct slot *s = file_slot(f, n);

	return !s || (!s->b && extent_is_hole(&s->live));
}

/* Head, tail, middle: the partial blocks are written with zeros, the whole ones dropped. */
static void punch_tail(struct op_run *r)
{
	struct cache *c = &r->e->c;
	uint64_t off = r->op->off, end = min_u64(off + r->op->len, r->f->size);
	uint32_t last = (uint32_t)(end / c->block);

	r->resume = punch_resume;
	if (end < r->f->size && end % c->block && last > off / c->block && !is_hole(r->f, last)) {
		r->pos = (uint64_t)last * c->block;
		r->end = end;
		write_next(r);
		return;
	}
	punch_resume(r);
}

static void punch_head(struct op_run *r)
{
	struct cache *c = &r->e->c;
	uint64_t off = r->op->off, end = min_u64(off + r->op->len, r->f->size);
	uint32_t first = (uint32_t)(off / c->block);

	if (off >= end) {
		op_end(r->op, 0);
		return;
	}
	r->resume = punch_tail;
	/* Within one block, or a head that does not begin a block. */
	if ((off % c->block || (end < ((uint64_t)first + 1) * c->block && end < r->f->size)) &&
	    !is_hole(r->f, first)) {
		r->pos = off;
		r->end = min_u64(end, ((uint64_t)first + 1) * c->block);
		write_next(r);
		return;
	}
	punch_tail(r);
}

static void drop_resume(struct op_run *r)
{
	struct cache *c = &r->e->c;
	struct file *f = r->f;

	cache_quiet(c);
	if (settle(r, 0, UINT32_MAX)) {
		file_holes(c, f, 0, UINT32_MAX, false);
		freed_move(c, &c->orphans, &f->frees);
		file_free(c, f);
		run_free(r);
	}
	cache_loud(c);
}

void ops_drop_file(struct engine *e, uint64_t ino)
{
	struct file *f = file_find(&e->c, ino);
	struct op_run *r = f ? run_new(e, NULL, 0) : NULL;
	struct ns_attr a;

	if (!r)
		return;
	if (ns_getattr(e->c.ns, ino, &a) == 0) { /* a rollback of everything has brought it back */
		run_free(r);
		return;
	}
	r->f = f;
	r->resume = drop_resume;
	drop_resume(r);
}

/* ---- allocate, trim ---- */

/* What block n has to have for an ALLOCATE that ends at `end`. */
static uint32_t allocate_len(const struct cache *c, uint64_t n, uint64_t end)
{
	return (uint32_t)round_up_u64(min_u64(c->block, end - n * c->block), MOMENT_UNIT);
}

/* Bytes of places that an ALLOCATE wants, less what the blocks have already. */
static uint64_t allocate_need(struct op_run *r, uint64_t end)
{
	struct cache *c = &r->e->c;
	uint64_t first = r->op->off / c->block, last = (r->end - 1) / c->block;
	uint64_t need = 2 * ((last - first) * c->block + allocate_len(c, last, end));
	uint32_t n = (uint32_t)first;
	struct slot *s;

	for (; (s = file_slot_next(r->f, &n)) && n <= last; n++) {
		uint32_t len = allocate_len(c, n, end);
		unsigned int have = slot_places(s, len);

		need -= (uint64_t)(have < 2 ? have : 2) * len;
	}
	return need;
}

static void allocate_resume(struct op_run *r)
{
	struct cache *c = &r->e->c;
	struct file *f = r->f;
	struct engine_op *op = r->op;
	uint64_t size = max_u64(f->size, op->arg ? 0 : op->off + op->len);
	uint64_t first = op->off / c->block;
	int res = refuse_change(r->e, f, op);
	struct pool_info pi;

	r->w.wake = run_wake;
	if (!res && !r->checked) {
		res = space_check(c, &r->w, allocate_need(r, max_u64(size, r->end)), &r->waits);
		if (res == 1)
			return;
		r->checked = true;
		pool_get_info(c->pool, &pi);
		r->pool_size = pi.size;
	}
	for (; !res && r->pos * c->block < r->end; r->pos++) {
		struct slot *s = file_slot_make(c, f, (uint32_t)r->pos);
		uint64_t left = r->end - r->pos * c->block;
		uint32_t len = allocate_len(c, r->pos, max_u64(size, r->end));

		r->own[r->pos - first] = s && !s->keep;
		res = s ? slot_keep(c, f, s, len) : -ENOMEM;
		r->w.wake = run_wake;
		if (res == -EBUSY) {
			block_wait(s->b, &r->w);
			return;
		}
		if (res == -EAGAIN) {
			space_grow(c, 2 * round_up_u64(left, c->block));
			res = space_wait(c, &r->w, len, false);
			if (!res)
				return;
		}
		if (res)
			break;
	}
	if (res) {
		for (uint64_t i = first; i <= r->pos; i++) {
			struct slot *s = file_slot(f, (uint32_t)i);

			if (!r->own[i - first])
				continue;
			s->keep = false;
			slot_trim(c, s);
			slot_account(c, f, (uint32_t)i);
		}
		if (r->checked)
			space_trim(c, r->pool_size);
		op_end(op, res);
		return;
	}
	for (uint64_t i = first; i * c->block < r->end; i++)
		slot_account(c, f, (uint32_t)i);
	if (size > f->size) {
		f->size = size;
		file_changed(c, f);
	}
	file_publish(c, f, true);
	op_end(op, 0);
}

static void trim_resume(struct op_run *r)
{
	struct cache *c = &r->e->c;
	struct pool_info pi;

	if (c->growing) {
		r->w.wake = run_wake;
		list_push_back(&c->space, &r->w.link);
		return;
	}
	pool_get_info(c->pool, &pi);
	if (!r->checked) {
		r->checked = true;
		r->pool_size = pi.size;
		if (commit_running(c)) { /* another one, since ours ended */
			r->checked = false;
			r->w.wake = run_wake;
			commit_when_idle(c, &r->w);
			return;
		}
		if (space_trim(c, 0)) {
			trim_resume(r);
			return;
		}
	}
	op_end(r->op, r->pool_size > pi.size ? (int64_t)(r->pool_size - pi.size) : 0);
}

static void trim_committed(struct commit_wait *w, int res)
{
	struct op_run *r = container_of(w, struct op_run, cw);

	if (res)
		op_end(r->op, res);
	else
		trim_resume(r);
}

/* What was removed is free only with the next commit. */
static void op_trim(struct engine *e, struct engine_op *op)
{
	struct op_run *r = e->c.readonly ? NULL : run_new(e, op, 0);

	if (!r) {
		op_end(op, e->c.readonly ? -EROFS : -ENOMEM);
		return;
	}
	r->resume = trim_resume;
	r->cw.done = trim_committed;
	if (e->plain) /* nothing is committed before its end: what is free already */
		trim_resume(r);
	else
		commit_request(&e->c, &r->cw);
}

/* ---- seek, residency ---- */

static void op_seek(struct engine *e, struct engine_op *op)
{
	struct cache *c = &e->c;
	struct file *f = file_get(c, op->ino);
	uint64_t pos = op->off;

	if (!f || pos >= f->size) {
		op_end(op, f ? -ENXIO : -ESTALE);
		return;
	}
	for (uint32_t n = (uint32_t)(pos / c->block);; n++) {
		struct slot *s;
		bool data;

		if ((uint64_t)n * c->block >= f->size) {
			op_end(op, op->arg == SEEK_HOLE ? (int64_t)f->size : -ENXIO);
			return;
		}
		s = file_slot(f, n);
		data = s && slot_has_content(s);
		if (data == (op->arg == SEEK_DATA)) {
			op_end(op, (int64_t)max_u64(pos, (uint64_t)n * c->block));
			return;
		}
		if (!s && op->arg == SEEK_DATA && file_slot_next(f, &n))
			n--;
		else if (!s && op->arg == SEEK_DATA)
			n = file_nblocks(c, f);
	}
}

static void op_resident(struct engine *e, struct engine_op *op)
{
	struct cache *c = &e->c;
	struct file *f = file_find(c, op->ino);
	struct slot *s;

	op->out.resident = op->out.dirty = 0;
	op->out.bytes = f ? f->bytes : 0;
	for (uint32_t n = 0; f && (s = file_slot_next(f, &n)); n++) {
		struct block *b = s->b;

		if (!b || b->state == BLOCK_EMPTY || b->state == BLOCK_READING)
			continue;
		op->out.resident += file_content(c, f, n);
		if (b->state != BLOCK_CLEAN)
			op->out.dirty += file_content(c, f, n);
	}
	op_end(op, 0);
}

/* ---- commits and steps ---- */

static void sync_done(struct commit_wait *w, int res)
{
	op_end(container_of(w, struct op_run, cw)->op, res);
}

void op_sync(struct engine *e, struct engine_op *op)
{
	struct cache *c = &e->c;
	struct op_run *r;

	if (op->kind == ENGINE_FSYNC) {
		struct file *f = file_find(c, op->ino);
		int res = bracket_sync(e, op, f);

		if (res == 2)
			return; /* it waits */
		/* Of a session's step: durable with it, so never waited for here. */
		if (res == 1 && f && f->held)
			res = 0;
		if (res != 1) {
			op_end(op, res);
			return;
		}
	} else if (e->plain) {
		op_end(op, e->torn ? -ESTALE : -EBUSY);
		return;
	}
	r = run_new(e, op, 0);
	if (!r) {
		op_end(op, -ENOMEM);
		return;
	}
	r->cw.done = sync_done;
	commit_request(c, &r->cw);
}

static void rollback_done(void *arg, int res)
{
	op_end(arg, res);
}

static void op_rollback(struct engine *e, struct engine_op *op)
{
	bool all = !e->torn || e->plain;

	if (e->c.readonly) {
		op_end(op, -EROFS);
		return;
	}
	/* A plain step that is open is for its writer to give up. */
	if (e->writer || (e->plain && !e->torn && op->foreign) ||
	    ns_open_writers_total(e->c.ns)) {
		op_end(op, -EBUSY);
		return;
	}
	engine_revert(e, all, rollback_done, op);
}

/* ---- in ---- */

static bool is_of_file(const struct engine_op *op)
{
	switch (op->kind) {
	case ENGINE_READ:
	case ENGINE_WRITE:
	case ENGINE_TRUNCATE:
	case ENGINE_PUNCH:
	case ENGINE_ALLOCATE:
	case ENGINE_SEEK:
	case ENGINE_FSYNC:
	case ENGINE_PREFETCH:
	case ENGINE_RESIDENT:
		return true;
	default:
		return false;
	}
}

static void op_start(struct loop_task *t)
{
	struct engine_op *op = container_of(t, struct engine_op, task);
	struct engine *e = op->e;
	struct cache *c = &e->c;
	struct op_run *r;
	struct file *f;
	int res;

	if (e->reverting) { /* the maps are being exchanged */
		list_push_back(&e->parked, &op->link);
		return;
	}
	c->stats.ops++;
	f = is_of_file(op) ? file_find(c, op->ino) : NULL;
	if (f && f->lost) {
		op_end(op, -ESTALE);
		return;
	}
	switch (op->kind) {
	case ENGINE_READ:
		op_read(e, op);
		return;
	case ENGINE_WRITE:
		op_write(e, op);
		return;
	case ENGINE_SEEK:
		op_seek(e, op);
		return;
	case ENGINE_RESIDENT:
		op_resident(e, op);
		return;
	case ENGINE_FSYNC:
	case ENGINE_SYNC:
		op_sync(e, op);
		return;
	case ENGINE_STEP_BEGIN:
	case ENGINE_STEP_END:
	case ENGINE_STEP_TEAR:
		op_step(e, op);
		return;
	case ENGINE_ROLLBACK:
		op_rollback(e, op);
		return;
	case ENGINE_TRIM:
		op_trim(e, op);
		return;
	case ENGINE_SCRUB:
		scrub_start(e, op);
		return;
	case ENGINE_PREFETCH:
		f = file_get(c, op->ino);
		if (f && op->len && op->off < f->size) {
			uint64_t end = op->off + min_u64(op->len, f->size - op->off);
			uint32_t first = (uint32_t)(op->off / c->block);

			cache_prefetch(c, op->ino, first,
				       (uint32_t)((end + c->block - 1) / c->block) - first);
			cache_pump(c);
		}
		op_end(op, f ? 0 : -ESTALE);
		return;
	case ENGINE_TRUNCATE:
	case ENGINE_PUNCH:
	case ENGINE_ALLOCATE:
		break;
	}
	f = file_get(c, op->ino);
	res = refuse_change(e, f, op);
	r = res ? NULL : run_new(e, op, 1);
	if (!r) {
		op_end(op, res ? res : -ENOMEM);
		return;
	}
	r->f = f;
	bracket_changes(e, f, op);
	if (op->kind == ENGINE_TRUNCATE) {
		r->resume = truncate_resume;
		truncate_resume(r);
	} else if (op->kind == ENGINE_PUNCH) {
		punch_head(r);
	} else {
		r->pos = op->off / c->block;
		r->end = op->off + op->len;
		r->own = calloc(r->end / c->block - r->pos + 1, 1);
		r->resume = allocate_resume;
		if (r->own)
			allocate_resume(r);
		else
			op_end(op, -ENOMEM);
	}
}

/* The loop has ended; what still waits are drops of files that were in use, done by forgetting. */
void ops_fini(struct engine *e)
{
	while (!list_empty(&e->runs))
		run_free(list_first(&e->runs, struct op_run, link));
}

void ops_unpark(struct engine *e)
{
	struct list todo;

	list_init(&todo);
	list_splice_back(&todo, &e->parked);
	while (!list_empty(&todo)) {
		struct engine_op *op = list_first(&todo, struct engine_op, link);

		list_remove(&op->link);
		op_start(&op->task);
	}
	list_splice_back(&todo, &e->after);
	while (!list_empty(&todo)) {
		struct waiter *w = list_first(&todo, struct waiter, link);

		list_remove(&w->link);
		w->wake(w);
	}
}

void engine_submit(struct engine *e, struct engine_op *op)
{
	op->id = atomic_fetch_add(&e->next_id, 1) + 1;
	op->e = e;
	op->start_ns = loop_now_ns();
	op->run = NULL;
	op->text = NULL;
	op->task.run = op_start;
	loop_post(e->loop, &op->task);
}

/* ---- cancelling ---- */

struct cancel {
	struct loop_task task;
	struct engine *e;
	uint64_t id;
};

/* By number: when it is looked at here, the op may be long gone. */
static void cancel_fn(struct loop_task *t)
{
	struct cancel *k = container_of(t, struct cancel, task);
	struct op_run *r = NULL;

	list_for_each(l, &k->e->runs)
	{
		r = list_entry(l, struct op_run, link);
		if (r->op && r->op->id == k->id)
			break;
		r = NULL;
	}
	if (r && r->op->kind == ENGINE_FSYNC && list_linked(&r->w.link)) /* for a step's end */
		op_end(r->op, -EINTR);
	else if (r && (r->op->kind == ENGINE_FSYNC || r->op->kind == ENGINE_SYNC) &&
	    commit_cancel(&r->e->c, &r->cw))
		op_end(r->op, -EINTR);
	else if (r && r->op->kind == ENGINE_READ && cache_get_cancel(&r->e->c, &r->g)) {
		struct cache *c = &r->e->c;

		r->g.done(&r->g, -EINTR);
		cache_pump(c); /* those behind it in the line may be served now */
	}
	free(k);
}

void engine_cancel(struct engine *e, struct engine_op *op)
{
	struct cancel *k = calloc(1, sizeof(*k));

	if (!k)
		return;
	k->e = e;
	k->id = op->id;
	k->task.run = cancel_fn;
	loop_post(e->loop, &k->task);
}
