/* SPDX-License-Identifier: Apache-2.0 */
/*
 * log.h - the daemon's messages: to stderr with the program's name before them, or to syslog once
 * it runs in the background. Any thread.
 */
#ifndef DAEMON_LOG_H
#define DAEMON_LOG_H

#include <stdbool.h>

#include "engine/engine.h"

void log_msg(enum engine_log_level level, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));

#define log_error(...)	 log_msg(ENGINE_LOG_ERROR, __VA_ARGS__)
#define log_warning(...) log_msg(ENGINE_LOG_WARNING, __VA_ARGS__)
#define log_notice(...)	 log_msg(ENGINE_LOG_NOTICE, __VA_ARGS__)

void log_set_debug(bool on);
void log_to_syslog(void);
void log_take_fuse(void); /* libfuse's messages come through here, too */

/* engine_opts.log */
void log_engine(void *arg, enum engine_log_level level, const char *msg);

#endif
