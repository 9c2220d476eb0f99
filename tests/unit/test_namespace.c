/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_namespace.c - the tree in RAM: each rule by itself, random operations against a simple
 * model that also says which error is due, directories read while they change, and many threads.
 * Options: --seed=N.
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
#include <sys/xattr.h>

#include "engine/ns_impl.h"

static uint64_t seed = 1;

static uint64_t rnd(uint64_t *rng, uint64_t below)
{
	*rng ^= *rng << 13;
	*rng ^= *rng >> 7;
	*rng ^= *rng << 17;
	return *rng % below;
}

/* --- fixture -------------------------------------------------------------------------------- */

struct gone {
	uint64_t inos[64];
	unsigned int n;
};

static void on_gone(void *arg, uint64_t ino)
{
	struct gone *g = arg;

	if (g->n < 64)
		g->inos[g->n] = ino;
	g->n++;
}

static struct gone gone;

static int setup(void **state)
{
	gone = (struct gone){0};
	*state = ns_new(on_gone, &gone);
	return *state ? 0 : -1;
}

static int teardown(void **state)
{
	ns_delete(*state);
	return 0;
}

static uint64_t mkfile(struct ns *ns, uint64_t dir, const char *name)
{
	struct ns_attr a;

	assert_int_equal(ns_create(ns, dir, name, 0644, 1, 2, false, &a), 0);
	return a.ino;
}

static uint64_t mkdir_in(struct ns *ns, uint64_t dir, const char *name)
{
	struct ns_attr a;

	assert_int_equal(ns_mkdir(ns, dir, name, 0755, 1, 2, false, &a), 0);
	return a.ino;
}

static struct ns_attr attr(struct ns *ns, uint64_t ino)
{
	struct ns_attr a;

	assert_int_equal(ns_getattr(ns, ino, &a), 0);
	return a;
}

static bool same_time(struct timespec a, struct timespec b)
{
	return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

/* Sets all times of an inode to something old, so that any move shows. */
static void make_old(struct ns *ns, uint64_t ino)
{
	struct ns_inode *i;

	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	i->mtime = i->ctime = (struct timespec){1000, 5};
	pthread_mutex_unlock(&ns->lock);
}

static bool moved_m(struct ns *ns, uint64_t ino)
{
	return !same_time(attr(ns, ino).mtime, (struct timespec){1000, 5});
}

static bool moved_c(struct ns *ns, uint64_t ino)
{
	return !same_time(attr(ns, ino).ctime, (struct timespec){1000, 5});
}

/* --- names ---------------------------------------------------------------------------------- */

static void names_are_checked(void **state)
{
	struct ns *ns = *state;
	char longest[NS_NAME_MAX + 2];
	struct ns_attr a;
	uint64_t file;

	memset(longest, 'n', sizeof(longest));
	longest[NS_NAME_MAX + 1] = '\0';
	assert_int_equal(ns_create(ns, NS_ROOT, longest, 0644, 0, 0, false, &a), -ENAMETOOLONG);
	assert_int_equal(ns_lookup(ns, NS_ROOT, longest, &a), -ENAMETOOLONG);
	longest[NS_NAME_MAX] = '\0';
	file = mkfile(ns, NS_ROOT, longest);
	assert_int_equal(ns_create(ns, NS_ROOT, longest, 0644, 0, 0, false, &a), -EEXIST);
	assert_int_equal(ns_create(ns, NS_ROOT, "", 0644, 0, 0, false, &a), -ENOENT);
	assert_int_equal(ns_create(ns, NS_ROOT, ".", 0644, 0, 0, false, &a), -EEXIST);
	assert_int_equal(ns_mkdir(ns, NS_ROOT, "..", 0755, 0, 0, false, &a), -EEXIST);
	assert_int_equal(ns_create(ns, NS_ROOT, "a/b", 0644, 0, 0, false, &a), -EINVAL);
	assert_int_equal(ns_create(ns, file, "x", 0644, 0, 0, false, &a), -ENOTDIR);
	assert_int_equal(ns_create(ns, 999, "x", 0644, 0, 0, false, &a), -ENOENT);
	assert_int_equal(ns_rmdir(ns, NS_ROOT, "."), -EINVAL);
	assert_int_equal(ns_rename(ns, NS_ROOT, longest, NS_ROOT, "..", 0), -EINVAL);
	assert_int_equal(ns_getattr(ns, 999, &a), -ESTALE);
}

static void walk_and_path(void **state)
{
	struct ns *ns = *state;
	uint64_t a = mkdir_in(ns, NS_ROOT, "a"), b = mkdir_in(ns, a, "b"), c = mkfile(ns, b, "c");
	struct ns_attr at;
	char buf[64];

	assert_int_equal(ns_walk(ns, "", &at), 0);
	assert_int_equal(at.ino, NS_ROOT);
	assert_int_equal(ns_walk(ns, "a/b/c", &at), 0);
	assert_int_equal(at.ino, c);
	assert_int_equal(at.parent, b);
	assert_int_equal(ns_walk(ns, "/a//b/", &at), 0);
	assert_int_equal(at.ino, b);
	assert_int_equal(ns_walk(ns, "a/b/c/d", &at), -ENOTDIR);
	assert_int_equal(ns_walk(ns, "a/x", &at), -ENOENT);
	assert_int_equal(ns_walk(ns, "a/../a", &at), -EINVAL);
	assert_int_equal(ns_path(ns, c, buf, sizeof(buf)), 0);
	assert_string_equal(buf, "a/b/c");
	assert_int_equal(ns_path(ns, c, buf, 6), 0);
	assert_int_equal(ns_path(ns, c, buf, 5), -ERANGE);
	assert_int_equal(ns_path(ns, NS_ROOT, buf, sizeof(buf)), 0);
	assert_string_equal(buf, "");
	assert_int_equal(ns_rename(ns, NS_ROOT, "a", NS_ROOT, "other", 0), 0);
	assert_int_equal(ns_path(ns, c, buf, sizeof(buf)), 0);
	assert_string_equal(buf, "other/b/c");
}

static void links_and_modes(void **state)
{
	struct ns *ns = *state;
	uint64_t d = mkdir_in(ns, NS_ROOT, "d"), sub = mkdir_in(ns, d, "sub");
	struct ns_attr in = {.mode = 02755, .gid = 77}, a;

	mkfile(ns, d, "f");
	assert_int_equal(attr(ns, d).nlink, 3);
	assert_int_equal(attr(ns, sub).nlink, 2);
	assert_true(S_ISDIR(attr(ns, d).mode));
	/* A set-group-ID directory gives its group to what is made in it. */
	assert_int_equal(ns_setattr(ns, d, NS_SET_MODE | NS_SET_GID, &in, &a), 0);
	assert_int_equal(attr(ns, mkfile(ns, d, "g")).gid, 77);
	assert_int_equal(attr(ns, mkdir_in(ns, d, "h")).mode, S_IFDIR | 02755);
	/* The kind never changes. */
	in.mode = S_IFREG | 0600;
	assert_int_equal(ns_setattr(ns, d, NS_SET_MODE, &in, &a), 0);
	assert_int_equal(a.mode, S_IFDIR | 0600);
	in.mtime.tv_nsec = 1000000000;
	assert_int_equal(ns_setattr(ns, d, NS_SET_MTIME, &in, &a), -EINVAL);
}

/* --- removing and renaming -------------------------------------------------------------------- */

static void removing_errors(void **state)
{
	struct ns *ns = *state;
	uint64_t d = mkdir_in(ns, NS_ROOT, "d");

	mkfile(ns, d, "f");
	assert_int_equal(ns_unlink(ns, NS_ROOT, "d"), -EISDIR);
	assert_int_equal(ns_rmdir(ns, d, "f"), -ENOTDIR);
	assert_int_equal(ns_rmdir(ns, NS_ROOT, "d"), -ENOTEMPTY);
	assert_int_equal(ns_unlink(ns, d, "g"), -ENOENT);
	assert_int_equal(ns_unlink(ns, d, "f"), 0);
	assert_int_equal(ns_rmdir(ns, NS_ROOT, "d"), 0);
	assert_int_equal(ns_rmdir(ns, NS_ROOT, "d"), -ENOENT);
}

static void a_reference_keeps_a_removed_file(void **state)
{
	struct ns *ns = *state;
	struct ns_attr a;
	uint64_t f = mkfile(ns, NS_ROOT, "f"), g = mkfile(ns, NS_ROOT, "g");
	char buf[8];

	assert_int_equal(ns_lookup(ns, NS_ROOT, "f", &a), 0);
	assert_int_equal(ns_lookup(ns, NS_ROOT, "f", &a), 0);
	assert_int_equal(ns_peek(ns, NS_ROOT, "f", &a), 0);
	assert_int_equal(ns_open(ns, f, true), 0);
	assert_int_equal(ns_unlink(ns, NS_ROOT, "f"), 0);
	assert_int_equal(gone.n, 0);
	assert_int_equal(attr(ns, f).nlink, 0);
	assert_int_equal(ns_path(ns, f, buf, sizeof(buf)), -ENOENT);
	ns_publish(ns, f, 100, 512, true);
	assert_int_equal(attr(ns, f).size, 100);
	ns_forget(ns, f, 2);
	assert_int_equal(gone.n, 0);
	ns_release(ns, f, true);
	assert_int_equal(gone.n, 1);
	assert_int_equal(gone.inos[0], f);
	assert_int_equal(ns_getattr(ns, f, &a), -ESTALE);
	assert_int_equal(ns_open_writers_total(ns), 0);
	/* Without a reference it goes at once. */
	assert_int_equal(ns_unlink(ns, NS_ROOT, "g"), 0);
	assert_int_equal(gone.n, 2);
	assert_int_equal(gone.inos[1], g);
	/* Nothing can be made in a directory that is gone but referenced. */
	f = mkdir_in(ns, NS_ROOT, "d");
	assert_int_equal(ns_lookup(ns, NS_ROOT, "d", &a), 0);
	assert_int_equal(ns_rmdir(ns, NS_ROOT, "d"), 0);
	assert_int_equal(ns_create(ns, f, "x", 0644, 0, 0, false, &a), -ENOENT);
	assert_int_equal(attr(ns, f).nlink, 0);
	ns_forget(ns, f, 1);
	assert_int_equal(gone.n, 2); /* directories have no data */
}

static void rename_errors(void **state)
{
	struct ns *ns = *state;
	uint64_t d = mkdir_in(ns, NS_ROOT, "d"), e = mkdir_in(ns, d, "e"), f = mkfile(ns, e, "f");

	mkdir_in(ns, NS_ROOT, "empty");
	mkfile(ns, NS_ROOT, "g");
	assert_int_equal(ns_rename(ns, NS_ROOT, "d", e, "x", 0), -EINVAL);
	assert_int_equal(ns_rename(ns, NS_ROOT, "d", d, "x", 0), -EINVAL);
	assert_int_equal(ns_rename(ns, d, "e", NS_ROOT, "d", 0), -ENOTEMPTY);
	assert_int_equal(ns_rename(ns, NS_ROOT, "d", NS_ROOT, "g", 0), -ENOTDIR);
	assert_int_equal(ns_rename(ns, NS_ROOT, "g", NS_ROOT, "d", 0), -EISDIR);
	assert_int_equal(ns_rename(ns, NS_ROOT, "g", e, "f", 1), -EEXIST);
	assert_int_equal(ns_rename(ns, NS_ROOT, "g", e, "f", 2), -EINVAL);
	assert_int_equal(ns_rename(ns, NS_ROOT, "nope", e, "f", 0), -ENOENT);
	assert_int_equal(ns_rename(ns, NS_ROOT, "g", f, "x", 0), -ENOTDIR);
	assert_int_equal(ns_rename(ns, NS_ROOT, "g", NS_ROOT, "g", 0), 0);
	assert_int_equal(gone.n, 0);
	/* Over a file: that one goes. Over an empty directory: likewise. */
	assert_int_equal(ns_rename(ns, NS_ROOT, "g", e, "f", 0), 0);
	assert_int_equal(gone.n, 1);
	assert_int_equal(gone.inos[0], f);
	assert_int_equal(ns_rename(ns, d, "e", NS_ROOT, "empty", 0), 0);
	assert_int_equal(attr(ns, d).nlink, 2);
	assert_int_equal(attr(ns, e).parent, NS_ROOT);
	assert_int_equal(attr(ns, NS_ROOT).nlink, 4);
}

static void times_move_as_posix_says(void **state)
{
	struct ns *ns = *state;
	uint64_t d = mkdir_in(ns, NS_ROOT, "d"), e = mkdir_in(ns, NS_ROOT, "e");
	uint64_t f = mkfile(ns, d, "f");
	struct ns_attr in = {.mode = 0600, .mtime = {77, 8}}, a;

	make_old(ns, d);
	mkfile(ns, d, "g");
	assert_true(moved_m(ns, d) && moved_c(ns, d));
	make_old(ns, d);
	assert_int_equal(ns_unlink(ns, d, "g"), 0);
	assert_true(moved_m(ns, d) && moved_c(ns, d));
	make_old(ns, d);
	make_old(ns, e);
	make_old(ns, f);
	assert_int_equal(ns_rename(ns, d, "f", e, "f", 0), 0);
	assert_true(moved_m(ns, d) && moved_c(ns, d) && moved_m(ns, e) && moved_c(ns, e));
	assert_true(!moved_m(ns, f) && moved_c(ns, f));
	make_old(ns, f);
	make_old(ns, e);
	assert_int_equal(ns_setattr(ns, f, NS_SET_MODE, &in, &a), 0);
	assert_true(!moved_m(ns, f) && moved_c(ns, f) && !moved_m(ns, e) && !moved_c(ns, e));
	make_old(ns, f);
	assert_int_equal(ns_setattr(ns, f, NS_SET_MTIME, &in, &a), 0);
	assert_true(same_time(attr(ns, f).mtime, in.mtime) && moved_c(ns, f));
	make_old(ns, f);
	assert_int_equal(ns_setxattr(ns, f, "user.a", "1", 1, 0), 0);
	assert_true(!moved_m(ns, f) && moved_c(ns, f));
	make_old(ns, f);
	ns_publish(ns, f, UINT64_MAX, 4096, false);
	assert_true(!moved_m(ns, f) && !moved_c(ns, f));
	ns_publish(ns, f, UINT64_MAX, UINT64_MAX, true);
	assert_true(moved_m(ns, f) && moved_c(ns, f));
	/* Looking moves nothing. */
	make_old(ns, f);
	make_old(ns, e);
	assert_int_equal(ns_open(ns, f, false), 0);
	ns_release(ns, f, false);
	assert_int_equal(ns_peek(ns, e, "f", &a), 0);
	assert_int_equal(ns_getxattr(ns, f, "user.a", NULL, 0), 1);
	assert_true(!moved_m(ns, f) && !moved_c(ns, f) && !moved_m(ns, e) && !moved_c(ns, e));
}

static void counts_follow(void **state)
{
	struct ns *ns = *state;
	struct ns_counts c;
	struct ns_attr a;
	uint64_t d = mkdir_in(ns, NS_ROOT, "d"), f = mkfile(ns, d, "f"), g = mkfile(ns, d, "g");

	ns_publish(ns, f, 100, UINT64_MAX, true);
	ns_publish(ns, g, 11, UINT64_MAX, true);
	ns_publish(ns, f, 50, UINT64_MAX, true);
	ns_count(ns, &c);
	assert_int_equal(c.files, 2);
	assert_int_equal(c.dirs, 2);
	assert_int_equal(c.bytes, 61);
	assert_int_equal(ns_lookup(ns, d, "g", &a), 0);
	assert_int_equal(ns_unlink(ns, d, "g"), 0);
	ns_publish(ns, g, 1000, UINT64_MAX, true);
	ns_count(ns, &c);
	assert_int_equal(c.files, 1);
	assert_int_equal(c.bytes, 50);
	ns_forget(ns, g, 1);
}

/* --- extended attributes ---------------------------------------------------------------------- */

static void xattr_rules(void **state)
{
	struct ns *ns = *state;
	uint64_t f = mkfile(ns, NS_ROOT, "f");
	char name[NS_XATTR_NAME_MAX + 2], buf[64];
	static char big[NS_XATTR_VALUE_MAX + 1];

	assert_int_equal(ns_getxattr(ns, f, "user.a", NULL, 0), -ENODATA);
	assert_int_equal(ns_setxattr(ns, f, "user.a", "v", 1, XATTR_REPLACE), -ENODATA);
	assert_int_equal(ns_setxattr(ns, f, "user.b", "value", 5, XATTR_CREATE), 0);
	assert_int_equal(ns_setxattr(ns, f, "user.b", "value", 5, XATTR_CREATE), -EEXIST);
	assert_int_equal(ns_setxattr(ns, f, "user.a", "", 0, 0), 0);
	assert_int_equal(ns_getxattr(ns, f, "user.a", buf, sizeof(buf)), 0);
	assert_int_equal(ns_getxattr(ns, f, "user.b", NULL, 0), 5);
	assert_int_equal(ns_getxattr(ns, f, "user.b", buf, 4), -ERANGE);
	assert_int_equal(ns_getxattr(ns, f, "user.b", buf, 5), 5);
	assert_memory_equal(buf, "value", 5);
	assert_int_equal(ns_listxattr(ns, f, NULL, 0), 14);
	assert_int_equal(ns_listxattr(ns, f, buf, 13), -ERANGE);
	assert_int_equal(ns_listxattr(ns, f, buf, 14), 14);
	assert_memory_equal(buf, "user.a\0user.b", 14);
	assert_int_equal(ns_removexattr(ns, f, "user.a"), 0);
	assert_int_equal(ns_removexattr(ns, f, "user.a"), -ENODATA);
	/* Limits, and names that are not ours to keep. */
	assert_int_equal(ns_setxattr(ns, f, "user.big", big, sizeof(big), 0), -E2BIG);
	assert_int_equal(ns_setxattr(ns, f, "user.big", big, sizeof(big) - 1, 0), 0);
	memset(name, 'n', sizeof(name));
	memcpy(name, "user.", 5);
	name[NS_XATTR_NAME_MAX + 1] = '\0';
	assert_int_equal(ns_setxattr(ns, f, name, "", 0, 0), -ERANGE);
	name[NS_XATTR_NAME_MAX] = '\0';
	assert_int_equal(ns_setxattr(ns, f, name, "", 0, 0), 0);
	assert_int_equal(ns_setxattr(ns, f, "user.", "", 0, 0), -EINVAL);
	assert_int_equal(ns_setxattr(ns, f, "system.posix_acl_access", "", 0, 0), -EOPNOTSUPP);
	assert_int_equal(ns_setxattr(ns, f, "user.c", "", 0, 8), -EINVAL);
	assert_int_equal(ns_setxattr(ns, 999, "user.c", "", 0, 0), -ESTALE);
	/* All of one inode together is bounded too. */
	for (int i = 0;; i++) {
		int res;

		assert_in_range(i, 0, 64);
		snprintf(buf, sizeof(buf), "user.big%d", i);
		res = ns_setxattr(ns, f, buf, big, sizeof(big) - 1, 0);
		if (res < 0) {
			assert_int_equal(res, -ENOSPC);
			break;
		}
	}
}

static void packed_xattrs_come_back(void **state)
{
	struct ns *ns = *state;
	uint64_t rng = seed * 77 + 1;

	for (int round = 0; round < 200; round++) {
		struct ns_inode *i = ns_inode_new(10, S_IFREG);
		struct ns_xattr *list;
		uint8_t *packed, *again;
		size_t len, again_len;
		char name[16];

		(void)ns;
		u64map_put(&ns->inodes, 10, i);
		for (uint64_t n = rnd(&rng, 6); n; n--) {
			snprintf(name, sizeof(name), "user.%lu", rnd(&rng, 9));
			assert_int_equal(ns_setxattr(ns, 10, name, name, rnd(&rng, 7), 0), 0);
		}
		assert_int_equal(ns_xattrs_pack(i->xattrs, &packed, &len), 0);
		assert_int_equal(ns_xattrs_unpack(packed, len, &list), 0);
		assert_int_equal(ns_xattrs_pack(list, &again, &again_len), 0);
		assert_int_equal(len, again_len);
		if (len)
			assert_memory_equal(packed, again, len);
		ns_xattrs_free(list);
		/* Damaged ones are refused or are another list, never a crash. */
		for (int flips = 0; len && flips < 20; flips++) {
			uint8_t *copy = malloc(len);
			size_t cut = rnd(&rng, len + 1);

			memcpy(copy, packed, len);
			copy[rnd(&rng, len)] ^= (uint8_t)(1u << rnd(&rng, 8));
			if (ns_xattrs_unpack(copy, cut, &list) == 0)
				ns_xattrs_free(list);
			else
				assert_null(list);
			free(copy);
		}
		free(packed);
		free(again);
		u64map_del(&ns->inodes, 10);
		ns_inode_free(i);
	}
}

/* --- sessions ------------------------------------------------------------------------------- */

static void registered_files_are_pinned(void **state)
{
	struct ns *ns = *state;
	uint64_t d = mkdir_in(ns, NS_ROOT, "d"), w = mkdir_in(ns, d, "w"), f = mkfile(ns, w, "f");
	struct ns_moment m[] = {{"user.moment.step", "7", 1}, {"user.moment.gone", NULL, 0}};
	struct ns_attr a;
	char buf[4];

	mkfile(ns, NS_ROOT, "other");
	mkfile(ns, w, "free");
	assert_int_equal(ns_register(ns, d), -EISDIR);
	assert_int_equal(ns_open(ns, f, true), 0);
	assert_int_equal(ns_register(ns, f), -EBUSY);
	ns_release(ns, f, true);
	assert_int_equal(ns_setxattr(ns, f, "user.moment.dtype", "float32", 7, 0), 0);
	assert_int_equal(ns_register(ns, f), 0);
	assert_int_equal(ns_register(ns, f), -EALREADY);
	assert_int_equal(ns_open(ns, f, true), -EBUSY);
	assert_int_equal(ns_open(ns, f, false), 0);
	ns_release(ns, f, false);
	assert_int_equal(ns_unlink(ns, w, "f"), -EBUSY);
	assert_int_equal(ns_rename(ns, w, "f", NS_ROOT, "f", 0), -EBUSY);
	assert_int_equal(ns_rename(ns, NS_ROOT, "other", w, "f", 0), -EBUSY);
	assert_int_equal(ns_rename(ns, d, "w", NS_ROOT, "w", 0), -EBUSY);
	assert_int_equal(ns_rename(ns, NS_ROOT, "d", NS_ROOT, "x", 0), -EBUSY);
	assert_int_equal(ns_setxattr(ns, f, "user.moment.dtype", "x", 1, 0), -EBUSY);
	assert_int_equal(ns_removexattr(ns, f, "user.moment.dtype"), -EBUSY);
	assert_int_equal(ns_setxattr(ns, w, "user.moment.step", "9", 1, 0), -EBUSY);
	assert_int_equal(ns_setxattr(ns, f, "user.mine", "x", 1, 0), 0);
	assert_int_equal(ns_set_moment(ns, w, m, 2), 0);
	assert_int_equal(ns_getxattr(ns, w, "user.moment.step", buf, sizeof(buf)), 1);
	assert_int_equal(buf[0], '7');
	m[1].name = "bad";
	m[0].value = "8";
	assert_int_equal(ns_set_moment(ns, w, m, 2), -EOPNOTSUPP);
	assert_int_equal(ns_getxattr(ns, w, "user.moment.step", buf, sizeof(buf)), 1);
	assert_int_equal(buf[0], '7');
	/* Its neighbour is anybody's. */
	assert_int_equal(ns_rename(ns, w, "free", NS_ROOT, "free", 0), 0);
	ns_hold(ns, f, true);
	assert_int_equal(attr(ns, f).flags, NS_REGISTERED | NS_HELD);
	ns_unregister(ns, f);
	assert_int_equal(attr(ns, f).flags, 0);
	assert_int_equal(ns_rename(ns, NS_ROOT, "d", NS_ROOT, "x", 0), 0);
	assert_int_equal(ns_unlink(ns, w, "f"), 0);
	assert_int_equal(ns_getattr(ns, f, &a), -ESTALE);
}

static void check_json(struct ns *ns, uint64_t dir, const char *want)
{
	struct ns_attr a;
	char *text;
	size_t len;

	assert_int_equal(ns_peek(ns, dir, "meta.json", &a), 0);
	assert_int_equal(ns_generate(ns, a.ino, &text, &len), 0);
	assert_string_equal(text, want);
	assert_int_equal(len, strlen(want));
	assert_int_equal(a.size, len);
	free(text);
}

static void meta_json_says_what_the_attributes_say(void **state)
{
	struct ns *ns = *state;
	uint64_t w = mkdir_in(ns, NS_ROOT, "a%2Fb"), f = mkfile(ns, w, "exp_avg");
	static const char hyper[] = "{\"lr\": 1e-3, \"betas\": [0.9, 0.999], \"x\": {\"y\": null}}";
	const struct ns_moment m[] = {
		{"user.moment.name", "a/b \"\\\n\xff\xc3\xa9", 10},
		{"user.moment.shape", "768x2304", 8},
		{"user.moment.step", "42", 2},
		{"user.moment.hyper", hyper, sizeof(hyper) - 1},
	};
	struct ns_attr before, after;

	ns_publish(ns, f, 7077888, 7077888, true);
	assert_int_equal(ns_make_meta(ns, w, 0), 0);
	assert_int_equal(ns_make_meta(ns, w, 0), 0);
	check_json(ns, w,
		   "{\n  \"format\": \"momentfs-param\",\n  \"version\": 1,\n  \"name\": \"a/b\",\n"
		   "  \"shape\": null,\n  \"step\": null,\n  \"files\": {\n"
		   "    \"exp_avg\": {\"dtype\": null, \"bytes\": 7077888}\n  }\n}\n");
	assert_int_equal(ns_setxattr(ns, f, "user.moment.dtype", "float32", 7, 0), 0);
	make_old(ns, w);
	make_old(ns, f);
	assert_int_equal(ns_peek(ns, w, "meta.json", &before), 0);
	assert_int_equal(ns_set_moment(ns, w, m, 4), 0);
	assert_int_equal(ns_peek(ns, w, "meta.json", &after), 0);
	assert_false(same_time(before.mtime, after.mtime));
	check_json(
		ns, w,
		"{\n  \"format\": \"momentfs-param\",\n  \"version\": 1,\n"
		"  \"name\": \"a/b \\\"\\\\\\u000a\\udcff\xc3\xa9\",\n"
		"  \"shape\": [768, 2304],\n  \"step\": 42,\n  \"files\": {\n"
		"    \"exp_avg\": {\"dtype\": \"float32\", \"bytes\": 7077888}\n  },\n"
		"  \"hyper\": {\"lr\": 1e-3, \"betas\": [0.9, 0.999], \"x\": {\"y\": null}}\n}\n");
}

static void meta_json_is_json_whatever_the_attributes(void **state)
{
	static const char *const bad[] = {
		"",
		"{",
		"[]",
		"1",
		"{\"a\":}",
		"{\"a\":01}",
		"{\"a\":1,}",
		"{a:1}",
		"{\"a\":1} x",
		"{\"a\":\"\n\"}",
		"{\"a\":\"\\x\"}",
		"{\"a\":\"\\u12g4\"}",
		"{\"a\":\"\xff\"}",
		"{\"a\":1.}",
		"{\"a\":-}",
		"{\"a\":\"",
		"{\"a\":tru}",
		"{\"a\":\"\\u12\"}",
	};
	static const char *const good[] = {
		"{}",
		" { } ",
		"{\"a\":[],\"b\":{},\"c\":-0.5E+3}",
		"{\"\\u00e9\\n\":\"\xc3\xa9\"}",
		"{\"a\":[true,false,null,0,10]}",
	};
	struct ns *ns = *state;
	uint64_t w = mkdir_in(ns, NS_ROOT, "w");
	struct ns_attr a;
	char *text;
	size_t len;

	assert_int_equal(ns_make_meta(ns, w, 0), 0);
	assert_int_equal(ns_peek(ns, w, "meta.json", &a), 0);
	for (size_t b = 0; b < sizeof(bad) / sizeof(*bad); b++) {
		assert_int_equal(ns_setxattr(ns, w, "user.moment.hyper", bad[b], strlen(bad[b]), 0),
				 0);
		assert_int_equal(ns_setxattr(ns, w, "user.moment.shape", bad[b], strlen(bad[b]), 0),
				 0);
		assert_int_equal(ns_setxattr(ns, w, "user.moment.step", "-1", 2, 0), 0);
		assert_int_equal(ns_generate(ns, a.ino, &text, &len), 0);
		if (strstr(text, "hyper"))
			fail_msg("taken for an object: %s", bad[b]);
		assert_non_null(strstr(text, "\"step\": null"));
		free(text);
	}
	for (size_t g = 0; g < sizeof(good) / sizeof(*good); g++) {
		assert_int_equal(
			ns_setxattr(ns, w, "user.moment.hyper", good[g], strlen(good[g]), 0), 0);
		assert_int_equal(ns_generate(ns, a.ino, &text, &len), 0);
		if (!strstr(text, "hyper"))
			fail_msg("not taken for an object: %s", good[g]);
		free(text);
	}
}

static void meta_json_belongs_to_its_directory(void **state)
{
	struct ns *ns = *state;
	uint64_t w = mkdir_in(ns, NS_ROOT, "w"), f = mkfile(ns, w, "f"), plain;
	struct ns_attr a;
	char *text;
	size_t len;

	assert_int_equal(ns_make_meta(ns, w, 0), 0);
	assert_int_equal(ns_peek(ns, w, "meta.json", &a), 0);
	assert_int_equal(ns_open(ns, a.ino, true), -EACCES);
	assert_int_equal(ns_register(ns, a.ino), -EACCES);
	assert_int_equal(ns_generate(ns, f, &text, &len), -EINVAL);
	assert_int_equal(ns_rename(ns, w, "meta.json", NS_ROOT, "m", 0), -EXDEV);
	assert_int_equal(ns_register(ns, f), 0);
	assert_int_equal(ns_unlink(ns, w, "meta.json"), -EBUSY);
	ns_unregister(ns, f);
	assert_int_equal(ns_rmdir(ns, NS_ROOT, "w"), -ENOTEMPTY);
	assert_int_equal(ns_unlink(ns, w, "f"), 0);
	/* With nothing else in it the directory counts as empty. */
	assert_int_equal(ns_rmdir(ns, NS_ROOT, "w"), 0);
	assert_int_equal(ns_getattr(ns, a.ino, &a), -ESTALE);
	/* An ordinary file of that name is turned into the generated one, unless it is open. */
	w = mkdir_in(ns, NS_ROOT, "w");
	plain = mkfile(ns, w, "meta.json");
	ns_publish(ns, plain, 10, 512, true);
	assert_int_equal(ns_open(ns, plain, true), 0);
	assert_int_equal(ns_make_meta(ns, w, 0), -EAGAIN);
	assert_int_equal(ns_make_meta(ns, w, plain), -EBUSY);
	ns_release(ns, plain, true);
	assert_int_equal(ns_make_meta(ns, w, plain), 0);
	assert_int_equal(attr(ns, plain).flags, NS_GENERATED);
	/* And back: a plain file renamed over it replaces it. */
	f = mkfile(ns, w, "tmp");
	assert_int_equal(ns_rename(ns, w, "tmp", w, "meta.json", 0), 0);
	assert_int_equal(attr(ns, f).flags, 0);
	assert_int_equal(ns_rmdir(ns, NS_ROOT, "w"), -ENOTEMPTY);
	/* Over a directory that holds only the generated one. */
	assert_int_equal(ns_unlink(ns, w, "meta.json"), 0);
	assert_int_equal(ns_make_meta(ns, w, 0), 0);
	mkdir_in(ns, NS_ROOT, "v");
	assert_int_equal(ns_rename(ns, NS_ROOT, "v", NS_ROOT, "w", 0), 0);
}

/* --- what the kernel was shown ------------------------------------------------------------- */

static void only_what_the_kernel_was_shown_gets_stale(void **state)
{
	struct ns *ns = *state;
	struct ns_moment step = {"user.moment.step", "1", 1};
	struct ns_stale got[16];
	struct ns_attr a;
	uint64_t ino[1000], looked;
	char name[16];

	for (int i = 0; i < 1000; i++) {
		snprintf(name, sizeof(name), "f%d", i);
		assert_int_equal(ns_create(ns, NS_ROOT, name, 0600, 0, 0, false, &a), 0);
		ino[i] = a.ino;
	}
	/* What nobody has looked at is not noted, however much of it changes. */
	for (int i = 0; i < 1000; i++) {
		assert_int_equal(ns_set_moment(ns, ino[i], &step, 1), 0);
		ns_stale(ns, ino[i], NS_STALE_DATA);
	}
	assert_false(ns_stale_any(ns));
	/* What somebody has is, once, until it is looked at again; pages only where there may be some. */
	assert_int_equal(ns_lookup(ns, NS_ROOT, "f7", &a), 0);
	looked = a.ino;
	assert_int_equal(ns_lookup(ns, NS_ROOT, "f8", &a), 0);
	ns_set_paged(ns, a.ino);
	for (int i = 0; i < 3000; i++) {
		ns_set_moment(ns, ino[i % 1000], &step, 1);
		ns_stale(ns, ino[i % 1000], NS_STALE_DATA);
	}
	assert_int_equal(ns_stale_take(ns, got, 16), 2);
	for (int i = 0; i < 2; i++)
		assert_int_equal(got[i].data, got[i].ino != looked);
	assert_int_equal(ns_stale_take(ns, got, 16), 0);
	ns_set_moment(ns, looked, &step, 1);
	assert_false(ns_stale_any(ns));
	assert_int_equal(ns_look(ns, looked, false, &a), 0);
	ns_set_moment(ns, looked, &step, 1);
	assert_true(ns_stale_any(ns));
	assert_int_equal(ns_look(ns, looked, false, &a), 0); /* it has the new ones now */
	assert_false(ns_stale_any(ns));
	/* Nor is what the kernel keeps nothing of: files that are open for writing. */
	assert_int_equal(ns_open(ns, looked, true), 0);
	ns_stale_take(ns, got, 16);
	assert_int_equal(ns_look(ns, looked, false, &a), 0);
	assert_int_equal(a.writers, 1);
	ns_grow(ns, looked, 100);
	assert_int_equal(ns_stale_take(ns, got, 16), 1); /* from before it was opened */
	assert_int_equal(ns_look(ns, looked, false, &a), 0);
	ns_grow(ns, looked, 200);
	assert_false(ns_stale_any(ns));
	ns_release(ns, looked, true);
	/* Names that others than the kernel remove are; those that it removes it knows. */
	assert_int_equal(ns_unlink(ns, NS_ROOT, "f8"), 0);
	assert_int_equal(ns_remove(ns, NS_ROOT, "f9", false), 0);
	assert_int_equal(ns_remove(ns, NS_ROOT, "f7", false), 0);
	assert_int_equal(ns_stale_take(ns, got, 1), 1);
	assert_int_equal(got[0].ino, 0);
	assert_int_equal(got[0].parent, NS_ROOT);
	assert_string_equal(got[0].name, "f7");
	/* What the kernel has forgotten it need not be told of. */
	ns_forget(ns, looked, 1);
	ns_forget(ns, ino[8], 1);
	assert_false(ns_stale_any(ns));
}

/* --- reading directories ---------------------------------------------------------------------- */

struct reading {
	unsigned int seen[1024]; /* by the number in the name */
	unsigned int batch;
	uint64_t cookie;
};

static bool read_entry(void *arg, const char *name, const struct ns_attr *a, uint64_t cookie)
{
	struct reading *r = arg;
	unsigned int n;

	(void)a;
	if (!r->batch)
		return false;
	r->batch--;
	assert_int_equal(sscanf(name, "n%u", &n), 1);
	r->seen[n % 1024]++;
	assert_true(cookie > r->cookie);
	assert_true(cookie >= NS_FIRST_COOKIE);
	r->cookie = cookie;
	return true;
}

/* What is there throughout is seen exactly once, whatever happens in between. */
static void readdir_is_stable(void **state)
{
	struct ns *ns = *state;
	uint64_t rng = seed * 31 + 7;
	uint64_t other = mkdir_in(ns, NS_ROOT, "n1000");

	for (int round = 0; round < 30; round++) {
		uint64_t d = mkdir_in(ns, NS_ROOT, "n999");
		struct reading r = {0};
		bool there[512], throughout[512];
		char name[16], to[16];
		struct ns_attr a;

		for (unsigned int i = 0; i < 512; i++) {
			snprintf(name, sizeof(name), "n%u", i);
			there[i] = throughout[i] = rnd(&rng, 2);
			if (there[i])
				mkfile(ns, d, name);
		}
		for (;;) {
			uint64_t from = r.cookie;

			r.batch = (unsigned int)rnd(&rng, 20) + 1;
			assert_int_equal(ns_readdir(ns, d, r.cookie, false, read_entry, &r), 0);
			if (r.cookie == from)
				break;
			for (uint64_t ops = rnd(&rng, 40); ops; ops--) {
				unsigned int i = (unsigned int)rnd(&rng, 512);
				unsigned int j = (unsigned int)rnd(&rng, 512);

				snprintf(name, sizeof(name), "n%u", i);
				snprintf(to, sizeof(to), "n%u", j);
				if (!there[i]) {
					assert_int_equal(
						ns_create(ns, d, name, 0644, 0, 0, false, &a), 0);
					there[i] = true;
				} else if (rnd(&rng, 3) && i != j) {
					/* Renamed over: the name j is there all along if it was. */
					assert_int_equal(ns_rename(ns, d, name, d, to, 0), 0);
					there[i] = throughout[i] = false;
					there[j] = true;
				} else if (rnd(&rng, 2)) {
					assert_int_equal(ns_unlink(ns, d, name), 0);
					there[i] = throughout[i] = false;
				} else {
					snprintf(to, sizeof(to), "n%lu", 2000 + ns->next_ino);
					assert_int_equal(ns_rename(ns, d, name, other, to, 0), 0);
					there[i] = throughout[i] = false;
				}
			}
		}
		for (unsigned int i = 0; i < 512; i++) {
			if (throughout[i])
				assert_int_equal(r.seen[i], 1);
			if (there[i]) {
				snprintf(name, sizeof(name), "n%u", i);
				assert_int_equal(ns_unlink(ns, d, name), 0);
			}
		}
		assert_int_equal(ns_rmdir(ns, NS_ROOT, "n999"), 0);
	}
}

static void readdir_takes_references(void **state)
{
	struct ns *ns = *state;
	struct reading r = {.batch = 2};
	uint64_t inos[3];

	for (unsigned int i = 0; i < 3; i++)
		inos[i] = mkfile(ns, NS_ROOT, (const char *[]){"n0", "n1", "n2"}[i]);
	assert_int_equal(ns_readdir(ns, NS_ROOT, 0, true, read_entry, &r), 0);
	for (unsigned int i = 0; i < 3; i++)
		assert_int_equal(ns_find_locked(ns, inos[i])->lookups, i < 2);
	assert_int_equal(ns_readdir(ns, inos[0], 0, false, read_entry, &r), -ENOTDIR);
}

static void a_hundred_thousand_files(void **state)
{
	struct ns *ns = *state;
	uint64_t d = mkdir_in(ns, NS_ROOT, "d"), total = 0;
	struct reading r = {0};
	struct ns_attr a;
	char name[16];

	for (unsigned int i = 0; i < 100000; i++) {
		snprintf(name, sizeof(name), "n%u", i);
		mkfile(ns, d, name);
	}
	for (uint64_t from = 1; r.cookie != from;) {
		from = r.cookie;
		r.batch = 100;
		assert_int_equal(ns_readdir(ns, d, r.cookie, false, read_entry, &r), 0);
		total += 100 - r.batch;
	}
	assert_int_equal(total, 100000);
	for (unsigned int i = 0; i < 100000; i++) {
		snprintf(name, sizeof(name), "n%u", i);
		assert_int_equal(ns_peek(ns, d, name, &a), 0);
		assert_int_equal(ns_unlink(ns, d, name), 0);
	}
	assert_int_equal(ns_rmdir(ns, NS_ROOT, "d"), 0);
	assert_int_equal(ns->inodes.n, 1);
}

/* --- random operations against a model ---------------------------------------------------------
 */

#define NODES 60
#define NAMES 12

/* A node is where it is by parent and name; index 0 is the root. */
struct node {
	bool used, dir;
	unsigned int parent, name;
	uint64_t ino;
};

static struct node nodes[NODES];

static unsigned int model_child(unsigned int dir, unsigned int name)
{
	for (unsigned int n = 1; n < NODES; n++)
		if (nodes[n].used && nodes[n].parent == dir && nodes[n].name == name)
			return n;
	return 0;
}

static bool model_empty(unsigned int dir)
{
	for (unsigned int n = 1; n < NODES; n++)
		if (nodes[n].used && nodes[n].parent == dir)
			return false;
	return true;
}

static bool model_below(unsigned int n, unsigned int top)
{
	for (; n; n = nodes[n].parent)
		if (n == top)
			return true;
	return top == 0;
}

static int model_rename(unsigned int n, unsigned int to, unsigned int name, bool noreplace)
{
	unsigned int old;

	if (!n)
		return -ENOENT;
	old = model_child(to, name);
	if (old && noreplace)
		return -EEXIST;
	if (old == n)
		return 0;
	if (nodes[n].dir && model_below(to, n))
		return -EINVAL;
	if (old && nodes[n].dir != nodes[old].dir)
		return nodes[n].dir ? -ENOTDIR : -EISDIR;
	if (old && nodes[old].dir && !model_empty(old))
		return -ENOTEMPTY;
	nodes[old].used = old == 0;
	nodes[n].parent = to;
	nodes[n].name = name;
	return 0;
}

static void compare_with_model(struct ns *ns)
{
	struct ns_counts c;
	uint64_t files = 0, dirs = 0;

	for (unsigned int n = 0; n < NODES; n++) {
		unsigned int children = 0, subdirs = 0;
		struct ns_attr a;
		char name[8];

		if (!nodes[n].used)
			continue;
		for (unsigned int m = 1; m < NODES; m++) {
			children += nodes[m].used && nodes[m].parent == n;
			subdirs += nodes[m].used && nodes[m].parent == n && nodes[m].dir;
		}
		files += !nodes[n].dir;
		dirs += nodes[n].dir;
		a = attr(ns, nodes[n].ino);
		assert_int_equal(a.nlink, nodes[n].dir ? 2 + subdirs : 1);
		assert_int_equal(ns_find_locked(ns, a.ino)->n_children, children);
		if (!n)
			continue;
		snprintf(name, sizeof(name), "%u", nodes[n].name);
		assert_int_equal(ns_peek(ns, nodes[nodes[n].parent].ino, name, &a), 0);
		assert_int_equal(a.ino, nodes[n].ino);
	}
	ns_count(ns, &c);
	assert_int_equal(c.files, files);
	assert_int_equal(c.dirs, dirs);
	assert_int_equal(ns->inodes.n, files + dirs);
}

static void random_operations_agree_with_a_model(void **state)
{
	struct ns *ns = *state;
	uint64_t rng = seed * 0x9e3779b97f4a7c15u + 1;

	memset(nodes, 0, sizeof(nodes));
	nodes[0] = (struct node){.used = true, .dir = true, .ino = NS_ROOT};
	for (int round = 0; round < 100000; round++) {
		unsigned int dir, to, name = (unsigned int)rnd(&rng, NAMES), n, free_node, flags;
		char text[8], newtext[8];
		int want, res;

		do {
			dir = (unsigned int)rnd(&rng, NODES);
		} while (!nodes[dir].used);
		snprintf(text, sizeof(text), "%u", name);
		n = nodes[dir].dir ? model_child(dir, name) : 0;
		for (free_node = 1; free_node < NODES && nodes[free_node].used;)
			free_node++;
		switch (rnd(&rng, 5)) {
		case 0:
		case 1:
			if (free_node < NODES) {
				struct ns_attr a = {0};
				bool make_dir = rnd(&rng, 2);

				want = !nodes[dir].dir ? -ENOTDIR : n ? -EEXIST : 0;
				res = (make_dir ? ns_mkdir : ns_create)(ns, nodes[dir].ino, text,
									0755, 0, 0, false, &a);
				assert_int_equal(res, want);
				if (!res)
					nodes[free_node] =
						(struct node){true, make_dir, dir, name, a.ino};
			}
			break;
		case 2:
			want = !nodes[dir].dir ? -ENOTDIR
			       : !n	       ? -ENOENT
			       : nodes[n].dir  ? -EISDIR
					       : 0;
			assert_int_equal(ns_unlink(ns, nodes[dir].ino, text), want);
			if (!want)
				nodes[n].used = false;
			break;
		case 3:
			want = !nodes[dir].dir	 ? -ENOTDIR
			       : !n		 ? -ENOENT
			       : !nodes[n].dir	 ? -ENOTDIR
			       : !model_empty(n) ? -ENOTEMPTY
						 : 0;
			assert_int_equal(ns_rmdir(ns, nodes[dir].ino, text), want);
			if (!want)
				nodes[n].used = false;
			break;
		case 4:
			do {
				to = (unsigned int)rnd(&rng, NODES);
			} while (!nodes[to].used);
			name = (unsigned int)rnd(&rng, NAMES);
			flags = (unsigned int)rnd(&rng, 2);
			snprintf(newtext, sizeof(newtext), "%u", name);
			want = !nodes[dir].dir || !nodes[to].dir ? -ENOTDIR
								 : model_rename(n, to, name, flags);
			assert_int_equal(
				ns_rename(ns, nodes[dir].ino, text, nodes[to].ino, newtext, flags),
				want);
			break;
		}
		if (round % 500 == 0)
			compare_with_model(ns);
	}
	compare_with_model(ns);
}

/* --- many threads --------------------------------------------------------------------------- */

struct worker {
	struct ns *ns;
	uint64_t rng;
	unsigned int id;
};

static bool any_entry(void *arg, const char *name, const struct ns_attr *a, uint64_t cookie)
{
	uint64_t *last = arg;

	(void)name;
	(void)a;
	*last = cookie;
	return true;
}

static void *work(void *arg)
{
	struct worker *w = arg;
	char name[16], to[16], value[8];
	struct ns_attr a;

	for (int round = 0; round < 5000; round++) {
		uint64_t cookie = 0;

		snprintf(name, sizeof(name), "%lu", rnd(&w->rng, 20));
		snprintf(to, sizeof(to), "%lu", rnd(&w->rng, 20));
		switch (rnd(&w->rng, 8)) {
		case 0:
			if (!ns_create(w->ns, NS_ROOT, name, 0644, w->id, 0, true, &a))
				ns_forget(w->ns, a.ino, 1);
			break;
		case 1:
			ns_unlink(w->ns, NS_ROOT, name);
			break;
		case 2:
			ns_rename(w->ns, NS_ROOT, name, NS_ROOT, to, 0);
			break;
		case 3:
			if (!ns_lookup(w->ns, NS_ROOT, name, &a)) {
				ns_setxattr(w->ns, a.ino, "user.x", name, strlen(name), 0);
				ns_getxattr(w->ns, a.ino, "user.x", value, sizeof(value));
				ns_forget(w->ns, a.ino, 1);
			}
			break;
		case 4:
			ns_readdir(w->ns, NS_ROOT, 0, false, any_entry, &cookie);
			break;
		case 5:
			if (!ns_peek(w->ns, NS_ROOT, name, &a))
				ns_publish(w->ns, a.ino, round, round, true);
			break;
		case 6:
			if (!ns_lookup(w->ns, NS_ROOT, name, &a)) {
				if (!ns_open(w->ns, a.ino, true))
					ns_release(w->ns, a.ino, true);
				ns_forget(w->ns, a.ino, 1);
			}
			break;
		case 7:
			if (!ns_walk(w->ns, name, &a) && !ns_register(w->ns, a.ino))
				ns_unregister(w->ns, a.ino);
			break;
		}
	}
	return NULL;
}

static void gone_quietly(void *arg, uint64_t ino)
{
	(void)ino;
	__atomic_fetch_add((uint64_t *)arg, 1, __ATOMIC_RELAXED);
}

static void threads_leave_a_whole_tree(void **state)
{
	uint64_t n_gone = 0, linked = 0;
	struct ns *ns = ns_new(gone_quietly, &n_gone);
	struct worker workers[4];
	pthread_t threads[4];
	struct ns_counts c;

	(void)state;
	assert_non_null(ns);
	for (unsigned int t = 0; t < 4; t++) {
		workers[t] = (struct worker){ns, seed * 4 + t + 1, t};
		assert_int_equal(pthread_create(&threads[t], NULL, work, &workers[t]), 0);
	}
	for (unsigned int t = 0; t < 4; t++)
		pthread_join(threads[t], NULL);
	ns_count(ns, &c);
	linked = ns->root->n_children;
	assert_int_equal(c.files, linked);
	assert_int_equal(ns->inodes.n, linked + 1);
	assert_int_equal(n_gone, ns->next_ino - NS_FIRST - linked);
	assert_int_equal(ns_open_writers_total(ns), 0);
	assert_int_equal(ns->root->pins, 0);
	ns_delete(ns);
}

#define test(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		test(only_what_the_kernel_was_shown_gets_stale),
		test(names_are_checked),
		test(walk_and_path),
		test(links_and_modes),
		test(removing_errors),
		test(a_reference_keeps_a_removed_file),
		test(rename_errors),
		test(times_move_as_posix_says),
		test(counts_follow),
		test(xattr_rules),
		test(packed_xattrs_come_back),
		test(registered_files_are_pinned),
		test(meta_json_says_what_the_attributes_say),
		test(meta_json_is_json_whatever_the_attributes),
		test(meta_json_belongs_to_its_directory),
		test(readdir_is_stable),
		test(readdir_takes_references),
		test(a_hundred_thousand_files),
		test(random_operations_agree_with_a_model),
		test(threads_leave_a_whole_tree),
	};

	if (argc > 1)
		sscanf(argv[1], "--seed=%lu", &seed);
	printf("seed %lu\n", seed);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
