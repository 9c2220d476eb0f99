/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_names.c - parameter names as directory names: ordinary ones stay as they are, no two meet,
 * all come back. tests/fuzz/fuzz_names.c feeds it anything.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/names.h"

#define LEN(a) (sizeof(a) / sizeof((a)[0]))

static void encodes_as(const char *name, const char *want)
{
	char dir[NAMES_MAX + 1], back[NAMES_MAX];
	size_t len = sizeof(back);

	assert_int_equal(names_encode(name, strlen(name), dir), 0);
	assert_string_equal(dir, want);
	assert_int_equal(names_decode(dir, back, &len), 0);
	assert_int_equal(len, strlen(name));
	assert_memory_equal(back, name, len);
}

static void ordinary_names_stay(void **state)
{
	static const char *const names[] = {
		"transformer.h.0.attn.c_attn.weight",
		"a",
		"a.b",
		"a_b",
		"A",
		"exp_avg",
		"层.0.weight",
		"\xc3\xa9",
		"e\xcc\x81",
		"two words",
		"model.layers.31.mlp.gate_proj",
		"a-b",
		"a.",
		"~",
		"a\\b",
		"\"quoted\"",
		"\xf0\x9f\x98\x80",
		"\xf4\x8f\xbf\xbf",
	};

	(void)state;
	for (size_t n = 0; n < LEN(names); n++)
		encodes_as(names[n], names[n]);
}

static void unusual_bytes_are_escaped(void **state)
{
	(void)state;
	encodes_as("a/b", "a%2Fb");
	encodes_as("a%2Eb", "a%252Eb");
	encodes_as("..", "%2E.");
	encodes_as(".", "%2E");
	encodes_as("../../etc/x", "%2E.%2F..%2Fetc%2Fx");
	encodes_as(".hidden", "%2Ehidden");
	encodes_as("-rf", "%2Drf");
	encodes_as("one\ntwo", "one%0Atwo");
	encodes_as("\x7f", "%7F");
	encodes_as("a\xff", "a%FF");
	encodes_as("\xe5\xb1", "%E5%B1");			  /* cut off */
	encodes_as("\xed\xa0\x80", "%ED%A0%80");		  /* a surrogate */
	encodes_as("\xc0\xaf", "%C0%AF");			  /* an overlong '/' */
	encodes_as("\xe0\x80\xaf", "%E0%80%AF");		  /* and longer */
	encodes_as("\xf4\x90\x80\x80", "%F4%90%80%80");		  /* beyond Unicode */
	encodes_as("\xe5\xb1\xe5\xb1\x82", "%E5%B1\xe5\xb1\x82"); /* and a whole one behind it */
}

static void impossible_names_are_refused(void **state)
{
	char dir[NAMES_MAX + 1];

	(void)state;
	assert_int_equal(names_encode("", 0, dir), -EINVAL);
	assert_int_equal(names_encode("a\0b", 3, dir), -EINVAL);
	assert_int_equal(names_encode("\0", 1, dir), -EINVAL);
}

static void only_encodings_decode(void **state)
{
	static const char *const bad[] = {
		"",
		".",
		"..",
		".a",
		"-a",
		"%",
		"%2",
		"%2f",
		"%41",
		"%zz",
		"a%",
		"%00",
		"a/b",
		"a\nb",
		"\xff",
		"a\xe5\xb1",
		"%E5%B1%82",
		"%~",
		"x%~0123456789ABCDEF0123456789ABCDEF",
	};
	char out[NAMES_MAX], longest[NAMES_MAX + 2];
	size_t len;

	(void)state;
	for (size_t n = 0; n < LEN(bad); n++) {
		len = sizeof(out);
		assert_int_equal(names_decode(bad[n], out, &len), -EINVAL);
	}
	memset(longest, 'x', NAMES_MAX + 1);
	longest[NAMES_MAX + 1] = '\0';
	len = sizeof(out);
	assert_int_equal(names_decode(longest, out, &len), -EINVAL);
	longest[NAMES_MAX] = '\0';
	assert_int_equal(names_decode(longest, out, &len), 0);
	len = 3;
	assert_int_equal(names_decode("four", out, &len), -ERANGE);
}

static void long_name(char *name, size_t len)
{
	for (size_t i = 0; i < len; i++)
		name[i] = (char)('a' + i % 26);
}

static void long_names_are_cut_with_a_hash(void **state)
{
	static const size_t lens[] = {200, 201, 244, 250, 255, 256, 1000, 5000};
	char name[5000], dir[NAMES_MAX + 1], other[NAMES_MAX + 1], out[NAMES_MAX];
	size_t len;

	(void)state;
	for (size_t n = 0; n < LEN(lens); n++) {
		long_name(name, lens[n]);
		assert_int_equal(names_encode(name, lens[n], dir), 0);
		assert_int_equal(strlen(dir), NAMES_MAX);
		len = sizeof(out);
		assert_int_equal(names_decode(dir, out, &len), lens[n] > 200 ? -EOVERFLOW : 0);
		if (lens[n] <= 300)
			continue;
		/* Two that differ in byte 300 only. */
		name[300] = '!';
		assert_int_equal(names_encode(name, lens[n], other), 0);
		assert_string_not_equal(dir, other);
		assert_memory_equal(dir, other, 166);
	}
	/* A name that looks like the cut form of another is not taken for it. */
	long_name(name, 5000);
	assert_int_equal(names_encode(name, 5000, dir), 0);
	assert_int_equal(names_encode(dir, strlen(dir), other), 0);
	assert_string_not_equal(dir, other);
}

/* A character or an escape is never cut in half: at every position of the cut. */
static void cuts_are_at_whole_characters(void **state)
{
	static const char *const pieces[] = {"\xe5\xb1\x82", "\xf0\x9f\x98\x80", "\xff",
					     "\xc3\xa9"};
	char name[2000], dir[NAMES_MAX + 1], out[NAMES_MAX];

	(void)state;
	for (size_t p = 0; p < LEN(pieces); p++) {
		for (size_t lead = 0; lead < 8; lead++) {
			size_t n = lead, len = sizeof(out);
			const char *mark;

			memset(name, 'x', lead);
			for (; n < 900; n += strlen(pieces[p]))
				memcpy(name + n, pieces[p], strlen(pieces[p]));
			assert_int_equal(names_encode(name, n, dir), 0);
			mark = strstr(dir, "%~");
			assert_non_null(mark);
			assert_in_range(mark - dir, 163, 166);
			for (size_t at = 0; at < (size_t)(mark - dir);) {
				size_t whole = names_utf8_len(dir + at, (size_t)(mark - dir) - at);

				assert_int_not_equal(whole, 0);
				at += whole;
			}
			assert_int_equal((mark - dir - (long)lead) %
						 (p == 2 ? 3 : (long)strlen(pieces[p])),
					 0);
			assert_int_equal(names_decode(dir, out, &len), -EOVERFLOW);
		}
	}
}

static int by_text(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Every name of one, two and three bytes from a nasty alphabet: no two meet. */
static void no_two_names_meet(void **state)
{
	static const char alphabet[] = "a%2F~.-/\xff\xe5\xb1\x82\x01";
	const size_t k = sizeof(alphabet) - 1, n_names = k + k * k + k * k * k;
	char(*dirs)[NAMES_MAX + 1] = malloc(n_names * sizeof(*dirs));
	char **sorted = malloc(n_names * sizeof(*sorted));
	size_t n = 0;

	(void)state;
	assert_non_null(dirs);
	assert_non_null(sorted);
	for (size_t len = 1; len <= 3; len++) {
		for (size_t v = 0, end = len == 1   ? k
					 : len == 2 ? k * k
						    : k * k * k;
		     v < end; v++) {
			char name[3], back[NAMES_MAX];
			size_t back_len = sizeof(back);

			for (size_t i = 0, w = v; i < len; i++, w /= k)
				name[i] = alphabet[w % k];
			assert_int_equal(names_encode(name, len, dirs[n]), 0);
			assert_int_equal(names_decode(dirs[n], back, &back_len), 0);
			assert_int_equal(back_len, len);
			assert_memory_equal(back, name, len);
			sorted[n] = dirs[n];
			n++;
		}
	}
	assert_int_equal(n, n_names);
	qsort(sorted, n, sizeof(*sorted), by_text);
	for (size_t i = 1; i < n; i++)
		assert_string_not_equal(sorted[i - 1], sorted[i]);
	free(sorted);
	free(dirs);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(ordinary_names_stay),
		cmocka_unit_test(unusual_bytes_are_escaped),
		cmocka_unit_test(impossible_names_are_refused),
		cmocka_unit_test(only_encodings_decode),
		cmocka_unit_test(long_names_are_cut_with_a_hash),
		cmocka_unit_test(cuts_are_at_whole_characters),
		cmocka_unit_test(no_two_names_meet),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
