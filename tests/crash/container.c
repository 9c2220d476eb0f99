/* SPDX-License-Identifier: Apache-2.0 */
/*
 * container.c - trains a model whose state is larger than all the memory there is, and checks every
 * element of it (for container.sh).
 *
 * Weights and gradients take no memory worth mentioning: one piece of WINDOW elements each, mapped
 * again and again over as many addresses as the largest parameter has. The learning rate is 0, so
 * the weights stay as they are; the gradient of a step is the same in every window, so the state of
 * element i is that of i % WINDOW, which is computed beside in plain memory.
 *
 *	container --mount DIR --model FILE.tsv --steps N
 *
 * Goes on from the step that the mount has. Exit status: 0; 1 wrong bytes or steps; 3 an error of
 * the library; 2 anything else.
 */
#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "moment/moment.h"

#define PARAMS_MAX 256
#define WINDOW	   (256u << 10)
#define BYTES	   (WINDOW * sizeof(float))

static const struct moment_optim adamw = {.kind = MOMENT_ADAM,
					  .flags = MOMENT_DECOUPLED | MOMENT_BIAS_CORRECTION,
					  .lr = 0,
					  .beta1 = 0.9,
					  .beta2 = 0.99,
					  .eps = 1e-8};

static struct moment_param params[PARAMS_MAX];
static uint64_t numel[PARAMS_MAX];
static uint32_t n;
static float ref_p[WINDOW], ref_g[WINDOW], ref_m[WINDOW], ref_v[WINDOW], got[WINDOW];
static struct moment_session *s;

__attribute__((format(printf, 2, 3), noreturn)) static void die(int status, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	fputs("container: ", stderr);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputc('\n', stderr);
	exit(status);
}

static void read_model(const char *path)
{
	FILE *f = fopen(path, "re");
	char name[512];
	unsigned long long count;

	if (!f)
		die(2, "%s cannot be read", path);
	while (n < PARAMS_MAX && fscanf(f, "%511s %*s %llu", name, &count) == 2) {
		numel[n] = count;
		params[n].name = strdup(name);
		params[n].ndim = 1;
		params[n].shape = &numel[n];
		if (!params[n++].name)
			die(2, "out of memory");
	}
	fclose(f);
	if (!n)
		die(2, "no parameters in %s", path);
}

/* As many elements as that, of which the same WINDOW come round and round. */
static float *rings(uint64_t count, const char *name)
{
	uint64_t times = (count + WINDOW - 1) / WINDOW;
	int fd = memfd_create(name, MFD_CLOEXEC);
	char *at = mmap(NULL, times * BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (fd < 0 || ftruncate(fd, BYTES) || at == MAP_FAILED)
		die(2, "no memory for the %s", name);
	for (uint64_t i = 0; i < times; i++) {
		if (mmap(at + i * BYTES, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
			 0) == MAP_FAILED)
			die(2, "the %s cannot be mapped %llu times", name,
			    (unsigned long long)times);
	}
	close(fd);
	return (float *)at;
}

static void gradients(uint64_t step)
{
	uint32_t x = (uint32_t)(step * 0x9e3779b9u) | 1;

	for (uint32_t k = 0; k < WINDOW; k++) {
		x = x * 1664525u + 1013904223u;
		ref_g[k] = (float)(x >> 16) * (1.0f / 65536) - 0.5f;
	}
}

static void plain_step(uint64_t step)
{
	struct moment_slice x = {.p = ref_p,
				 .g = ref_g,
				 .m = ref_m,
				 .v = ref_v,
				 .numel = WINDOW,
				 .p_dtype = MOMENT_F32,
				 .g_dtype = MOMENT_F32};

	gradients(step);
	if (moment_update(&adamw, step, &x, 1, NULL))
		die(2, "moment_update");
}

static void judge_array(const struct moment_param *p, uint32_t role, const float *want,
			uint64_t count, uint64_t step)
{
	for (uint64_t at = 0; at < count; at += WINDOW) {
		uint64_t len = count - at < WINDOW ? count - at : WINDOW;

		if (moment_read_state(s, p->handle, role, at, len, got))
			die(3, "%s: %s", p->name, moment_error());
		if (memcmp(got, want, len * sizeof(float)))
			die(1, "%s, array %u, elements from %llu on: not those of step %llu",
			    p->name, role, (unsigned long long)at, (unsigned long long)step);
	}
}

static void judge(uint64_t step)
{
	for (uint32_t i = 0; i < n; i++) {
		uint64_t have = 0;

		if (moment_param_step(s, params[i].handle, &have))
			die(3, "%s", moment_error());
		if (have != step)
			die(1, "%s is at step %llu, not %llu", params[i].name,
			    (unsigned long long)have, (unsigned long long)step);
		judge_array(&params[i], MOMENT_ROLE_EXP_AVG, ref_m, numel[i], step);
		judge_array(&params[i], MOMENT_ROLE_EXP_AVG_SQ, ref_v, numel[i], step);
	}
}

int main(int argc, char **argv)
{
	static const struct option o[] = {{"mount", 1, NULL, 'm'},
					  {"model", 1, NULL, 'f'},
					  {"steps", 1, NULL, 'n'},
					  {NULL, 0, NULL, 0}};
	struct moment_open_opts oo = {.size = sizeof(oo),
				      .flags = MOMENT_OPEN_RESUME | MOMENT_OPEN_NEW_OK};
	struct moment_item items[PARAMS_MAX] = {0};
	uint64_t steps = 10, now, largest = 0, sum = 0;
	float *p, *g;
	int ch;

	while ((ch = getopt_long(argc, argv, "", o, NULL)) != -1) {
		if (ch == 'm')
			oo.mount = optarg;
		else if (ch == 'f')
			read_model(optarg);
		else if (ch == 'n')
			steps = strtoull(optarg, NULL, 10);
		else
			return 2;
	}
	if (moment_open(&oo, &s))
		die(3, "open: %s", moment_error());
	if (moment_register(s, params, n))
		die(3, "register: %s", moment_error());
	for (uint32_t i = 0; i < n; i++) {
		sum += numel[i];
		largest = numel[i] > largest ? numel[i] : largest;
	}
	p = rings(largest, "weights");
	g = rings(largest, "gradients");
	for (uint32_t k = 0; k < WINDOW; k++)
		p[k] = ref_p[k] = (float)(k % 2001) * 1e-3f - 1.0f;
	for (uint32_t i = 0; i < n; i++)
		items[i] = (struct moment_item){.param = params[i].handle,
						.p = p,
						.g = g,
						.p_numel = params[i].numel,
						.g_numel = params[i].numel,
						.p_dtype = MOMENT_F32,
						.g_dtype = MOMENT_F32,
						.optim = &adamw};
	if (moment_committed_step(s, &now))
		die(3, "%s", moment_error());
	now = now == MOMENT_STEP_NONE ? 0 : now;
	for (uint64_t k = 1; k <= now; k++)
		plain_step(k);
	while (now < steps) {
		plain_step(++now);
		memcpy(g, ref_g, BYTES);
		if (moment_step(s, now, items, n, MOMENT_STEP_COMMIT))
			die(3, "step %llu: %s", (unsigned long long)now, moment_error());
	}
	if (moment_commit(s, 1))
		die(3, "commit: %s", moment_error());
	judge(now);
	printf("%llu elements at step %llu, all right\n", (unsigned long long)sum,
	       (unsigned long long)now);
	if (moment_close(s))
		die(3, "close: %s", moment_error());
	return 0;
}
