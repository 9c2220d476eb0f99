/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ns_stale.c - what the kernel was shown of the tree and is not so any more.
 *
 * The kernel keeps pages of files until it is told to drop them, and attributes and names for up to
 * a second. It knows of what goes through it; all else has to be told. Who changes what, and how the
 * kernel gets to know:
 *
 *   what changes                     by whom                          noted by
 *   bytes, times                     a session's leases               session_post_step(): a boundary
 *   step counts (xattrs, ctime)      a session's step                 ns_set_moment()
 *   bytes, sizes, names              register, FRESH                  make_zeros(), ns_publish(),
 *                                                                     ns_create(), ns_remove()
 *   names                            a session removes parameters     ns_remove()
 *   meta.json becomes a made-up one  adoption, register               ns_make_meta()
 *   bytes, attributes, names         rollback, a torn step given up   revert_load(), ns_row_put_locked(),
 *                                                                     ns_replace_locked()
 *   allocated space                  register, the end of a session   ns_publish()
 *   meta.json's size and time        its neighbours                   nobody: never kept (timeout 0)
 *   size, blocks of a file that is   stores through mappings          nobody: never kept (timeout 0)
 *     open for writing
 *   bytes                            a write with O_DIRECT            the daemon, before it answers, by
 *                                                                     range (notify_pages)
 *   bytes                            a punch that is refused, in part  the same
 *   bytes the kernel has already     a write that is refused, or       the daemon, after it has answered:
 *                                    short, for want of room          the kernel holds the pages till then
 *   all of it                        write, truncate, fallocate,      the kernel itself
 *                                    punch, create, unlink, rename,
 *                                    chmod ... through the mount
 *
 * Every one of the noted ways passes ns_stale_locked(), or ns_stale_name_locked() for a name that
 * goes; ns_dirty_locked(), which all changes of attributes pass, calls the former. They note only what
 * the kernel was shown since it was last told: so a step over 100,000 parameters that nobody looked
 * at costs nothing here. engine_invalidate() has the edge take what was noted (ns_stale_take) and tell
 * the kernel, and goes on when that is done: before a step's end, a registration, a removal, an
 * attach or a rollback is answered. What a program does through the mount is noted too, because the
 * same functions do it; the kernel then hears what it knows, once for each inode.
 *
 * Under ns->lock, like all of the namespace. A new way by which something changes gets its line above.
 */
#include "engine/ns_impl.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

void ns_shown_locked(struct ns *ns, struct ns_inode *i, bool name)
{
	(void)ns;
	if (name)
		i->named = true;
	/* With these the kernel is told to keep nothing. */
	if (i->writers || i->flags & NS_GENERATED)
		return;
	i->shown = true;
	/* What it gets now is right. */
	i->stale_attr = false;
	if (!i->stale_data)
		list_remove(&i->stale);
}

void ns_forgotten_locked(struct ns_inode *i)
{
	i->shown = i->named = i->paged = i->stale_attr = i->stale_data = false;
	list_remove(&i->stale);
}

void ns_stale_locked(struct ns *ns, struct ns_inode *i, unsigned int what)
{
	if (what & NS_STALE_ATTR && i->shown)
		i->stale_attr = true;
	if (what & NS_STALE_DATA && i->paged)
		i->stale_data = true;
	if ((i->stale_attr || i->stale_data) && !list_linked(&i->stale))
		list_push_back(&ns->stale, &i->stale);
}

void ns_stale(struct ns *ns, uint64_t ino, unsigned int what)
{
	struct ns_inode *i;

	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	if (i)
		ns_stale_locked(ns, i, what);
	pthread_mutex_unlock(&ns->lock);
}

void ns_stale_name_locked(struct ns *ns, struct ns_inode *i)
{
	struct ns_stale_name *n;

	if (!i->named || !i->parent)
		return;
	n = malloc(sizeof(*n) + strlen(i->name) + 1);
	if (!n) /* the kernel looks again after a second */
		return;
	n->parent = i->parent->ino;
	strcpy(n->name, i->name);
	list_push_back(&ns->stale_names, &n->link);
}

void ns_stale_fini(struct ns *ns)
{
	while (!list_empty(&ns->stale_names)) {
		struct ns_stale_name *n = list_first(&ns->stale_names, struct ns_stale_name, link);

		list_remove(&n->link);
		free(n);
	}
}

bool ns_stale_any(struct ns *ns)
{
	bool any;

	pthread_mutex_lock(&ns->lock);
	any = !list_empty(&ns->stale) || !list_empty(&ns->stale_names);
	pthread_mutex_unlock(&ns->lock);
	return any;
}

/*
 * The marks go before the kernel is called: what it asks for from then on it gets as it is now, and
 * that is noted again. An answer that is on its way with older attributes is refused by the kernel,
 * and older pages are locked until they are there, so that dropping them waits.
 */
size_t ns_stale_take(struct ns *ns, struct ns_stale *out, size_t most)
{
	size_t n = 0;

	pthread_mutex_lock(&ns->lock);
	while (n < most && !list_empty(&ns->stale_names)) {
		struct ns_stale_name *x = list_first(&ns->stale_names, struct ns_stale_name, link);

		out[n] = (struct ns_stale){.parent = x->parent};
		strcpy(out[n++].name, x->name);
		list_remove(&x->link);
		free(x);
	}
	while (n < most && !list_empty(&ns->stale)) {
		struct ns_inode *i = list_first(&ns->stale, struct ns_inode, stale);

		list_remove(&i->stale);
		out[n++] = (struct ns_stale){.ino = i->ino, .data = i->stale_data};
		/* Dropping pages drops attributes too. */
		i->shown = false;
		if (i->stale_data)
			i->paged = false;
		i->stale_attr = i->stale_data = false;
	}
	pthread_mutex_unlock(&ns->lock);
	return n;
}

int ns_look(struct ns *ns, uint64_t ino, bool name, struct ns_attr *a)
{
	struct ns_inode *i;

	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	if (i) {
		ns_shown_locked(ns, i, name);
		ns_attr_locked(i, a);
	}
	pthread_mutex_unlock(&ns->lock);
	return i ? 0 : -ESTALE;
}

void ns_set_paged(struct ns *ns, uint64_t ino)
{
	struct ns_inode *i;

	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	if (i)
		i->paged = true;
	pthread_mutex_unlock(&ns->lock);
}

bool ns_is_paged(struct ns *ns, uint64_t ino)
{
	struct ns_inode *i;
	bool paged;

	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	paged = i && i->paged;
	pthread_mutex_unlock(&ns->lock);
	return paged;
}

void ns_stale_written(struct ns *ns)
{
	struct ns_inode *i;
	size_t pos = 0;

	pthread_mutex_lock(&ns->lock);
	while ((i = u64map_next(&ns->inodes, &pos))) {
		if (!i->writers)
			continue;
		i->stale_data = true;
		if (!list_linked(&i->stale))
			list_push_back(&ns->stale, &i->stale);
	}
	pthread_mutex_unlock(&ns->lock);
}
