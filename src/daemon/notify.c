/* SPDX-License-Identifier: Apache-2.0 */
/*
 * notify.c - tells the kernel what it holds and is not so any more: pages, attributes, names.
 *
 * What that is, and by which ways it comes about, is in the table of engine/ns_stale.c, with one
 * exception, of what a request itself leaves in the kernel's pages (notify_pages): a write with O_DIRECT. The kernel drops the pages of its range before
 * such a write is sent, and for one that is asynchronous not again afterwards; a reader beside it
 * would put the old bytes back there, to stay. So while a file may have pages, the range is dropped
 * once more when its bytes are in their place, and then the write is answered. And a write or a punch
 * that is refused, for want of room: of the one the kernel has the bytes already, of the other it keeps
 * what may be zeros now.
 *
 * The notify thread makes the calls and holds nothing meanwhile: the kernel waits for pages that
 * are being read, and for directories that are being changed, and those requests are answered by
 * other threads, without waiting for this one. Jobs are done in the order of arrival. The lock is a
 * leaf, around the queue.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/daemon.h"

#define STACK (256u << 10)
#define BATCH 64u

struct notify {
	struct daemon *d;
	pthread_t thread;
	pthread_mutex_t lock;
	pthread_cond_t wake;
	struct notify_job *first, **last;
	bool stop;
	struct ns_stale batch[BATCH];
};

static bool failed(int res)
{
	/* ENOENT: the kernel does not know it (any more). The others: the mount is going. */
	return res && res != -ENOENT && res != -ENODEV && res != -ENOTCONN && res != -EBADF;
}

static void drop(struct notify *n, uint64_t ino, off_t off, off_t len)
{
	int res = fuse_lowlevel_notify_inval_inode(n->d->se, ino, off, len);

	if (failed(res))
		log_warning("the kernel would not drop old pages of inode %llu: %s; readers may see "
			    "old bytes",
			    (unsigned long long)ino, strerror(-res));
}

static void tell(struct notify *n, const struct ns_stale *s)
{
	int res;

	if (!s->ino) {
		res = fuse_lowlevel_notify_inval_entry(n->d->se, s->parent, s->name,
						       strlen(s->name));
		if (failed(res))
			log_warning("the kernel would not drop the name '%s': %s", s->name,
				    strerror(-res));
	} else if (s->data) {
		drop(n, s->ino, 0, 0);
		lost_found(n->d, s->ino, 0, UINT64_MAX);
	} else {
		drop(n, s->ino, -1, 0); /* attributes only */
	}
}

static void tell_stale(struct notify *n)
{
	size_t got;

	while ((got = ns_stale_take(n->d->ns, n->batch, BATCH)))
		for (size_t i = 0; i < got; i++)
			tell(n, &n->batch[i]);
}

static void tell_all(struct notify_job *j)
{
	tell_stale(j->notify);
	j->boundary->done(j->boundary);
	free(j);
}

static void fetch(struct notify_job *j)
{
	ns_stale_written(j->notify->d->ns);
	tell_stale(j->notify);
	free(j);
}

static void *notify_thread(void *arg)
{
	struct notify *n = arg;

	pthread_mutex_lock(&n->lock);
	for (;;) {
		struct notify_job *j = n->first;

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
		if (j->len)
			drop(n, j->ino, (off_t)j->off, (off_t)j->len);
		j->run(j); /* it may be gone now */
		pthread_mutex_lock(&n->lock);
	}
	pthread_mutex_unlock(&n->lock);
	return NULL;
}

static bool queue(struct notify *n, struct notify_job *j)
{
	bool stop;

	j->notify = n;
	j->next = NULL;
	pthread_mutex_lock(&n->lock);
	stop = n->stop;
	if (!stop) {
		*n->last = j;
		n->last = &j->next;
		pthread_cond_signal(&n->wake);
	}
	pthread_mutex_unlock(&n->lock);
	return !stop;
}

void notify_boundary(void *arg, struct engine_boundary *b)
{
	struct daemon *d = arg;
	struct notify_job *j = calloc(1, sizeof(*j));

	if (j) {
		j->run = tell_all;
		j->boundary = b;
	}
	if (!j || !queue(d->notify, j)) {
		free(j);
		b->done(b); /* no memory, or the mount is going */
	}
}

bool notify_pages(struct notify *n, struct notify_job *j)
{
	return j->len && ns_is_paged(n->d->ns, j->ino) && queue(n, j);
}

void notify_fetch(struct notify *n)
{
	struct notify_job *j = calloc(1, sizeof(*j));

	if (j)
		j->run = fetch;
	if (j && !queue(n, j))
		free(j);
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

	pthread_cond_destroy(&n->wake);
	pthread_mutex_destroy(&n->lock);
	free(n);
	d->notify = NULL;
}
