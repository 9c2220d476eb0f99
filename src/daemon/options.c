/* SPDX-License-Identifier: Apache-2.0 */
/*
 * options.c - the command line of momentfs.
 *
 * option_table is the one place where mount options are named: the parser, --help and --help-man
 * (the fragment between two markers of momentfs.8; a test compares them) all read it. Runs on the
 * main thread before anything else.
 */
#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/daemon.h"
#include "engine/memory.h"

enum option_kind {
	OPT_SIZE,    /* bytes with a suffix */
	OPT_RAM,     /* the same, or a percentage of the memory */
	OPT_BLOCK,   /* a size that is a power of two */
	OPT_SECONDS, /* or "off" */
	OPT_CHOICE,
	OPT_FLAG,
	OPT_PATH,
};

struct choice {
	const char *word;
	int value;
};

struct option_def {
	const char *name, *arg; /* arg NULL: none */
	enum option_kind kind;
	size_t offset; /* in struct options */
	const struct choice *choices;
	const char *help;
};

static const struct choice io_choices[] = {
	{"auto", IO_AUTO}, {"uring", IO_URING}, {"threads", IO_THREADS}, {NULL, 0}};
static const struct choice direct_choices[] = {
	{"auto", IO_DIRECT_AUTO}, {"on", IO_DIRECT_ON}, {"off", IO_DIRECT_OFF}, {NULL, 0}};
static const struct choice huge_choices[] = {{"auto", ARENA_HUGE_AUTO},
					     {"hugetlb", ARENA_HUGE_HUGETLB},
					     {"off", ARENA_HUGE_OFF},
					     {NULL, 0}};

#define FIELD(f) offsetof(struct options, f)

static const struct option_def option_table[] = {
	{"ram", "SIZE", OPT_RAM, FIELD(ram), NULL,
	 "The budget of the RAM tier, such as 8G, or a percentage of the memory that this process may "
	 "use, such as 50%. Every byte of file data that is kept in memory counts. "
	 "Default: a quarter of that memory, limits of control groups counted. "
	 "All of it is taken before the mount is there; a virtual machine may be slow to give memory "
	 "for the first time, and every 3 seconds momentfs says how far it is."},
	{"block", "SIZE", OPT_BLOCK, FIELD(block), NULL,
	 "The block size of a new backing: a power of two from 64K to 64M. Default: 2M. An existing "
	 "backing keeps the one it was made with."},
	{"size", "SIZE", OPT_SIZE, FIELD(size), NULL,
	 "The most that the pool on the drive may grow to. Default: as much as the drive has."},
	{"commit", "SECONDS", OPT_SECONDS, FIELD(commit_seconds), NULL,
	 "Commit at the first step boundary after so many seconds, or off: only when asked for (by a "
	 "program, momentctl commit, fsync, or unmounting). Default: 60."},
	{"io", "ENGINE", OPT_CHOICE, FIELD(io), io_choices,
	 "How the drive is read and written: auto, uring or threads. auto takes io_uring and falls "
	 "back to threads where the system does not allow it; uring fails there. Default: auto."},
	{"direct", "WHEN", OPT_CHOICE, FIELD(direct), direct_choices,
	 "O_DIRECT to the pool: auto, on or off. auto tries it and falls back to the page cache where "
	 "the file system cannot do it; on fails there. Default: auto."},
	{"hugepages", "KIND", OPT_CHOICE, FIELD(huge), huge_choices,
	 "Huge pages for the RAM tier: auto, hugetlb (only reserved ones, or fail) or off. Default: "
	 "auto."},
	{"ro", NULL, OPT_FLAG, FIELD(readonly), NULL,
	 "Mount read-only; the backing is not changed."},
	{"allow_other", NULL, OPT_FLAG, FIELD(allow_other), NULL,
	 "Other users may use the mount, as the modes of files allow. An ordinary user needs "
	 "user_allow_other in /etc/fuse.conf for it."},
	{"trace", "FILE", OPT_PATH, FIELD(trace), NULL,
	 "Write one line per block and I/O event to FILE."},
};

/* Words of fstab(5) and of mount(8) that are for mount(8) itself, or always so, or about what the
 * files of a mount do not have: access times, set-user-ID bits, devices, symbolic links, locks. */
static const char *const ignored_options[] = {
	"auto",	       "noauto",	"user",		 "nouser",	"users",
	"nousers",     "owner",		"noowner",	 "group",	"nogroup",
	"nofail",      "_netdev",	"defaults",	 "suid",	"nosuid",
	"dev",	       "nodev",		"atime",	 "noatime",	"diratime",
	"nodiratime",  "relatime",	"norelatime",	 "strictatime", "nostrictatime",
	"lazytime",    "nolazytime",	"iversion",	 "noiversion",	"mand",
	"nomand",      "silent",	"loud",		 "symfollow",	"nosymfollow",
	"default_permissions",
};
static const char *const ignored_prefixes[] = {"x-", "X-", "comment=", "user=", "helper=",
					       "uhelper="};

/* Words that the kernel is told when it mounts. Of two that contradict each other the last counts. */
static const char *const kernel_options[] = {"exec", "noexec", "async", "sync", "dirsync"};
static const char *const kernel_prefixes[] = {"context=", "fscontext=", "defcontext=",
					      "rootcontext="};

#define N(a) (sizeof(a) / sizeof((a)[0]))

static const char usage_line[] =
	"Usage: momentfs [-fdhV] [-o OPTION[,OPTION...]] BACKING MOUNTPOINT\n";

static void print_wrapped(const char *text, int indent, int width)
{
	int col = 0;

	while (*text) {
		int word = (int)strcspn(text, " ");

		if (col == 0)
			col = printf("%*s%.*s", indent, "", word, text);
		else if (col + 1 + word > width)
			col = printf("\n%*s%.*s", indent, "", word, text) - 1;
		else
			col += printf(" %.*s", word, text);
		text += word;
		text += strspn(text, " ");
	}
	putchar('\n');
}

static void print_help(void)
{
	printf("%s\n", usage_line);
	print_wrapped(
		"Shows the optimizer state kept in the directory BACKING (made if absent; best on "
		"an NVMe drive) as files under MOUNTPOINT. End it with `momentctl umount "
		"MOUNTPOINT`.",
		0, 80);
	printf("\n  -f              stay in the foreground\n"
	       "  -d              debug: print each request; implies -f\n"
	       "  -o OPTION,...   mount options, below\n"
	       "  -h, --help      this text\n"
	       "  -V, --version   the version\n\nMount options:\n");
	for (size_t i = 0; i < N(option_table); i++) {
		const struct option_def *d = &option_table[i];

		printf("  %s%s%s\n", d->name, d->arg ? "=" : "", d->arg ? d->arg : "");
		print_wrapped(d->help, 6, 80);
	}
	printf("\nA SIZE is a number of bytes, or one with K, M, G or T (powers of 1024).\n"
	       "Exit status: 0 mounted (in the foreground: served and ended well), 1 usage, 2 BACKING,\n"
	       "3 MOUNTPOINT, 4 FUSE cannot be used here, 5 failed while running.\n");
}

/* A percent sign, dash or leading dot needs no care in these texts but for dashes in words. */
static void print_man(void)
{
	for (size_t i = 0; i < N(option_table); i++) {
		const struct option_def *d = &option_table[i];

		if (d->arg)
			printf(".TP\n.BI %s= %s\n", d->name, d->arg);
		else
			printf(".TP\n.B %s\n", d->name);
		for (const char *p = d->help; *p; p++) {
			if (*p == '-')
				fputs("\\-", stdout);
			else if (*p == '.' && p[1] == ' ') {
				fputs(".\n", stdout);
				p++;
			} else
				putchar(*p);
		}
		putchar('\n');
	}
}

/* "12", "64K", "1.5G", "2MiB": 0 and the bytes, or -EINVAL. */
static int parse_size(const char *s, uint64_t *out)
{
	static const char suffixes[] = "KMGTP";
	const char *p;
	char *end;
	double v;
	int shift = 0;

	if (!isdigit((unsigned char)s[0]) || strchr(s, 'x') || strchr(s, 'X'))
		return -EINVAL;
	errno = 0;
	v = strtod(s, &end);
	if (errno || v < 0)
		return -EINVAL;
	if (*end && (p = strchr(suffixes, toupper((unsigned char)*end)))) {
		shift = 10 * (int)(p - suffixes + 1);
		end++;
		if (*end == 'i')
			end++;
		if (*end == 'B')
			end++;
	}
	v *= (double)((uint64_t)1 << shift);
	if (*end || v >= 9.2e18)
		return -EINVAL;
	*out = (uint64_t)v;
	return 0;
}

static int parse_ram(const char *s, uint64_t *out)
{
	char *end;
	struct memory m;
	long percent = strtol(s, &end, 10);

	if (!isdigit((unsigned char)s[0]) || *end != '%')
		return parse_size(s, out);
	if (end[1] || percent < 1 || percent > 100)
		return -EINVAL;
	memory_read("", &m);
	if (m.total == UINT64_MAX)
		return -EINVAL;
	*out = m.total / 100 * (uint64_t)percent;
	return 0;
}

static int bad_value(const struct option_def *d, const char *value, const char *allowed)
{
	log_error("option %s=%s: not valid; allowed: %s", d->name, value, allowed);
	return -EINVAL;
}

static int set_value(struct options *o, const struct option_def *d, const char *value)
{
	void *field = (char *)o + d->offset;
	char words[128] = "";
	uint64_t v;
	char *end;
	long n;

	switch (d->kind) {
	case OPT_FLAG:
		*(bool *)field = true;
		return 0;
	case OPT_PATH:
		if (!*value)
			return bad_value(d, value, "the path of a file");
		free(*(char **)field);
		*(char **)field = strdup(value);
		return *(char **)field ? 0 : -ENOMEM;
	case OPT_SIZE:
		if (parse_size(value, &v) < 0 || !v)
			return bad_value(d, value, "a size such as 512M, 8G or 2T");
		*(uint64_t *)field = v;
		return 0;
	case OPT_RAM:
		if (parse_ram(value, &v) < 0 || !v)
			return bad_value(d, value,
					 "a size such as 512M or 8G, or a percentage of the memory "
					 "from 1% to 100%");
		*(uint64_t *)field = v;
		return 0;
	case OPT_BLOCK:
		if (parse_size(value, &v) < 0 || v < (64u << 10) || v > (64u << 20) ||
		    (v & (v - 1)))
			return bad_value(d, value, "a power of two from 64K to 64M, such as 2M");
		*(uint64_t *)field = v;
		return 0;
	case OPT_SECONDS:
		if (!strcmp(value, "off")) {
			*(int *)field = ENGINE_COMMIT_OFF;
			return 0;
		}
		n = strtol(value, &end, 10);
		if (!isdigit((unsigned char)value[0]) || *end || n < 1 || n > 1000000)
			return bad_value(d, value, "whole seconds from 1 to 1000000, or off");
		*(int *)field = (int)n;
		return 0;
	case OPT_CHOICE:
		for (const struct choice *c = d->choices; c->word; c++) {
			if (!strcmp(value, c->word)) {
				*(int *)field = c->value;
				return 0;
			}
			snprintf(words + strlen(words), sizeof(words) - strlen(words), "%s%s",
				 c == d->choices ? "" : ", ", c->word);
		}
		return bad_value(d, value, words);
	}
	return -EINVAL;
}

static bool is_among(const char *word, const char *const *words, size_t n)
{
	for (size_t i = 0; i < n; i++)
		if (!strcmp(word, words[i]))
			return true;
	return false;
}

static bool starts_among(const char *word, const char *const *prefixes, size_t n)
{
	for (size_t i = 0; i < n; i++)
		if (!strncmp(word, prefixes[i], strlen(prefixes[i])))
			return true;
	return false;
}

/* A word of mount(8): 1 if it was one, 0 if not, -ENOMEM. */
static int parse_generic(struct options *o, const char *word)
{
	if (!strcmp(word, "rw")) {
		o->readonly = false;
		return 1;
	}
	if (is_among(word, ignored_options, N(ignored_options)) ||
	    starts_among(word, ignored_prefixes, N(ignored_prefixes)))
		return 1;
	if (!is_among(word, kernel_options, N(kernel_options)) &&
	    !starts_among(word, kernel_prefixes, N(kernel_prefixes)))
		return 0;
	return fuse_opt_add_opt_escaped(&o->kernel, word) ? -ENOMEM : 1;
}

static int parse_word(struct options *o, char *word)
{
	char *value = strchr(word, '=');
	size_t len = value ? (size_t)(value - word) : strlen(word);
	int res;

	if (!len && !value)
		return 0;
	for (size_t i = 0; i < N(option_table); i++) {
		const struct option_def *d = &option_table[i];

		if (strlen(d->name) != len || memcmp(d->name, word, len))
			continue;
		if (d->arg && !value) {
			log_error("option %s needs a value: %s=%s", d->name, d->name, d->arg);
			return -EINVAL;
		}
		if (!d->arg && value) {
			log_error("option %s takes no value, but '%s' was given", d->name,
				  value + 1);
			return -EINVAL;
		}
		return set_value(o, d, value ? value + 1 : "");
	}
	res = parse_generic(o, word);
	if (res)
		return res < 0 ? res : 0;
	if (!strcmp(word, "remount")) {
		log_error("option remount: not possible; unmount and mount again");
		return -EINVAL;
	}
	fprintf(stderr, "momentfs: unknown option '%s'; there are", word);
	for (size_t i = 0; i < N(option_table); i++)
		fprintf(stderr, "%s %s", i ? "," : "", option_table[i].name);
	fputc('\n', stderr);
	return -EINVAL;
}

/* Options are separated by commas; a backslash takes the next byte as it is. */
static int parse_list(struct options *o, const char *list)
{
	char *word = malloc(strlen(list) + 1);
	size_t n = 0;
	int res = 0;

	if (!word)
		return -ENOMEM;
	for (const char *p = list; !res; p++) {
		if (*p == '\\' && p[1]) {
			word[n++] = *++p;
		} else if (*p && *p != ',') {
			word[n++] = *p;
		} else {
			word[n] = '\0';
			n = 0;
			res = parse_word(o, word);
			if (!*p)
				break;
		}
	}
	free(word);
	return res;
}

static int usage_error(void)
{
	fprintf(stderr, "%sTry momentfs --help.\n", usage_line);
	return EXIT_USAGE;
}

int options_parse(int argc, char **argv, struct options *o)
{
	enum { HELP_MAN = 256 };
	static const struct option long_options[] = {{"help", no_argument, NULL, 'h'},
						     {"version", no_argument, NULL, 'V'},
						     {"help-man", no_argument, NULL, HELP_MAN},
						     {NULL, 0, NULL, 0}};
	const char *name = strrchr(argv[0], '/');
	bool helper = !strncmp(name ? name + 1 : argv[0], "mount.", 6);
	bool fake = false;
	int c;

	memset(o, 0, sizeof(*o));
	o->commit_seconds = 60;
	/* As mount.momentfs, called by mount(8): -s -n -v -N -t mean nothing to us, -f means
	 * "fake". */
	while ((c = getopt_long(argc, argv, helper ? "o:fdhVsnvN:t:" : "o:fdhV", long_options,
				NULL)) != -1) {
		switch (c) {
		case 'o':
			if (parse_list(o, optarg) < 0)
				return EXIT_USAGE;
			break;
		case 'f':
			fake = helper;
			o->foreground = !helper;
			break;
		case 'd':
			o->debug = o->foreground = true;
			break;
		case 'h':
			print_help();
			return 0;
		case 'V':
			printf("momentfs %s, libfuse %s\n", VERSION, fuse_pkgversion());
			return 0;
		case HELP_MAN:
			print_man();
			return 0;
		case '?':
			return usage_error();
		}
	}
	if (argc - optind != 2) {
		if (argc - optind < 2)
			log_error(argc == optind ? "BACKING and MOUNTPOINT are missing"
						 : "MOUNTPOINT is missing");
		else
			log_error("one argument too many: '%s'", argv[optind + 2]);
		return usage_error();
	}
	if (!argv[optind][0] || !argv[optind + 1][0]) {
		log_error("%s is an empty string", argv[optind][0] ? "MOUNTPOINT" : "BACKING");
		return usage_error();
	}
	if (fake)
		return 0;
	o->backing = argv[optind];
	o->mountpoint = argv[optind + 1];
	return -1;
}

void options_fini(struct options *o)
{
	free(o->trace);
	free(o->kernel);
	o->trace = o->kernel = NULL;
}
