/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_arena.c - the arena: its memory is sealed, populated and as large as it says; allocations do
 * not overlap, are aligned, come back whole, and keep to their class. Pieces at random against a
 * shadow map.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/arena.h"

#define KIB 1024u
#define MIB (1024u * KIB)

static struct arena *make(uint64_t size, uint32_t chunk, uint32_t small_max)
{
	struct arena_opts o = {.size = size, .chunk = chunk, .small_max = small_max};
	struct arena *a;

	assert_int_equal(arena_create(&o, &a), 0);
	return a;
}

static struct arena_info info(const struct arena *a)
{
	struct arena_info i;

	arena_get_info(a, &i);
	return i;
}

static void bad_sizes_are_refused(void **state)
{
	static const struct arena_opts bad[] = {
		{.size = 8 * MIB, .chunk = 0},
		{.size = 8 * MIB, .chunk = 3 * MIB},
		{.size = 8 * MIB, .chunk = 32 * KIB},
		{.size = 1024ull * MIB, .chunk = 128 * MIB},
		{.size = 8 * MIB - 1, .chunk = 2 * MIB}, /* three chunks */
		{.size = 0, .chunk = 2 * MIB},
	};
	struct arena *a;

	(void)state;
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
		assert_int_equal(arena_create(&bad[i], &a), -EINVAL);
}

static void more_than_the_machine_has_is_enomem(void **state)
{
	struct arena_opts o = {.size = 1ull << 44, .chunk = 2 * MIB};
	struct arena *a;

	(void)state;
	assert_int_equal(arena_create(&o, &a), -ENOMEM);
	o.huge = ARENA_HUGE_OFF;
	assert_int_equal(arena_create(&o, &a), -ENOMEM);
}

static void memory_is_populated_aligned_and_mapped(void **state)
{
	/* The second has a tail that no huge page can hold, the third is smaller than one. */
	static const struct {
		uint64_t size;
		uint32_t chunk;
	} shapes[] = {{16 * MIB, 2 * MIB}, {5 * MIB, 64 * KIB}, {MIB, 256 * KIB}};

	(void)state;
	for (int i = 0; i < 3; i++) {
		struct arena *a = make(shapes[i].size + 4095, shapes[i].chunk, 0);
		unsigned char *base = arena_base(a), *again;
		struct stat st;

		/* Where nothing collapses but pages are reserved, whole ones are taken. */
		if (!strcmp(info(a).kind, "hugetlb")) {
			arena_destroy(a);
			continue;
		}
		assert_int_equal(arena_size(a), shapes[i].size);
		assert_int_equal(arena_chunk(a), shapes[i].chunk);
		assert_int_equal((uintptr_t)base % (2 * MIB), 0);
		assert_int_equal(fstat(arena_fd(a), &st), 0);
		assert_int_equal(st.st_size, shapes[i].size);
		assert_int_equal(st.st_blocks * 512, shapes[i].size);

		/* A client's mapping of the descriptor sees the same bytes. */
		again = mmap(NULL, shapes[i].size, PROT_READ | PROT_WRITE, MAP_SHARED, arena_fd(a),
			     0);
		assert_true(again != MAP_FAILED);
		for (uint64_t off = 0; off < shapes[i].size; off += 4096)
			base[off] = (unsigned char)(off >> 12 ^ off >> 20);
		for (uint64_t off = 0; off < shapes[i].size; off += 4096)
			assert_int_equal(again[off], (unsigned char)(off >> 12 ^ off >> 20));
		munmap(again, shapes[i].size);
		arena_destroy(a);
	}
}

static void memory_is_sealed(void **state)
{
	struct arena *a = make(8 * MIB, 2 * MIB, 0);
	int seals = fcntl(arena_fd(a), F_GET_SEALS);

	(void)state;
	assert_int_equal(ftruncate(arena_fd(a), 4 * MIB), -1);
	assert_int_equal(errno, EPERM);
	assert_int_equal(ftruncate(arena_fd(a), 16 * MIB), -1);
	assert_int_equal(errno, EPERM);
	assert_int_equal(fcntl(arena_fd(a), F_ADD_SEALS, F_SEAL_WRITE), -1);
	assert_int_equal(errno, EPERM);
	assert_true(seals & F_SEAL_SEAL);
	assert_false(seals & F_SEAL_WRITE);
	arena_destroy(a);
}

static uint64_t reserved_huge_pages(void)
{
	unsigned long long n = 0;
	FILE *f = fopen("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "r");

	if (f) {
		if (fscanf(f, "%llu", &n) != 1)
			n = 0;
		fclose(f);
	}
	return n;
}

static void kind_says_what_it_is(void **state)
{
	struct arena_opts o = {.size = 16 * MIB, .chunk = 2 * MIB, .huge = ARENA_HUGE_OFF};
	struct arena_info i;
	struct arena *a;

	(void)state;
	assert_int_equal(arena_create(&o, &a), 0);
	i = info(a);
	assert_string_equal(i.kind, "small pages");
	assert_int_equal(i.huge, 0);
	assert_true(i.reason[0]);
	arena_destroy(a);

	o.huge = ARENA_HUGE_AUTO;
	assert_int_equal(arena_create(&o, &a), 0);
	i = info(a);
	if (!i.reason[0]) /* all of it, or else it says why not */
		assert_int_equal(i.huge, i.size);
	if (!strcmp(i.kind, "small pages"))
		assert_int_equal(i.huge, 0);
	arena_destroy(a);

	o.huge = ARENA_HUGE_HUGETLB;
	if (reserved_huge_pages() >= 8) {
		/* 2 MiB less is kept: such memory comes in whole pages. */
		o.size = 15 * MIB;
		o.chunk = MIB;
		assert_int_equal(arena_create(&o, &a), 0);
		i = info(a);
		assert_string_equal(i.kind, "hugetlb");
		assert_string_equal(i.reason, "");
		assert_int_equal(i.size, 14 * MIB);
		assert_int_equal(i.huge, i.size);
		memset(arena_base(a), 1, i.size);
		arena_destroy(a);
	} else {
		o.size = (reserved_huge_pages() + 8) * 2 * MIB;
		assert_int_equal(arena_create(&o, &a), -ENOMEM);
	}
}

static void piece_size_is_the_next_power_of_two(void **state)
{
	struct arena *a = make(8 * MIB, 2 * MIB, 0);

	(void)state;
	assert_int_equal(arena_piece_size(a, 1), 4 * KIB);
	assert_int_equal(arena_piece_size(a, 4096), 4 * KIB);
	assert_int_equal(arena_piece_size(a, 4097), 8 * KIB);
	assert_int_equal(arena_piece_size(a, 8192), 8 * KIB);
	assert_int_equal(arena_piece_size(a, 8193), 16 * KIB);
	assert_int_equal(arena_piece_size(a, MIB), MIB);
	assert_int_equal(arena_piece_size(a, MIB + 1), 2 * MIB);
	assert_int_equal(arena_piece_size(a, 2 * MIB), 2 * MIB);
	assert_false(arena_is_whole(a, MIB));
	assert_true(arena_is_whole(a, MIB + 1));
	arena_destroy(a);
}

static void lengths_out_of_range_are_refused(void **state)
{
	struct arena *a = make(8 * MIB, 2 * MIB, 0);
	struct aoff o;

	(void)state;
	assert_int_equal(arena_alloc(a, 0, &o), -EINVAL);
	assert_int_equal(arena_alloc(a, 2 * MIB + 1, &o), -EINVAL);
	arena_destroy(a);
}

static void all_chunks_can_be_had_whole(void **state)
{
	struct arena *a = make(16 * MIB, MIB, 4);
	bool seen[16] = {false};
	struct aoff o[16], none;

	(void)state;
	for (int i = 0; i < 16; i++) {
		assert_int_equal(arena_free_chunks(a), 16 - i);
		assert_int_equal(arena_alloc(a, MIB - (uint32_t)i, &o[i]), 0);
		assert_int_equal(o[i].o % MIB, 0);
		assert_true(o[i].o < 16 * MIB);
		assert_false(seen[o[i].o / MIB]);
		seen[o[i].o / MIB] = true;
		assert_ptr_equal(arena_ptr(a, o[i]), (char *)arena_base(a) + o[i].o);
	}
	assert_int_equal(info(a).used, 16 * MIB);
	assert_int_equal(arena_alloc(a, MIB, &none), -ENOMEM);
	assert_int_equal(arena_alloc(a, 1, &none), -ENOMEM);
	for (int i = 0; i < 16; i++)
		arena_free(a, o[i], MIB - (uint32_t)i);
	assert_int_equal(arena_free_chunks(a), 16);
	assert_int_equal(info(a).used, 0);
	arena_destroy(a);
}

static void pieces_stay_in_their_chunks(void **state)
{
	struct arena *a = make(16 * MIB, MIB, 3);
	struct aoff o, last = {0};
	unsigned int n = 0;

	(void)state;
	/* However many pieces there are, thirteen chunks stay whole. */
	while (!arena_alloc(a, 4 * KIB, &o)) {
		last = o;
		n++;
	}
	assert_int_equal(n, 3 * 256);
	assert_int_equal(info(a).chunks_small, 3);
	assert_int_equal(arena_free_chunks(a), 13);
	assert_int_equal(arena_alloc(a, MIB, &o), 0);

	/* One freed piece serves one allocation again. */
	arena_free(a, last, 4 * KIB);
	assert_int_equal(arena_alloc(a, 8 * KIB, &o), -ENOMEM);
	assert_int_equal(arena_alloc(a, 4 * KIB, &o), 0);
	assert_int_equal(o.o, last.o);
	arena_destroy(a);
}

static void default_is_a_quarter_for_pieces(void **state)
{
	struct arena *a = make(16 * MIB, MIB, 0);

	(void)state;
	assert_int_equal(info(a).small_max, 4);
	arena_destroy(a);
	a = make(4 * MIB, MIB, 0);
	assert_int_equal(info(a).small_max, 1);
	arena_destroy(a);
	a = make(4 * MIB, MIB, 100);
	assert_int_equal(info(a).small_max, 4);
	arena_destroy(a);
}

static void chunk_without_pieces_goes_back(void **state)
{
	struct arena *a = make(4 * MIB, MIB, 1);
	struct aoff small, half, whole[4];

	(void)state;
	assert_int_equal(arena_alloc(a, 100, &small), 0);
	assert_int_equal(arena_alloc(a, 512 * KIB, &half), 0);
	assert_int_equal(small.o / MIB, half.o / MIB);
	assert_int_equal(info(a).used, 516 * KIB);
	for (int i = 0; i < 3; i++)
		assert_int_equal(arena_alloc(a, MIB, &whole[i]), 0);
	assert_int_equal(arena_alloc(a, MIB, &whole[3]), -ENOMEM);
	arena_free(a, half, 512 * KIB);
	assert_int_equal(arena_alloc(a, MIB, &whole[3]), -ENOMEM);
	arena_free(a, small, 100);
	assert_int_equal(info(a).chunks_small, 0);
	assert_int_equal(arena_alloc(a, MIB, &whole[3]), 0);
	arena_destroy(a);
}

static void smallest_piece_that_fits_is_taken(void **state)
{
	struct arena *a = make(4 * MIB, MIB, 2);
	struct aoff p[256], o;

	(void)state;
	for (int i = 0; i < 256; i++)
		assert_int_equal(arena_alloc(a, 4 * KIB, &p[i]), 0);
	/* Two holes: one of 4 KiB, one of 16 KiB, freed later and so at the front of its list. */
	arena_free(a, p[9], 4 * KIB);
	for (int i = 100; i < 104; i++)
		arena_free(a, p[i], 4 * KIB);
	assert_int_equal(arena_alloc(a, 4 * KIB, &o), 0);
	assert_int_equal(o.o, p[9].o);
	assert_int_equal(arena_alloc(a, 16 * KIB, &o), 0);
	assert_int_equal(o.o, p[100].o);
	assert_int_equal(info(a).chunks_small, 1);
	arena_destroy(a);
}

/* --- at random against a shadow map ------------------------------------------------------- */

struct held {
	struct aoff off;
	uint32_t len;
	uint32_t tag;
};

static void mark_ends(struct arena *a, const struct held *h)
{
	char *p = arena_ptr(a, h->off);

	memcpy(p, &h->tag, sizeof(h->tag));
	memcpy(p + arena_piece_size(a, h->len) - sizeof(h->tag), &h->tag, sizeof(h->tag));
}

static void check_ends(struct arena *a, const struct held *h)
{
	const char *p = arena_ptr(a, h->off);

	assert_memory_equal(p, &h->tag, sizeof(h->tag));
	assert_memory_equal(p + arena_piece_size(a, h->len) - sizeof(h->tag), &h->tag,
			    sizeof(h->tag));
}

static void random_operations(uint64_t size, uint32_t chunk, uint32_t small_max, unsigned int seed)
{
	struct arena *a = make(size, chunk, small_max);
	size_t units = size / MOMENT_UNIT, n = 0, failed = 0, heap;
	bool *taken = calloc(units, sizeof(*taken));
	struct held *held = calloc(units, sizeof(*held));
	uint64_t used = 0;

	assert_non_null(taken);
	assert_non_null(held);
	heap = mallinfo2().uordblks;
	for (uint32_t round = 0; round < 40000; round++) {
		/* Tides, so that it is nearly empty and quite full again and again. */
		bool grow = (unsigned int)rand_r(&seed) % 8 < (round / 2000 % 2 ? 2u : 6u);

		if (grow) {
			struct held *h = &held[n];
			uint32_t shift = (unsigned int)rand_r(&seed) % 12;
			uint32_t piece;

			h->len = 1 + (uint32_t)rand_r(&seed) % (chunk >> shift);
			h->tag = round;
			if (arena_alloc(a, h->len, &h->off)) {
				/* True shortage only: a whole chunk fails if and only if none is
				 * free; a piece only if all small chunks are in use. */
				struct arena_info i = info(a);

				if (arena_is_whole(a, h->len))
					assert_int_equal(i.chunks_free, 0);
				else
					assert_true(!i.chunks_free ||
						    i.chunks_small == i.small_max);
				failed++;
				continue;
			}
			piece = arena_piece_size(a, h->len);
			assert_int_equal(h->off.o % piece, 0);
			assert_true(h->off.o + piece <= size);
			for (uint64_t u = h->off.o / MOMENT_UNIT;
			     u < (h->off.o + piece) / MOMENT_UNIT; u++) {
				assert_false(taken[u]);
				taken[u] = true;
			}
			used += piece;
			mark_ends(a, h);
			n++;
		} else if (n) {
			size_t i = (size_t)rand_r(&seed) % n;
			struct held h = held[i];
			uint32_t piece = arena_piece_size(a, h.len);

			check_ends(a, &h);
			arena_free(a, h.off, h.len);
			memset(taken + h.off.o / MOMENT_UNIT, 0, piece / MOMENT_UNIT);
			used -= piece;
			held[i] = held[--n];
		}
		assert_int_equal(info(a).used, used);
		assert_true(info(a).chunks_small <= info(a).small_max);
	}
	assert_true(failed > 0);
	assert_int_equal(mallinfo2().uordblks, heap); /* no allocation after creation */
	while (n) {
		n--;
		check_ends(a, &held[n]);
		arena_free(a, held[n].off, held[n].len);
	}
	assert_int_equal(info(a).used, 0);
	assert_int_equal(info(a).chunks_small, 0);
	assert_int_equal(arena_free_chunks(a), info(a).chunks);
	free(held);
	free(taken);
	arena_destroy(a);
}

static void random_operations_fit_a_shadow_map(void **state)
{
	(void)state;
	random_operations(64 * MIB, 2 * MIB, 12, 1);
	random_operations(4 * MIB, 64 * KIB, 0, 2);
	random_operations(16 * MIB, MIB, 16, 3);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(bad_sizes_are_refused),
		cmocka_unit_test(more_than_the_machine_has_is_enomem),
		cmocka_unit_test(memory_is_populated_aligned_and_mapped),
		cmocka_unit_test(memory_is_sealed),
		cmocka_unit_test(kind_says_what_it_is),
		cmocka_unit_test(piece_size_is_the_next_power_of_two),
		cmocka_unit_test(lengths_out_of_range_are_refused),
		cmocka_unit_test(all_chunks_can_be_had_whole),
		cmocka_unit_test(pieces_stay_in_their_chunks),
		cmocka_unit_test(default_is_a_quarter_for_pieces),
		cmocka_unit_test(chunk_without_pieces_goes_back),
		cmocka_unit_test(smallest_piece_that_fits_is_taken),
		cmocka_unit_test(random_operations_fit_a_shadow_map),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
