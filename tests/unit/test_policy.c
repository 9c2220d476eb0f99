/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_policy.c - the order of victims, the ghosts, and what they are for: hit rates on traces,
 * with a plain LRU beside it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "engine/policy.h"

static struct policy *make(uint32_t blocks)
{
	struct policy *p;

	assert_int_equal(policy_create(&p, blocks), 0);
	return p;
}

static struct policy_node node(uint64_t key)
{
	struct policy_node n = {.key = key, .bytes = 4096, .class = POLICY_WHOLE};

	return n;
}

/* Inserts keys first .. first + n - 1. */
static void insert(struct policy *p, struct policy_node *nodes, uint64_t first, int n)
{
	for (int i = 0; i < n; i++) {
		nodes[i] = node(first + (uint64_t)i);
		policy_insert(p, &nodes[i]);
	}
}

static void expect_order(struct policy *p, enum policy_class class, int n, const uint64_t *keys)
{
	struct policy_node *pos = NULL;

	for (int i = 0; i < n; i++) {
		pos = policy_victim(p, class, 0, pos);
		assert_non_null(pos);
		assert_int_equal(pos->key, keys[i]);
	}
	assert_null(policy_victim(p, class, 0, pos));
}

/* Brings a block into Am: seen, evicted, seen again. */
static void make_hot(struct policy *p, struct policy_node *n, uint64_t key)
{
	*n = node(key);
	policy_insert(p, n);
	policy_remove(p, n, true);
	policy_insert(p, n);
}

static void empty_has_no_victim(void **state)
{
	struct policy *p = make(8);

	(void)state;
	assert_null(policy_victim(p, POLICY_WHOLE, 0, NULL));
	assert_null(policy_victim(p, POLICY_SMALL, 0, NULL));
	policy_destroy(p);
}

static void newcomers_go_in_order_of_arrival(void **state)
{
	struct policy *p = make(8);
	struct policy_node n[4];

	(void)state;
	insert(p, n, 1, 4);
	policy_touch(p, &n[0]); /* uses close together are one use */
	expect_order(p, POLICY_WHOLE, 4, (uint64_t[]){1, 2, 3, 4});
	policy_destroy(p);
}

static void ghost_makes_hot(void **state)
{
	struct policy *p = make(8);
	struct policy_node hot[2], n[3];

	(void)state;
	make_hot(p, &hot[0], 100);
	make_hot(p, &hot[1], 101);
	insert(p, n, 1, 3);
	/* Newcomers exceed their quarter, so they go first; the hot ones least recently used. */
	expect_order(p, POLICY_WHOLE, 5, (uint64_t[]){1, 2, 3, 100, 101});
	policy_touch(p, &hot[0]);
	expect_order(p, POLICY_WHOLE, 5, (uint64_t[]){1, 2, 3, 101, 100});
	policy_destroy(p);
}

/* Whether a block that comes now is a newcomer: one that comes later does not go before it. */
static bool comes_as_newcomer(struct policy *p, struct policy_node *n)
{
	struct policy_node later = node(UINT64_MAX);
	bool first;

	policy_insert(p, n);
	policy_insert(p, &later);
	first = policy_victim(p, POLICY_WHOLE, 0, NULL) == n;
	policy_remove(p, &later, false);
	return first;
}

static void dropped_block_leaves_no_ghost(void **state)
{
	struct policy *p = make(8);
	struct policy_node n = node(1);

	(void)state;
	policy_insert(p, &n);
	policy_remove(p, &n, false);
	assert_true(comes_as_newcomer(p, &n));
	policy_remove(p, &n, true);
	assert_false(comes_as_newcomer(p, &n));
	policy_destroy(p);
}

static void hot_block_evicted_leaves_no_ghost(void **state)
{
	struct policy *p = make(8);
	struct policy_node n;

	(void)state;
	make_hot(p, &n, 1);
	policy_remove(p, &n, true);
	assert_true(comes_as_newcomer(p, &n));
	policy_destroy(p);
}

static void newcomers_within_their_share_stay(void **state)
{
	struct policy *p = make(8);
	struct policy_node hot[6], n[3];

	(void)state;
	for (int i = 0; i < 6; i++)
		make_hot(p, &hot[i], 100 + (uint64_t)i);
	/* Two of eight are a quarter, three of nine are more. */
	insert(p, n, 1, 2);
	expect_order(p, POLICY_WHOLE, 8, (uint64_t[]){100, 101, 102, 103, 104, 105, 1, 2});
	insert(p, n + 2, 3, 1);
	expect_order(p, POLICY_WHOLE, 9, (uint64_t[]){1, 2, 3, 100, 101, 102, 103, 104, 105});
	policy_destroy(p);
}

static void share_is_of_bytes(void **state)
{
	struct policy *p = make(8);
	struct policy_node hot[2], n = node(1);

	(void)state;
	make_hot(p, &hot[0], 100);
	make_hot(p, &hot[1], 101);
	n.bytes = 1024; /* a third of the blocks, an eighth of the bytes */
	policy_insert(p, &n);
	expect_order(p, POLICY_WHOLE, 3, (uint64_t[]){100, 101, 1});
	policy_destroy(p);
}

static void cooled_goes_first_and_touch_takes_it_back(void **state)
{
	struct policy *p = make(8);
	struct policy_node hot[2], n[3];

	(void)state;
	make_hot(p, &hot[0], 100);
	make_hot(p, &hot[1], 101);
	insert(p, n, 1, 3);
	policy_cool(p, &hot[1]);
	policy_cool(p, &n[2]);
	/* The last one done with is used again last, if this is a sweep. */
	expect_order(p, POLICY_WHOLE, 5, (uint64_t[]){3, 101, 1, 2, 100});
	policy_cool(p, &hot[1]);
	expect_order(p, POLICY_WHOLE, 5, (uint64_t[]){101, 3, 1, 2, 100});
	policy_touch(p, &hot[1]);
	policy_touch(p, &n[2]);
	expect_order(p, POLICY_WHOLE, 5, (uint64_t[]){1, 2, 3, 100, 101});
	policy_destroy(p);
}

static void classes_are_apart(void **state)
{
	struct policy *p = make(8);
	struct policy_node n[3], small = node(7), other = node(8);

	(void)state;
	insert(p, n, 1, 3);
	small.class = other.class = POLICY_SMALL;
	policy_insert(p, &small);
	expect_order(p, POLICY_WHOLE, 3, (uint64_t[]){1, 2, 3});
	expect_order(p, POLICY_SMALL, 1, (uint64_t[]){7});

	/* A ghost of the other class does not count: both small ones are newcomers. */
	policy_remove(p, &small, false);
	policy_remove(p, &n[0], true);
	small.key = 1;
	policy_insert(p, &small);
	policy_insert(p, &other);
	expect_order(p, POLICY_SMALL, 2, (uint64_t[]){1, 8});
	policy_destroy(p);
}

static void ghosts_are_bounded_and_the_oldest_goes(void **state)
{
	struct policy *p = make(8); /* four ghosts */
	struct policy_node n, all[5], cold;

	(void)state;
	for (uint64_t k = 1; k <= 5; k++) {
		n = node(k);
		policy_insert(p, &n);
		policy_remove(p, &n, true);
	}
	insert(p, all, 1, 5);
	cold = node(9);
	policy_insert(p, &cold);
	/* 1 was forgotten and is a newcomer like 9; 2 to 5 came back. */
	expect_order(p, POLICY_WHOLE, 6, (uint64_t[]){1, 9, 2, 3, 4, 5});
	policy_destroy(p);
}

static void tiny_sizes_work(void **state)
{
	(void)state;
	for (uint32_t blocks = 0; blocks < 6; blocks++) {
		struct policy *p = make(blocks);
		struct policy_node n;

		for (uint64_t k = 0; k < 20; k++) {
			n = node(k % 3);
			policy_insert(p, &n);
			assert_ptr_equal(policy_victim(p, POLICY_WHOLE, 0, NULL), &n);
			policy_remove(p, &n, true);
		}
		policy_destroy(p);
	}
}

/* --- every block once, at random ---------------------------------------------------------- */

static void walk_covers_every_block_once(void **state)
{
	enum { N = 64 };
	struct policy *p = make(N);
	struct policy_node n[N];
	bool in[N] = {false};
	unsigned int seed = 7;

	(void)state;
	for (int i = 0; i < N; i++) {
		n[i] = node((uint64_t)i << 24);
		n[i].bytes = 4096u << i % 4;
		n[i].class = i % 3 ? POLICY_WHOLE : POLICY_SMALL;
	}
	for (int round = 0; round < 20000; round++) {
		int i = rand_r(&seed) % N, what = rand_r(&seed) % 8;

		if (!in[i]) {
			policy_insert(p, &n[i]);
			in[i] = true;
		} else if (what < 4) {
			policy_touch(p, &n[i]);
		} else if (what < 6) {
			policy_cool(p, &n[i]);
			assert_ptr_equal(policy_victim(p, n[i].class, 0, NULL), &n[i]);
		} else {
			policy_remove(p, &n[i], what == 6);
			in[i] = false;
		}
		for (int class = 0; class < POLICY_CLASSES; class ++) {
			struct policy_node *pos = NULL;
			bool seen[N] = {false};
			int count = 0;

			while ((pos = policy_victim(p, class, 0, pos))) {
				assert_true(pos >= n && pos < n + N && in[pos - n]);
				assert_int_equal(pos->class, class);
				assert_false(seen[pos - n]);
				seen[pos - n] = true;
				count++;
			}
			for (int k = 0; k < N; k++)
				count -= in[k] && n[k].class == class;
			assert_int_equal(count, 0);
		}
	}
	policy_destroy(p);
}

/* --- traces ------------------------------------------------------------------------------- */

#define KEYS 4096

/* A cache of `size` blocks with 2Q, and an LRU of the same size; both count hits. */
struct caches {
	struct policy *p;
	struct policy_node nodes[KEYS];
	bool in[KEYS];
	int size, count;
	long hits, lru_hits, uses;
	uint64_t last[KEYS], clock; /* LRU: time of the last use, 0: not in */
	int lru_count;
};

static struct caches *caches_make(int size)
{
	struct caches *c = calloc(1, sizeof(*c));

	assert_non_null(c);
	c->size = size;
	c->p = make((uint32_t)size);
	return c;
}

static void caches_free(struct caches *c)
{
	policy_destroy(c->p);
	free(c);
}

static void use_lru(struct caches *c, int key)
{
	if (c->last[key]) {
		c->lru_hits++;
	} else if (c->lru_count < c->size) {
		c->lru_count++;
	} else {
		int oldest = -1;

		for (int k = 0; k < KEYS; k++) {
			if (c->last[k] && (oldest < 0 || c->last[k] < c->last[oldest]))
				oldest = k;
		}
		c->last[oldest] = 0;
	}
	c->last[key] = ++c->clock;
}

static bool use(struct caches *c, int key)
{
	bool hit = c->in[key];

	c->uses++;
	use_lru(c, key);
	if (hit) {
		c->hits++;
		policy_touch(c->p, &c->nodes[key]);
		return true;
	}
	if (c->count == c->size) {
		struct policy_node *v = policy_victim(c->p, POLICY_WHOLE, 0, NULL);

		policy_remove(c->p, v, true);
		c->in[v->key] = false;
		c->count--;
	}
	c->nodes[key] = node((uint64_t)key);
	policy_insert(c->p, &c->nodes[key]);
	c->in[key] = true;
	c->count++;
	return false;
}

static void scan_does_not_flush_the_hot_ones(void **state)
{
	struct caches *c = caches_make(64);
	int scan = 1000, hot_in = 0;

	(void)state;
	/* Forty hot blocks amid others, until they are known. */
	for (int round = 0; round < 20; round++) {
		for (int k = 0; k < 40; k++)
			use(c, k);
		for (int k = 0; k < 10; k++)
			use(c, 200 + round * 10 + k);
	}
	for (int k = 0; k < 2000; k++)
		use(c, scan + k);
	c->hits = c->lru_hits = 0;
	for (int k = 0; k < 40; k++)
		hot_in += use(c, k);
	assert_int_equal(hot_in, 40);
	assert_int_equal(c->lru_hits, 0); /* while LRU has lost them all */
	caches_free(c);
}

static void sweep_is_no_worse_than_lru(void **state)
{
	(void)state;
	for (int length = 32; length <= 256; length += 16) {
		struct caches *c = caches_make(64);

		for (int round = 0; round < 10; round++) {
			for (int k = 0; k < length; k++)
				use(c, k);
		}
		assert_true(c->hits >= c->lru_hits);
		if (length <= 64)
			assert_int_equal(c->hits, 9 * length);
		caches_free(c);
	}
}

static void sweep_with_hints_keeps_a_part(void **state)
{
	struct caches *c = caches_make(64);

	(void)state;
	/* Whoever sweeps says so; then a part of 64 in 128 stays, where LRU keeps nothing. */
	for (int round = 0; round < 10; round++) {
		for (int k = 0; k < 128; k++) {
			use(c, k);
			policy_cool(c->p, &c->nodes[k]);
		}
	}
	assert_int_equal(c->lru_hits, 0);
	assert_true(c->hits >= 9 * 60);
	caches_free(c);
}

static void skewed_uses_are_hit_as_often_as_with_lru(void **state)
{
	struct caches *c = caches_make(64);
	unsigned int seed = 3;

	(void)state;
	for (int i = 0; i < 20000; i++) {
		/* Products of uniform numbers: small keys often, large ones now and then. */
		int a = rand_r(&seed) % 1000, b = rand_r(&seed) % 1000, d = rand_r(&seed) % 1000;

		use(c, (int)((long)a * b / 1000 * d / 1000));
	}
	assert_true(c->hits >= c->lru_hits);
	caches_free(c);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(empty_has_no_victim),
		cmocka_unit_test(newcomers_go_in_order_of_arrival),
		cmocka_unit_test(ghost_makes_hot),
		cmocka_unit_test(dropped_block_leaves_no_ghost),
		cmocka_unit_test(hot_block_evicted_leaves_no_ghost),
		cmocka_unit_test(newcomers_within_their_share_stay),
		cmocka_unit_test(share_is_of_bytes),
		cmocka_unit_test(cooled_goes_first_and_touch_takes_it_back),
		cmocka_unit_test(classes_are_apart),
		cmocka_unit_test(ghosts_are_bounded_and_the_oldest_goes),
		cmocka_unit_test(tiny_sizes_work),
		cmocka_unit_test(walk_covers_every_block_once),
		cmocka_unit_test(scan_does_not_flush_the_hot_ones),
		cmocka_unit_test(sweep_is_no_worse_than_lru),
		cmocka_unit_test(sweep_with_hints_keeps_a_part),
		cmocka_unit_test(skewed_uses_are_hit_as_often_as_with_lru),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
