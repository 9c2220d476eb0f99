/* SPDX-License-Identifier: Apache-2.0 */
/*
 * trace.h - a line for each thing that happens to a block, for people who look into the pipeline.
 *
 * Loop thread only. Tab-separated: seconds since the start, event, inode, block, bytes. Events:
 * hint, ahead (a read started before anybody asked), read (a read that somebody waits for), zero,
 * lease, release, write, written, evict, freeze, commit, step (begin), end. Inode and block are 0
 * where they mean nothing; for step and end the block is the step.
 */
#ifndef ENGINE_TRACE_H
#define ENGINE_TRACE_H

#include <stdint.h>

struct trace;

/* 0 or -errno; *why then says what is wrong with the file, if it is there. */
int trace_open(const char *path, struct trace **out, const char **why);
void trace_close(struct trace *t);
void trace_write(struct trace *t, const char *event, uint64_t ino, uint64_t n, uint64_t bytes);

/* Costs a test of a pointer when nobody traces. */
#define TRACE(c, event, ino, n, bytes) \
	do { \
		if ((c)->trace) \
			trace_write((c)->trace, event, ino, n, bytes); \
	} while (0)

#endif
