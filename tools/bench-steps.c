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
	unsigned int steps, commit_every;
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
	      "  --ram SIZE       embedded: the RAM tier, bytes (64 MiB)\n"
	      "  --steps N        measured steps, after two to warm up (7)\n"
	      "  --commit-every N start a commit behind every Nth step (0: only at the end)\n"
	      "  --data PATH      session, mmap or embedded (whatever works best)\n"
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

int main(int argc, char **argv)
{
	static const struct option longopts[] = {
		{"model", 1, NULL, 'm'},     {"backing", 1, NULL, 'b'},
		{"mount", 1, NULL, 'M'},     {"ram", 1, NULL, 'r'},
		{"steps", 1, NULL, 's'},     {"commit-every", 1, NULL, 'c'},
		{"data", 1, NULL, 'd'},	     {"threads", 1, NULL, 't'},
		{"no-hints", 0, NULL, 'n'},  {"json", 0, NULL, 'j'},
		{"bf16", 0, NULL, 'h'},	     {"help", 0, NULL, '?'},
		{"drive-dir", 1, NULL, 'D'}, {NULL, 0, NULL, 0}};
	static struct bench b = {.o = {.ram = 64u << 20, .steps = 7, .hints = true}};
	const char *drive_dir = NULL;
	double step[64], limit[64], elapsed, bytes;
	struct moment_info before, after;
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
			b.o.commit_every = (unsigned int)strtoul(optarg, NULL, 10);
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
						 .p_dtype = dtype,
						 .g_dtype = dtype,
						 .optim = &adam};
	}
	bytes = (double)b.numel * 8;
	b.drive = drive_open(drive_dir ? drive_dir : b.o.backing, (uint64_t)bytes);
	if (!b.drive)
		return 1;
	run_step(&b, false);
	run_step(&b, false);
	if (moment_commit(b.s, 1))
		die("commit");
	run_step(&b, false);
	moment_get_info(b.s, &before);
	elapsed = 0;
	for (unsigned int i = 0; i < b.o.steps; i++) {
		step[i] = run_step(&b, b.o.commit_every && i % b.o.commit_every == 0);
		elapsed += step[i];
		limit[i] = drive_mix(b.drive);
		if (!b.o.json)
			fprintf(stderr, "\rstep %u/%u: %.3f s, the drive alone %.3f s ", i + 1,
				b.o.steps, step[i], limit[i]);
	}
	if (!b.o.json)
		fputc('\n', stderr);
	moment_get_info(b.s, &after);
	{
		double s = bench_median(step, b.o.steps), l = bench_median(limit, b.o.steps);
		double rd = (double)(after.read_bytes - before.read_bytes) / b.o.steps;
		double wr = (double)(after.written_bytes - before.written_bytes) / b.o.steps;
		/* What the RAM tier kept need not be moved: the limit is for the bytes that were.
		 */
		double share = (rd + wr) / (2 * bytes);

		printf("%s: %u parameters, %.0f MiB of state, path %s, %s\n", b.o.model, b.n,
		       bytes / (1 << 20), moment_data_path(b.s), moment_version());
		printf("step %.3f s: read %.0f MiB, wrote %.0f MiB, %.2f GB/s\n", s, rd / (1 << 20),
		       wr / (1 << 20), (rd + wr) / s / 1e9);
		printf("drive alone, all state read and written: %.3f s, %.2f GB/s\n", l,
		       2 * bytes / l / 1e9);
		printf("rate of the step over that of the drive: %.2f\n",
		       ((rd + wr) / s) / (2 * bytes / l));
		if (b.o.json)
			printf("{\"step_seconds\":%.4f,\"drive_seconds\":%.4f,\"read_bytes\":%.0f,"
			       "\"written_bytes\":%.0f,\"ratio\":%.4f,\"moved\":%.4f,\"elapsed\":%.4f}\n",
			       s, l, rd, wr, ((rd + wr) / s) / (2 * bytes / l), share, elapsed);
	}
	drive_close(b.drive);
	if (moment_close(b.s))
		die("close");
	return 0;
}
