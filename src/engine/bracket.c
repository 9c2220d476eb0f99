/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bracket.c - the step of a plain writer: `begin` and `end` through .moment/step.
 *
 * A plain writer has no files of its own, so from begin to end no commit starts at all. What asks for
 * one meanwhile: the writer's own fsync is noted and answered at once, for the writer could not get
 * to its end otherwise, and then the end is answered when all is durable. Somebody else's fsync
 * waits for the end; of a file that the step has changed it is refused at once, and any other after
 * WAIT_NS, for the kernel holds the file's lock meanwhile and the writer may need just that.
 *
 * The step is what the writer (and whoever it started, and whoever is not known: op.foreign is false)
 * has changed: bytes of files (file.stepped) and names (step_names). A writer that dies inside it
 * leaves a torn step. If it has changed nothing, that is all. Else the files that were changed in a
 * step since the last commit are held, as those of a dead session are: commits leave them out, and
 * they go back to the last commit as soon as nobody has one open for writing. If the step changed
 * names, files that it made have taken the place of others; then everything goes back.
 *
 * Loop thread only, but for engine_step_names().
 */
#include <errno.h>
#include <string.h>

#include "engine/ops_impl.h"

#define WAIT_NS 10000000000ull
#define LOOK_NS 100000000ull

/* ---- who waits for the end ---- */

static void wait_over(struct loop_timer *t)
{
	struct op_run *r = container_of(t, struct op_run, timer);

	op_end(r->op, -EBUSY);
}

static void ask_again(struct op_run *r)
{
	struct engine *e = r->e;
	struct engine_op *op = r->op;

	run_free(r);
	op->run = NULL;
	op_sync(e, op);
}

int bracket_sync(struct engine *e, struct engine_op *op, const struct file *f)
{
	struct op_run *r;

	if (!e->plain)
		return f && f->held && e->torn ? -ESTALE : 1;
	if (e->torn)
		return -ESTALE;
	if (!op->foreign) {
		e->sync_at_end = true;
		return 0;
	}
	if (f && f->stepped)
		return -EBUSY;
	r = run_new(e, op, 0);
	if (!r)
		return -ENOMEM;
	r->resume = ask_again;
	r->timer.fire = wait_over;
	list_push_back(&e->bracket_waits, &r->w.link);
	loop_timer_set(e->loop, &r->timer, WAIT_NS);
	return 2;
}

void bracket_over(struct engine *e)
{
	struct list todo;

	list_init(&todo);
	list_splice_back(&todo, &e->bracket_waits);
	while (!list_empty(&todo)) {
		struct op_run *r = list_first(&todo, struct op_run, w.link);

		list_remove(&r->w.link);
		r->resume(r);
	}
}

/* ---- what the step changes ---- */

void bracket_changes(struct engine *e, struct file *f, const struct engine_op *op)
{
	if (!e->plain || (op && op->foreign))
		return;
	f->stepped = true;
	e->step_changed = true;
}

void engine_step_names(struct engine *e)
{
	atomic_store(&e->names_in_step, true);
	atomic_store(&e->c.step_names, true);
}

/* ---- torn ---- */

static void look(struct loop_timer *t);

static void reverted(void *arg, int res)
{
	struct engine *e = arg;

	if (res) { /* a reader's leases, or the catalog cannot be read: once more */
		loop_timer_set(e->loop, &e->torn_timer, 10 * LOOK_NS);
		return;
	}
	engine_log(e, ENGINE_LOG_NOTICE, "the torn step is undone: its files are at the last commit");
}

/* Pages that somebody may still store would come over what goes back. */
static bool open_for_writing(struct engine *e)
{
	struct cache *c = &e->c;

	if (e->plain)
		return ns_open_writers_total(c->ns);
	list_for_each(l, &c->changed)
	{
		struct file *f = list_entry(l, struct file, changed_link);

		if (f->held && ns_open_writers(c->ns, f->ino))
			return true;
	}
	return false;
}

static void look(struct loop_timer *t)
{
	struct engine *e = container_of(t, struct engine, torn_timer);

	if (!e->torn || e->closing) /* somebody has rolled back */
		return;
	if (e->reverting || e->writer || open_for_writing(e))
		loop_timer_set(e->loop, &e->torn_timer, LOOK_NS);
	else
		engine_revert(e, e->plain, reverted, e);
}

static void tear(struct engine *e)
{
	struct cache *c = &e->c;
	bool names = atomic_load(&e->c.step_names);
	unsigned int n = 0;

	if (!e->step_changed && !atomic_load(&e->names_in_step)) {
		engine_log(e, ENGINE_LOG_WARNING,
			   "step %llu was begun, and its process ended before the end; it had changed nothing",
			   (unsigned long long)e->open_step);
		e->open_step = STEP_NONE;
		e->plain = false;
		commit_unblock(c);
		bracket_over(e);
		return;
	}
	e->torn = true;
	list_for_each(l, &c->changed)
	{
		struct file *f = list_entry(l, struct file, changed_link);

		if (!f->stepped)
			continue;
		file_hold(c, f, true);
		n++;
	}
	engine_log(e, ENGINE_LOG_WARNING,
		   "step %llu was begun and not ended: the state is torn; it changed %u files%s go back to "
		   "the last commit as soon as none of %s is open for writing",
		   (unsigned long long)e->open_step, n, names ? " and names, so all files" : ", which",
		   names ? "all" : "these");
	if (!names) {
		e->plain = false;
		commit_unblock(c);
	}
	bracket_over(e);
}

void bracket_close(struct engine *e, char *dropped, size_t len)
{
	struct cache *c = &e->c;
	unsigned long long bytes = 0;
	unsigned int n = 0;

	loop_timer_clear(e->loop, &e->torn_timer);
	if (e->plain && !e->torn)
		tear(e);
	if (!e->torn)
		return;
	list_for_each(l, &c->changed)
	{
		struct file *f = list_entry(l, struct file, changed_link);

		if (!f->held)
			continue;
		n++;
		bytes += f->size;
	}
	if (e->plain)
		snprintf(dropped, len,
			 "step %llu was begun and not ended, and it changed names: all that was not committed "
			 "is dropped; what is on disk is the last commit",
			 (unsigned long long)e->open_step);
	else if (n)
		snprintf(dropped, len,
			 "step %llu was begun and not ended: what changed since the last commit in %u files "
			 "(of %llu bytes) is dropped, they are as they were then",
			 (unsigned long long)e->open_step, n, bytes);
}

/* ---- begin, end ---- */

static void begin(struct engine *e, struct engine_op *op);

/* The commit that was to show whether steps may go on. */
static void begin_tried(struct commit_wait *w, int res)
{
	struct op_run *r = container_of(w, struct op_run, cw);
	struct engine *e = r->e;
	struct engine_op *op = r->op;
	char why[768];

	if (!res) {
		run_free(r);
		op->run = NULL;
		begin(e, op);
		return;
	}
	commit_explain(&e->c, why, sizeof(why));
	op->text = why;
	op_end(op, res);
}

static void begin(struct engine *e, struct engine_op *op)
{
	struct cache *c = &e->c;
	struct op_run *r;

	if (c->readonly || e->open_step != STEP_NONE || e->torn || e->reverting || e->writer) {
		op_end(op, c->readonly ? -EROFS : -EBUSY);
		return;
	}
	if (commit_stalled(c)) {
		r = run_new(e, op, 0);
		if (!r) {
			op_end(op, -ENOMEM);
			return;
		}
		r->cw.done = begin_tried;
		commit_request(c, &r->cw);
		return;
	}
	e->open_step = op->arg;
	e->plain = true;
	e->step_changed = e->sync_at_end = false;
	atomic_store(&e->names_in_step, false);
	commit_block(c);
	op_end(op, 0);
}

static void end_durable(struct commit_wait *w, int res)
{
	struct op_run *r = container_of(w, struct op_run, cw);
	char why[768];

	if (res) {
		commit_explain(&r->e->c, why, sizeof(why));
		r->op->text = why;
	}
	op_end(r->op, res);
}

static void end(struct engine *e, struct engine_op *op)
{
	struct cache *c = &e->c;
	struct op_run *r;

	if (!e->plain || e->torn || e->open_step != op->arg) {
		op_end(op, -EINVAL);
		return;
	}
	r = e->sync_at_end ? run_new(e, op, 0) : NULL;
	if (e->sync_at_end && !r) {
		op_end(op, -ENOMEM); /* the step is still open */
		return;
	}
	e->open_step = STEP_NONE;
	e->plain = false;
	commit_set_boundary(c, op->arg);
	commit_unblock(c);
	bracket_over(e);
	if (r) {
		r->cw.done = end_durable;
		commit_request(c, &r->cw);
		return;
	}
	commit_maybe(c);
	op_end(op, 0);
}

void op_step(struct engine *e, struct engine_op *op)
{
	if (op->kind == ENGINE_STEP_BEGIN) {
		begin(e, op);
	} else if (op->kind == ENGINE_STEP_END) {
		end(e, op);
	} else if (e->plain && !e->torn && e->open_step == op->arg) {
		tear(e);
		e->torn_timer.fire = look;
		if (e->torn)
			loop_timer_set(e->loop, &e->torn_timer, 1);
		op_end(op, 0);
	} else {
		op_end(op, -EINVAL);
	}
}
