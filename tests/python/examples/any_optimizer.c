/* SPDX-License-Identifier: Apache-2.0 */
/*
 * any_optimizer.c - a C program that trains with its state on the drive: AdamW by the library's
 * kernels on one tensor, and SGD with momentum, written here, on another; in one step, with one
 * commit.
 *
 *	cc any_optimizer.c $(pkg-config --cflags --libs moment) && ./a.out BACKING STEPS
 * Run again it goes on from where it stood.
 */
#include <moment/moment.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N 500000u

static int die(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, moment_error());
	return 1;
}

/* One piece of the tensor; exp_avg is the velocity. */
static int momentum(void *arg, const struct moment_block *b)
{
	float lr = *(const float *)arg, *velocity = b->state[MOMENT_ROLE_EXP_AVG], *p = b->p;
	const float *g = b->g;
	size_t i;

	for (i = 0; i < b->numel; i++) {
		velocity[i] = 0.9f * velocity[i] + g[i];
		p[i] -= lr * velocity[i];
	}
	return 0;
}

int main(int argc, char **argv)
{
	static const uint64_t shape[] = {N};
	struct moment_open_opts o = {.size = sizeof(o), .flags = MOMENT_OPEN_RESUME};
	struct moment_param param[] = {
		{.name = "adamw.weight", .ndim = 1, .shape = shape},
		{.name = "momentum.weight",
		 .ndim = 1,
		 .shape = shape,
		 .arrays = MOMENT_ARRAY(MOMENT_ROLE_EXP_AVG)},
	};
	struct moment_optim adamw = {.kind = MOMENT_ADAM,
				     .flags = MOMENT_DECOUPLED | MOMENT_BIAS_CORRECTION,
				     .lr = 1e-3,
				     .beta1 = 0.9,
				     .beta2 = 0.999,
				     .eps = 1e-8,
				     .weight_decay = 0.01};
	float lr = 0.01f, *w = malloc(2 * N * sizeof(*w)), *g = malloc(2 * N * sizeof(*g));
	struct moment_session *s;
	uint64_t first, step;
	size_t i;

	if (argc != 3 || !w || !g)
		return 2;
	o.backing = argv[1];
	if (moment_open(&o, &s) < 0)
		return die(argv[1]);
	if (moment_register(s, param, 2) < 0)
		return die("register");
	first = param[0].step + 1;
	for (i = 0; i < 2 * N; i++) /* a real program loads its weights */
		w[i] = 1.0f / (float)(1 + i % 1000 + first);
	for (step = first; step < first + strtoull(argv[2], NULL, 10); step++) {
		struct moment_item items[] = {
			{.param = param[0].handle,
			 .p = w,
			 .g = g,
			 .p_numel = N,
			 .g_numel = N,
			 .optim = &adamw},
			{.param = param[1].handle,
			 .p = w + N,
			 .g = g + N,
			 .p_numel = N,
			 .g_numel = N,
			 .fn = momentum,
			 .arg = &lr},
		};

		for (i = 0; i < 2 * N; i++)
			g[i] = w[i] - 0.5f;
		if (moment_step(s, step, items, 2, 0) < 0)
			return die("step");
	}
	if (moment_commit(s, 1) < 0)
		return die("commit");
	printf("%llu steps, by the %s path\n", (unsigned long long)step - 1, moment_data_path(s));
	if (moment_close(s) < 0)
		return die("close");
	free(w);
	free(g);
	return 0;
}
