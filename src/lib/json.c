/* SPDX-License-Identifier: Apache-2.0 */
/*
 * json.c - takes single values out of a JSON text, by skipping what is not asked for. It is the
 * daemon's own text, so a malformed one need only be survived: the answer is then "not there".
 */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "lib/json.h"

static const char *skip_space(const char *s)
{
	return s + strspn(s, " \t\r\n");
}

/* Past the string that starts at s, or NULL. */
static const char *skip_string(const char *s)
{
	if (*s != '"')
		return NULL;
	for (s++; *s && *s != '"'; s++)
		if (*s == '\\' && s[1])
			s++;
	return *s ? s + 1 : NULL;
}

/* Past the value that starts at s, or NULL. Depth is counted, not recursed: any nesting is
 * harmless. */
static const char *skip_value(const char *s)
{
	unsigned int depth = 0;

	for (;;) {
		s = skip_space(s);
		if (*s == '"') {
			s = skip_string(s);
			if (!s)
				return NULL;
		} else if (*s == '{' || *s == '[') {
			depth++;
			s++;
			continue;
		} else if (*s == '}' || *s == ']') {
			if (depth == 0)
				return NULL;
			depth--;
			s++;
		} else if (*s == ',' || *s == ':') {
			if (depth == 0)
				return NULL;
			s++;
			continue;
		} else if (*s) {
			s += strcspn(s, ",:]} \t\r\n");
		} else {
			return NULL;
		}
		if (depth == 0)
			return s;
	}
}

/* The value of key (n bytes, without escapes) in the object at s, or NULL. */
static const char *member(const char *s, const char *key, size_t n)
{
	s = skip_space(s);
	if (*s != '{')
		return NULL;
	s = skip_space(s + 1);
	while (*s == '"') {
		const char *end = skip_string(s);
		bool found;

		if (!end)
			return NULL;
		found = (size_t)(end - s) == n + 2 && memcmp(s + 1, key, n) == 0;
		s = skip_space(end);
		if (*s != ':')
			return NULL;
		s = skip_space(s + 1);
		if (found)
			return s;
		s = skip_value(s);
		if (!s)
			return NULL;
		s = skip_space(s);
		if (*s == ',')
			s = skip_space(s + 1);
	}
	return NULL;
}

const char *json_find(const char *text, const char *path)
{
	while (text) {
		const char *dot = strchr(path, '.');

		text = member(text, path, dot ? (size_t)(dot - path) : strlen(path));
		if (!dot)
			break;
		path = dot + 1;
	}
	return text;
}

const char *json_first(const char *value)
{
	if (!value || *value != '[')
		return NULL;
	value = skip_space(value + 1);
	return *value && *value != ']' ? value : NULL;
}

const char *json_next(const char *element)
{
	const char *s = skip_value(element);

	s = s ? skip_space(s) : NULL;
	return s && *s == ',' ? skip_space(s + 1) : NULL;
}

/* Writes code point c as UTF-8. */
static char *put_utf8(char *o, unsigned long c)
{
	if (c < 0x80) {
		*o++ = (char)c;
	} else if (c < 0x800) {
		*o++ = (char)(0xc0 | c >> 6);
		*o++ = (char)(0x80 | (c & 0x3f));
	} else {
		*o++ = (char)(0xe0 | c >> 12);
		*o++ = (char)(0x80 | (c >> 6 & 0x3f));
		*o++ = (char)(0x80 | (c & 0x3f));
	}
	return o;
}

char *json_string(const char *value)
{
	const char *end = value ? skip_string(value) : NULL;
	char *out, *o;

	if (!end)
		return NULL;
	out = o = malloc((size_t)(end - value) + 1);
	if (!out)
		return NULL;
	for (value++; value < end - 1; value++) {
		char hex[5] = "";

		if (*value != '\\') {
			*o++ = *value;
			continue;
		}
		switch (*++value) {
		case 'n':
			*o++ = '\n';
			break;
		case 't':
			*o++ = '\t';
			break;
		case 'r':
			*o++ = '\r';
			break;
		case 'b':
			*o++ = '\b';
			break;
		case 'f':
			*o++ = '\f';
			break;
		case 'u':
			strncpy(hex, value + 1, 4);
			o = put_utf8(o, strtoul(hex, NULL, 16));
			value += strspn(hex, "0123456789abcdefABCDEF");
			break;
		default:
			*o++ = *value;
		}
	}
	*o = 0;
	return out;
}

uint64_t json_u64(const char *value, uint64_t none)
{
	char *end;
	uint64_t v;

	if (!value || *value < '0' || *value > '9')
		return none;
	v = strtoull(value, &end, 10);
	return *end == '.' || *end == 'e' || *end == 'E' ? none : v;
}
