/* SPDX-License-Identifier: Apache-2.0 */
/*
 * momentctl.c - looks at a momentfs mount and tells it what to do. This file: the table of
 * commands, and the small things they share (options, progress, messages). The mount is found in
 * momentctl_target.c; each larger command has a file of its own.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "momentctl.h"

static const struct command {
	const char *name, *operand, *help;
	int (*run)(int argc, char **argv);
} commands[] = {
	{"status", "PATH", "what the mount is doing", cmd_status},
	{"ls", "[PATH]", "the files: bytes, type, shape, step, how much is in RAM", cmd_ls},
	{"commit", "PATH", "make everything durable now", cmd_commit},
	{"umount", "PATH", "commit, unmount, wait until the backing is released", cmd_umount},
	{"rollback", "PATH", "go back to the last commit", cmd_rollback},
	{"scrub", "PATH", "read and check every extent on the drive", cmd_scrub},
	{"trim", "PATH", "give the free end of the pool back to the host's disk", cmd_trim},
	{"fsck", "BACKING", "check a backing that is not mounted", cmd_fsck},
};

#define N_COMMANDS (sizeof(commands) / sizeof(commands[0]))

static bool progress_shown;

void ctl_progress(const char *fmt, ...)
{
	va_list ap;

	if (!isatty(STDERR_FILENO))
		return;
	fputs("\r\033[K", stderr);
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fflush(stderr);
	progress_shown = true;
}

void ctl_progress_end(void)
{
	if (progress_shown)
		fputs("\r\033[K", stderr);
	progress_shown = false;
}

void ctl_error(const char *fmt, ...)
{
	va_list ap;

	ctl_progress_end();
	fputs("momentctl: ", stderr);
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputc('\n', stderr);
}

const char *ctl_size(uint64_t bytes)
{
	static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
	static char buffers[8][32];
	static unsigned int next;
	char *buf = buffers[next++ % 8];
	double v = (double)bytes;
	size_t u = 0;

	while (v >= 1024 && u + 1 < sizeof(units) / sizeof(units[0])) {
		v /= 1024;
		u++;
	}
	snprintf(buf, sizeof(buffers[0]), u && v < 10 ? "%.1f %s" : "%.0f %s", v, units[u]);
	return buf;
}

static void print_command_help(const char *name, const char *operand, const char *about,
			       const struct ctl_option *options, bool optional)
{
	printf("Usage: momentctl %s", name);
	for (const struct ctl_option *o = options; o && o->name; o++)
		printf(" [--%s]", o->name);
	printf(optional ? " [%s]\n\n%s\n" : " %s\n\n%s\n", operand, about);
	for (const struct ctl_option *o = options; o && o->name; o++)
		printf("%s  --%-8s %s\n", o == options ? "\n" : "", o->name, o->help);
}

static bool set_option(const struct ctl_option *options, const char *word)
{
	for (const struct ctl_option *o = options; o && o->name; o++) {
		if (strcmp(word, o->name))
			continue;
		*o->value = true;
		return true;
	}
	return false;
}

int ctl_parse(int argc, char **argv, const char *operand_name, const char *about,
	      const struct ctl_option *options, const char *fallback, const char **operand)
{
	bool only_operands = false;

	*operand = NULL;
	for (int i = 1; i < argc; i++) {
		if (!only_operands && argv[i][0] == '-' && argv[i][1]) {
			if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) {
				print_command_help(argv[0], operand_name, about, options,
						   fallback != NULL);
				return CTL_OK;
			}
			if (!strcmp(argv[i], "--")) {
				only_operands = true;
			} else if (strncmp(argv[i], "--", 2) || !set_option(options, argv[i] + 2)) {
				ctl_error("%s: unknown option '%s' (see momentctl %s --help)",
					  argv[0], argv[i], argv[0]);
				return CTL_CANNOT;
			}
		} else if (*operand) {
			ctl_error("%s: one argument too many: '%s'", argv[0], argv[i]);
			return CTL_CANNOT;
		} else {
			*operand = argv[i];
		}
	}
	if (!*operand)
		*operand = fallback;
	if (!*operand) {
		ctl_error("%s: %s is missing (see momentctl %s --help)", argv[0], operand_name,
			  argv[0]);
		return CTL_CANNOT;
	}
	return -1;
}

static void print_help(void)
{
	puts("Usage: momentctl COMMAND [OPTIONS] PATH\n\n"
	     "PATH is the mount point of a momentfs (or anything in it), or its BACKING.\n");
	for (size_t i = 0; i < N_COMMANDS; i++)
		printf("  %-9s %-8s %s\n", commands[i].name, commands[i].operand, commands[i].help);
	puts("\nmomentctl COMMAND --help tells more.\n"
	     "Exit status: 0 done, 1 failed, refused or problems found, 2 could not be tried.");
}

int main(int argc, char **argv)
{
	if (argc >= 2 && (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h"))) {
		print_help();
		return CTL_OK;
	}
	if (argc >= 2 && (!strcmp(argv[1], "--version") || !strcmp(argv[1], "-V"))) {
		printf("momentctl %s\n", VERSION);
		return CTL_OK;
	}
	for (size_t i = 0; argc >= 2 && i < N_COMMANDS; i++)
		if (!strcmp(argv[1], commands[i].name))
			return commands[i].run(argc - 1, argv + 1);
	if (argc < 2)
		ctl_error("which command? (see momentctl --help)");
	else
		ctl_error("unknown command '%s' (see momentctl --help)", argv[1]);
	return CTL_CANNOT;
}
