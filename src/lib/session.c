/* SPDX-License-Identifier: Apache-2.0 */
/*
 * session.c - the life of a session: opening, closing, forks, commits.
 *
 * All sessions of the process are in one list, so that the fork handlers can find them. The child
 * handler only marks sessions and closes descriptors; the engine's threads do not exist in the
 * child and its locks may be held for ever, so there nothing else is ever touched, not even to free
 * it.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/cpus.h"
#include "lib/error.h"
#include "lib/fsize.h"
#include "lib/session.h"

#define THREADS_MAX 1024

static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;
static struct moment_session *all;
static pthread_once_t all_once = PTHREAD_ONCE_INIT;

static void fork_prepare(void)
{
	pthread_mutex_lock(&all_lock);
}

static void fork_parent(void)
{
	pthread_mutex_unlock(&all_lock);
}

static void fork_child(void)
{
	struct moment_session *s;

	for (s = all; s; s = s->next) {
		if (s->forked)
			continue;
		s->forked = true;
		s->path->ops->forked(s->path);
		temp_forked(&s->temp);
	}
	pthread_mutex_unlock(&all_lock);
}

static void fork_watch(void)
{
	pthread_atfork(fork_prepare, fork_parent, fork_child);
}

int session_enter(struct moment_session *s)
{
	if (!s)
		return err_set(-EINVAL, "no session");
	if (s->forked || s->pid != getpid())
		return err_set(
			-EINVAL,
			"this session belongs to process %d; a forked child (%d) cannot use it: open "
			"one of its own",
			(int)s->pid, (int)getpid());
	pthread_mutex_lock(&s->lock);
	return 0;
}

static void message_stderr(void *arg, enum moment_message kind, const char *text)
{
	const char *quiet = getenv("MOMENT_QUIET");

	(void)arg;
	if (kind == MOMENT_NOTICE && quiet && quiet[0] && strcmp(quiet, "0") != 0)
		return;
	fprintf(stderr, "moment: %s%s\n", kind == MOMENT_WARNING ? "warning: " : "", text);
}

void session_say(struct moment_session *s, enum moment_message kind, const char *fmt, ...)
{
	char text[2048];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	s->message(s->message_arg, kind, text);
}

/*
 * Threads to compute with, where the options name none. What is written in MOMENT_THREADS is meant
 * for us, so it is a number or an error; OMP_NUM_THREADS may hold what only OpenMP understands.
 * Ranks that torchrun started on this machine share its CPUs.
 */
static int default_threads(void)
{
	const char *own = getenv("MOMENT_THREADS"), *omp = getenv("OMP_NUM_THREADS");
	const char *ranks = getenv("LOCAL_WORLD_SIZE");
	long n;
	char *end;

	if (own && *own) {
		n = strtol(own, &end, 10);
		if (*end || n < 1 || n > THREADS_MAX)
			return err_set(-EINVAL,
				       "MOMENT_THREADS=%s: a number of threads from 1 to %d, or "
				       "unset it: as many as this process may use CPUs",
				       own, THREADS_MAX);
		return (int)n;
	}
	n = omp ? strtol(omp, NULL, 10) : 0;
	if (n > 0 && n <= THREADS_MAX)
		return (int)n;
	n = ranks ? strtol(ranks, NULL, 10) : 1;
	n = (long)cpus_available() / (n > 0 ? n : 1);
	return n > 0 ? (int)n : 1;
}

static int opts_check(const struct moment_open_opts *o)
{
	uint32_t known = MOMENT_OPEN_RESUME | MOMENT_OPEN_FRESH | MOMENT_OPEN_NEW_OK |
			 MOMENT_OPEN_READONLY | MOMENT_OPEN_NO_HINTS;

	if (!o || o->size != sizeof(*o))
		return err_set(-EINVAL,
			       "moment_open_opts.size is %u, and this library's is %zu: set it to sizeof(struct "
			       "moment_open_opts), and build the program with this library's moment.h",
			       o ? o->size : 0, sizeof(*o));
	if (o->flags & ~known)
		return err_set(-EINVAL, "unknown flags %#x", o->flags & ~known);
	if ((o->flags & MOMENT_OPEN_RESUME) && (o->flags & MOMENT_OPEN_FRESH))
		return err_set(-EINVAL, "resume and fresh exclude each other");
	if (o->mount && o->backing)
		return err_set(-EINVAL, "give a mount point or a backing directory, not both");
	if (o->threads < 0 || o->threads > THREADS_MAX)
		return err_set(-EINVAL, "%d threads: from 1 to %d, or 0 for the default",
			       o->threads, THREADS_MAX);
	return 0;
}

static void session_free(struct moment_session *s)
{
	listed_free(s);
	params_free(s);
	ahead_free(s);
	pthread_mutex_destroy(&s->lock);
	free(s);
}

static void session_forget(struct moment_session *s)
{
	struct moment_session **at;

	pthread_mutex_lock(&all_lock);
	for (at = &all; *at; at = &(*at)->next) {
		if (*at == s) {
			*at = s->next;
			break;
		}
	}
	pthread_mutex_unlock(&all_lock);
}

int moment_open(const struct moment_open_opts *o, struct moment_session **out)
{
	struct moment_session *s;
	const char *hints = getenv("MOMENT_HINTS");
	struct fsize_guard limit;
	int res = opts_check(o);
	int threads;

	if (res < 0)
		return res;
	threads = o->threads ? o->threads : default_threads();
	if (threads < 0)
		return threads;
	s = calloc(1, sizeof(*s));
	if (!s)
		return err_set(-ENOMEM, "out of memory");
	s->pid = getpid();
	pthread_mutex_init(&s->lock, NULL);
	s->temp.lock = -1;
	s->flags = o->flags;
	s->message = o->message ? o->message : message_stderr;
	s->message_arg = o->message_arg;
	s->hints = !(o->flags & MOMENT_OPEN_NO_HINTS) && !(hints && strcmp(hints, "off") == 0);
	s->threads = threads;
	s->last_step = MOMENT_STEP_NONE;

	/* Registered before the path exists in full would let a fork see half of it: so the other
	 * way round, and a fork during moment_open() leaves the child a few descriptors. */
	pthread_once(&all_once, fork_watch);
	fsize_enter(&limit);
	res = fsize_leave(&limit, where_open(o, s));
	if (res < 0)
		goto out_temp;
	pthread_mutex_lock(&all_lock);
	s->next = all;
	all = s;
	pthread_mutex_unlock(&all_lock);

	res = listed_load(s);
	if (res < 0)
		goto out_path;
	if (s->path->rolled_back != MOMENT_STEP_NONE)
		session_say(
			s, MOMENT_NOTICE,
			"%s: step %llu was interrupted and is dropped; the state is that of the last commit",
			s->path->backing, (unsigned long long)s->path->rolled_back);
	*out = s;
	return 0;
out_path:
	session_forget(s);
	s->path->ops->close(s->path, false);
out_temp:
	temp_remove(&s->temp);
	session_free(s);
	return res;
}

int moment_close(struct moment_session *s)
{
	struct fsize_guard limit;
	int res;

	if (!s)
		return 0;
	if (s->forked || s->pid != getpid())
		return 0; /* what is shared with the parent must not be freed by us */
	session_forget(s);
	pthread_mutex_lock(&s->lock);
	fsize_enter(&limit);
	res = s->path->ops->close(s->path, !s->temp.dir && s->state == STEP_NONE);
	fsize_leave(&limit, 0);
	pthread_mutex_unlock(&s->lock);
	if (res < 0)
		err_write("the last commit failed: %s", err_name(res));
	temp_remove(&s->temp);
	session_free(s);
	return res;
}

struct param *session_param(struct moment_session *s, uint32_t handle)
{
	if (handle >= s->n_params || s->param[handle].dead) {
		err_write("parameter %u is not registered (%u are)", handle, s->n_params);
		return NULL;
	}
	return &s->param[handle];
}

const char *moment_data_path(const struct moment_session *s)
{
	return s ? s->path->ops->name : "";
}

const char *moment_version(void)
{
	static char text[64];
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

	pthread_mutex_lock(&lock);
	if (!text[0])
		snprintf(text, sizeof(text), "momentfs %s, %s", PACKAGE_VERSION,
			 moment_simd_level());
	pthread_mutex_unlock(&lock);
	return text;
}

int moment_get_info(struct moment_session *s, struct moment_info *info)
{
	int res = session_enter(s);

	if (res < 0)
		return res;
	*info = (struct moment_info){
		.data_path = s->path->ops->name,
		.mount = s->path->mount,
		.backing = s->path->backing,
		.holder_pid = s->path->holder_pid,
		.block = s->path->block,
		.ram = s->path->ram,
		.quota = s->path->quota,
		.window = s->path->window,
		.rolled_back = s->path->rolled_back,
		.threads = s->threads,
		.temporary = s->temp.dir != NULL,
		.hints = s->hints,
	};
	res = s->path->ops->info(s->path, info);
	info->reserved_bytes = s->path->reserved;
	info->free_bytes = s->path->free;
	return session_leave(s, res);
}

/* ---- commits ---------------------------------------------------------------------------- */

static int torn(struct moment_session *s, const char *what)
{
	return err_set(
		-ESTALE,
		"%s: step %llu failed part-way and its state is torn; moment_rollback() returns it to the last "
		"commit (the weights are yours to restore)",
		what, (unsigned long long)s->open_step);
}

int moment_commit(struct moment_session *s, int wait)
{
	int res = session_enter(s);

	if (res < 0)
		return res;
	if (s->state == STEP_TORN)
		res = torn(s, "cannot commit");
	else if (wait && s->state == STEP_OPEN)
		res = err_set(-EBUSY, "step %llu is open: end it, then wait for a commit",
			      (unsigned long long)s->open_step);
	else
		res = s->path->ops->commit(s->path, wait);
	return session_leave(s, res);
}

int moment_committed_step(struct moment_session *s, uint64_t *step)
{
	struct moment_info info = {.committed_step = MOMENT_STEP_NONE};
	int res = session_enter(s);

	if (res < 0)
		return res;
	res = s->path->ops->info(s->path, &info);
	if (res == 0)
		*step = info.committed_step;
	return session_leave(s, res);
}

int moment_rollback(struct moment_session *s)
{
	struct moment_info info = {.committed_step = MOMENT_STEP_NONE};
	int res = session_enter(s);

	if (res < 0)
		return res;
	res = s->path->ops->rollback(s->path);
	if (res == 0)
		res = s->path->ops->info(s->path, &info);
	if (res == 0) {
		s->state = STEP_NONE;
		s->last_step = info.committed_step;
		ahead_reset(s);
		res = params_reload(s);
	}
	return session_leave(s, res);
}
