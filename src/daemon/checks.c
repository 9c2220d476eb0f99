/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checks.c - refuses what cannot work before anything is opened or mounted. Main thread, no other
 * thread exists (check_fusermount_detach(): later, too).
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/checks.h"
#include "daemon/daemon.h"
#include "daemon/mountinfo.h"

#define CAP_SYS_ADMIN_BIT 21

extern char **environ;

/* ---- paths ---------------------------------------------------------------------------------- */

/* The parent resolved, the last component as it is: also for what does not exist, or is a dead
 * mount. */
static char *resolve_parent(const char *path)
{
	char *copy1 = strdup(path), *copy2 = strdup(path), *out = NULL;
	char *parent = copy1 && copy2 ? realpath(dirname(copy1), NULL) : NULL;
	const char *base;

	if (parent) {
		base = basename(copy2);
		if (asprintf(&out, "%s/%s", strcmp(parent, "/") ? parent : "", base) < 0)
			out = NULL;
	}
	free(parent);
	free(copy1);
	free(copy2);
	return out;
}

static bool is_inside(const char *path, const char *dir)
{
	size_t len = strlen(dir);

	if (!strcmp(dir, "/"))
		return true;
	return !strncmp(path, dir, len) && (path[len] == '\0' || path[len] == '/');
}

/* A daemon that served this mount has gone without unmounting. */
static int clear_dead_mount(const char *point)
{
	struct mountinfo m;

	if (!mountinfo_at(point, &m) || strcmp(m.type, MOMENTFS_TYPE)) {
		log_error(
			"MOUNTPOINT %s: a dead mount that is not momentfs's; clear it with: umount -l '%s'",
			point, point);
		return EXIT_MOUNTPOINT;
	}
	if (umount2(point, MNT_DETACH | UMOUNT_NOFOLLOW) && check_fusermount_detach(point) < 0) {
		log_error("MOUNTPOINT %s: the daemon that served it has died; clear it with: "
			  "fusermount3 -u -z '%s'",
			  point, point);
		return EXIT_MOUNTPOINT;
	}
	log_notice("MOUNTPOINT %s: cleared the mount of %s, whose daemon has died", point,
		   m.source);
	return 0;
}

static int check_empty(const char *point)
{
	DIR *dir = opendir(point);
	struct dirent *e;
	int res = 0;

	if (!dir) {
		log_error("MOUNTPOINT %s: cannot be read: %s", point, strerror(errno));
		return EXIT_MOUNTPOINT;
	}
	while (!res && (e = readdir(dir))) {
		if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, ".."))
			continue;
		log_error(
			"MOUNTPOINT %s: not empty (there is '%s', which the mount would hide); mount on "
			"an empty directory",
			point, e->d_name);
		res = EXIT_MOUNTPOINT;
	}
	closedir(dir);
	return res;
}

/* stat() may be answered from what the kernel remembers; this one asks who serves the mount. */
static bool is_dead(const char *path)
{
	struct statfs s;

	return statfs(path, &s) && errno == ENOTCONN;
}

static int find_mountpoint(const char *path, char **out)
{
	struct stat st;
	int res;

	if (is_dead(path)) {
		*out = resolve_parent(path);
		if (!*out) {
			log_error("MOUNTPOINT %s: %s", path, strerror(errno));
			return EXIT_MOUNTPOINT;
		}
		res = clear_dead_mount(*out);
		if (res)
			return res;
		free(*out);
		*out = NULL;
	}
	if (stat(path, &st)) {
		if (errno == ENOENT)
			log_error("MOUNTPOINT %s: does not exist; make it with: mkdir -p '%s'",
				  path, path);
		else
			log_error("MOUNTPOINT %s: %s", path, strerror(errno));
		return EXIT_MOUNTPOINT;
	}
	if (!S_ISDIR(st.st_mode)) {
		log_error("MOUNTPOINT %s: not a directory", path);
		return EXIT_MOUNTPOINT;
	}
	*out = realpath(path, NULL);
	if (!*out) {
		log_error("MOUNTPOINT %s: %s", path, strerror(errno));
		return EXIT_MOUNTPOINT;
	}
	return 0;
}

static int check_mountpoint(const char *point)
{
	struct mountinfo m;

	if (mountinfo_at(point, &m) && !strcmp(m.type, MOMENTFS_TYPE)) {
		log_error(
			"MOUNTPOINT %s: momentfs is mounted there already, of %s; unmount it with: "
			"momentctl umount '%s'",
			point, m.source, point);
		return EXIT_MOUNTPOINT;
	}
	return check_empty(point);
}

static int check_backing(const char *path, const char *point, char **out)
{
	struct mountinfo m;

	*out = realpath(path, NULL);
	if (!*out && errno == ENOENT)
		*out = resolve_parent(path);
	if (!*out) {
		log_error("BACKING %s: %s", path,
			  errno == ENOENT ? "the folder that should hold it does not exist"
					  : strerror(errno));
		return EXIT_BACKING;
	}
	if (is_inside(*out, point)) {
		log_error(
			"BACKING %s: lies inside MOUNTPOINT %s, which would hide it; keep them apart",
			*out, point);
		return EXIT_BACKING;
	}
	if (is_inside(point, *out)) {
		log_error("BACKING %s: MOUNTPOINT %s lies inside it; keep them apart", *out, point);
		return EXIT_BACKING;
	}
	if (mountinfo_containing(*out, &m)) {
		log_error(
			"BACKING %s: lies inside the momentfs mount at %s; it needs a file system on a "
			"drive",
			*out, m.point);
		return EXIT_BACKING;
	}
	return 0;
}

int check_paths(const struct options *o, char **backing, char **mountpoint)
{
	int res = find_mountpoint(o->mountpoint, mountpoint);

	if (!res)
		res = check_backing(o->backing, *mountpoint, backing);
	return res ? res : check_mountpoint(*mountpoint);
}

/* ---- FUSE ----------------------------------------------------------------------------------- */

bool check_may_mount(void)
{
	unsigned long long caps = 0;
	FILE *f = fopen("/proc/self/status", "re");
	char line[256];

	if (!f)
		return geteuid() == 0;
	while (fgets(line, sizeof(line), f))
		if (sscanf(line, "CapEff: %llx", &caps) == 1)
			break;
	fclose(f);
	return caps >> CAP_SYS_ADMIN_BIT & 1;
}

static bool find_fusermount(char *path, size_t len)
{
	static const char *const dirs[] = {"/usr/bin", "/bin", "/usr/local/bin"};
	const char *p = getenv("PATH");

	for (size_t i = 0; i < sizeof(dirs) / sizeof(dirs[0]); i++) {
		snprintf(path, len, "%s/fusermount3", dirs[i]);
		if (!access(path, X_OK))
			return true;
	}
	while (p && *p) {
		int n = (int)strcspn(p, ":");

		snprintf(path, len, "%.*s/fusermount3", n, p);
		if (n && !access(path, X_OK))
			return true;
		p += n + (p[n] == ':');
	}
	return false;
}

int check_fusermount_detach(const char *point)
{
	char path[PATH_MAX];
	char *argv[] = {path, "-u", "-z", "-q", "--", (char *)(uintptr_t)point, NULL};
	int status, res;
	pid_t pid;

	if (!find_fusermount(path, sizeof(path)))
		return -ENOENT;
	res = posix_spawn(&pid, path, NULL, NULL, argv, environ);
	if (res)
		return -res;
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			return -errno;
	return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : -EPERM;
}

static int check_device(void)
{
	static const char container[] =
		"in a container, start it with: --device /dev/fuse --cap-add SYS_ADMIN";
	struct stat st;
	int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);

	if (fd >= 0) {
		close(fd);
		return 0;
	}
	switch (errno) {
	case ENOENT:
		log_error("no /dev/fuse: the kernel has no FUSE here (as root: modprobe fuse); %s",
			  container);
		break;
	case ENODEV:
	case ENXIO:
		log_error(
			"/dev/fuse is there but the kernel's fuse module is not: modprobe fuse, as root "
			"of the host");
		break;
	case EACCES:
		if (stat("/dev/fuse", &st))
			st.st_mode = 0;
		log_error(
			"no permission to open /dev/fuse (mode %04o, uid %u): as root, chmod 0666 "
			"/dev/fuse, or run momentfs as root",
			st.st_mode & 07777, geteuid());
		break;
	case EPERM:
		log_error(
			"/dev/fuse is there but using it is forbidden (device rules of the container): "
			"%s",
			container);
		break;
	default:
		log_error("/dev/fuse: %s", strerror(errno));
	}
	return EXIT_FUSE;
}

static int check_fusermount(void)
{
	char path[PATH_MAX];
	struct stat st;

	if (geteuid() == 0) {
		log_error(
			"root without the capability CAP_SYS_ADMIN cannot mount; in a container, start "
			"it with: --cap-add SYS_ADMIN (and, where AppArmor is on, --security-opt "
			"apparmor=unconfined)");
		return EXIT_FUSE;
	}
	if (!find_fusermount(path, sizeof(path))) {
		log_error(
			"fusermount3 not found: an ordinary user needs it to mount; install the package "
			"fuse3, or run momentfs as root");
		return EXIT_FUSE;
	}
	if (stat(path, &st) || !(st.st_mode & S_ISUID) || st.st_uid != 0) {
		log_error(
			"%s is not setuid root, so it cannot mount for an ordinary user; as root: chmod "
			"u+s %s",
			path, path);
		return EXIT_FUSE;
	}
	if (prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1) {
		log_error(
			"this process has no_new_privs set, so fusermount3 cannot mount for it; in a "
			"container, leave out --security-opt no-new-privileges");
		return EXIT_FUSE;
	}
	return 0;
}

static int check_allow_other(void)
{
	FILE *f = fopen("/etc/fuse.conf", "re");
	char line[256], word[64];
	bool found = false;

	while (f && !found && fgets(line, sizeof(line), f))
		found = sscanf(line, " %63s", word) == 1 && !strcmp(word, "user_allow_other");
	if (f)
		fclose(f);
	if (!found) {
		log_error(
			"option allow_other: for an ordinary user, /etc/fuse.conf must have a line "
			"`user_allow_other`");
		return EXIT_FUSE;
	}
	return 0;
}

int check_fuse(const struct options *o)
{
	int res = check_device();

	if (!res && !check_may_mount())
		res = check_fusermount();
	if (!res && o->allow_other && geteuid() != 0)
		res = check_allow_other();
	return res;
}
