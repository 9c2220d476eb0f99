/* SPDX-License-Identifier: Apache-2.0 */
/*
 * report.c - what went wrong, for status (each one) and for the log (not each one).
 *
 * Loop thread. A drive that fails, or is full, fails for every block at once: of errors that are
 * alike the first few are lines of the log, the others become one line with their number.
 */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "engine/engine_impl.h"

#define REPEAT_NS   10000000000ull /* what is said within so long is said together */
#define REPEAT_FEW  3u		   /* are said one by one */

void report_flush(struct engine *e)
{
	for (unsigned int i = 0; i < REPORT_KINDS; i++) {
		struct report_kind *k = &e->kinds[i];

		if (k->n > REPEAT_FEW)
			engine_log(e, ENGINE_LOG_ERROR, "%s: %s: %llu more within %llu s, the last %s%s",
				   k->what, strerror(-k->err),
				   (unsigned long long)(k->n - REPEAT_FEW),
				   (unsigned long long)(REPEAT_NS / 1000000000ull),
				   k->path[0] ? "of " : "as before", k->path);
		k->n = 0;
	}
	loop_timer_clear(e->loop, &e->repeat);
}

static void repeat_fire(struct loop_timer *t)
{
	report_flush(container_of(t, struct engine, repeat));
}

/* True: it is counted, and its kind has been said often enough. */
static bool repeated(struct engine *e, const struct engine_error *x)
{
	struct report_kind *k = NULL, *free_one = NULL;

	for (unsigned int i = 0; i < REPORT_KINDS && !k; i++) {
		if (!e->kinds[i].n)
			free_one = free_one ? free_one : &e->kinds[i];
		else if (e->kinds[i].err == x->err && !strcmp(e->kinds[i].what, x->what))
			k = &e->kinds[i];
	}
	if (!k && !free_one)
		return false;
	if (!k) {
		k = free_one;
		*k = (struct report_kind){.err = x->err};
		snprintf(k->what, sizeof(k->what), "%s", x->what);
	}
	snprintf(k->path, sizeof(k->path), "%s", x->path);
	if (!list_linked(&e->repeat.link)) {
		e->repeat.fire = repeat_fire;
		loop_timer_set(e->loop, &e->repeat, REPEAT_NS);
	}
	return ++k->n > REPEAT_FEW;
}

void engine_report(struct engine *e, int err, uint64_t ino, uint64_t off, uint64_t len,
		   const char *what)
{
	struct engine_error *x = &e->errors[e->nerrors++ % ENGINE_ERRORS];
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	memset(x, 0, sizeof(*x));
	x->time_ns = (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
	x->ino = ino;
	x->off = off;
	x->len = len;
	x->err = err;
	x->step = e->open_step != STEP_NONE ? e->open_step : commit_boundary(&e->c);
	snprintf(x->what, sizeof(x->what), "%s", what);
	if (ino && ns_path(e->c.ns, ino, x->path, sizeof(x->path)))
		snprintf(x->path, sizeof(x->path), "(removed file, inode %llu)",
			 (unsigned long long)ino);
	if (repeated(e, x))
		return;
	if (ino)
		engine_log(e, ENGINE_LOG_ERROR, "%s: %s at offset %llu, %llu bytes: %s", x->path,
			   what, (unsigned long long)off, (unsigned long long)len, strerror(-err));
	else
		engine_log(e, ENGINE_LOG_ERROR, "%s: %s", what, strerror(-err));
}
