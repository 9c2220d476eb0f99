/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ns_row.c - between the tree and the catalog's rows: take a copy of an inode, put a committed one
 * back, replace the whole tree.
 */
#include "engine/ns_impl.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

void ns_row_fini(struct ns_row *row)
{
	free(row->name);
	free(row->xattrs);
	row->name = NULL;
	row->xattrs = NULL;
}

int ns_row_get_locked(const struct ns_inode *i, struct ns_row *row)
{
	int res;

	*row = (struct ns_row){
		.ino = i->ino,
		.parent = i->parent ? i->parent->ino : 0,
		.name = strdup(i->name),
		.name_len = (uint32_t)strlen(i->name),
		.mode = i->mode,
		.uid = i->uid,
		.gid = i->gid,
		.flags = i->flags & NS_STORED_FLAGS,
		.size = i->size,
		.mtime = i->mtime,
		.ctime = i->ctime,
	};
	res = row->name ? ns_xattrs_pack(i->xattrs, &row->xattrs, &row->xattrs_len) : -ENOMEM;
	if (res < 0)
		ns_row_fini(row);
	return res;
}

/* Everything but name and size, which the counts of a linked inode depend on. */
static void put_attrs(struct ns *ns, struct ns_inode *i, const struct ns_row *row,
		      struct ns_xattr *xattrs)
{
	ns->heap -= ns_inode_heap(i);
	ns_xattrs_free(i->xattrs);
	i->xattrs = xattrs;
	ns->heap += ns_inode_heap(i);
	i->mode = row->mode;
	i->uid = row->uid;
	i->gid = row->gid;
	i->flags = (i->flags & ~NS_STORED_FLAGS) | (row->flags & NS_STORED_FLAGS);
	i->mtime = row->mtime;
	i->ctime = row->ctime;
}

void ns_row_put_locked(struct ns *ns, struct ns_inode *i, const struct ns_row *row,
		       struct ns_xattr *xattrs)
{
	put_attrs(ns, i, row, xattrs);
	if (i->linked && !ns_is_dir(i))
		ns->counts.bytes += row->size - i->size;
	i->size = row->size;
	ns_stale_locked(ns, i, NS_STALE_ATTR);
}

/* A tree made of rows, with nothing shared with any other. NULL: no memory. */
static struct ns *build(const struct ns_row *rows, size_t n, uint64_t first_cookie)
{
	struct ns *ns = ns_new(NULL, NULL);

	if (!ns)
		return NULL;
	ns->next_cookie = first_cookie;
	if (u64map_reserve(&ns->inodes, n) < 0)
		goto out_delete;
	for (size_t r = 0; r < n; r++) {
		struct ns_inode *i = ns->root;
		struct ns_xattr *xattrs;

		if (rows[r].ino != NS_ROOT) {
			i = ns_inode_new(rows[r].ino, rows[r].mode);
			if (!i || u64map_put(&ns->inodes, i->ino, i) < 0) {
				ns_inode_free(i);
				goto out_delete;
			}
		}
		if (ns_xattrs_unpack(rows[r].xattrs, rows[r].xattrs_len, &xattrs) < 0)
			goto out_delete;
		put_attrs(ns, i, &rows[r], xattrs);
		i->size = rows[r].size;
		i->maybe_stored = true;
	}
	for (size_t r = 0; r < n; r++) {
		struct ns_inode *dir;
		char *name;

		if (rows[r].ino == NS_ROOT)
			continue;
		dir = ns_find_locked(ns, rows[r].parent);
		name = strndup(rows[r].name, rows[r].name_len);
		if (!dir || !name || ns_link_prepare_locked(ns, dir) < 0) {
			free(name);
			goto out_delete;
		}
		ns_link_locked(ns, dir, ns_find_locked(ns, rows[r].ino), name, 0);
	}
	return ns;

out_delete:
	ns_delete(ns);
	return NULL;
}

/* Gives the references and marks of `from` to `to`, the same inode in another tree. */
static void inherit(struct ns_inode *to, const struct ns_inode *from)
{
	to->lookups = from->lookups;
	to->opens = from->opens;
	to->writers = from->writers;
	to->bytes = from->bytes;
	to->shown = from->shown;
	to->named = from->named;
	to->paged = from->paged;
	to->flags |= from->flags & ~NS_STORED_FLAGS;
	for (struct ns_inode *up = to->parent; up; up = up->parent) {
		up->pins += (to->flags & NS_REGISTERED) != 0;
		up->claims += (to->flags & NS_CLAIMED) != 0;
	}
}

static void swap_trees(struct ns *a, struct ns *b)
{
	struct ns tmp = *a;

	a->inodes = b->inodes;
	a->names = b->names;
	a->n_names = b->n_names;
	a->n_buckets = b->n_buckets;
	a->root = b->root;
	a->next_cookie = b->next_cookie;
	a->counts = b->counts;
	a->heap = b->heap;
	b->inodes = tmp.inodes;
	b->names = tmp.names;
	b->n_names = tmp.n_names;
	b->n_buckets = tmp.n_buckets;
	b->root = tmp.root;
	b->counts = tmp.counts;
	b->heap = tmp.heap;
}

int ns_replace_locked(struct ns *ns, const struct ns_row *rows, size_t n, uint64_t *gone,
		      size_t *n_gone)
{
	struct ns *old = build(rows, n, ns->next_cookie); /* new, until they are swapped */
	struct ns_inode *i;
	size_t pos = 0;

	*n_gone = 0;
	if (!old)
		return -ENOMEM;
	if (u64map_reserve(&old->inodes, ns->inodes.n) < 0) {
		ns_delete(old);
		return -ENOMEM;
	}
	/* Unlinks all that is there; the lists of what changed are void now. */
	while (!list_empty(&ns->dirty))
		list_remove(ns->dirty.next);
	ns->n_dead = 0;
	swap_trees(ns, old);
	while ((i = u64map_next(&old->inodes, &pos))) {
		struct ns_inode *now = ns_find_locked(ns, i->ino);

		if (!now || i->parent == NULL || now->parent->ino != i->parent->ino ||
		    strcmp(now->name, i->name) != 0)
			ns_stale_name_locked(ns, i);
		if (now) {
			inherit(now, i);
			ns_stale_locked(ns, now, NS_STALE_ATTR | NS_STALE_DATA);
			continue;
		}
		if (!i->lookups && !i->opens) {
			if (!ns_is_dir(i))
				gone[(*n_gone)++] = i->ino;
			continue;
		}
		/* Referenced: lives on as a removed one, in a structure of its own. */
		u64map_put(&ns->inodes, i->ino, i);
	}
	pos = 0;
	while ((i = u64map_next(&ns->inodes, &pos))) {
		if (ns_find_locked(old, i->ino) != i)
			continue;
		u64map_del(&old->inodes, i->ino);
		old->heap -= ns_inode_heap(i);
		free(i->slots);
		free(i->name);
		i->slots = NULL;
		i->n_slots = i->cap_slots = i->n_children = 0;
		i->n_subdirs = i->pins = i->claims = 0;
		i->name = NULL;
		ns->heap += ns_inode_heap(i);
		i->name_next = NULL;
		i->parent = NULL;
		i->linked = i->maybe_stored = false;
		i->flags &= ~((uint32_t)NS_REGISTERED | NS_HELD | NS_CLAIMED);
		ns_stale_locked(ns, i, NS_STALE_ATTR | NS_STALE_DATA);
	}
	ns_delete(old);
	return 0;
}
