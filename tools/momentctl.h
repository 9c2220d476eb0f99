/* SPDX-License-Identifier: Apache-2.0 */
/*
 * momentctl.h - what the commands of momentctl share. A command gets its own argv (argv[0] is its
 * name) and returns the exit status. One thread.
 */
#ifndef TOOLS_MOMENTCTL_H
#define TOOLS_MOMENTCTL_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CTL_OK	   0
#define CTL_FAILED 1 /* it was tried, and the answer is no: refused, failed, problems found */
#define CTL_HELD   3 /* umount: unmounted here, but others still have the mount, so it is still served */
#define CTL_CANNOT 2 /* it could not be tried: usage, nothing mounted there, no permission */

int cmd_status(int argc, char **argv);
int cmd_ls(int argc, char **argv);
int cmd_commit(int argc, char **argv);
int cmd_umount(int argc, char **argv);
int cmd_rollback(int argc, char **argv);
int cmd_scrub(int argc, char **argv);
int cmd_trim(int argc, char **argv);
int cmd_fsck(int argc, char **argv);

void ctl_error(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

struct ctl_option {
	const char *name; /* "json", for --json */
	bool *value;
	const char *help;
};

/*
 * Takes --options and exactly one operand (or none, if `fallback`: then *operand is that). Returns
 * -1 to go on, else the exit status. `about` is the text of --help.
 */
int ctl_parse(int argc, char **argv, const char *operand_name, const char *about,
	      const struct ctl_option *options, const char *fallback, const char **operand);

/* A living momentfs mount. */
struct ctl_target {
	char mount[PATH_MAX];
	char backing[PATH_MAX];
	char path[PATH_MAX]; /* what was named, absolute, if inside the mount; else the mount */
	char device[24];     /* "major:minor" */
	int elsewhere;	     /* a process in whose mount namespace only it is mounted; 0: it is here */
};

/* From any path in a mount, or from a BACKING that is mounted. CTL_OK or CTL_CANNOT, and it was
 * said why. */
int ctl_find(const char *arg, struct ctl_target *t);

/* A mount as a process sees it whose mount namespace is another than ours, or as we see it. */
struct ctl_elsewhere {
	int pid; /* 0: ourselves */
	bool here;
	char comm[32];
	const char *point; /* there */
};

/* Calls fn for each mount of "major:minor", or of a backing, in each mount namespace that some
 * process is in and that may be looked at. True: there was one. */
bool ctl_each_of_device(const char *device, void (*fn)(void *arg, const struct ctl_elsewhere *e),
			void *arg);
bool ctl_each_of_backing(const char *backing, void (*fn)(void *arg, const struct ctl_elsewhere *e),
			 void *arg);

/* .moment/NAME, malloc'ed and NUL-terminated; NULL and errno. */
char *ctl_read(const struct ctl_target *t, const char *name);
/* One command to .moment/control: 0 or -errno. Returns when it is done. */
int ctl_command(const struct ctl_target *t, const char *command);
/* Says what status tells about the command that has just failed with `res`. */
void ctl_explain(const struct ctl_target *t, const char *command, int res);

/* Runs on a terminal only: the line is rewritten in place, and wiped with NULL. */
void ctl_progress(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void ctl_progress_end(void);

/* "1.5 GiB" in one of a few static buffers. */
const char *ctl_size(uint64_t bytes);

/* Values of a JSON text by path ("$.mount.pid", in SQLite's words). */
struct ctl_json;
struct ctl_json *ctl_json_open(const char *text); /* NULL: it is none */
void ctl_json_close(struct ctl_json *j);
/* The value as text, valid for the next seven calls; "" if there is none. */
const char *ctl_json_get(struct ctl_json *j, const char *path);
uint64_t ctl_json_u64(struct ctl_json *j, const char *path); /* 0 if there is none */
/* Calls fn for each element of the array. */
void ctl_json_each(struct ctl_json *j, const char *path, void (*fn)(void *arg, const char *value),
		   void *arg);

#endif
