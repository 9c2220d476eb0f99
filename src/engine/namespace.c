/* SPDX-License-Identifier: Apache-2.0 */
/*
 * namespace.c - the tree in RAM: inodes, names, directories, references, reading directories.
 *
 * Inodes are found by number (u64map) and by (parent, name) (a chained hash). A directory also
 * has an array of places in the order in which entries were made; a place has a cookie that is
 * never used again, so reading goes on behind a cookie by binary search, whatever was made or
 * removed meanwhile. Removed entries leave empty places, packed when they are the majority.
 *
 * Invariants: a linked inode other than the root has a parent that is a linked directory, and is in
 * its bucket and its place; one that is not linked has at least one reference. Only linked inodes
 * are in ns->dirty. Any thread; see ns_impl.h for the lock.
 */
#include "engine/ns_impl.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

struct timespec ns_now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_REALTIME, &t);
	return t;
}

/* --- inodes --------------------------------------------------------------------------------- */

struct ns_inode *ns_inode_new(uint64_t ino, uint32_t mode)
{
	struct ns_inode *i = calloc(1, sizeof(*i));

	if (!i)
		return NULL;
	i->ino = ino;
	i->mode = mode;
	list_init(&i->dirty);
	list_init(&i->stale);
	return i;
}

void ns_inode_free(struct ns_inode *i)
{
	if (!i)
		return;
	list_remove(&i->dirty);
	list_remove(&i->stale);
	ns_xattrs_free(i->xattrs);
	free(i->slots);
	free(i->name);
	free(i);
}

uint64_t ns_inode_heap(const struct ns_inode *i)
{
	uint64_t sum = i->name ? heap_cost(strlen(i->name) + 1) : 0;

	if (i->cap_slots)
		sum += heap_cost(i->cap_slots * sizeof(*i->slots));
	for (const struct ns_xattr *x = i->xattrs; x; x = x->next)
		sum += ns_xattr_heap(x);
	return sum;
}

struct ns *ns_new(void (*on_gone)(void *arg, uint64_t ino), void *arg)
{
	struct ns *ns = calloc(1, sizeof(*ns));

	if (!ns)
		return NULL;
	pthread_mutex_init(&ns->lock, NULL);
	list_init(&ns->dirty);
	list_init(&ns->stale);
	list_init(&ns->stale_names);
	ns->next_ino = NS_FIRST;
	ns->next_cookie = NS_FIRST_COOKIE;
	ns->on_gone = on_gone;
	ns->arg = arg;
	ns->n_buckets = 64;
	ns->names = calloc(ns->n_buckets, sizeof(*ns->names));
	ns->root = ns_inode_new(NS_ROOT, S_IFDIR | 0755);
	if (!ns->names || !ns->root)
		goto out_delete;
	ns->root->name = strdup("");
	ns->root->linked = true;
	if (!ns->root->name || u64map_put(&ns->inodes, NS_ROOT, ns->root) < 0)
		goto out_delete;
	ns->root->mtime = ns->root->ctime = ns_now();
	ns->counts.dirs = 1;
	ns->heap = ns_inode_heap(ns->root);
	return ns;

out_delete:
	if (!ns->inodes.n)
		ns_inode_free(ns->root);
	ns_delete(ns);
	return NULL;
}

void ns_delete(struct ns *ns)
{
	struct ns_inode *i;
	size_t pos = 0;

	if (!ns)
		return;
	while ((i = u64map_next(&ns->inodes, &pos)))
		ns_inode_free(i);
	ns_stale_fini(ns);
	u64map_fini(&ns->inodes);
	free(ns->names);
	free(ns->dead);
	pthread_mutex_destroy(&ns->lock);
	free(ns);
}

struct ns_inode *ns_find_locked(const struct ns *ns, uint64_t ino)
{
	return u64map_get(&ns->inodes, ino);
}

int ns_find_dir_locked(const struct ns *ns, uint64_t parent, struct ns_inode **out)
{
	struct ns_inode *dir = ns_find_locked(ns, parent);

	if (!dir)
		return -ENOENT;
	if (!ns_is_dir(dir))
		return -ENOTDIR;
	*out = dir;
	return 0;
}

uint64_t ns_drop_locked(struct ns *ns, struct ns_inode *i)
{
	uint64_t ino = i->ino;
	bool file = !ns_is_dir(i);

	if (i->linked || i->lookups || i->opens)
		return 0;
	u64map_del(&ns->inodes, ino);
	ns->heap -= ns_inode_heap(i);
	ns_inode_free(i);
	return file ? ino : 0;
}

void ns_gone(struct ns *ns, uint64_t ino)
{
	if (ino && ns->on_gone)
		ns->on_gone(ns->arg, ino);
}

void ns_dirty_locked(struct ns *ns, struct ns_inode *i)
{
	ns_stale_locked(ns, i, NS_STALE_ATTR);
	if (i->linked && !list_linked(&i->dirty))
		list_push_back(&ns->dirty, &i->dirty);
}

int ns_dead_reserve_locked(struct ns *ns, size_t more)
{
	size_t cap = ns->cap_dead ? ns->cap_dead : 64;
	uint64_t *dead;

	while (cap < ns->n_dead + more)
		cap *= 2;
	if (cap == ns->cap_dead)
		return 0;
	dead = realloc(ns->dead, cap * sizeof(*dead));
	if (!dead)
		return -ENOMEM;
	ns->dead = dead;
	ns->cap_dead = cap;
	return 0;
}

void ns_attr_locked(const struct ns_inode *i, struct ns_attr *a)
{
	char *text;
	size_t len;

	*a = (struct ns_attr){
		.ino = i->ino,
		.parent = i->parent ? i->parent->ino : 0,
		.mode = i->mode,
		.uid = i->uid,
		.gid = i->gid,
		.nlink = !i->linked	? 0
			 : ns_is_dir(i) ? 2 + i->n_subdirs
					: 1,
		.size = i->size,
		.bytes = i->bytes,
		.atime = ns_atime(i),
		.mtime = i->mtime,
		.ctime = i->ctime,
		.flags = i->flags,
		.writers = i->writers,
	};
	if (!(i->flags & NS_GENERATED) || !i->parent)
		return;
	/* What it says comes from its neighbours, and so do its size and its time. */
	if (ns_meta_render_locked(i->parent, &text, &len) == 0) {
		a->size = len;
		a->bytes = round_up_u64(len, 512);
		free(text);
	}
	for (size_t s = 0; s <= i->parent->n_slots; s++) {
		const struct ns_inode *from =
			s < i->parent->n_slots ? i->parent->slots[s].inode : i->parent;

		if (!from || from == i)
			continue;
		if (from->ctime.tv_sec > a->mtime.tv_sec ||
		    (from->ctime.tv_sec == a->mtime.tv_sec &&
		     from->ctime.tv_nsec > a->mtime.tv_nsec))
			a->mtime = from->ctime;
	}
	a->ctime = a->mtime;
	if (!ns_xattr_find(i, NS_XATTR_ATIME))
		a->atime = a->mtime;
}

/* --- names ---------------------------------------------------------------------------------- */

static uint64_t name_hash(uint64_t parent, const char *name)
{
	return XXH3_64bits_withSeed(name, strlen(name), parent);
}

int ns_name_check(const char *name)
{
	size_t len = strnlen(name, NS_NAME_MAX + 1);

	if (!len)
		return -ENOENT;
	if (len > NS_NAME_MAX)
		return -ENAMETOOLONG;
	if (!strcmp(name, ".") || !strcmp(name, "..") || strchr(name, '/'))
		return -EINVAL;
	return 0;
}

struct ns_inode *ns_child_locked(const struct ns *ns, const struct ns_inode *dir, const char *name)
{
	uint64_t hash = name_hash(dir->ino, name);
	struct ns_inode *i;

	for (i = ns->names[hash & (ns->n_buckets - 1)]; i; i = i->name_next)
		if (i->name_hash == hash && i->parent == dir && !strcmp(i->name, name))
			return i;
	return NULL;
}

int ns_find_entry_locked(const struct ns *ns, uint64_t parent, const char *name,
			 struct ns_inode **dir, struct ns_inode **out)
{
	int res = ns_name_check(name);

	if (!res)
		res = ns_find_dir_locked(ns, parent, dir);
	if (res)
		return res;
	*out = ns_child_locked(ns, *dir, name);
	return *out ? 0 : -ENOENT;
}

/* Without memory the chains just stay longer. */
static void names_grow(struct ns *ns)
{
	size_t n = ns->n_buckets * 2;
	struct ns_inode **names = calloc(n, sizeof(*names));

	if (!names)
		return;
	for (size_t b = 0; b < ns->n_buckets; b++) {
		struct ns_inode *next;

		for (struct ns_inode *i = ns->names[b]; i; i = next) {
			next = i->name_next;
			i->name_next = names[i->name_hash & (n - 1)];
			names[i->name_hash & (n - 1)] = i;
		}
	}
	free(ns->names);
	ns->names = names;
	ns->n_buckets = n;
}

/* Never from ns_unlink_locked(): a rename reuses the place that it has just emptied. */
static void slots_pack(struct ns_inode *dir)
{
	size_t to = 0;

	for (size_t s = 0; s < dir->n_slots; s++)
		if (dir->slots[s].inode)
			dir->slots[to++] = dir->slots[s];
	dir->n_slots = to;
}

/* The first place with a cookie above or equal to `cookie`. */
static size_t slots_find(const struct ns_inode *dir, uint64_t cookie)
{
	size_t lo = 0, hi = dir->n_slots;

	while (lo < hi) {
		size_t mid = lo + (hi - lo) / 2;

		if (dir->slots[mid].cookie < cookie)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

int ns_link_prepare_locked(struct ns *ns, struct ns_inode *dir)
{
	struct ns_slot *slots;
	size_t cap;

	if (ns->n_names >= ns->n_buckets)
		names_grow(ns);
	if (dir->n_slots == dir->cap_slots && dir->n_children < dir->n_slots / 2)
		slots_pack(dir);
	if (dir->n_slots < dir->cap_slots)
		return 0;
	cap = dir->cap_slots ? dir->cap_slots * 2 : 4;
	slots = realloc(dir->slots, cap * sizeof(*slots));
	if (!slots)
		return -ENOMEM;
	if (dir->cap_slots)
		ns->heap -= heap_cost(dir->cap_slots * sizeof(*slots));
	ns->heap += heap_cost(cap * sizeof(*slots));
	dir->slots = slots;
	dir->cap_slots = cap;
	return 0;
}

void ns_link_locked(struct ns *ns, struct ns_inode *dir, struct ns_inode *i, char *name,
		    uint64_t cookie)
{
	struct ns_inode **bucket;

	if (cookie) {
		dir->slots[slots_find(dir, cookie)].inode = i;
	} else {
		cookie = ns->next_cookie++;
		dir->slots[dir->n_slots++] = (struct ns_slot){cookie, i};
	}
	i->name = name;
	ns->heap += heap_cost(strlen(name) + 1);
	i->name_hash = name_hash(dir->ino, name);
	i->parent = dir;
	i->cookie = cookie;
	i->linked = true;
	bucket = &ns->names[i->name_hash & (ns->n_buckets - 1)];
	i->name_next = *bucket;
	*bucket = i;
	ns->n_names++;
	dir->n_children++;
	if (ns_is_dir(i)) {
		dir->n_subdirs++;
		ns->counts.dirs++;
	} else {
		ns->counts.files++;
		ns->counts.bytes += i->size;
	}
}

void ns_unlink_locked(struct ns *ns, struct ns_inode *i)
{
	struct ns_inode *dir = i->parent;
	struct ns_inode **at = &ns->names[i->name_hash & (ns->n_buckets - 1)];

	while (*at != i)
		at = &(*at)->name_next;
	*at = i->name_next;
	ns->n_names--;
	dir->slots[slots_find(dir, i->cookie)].inode = NULL;
	dir->n_children--;
	if (ns_is_dir(i)) {
		dir->n_subdirs--;
		ns->counts.dirs--;
	} else {
		ns->counts.files--;
		ns->counts.bytes -= i->size;
	}
	ns->heap -= heap_cost(strlen(i->name) + 1);
	free(i->name);
	i->name = NULL;
	i->name_next = NULL;
	i->parent = NULL;
	i->linked = false;
	list_remove(&i->dirty);
}

/* --- lookup and references ------------------------------------------------------------------ */

static int lookup(struct ns *ns, uint64_t parent, const char *name, struct ns_attr *a, bool ref,
		  bool shown)
{
	struct ns_inode *dir, *i;
	int res;

	pthread_mutex_lock(&ns->lock);
	res = ns_find_entry_locked(ns, parent, name, &dir, &i);
	if (!res) {
		i->lookups += ref;
		if (shown)
			ns_shown_locked(ns, i, true);
		ns_attr_locked(i, a);
	}
	pthread_mutex_unlock(&ns->lock);
	return res;
}

int ns_lookup(struct ns *ns, uint64_t parent, const char *name, struct ns_attr *a)
{
	return lookup(ns, parent, name, a, true, true);
}

int ns_ref(struct ns *ns, uint64_t parent, const char *name, struct ns_attr *a)
{
	return lookup(ns, parent, name, a, true, false);
}

int ns_peek(struct ns *ns, uint64_t parent, const char *name, struct ns_attr *a)
{
	return lookup(ns, parent, name, a, false, false);
}

int ns_walk(struct ns *ns, const char *path, struct ns_attr *a)
{
	char name[NS_NAME_MAX + 1];
	struct ns_inode *i;
	int res = 0;

	pthread_mutex_lock(&ns->lock);
	i = ns->root;
	for (;;) {
		size_t len;

		path += strspn(path, "/");
		len = strcspn(path, "/");
		if (!len)
			break;
		res = -ENAMETOOLONG;
		if (len > NS_NAME_MAX)
			goto out_unlock;
		memcpy(name, path, len);
		name[len] = '\0';
		path += len;
		res = ns_name_check(name);
		if (res < 0)
			goto out_unlock;
		res = -ENOTDIR;
		if (!ns_is_dir(i))
			goto out_unlock;
		res = -ENOENT;
		i = ns_child_locked(ns, i, name);
		if (!i)
			goto out_unlock;
	}
	ns_attr_locked(i, a);
	res = 0;
out_unlock:
	pthread_mutex_unlock(&ns->lock);
	return res;
}

void ns_forget(struct ns *ns, uint64_t ino, uint64_t n)
{
	struct ns_inode *i;
	uint64_t gone = 0;

	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	if (i) {
		i->lookups -= min_u64(n, i->lookups);
		if (!i->lookups)
			ns_forgotten_locked(i);
		gone = ns_drop_locked(ns, i);
	}
	pthread_mutex_unlock(&ns->lock);
	ns_gone(ns, gone);
}

int ns_getattr(struct ns *ns, uint64_t ino, struct ns_attr *a)
{
	struct ns_inode *i;

	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	if (i)
		ns_attr_locked(i, a);
	pthread_mutex_unlock(&ns->lock);
	return i ? 0 : -ESTALE;
}

int ns_path(struct ns *ns, uint64_t ino, char *buf, size_t len)
{
	struct ns_inode *i;
	size_t at = len;
	int res = -ENOENT;

	if (!len)
		return -ERANGE;
	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	if (!i || !i->linked)
		goto out_unlock;
	/* From the end of buf backwards, then to its start. */
	res = -ERANGE;
	buf[--at] = '\0';
	for (; i->parent; i = i->parent) {
		size_t n = strlen(i->name), slash = i->parent->parent != NULL;

		if (at < n + slash)
			goto out_unlock;
		at -= n;
		memcpy(buf + at, i->name, n);
		if (slash)
			buf[--at] = '/';
	}
	memmove(buf, buf + at, len - at);
	res = 0;
out_unlock:
	pthread_mutex_unlock(&ns->lock);
	return res;
}

int ns_readdir(struct ns *ns, uint64_t ino, uint64_t cookie, bool take_refs, ns_readdir_fn *fn,
	       void *arg)
{
	struct ns_inode *dir;
	int res;

	pthread_mutex_lock(&ns->lock);
	res = ns_find_dir_locked(ns, ino, &dir);
	if (!res && dir->n_slots > 16 && dir->n_children < dir->n_slots / 4)
		slots_pack(dir);
	for (size_t s = res < 0 ? 0 : slots_find(dir, cookie + 1); !res && s < dir->n_slots; s++) {
		struct ns_inode *i = dir->slots[s].inode;
		struct ns_attr a;

		if (!i)
			continue;
		ns_attr_locked(i, &a);
		if (!fn(arg, i->name, &a, dir->slots[s].cookie))
			break;
		if (take_refs) {
			i->lookups++;
			ns_shown_locked(ns, i, true);
		}
	}
	pthread_mutex_unlock(&ns->lock);
	return res;
}

uint64_t ns_next_cookie(struct ns *ns)
{
	uint64_t cookie;

	pthread_mutex_lock(&ns->lock);
	cookie = ns->next_cookie;
	pthread_mutex_unlock(&ns->lock);
	return cookie;
}

void ns_count(struct ns *ns, struct ns_counts *c)
{
	pthread_mutex_lock(&ns->lock);
	*c = ns->counts;
	c->inodes = ns->inodes.n;
	c->memory = ns->heap + ns->inodes.n * heap_cost(sizeof(struct ns_inode)) +
		    u64map_heap(&ns->inodes) + ns->n_buckets * sizeof(*ns->names) +
		    ns->cap_dead * sizeof(*ns->dead);
	pthread_mutex_unlock(&ns->lock);
}
