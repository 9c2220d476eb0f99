/* SPDX-License-Identifier: Apache-2.0 */
/*
 * transport_socket.c - messages to a momentfs daemon, over the SEQPACKET socket in its backing.
 *
 * The arena's memfd comes with the first message that carries one (the reply to HELLO) and is
 * mapped once, at an address aligned to 2 MiB so that huge pages stay huge. The memfd is sealed
 * against shrinking: touching the mapping can never fault, also after the daemon has died. A forked
 * child does not get the mapping.
 *
 * Reading never holds up the daemon and the daemon never blocks on us (it queues), so a blocking
 * send is safe.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "lib/error.h"
#include "lib/transport.h"

#define HUGE_PAGE   ((size_t)2 << 20)
#define FAREWELL_MS 5000

struct transport_sock {
	struct transport t;
	int fd;
	int arena_fd;
	void *map;
	size_t map_size;
};

static struct transport_sock *sock_of(struct transport *t)
{
	return (struct transport_sock *)t;
}

static int sock_send(struct transport *t, const void *msg, size_t len)
{
	struct transport_sock *k = sock_of(t);
	ssize_t n;

	do
		n = send(k->fd, msg, len, MSG_NOSIGNAL);
	while (n < 0 && errno == EINTR);
	if (n < 0)
		return errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN ? -ECONNRESET
										  : -errno;
	return 0;
}

/* Takes the descriptors that came along; keeps one, closes the rest. */
static void sock_take_fds(struct transport_sock *k, struct msghdr *mh)
{
	struct cmsghdr *c;

	for (c = CMSG_FIRSTHDR(mh); c; c = CMSG_NXTHDR(mh, c)) {
		size_t n, i;

		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		for (i = 0; i < n; i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
			if (k->arena_fd < 0)
				k->arena_fd = fd;
			else
				close(fd);
		}
	}
}

static int64_t sock_recv(struct transport *t, void *buf, size_t cap)
{
	struct transport_sock *k = sock_of(t);
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(4 * sizeof(int))];
	} control;
	struct iovec iov = {.iov_base = buf, .iov_len = cap};
	struct msghdr mh;
	ssize_t n;

	do {
		mh = (struct msghdr){.msg_iov = &iov,
				     .msg_iovlen = 1,
				     .msg_control = control.bytes,
				     .msg_controllen = sizeof(control.bytes)};
		n = recvmsg(k->fd, &mh, MSG_CMSG_CLOEXEC);
	} while (n < 0 && errno == EINTR);
	if (n <= 0)
		return -ECONNRESET;
	sock_take_fds(k, &mh);
	if (mh.msg_flags & MSG_TRUNC)
		return -EPROTO;
	return n;
}

static int sock_attach(struct transport *t, uint64_t arena_size, void **base)
{
	struct transport_sock *k = sock_of(t);
	size_t size = arena_size, room = size + HUGE_PAGE;
	char *raw, *at;
	struct stat st;

	if (k->arena_fd < 0)
		return err_set(-EPROTO, "the daemon's greeting came without its memory");
	if (fstat(k->arena_fd, &st) || (uint64_t)st.st_size < arena_size ||
	    !(fcntl(k->arena_fd, F_GET_SEALS) & F_SEAL_SHRINK))
		return err_set(-EPROTO, "the daemon's memory is not the %s that it greets with",
			       err_bytes(arena_size));
	raw = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (raw == MAP_FAILED)
		return err_set(-errno, "no address space for the daemon's RAM tier of %s: %s",
			       err_bytes(arena_size), strerror(errno));
	at = (char *)(((uintptr_t)raw + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1));
	if (mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, k->arena_fd, 0) ==
	    MAP_FAILED) {
		int res = -errno;

		munmap(raw, room);
		return err_set(res, "cannot map the daemon's RAM tier of %s: %s",
			       err_bytes(arena_size), strerror(-res));
	}
	if (at > raw)
		munmap(raw, (size_t)(at - raw));
	if (at + size < raw + room)
		munmap(at + size, (size_t)(raw + room - at) - size);
	madvise(at, size, MADV_DONTFORK);
	close(k->arena_fd);
	k->arena_fd = -1;
	k->map = at;
	k->map_size = size;
	*base = at;
	return 0;
}

/*
 * Our mapping of the daemon's memory would count as this process' own until the next step, through
 * the forward and backward pass, where the peak is. The bytes are the memfd's and stay; mapping
 * them again costs a fault for each huge page.
 */
static void sock_rest(struct transport *t)
{
	struct transport_sock *k = sock_of(t);

	if (k->map)
		madvise(k->map, k->map_size, MADV_DONTNEED);
}

/*
 * Says good-bye and waits until the daemon has let go of the session, so that what the session held
 * (files that may not be written, the place of the one writer) is free when moment_close() returns.
 * Replies that nobody waits for are dropped. A daemon that hangs is waited for in vain, but not for
 * ever.
 */
static void sock_farewell(struct transport_sock *k)
{
	struct pollfd p = {.fd = k->fd, .events = POLLIN};
	char drop[256];

	if (shutdown(k->fd, SHUT_WR) < 0)
		return;
	while (poll(&p, 1, FAREWELL_MS) > 0)
		if (recv(k->fd, drop, sizeof(drop), MSG_DONTWAIT) <= 0)
			return;
}

static int sock_close(struct transport *t, bool commit)
{
	struct transport_sock *k = sock_of(t);

	(void)commit; /* the daemon's own business */
	if (k->fd >= 0)
		sock_farewell(k);
	if (k->map)
		munmap(k->map, k->map_size);
	if (k->arena_fd >= 0)
		close(k->arena_fd);
	if (k->fd >= 0)
		close(k->fd);
	free(k);
	return 0;
}

static void sock_forked(struct transport *t)
{
	struct transport_sock *k = sock_of(t);

	if (k->fd >= 0)
		close(k->fd);
	k->fd = -1;
	k->map = NULL; /* was not inherited */
}

static const struct transport_ops sock_ops = {
	.name = "session",
	.send = sock_send,
	.recv = sock_recv,
	.attach = sock_attach,
	.rest = sock_rest,
	.close = sock_close,
	.forked = sock_forked,
};

/* A socket's path has 107 bytes; a backing's may have more. So the name goes by way of its
 * directory. */
static int sock_connect(int fd, const char *backing)
{
	struct sockaddr_un sa = {.sun_family = AF_UNIX};
	int dir, res = 0;

	dir = open(backing, O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (dir < 0)
		return -errno;
	snprintf(sa.sun_path, sizeof(sa.sun_path), "/proc/self/fd/%d/" MOMENT_SOCKET_NAME, dir);
	if (connect(fd, (struct sockaddr *)&sa, sizeof(sa)) < 0)
		res = -errno;
	close(dir);
	return res;
}

int transport_socket(const char *backing, struct transport **out)
{
	struct transport_sock *k = calloc(1, sizeof(*k));
	int res, bytes = 4 * (int)MOMENT_MSG_MAX;

	if (!k)
		return -ENOMEM;
	k->t.ops = &sock_ops;
	k->arena_fd = -1;
	k->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (k->fd < 0) {
		res = -errno;
		goto out_free;
	}
	setsockopt(k->fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
	res = sock_connect(k->fd, backing);
	if (res < 0)
		goto out_close;
	*out = &k->t;
	return 0;
out_close:
	close(k->fd);
out_free:
	free(k);
	return res;
}
