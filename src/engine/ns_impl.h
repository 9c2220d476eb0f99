/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ns_impl.h - inside the namespace: shared by namespace.c, ns_*.c and the catalog's files.
 *
 * struct ns and everything below it is guarded by ns->lock. The lock is a leaf: no callback but
 * the readdir function runs under it, and no I/O. A function named *_locked wants it held.
 *
 * Who owns an inode: the tree, while it is linked; else its references (lookups, open handles).
 * When the last of them goes the structure is freed and, for a file, on_gone() is called after
 * the lock has been dropped.
 */
#ifndef ENGINE_NS_IMPL_H
#define ENGINE_NS_IMPL_H

#include <pthread.h>

#include "engine/list.h"
#include "engine/namespace.h"
#include "engine/u64map.h"

#define NS_STORED_FLAGS ((uint32_t)NS_GENERATED) /* the flags that the catalog keeps */
#define NS_FIRST_COOKIE ((uint64_t)16)		 /* below: the caller's, for "." and ".." */
#define NS_XATTR_TOTAL	((size_t)1 << 20)	 /* names and values of one inode, bytes */

struct ns_xattr {
	struct ns_xattr *next; /* sorted by name, bytewise */
	uint32_t size;
	uint8_t name_len;
	char name[]; /* NUL-terminated; the value follows */
};

static inline const void *ns_xattr_value(const struct ns_xattr *x)
{
	return x->name + x->name_len + 1;
}

/* A place in a directory. Places are in the order of their cookies; the inode is NULL when the
 * entry has gone, until the array is packed. */
struct ns_slot {
	uint64_t cookie;
	struct ns_inode *inode;
};

struct ns_inode {
	uint64_t ino;
	struct ns_inode *parent;    /* NULL: the root, or not linked */
	struct ns_inode *name_next; /* in its bucket of ns->names */
	char *name;		    /* "" for the root, NULL when not linked */
	uint64_t name_hash;
	uint64_t cookie; /* its slot in the parent */
	uint32_t mode, uid, gid, flags;
	uint64_t size, bytes;
	struct timespec mtime, ctime;
	struct ns_xattr *xattrs;
	uint64_t lookups;
	unsigned int opens, writers; /* writers are among the opens */
	bool linked;
	/* what the kernel may hold of it, and what of that is wrong by now: ns_stale.c */
	bool shown, named, paged; /* attributes, a name, pages */
	bool stale_attr, stale_data;
	struct list stale; /* in ns->stale when one of these is set */
	bool maybe_stored; /* a row of it may be in the catalog: its removal must be told */
	struct list dirty; /* in ns->dirty when changed since the last freeze */
	/* directories */
	struct ns_slot *slots;
	size_t n_slots, cap_slots, n_children;
	unsigned int n_subdirs;
	unsigned int pins;   /* registered files anywhere below */
	unsigned int claims; /* claimed files anywhere below */
};

struct ns {
	pthread_mutex_t lock;
	struct u64map inodes; /* number -> struct ns_inode, also those not linked any more */
	struct ns_inode **names;
	size_t n_names, n_buckets;
	struct ns_inode *root;
	struct list dirty;
	struct list stale, stale_names; /* ns_stale.c */
	uint64_t *dead; /* numbers removed since the last freeze that may have a row */
	size_t n_dead, cap_dead;
	uint64_t next_ino, next_cookie;
	struct ns_counts counts; /* but for `inodes` and `memory`, which ns_count() makes */
	uint64_t heap;		 /* bytes of names, places and extended attributes of all inodes */
	unsigned int writers_total;
	void (*on_gone)(void *arg, uint64_t ino);
	void *arg;
};

struct ns_stale_name {
	struct list link;
	uint64_t parent;
	char name[];
};

/* One inode as the catalog keeps it; name and xattrs are malloc'ed. */
struct ns_row {
	uint64_t ino, parent; /* parent 0: the root */
	char *name;
	uint32_t name_len;
	uint32_t mode, uid, gid, flags;
	uint64_t size;
	struct timespec mtime, ctime;
	uint8_t *xattrs; /* u16 name length, u32 value length, name, value; sorted by name; all
			    little-endian */
	size_t xattrs_len;
};

static inline bool ns_is_dir(const struct ns_inode *i)
{
	return S_ISDIR(i->mode);
}

struct timespec ns_now(void);

/* Memory of an extended attribute, and of all that belongs to an inode beside its structure:
 * ns->heap is the sum of the latter. Whoever changes one of them changes that. */
static inline uint64_t ns_xattr_heap(const struct ns_xattr *x)
{
	return x ? heap_cost(sizeof(*x) + x->name_len + 1u + x->size) : 0;
}

uint64_t ns_inode_heap(const struct ns_inode *i);

/* namespace.c: structure */
struct ns *ns_new(void (*on_gone)(void *arg, uint64_t ino), void *arg);
void ns_delete(struct ns *ns);
struct ns_inode *ns_inode_new(uint64_t ino, uint32_t mode);
void ns_inode_free(struct ns_inode *i);
struct ns_inode *ns_find_locked(const struct ns *ns, uint64_t ino);
/* The directory `parent`, linked or not: -ENOENT, -ENOTDIR. */
int ns_find_dir_locked(const struct ns *ns, uint64_t parent, struct ns_inode **out);
/* What directory `parent` has under `name`: -ENOENT, -ENOTDIR, or what ns_name_check() says. */
int ns_find_entry_locked(const struct ns *ns, uint64_t parent, const char *name,
			 struct ns_inode **dir, struct ns_inode **out);
struct ns_inode *ns_child_locked(const struct ns *ns, const struct ns_inode *dir, const char *name);
int ns_name_check(const char *name); /* 0, -ENOENT, -EINVAL, -ENAMETOOLONG */
/* Reserves what ns_link_locked() needs in `dir`, so that it cannot fail. */
int ns_link_prepare_locked(struct ns *ns, struct ns_inode *dir);
/* `name` is malloc'ed and becomes the inode's. cookie 0: a new place at the end. */
void ns_link_locked(struct ns *ns, struct ns_inode *dir, struct ns_inode *i, char *name,
		    uint64_t cookie);
void ns_unlink_locked(struct ns *ns, struct ns_inode *i); /* only takes it out of its directory */
/* Frees it if nothing holds it; returns the number for on_gone, 0 if there is none to tell. */
uint64_t ns_drop_locked(struct ns *ns, struct ns_inode *i);
void ns_gone(struct ns *ns, uint64_t ino); /* tells, unless 0; lock not held */
void ns_dirty_locked(struct ns *ns, struct ns_inode *i);
int ns_dead_reserve_locked(struct ns *ns, size_t more);
void ns_attr_locked(const struct ns_inode *i, struct ns_attr *a);

/* ns_stale.c */
/* The kernel is being shown its attributes, and a name of it. */
void ns_shown_locked(struct ns *ns, struct ns_inode *i, bool name);
void ns_forgotten_locked(struct ns_inode *i); /* the kernel has let go of it */
void ns_stale_locked(struct ns *ns, struct ns_inode *i, unsigned int what);
void ns_stale_name_locked(struct ns *ns, struct ns_inode *i); /* before it loses its name */
void ns_stale_fini(struct ns *ns);

/* ns_xattr.c */
/* The time of access, where it was set by itself, is an extended attribute that nobody is shown: 8
 * bytes of seconds and 4 of nanoseconds, little-endian. So the catalog has it, also an older one. */
#define NS_XATTR_ATIME "trusted.moment.atime"
struct timespec ns_atime(const struct ns_inode *i);
int ns_set_atime(struct ns *ns, struct ns_inode *i,
		 const struct timespec *t); /* NULL: that of mtime; 0, -ENOMEM */
const struct ns_xattr *ns_xattr_find(const struct ns_inode *i, const char *name);
void ns_xattrs_free(struct ns_xattr *list);
int ns_xattrs_pack(const struct ns_xattr *list, uint8_t **out, size_t *len);
/* -EUCLEAN when the bytes are no packed list. */
int ns_xattrs_unpack(const uint8_t *buf, size_t len, struct ns_xattr **out);
/* The entry at *pos of a packed list, which moves behind it. 0 at the end, 1, or -EUCLEAN. */
int ns_xattrs_next(const uint8_t *buf, size_t len, size_t *pos, const char **name,
		   uint32_t *name_len, const uint8_t **value, uint32_t *size);

/* ns_meta.c: the generated text; under the lock. */
int ns_meta_render_locked(const struct ns_inode *dir, char **out, size_t *len);

/* ns_row.c: to and from rows */
int ns_row_get_locked(const struct ns_inode *i, struct ns_row *row);
void ns_row_fini(struct ns_row *row);
/* Sets attributes (not the name) as the row has them, and extended attributes, which become the
 * inode's: what ns_xattrs_unpack() made of the row's. Cannot fail. */
void ns_row_put_locked(struct ns *ns, struct ns_inode *i, const struct ns_row *row,
		       struct ns_xattr *xattrs);
/*
 * Replaces the whole tree by `rows`, which were checked: unique numbers and names, every parent a
 * directory among them, one root. Inodes that exist keep their references; those that are not in
 * `rows` become removed ones. gone[] (room for all inodes there were, see ns->inodes.n) gets the
 * files whose data can go; *n_gone how many. 0 or -ENOMEM, and then nothing has changed.
 */
int ns_replace_locked(struct ns *ns, const struct ns_row *rows, size_t n, uint64_t *gone,
		      size_t *n_gone);

#endif
