/* SPDX-License-Identifier: Apache-2.0 */
/* test_lib_parts.c - the small parts of libmoment that need no session: selection, finiteness,
 * JSON, texts. */
#include <math.h>

#include "lib/error.h"
#include "lib/json.h"
#include "lib_fixture.h"

/* ColossalAI's example: sizes, those with G on the GPU; half of all may be offloaded. */
static void quota_of_the_offload_fraction(void **state)
{
	static const uint64_t numel[] = {80, 32, 8, 8, 8, 32, 4, 4, 4, 16, 4};
	static const uint8_t cpu[] = {0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1};
	static const uint8_t want[] = {0, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1};
	static const uint64_t one[] = {3};
	uint8_t got[11];
	size_t i;

	(void)state;
	assert_int_equal(moment_offload_select(numel, cpu, 11, 0.5, got), 96);
	assert_memory_equal(got, want, 11);
	assert_int_equal(moment_offload_select(numel, cpu, 11, 0.0, got), 0);
	assert_int_equal(moment_offload_select(numel, cpu, 11, 1.0, got), 112);
	for (i = 0; i < 11; i++)
		assert_int_equal(got[i], cpu[i]);
	assert_int_equal(moment_offload_select(numel, NULL, 11, 1.0, got), 200);
	/* floor(3 x 0.99) = 2 */
	assert_int_equal(moment_offload_select(one, NULL, 1, 0.99, got), 0);
	assert_int_equal(moment_offload_select(one, NULL, 0, 0.5, got), 0);
}

static void one_bad_element_is_found_wherever_it_is(void **state)
{
	static const size_t sizes_[] = {1, 63, 64, 65, 1000, 65536, 65537, 200003};
	static const struct {
		uint32_t dtype;
		unsigned int size;
		uint64_t large, inf, nan;
	} types[] = {
		{MOMENT_F32, 4, 0x7f7fffff, 0xff800000, 0x7f800001},
		{MOMENT_BF16, 2, 0x7f7f, 0x7f80, 0xffc0},
		{MOMENT_F16, 2, 0xfbff, 0x7c00, 0x7e01},
		{MOMENT_F64, 8, 0x7fefffffffffffff, 0x7ff0000000000000, 0xfff0000000000001},
	};
	size_t t, k;

	(void)state;
	for (t = 0; t < 4; t++) {
		for (k = 0; k < sizeof(sizes_) / sizeof(sizes_[0]); k++) {
			size_t n = sizes_[k], at[] = {0, n / 2, n - 1}, i;
			unsigned char *x = malloc(n * types[t].size + 1);

			for (i = 0; i < n; i++)
				memcpy(x + 1 + i * types[t].size, &types[t].large, types[t].size);
			assert_int_equal(moment_is_finite(x + 1, n, types[t].dtype), 1);
			assert_int_equal(moment_is_finite(x + 1, 0, types[t].dtype), 1);
			for (i = 0; i < 3; i++) {
				unsigned char *e = x + 1 + at[i] * types[t].size;

				memcpy(e, &types[t].inf, types[t].size);
				assert_int_equal(moment_is_finite(x + 1, n, types[t].dtype), 0);
				memcpy(e, &types[t].nan, types[t].size);
				assert_int_equal(moment_is_finite(x + 1, n, types[t].dtype), 0);
				memcpy(e, &types[t].large, types[t].size);
			}
			free(x);
		}
	}
	refused(moment_is_finite(NULL, 0, 99), -EINVAL, "type 99");
}

static void values_are_found_in_json(void **state)
{
	static const char text[] =
		"{ \"a\\\"b\": [1, {\"c\": 2}], \"mount\": {\"socket\": \"/x \\\"y\\\" \\u00e9\\n\", \"pid\":77,"
		"\"none\": null}, \"big\" : 18446744073709551614, \"real\": 1.5, \"c\": \"top\", \"neg\": -4}";
	char *s;

	(void)state;
	s = json_string(json_find(text, "mount.socket"));
	assert_string_equal(s, "/x \"y\" \xc3\xa9\n");
	free(s);
	s = json_string(json_find(text, "c")); /* not the one inside the array */
	assert_string_equal(s, "top");
	free(s);
	assert_int_equal(json_u64(json_find(text, "mount.pid"), 5), 77);
	assert_true(json_u64(json_find(text, "big"), 5) == UINT64_MAX - 1);
	assert_int_equal(json_u64(json_find(text, "mount.none"), 5), 5);
	assert_int_equal(json_u64(json_find(text, "real"), 5), 5);
	assert_int_equal(json_u64(json_find(text, "neg"), 5), 5);
	assert_null(json_find(text, "mount.nothing"));
	assert_null(json_find(text, "c.d"));
	assert_null(json_string(json_find(text, "mount")));
}

/* Whatever is cut off or broken: no value, no crash (the sanitizers look on). */
static void broken_json_is_survived(void **state)
{
	static const char text[] = "{\"a\": [1, {\"b\": \"c\\u00\"}], \"d\": {\"e\": \"f\"}}";
	char cut[sizeof(text)];
	size_t n, i;

	(void)state;
	for (n = 0; n < sizeof(text); n++) {
		memcpy(cut, text, n);
		cut[n] = 0;
		free(json_string(json_find(cut, "d.e")));
		for (i = 0; i < n; i++) {
			char old = cut[i];

			cut[i] = "{}[]\",:\\x"[i % 9];
			free(json_string(json_find(cut, "d.e")));
			free(json_string(json_find(cut, "a")));
			cut[i] = old;
		}
	}
	assert_null(json_find("", "a"));
	assert_null(json_find("[1]", "a"));
}

static void texts(void **state)
{
	char many[5000];

	(void)state;
	assert_int_equal(err_set(-EIO, "the %s", "cause"), -EIO);
	assert_string_equal(moment_error(), "the cause");
	err_write_before("in %d", 7);
	assert_string_equal(moment_error(), "in 7: the cause");
	memset(many, 'x', sizeof(many) - 1);
	many[sizeof(many) - 1] = 0;
	err_write("%s", many);
	err_write_before("%s", many);
	assert_true(strlen(moment_error()) < 2048);
	assert_string_equal(err_bytes(0), "0 bytes");
	assert_string_equal(err_bytes(1536), "1.5 KiB");
	assert_string_equal(err_bytes((unsigned long long)3 << 40), "3.0 TiB");
	assert_non_null(strstr(moment_version(), moment_simd_level()));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(quota_of_the_offload_fraction),
		cmocka_unit_test(one_bad_element_is_found_wherever_it_is),
		cmocka_unit_test(values_are_found_in_json),
		cmocka_unit_test(broken_json_is_survived),
		cmocka_unit_test(texts),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
