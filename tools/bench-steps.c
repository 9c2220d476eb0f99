/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench-steps.c - optimizer steps over a model's whole state, next to what the drive can do in the
 * same run.
 *
 * Weights and gradients are in RAM, the two moments of each parameter behind momentfs. A step reads
 * and writes what the RAM tier does not keep; the limit is the time that the drive takes for the
 * same bytes, read and written together, O_DIRECT, from huge pages. Steps and limit runs alternate;
 * medians are compared.
 */
#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bench-drive.h"
#include "moment/moment.h"

#define PARAMS_MAX 4096u

struct options {
	const char *model, *backing, *mount, *data;
	uint64_t ram;
	unsigned int steps;
	const char *mode;
	int threads;
	bool hints, json, bf16;
};

struct bench {
	struct options o;
	struct moment_param param[PARAMS_MAX];
	struct moment_item item[PARAMS_MAX];
	uint64_t shape[PARAMS_MAX][8];
	unsigned int n;
	uint64_t numel;
	struct moment_session *s;
	struct drive *drive;
	uint64_t step;
};

static void usage(FILE *f)
{
	fputs("usage: bench-steps --model FILE.tsv (--backing DIR | --mount MOUNT) [options]\n"
	      "  --ram BYTES      embedded: the RAM tier (64 MiB)\n"
	      "  --steps N        measured rounds, after three steps to warm up (7)\n"
	      "  --mode MODE      steps: next to the drive alone; commits: with a commit beside each step and\n"
	      "                   without; full: a commit of everything dirty next to a bare write (steps)\n"
	      "  --data PATH      session, mmap or embedded (whatever works best)\n"
	      "  --drive-dir DIR  where the drive alone is measured (the backing)\n"
	      "  --threads N      for computing (all CPUs)\n"
	      "  --no-hints       look ahead at nothing\n"
	      "  --bf16           bf16 weights and gradients, no master weights\n"
	      "  --json           one JSON object on the last line\n",
	      f);
}

static void die(const char *what)
{
	fprintf(stderr, "bench-steps: %s: %s\n", what, moment_error());
	exit(1);
}

static int read_model(struct bench *b)
{
	FILE *f = fopen(b->o.model, "r");
	char line[4096];

	if (!f) {
		perror(b->o.model);
		return -1;
	}
	while (fgets(line, sizeof(line), f) && b->n < PARAMS_MAX) {
		char name[1024], dims[256];
		struct moment_param *p = &b->param[b->n];
		uint64_t numel = 1;

		if (line[0] == '#' || sscanf(line, "%1023s %255s", name, dims) != 2 ||
		    dims[0] < '0' || dims[0] > '9')
			continue;
		p->name = strdup(name);
		for (char *d = strtok(dims, "x"); d && p->ndim < 8; d = strtok(NULL, "x")) {
			b->shape[b->n][p->ndim] = strtoull(d, NULL, 10);
			numel *= b->shape[b->n][p->ndim++];
		}
		p->shape = b->shape[b->n];
		p->numel = numel;
		b->numel += numel;
		b->n++;
	}
	fclose(f);
	return b->n ? 0 : -1;
}

/* Weights and gradients, on huge pages where possible. */
static void *array(uint64_t bytes, unsigned int seed, bool zero)
{
	float *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED) {
		perror("mmap");
		exit(1);
	}
	madvise(p, bytes, MADV_HUGEPAGE);
	if (zero) {
		memset(p, 0, bytes);
		return p;
	}
	for (uint64_t i = 0; i < bytes / 4; i++) {
		seed = seed * 1664525u + 1013904223u;
		p[i] = (float)(seed >> 8) / (1 << 24) - 0.5f;
	}
	return p;
}

static double run_step(struct bench *b, bool commit)
{
	double t = bench_now();

	b->step++;
	if (moment_step(b->s, b->step, b->item, b->n, commit ? MOMENT_STEP_COMMIT : 0))
		die("step");
	return bench_now() - t;
}

/* Steps, each next to the drive alone. */
static void mode_steps(struct bench *b)
{
	double step[64], limit[64], bytes = (double)b->numel * 8;
	struct moment_info before, after;
	double s, l, rd, wr;

	moment_get_info(b->s, &before);
	for (unsigned int i = 0; i < b->o.steps; i++) {
		step[i] = run_step(b, false);
		limit[i] = drive_mix(b->drive);
		if (!b->o.json)
			fprintf(stderr, "\rstep %u/%u: %.3f s, the drive alone %.3f s ", i + 1,
				b->o.steps, step[i], limit[i]);
	}
	if (!b->o.json)
		fputc('\n', stderr);
	moment_get_info(b->s, &after);
	s = bench_median(step, b->o.steps);
	l = bench_median(limit, b->o.steps);
	rd = (double)(after.read_bytes - before.read_bytes) / b->o.steps;
	wr = (double)(after.written_bytes - before.written_bytes) / b->o.steps;
	printf("step %.3f s: read %.0f MiB, wrote %.0f MiB, %.2f GB/s\n", s, rd / (1 << 20),
	       wr / (1 << 20), (rd + wr) / s / 1e9);
	printf("drive alone, all state read and written: %.3f s, %.2f GB/s\n", l,
	       2 * bytes / l / 1e9);
	printf("rate of the step over that of the drive: %.2f\n",
	       ((rd + wr) / s) / (2 * bytes / l));
	if (b->o.json)
		printf("{\"step_seconds\":%.4f,\"drive_seconds\":%.4f,\"read_bytes\":%.0f,"
		       "\"written_bytes\":%.0f,\"ratio\":%.4f}\n",
		       s, l, rd, wr, ((rd + wr) / s) / (2 * bytes / l));
}

/* Bytes moved a second over a few steps, with or without a commit behind each. */
static double rate(struct bench *b, bool commit)
{
	struct moment_info before, after;
	double t;

	moment_get_info(b->s, &before);
	t = bench_now();
	for (int i = 0; i < 3; i++)
		run_step(b, commit);
	if (commit && moment_commit(b->s, 1))
		die("commit");
	t = bench_now() - t;
	moment_get_info(b->s, &after);
	return (double)(after.read_bytes + after.written_bytes - before.read_bytes -
			before.written_bytes) /
	       t;
}

static void mode_commits(struct bench *b)
{
	double with[64], without[64], ratio[64], r;

	for (unsigned int i = 0; i < b->o.steps; i++) {
		without[i] = rate(b, false);
		with[i] = rate(b, true);
		ratio[i] = with[i] / without[i];
	}
	r = bench_median(ratio, b->o.steps);
	printf("bytes moved, commits beside every step: %.2f GB/s, without: %.2f GB/s, ratio %.2f\n",
	       bench_median(with, b->o.steps) / 1e9, bench_median(without, b->o.steps) / 1e9, r);
	if (b->o.json)
		printf("{\"commit_beside_steps_ratio\":%.4f}\n", r);
}

/* Seconds of a commit that is waited for; *wrote: bytes. */
static double commit_all(struct bench *b, uint64_t *wrote)
{
	struct moment_info before, after;
	double t;

	moment_get_info(b->s, &before);
	t = bench_now();
	if (moment_commit(b->s, 1))
		die("commit");
	t = bench_now() - t;
	moment_get_info(b->s, &after);
	*wrote = after.written_bytes - before.written_bytes;
	return t;
}

/*
 * The RAM tier holds all state, all of it dirty: the commit next to a bare write of as much. Which
 * of the two comes first alternates: what the drive and its host still do of the one before, and
 * what the step left in the caches, must not favour one.
 */
static void mode_full(struct bench *b)
{
	double commit[64], bare[64], c, w;
	uint64_t wrote;

	run_step(b, false);
	commit_all(b, &wrote);
	for (unsigned int i = 0; i < b->o.steps; i++) {
		run_step(b, false);
		if (i % 2)
			bare[i] = drive_write(b->drive, wrote);
		commit[i] = commit_all(b, &wrote);
		if (i % 2 == 0)
			bare[i] = drive_write(b->drive, wrote);
	}
	c = bench_median(commit, b->o.steps);
	w = bench_median(bare, b->o.steps);
	printf("commit of %.0f MiB: %.3f s, a bare O_DIRECT write of as much and one fdatasync: %.3f s, ratio %.2f\n",
	       (double)wrote / (1 << 20), c, w, c / w);
	if (b->o.json)
		printf("{\"commit_full_ratio\":%.4f}\n", c / w);
}

int main(int argc, char **argv)
{
	static const struct option longopts[] = {
		{"model", 1, NULL, 'm'},     {"backing", 1, NULL, 'b'}, {"mount", 1, NULL, 'M'},
		{"ram", 1, NULL, 'r'},	     {"steps", 1, NULL, 's'},	{"mode", 1, NULL, 'c'},
		{"data", 1, NULL, 'd'},	     {"threads", 1, NULL, 't'}, {"no-hints", 0, NULL, 'n'},
		{"json", 0, NULL, 'j'},	     {"bf16", 0, NULL, 'h'},	{"help", 0, NULL, '?'},
		{"drive-dir", 1, NULL, 'D'}, {NULL, 0, NULL, 0}};
	static struct bench b = {
		.o = {.ram = 64u << 20, .steps = 7, .hints = true, .mode = "steps"}};
	const char *drive_dir = NULL;
	double bytes;
	struct moment_optim adam = {.kind = MOMENT_ADAM,
				    .flags = MOMENT_DECOUPLED | MOMENT_BIAS_CORRECTION,
				    .lr = 1e-3,
				    .beta1 = 0.9,
				    .beta2 = 0.999,
				    .eps = 1e-8,
				    .weight_decay = 0.01};
	int ch;

	while ((ch = getopt_long(argc, argv, "", longopts, NULL)) != -1) {
		switch (ch) {
		case 'm':
			b.o.model = optarg;
			break;
		case 'b':
			b.o.backing = optarg;
			break;
		case 'M':
			b.o.mount = optarg;
			break;
		case 'r':
			b.o.ram = strtoull(optarg, NULL, 0);
			break;
		case 's':
			b.o.steps = (unsigned int)strtoul(optarg, NULL, 10);
			break;
		case 'c':
			b.o.mode = optarg;
			break;
		case 'd':
			b.o.data = optarg;
			break;
		case 't':
			b.o.threads = atoi(optarg);
			break;
		case 'n':
			b.o.hints = false;
			break;
		case 'j':
			b.o.json = true;
			break;
		case 'h':
			b.o.bf16 = true;
			break;
		case 'D':
			drive_dir = optarg;
			break;
		default:
			usage(stdout);
			return 0;
		}
	}
	if (!b.o.model || !b.o.backing == !b.o.mount || b.o.steps < 1 || b.o.steps > 64 ||
	    !(drive_dir || b.o.backing)) {
		usage(stderr);
		return 2;
	}
	if (read_model(&b)) {
		fprintf(stderr, "bench-steps: no parameters in %s\n", b.o.model);
		return 1;
	}
	if (moment_open(&(struct moment_open_opts){.size = sizeof(struct moment_open_opts),
						   .flags = MOMENT_OPEN_FRESH |
							    (b.o.hints ? 0 : MOMENT_OPEN_NO_HINTS),
						   .mount = b.o.mount,
						   .backing = b.o.backing,
						   .data = b.o.data,
						   .ram = b.o.ram,
						   .commit_seconds = -1,
						   .threads = b.o.threads},
			&b.s))
		die("open");
	if (moment_register(b.s, b.param, b.n))
		die("register");
	for (unsigned int i = 0; i < b.n; i++) {
		uint32_t dtype = b.o.bf16 ? MOMENT_BF16 : MOMENT_F32;
		uint64_t size = b.param[i].numel * (b.o.bf16 ? 2 : 4);

		b.item[i] = (struct moment_item){.param = b.param[i].handle,
						 .p = array(size, i, b.o.bf16),
						 .g = array(size, ~i, b.o.bf16),
						 .p_numel = b.param[i].numel,
						 .g_numel = b.param[i].numel,
						 .p_dtype = dtype,
						 .g_dtype = dtype,
						 .optim = &adam};
	}
	bytes = (double)b.numel * 8;
	b.drive = drive_open(drive_dir ? drive_dir : b.o.backing, (uint64_t)bytes,
			     !strcmp(b.o.mode, "full"));
	if (!b.drive)
		return 1;
	printf("%s: %u parameters, %.0f MiB of state, path %s, %s\n", b.o.model, b.n,
	       bytes / (1 << 20), moment_data_path(b.s), moment_version());
	run_step(&b, false);
	run_step(&b, false);
	if (moment_commit(b.s, 1))
		die("commit");
	run_step(&b, false);
	if (!strcmp(b.o.mode, "commits"))
		mode_commits(&b);
	else if (!strcmp(b.o.mode, "full"))
		mode_full(&b);
	else
		mode_steps(&b);
	drive_close(b.drive);
	if (moment_close(b.s))
		die("close");
	return 0;
}
