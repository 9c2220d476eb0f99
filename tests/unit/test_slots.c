/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_slots.c - a file's slots: found by number, in order, marked for commits, and in memory only
 * where blocks were touched.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <malloc.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache.h"

#define HIGHEST (1u << 30)

struct fx {
	struct cache c;
	struct file f;
};

static int setup(void **state)
{
	struct fx *x = calloc(1, sizeof(*x));

	assert_non_null(x);
	list_init(&x->c.changed);
	list_init(&x->f.changed_link);
	*state = x;
	return 0;
}

static int teardown(void **state)
{
	struct fx *x = *state;

	slots_fini(&x->c, &x->f);
	assert_int_equal(x->c.heap, 0);
	free(x);
	return 0;
}

static uint64_t rnd(uint64_t *rng)
{
	*rng ^= *rng << 13;
	*rng ^= *rng >> 7;
	*rng ^= *rng << 17;
	return *rng;
}

static int by_number(const void *pa, const void *pb)
{
	const uint32_t *a = pa, *b = pb;

	return *a < *b ? -1 : *a > *b;
}

/* Near and far ones, each power of two about as often as the next. */
static uint32_t a_number(uint64_t *rng)
{
	return (uint32_t)(rnd(rng) % ((uint64_t)1 << rnd(rng) % 31));
}

static void every_slot_is_found_by_its_number_and_in_order(void **state)
{
	enum { N = 3000 };
	static uint32_t n[N];
	static struct slot *at[N];
	struct fx *x = *state;
	uint64_t rng = 88172645463325252u;
	uint32_t next = 0, seen = 0;
	struct slot *s;

	for (int i = 0; i < N; i++) {
		n[i] = a_number(&rng);
		at[i] = file_slot_make(&x->c, &x->f, n[i]);
		assert_non_null(at[i]);
		at[i]->acct = n[i] + 1; /* it is this one */
	}
	for (int i = 0; i < N; i++) {
		assert_ptr_equal(file_slot(&x->f, n[i]), at[i]);
		assert_int_equal(at[i]->acct, n[i] + 1);
	}
	qsort(n, N, sizeof(*n), by_number);
	for (int i = 0; i < N; i++) {
		if (i && n[i] == n[i - 1])
			continue;
		while ((s = file_slot_next(&x->f, &next)) && !s->acct)
			next++;
		assert_non_null(s);
		assert_int_equal(next, n[i]);
		assert_int_equal(s->acct, next + 1);
		next++;
		seen++;
	}
	while ((s = file_slot_next(&x->f, &next)) && !s->acct)
		next++;
	assert_null(s);
	assert_true(seen > N / 2);
}

static void memory_goes_by_the_blocks_that_were_touched(void **state)
{
	struct fx *x = *state;
	size_t before = mallinfo2().uordblks, took;

	assert_non_null(file_slot_make(&x->c, &x->f, 0));
	assert_int_equal(x->c.heap, 0); /* a small file has its slot with it */
	for (uint32_t n = 1; n < 32; n++) {
		file_slot_make(&x->c, &x->f, n);
		assert_in_range(x->c.heap, n * sizeof(struct slot),
				128 + 16 * 5 + 2 * n * sizeof(struct slot));
	}
	file_slot_make(&x->c, &x->f, HIGHEST); /* alone, as far off as can be */
	assert_in_range(x->c.heap, 1, 10000);
	for (uint32_t n = 0; n < 20000; n++)
		file_slot_make(&x->c, &x->f, n);
	assert_in_range(x->c.heap, 1, 20000 * (sizeof(struct slot) + 4));
	took = mallinfo2().uordblks - before;
	if (mallinfo2().uordblks) /* not with a sanitizer's allocator */
		assert_in_range(took, x->c.heap * 99 / 100, x->c.heap * 101 / 100);
}

static void a_commit_finds_what_was_marked_and_nothing_else(void **state)
{
	static const uint32_t touched[] = {0, 40, 41, 70, 5000, 1u << 20, HIGHEST};
	struct fx *x = *state;
	uint32_t segs[8];

	for (size_t i = 0; i < sizeof(touched) / sizeof(*touched); i++)
		file_slot_make(&x->c, &x->f, touched[i])->live.off = 4096;
	assert_int_equal(slots_marked(&x->f), 0);
	assert_int_equal(file_map_len(&x->f), HIGHEST + 1);
	slot_changed(&x->c, &x->f, 1u << 20);
	slot_changed(&x->c, &x->f, 41);
	slot_changed(&x->c, &x->f, 40);
	assert_true(x->f.changed);
	assert_int_equal(slots_marked(&x->f), 2);
	slots_marked_get(&x->f, segs);
	assert_int_equal(segs[0], 1);
	assert_int_equal(segs[1], (1u << 20) / SLOT_LEAF);
	/* What lies past the end of the file is for the next one. */
	slots_unmark(&x->f, 5000);
	assert_int_equal(slots_marked(&x->f), 1);
	slots_unmark(&x->f, UINT32_MAX);
	assert_int_equal(slots_marked(&x->f), 0);
	file_changed_all(&x->c, &x->f);
	assert_int_equal(slots_marked(&x->f), 6); /* 40 and 41 are in one */
}

static void memory_of_holes_is_given_back(void **state)
{
	struct fx *x = *state;
	uint64_t full;

	for (uint32_t n = 32; n < 100000; n++)
		file_slot_make(&x->c, &x->f, n)->live.off = 4096;
	full = x->c.heap;
	for (uint32_t n = 64; n < 100000; n++)
		file_slot(&x->f, n)->live.off = 0;
	slot_changed(&x->c, &x->f, 50000); /* the next commit is to see that it is a hole */
	slots_tidy(&x->c, &x->f);
	assert_true(x->c.heap < full / 100);
	assert_non_null(file_slot(&x->f, 50000));
	assert_null(file_slot(&x->f, 50000 + SLOT_LEAF));
	assert_int_equal(file_map_len(&x->f), 64);
	slots_unmark(&x->f, UINT32_MAX);
	file_slot(&x->f, 50)->live.off = 0;
	for (uint32_t n = 32; n < 64; n++)
		file_slot(&x->f, n)->live.off = 0;
	slots_tidy(&x->c, &x->f);
	assert_int_equal(x->c.heap, 0);
	assert_null(file_slot(&x->f, 50));
	assert_non_null(file_slot_make(&x->c, &x->f, 5000));
}

#define test(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		test(every_slot_is_found_by_its_number_and_in_order),
		test(memory_goes_by_the_blocks_that_were_touched),
		test(a_commit_finds_what_was_marked_and_nothing_else),
		test(memory_of_holes_is_given_back),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
