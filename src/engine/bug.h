/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bug.h - invariants that hold unless the engine itself is wrong.
 *
 * Included in place of <assert.h>: assert() is the same in every build, NDEBUG or not. What it checks
 * is what keeps committed bytes safe (who may touch a block, which place may be written, what is
 * free), and all of it together costs nothing that can be measured. Never for input, for errors of
 * the drive, or for want of memory.
 *
 * A process that meets one stops at once: nothing more is written, no commit is recorded, the last
 * one stays. What and where it was goes to standard error and, since a daemon has none, to syslog.
 */
#ifndef ENGINE_BUG_H
#define ENGINE_BUG_H

_Noreturn void bug_stop(const char *what, const char *file, int line, const char *function);

#define assert(x) ((x) ? (void)0 : bug_stop(#x, __FILE__, __LINE__, __func__))

#endif
