/* SPDX-License-Identifier: Apache-2.0 */
/*
 * loop.h - the engine's one loop thread, its inbox, and the small pool of work threads.
 *
 * The loop thread owns cache, policy, pool allocation and io: everything that runs on it needs no
 * lock, and nothing slow may run on it. Slow or bulky work (hashing, zeroing, copying, fallocate,
 * fdatasync, SQLite) goes to the work threads and comes back as a completion on the loop thread.
 *
 *   any thread   --loop_post()-->     loop thread
 *   loop thread  --loop_work()-->     a work thread runs work->run(), then the loop thread done()
 *
 * Objects are embedded in their users (no allocation on these paths) and belong to the loop from
 * the call until their callback has been entered.
 */
#ifndef ENGINE_LOOP_H
#define ENGINE_LOOP_H

#include "engine/types.h"
#include "engine/list.h"

struct loop;
struct io;

/* Something to run on the loop thread. */
struct loop_task {
	void (*run)(struct loop_task *);
	struct loop_task *next; /* the loop's */
};

/* Something to run on a work thread, and then a completion on the loop thread. */
struct loop_work {
	void (*run)(struct loop_work *);  /* on a work thread */
	void (*done)(struct loop_work *); /* on the loop thread */
	struct list link;		  /* the loop's */
};

/* A file descriptor watched by the loop thread (session sockets, pidfds). */
struct loop_watch {
	int fd;
	uint32_t events;				     /* EPOLLIN, EPOLLOUT */
	void (*ready)(struct loop_watch *, uint32_t events); /* on the loop thread */
	struct list link;				     /* the loop's */
};

/* Fires once, on the loop thread, no earlier than the given time. */
struct loop_timer {
	void (*fire)(struct loop_timer *);
	uint64_t when_ns; /* CLOCK_MONOTONIC */
	struct list link;
};

/*
 * Starts the loop thread with `workers` work threads (0: chosen from the CPUs it may use, 2 to 8).
 * The loop polls `io` (see io.h) for completions as part of its wait; the io object is used by the
 * loop thread alone from now on. Returns 0 or -errno.
 */
int loop_create(struct loop **out, struct io *io, unsigned int workers);

/*
 * Runs what has been posted, waits for outstanding work and io, stops the threads, frees. Must not
 * be called from the loop thread. The io object stays the caller's.
 */
void loop_destroy(struct loop *loop);

/* Runs task->run on the loop thread, in the order of posting. Any thread; never blocks or fails. */
void loop_post(struct loop *loop, struct loop_task *task);

/* Runs fn(arg) on the loop thread and waits for it to return. Any thread but the loop's. */
void loop_call(struct loop *loop, void (*fn)(void *arg), void *arg);

/* True on the loop thread. */
bool loop_is_current(const struct loop *loop);

/* Queues work. Loop thread, or any thread. */
void loop_work(struct loop *loop, struct loop_work *work);

/*
 * Like loop_work(), but goes ahead of the queue: for short work on which somebody waits
 * while bulk work (commit, scrub) fills the queue.
 */
void loop_work_urgent(struct loop *loop, struct loop_work *work);

/* Watches w->fd for w->events, level-triggered, until loop_unwatch(). Loop thread only. 0 or
 * -errno. */
int loop_watch(struct loop *loop, struct loop_watch *w);

/* Changes the events of a watched fd. Loop thread only. */
int loop_rewatch(struct loop *loop, struct loop_watch *w, uint32_t events);

/*
 * Stops watching; no ready() callback is entered after this returns. The caller then closes the
 * fd. Loop thread only.
 */
void loop_unwatch(struct loop *loop, struct loop_watch *w);

/* Arms (or re-arms) a timer to fire after delay_ns. Loop thread only. */
void loop_timer_set(struct loop *loop, struct loop_timer *t, uint64_t delay_ns);
void loop_timer_clear(struct loop *loop, struct loop_timer *t);

/* CLOCK_MONOTONIC in nanoseconds. Any thread. */
uint64_t loop_now_ns(void);

#endif
