/* SPDX-License-Identifier: Apache-2.0 */
/*
 * log.c - the daemon's messages. One line each, written with one call, so that lines of several
 * threads do not mix. The two flags are set by main before other threads exist, but for the switch
 * to syslog, which is one atomic store.
 */
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <syslog.h>

#include "daemon/daemon.h"
#include "daemon/log.h"

static bool debug;
static atomic_bool to_syslog;

void log_set_debug(bool on)
{
	debug = on;
}

void log_to_syslog(void)
{
	openlog("momentfs", LOG_PID, LOG_DAEMON);
	atomic_store(&to_syslog, true);
}

static void log_line(enum engine_log_level level, const char *msg)
{
	static const int priority[] = {LOG_ERR, LOG_WARNING, LOG_NOTICE, LOG_DEBUG};
	static const char *const word[] = {"", "warning: ", "", "debug: "};

	if (level == ENGINE_LOG_DEBUG && !debug)
		return;
	if (atomic_load(&to_syslog))
		syslog(priority[level], "%s", msg);
	else
		fprintf(stderr, "momentfs: %s%s\n", word[level], msg);
}

static void log_va(enum engine_log_level level, const char *fmt, va_list ap)
{
	char msg[2 * PATH_MAX + 1024];
	size_t len;

	vsnprintf(msg, sizeof(msg), fmt, ap);
	len = strlen(msg);
	while (len && msg[len - 1] == '\n')
		msg[--len] = '\0';
	log_line(level, msg);
}

void log_msg(enum engine_log_level level, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	log_va(level, fmt, ap);
	va_end(ap);
}

void log_engine(void *arg, enum engine_log_level level, const char *msg)
{
	(void)arg;
	log_line(level, msg);
}

static void log_fuse(enum fuse_log_level level, const char *fmt, va_list ap)
{
	if (level <= FUSE_LOG_ERR)
		log_va(ENGINE_LOG_ERROR, fmt, ap);
	else if (level <= FUSE_LOG_NOTICE)
		log_va(ENGINE_LOG_WARNING, fmt, ap);
	else
		log_va(ENGINE_LOG_DEBUG, fmt, ap);
}

void log_take_fuse(void)
{
	fuse_set_log_func(log_fuse);
}
