/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ours.c - see ours.h. Stateless; any thread, but ours_check_dir() asks the user database and is
 * for opening only.
 *
 * Who may write to the directory: its owner, who must be this user or root, and members of its
 * group only if that is the owner's own group, which has the owner's name and no other member (the
 * user-private groups of most distributions, where umask 002 is usual). An access control list
 * may let more in, which the mode does not tell, so it is refused when the mode leaves a doubt.
 */
#include "engine/ours.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#define USERS_BUF 65536u

/* ---- the directory ---- */

static bool is_private_group(uid_t uid, gid_t gid)
{
	char *buf = malloc(2 * USERS_BUF);
	struct passwd pw, *user = NULL;
	struct group gr, *group = NULL;
	bool private;

	if (!buf || getpwuid_r(uid, &pw, buf, USERS_BUF, &user) || !user ||
	    getgrgid_r(gid, &gr, buf + USERS_BUF, USERS_BUF, &group) || !group) {
		free(buf);
		return false;
	}
	private = pw.pw_gid == gid && !strcmp(gr.gr_name, pw.pw_name);
	for (char **m = gr.gr_mem; private && *m; m++)
	private = !strcmp(*m, pw.pw_name);
	free(buf);
	return private;
}

int ours_check_dir(int dirfd, const char *path, char *err, size_t errlen)
{
	struct stat st;

	if (fstat(dirfd, &st)) {
		int r = -errno;

		snprintf(err, errlen, "%s: %s", path, strerror(-r));
		return r;
	}
	if (st.st_uid != geteuid() && st.st_uid != 0) {
		snprintf(err, errlen,
			 "%s belongs to uid %u, who could put other files in the place of its "
			 "files, but this runs as uid %u: run it as uid %u, or take the directory "
			 "over with: chown -R %u '%s'",
			 path, st.st_uid, geteuid(), st.st_uid, geteuid(), path);
		return -EPERM;
	}
	if (st.st_mode & S_IWOTH) {
		snprintf(err, errlen,
			 "%s: everybody may write to this directory (mode %04o), and so put other "
			 "files in the place of its files: chmod go-w '%s', or give a directory "
			 "below it",
			 path, st.st_mode & 07777, path);
		return -EPERM;
	}
	if (!(st.st_mode & S_IWGRP))
		return 0;
	if (fgetxattr(dirfd, "system.posix_acl_access", NULL, 0) > 0) {
		snprintf(err, errlen,
			 "%s: its access control list may let others write to this directory, and "
			 "so put other files in the place of its files: setfacl -b '%s' && chmod "
			 "go-w '%s'",
			 path, path, path);
		return -EPERM;
	}
	if (is_private_group(st.st_uid, st.st_gid))
		return 0;
	snprintf(err, errlen,
		 "%s: the members of group %u may write to this directory (mode %04o), and so put "
		 "other files in the place of its files: chmod g-w '%s'",
		 path, st.st_gid, st.st_mode & 07777, path);
	return -EPERM;
}

/* ---- its files ---- */

static int check_stat(const struct stat *st, bool readonly, const char **why)
{
	if (S_ISLNK(st->st_mode)) {
		*why = "is a symbolic link, and those are not followed: put the file itself in its "
		       "place, or remove the link";
		return -ELOOP;
	}
	if (!S_ISREG(st->st_mode)) {
		*why = "is not a regular file: remove it";
		return -EINVAL;
	}
	if (st->st_uid != geteuid() && st->st_uid != 0) {
		*why = "belongs to another user, and only files of the user who runs this or of "
		       "root are used: chown it, if it is the right one";
		return -EPERM;
	}
	if (!readonly && st->st_nlink > 1) {
		*why = "has a second name (a hard link), under which it would change too: put a "
		       "copy of it in its place, or look at it with -o ro";
		return -EMLINK;
	}
	return 0;
}

int ours_check(int dirfd, const char *name, bool readonly, const char **why)
{
	const char *unasked;
	struct stat st;

	if (fstatat(dirfd, name, &st, AT_SYMLINK_NOFOLLOW))
		return errno == ENOENT ? 0 : -errno;
	return check_stat(&st, readonly, why ? why : &unasked);
}

int ours_open(int dirfd, const char *name, int flags, const char **why)
{
	/* O_NONBLOCK: a FIFO would wait for its other end. O_TRUNC only when it is known what. */
	int fd = openat(dirfd, name,
			(flags & ~O_TRUNC) | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, 0600);
	bool readonly = (flags & O_ACCMODE) == O_RDONLY;
	const char *unasked;
	struct stat st;
	int r;

	if (!why)
		why = &unasked;
	if (fd < 0) {
		r = -errno;
		/* ELOOP, ENXIO, EISDIR and their like: what is it? */
		if (r != -ENOENT && r != -EEXIST && r != -EACCES &&
		    !fstatat(dirfd, name, &st, AT_SYMLINK_NOFOLLOW) &&
		    check_stat(&st, readonly, why))
			return check_stat(&st, readonly, why);
		return r;
	}
	r = fstat(fd, &st) ? -errno : check_stat(&st, readonly, why);
	if (!r && flags & O_TRUNC && ftruncate(fd, 0))
		r = -errno;
	/* The io of the pool is to wait. */
	if (!r && !(flags & O_NONBLOCK) &&
	    fcntl(fd, F_SETFL, flags & ~(O_CREAT | O_EXCL | O_TRUNC)))
		r = -errno;
	if (r) {
		close(fd);
		return r;
	}
	return fd;
}
