/* SPDX-License-Identifier: Apache-2.0 */
/* Threads that help with loops and sleep in between; the header of team.c says why they are not
 * OpenMP's. */
#ifndef ADAM_TEAM_H
#define ADAM_TEAM_H

/*
 * Calls fn(arg, piece) once for each piece in [0, pieces), on up to nthreads threads, the caller's
 * included, and returns when all calls have returned. Runs on the caller's thread only when another
 * thread has the helpers, or when called from within fn.
 */
void team_run(int nthreads, void (*fn)(void *arg, unsigned int piece), void *arg,
	      unsigned int pieces);

/* How many threads the calling thread's affinity mask allows; at least 1. */
int team_default_size(void);

#endif
