/* SPDX-License-Identifier: Apache-2.0 */
/*
 * driver.h - what the crash tests share: an engine whose drive and catalog fail on purpose, and a
 * client that speaks protocol.h to it in the same process.
 *
 * The test thread makes one call at a time and waits for it. drive_cut_at() names a moment in the
 * future, counted in calls and then in microseconds: there the power goes out, for the pool and the
 * catalog in one turn of the loop thread, and the test jumps out of whatever it was doing to
 * `cut_jump`. So what stands after a call in a test happened before the power went out.
 *
 * drive_die_in_sync() names a sync of the catalog in which the process dies. What it had written is in
 * the kernel's cache then: the next life reads it, and a power cut in that life may still lose it, if
 * nobody has synced it in between.
 */
#ifndef TEST_CRASH_DRIVER_H
#define TEST_CRASH_DRIVER_H

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "engine/engine_impl.h"
#include "engine/io_fault.h"
#include "engine/sqlite_fault.h"
#include "moment/protocol.h"

#define CALL_SECONDS 60 /* a call that takes longer hangs */

struct client {
	struct session *s;
	char *arena;
	uint64_t next_id;
	/* the reply to the call under way */
	uint64_t want;
	size_t len;
	bool there;
	union {
		struct moment_reply r;
		struct moment_hello_reply hello;
		struct moment_register_reply reg;
		struct moment_advance_reply adv;
		struct moment_info_reply info;
		char bytes[MOMENT_MSG_MAX];
	} reply;
};

static struct engine *e;
static struct sqlite_fault *vfs;
static struct client client;
static jmp_buf cut_jump;
static pthread_mutex_t wait_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wait_cond;
static uint64_t rng, seed;
static unsigned long calls; /* since the engine was opened */
static unsigned long cut_call;
static unsigned int cut_us;
static bool cut_planned, was_cut, died, verbose;
static uint64_t cut_seed;
static char last_notes[32][160];
static unsigned long notes;
static const char *drive_folder; /* goes also when the test fails, unless MOMENT_KEEP is set */

/* ---- chance, messages ---- */

static inline uint64_t rnd(void)
{
	uint64_t z = (rng += 0x9e3779b97f4a7c15ull);

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ z >> 27) * 0x94d049bb133111ebull;
	return z ^ z >> 31;
}

static inline uint64_t below(uint64_t n)
{
	return rnd() % n;
}

__attribute__((format(printf, 1, 2))) static inline void note(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(last_notes[notes % 32], sizeof(last_notes[0]), fmt, ap);
	va_end(ap);
	if (verbose)
		printf("call %lu: %s\n", calls, last_notes[notes % 32]);
	notes++;
}

static inline void drive_remove(void)
{
	char cmd[400];

	if (!drive_folder)
		return;
	snprintf(cmd, sizeof(cmd), "rm -rf '%s'", drive_folder);
	if (system(cmd))
		fprintf(stderr, "cannot remove %s\n", drive_folder);
}

__attribute__((format(printf, 1, 2), noreturn)) static inline void die(const char *fmt, ...)
{
	va_list ap;

	fprintf(stderr, "seed %llu: ", (unsigned long long)seed);
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputs("\nwhat was done last:\n", stderr);
	for (unsigned long i = notes > 32 ? notes - 32 : 0; i < notes; i++)
		fprintf(stderr, "  %s\n", last_notes[i % 32]);
	fflush(NULL);
	if (e && !was_cut) { /* it says what went wrong inside; if it can */
		char *status;

		alarm(5);
		status = engine_status_json(e);
		status = status ? strstr(status, "\"commit\":") : NULL;
		fprintf(stderr, "status: %.2000s\n", status ? status : "none");
	}
	if (!getenv("MOMENT_KEEP"))
		drive_remove();
	_exit(1);
}

static inline void must(int64_t r, const char *what)
{
	if (r < 0)
		die("%s: %s", what, strerror((int)-r));
}

/*
 * Forks DRIVE_JOBS jobs, numbered from 0, and returns in these: much of a test is waiting, for a
 * drive that fails to be tried again. They make their folders in the one that it returns. The first
 * that fails ends all, so that its words are the last.
 */
#define DRIVE_JOBS 3u

static inline const char *drive_jobs(const char *where, unsigned int *job)
{
	static char folder[256];
	pid_t pid[DRIVE_JOBS], p;
	int status;

	snprintf(folder, sizeof(folder), "%s/momentfs-jobs-XXXXXX", where);
	if (!mkdtemp(folder))
		die("mkdtemp %s: %s", folder, strerror(errno));
	drive_folder = folder;
	for (*job = 0; *job < DRIVE_JOBS; ++*job) {
		pid[*job] = fork();
		if (pid[*job] < 0)
			die("fork: %s", strerror(errno));
		if (pid[*job] == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			return folder;
		}
	}
	for (unsigned int left = DRIVE_JOBS; left; left--) {
		p = wait(&status);
		for (unsigned int i = 0; i < DRIVE_JOBS; i++) {
			if (pid[i] == p)
				pid[i] = 0; /* its number may be another's now */
			else if (status && pid[i])
				kill(pid[i], SIGKILL);
		}
		if (status) {
			while (wait(NULL) > 0)
				;
			if (!getenv("MOMENT_KEEP"))
				drive_remove();
			exit(1);
		}
	}
	drive_remove();
	exit(0);
}

/* ---- the power ---- */

static void cut_now(void *arg)
{
	(void)arg;
	io_fault_cut(e->io, cut_seed);
	sqlite_fault_cut(vfs, cut_seed);
}

static inline void power_cut(void)
{
	cut_planned = false;
	note("the power goes out (call %lu)", calls);
	loop_call(e->loop, cut_now, NULL);
	was_cut = true;
	longjmp(cut_jump, 1);
}

/* The process died in a sync (drive_die_in_sync): whatever it was told since does not count. */
static inline void look_for_death(void)
{
	if (was_cut || died || !sqlite_fault_is_dead(vfs))
		return;
	cut_planned = false;
	died = true;
	note("the process died in a sync of the catalog (call %lu)", calls);
	longjmp(cut_jump, 1);
}

/* The process dies in sync number n of the catalog from now on. */
static inline void drive_die_in_sync(unsigned int n)
{
	sqlite_fault_die_in_sync(vfs, n);
}

/* The power goes out `us` microseconds after call number `call` was made. */
static inline void drive_cut_at(unsigned long call, unsigned int us)
{
	calls = 0;
	cut_call = call;
	cut_us = us;
	cut_seed = rnd();
	cut_planned = true;
	was_cut = false;
}

static void set_spec(void *arg)
{
	char why[256];

	if (io_fault_set(e->io, arg, why, sizeof(why)))
		die("fault spec \"%s\": %s", (char *)arg, why);
}

static inline void drive_faults(const char *spec)
{
	note("faults \"%s\"", spec);
	loop_call(e->loop, set_spec, (void *)(uintptr_t)spec);
}

/* ---- waiting ---- */

/* Waits until *done, set under wait_lock. Every call counts here, once. */
static inline void wait_for(bool *done)
{
	struct timespec until;
	bool cut = cut_planned && calls >= cut_call;

	calls++;
	if (cut && cut_us == 0)
		power_cut();
	clock_gettime(CLOCK_MONOTONIC, &until);
	if (cut) {
		until.tv_nsec += (long)cut_us * 1000;
		until.tv_sec += until.tv_nsec / 1000000000;
		until.tv_nsec %= 1000000000;
	} else {
		until.tv_sec += CALL_SECONDS;
	}
	pthread_mutex_lock(&wait_lock);
	/* A cut comes at its time also when the call has been answered: others may be under way. */
	while (!*done || cut) {
		if (pthread_cond_timedwait(&wait_cond, &wait_lock, &until) == ETIMEDOUT)
			break;
	}
	if (cut) {
		pthread_mutex_unlock(&wait_lock);
		power_cut();
	}
	if (!*done)
		die("no answer within %d seconds: it hangs", CALL_SECONDS);
	pthread_mutex_unlock(&wait_lock);
	look_for_death();
}

/* ---- ops ---- */

struct drive_op {
	struct engine_op op;
	bool done;
	struct list link;
	char *buf;
};

/* Those that the power cut left unanswered: their memory must outlive the engine. */
static struct list left_ops;

static void drive_op_done(struct engine_op *op)
{
	struct drive_op *o = container_of(op, struct drive_op, op);
	char *to = o->buf;

	for (int i = 0; op->kind == ENGINE_READ && i < op->iovcnt; i++) {
		memcpy(to, op->iov[i].iov_base, op->iov[i].iov_len);
		to += op->iov[i].iov_len;
	}
	pthread_mutex_lock(&wait_lock);
	o->done = true;
	pthread_cond_broadcast(&wait_cond);
	pthread_mutex_unlock(&wait_lock);
}

static inline int64_t drive_op(enum engine_op_kind kind, uint64_t ino, uint64_t off, uint64_t len,
			       uint64_t arg, char *data)
{
	struct drive_op *o = calloc(1, sizeof(*o) + (data ? len : 0));
	int64_t res;

	if (!o)
		die("out of memory");
	o->op = (struct engine_op){.kind = kind,
				   .ino = ino,
				   .off = off,
				   .len = len,
				   .arg = arg,
				   .done = drive_op_done};
	o->buf = (char *)(o + 1);
	if (data && kind == ENGINE_WRITE) {
		memcpy(o->buf, data, len);
		o->op.data = o->buf;
	}
	list_push_back(&left_ops, &o->link);
	engine_submit(e, &o->op);
	wait_for(&o->done);
	list_remove(&o->link);
	res = o->op.res;
	if (kind == ENGINE_READ && res > 0)
		memcpy(data, o->buf, (size_t)res);
	free(o);
	return res;
}

/* ---- the session ---- */

/* Loop thread. */
static void client_reply(void *arg, const void *msg, size_t len, bool pass_arena)
{
	const struct moment_msg *m = msg;

	(void)pass_arena;
	pthread_mutex_lock(&wait_lock);
	(void)arg;
	if (m->id == client.want && !client.there) {
		memcpy(client.reply.bytes, msg, len);
		client.len = len;
		client.there = true;
		pthread_cond_broadcast(&wait_cond);
	}
	pthread_mutex_unlock(&wait_lock);
}

struct send {
	const void *msg;
	size_t len;
	int res;
};

static void send_now(void *arg)
{
	struct send *s = arg;

	s->res = session_receive(client.s, s->msg, s->len);
}

static inline void client_send(struct moment_msg *m, uint16_t type, size_t len)
{
	struct send s = {.msg = m, .len = len};

	m->type = type;
	m->len = (uint32_t)len;
	m->id = ++client.next_id;
	pthread_mutex_lock(&wait_lock);
	client.want = m->id;
	client.there = false;
	pthread_mutex_unlock(&wait_lock);
	loop_call(e->loop, send_now, &s);
	must(s.res, "session_receive");
}

/* Sends and waits: the reply's status; the reply is in client.reply. */
static inline int client_call(struct moment_msg *m, uint16_t type, size_t len)
{
	client_send(m, type, len);
	wait_for(&client.there);
	return client.reply.r.status;
}

static inline const char *client_text(void)
{
	static char text[1100];
	size_t n = client.reply.r.text_len;

	if (n > client.len - sizeof(client.reply.r))
		n = client.len - sizeof(client.reply.r);
	if (n >= sizeof(text))
		n = sizeof(text) - 1;
	memcpy(text, client.reply.bytes + sizeof(client.reply.r), n);
	text[n] = 0;
	return text;
}

static inline int client_simple(uint16_t type, uint16_t flags)
{
	struct moment_simple m = {.h.flags = flags};

	return client_call(&m.h, type, sizeof(m));
}

static inline int client_step(uint16_t type, uint64_t step, uint16_t flags)
{
	struct moment_post_step m = {.h.flags = flags, .step = step};

	return client_call(&m.h, type, sizeof(m));
}

static void client_create(void *arg)
{
	struct session_opts so = {.pid = getpid(), .reply = client_reply};
	int *res = arg;

	*res = session_create(e, &so, &client.s);
}

static void client_destroy(void *arg)
{
	struct session *s = client.s;

	(void)arg;
	pthread_mutex_lock(&wait_lock);
	client.s = NULL;
	pthread_mutex_unlock(&wait_lock);
	session_destroy(s);
}

/* HELLO; on an error there is no session afterwards. */
static inline int client_open(bool rollback)
{
	struct moment_hello m = {.h.flags = rollback ? MOMENT_HELLO_ROLLBACK : 0,
				 .version = MOMENT_PROTOCOL_VERSION,
				 .pid = 1,
				 .client = "crash test"};
	int r;

	loop_call(e->loop, client_create, &r);
	must(r, "session_create");
	r = client_call(&m.h, MOMENT_MSG_HELLO, sizeof(m));
	client.arena = arena_base(engine_arena(e));
	if (r)
		loop_call(e->loop, client_destroy, NULL);
	return r;
}

static inline void client_close(void)
{
	if (client.s)
		loop_call(e->loop, client_destroy, NULL);
}

/* ---- the engine ---- */

static void drive_log(void *arg, enum engine_log_level level, const char *msg)
{
	(void)arg;
	if (verbose && level <= ENGINE_LOG_NOTICE)
		printf("engine: %s\n", msg);
}

static inline void drive_init(void)
{
	pthread_condattr_t a;

	pthread_condattr_init(&a);
	pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
	pthread_cond_init(&wait_cond, &a);
	pthread_condattr_destroy(&a);
	list_init(&left_ops);
	must(sqlite_fault_create("crash", &vfs), "sqlite_fault_create");
}

static inline int drive_try_open(const char *dir, const struct engine_opts *opts, char *err,
				 size_t errlen)
{
	struct engine_opts o = *opts;

	o.faults = o.faults ? o.faults : "seed=1,journal";
	o.vfs = "crash";
	o.log = drive_log;
	o.holder = "crash test";
	cut_planned = was_cut = died = false;
	return engine_open(dir, &o, &e, err, errlen);
}

static inline void drive_open(const char *dir, const struct engine_opts *opts)
{
	char err[1024];
	int r = drive_try_open(dir, opts, err, sizeof(err));

	if (r)
		die("the backing does not open: %s (%s)", err, strerror(-r));
}

/* After a cut, or as a kill -9; the power is back. What a process that died had not synced is in the
 * kernel's cache for the next one. */
static inline void drive_abandon(void)
{
	cut_planned = false;
	if (!was_cut)
		sqlite_fault_die(vfs);
	client_close();
	engine_abandon(e);
	e = NULL;
	while (!list_empty(&left_ops)) {
		struct drive_op *o = list_first(&left_ops, struct drive_op, link);

		list_remove(&o->link);
		free(o);
	}
	if (was_cut)
		sqlite_fault_restore(vfs);
	else
		sqlite_fault_revive(vfs);
}

#endif
