/* SPDX-License-Identifier: Apache-2.0 */
/* trace.c - see trace.h. Buffered; flushed when a step or a commit ends, and at the end. */
#include "engine/trace.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/loop.h"
#include "engine/ours.h"

struct trace {
	FILE *f;
	uint64_t start_ns;
};

int trace_open(const char *path, struct trace **out, const char **why)
{
	struct trace *t = calloc(1, sizeof(*t));
	struct stat st;
	int r, fd;

	if (!t)
		return -ENOMEM;
	/* A regular file that is not ours alone is not written over; a pipe or a terminal may be
	 * anybody's. */
	if (!stat(path, &st) && !S_ISREG(st.st_mode)) {
		fd = open(path, O_WRONLY | O_CLOEXEC | O_NOCTTY);
		r = -errno;
	} else {
		fd = r = ours_open(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, why);
	}
	t->f = fd < 0 ? NULL : fdopen(fd, "w");
	if (!t->f) {
		if (fd >= 0)
			close(fd);
		free(t);
		return fd < 0 ? r : -ENOMEM;
	}
	setvbuf(t->f, NULL, _IOFBF, 1 << 18);
	fputs("# seconds\tevent\tinode\tblock\tbytes\n", t->f);
	t->start_ns = loop_now_ns();
	*out = t;
	return 0;
}

void trace_close(struct trace *t)
{
	if (!t)
		return;
	fclose(t->f);
	free(t);
}

void trace_write(struct trace *t, const char *event, uint64_t ino, uint64_t n, uint64_t bytes)
{
	fprintf(t->f, "%.6f\t%s\t%llu\t%llu\t%llu\n", (double)(loop_now_ns() - t->start_ns) / 1e9,
		event, (unsigned long long)ino, (unsigned long long)n, (unsigned long long)bytes);
	if (!strcmp(event, "end") || !strcmp(event, "commit"))
		fflush(t->f);
}
