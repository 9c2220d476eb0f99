/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bug.c - see bug.h. Any thread. Takes no lock of the engine's and no memory: what is broken is not
 * known.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <syslog.h>
#include <unistd.h>

#include "engine/bug.h"

void bug_stop(const char *what, const char *file, int line, const char *function)
{
	const char *slash = strrchr(file, '/');
	char text[512];
	int n = snprintf(text, sizeof(text),
			 "momentfs: a bug: %s does not hold in %s() (%s:%d). Stopping without writing "
			 "anything more: what is on disk is the last commit. Please report this line\n",
			 what, function, slash ? slash + 1 : file, line);

	if (n > 0 && write(STDERR_FILENO, text, strnlen(text, sizeof(text))) < 0)
		n = 0; /* syslog has it */
	syslog(LOG_CRIT | LOG_DAEMON, "%s", text);
	abort();
}
