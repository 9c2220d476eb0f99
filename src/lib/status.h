/* SPDX-License-Identifier: Apache-2.0 */
/* status.h - looking at mounts: .moment/status, and which mount shows a backing. */
#ifndef LIB_STATUS_H
#define LIB_STATUS_H

/* The text of MOUNT/.moment/status, malloc'ed. -ENOENT: not a momentfs mount; -ENOTCONN: a dead
 * one. */
int status_read(const char *mount, char **out);

/* Where this backing is mounted, malloc'ed; NULL: nowhere that we can see. From the table of mounts
 * only: a mount may be dead or, for all we know, hang whoever touches it. */
char *mount_of_backing(const char *backing);

#endif
