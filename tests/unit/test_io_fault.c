/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_io_fault.c - that injected faults are what they say, and that a power cut leaves what a
 * drive might leave: everything synced, and of the rest each sector old or new.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/wait.h>
#include <time.h>

#include <cmocka.h>

#include "io_fixture.h"

static enum io_engine engines[] = {IO_AUTO, IO_THREADS};

static void open_with(struct fixture *f, void **state, const char *faults)
{
	fixture_open(f, NULL, 4 * MIB, 2 * MIB);
	f->opts.engine = *(enum io_engine *)*state;
	f->opts.faults = faults;
	fixture_io(f);
}

static uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static unsigned int bits_differing(const char *a, const char *b, size_t len)
{
	unsigned int n = 0;

	for (size_t i = 0; i < len; i++)
		n += (unsigned int)__builtin_popcount((unsigned char)(a[i] ^ b[i]));
	return n;
}

static void test_errors_by_kind_and_healing(void **state)
{
	struct io_info info;
	struct fixture f;

	open_with(&f, state, "write.error=ENOSPC:1");
	assert_int_equal(io_one(f.io, IO_WRITE, f.arena, 0, MIB), -ENOSPC);
	assert_int_equal(io_one(f.io, IO_READ, f.arena, 0, MIB), 0);
	assert_int_equal(io_one(f.io, IO_SYNC, NULL, 0, 0), 0);
	assert_int_equal(io_fault_set(f.io, "sync.error=5:1,write.error=EDQUOT:1", NULL, 0), 0);
	assert_int_equal(io_one(f.io, IO_SYNC, NULL, 0, 0), -EIO);
	assert_int_equal(io_one(f.io, IO_WRITE, f.arena, 0, MIB), -EDQUOT);
	assert_int_equal(io_fault_set(f.io, "error=ENODATA:1", NULL, 0), 0);
	assert_int_equal(io_one(f.io, IO_READ, f.arena, 0, MIB), -ENODATA);
	assert_int_equal(io_fault_set(f.io, "", NULL, 0), 0);
	assert_int_equal(io_one(f.io, IO_WRITE, f.arena, 0, MIB), 0);
	assert_int_equal(io_one(f.io, IO_SYNC, NULL, 0, 0), 0);
	io_get_info(f.io, &info);
	assert_int_equal(info.errors, 4);
	fixture_close(&f);
}

static void test_rate(void **state)
{
	unsigned int failed = 0;
	struct fixture f;

	open_with(&f, state, "seed=9,read.error=EIO:0.25");
	for (int i = 0; i < 400; i++)
		failed += io_one(f.io, IO_READ, f.arena, 0, 4096) != 0;
	assert_in_range(failed, 60, 140); /* 100 expected */
	fixture_close(&f);
}

static void test_trigger_file(void **state)
{
	char dir[] = "/tmp/test_io_fault.XXXXXX", path[64], spec[128];
	struct fixture f;
	int fd;

	assert_non_null(mkdtemp(dir));
	snprintf(path, sizeof(path), "%s/fail", dir);
	snprintf(spec, sizeof(spec), "error=EIO:1,file=%s", path);
	open_with(&f, state, spec);
	assert_int_equal(io_one(f.io, IO_READ, f.arena, 0, 4096), 0);
	fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
	assert_true(fd >= 0);
	close(fd);
	assert_int_equal(io_one(f.io, IO_READ, f.arena, 0, 4096), -EIO);
	unlink(path);
	assert_int_equal(io_one(f.io, IO_READ, f.arena, 0, 4096), 0);
	rmdir(dir);
	fixture_close(&f);
}

static void test_delay(void **state)
{
	struct fixture f;
	uint64_t begin;

	open_with(&f, state, "read.delay=30ms:1");
	begin = now_ns();
	assert_int_equal(io_one(f.io, IO_WRITE, f.arena, 0, 4096), 0);
	assert_int_equal(io_one(f.io, IO_READ, f.arena, 0, 4096), 0);
	assert_true(now_ns() - begin >= 30000000u);
	fixture_close(&f);
}

static void test_flips_one_bit(void **state)
{
	struct fixture f;
	char *got;

	open_with(&f, state, "read.flip=1");
	got = f.arena + MIB;
	fill(f.arena, 64 * KIB, 0, 1);
	assert_int_equal(io_one(f.io, IO_WRITE, f.arena, 0, 64 * KIB), 0);
	assert_int_equal(io_one(f.io, IO_READ, got, 0, 64 * KIB), 0);
	assert_int_equal(bits_differing(got, f.arena, 64 * KIB), 1);
	assert_int_equal(io_pread_all(f.fd, got, 64 * KIB, 0), 0);
	assert_memory_equal(got, f.arena, 64 * KIB); /* the drive has it right */

	assert_int_equal(io_fault_set(f.io, "write.flip=1", NULL, 0), 0);
	assert_int_equal(io_one(f.io, IO_WRITE, f.arena, 0, 64 * KIB), 0);
	assert_int_equal(io_one(f.io, IO_READ, got, 0, 64 * KIB), 0);
	assert_int_equal(bits_differing(got, f.arena, 64 * KIB), 1); /* and here it has not */
	fixture_close(&f);
}

static void test_bad_specs_name_the_word(void **state)
{
	static const char *const bad[] = {
		"read.error=EIO",     "read.error=EWHAT:0.1",
		"write.short=1.5",    "flip=x",
		"delay=2:0.1",	      "delay=ms:1",
		"sync.short=0.1",     "sync.flip=1",
		"format.error=EIO:1", "cut=",
		"cut=5:leave",	      "cut=-1",
		"seed=0x1",	      "journal=1",
		"nonsense",	      "file=",
		"read.error=0:1",     "read.short=nan",
	};
	struct fixture f;
	char spec[100];

	open_with(&f, state, "seed=1");
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		snprintf(spec, sizeof(spec), "seed=1,%s,write.short=0.1", bad[i]);
		f.why[0] = '\0';
		assert_int_equal(io_fault_set(f.io, spec, f.why, sizeof(f.why)), -EINVAL);
		assert_non_null(strstr(f.why, bad[i]));
	}
	/* What stood before still stands, and io_create() says it too. */
	assert_int_equal(io_one(f.io, IO_READ, f.arena, 0, 4096), 0);
	io_destroy(f.io);
	f.opts.faults = "seed=1,nonsense";
	assert_int_equal(io_create(&f.opts, &f.io), -EINVAL);
	assert_non_null(strstr(f.why, "nonsense"));
	f.opts.faults = NULL;
	fixture_io(&f);
	assert_int_equal(io_fault_set(f.io, "", NULL, 0), -ENOTSUP);
	assert_int_equal(io_fault_cut(f.io, 1), -ENOTSUP);
	fixture_close(&f);
}

/* --- the power cut ---------------------------------------------------------------------------- */

#define CELL   (16u * KIB)
#define CELLS  48
#define SECTOR 512u

enum { OLD, NEW, NEITHER };

/* Is this sector of the cell as version `old` or as version `new` has it? */
static int sector_state(const char *got, uint64_t off, uint64_t old, uint64_t new)
{
	char want[SECTOR];

	fill(want, SECTOR, off, new);
	if (!memcmp(got, want, SECTOR))
		return NEW;
	fill(want, SECTOR, off, old);
	return memcmp(got, want, SECTOR) ? NEITHER : OLD;
}

static struct io_op cell_ops[CELLS];

static void write_cells(struct fixture *f, unsigned int first, unsigned int n, uint64_t version)
{
	struct io_op *ops = cell_ops;

	for (unsigned int i = first; i < first + n; i++) {
		char *buf = f->arena + i * CELL;

		fill(buf, CELL, (uint64_t)i * CELL, version);
		ops[i] = (struct io_op){.kind = IO_WRITE,
					.buf = buf,
					.off = (uint64_t)i * CELL,
					.len = CELL,
					.done = op_finish};
		io_submit(f->io, &ops[i]);
	}
	io_kick(f->io);
}

/* Counts the sectors of cells [first, first + n) by what they are. */
static void count_sectors(struct fixture *f, unsigned int first, unsigned int n, uint64_t old,
			  uint64_t new, unsigned int count[3])
{
	char *got = aligned(CELL);

	memset(count, 0, 3 * sizeof(count[0]));
	for (unsigned int i = first; i < first + n; i++) {
		assert_int_equal(io_pread_all(f->fd, got, CELL, (uint64_t)i * CELL), 0);
		for (uint64_t at = 0; at < CELL; at += SECTOR)
			count[sector_state(got + at, (uint64_t)i * CELL + at, old, new)]++;
	}
	free(got);
}

static void cut_round(void **state, uint64_t seed, bool in_flight)
{
	const unsigned int third = CELLS / 3, all = third * (CELL / SECTOR);
	unsigned int count[3];
	struct fixture f;

	open_with(&f, state, seed & 1 ? "journal" : "journal,write.short=0.3");
	write_cells(&f, 0, CELLS, 1);
	io_drain(f.io);
	assert_int_equal(io_one(f.io, IO_SYNC, NULL, 0, 0), 0);
	write_cells(&f, 0, third, 2); /* synced */
	io_drain(f.io);
	assert_int_equal(io_one(f.io, IO_SYNC, NULL, 0, 0), 0);
	write_cells(&f, third, third, 2); /* not */
	if (!in_flight)
		io_drain(f.io);
	assert_int_equal(io_fault_cut(f.io, seed), 0);

	count_sectors(&f, 0, third, 1, 2, count);
	assert_int_equal(count[NEW], all);
	count_sectors(&f, third, third, 1, 2, count);
	assert_int_equal(count[NEITHER], 0);
	assert_true(count[OLD] > all / 8 && count[NEW] > all / 8);
	count_sectors(&f, 2 * third, third, 1, 2, count);
	assert_int_equal(count[OLD], all);

	/* And from now on there is no drive, not even a healed one. */
	io_drain(f.io);
	for (unsigned int i = third; i < 2 * third; i++)
		assert_int_equal(cell_ops[i].res, in_flight ? -EIO : 0);
	assert_int_equal(io_fault_set(f.io, "", NULL, 0), 0);
	assert_int_equal(io_one(f.io, IO_WRITE, f.arena, 0, CELL), -EIO);
	assert_int_equal(io_one(f.io, IO_READ, f.arena, 0, CELL), -EIO);
	assert_int_equal(io_one(f.io, IO_SYNC, NULL, 0, 0), -EIO);
	assert_int_equal(io_fault_cut(f.io, seed), 0);
	count_sectors(&f, 2 * third, third, 1, 2, count);
	assert_int_equal(count[OLD], all);
	fixture_close(&f);
}

static void test_cut_keeps_what_was_synced(void **state)
{
	for (uint64_t seed = 1; seed <= 6; seed++)
		cut_round(state, seed, seed % 3 == 0);
}

/* Two versions since the sync: any of the three may be there, and nothing else. */
static void test_cut_of_a_place_written_twice(void **state)
{
	unsigned int count[3], olds[3];
	struct fixture f;

	open_with(&f, state, "journal");
	for (uint64_t v = 1; v <= 3; v++) {
		write_cells(&f, 0, CELLS, v);
		io_drain(f.io);
		if (v == 1)
			assert_int_equal(io_one(f.io, IO_SYNC, NULL, 0, 0), 0);
	}
	assert_int_equal(io_fault_cut(f.io, 3), 0);
	count_sectors(&f, 0, CELLS, 2, 3, count);
	count_sectors(&f, 0, CELLS, 1, 1, olds);
	assert_int_equal(count[OLD] + count[NEW] + olds[NEW], CELLS * (CELL / SECTOR));
	assert_true(count[OLD] && count[NEW] && olds[NEW]);
	fixture_close(&f);
}

/* A sync speaks for what had completed when it began, not for what completed meanwhile. */
static void test_cut_after_a_sync_that_began_too_early(void **state)
{
	struct io_op sync = {.kind = IO_SYNC, .done = op_finish};
	unsigned int count[3];
	struct fixture f;

	open_with(&f, state, "journal");
	write_cells(&f, 0, 4, 1);
	io_drain(f.io);
	assert_int_equal(io_one(f.io, IO_SYNC, NULL, 0, 0), 0);
	write_cells(&f, 0, 4, 2);
	io_submit(f.io, &sync);
	io_drain(f.io);
	assert_int_equal(sync.res, 0);
	assert_int_equal(io_fault_cut(f.io, 3), 0);
	count_sectors(&f, 0, 4, 1, 2, count);
	assert_int_equal(count[NEITHER], 0);
	assert_true(count[OLD] > 0);
	fixture_close(&f);
}

/* Everything is of version 1, and stored. */
static void open_stored(struct fixture *f, void **state)
{
	open_with(f, state, "journal");
	write_cells(f, 0, CELLS, 1);
	io_drain(f->io);
	assert_int_equal(io_one(f->io, IO_SYNC, NULL, 0, 0), 0);
}

/* A sync that failed keeps nothing safe. */
static void test_cut_after_a_failed_sync(void **state)
{
	unsigned int count[3];
	struct fixture f;

	open_stored(&f, state);
	assert_int_equal(io_fault_set(f.io, "sync.error=EIO:1", NULL, 0), 0);
	write_cells(&f, 0, CELLS, 2);
	io_drain(f.io);
	assert_int_equal(io_one(f.io, IO_SYNC, NULL, 0, 0), -EIO);
	assert_int_equal(io_fault_cut(f.io, 3), 0);
	count_sectors(&f, 0, CELLS, 1, 2, count);
	assert_int_equal(count[NEITHER], 0);
	assert_true(count[OLD] > 0);
	fixture_close(&f);
}

/* Nor does a good one after it, until all is written again; what is new since then is safe. */
static void test_cut_after_a_good_sync_after_a_failed_one(void **state)
{
	const unsigned int third = CELLS / 3, all = third * (CELL / SECTOR);
	unsigned int count[3];
	struct fixture f;

	open_stored(&f, state);
	write_cells(&f, 0, 2 * third, 2);
	io_drain(f.io);
	assert_int_equal(io_fault_set(f.io, "sync.error=EIO:1", NULL, 0), 0);
	assert_int_equal(io_one(f.io, IO_SYNC, NULL, 0, 0), -EIO);
	assert_int_equal(io_fault_set(f.io, "", NULL, 0), 0);
	count_sectors(&f, 0, 2 * third, 1, 2, count);
	assert_int_equal(count[NEW], 2 * all); /* it is there to be read all the same */
	write_cells(&f, 0, third, 2);
	write_cells(&f, 2 * third, third, 2);
	io_drain(f.io);
	assert_int_equal(io_one(f.io, IO_SYNC, NULL, 0, 0), 0);
	assert_int_equal(io_fault_cut(f.io, 3), 0);
	count_sectors(&f, 0, third, 1, 2, count);
	assert_int_equal(count[NEW], all);
	count_sectors(&f, third, third, 1, 2, count);
	assert_int_equal(count[NEITHER], 0);
	assert_true(count[OLD] > all / 8 && count[NEW] > all / 8);
	count_sectors(&f, 2 * third, third, 1, 2, count);
	assert_int_equal(count[NEW], all);
	fixture_close(&f);
}

static void test_a_failed_sync_drops_at_once(void **state)
{
	unsigned int count[3];
	struct fixture f;

	open_stored(&f, state);
	write_cells(&f, 0, CELLS, 2);
	io_drain(f.io);
	assert_int_equal(io_fault_set(f.io, "drop,sync.error=EIO:1", NULL, 0), 0);
	assert_int_equal(io_one(f.io, IO_SYNC, NULL, 0, 0), -EIO);
	count_sectors(&f, 0, CELLS, 1, 2, count);
	assert_int_equal(count[NEITHER], 0);
	assert_true(count[OLD] > CELLS && count[NEW] > CELLS);
	fixture_close(&f);
}

static void test_cut_needs_the_journal(void **state)
{
	struct fixture f;

	open_with(&f, state, "seed=1");
	assert_int_equal(io_fault_cut(f.io, 1), -EINVAL);
	assert_int_equal(io_one(f.io, IO_WRITE, f.arena, 0, CELL), 0);
	fixture_close(&f);
}

static void test_cut_by_count(void **state)
{
	unsigned int count[3];
	struct fixture f;

	open_with(&f, state, "seed=4,cut=10");
	for (unsigned int i = 0; i < 20; i++) {
		fill(f.arena, CELL, (uint64_t)i * CELL, 1);
		assert_int_equal(io_one(f.io, IO_WRITE, f.arena, (uint64_t)i * CELL, CELL),
				 i < 10 ? 0 : -EIO);
	}
	count_sectors(&f, 0, 10, 0, 1, count);
	assert_true(count[NEW] > 0 && count[NEW] < 10 * (CELL / SECTOR));
	count_sectors(&f, 10, 10, 0, 1, count);
	assert_int_equal(count[NEW], 0);
	fixture_close(&f);
}

static void test_cut_takes_the_process_along(void **state)
{
	int status = 0;
	pid_t pid = fork();

	assert_true(pid >= 0);
	if (!pid) {
		struct fixture f;

		open_with(&f, state, "cut=3:exit");
		for (unsigned int i = 0; i < 5; i++)
			io_one(f.io, IO_WRITE, f.arena, (uint64_t)i * CELL, CELL);
		_exit(0);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true(WIFEXITED(status));
	assert_int_equal(WEXITSTATUS(status), 70);
}

#define BOTH(name) \
	{#name " auto", name, NULL, NULL, &engines[0]}, \
	{ \
#name " threads", name, NULL, NULL, &engines[1] \
	}

int main(void)
{
	const struct CMUnitTest tests[] = {
		BOTH(test_errors_by_kind_and_healing),
		BOTH(test_rate),
		BOTH(test_trigger_file),
		BOTH(test_delay),
		BOTH(test_flips_one_bit),
		BOTH(test_bad_specs_name_the_word),
		BOTH(test_cut_keeps_what_was_synced),
		BOTH(test_cut_of_a_place_written_twice),
		BOTH(test_cut_after_a_sync_that_began_too_early),
		BOTH(test_cut_after_a_failed_sync),
		BOTH(test_cut_after_a_good_sync_after_a_failed_one),
		BOTH(test_a_failed_sync_drops_at_once),
		BOTH(test_cut_needs_the_journal),
		BOTH(test_cut_by_count),
		BOTH(test_cut_takes_the_process_along),
	};

	alarm(180); /* a hang is a failure */
	return cmocka_run_group_tests(tests, NULL, NULL);
}
