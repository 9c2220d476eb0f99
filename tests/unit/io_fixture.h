/* SPDX-License-Identifier: Apache-2.0 */
/*
 * io_fixture.h - a temporary file with an io on it, driven without a loop, for the io tests.
 */
#ifndef TEST_IO_FIXTURE_H
#define TEST_IO_FIXTURE_H

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/io.h"
#include "engine/io_fault.h"
#include "engine/io_impl.h"

#define KIB	1024u
#define MIB	(1024u * KIB)
#define WAIT_MS 20000

/* For forked children too, where CMocka's asserts would go on as a second test run. */
#define check(cond) \
	do { \
		if (!(cond)) { \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #cond); \
			abort(); \
		} \
	} while (0)

/* ThreadSanitizer wants to be asked before a forked child may start threads. */
#ifdef __SANITIZE_THREAD__
const char *__tsan_default_options(void);
const char *__tsan_default_options(void)
{
	return "die_after_fork=0";
}
#endif

struct fixture {
	int fd;
	uint64_t size;
	char *arena; /* registered */
	size_t arena_len;
	char why[400];
	struct io_opts opts;
	struct io *io;
};

static inline void *aligned(size_t len)
{
	void *p;

	check(posix_memalign(&p, MOMENT_UNIT, len) == 0);
	memset(p, 0, len);
	return p;
}

/* A file of `size` bytes in `dir` (NULL: where temporary files go), without a name. */
static inline int temp_file(const char *dir, uint64_t size)
{
	char path[300];
	int fd;

	if (!dir)
		dir = getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp";
	snprintf(path, sizeof(path), "%s/test_io.XXXXXX", dir);
	fd = mkostemp(path, O_CLOEXEC);
	check(fd >= 0);
	check(unlink(path) == 0);
	check(posix_fallocate(fd, 0, (off_t)size) == 0);
	return fd;
}

/* The file and the arena; the caller may change f->opts before fixture_io(). */
static inline void fixture_open(struct fixture *f, const char *dir, uint64_t size, size_t arena_len)
{
	memset(f, 0, sizeof(*f));
	f->fd = temp_file(dir, size);
	f->size = size;
	f->arena_len = arena_len;
	f->arena = arena_len ? aligned(arena_len) : NULL;
	f->opts = (struct io_opts){.fd = f->fd,
				   .buf = f->arena,
				   .buf_len = arena_len,
				   .why = f->why,
				   .why_len = sizeof(f->why)};
}

static inline void fixture_io(struct fixture *f)
{
	int ret = io_create(&f->opts, &f->io);

	if (ret)
		fprintf(stderr, "io_create: %s (%s)\n", strerror(-ret), f->why);
	check(ret == 0);
}

static inline void fixture_close(struct fixture *f)
{
	io_destroy(f->io);
	free(f->arena);
	close(f->fd);
}

/* Kicks, then waits for something to reap; the event descriptor has to say so. */
static inline unsigned int io_turn(struct io *io)
{
	struct pollfd p = {.fd = io_event_fd(io), .events = POLLIN};
	int n;

	io_kick(io);
	do
		n = poll(&p, 1, WAIT_MS);
	while (n < 0 && errno == EINTR);
	check(n == 1);
	return io_reap(io);
}

static inline void io_drain(struct io *io)
{
	while (io_pending(io))
		io_turn(io);
}

static inline void op_finish(struct io_op *op)
{
	op->priv = op; /* done, once */
}

/* One op, from start to end; its result. */
static inline int io_one(struct io *io, enum io_kind kind, void *buf, uint64_t off, uint64_t len)
{
	struct io_op op = {.kind = kind, .buf = buf, .off = off, .len = len, .done = op_finish};

	io_submit(io, &op);
	check(op.priv == NULL);
	io_drain(io);
	check(op.priv == &op);
	return op.res;
}

/* Bytes that differ from place to place and from version to version. */
static inline void fill(void *buf, uint64_t len, uint64_t off, uint64_t version)
{
	uint64_t *p = buf;

	for (uint64_t i = 0; i < len / 8; i++)
		p[i] = ((off + i * 8) * 0x9e3779b97f4a7c15u) ^ (version * 0xbf58476d1ce4e5b9u);
}

static inline uint64_t next_random(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

#endif
