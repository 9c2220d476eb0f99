/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_loop.c - the loop thread: posting order, work threads, watches, timers, and the end.
 *
 * Variables that only loop callbacks touch are plain: the test looks at them through loop_call()
 * or after loop_destroy(), both of which order memory. ThreadSanitizer checks that claim.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/io.h"
#include "engine/loop.h"

#define MS 1000000u

static void nothing(void *arg)
{
	(void)arg;
}

static struct loop *make_loop(unsigned int workers)
{
	struct loop *loop;

	assert_int_equal(loop_create(&loop, NULL, workers), 0);
	return loop;
}

/* --- posting ---------------------------------------------------------------------------------- */

#define POSTERS 4
#define POSTS	3000

struct post {
	struct loop_task task;
	struct poster *by;
	int n;
};

struct poster {
	struct loop *loop;
	pthread_t thread;
	int seen; /* loop thread */
	int wrong;
	struct post posts[POSTS];
};

static void post_seen(struct loop_task *task)
{
	struct post *p = container_of(task, struct post, task);

	p->by->wrong += p->n != p->by->seen;
	p->by->seen++;
}

static void *poster_main(void *arg)
{
	struct poster *by = arg;

	for (int i = 0; i < POSTS; i++) {
		by->posts[i] = (struct post){.task.run = post_seen, .by = by, .n = i};
		loop_post(by->loop, &by->posts[i].task);
		if (i % 500 == 0)
			usleep(200); /* so that the loop falls asleep in between */
	}
	return NULL;
}

static void test_posts_keep_their_order(void **state)
{
	struct poster *by = calloc(POSTERS, sizeof(*by));
	struct loop *loop = make_loop(1);

	(void)state;
	assert_non_null(by);
	for (int i = 0; i < POSTERS; i++) {
		by[i].loop = loop;
		assert_int_equal(pthread_create(&by[i].thread, NULL, poster_main, &by[i]), 0);
	}
	for (int i = 0; i < POSTERS; i++)
		pthread_join(by[i].thread, NULL);
	loop_call(loop, nothing, NULL); /* posted last, so all have run when it returns */
	for (int i = 0; i < POSTERS; i++) {
		assert_int_equal(by[i].seen, POSTS);
		assert_int_equal(by[i].wrong, 0);
	}
	loop_destroy(loop);
	free(by);
}

struct where {
	struct loop *loop;
	bool current;
	pthread_t thread;
};

static void look_where(void *arg)
{
	struct where *w = arg;

	w->current = loop_is_current(w->loop);
	w->thread = pthread_self();
}

static void test_call_runs_on_the_loop_thread(void **state)
{
	struct loop *loop = make_loop(1);
	struct where w = {.loop = loop};

	(void)state;
	assert_false(loop_is_current(loop));
	loop_call(loop, look_where, &w);
	assert_true(w.current);
	assert_false(pthread_equal(w.thread, pthread_self()));
	loop_destroy(loop);
}

/* --- work ------------------------------------------------------------------------------------- */

static struct loop *cur;   /* the loop under test, set before anything is queued */
static atomic_int order_n; /* what ran, in order */
static const char *order[32];

static void note(const char *what)
{
	order[atomic_fetch_add(&order_n, 1)] = what;
}

static void check_order(const char *const *want)
{
	int n = 0;

	for (; want[n]; n++) {
		assert_true(n < atomic_load(&order_n));
		assert_string_equal(order[n], want[n]);
	}
	assert_int_equal(atomic_load(&order_n), n);
}

struct job {
	struct loop_work work;
	const char *name;
	sem_t *started, *gate; /* may be NULL */
	struct loop_task task;
	bool ran_on_loop, done_on_loop;
};

static void job_run(struct loop_work *work)
{
	struct job *j = container_of(work, struct job, work);

	j->ran_on_loop = loop_is_current(cur);
	if (j->started)
		sem_post(j->started);
	if (j->gate)
		sem_wait(j->gate);
	note(j->name);
}

static void job_done(struct loop_work *work)
{
	struct job *j = container_of(work, struct job, work);

	j->done_on_loop = loop_is_current(cur);
}

static struct job job(const char *name)
{
	return (struct job){.work = {.run = job_run, .done = job_done}, .name = name};
}

static void test_urgent_work_goes_first(void **state)
{
	static const char *const want[] = {"gate", "u1", "u2", "n1", "n2", NULL};
	struct job g = job("gate"), n1 = job("n1"), n2 = job("n2"), u1 = job("u1"), u2 = job("u2");
	sem_t started, gate;

	(void)state;
	sem_init(&started, 0, 0);
	sem_init(&gate, 0, 0);
	order_n = 0;
	cur = make_loop(1);
	g.started = &started;
	g.gate = &gate;
	loop_work(cur, &g.work);
	sem_wait(&started);
	loop_work(cur, &n1.work);
	loop_work(cur, &n2.work);
	loop_work_urgent(cur, &u1.work);
	loop_work_urgent(cur, &u2.work);
	sem_post(&gate);
	loop_destroy(cur);
	check_order(want);
	assert_true(n1.done_on_loop && n2.done_on_loop && u1.done_on_loop && u2.done_on_loop);
	assert_false(n1.ran_on_loop || u1.ran_on_loop);
	sem_destroy(&started);
	sem_destroy(&gate);
}

/* With two threads and two long jobs in the queue, urgent work still finds a thread. */
static void test_a_thread_is_kept_for_urgent_work(void **state)
{
	static const char *const want[] = {"urgent", "long1", "long2", NULL};
	struct job l1 = job("long1"), l2 = job("long2"), u = job("urgent");
	sem_t started, gate, ran;

	(void)state;
	sem_init(&started, 0, 0);
	sem_init(&gate, 0, 0);
	sem_init(&ran, 0, 0);
	order_n = 0;
	cur = make_loop(2);
	l1.started = &started;
	l1.gate = l2.gate = &gate;
	u.started = &ran;
	loop_work(cur, &l1.work);
	loop_work(cur, &l2.work);
	sem_wait(&started);
	loop_work_urgent(cur, &u.work);
	sem_wait(&ran); /* or the test hangs */
	while (atomic_load(&order_n) < 1)
		usleep(100);
	sem_post(&gate);
	sem_post(&gate);
	loop_destroy(cur);
	check_order(want);
	sem_destroy(&started);
	sem_destroy(&gate);
	sem_destroy(&ran);
}

static void task_note(struct loop_task *task)
{
	note(container_of(task, struct job, task)->name);
}

static void post_and_run(struct loop_work *work)
{
	struct job *j = container_of(work, struct job, work);

	j->task.run = task_note;
	loop_post(cur, &j->task);
}

static void note_done(struct loop_work *work)
{
	(void)work;
	note("done");
}

static void test_what_work_posts_runs_before_its_done(void **state)
{
	(void)state;
	for (int i = 0; i < 200; i++) {
		static const char *const want[] = {"task", "done", NULL};
		struct job j = {.work = {.run = post_and_run, .done = note_done}, .name = "task"};

		order_n = 0;
		cur = make_loop(2);
		loop_work(cur, &j.work);
		loop_destroy(cur);
		check_order(want);
	}
}

struct chain {
	struct loop_work work;
	int left;
};

static void chain_run(struct loop_work *work)
{
	container_of(work, struct chain, work)->left--;
}

static void chain_done(struct loop_work *work)
{
	if (container_of(work, struct chain, work)->left)
		loop_work(cur, work);
}

static void test_destroy_waits_for_work_that_begets_work(void **state)
{
	struct chain c[3];

	(void)state;
	cur = make_loop(2);
	for (int i = 0; i < 3; i++) {
		c[i] = (struct chain){.work = {.run = chain_run, .done = chain_done}, .left = 200};
		loop_work(cur, &c[i].work);
	}
	loop_destroy(cur);
	for (int i = 0; i < 3; i++)
		assert_int_equal(c[i].left, 0);
}

/* --- watches ---------------------------------------------------------------------------------- */

struct sock {
	struct loop_watch w;
	int other;
	int calls, bytes;
	struct sock *kills; /* unwatches that one */
};

static void sock_ready(struct loop_watch *w, uint32_t events)
{
	struct sock *s = container_of(w, struct sock, w);
	char c;

	if ((events & EPOLLIN) && read(w->fd, &c, 1) == 1)
		s->bytes++; /* one a call: level-triggered */
	s->calls++;
	if (s->kills) {
		loop_unwatch(cur, &s->kills->w);
		s->kills = NULL;
	}
	if (s->bytes == 100)
		loop_unwatch(cur, w);
}

static void sock_open(struct sock *s)
{
	int fds[2];

	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
	*s = (struct sock){.w = {.fd = fds[0], .events = EPOLLIN, .ready = sock_ready},
			   .other = fds[1]};
}

static void sock_close(struct sock *s)
{
	close(s->w.fd);
	close(s->other);
}

static void sock_watch(void *arg)
{
	assert_int_equal(loop_watch(cur, &((struct sock *)arg)->w), 0);
}

static void sock_pause(void *arg)
{
	assert_int_equal(loop_rewatch(cur, &((struct sock *)arg)->w, 0), 0);
}

static void sock_resume(void *arg)
{
	assert_int_equal(loop_rewatch(cur, &((struct sock *)arg)->w, EPOLLIN), 0);
}

static void sock_bytes(void *arg)
{
	struct sock *s = arg;

	order_n = s->bytes;
}

static int bytes_of(struct sock *s)
{
	loop_call(cur, sock_bytes, s);
	return order_n;
}

static void test_watch_rewatch_unwatch(void **state)
{
	char data[150] = {0};
	struct sock s;

	(void)state;
	cur = make_loop(1);
	sock_open(&s);
	assert_int_equal(write(s.other, data, 50), 50);
	loop_call(cur, sock_watch, &s);
	while (bytes_of(&s) < 50)
		usleep(100);
	loop_call(cur, sock_pause, &s);
	assert_int_equal(write(s.other, data, 100), 100);
	usleep(20000);
	assert_int_equal(bytes_of(&s), 50);
	loop_call(cur, sock_resume, &s);
	while (bytes_of(&s) < 100)
		usleep(100);
	usleep(20000);
	assert_int_equal(bytes_of(&s), 100); /* it unwatched itself; 50 bytes are left */
	loop_destroy(cur);
	sock_close(&s);
}

/* Both are ready in the same turn; whichever comes first unwatches the other. */
static struct sock kill_a, kill_b;

static void watch_both(void *arg)
{
	(void)arg;
	sock_watch(&kill_a);
	sock_watch(&kill_b);
}

static void test_unwatched_in_the_same_turn_is_not_called(void **state)
{
	(void)state;
	cur = make_loop(1);
	sock_open(&kill_a);
	sock_open(&kill_b);
	kill_a.kills = &kill_b;
	kill_b.kills = &kill_a;
	assert_int_equal(write(kill_a.other, "x", 1), 1);
	assert_int_equal(write(kill_b.other, "x", 1), 1);
	loop_call(cur, watch_both, NULL);
	while (bytes_of(&kill_a) + bytes_of(&kill_b) < 1)
		usleep(100);
	usleep(20000);
	assert_int_equal(bytes_of(&kill_a) + bytes_of(&kill_b), 1);
	loop_destroy(cur);
	sock_close(&kill_a);
	sock_close(&kill_b);
}

/* --- timers ----------------------------------------------------------------------------------- */

struct timer {
	struct loop_timer t;
	const char *name;
	uint64_t set_ns, delay_ns, fired_ns;
	int again, early;
};

static struct timer timers[4];

static void timer_fire(struct loop_timer *t)
{
	struct timer *tm = container_of(t, struct timer, t);

	tm->fired_ns = loop_now_ns();
	tm->early += tm->fired_ns < tm->set_ns + tm->delay_ns;
	if (tm->again-- > 0) {
		tm->set_ns = tm->fired_ns;
		loop_timer_set(cur, t, tm->delay_ns);
		return;
	}
	note(tm->name);
}

static void timer_set(struct timer *tm, const char *name, uint64_t delay_ns)
{
	tm->t.fire = timer_fire;
	tm->name = name;
	tm->set_ns = loop_now_ns();
	tm->delay_ns = delay_ns;
	loop_timer_set(cur, &tm->t, delay_ns);
}

static void set_timers(void *arg)
{
	(void)arg;
	memset(timers, 0, sizeof(timers));
	timer_set(&timers[0], "30 ms", 30 * MS);
	timer_set(&timers[1], "10 ms", 10 * MS);
	timers[2].again = 3;
	timer_set(&timers[2], "4 times 5 ms", 5 * MS);
	timer_set(&timers[3], "never", 15 * MS);
	loop_timer_clear(cur, &timers[3].t);
	loop_timer_clear(cur, &timers[3].t);
	timer_set(&timers[0], "40 ms", 40 * MS); /* re-armed: fires once, later */
}

static void test_timers(void **state)
{
	static const char *const want[] = {"10 ms", "4 times 5 ms", "40 ms", NULL};

	(void)state;
	order_n = 0;
	cur = make_loop(1);
	loop_call(cur, set_timers, NULL);
	while (atomic_load(&order_n) < 3)
		usleep(1000);
	usleep(20000);
	loop_destroy(cur);
	check_order(want);
	for (int i = 0; i < 3; i++)
		assert_int_equal(timers[i].early, 0);
}

static void set_far_timer(void *arg)
{
	(void)arg;
	memset(timers, 0, sizeof(timers));
	timer_set(&timers[0], "far", UINT64_C(3600000) * MS);
}

static void test_destroy_does_not_wait_for_timers(void **state)
{
	uint64_t begin = loop_now_ns();

	(void)state;
	cur = make_loop(1);
	loop_call(cur, set_far_timer, NULL);
	loop_destroy(cur);
	assert_true(loop_now_ns() - begin < UINT64_C(10000) * MS);
}

/* --- with io ---------------------------------------------------------------------------------- */

#define OPS 32

static struct io *io;
static struct io_op ops[OPS];
static int ops_done, ops_failed;

static void op_done(struct io_op *op)
{
	ops_failed += op->res != 0;
	if (++ops_done < 4 * OPS) /* completions submit, four times over */
		io_submit(io, op);
}

static void submit_ops(void *arg)
{
	char *buf = arg;

	for (int i = 0; i < OPS; i++) {
		ops[i] = (struct io_op){.kind = i % 2 ? IO_READ : IO_WRITE,
					.buf = buf + i * MOMENT_UNIT,
					.off = (uint64_t)i * MOMENT_UNIT,
					.len = MOMENT_UNIT,
					.done = op_done};
		io_submit(io, &ops[i]);
	}
}

static uint64_t thread_cpu;

static void read_thread_cpu(void *arg)
{
	struct timespec ts;

	(void)arg;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
	thread_cpu = (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void with_io(enum io_engine engine)
{
	char path[] = "/tmp/test_loop.XXXXXX", *buf;
	int fd = mkstemp(path);
	struct io_opts opts = {.engine = engine, .fd = fd, .depth = 8};
	uint64_t before;

	assert_true(fd >= 0);
	unlink(path);
	assert_int_equal(posix_fallocate(fd, 0, OPS * MOMENT_UNIT), 0);
	buf = aligned_alloc(MOMENT_UNIT, OPS * MOMENT_UNIT);
	assert_non_null(buf);
	memset(buf, 7, OPS * MOMENT_UNIT);
	assert_int_equal(io_create(&opts, &io), 0);
	assert_int_equal(loop_create(&cur, io, 2), 0);

	/* Destroyed with ops in flight: all complete first. */
	ops_done = ops_failed = 0;
	loop_call(cur, submit_ops, buf);
	loop_destroy(cur);
	assert_int_equal(ops_done, 5 * OPS - 1);
	assert_int_equal(ops_failed, 0);
	assert_int_equal(io_pending(io), 0);

	/* Another loop on the same io; and when nothing is left to do it sleeps. */
	assert_int_equal(loop_create(&cur, io, 2), 0);
	ops_done = ops_failed = 0;
	loop_call(cur, submit_ops, buf);
	while (io_pending(io))
		usleep(1000);
	loop_call(cur, read_thread_cpu, NULL);
	before = thread_cpu;
	usleep(300000);
	loop_call(cur, read_thread_cpu, NULL);
	assert_true(thread_cpu - before < 100 * MS);
	loop_destroy(cur);
	assert_int_equal(ops_failed, 0);
	io_destroy(io);
	free(buf);
	close(fd);
}

static void test_with_io_auto(void **state)
{
	(void)state;
	with_io(IO_AUTO);
}

static void test_with_io_threads(void **state)
{
	(void)state;
	with_io(IO_THREADS);
}

/* --- threads ---------------------------------------------------------------------------------- */

static void read_own_status(void *arg)
{
	char path[64], *text = arg;
	FILE *f;
	size_t n;

	snprintf(path, sizeof(path), "/proc/thread-self/status");
	f = fopen(path, "r");
	n = f ? fread(text, 1, 4095, f) : 0;
	text[n] = '\0';
	if (f)
		fclose(f);
}

static char worker_status[4096];

static void worker_read_status(struct loop_work *work)
{
	(void)work;
	read_own_status(worker_status);
}

static void check_status(const char *status, const char *name)
{
	unsigned long long blocked = 0;
	const char *at = strstr(status, "SigBlk:");

	assert_non_null(at);
	assert_int_equal(sscanf(at, "SigBlk: %llx", &blocked), 1);
	/* SIGTERM, SIGINT, SIGHUP, SIGUSR1: for the main thread */
	assert_int_equal(blocked & 0x4203u, 0x4203u);
	assert_non_null(strstr(status, name));
}

static void worker_ended(struct loop_work *work)
{
	(void)work;
}

static void test_threads_have_names_and_block_signals(void **state)
{
	struct loop_work work = {.run = worker_read_status, .done = worker_ended};
	char status[4096];

	(void)state;
	cur = make_loop(1);
	loop_call(cur, read_own_status, status);
	loop_work(cur, &work);
	loop_destroy(cur);
	check_status(status, "moment-loop");
	check_status(worker_status, "moment-work0");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_posts_keep_their_order),
		cmocka_unit_test(test_call_runs_on_the_loop_thread),
		cmocka_unit_test(test_urgent_work_goes_first),
		cmocka_unit_test(test_a_thread_is_kept_for_urgent_work),
		cmocka_unit_test(test_what_work_posts_runs_before_its_done),
		cmocka_unit_test(test_destroy_waits_for_work_that_begets_work),
		cmocka_unit_test(test_watch_rewatch_unwatch),
		cmocka_unit_test(test_unwatched_in_the_same_turn_is_not_called),
		cmocka_unit_test(test_timers),
		cmocka_unit_test(test_destroy_does_not_wait_for_timers),
		cmocka_unit_test(test_with_io_auto),
		cmocka_unit_test(test_with_io_threads),
		cmocka_unit_test(test_threads_have_names_and_block_signals),
	};

	alarm(120); /* a hang is a failure */
	return cmocka_run_group_tests(tests, NULL, NULL);
}
