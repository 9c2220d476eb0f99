/* SPDX-License-Identifier: Apache-2.0 */
/*
 * main.c - momentfs: the command line, the background, the process's own settings.
 *
 * In the background the parent waits for one byte, which the child writes when the mount serves;
 * without it, it waits for the child and ends with its status. So whatever goes wrong until then,
 * the caller sees the message and the status.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/checks.h"
#include "daemon/daemon.h"

/* The write end of the pipe to the waiting parent; -1 in the foreground. */
static int ready_fd = -1;

/* The mount serves: the caller may go on, and messages go where those of daemons go. */
static void ready(void)
{
	int null;

	if (ready_fd < 0)
		return;
	log_to_syslog();
	setsid();
	null = open("/dev/null", O_RDWR);
	if (null >= 0) {
		dup2(null, STDIN_FILENO);
		dup2(null, STDOUT_FILENO);
		dup2(null, STDERR_FILENO);
		if (null > STDERR_FILENO)
			close(null);
	}
	if (write(ready_fd, "r", 1) != 1)
		log_warning("nobody waits for the mount any more");
	close(ready_fd);
}

/* The parent: returns the exit status. */
static int wait_ready(int fd, pid_t child)
{
	char byte;
	ssize_t n;
	int status;

	do
		n = read(fd, &byte, 1);
	while (n < 0 && errno == EINTR);
	if (n == 1)
		return 0;
	while (waitpid(child, &status, 0) < 0)
		if (errno != EINTR)
			return EXIT_RUNTIME;
	if (WIFEXITED(status))
		return WEXITSTATUS(status);
	log_error("the daemon was ended by signal %d", WTERMSIG(status));
	return EXIT_RUNTIME;
}

/* Returns -1 in the child, else the exit status of the parent. */
static int go_background(void)
{
	int fds[2];
	pid_t pid;

	if (pipe2(fds, O_CLOEXEC)) {
		log_error("pipe: %s", strerror(errno));
		return EXIT_RUNTIME;
	}
	pid = fork();
	if (pid < 0) {
		log_error("fork: %s", strerror(errno));
		return EXIT_RUNTIME;
	}
	if (pid > 0) {
		close(fds[1]);
		return wait_ready(fds[0], pid);
	}
	close(fds[0]);
	ready_fd = fds[1];
	return -1;
}

/* A relative path would mean something else after chdir("/"). */
static int make_absolute(char **path)
{
	char *cwd, *abs;

	if (!*path || (*path)[0] == '/')
		return 0;
	cwd = getcwd(NULL, 0);
	if (!cwd || asprintf(&abs, "%s/%s", cwd, *path) < 0) {
		free(cwd);
		return -ENOMEM;
	}
	free(cwd);
	free(*path);
	*path = abs;
	return 0;
}

static int block_signals(void)
{
	sigset_t set;

	signal(SIGPIPE, SIG_IGN);
	signal(SIGXFSZ, SIG_IGN); /* a limit of file sizes is an error like any other: EFBIG */
	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGHUP);
	sigprocmask(SIG_BLOCK, &set, NULL);
	return signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

int main(int argc, char **argv)
{
	struct options o;
	struct daemon d = {.o = &o, .bracket.watch.fd = -1};
	char *backing = NULL, *mountpoint = NULL;
	int status = options_parse(argc, argv, &o);
	pthread_condattr_t ca;
	int signal_fd;

	if (status >= 0)
		goto out_options;
	log_set_debug(o.debug);
	log_take_fuse();
	status = check_paths(&o, &backing, &mountpoint);
	if (!status)
		status = check_fuse(&o);
	if (status)
		goto out_paths;
	if (make_absolute(&o.trace) < 0) {
		status = EXIT_RUNTIME;
		goto out_paths;
	}
	if (!o.foreground) {
		status = go_background();
		if (status >= 0)
			goto out_paths;
	}
	signal_fd = block_signals();
	if (signal_fd < 0 || chdir("/")) {
		log_error("cannot start: %s", strerror(errno));
		status = EXIT_RUNTIME;
		goto out_paths;
	}
	steady_begin();
	d.mountpoint = mountpoint;
	d.uid = geteuid();
	d.gid = getegid();
	pthread_mutex_init(&d.lock, NULL);
	pthread_condattr_init(&ca);
	pthread_condattr_setclock(&ca, CLOCK_MONOTONIC);
	pthread_cond_init(&d.drained, &ca);
	list_init(&d.lost);
	status = life_run(&d, backing, signal_fd, ready);
	lost_fini(&d);
	close(signal_fd);
out_paths:
	free(backing);
	free(mountpoint);
out_options:
	options_fini(&o);
	return status;
}
