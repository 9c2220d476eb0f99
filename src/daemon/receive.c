/* SPDX-License-Identifier: Apache-2.0 */
/*
 * receive.c - reads requests from /dev/fuse and hands them to libfuse's dispatcher.
 *
 * libfuse's own loop frees or reuses a request's buffer when the handler returns, so a WRITE would
 * have to be finished, or copied, inside its handler. Here the handler may take the buffer over
 * (rx_take) and gives it back when the engine is done with the bytes: no handler ever waits for the
 * drive, and nothing is copied twice.
 *
 * Memory: a buffer holds one request of any size (1 MiB and its header). One for each thread and
 * SPARE more are there, and touched, from the start. When writes pile up so that all are in use, a
 * thread waits for one, but only GRACE_MS: then it asks for one more, for what it would read may be
 * the very request that lets the writes go on (an interrupt, a step's end). receive_keep(), which
 * steady.c's thread runs, maps it, and unmaps it when it has been given back.
 * Mapping may wait for memory, and that for pages that are to be written back: by a request that is
 * not read yet. So no thread that a request needs does it.
 *
 * Threads: the receive threads run worker(); rx_put() is called from the engine's threads. The lock
 * is a leaf.
 */
#include <errno.h>
#include <linux/fuse.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "daemon/daemon.h"
#include "engine/cpus.h"

#define RX_HEADER   4096u
#define RX_SIZE	    (ENGINE_OP_MAX + 4096u)
#define RX_SPARE    14u
#define RX_GRACE_MS 100
#define RX_STACK    (256u << 10)
#define RX_THREADS  8

struct rx_buf {
	struct rx_buf *next;
};

struct receive {
	struct daemon *d;
	pthread_t threads[RX_THREADS];
	unsigned int started;
	atomic_uint running;
	atomic_bool stop;

	pthread_mutex_t lock;
	pthread_cond_t returned;
	struct rx_buf *free;
	unsigned int n_free, n_all, n_keep;
	unsigned int wanted; /* threads that wait for one more */
};

/* The buffer of the request whose handler this thread is in; NULL when the handler took it. */
static _Thread_local struct rx_buf *current;

static char *rx_data(struct rx_buf *b)
{
	return (char *)b + RX_HEADER;
}

static struct rx_buf *rx_map(void)
{
	void *p = mmap(NULL, RX_HEADER + RX_SIZE, PROT_READ | PROT_WRITE,
		       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED)
		return NULL;
	/* Touched here: read(2) would wait for memory with the lock of the address space. Not by
	 * MAP_POPULATE, which leaves out what mlockall() wants locked when it is touched. */
	for (size_t at = 0; at < RX_HEADER + RX_SIZE; at += 4096)
		*(volatile char *)((char *)p + at) = 0;
	return p;
}

static void rx_unmap(struct rx_buf *b)
{
	munmap(b, RX_HEADER + RX_SIZE);
}

static struct rx_buf *rx_get(struct receive *rx)
{
	struct timespec until;
	struct rx_buf *b;
	bool late = false;

	clock_gettime(CLOCK_MONOTONIC, &until);
	until.tv_nsec += RX_GRACE_MS * 1000000L;
	if (until.tv_nsec >= 1000000000L) {
		until.tv_sec++;
		until.tv_nsec -= 1000000000L;
	}
	pthread_mutex_lock(&rx->lock);
	while (!rx->free) {
		if (late) {
			rx->wanted++;
			steady_wake();
			pthread_cond_wait(&rx->returned, &rx->lock);
			rx->wanted--;
		} else {
			late = pthread_cond_timedwait(&rx->returned, &rx->lock, &until) ==
			       ETIMEDOUT;
		}
	}
	b = rx->free;
	rx->free = b->next;
	rx->n_free--;
	pthread_mutex_unlock(&rx->lock);
	return b;
}

struct rx_buf *rx_take(void)
{
	struct rx_buf *b = current;

	current = NULL;
	return b;
}

/* libfuse 3.14 does not hand these flags on. */
bool rx_kills_setid(void)
{
	const char *p = rx_data(current);
	struct fuse_in_header h;
	struct fuse_write_in w;
	struct fuse_setattr_in s;

	memcpy(&h, p, sizeof(h));
	if (h.opcode == FUSE_WRITE && h.len >= sizeof(h) + sizeof(w)) {
		memcpy(&w, p + sizeof(h), sizeof(w));
		return w.write_flags & FUSE_WRITE_KILL_SUIDGID;
	}
	if (h.opcode == FUSE_SETATTR && h.len >= sizeof(h) + sizeof(s)) {
		memcpy(&s, p + sizeof(h), sizeof(s));
		return s.valid & FATTR_KILL_SUIDGID;
	}
	return false;
}

void rx_put(struct receive *rx, struct rx_buf *b)
{
	if (!b)
		return;
	pthread_mutex_lock(&rx->lock);
	b->next = rx->free;
	rx->free = b;
	rx->n_free++;
	pthread_cond_signal(&rx->returned);
	pthread_mutex_unlock(&rx->lock);
}

void receive_keep(struct daemon *d)
{
	struct receive *rx = d->receive;
	struct rx_buf *b;
	bool more;

	pthread_mutex_lock(&rx->lock);
	more = rx->wanted > rx->n_free;
	rx->n_all += more;
	pthread_mutex_unlock(&rx->lock);
	if (more) {
		b = rx_map();
		if (b)
			rx_put(rx, b);
		pthread_mutex_lock(&rx->lock);
		rx->n_all -= !b; /* those in use come back */
		pthread_mutex_unlock(&rx->lock);
		return;
	}
	do {
		b = NULL;
		pthread_mutex_lock(&rx->lock);
		if (rx->n_all > rx->n_keep && rx->n_free) {
			b = rx->free;
			rx->free = b->next;
			rx->n_free--;
			rx->n_all--;
		}
		pthread_mutex_unlock(&rx->lock);
		if (b)
			rx_unmap(b);
	} while (b);
}

/* One request, or the end: false. */
static bool receive_one(struct receive *rx, struct rx_buf *b, int fd)
{
	struct fuse_buf fb = {.mem = rx_data(b)};
	ssize_t n = read(fd, fb.mem, RX_SIZE);

	if (n < 0) {
		/* ENOENT: the request was interrupted before it was read. ENODEV: unmounted. */
		if (errno == EINTR || errno == EAGAIN || errno == ENOENT)
			return true;
		if (errno != ENODEV)
			log_error("reading /dev/fuse: %s; ending", strerror(errno));
		return false;
	}
	fb.size = (size_t)n;
	fuse_session_process_buf(rx->d->se, &fb);
	/* Only now has the kernel taken the answer to INIT, and with it the limits of the mount. */
	if (atomic_load(&rx->d->initialized) && atomic_exchange(&rx->d->initialized, false))
		daemon_raise(rx->d, EVENT_INIT);
	return !fuse_session_exited(rx->d->se);
}

static void *worker(void *arg)
{
	struct receive *rx = arg;
	int fd = fuse_session_fd(rx->d->se);
	struct rx_buf *b = NULL;
	bool more = true;

	while (more && !atomic_load(&rx->stop)) {
		if (!b)
			b = rx_get(rx);
		current = b;
		more = receive_one(rx, b, fd);
		b = current;
	}
	current = NULL;
	rx_put(rx, b);
	if (atomic_fetch_sub(&rx->running, 1) == 1)
		daemon_raise(rx->d, EVENT_ENDED);
	return NULL;
}

/* Only there to make read(2) return. */
static void on_wakeup(int sig)
{
	(void)sig;
}

int receive_start(struct daemon *d)
{
	struct sigaction sa = {.sa_handler = on_wakeup};
	struct receive *rx = calloc(1, sizeof(*rx));
	pthread_condattr_t ca;
	pthread_attr_t ta;
	unsigned int n;
	int res = 0;

	if (!rx)
		return -ENOMEM;
	rx->d = d;
	pthread_mutex_init(&rx->lock, NULL);
	pthread_condattr_init(&ca);
	pthread_condattr_setclock(&ca, CLOCK_MONOTONIC);
	pthread_cond_init(&rx->returned, &ca);
	pthread_condattr_destroy(&ca);
	d->receive = rx;

	sigaction(SIGUSR1, &sa, NULL);
	n = cpus_available();
	n = n < 2 ? 2 : n > RX_THREADS ? RX_THREADS : n;
	rx->n_keep = n + RX_SPARE;
	while (rx->n_all < rx->n_keep) {
		struct rx_buf *b = rx_map();

		if (!b)
			return -ENOMEM;
		rx->n_all++;
		rx_put(rx, b);
	}
	pthread_attr_init(&ta);
	pthread_attr_setstacksize(&ta, RX_STACK);
	/* Counted before it runs: the one that ends last raises EVENT_ENDED. */
	atomic_store(&rx->running, n);
	while (rx->started < n && !res) {
		res = -pthread_create(&rx->threads[rx->started], &ta, worker, rx);
		if (!res)
			rx->started++;
	}
	pthread_attr_destroy(&ta);
	if (rx->started < n && atomic_fetch_sub(&rx->running, n - rx->started) == n - rx->started)
		daemon_raise(d, EVENT_ENDED);
	return rx->started ? 0 : res;
}

void receive_stop(struct daemon *d)
{
	struct receive *rx = d->receive;
	struct timespec pause = {.tv_nsec = 2000000};

	atomic_store(&rx->stop, true);
	/* A signal just before read(2) is lost: so until they are gone. */
	while (atomic_load(&rx->running)) {
		for (unsigned int i = 0; i < rx->started; i++)
			pthread_kill(rx->threads[i], SIGUSR1);
		nanosleep(&pause, NULL);
	}
	for (unsigned int i = 0; i < rx->started; i++)
		pthread_join(rx->threads[i], NULL);
	rx->started = 0;
}

void receive_destroy(struct daemon *d)
{
	struct receive *rx = d->receive;

	if (!rx)
		return;
	while (rx->free) {
		struct rx_buf *b = rx->free;

		rx->free = b->next;
		rx_unmap(b);
	}
	pthread_cond_destroy(&rx->returned);
	pthread_mutex_destroy(&rx->lock);
	free(rx);
	d->receive = NULL;
}
