/* SPDX-License-Identifier: Apache-2.0 */
/*
 * momentctl_fsck.c - `momentctl fsck BACKING`: the check of a backing that nobody has open, shown
 * as lines or as JSON. The checking itself is src/engine/fsck.c.
 */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/fsck.h"
#include "engine/names.h"
#include "momentctl.h"

static const char about[] =
	"Checks a backing directory that is not mounted and not in use: the superblock and the\n"
	"catalog, that every block lies in the pool and no two at one place, and every byte against\n"
	"its checksum. Without --repair nothing is changed.\n\n"
	"--repair mends only what loses nothing that could still be read, and says what it does: it\n"
	"removes leftovers of a creation that was cut short, writes a damaged copy of the superblock\n"
	"anew, drops extended attributes that belong to no file, and goes back to an older commit if\n"
	"the catalog has lost later ones and all of the older one's data are right.\n\n"
	"Exit status: 0 clean, or all problems repaired; 1 problems listed; 2 could not run.";

struct output {
	bool json;
	unsigned int n;
	time_t shown; /* progress, at most once a second */
};

/* A JSON string; bytes that are not UTF-8 as Python's surrogateescape has them. */
static void put_string(const char *s)
{
	size_t len = strlen(s);

	putchar('"');
	while (len) {
		unsigned char c = (unsigned char)*s;
		size_t n = names_utf8_len(s, len);

		if (!n)
			printf("\\udc%02x", c);
		else if (c == '"' || c == '\\')
			printf("\\%c", c);
		else if (c < 0x20 || c == 0x7f)
			printf("\\u%04x", c);
		else
			fwrite(s, 1, n, stdout);
		n += !n;
		s += n;
		len -= n;
	}
	putchar('"');
}

static void show_problem(void *arg, const struct fsck_problem *p)
{
	struct output *o = arg;

	ctl_progress_end();
	o->n++;
	if (!o->json) {
		printf("%s: %s%s%s", p->kind, p->path, *p->path ? ": " : "", p->text);
		if (*p->fix)
			printf(" [%s: %s]", p->fixed ? "repaired" : "--repair would", p->fix);
		putchar('\n');
		return;
	}
	printf("%s\n    {\"kind\": \"%s\", \"inode\": %" PRIu64 ", \"path\": ", o->n > 1 ? "," : "",
	       p->kind, p->ino);
	put_string(p->path);
	printf(", \"text\": ");
	put_string(p->text);
	printf(", \"fix\": ");
	put_string(p->fix);
	printf(", \"fixed\": %s}", p->fixed ? "true" : "false");
}

static void show_progress(void *arg, uint64_t done, uint64_t total)
{
	struct output *o = arg;
	time_t now = time(NULL);

	if (now == o->shown)
		return;
	o->shown = now;
	ctl_progress("%s of %s checked", ctl_size(done), ctl_size(total));
}

static void show_result(const struct output *o, const struct fsck_result *r)
{
	if (o->json) {
		printf("%s],\n  \"problems_found\": %" PRIu64 ", \"problems_repaired\": %" PRIu64
		       ",\n  \"files\": %" PRIu64 ", \"directories\": %" PRIu64
		       ", \"extents\": %" PRIu64 ", \"bytes\": %" PRIu64
		       ", \"bytes_checked\": %" PRIu64 ",\n  \"commit\": ",
		       o->n ? "\n  " : "", r->problems, r->fixed, r->files, r->dirs, r->extents,
		       r->bytes, r->checked);
		printf(r->has_catalog ? "%" PRIu64 ", " : "null, ", r->commit_seq);
		printf(r->has_step ? "\"step\": %" PRIu64 "\n}\n" : "\"step\": null\n}\n", r->step);
		return;
	}
	if (r->has_catalog)
		printf("commit %" PRIu64 ", %" PRIu64 " files, %" PRIu64
		       " directories, %s in %" PRIu64 " extents, %s compared with checksums\n",
		       r->commit_seq, r->files, r->dirs, ctl_size(r->bytes), r->extents,
		       ctl_size(r->checked));
	if (r->problems)
		printf("%" PRIu64 " problem%s, %" PRIu64 " repaired\n", r->problems,
		       r->problems == 1 ? "" : "s", r->fixed);
	else
		puts("clean");
}

int cmd_fsck(int argc, char **argv)
{
	struct output o = {0};
	struct fsck_opts opts = {
		.problem = show_problem,
		.progress = show_progress,
		.arg = &o,
	};
	const struct ctl_option options[] = {
		{"json", &o.json, "the result as one JSON object"},
		{"repair", &opts.repair, "mend what can be mended without loss (see above)"},
		{"no-data", &opts.no_data, "leave out comparing the data with their checksums"},
		{NULL, NULL, NULL},
	};
	struct fsck_result result;
	char err[2 * PATH_MAX + 800];
	int res = ctl_parse(argc, argv, "BACKING", about, options, NULL, &opts.dir);

	if (res >= 0)
		return res;
	if (o.json) {
		printf("{\n  \"backing\": ");
		put_string(opts.dir);
		printf(",\n  \"problems\": [");
	}
	res = fsck_run(&opts, &result, err, sizeof(err));
	ctl_progress_end();
	if (res < 0) {
		if (o.json) {
			printf("%s],\n  \"error\": ", o.n ? "\n  " : "");
			put_string(err);
			puts("\n}");
		}
		ctl_error("fsck: %s", err);
		return CTL_CANNOT;
	}
	show_result(&o, &result);
	return result.problems == result.fixed ? CTL_OK : CTL_FAILED;
}
