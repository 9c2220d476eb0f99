/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sqlite_fault.h - making the drive under the catalog fail on purpose: an SQLite VFS over the
 * default one, with the words of io_fault_spec.c (read, write, sync; error, short, flip, delay,
 * cut, file, seed), and the power going out.
 *
 * Every open file is followed: its content at the last sync, and what was written since. Making and
 * removing a file counts as durable only after a sync of the directory. For tests; any thread, one
 * mutex inside.
 */
#ifndef ENGINE_SQLITE_FAULT_H
#define ENGINE_SQLITE_FAULT_H

#include "engine/types.h"

struct sqlite_fault;

/* Registers a VFS called `name` (copied). -EEXIST when there is one. Nothing fails yet. */
int sqlite_fault_create(const char *name, struct sqlite_fault **out);
/* All its files must have been closed. */
void sqlite_fault_destroy(struct sqlite_fault *f);

/* Replaces the spec from now on; "" heals it. -EINVAL: `why` (may be NULL) names the word. "cut=N"
 * cuts after N more writes, with the spec's seed; "exit" and "journal" mean nothing here. */
int sqlite_fault_set(struct sqlite_fault *f, const char *spec, char *why, size_t why_len);

/*
 * The power goes out now. Of every file, each 512-byte piece of a write, each truncation, each
 * creation and removal since the last sync is on the drive or is not, by chance; so is each piece
 * of a write before a sync that failed, until it is written and synced again. The files are then
 * what the next mount would find, and every call fails with EIO until sqlite_fault_restore().
 */
void sqlite_fault_cut(struct sqlite_fault *f, uint64_t seed);
bool sqlite_fault_is_cut(struct sqlite_fault *f);

/*
 * The process dies in its sync number `n` from now on (1: the next one), before the sync has done
 * anything; 0: it does not. From then on every call fails with EIO and changes nothing, until
 * sqlite_fault_revive(). What was written stays in the files, as it does in the kernel's cache, and
 * is as durable as it was: also for a later sqlite_fault_cut(), in another life.
 */
void sqlite_fault_die_in_sync(struct sqlite_fault *f, unsigned int n);
/* At once: a kill. */
void sqlite_fault_die(struct sqlite_fault *f);
bool sqlite_fault_is_dead(struct sqlite_fault *f);
/* Another process may begin. All files must have been closed. */
void sqlite_fault_revive(struct sqlite_fault *f);

/* The power is back. All files must have been closed. What is on the drive is durable. */
void sqlite_fault_restore(struct sqlite_fault *f);

/* The directory was synced by someone else than SQLite. */
void sqlite_fault_dirsync(struct sqlite_fault *f);

/* Writes so far, to choose a moment for "cut=". */
uint64_t sqlite_fault_writes(struct sqlite_fault *f);

#endif
