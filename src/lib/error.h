/* SPDX-License-Identifier: Apache-2.0 */
/*
 * error.h - the text that goes with an error: one a thread, set where the error is decided.
 */
#ifndef LIB_ERROR_H
#define LIB_ERROR_H

#include <stddef.h>

void err_write(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void err_write_before(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Sets the text and has the value of code (which the compiler then knows to be negative). */
#define err_set(code, ...) (err_write(__VA_ARGS__), (code))

/* Puts "what: " before the text that is there. */
#define err_prefix(code, ...) (err_write_before(__VA_ARGS__), (code))

const char *err_text(void);
void err_clear(void);

/* strerror() of -code, for texts. */
const char *err_name(int code);

/* Bytes for people: "1.5 GiB". Four results live at a time in a thread. */
const char *err_bytes(unsigned long long bytes);

#endif
