/* SPDX-License-Identifier: Apache-2.0 */
/* status.c - looking at mounts from outside: ordinary reads, in the caller's thread. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "lib/error.h"
#include "lib/json.h"
#include "lib/status.h"

static int explain(const char *mount, int res)
{
	if (res == -ENOTCONN)
		return err_set(
			res,
			"the daemon that served %s has ended: clear the dead mount with `fusermount3 -u %s`, then mount again",
			mount, mount);
	if (res == -ENOENT || res == -ENOTDIR)
		return err_set(
			-ENOENT,
			"%s is not a momentfs mount (no .moment/status there): `momentfs BACKING %s` makes it one",
			mount, mount);
	return err_set(res, "%s/.moment/status: %s", mount, strerror(-res));
}

int status_read(const char *mount, char **out)
{
	size_t len = 0, cap = 65536;
	char path[4096], *text;
	int fd, res;

	if (snprintf(path, sizeof(path), "%s/.moment/status", mount) >= (int)sizeof(path))
		return err_set(-ENAMETOOLONG, "%.100s...: too long", mount);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return explain(mount, -errno);
	text = malloc(cap);
	while (text) {
		ssize_t n = read(fd, text + len, cap - len - 1);
		char *more;

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0) {
			res = explain(mount, -errno);
			goto out_free;
		}
		len += (size_t)n;
		text[len] = 0;
		if (n == 0) {
			close(fd);
			*out = text;
			return 0;
		}
		if (cap - len > 1)
			continue;
		cap *= 2;
		more = realloc(text, cap);
		if (!more)
			break;
		text = more;
	}
	res = err_set(-ENOMEM, "out of memory");
out_free:
	free(text);
	close(fd);
	return res;
}

/* Undoes the kernel's octal escapes, in place: of blanks, backslashes, and since 6.0 of '#', which
 * getmntent(3) does not know; nor does that take a line of two long paths. */
static void unescape(char *text)
{
	char *to = text;

	for (; *text; to++) {
		if (text[0] == '\\' && text[1] >= '0' && text[1] <= '3' && text[2] >= '0' &&
		    text[2] <= '7' && text[3] >= '0' && text[3] <= '7') {
			*to = (char)((text[1] - '0') << 6 | (text[2] - '0') << 3 | (text[3] - '0'));
			text += 4;
		} else {
			*to = *text++;
		}
	}
	*to = '\0';
}

char *mount_of_backing(const char *backing)
{
	char *want = realpath(backing, NULL), *found = NULL, *line = NULL;
	FILE *f = want ? fopen("/proc/self/mounts", "re") : NULL;
	size_t size = 0;

	/* source, mount point, type */
	while (f && getline(&line, &size, f) > 0) {
		char *rest = line, *source = strsep(&rest, " "), *point = strsep(&rest, " ");
		char *type = strsep(&rest, " ");

		if (!type || strcmp(type, "fuse.momentfs"))
			continue;
		unescape(source);
		if (strcmp(source, want))
			continue;
		unescape(point);
		free(found); /* the last one is on top of those that a crash may have left */
		found = strdup(point);
	}
	if (f)
		fclose(f);
	free(line);
	free(want);
	return found;
}
