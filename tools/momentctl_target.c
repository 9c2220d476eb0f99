/* SPDX-License-Identifier: Apache-2.0 */
/*
 * momentctl_target.c - finds the mount that is meant, and talks to it through the files of
 * .moment/.
 */
#include <errno.h>
#include <fcntl.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "daemon/mountinfo.h"
#include "momentctl.h"

#define COPY(to, from) snprintf((to), sizeof(to), "%s", (from))

/* Also of what cannot be looked at: a dead mount, or somebody else's. */
static int make_absolute(const char *arg, char *out, size_t len)
{
	char *real = realpath(arg, NULL), *cwd;
	int n;

	if (real) {
		n = snprintf(out, len, "%s", real);
		free(real);
	} else if (errno == ENOENT) {
		ctl_error("%s: does not exist", arg);
		return CTL_CANNOT;
	} else if (arg[0] == '/') {
		n = snprintf(out, len, "%s", arg);
		while (n > 1 && (size_t)n < len && out[n - 1] == '/')
			out[--n] = '\0';
	} else {
		cwd = getcwd(NULL, 0);
		n = snprintf(out, len, "%s/%s", cwd ? cwd : "", arg);
		free(cwd);
	}
	if ((size_t)n >= len) {
		ctl_error("%s: the path is too long", arg);
		return CTL_CANNOT;
	}
	return CTL_OK;
}

static int check_alive(const struct ctl_target *t)
{
	struct statfs s;

	/* Not stat(): that may be answered from what the kernel remembers. */
	if (!statfs(t->mount, &s))
		return CTL_OK;
	if (errno == ENOTCONN || errno == ECONNABORTED)
		ctl_error(
			"%s: the daemon that served this mount has died; clear it with: fusermount3 -u -z "
			"'%s'",
			t->mount, t->mount);
	else if (errno == EACCES)
		ctl_error("%s: this mount is another user's (who mounted without allow_other)",
			  t->mount);
	else
		ctl_error("%s: %s", t->mount, strerror(errno));
	return CTL_CANNOT;
}

/* A mount in another namespace is reached through a process that is in it. */
static void take_elsewhere(void *arg, const struct ctl_elsewhere *e)
{
	struct ctl_target *t = arg;

	if (t->elsewhere)
		return;
	t->elsewhere = e->pid;
	if (snprintf(t->mount, sizeof(t->mount), "/proc/%d/root%s", e->pid, e->point) >=
	    (int)sizeof(t->mount))
		t->elsewhere = 0;
}

int ctl_find(const char *arg, struct ctl_target *t)
{
	static struct mountinfo m;
	char path[PATH_MAX];
	int res = make_absolute(arg, path, sizeof(path));

	memset(t, 0, sizeof(*t));
	if (res)
		return res;
	if (mountinfo_containing(path, &m)) {
		COPY(t->path, path);
	} else if (mountinfo_of_backing(path, &m)) {
		COPY(t->path, m.point);
	} else if (ctl_each_of_backing(path, take_elsewhere, t)) {
		COPY(t->path, t->mount);
		COPY(t->backing, path);
		return check_alive(t);
	} else {
		ctl_error("%s: neither in a momentfs mount nor a backing that is mounted, as far as "
			  "can be seen from here",
			  arg);
		return CTL_CANNOT;
	}
	COPY(t->mount, m.point);
	COPY(t->backing, m.source);
	COPY(t->device, m.device);
	return check_alive(t);
}

static int open_moment(const struct ctl_target *t, const char *name, int flags)
{
	char path[PATH_MAX + 32];

	snprintf(path, sizeof(path), "%s/.moment/%s", t->mount, name);
	return open(path, flags | O_CLOEXEC);
}

char *ctl_read(const struct ctl_target *t, const char *name)
{
	int fd = open_moment(t, name, O_RDONLY);
	size_t len = 0, size = 65536;
	char *text = fd < 0 ? NULL : malloc(size), *grown;
	ssize_t n;

	while (text && (n = read(fd, text + len, size - len - 1)) != 0) {
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0) {
			free(text);
			text = NULL;
			break;
		}
		len += (size_t)n;
		if (size - len - 1 > 0)
			continue;
		size *= 2;
		grown = realloc(text, size);
		if (!grown)
			free(text);
		text = grown;
	}
	if (text)
		text[len] = '\0';
	if (fd >= 0)
		close(fd);
	return text;
}

int ctl_command(const struct ctl_target *t, const char *command)
{
	int fd = open_moment(t, "control", O_WRONLY);
	ssize_t n;
	int res;

	if (fd < 0)
		return -errno;
	n = write(fd, command, strlen(command));
	res = n < 0 ? -errno : 0;
	close(fd);
	return res;
}

void ctl_explain(const struct ctl_target *t, const char *command, int res)
{
	char *text = ctl_read(t, "status");
	struct ctl_json *j = text ? ctl_json_open(text) : NULL;
	const char *message = "";

	if (j && (int)strtol(ctl_json_get(j, "$.mount.control.result"), NULL, 10) == res)
		message = ctl_json_get(j, "$.mount.control.message");
	if (*message)
		ctl_error("%s: %s", t->mount, message);
	else
		ctl_error("%s: %s: %s", t->mount, command, strerror(-res));
	ctl_json_close(j);
	free(text);
}

/* ---- JSON ----------------------------------------------------------------------------------- */

/* SQLite is in the program anyway (fsck), and has the JSON reader. */
struct ctl_json {
	sqlite3 *db;
	const char *text;
	char *values[8];
	unsigned int next;
};

struct ctl_json *ctl_json_open(const char *text)
{
	struct ctl_json *j = calloc(1, sizeof(*j));

	if (!j)
		return NULL;
	j->text = text;
	if (sqlite3_open_v2(":memory:", &j->db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, NULL) !=
		    SQLITE_OK ||
	    strcmp(ctl_json_get(j, "$"), "") == 0) {
		ctl_json_close(j);
		return NULL;
	}
	return j;
}

void ctl_json_close(struct ctl_json *j)
{
	if (!j)
		return;
	sqlite3_close(j->db);
	for (unsigned int i = 0; i < 8; i++)
		free(j->values[i]);
	free(j);
}

const char *ctl_json_get(struct ctl_json *j, const char *path)
{
	unsigned int slot = j->next++ % 8;
	sqlite3_stmt *s;

	free(j->values[slot]);
	j->values[slot] = NULL;
	if (sqlite3_prepare_v2(j->db, "SELECT json_extract(?1, ?2)", -1, &s, NULL) != SQLITE_OK)
		return "";
	sqlite3_bind_text(s, 1, j->text, -1, SQLITE_STATIC);
	sqlite3_bind_text(s, 2, path, -1, SQLITE_STATIC);
	if (sqlite3_step(s) == SQLITE_ROW && sqlite3_column_type(s, 0) != SQLITE_NULL)
		j->values[slot] = strdup((const char *)sqlite3_column_text(s, 0));
	sqlite3_finalize(s);
	return j->values[slot] ? j->values[slot] : "";
}

uint64_t ctl_json_u64(struct ctl_json *j, const char *path)
{
	return strtoull(ctl_json_get(j, path), NULL, 10);
}

void ctl_json_each(struct ctl_json *j, const char *path, void (*fn)(void *arg, const char *value),
		   void *arg)
{
	sqlite3_stmt *s;

	if (sqlite3_prepare_v2(j->db, "SELECT value FROM json_each(?1, ?2)", -1, &s, NULL) !=
	    SQLITE_OK)
		return;
	sqlite3_bind_text(s, 1, j->text, -1, SQLITE_STATIC);
	sqlite3_bind_text(s, 2, path, -1, SQLITE_STATIC);
	while (sqlite3_step(s) == SQLITE_ROW)
		if (sqlite3_column_type(s, 0) != SQLITE_NULL)
			fn(arg, (const char *)sqlite3_column_text(s, 0));
	sqlite3_finalize(s);
}
