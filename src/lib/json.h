/* SPDX-License-Identifier: Apache-2.0 */
/* json.h - just enough to take single values out of .moment/status. */
#ifndef LIB_JSON_H
#define LIB_JSON_H

#include <stdint.h>

/* The value at a dotted path of keys ("commit.step") in a JSON object: a pointer into text, or
 * NULL. */
const char *json_find(const char *text, const char *path);
/* The first element of an array, and the one after an element. NULL: no more, or no array. */
const char *json_first(const char *value);
const char *json_next(const char *element);
/* As a string, malloc'ed, or NULL if it is none. */
char *json_string(const char *value);
/* As an unsigned number; `none` if it is none (or null, or negative). */
uint64_t json_u64(const char *value, uint64_t none);

#endif
