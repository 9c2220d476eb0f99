/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fsize.h - growing files where the process has a limit of file sizes (ulimit -f).
 *
 * The kernel answers EFBIG there, but sends SIGXFSZ too, which ends a program that did not expect
 * it. Between these two calls the calling thread does not get it. The engine's own threads take no
 * signals at all.
 */
#ifndef LIB_FSIZE_H
#define LIB_FSIZE_H

#include <signal.h>
#include <stdbool.h>

struct fsize_guard {
	sigset_t saved;
	bool active;
};

void fsize_enter(struct fsize_guard *g);
/* res, with the limit in the text if it is -EFBIG. */
int fsize_leave(struct fsize_guard *g, int res);

#endif
