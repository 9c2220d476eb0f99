/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench-drive.h - what the drive itself can do, for the benchmarks to be held against: O_DIRECT
 * from huge pages through io.h, on a file of the same size that has been written once before.
 */
#ifndef BENCH_DRIVE_H
#define BENCH_DRIVE_H

#include <stdbool.h>
#include <stdint.h>

struct drive;

/*
 * A file of 2 * bytes in directory `dir`, written once. `distinct`: drive_write() takes each block
 * from memory of its own, as a commit of a RAM tier does, not from a few buffers over and over,
 * which the processor's caches hold. Prints why and returns NULL when it cannot.
 */
struct drive *drive_open(const char *dir, uint64_t bytes, bool distinct);
void drive_close(struct drive *d);

/* Seconds to read `bytes` from one half while as much is written to the other, 16 blocks of 2 MiB
 * in flight; < 0: failed. */
double drive_mix(struct drive *d);
double drive_read(struct drive *d);
/* With one fdatasync at the end. */
double drive_write(struct drive *d, uint64_t bytes);

double bench_now(void);
int bench_compare(const void *a, const void *b); /* of doubles, for qsort */
double bench_median(double *v, unsigned int n);	 /* sorts v */

#endif
