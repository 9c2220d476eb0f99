/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A small team of helper threads for one loop at a time.
 *
 * Why not OpenMP: libgomp's threads spin for milliseconds after each parallel region. Updates come
 * one block at a time, a fraction of a millisecond each, so they would spin all through a step, on
 * the cores that the caller's own pool, the I/O threads and the hashing want, and nothing in
 * OpenMP's interface turns that off for one library (OMP_WAIT_POLICY is the whole process's and
 * read at load). A region also ends in a barrier for threads that came too late to be of use, hangs
 * in a forked child, and is opaque to ThreadSanitizer.
 *
 * How: the caller posts a job under the lock, wakes helpers and begins at once. Pieces are claimed
 * by an atomic counter. A helper joins a job under the lock while it is posted; the caller, when no
 * piece is left, takes the job back under the lock and waits only for helpers that have joined. One
 * that wakes up later finds no job and sleeps on. So a wake-up that takes long costs help, never
 * time.
 *
 * Owners: everything in `team` is under team.lock, except job->next. The job is on the caller's
 * stack and not touched by helpers after they have left it. team.busy is the one caller's claim on
 * the helpers. Helpers live until the library is unloaded or the process exits. fork() runs with
 * the lock held, and the child starts with no helpers.
 */
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <unistd.h>

#include "adam/team.h"

#define TEAM_MAX 256

struct job {
	void (*fn)(void *arg, unsigned int piece);
	void *arg;
	unsigned int pieces;
	atomic_uint next;
};

static struct {
	pthread_mutex_t lock;
	pthread_cond_t work; /* a job was posted, or stop */
	pthread_cond_t idle; /* the last helper left a job */
	struct job *job;
	int wanted;  /* how many more helpers may join the job */
	int working; /* how many are in it */
	int helpers;
	bool busy, stop, fork_handled;
	pthread_t thread[TEAM_MAX];
} team = {
	.lock = PTHREAD_MUTEX_INITIALIZER,
	.work = PTHREAD_COND_INITIALIZER,
	.idle = PTHREAD_COND_INITIALIZER,
};

static void run_pieces(struct job *job)
{
	unsigned int piece;

	/* Relaxed: what pieces write is published by the lock, taken when a thread leaves the job.
	 */
	while ((piece = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed)) <
	       job->pieces)
		job->fn(job->arg, piece);
}

static void *helper(void *unused)
{
	(void)unused;
	pthread_mutex_lock(&team.lock);
	while (!team.stop) {
		struct job *job = team.job;

		if (!job || team.wanted == 0) {
			pthread_cond_wait(&team.work, &team.lock);
			continue;
		}
		team.wanted--;
		team.working++;
		pthread_mutex_unlock(&team.lock);
		run_pieces(job);
		pthread_mutex_lock(&team.lock);
		if (--team.working == 0)
			pthread_cond_signal(&team.idle);
	}
	pthread_mutex_unlock(&team.lock);
	return NULL;
}

static void fork_prepare(void)
{
	pthread_mutex_lock(&team.lock);
}

static void fork_parent(void)
{
	pthread_mutex_unlock(&team.lock);
}

/* Only the thread that forked is here. It was not in a job: it holds the lock, which no job's code
 * takes. */
static void fork_child(void)
{
	pthread_mutex_init(&team.lock, NULL);
	pthread_cond_init(&team.work, NULL);
	pthread_cond_init(&team.idle, NULL);
	team.job = NULL;
	team.wanted = team.working = team.helpers = 0;
	team.busy = team.stop = false;
}

/* As many helpers as wanted, or as can be had. They take no signals: those are the caller's. */
static void start_helpers_locked(int count)
{
	sigset_t all, saved;

	if (count > TEAM_MAX)
		count = TEAM_MAX;
	if (team.helpers >= count)
		return;
	if (!team.fork_handled && pthread_atfork(fork_prepare, fork_parent, fork_child) != 0)
		return;
	team.fork_handled = true;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &saved);
	while (team.helpers < count &&
	       pthread_create(&team.thread[team.helpers], NULL, helper, NULL) == 0)
		pthread_setname_np(team.thread[team.helpers++], "moment-kernel");
	pthread_sigmask(SIG_SETMASK, &saved, NULL);
}

void team_run(int nthreads, void (*fn)(void *arg, unsigned int piece), void *arg,
	      unsigned int pieces)
{
	struct job job = {.fn = fn, .arg = arg, .pieces = pieces};
	bool alone = nthreads < 2 || pieces < 2;
	int cancel;

	/* A wait is where a thread could be cancelled, and would take the helpers with it. */
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
	if (!alone) {
		int helpers = (unsigned int)nthreads < pieces ? nthreads - 1 : (int)pieces - 1;

		pthread_mutex_lock(&team.lock);
		alone = team.busy || team.stop;
		if (!alone) {
			team.busy = true;
			start_helpers_locked(helpers);
			team.job = &job;
			team.wanted = helpers;
			for (int i = 0; i < helpers && i < team.helpers; i++)
				pthread_cond_signal(&team.work);
		}
		pthread_mutex_unlock(&team.lock);
	}
	run_pieces(&job);
	if (!alone) {
		pthread_mutex_lock(&team.lock);
		team.job = NULL;
		team.wanted = 0;
		while (team.working > 0)
			pthread_cond_wait(&team.idle, &team.lock);
		team.busy = false;
		pthread_mutex_unlock(&team.lock);
	}
	pthread_setcancelstate(cancel, NULL);
}

int team_default_size(void)
{
	cpu_set_t allowed;
	long online;

	if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0)
		return CPU_COUNT(&allowed) > 0 ? CPU_COUNT(&allowed) : 1;
	online = sysconf(_SC_NPROCESSORS_ONLN); /* more than a cpu_set_t holds */
	return online > 0 ? (int)online : 1;
}

__attribute__((destructor)) static void stop_helpers(void)
{
	int helpers;

	pthread_mutex_lock(&team.lock);
	team.stop = true;
	helpers = team.helpers;
	team.helpers = 0;
	pthread_cond_broadcast(&team.work);
	pthread_mutex_unlock(&team.lock);
	for (int i = 0; i < helpers; i++)
		pthread_join(team.thread[i], NULL);
}
