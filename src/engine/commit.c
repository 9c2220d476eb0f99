/* SPDX-License-Identifier: Apache-2.0 */
/*
 * commit.c - see commit.h for the idea and the order of things.
 *
 * Loop thread, except record_run (a work thread, which alone uses the catalog's SQLite meanwhile).
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/bug.h"
#include "engine/blockmap.h"
#include "engine/commit.h"
#include "engine/unsure.h"

#define NONE UINT64_MAX

struct commit {
	struct cache *c;
	int seconds; /* -1: off */
	bool running;
	unsigned int blocked;
	/* the one under way */
	struct catalog_txn *txn;
	uint64_t seq, step;
	unsigned int pending; /* frozen blocks, and one for `again` */
	int res; /* its first failure; with the file, or 0, and a word for it: */
	uint64_t res_ino;
	const char *res_what;
	uint64_t start_ns, bytes;
	bool full; /* no file was held back */
	bool step_names; /* it has names that a plain step changed */
	bool lost; /* its sync failed */
	bool owing; /* commit_owes() */
	struct freed_list frees;
	struct unsure_run again; /* what a failed sync made unsure, written again */
	uint64_t *inos;
	size_t ninos, cap;
	uint32_t *segs; /* of a file, while it is taken */
	size_t segs_cap;
	struct list waiting; /* for this one */
	struct list next;    /* for the next one */
	struct list idle;    /* waiters: no commit running */
	struct io_op sync;
	struct loop_work record;
	struct loop_timer timer;
	/* what is known */
	uint64_t boundary;
	uint64_t committed;
	uint64_t last_full_ns;
	int refused; /* commit_refuse() */
	const char *refused_what;
	struct commit_info info;
};

static void timer_fire(struct loop_timer *t);
static void again_done(struct unsure_run *u);

/* The commit under way will fail: the first reason counts. */
static void fails(struct commit *m, int res, uint64_t ino, const char *what)
{
	if (!res || m->res)
		return;
	m->res = res;
	m->res_ino = ino;
	m->res_what = what;
}

static void tell(struct list *waiters, int res)
{
	while (!list_empty(waiters)) {
		struct commit_wait *w = list_first(waiters, struct commit_wait, link);

		list_remove(&w->link);
		w->done(w, res);
	}
}

int commit_init(struct cache *c, int seconds)
{
	struct commit *m = calloc(1, sizeof(*m));
	struct catalog_meta meta;

	if (!m)
		return -ENOMEM;
	catalog_get_meta(c->cat, &meta);
	m->c = m->again.c = c;
	m->again.done = again_done;
	m->seconds = seconds;
	m->boundary = NONE;
	m->committed = meta.has_step ? meta.step : NONE;
	m->info.seq = meta.commit_seq;
	m->info.time_ns = meta.commit_time_ns;
	m->last_full_ns = loop_now_ns();
	list_init(&m->waiting);
	list_init(&m->next);
	list_init(&m->idle);
	list_init(&m->timer.link);
	list_init(&m->record.link);
	m->timer.fire = timer_fire;
	c->commit = m;
	return 0;
}

void commit_fini(struct cache *c)
{
	struct commit *m = c->commit;

	/* An engine that is abandoned may leave one half done: the backing stays at the one before.
	 */
	if (m->running)
		catalog_txn_end(c->cat, m->txn, -ECANCELED);
	tell(&m->waiting, -ECANCELED);
	tell(&m->next, -ECANCELED);
	unsure_fini(&m->again);
	freed_fini(c, &m->frees);
	free(m->inos);
	free(m->segs);
	free(m);
	c->commit = NULL;
}

bool commit_running(const struct cache *c)
{
	return c->commit->running;
}

struct freed_list *commit_frees(struct cache *c)
{
	return &c->commit->frees;
}

static struct file *changed_file(struct list *l)
{
	return list_entry(l, struct file, changed_link);
}

bool commit_frees_pending(const struct cache *c)
{
	if (c->commit->blocked)
		return false;
	if (c->orphans.n)
		return true;
	list_for_each(l, &c->changed)
	{
		if (!changed_file(l)->held && changed_file(l)->frees.n)
			return true;
	}
	return false;
}

/* ---- end ---- */

/*
 * The commit did not happen: what it took is changed again, what it would have freed is not free.
 * It may even be what a mount finds after a crash (catalog_uncertain): then its places are not
 * written over either, until a later commit has succeeded.
 */
static void undo(struct commit *m)
{
	struct cache *c = m->c;
	bool uncertain = catalog_uncertain(c->cat);

	for (size_t i = 0; i < m->ninos; i++) {
		struct file *f = file_find(c, m->inos[i]);
		struct slot *s;

		if (!f)
			continue;
		for (uint32_t k = 0; !uncertain && (s = file_slot_next(f, &k)); k++)
			if (s->seq == m->seq)
				s->seq = 0;
		file_changed_all(c, f);
		f->stepped = true; /* maybe; the step's files stay together */
		file_changed(c, f);
	}
	m->owing = m->owing || uncertain;
	for (size_t i = 0; i < m->frees.n; i++) {
		struct file *f = file_find(c, m->frees.v[i].ino);

		freed_push(c, f ? &f->frees : &c->orphans, m->frees.v[i]);
		if (f)
			file_changed(c, f);
	}
	if (m->step_names)
		atomic_store(&c->step_names, true);
	m->frees.n = 0;
}

static void failed(struct commit *m)
{
	commit_info_failed(&m->info, m->c->ns, m->res, m->again.lost, m->res_ino, m->res_what);
}

static void finish(struct commit *m)
{
	struct cache *c = m->c;
	struct list waiting, idle;
	int res = m->res;

	if (res) {
		undo(m);
		failed(m);
		if (m->lost)
			unsure_mark(c, m->seq);
	} else {
		struct timespec now;

		clock_gettime(CLOCK_REALTIME, &now);
		commit_info_well(&m->info);
		m->committed = m->step;
		TRACE(c, "commit", 0, m->seq, m->bytes);
		m->info.seq = m->seq;
		m->info.count++;
		m->info.time_ns = (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
		m->info.last_bytes = m->bytes;
		m->info.last_ns = loop_now_ns() - m->start_ns;
		if (m->full)
			m->last_full_ns = m->start_ns;
		for (size_t i = 0; i < m->frees.n; i++)
			freed_release(c, &m->frees.v[i]);
		m->frees.n = 0;
		m->owing = m->owing && !m->full;
	}
	m->info.full = m->full;
	catalog_txn_end(c->cat, m->txn, res);
	m->txn = NULL;
	m->running = false;
	list_init(&waiting);
	list_splice_back(&waiting, &m->waiting);
	list_init(&idle);
	list_splice_back(&idle, &m->idle);
	c->grow_error = 0;
	tell(&waiting, res);
	while (!list_empty(&idle)) {
		struct waiter *w = list_first(&idle, struct waiter, link);

		list_remove(&w->link);
		w->wake(w);
	}
	/* Those whom it should have given room must not ask for the next one at once, for ever. */
	c->space_error = res;
	space_wake(c);
	c->space_error = 0;
	if (!list_empty(&m->next))
		commit_start(c);
	cache_pump(c);
}

/* ---- record, sync ---- */

static void record_run(struct loop_work *w)
{
	struct commit *m = container_of(w, struct commit, record);

	/* Once more: it may be long since the commit began. */
	if (m->c->intact && m->c->intact(m->c->arg))
		fails(m, -EIO, 0, "the backing's files are gone");
	else
		fails(m, catalog_commit(m->c->cat, m->txn), catalog_txn_blame(m->txn),
		      "the catalog could not be written");
	if (!m->res)
		pool_write_super(m->c->pool, m->seq); /* a hint: its failure loses nothing */
}

static void record_done(struct loop_work *w)
{
	struct commit *m = container_of(w, struct commit, record);

	if (m->res)
		m->c->report(m->c->arg, m->res, m->res_ino, 0, 0, m->res_what);
	finish(m);
}

static void record(struct commit *m)
{
	m->record.run = record_run;
	m->record.done = record_done;
	loop_work_urgent(m->c->loop, &m->record);
}

static void sync_done(struct io_op *io)
{
	struct commit *m = container_of(io, struct commit, sync);

	if (io->res) {
		m->c->report(m->c->arg, io->res, 0, 0, 0, "fdatasync of the pool failed");
		m->lost = true;
		fails(m, io->res, 0, "fdatasync of the pool failed");
		finish(m);
		return;
	}
	record(m);
}

static void written(struct commit *m)
{
	if (m->res) {
		finish(m);
		return;
	}
	m->sync = (struct io_op){.kind = IO_SYNC, .done = sync_done};
	list_init(&m->sync.link);
	io_submit(m->c->io, &m->sync);
}

void commit_block_done(struct cache *c, struct block *b, int res)
{
	struct commit *m = c->commit;

	assert(m->running && b->frozen && m->pending);
	b->frozen = false;
	block_mark(b);
	if (res) {
		fails(m, res, b->f->ino, "a block could not be written");
	} else {
		struct slot *s = file_slot(b->f, b->n);
		uint32_t n;
		struct extent *e = catalog_txn_segment_get(m->txn, b->f->ino,
							   b->n / BLOCKMAP_SEGMENT, &n);

		assert(e && b->n % BLOCKMAP_SEGMENT < n);
		e[b->n % BLOCKMAP_SEGMENT] = s->live;
		s->seq = m->seq;
		m->bytes += s->live.len;
	}
	if (--m->pending == 0)
		written(m);
}

static void again_done(struct unsure_run *u)
{
	struct commit *m = container_of(u, struct commit, again);

	fails(m, u->res, u->res_ino, u->res_what);
	m->bytes += u->bytes;
	if (--m->pending == 0)
		written(m);
}

/* ---- freeze ---- */

/*
 * The newest content is not on disk, or will not be: a block that is being filled by the one who
 * overwrites all of it is to be written in place, over the extent that a commit would refer to.
 */
static bool must_write(const struct slot *s)
{
	const struct block *b = s->b;

	return b && (b->state == BLOCK_DIRTY || b->state == BLOCK_WRITING ||
		     (b->state == BLOCK_READING && b->filler && b->writer && s->seq == 0 &&
		      !extent_is_hole(&s->live)));
}

/* Room for the numbers of one more file, and of `n` segments. */
static int take_room(struct commit *m, uint32_t n)
{
	if (m->ninos == m->cap) {
		size_t cap = m->cap ? m->cap * 2 : 256;
		uint64_t *v = realloc(m->inos, cap * sizeof(*v));

		if (!v)
			return -ENOMEM;
		m->inos = v;
		m->cap = cap;
	}
	if (n > m->segs_cap) {
		size_t cap = max_u64(n, 2 * m->segs_cap);
		uint32_t *v = realloc(m->segs, cap * sizeof(*v));

		if (!v)
			return -ENOMEM;
		m->segs = v;
		m->segs_cap = cap;
	}
	return 0;
}

/* The part of a segment that lies below block n of the file, as it will be: what is to be written
 * gets its place later. *unsure grows by the blocks that a failed sync made doubtful. */
static int take_segment(struct commit *m, struct file *f, uint32_t seg, uint32_t n, size_t *unsure)
{
	struct extent e[BLOCKMAP_SEGMENT] = {0};
	uint32_t first = seg * BLOCKMAP_SEGMENT, used = 0;

	for (uint32_t i = 0; i < BLOCKMAP_SEGMENT && first + i < n; i++) {
		const struct slot *s = file_slot(f, first + i);

		if (!s)
			continue;
		if (!must_write(s))
			e[i] = s->live;
		if (must_write(s) || !extent_is_hole(&s->live))
			used = i + 1;
		*unsure += s->unsure;
	}
	return catalog_txn_segment(m->txn, f->ino, seg, e, used);
}

static void freeze_segment(struct commit *m, struct file *f, uint32_t seg, uint32_t n)
{
	for (uint32_t i = seg * BLOCKMAP_SEGMENT; i / BLOCKMAP_SEGMENT == seg && i < n; i++) {
		struct slot *s = file_slot(f, i);

		if (!s)
			continue;
		if (must_write(s)) {
			s->b->frozen = true;
			block_mark(s->b);
			m->pending++;
			block_write(s->b, false);
		} else if (!extent_is_hole(&s->live)) {
			if (s->seq == 0)
				s->seq = m->seq;
			if (s->unsure)
				unsure_add(&m->again, f, i, &s->live);
		}
	}
}

static int take_file(struct commit *m, struct file *f)
{
	struct cache *c = m->c;
	/* A block past the end has no bytes that anybody was told of: the next commit takes it. */
	uint32_t n = (uint32_t)min_u64(file_map_len(f), file_nblocks(c, f));
	uint32_t marked = slots_marked(f);
	size_t unsure = 0;
	int r = take_room(m, marked);

	if (!r)
		r = catalog_txn_map(m->txn, f->ino, n);
	if (r)
		return r;
	slots_marked_get(f, m->segs);
	for (uint32_t i = 0; !r && i < marked; i++)
		r = take_segment(m, f, m->segs[i], n, &unsure);
	if (!r)
		r = unsure_room(&m->again, unsure);
	if (r)
		return r;
	/* From here on nothing can fail. */
	m->inos[m->ninos++] = f->ino;
	for (uint32_t i = 0; i < marked; i++)
		freeze_segment(m, f, m->segs[i], n);
	list_remove(&f->changed_link);
	f->changed = f->stepped = false;
	slots_unmark(f, n);
	freed_move(c, &m->frees, &f->frees);
	return 0;
}

static bool removed(struct cache *c, const struct file *f)
{
	struct ns_attr a;

	return ns_getattr(c->ns, f->ino, &a) || a.nlink == 0;
}

void commit_start(struct cache *c)
{
	struct commit *m = c->commit;
	const char *why = "a commit could not begin";
	bool changed = false, held;
	int r = 0;

	if (m->running || m->blocked)
		return;
	list_splice_back(&m->waiting, &m->next);
	if (c->readonly) {
		tell(&m->waiting, 0);
		return;
	}
	if (m->refused) {
		commit_info_failed(&m->info, c->ns, m->refused, true, 0, m->refused_what);
		tell(&m->waiting, m->refused);
		return;
	}
	held = !list_empty(&c->held);
	m->step = held || m->boundary == NONE ? m->committed : m->boundary;
	m->full = !held;
	r = c->intact ? c->intact(c->arg) : 0;
	if (r)
		why = "the backing's files are gone";
	else
		r = catalog_freeze(c->cat, m->step == NONE ? 0 : m->step, m->step != NONE, &m->txn,
				   &changed);
	if (r) {
		c->report(c->arg, r, 0, 0, 0, why);
		m->res = 0;
		m->again.lost = false;
		fails(m, r, 0, why);
		failed(m);
		tell(&m->waiting, r);
		return;
	}
	m->running = true;
	m->step_names = atomic_exchange(&c->step_names, false);
	m->seq = catalog_txn_seq(m->txn);
	TRACE(c, "freeze", 0, m->seq, 0);
	m->res = 0;
	m->bytes = 0;
	m->lost = false;
	m->start_ns = loop_now_ns();
	m->ninos = 0;
	m->pending = 2; /* `again`, and one that keeps what finishes meanwhile from ending it */
	freed_move(c, &m->frees, &c->orphans);
	list_for_each_safe(l, tmp, &c->changed)
	{
		struct file *f = changed_file(l);

		if (f->held)
			continue;
		r = take_file(m, f);
		/* A removed file that is still open has no row: its places go when it is dropped.
		 * What was frozen counts; one removed since then still has its row. */
		if (r == -ENOENT && removed(c, f))
			continue;
		fails(m, r, f->ino, "its block map could not be taken");
		changed = true;
	}
	if (!changed && m->committed == m->step && !m->owing) {
		/* Nothing to record; what was freed needs no commit to be free. */
		for (size_t i = 0; i < m->frees.n; i++)
			freed_release(c, &m->frees.v[i]);
		m->frees.n = 0;
		m->running = false;
		m->pending = 0;
		catalog_txn_end(c->cat, m->txn, -ECANCELED);
		m->txn = NULL;
		m->info.full = m->full;
		if (m->full)
			m->last_full_ns = m->start_ns;
		if (!c->error_blocks && m->full)
			commit_info_well(&m->info);
		tell(&m->waiting, 0);
		space_wake(c);
		return;
	}
	block_write_pump(c);
	unsure_start(&m->again);
	if (--m->pending == 0)
		written(m);
}

void commit_request(struct cache *c, struct commit_wait *w)
{
	list_push_back(&c->commit->next, &w->link);
	commit_start(c);
}

bool commit_cancel(struct cache *c, struct commit_wait *w)
{
	(void)c;
	if (!list_linked(&w->link))
		return false;
	list_remove(&w->link);
	return true;
}

/* ---- when ---- */

static void timer_arm(struct commit *m)
{
	if (m->seconds > 0 && !m->c->readonly)
		loop_timer_set(m->c->loop, &m->timer, (uint64_t)m->seconds * 1000000000ull);
}

static void timer_fire(struct loop_timer *t)
{
	struct commit *m = container_of(t, struct commit, timer);

	commit_start(m->c);
	timer_arm(m);
}

void commit_timer_start(struct cache *c)
{
	timer_arm(c->commit);
}

void commit_stop(struct cache *c)
{
	loop_timer_clear(c->loop, &c->commit->timer);
	c->commit->blocked++;
}

void commit_refuse(struct cache *c, int res, const char *what)
{
	struct commit *m = c->commit;

	m->refused = res;
	m->refused_what = what;
	commit_info_failed(&m->info, c->ns, res, true, 0, what);
}

void commit_maybe(struct cache *c)
{
	struct commit *m = c->commit;

	if (m->seconds >= 0 &&
	    loop_now_ns() - m->last_full_ns >= (uint64_t)m->seconds * 1000000000ull)
		commit_start(c);
}

bool commit_stalled(const struct cache *c)
{
	return commit_info_stalled(&c->commit->info, c->commit->seconds);
}

void commit_owes(struct cache *c)
{
	c->commit->owing = true;
}

bool commit_owing(const struct cache *c)
{
	return c->commit->owing;
}

void commit_set_boundary(struct cache *c, uint64_t step)
{
	c->commit->boundary = step;
}

uint64_t commit_boundary(const struct cache *c)
{
	return c->commit->boundary;
}

void commit_block(struct cache *c)
{
	c->commit->blocked++;
}

void commit_unblock(struct cache *c)
{
	assert(c->commit->blocked);
	if (--c->commit->blocked == 0 && !list_empty(&c->commit->next))
		commit_start(c);
}

bool commit_blocked(const struct cache *c)
{
	return c->commit->blocked > 0;
}

void commit_when_idle(struct cache *c, struct waiter *w)
{
	if (!c->commit->running)
		w->wake(w);
	else
		list_push_back(&c->commit->idle, &w->link);
}

uint64_t commit_memory(const struct cache *c)
{
	const struct commit *m = c->commit;

	return m->cap * sizeof(*m->inos) + m->segs_cap * sizeof(*m->segs) +
	       (m->txn ? catalog_txn_memory(m->txn) : 0);
}

void commit_get_info(const struct cache *c, struct commit_info *i)
{
	const struct commit *m = c->commit;

	*i = m->info;
	i->step = m->committed;
	i->running = m->running;
	i->pending = m->pending;
}
