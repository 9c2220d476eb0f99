/* SPDX-License-Identifier: Apache-2.0 */
/*
 * boundary.c - after a step, a registration or a revert, nobody sees what was before: the edge tells
 * the kernel of all that was noted as stale (ns_stale.c), off the loop thread, and says when it is done.
 */
#include <stdlib.h>

#include "engine/engine_impl.h"

struct invalidate {
	struct engine_boundary b;
	struct loop_task task;
	struct engine *e;
	void (*done)(void *arg);
	void *arg;
};

static void invalidate_end(struct loop_task *t)
{
	struct invalidate *v = container_of(t, struct invalidate, task);

	v->done(v->arg);
	free(v);
}

/* The edge's thread. */
static void invalidate_done(struct engine_boundary *b)
{
	struct invalidate *v = container_of(b, struct invalidate, b);

	v->task.run = invalidate_end;
	loop_post(v->e->loop, &v->task);
}

void engine_invalidate(struct engine *e, void (*done)(void *arg), void *arg)
{
	bool any = e->opts.boundary && ns_stale_any(e->c.ns);
	struct invalidate *v = any ? calloc(1, sizeof(*v)) : NULL;

	if (!v) { /* without memory the kernel hears of it the next time */
		done(arg);
		return;
	}
	v->e = e;
	v->done = done;
	v->arg = arg;
	v->b.done = invalidate_done;
	e->opts.boundary(e->opts.arg, &v->b);
}
