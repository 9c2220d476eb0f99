/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checks.h - is this a place where momentfs can be mounted? Each failure is told in words that name
 * the thing and the way out.
 */
#ifndef DAEMON_CHECKS_H
#define DAEMON_CHECKS_H

#include "daemon/options.h"

/*
 * Makes both paths absolute (malloc'ed), refuses places that cannot work, and clears a dead
 * momentfs mount at MOUNTPOINT. 0, EXIT_BACKING or EXIT_MOUNTPOINT.
 */
int check_paths(const struct options *o, char **backing, char **mountpoint);

/* /dev/fuse, fusermount3, capabilities, allow_other. 0 or EXIT_FUSE. */
int check_fuse(const struct options *o);

/* May this process mount by itself (CAP_SYS_ADMIN), without fusermount3? */
bool check_may_mount(void);

/* Runs `fusermount3 -u -z -q -- POINT`; 0 or -errno. */
int check_fusermount_detach(const char *point);

#endif
