/* SPDX-License-Identifier: Apache-2.0 */
/* trace.c - see trace.h. Buffered; flushed when a step or a commit ends, and at the end. */
#include "engine/trace.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/loop.h"

struct trace {
	FILE *f;
	uint64_t start_ns;
};

int trace_open(const char *path, struct trace **out)
{
	struct trace *t = calloc(1, sizeof(*t));
	int r;

	if (!t)
		return -ENOMEM;
	t->f = fopen(path, "we");
	if (!t->f) {
		r = -errno;
		free(t);
		return r;
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
