/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_names.c - any bytes as a parameter's name, and as a directory's: there and back is the same,
 * and whatever comes out is one harmless path component.
 */
#include <errno.h>

#include "engine/names.h"
#include "fuzz.h"

static void check_component(const char *dir)
{
	size_t len = strlen(dir);

	must(len >= 1 && len <= NAMES_MAX);
	must(dir[0] != '.' && dir[0] != '-' && !strchr(dir, '/'));
	for (size_t at = 0; at < len;) {
		size_t n = names_utf8_len(dir + at, len - at);

		must(n && (unsigned char)dir[at] >= 0x20 && dir[at] != 0x7f);
		at += n;
	}
}

static void as_name(const uint8_t *data, size_t size)
{
	char dir[NAMES_MAX + 1], name[NAMES_MAX];
	size_t len = sizeof(name);
	int res = names_encode(data, size, dir);

	if (!size || memchr(data, 0, size)) {
		must(res == -EINVAL);
		return;
	}
	must(res == 0);
	check_component(dir);
	res = names_decode(dir, name, &len);
	if (strstr(dir, "%~"))
		must(res == -EOVERFLOW);
	else
		must(res == 0 && len == size && !memcmp(name, data, size));
}

static void as_dir(const uint8_t *data, size_t size)
{
	char *dir = malloc(size + 1), name[NAMES_MAX], again[NAMES_MAX + 1];
	size_t len = sizeof(name);
	int res;

	must(dir);
	if (size)
		memcpy(dir, data, size);
	dir[size] = '\0';
	res = names_decode(dir, name, &len);
	must(res == 0 || res == -EINVAL || res == -EOVERFLOW);
	if (!res) {
		must(names_encode(name, len, again) == 0);
		must(!strcmp(again, dir));
	}
	free(dir);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	as_name(data, size);
	as_dir(data, size);
	return 0;
}

#ifndef FUZZ_ENGINE
int main(int argc, char **argv)
{
	return fuzz_main(argc, argv, "corpus-names", 20000);
}
#endif
