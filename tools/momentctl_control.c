/* SPDX-License-Identifier: Apache-2.0 */
/*
 * momentctl_control.c - the commands that are one word to .moment/control: commit, rollback, scrub, trim.
 * The word is written by a child, so that the parent can show progress while the write waits.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "momentctl.h"

/* One line about what is going on, from status. */
static void show(const struct ctl_target *t, const char *command, time_t start)
{
	char *text = isatty(STDERR_FILENO) ? ctl_read(t, "status") : NULL;
	struct ctl_json *j = text ? ctl_json_open(text) : NULL;
	uint64_t done, total;

	if (j) {
		done = ctl_json_u64(j, "$.scrub.done_bytes");
		total = ctl_json_u64(j, "$.scrub.total_bytes");
		if (!strcmp(command, "scrub") && total)
			ctl_progress("%s: %s of %s checked", t->mount, ctl_size(done),
				     ctl_size(total));
		else
			ctl_progress("%s: %s, %ld s", t->mount, command,
				     (long)(time(NULL) - start));
	}
	ctl_json_close(j);
	free(text);
}

/* 0 or -errno. */
static int command_with_progress(const struct ctl_target *t, const char *command)
{
	time_t start = time(NULL);
	int fds[2], res = -ECHILD;
	struct pollfd p;
	pid_t pid;

	if (pipe(fds))
		return -errno;
	pid = fork();
	if (pid < 0) {
		res = -errno;
		close(fds[0]);
		close(fds[1]);
		return res;
	}
	if (pid == 0) {
		res = ctl_command(t, command);
		if (write(fds[1], &res, sizeof(res)) != sizeof(res))
			_exit(1);
		_exit(0);
	}
	close(fds[1]);
	p = (struct pollfd){.fd = fds[0], .events = POLLIN};
	while (poll(&p, 1, 500) == 0)
		show(t, command, start);
	ctl_progress_end();
	if (read(fds[0], &res, sizeof(res)) != sizeof(res))
		res = -ECHILD;
	close(fds[0]);
	while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
		;
	return res;
}

/* How much a trim has given back, from its message. */
static void tell_trimmed(const struct ctl_target *t)
{
	char *text = ctl_read(t, "status");
	struct ctl_json *j = text ? ctl_json_open(text) : NULL;
	unsigned long long bytes;

	if (j && sscanf(ctl_json_get(j, "$.mount.control.message"), "trim: %llu", &bytes) == 1)
		printf("%s: %s given back to the host, the pool has %s\n", t->mount,
		       ctl_size(bytes), ctl_size(ctl_json_u64(j, "$.pool.bytes")));
	ctl_json_close(j);
	free(text);
}

static int run(int argc, char **argv, const char *about)
{
	const char *arg;
	struct ctl_target t;
	int res = ctl_parse(argc, argv, "PATH", about, NULL, NULL, &arg);

	if (res >= 0)
		return res;
	res = ctl_find(arg, &t);
	if (res)
		return res;
	res = command_with_progress(&t, argv[0]);
	if (res == -EACCES || res == -EPERM) {
		ctl_error("%s: only the owner of the mount and root may do that", t.mount);
		return CTL_CANNOT;
	}
	if (res < 0) {
		ctl_explain(&t, argv[0], res);
		return CTL_FAILED;
	}
	if (!strcmp(argv[0], "trim"))
		tell_trimmed(&t);
	return CTL_OK;
}

int cmd_commit(int argc, char **argv)
{
	return run(
		argc, argv,
		"Makes durable what can be: all files, and a session's at its last step boundary.\n"
		"Returns when it is on the drive.");
}

int cmd_rollback(int argc, char **argv)
{
	return run(
		argc, argv,
		"Drops everything since the last commit. Refused while anything is open for writing "
		"or a\nsession has a step open.");
}

int cmd_scrub(int argc, char **argv)
{
	return run(
		argc, argv,
		"Reads every committed extent and checks its hash, at low priority; the mount stays "
		"in use.\nExit status 1: some are damaged, and `momentctl status` lists them.");
}

int cmd_trim(int argc, char **argv)
{
	return run(
		argc, argv,
		"Commits, so that what was removed is free, and gives the free space at the end of the "
		"pool\nfile back to the host's disk. Free space between what is stored stays reserved. "
		"Says how much\nit was; unmounting does the same.");
}
