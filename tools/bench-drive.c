/* SPDX-License-Identifier: Apache-2.0 */
/* bench-drive.c - see bench-drive.h. One thread. */
#include "bench-drive.h"

#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/arena.h"
#include "engine/io.h"

#define BLOCK (2u << 20)
#define DEPTH 16u

struct lane {
	struct io_op op;
	struct drive *d;
	void *buf;   /* its own, for what is read */
	bool writes; /* after the read of this lane's block, it is written */
};

struct drive {
	int fd;
	struct arena *arena;
	struct io *io;
	uint64_t blocks; /* of one half */
	char **mem;	 /* what is written; the first DEPTH are the lanes' */
	uint64_t nmem;
	bool flip; /* which half is read */
	/* the run under way */
	uint64_t next, left;
	bool reads, writes, failed;
	struct lane lane[DEPTH];
};

double bench_now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

int bench_compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

double bench_median(double *v, unsigned int n)
{
	qsort(v, n, sizeof(*v), bench_compare);
	return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

static void lane_done(struct io_op *op);

static void lane_start(struct lane *l)
{
	struct drive *d = l->d;
	uint64_t at;

	if (d->next == d->left)
		return;
	at = d->next++;
	l->writes = !d->reads;
	l->op = (struct io_op){.kind = d->reads ? IO_READ : IO_WRITE,
			       .buf = d->reads ? l->buf : d->mem[at % d->nmem],
			       .off = ((d->reads == d->flip ? d->blocks : 0) + at) * BLOCK,
			       .len = BLOCK,
			       .done = lane_done};
	list_init(&l->op.link);
	io_submit(d->io, &l->op);
}

static void lane_done(struct io_op *op)
{
	struct lane *l = (struct lane *)((char *)op - offsetof(struct lane, op));
	struct drive *d = l->d;

	if (op->res)
		d->failed = true;
	if (!l->writes && d->writes) {
		uint64_t half = d->blocks * BLOCK;

		l->writes = true;
		op->kind = IO_WRITE;
		op->off = op->off < half ? op->off + half : op->off - half;
		io_submit(d->io, op);
		return;
	}
	lane_start(l);
}

static double go(struct drive *d, bool reads, bool writes, uint64_t blocks, bool sync)
{
	double t = bench_now();

	d->reads = reads;
	d->writes = writes;
	d->next = 0;
	d->left = blocks;
	d->failed = false;
	for (unsigned int i = 0; i < DEPTH; i++)
		lane_start(&d->lane[i]);
	io_kick(d->io);
	while (io_pending(d->io)) {
		struct pollfd p = {.fd = io_event_fd(d->io), .events = POLLIN};

		poll(&p, 1, 1000);
		io_reap(d->io);
		io_kick(d->io);
	}
	if (sync && fdatasync(d->fd))
		d->failed = true;
	d->flip = !d->flip;
	return d->failed ? -1 : bench_now() - t;
}

double drive_mix(struct drive *d)
{
	return go(d, true, true, d->blocks, false);
}

double drive_read(struct drive *d)
{
	return go(d, true, false, d->blocks, false);
}

double drive_write(struct drive *d, uint64_t bytes)
{
	return go(d, false, true, bytes / BLOCK < d->blocks ? bytes / BLOCK : d->blocks, true);
}

struct drive *drive_open(const char *dir, uint64_t bytes, bool distinct)
{
	struct drive *d = calloc(1, sizeof(*d));
	char path[4096];
	int r;

	if (!d)
		return NULL;
	d->blocks = (bytes + BLOCK - 1) / BLOCK;
	d->nmem = distinct && d->blocks > DEPTH ? d->blocks : DEPTH;
	d->mem = calloc(d->nmem, sizeof(*d->mem));
	if (!d->mem) {
		free(d);
		return NULL;
	}
	snprintf(path, sizeof(path), "%s/bench-drive-XXXXXX", dir);
	d->fd = mkstemp(path);
	if (d->fd < 0 || unlink(path)) {
		perror(path);
		free(d);
		return NULL;
	}
	r = posix_fallocate(d->fd, 0, (off_t)(2 * d->blocks * BLOCK));
	if (!r)
		r = -arena_create(
			&(struct arena_opts){.size = (d->nmem + 4) * BLOCK, .chunk = BLOCK},
			&d->arena);
	if (!r)
		r = -io_create(&(struct io_opts){.fd = d->fd,
						 .buf = arena_base(d->arena),
						 .buf_len = arena_size(d->arena)},
			       &d->io);
	if (r) {
		fprintf(stderr, "cannot measure the drive under %s: %s\n", dir, strerror(r));
		drive_close(d);
		return NULL;
	}
	for (uint64_t i = 0; i < d->nmem; i++) {
		struct aoff at;

		if (arena_alloc(d->arena, BLOCK, &at))
			abort();
		d->mem[i] = arena_ptr(d->arena, at);
		memset(d->mem[i], (int)(i % 250) + 1, BLOCK);
	}
	for (unsigned int i = 0; i < DEPTH; i++) {
		d->lane[i].d = d;
		d->lane[i].buf = d->mem[i];
	}
	drive_write(d, d->blocks * BLOCK);
	drive_write(d, d->blocks * BLOCK);
	return d;
}

void drive_close(struct drive *d)
{
	if (d->io)
		io_destroy(d->io);
	if (d->arena)
		arena_destroy(d->arena);
	close(d->fd);
	free(d->mem);
	free(d);
}
