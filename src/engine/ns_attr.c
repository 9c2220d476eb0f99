/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ns_attr.c - attributes, open handles, and what sessions mark on inodes.
 *
 * A registered file pins every directory above it, so that its path holds for the session's life.
 * A generated file has no data, so neither size nor bytes can be published for it.
 * Any thread, except ns_publish(): loop thread.
 */
#include "engine/ns_impl.h"

#include <errno.h>

void ns_kill_setid(struct ns *ns, uint64_t ino, uint32_t bits)
{
	struct ns_inode *i;

	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	if (i && !ns_is_dir(i) && i->mode & bits) {
		i->mode &= ~bits;
		i->ctime = ns_now();
		ns_dirty_locked(ns, i);
	}
	pthread_mutex_unlock(&ns->lock);
}

static bool valid(const struct timespec *t)
{
	return t->tv_nsec >= 0 && t->tv_nsec <= 999999999;
}

static bool same(const struct timespec *a, const struct timespec *b)
{
	return a->tv_sec == b->tv_sec && a->tv_nsec == b->tv_nsec;
}

/* Both times; the only part that can fail. */
static int set_times(struct ns *ns, struct ns_inode *i, unsigned int mask,
		     const struct ns_attr *in, struct timespec now)
{
	struct timespec mtime = i->mtime, atime = ns_atime(i);
	int res;

	if (mask & NS_SET_MTIME)
		mtime = in->mtime;
	if (mask & NS_SET_MTIME_NOW)
		mtime = now;
	if (mask & NS_SET_ATIME)
		atime = in->atime;
	if (mask & NS_SET_ATIME_NOW)
		atime = now;
	res = ns_set_atime(ns, i, same(&atime, &mtime) ? NULL : &atime);
	if (!res)
		i->mtime = mtime;
	return res;
}

int ns_setattr(struct ns *ns, uint64_t ino, unsigned int mask, const struct ns_attr *in,
	       struct ns_attr *out)
{
	const unsigned int times =
		NS_SET_MTIME | NS_SET_MTIME_NOW | NS_SET_ATIME | NS_SET_ATIME_NOW;
	struct timespec now = ns_now();
	struct ns_inode *i;
	int res = -ESTALE;

	if ((mask & NS_SET_MTIME && !valid(&in->mtime)) ||
	    (mask & NS_SET_ATIME && !valid(&in->atime)))
		return -EINVAL;
	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	if (!i)
		goto out_unlock;
	res = 0;
	if (mask & times) /* those of a made-up file are its neighbours' */
		res = i->flags & NS_GENERATED ? -EPERM : set_times(ns, i, mask, in, now);
	if (res < 0)
		goto out_unlock;
	if (mask & NS_SET_MODE)
		i->mode = (i->mode & S_IFMT) | (in->mode & 07777);
	if (mask & NS_SET_UID)
		i->uid = in->uid;
	if (mask & NS_SET_GID)
		i->gid = in->gid;
	if (mask) {
		i->ctime = now;
		ns_dirty_locked(ns, i);
	}
	ns_attr_locked(i, out);
out_unlock:
	pthread_mutex_unlock(&ns->lock);
	return res;
}

static void set_size_locked(struct ns *ns, struct ns_inode *i, uint64_t size)
{
	if (i->linked)
		ns->counts.bytes += size - i->size;
	i->size = size;
	ns_dirty_locked(ns, i);
}

void ns_grow(struct ns *ns, uint64_t ino, uint64_t size)
{
	struct ns_inode *i;

	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	if (i && !ns_is_dir(i) && !(i->flags & NS_GENERATED)) {
		if (size > i->size)
			set_size_locked(ns, i, size);
		i->mtime = i->ctime = ns_now();
		ns_dirty_locked(ns, i);
	}
	pthread_mutex_unlock(&ns->lock);
}

void ns_publish(struct ns *ns, uint64_t ino, uint64_t size, uint64_t bytes, bool touch)
{
	struct ns_inode *i;

	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	if (!i || ns_is_dir(i) || i->flags & NS_GENERATED)
		goto out_unlock;
	if (size != UINT64_MAX && size != i->size)
		set_size_locked(ns, i, size);
	if (bytes != UINT64_MAX && bytes != i->bytes) {
		i->bytes = bytes;
		ns_stale_locked(ns, i, NS_STALE_ATTR);
	}
	if (touch) {
		i->mtime = i->ctime = ns_now();
		ns_dirty_locked(ns, i);
	}
out_unlock:
	pthread_mutex_unlock(&ns->lock);
}

/* --- handles -------------------------------------------------------------------------------- */

static void set_claimed(struct ns_inode *i, bool claimed)
{
	if (claimed)
		i->flags |= NS_CLAIMED;
	else
		i->flags &= ~(uint32_t)NS_CLAIMED;
	for (struct ns_inode *up = i->parent; up; up = up->parent)
		up->claims += claimed ? 1u : -1u;
}

int ns_open(struct ns *ns, uint64_t ino, bool write)
{
	struct ns_inode *i;
	int res = 0;

	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	if (!i)
		res = -ESTALE;
	else if (write && ns_is_dir(i))
		res = -EISDIR;
	else if (write && i->flags & (NS_REGISTERED | NS_CLAIMED))
		res = -EBUSY;
	else if (write && i->flags & NS_GENERATED)
		res = -EACCES;
	if (!res) {
		i->opens++;
		i->writers += write;
		ns->writers_total += write;
	}
	pthread_mutex_unlock(&ns->lock);
	return res;
}

void ns_release(struct ns *ns, uint64_t ino, bool write)
{
	struct ns_inode *i;
	uint64_t gone = 0;

	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	if (i && i->opens) {
		i->opens--;
		if (write && i->writers) {
			i->writers--;
			ns->writers_total--;
			if (i->flags & NS_CLAIMED) /* this was the one */
				set_claimed(i, false);
		}
		gone = ns_drop_locked(ns, i);
	}
	pthread_mutex_unlock(&ns->lock);
	ns_gone(ns, gone);
}

unsigned int ns_open_writers(struct ns *ns, uint64_t ino)
{
	struct ns_inode *i;
	unsigned int n;

	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	n = i ? i->writers : 0;
	pthread_mutex_unlock(&ns->lock);
	return n;
}

bool ns_is_stored(struct ns *ns, uint64_t ino)
{
	struct ns_inode *i;
	bool stored;

	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	stored = i && i->maybe_stored;
	pthread_mutex_unlock(&ns->lock);
	return stored;
}

unsigned int ns_open_writers_total(struct ns *ns)
{
	unsigned int n;

	pthread_mutex_lock(&ns->lock);
	n = ns->writers_total;
	pthread_mutex_unlock(&ns->lock);
	return n;
}

/* --- sessions ------------------------------------------------------------------------------- */

int ns_register(struct ns *ns, uint64_t ino)
{
	struct ns_inode *i;
	int res = 0;

	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	if (!i || !i->linked)
		res = -ESTALE;
	else if (ns_is_dir(i))
		res = -EISDIR;
	else if (i->flags & NS_GENERATED)
		res = -EACCES;
	else if (i->flags & NS_REGISTERED)
		res = -EALREADY;
	else if (i->writers)
		res = -EBUSY;
	if (!res) {
		i->flags |= NS_REGISTERED;
		for (struct ns_inode *up = i->parent; up; up = up->parent)
			up->pins++;
	}
	pthread_mutex_unlock(&ns->lock);
	return res;
}

int ns_claim(struct ns *ns, uint64_t ino, bool claim)
{
	struct ns_inode *i;
	int res = 0;

	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	if (!i || !i->linked)
		res = -ESTALE;
	else if (i->writers != 1 || i->flags & NS_REGISTERED)
		res = -EBUSY;
	else if (claim != ((i->flags & NS_CLAIMED) != 0))
		set_claimed(i, claim);
	pthread_mutex_unlock(&ns->lock);
	return res;
}

bool ns_is_claimed(struct ns *ns, uint64_t ino)
{
	struct ns_inode *i;
	bool claimed;

	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	claimed = i && i->flags & NS_CLAIMED;
	pthread_mutex_unlock(&ns->lock);
	return claimed;
}

void ns_unregister(struct ns *ns, uint64_t ino)
{
	struct ns_inode *i;

	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	if (i && i->flags & NS_REGISTERED) {
		i->flags &= ~((uint32_t)NS_REGISTERED | NS_HELD);
		for (struct ns_inode *up = i->parent; up; up = up->parent)
			up->pins--;
	}
	pthread_mutex_unlock(&ns->lock);
}

void ns_hold(struct ns *ns, uint64_t ino, bool held)
{
	struct ns_inode *i;

	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	if (i && held)
		i->flags |= NS_HELD;
	else if (i)
		i->flags &= ~(uint32_t)NS_HELD;
	pthread_mutex_unlock(&ns->lock);
}
