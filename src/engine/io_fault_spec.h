/* SPDX-License-Identifier: Apache-2.0 */
/*
 * io_fault_spec.h - what a fault injection spec says, read. For io_fault.c; the grammar is in
 * io_fault_spec.c.
 */
#ifndef ENGINE_IO_FAULT_SPEC_H
#define ENGINE_IO_FAULT_SPEC_H

#include "engine/types.h"

struct fault_kind {
	double error, shorten, flip, delay; /* rates */
	int errnum;
	uint64_t delay_ns;
};

struct fault_spec {
	struct fault_kind kind[3]; /* by enum io_call: READ, WRITE, SYNC */
	bool journal, drop, cut, cut_exit;
	uint64_t cut_after, seed;
	char file[256];
};

/* -EINVAL with the offending word in `why`. */
int io_fault_spec_parse(const char *text, struct fault_spec *spec, char *why, size_t why_len);

#endif
