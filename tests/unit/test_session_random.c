/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_session_random.c - random leases, steps, commits, rollbacks, deaths of the client and
 * remounts, on a RAM tier far smaller than the state, against session_model.h's model; and plain
 * reads between the steps, which must show the same.
 *
 *	test_session_random [--seed N] [--seeds N] [--blocks N] [--io uring|threads]
 */
#include <getopt.h>

#include "marks.h"
#include "session_model.h"

#define BLOCK (64u << 10)

static struct engine *e;
static struct wire w;
static struct model m;
static char dir[256];
static enum io_engine io;

static void log_line(void *arg, enum engine_log_level level, const char *msg)
{
	(void)arg;
	if (level <= ENGINE_LOG_ERROR)
		fprintf(stderr, "engine: %s\n", msg);
}

static void start(void)
{
	struct engine_opts o = {.ram = 20u * BLOCK,
				.block = BLOCK,
				.commit_seconds = ENGINE_COMMIT_OFF,
				.io = io,
				.log = log_line,
				.holder = "test_session_random"};
	char err[1024];

	if (engine_open(dir, &o, &e, err, sizeof(err)))
		model_die(&m, "%s", err);
	w.l = link_local(e);
}

/* Plain reads of everything. Without leases out and outside a step. */
static void check_all(void)
{
	for (uint32_t f = 0; f < MODEL_FILES; f++) {
		uint64_t size = model_size(&m, f);
		unsigned char *buf = malloc(size + 1);
		char path[64];
		struct ns_attr a;

		snprintf(path, sizeof(path), "h.%u.weight/%s", f / 2,
			 f % 2 ? "exp_avg_sq" : "exp_avg");
		if (ns_walk(engine_ns(e), path, &a) || a.size != size)
			model_die(&m, "%s is gone or of another size", path);
		if (engine_pread(e, a.ino, buf, size + 1, 0) != (int64_t)size ||
		    memcmp(buf, m.live.bytes + m.at[f], size))
			model_die(&m, "%s reads as something else", path);
		free(buf);
	}
}

static void remount(void)
{
	bool commit = model_below(&m, 2);

	model_settle(&m);
	snprintf(m.last, sizeof(m.last), "remount, %s", commit ? "with a commit" : "without");
	link_local_gone(w.l);
	/* Committed is the last boundary, unless the step was open and had begun to write. */
	if (engine_close(e, commit))
		model_die(&m, "close");
	w.l->close(w.l);
	start();
	model_attach(&m, 0);
	if (m.next_step <= m.live.label)
		model_die(&m, "from the future");
	m.next_step++;
	check_all();
}

/* The client dies as it is. */
static void die_and_come_back(void)
{
	bool torn = m.stepping;

	if (!model_below(&m, 2))
		model_settle(&m);
	snprintf(m.last, sizeof(m.last), "death of the client%s", torn ? " inside a step" : "");
	if (!torn) {
		/* What is committed does not change; what is live stays live. */
		model_settle(&m);
		if (m.nout)
			return;
		model_wait_commit(&m);
		model_commit(&m);
		model_wait_commit(&m);
	}
	w.l->close(w.l);
	w.l = link_local(e);
	if (torn && wire_hello(&w, 0) != -ESTALE)
		model_die(&m, "a torn state was not refused");
	model_attach(&m, MOMENT_HELLO_ROLLBACK);
	m.next_step++;
	check_all();
}

static void run(uint64_t seed, uint64_t blocks)
{
	char cmd[512];

	printf("seed %llu, %llu blocks, io=%s\n", (unsigned long long)seed,
	       (unsigned long long)blocks, io == IO_AUTO ? "auto" : "threads");
	fflush(stdout);
	snprintf(dir, sizeof(dir), "%s/momentfs-leases-XXXXXX",
		 getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
	if (!mkdtemp(dir))
		exit(1);
	model_init(&m, &w, seed, BLOCK);
	start();
	model_attach(&m, 0);
	while (m.blocks_done < blocks) {
		uint64_t k = model_below(&m, 1000);

		if (k < 3)
			remount();
		else if (k < 6)
			die_and_come_back();
		else if (k < 20 && !m.stepping && !m.nout && !m.nflight)
			check_all();
		else
			model_act(&m);
		marks_check(e);
	}
	if (m.stepping)
		model_post_step(&m);
	else
		model_advance(&m, true);
	model_settle(&m);
	model_wait_commit(&m);
	model_commit(&m);
	model_wait_commit(&m);
	check_all();
	w.l->close(w.l);
	if (engine_call(e, ENGINE_SCRUB, 0, 0, 0, 0))
		model_die(&m, "scrub");
	engine_close(e, false);
	start();
	model_attach(&m, 0);
	check_all();
	w.l->close(w.l);
	engine_close(e, true);
	model_fini(&m);
	snprintf(cmd, sizeof(cmd), "rm -rf '%s'", dir);
	if (system(cmd))
		exit(1);
}

int main(int argc, char **argv)
{
	static const struct option o[] = {{"seed", 1, NULL, 's'},
					  {"seeds", 1, NULL, 'n'},
					  {"blocks", 1, NULL, 'b'},
					  {"io", 1, NULL, 'i'},
					  {NULL, 0, NULL, 0}};
	uint64_t seed = (uint64_t)time(NULL) << 16 ^ (uint64_t)getpid(), blocks = 3000, seeds = 1;
	int ch, only = -1;

	while ((ch = getopt_long(argc, argv, "", o, NULL)) != -1) {
		if (ch == 's')
			seed = strtoull(optarg, NULL, 0);
		else if (ch == 'n')
			seeds = strtoull(optarg, NULL, 0);
		else if (ch == 'b')
			blocks = strtoull(optarg, NULL, 0);
		else if (ch == 'i')
			only = strcmp(optarg, "threads") ? IO_AUTO : IO_THREADS;
		else
			return 2;
	}
	for (uint64_t i = 0; i < seeds; i++) {
		for (int k = 0; k < 2; k++) {
			io = k ? IO_THREADS : IO_AUTO;
			if (only < 0 || (enum io_engine)only == io)
				run(seed + i, blocks);
		}
	}
	printf("%llu refused for lack of room\nok\n", (unsigned long long)m.no_room);
	return 0;
}
