/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lost.c - bytes of mapped files that the kernel handed over and that could not be taken: no room.
 *
 * A program stores into a mapping and goes on; later the kernel writes the page. If that fails, the
 * kernel counts the page as clean all the same and tells one fsync or msync of it, once; the next
 * one succeeds with nothing stored. So such ranges are remembered here, and every fsync of the file
 * fails, until they have been written after all (a program that stores there again makes the kernel
 * write again), cut off, or given up: after a rollback the kernel drops its pages, and what can be
 * read is what is stored.
 *
 * Any thread; daemon.lock. Nearly always the list is empty, and that is all that is looked at.
 */
#include <stdlib.h>

#include "daemon/daemon.h"

#define RANGES_MAX 1024 /* from then on a file's are made one, with what lies between */

struct lost {
	struct list link;
	uint64_t ino, off, end;
	int err;
};

static struct lost *lost_new(struct daemon *d, const struct lost *like)
{
	struct lost *l = malloc(sizeof(*l));

	if (!l)
		return NULL;
	*l = *like;
	list_push_back(&d->lost, &l->link);
	atomic_fetch_add(&d->nlost, 1);
	return l;
}

static void lost_free(struct daemon *d, struct lost *l)
{
	list_remove(&l->link);
	free(l);
	atomic_fetch_sub(&d->nlost, 1);
}

bool lost_add(struct daemon *d, uint64_t ino, uint64_t off, uint64_t len, int err)
{
	struct lost x = {.ino = ino, .off = off, .end = off + len, .err = err};
	bool first = true, full = atomic_load(&d->nlost) >= RANGES_MAX;

	pthread_mutex_lock(&d->lock);
	list_for_each_safe(pos, tmp, &d->lost)
	{
		struct lost *l = list_entry(pos, struct lost, link);

		if (l->ino != ino)
			continue;
		first = false;
		if (!full && (l->end < x.off || l->off > x.end))
			continue;
		x.off = min_u64(l->off, x.off);
		x.end = max_u64(l->end, x.end);
		lost_free(d, l);
	}
	if (!lost_new(d, &x))
		log_error("no memory to remember that bytes of inode %llu are lost",
			  (unsigned long long)ino);
	pthread_mutex_unlock(&d->lock);
	return first;
}

void lost_found(struct daemon *d, uint64_t ino, uint64_t off, uint64_t end)
{
	if (!atomic_load(&d->nlost))
		return;
	pthread_mutex_lock(&d->lock);
	list_for_each_safe(pos, tmp, &d->lost)
	{
		struct lost *l = list_entry(pos, struct lost, link), rest = *l;

		if (l->ino != ino || l->end <= off || l->off >= end)
			continue;
		if (l->off < off && l->end > end) {
			/* In two; if there is no memory for the second it stays one. */
			rest.off = end;
			if (lost_new(d, &rest))
				l->end = off;
		} else if (l->off < off) {
			l->end = off;
		} else if (l->end > end) {
			l->off = end;
		} else {
			lost_free(d, l);
		}
	}
	pthread_mutex_unlock(&d->lock);
}

int lost_error(struct daemon *d, uint64_t ino)
{
	int err = 0;

	if (!atomic_load(&d->nlost))
		return 0;
	pthread_mutex_lock(&d->lock);
	list_for_each(pos, &d->lost)
	{
		const struct lost *l = list_entry(pos, struct lost, link);

		if (l->ino == ino)
			err = l->err;
	}
	pthread_mutex_unlock(&d->lock);
	return err;
}

void lost_fini(struct daemon *d)
{
	while (!list_empty(&d->lost))
		lost_free(d, list_first(&d->lost, struct lost, link));
}
