/* SPDX-License-Identifier: Apache-2.0 */
/*
 * io_fault.h - making the drive fail on purpose: errors, short results, delays, flipped bits, and
 * the power going out. The grammar of the spec is in io_fault_spec.c.
 *
 * For an io that was created with a spec (io_opts.faults; "seed=1" injects nothing by itself).
 * Loop thread only, use loop_call() from elsewhere.
 */
#ifndef ENGINE_IO_FAULT_H
#define ENGINE_IO_FAULT_H

#include "engine/io.h"

/*
 * Replaces the spec from now on; "" heals the drive (not one whose power was cut). The journal
 * stays on once it is on. -EINVAL for a spec that cannot be read, `why` (may be NULL) then names
 * the word; -ENOTSUP for an io created without a spec.
 */
int io_fault_set(struct io *io, const char *spec, char *why, size_t why_len);

/*
 * The power goes out now: of every write since the last completed sync, and of those since the last
 * good one before a failed one that were not written again, each 512-byte piece is on the drive or
 * is not, by chance (`seed`). All ops in flight and all later ones fail with -EIO.
 * The file is then what the next mount would find. Needs "journal" in the spec, else -EINVAL.
 */
int io_fault_cut(struct io *io, uint64_t seed);

#endif
