/* SPDX-License-Identifier: Apache-2.0 */
/*
 * revert.c - back to the last commit: the files of a torn step, or everything.
 *
 * Loop thread, except revert_run (a work thread: SQLite). Order: no commit runs, no new op starts
 * (they are parked), the committed rows and maps are read, the files' blocks become idle and are
 * dropped with everything that no commit knows, the maps take their place, readers' caches are
 * invalidated. Places that a commit may know, though the maps do not have them (one that failed, and
 * of which a crash may yet bring back either side), stay taken until the next commit has succeeded. If the catalog cannot be read nothing is dropped, a torn state stays torn, and a
 * later attempt may succeed. The same if a reader keeps a lease: all else stands still meanwhile,
 * so it is not waited for long.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/blockmap.h"
#include "engine/engine_impl.h"

struct revert {
	struct engine *e;
	bool all;
	void (*done)(void *arg, int res);
	void *arg;
	struct waiter w;
	struct loop_work work;
	struct loop_timer timer;
	uint64_t patience_ns; /* until then, readers may give back what they lease */
	struct list maps;
	struct freed_list places; /* that a commit knows: live ones and those that were to be freed */
	uint64_t *inos;
	size_t n;
	bool read; /* the maps are here */
	int res;
};

static void revert_end(void *arg)
{
	struct revert *r = arg;

	r->done(r->arg, r->res);
	free(r);
}

static void revert_told(void *arg)
{
	struct revert *r = arg;

	r->e->telling--;
	revert_end(r);
}

static int on_map(void *arg, struct map_copy *map)
{
	struct revert *r = arg;

	list_push_back(&r->maps, &map->link);
	return 0;
}

static void revert_run(struct loop_work *w)
{
	struct revert *r = container_of(w, struct revert, work);

	r->res = catalog_revert(r->e->cat, r->all ? NULL : r->inos, r->n, on_map, r);
}

static void revert_try(struct waiter *w);

static void revert_fail(struct revert *r)
{
	struct engine *e = r->e;

	engine_log(e, ENGINE_LOG_ERROR,
		   "going back to the last commit failed: %s; nothing was dropped, try again",
		   strerror(-r->res));
	map_copies_free(&r->maps);
	free(r->inos);
	e->reverting = false;
	commit_unblock(&e->c);
	ops_unpark(e);
	revert_end(r);
}

static void revert_done(struct loop_work *w)
{
	struct revert *r = container_of(w, struct revert, work);

	r->read = true;
	if (r->res)
		revert_fail(r);
	else
		revert_try(&r->w);
}

/* What the maps have is live again. The rest is freed by a commit that succeeds. */
static void keep_places(struct revert *r)
{
	struct cache *c = &r->e->c;
	bool owed = false;

	for (size_t i = 0; i < r->places.n; i++) {
		const struct freed *fr = &r->places.v[i];
		struct file *f = file_find(c, fr->ino);
		struct slot *s = f ? file_slot(f, fr->n) : NULL;

		if (s && s->live.off == fr->off.o) {
			slot_take_tail(c, s, fr->tail);
			continue;
		}
		owed = true;
		freed_push(c, f ? &f->frees : &c->orphans, *fr);
		if (f)
			file_changed(c, f);
	}
	freed_fini(c, &r->places);
	if (owed)
		commit_owes(c);
}

/* The committed maps in place of what was forgotten. */
static void revert_load(struct revert *r)
{
	struct engine *e = r->e;
	struct cache *c = &e->c;
	struct commit_info ci;

	commit_get_info(c, &ci);
	while (!list_empty(&r->maps)) {
		struct map_copy *m = list_first(&r->maps, struct map_copy, link);
		/* Without a map, one that nobody has used needs no structure. */
		struct file *f = m->n ? file_get(c, m->ino) : file_find(c, m->ino);
		struct ns_attr a;

		list_remove(&m->link);
		if (ns_getattr(c->ns, m->ino, &a))
			a = (struct ns_attr){0};
		if (!f && m->n && a.nlink && !r->res)
			r->res = -ENOMEM;
		if (f && !r->res) {
			f->generated = a.flags & NS_GENERATED;
			f->size = m->size;
			r->res = file_load_map(c, f, m, ci.seq);
			file_publish(c, f, false);
		}
		free(m);
	}
	keep_places(r);
	for (size_t i = 0; i < r->n; i++) {
		struct file *f = file_find(c, r->inos[i]);

		struct ns_attr a;

		if (!f) {
			ns_hold(c->ns, r->inos[i], false); /* a directory */
			continue;
		}
		/* No commit has it, and no name leads to it: who has it open is told that it is gone. */
		if (ns_getattr(c->ns, f->ino, &a) || a.nlink == 0)
			f->lost = true;
		if (f->held) {
			file_hold(c, f, false);
			if (!f->session) { /* its session died */
				ns_unregister(c->ns, f->ino);
				file_unkeep(c, f, 0);
			}
		}
	}
	free(r->inos);
	e->torn = false;
	e->open_step = STEP_NONE;
	session_reverted(e);
	if (e->plain) {
		e->plain = false;
		commit_unblock(c);
	}
	commit_set_boundary(c, ci.step);
	if (r->res) { /* what could not be loaded reads as zeros, which must never be stored */
		engine_log(e, ENGINE_LOG_ERROR,
			   "going back to the last commit: %s; unmount and mount again",
			   strerror(-r->res));
		commit_refuse(c, r->res,
			      "a rollback could not load what is stored: mount again");
	}
	e->reverting = false;
	commit_unblock(c);
	bracket_over(e);
	ops_unpark(e);
	e->telling++;
	engine_invalidate(e, revert_told, r);
}

/*
 * The affected files, one after another: all there are, or the held ones, of which there is a list,
 * so that the end of one session's step does not look at every file. Start with NULL and 0.
 */
static struct file *next_file(const struct revert *r, struct file *f, size_t *pos)
{
	struct cache *c = &r->e->c;
	struct list *l = f ? f->held_link.next : c->held.next;

	if (r->all)
		return file_next(c, pos);
	return l == &c->held ? NULL : list_entry(l, struct file, held_link);
}

/* Drops what no commit knows, and notes the places of the rest. The files' blocks are settled. */
static void forget(struct revert *r)
{
	struct cache *c = &r->e->c;
	struct file *f = NULL;
	size_t pos = 0;

	while ((f = next_file(r, f, &pos))) {
		struct slot *s;

		ns_stale(c->ns, f->ino, NS_STALE_ATTR | NS_STALE_DATA);
		for (uint32_t i = 0; (s = file_slot_next(f, &i)); i++) {
			if (s->b)
				block_drop(s->b);
			if (!f->session)
				s->keep = false;
			slot_drop_live(c, f, s, i);
			slot_trim(c, s);
			slot_account(c, f, i);
		}
		freed_move(c, &r->places, &f->frees);
		list_remove(&f->changed_link);
		slots_unmark(f, UINT32_MAX);
		f->changed = f->touched = f->stepped = false;
	}
	if (r->all) {
		freed_move(c, &r->places, &c->orphans);
		atomic_store(&c->step_names, false);
	}
}

/* What the catalog is asked for: the files and the directories that have their step counts. */
static int collect(struct revert *r)
{
	struct cache *c = &r->e->c;
	struct file *f = NULL;
	struct ns_attr a;
	size_t n = 0, pos = 0;

	while ((f = next_file(r, f, &pos)))
		n++;
	r->inos = calloc(n ? 2 * n : 1, sizeof(*r->inos));
	if (!r->inos)
		return -ENOMEM;
	pos = 0;
	while ((f = next_file(r, f, &pos))) {
		r->inos[r->n++] = f->ino;
		/* One that has lost its name, and is open, is in no directory. */
		if (!r->all && ns_getattr(c->ns, f->ino, &a) == 0 && a.nlink && a.parent != NS_ROOT)
			r->inos[r->n++] = a.parent;
	}
	return 0;
}

/* True: a block is busy, the waiter will be woken. */
static bool wait_idle(struct revert *r)
{
	struct file *f = NULL;
	size_t pos = 0;

	while ((f = next_file(r, f, &pos)))
		if (!file_settle(&r->e->c, f, 0, UINT32_MAX, &r->w))
			return true;
	return false;
}

static void revert_try(struct waiter *w)
{
	struct revert *r = container_of(w, struct revert, w);
	struct engine *e = r->e;
	struct cache *c = &e->c;

	if (session_lessee(e, !r->all)) {
		if (loop_now_ns() < r->patience_ns) {
			loop_timer_set(e->loop, &r->timer, 1000000);
			return;
		}
		r->res = -EBUSY;
		revert_fail(r);
		return;
	}
	if (commit_running(&e->c)) {
		commit_when_idle(&e->c, &r->w);
		return;
	}
	if (!r->read) {
		r->work.run = revert_run;
		r->work.done = revert_done;
		r->res = collect(r);
		if (r->res)
			revert_done(&r->work);
		else
			loop_work(e->loop, &r->work);
		return;
	}
	/* Nobody may see the maps empty in between: who waits for memory is served afterwards. */
	cache_quiet(c);
	if (!wait_idle(r)) {
		forget(r);
		revert_load(r);
	}
	cache_loud(c);
}

static void revert_again(struct loop_timer *t)
{
	revert_try(&container_of(t, struct revert, timer)->w);
}

void engine_revert(struct engine *e, bool all, void (*done)(void *arg, int res), void *arg)
{
	struct revert *r = calloc(1, sizeof(*r));

	if (!r) {
		done(arg, -ENOMEM);
		return;
	}
	r->e = e;
	r->all = all;
	r->done = done;
	r->arg = arg;
	r->w.wake = revert_try;
	r->timer.fire = revert_again;
	r->patience_ns = loop_now_ns() + PATIENCE_NS;
	list_init(&r->timer.link);
	list_init(&r->w.link);
	list_init(&r->work.link);
	list_init(&r->maps);
	e->reverting = true;
	commit_block(&e->c);
	cache_prefetch_clear(&e->c);
	revert_try(&r->w);
}
