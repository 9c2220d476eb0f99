/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_session.c - any bytes as the messages of a session, one after the other as they would come
 * from a socket, to a real engine on a small backing. Whatever a client sends: the engine serves
 * the next one, nothing stays leased, a torn step can be rolled back, the state can be committed.
 *
 * An input is a run of whole messages, each with its own header and beginning at a multiple of 8.
 */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "engine/engine_impl.h"
#include "fuzz.h"
#include "moment/protocol.h"

static struct engine *e;
static struct session *s;
static char dir[300];
static atomic_uint replies;

static void finish(void)
{
	char cmd[400];

	if (!dir[0])
		return;
	engine_close(e, false);
	snprintf(cmd, sizeof(cmd), "rm -rf '%s'", dir);
	if (system(cmd))
		fprintf(stderr, "cannot remove %s\n", dir);
}

static void start(void)
{
	struct engine_opts o = {.ram = 20u << 16,
				.block = 1u << 16,
				.size = 64u << 20, /* a parameter of any size is asked for */
				.commit_seconds = ENGINE_COMMIT_OFF,
				.holder = "fuzz_session"};
	char err[1024];

	snprintf(dir, sizeof(dir), "%s/momentfs-fuzz-XXXXXX",
		 access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm");
	must(mkdtemp(dir));
	must(!engine_open(dir, &o, &e, err, sizeof(err)));
	atexit(finish);
}

/* Loop thread. */
static void on_reply(void *arg, const void *msg, size_t len, bool pass_arena)
{
	const struct moment_reply *r = msg;

	(void)arg;
	(void)pass_arena;
	must(len >= sizeof(*r) && len <= MOMENT_MSG_MAX && r->h.len == len);
	must(r->status <= 0 && r->status > -4096);
	must(!r->status || len == sizeof(*r) + r->text_len);
	atomic_fetch_add(&replies, 1);
}

static void create(void *arg)
{
	struct session_opts so = {.pid = getpid(), .reply = on_reply};

	(void)arg;
	must(!session_create(e, &so, &s));
}

static void destroy(void *arg)
{
	(void)arg;
	session_destroy(s);
}

struct message {
	void *data;
	size_t len;
	int res;
};

static void receive(void *arg)
{
	struct message *m = arg;

	m->res = session_receive(s, m->data, m->len);
}

/* Most answers come at once, some never (a commit waits for the step's end). */
static void wait_reply(unsigned int before)
{
	for (int i = 0; i < 100 && atomic_load(&replies) == before; i++)
		usleep(i < 50 ? 20 : 300);
}

static void idle(void *arg)
{
	*(bool *)arg = list_empty(&e->sessions) && !e->writer && !e->reverting &&
		       e->c.leased == 0 && list_empty(&e->c.starving);
}

struct listed {
	unsigned int n;
	char name[64][NS_NAME_MAX + 1];
	bool dir[64];
};

static bool list_one(void *arg, const char *name, const struct ns_attr *a, uint64_t cookie)
{
	struct listed *l = arg;

	(void)cookie;
	if (l->n == 64)
		return false;
	l->dir[l->n] = S_ISDIR(a->mode);
	strcpy(l->name[l->n++], name);
	return true;
}

/* A register that was under way when its session ended is undone a moment later. */
static bool removed(uint64_t dir_ino, const char *name, bool is_dir)
{
	int res = -EBUSY;

	for (int i = 0; i < 5000 && res == -EBUSY; i++) {
		if (i)
			usleep(1000);
		res = is_dir ? ns_rmdir(engine_ns(e), dir_ino, name)
			     : ns_unlink(engine_ns(e), dir_ino, name);
	}
	if (res && res != -ENOENT)
		fprintf(stderr, "%s cannot be removed: %s\n", name, strerror(-res));
	return !res || res == -ENOENT;
}

static void remove_all(uint64_t dir_ino)
{
	struct listed *l = calloc(1, sizeof(*l));
	struct ns_attr a;

	must(l);
	do {
		l->n = 0;
		ns_readdir(engine_ns(e), dir_ino, 0, false, list_one, l);
		for (unsigned int i = 0; i < l->n; i++) {
			if (l->dir[i] && !ns_peek(engine_ns(e), dir_ino, l->name[i], &a))
				remove_all(a.ino);
			must(removed(dir_ino, l->name[i], l->dir[i]));
		}
	} while (l->n);
	free(l);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static unsigned int inputs;
	const char *keep = getenv("FUZZ_KEEP"); /* a file for the input under way */
	struct engine_step_state st;
	bool is_idle = false;
	size_t at = 0;

	if (keep) {
		FILE *f = fopen(keep, "wb");

		must(f && fwrite(data, 1, size, f) == size);
		fclose(f);
	}
	if (!e)
		start();
	loop_call(e->loop, create, NULL);
	while (at + sizeof(struct moment_msg) <= size) {
		struct message m = {.len = size - at};
		struct moment_msg h;
		unsigned int before = atomic_load(&replies);

		memcpy(&h, data + at, sizeof(h));
		if (h.len <= m.len && h.len >= sizeof(h))
			m.len = h.len;
		m.data = malloc(m.len); /* of just its size */
		must(m.data);
		memcpy(m.data, data + at, m.len);
		loop_call(e->loop, receive, &m);
		free(m.data);
		must(m.res == 0 || m.res == -EPROTO);
		if (m.res)
			break; /* the edge ends the session */
		if (h.type != MOMENT_MSG_PREFETCH)
			wait_reply(before);
		at = (at + m.len + 7) / 8 * 8;
	}
	loop_call(e->loop, destroy, NULL);
	for (int i = 0; i < 5000 && !is_idle; i++) {
		if (i)
			usleep(1000);
		loop_call(e->loop, idle, &is_idle);
	}
	must(is_idle);
	engine_get_step(e, &st);
	if (st.torn)
		must(!engine_call(e, ENGINE_ROLLBACK, 0, 0, 0, 0));
	engine_get_step(e, &st);
	must(!st.torn && st.open == STEP_NONE);
	remove_all(NS_ROOT);
	if (++inputs % 16 == 0)
		must(!engine_call(e, ENGINE_SYNC, 0, 0, 0, 0));
	return 0;
}

#ifndef FUZZ_ENGINE
int main(int argc, char **argv)
{
	return fuzz_main(argc, argv, "corpus-session", 60);
}
#endif
