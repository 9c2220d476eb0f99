/* SPDX-License-Identifier: Apache-2.0 */
/*
 * session_client.c - a client of a mounted daemon's session socket, for session_client.sh.
 *
 *	session_client random BACKING MOUNTPOINT SEED BLOCKS STATE
 *		leases, writes and releases BLOCKS random blocks against a model, with steps,
 * commits and rollbacks; at boundaries reads the files through the mount. Ends with a commit and
 *		leaves the model in the file STATE.
 *	session_client verify BACKING MOUNTPOINT SEED STATE
 *		what is there, by lease and through the mount, is what STATE says.
 *	session_client hold BACKING SEED STATE
 *		begins a step, holds leases, says "holding" and waits.
 *	session_client fork BACKING SEED STATE
 *		the same with a child that has copies of everything: "holding CHILD".
 */
#include <fcntl.h>

#include "../unit/session_model.h"

static struct wire w;
static struct model m;

static void open_link(const char *backing)
{
	w.l = link_socket(backing);
	if (!w.l) {
		fprintf(stderr, "%s/%s: %s\n", backing, MOMENT_SOCKET_NAME, strerror(errno));
		exit(1);
	}
}

/* The block size is known from HELLO only, and the model needs it before it attaches. */
static uint32_t ask_block(const char *backing)
{
	uint32_t block;

	open_link(backing);
	if (wire_hello(&w, MOMENT_HELLO_READONLY)) {
		fprintf(stderr, "hello: %s\n", wire_text(&w));
		exit(1);
	}
	block = ((const struct moment_hello_reply *)w.in)->block;
	w.l->close(w.l);
	return block;
}

/* All files through the mount. */
static void check_files(const char *mnt, const char *when)
{
	for (uint32_t f = 0; f < MODEL_FILES; f++) {
		uint64_t size = model_size(&m, f), got = 0;
		unsigned char *buf = malloc(size + 1);
		char path[4096];
		int fd;

		snprintf(path, sizeof(path), "%s/params/h.%u.weight/%s", mnt, f / 2,
			 f % 2 ? "exp_avg_sq" : "exp_avg");
		fd = open(path, O_RDONLY | O_CLOEXEC);
		if (fd < 0)
			model_die(&m, "%s: %s: %s", when, path, strerror(errno));
		for (ssize_t n = 1; n > 0; got += (uint64_t)n) {
			n = read(fd, buf + got, size + 1 - got);
			if (n < 0)
				model_die(&m, "%s: read %s: %s", when, path, strerror(errno));
		}
		close(fd);
		if (got != size)
			model_die(&m, "%s: %s has %llu bytes, not %llu", when, path,
				  (unsigned long long)got, (unsigned long long)size);
		for (uint64_t i = 0; i < size; i++) {
			if (buf[i] != m.live.bytes[m.at[f] + i])
				model_die(&m, "%s: %s: byte %llu is %02x, not %02x", when, path,
					  (unsigned long long)i, buf[i], m.live.bytes[m.at[f] + i]);
		}
		free(buf);
	}
}

static void save(const char *path)
{
	FILE *f = fopen(path, "we");

	if (!f || fwrite(&m.live.label, sizeof(m.live.label), 1, f) != 1 ||
	    fwrite(m.live.steps, sizeof(m.live.steps), 1, f) != 1 ||
	    fwrite(m.live.bytes, 1, m.total, f) != m.total || fclose(f))
		model_die(&m, "%s: %s", path, strerror(errno));
}

static void load(const char *path)
{
	FILE *f = fopen(path, "re");
	struct model_state *k = &m.kept[0];

	if (!f || fread(&k->label, sizeof(k->label), 1, f) != 1 ||
	    fread(k->steps, sizeof(k->steps), 1, f) != 1 ||
	    fread(k->bytes, 1, m.total, f) != m.total)
		model_die(&m, "%s: %s", path, strerror(errno));
	fclose(f);
	m.durable = k->label;
	m.next_step = k->label + 1;
}

/* Every block once, by lease. */
static void check_leases(void)
{
	for (uint32_t f = 0; f < MODEL_FILES; f++) {
		for (uint32_t n = 0; n < model_blocks(&m, f); n++) {
			struct model_block b = {.file = f, .n = n};

			wire_adv_begin(&w);
			wire_adv_add(&w, true, (struct moment_range){f, n, 1, 0});
			if (wire_call(&w))
				model_die(&m, "lease");
			b.mem = w.l->base + wire_leases(&w)->arena;
			model_check_block(&m, &b, "verify");
			wire_adv_begin(&w);
			wire_adv_add(&w, false, (struct moment_range){f, n, 1, MOMENT_RANGE_COOL});
			if (wire_call(&w))
				model_die(&m, "release");
		}
	}
}

static int do_random(const char *backing, const char *mnt, uint64_t blocks, const char *state)
{
	open_link(backing);
	model_attach(&m, 0);
	while (m.blocks_done < blocks) {
		if (!model_below(&m, 60) && !m.stepping && !m.nout && !m.nflight)
			check_files(mnt, "at a boundary");
		else
			model_act(&m);
	}
	if (!m.stepping)
		model_advance(&m, true);
	else
		model_post_step(&m);
	model_settle(&m);
	model_wait_commit(&m);
	check_files(mnt, "at the end");
	model_commit(&m);
	model_wait_commit(&m);
	save(state);
	printf("%llu blocks, %llu steps\n", (unsigned long long)m.blocks_done,
	       (unsigned long long)m.next_step - 1);
	w.l->close(w.l);
	model_fini(&m);
	return 0;
}

static int do_hold(const char *backing, bool with_child)
{
	pid_t child = 0;

	open_link(backing);
	model_attach(&m, MOMENT_HELLO_ROLLBACK);
	model_pre_step(&m);
	while (m.nout < 6)
		model_advance(&m, false);
	model_settle(&m);
	if (with_child)
		child = fork();
	if (!child && with_child) {
		/* Lives on with the socket and the arena, until told to go. */
		pause();
		_exit(0);
	}
	if (with_child)
		printf("holding %d\n", (int)child);
	else
		puts("holding");
	fflush(stdout);
	pause();
	return 0;
}

int main(int argc, char **argv)
{
	bool random = argc == 7 && !strcmp(argv[1], "random");
	bool verify = argc == 6 && !strcmp(argv[1], "verify");
	bool hold = argc == 5 && (!strcmp(argv[1], "hold") || !strcmp(argv[1], "fork"));

	if (!random && !verify && !hold)
		return 2;
	model_init(&m, &w, strtoull(argv[hold ? 3 : 4], NULL, 0), ask_block(argv[2]));
	if (random)
		return do_random(argv[2], argv[3], strtoull(argv[5], NULL, 0), argv[6]);
	load(argv[hold ? 4 : 5]);
	if (hold)
		return do_hold(argv[2], argv[1][0] == 'f');
	open_link(argv[2]);
	model_attach(&m, MOMENT_HELLO_ROLLBACK);
	check_leases();
	check_files(argv[3], "after a remount");
	w.l->close(w.l);
	return 0;
}
