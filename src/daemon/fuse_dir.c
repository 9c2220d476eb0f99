/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuse_dir.c - the FUSE handlers that list directories.
 *
 * The namespace calls back under its lock, so entries are copied first and the answer is made
 * afterwards. Each entry of a READDIRPLUS that reaches the kernel carries a reference, "." and ".."
 * excepted. Receive threads.
 *
 * An open directory shows the names that were there when it was opened, or read from its start
 * again. Names that come later, also by renaming, have larger cookies and are not shown: a program
 * that renames what it reads would else meet the new names without end.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/daemon.h"

struct dir_handle {
	_Atomic uint64_t end; /* the cookie that the next new name would have had */
};

static struct dir_handle *dir_of(const struct fuse_file_info *fi)
{
	return (struct dir_handle *)(uintptr_t)fi->fh;
}

void dir_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	struct daemon *d = daemon_of(req);
	struct dir_handle *h = calloc(1, sizeof(*h));

	if (!h) {
		reply_err(req, -ENOMEM);
		return;
	}
	atomic_init(&h->end, ns_next_cookie(d->ns));
	fi->fh = (uint64_t)(uintptr_t)h;
	if (!ino_is_virtual(ino))
		atomic_fetch_add(&d->handles, 1);
	if (fuse_reply_open(req, fi) >= 0)
		return;
	if (!ino_is_virtual(ino))
		atomic_fetch_sub(&d->handles, 1);
	free(h);
}

void dir_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	struct daemon *d = daemon_of(req);

	free(dir_of(fi));
	if (!ino_is_virtual(ino) && atomic_fetch_sub(&d->handles, 1) == 1 &&
	    atomic_load(&d->detaching))
		daemon_raise(d, EVENT_IDLE);
	reply_err(req, 0);
}

/* An answer to READDIR or READDIRPLUS in the making. Cookies 1 and 2 are "." and "..". */
struct listing {
	fuse_req_t req;
	bool plus;
	char *buf;
	size_t size, used; /* bytes of the answer */
	struct listed {
		struct listed *next;
		struct ns_attr a;
		off_t cookie;
		char name[];
	} * first, **last;
	size_t reserved; /* bytes that the collected entries will take */
	uint64_t end;	 /* no entry with this cookie or a larger one */
};

static size_t entry_space(struct listing *l, const char *name)
{
	return l->plus ? fuse_add_direntry_plus(l->req, NULL, 0, name, NULL, 0)
		       : fuse_add_direntry(l->req, NULL, 0, name, NULL, 0);
}

static bool listing_add(struct listing *l, const char *name, const struct fuse_entry_param *e,
			off_t cookie)
{
	size_t left = l->size - l->used;
	size_t n =
		l->plus ? fuse_add_direntry_plus(l->req, l->buf + l->used, left, name, e, cookie)
			: fuse_add_direntry(l->req, l->buf + l->used, left, name, &e->attr, cookie);

	if (n > left)
		return false;
	l->used += n;
	return true;
}

/* Under the namespace's lock: only copies. */
static bool collect(void *arg, const char *name, const struct ns_attr *a, uint64_t cookie)
{
	struct listing *l = arg;
	size_t space = entry_space(l, name), len = strlen(name) + 1;
	struct listed *e;

	if (cookie >= l->end || l->used + l->reserved + space > l->size)
		return false;
	e = malloc(sizeof(*e) + len);
	if (!e)
		return false;
	e->next = NULL;
	e->a = *a;
	e->cookie = (off_t)cookie + 2;
	memcpy(e->name, name, len);
	*l->last = e;
	l->last = &e->next;
	l->reserved += space;
	return true;
}

static int list_virtual(struct daemon *d, struct listing *l, uint64_t dir, off_t off)
{
	size_t n;
	const struct virt_entry *list = virt_list(dir, &n);

	if (!list)
		return -ENOTDIR;
	for (size_t i = off <= 2 ? 0 : (size_t)off - 2; i < n; i++) {
		struct fuse_entry_param e = {.ino = list[i].ino, .entry_timeout = ATTR_TIMEOUT};
		int res = daemon_getattr(d, e.ino, &e.attr, &e.attr_timeout);

		if (res < 0)
			return res;
		if (!listing_add(l, list[i].name, &e, (off_t)i + 3))
			break;
	}
	return 0;
}

static int list_real(struct daemon *d, struct listing *l, uint64_t dir, off_t off)
{
	struct fuse_entry_param p;
	int res;

	l->last = &l->first;
	res = ns_readdir(d->ns, dir, off <= 2 ? 0 : (uint64_t)off - 2, l->plus, collect, l);
	for (struct listed *e = l->first; e; e = e->next) {
		daemon_fill_entry(&e->a, &p);
		listing_add(l, e->name, &p, e->cookie); /* fits: collect() has counted */
	}
	return res;
}

static void free_listed(struct listed *e)
{
	while (e) {
		struct listed *next = e->next;

		free(e);
		e = next;
	}
}

static void list_dir(fuse_req_t req, uint64_t ino, size_t size, off_t off, struct dir_handle *h,
		     bool plus)
{
	struct daemon *d = daemon_of(req);
	struct listing l = {.req = req, .plus = plus, .size = min_u64(size, ENGINE_OP_MAX)};
	static const char *const dots[] = {".", ".."};
	struct ns_attr a;
	int res = 0;

	if (off == 0)
		atomic_store(&h->end, ns_next_cookie(d->ns));
	l.end = atomic_load(&h->end);
	l.buf = malloc(l.size ? l.size : 1);
	if (!l.buf) {
		reply_err(req, -ENOMEM);
		return;
	}
	for (off_t i = off; i < 2 && !res; i++) {
		/* The kernel takes the number and the type from these two and counts no reference.
		 */
		struct fuse_entry_param e = {.ino = ino, .attr = {.st_mode = S_IFDIR}};

		if (i == 1 && ino_is_virtual(ino))
			e.ino = FUSE_ROOT_ID;
		else if (i == 1 && ino == NS_ROOT)
			e.ino = FUSE_ROOT_ID;
		else if (i == 1 && !(res = ns_getattr(d->ns, ino, &a)))
			e.ino = a.parent;
		e.attr.st_ino = e.ino;
		if (!res && !listing_add(&l, dots[i], &e, i + 1))
			goto reply;
	}
	if (!res)
		res = ino_is_virtual(ino) ? list_virtual(d, &l, ino, off)
					  : list_real(d, &l, ino, off);
reply:
	if (res < 0) {
		reply_err(req, res);
	} else if (fuse_reply_buf(req, l.buf, l.used) < 0 && plus) {
		for (struct listed *e = l.first; e; e = e->next)
			daemon_forget(d, e->a.ino, 1);
	}
	free_listed(l.first);
	free(l.buf);
}

void dir_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi)
{
	list_dir(req, ino, size, off, dir_of(fi), false);
}

void dir_readplus(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi)
{
	list_dir(req, ino, size, off, dir_of(fi), true);
}
