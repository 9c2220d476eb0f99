/* SPDX-License-Identifier: Apache-2.0 */
/*
 * error.c - error texts. Each thread has its own, so that no lock and no session is needed to ask
 * for it, and an error of moment_open(), which has no session to show, is told the same way.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "lib/error.h"
#include "moment/moment.h"

static _Thread_local char text[2048];

void err_write(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
}

void err_write_before(const char *fmt, ...)
{
	char old[sizeof(text)];
	va_list ap;
	size_t n;

	memcpy(old, text, sizeof(old));
	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	n = strlen(text);
	snprintf(text + n, sizeof(text) - n, ": %.1500s", old);
}

const char *err_text(void)
{
	return text;
}

void err_clear(void)
{
	text[0] = 0;
}

const char *err_name(int code)
{
	return strerror(-code);
}

const char *err_bytes(unsigned long long bytes)
{
	static const char *const unit[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
	static _Thread_local char buf[4][32];
	static _Thread_local unsigned int turn;
	char *b = buf[turn++ % 4];
	double v = (double)bytes;
	unsigned int u = 0;

	while (v >= 1024 && u + 1 < sizeof(unit) / sizeof(unit[0])) {
		v /= 1024;
		u++;
	}
	snprintf(b, sizeof(buf[0]), u == 0 ? "%.0f %s" : "%.1f %s", v, unit[u]);
	return b;
}

const char *moment_error(void)
{
	return text;
}
