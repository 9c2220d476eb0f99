/* SPDX-License-Identifier: Apache-2.0 */
/*
 * names.h - a parameter's name as the name of one directory, and back.
 *
 * The encoding is injective. Plain bytes and valid UTF-8 stay as they are; '/', '%', bytes below
 * 0x20, 0x7f, bytes that are not part of valid UTF-8, and a '.' or '-' at the start become %XX
 * (upper-case). A result of more than NAMES_MAX bytes is cut at a whole character or escape and
 * gets "%~" and 32 hexadecimal digits, the XXH3-128 of the name, behind it; the cut form cannot be
 * decoded, and the whole name is kept in the extended attribute user.moment.name. Ordinary names
 * of PyTorch modules are their own encoding.
 */
#ifndef ENGINE_NAMES_H
#define ENGINE_NAMES_H

#include <stddef.h>

#define NAMES_MAX 200 /* bytes of a directory name, without the NUL */

/* `out` gets a NUL-terminated string. -EINVAL: the name is empty or has a NUL in it. */
int names_encode(const void *name, size_t len, char out[NAMES_MAX + 1]);

/*
 * The reverse. `out` has room for *len bytes (NAMES_MAX always suffices); *len is then the length
 * of the name, which is not NUL-terminated. -EOVERFLOW: a name that was cut; -ERANGE: `out` is too
 * small; -EINVAL: names_encode() never gives this string.
 */
int names_decode(const char *dir, void *out, size_t *len);

/* Length of the valid UTF-8 character (as in RFC 3629: no surrogates, nothing overlong) at s, which
 * has `len` bytes; 0 when there is none. */
size_t names_utf8_len(const char *s, size_t len);

#endif
