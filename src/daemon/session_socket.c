/* SPDX-License-Identifier: Apache-2.0 */
/*
 * session_socket.c - the SEQPACKET socket in BACKING through which sessions talk to the engine.
 *
 * Everything here but start, stop and farewell (main thread) runs on the engine's loop thread; the
 * two counters that others read are atomic. A connection owns its fd, the pidfd of its peer, its
 * session, and the replies that the socket did not take yet. While there are such replies nothing
 * more is read from that peer, so what one can make us keep is bounded by what it has asked for.
 *
 * A session ends with its connection or with its process, whichever comes first: a forked child may
 * keep the connection open. A connection is freed by a task of its own, never inside a call from
 * the session, which is on the stack then.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/daemon.h"
#include "moment/protocol.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

#define BATCH	    16	       /* messages taken from one peer before others have their turn */
#define QUEUE_MOST  (8u << 20) /* bytes; a peer that asks and never reads ends here */
#define LISTEN_MOST 64
#define CONNS_MOST  256 /* two descriptors each */

struct queued {
	struct queued *next;
	size_t len;
	bool pass_arena;
	char bytes[];
};

struct conn {
	struct list link;
	struct session_socket *s;
	struct loop_watch watch, pid_watch;
	struct session *session;
	pid_t pid;
	uid_t uid;
	gid_t gid;
	bool refused; /* another user: told so in answer to the first message */
	bool ending;
	struct queued *first, **last;
	size_t queued;
	struct loop_task end;
};

struct session_socket {
	struct daemon *d;
	int dirfd;
	struct loop_watch watch;
	struct list conns;
	unsigned int n_conns;
	int spare; /* a descriptor to give up, so that who waits to be accepted can be sent away */
	bool full; /* and it was said */
	atomic_uint sessions;
	_Atomic pid_t pid;
	int *waiting; /* connections kept for the farewell */
	size_t n_waiting;
	char buf[MOMENT_MSG_MAX];
};

/* ---- the end of a connection ---------------------------------------------------------------- */

static void conn_free(struct conn *c)
{
	struct session_socket *s = c->s;

	if (list_linked(&c->link))
		s->n_conns--;
	list_remove(&c->link);
	if (c->session) {
		session_destroy(c->session);
		if (atomic_fetch_sub(&s->sessions, 1) == 1 && atomic_load(&s->d->detaching))
			daemon_raise(s->d, EVENT_IDLE);
	}
	if (c->watch.fd >= 0)
		close(c->watch.fd);
	if (c->pid_watch.fd >= 0)
		close(c->pid_watch.fd);
	while (c->first) {
		struct queued *q = c->first;

		c->first = q->next;
		free(q);
	}
	free(c);
}

static void conn_unwatch(struct conn *c)
{
	struct loop *loop = engine_loop(c->s->d->e);

	loop_unwatch(loop, &c->watch);
	if (c->pid_watch.fd >= 0)
		loop_unwatch(loop, &c->pid_watch);
}

static void conn_end_run(struct loop_task *task)
{
	conn_free(container_of(task, struct conn, end));
}

static void conn_end(struct conn *c)
{
	if (c->ending)
		return;
	c->ending = true;
	conn_unwatch(c);
	c->end.run = conn_end_run;
	loop_post(engine_loop(c->s->d->e), &c->end);
}

/* ---- replies -------------------------------------------------------------------------------- */

/* True: the socket has it, or the connection is over. */
static bool send_packet(struct conn *c, const void *msg, size_t len, bool pass_arena)
{
	union {
		char space[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} control;
	struct iovec iov = {(void *)(uintptr_t)msg, len};
	struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
	int fd = arena_fd(engine_arena(c->s->d->e));
	struct cmsghdr *cm;
	ssize_t n;

	if (pass_arena) {
		memset(&control, 0, sizeof(control));
		m.msg_control = control.space;
		m.msg_controllen = sizeof(control.space);
		cm = CMSG_FIRSTHDR(&m);
		cm->cmsg_level = SOL_SOCKET;
		cm->cmsg_type = SCM_RIGHTS;
		cm->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(cm), &fd, sizeof(fd));
	}
	do
		n = sendmsg(c->watch.fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL);
	while (n < 0 && errno == EINTR);
	if (n >= 0)
		return true;
	if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS || errno == ENOMEM)
		return false;
	conn_end(c);
	return true;
}

static void conn_reply(void *arg, const void *msg, size_t len, bool pass_arena)
{
	struct conn *c = arg;
	struct queued *q;

	if (c->ending || (!c->first && send_packet(c, msg, len, pass_arena)))
		return;
	q = c->queued + len > QUEUE_MOST ? NULL : malloc(sizeof(*q) + len);
	if (!q) {
		log_warning("session of pid %d: it does not read its replies; ended", (int)c->pid);
		conn_end(c);
		return;
	}
	q->next = NULL;
	q->len = len;
	q->pass_arena = pass_arena;
	memcpy(q->bytes, msg, len);
	if (!c->first)
		loop_rewatch(engine_loop(c->s->d->e), &c->watch, EPOLLOUT);
	*c->last = q;
	c->last = &q->next;
	c->queued += len;
}

static void conn_flush(struct conn *c)
{
	while (c->first && !c->ending) {
		struct queued *q = c->first;

		if (!send_packet(c, q->bytes, q->len, q->pass_arena))
			return;
		c->first = q->next;
		c->queued -= q->len;
		free(q);
	}
	if (!c->first)
		c->last = &c->first;
	if (!c->ending)
		loop_rewatch(engine_loop(c->s->d->e), &c->watch, EPOLLIN);
}

/* ---- requests ------------------------------------------------------------------------------- */

static void refuse(struct conn *c, const struct moment_msg *m)
{
	struct {
		struct moment_reply r;
		char text[192];
	} reply = {.r = {.h = *m, .status = -EACCES}};

	reply.r.text_len = (uint32_t)snprintf(
		reply.text, sizeof(reply.text),
		"this mount belongs to uid %u; uid %u cannot attach to it (only its owner and root can)",
		c->s->d->uid, c->uid);
	reply.r.h.flags = 0;
	reply.r.h.len = (uint32_t)(sizeof(reply.r) + reply.r.text_len);
	send_packet(c, &reply, reply.r.h.len, false);
	conn_end(c);
}

static int start_session(struct conn *c)
{
	struct session_opts o = {
		.pid = c->pid, .uid = c->uid, .gid = c->gid, .reply = conn_reply, .arg = c};
	int res = session_create(c->s->d->e, &o, &c->session);

	if (res < 0) {
		c->session = NULL;
		return res;
	}
	atomic_store(&c->s->pid, c->pid);
	atomic_fetch_add(&c->s->sessions, 1);
	return 0;
}

static void take_message(struct conn *c, const char *buf, size_t len)
{
	const struct moment_msg *m = (const void *)buf;
	int res = 0;

	if (len < sizeof(*m)) {
		conn_end(c);
		return;
	}
	if (c->refused) {
		refuse(c, m);
		return;
	}
	if (!c->session)
		res = start_session(c);
	if (!res)
		res = session_receive(c->session, buf, len);
	if (res < 0) {
		log_warning("session of pid %d: %s; ended", (int)c->pid,
			    res == -EPROTO ? "it sent something that is no message"
					   : strerror(-res));
		conn_end(c);
	}
}

static void conn_ready(struct loop_watch *w, uint32_t events)
{
	struct conn *c = container_of(w, struct conn, watch);
	struct session_socket *s = c->s;

	if (c->first) {
		if (events & (EPOLLHUP | EPOLLERR))
			conn_end(c);
		else
			conn_flush(c);
		return;
	}
	for (int i = 0; i < BATCH && !c->ending && !c->first; i++) {
		ssize_t n = recv(w->fd, s->buf, sizeof(s->buf), MSG_DONTWAIT | MSG_TRUNC);

		if (n < 0 && (errno == EAGAIN || errno == EINTR))
			return;
		if (n <= 0) {
			conn_end(c);
			return;
		}
		/* Longer than any message may be: to the session it is malformed. */
		take_message(c, s->buf, n > (ssize_t)sizeof(s->buf) ? 0 : (size_t)n);
	}
}

static void pid_ready(struct loop_watch *w, uint32_t events)
{
	(void)events;
	conn_end(container_of(w, struct conn, pid_watch));
}

/* ---- new connections ------------------------------------------------------------------------ */

/* A descriptor of the process at the other end, or -1 where the kernel has none to give. */
static int peer_pidfd(int fd, pid_t pid)
{
	socklen_t len = sizeof(int);
	int pidfd;

	if (!getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &len))
		return pidfd;
	return pid > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
}

static void accept_one(struct session_socket *s, int fd)
{
	struct loop *loop = engine_loop(s->d->e);
	struct conn *c = calloc(1, sizeof(*c));
	socklen_t len = sizeof(struct ucred);
	struct ucred cred;

	if (!c || getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len)) {
		close(fd);
		free(c);
		return;
	}
	c->s = s;
	c->pid = cred.pid;
	c->uid = cred.uid;
	c->gid = cred.gid;
	c->refused = cred.uid != s->d->uid && cred.uid != 0;
	c->last = &c->first;
	list_init(&c->link);
	c->watch = (struct loop_watch){.fd = fd, .events = EPOLLIN, .ready = conn_ready};
	c->pid_watch = (struct loop_watch){
		.fd = peer_pidfd(fd, cred.pid), .events = EPOLLIN, .ready = pid_ready};
	list_init(&c->watch.link);
	list_init(&c->pid_watch.link);
	if (loop_watch(loop, &c->watch) < 0)
		goto out_free;
	if (c->pid_watch.fd >= 0 && loop_watch(loop, &c->pid_watch) < 0)
		goto out_unwatch;
	list_push_back(&s->conns, &c->link);
	s->n_conns++;
	return;

out_unwatch:
	loop_unwatch(loop, &c->watch);
out_free:
	conn_free(c);
}

/*
 * One connection too many: hung up on. Left in the queue it would wake the loop thread for ever;
 * fd < 0: there is no descriptor to accept it with but the spare one.
 */
static void send_away(struct session_socket *s, int fd)
{
	if (fd < 0 && s->spare >= 0) {
		close(s->spare);
		s->spare = -1;
		fd = accept4(s->watch.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	}
	if (fd >= 0)
		close(fd);
	if (s->spare < 0)
		s->spare = open("/dev/null", O_RDONLY | O_CLOEXEC);
	if (!s->full)
		log_warning("%u connections to %s are open and one more was refused", s->n_conns,
			    MOMENT_SOCKET_NAME);
	s->full = true;
}

static void listen_ready(struct loop_watch *w, uint32_t events)
{
	struct session_socket *s = container_of(w, struct session_socket, watch);

	(void)events;
	for (int i = 0; i < BATCH; i++) {
		int fd = accept4(w->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

		if (fd < 0) {
			if (errno == EMFILE || errno == ENFILE)
				send_away(s, -1);
			return;
		}
		if (s->n_conns < CONNS_MOST) {
			s->full = false;
			accept_one(s, fd);
		} else {
			send_away(s, fd);
		}
	}
}

/* ---- start and stop ------------------------------------------------------------------------- */

/*
 * A socket's address holds 108 bytes; BACKING's path may be longer, so the directory is named by
 * its descriptor. The inode gets the mode of the socket, which so is never open to others.
 */
static int bind_socket(struct session_socket *s, int fd)
{
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	struct stat st;

	/* What a daemon that was killed has left. Anything else of that name is somebody's. */
	if (!fstatat(s->dirfd, MOMENT_SOCKET_NAME, &st, AT_SYMLINK_NOFOLLOW) &&
	    !S_ISSOCK(st.st_mode))
		return -ENOTSOCK;
	if (unlinkat(s->dirfd, MOMENT_SOCKET_NAME, 0) && errno != ENOENT)
		return -errno;
	snprintf(a.sun_path, sizeof(a.sun_path), "/proc/self/fd/%d/%s", s->dirfd,
		 MOMENT_SOCKET_NAME);
	if (fchmod(fd, 0600) || bind(fd, (struct sockaddr *)&a, sizeof(a)) ||
	    listen(fd, LISTEN_MOST))
		return -errno;
	return 0;
}

struct start {
	struct session_socket *s;
	int res;
};

static void start_fn(void *arg)
{
	struct start *st = arg;

	st->res = loop_watch(engine_loop(st->s->d->e), &st->s->watch);
}

int session_socket_start(struct daemon *d, char *err, size_t errlen)
{
	struct session_socket *s = calloc(1, sizeof(*s));
	struct start st = {.s = s};
	const char *backing = engine_backing(d->e);
	int fd, res;

	if (!s)
		return -ENOMEM;
	s->d = d;
	list_init(&s->conns);
	s->spare = open("/dev/null", O_RDONLY | O_CLOEXEC);
	s->dirfd = fcntl(engine_dirfd(d->e), F_DUPFD_CLOEXEC, 0);
	if (s->dirfd < 0) {
		res = -errno;
		goto out_free;
	}
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0) {
		res = -errno;
		goto out_dir;
	}
	s->watch = (struct loop_watch){.fd = fd, .events = EPOLLIN, .ready = listen_ready};
	list_init(&s->watch.link);
	res = bind_socket(s, fd);
	if (res < 0)
		goto out_fd;
	loop_call(engine_loop(d->e), start_fn, &st);
	res = st.res;
	if (res < 0)
		goto out_fd;
	d->socket = s;
	return 0;

out_fd:
	close(fd);
out_dir:
	close(s->dirfd);
out_free:
	if (s->spare >= 0)
		close(s->spare);
	free(s);
	snprintf(err, errlen, "%s/%s: %s%s", backing, MOMENT_SOCKET_NAME, strerror(-res),
		 res == -ENOTSOCK ? " (remove what is in its place and mount again)" : "");
	return res;
}

unsigned int session_socket_sessions(const struct session_socket *s)
{
	return s ? atomic_load(&s->sessions) : 0;
}

pid_t session_socket_writer(const struct session_socket *s)
{
	return s ? atomic_load(&s->pid) : 0;
}

static void keep_waiting(struct session_socket *s, struct conn *c)
{
	int *grown = realloc(s->waiting, (s->n_waiting + 1) * sizeof(*grown));

	if (!grown)
		return;
	s->waiting = grown;
	s->waiting[s->n_waiting++] = c->watch.fd;
	c->watch.fd = -1;
}

static void stop_fn(void *arg)
{
	struct session_socket *s = arg;

	loop_unwatch(engine_loop(s->d->e), &s->watch);
	list_for_each_safe(l, tmp, &s->conns)
	{
		struct conn *c = list_entry(l, struct conn, link);

		if (c->ending)
			continue; /* its task is on its way, and frees it */
		c->ending = true;
		conn_unwatch(c);
		if (!c->session && !c->refused)
			keep_waiting(s, c);
		conn_free(c);
	}
}

static void nothing(void *arg)
{
	(void)arg;
}

void session_socket_stop(struct session_socket *s)
{
	struct loop *loop = engine_loop(s->d->e);

	unlinkat(s->dirfd, MOMENT_SOCKET_NAME, 0);
	loop_call(loop, stop_fn, s);
	/* Tasks run in the order of posting: after this one, those that were on their way have run.
	 */
	loop_call(loop, nothing, NULL);
	close(s->watch.fd);
	close(s->dirfd);
	if (s->spare >= 0)
		close(s->spare);
	s->d->socket = NULL;
}

void session_socket_farewell(struct session_socket *s, int result, const char *text)
{
	struct {
		struct moment_reply r;
		char text[512];
	} last = {.r = {.status = result}};

	last.r.text_len = (uint32_t)snprintf(last.text, sizeof(last.text), "%s", text);
	last.r.text_len = (uint32_t)min_u64(last.r.text_len, sizeof(last.text) - 1);
	last.r.h.len = (uint32_t)(sizeof(last.r) + last.r.text_len);
	for (size_t i = 0; i < s->n_waiting; i++) {
		send(s->waiting[i], &last, last.r.h.len, MSG_DONTWAIT | MSG_NOSIGNAL);
		close(s->waiting[i]);
	}
	free(s->waiting);
	free(s);
}
