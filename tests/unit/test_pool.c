/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_pool.c - allocation against a model that does next-fit the slow way, marking, growth on
 * hosts of several kinds, and the search for runs in a pool of several TiB.
 *
 * fallocate() and fstatvfs() are this file's own, so a test can say what the host answers.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "engine/pool.h"
#include "engine/pool_map.h"

#define KIB   1024u
#define MIB   (1024u * KIB)
#define GIB   (1024ull * MIB)
#define BLOCK (2 * MIB)

static char dir[64];
static int dirfd_;

/* --- the host ----------------------------------------------------------------------------- */

static struct {
	int error;	     /* of fallocate(), beyond `capacity` */
	uint64_t capacity;   /* fallocate() works up to this end */
	uint64_t free;	     /* what fstatvfs() says; 0: the truth */
	unsigned int calls;  /* of fallocate() */
	uint64_t leftover;   /* on failure the file becomes this long nevertheless */
	unsigned int signal; /* so many calls fail with EINTR first */
} host;

int fallocate(int fd, int mode, off_t off, off_t len)
{
	host.calls++;
	if (host.signal) {
		host.signal--;
		errno = EINTR;
		return -1;
	}
	if (host.error && (uint64_t)(off + len) > host.capacity) {
		if (host.leftover && ftruncate(fd, (off_t)host.leftover))
			return -1;
		errno = host.error;
		return -1;
	}
	return (int)syscall(SYS_fallocate, fd, mode, off, len);
}

int fstatvfs(int fd, struct statvfs *st)
{
	int rc = fchmod(fd, 0600); /* a bad descriptor is an error here too */

	memset(st, 0, sizeof(*st));
	st->f_frsize = 4096;
	st->f_bavail = (host.free ? host.free : 64 * GIB) / 4096;
	return rc;
}

static int setup(void **state)
{
	const char *tmp = getenv("TMPDIR");

	(void)state;
	memset(&host, 0, sizeof(host));
	snprintf(dir, sizeof(dir), "%.40s/test_pool.XXXXXX", tmp ? tmp : "/tmp");
	if (!mkdtemp(dir))
		return -1;
	dirfd_ = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	return dirfd_ < 0 ? -1 : 0;
}

static int teardown(void **state)
{
	(void)state;
	unlinkat(dirfd_, "pool", 0);
	close(dirfd_);
	return rmdir(dir);
}

static struct pool *open_pool(bool create, uint64_t limit)
{
	struct pool_opts o = {.dirfd = dirfd_, .name = "pool", .limit = limit, .create = create};
	struct pool *p;

	o.block = create ? BLOCK : 0;
	assert_int_equal(pool_open(&o, &p, NULL), 0);
	return p;
}

static int grow(struct pool *p, uint64_t need)
{
	struct pool_grow g;
	int rc = pool_grow_begin(p, need, &g);

	if (rc)
		return rc;
	pool_grow_run(p, &g);
	pool_grow_end(p, &g);
	return g.res;
}

static struct pool_info info(const struct pool *p)
{
	struct pool_info i;

	pool_get_info(p, &i);
	return i;
}

static uint64_t file_size(const struct pool *p)
{
	struct stat st;

	assert_int_equal(fstat(pool_fd(p), &st), 0);
	return (uint64_t)st.st_size;
}

/* A pool of POOL_SUPER_SIZE and `bytes` more. */
static struct pool *make(uint64_t bytes)
{
	struct pool *p = open_pool(true, POOL_SUPER_SIZE + bytes);

	assert_int_equal(grow(p, bytes), 0);
	assert_int_equal(info(p).size, POOL_SUPER_SIZE + bytes);
	return p;
}

/* --- allocation --------------------------------------------------------------------------- */

static void fresh_pool_is_small_and_asks_to_grow(void **state)
{
	struct pool *p = open_pool(true, 0);
	struct poff o;

	(void)state;
	assert_int_equal(file_size(p), POOL_SUPER_SIZE);
	assert_int_equal(info(p).size, POOL_SUPER_SIZE);
	assert_int_equal(info(p).free, 0);
	assert_int_equal(info(p).used, 0);
	assert_int_equal(pool_alloc(p, 4096, &o), -EAGAIN);
	pool_close(p);
}

static void one_allocation_follows_the_other(void **state)
{
	static const uint32_t lens[] = {BLOCK, 4096, 8192, BLOCK, 64 * KIB, 4096, BLOCK - 4096};
	struct pool *p = make(16 * MIB);
	uint64_t at = POOL_SUPER_SIZE;
	struct poff o;

	(void)state;
	for (size_t i = 0; i < sizeof(lens) / sizeof(lens[0]); i++) {
		assert_int_equal(pool_alloc(p, lens[i], &o), 0);
		assert_int_equal(o.o, at);
		at += lens[i];
	}
	assert_int_equal(info(p).used, at - POOL_SUPER_SIZE);
	assert_int_equal(info(p).free, 16 * MIB - (at - POOL_SUPER_SIZE));
	pool_close(p);
}

static void wraps_before_it_asks_to_grow(void **state)
{
	struct pool *p = make(8 * BLOCK);
	struct poff o[8], again;

	(void)state;
	for (int i = 0; i < 8; i++)
		assert_int_equal(pool_alloc(p, BLOCK, &o[i]), 0);
	assert_int_equal(pool_alloc(p, BLOCK, &again), -EAGAIN);
	/* A failed search does not move the cursor; what is freed is used again, in order. */
	pool_free(p, o[2], BLOCK);
	pool_free(p, o[5], BLOCK);
	assert_int_equal(pool_alloc(p, BLOCK, &again), 0);
	assert_int_equal(again.o, o[2].o);
	pool_free(p, o[2], BLOCK);
	assert_int_equal(pool_alloc(p, BLOCK, &again), 0);
	assert_int_equal(again.o, o[5].o); /* next-fit, not first-fit */
	assert_int_equal(pool_alloc(p, BLOCK, &again), 0);
	assert_int_equal(again.o, o[2].o);
	assert_int_equal(pool_alloc(p, 4096, &again), -EAGAIN);
	pool_close(p);
}

static void run_may_straddle_the_cursor(void **state)
{
	struct pool *p = make(4 * BLOCK);
	struct poff o[4], again;

	(void)state;
	for (int i = 0; i < 4; i++)
		assert_int_equal(pool_alloc(p, BLOCK, &o[i]), 0);
	pool_free(p, o[0], BLOCK);
	pool_free(p, o[1], BLOCK);
	pool_free(p, o[2], BLOCK);
	assert_int_equal(pool_alloc(p, BLOCK, &again), 0);
	pool_free(p, again, BLOCK);
	/* The cursor is in the middle of a run of three; only that is long enough. */
	assert_int_equal(pool_alloc(p, 3 * BLOCK, &again), 0);
	assert_int_equal(again.o, o[0].o);
	pool_close(p);
}

static void is_allocated_means_all_of_it(void **state)
{
	struct pool *p = make(8 * BLOCK);
	struct poff o, super = {0};

	(void)state;
	assert_int_equal(pool_alloc(p, BLOCK, &o), 0);
	assert_true(pool_is_allocated(p, o, BLOCK));
	assert_true(pool_is_allocated(p, (struct poff){o.o + 4096}, BLOCK - 4096));
	assert_false(pool_is_allocated(p, o, BLOCK + 4096));
	assert_false(pool_is_allocated(p, (struct poff){o.o + 1}, 4096));
	assert_false(pool_is_allocated(p, o, 0));
	assert_false(pool_is_allocated(p, super, 4096));
	assert_false(pool_is_allocated(p, (struct poff){POOL_SUPER_SIZE - 4096}, 8192));
	assert_false(pool_is_allocated(p, (struct poff){1ull << 50}, 4096));
	assert_false(pool_is_allocated(p, o, UINT64_MAX - 4095));
	pool_free(p, o, BLOCK);
	assert_false(pool_is_allocated(p, o, 4096));
	pool_close(p);
}

static void marks_are_checked(void **state)
{
	struct pool *p = make(8 * BLOCK);
	uint64_t size = info(p).size;
	const struct extent good = {.off = POOL_SUPER_SIZE + BLOCK, .len = BLOCK, .valid = 5};
	const struct extent bad[] = {
		{.off = good.off, .len = 4096, .valid = 4096},		     /* overlaps */
		{.off = good.off - 4096, .len = 8192, .valid = 1},	     /* at its start */
		{.off = good.off + BLOCK - 4096, .len = 8192, .valid = 1},   /* at its end */
		{.off = 4096, .len = 4096, .valid = 4096},		     /* superblock */
		{.off = POOL_SUPER_SIZE - 4096, .len = 8192, .valid = 4096}, /* reaches into it */
		{.off = POOL_SUPER_SIZE + 512, .len = 4096, .valid = 4096},
		{.off = POOL_SUPER_SIZE, .len = 1000, .valid = 1000},
		{.off = POOL_SUPER_SIZE, .len = 0, .valid = 0},
		{.off = POOL_SUPER_SIZE, .len = 4096, .valid = 4097},
		{.off = POOL_SUPER_SIZE + 3 * BLOCK, .len = 2 * BLOCK, .valid = 1}, /* > block */
		{.off = size - 4096, .len = 8192, .valid = 1},
		{.off = size, .len = 4096, .valid = 1},
		{.off = UINT64_MAX - 4095, .len = 8192, .valid = 1},
		{.off = 0, .len = 4096, .valid = 1}, /* a hole with bytes */
	};
	const struct extent hole = {0};

	(void)state;
	assert_int_equal(pool_mark(p, &hole), 0);
	assert_int_equal(info(p).used, 0);
	assert_int_equal(pool_mark(p, &good), 0);
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
		assert_int_equal(pool_mark(p, &bad[i]), -EUCLEAN);
	/* A refused mark has marked nothing. */
	assert_int_equal(info(p).used, BLOCK);
	assert_false(pool_is_allocated(p, (struct poff){good.off - 4096}, 4096));
	pool_close(p);
}

static void marked_space_is_not_handed_out(void **state)
{
	struct pool *p = make(4 * BLOCK);
	struct extent e = {.off = POOL_SUPER_SIZE + BLOCK, .len = BLOCK, .valid = BLOCK};
	struct poff o;

	(void)state;
	pool_close(p);
	p = open_pool(false, 0);
	assert_int_equal(info(p).used, 0); /* what is free is not stored */
	assert_int_equal(pool_mark(p, &e), 0);
	assert_int_equal(pool_alloc(p, BLOCK, &o), 0);
	assert_int_equal(o.o, POOL_SUPER_SIZE);
	assert_int_equal(pool_alloc(p, BLOCK, &o), 0);
	assert_int_equal(o.o, POOL_SUPER_SIZE + 2 * BLOCK);
	pool_free(p, (struct poff){e.off}, e.len);
	assert_int_equal(pool_alloc(p, BLOCK, &o), 0);
	assert_int_equal(o.o, POOL_SUPER_SIZE + 3 * BLOCK);
	assert_int_equal(pool_alloc(p, BLOCK, &o), 0);
	assert_int_equal(o.o, e.off);
	pool_close(p);
}

/* --- at random against a model ------------------------------------------------------------ */

struct model {
	bool *used; /* by unit */
	uint64_t units, cursor;
};

static bool model_find(const struct model *m, uint64_t from, uint64_t n, uint64_t *at)
{
	uint64_t run = 0;

	for (uint64_t u = from; u < m->units; u++) {
		run = m->used[u] ? 0 : run + 1;
		if (run == n) {
			*at = u + 1 - n;
			return true;
		}
	}
	return false;
}

static void model_set(struct model *m, uint64_t at, uint64_t n, bool used)
{
	for (uint64_t u = at; u < at + n; u++) {
		assert_int_equal(m->used[u], !used);
		m->used[u] = used;
	}
}

static void random_operations_fit_the_model(void **state)
{
	enum { HELD = 8192, FIRST = POOL_SUPER_SIZE / MOMENT_UNIT };
	/* Five groups of the bitmap and a piece of a sixth, reached in two steps. */
	const uint64_t small = 37 * MIB, large = 90 * MIB + 12 * KIB;
	struct pool *p = open_pool(true, POOL_SUPER_SIZE + large);
	struct model m = {.cursor = FIRST};
	static struct {
		struct poff off;
		uint32_t len;
	} held[HELD];
	unsigned int seed = 11, n = 0, failed = 0;

	(void)state;
	host.free = 4 * small; /* the step that growth takes for itself is a quarter of it */
	assert_int_equal(grow(p, small), 0);
	m.units = info(p).size / MOMENT_UNIT;
	m.used = calloc((POOL_SUPER_SIZE + large) / MOMENT_UNIT, sizeof(*m.used));
	assert_non_null(m.used);
	memset(m.used, true, FIRST);

	for (unsigned int round = 0; round < 12000; round++) {
		bool take = (unsigned int)rand_r(&seed) % 8 < (round / 1500 % 2 ? 3u : 6u);

		if (round == 4000) {
			host.free = 64 * GIB;
			assert_int_equal(grow(p, large - small), 0);
			m.units = info(p).size / MOMENT_UNIT;
		}
		if (take && n < HELD) {
			uint32_t len = MOMENT_UNIT *
				       (1 + (uint32_t)rand_r(&seed) % (1u << rand_r(&seed) % 12));
			uint64_t units = len / MOMENT_UNIT, at;
			struct poff o;
			int rc = pool_alloc(p, len, &o);

			if (!model_find(&m, m.cursor, units, &at) &&
			    !model_find(&m, FIRST, units, &at)) {
				assert_int_equal(rc, -EAGAIN);
				failed++;
				continue;
			}
			assert_int_equal(rc, 0);
			assert_int_equal(o.o, at * MOMENT_UNIT);
			model_set(&m, at, units, true);
			m.cursor = at + units;
			held[n].off = o;
			held[n++].len = len;
		} else if (n) {
			unsigned int i = (unsigned int)rand_r(&seed) % n;

			model_set(&m, held[i].off.o / MOMENT_UNIT, held[i].len / MOMENT_UNIT,
				  false);
			pool_free(p, held[i].off, held[i].len);
			held[i] = held[--n];
		}
	}
	assert_true(failed > 0);

	/* Everything is accounted for, and all freed is one run again. */
	while (n--)
		pool_free(p, held[n].off, held[n].len);
	assert_int_equal(info(p).used, 0);
	assert_int_equal(info(p).free, large);
	{
		struct poff o;

		assert_int_equal(pool_alloc(p, (uint32_t)large, &o), 0);
		assert_int_equal(o.o, POOL_SUPER_SIZE);
	}
	free(m.used);
	pool_close(p);
}

/* --- several TiB -------------------------------------------------------------------------- */

static void search_in_a_full_pool_of_4_tib(void **state)
{
	const uint64_t units = 4096 * GIB / MOMENT_UNIT;
	struct pool_map m = {0};
	uint64_t at;

	(void)state;
	assert_int_equal(pool_map_grow(&m, units), 0);
	pool_map_take(&m, 0, units);
	assert_false(pool_map_find(&m, 0, 1, &at));

	/* Runs: within a word, within a group, over the border of groups, over a whole group. */
	pool_map_give(&m, units / 2 + 7, 5);
	pool_map_give(&m, units / 2 + POOL_GROUP + 100, 1000);
	pool_map_give(&m, units / 2 + 4 * POOL_GROUP - 600, 1200);
	pool_map_give(&m, units / 2 + 8 * POOL_GROUP - 1, POOL_GROUP + 2);
	pool_map_give(&m, units - 3, 3);
	assert_true(pool_map_find(&m, 0, 5, &at));
	assert_int_equal(at, units / 2 + 7);
	assert_true(pool_map_find(&m, 0, 6, &at));
	assert_int_equal(at, units / 2 + POOL_GROUP + 100);
	assert_true(pool_map_find(&m, 0, 1001, &at));
	assert_int_equal(at, units / 2 + 4 * POOL_GROUP - 600);
	assert_true(pool_map_find(&m, 0, 1201, &at));
	assert_int_equal(at, units / 2 + 8 * POOL_GROUP - 1);
	assert_false(pool_map_find(&m, 0, POOL_GROUP + 3, &at));
	assert_true(pool_map_find(&m, units / 2 + 9 * POOL_GROUP, 2, &at));
	assert_int_equal(at, units - 3);
	assert_false(pool_map_find(&m, units - 2, 3, &at));
	assert_false(pool_map_find(&m, units, 1, &at));
	pool_map_fini(&m);
}

static void offsets_beyond_4_gib(void **state)
{
	struct pool *p = open_pool(true, 9 * GIB);
	struct extent e = {.off = 5 * GIB, .len = BLOCK, .valid = BLOCK};
	struct poff o;
	uint64_t sum = 0;

	(void)state;
	host.error = EOPNOTSUPP; /* a sparse file takes no space and no time */
	assert_int_equal(grow(p, 8 * GIB), 0);
	assert_int_equal(pool_mark(p, &e), 0);
	while (!pool_alloc(p, BLOCK, &o)) {
		assert_true(o.o + BLOCK <= e.off || o.o >= e.off + BLOCK);
		sum += BLOCK;
	}
	assert_true(sum >= 8 * GIB - 3 * BLOCK);
	assert_true(o.o > 7 * GIB);
	assert_true(pool_is_allocated(p, (struct poff){6 * GIB}, BLOCK));
	pool_free(p, o, BLOCK);
	assert_false(pool_is_allocated(p, o, BLOCK));
	pool_close(p);
}

/* --- growth ------------------------------------------------------------------------------- */

static void grows_in_large_steps_up_to_the_limit(void **state)
{
	struct pool *p = open_pool(true, 600 * MIB + 100);
	struct pool_grow g, other;

	(void)state;
	host.error = EOPNOTSUPP;
	host.free = 100 * GIB;
	assert_int_equal(pool_grow_begin(p, 4096, &g), 0);
	assert_int_equal(g.from, POOL_SUPER_SIZE);
	assert_int_equal(g.to - g.from, 4 * MIB); /* a small pool takes little */
	assert_int_equal(pool_grow_begin(p, 4096, &other), -EALREADY);
	assert_int_equal(info(p).size, POOL_SUPER_SIZE);
	pool_grow_run(p, &g);
	assert_int_equal(g.res, 0);
	assert_int_equal(info(p).size, POOL_SUPER_SIZE); /* not published before the end */
	pool_grow_end(p, &g);
	assert_int_equal(info(p).size, POOL_SUPER_SIZE + 4 * MIB);
	assert_int_equal(file_size(p), info(p).size);
	assert_int_equal(grow(p, 1), 0); /* as much again */
	assert_int_equal(info(p).size, 2 * (POOL_SUPER_SIZE + 4 * MIB));

	assert_int_equal(grow(p, 300 * MIB), 0); /* more than a step is needed */
	assert_int_equal(info(p).size, 2 * POOL_SUPER_SIZE + 308 * MIB);
	assert_int_equal(pool_grow_begin(p, 4096, &g), 0); /* no more than a large step */
	assert_int_equal(g.to - g.from, 256 * MIB);
	pool_grow_run(p, &g);
	pool_grow_end(p, &g);
	assert_int_equal(grow(p, 100 * MIB), -ENOSPC);
	assert_int_equal(info(p).available, 600 * MIB - POOL_SUPER_SIZE);
	assert_int_equal(grow(p, 1), 0);
	assert_int_equal(info(p).size, 600 * MIB);
	assert_int_equal(info(p).grown, 5);
	assert_int_equal(grow(p, 1), -ENOSPC);
	assert_int_equal(grow(p, 0), -EINVAL);
	pool_close(p);

	/* An eighth, once that is more. */
	p = open_pool(false, 0);
	assert_int_equal(grow(p, 15 * GIB), 0);
	assert_int_equal(pool_grow_begin(p, 4096, &g), 0);
	assert_in_range(g.to - g.from, info(p).size / 8 - 4096, info(p).size / 8);
	pool_grow_run(p, &g);
	pool_grow_end(p, &g);
	pool_close(p);
}

static void small_host_is_not_filled_by_one_step(void **state)
{
	struct pool *p = open_pool(true, 0);

	(void)state;
	host.free = 100 * MIB;
	assert_int_equal(grow(p, 30 * MIB), 0);
	assert_int_equal(grow(p, 4096), 0);
	assert_int_equal(info(p).size, POOL_SUPER_SIZE + 55 * MIB);
	assert_int_equal(grow(p, 60 * MIB), 0); /* what is needed is taken, though */
	assert_int_equal(info(p).size, POOL_SUPER_SIZE + 115 * MIB);
	assert_int_equal(grow(p, 101 * MIB), -ENOSPC);
	pool_close(p);
}

static void limit_below_the_size_only_stops_growth(void **state)
{
	struct pool *p = make(4 * BLOCK);
	struct poff o;

	(void)state;
	pool_close(p);
	p = open_pool(false, 4096);
	assert_int_equal(pool_alloc(p, BLOCK, &o), 0);
	assert_int_equal(grow(p, 4096), -ENOSPC);
	assert_int_equal(info(p).available, 3 * BLOCK);
	pool_close(p);
}

static void host_that_runs_full_gives_a_smaller_step(void **state)
{
	static const int errors[] = {ENOSPC, EDQUOT, EFBIG};

	(void)state;
	for (int i = 0; i < 3; i++) {
		struct pool *p = open_pool(true, 0);

		/* It says 64 GiB are free, but a quota says otherwise. */
		host.error = errors[i];
		host.capacity = 100 * MIB;
		assert_int_equal(grow(p, 60 * MIB), 0);
		assert_int_equal(grow(p, 4 * MIB), 0);
		assert_in_range(info(p).size, POOL_SUPER_SIZE + 64 * MIB, host.capacity);
		/* What a failing fallocate leaves behind is given back. */
		host.leftover = 99 * MIB;
		assert_int_equal(grow(p, 30 * MIB), -ENOSPC);
		assert_int_equal(file_size(p), info(p).size);
		host.leftover = 0;
		assert_int_equal(grow(p, 100 * MIB - info(p).size), 0); /* and it may try again */
		assert_int_equal(info(p).size, 100 * MIB);
		pool_close(p);
		unlinkat(dirfd_, "pool", 0);
	}
}

static void other_errors_of_the_host_are_passed_on(void **state)
{
	struct pool *p = open_pool(true, 0);

	(void)state;
	host.error = EIO;
	assert_int_equal(grow(p, 4096), -EIO);
	assert_int_equal(info(p).size, POOL_SUPER_SIZE);
	assert_int_equal(info(p).grown, 0);
	host.error = 0;
	host.signal = 3;
	assert_int_equal(grow(p, 4096), 0);
	assert_int_equal(host.signal, 0);
	pool_close(p);
}

static void host_that_cannot_reserve(void **state)
{
	struct pool *p;
	struct poff o;
	uint64_t size;

	(void)state;
	host.error = EOPNOTSUPP;
	p = open_pool(true, 0);
	assert_false(info(p).reserves);
	assert_int_equal(grow(p, BLOCK), 0);
	size = info(p).size;
	assert_int_equal(file_size(p), size);
	/* Free space in the file is worth no more than the host's. */
	host.free = 10 * BLOCK;
	assert_int_equal(info(p).available, 10 * BLOCK);
	assert_int_equal(pool_alloc(p, BLOCK, &o), 0);
	pool_close(p);

	/* Opening finds out by itself, and leaves the file as long as it is. */
	p = open_pool(false, 0);
	assert_false(info(p).reserves);
	assert_int_equal(info(p).size, size);
	assert_int_equal(file_size(p), size);
	pool_close(p);

	/* A full host, on the other hand, can. */
	host.error = ENOSPC;
	p = open_pool(false, 0);
	assert_int_equal(info(p).size, size);
	pool_close(p);
}

static void growth_takes_real_space(void **state)
{
	struct pool *p = make(8 * MIB);
	struct stat st;

	(void)state;
	assert_int_equal(fstat(pool_fd(p), &st), 0);
	assert_true(st.st_blocks * 512 >= 8 * MIB);
	assert_true(info(p).host_fs[0]);
	pool_close(p);
}

static void readonly_changes_nothing(void **state)
{
	struct pool_opts o = {.dirfd = dirfd_, .name = "pool", .readonly = true};
	struct extent e = {.off = POOL_SUPER_SIZE, .len = BLOCK, .valid = BLOCK};
	struct pool_grow g;
	struct pool *p;
	struct poff at;

	(void)state;
	pool_close(make(4 * BLOCK));
	host.calls = 0;
	assert_int_equal(pool_open(&o, &p, NULL), 0);
	assert_int_equal(pool_mark(p, &e), 0);
	assert_true(pool_is_allocated(p, (struct poff){e.off}, e.len));
	assert_int_equal(pool_alloc(p, BLOCK, &at), -EROFS);
	assert_int_equal(pool_grow_begin(p, BLOCK, &g), -EROFS);
	assert_int_equal(pool_write_super(p, 1), -EROFS);
	assert_int_equal(info(p).available, 3 * BLOCK);
	assert_int_equal(host.calls, 0);
	pool_close(p);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(fresh_pool_is_small_and_asks_to_grow),
		T(one_allocation_follows_the_other),
		T(wraps_before_it_asks_to_grow),
		T(run_may_straddle_the_cursor),
		T(is_allocated_means_all_of_it),
		T(marks_are_checked),
		T(marked_space_is_not_handed_out),
		T(random_operations_fit_the_model),
		T(search_in_a_full_pool_of_4_tib),
		T(offsets_beyond_4_gib),
		T(grows_in_large_steps_up_to_the_limit),
		T(small_host_is_not_filled_by_one_step),
		T(limit_below_the_size_only_stops_growth),
		T(host_that_runs_full_gives_a_smaller_step),
		T(other_errors_of_the_host_are_passed_on),
		T(host_that_cannot_reserve),
		T(growth_takes_real_space),
		T(readonly_changes_nothing),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
