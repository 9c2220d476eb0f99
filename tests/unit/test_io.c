/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_io.c - the promises of io.h: first with a scripted kernel, where each result can be chosen,
 * then the same random reads and writes against a model with every implementation.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "io_fixture.h"

/* --- a scripted kernel -------------------------------------------------------------------------
 * A backend that keeps the parts it is given until the test says how each one ends.
 */

struct script {
	struct io_backend be;
	struct io_part *held[64]; /* in the order of their start */
	unsigned int nheld, max_held, kicks;
};

static void script_start(struct io_backend *be, struct io_part *part)
{
	struct script *s = container_of(be, struct script, be);

	s->held[s->nheld++] = part;
	if (s->nheld > s->max_held)
		s->max_held = s->nheld;
}

static void script_kick(struct io_backend *be)
{
	container_of(be, struct script, be)->kicks++;
}

static void script_reap(struct io_backend *be)
{
	(void)be;
}

static int script_event_fd(const struct io_backend *be)
{
	(void)be;
	return -1;
}

static void script_destroy(struct io_backend *be)
{
	(void)be;
}

static const struct io_backend_ops script_ops = {.name = "script",
						 .destroy = script_destroy,
						 .start = script_start,
						 .kick = script_kick,
						 .reap = script_reap,
						 .event_fd = script_event_fd};

struct scripted {
	struct fixture f;
	struct script s;
	struct io_backend *real;
};

/* A real io whose backend is exchanged for the script; `depth` parts. */
static void script_open(struct scripted *t, unsigned int depth, bool direct, uint32_t align)
{
	memset(t, 0, sizeof(*t));
	fixture_open(&t->f, NULL, MIB, 0);
	t->f.opts.engine = IO_THREADS;
	t->f.opts.direct = IO_DIRECT_OFF;
	t->f.opts.threads = depth;
	fixture_io(&t->f);
	t->real = t->f.io->be;
	t->s.be = (struct io_backend){.ops = &script_ops,
				      .depth = depth,
				      .part_done = t->real->part_done,
				      .owner = t->real->owner};
	t->f.io->be = &t->s.be;
	t->f.io->direct = direct;
	t->f.io->align = align;
}

static void script_close(struct scripted *t)
{
	assert_int_equal(t->s.nheld, 0);
	t->f.io->be = t->real;
	fixture_close(&t->f);
}

static void check_part(struct scripted *t, unsigned int i, enum io_call call, uint64_t off,
		       uint64_t len)
{
	assert_true(i < t->s.nheld);
	assert_int_equal(t->s.held[i]->call, call);
	assert_int_equal(t->s.held[i]->off, off);
	assert_int_equal(t->s.held[i]->count, len);
}

/* The kernel is done with the oldest part. Returns how many ops completed. */
static unsigned int finish(struct scripted *t, int res)
{
	struct io_part *part = t->s.held[0];

	assert_true(t->s.nheld > 0);
	t->s.nheld--;
	memmove(t->s.held, t->s.held + 1, t->s.nheld * sizeof(t->s.held[0]));
	t->s.be.part_done(t->s.be.owner, part, res);
	return io_reap(t->f.io);
}

static struct io_op make_op(enum io_kind kind, uint64_t off, uint64_t len)
{
	return (struct io_op){.kind = kind,
			      .buf = (void *)(uintptr_t)0x100000,
			      .off = off,
			      .len = len,
			      .done = op_finish};
}

static void submit(struct scripted *t, struct io_op *op)
{
	io_submit(t->f.io, op);
	io_kick(t->f.io);
}

static void test_short_direct_resumes_at_a_sector(void **state)
{
	struct io_op op = make_op(IO_READ, 8192, 16384);
	struct scripted t;

	(void)state;
	script_open(&t, 4, true, 512);
	submit(&t, &op);
	check_part(&t, 0, IO_CALL_READ, 8192, 16384);
	assert_int_equal(finish(&t, 5000), 0);
	check_part(&t, 0, IO_CALL_READ, 8192 + 4608, 16384 - 4608);
	assert_ptr_equal(t.s.held[0]->buf, (char *)op.buf + 4608);
	assert_int_equal(finish(&t, 100), 0); /* less than a sector: once more */
	check_part(&t, 0, IO_CALL_READ, 8192 + 4608, 16384 - 4608);
	assert_int_equal(finish(&t, 16384 - 4608), 1);
	assert_ptr_equal(op.priv, &op);
	assert_int_equal(op.res, 0);
	script_close(&t);
}

static void test_short_buffered_resumes_at_the_byte(void **state)
{
	struct io_op op = make_op(IO_READ, 0, 8192);
	struct scripted t;

	(void)state;
	script_open(&t, 4, false, 4096);
	submit(&t, &op);
	assert_int_equal(finish(&t, 1), 0);
	check_part(&t, 0, IO_CALL_READ, 1, 8191);
	assert_int_equal(finish(&t, 8191), 1);
	assert_int_equal(op.res, 0);
	script_close(&t);
}

static void test_end_of_file_is_eio(void **state)
{
	struct io_op op = make_op(IO_READ, 0, 8192);
	struct scripted t;

	(void)state;
	script_open(&t, 4, true, 512);
	submit(&t, &op);
	assert_int_equal(finish(&t, 4096), 0);
	assert_int_equal(finish(&t, 0), 1);
	assert_int_equal(op.res, -EIO);
	script_close(&t);
}

/* The file ends inside a sector: the same few bytes again and again. */
static void test_no_progress_ends(void **state)
{
	struct io_op op = make_op(IO_READ, 0, 8192);
	struct scripted t;
	unsigned int calls = 1;

	(void)state;
	script_open(&t, 4, true, 512);
	submit(&t, &op);
	while (!finish(&t, 100))
		assert_true(++calls < 100000);
	assert_int_equal(op.res, -EIO);
	script_close(&t);
}

static void test_eintr_and_eagain_are_retried(void **state)
{
	struct io_op op = make_op(IO_WRITE, 4096, 8192), sync = make_op(IO_SYNC, 0, 0);
	struct scripted t;
	struct io_info info;
	unsigned int calls = 1;

	(void)state;
	script_open(&t, 4, true, 512);
	submit(&t, &op);
	assert_int_equal(finish(&t, -EINTR), 0);
	assert_int_equal(finish(&t, -EAGAIN), 0);
	check_part(&t, 0, IO_CALL_WRITE, 4096, 8192);
	assert_int_equal(finish(&t, 8192), 1);
	assert_int_equal(op.res, 0);
	submit(&t, &sync);
	assert_int_equal(finish(&t, -EINTR), 0);
	check_part(&t, 0, IO_CALL_SYNC, 0, 0);
	assert_int_equal(finish(&t, 0), 1);
	assert_int_equal(sync.res, 0);
	io_get_info(t.f.io, &info);
	assert_int_equal(info.retries, 3);
	assert_int_equal(info.errors, 0);

	op = make_op(IO_WRITE, 4096, 8192); /* but not for ever */
	submit(&t, &op);
	while (!finish(&t, -EAGAIN))
		assert_true(++calls < 100000);
	assert_int_equal(op.res, -EAGAIN);
	script_close(&t);
}

static void test_split_above_the_limit(void **state)
{
	const uint64_t gib = UINT64_C(1) << 30;
	struct io_op op = make_op(IO_READ, 4096, 2 * gib + 8192);
	struct scripted t;

	(void)state;
	script_open(&t, 8, true, 512);
	submit(&t, &op);
	assert_int_equal(t.s.nheld, 3);
	check_part(&t, 0, IO_CALL_READ, 4096, gib);
	check_part(&t, 1, IO_CALL_READ, 4096 + gib, gib);
	check_part(&t, 2, IO_CALL_READ, 4096 + 2 * gib, 8192);
	assert_int_equal(finish(&t, 1 << 30), 0);
	assert_int_equal(finish(&t, 1 << 30), 0);
	assert_int_equal(finish(&t, 8192), 1);
	assert_int_equal(op.res, 0);
	script_close(&t);
}

/* It is cut no further, but waits for the parts in flight: the kernel uses their memory. */
static void test_split_op_that_fails(void **state)
{
	struct io_op op = make_op(IO_WRITE, 0, 10 * 4096), next = make_op(IO_READ, 0, 4096);
	struct scripted t;

	(void)state;
	script_open(&t, 3, true, 512);
	t.f.io->part_max = 4096;
	submit(&t, &op);
	assert_int_equal(t.s.nheld, 3);
	assert_int_equal(finish(&t, -ENOSPC), 0);
	submit(&t, &next);
	assert_int_equal(t.s.nheld, 3);
	check_part(&t, 2, IO_CALL_READ, 0, 4096); /* the next op, not a fourth part */
	assert_int_equal(finish(&t, -EIO), 0);
	assert_null(op.priv);
	assert_int_equal(finish(&t, 4096), 1);
	assert_ptr_equal(op.priv, &op);
	assert_int_equal(op.res, -ENOSPC); /* the first error */
	assert_int_equal(finish(&t, 4096), 1);
	assert_int_equal(next.res, 0);
	script_close(&t);
}

static void test_urgent_goes_first_and_depth_is_kept(void **state)
{
	struct scripted t;
	struct io_op ops[6];
	/* 0 is in flight when the others come; 3 and 4 are urgent */
	static const int want[] = {3, 4, 1, 2, 5};

	(void)state;
	script_open(&t, 1, true, 512);
	for (int i = 0; i < 6; i++)
		ops[i] = make_op(IO_READ, (uint64_t)i * 4096, 4096);
	submit(&t, &ops[0]);
	io_submit(t.f.io, &ops[1]);
	io_submit(t.f.io, &ops[2]);
	io_submit_urgent(t.f.io, &ops[3]);
	io_submit_urgent(t.f.io, &ops[4]);
	io_submit(t.f.io, &ops[5]);
	io_kick(t.f.io);
	check_part(&t, 0, IO_CALL_READ, 0, 4096);
	for (int i = 0; i < 5; i++) {
		assert_int_equal(finish(&t, 4096), 1);
		io_kick(t.f.io);
		check_part(&t, 0, IO_CALL_READ, (uint64_t)want[i] * 4096, 4096);
	}
	assert_int_equal(finish(&t, 4096), 1);
	assert_int_equal(t.s.max_held, 1);
	assert_int_equal(io_pending(t.f.io), 0);
	script_close(&t);
}

static void test_nothing_starts_before_the_kick(void **state)
{
	struct io_op op = make_op(IO_READ, 0, 4096);
	struct scripted t;

	(void)state;
	script_open(&t, 4, true, 512);
	io_submit(t.f.io, &op);
	assert_int_equal(t.s.nheld, 0);
	assert_int_equal(io_pending(t.f.io), 1);
	io_kick(t.f.io);
	assert_int_equal(t.s.kicks, 1);
	assert_int_equal(finish(&t, 4096), 1);
	script_close(&t);
}

static void test_buffered_writes_are_dropped_behind(void **state)
{
	struct io_op op = make_op(IO_WRITE, 4096, 8192);
	struct scripted t;

	(void)state;
	script_open(&t, 4, false, 4096);
	submit(&t, &op);
	assert_int_equal(finish(&t, 4096), 0); /* short: the range is the whole all the same */
	assert_int_equal(finish(&t, 4096), 0);
	check_part(&t, 0, IO_CALL_RANGE, 4096, 8192);
	assert_int_equal(finish(&t, 0), 0);
	check_part(&t, 0, IO_CALL_DROP, 4096, 8192);
	assert_int_equal(finish(&t, -EINVAL), 1); /* advice: nobody minds */
	assert_int_equal(op.res, 0);

	/* The write-back fails: that is the write's error, and the kernel tells it only once. */
	op = make_op(IO_WRITE, 4096, 8192);
	submit(&t, &op);
	assert_int_equal(finish(&t, 8192), 0);
	assert_int_equal(finish(&t, -EIO), 1);
	assert_int_equal(op.res, -EIO);

	/* The file system does not know the call. */
	op = make_op(IO_WRITE, 4096, 8192);
	submit(&t, &op);
	assert_int_equal(finish(&t, 8192), 0);
	assert_int_equal(finish(&t, -ENOSYS), 0);
	assert_int_equal(finish(&t, 0), 1);
	assert_int_equal(op.res, 0);
	script_close(&t);
}

/* --- the real ones ---------------------------------------------------------------------------- */

struct variant {
	enum io_engine engine;
	enum io_direct direct;
	const char *faults;
};

#define MANGLED "seed=5,short=0.3,delay=300us:0.05,error=EAGAIN:0.05"

static void variant_open(struct fixture *f, void **state, uint64_t size, size_t arena)
{
	const struct variant *v = *state;

	fixture_open(f, NULL, size, arena);
	f->opts.engine = v->engine;
	f->opts.direct = v->direct;
	f->opts.faults = v->faults;
	f->opts.depth = 16;
	f->opts.probe_off = size - MOMENT_UNIT;
	fixture_io(f);
}

#define CELLS	  64
#define CELL	  (64u * KIB)
#define RUN_OPS	  1500
#define IN_FLIGHT 24

struct slot {
	struct io_op op;
	char *buf;
	uint64_t first, version;
	bool busy;
};

struct model {
	uint64_t version[CELLS]; /* 0: zeros */
	bool busy[CELLS];
	struct slot slots[IN_FLIGHT];
	unsigned int reads, writes;
};

static struct model *model;

static void model_done(struct io_op *op)
{
	struct slot *s = container_of(op, struct slot, op);
	char *want = op->kind == IO_READ ? aligned(CELL) : NULL;

	assert_int_equal(op->res, 0);
	for (uint64_t at = 0; at < op->len; at += CELL) {
		uint64_t cell = s->first + at / CELL;

		if (op->kind == IO_WRITE) {
			model->version[cell] = s->version;
		} else {
			memset(want, 0, CELL);
			if (model->version[cell])
				fill(want, CELL, cell * CELL, model->version[cell]);
			assert_memory_equal(s->buf + at, want, CELL);
		}
		model->busy[cell] = false;
	}
	s->busy = false;
	free(want);
}

static void model_submit(struct fixture *f, struct slot *s, uint64_t *rng, uint64_t version)
{
	uint64_t first = next_random(rng) % CELLS, n = 1 + next_random(rng) % 4;
	bool write = next_random(rng) & 1;

	n = min_u64(n, CELLS - first);
	for (uint64_t i = 0; i < n; i++) {
		if (model->busy[first + i])
			return;
	}
	for (uint64_t i = 0; i < n; i++)
		model->busy[first + i] = true;
	s->busy = true;
	s->first = first;
	s->version = version;
	s->op = (struct io_op){.kind = write ? IO_WRITE : IO_READ,
			       .buf = s->buf,
			       .off = first * CELL,
			       .len = n * CELL,
			       .done = model_done};
	if (write) {
		fill(s->buf, n * CELL, first * CELL, version);
		model->writes++;
	} else {
		memset(s->buf, 0x55, n * CELL);
		model->reads++;
	}
	if (next_random(rng) % 8)
		io_submit(f->io, &s->op);
	else
		io_submit_urgent(f->io, &s->op);
}

static void test_random_against_model(void **state)
{
	const struct variant *v = *state;
	uint64_t rng = 88172645463325252u;
	struct io_info info;
	struct fixture f;
	char *outside;

	variant_open(&f, state, CELLS * CELL, IN_FLIGHT / 2 * 4 * CELL);
	f.io->part_max = 96 * KIB; /* so that ops are split, here and there */
	model = calloc(1, sizeof(*model));
	assert_non_null(model);
	outside = aligned(IN_FLIGHT / 2 * 4 * CELL); /* every other op: not in the arena */
	for (int i = 0; i < IN_FLIGHT; i++)
		model->slots[i].buf = (i % 2 ? outside : f.arena) + i / 2 * (4 * CELL);

	for (unsigned int i = 0; i < RUN_OPS; i++) {
		struct slot *s = &model->slots[next_random(&rng) % IN_FLIGHT];

		if (!s->busy)
			model_submit(&f, s, &rng, i + 1);
		if (next_random(&rng) % 4 == 0 && io_pending(f.io))
			io_turn(f.io);
	}
	io_drain(f.io);
	assert_int_equal(io_one(f.io, IO_SYNC, NULL, 0, 0), 0);

	io_get_info(f.io, &info);
	assert_int_equal(info.reads, model->reads);
	assert_int_equal(info.writes, model->writes);
	assert_true(info.reads > 100 && info.writes > 100);
	assert_int_equal(info.syncs, 1);
	assert_int_equal(info.errors, 0);
	assert_int_equal(info.inflight, 0);
	assert_true(info.read_ns > 0 && info.write_ns > 0);
	if (v->faults)
		assert_true(info.retries > 50);
	/* Another descriptor sees the same bytes. */
	for (uint64_t cell = 0; cell < CELLS; cell++) {
		char *got = outside, *want = outside + CELL;

		assert_int_equal(io_pread_all(f.fd, got, CELL, cell * CELL), 0);
		memset(want, 0, CELL);
		if (model->version[cell])
			fill(want, CELL, cell * CELL, model->version[cell]);
		assert_memory_equal(got, want, CELL);
	}
	free(outside);
	free(model);
	fixture_close(&f);
}

/* Readable exactly while there is something to reap: the loop would spin, or sleep for ever. */
static void test_event_fd_tells_the_truth(void **state)
{
	struct pollfd p = {.events = POLLIN};
	struct fixture f;

	variant_open(&f, state, MIB, MIB);
	p.fd = io_event_fd(f.io);
	assert_int_equal(poll(&p, 1, 0), 0);
	for (int i = 0; i < 20; i++) {
		assert_int_equal(io_one(f.io, i & 1 ? IO_READ : IO_WRITE, f.arena, 0, 256 * KIB),
				 0);
		assert_int_equal(io_reap(f.io), 0);
		assert_int_equal(poll(&p, 1, 2), 0);
	}
	fixture_close(&f);
}

static void test_read_past_the_end_is_eio(void **state)
{
	struct fixture f;

	variant_open(&f, state, MIB, MIB);
	assert_int_equal(io_one(f.io, IO_READ, f.arena, MIB, 4096), -EIO);
	assert_int_equal(io_one(f.io, IO_READ, f.arena, MIB - 4096, 8192), -EIO);
	assert_int_equal(ftruncate(f.fd, MIB - 100), 0);
	assert_int_equal(io_one(f.io, IO_READ, f.arena, MIB - 4096, 4096), -EIO);
	assert_int_equal(io_one(f.io, IO_READ, f.arena, 0, 4096), 0);
	assert_int_equal(io_one(f.io, IO_READ, f.arena, 0, 0), 0);
	fixture_close(&f);
}

static void test_destroy_waits_for_ops(void **state)
{
	struct io_op ops[8];
	struct fixture f;

	variant_open(&f, state, 8 * MIB, 8 * MIB);
	for (int i = 0; i < 8; i++) {
		ops[i] = (struct io_op){.kind = IO_WRITE,
					.buf = f.arena + i * MIB,
					.off = (uint64_t)i * MIB,
					.len = MIB,
					.done = op_finish};
		io_submit(f.io, &ops[i]);
	}
	fixture_close(&f);
	for (int i = 0; i < 8; i++)
		assert_ptr_equal(ops[i].priv, &ops[i]);
}

/* --- the synchronous helpers ----------------------------------------------------------------- */

static void test_pread_all_pwrite_all(void **state)
{
	int fd = temp_file(NULL, 64 * KIB), ro, pipes[2];
	char *a = aligned(64 * KIB), *b = aligned(64 * KIB), path[40];

	(void)state;
	fill(a, 64 * KIB, 0, 1);
	assert_int_equal(io_pwrite_all(fd, a, 60001, 3), 0);
	assert_int_equal(io_pread_all(fd, b, 60001, 3), 0);
	assert_memory_equal(a, b, 60001);
	assert_int_equal(io_pread_all(fd, b, 10, 64 * KIB - 5), -EIO);
	assert_int_equal(io_pread_all(fd, b, 0, 64 * KIB), 0);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	ro = open(path, O_RDONLY | O_CLOEXEC);
	assert_true(ro >= 0);
	assert_int_equal(io_pwrite_all(ro, a, 10, 0), -EBADF);
	assert_int_equal(pipe(pipes), 0);
	assert_int_equal(io_pread_all(pipes[0], b, 10, 0), -ESPIPE);
	close(pipes[0]);
	close(pipes[1]);
	close(ro);
	close(fd);
	free(a);
	free(b);
}

/* One registered buffer holds at most 1 GiB; a part that crosses from one to the next, or leaves
 * the arena, goes unregistered. */
static void test_registered_buffer_of_a_place(void **state)
{
	const uint64_t gib = UINT64_C(1) << 30, len = 2 * gib + 8192;
	const char *arena = (const char *)(uintptr_t)0x10000000;

	(void)state;
	assert_int_equal(io_uring_buf_index(arena, len, arena, 4096), 0);
	assert_int_equal(io_uring_buf_index(arena, len, arena + gib - 4096, 4096), 0);
	assert_int_equal(io_uring_buf_index(arena, len, arena + gib - 4096, 8192), -1);
	assert_int_equal(io_uring_buf_index(arena, len, arena + gib, gib), 1);
	assert_int_equal(io_uring_buf_index(arena, len, arena + 2 * gib, 8192), 2);
	assert_int_equal(io_uring_buf_index(arena, len, arena + 2 * gib, 12288), -1);
	assert_int_equal(io_uring_buf_index(arena, len, arena + len, 4096), -1);
	assert_int_equal(io_uring_buf_index(arena, len, arena - 4096, 4096), -1);
	assert_int_equal(io_uring_buf_index(NULL, 0, arena, 4096), -1);
}

#define VARIANTS(name) \
	{#name " uring direct", name, NULL, NULL, &variants[0]}, \
		{#name " uring buffered", name, NULL, NULL, &variants[1]}, \
		{#name " uring mangled", name, NULL, NULL, &variants[2]}, \
		{#name " threads direct", name, NULL, NULL, &variants[3]}, \
		{#name " threads buffered", name, NULL, NULL, &variants[4]}, \
		{#name " threads mangled", name, NULL, NULL, &variants[5]}, \
	{ \
#name " threads buffered mangled", name, NULL, NULL, &variants[6] \
	}

static struct variant variants[] = {
	{IO_URING, IO_DIRECT_AUTO, NULL},     {IO_URING, IO_DIRECT_OFF, NULL},
	{IO_URING, IO_DIRECT_AUTO, MANGLED},  {IO_THREADS, IO_DIRECT_AUTO, NULL},
	{IO_THREADS, IO_DIRECT_OFF, NULL},    {IO_THREADS, IO_DIRECT_AUTO, MANGLED},
	{IO_THREADS, IO_DIRECT_OFF, MANGLED},
};

/* Where the ring is forbidden, the same tests run twice on the threads. */
static void without_a_ring(void)
{
	struct fixture f;

	fixture_open(&f, NULL, MIB, 0);
	f.opts.engine = IO_URING;
	if (io_create(&f.opts, &f.io)) {
		printf("# no io_uring here: %s\n", f.why);
		for (int i = 0; i < 3; i++)
			variants[i].engine = IO_AUTO;
	}
	fixture_close(&f);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_short_direct_resumes_at_a_sector),
		cmocka_unit_test(test_short_buffered_resumes_at_the_byte),
		cmocka_unit_test(test_end_of_file_is_eio),
		cmocka_unit_test(test_no_progress_ends),
		cmocka_unit_test(test_eintr_and_eagain_are_retried),
		cmocka_unit_test(test_split_above_the_limit),
		cmocka_unit_test(test_split_op_that_fails),
		cmocka_unit_test(test_urgent_goes_first_and_depth_is_kept),
		cmocka_unit_test(test_nothing_starts_before_the_kick),
		cmocka_unit_test(test_buffered_writes_are_dropped_behind),
		VARIANTS(test_random_against_model),
		VARIANTS(test_event_fd_tells_the_truth),
		VARIANTS(test_read_past_the_end_is_eio),
		VARIANTS(test_destroy_waits_for_ops),
		cmocka_unit_test(test_registered_buffer_of_a_place),
		cmocka_unit_test(test_pread_all_pwrite_all),
	};

	alarm(180); /* a hang is a failure */
	without_a_ring();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
