/* SPDX-License-Identifier: Apache-2.0 */
/*
 * namespace.h - the tree under params/: names, attributes, extended attributes, all in RAM.
 *
 * Any thread may call these; one mutex inside, held for microseconds and never across I/O. Nothing
 * here touches file data: sizes and block counts are published by the loop thread (ns_publish),
 * which owns the data. Persistence is catalog.h's: a commit freezes what changed.
 *
 * There are directories and regular files; no hard links (link count of a file is 1, or 0 when it
 * has been removed and is still referenced), no symbolic links, no devices. An inode number is
 * never used again.
 */
#ifndef ENGINE_NAMESPACE_H
#define ENGINE_NAMESPACE_H

#include <sys/stat.h>
#include <time.h>

#include "engine/types.h"

struct ns;

#define NS_ROOT		   ((uint64_t)2)       /* params/; 1 is left to the mount's own root */
#define NS_FIRST	   ((uint64_t)3)       /* numbers of real inodes start here ... */
#define NS_LAST		   ((uint64_t)1 << 48) /* ... and stay below this */
#define NS_NAME_MAX	   255
#define NS_META_NAME	   "meta.json" /* of a parameter's directory */
#define NS_XATTR_NAME_MAX  255
#define NS_XATTR_VALUE_MAX 65536
#define NS_FILE_SIZE_MAX   ((uint64_t)4 << 40) /* -EFBIG above */

enum ns_flag {
	NS_GENERATED =
		1u
		<< 0, /* meta.json of a registered parameter: content made on read (ns_generate) */
	NS_REGISTERED = 1u << 1, /* a state file of the current session: not writable, movable,
				    removable by others */
	NS_HELD =
		1u
		<< 2, /* part of an open (or torn) step: a commit leaves it at its committed row */
	NS_CLAIMED = 1u << 3, /* whoever has it open for writing has it alone (ns_claim) */
};

struct ns_attr {
	uint64_t ino, parent;
	uint32_t mode, uid, gid, nlink;
	uint64_t size;
	uint64_t bytes; /* allocated: st_blocks * 512; what is only in RAM counts */
	struct timespec atime, mtime, ctime;
	uint32_t flags;
	unsigned int writers; /* open writable handles */
};

/* Lookup and references. A reference (nlookup) keeps a removed inode alive. -ENOENT, -ENOTDIR,
 * -ENAMETOOLONG. */
int ns_lookup(struct ns *ns, uint64_t parent, const char *name,
	      struct ns_attr *a); /* for the kernel: takes a reference, and it is shown the name */
int ns_ref(struct ns *ns, uint64_t parent, const char *name,
	   struct ns_attr *a); /* takes a reference */
int ns_peek(struct ns *ns, uint64_t parent, const char *name, struct ns_attr *a); /* does not */
int ns_walk(struct ns *ns, const char *path,
	    struct ns_attr *a); /* "a/b/c" below params/, no reference; "" is the root */
void ns_forget(struct ns *ns, uint64_t ino, uint64_t n);
int ns_getattr(struct ns *ns, uint64_t ino, struct ns_attr *a); /* -ESTALE when gone */
/* The same, to be shown to the kernel, with a name if `name`: ns_stale.c. */
int ns_look(struct ns *ns, uint64_t ino, bool name, struct ns_attr *a);
int ns_path(struct ns *ns, uint64_t ino, char *buf,
	    size_t len); /* path below params/, for messages; -ENOENT when unlinked */

/* Making and removing. The maker gets a reference when `ref`. -EEXIST, -ENOTEMPTY, -EBUSY
 * (registered), -EXDEV, -EINVAL (into itself). */
int ns_create(struct ns *ns, uint64_t parent, const char *name, uint32_t mode, uint32_t uid,
	      uint32_t gid, bool ref, struct ns_attr *a);
int ns_mkdir(struct ns *ns, uint64_t parent, const char *name, uint32_t mode, uint32_t uid,
	     uint32_t gid, bool ref, struct ns_attr *a);
int ns_unlink(struct ns *ns, uint64_t parent, const char *name);
int ns_rmdir(struct ns *ns, uint64_t parent,
	     const char *name); /* a directory that holds only a generated meta.json counts as
				   empty: it goes too */
/* Either of these, by somebody else than the kernel, which therefore is to be told. */
int ns_remove(struct ns *ns, uint64_t parent, const char *name, bool dir);
int ns_rename(struct ns *ns, uint64_t parent, const char *name, uint64_t newparent,
	      const char *newname,
	      unsigned int flags /* RENAME_NOREPLACE, RENAME_EXCHANGE: -EINVAL */);

/*
 * Attributes. mask: which of mode, uid, gid, mtime, atime to set. A change of owner takes a file's
 * set-ID bits away. The time of access is mtime, until it is set by itself; reading does not move it.
 */
enum {
	NS_SET_MODE = 1,
	NS_SET_UID = 2,
	NS_SET_GID = 4,
	NS_SET_MTIME = 8,
	NS_SET_MTIME_NOW = 16,
	NS_SET_ATIME = 32,
	NS_SET_ATIME_NOW = 64,
};
int ns_setattr(struct ns *ns, uint64_t ino, unsigned int mask, const struct ns_attr *in,
	       struct ns_attr *out);

/* A file loses these set-ID bits. Which, the edge says (setid.c of the daemon): it knows the caller. */
void ns_kill_setid(struct ns *ns, uint64_t ino, uint32_t bits);

/*
 * Reading a directory: calls fn for each entry after `cookie` (0: from the start) until fn returns
 * false. Cookies are stable: an entry that exists throughout is reported exactly once, whatever is
 * made or removed meanwhile. fn runs under the lock: copy and return. ns_readdir_ref() adds n
 * references after the lock (readdirplus).
 */
typedef bool ns_readdir_fn(void *arg, const char *name, const struct ns_attr *a, uint64_t cookie);
int ns_readdir(struct ns *ns, uint64_t ino, uint64_t cookie, bool take_refs, ns_readdir_fn *fn,
	       void *arg);
/* Names that are made from now on, also by renaming, have this cookie or a larger one. */
uint64_t ns_next_cookie(struct ns *ns);

/* Extended attributes. get/list: size 0 asks for the size; -ERANGE, -ENODATA, -E2BIG,
 * -EEXIST/-ENODATA by flags (XATTR_CREATE/XATTR_REPLACE). Return the size, or 0 for set/remove. */
int64_t ns_getxattr(struct ns *ns, uint64_t ino, const char *name, void *buf, size_t size);
int64_t ns_listxattr(struct ns *ns, uint64_t ino, char *buf, size_t size);
int ns_setxattr(struct ns *ns, uint64_t ino, const char *name, const void *value, size_t size,
		int flags);
int ns_removexattr(struct ns *ns, uint64_t ino, const char *name);

/* The session's own way to set user.moment.* of what is registered: several at once, all or none;
 * value NULL removes (also what is not there). No name twice. Does not ask whether the inode is
 * registered. */
struct ns_moment {
	const char *name;
	const void *value;
	size_t size;
};
int ns_set_moment(struct ns *ns, uint64_t ino, const struct ns_moment *m, size_t n);

/*
 * Open handles. Opening for writing a file that is registered or generated: -EBUSY, -EACCES.
 * ns_open_writers() tells the number of writable handles (lseek and st_blocks answer differently
 * while there are any), total: over all files.
 */
int ns_open(struct ns *ns, uint64_t ino, bool write);
void ns_release(struct ns *ns, uint64_t ino, bool write);
unsigned int ns_open_writers(struct ns *ns, uint64_t ino);
unsigned int ns_open_writers_total(struct ns *ns);

/* Has a commit taken it since it was made, or was it there at the mount? */
bool ns_is_stored(struct ns *ns, uint64_t ino);

/*
 * Sessions: a file becomes registered only while nobody has it open for writing (-EBUSY), and its
 * directory entry is then pinned. hold: set or clear NS_HELD on registered inodes, at step begin
 * and end.
 */
int ns_register(struct ns *ns, uint64_t ino);
/*
 * The one writable handle that there is (else -EBUSY) excludes others until it is released: nobody
 * opens the file for writing, cuts it, renames or removes it, or a directory above it. What is so
 * already stays so.
 */
int ns_claim(struct ns *ns, uint64_t ino, bool claim);
bool ns_is_claimed(struct ns *ns, uint64_t ino);
void ns_unregister(struct ns *ns, uint64_t ino);
void ns_hold(struct ns *ns, uint64_t ino, bool held);

/* Loop thread: data changed. size == UINT64_MAX: unchanged; bytes == UINT64_MAX likewise; `touch`
 * moves mtime and ctime to now and marks the inode for the next commit. */
void ns_publish(struct ns *ns, uint64_t ino, uint64_t size, uint64_t bytes, bool touch);

/* Any thread: a write has reached `size`; the file is at least that long now. Times move. */
void ns_grow(struct ns *ns, uint64_t ino, uint64_t size);

/*
 * What the kernel was shown and is not so any more (ns_stale.c has the whole story). ns_stale() notes
 * it; ns_stale_take() gives up to `most` of what was noted, for the kernel to be told, until it returns
 * 0. ns_set_paged(): pages of it get into the kernel's cache. Any thread.
 */
enum { NS_STALE_ATTR = 1, NS_STALE_DATA = 2 };
struct ns_stale {
	uint64_t ino;	 /* 0: a name */
	uint64_t parent; /* of the name */
	bool data;	 /* its pages, too */
	char name[NS_NAME_MAX + 1];
};
void ns_stale(struct ns *ns, uint64_t ino, unsigned int what);
bool ns_stale_any(struct ns *ns);
void ns_stale_written(struct ns *ns); /* data of all that is open for writing: to be fetched */
size_t ns_stale_take(struct ns *ns, struct ns_stale *out, size_t most);
void ns_set_paged(struct ns *ns, uint64_t ino);
bool ns_is_paged(struct ns *ns, uint64_t ino);

/*
 * The content of a generated meta.json: malloc'ed, NUL-terminated; *len without the NUL. From the
 * attributes of its directory (user.moment.name, .shape, .step, .hyper) and of the files beside it
 * (user.moment.dtype). One JSON object, keys: format ("momentfs-param"), version, name, shape,
 * step, files {file name: {dtype, bytes}}, hyper (object) when set.
 */
int ns_generate(struct ns *ns, uint64_t ino, char **out, size_t *len);
/*
 * Makes the generated meta.json of directory `dir`, or turns the ordinary file `ino` of that name
 * into it (0: there is none). -EAGAIN: it is not that one which is there now. -EBUSY: it is open for
 * writing. For file_make_meta() (cache.h), which takes the file's data away in the same instant.
 */
int ns_make_meta(struct ns *ns, uint64_t dir, uint64_t ino);

struct ns_counts {
	uint64_t files, dirs, bytes; /* sum of sizes */
	uint64_t inodes; /* those that are removed and still referenced, too */
	uint64_t memory; /* bytes of memory that the tree takes */
};
void ns_count(struct ns *ns, struct ns_counts *c);

#endif
