/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bracket.c - whose the plain step is that is open (.moment/step), and who has to do with it.
 *
 * It belongs to the process that wrote `begin`: a shell opens the file anew for each line, so the
 * handle says nothing. The process is watched by a pidfd, and when it ends before the step does, the
 * step is torn. A process in a pid namespace that this one cannot see has no number here; then the
 * handle that brought `begin` stands for it, and the step is torn when that is released.
 *
 * What the process changes, and those that it has started, is the step's. Somebody else is known as
 * such only if he has a number and his parents lead past the owner; pages that come back from
 * mappings have no number, so they are the step's, too (engine.h: op.foreign).
 *
 * The owner is set and cleared on the loop thread; receive threads look at it.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/daemon.h"

#define DEPTH 64 /* of parents */

/* The process that a thread belongs to, and that one's parent. */
static bool look_up(pid_t tid, pid_t *tgid, pid_t *ppid)
{
	char path[64], line[256];
	int got = 0, v;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/status", (int)tid);
	f = fopen(path, "re");
	while (f && got < 2 && fgets(line, sizeof(line), f)) {
		if (sscanf(line, "Tgid: %d", &v) == 1) {
			*tgid = v;
			got++;
		} else if (sscanf(line, "PPid: %d", &v) == 1) {
			*ppid = v;
			got++;
		}
	}
	if (f)
		fclose(f);
	return got == 2;
}

static bool descends(pid_t tid, pid_t owner)
{
	pid_t tgid, ppid;

	for (int i = 0; i < DEPTH && tid > 0 && look_up(tid, &tgid, &ppid); i++, tid = ppid)
		if (tgid == owner)
			return true;
	return false;
}

bool bracket_foreign(struct daemon *d, pid_t tid, bool unknown_is_foreign)
{
	pid_t owner = atomic_load(&d->bracket.owner);

	if (owner == BRACKET_NONE)
		return false;
	if (owner == BRACKET_UNKNOWN)
		return tid > 0;
	return tid > 0 ? !descends(tid, owner) : unknown_is_foreign;
}

void bracket_name(fuse_req_t req)
{
	struct daemon *d = daemon_of(req);

	if (atomic_load(&d->bracket.owner) != BRACKET_NONE &&
	    !bracket_foreign(d, fuse_req_ctx(req)->pid, false))
		engine_step_names(d->e);
}

/* ---- its end ---- */

static void tear_done(struct engine_op *op)
{
	free(op);
}

static void tear(struct daemon *d, uint64_t step)
{
	struct engine_op *op = calloc(1, sizeof(*op));

	if (!op) {
		log_warning("no memory to note that the writer of step %llu has ended",
			    (unsigned long long)step);
		return;
	}
	op->kind = ENGINE_STEP_TEAR;
	op->arg = step;
	op->done = tear_done;
	engine_submit(d->e, op);
}

void bracket_ended(struct daemon *d)
{
	struct bracket *b = &d->bracket;

	atomic_store(&b->owner, BRACKET_NONE);
	atomic_store(&b->handle, NULL);
	if (b->watch.fd < 0)
		return;
	loop_unwatch(engine_loop(d->e), &b->watch);
	close(b->watch.fd);
	b->watch.fd = -1;
}

static void owner_gone(struct loop_watch *w, uint32_t events)
{
	struct daemon *d = container_of(w, struct daemon, bracket.watch);

	(void)events;
	bracket_ended(d);
	tear(d, d->bracket.step);
}

void bracket_released(struct daemon *d, const struct text *t)
{
	if (t && atomic_load(&d->bracket.handle) == t)
		tear(d, atomic_load(&d->bracket.step));
}

/* ---- its beginning ---- */

pid_t bracket_owner(pid_t tid)
{
	pid_t tgid, ppid;

	return tid > 0 && look_up(tid, &tgid, &ppid) ? tgid : BRACKET_UNKNOWN;
}

void bracket_began(struct daemon *d, pid_t owner, const struct text *handle, uint64_t step)
{
	struct bracket *b = &d->bracket;
	int fd = owner > 0 ? (int)syscall(SYS_pidfd_open, owner, 0) : -1;
	bool gone = owner > 0 && fd < 0 && errno == ESRCH;

	bracket_ended(d);
	atomic_store(&b->step, step);
	b->watch = (struct loop_watch){.fd = fd, .events = EPOLLIN, .ready = owner_gone};
	list_init(&b->watch.link);
	if (fd >= 0 && loop_watch(engine_loop(d->e), &b->watch) < 0) {
		close(fd);
		b->watch.fd = -1;
	}
	if (gone)
		tear(d, step);
	if (b->watch.fd < 0)
		atomic_store(&b->handle, handle);
	atomic_store(&b->owner, owner);
}

static void stop(void *arg)
{
	bracket_ended(arg);
}

void bracket_stop(struct daemon *d)
{
	loop_call(engine_loop(d->e), stop, d);
}
