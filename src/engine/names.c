/* SPDX-License-Identifier: Apache-2.0 */
/*
 * names.c - see names.h. Pure functions: any thread.
 *
 * Why no two names meet: an encoding that was not cut can be read back byte by byte; one that was
 * cut has "%~" in it, which no escape is; and two cut ones differ in 128 bits of hash.
 */
#include "engine/names.h"

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <xxhash.h>

#define HASH_DIGITS 32
#define HASH_SUFFIX (2 + HASH_DIGITS) /* "%~" and the digits */

static const char hex[] = "0123456789ABCDEF";

size_t names_utf8_len(const char *str, size_t len)
{
	const unsigned char *s = (const unsigned char *)str;
	unsigned char lo = 0x80, hi = 0xbf; /* of the second byte */
	size_t n;

	if (!len)
		return 0;
	if (s[0] < 0x80)
		return 1;
	if (s[0] < 0xc2 || s[0] > 0xf4)
		return 0;
	n = s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : 4;
	if (s[0] == 0xe0)
		lo = 0xa0;
	else if (s[0] == 0xed)
		hi = 0x9f;
	else if (s[0] == 0xf0)
		lo = 0x90;
	else if (s[0] == 0xf4)
		hi = 0x8f;
	if (len < n || s[1] < lo || s[1] > hi)
		return 0;
	for (size_t i = 2; i < n; i++)
		if (s[i] < 0x80 || s[i] > 0xbf)
			return 0;
	return n;
}

/* How many bytes at s stay as they are together; 0: the byte at s is escaped. */
static size_t plain_len(const char *s, size_t len, bool first)
{
	unsigned char c = (unsigned char)*s;

	if (c == '/' || c == '%' || c < 0x20 || c == 0x7f || (first && (c == '.' || c == '-')))
		return 0;
	return names_utf8_len(s, len);
}

static void put_hash(const void *name, size_t len, char *out)
{
	XXH128_canonical_t c;

	XXH128_canonicalFromHash(&c, XXH3_128bits(name, len));
	*out++ = '%';
	*out++ = '~';
	for (size_t i = 0; i < sizeof(c.digest); i++) {
		*out++ = hex[c.digest[i] >> 4];
		*out++ = hex[c.digest[i] & 15];
	}
	*out = '\0';
}

int names_encode(const void *name, size_t len, char out[NAMES_MAX + 1])
{
	const char *s = name;
	size_t to = 0, cut = 0; /* cut: the longest whole prefix that leaves room for the hash */

	if (!len || memchr(name, '\0', len))
		return -EINVAL;
	for (size_t at = 0; at < len;) {
		size_t plain = plain_len(s + at, len - at, at == 0);
		size_t grows = plain ? plain : 3;

		if (to + grows > NAMES_MAX) {
			put_hash(name, len, out + cut);
			return 0;
		}
		if (plain) {
			memcpy(out + to, s + at, plain);
		} else {
			unsigned char c = (unsigned char)s[at];

			out[to] = '%';
			out[to + 1] = hex[c >> 4];
			out[to + 2] = hex[c & 15];
		}
		to += grows;
		at += plain ? plain : 1;
		if (to <= NAMES_MAX - HASH_SUFFIX)
			cut = to;
	}
	out[to] = '\0';
	return 0;
}

static int hex_digit(char c)
{
	const char *at = c ? strchr(hex, c) : NULL;

	return at ? (int)(at - hex) : -1;
}

/*
 * Could names_encode() have made this? `name` are the `to` bytes that the part before the hash
 * says. That part is a proper encoding, and so long that no further character fits, which takes
 * at most 4 bytes.
 */
static bool is_cut(const char *dir, size_t len, size_t at, const void *name, size_t to)
{
	char again[NAMES_MAX + 1];

	if (len - at != HASH_SUFFIX || at + 4 <= NAMES_MAX - HASH_SUFFIX)
		return false;
	for (size_t i = at + 2; i < len; i++)
		if (hex_digit(dir[i]) < 0)
			return false;
	return names_encode(name, to, again) == 0 && strlen(again) == at && !memcmp(again, dir, at);
}

int names_decode(const char *dir, void *out, size_t *len)
{
	unsigned char name[NAMES_MAX];
	char again[NAMES_MAX + 1];
	size_t n = strnlen(dir, NAMES_MAX + 1), to = 0;

	if (!n || n > NAMES_MAX)
		return -EINVAL;
	for (size_t at = 0; at < n;) {
		int hi, lo;

		if (dir[at] != '%') {
			name[to++] = (unsigned char)dir[at++];
			continue;
		}
		if (dir[at + 1] == '~')
			return is_cut(dir, n, at, name, to) ? -EOVERFLOW : -EINVAL;
		hi = hex_digit(dir[at + 1]);
		lo = hi < 0 ? -1 : hex_digit(dir[at + 2]);
		if (lo < 0)
			return -EINVAL;
		name[to++] = (unsigned char)(hi << 4 | lo);
		at += 3;
	}
	/* Only the canonical encoding counts, so that every directory has one name. */
	if (names_encode(name, to, again) < 0 || strcmp(again, dir))
		return -EINVAL;
	if (to > *len)
		return -ERANGE;
	memcpy(out, name, to);
	*len = to;
	return 0;
}
