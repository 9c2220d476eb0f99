/* SPDX-License-Identifier: Apache-2.0 */
/*
 * loop.c - the loop thread, its inbox, and the work threads.
 *
 * The loop waits in one place, epoll, on the inbox's eventfd, the io's descriptor and the watched
 * ones. One turn: run what was posted, reap io, run watches and timers, then kick io once,
 * so that whatever the turn submitted goes to the kernel together.
 *
 * The inbox is two lock-free stacks, one of tasks and one of finished work; the loop takes a whole
 * stack at a time and turns it round, which gives posting order. Work is taken first and run last:
 * whatever a work's run() posted was there before the work itself, so it runs before done().
 *
 * `asleep` says that a poster has to write the eventfd. The loop sets it, then looks at the inbox
 * again, then sleeps; a poster pushes, then takes the flag. In the total order of these (all are
 * seq_cst) one of the two sees the other. The eventfd is edge-triggered and never read.
 *
 * Work threads share two queues, urgent and normal. At most half of them do normal work: a lease
 * that waits for one hash must not wait for a whole commit. And one thread hashes several times
 * faster than a drive writes; more at once take memory bandwidth from it (tools/bench commit).
 *
 * Everything but the inbox, the work queues and `outstanding` belongs to the loop thread.
 */
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "engine/bug.h"
#include "engine/io.h"
#include "engine/cpus.h"
#include "engine/loop.h"

#define EVENTS_MAX    32
#define TURNS_NO_POLL 64 /* turns in a row that may skip epoll while the inbox is never empty */

struct loop {
	struct io *io; /* may be NULL */
	pthread_t thread;
	int epfd, inbox_fd;

	_Atomic(struct loop_task *) tasks;
	_Atomic(struct list *) finished; /* struct loop_work.link, chained by next alone */
	atomic_bool asleep;
	atomic_uint outstanding; /* work queued, running, or waiting for its done() */

	struct list timers; /* soonest first */
	struct epoll_event events[EVENTS_MAX];
	int nevents; /* fetched and not dispatched yet: unwatch looks here */
	bool stop;

	pthread_mutex_t lock; /* of everything below */
	pthread_cond_t wake;
	struct list urgent, normal;
	unsigned int normal_running;
	bool workers_stop;
	unsigned int nworkers, normal_max;
	pthread_t workers[];
};

uint64_t loop_now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

bool loop_is_current(const struct loop *loop)
{
	return pthread_equal(pthread_self(), loop->thread);
}

/* --- inbox ------------------------------------------------------------------------------------ */

static void loop_wake(struct loop *loop)
{
	uint64_t one = 1;

	if (!atomic_load(&loop->asleep) || !atomic_exchange(&loop->asleep, false))
		return;
	while (write(loop->inbox_fd, &one, sizeof(one)) < 0 && errno == EINTR)
		;
}

void loop_post(struct loop *loop, struct loop_task *task)
{
	task->next = atomic_load_explicit(&loop->tasks, memory_order_relaxed);
	while (!atomic_compare_exchange_weak(&loop->tasks, &task->next, task))
		;
	loop_wake(loop); /* `task` may be run and gone by now */
}

static void post_finished(struct loop *loop, struct loop_work *work)
{
	struct list *head = atomic_load_explicit(&loop->finished, memory_order_relaxed);

	do
		work->link.next = head;
	while (!atomic_compare_exchange_weak(&loop->finished, &head, &work->link));
	loop_wake(loop);
}

static bool inbox_empty(struct loop *loop)
{
	return !atomic_load(&loop->tasks) && !atomic_load(&loop->finished);
}

static void run_inbox(struct loop *loop)
{
	struct list *stack = atomic_exchange(&loop->finished, NULL), *works = NULL;
	struct loop_task *top = atomic_exchange(&loop->tasks, NULL), *tasks = NULL;

	while (top) {
		struct loop_task *next = top->next;

		top->next = tasks;
		tasks = top;
		top = next;
	}
	while (stack) {
		struct list *next = stack->next;

		stack->next = works;
		works = stack;
		stack = next;
	}
	while (tasks) {
		struct loop_task *task = tasks;

		tasks = task->next;
		task->run(task);
	}
	while (works) {
		struct loop_work *work = list_entry(works, struct loop_work, link);

		works = works->next;
		list_init(&work->link);
		work->done(work);
		/* after done(): what it queues must not look like the last work ending */
		atomic_fetch_sub(&loop->outstanding, 1);
	}
}

struct call {
	struct loop_task task;
	void (*fn)(void *arg);
	void *arg;
	sem_t done;
};

static void call_run(struct loop_task *task)
{
	struct call *c = container_of(task, struct call, task);

	c->fn(c->arg);
	sem_post(&c->done);
}

void loop_call(struct loop *loop, void (*fn)(void *arg), void *arg)
{
	struct call c = {.task.run = call_run, .fn = fn, .arg = arg};

	assert(!loop_is_current(loop));
	sem_init(&c.done, 0, 0);
	loop_post(loop, &c.task);
	while (sem_wait(&c.done))
		;
	sem_destroy(&c.done);
}

/* --- watches ---------------------------------------------------------------------------------- */

int loop_watch(struct loop *loop, struct loop_watch *w)
{
	struct epoll_event ev = {.events = w->events, .data.ptr = w};

	return epoll_ctl(loop->epfd, EPOLL_CTL_ADD, w->fd, &ev) ? -errno : 0;
}

int loop_rewatch(struct loop *loop, struct loop_watch *w, uint32_t events)
{
	struct epoll_event ev = {.events = events, .data.ptr = w};

	if (epoll_ctl(loop->epfd, EPOLL_CTL_MOD, w->fd, &ev))
		return -errno;
	w->events = events;
	return 0;
}

void loop_unwatch(struct loop *loop, struct loop_watch *w)
{
	epoll_ctl(loop->epfd, EPOLL_CTL_DEL, w->fd, NULL);
	for (int i = 0; i < loop->nevents; i++) {
		if (loop->events[i].data.ptr == w)
			loop->events[i].data.ptr = NULL;
	}
}

static void run_watches(struct loop *loop)
{
	for (int i = 0; i < loop->nevents; i++) {
		struct loop_watch *w = loop->events[i].data.ptr;

		/* NULL: unwatched meanwhile, or the inbox or the io, which only wake us. */
		if (w)
			w->ready(w, loop->events[i].events);
	}
	loop->nevents = 0;
}

/* --- timers ----------------------------------------------------------------------------------- */

void loop_timer_clear(struct loop *loop, struct loop_timer *t)
{
	(void)loop;
	if (t->link.next) /* never armed, zeroed memory */
		list_remove(&t->link);
}

/* There are a handful of timers at most, hence a sorted list. */
void loop_timer_set(struct loop *loop, struct loop_timer *t, uint64_t delay_ns)
{
	struct list *at;

	loop_timer_clear(loop, t);
	t->when_ns = loop_now_ns() + delay_ns;
	at = loop->timers.prev;
	while (at != &loop->timers && list_entry(at, struct loop_timer, link)->when_ns > t->when_ns)
		at = at->prev;
	list_insert_between(&t->link, at, at->next);
}

static void run_timers(struct loop *loop)
{
	uint64_t now;

	if (list_empty(&loop->timers))
		return;
	now = loop_now_ns();
	/* One that re-arms itself with no delay comes after `now`, so this ends. */
	while (!list_empty(&loop->timers)) {
		struct loop_timer *t = list_first(&loop->timers, struct loop_timer, link);

		if (t->when_ns > now)
			break;
		list_remove(&t->link);
		t->fire(t);
	}
}

/* For epoll, in milliseconds rounded up: a timer never fires early. */
static int timeout_ms(struct loop *loop)
{
	uint64_t now, when, ms;

	if (list_empty(&loop->timers))
		return -1;
	now = loop_now_ns();
	when = list_first(&loop->timers, struct loop_timer, link)->when_ns;
	if (when <= now)
		return 0;
	ms = (when - now + 999999) / 1000000;
	return ms > 3600000 ? 3600000 : (int)ms;
}

/* --- the loop --------------------------------------------------------------------------------- */

static bool loop_idle(struct loop *loop)
{
	/* In this order: a work that ends while we look is then seen in the inbox. */
	return !atomic_load(&loop->outstanding) && inbox_empty(loop) &&
	       (!loop->io || !io_pending(loop->io));
}

static void loop_wait(struct loop *loop)
{
	int timeout = timeout_ms(loop);
	int n;

	atomic_store(&loop->asleep, true);
	if (!inbox_empty(loop) || (loop->stop && loop_idle(loop)))
		timeout = 0;
	n = epoll_wait(loop->epfd, loop->events, EVENTS_MAX, timeout);
	atomic_store(&loop->asleep, false);
	loop->nevents = n > 0 ? n : 0; /* EINTR: io_uring has completions, very likely */
}

static void *loop_main(void *arg)
{
	struct loop *loop = arg;
	unsigned int skipped = 0;

	while (!loop->stop || !loop_idle(loop)) {
		if (inbox_empty(loop) || ++skipped >= TURNS_NO_POLL) {
			loop_wait(loop);
			skipped = 0;
		}
		run_inbox(loop);
		if (loop->io)
			io_reap(loop->io);
		run_watches(loop);
		run_timers(loop);
		if (loop->io)
			io_kick(loop->io);
	}
	return NULL;
}

/* --- work threads ----------------------------------------------------------------------------- */

static void queue_work(struct loop *loop, struct loop_work *work, struct list *queue)
{
	atomic_fetch_add(&loop->outstanding, 1);
	pthread_mutex_lock(&loop->lock);
	list_push_back(queue, &work->link);
	pthread_mutex_unlock(&loop->lock);
	pthread_cond_signal(&loop->wake);
}

void loop_work(struct loop *loop, struct loop_work *work)
{
	queue_work(loop, work, &loop->normal);
}

/* Urgent work keeps its order among itself: the earlier one has waited longer. */
void loop_work_urgent(struct loop *loop, struct loop_work *work)
{
	queue_work(loop, work, &loop->urgent);
}

static void *worker_main(void *arg)
{
	struct loop *loop = arg;

	pthread_mutex_lock(&loop->lock);
	for (;;) {
		struct list *queue = NULL;
		struct loop_work *work;
		bool normal;

		if (!list_empty(&loop->urgent))
			queue = &loop->urgent;
		else if (!list_empty(&loop->normal) && loop->normal_running < loop->normal_max)
			queue = &loop->normal;
		if (!queue) {
			if (loop->workers_stop)
				break;
			pthread_cond_wait(&loop->wake, &loop->lock);
			continue;
		}
		work = list_first(queue, struct loop_work, link);
		list_remove(&work->link);
		normal = queue == &loop->normal;
		loop->normal_running += normal;
		pthread_mutex_unlock(&loop->lock);

		work->run(work);
		post_finished(loop, work);

		pthread_mutex_lock(&loop->lock);
		loop->normal_running -= normal;
	}
	pthread_mutex_unlock(&loop->lock);
	return NULL;
}

/* --- creation --------------------------------------------------------------------------------- */

static unsigned int default_workers(void)
{
	unsigned int n = cpus_available();

	/* One more than CPUs: they sleep in fdatasync and SQLite; one is kept for the urgent. */
	return n < 2 ? 2 : n > 7 ? 8 : n + 1;
}

static void stop_workers(struct loop *loop)
{
	pthread_mutex_lock(&loop->lock);
	loop->workers_stop = true;
	pthread_mutex_unlock(&loop->lock);
	pthread_cond_broadcast(&loop->wake);
	for (unsigned int i = 0; i < loop->nworkers; i++)
		pthread_join(loop->workers[i], NULL);
}

static int start_threads(struct loop *loop, unsigned int workers)
{
	sigset_t all, old;
	char name[16];
	int ret = 0;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	for (unsigned int i = 0; i < workers && !ret; i++) {
		ret = -pthread_create(&loop->workers[i], NULL, worker_main, loop);
		if (ret)
			break;
		loop->nworkers++;
		snprintf(name, sizeof(name), "moment-work%u", i % 1000);
		pthread_setname_np(loop->workers[i], name);
	}
	if (!ret) {
		ret = -pthread_create(&loop->thread, NULL, loop_main, loop);
		if (!ret)
			pthread_setname_np(loop->thread, "moment-loop");
	}
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (ret)
		stop_workers(loop);
	return ret;
}

static int epoll_add(int epfd, int fd, uint32_t events)
{
	struct epoll_event ev = {.events = events, .data.ptr = NULL};

	return epoll_ctl(epfd, EPOLL_CTL_ADD, fd, &ev) ? -errno : 0;
}

int loop_create(struct loop **out, struct io *io, unsigned int workers)
{
	struct loop *loop;
	int ret;

	*out = NULL;
	if (!workers)
		workers = default_workers();
	loop = calloc(1, sizeof(*loop) + workers * sizeof(loop->workers[0]));
	if (!loop)
		return -ENOMEM;
	loop->io = io;
	loop->normal_max = workers > 2 ? (workers - 1) / 2 : 1;
	list_init(&loop->timers);
	list_init(&loop->urgent);
	list_init(&loop->normal);
	pthread_mutex_init(&loop->lock, NULL);
	pthread_cond_init(&loop->wake, NULL);

	loop->epfd = epoll_create1(EPOLL_CLOEXEC);
	if (loop->epfd < 0) {
		ret = -errno;
		goto out_free;
	}
	loop->inbox_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (loop->inbox_fd < 0) {
		ret = -errno;
		goto out_epfd;
	}
	ret = epoll_add(loop->epfd, loop->inbox_fd, EPOLLIN | EPOLLET);
	if (!ret && io)
		ret = epoll_add(loop->epfd, io_event_fd(io), EPOLLIN);
	if (ret)
		goto out_inbox;
	ret = start_threads(loop, workers);
	if (ret)
		goto out_inbox;
	*out = loop;
	return 0;

out_inbox:
	close(loop->inbox_fd);
out_epfd:
	close(loop->epfd);
out_free:
	pthread_cond_destroy(&loop->wake);
	pthread_mutex_destroy(&loop->lock);
	free(loop);
	return ret;
}

static void loop_set_stop(void *arg)
{
	((struct loop *)arg)->stop = true;
}

void loop_destroy(struct loop *loop)
{
	if (!loop)
		return;
	loop_call(loop, loop_set_stop, loop);
	pthread_join(loop->thread, NULL);
	stop_workers(loop);
	close(loop->inbox_fd);
	close(loop->epfd);
	pthread_cond_destroy(&loop->wake);
	pthread_mutex_destroy(&loop->lock);
	free(loop);
}
