/* SPDX-License-Identifier: Apache-2.0 */
/*
 * systemd.c - tells a service manager how far the daemon is, by the protocol of sd_notify(3): one
 * datagram of lines to the socket that NOTIFY_SOCKET names. Without that variable nothing is done.
 *
 * What the last commit has to write may take longer than a manager waits before it kills. So from
 * the beginning of the end a thread asks every EXTEND_S for EXTEND_MORE_S from then on, for as long
 * as the daemon is there.
 */
#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "daemon/daemon.h"

#define EXTEND_S      5
#define EXTEND_MORE_S 60
#define STACK	      (64u << 10)

void systemd_tell(const char *fmt, ...)
{
	const char *path = getenv("NOTIFY_SOCKET");
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	char text[512];
	size_t len;
	va_list ap;
	int fd, n;

	if (!path || (*path != '/' && *path != '@') || strlen(path) >= sizeof(a.sun_path))
		return;
	va_start(ap, fmt);
	n = vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	if (n < 0)
		return;
	len = strlen(path);
	memcpy(a.sun_path, path, len);
	if (*path == '@')
		a.sun_path[0] = '\0'; /* in the abstract namespace */
	fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return;
	if (sendto(fd, text, strnlen(text, sizeof(text)), MSG_NOSIGNAL | MSG_DONTWAIT,
		   (struct sockaddr *)&a,
		   (socklen_t)(offsetof(struct sockaddr_un, sun_path) + len)) < 0)
		log_msg(ENGINE_LOG_DEBUG, "NOTIFY_SOCKET %s: %s", path, strerror(errno));
	close(fd);
}

static void *extend(void *arg)
{
	struct timespec pause = {.tv_sec = EXTEND_S};

	(void)arg;
	for (;;) {
		systemd_tell("EXTEND_TIMEOUT_USEC=%d000000", EXTEND_MORE_S);
		nanosleep(&pause, NULL);
	}
	return NULL;
}

void systemd_ending(const char *mountpoint)
{
	pthread_attr_t ta;
	pthread_t thread;

	if (!getenv("NOTIFY_SOCKET"))
		return;
	systemd_tell("STOPPING=1\nSTATUS=unmounting %s: writing what is not on the drive yet",
		     mountpoint);
	pthread_attr_init(&ta);
	pthread_attr_setstacksize(&ta, STACK);
	pthread_attr_setdetachstate(&ta, PTHREAD_CREATE_DETACHED);
	if (pthread_create(&thread, &ta, extend, NULL))
		log_warning("cannot ask systemd for time: no thread");
	pthread_attr_destroy(&ta);
}
