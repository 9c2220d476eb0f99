/* SPDX-License-Identifier: Apache-2.0 */
/*
 * boundary.c - after a step or a revert, nobody reads older bytes: the edge drops the kernel's
 * pages of what changed, off the loop thread, and says when it is done.
 */
#include <stdlib.h>

#include "engine/engine_impl.h"

struct invalidate {
	struct engine_boundary b;
	struct loop_task task;
	struct engine *e;
	uint64_t *inos;
	void (*done)(void *arg);
	void *arg;
};

static void invalidate_end(struct loop_task *t)
{
	struct invalidate *v = container_of(t, struct invalidate, task);

	v->done(v->arg);
	free(v->inos);
	free(v);
}

/* The edge's thread. */
static void invalidate_done(struct engine_boundary *b)
{
	struct invalidate *v = container_of(b, struct invalidate, b);

	v->task.run = invalidate_end;
	loop_post(v->e->loop, &v->task);
}

void engine_invalidate(struct engine *e, uint64_t *inos, size_t n, void (*done)(void *arg),
		       void *arg)
{
	struct invalidate *v = n && e->opts.boundary ? calloc(1, sizeof(*v)) : NULL;

	if (!v) {
		free(inos);
		done(arg);
		return;
	}
	v->e = e;
	v->inos = inos;
	v->done = done;
	v->arg = arg;
	v->b = (struct engine_boundary){.inos = inos, .n = n, .done = invalidate_done};
	e->opts.boundary(e->opts.arg, &v->b);
}
