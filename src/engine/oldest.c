/* SPDX-License-Identifier: Apache-2.0 */
/*
 * oldest.c - the request that waits longest, and for what: for status, and for a watchdog.
 *
 * Loop thread only. Ops under way are in engine.runs in the order of their coming, those that came
 * during a revert in engine.parked. A timer looks every WATCH_NS while there are any; of one that has
 * waited for LIMIT_NS it is said once, since a request that nobody wakes is a bug that else shows as
 * a program in state D and no more.
 */
#include <inttypes.h>
#include <stdlib.h>

#include "engine/ops_impl.h"

#ifdef NDEBUG
#define LIMIT_NS 120000000000ull
#else
#define LIMIT_NS 15000000000ull
#endif
#define WATCH_NS (LIMIT_NS / 3)

static const char *kind_name(const struct engine_op *op)
{
	static const char *const names[] = {
		[ENGINE_READ] = "read",		    [ENGINE_WRITE] = "write",
		[ENGINE_TRUNCATE] = "truncate",	    [ENGINE_PUNCH] = "punch",
		[ENGINE_ALLOCATE] = "allocate",	    [ENGINE_SEEK] = "seek",
		[ENGINE_FSYNC] = "fsync",	    [ENGINE_SYNC] = "commit",
		[ENGINE_PREFETCH] = "prefetch",	    [ENGINE_STEP_BEGIN] = "begin of a step",
		[ENGINE_STEP_END] = "end of a step", [ENGINE_ROLLBACK] = "rollback",
		[ENGINE_SCRUB] = "scrub",	    [ENGINE_RESIDENT] = "residency",
	};

	return (size_t)op->kind < sizeof(names) / sizeof(*names) && names[op->kind]
		       ? names[op->kind]
		       : "request";
}

/* The block that a get waits for, or whose place on disk it waits for. */
static const char *block_reason(const struct get *g)
{
	const struct block *b = g->i < g->n ? g->want[g->i].b : NULL;

	if (!b)
		return "a block in use";
	if (b->state == BLOCK_READING)
		return "a block being read";
	if (b->state == BLOCK_WRITING || b->frozen)
		return "a block being written";
	if (b->promised)
		return "a block being filled";
	if (b->writer)
		return "a block that another writes or has leased";
	return "room on the drive";
}

static bool queued(const struct list *l)
{
	return l->next && list_linked(l); /* zeroed: never used */
}

static const char *reason(const struct op_run *r)
{
	if (queued(&r->g.link))
		return "memory in the RAM tier";
	if (queued(&r->g.w.link))
		return block_reason(&r->g);
	if (queued(&r->w.link))
		return "a busy block, or room on the drive";
	if (queued(&r->cw.link))
		return "a commit";
	return "its own work";
}

/* NULL: there is none. */
static const struct engine_op *oldest(const struct engine *e, const char **why)
{
	list_for_each(l, &e->runs)
	{
		const struct op_run *r = list_entry(l, struct op_run, link);

		if (!r->op)
			continue;
		*why = reason(r);
		return r->op;
	}
	if (list_empty(&e->parked))
		return NULL;
	*why = "a rollback";
	return list_first(&e->parked, struct engine_op, link);
}

static void path_of(const struct engine *e, const struct engine_op *op, char *path, size_t len)
{
	if (!op->ino || ns_path(e->c.ns, op->ino, path, len))
		snprintf(path, len, op->ino ? "(a file without a name)" : "-");
}

void oldest_status(struct engine *e, FILE *f)
{
	const char *why;
	const struct engine_op *op = oldest(e, &why);
	char path[300];

	if (!op) {
		fputs("\"oldest_request\":null", f);
		return;
	}
	path_of(e, op, path, sizeof(path));
	fprintf(f, "\"oldest_request\":{\"kind\":\"%s\",\"file\":", kind_name(op));
	status_string(f, path);
	fprintf(f,
		",\"offset\":%" PRIu64 ",\"length\":%" PRIu64
		",\"seconds\":%.3f,\"waits_for\":\"%s\"}",
		op->off, op->len, (double)(loop_now_ns() - op->start_ns) / 1e9, why);
}

static void watch_fire(struct loop_timer *t)
{
	struct engine *e = container_of(t, struct engine, watch);
	const char *why;
	const struct engine_op *op = oldest(e, &why);
	uint64_t now = loop_now_ns();
	char path[300];

	if (!op)
		return; /* armed again by the next one */
	if (now - op->start_ns >= LIMIT_NS && op->id != e->watched) {
		e->watched = op->id;
		path_of(e, op, path, sizeof(path));
		engine_log(e, ENGINE_LOG_WARNING,
			   "a %s (%s, %" PRIu64 " bytes at %" PRIu64
			   ") has waited for %.0f seconds; it waits for %s",
			   kind_name(op), path, op->len, op->off,
			   (double)(now - op->start_ns) / 1e9, why);
	}
	loop_timer_set(e->loop, t, WATCH_NS);
}

void oldest_watch(struct engine *e)
{
	if (queued(&e->watch.link))
		return;
	e->watch.fire = watch_fire;
	loop_timer_set(e->loop, &e->watch, WATCH_NS);
}
