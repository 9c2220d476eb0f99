/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ns_ops.c - making, removing and renaming, with the times that POSIX wants moved.
 *
 * Everything that can fail is done before the first change. Registered files are pinned: neither
 * they nor any directory above them moves or goes; a generated meta.json is part of its directory:
 * it goes with it, and a rename of it alone is refused as if across devices, so that mv copies
 * its text. Any thread.
 */
#include <fcntl.h>
#include <stdio.h>

#include "engine/ns_impl.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#ifndef RENAME_NOREPLACE
#define RENAME_NOREPLACE 1u
#endif

static void touch(struct ns *ns, struct ns_inode *dir, struct timespec now)
{
	dir->mtime = dir->ctime = now;
	ns_dirty_locked(ns, dir);
}

static int make(struct ns *ns, uint64_t parent, const char *name, uint32_t mode, uint32_t uid,
		uint32_t gid, bool ref, struct ns_attr *a)
{
	struct timespec now = ns_now();
	struct ns_inode *dir, *i = NULL;
	char *own_name = strdup(name);
	int res = ns_name_check(name);

	if (res == -EINVAL && !strchr(name, '/'))
		res = -EEXIST; /* "." and ".." */
	pthread_mutex_lock(&ns->lock);
	if (res < 0)
		goto out_unlock;
	res = ns_find_dir_locked(ns, parent, &dir);
	if (res < 0)
		goto out_unlock;
	res = -ENOENT;
	if (!dir->linked)
		goto out_unlock;
	res = -EEXIST;
	if (ns_child_locked(ns, dir, name))
		goto out_unlock;
	res = -ENOSPC;
	if (ns->next_ino >= NS_LAST)
		goto out_unlock;
	res = -ENOMEM;
	i = ns_inode_new(ns->next_ino, mode);
	if (!i || !own_name || ns_link_prepare_locked(ns, dir) < 0 ||
	    u64map_put(&ns->inodes, i->ino, i) < 0)
		goto out_unlock;
	ns->next_ino++;
	i->uid = uid;
	i->gid = gid;
	if (dir->mode & S_ISGID) {
		i->gid = dir->gid;
		if (ns_is_dir(i))
			i->mode |= S_ISGID;
	}
	i->mtime = i->ctime = now;
	i->lookups = ref;
	ns_link_locked(ns, dir, i, own_name, 0);
	ns_dirty_locked(ns, i);
	touch(ns, dir, now);
	ns_attr_locked(i, a);
	own_name = NULL;
	i = NULL;
	res = 0;
out_unlock:
	pthread_mutex_unlock(&ns->lock);
	ns_inode_free(i);
	free(own_name);
	return res;
}

int ns_create(struct ns *ns, uint64_t parent, const char *name, uint32_t mode, uint32_t uid,
	      uint32_t gid, bool ref, struct ns_attr *a)
{
	return make(ns, parent, name, S_IFREG | (mode & 07777), uid, gid, ref, a);
}

int ns_mkdir(struct ns *ns, uint64_t parent, const char *name, uint32_t mode, uint32_t uid,
	     uint32_t gid, bool ref, struct ns_attr *a)
{
	return make(ns, parent, name, S_IFDIR | (mode & 07777), uid, gid, ref, a);
}

/* --- removing ------------------------------------------------------------------------------- */

/* The generated meta.json of a directory that holds nothing else, or NULL. */
static struct ns_inode *only_meta(const struct ns *ns, const struct ns_inode *dir)
{
	struct ns_inode *meta;

	if (dir->n_children != 1)
		return NULL;
	meta = ns_child_locked(ns, dir, NS_META_NAME);
	return meta && meta->flags & NS_GENERATED ? meta : NULL;
}

/* May this file or directory leave its name? */
static int may_remove(const struct ns *ns, const struct ns_inode *i)
{
	if (i->flags & (NS_REGISTERED | NS_CLAIMED) || i->pins || i->claims)
		return -EBUSY;
	if (i->flags & NS_GENERATED && i->parent->pins)
		return -EBUSY;
	if (ns_is_dir(i) && i->n_children && !only_meta(ns, i))
		return -ENOTEMPTY;
	return 0;
}

/* Unlinks an inode (room for its number in `dead` was reserved) and drops it. */
static uint64_t remove_one(struct ns *ns, struct ns_inode *i, struct timespec now)
{
	if (i->maybe_stored)
		ns->dead[ns->n_dead++] = i->ino;
	i->ctime = now;
	ns_stale_locked(ns, i, NS_STALE_ATTR);
	ns_unlink_locked(ns, i);
	return ns_drop_locked(ns, i);
}

/* With the generated meta.json that a directory may have: it may have been an ordinary file, and what
 * its data took is not free before it has gone. gone[]: for ns_gone(). */
static void remove_inode(struct ns *ns, struct ns_inode *i, struct timespec now, uint64_t gone[2])
{
	struct ns_inode *meta = ns_is_dir(i) ? only_meta(ns, i) : NULL;

	gone[0] = meta ? remove_one(ns, meta, now) : 0;
	gone[1] = remove_one(ns, i, now);
}

static int remove_name(struct ns *ns, uint64_t parent, const char *name, bool want_dir, bool tell)
{
	struct ns_inode *dir, *i;
	uint64_t gone[2] = {0};
	struct timespec now = ns_now();
	int res;

	pthread_mutex_lock(&ns->lock);
	res = ns_find_entry_locked(ns, parent, name, &dir, &i);
	if (res < 0)
		goto out_unlock;
	res = want_dir ? -ENOTDIR : -EISDIR;
	if (ns_is_dir(i) != want_dir)
		goto out_unlock;
	res = may_remove(ns, i);
	if (res < 0)
		goto out_unlock;
	res = ns_dead_reserve_locked(ns, 2);
	if (res < 0)
		goto out_unlock;
	if (tell)
		ns_stale_name_locked(ns, i);
	remove_inode(ns, i, now, gone);
	touch(ns, dir, now);
out_unlock:
	pthread_mutex_unlock(&ns->lock);
	ns_gone(ns, gone[0]);
	ns_gone(ns, gone[1]);
	return res;
}

int ns_unlink(struct ns *ns, uint64_t parent, const char *name)
{
	return remove_name(ns, parent, name, false, false);
}

int ns_rmdir(struct ns *ns, uint64_t parent, const char *name)
{
	return remove_name(ns, parent, name, true, false);
}

int ns_remove(struct ns *ns, uint64_t parent, const char *name, bool dir)
{
	return remove_name(ns, parent, name, dir, true);
}

/* --- renaming ------------------------------------------------------------------------------- */

/* May `i` get the name `newname` in `to`, where `old` (or NULL) has it now? */
static int may_rename(const struct ns *ns, const struct ns_inode *i, const struct ns_inode *to,
		      const struct ns_inode *old)
{
	if (i->flags & (NS_REGISTERED | NS_CLAIMED) || i->pins || i->claims)
		return -EBUSY;
	if (i->flags & NS_GENERATED)
		return i->parent->pins ? -EBUSY : -EXDEV;
	if (!to->linked)
		return -ENOENT;
	for (const struct ns_inode *up = to; up; up = up->parent)
		if (up == i)
			return -EINVAL;
	if (!old)
		return 0;
	if (ns_is_dir(i) && !ns_is_dir(old))
		return -ENOTDIR;
	if (!ns_is_dir(i) && ns_is_dir(old))
		return -EISDIR;
	return may_remove(ns, old);
}

int ns_rename(struct ns *ns, uint64_t parent, const char *name, uint64_t newparent,
	      const char *newname, unsigned int flags)
{
	struct timespec now = ns_now();
	struct ns_inode *from, *to, *i, *old;
	char *own_name = strdup(newname);
	uint64_t gone[2] = {0}, cookie = 0;
	int res;

	pthread_mutex_lock(&ns->lock);
	res = flags & ~RENAME_NOREPLACE ? -EINVAL : ns_name_check(name);
	if (!res)
		res = ns_name_check(newname);
	if (!res)
		res = ns_find_dir_locked(ns, parent, &from);
	if (!res)
		res = ns_find_dir_locked(ns, newparent, &to);
	if (res < 0)
		goto out_unlock;
	res = -ENOENT;
	i = ns_child_locked(ns, from, name);
	if (!i)
		goto out_unlock;
	old = ns_child_locked(ns, to, newname);
	res = -EEXIST;
	if (old && flags & RENAME_NOREPLACE)
		goto out_unlock;
	res = 0;
	if (old == i)
		goto out_unlock;
	res = may_rename(ns, i, to, old);
	if (res < 0)
		goto out_unlock;
	res = -ENOMEM;
	if (!own_name || ns_link_prepare_locked(ns, to) < 0 || ns_dead_reserve_locked(ns, 2) < 0)
		goto out_unlock;
	/* A name that is replaced was there all the time, so it keeps its place and cookie. */
	ns_unlink_locked(ns, i);
	if (old) {
		cookie = old->cookie;
		remove_inode(ns, old, now, gone);
	}
	ns_link_locked(ns, to, i, own_name, cookie);
	own_name = NULL;
	i->ctime = now;
	ns_dirty_locked(ns, i);
	touch(ns, from, now);
	touch(ns, to, now);
	res = 0;
out_unlock:
	pthread_mutex_unlock(&ns->lock);
	free(own_name);
	ns_gone(ns, gone[0]);
	ns_gone(ns, gone[1]);
	return res;
}
