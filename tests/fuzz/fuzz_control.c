/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_control.c - any bytes written to .moment/step, prefetch and control: each write is answered
 * exactly once, with all its bytes or an errno, and the engine serves on.
 *
 * control.c is the daemon's; the engine is a real one; what is between them and the kernel
 * (requests and replies, fuse_data.c and libfuse) is played here. Byte 0 of the input says which
 * file; for prefetch byte 1 says into how many writes the rest is cut.
 */
#include <errno.h>
#include <unistd.h>

#include "daemon/daemon.h"
#include "fuzz.h"

static struct daemon d;
static struct options options;
static char dir[300];
static unsigned int answers;
static size_t answered;
static int answered_err;

/* ---- what control.c calls ---- */

int fuse_reply_write(fuse_req_t req, size_t count)
{
	(void)req;
	answers++;
	answered = count;
	answered_err = 0;
	return 0;
}

int fuse_reply_err(fuse_req_t req, int err)
{
	(void)req;
	must(err > 0 && err < 4096);
	answers++;
	answered_err = err;
	return 0;
}

void *fuse_req_userdata(fuse_req_t req)
{
	(void)req;
	return &d;
}

void fuse_req_interrupt_func(fuse_req_t req, fuse_interrupt_func_t func, void *data)
{
	(void)req;
	(void)func;
	(void)data;
}

struct request *request_create(fuse_req_t req, enum engine_op_kind kind, uint64_t ino,
			       bool (*finish)(struct request *, int64_t))
{
	struct request *r = calloc(1, sizeof(*r));

	must(r);
	r->op.kind = kind;
	r->op.ino = ino;
	r->req = req;
	r->d = &d;
	r->finish = finish;
	return r;
}

void request_destroy(struct request *r)
{
	free(r->text);
	free(r);
}

void request_submit(struct request *r)
{
	int64_t res = engine_call(d.e, r->op.kind, r->op.ino, r->op.off, r->op.len, r->op.arg);

	if (!r->finish(r, res))
		request_destroy(r);
}

pid_t bracket_owner(pid_t tid)
{
	return tid;
}

void bracket_began(struct daemon *x, pid_t owner, const struct text *handle, uint64_t step)
{
	(void)x, (void)owner, (void)handle, (void)step;
}

void bracket_ended(struct daemon *x)
{
	(void)x;
}

unsigned int session_socket_sessions(const struct session_socket *s)
{
	(void)s;
	return 0;
}

pid_t session_socket_writer(const struct session_socket *s)
{
	(void)s;
	return 0;
}

void daemon_raise(struct daemon *dd, enum daemon_event event)
{
	must(dd == &d && event == EVENT_CONTROL);
	control_answer_detach(&d, -EINTR, "not in a test");
}

/* ---- */

static void finish(void)
{
	char cmd[400];

	engine_close(d.e, false);
	snprintf(cmd, sizeof(cmd), "rm -rf '%s'", dir);
	if (system(cmd))
		fprintf(stderr, "cannot remove %s\n", dir);
}

static void start(void)
{
	struct engine_opts o = {.ram = 16u << 16,
				.block = 1u << 16,
				.commit_seconds = ENGINE_COMMIT_OFF,
				.holder = "fuzz_control"};
	static const char content[100000];
	struct ns_attr a;
	char err[1024];

	snprintf(dir, sizeof(dir), "%s/momentfs-fuzz-XXXXXX",
		 access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm");
	must(mkdtemp(dir));
	must(!engine_open(dir, &o, &d.e, err, sizeof(err)));
	atexit(finish);
	d.ns = engine_ns(d.e);
	d.o = &options;
	pthread_mutex_init(&d.lock, NULL);
	must(!ns_create(d.ns, NS_ROOT, "a b", 0644, 0, 0, false, &a));
	must(engine_pwrite(d.e, a.ino, content, sizeof(content), 0) == sizeof(content));
	must(!engine_call(d.e, ENGINE_SYNC, 0, 0, 0, 0));
}

/* The kernel's write: not terminated, of just its size. */
static void write_one(uint64_t ino, struct text *t, const uint8_t *data, size_t size)
{
	char *exact = malloc(size ? size : 1);

	must(exact);
	if (size)
		memcpy(exact, data, size);
	answers = 0;
	virt_write(&d, NULL, ino, t, exact, size);
	must(answers == 1);
	must(answered_err || answered == size);
	free(exact);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct engine_step_state st;
	struct text t = {.lock = PTHREAD_MUTEX_INITIALIZER};
	uint64_t ino;
	size_t part;

	if (!d.e)
		start();
	if (size < 2)
		return 0;
	ino = VIRT_INO(data[0] % VIRT_COUNT);
	part = ino == VIRT_INO(VIRT_PREFETCH) ? size / (1 + data[1] % 16) + 1 : size;
	for (size_t at = 2; at < size; at += part)
		write_one(ino, &t, data + at, size - at < part ? size - at : part);
	virt_flush(&d, ino, &t);
	must(t.tail_len == 0 || ino != VIRT_INO(VIRT_PREFETCH));
	free(t.tail);
	must(!d.detach);
	engine_get_step(d.e, &st);
	if (st.open != UINT64_MAX)
		must(!engine_call(d.e, ENGINE_STEP_END, 0, 0, 0, st.open));
	return 0;
}

#ifndef FUZZ_ENGINE
int main(int argc, char **argv)
{
	return fuzz_main(argc, argv, "corpus-control", 1000);
}
#endif
