/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuse_ops.c - the FUSE handlers for names and attributes, and the table of all handlers.
 *
 * All of it is answered at once from the namespace, which is in RAM; only a change of size goes to
 * the engine (fuse_data.c). The kernel checks permissions (default_permissions). Each entry that is
 * handed to the kernel carries one reference in the namespace, which FORGET gives back; params/
 * itself and the daemon's own files are always there and are not counted.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/statvfs.h>
#include <sys/xattr.h>

#include "daemon/daemon.h"

#define BACKGROUND \
	32u /* requests that the kernel may keep in flight for readahead and write-back */

static bool is_counted(uint64_t ino)
{
	return ino >= NS_FIRST && ino < VIRT_FIRST;
}

void daemon_forget(struct daemon *d, uint64_t ino, uint64_t n)
{
	struct ns_attr a;

	if (is_counted(ino))
		ns_forget(d->ns, ino, n);
	if (lost_error(d, ino) && ns_getattr(d->ns, ino, &a) < 0)
		lost_found(d, ino, 0, UINT64_MAX); /* removed */
}

/* ---- attributes ----------------------------------------------------------------------------- */

void attr_to_stat(const struct ns_attr *a, struct stat *st)
{
	uint64_t bytes = a->bytes;

	/*
	 * Pages that are dirty through a mapping are unknown here: while one may exist, claim that
	 * there are no holes, or `tar -S` would archive zeros.
	 */
	if (a->writers)
		bytes = max_u64(bytes, round_up_u64(a->size, MOMENT_UNIT));
	memset(st, 0, sizeof(*st));
	st->st_ino = a->ino;
	st->st_mode = a->mode;
	st->st_nlink = a->nlink;
	st->st_uid = a->uid;
	st->st_gid = a->gid;
	st->st_size = (off_t)a->size;
	st->st_blksize = ENGINE_OP_MAX;
	st->st_blocks = (blkcnt_t)((bytes + 511) / 512);
	st->st_mtim = a->mtime;
	st->st_atim = a->atime;
	st->st_ctim = a->ctime;
}

/*
 * With a writable handle open the figures change without notice when it is closed, those of a made-up
 * file with its neighbours (ns_shown_locked() has the same rule).
 */
static double fill_stat(const struct ns_attr *a, struct stat *st)
{
	attr_to_stat(a, st);
	return a->writers || a->flags & NS_GENERATED ? 0 : ATTR_TIMEOUT;
}

int daemon_getattr(struct daemon *d, uint64_t ino, struct stat *st, double *timeout)
{
	struct ns_attr a;
	int res;

	*timeout = ATTR_TIMEOUT;
	if (ino_is_virtual(ino))
		return virt_getattr(d, ino, st);
	res = ns_look(d->ns, ino, false, &a);
	if (!res)
		*timeout = fill_stat(&a, st);
	return res;
}

void daemon_fill_entry(const struct ns_attr *a, struct fuse_entry_param *e)
{
	memset(e, 0, sizeof(*e));
	e->ino = a->ino;
	e->attr_timeout = fill_stat(a, &e->attr);
	e->entry_timeout = ATTR_TIMEOUT;
}

static void reply_entry(fuse_req_t req, const struct ns_attr *a)
{
	struct daemon *d = daemon_of(req);
	struct fuse_entry_param e;

	daemon_fill_entry(a, &e);
	if (fuse_reply_entry(req, &e) < 0)
		daemon_forget(d, a->ino, 1);
}

static void op_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	struct stat st;
	double timeout;
	int res = daemon_getattr(daemon_of(req), ino, &st, &timeout);

	(void)fi;
	if (res < 0)
		reply_err(req, res);
	else
		fuse_reply_attr(req, &st, timeout);
}

static void op_setattr(fuse_req_t req, fuse_ino_t ino, struct stat *attr, int to_set,
		       struct fuse_file_info *fi)
{
	struct daemon *d = daemon_of(req);
	struct ns_attr in = {.mode = attr->st_mode,
			     .uid = attr->st_uid,
			     .gid = attr->st_gid,
			     .atime = attr->st_atim,
			     .mtime = attr->st_mtim};
	struct ns_attr out;
	unsigned int mask = 0;
	int res = 0;

	if (ino_is_virtual(ino)) {
		/* `echo x > .moment/step` truncates first: that is fine, and nothing else is. */
		if (to_set != FUSE_SET_ATTR_SIZE || attr->st_size != 0)
			reply_err(req, -EPERM);
		else
			op_getattr(req, ino, fi);
		return;
	}
	if (to_set & FUSE_SET_ATTR_MODE)
		mask |= NS_SET_MODE;
	if (to_set & FUSE_SET_ATTR_UID)
		mask |= NS_SET_UID;
	if (to_set & FUSE_SET_ATTR_GID)
		mask |= NS_SET_GID;
	if (to_set & FUSE_SET_ATTR_MTIME_NOW)
		mask |= NS_SET_MTIME_NOW;
	else if (to_set & FUSE_SET_ATTR_MTIME)
		mask |= NS_SET_MTIME;
	if (to_set & FUSE_SET_ATTR_ATIME_NOW)
		mask |= NS_SET_ATIME_NOW;
	else if (to_set & FUSE_SET_ATTR_ATIME)
		mask |= NS_SET_ATIME;
	setid_changed(req, ino,
		      to_set & (FUSE_SET_ATTR_UID | FUSE_SET_ATTR_GID) ? SETID_OWNER : SETID_KERNEL_SAYS);
	if (mask)
		res = ns_setattr(d->ns, ino, mask, &in, &out);
	if (res < 0)
		reply_err(req, res);
	else if (to_set & FUSE_SET_ATTR_SIZE)
		data_truncate(req, ino, (uint64_t)attr->st_size, fi != NULL);
	else
		op_getattr(req, ino, fi);
}

/* ---- names ---------------------------------------------------------------------------------- */

static void lookup_virtual(fuse_req_t req, uint64_t parent, const char *name)
{
	struct daemon *d = daemon_of(req);
	struct fuse_entry_param e = {.entry_timeout = ATTR_TIMEOUT};
	size_t n;
	const struct virt_entry *list = virt_list(parent, &n);
	int res = list ? -ENOENT : -ENOTDIR;

	for (size_t i = 0; list && i < n; i++) {
		if (strcmp(list[i].name, name))
			continue;
		e.ino = list[i].ino;
		res = daemon_getattr(d, e.ino, &e.attr, &e.attr_timeout);
	}
	if (res < 0)
		reply_err(req, res);
	else
		fuse_reply_entry(req, &e);
}

static void op_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
	struct daemon *d = daemon_of(req);
	struct ns_attr a;
	int res;

	if (ino_is_virtual(parent)) {
		lookup_virtual(req, parent, name);
		return;
	}
	res = ns_lookup(d->ns, parent, name, &a);
	if (res < 0)
		reply_err(req, res);
	else
		reply_entry(req, &a);
}

static void op_forget(fuse_req_t req, fuse_ino_t ino, uint64_t nlookup)
{
	daemon_forget(daemon_of(req), ino, nlookup);
	fuse_reply_none(req);
}

static void op_forget_multi(fuse_req_t req, size_t count, struct fuse_forget_data *forgets)
{
	for (size_t i = 0; i < count; i++)
		daemon_forget(daemon_of(req), forgets[i].ino, forgets[i].nlookup);
	fuse_reply_none(req);
}

/* New things belong to who makes them; below a setgid directory, to its group. */
static int owner_of_new(fuse_req_t req, uint64_t parent, mode_t *mode, uid_t *uid, gid_t *gid)
{
	const struct fuse_ctx *ctx = fuse_req_ctx(req);
	struct ns_attr a;
	int res = ino_is_virtual(parent) ? -EPERM : ns_getattr(daemon_of(req)->ns, parent, &a);

	if (res < 0)
		return res;
	*uid = ctx->uid;
	*gid = ctx->gid;
	if (a.mode & S_ISGID) {
		*gid = a.gid;
		if (S_ISDIR(*mode))
			*mode |= S_ISGID;
	}
	return 0;
}

static int make(fuse_req_t req, uint64_t parent, const char *name, mode_t mode, struct ns_attr *a)
{
	struct daemon *d = daemon_of(req);
	uid_t uid;
	gid_t gid;
	int res = owner_of_new(req, parent, &mode, &uid, &gid);

	if (res < 0)
		return res;
	bracket_name(req);
	if (S_ISDIR(mode))
		res = ns_mkdir(d->ns, parent, name, mode, uid, gid, true, a);
	else
		res = ns_create(d->ns, parent, name, mode, uid, gid, true, a);
	return res < 0 ? res : ns_look(d->ns, a->ino, true, a);
}

static void op_mkdir(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode)
{
	struct ns_attr a;
	int res = make(req, parent, name, (mode & ~(mode_t)S_IFMT) | S_IFDIR, &a);

	if (res < 0)
		reply_err(req, res);
	else
		reply_entry(req, &a);
}

static void op_mknod(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, dev_t rdev)
{
	struct ns_attr a;
	int res = S_ISREG(mode) ? make(req, parent, name, mode, &a) : -EPERM;

	(void)rdev;
	if (res < 0)
		reply_err(req, res);
	else
		reply_entry(req, &a);
}

static void op_create(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode,
		      struct fuse_file_info *fi)
{
	struct daemon *d = daemon_of(req);
	bool write = (fi->flags & O_ACCMODE) != O_RDONLY;
	struct fuse_entry_param e;
	struct ns_attr a;
	int res = make(req, parent, name, (mode & ~(mode_t)S_IFMT) | S_IFREG, &a);

	if (res < 0) {
		reply_err(req, res);
		return;
	}
	res = ns_open(d->ns, a.ino, write);
	if (res < 0) {
		daemon_forget(d, a.ino, 1);
		reply_err(req, res);
		return;
	}
	data_create_handle(d, a.ino, fi);
	a.writers = write; /* nobody else knows it yet */
	daemon_fill_entry(&a, &e);
	if (fuse_reply_create(req, &e, fi) < 0) {
		atomic_fetch_sub(&d->handles, 1);
		ns_release(d->ns, a.ino, write);
		daemon_forget(d, a.ino, 1);
	}
}

static void op_unlink(fuse_req_t req, fuse_ino_t parent, const char *name)
{
	bracket_name(req);
	reply_err(req,
		  ino_is_virtual(parent) ? -EPERM : ns_unlink(daemon_of(req)->ns, parent, name));
}

static void op_rmdir(fuse_req_t req, fuse_ino_t parent, const char *name)
{
	bracket_name(req);
	reply_err(req,
		  ino_is_virtual(parent) ? -EPERM : ns_rmdir(daemon_of(req)->ns, parent, name));
}

static void op_rename(fuse_req_t req, fuse_ino_t parent, const char *name, fuse_ino_t newparent,
		      const char *newname, unsigned int flags)
{
	bracket_name(req);
	if (ino_is_virtual(parent) || ino_is_virtual(newparent))
		reply_err(req, parent == newparent ? -EPERM : -EXDEV);
	else
		reply_err(req,
			  ns_rename(daemon_of(req)->ns, parent, name, newparent, newname, flags));
}

/* There are no links: EPERM is what POSIX has for that, where an absent handler says ENOSYS. */
static void op_symlink(fuse_req_t req, const char *link, fuse_ino_t parent, const char *name)
{
	(void)link, (void)parent, (void)name;
	reply_err(req, -EPERM);
}

static void op_link(fuse_req_t req, fuse_ino_t ino, fuse_ino_t newparent, const char *newname)
{
	(void)ino, (void)newparent, (void)newname;
	reply_err(req, -EPERM);
}

/* ---- the file system, extended attributes --------------------------------------------------- */

static void op_statfs(fuse_req_t req, fuse_ino_t ino)
{
	struct engine_statfs s;
	struct statvfs v = {.f_bsize = MOMENT_UNIT, .f_frsize = MOMENT_UNIT};

	(void)ino;
	engine_get_statfs(daemon_of(req)->e, &s);
	v.f_blocks = s.total / MOMENT_UNIT;
	v.f_bfree = v.f_bavail = s.free / MOMENT_UNIT;
	v.f_files = s.files + (1u << 30);
	v.f_ffree = v.f_favail = 1u << 30;
	v.f_namemax = NS_NAME_MAX;
	fuse_reply_statfs(req, &v);
}

/* user.* is kept; of the others there are none, and none can be set. */
static bool xattr_is_kept(const char *name)
{
	return !strncmp(name, "user.", 5);
}

static int xattr_refused(const char *name)
{
	return strncmp(name, "security.", 9) ? -EOPNOTSUPP : -ENODATA;
}

static void reply_xattr(fuse_req_t req, int64_t res, const char *buf, size_t size)
{
	if (res < 0)
		reply_err(req, (int)res);
	else if (size == 0)
		fuse_reply_xattr(req, (size_t)res);
	else
		fuse_reply_buf(req, buf, (size_t)res);
}

static void op_getxattr(fuse_req_t req, fuse_ino_t ino, const char *name, size_t size)
{
	char *buf = NULL;
	int64_t res;

	if (!xattr_is_kept(name)) {
		reply_err(req, xattr_refused(name));
		return;
	}
	if (ino_is_virtual(ino)) {
		reply_err(req, -ENODATA);
		return;
	}
	if (!strcmp(name, XATTR_CACHE)) {
		data_residency(req, ino, size);
		return;
	}
	if (size && !(buf = malloc(size))) {
		reply_err(req, -ENOMEM);
		return;
	}
	res = ns_getxattr(daemon_of(req)->ns, ino, name, buf, size);
	reply_xattr(req, res, buf, size);
	free(buf);
}

static void op_listxattr(fuse_req_t req, fuse_ino_t ino, size_t size)
{
	char *buf = NULL;
	int64_t res;

	if (size && !(buf = malloc(size))) {
		reply_err(req, -ENOMEM);
		return;
	}
	res = ino_is_virtual(ino) ? 0 : ns_listxattr(daemon_of(req)->ns, ino, buf, size);
	reply_xattr(req, res, buf, size);
	free(buf);
}

static void op_setxattr(fuse_req_t req, fuse_ino_t ino, const char *name, const char *value,
			size_t size, int flags)
{
	if (!xattr_is_kept(name))
		reply_err(req, -EOPNOTSUPP);
	else if (ino_is_virtual(ino) || !strcmp(name, XATTR_CACHE))
		reply_err(req, -EPERM);
	else
		reply_err(req, ns_setxattr(daemon_of(req)->ns, ino, name, value, size, flags));
}

static void op_removexattr(fuse_req_t req, fuse_ino_t ino, const char *name)
{
	if (!xattr_is_kept(name))
		reply_err(req, xattr_refused(name));
	else if (ino_is_virtual(ino))
		reply_err(req, -ENODATA);
	else
		reply_err(req, ns_removexattr(daemon_of(req)->ns, ino, name));
}

/* ---- start ---------------------------------------------------------------------------------- */

static void want(struct fuse_conn_info *conn, unsigned int cap, bool on)
{
	if (on)
		conn->want |= conn->capable & cap;
	else
		conn->want &= ~cap;
}

static void op_init(void *userdata, struct fuse_conn_info *conn)
{
	struct daemon *d = userdata;

	/* A larger max_write kills the session with libfuse 3.14. */
	conn->max_write = min_u64(conn->max_write, ENGINE_OP_MAX);
	conn->max_read = ENGINE_OP_MAX; /* as the mount option says */
	conn->max_background = BACKGROUND;
	conn->congestion_threshold = BACKGROUND / 4 * 3;
	/* Pages are dropped when they are stale (notify.c), not when a time stamp moves. */
	want(conn, FUSE_CAP_AUTO_INVAL_DATA, false);
	want(conn, FUSE_CAP_WRITEBACK_CACHE, false);
	want(conn, FUSE_CAP_ATOMIC_O_TRUNC, false);
	want(conn, FUSE_CAP_SPLICE_READ | FUSE_CAP_SPLICE_WRITE | FUSE_CAP_SPLICE_MOVE, false);
	want(conn, FUSE_CAP_ASYNC_READ | FUSE_CAP_ASYNC_DIO | FUSE_CAP_PARALLEL_DIROPS, true);
	want(conn, FUSE_CAP_READDIRPLUS | FUSE_CAP_READDIRPLUS_AUTO, true);
	atomic_store(&d->initialized, true);
}

const struct fuse_lowlevel_ops daemon_ops = {
	.init = op_init,
	.lookup = op_lookup,
	.forget = op_forget,
	.forget_multi = op_forget_multi,
	.getattr = op_getattr,
	.setattr = op_setattr,
	.mknod = op_mknod,
	.mkdir = op_mkdir,
	.symlink = op_symlink,
	.link = op_link,
	.unlink = op_unlink,
	.rmdir = op_rmdir,
	.rename = op_rename,
	.create = op_create,
	.opendir = dir_open,
	.readdir = dir_read,
	.readdirplus = dir_readplus,
	.releasedir = dir_release,
	.fsyncdir = data_fsyncdir,
	.statfs = op_statfs,
	.setxattr = op_setxattr,
	.getxattr = op_getxattr,
	.listxattr = op_listxattr,
	.removexattr = op_removexattr,
	.open = data_open,
	.ioctl = data_ioctl,
	.read = data_read,
	.write = data_write,
	.flush = data_flush,
	.release = data_release,
	.fsync = data_fsync,
	.fallocate = data_fallocate,
	.lseek = data_lseek,
};
