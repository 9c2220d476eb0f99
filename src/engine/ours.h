/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ours.h - whether the files of a backing are those that this user put there.
 *
 * A backing is a directory, and its files are found by name. Somebody else who can write to the
 * directory could put a symbolic link or a hard link there, and the daemon, which may be root's,
 * would truncate, overwrite or read what it leads to. So every directory is looked at before
 * anything in it is, and every file of it is opened here, or checked here when SQLite opens it.
 */
#ifndef ENGINE_OURS_H
#define ENGINE_OURS_H

#include <stdbool.h>
#include <stddef.h>

/*
 * Whether nobody but this user and root can put files into the directory. 0, or -EPERM with a
 * message that says who can and how to change that.
 */
int ours_check_dir(int dirfd, const char *path, char *err, size_t errlen);

/*
 * Opens a file of a directory that ours_check_dir() has let pass; `flags` as of open(2), new files
 * get mode 0600. The descriptor, or -errno. If the file is there and not what it should be, *why
 * (may be NULL) says what is wrong and what to do, else it is left alone: a symbolic link (-ELOOP),
 * not a regular file (-EINVAL), of another user (-EPERM), or, for writing, a file with a second
 * name (-EMLINK).
 */
int ours_open(int dirfd, const char *name, int flags, const char **why);

/* The same checks without opening it. 0 also when there is no such file. */
int ours_check(int dirfd, const char *name, bool readonly, const char **why);

#endif
