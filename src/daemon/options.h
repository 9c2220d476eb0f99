/* SPDX-License-Identifier: Apache-2.0 */
/*
 * options.h - the command line of momentfs: one table feeds the parser, --help and the man page.
 */
#ifndef DAEMON_OPTIONS_H
#define DAEMON_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

struct options {
	char *backing, *mountpoint; /* as given */
	uint64_t ram;		    /* bytes, 0: the default */
	uint64_t block, size;
	int commit_seconds;
	int io, direct, huge; /* enum io_engine, io_direct, arena_huge */
	bool readonly, allow_other;
	char *trace;
	char *kernel; /* words for the kernel, escaped and with commas; NULL: none */
	bool foreground, debug;
};

/* Returns -1: go on with `o`; else the exit status, and what had to be said has been said. */
int options_parse(int argc, char **argv, struct options *o);
void options_fini(struct options *o);

#endif
