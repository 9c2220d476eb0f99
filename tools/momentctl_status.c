/* SPDX-License-Identifier: Apache-2.0 */
/*
 * momentctl_status.c - momentctl status: .moment/status for people, or as it is with --json.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "momentctl.h"

static bool is_true(struct ctl_json *j, const char *path)
{
	return ctl_json_u64(j, path) != 0; /* SQLite's true is 1 */
}

static const char *or_none(const char *s)
{
	return *s ? s : "none";
}

/* "huge pages: collapsed", and why not better. */
static void reason(struct ctl_json *j, const char *path)
{
	const char *why = ctl_json_get(j, path);

	if (*why)
		printf(" (%s)", why);
}

static void print_step(struct ctl_json *j)
{
	printf("step     committed %s", or_none(ctl_json_get(j, "$.step.committed")));
	printf(", last boundary %s", or_none(ctl_json_get(j, "$.step.boundary")));
	printf(", open %s\n", or_none(ctl_json_get(j, "$.step.open")));
	if (is_true(j, "$.step.torn"))
		puts("         TORN: a session ended inside a step; `momentctl rollback` returns to the "
		     "last commit,\n         and so does the next session");
}

static void print_commit(struct ctl_json *j)
{
	uint64_t when = ctl_json_u64(j, "$.commit.time");
	const char *error;

	printf("commit   number %s", ctl_json_get(j, "$.commit.sequence"));
	if (when)
		printf(", %lld s ago", (long long)(time(NULL) - (time_t)when));
	printf(", %s took %s s", ctl_size(ctl_json_u64(j, "$.commit.last_bytes")),
	       ctl_json_get(j, "$.commit.last_seconds"));
	puts(is_true(j, "$.commit.running") ? ", one is running" : "");
	error = ctl_json_get(j, "$.commit.error");
	if (*error)
		printf("         FAILED %s in a row, for %s s: %s: %s\n",
		       ctl_json_get(j, "$.commit.failures"),
		       ctl_json_get(j, "$.commit.failing_seconds"),
		       ctl_json_get(j, "$.commit.cause"), error);
	if (is_true(j, "$.commit.steps_refused"))
		puts("         no step begins before a commit succeeds");
}

static void print_ram(struct ctl_json *j)
{
	printf("ram      %s, in use %s, not committed %s; pages: %s",
	       ctl_size(ctl_json_u64(j, "$.ram.bytes")),
	       ctl_size(ctl_json_u64(j, "$.ram.used_bytes")),
	       ctl_size(ctl_json_u64(j, "$.ram.dirty_bytes")), ctl_json_get(j, "$.ram.pages"));
	reason(j, "$.ram.pages_reason");
	printf(is_true(j, "$.ram.registered") ? ", pinned" : ", not pinned");
	reason(j, "$.ram.registered_reason");
	putchar('\n');
}

static void print_drive(struct ctl_json *j)
{
	uint64_t limit = ctl_json_u64(j, "$.pool.limit_bytes");

	printf("pool     %s in use of %s", ctl_size(ctl_json_u64(j, "$.pool.used_bytes")),
	       ctl_size(ctl_json_u64(j, "$.pool.bytes")));
	if (limit)
		printf(" (at most %s)", ctl_size(limit));
	printf(", room for %s more, on %s\n", ctl_size(ctl_json_u64(j, "$.pool.available_bytes")),
	       ctl_json_get(j, "$.pool.host_fs"));
	printf("io       %s", ctl_json_get(j, "$.io.engine"));
	reason(j, "$.io.engine_reason");
	printf(is_true(j, "$.io.direct") ? ", direct" : ", through the page cache");
	reason(j, "$.io.direct_reason");
	printf("; read %s, written %s since the mount\n",
	       ctl_size(ctl_json_u64(j, "$.io.read_bytes")),
	       ctl_size(ctl_json_u64(j, "$.io.write_bytes")));
	if (is_true(j, "$.scrub.running"))
		printf("scrub    %s of %s\n", ctl_size(ctl_json_u64(j, "$.scrub.done_bytes")),
		       ctl_size(ctl_json_u64(j, "$.scrub.total_bytes")));
	else if (ctl_json_u64(j, "$.scrub.finished"))
		printf("scrub    the last one found %s damaged extents\n",
		       ctl_json_get(j, "$.scrub.damaged"));
}

static void print_session(void *arg, const char *value)
{
	struct ctl_json *j = ctl_json_open(value);

	(void)arg;
	if (!j)
		return;
	printf("session  %s (%s%s)\n", or_none(ctl_json_get(j, "$.client")),
	       ctl_json_u64(j, "$.pid") ? "pid " : "a process in another pid namespace, a container",
	       ctl_json_u64(j, "$.pid") ? ctl_json_get(j, "$.pid") : "");
	ctl_json_close(j);
}

static void print_error(void *arg, const char *value)
{
	struct ctl_json *j = ctl_json_open(value);
	const char *file;

	(void)arg;
	if (!j)
		return;
	printf("error    %s: %s", ctl_json_get(j, "$.what"), ctl_json_get(j, "$.error"));
	file = ctl_json_get(j, "$.file");
	if (*file)
		printf("; %s, %s bytes", file, ctl_json_get(j, "$.length"));
	if (*ctl_json_get(j, "$.offset"))
		printf(" at %s", ctl_json_get(j, "$.offset"));
	putchar('\n');
	ctl_json_close(j);
}

/* Of what takes its time only. */
static void print_oldest(struct ctl_json *j)
{
	double seconds = strtod(ctl_json_get(j, "$.oldest_request.seconds"), NULL);

	if (seconds < 1)
		return;
	printf("waits    %s", ctl_json_get(j, "$.oldest_request.kind"));
	printf(" (%s): %.0f s, for ", ctl_json_get(j, "$.oldest_request.file"), seconds);
	printf("%s\n", ctl_json_get(j, "$.oldest_request.waits_for"));
}

static void print(const struct ctl_target *t, struct ctl_json *j)
{
	printf("mount    %s of %s (pid %s%s)\n", t->mount, t->backing,
	       ctl_json_get(j, "$.mount.pid"), is_true(j, "$.readonly") ? ", read-only" : "");
	printf("files    %s, %s; %s open, %s for writing\n", ctl_json_get(j, "$.catalog.files"),
	       ctl_size(ctl_json_u64(j, "$.catalog.bytes")), ctl_json_get(j, "$.mount.handles"),
	       ctl_json_get(j, "$.mount.writers"));
	print_step(j);
	print_commit(j);
	print_ram(j);
	printf("memory   %s for the names and maps of %s files and directories; %s\n",
	       ctl_size(ctl_json_u64(j, "$.memory.bytes")), ctl_json_get(j, "$.memory.files"),
	       ctl_json_get(j, "$.mount.memory"));
	print_drive(j);
	ctl_json_each(j, "$.sessions", print_session, NULL);
	print_oldest(j);
	if (ctl_json_u64(j, "$.errors.uncured_blocks"))
		printf("error    %s blocks could not be written and are kept in RAM\n",
		       ctl_json_get(j, "$.errors.uncured_blocks"));
	ctl_json_each(j, "$.errors.last", print_error, NULL);
}

int cmd_status(int argc, char **argv)
{
	bool json = false;
	const struct ctl_option options[] = {
		{"json", &json, "for programs: what .moment/status says"}, {NULL, NULL, NULL}};
	struct ctl_target t;
	struct ctl_json *j;
	const char *arg;
	char *text;
	int res = ctl_parse(argc, argv, "PATH",
			    "What the mount is doing: steps, commits, memory, the drive, sessions, "
			    "errors.",
			    options, NULL, &arg);

	if (res >= 0)
		return res;
	res = ctl_find(arg, &t);
	if (res)
		return res;
	text = ctl_read(&t, "status");
	if (!text) {
		ctl_error("%s/.moment/status: %s", t.mount, strerror(errno));
		return CTL_CANNOT;
	}
	j = ctl_json_open(text);
	if (!j) {
		ctl_error("%s/.moment/status: not JSON; --json shows it as it is", t.mount);
		res = json ? CTL_OK : CTL_CANNOT;
	}
	if (json)
		printf("%s%s", text, text[0] && text[strlen(text) - 1] == '\n' ? "" : "\n");
	else if (j)
		print(&t, j);
	ctl_json_close(j);
	free(text);
	return res;
}
