/* SPDX-License-Identifier: Apache-2.0 */
/*
 * notify.c - tells the kernel which of its pages are stale.
 *
 * Only inodes that have been opened since they were last invalidated can have pages in the kernel's
 * cache; the table knows them, so that a step boundary over thousands of files that nobody looks at
 * costs a look-up each and no system call.
 *
 * The notify thread makes the calls and holds nothing meanwhile: the kernel waits for pages that
 * are being read, and those reads are answered by other threads. Jobs are done in the order of
 * arrival. The lock is a leaf, around the table and the queue.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/daemon.h"

#define BUCKETS 4096u
#define STACK	(256u << 10)

struct seen {
	struct seen *next;
	uint64_t ino;
	unsigned int opens;
	bool cached; /* opened since it was last invalidated */
};

struct job {
	struct job *next;
	struct engine_boundary *boundary; /* or NULL: all inodes */
	void (*then)(void *arg);
	void *arg;
};

struct notify {
	struct daemon *d;
	pthread_t thread;
	pthread_mutex_t lock;
	pthread_cond_t wake;
	struct seen *buckets[BUCKETS];
	struct job *first, **last;
	bool stop;
};

static struct seen **find_locked(struct notify *n, uint64_t ino)
{
	struct seen **p = &n->buckets[(ino * 0x9e3779b97f4a7c15u) >> 52];

	while (*p && (*p)->ino != ino)
		p = &(*p)->next;
	return p;
}

void notify_opened(struct notify *n, uint64_t ino)
{
	struct seen **p, *s;

	pthread_mutex_lock(&n->lock);
	p = find_locked(n, ino);
	if (!*p) {
		s = calloc(1, sizeof(*s));
		if (s) {
			s->ino = ino;
			*p = s;
		}
	}
	if (*p) {
		(*p)->opens++;
		(*p)->cached = true;
	}
	pthread_mutex_unlock(&n->lock);
}

void notify_closed(struct notify *n, uint64_t ino)
{
	struct seen *s;

	pthread_mutex_lock(&n->lock);
	s = *find_locked(n, ino);
	if (s && s->opens)
		s->opens--;
	pthread_mutex_unlock(&n->lock);
}

/* Forgets an inode that nobody has open (it is about to have no pages); true if it may have some.
 */
static bool take(struct notify *n, uint64_t ino)
{
	struct seen **p, *s;
	bool cached = false;

	pthread_mutex_lock(&n->lock);
	p = find_locked(n, ino);
	s = *p;
	if (s) {
		cached = s->cached;
		if (!s->opens) {
			*p = s->next;
			free(s);
		}
	}
	pthread_mutex_unlock(&n->lock);
	return cached;
}

static void invalidate(struct notify *n, uint64_t ino)
{
	int res = fuse_lowlevel_notify_inval_inode(n->d->se, ino, 0, 0);

	lost_found(n->d, ino, 0, UINT64_MAX);
	/* ENOENT: the kernel does not know it (any more). The others: the mount is going. */
	if (res && res != -ENOENT && res != -ENODEV && res != -ENOTCONN && res != -EBADF)
		log_warning(
			"the kernel would not drop old pages of inode %llu: %s; readers may see "
			"bytes of an earlier step",
			(unsigned long long)ino, strerror(-res));
}

/* A copy of the numbers first: nothing may be held while the kernel is called. */
static void invalidate_all(struct notify *n)
{
	size_t count = 0, i = 0;
	uint64_t *inos;

	pthread_mutex_lock(&n->lock);
	for (unsigned int b = 0; b < BUCKETS; b++)
		for (struct seen *s = n->buckets[b]; s; s = s->next)
			count++;
	inos = count ? malloc(count * sizeof(*inos)) : NULL;
	for (unsigned int b = 0; inos && b < BUCKETS; b++)
		for (struct seen *s = n->buckets[b]; s; s = s->next)
			inos[i++] = s->ino;
	pthread_mutex_unlock(&n->lock);
	if (count && !inos)
		log_warning("no memory to drop the kernel's old pages; readers may see old bytes");
	while (i--)
		if (take(n, inos[i]))
			invalidate(n, inos[i]);
	free(inos);
}

static void run(struct notify *n, struct job *j)
{
	if (!j->boundary) {
		invalidate_all(n);
		if (j->then)
			j->then(j->arg);
		return;
	}
	for (size_t i = 0; i < j->boundary->n; i++)
		if (take(n, j->boundary->inos[i]))
			invalidate(n, j->boundary->inos[i]);
	j->boundary->done(j->boundary);
}

static void *notify_thread(void *arg)
{
	struct notify *n = arg;

	pthread_mutex_lock(&n->lock);
	for (;;) {
		struct job *j = n->first;

		if (!j) {
			if (n->stop)
				break;
			pthread_cond_wait(&n->wake, &n->lock);
			continue;
		}
		n->first = j->next;
		if (!n->first)
			n->last = &n->first;
		pthread_mutex_unlock(&n->lock);
		run(n, j);
		free(j);
		pthread_mutex_lock(&n->lock);
	}
	pthread_mutex_unlock(&n->lock);
	return NULL;
}

static bool queue(struct notify *n, struct engine_boundary *b, void (*then)(void *), void *arg)
{
	struct job *j = calloc(1, sizeof(*j));

	if (!j)
		return false;
	j->boundary = b;
	j->then = then;
	j->arg = arg;
	pthread_mutex_lock(&n->lock);
	if (n->stop) {
		pthread_mutex_unlock(&n->lock);
		free(j);
		return false;
	}
	*n->last = j;
	n->last = &j->next;
	pthread_cond_signal(&n->wake);
	pthread_mutex_unlock(&n->lock);
	return true;
}

void notify_boundary(void *arg, struct engine_boundary *b)
{
	struct daemon *d = arg;

	if (!queue(d->notify, b, NULL, NULL))
		b->done(b); /* no memory, or the mount is going */
}

void notify_all(struct notify *n, void (*then)(void *arg), void *arg)
{
	if (!queue(n, NULL, then, arg) && then)
		then(arg);
}

int notify_create(struct daemon *d)
{
	struct notify *n = calloc(1, sizeof(*n));
	pthread_attr_t ta;
	int res;

	if (!n)
		return -ENOMEM;
	n->d = d;
	n->last = &n->first;
	pthread_mutex_init(&n->lock, NULL);
	pthread_cond_init(&n->wake, NULL);
	pthread_attr_init(&ta);
	pthread_attr_setstacksize(&ta, STACK);
	res = -pthread_create(&n->thread, &ta, notify_thread, n);
	pthread_attr_destroy(&ta);
	if (res) {
		free(n);
		return res;
	}
	d->notify = n;
	return 0;
}

void notify_stop(struct daemon *d)
{
	struct notify *n = d->notify;

	pthread_mutex_lock(&n->lock);
	n->stop = true;
	pthread_cond_signal(&n->wake);
	pthread_mutex_unlock(&n->lock);
	pthread_join(n->thread, NULL);
}

void notify_destroy(struct daemon *d)
{
	struct notify *n = d->notify;

	for (unsigned int b = 0; b < BUCKETS; b++) {
		while (n->buckets[b]) {
			struct seen *s = n->buckets[b];

			n->buckets[b] = s->next;
			free(s);
		}
	}
	pthread_cond_destroy(&n->wake);
	pthread_mutex_destroy(&n->lock);
	free(n);
	d->notify = NULL;
}
