/* SPDX-License-Identifier: Apache-2.0 */
/*
 * holder.c - one process a backing: an OFD lock on the file `lock`, whose text says who has it.
 *
 * A file can be removed beside its holder; the directory is locked as well (flock), which cannot be
 * taken away. Where a directory cannot be locked (NFS) the file has to do.
 *
 * The lock is what counts; it ends with the process, so there is nothing stale to clear. The text
 * (pid, host, name, state) is for messages. Readers (-o ro) take the lock shared.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <sys/file.h>
#include <unistd.h>

#include "engine/engine_impl.h"
#include "engine/ours.h"

#define LOCK_NAME "lock"

struct holder {
	long pid;
	unsigned long long pid_ns; /* in which the pid means that; 0: not known */
	char host[128], name[256], state[32];
};

uint64_t holder_pid_namespace(void)
{
	struct stat st;

	return stat("/proc/self/ns/pid", &st) ? 0 : (uint64_t)st.st_ino;
}

const char *holder_who(char buf[64], long pid)
{
	if (pid > 0)
		snprintf(buf, 64, "pid %ld on this host", pid);
	else
		snprintf(buf, 64, "a process in another pid namespace, a container");
	return buf;
}

static void write_text(int fd, const char *name, const char *state)
{
	char host[128] = "?", text[512];
	int n;

	gethostname(host, sizeof(host) - 1);
	n = snprintf(text, sizeof(text), "pid %ld\nhost %s\nstate %s\nname %.255s\npidns %llu\n",
		     (long)getpid(), host, state, name ? name : "momentfs",
		     (unsigned long long)holder_pid_namespace());
	if (n > (int)sizeof(text) - 1)
		n = (int)sizeof(text) - 1;
	/* Over the old one, which a reader may be reading: never nothing in between. */
	if (pwrite(fd, text, (size_t)n, 0) != n || ftruncate(fd, n))
		return; /* only a text */
}

static void read_text(int fd, struct holder *h)
{
	char text[512];
	ssize_t n = pread(fd, text, sizeof(text) - 1, 0);

	memset(h, 0, sizeof(*h));
	if (n <= 0)
		return;
	text[n] = 0;
	sscanf(text, "pid %ld\nhost %127[^\n]\nstate %31[^\n]\nname %255[^\n]\npidns %llu", &h->pid,
	       h->host, h->state, h->name, &h->pid_ns);
}

/* What is told of a holder: by its pid, if that means the same here. */
static void tell_busy(const struct holder *h, const char *path, char *err, size_t errlen)
{
	char host[sizeof(h->host)] = "?";

	gethostname(host, sizeof(host) - 1);
	if (h->pid == getpid() && h->pid_ns == holder_pid_namespace() && !strcmp(h->host, host))
		snprintf(err, errlen,
			 "%s is open in this process already, as %s: close that first; one at a "
			 "time may have it",
			 path, h->name);
	else if (!h->pid_ns || h->pid_ns == holder_pid_namespace())
		snprintf(
			err, errlen,
			"%s is in use by %s (pid %ld on host %s): unmount that, or end that process; one "
			"process at a time may have it",
			path, h->name[0] ? h->name : "another process", h->pid, h->host);
	else
		snprintf(
			err, errlen,
			"%s is in use by %s, in another pid namespace (a container) on host %s, where its "
			"pid is %ld: unmount it, or end that process, there; one process at a time may "
			"have it",
			path, h->name[0] ? h->name : "another process", h->host, h->pid);
}

/* The lock file is ours, or gone: whoever has the directory has it without one. */
static int lock_dir(int dirfd, const char *path, const struct engine_opts *opts, bool readonly,
		    char *err, size_t errlen)
{
	unsigned int waited = 0;

	/* One who goes lets go of one after the other. */
	while (flock(dirfd, (readonly ? LOCK_SH : LOCK_EX) | LOCK_NB)) {
		if (errno != EWOULDBLOCK)
			return 0; /* directories cannot be locked here */
		if (waited >= opts->wait_ms && waited >= 500) {
			snprintf(err, errlen,
				 "%s is in use, though nobody holds its lock file: somebody removed %s/" LOCK_NAME
				 " beside the process that has the backing (fuser %s tells which): unmount that, "
				 "or end that process",
				 path, path, path);
			return -EBUSY;
		}
		nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
		waited += 20;
	}
	return 0;
}

int holder_take(int dirfd, const char *path, const struct engine_opts *opts, bool readonly,
		int *lockfd, char *err, size_t errlen)
{
	const char *why = NULL;
	int fd = ours_open(dirfd, LOCK_NAME, readonly ? O_RDONLY : O_RDWR | O_CREAT, &why);
	unsigned int waited = 0;
	bool told = false;
	struct flock lk = {.l_type = readonly ? F_RDLCK : F_WRLCK, .l_whence = SEEK_SET};

	if (fd < 0) {
		int r = fd;

		if (readonly && r == -ENOENT) { /* never held by anybody, or removed */
			*lockfd = -1;
			return lock_dir(dirfd, path, opts, readonly, err, errlen);
		}
		snprintf(err, errlen, "%s/%s: %s%s", path, LOCK_NAME, why ? why : strerror(-r),
			 r == -EACCES
				 ? " (run as the owner of the directory, or choose another one)"
			 : r == -EROFS ? " (mount it with -o ro to look at it)"
				       : "");
		return r;
	}
	while (fcntl(fd, F_OFD_SETLK, &lk)) {
		int r = -errno;
		struct holder h;
		bool closing;

		if (r != -EAGAIN && r != -EACCES) {
			snprintf(err, errlen, "%s/%s: cannot lock: %s", path, LOCK_NAME,
				 strerror(-r));
			close(fd);
			return r;
		}
		read_text(fd, &h);
		closing = opts->wait && !strcmp(h.state, "closing");
		if (!closing && waited >= opts->wait_ms) {
			tell_busy(&h, path, err, errlen);
			close(fd);
			return -EBUSY;
		}
		if (!told && opts->log) {
			char msg[600];

			told = true;
			snprintf(msg, sizeof(msg), "%s is being released by %s (pid %ld): waiting",
				 path, h.name, h.pid);
			opts->log(opts->arg, ENGINE_LOG_NOTICE, msg);
		}
		nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
		waited += 20;
	}
	{
		int r = lock_dir(dirfd, path, opts, readonly, err, errlen);

		if (r) {
			close(fd);
			return r;
		}
	}
	if (!readonly)
		write_text(fd, opts->holder, "running");
	*lockfd = fd;
	return 0;
}

void holder_closing(int lockfd)
{
	struct holder h;

	if (lockfd < 0)
		return;
	read_text(lockfd, &h);
	write_text(lockfd, h.name, "closing");
}

void holder_release(int dirfd, int lockfd)
{
	if (dirfd >= 0)
		flock(dirfd, LOCK_UN);
	/* The text stays: while the lock is not yet gone, somebody may read that it soon will be. */
	if (lockfd >= 0)
		close(lockfd);
}
