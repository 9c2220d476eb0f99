/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/resource.h>
#include <time.h>

#include "lib/error.h"
#include "lib/fsize.h"

void fsize_enter(struct fsize_guard *g)
{
	sigset_t one, pending;

	sigemptyset(&one);
	sigaddset(&one, SIGXFSZ);
	/* One that waits already is the program's own, and is left to it. */
	g->active = sigpending(&pending) == 0 && !sigismember(&pending, SIGXFSZ) &&
		    pthread_sigmask(SIG_BLOCK, &one, &g->saved) == 0;
}

int fsize_leave(struct fsize_guard *g, int res)
{
	struct timespec now = {0};
	struct rlimit limit;
	char text[1024];
	sigset_t one;

	if (g->active) {
		sigemptyset(&one);
		sigaddset(&one, SIGXFSZ);
		while (sigtimedwait(&one, NULL, &now) < 0 && errno == EINTR)
			;
		pthread_sigmask(SIG_SETMASK, &g->saved, NULL);
	}
	if (res == -EFBIG && getrlimit(RLIMIT_FSIZE, &limit) == 0 &&
	    limit.rlim_cur != RLIM_INFINITY) {
		snprintf(text, sizeof(text), "%s", err_text());
		err_write("%s; this process may make files of at most %s (ulimit -f): raise that limit",
			  text, err_bytes(limit.rlim_cur));
	}
	return res;
}
