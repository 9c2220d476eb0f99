/* SPDX-License-Identifier: Apache-2.0 */
/*
 * io_threads.c - io with a pool of threads that call pread and pwrite, where there is no io_uring.
 *
 * A part is owned by one list at a time: staged (loop thread alone) -> todo -> a thread -> finished
 * -> reaped. todo and finished are under the lock. The eventfd is readable exactly while `finished`
 * is not empty: both change under the lock. It takes as many parts as it has threads, so a part
 * never waits here behind another one and urgent ops overtake in io.c, where the queue is.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "engine/io_impl.h"

struct io_threads {
	struct io_backend be;
	int fd;
	int event_fd;
	struct list staged;
	atomic_bool any; /* finished is not empty: spares reap() the lock */

	pthread_mutex_t lock;
	pthread_cond_t wake;
	struct list todo;
	struct list finished;
	bool stop;

	unsigned int nthreads;
	pthread_t threads[];
};

static void *threads_main(void *arg)
{
	struct io_threads *t = arg;
	uint64_t one = 1;

	pthread_mutex_lock(&t->lock);
	for (;;) {
		struct io_part *part;

		while (list_empty(&t->todo) && !t->stop)
			pthread_cond_wait(&t->wake, &t->lock);
		if (list_empty(&t->todo))
			break;
		part = list_first(&t->todo, struct io_part, link);
		list_remove(&part->link);
		pthread_mutex_unlock(&t->lock);

		part->res = io_part_call(t->fd, part);

		pthread_mutex_lock(&t->lock);
		if (list_empty(&t->finished)) {
			atomic_store_explicit(&t->any, true, memory_order_release);
			/* cannot fail: the counter is 0 */
			while (write(t->event_fd, &one, sizeof(one)) < 0 && errno == EINTR)
				;
		}
		list_push_back(&t->finished, &part->link);
	}
	pthread_mutex_unlock(&t->lock);
	return NULL;
}

static void threads_start(struct io_backend *be, struct io_part *part)
{
	struct io_threads *t = container_of(be, struct io_threads, be);

	list_push_back(&t->staged, &part->link);
}

static void threads_kick(struct io_backend *be)
{
	struct io_threads *t = container_of(be, struct io_threads, be);
	bool one;

	if (list_empty(&t->staged))
		return;
	one = t->staged.next == t->staged.prev;
	pthread_mutex_lock(&t->lock);
	list_splice_back(&t->todo, &t->staged);
	pthread_mutex_unlock(&t->lock);
	if (one)
		pthread_cond_signal(&t->wake);
	else
		pthread_cond_broadcast(&t->wake);
}

static void threads_reap(struct io_backend *be)
{
	struct io_threads *t = container_of(be, struct io_threads, be);
	struct list got;
	uint64_t v;

	if (!atomic_load_explicit(&t->any, memory_order_acquire))
		return;
	list_init(&got);
	pthread_mutex_lock(&t->lock);
	list_splice_back(&got, &t->finished);
	atomic_store_explicit(&t->any, false, memory_order_relaxed);
	while (read(t->event_fd, &v, sizeof(v)) < 0 && errno == EINTR)
		;
	pthread_mutex_unlock(&t->lock);
	while (!list_empty(&got)) {
		struct io_part *part = list_first(&got, struct io_part, link);

		list_remove(&part->link);
		be->part_done(be->owner, part, part->res);
	}
}

static int threads_event_fd(const struct io_backend *be)
{
	return container_of(be, struct io_threads, be)->event_fd;
}

static void threads_destroy(struct io_backend *be)
{
	struct io_threads *t = container_of(be, struct io_threads, be);

	pthread_mutex_lock(&t->lock);
	t->stop = true;
	pthread_mutex_unlock(&t->lock);
	pthread_cond_broadcast(&t->wake);
	for (unsigned int i = 0; i < t->nthreads; i++)
		pthread_join(t->threads[i], NULL);
	pthread_cond_destroy(&t->wake);
	pthread_mutex_destroy(&t->lock);
	close(t->event_fd);
	free(t);
}

static const struct io_backend_ops threads_ops = {
	.name = "threads",
	.destroy = threads_destroy,
	.start = threads_start,
	.kick = threads_kick,
	.reap = threads_reap,
	.event_fd = threads_event_fd,
};

int io_threads_backend_create(const struct io_opts *opts, int fd, struct io_backend **out,
			      char *why, size_t why_len)
{
	unsigned int want = opts->threads ? opts->threads : IO_THREADS_DFLT;
	struct io_threads *t;
	sigset_t all, old;
	char name[16];
	int ret = 0;

	if (opts->depth && opts->depth < want)
		want = opts->depth;
	t = calloc(1, sizeof(*t) + want * sizeof(t->threads[0]));
	if (!t)
		return -ENOMEM;
	t->be.ops = &threads_ops;
	snprintf(t->be.registered_reason, sizeof(t->be.registered_reason),
		 "only io_uring registers buffers");
	t->fd = fd;
	list_init(&t->staged);
	list_init(&t->todo);
	list_init(&t->finished);
	pthread_mutex_init(&t->lock, NULL);
	pthread_cond_init(&t->wake, NULL);
	t->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (t->event_fd < 0) {
		ret = -errno;
		snprintf(why, why_len, "eventfd: %s", strerror(errno));
		goto out_free;
	}

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	for (; t->nthreads < want; t->nthreads++) {
		ret = -pthread_create(&t->threads[t->nthreads], NULL, threads_main, t);
		if (ret)
			break;
		snprintf(name, sizeof(name), "moment-io%u", t->nthreads);
		pthread_setname_np(t->threads[t->nthreads], name);
	}
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (!t->nthreads) {
		snprintf(why, why_len, "starting an I/O thread: %s", strerror(-ret));
		goto out_event_fd;
	}
	t->be.depth = t->nthreads; /* fewer than asked for is slower, not wrong */
	*out = &t->be;
	return 0;

out_event_fd:
	close(t->event_fd);
out_free:
	pthread_cond_destroy(&t->wake);
	pthread_mutex_destroy(&t->lock);
	free(t);
	return ret;
}
