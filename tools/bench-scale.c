/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench-scale.c - what work costs with ten, a hundred, a thousand times as many files or parameters.
 *
 * Each size has a process and a backing of its own, embedded, so that its memory can be told. What
 * should grow with the number is given for one file or parameter, what should not as it is; the
 * ratio of the largest size to the smallest should be 1, and above 2 is told. Times are those of
 * the wall; the fastest of a few where an operation is short.
 */
#include <errno.h>
#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "engine/engine.h"
#include "moment/moment.h"

/* Of the RAM tier. For parameters so small that even the fewest do not fit, so that all sizes do
 * the same: their state passes through it. */
#define RAM_FILES  ((uint64_t)64 << 20)
#define RAM_PARAMS ((uint64_t)16 << 20)
#define FILE_BYTES 100u
#define ELEMENTS   1000u
#define SIZES_MOST 5

enum figure { CREATE, FIND, COMMIT, MOUNT, FILE_MEMORY, REGISTER, RESUME, STEP, PARAM_MEMORY, FIGURES };

static const struct {
	const char *key, *what, *unit;
	bool params;
} figures[FIGURES] = {
	[CREATE] = {"create_us", "create, write 100 bytes and commit, a file", "us", false},
	[FIND] = {"find_us", "find one file by its name", "us", false},
	[COMMIT] = {"commit_ms", "commit of one changed file", "ms", false},
	[MOUNT] = {"mount_us", "mount, a file", "us", false},
	[FILE_MEMORY] = {"file_bytes", "most memory beside ram=, a file", "bytes", false},
	[REGISTER] = {"register_us", "register, a parameter", "us", true},
	[RESUME] = {"resume_us", "open and register again, a parameter", "us", true},
	[STEP] = {"step_us", "a step, state beyond ram=, a parameter", "us", true},
	[PARAM_MEMORY] = {"param_bytes", "most memory beside ram=, a parameter", "bytes", true},
};

static const char *backing;
static uint64_t ram;

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void die(const char *what, const char *why)
{
	fprintf(stderr, "bench-scale: %s: %s\n", what, why);
	exit(1);
}

/* The most that this process has had in memory, the RAM tier left out. */
static double memory(void)
{
	char line[256];
	double kib = 0;
	FILE *f = fopen("/proc/self/status", "r");

	while (f && fgets(line, sizeof(line), f))
		sscanf(line, "VmHWM: %lf", &kib);
	if (f)
		fclose(f);
	return kib * 1024 - (double)ram;
}

static struct engine *mount_it(void)
{
	struct engine_opts o = {.ram = ram,
				.ram_forced = true,
				.commit_seconds = ENGINE_COMMIT_OFF,
				.holder = "bench-scale"};
	struct engine *e;
	char err[1024];

	if (engine_open(backing, &o, &e, err, sizeof(err)))
		die("mount", err);
	return e;
}

static void sync_it(struct engine *e)
{
	int64_t r = engine_call(e, ENGINE_SYNC, 0, 0, 0, 0);

	if (r < 0)
		die("commit", strerror((int)-r));
}

static void do_files(uint32_t n, double *out)
{
	static char data[FILE_BYTES];
	struct engine *e;
	struct ns_attr a = {.ino = 0};
	double t, base, fastest = 1e9;
	char name[32];

	ram = RAM_FILES;
	e = mount_it();
	base = memory();
	t = now();
	for (uint32_t i = 0; i < n; i++) {
		snprintf(name, sizeof(name), "file%u", i);
		if (ns_create(engine_ns(e), NS_ROOT, name, 0644, 0, 0, true, &a) ||
		    engine_pwrite(e, a.ino, data, sizeof(data), 0) != sizeof(data))
			die(name, "cannot be made");
		ns_forget(engine_ns(e), a.ino, 1);
	}
	sync_it(e);
	out[CREATE] = (now() - t) / n * 1e6;
	t = now();
	for (uint32_t i = 0; i < 20000; i++) {
		snprintf(name, sizeof(name), "file%u", (uint32_t)((uint64_t)i * 7919 % n));
		if (ns_lookup(engine_ns(e), NS_ROOT, name, &a))
			die(name, "is not found");
		ns_forget(engine_ns(e), a.ino, 1);
	}
	out[FIND] = (now() - t) / 20000 * 1e6;
	if (ns_lookup(engine_ns(e), NS_ROOT, "file0", &a))
		die("file0", "is not found");
	for (int i = 0; i < 9; i++) {
		data[0] = (char)i;
		t = now();
		if (engine_pwrite(e, a.ino, data, sizeof(data), 0) != sizeof(data))
			die("file0", "cannot be written");
		sync_it(e);
		t = now() - t;
		fastest = t < fastest ? t : fastest;
	}
	out[COMMIT] = fastest * 1e3;
	ns_forget(engine_ns(e), a.ino, 1);
	engine_close(e, true);
	fastest = 1e9;
	for (int i = 0; i < 3; i++) {
		t = now();
		e = mount_it();
		t = now() - t;
		fastest = t < fastest ? t : fastest;
		engine_close(e, false);
	}
	/* An empty backing's mount takes its time too, for the RAM tier above all. */
	out[MOUNT] = fastest / n * 1e6;
	out[FILE_MEMORY] = (memory() - base) / n;
}

static void quiet(void *arg, enum moment_message kind, const char *text)
{
	(void)arg;
	if (kind == MOMENT_WARNING)
		fprintf(stderr, "%s\n", text);
}

static struct moment_session *open_it(uint32_t flags)
{
	struct moment_open_opts o = {.size = sizeof(o),
				     .flags = flags,
				     .backing = backing,
				     .ram = ram,
				     .block = 1u << 20,
				     .data = "embedded",
				     .message = quiet};
	struct moment_session *s;

	if (moment_open(&o, &s) < 0)
		die("open", moment_error());
	return s;
}

static void do_params(uint32_t n, double *out)
{
	static const uint64_t shape[] = {ELEMENTS};
	struct moment_optim adam = {.kind = MOMENT_ADAM,
				    .flags = MOMENT_DECOUPLED | MOMENT_BIAS_CORRECTION,
				    .lr = 1e-3f,
				    .beta1 = 0.9f,
				    .beta2 = 0.999f,
				    .eps = 1e-8f};
	struct moment_param *p = calloc(n, sizeof(*p));
	struct moment_item *it = calloc(n, sizeof(*it));
	char(*name)[24] = calloc(n, sizeof(*name));
	float *w = calloc(ELEMENTS, sizeof(*w)), *g = calloc(ELEMENTS, sizeof(*g));
	struct moment_session *s;
	double t, base, fastest = 1e9;

	ram = RAM_PARAMS;
	s = open_it(0);
	base = memory();
	if (!p || !it || !name || !w || !g)
		die("parameters", "no memory");
	for (uint32_t i = 0; i < n; i++) {
		snprintf(name[i], sizeof(name[i]), "layer.%u", i);
		p[i] = (struct moment_param){.name = name[i], .ndim = 1, .shape = shape};
	}
	t = now();
	if (moment_register(s, p, n) < 0)
		die("register", moment_error());
	out[REGISTER] = (now() - t) / n * 1e6;
	for (uint32_t i = 0; i < n; i++)
		it[i] = (struct moment_item){.param = p[i].handle,
					       .p = w,
					       .g = g,
					       .p_numel = p[i].numel,
					       .g_numel = p[i].numel,
					       .optim = &adam};
	for (uint64_t step = 1; step <= 4; step++) {
		t = now();
		if (moment_step(s, step, it, n, 0) < 0)
			die("step", moment_error());
		t = now() - t;
		fastest = step > 1 && t < fastest ? t : fastest;
	}
	out[STEP] = fastest / n * 1e6;
	if (moment_close(s) < 0)
		die("close", moment_error());
	t = now();
	s = open_it(MOMENT_OPEN_RESUME);
	if (moment_register(s, p, n) < 0)
		die("resume", moment_error());
	out[RESUME] = (now() - t) / n * 1e6;
	moment_close(s);
	out[PARAM_MEMORY] = (memory() - base) / n;
}

/* One size, in a process of its own. */
static void measure(void (*fn)(uint32_t n, double *out), uint32_t n, double *out)
{
	double *shared = mmap(NULL, FIGURES * sizeof(*out), PROT_READ | PROT_WRITE,
			      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	char dir[4096], cmd[4200];
	int status;
	pid_t pid;

	if (shared == MAP_FAILED)
		die("memory", strerror(errno));
	snprintf(dir, sizeof(dir), "%s/scale-%u", backing, n);
	fflush(stdout);
	pid = fork();
	if (pid == 0) {
		backing = dir;
		fn(n, shared);
		exit(0);
	}
	if (pid < 0 || waitpid(pid, &status, 0) != pid || status)
		die("a measurement", "failed");
	for (int k = 0; k < FIGURES; k++)
		out[k] = shared[k] != 0 ? shared[k] : out[k];
	munmap(shared, FIGURES * sizeof(*out));
	snprintf(cmd, sizeof(cmd), "rm -rf '%s'", dir);
	if (system(cmd))
		die(dir, "cannot be removed");
}

static unsigned int sizes_to(uint32_t least, uint32_t most, uint32_t *n)
{
	unsigned int k = 0;

	for (uint64_t i = least; i < most && k < SIZES_MOST - 1; i *= 10)
		n[k++] = (uint32_t)i;
	n[k++] = most;
	return k;
}

static void table(bool params, const uint32_t *n, unsigned int k, double v[][FIGURES], bool json)
{
	if (!json) {
		printf("%-46s", params ? "parameters:" : "files:");
		for (unsigned int i = 0; i < k; i++)
			printf(" %10u", n[i]);
		printf("   ratio\n");
	}
	for (int f = 0; f < FIGURES; f++) {
		double ratio = v[k - 1][f] / v[0][f];

		if (figures[f].params != params)
			continue;
		if (json) {
			for (unsigned int i = 0; i < k; i++)
				printf("{\"figure\":\"%s\",\"n\":%u,\"value\":%.3f}\n", figures[f].key,
				       n[i], v[i][f]);
			continue;
		}
		printf("  %-38s %5s", figures[f].what, figures[f].unit);
		for (unsigned int i = 0; i < k; i++)
			printf(" %10.1f", v[i][f]);
		printf("   %.2f%s\n", ratio, ratio > 2 ? "  above 2" : "");
	}
}

static void usage(FILE *f)
{
	fputs("usage: bench-scale --backing DIR [options]\n"
	      "  --files N     the most files; from 1,000 on in tenfold sizes (100000)\n"
	      "  --params N    the most parameters, of 1,000 elements (10000)\n"
	      "  --json        one JSON object a line\n",
	      f);
}

int main(int argc, char **argv)
{
	static const struct option o[] = {
		{"backing", 1, NULL, 'b'}, {"files", 1, NULL, 'f'}, {"params", 1, NULL, 'p'},
		{"json", 0, NULL, 'j'},	   {"help", 0, NULL, 'h'},  {NULL, 0, NULL, 0}};
	double files[SIZES_MOST][FIGURES] = {{0}}, params[SIZES_MOST][FIGURES] = {{0}};
	uint32_t most_files = 100000, most_params = 10000, n[SIZES_MOST];
	bool json = false;
	unsigned int k;
	int c;

	while ((c = getopt_long(argc, argv, "h", o, NULL)) != -1) {
		if (c == 'b')
			backing = optarg;
		else if (c == 'f')
			most_files = (uint32_t)strtoul(optarg, NULL, 0);
		else if (c == 'p')
			most_params = (uint32_t)strtoul(optarg, NULL, 0);
		else if (c == 'j')
			json = true;
		else {
			usage(c == 'h' ? stdout : stderr);
			return c == 'h' ? 0 : 2;
		}
	}
	if (!backing || optind != argc || most_files > 10000000 || most_params > 1000000) {
		usage(stderr);
		return 2;
	}
	if (most_files) {
		k = sizes_to(1000, most_files, n);
		for (unsigned int i = 0; i < k; i++)
			measure(do_files, n[i], files[i]);
		table(false, n, k, files, json);
	}
	if (most_params) {
		k = sizes_to(1000, most_params, n);
		for (unsigned int i = 0; i < k; i++)
			measure(do_params, n[i], params[i]);
		table(true, n, k, params, json);
	}
	return 0;
}
