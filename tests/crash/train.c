/* SPDX-License-Identifier: Apache-2.0 */
/*
 * train.c - a training loop to be killed (by kill.sh), and the judge of what it finds when it
 * starts again.
 *
 * A small model: gradients depend on the step and on the weights, so the weights and the state of
 * step n are the same in every run that gets there by whole steps. Beside the session it computes
 * the same in plain memory. At the start: what the backing shows must be, bit for bit, the state of
 * its last whole step, and all parameters of the same one. At the end again.
 *
 *	train (--mount DIR | --backing DIR) --steps N [--data session|mmap|embedded] [--at-least C]
 *	      [--log FILE] [--commit N] [--pause US]
 *
 * The log gets a line "start C" and a line "committed C" for each commit that has returned.
 * Exit status: 0 got to step N and all is right; 1 wrong: bytes, step or an older commit than
 * --at-least; 3 the library returned an error (its message is on stderr); 2 usage.
 */
#include <fcntl.h>
#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "moment/moment.h"

#define PARAMS 6

static const uint64_t numel[PARAMS] = {16384, 1, 100003, 777, 65536, 49153};
static const struct moment_optim adamw = {.kind = MOMENT_ADAM,
					  .flags = MOMENT_DECOUPLED | MOMENT_BIAS_CORRECTION,
					  .lr = 1e-2,
					  .beta1 = 0.9,
					  .beta2 = 0.99,
					  .eps = 1e-8,
					  .weight_decay = 0.01};

struct tensor {
	float *p, *g, *m, *v;
};

static struct tensor run[PARAMS], ref[PARAMS];
static struct moment_param params[PARAMS];
static struct moment_session *s;
static int log_fd = -1;

__attribute__((format(printf, 2, 3), noreturn)) static void die(int status, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	fputs("train: ", stderr);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputc('\n', stderr);
	exit(status);
}

__attribute__((format(printf, 1, 2))) static void say(const char *fmt, ...)
{
	char line[80];
	va_list ap;
	int n;

	va_start(ap, fmt);
	n = vsnprintf(line, sizeof(line), fmt, ap);
	va_end(ap);
	if (log_fd >= 0 && write(log_fd, line, (size_t)n) != n)
		die(2, "the log cannot be written");
}

static float *floats(uint64_t n)
{
	float *x = calloc(n, sizeof(*x));

	if (!x)
		die(2, "out of memory");
	return x;
}

static void make(struct tensor *t)
{
	for (int i = 0; i < PARAMS; i++) {
		t[i].p = floats(numel[i]);
		t[i].g = floats(numel[i]);
		t[i].m = floats(numel[i]);
		t[i].v = floats(numel[i]);
		for (uint64_t k = 0; k < numel[i]; k++)
			t[i].p[k] = (float)((k * 2654435761u >> 8) % 2001) * 1e-3f - 1.0f;
	}
}

static void gradients(struct tensor *t, uint64_t step)
{
	for (int i = 0; i < PARAMS; i++) {
		uint32_t x = (uint32_t)(step * 0x9e3779b9u + (uint64_t)i * 0x85ebca6bu) | 1;

		for (uint64_t k = 0; k < numel[i]; k++) {
			x = x * 1664525u + 1013904223u;
			t[i].g[k] = (float)(x >> 16) * (1.0f / 65536) - 0.5f + 0.1f * t[i].p[k];
		}
	}
}

static void plain_step(uint64_t step)
{
	gradients(ref, step);
	for (int i = 0; i < PARAMS; i++) {
		struct moment_slice x = {.p = ref[i].p,
					 .g = ref[i].g,
					 .m = ref[i].m,
					 .v = ref[i].v,
					 .numel = numel[i],
					 .p_dtype = MOMENT_F32,
					 .g_dtype = MOMENT_F32};

		if (moment_update(&adamw, step, &x, 1, NULL))
			die(2, "moment_update");
	}
}

/* What the session has is what step `step` must have left. */
static void judge(uint64_t step, const char *when)
{
	for (int i = 0; i < PARAMS; i++) {
		uint64_t have = 0;
		float *x = floats(numel[i]);

		if (moment_param_step(s, params[i].handle, &have))
			die(3, "%s: %s", when, moment_error());
		if (have != step)
			die(1, "%s: %s is at step %llu, the commit at %llu", when, params[i].name,
			    (unsigned long long)have, (unsigned long long)step);
		for (uint32_t role = MOMENT_ROLE_EXP_AVG; role <= MOMENT_ROLE_EXP_AVG_SQ; role++) {
			const float *want = role == MOMENT_ROLE_EXP_AVG ? ref[i].m : ref[i].v;

			if (moment_read_state(s, params[i].handle, role, 0, numel[i], x))
				die(3, "%s: %s", when, moment_error());
			for (uint64_t k = 0; k < numel[i]; k++) {
				if (memcmp(&x[k], &want[k], sizeof(float)))
					die(1,
					    "%s: %s, array %u, element %llu is %a, not %a of step %llu",
					    when, params[i].name, role, (unsigned long long)k,
					    (double)x[k], (double)want[k],
					    (unsigned long long)step);
			}
		}
		free(x);
		if (memcmp(run[i].p, ref[i].p, numel[i] * sizeof(float)))
			die(1, "%s: the weights of %s are not those of step %llu", when,
			    params[i].name, (unsigned long long)step);
	}
}

static uint64_t committed(void)
{
	uint64_t c;

	if (moment_committed_step(s, &c))
		die(3, "%s", moment_error());
	return c == MOMENT_STEP_NONE ? 0 : c;
}

/* The last whole step: a daemon that lives has it, committed or not. */
static uint64_t whole_step(void)
{
	struct moment_info i;

	if (moment_get_info(s, &i))
		die(3, "%s", moment_error());
	return i.step == MOMENT_STEP_NONE ? committed() : i.step;
}

static void one_step(uint64_t step)
{
	struct moment_item items[PARAMS] = {0};

	gradients(run, step);
	for (int i = 0; i < PARAMS; i++)
		items[i] = (struct moment_item){.param = params[i].handle,
						.p = run[i].p,
						.g = run[i].g,
						.p_numel = params[i].numel,
						.g_numel = params[i].numel,
						.p_dtype = MOMENT_F32,
						.g_dtype = MOMENT_F32,
						.optim = &adamw};
	if (moment_step(s, step, items, PARAMS, 0))
		die(3, "step %llu: %s", (unsigned long long)step, moment_error());
}

int main(int argc, char **argv)
{
	static const struct option o[] = {
		{"mount", 1, NULL, 'm'},  {"backing", 1, NULL, 'b'},  {"steps", 1, NULL, 'n'},
		{"data", 1, NULL, 'd'},	  {"at-least", 1, NULL, 'a'}, {"log", 1, NULL, 'l'},
		{"commit", 1, NULL, 'c'}, {"pause", 1, NULL, 'p'},    {NULL, 0, NULL, 0}};
	static const char *const names[PARAMS] = {"wte",     "scalar",	       "h.0.attn.weight",
						  "ln.bias", "h.0.mlp.weight", "head"};
	struct moment_open_opts oo = {.size = sizeof(oo),
				      .flags = MOMENT_OPEN_RESUME | MOMENT_OPEN_NEW_OK,
				      .ram = 2u << 20,
				      .block = 64u << 10,
				      .commit_seconds = -1,
				      .threads = 1};
	uint64_t steps = 100, at_least = 0, every = 7, now;
	unsigned int pause = 0;
	int ch;

	while ((ch = getopt_long(argc, argv, "", o, NULL)) != -1) {
		if (ch == 'm')
			oo.mount = optarg;
		else if (ch == 'b')
			oo.backing = optarg;
		else if (ch == 'n')
			steps = strtoull(optarg, NULL, 10);
		else if (ch == 'd')
			oo.data = optarg;
		else if (ch == 'a')
			at_least = strtoull(optarg, NULL, 10);
		else if (ch == 'l')
			log_fd = open(optarg, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
		else if (ch == 'c')
			every = strtoull(optarg, NULL, 10);
		else if (ch == 'p')
			pause = (unsigned int)strtoul(optarg, NULL, 10);
		else
			return 2;
	}
	make(run);
	make(ref);
	if (moment_open(&oo, &s))
		die(3, "open: %s", moment_error());
	for (int i = 0; i < PARAMS; i++) {
		params[i].name = names[i];
		params[i].ndim = 1;
		params[i].shape = &numel[i];
	}
	if (moment_register(s, params, PARAMS))
		die(3, "register: %s", moment_error());
	now = whole_step();
	say("start %llu\n", (unsigned long long)committed());
	if (committed() < at_least || now < committed())
		die(1,
		    "the step is %llu, the committed one %llu, but the commit of %llu had returned",
		    (unsigned long long)now, (unsigned long long)committed(),
		    (unsigned long long)at_least);
	for (uint64_t k = 1; k <= now; k++)
		plain_step(k);
	for (int i = 0; i < PARAMS; i++)
		memcpy(run[i].p, ref[i].p, numel[i] * sizeof(float));
	judge(now, "at the start");
	while (now < steps) {
		one_step(++now);
		plain_step(now);
		if (every && now % every == 0) {
			if (moment_commit(s, now % (2 * every) == 0))
				die(3, "commit: %s", moment_error());
			say("committed %llu\n", (unsigned long long)committed());
		}
		if (pause)
			usleep(pause);
	}
	judge(now, "at the end");
	if (moment_commit(s, 1))
		die(3, "commit: %s", moment_error());
	if (committed() != now)
		die(1, "a commit returned, and the committed step is %llu, not %llu",
		    (unsigned long long)committed(), (unsigned long long)now);
	say("committed %llu\n", (unsigned long long)now);
	if (moment_close(s))
		die(3, "close: %s", moment_error());
	return 0;
}
