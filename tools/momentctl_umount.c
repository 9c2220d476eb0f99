/* SPDX-License-Identifier: Apache-2.0 */
/*
 * momentctl_umount.c - momentctl umount: commits, unmounts, waits until the backing is released.
 *
 * The kernel decides whether the mount is in use: the plain way is umount(2) itself (through
 * fusermount3 for an ordinary user), after a commit that may still fail with everything in place.
 * --lazy lets the daemon detach the mount under its users.
 *
 * umount(2) returns before the daemon has made its last commit. To learn how that goes, a
 * connection to the session socket is kept open: one that never said HELLO gets the daemon's last
 * word.
 */
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <poll.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "moment/protocol.h"
#include "momentctl.h"

#define HELD_AFTER 5 /* seconds that the kernel has to let go of a mount that nobody has any more */

extern char **environ;

struct umount {
	struct ctl_target t;
	bool lazy, force;
	int pid;	 /* of the daemon as we see it; 0: we do not */
	int sock, pidfd; /* -1: none */
	char *socket_path;
	uint64_t sessions, handles;
};

static int read_status(struct umount *u)
{
	char *text = ctl_read(&u->t, "status");
	struct ctl_json *j = text ? ctl_json_open(text) : NULL;
	const char *path;
	struct stat st;
	uint64_t ns;

	if (!j) {
		ctl_error("%s/.moment/status: %s", u->t.mount, text ? "not JSON" : strerror(errno));
		free(text);
		return CTL_CANNOT;
	}
	/* It tells its own number, which is another process's in another pid namespace. */
	ns = ctl_json_u64(j, "$.mount.pid_namespace");
	u->pid = !ns || (!stat("/proc/self/ns/pid", &st) && st.st_ino == ns)
			 ? (int)ctl_json_u64(j, "$.mount.pid")
			 : 0;
	u->sessions = ctl_json_u64(j, "$.mount.sessions");
	u->handles = ctl_json_u64(j, "$.mount.handles");
	path = ctl_json_get(j, "$.mount.socket");
	free(u->socket_path);
	u->socket_path = *path ? strdup(path) : NULL;
	ctl_json_close(j);
	free(text);
	return CTL_OK;
}

/* The path may be longer than an address holds: so through the directory's descriptor. */
static int connect_socket(const char *path)
{
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	char *copy = strdup(path);
	int dir = copy ? open(dirname(copy), O_PATH | O_DIRECTORY | O_CLOEXEC) : -1;
	int fd = dir < 0 ? -1 : socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	snprintf(a.sun_path, sizeof(a.sun_path), "/proc/self/fd/%d/%s", dir, MOMENT_SOCKET_NAME);
	if (fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof(a))) {
		close(fd);
		fd = -1;
	}
	if (dir >= 0)
		close(dir);
	free(copy);
	return fd;
}

static int commit(struct umount *u)
{
	int res;

	ctl_progress("%s: committing ...", u->t.mount);
	res = ctl_command(&u->t, "commit");
	ctl_progress_end();
	/* Read-only, or torn (then unmounting drops what is torn): nothing that could be kept is
	 * lost. */
	if (!res || res == -EROFS || res == -ESTALE)
		return CTL_OK;
	ctl_explain(&u->t, "commit", res);
	if (u->force)
		return CTL_OK;
	ctl_error("%s: still mounted, nothing is lost; --force unmounts all the same", u->t.mount);
	return CTL_FAILED;
}

static int run_fusermount(const char *point)
{
	char *argv[] = {"fusermount3", "-u", "--", (char *)(uintptr_t)point, NULL};
	int status;
	pid_t pid;

	if (posix_spawnp(&pid, argv[0], NULL, NULL, argv, environ)) {
		ctl_error("fusermount3 not found: install the package fuse3");
		return CTL_FAILED;
	}
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			return CTL_FAILED;
	return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? CTL_OK : CTL_FAILED;
}

static int unmount(struct umount *u)
{
	int res;

	if (u->lazy) {
		ctl_progress("%s: waiting for its users ...", u->t.mount);
		res = ctl_command(&u->t, u->force ? "detach force" : "detach");
		/* Detached, but a step is open or torn: the daemon's last word tells what it dropped. */
		if (!res || (u->force && (res == -EBUSY || res == -ESTALE)))
			return CTL_OK;
		ctl_explain(&u->t, "detach", res);
		return CTL_FAILED;
	}
	if (!umount2(u->t.mount, UMOUNT_NOFOLLOW))
		return CTL_OK;
	if (errno == EPERM && run_fusermount(u->t.mount) == CTL_OK)
		return CTL_OK;
	if (errno != EBUSY) {
		ctl_error("%s: could not be unmounted: %s", u->t.mount, strerror(errno));
		return CTL_FAILED;
	}
	read_status(u); /* how many now */
	ctl_error("%s: in use (%llu open files; fuser -vm '%s' tells by whom); committed, but still "
		  "mounted. --lazy detaches it now and gives its users 10 seconds",
		  u->t.mount, (unsigned long long)u->handles, u->t.mount);
	return CTL_FAILED;
}

/* ---- who else has the mount ---- */

#define HELD_TELL_MOST 8u

struct held {
	unsigned int n;
};

static void tell_holder(void *arg, const struct ctl_elsewhere *e)
{
	struct held *h = arg;

	if (h->n++ >= HELD_TELL_MOST)
		return;
	if (e->here)
		ctl_error("  it is also mounted at %s: umount '%s'", e->point, e->point);
	else
		ctl_error("  pid %d (%s) has it at %s in another mount namespace: end that process, or "
			  "nsenter -t %d -m umount '%s'",
			  e->pid, e->comm, e->point, e->pid, e->point);
}

/* The kernel has it as long as anybody has the mount. */
static bool is_held(const struct umount *u)
{
	char path[64];

	snprintf(path, sizeof(path), "/sys/class/bdi/%s", u->t.device);
	return u->t.device[0] && !access(path, F_OK);
}

static int tell_held(const struct umount *u)
{
	struct held h = {0};
	char daemon[64] = "the daemon, which is in another pid namespace,";

	if (u->pid)
		snprintf(daemon, sizeof(daemon), "the daemon (pid %d)", u->pid);
	ctl_progress_end();
	ctl_error("%s: committed and unmounted here, but others still have this mount, so %s goes on "
		  "serving %s:",
		  u->t.mount, daemon, u->t.backing);
	ctl_each_of_device(u->t.device, tell_holder, &h);
	if (h.n > HELD_TELL_MOST)
		ctl_error("  and %u more", h.n - HELD_TELL_MOST);
	if (!h.n)
		ctl_error("  processes of other users, or in a container, that cannot be seen from here");
	if (u->pid)
		ctl_error("  or end it under them: kill %d (it commits, and they have 10 seconds)",
			  u->pid);
	return CTL_HELD;
}

/* The last word: how the last commit went. Without it, that the process is gone. */
static int wait_released(struct umount *u)
{
	struct pollfd p[2] = {{.fd = u->sock, .events = POLLIN},
			      {.fd = u->pidfd, .events = POLLIN}};
	struct {
		struct moment_reply r;
		char text[1024];
	} last;
	time_t start = time(NULL);
	ssize_t n;

	while (poll(p, 2, 500) <= 0) {
		/* A detached mount goes when its users do, or are out of time. */
		if (!u->lazy && time(NULL) - start >= HELD_AFTER && is_held(u))
			return tell_held(u);
		ctl_progress("%s: unmounted; the daemon (pid %d) is committing, %ld s", u->t.mount,
			     u->pid, (long)(time(NULL) - start));
	}
	ctl_progress_end();
	if (u->sock < 0)
		return CTL_OK; /* a read-only mount: there was nothing to commit */
	n = recv(u->sock, &last, sizeof(last) - 1, MSG_DONTWAIT);
	if (n < (ssize_t)sizeof(last.r)) {
		ctl_error(
			"%s: unmounted, but the daemon (pid %d) ended without saying how its last commit "
			"went; the next mount of %s shows the last one that succeeded",
			u->t.mount, u->pid, u->t.backing);
		return CTL_FAILED;
	}
	((char *)&last)[n] = '\0';
	if (last.r.status < 0) {
		ctl_error("%s: unmounted, but %s", u->t.mount, last.text);
		return CTL_FAILED;
	}
	return CTL_OK;
}

/* /proc/PID/root/mnt is /mnt there. */
static const char *point_there(const struct ctl_target *t)
{
	const char *root = strstr(t->mount, "/root/");

	return root ? root + strlen("/root") : t->mount;
}

int cmd_umount(int argc, char **argv)
{
	struct umount u = {.sock = -1, .pidfd = -1};
	const struct ctl_option options[] = {
		{"lazy", &u.lazy,
		 "detach it now, also with files open; their users get 10 seconds"},
		{"force", &u.force,
		 "also when a session is attached or the commit fails; implies --lazy"},
		{NULL, NULL, NULL}};
	socklen_t len = sizeof(struct ucred);
	struct ucred peer;
	const char *arg;
	int res = ctl_parse(argc, argv, "PATH",
			    "Commits, unmounts, and waits until the last commit is durable and the "
			    "backing is released.",
			    options, NULL, &arg);

	if (res >= 0)
		return res;
	u.lazy |= u.force;
	res = ctl_find(arg, &u.t);
	if (!res && u.t.elsewhere) {
		ctl_error("%s is mounted in another mount namespace only, that of pid %d: nsenter -t %d "
			  "-m momentctl umount '%s'",
			  arg, u.t.elsewhere, u.t.elsewhere,
			  point_there(&u.t));
		res = CTL_CANNOT;
	}
	if (!res)
		res = read_status(&u);
	/* That of a trainer which has just ended goes a moment after its process. */
	for (int i = 0; !res && u.sessions && !u.force && i < 20; i++) {
		usleep(50000);
		res = read_status(&u);
	}
	if (res)
		goto out_path;
	if (u.sessions && !u.force) {
		ctl_error(
			"%s: %llu sessions are attached (momentctl status tells whose); end them first, or "
			"use --force, which drops what they have not committed",
			u.t.mount, (unsigned long long)u.sessions);
		res = CTL_FAILED;
		goto out_path;
	}
	if (u.socket_path)
		u.sock = connect_socket(u.socket_path);
	if (u.sock >= 0 && !getsockopt(u.sock, SOL_SOCKET, SO_PEERCRED, &peer, &len))
		u.pid = peer.pid;
	u.pidfd = u.pid ? (int)syscall(SYS_pidfd_open, u.pid, 0) : -1;
	if (u.sock < 0 && u.pidfd < 0)
		ctl_error("%s: cannot watch the daemon (pid %d) end: %s; going on", u.t.mount,
			  u.pid, strerror(errno));
	res = commit(&u);
	if (!res)
		res = unmount(&u);
	if (!res && (u.sock >= 0 || u.pidfd >= 0))
		res = wait_released(&u);
	if (u.sock >= 0)
		close(u.sock);
	if (u.pidfd >= 0)
		close(u.pidfd);
out_path:
	free(u.socket_path);
	return res;
}
