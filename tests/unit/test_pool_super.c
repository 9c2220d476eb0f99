/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_pool_super.c - the superblock: its bytes, its two slots, what is refused and how it says so.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "engine/pool.h"

#define BLOCK (2u << 20)
#define SLOT  4096

static const uint8_t uuid[16] = "0123456789abcdef";

static char dir[64];
static int dirfd_;

static int setup(void **state)
{
	const char *tmp = getenv("TMPDIR");

	(void)state;
	snprintf(dir, sizeof(dir), "%.40s/test_super.XXXXXX", tmp ? tmp : "/tmp");
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

static struct pool_opts options(bool create)
{
	struct pool_opts o = {.dirfd = dirfd_, .name = "pool", .block = BLOCK, .create = create};

	memcpy(o.uuid, uuid, sizeof(uuid));
	return o;
}

/* Creates a pool and writes commits 1 .. n into its superblock. */
static void make(uint64_t n)
{
	struct pool_opts o = options(true);
	struct pool *p;

	assert_int_equal(pool_open(&o, &p, NULL), 0);
	for (uint64_t seq = 1; seq <= n; seq++)
		assert_int_equal(pool_write_super(p, seq), 0);
	pool_close(p);
}

static uint64_t commit_seq(void)
{
	struct pool_opts o = options(false);
	struct pool_super s;
	const char *why;
	struct pool *p;

	assert_int_equal(pool_open(&o, &p, &why), 0);
	assert_string_equal(why, "");
	pool_get_super(p, &s);
	pool_close(p);
	return s.commit_seq;
}

static void refused_opts(const struct pool_opts *o, int rc, const char *reason)
{
	struct pool *p;
	const char *why;

	assert_int_equal(pool_open(o, &p, &why), rc);
	if (!strstr(why, reason))
		fail_msg("\"%s\" does not say \"%s\"", why, reason);
	assert_int_equal(pool_open(o, &p, NULL), rc);
}

static void refused(int rc, const char *reason)
{
	struct pool_opts o = options(false);

	refused_opts(&o, rc, reason);
}

static void file_write(off_t off, const void *buf, size_t len)
{
	int fd = openat(dirfd_, "pool", O_RDWR | O_CREAT | O_CLOEXEC, 0600);

	assert_true(fd >= 0);
	assert_int_equal(pwrite(fd, buf, len, off), len);
	close(fd);
}

static void file_read(off_t off, void *buf, size_t len)
{
	int fd = openat(dirfd_, "pool", O_RDONLY | O_CLOEXEC);

	assert_true(fd >= 0);
	assert_int_equal(pread(fd, buf, len, off), len);
	close(fd);
}

static void file_cut(off_t size)
{
	int fd = openat(dirfd_, "pool", O_RDWR | O_CLOEXEC);

	assert_true(fd >= 0);
	assert_int_equal(ftruncate(fd, size), 0);
	close(fd);
}

static void flip(off_t off)
{
	uint8_t b;

	file_read(off, &b, 1);
	b ^= 0x10;
	file_write(off, &b, 1);
}

static uint64_t number(const uint8_t *p, int bytes)
{
	uint64_t v = 0;

	while (bytes--)
		v = v << 8 | p[bytes];
	return v;
}

/* Puts a right checksum on a slot, whatever is in it. */
static void reseal(uint8_t *slot)
{
	uint64_t sum = XXH3_64bits(slot, 4088);

	for (int i = 0; i < 8; i++)
		slot[4088 + i] = (uint8_t)(sum >> 8 * i);
}

static void bytes_are_as_documented(void **state)
{
	uint8_t s[2 * SLOT];

	(void)state;
	make(1); /* into slot 0: at creation slot 1 was the last */
	file_read(0, s, sizeof(s));
	for (int i = 0; i < 2; i++) {
		const uint8_t *slot = s + i * SLOT;

		assert_memory_equal(slot, "MOMENTFS", 8);
		assert_int_equal(number(slot + 8, 4), 1);
		assert_int_equal(number(slot + 12, 4), BLOCK);
		assert_memory_equal(slot + 16, uuid, 16);
		for (int k = 48; k < 4088; k++)
			assert_int_equal(slot[k], 0);
		assert_true(number(slot + 4088, 8) == XXH3_64bits(slot, 4088));
	}
	assert_int_equal(number(s + 32, 8), 1);
	assert_int_equal(number(s + SLOT + 32, 8), 0);
	assert_int_equal(number(s + 40, 8), 3);
	assert_int_equal(number(s + SLOT + 40, 8), 2);
}

static void what_was_written_is_read(void **state)
{
	struct pool_opts o = options(true);
	struct pool_super s;
	struct pool *p;

	(void)state;
	assert_int_equal(pool_open(&o, &p, NULL), 0);
	for (uint64_t seq = 10; seq < 15; seq++) {
		assert_int_equal(pool_write_super(p, seq), 0);
		pool_get_super(p, &s);
		assert_int_equal(s.commit_seq, seq);
		assert_int_equal(commit_seq(), seq);
	}
	pool_close(p);

	/* And goes on from there, with the block size from the file. */
	o = options(false);
	o.block = 0;
	assert_int_equal(pool_open(&o, &p, NULL), 0);
	pool_get_super(p, &s);
	assert_int_equal(s.version, 1);
	assert_int_equal(s.block, BLOCK);
	assert_memory_equal(s.uuid, uuid, 16);
	assert_int_equal(pool_write_super(p, 15), 0);
	/* A catalog restored from a copy counts from lower on: the last write counts. */
	assert_int_equal(pool_write_super(p, 4), 0);
	pool_close(p);
	assert_int_equal(commit_seq(), 4);
}

static void torn_slot_leaves_the_other(void **state)
{
	uint8_t before[SLOT], half[SLOT];

	(void)state;
	make(7); /* commit 7 in slot 0, 6 in slot 1 */
	assert_int_equal(commit_seq(), 7);
	file_read(0, before, SLOT);
	/* Any place of the newer one: the one before counts. */
	for (int off = 0; off < SLOT; off += 61) {
		flip(off);
		assert_int_equal(commit_seq(), 6);
		flip(off);
	}
	/* The older one does not matter. */
	for (int off = 0; off < SLOT; off += 61) {
		flip(SLOT + off);
		assert_int_equal(commit_seq(), 7);
		flip(SLOT + off);
	}
	/* A write cut short by power loss: new bytes, then old ones. */
	{
		struct pool_opts o = options(false);
		struct pool *p;

		assert_int_equal(pool_open(&o, &p, NULL), 0);
		assert_int_equal(pool_write_super(p, 8), 0);
		assert_int_equal(pool_write_super(p, 9), 0); /* in slot 0 */
		pool_close(p);
	}
	file_read(0, half, SLOT);
	memcpy(half + 512, before + 512, SLOT - 512);
	file_write(0, half, SLOT);
	assert_int_equal(commit_seq(), 8);
	/* The next write goes over the torn one, not over the only good one. */
	{
		struct pool_opts o = options(false);
		struct pool *p;

		assert_int_equal(pool_open(&o, &p, NULL), 0);
		assert_int_equal(pool_write_super(p, 10), 0);
		pool_close(p);
	}
	assert_int_equal(commit_seq(), 10);
	flip(40);
	assert_int_equal(commit_seq(), 8);
}

static void both_slots_damaged(void **state)
{
	(void)state;
	make(2);
	flip(100);
	flip(SLOT + 100);
	refused(-EUCLEAN, "both copies");
}

static void not_a_pool(void **state)
{
	static const char text[] = "Once upon a time";
	static const uint8_t zeros[64 * 1024];
	struct pool_opts o = options(false);

	(void)state;
	refused(-ENOENT, "");
	file_write(0, text, sizeof(text));
	refused(-EINVAL, "not a momentfs pool");
	file_write(0, zeros, sizeof(zeros));
	refused(-EINVAL, "not a momentfs pool");
	file_cut(0);
	refused(-EINVAL, "not a momentfs pool");

	o.name = ".";
	o.readonly = true;
	refused_opts(&o, -EINVAL, "not a regular file");
}

static void newer_version(void **state)
{
	uint8_t slot[SLOT];

	(void)state;
	make(4);
	file_read(SLOT, slot, SLOT);
	slot[8] = 2;
	slot[40] += 10; /* the generation: it is the newer one */
	reseal(slot);
	file_write(SLOT, slot, SLOT);
	refused(-EPROTONOSUPPORT, "newer momentfs");
}

static void senseless_block_size(void **state)
{
	uint8_t slot[SLOT];

	(void)state;
	make(4);
	for (int i = 0; i < 2; i++) {
		file_read(i * SLOT, slot, SLOT);
		slot[12] = 1;
		reseal(slot);
		file_write(i * SLOT, slot, SLOT);
	}
	refused(-EUCLEAN, "makes no sense");
}

static void cut_off(void **state)
{
	(void)state;
	make(1);
	file_cut(60000);
	refused(-EUCLEAN, "cut off");
	file_cut(3000);
	refused(-EUCLEAN, "cut off");
}

static void other_block_size_or_uuid(void **state)
{
	struct pool_opts o = options(false);

	(void)state;
	make(1);
	o.block = 1u << 20;
	refused_opts(&o, -EINVAL, "block size");
	o = options(false);
	o.uuid[15] ^= 1;
	refused_opts(&o, -ESTALE, "another backing");
}

static void incomplete_last_unit_does_not_count(void **state)
{
	struct pool_opts o = options(false);
	struct pool_info i;
	struct pool *p;

	(void)state;
	make(1);
	file_cut(POOL_SUPER_SIZE + 3 * 4096 + 17);
	assert_int_equal(pool_open(&o, &p, NULL), 0);
	pool_get_info(p, &i);
	assert_int_equal(i.size, POOL_SUPER_SIZE + 3 * 4096);
	assert_int_equal(i.free, 3 * 4096);
	pool_close(p);
}

static void creation_does_not_replace(void **state)
{
	struct pool_opts o = options(true);
	struct pool *p;

	(void)state;
	make(3);
	assert_int_equal(pool_open(&o, &p, NULL), -EEXIST);
	assert_int_equal(commit_seq(), 3);
}

static void bad_block_size_creates_nothing(void **state)
{
	static const uint32_t bad[] = {0, 4096, 32u << 10, 3u << 20, 128u << 20};
	struct pool_opts o = options(true);
	struct pool *p;

	(void)state;
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		o.block = bad[i];
		assert_int_equal(pool_open(&o, &p, NULL), -EINVAL);
		assert_int_equal(faccessat(dirfd_, "pool", F_OK, 0), -1);
	}
}

static void *write_commits(void *arg)
{
	for (uint64_t seq = 1; seq <= 200; seq++) {
		if (pool_write_super(arg, seq))
			return arg;
	}
	return NULL;
}

static void can_be_read_while_a_commit_writes(void **state)
{
	struct pool_opts o = options(true);
	struct pool_super s;
	struct pool *p;
	uint64_t last = 0;
	pthread_t t;
	void *failed;

	(void)state;
	assert_int_equal(pool_open(&o, &p, NULL), 0);
	assert_int_equal(pthread_create(&t, NULL, write_commits, p), 0);
	while (last < 200) {
		pool_get_super(p, &s);
		assert_true(s.commit_seq >= last);
		assert_int_equal(s.block, BLOCK);
		last = s.commit_seq;
	}
	assert_int_equal(pthread_join(t, &failed), 0);
	assert_null(failed);
	pool_close(p);
	assert_int_equal(commit_seq(), 200);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(bytes_are_as_documented),
		T(what_was_written_is_read),
		T(torn_slot_leaves_the_other),
		T(both_slots_damaged),
		T(not_a_pool),
		T(newer_version),
		T(senseless_block_size),
		T(cut_off),
		T(other_block_size_or_uuid),
		T(incomplete_last_unit_does_not_count),
		T(creation_does_not_replace),
		T(bad_block_size_creates_nothing),
		T(can_be_read_while_a_commit_writes),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
