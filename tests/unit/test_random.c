/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_random.c - random operations on an engine against a model in memory.
 *
 * Create, write and read at odd offsets and sizes, truncate, rename, unlink, punch, allocate,
 * fsync, commit, roll back, unmount and remount, with a RAM tier far smaller than the data. The
 * model is the obvious one: a buffer a file. Every seed is printed; --seed replays it.
 *
 * A third of the runs has a pool that is too small and nearly always full: writes find room for
 * a part or for nothing, while readers wait for the blocks that they were to fill.
 *
 *	test_random [--seed N] [--ops N] [--io uring|threads] [--block BYTES] [--full] [--verbose]
 */
#include <errno.h>
#include <getopt.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/engine.h"
#include "early_write.h"
#include "marks.h"

#define FILES	 24
#define MAX_SIZE (700u * 1024)
#define FULL_POOL (5u << 20) /* of a full run: less than the files want */

struct model {
	bool exists;
	char name[32];
	uint64_t ino;
	uint64_t size;
	unsigned char *data; /* MAX_SIZE, zeros past size */
};

static struct model live[FILES], committed[FILES];
static uint64_t rng, seed;
static unsigned long op_count;
static bool verbose;
static char dir[256];
static struct engine *e;
static struct engine_opts opts;
static char last[16][160];
static uint64_t plain_step;
static bool bracket, full;
static bool synced; /* an fsync was asked for inside it */

static uint64_t rnd(void)
{
	uint64_t z = (rng += 0x9e3779b97f4a7c15ull);

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ z >> 27) * 0x94d049bb133111ebull;
	return z ^ z >> 31;
}

static uint64_t below(uint64_t n)
{
	return rnd() % n;
}

__attribute__((format(printf, 1, 2))) static void note(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(last[op_count % 16], sizeof(last[0]), fmt, ap);
	va_end(ap);
	if (verbose)
		printf("%lu: %s\n", op_count, last[op_count % 16]);
}

__attribute__((format(printf, 1, 2), noreturn)) static void die(const char *fmt, ...)
{
	va_list ap;

	fprintf(stderr, "seed %llu, operation %lu: ", (unsigned long long)seed, op_count);
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputs("\nthe last operations:\n", stderr);
	for (unsigned long i = op_count < 15 ? 0 : op_count - 15; i <= op_count; i++)
		fprintf(stderr, "  %lu: %s\n", i, last[i % 16]);
	exit(1);
}

static void log_line(void *arg, enum engine_log_level level, const char *msg)
{
	(void)arg;
	if (level <= ENGINE_LOG_WARNING || verbose)
		fprintf(stderr, "engine: %s\n", msg);
}

static void start(void)
{
	char err[1024];
	int r = engine_open(dir, &opts, &e, err, sizeof(err));

	if (r)
		die("open: %s (%s)", err, strerror(-r));
}

static void copy_models(struct model *to, const struct model *from)
{
	for (int i = 0; i < FILES; i++) {
		unsigned char *data = to[i].data;

		to[i] = from[i];
		to[i].data = data;
		memcpy(data, from[i].data, MAX_SIZE);
	}
}

static void is_committed(void)
{
	copy_models(committed, live);
}

static struct model *pick(bool exists)
{
	int k = (int)below(FILES);

	for (int i = 0; i < FILES; i++) {
		if (live[(k + i) % FILES].exists == exists)
			return &live[(k + i) % FILES];
	}
	return NULL;
}

/* Offsets and lengths that like the edges. */
static uint64_t odd(uint64_t max)
{
	static const uint64_t edges[] = {0, 1, 127, 4095, 4096, 4097, 65535, 65536, 65537, 131072};
	uint64_t v = below(4) ? below(max + 1) : edges[below(10)] + 65536 * below(4);

	return v > max ? max : v;
}

static void check_file(const struct model *m, uint64_t off, uint64_t len)
{
	static unsigned char buf[MAX_SIZE + 1];
	uint64_t want = off >= m->size ? 0 : m->size - off < len ? m->size - off : len;
	int64_t r = engine_pread(e, m->ino, buf, len, off);

	if (r != (int64_t)want)
		die("read %s %llu+%llu: %lld, not %llu", m->name, (unsigned long long)off,
		    (unsigned long long)len, (long long)r, (unsigned long long)want);
	for (uint64_t i = 0; i < want; i++) {
		if (buf[i] != m->data[off + i])
			die("read %s: byte %llu is %02x, not %02x (size %llu)", m->name,
			    (unsigned long long)(off + i), buf[i], m->data[off + i],
			    (unsigned long long)m->size);
	}
}

static void check_all(const char *when)
{
	struct ns_counts nc;
	unsigned int n = 0;

	for (int i = 0; i < FILES; i++) {
		struct ns_attr a;
		int r;

		if (!live[i].exists)
			continue;
		n++;
		r = ns_peek(engine_ns(e), NS_ROOT, live[i].name, &a);
		if (r)
			die("%s: %s: %s", when, live[i].name, strerror(-r));
		if (a.size != live[i].size)
			die("%s: %s has %llu bytes, not %llu", when, live[i].name,
			    (unsigned long long)a.size, (unsigned long long)live[i].size);
		live[i].ino = a.ino;
		check_file(&live[i], 0, MAX_SIZE);
	}
	ns_count(engine_ns(e), &nc);
	if (nc.files != n)
		die("%s: %llu files, not %u", when, (unsigned long long)nc.files, n);
}

static void must(int64_t r, const char *what)
{
	if (r < 0)
		die("%s: %s", what, strerror((int)-r));
}

static void do_create(void)
{
	struct model *m = pick(false);
	struct ns_attr a;

	if (!m)
		return;
	snprintf(m->name, sizeof(m->name), "f%lu", op_count);
	note("create %s", m->name);
	must(ns_create(engine_ns(e), NS_ROOT, m->name, 0644, 0, 0, false, &a), "create");
	m->exists = true;
	m->ino = a.ino;
	m->size = 0;
	memset(m->data, 0, MAX_SIZE);
}

static void do_write(void)
{
	static unsigned char buf[MAX_SIZE];
	struct model *m = pick(true);
	uint64_t off, len, fill;
	int64_t r;

	if (!m)
		return;
	off = below(3) ? odd(MAX_SIZE - 1) : below(2) ? m->size : 0;
	if (off >= MAX_SIZE)
		off = MAX_SIZE - 1;
	len = below(8) ? 1 + odd(below(3) ? 9000 : 140000) : 1 + odd(MAX_SIZE - 1);
	if (off + len > MAX_SIZE)
		len = MAX_SIZE - off;
	note("write %s %llu+%llu", m->name, (unsigned long long)off, (unsigned long long)len);
	fill = rnd();
	for (uint64_t i = 0; i < len; i++)
		buf[i] = (unsigned char)(fill >> (i % 8 * 8) ^ i);
	r = (below(2) ? engine_pwrite : early_pwrite)(e, m->ino, buf, len, off);
	if (full && r == -ENOSPC)
		return;
	must(r, "write");
	if (r == 0 || (uint64_t)r > len || (!full && (uint64_t)r < len))
		die("write of %llu: %lld", (unsigned long long)len, (long long)r);
	len = (uint64_t)r;
	memcpy(m->data + off, buf, len);
	if (off + len > m->size)
		m->size = off + len;
}

static void cut(struct model *m, uint64_t size)
{
	note("truncate %s %llu -> %llu", m->name, (unsigned long long)m->size,
	     (unsigned long long)size);
	must(engine_call(e, ENGINE_TRUNCATE, m->ino, 0, size, 0), "truncate");
	if (size < m->size)
		memset(m->data + size, 0, m->size - size);
	m->size = size;
}

static void do_truncate(void)
{
	struct model *m = pick(true);

	if (!m)
		return;
	cut(m, odd(MAX_SIZE));
}

static void do_punch(void)
{
	struct model *m = pick(true);
	uint64_t off, len, end;
	int64_t r;

	if (!m)
		return;
	off = odd(MAX_SIZE);
	len = 1 + odd(MAX_SIZE);
	note("punch %s %llu+%llu", m->name, (unsigned long long)off, (unsigned long long)len);
	end = off + len > m->size ? m->size : off + len;
	r = engine_call(e, ENGINE_PUNCH, m->ino, off, len, 0);
	if (full && r == -ENOSPC) { /* some of it may be zeros */
		static unsigned char buf[MAX_SIZE];

		must(engine_pread(e, m->ino, buf, end - off, off), "read");
		for (uint64_t i = off; i < end; i++) {
			if (buf[i - off])
				continue;
			m->data[i] = 0;
		}
		return;
	}
	must(r, "punch");
	if (off < end)
		memset(m->data + off, 0, end - off);
}

static void do_allocate(void)
{
	struct model *m = pick(true);
	uint64_t off, len;
	bool keep = below(2);
	int64_t r;

	if (!m)
		return;
	off = odd(MAX_SIZE / 2);
	len = 1 + odd(MAX_SIZE / 2 - 1);
	note("allocate %s %llu+%llu keep %d", m->name, (unsigned long long)off,
	     (unsigned long long)len, keep);
	r = engine_call(e, ENGINE_ALLOCATE, m->ino, off, len, keep);
	if (full && r == -ENOSPC)
		return;
	must(r, "allocate");
	if (!keep && off + len > m->size)
		m->size = off + len;
}

/* A full pool commits by itself to get room: what there is to go back to is not known else. */
static void settle(void)
{
	if (!full || bracket)
		return;
	must(engine_call(e, ENGINE_SYNC, 0, 0, 0, 0), "commit");
	is_committed();
}

struct racer {
	struct engine_op op;
	sem_t *ended;
	unsigned char got[65536];
	uint64_t n;
};

static void race_done(struct engine_op *op)
{
	struct racer *x = (struct racer *)op;

	for (int i = 0; op->kind == ENGINE_READ && i < op->iovcnt; i++) {
		memcpy(x->got + x->n, op->iov[i].iov_base, op->iov[i].iov_len);
		x->n += op->iov[i].iov_len;
	}
	sem_post(x->ended);
}

/* In one instant for the loop. */
static void race_begin(void *arg)
{
	struct racer *x = arg;

	engine_submit(e, &x[0].op);
	engine_submit(e, &x[1].op);
}

/*
 * All the room that is left, until it is removed; with something that a commit would free, so that
 * who finds no room waits for one.
 */
static void hog(void)
{
	struct ns_attr a;
	uint64_t off = 0;

	must(ns_create(engine_ns(e), NS_ROOT, "crumb", 0644, 0, 0, false, &a), "create");
	if (engine_pwrite(e, a.ino, "x", 1, 0) == 1 && !bracket)
		must(engine_call(e, ENGINE_SYNC, 0, 0, 0, 0), "commit");
	must(ns_create(engine_ns(e), NS_ROOT, "hog", 0644, 0, 0, false, &a), "create");
	for (uint64_t len = 65536; len >= 4096; len /= 16) {
		while (!engine_call(e, ENGINE_ALLOCATE, a.ino, off, len, 1))
			off += 65536;
	}
	must(ns_unlink(engine_ns(e), NS_ROOT, "crumb"), "unlink");
}

/* A file's last block is written, all of it, and read at the same time: each byte is the old or the new. */
static void do_race(void)
{
	static unsigned char buf[65536];
	static struct racer x[2];
	struct model *m = pick(true);
	uint64_t off, len, fill = rnd();
	bool hogged = false;
	sem_t ended;

#ifdef __SANITIZE_THREAD__
	return; /* a reader beside a writer sees a mix: that is allowed, and a race */
#endif
	if (!m || !m->size)
		return;
	off = (m->size - 1) / sizeof(buf) * sizeof(buf);
	len = m->size - off;
	if (full && below(2)) {
		/* The block was long, is short, and leaves memory: others are there then. */
		if (len > 1)
			cut(m, off + 1 + below(len < 20000 ? len - 1 : 20000));
		len = m->size - off;
		settle();
		for (int i = 0; i < 3; i++)
			check_file(pick(true), 0, MAX_SIZE);
		for (int i = 0; i < FILES; i++) {
			if (live[i].exists && &live[i] != m && live[i].size)
				check_file(&live[i], live[i].size - 1, 1);
		}
		hog();
		hogged = true;
	}
	note("write and read %s %llu+%llu", m->name, (unsigned long long)off,
	     (unsigned long long)len);
	for (uint64_t i = 0; i < len; i++)
		buf[i] = (unsigned char)(fill >> (i % 8 * 8) ^ i);
	sem_init(&ended, 0, 0);
	for (int i = 0; i < 2; i++) {
		x[i].op = (struct engine_op){.kind = i ? ENGINE_READ : ENGINE_WRITE,
					     .ino = m->ino,
					     .off = off,
					     .len = len,
					     .data = buf,
					     .done = race_done};
		x[i].ended = &ended;
		x[i].n = 0;
	}
	loop_call(engine_loop(e), race_begin, x);
	for (int i = 0; i < 2; i++) {
		while (sem_wait(&ended))
			;
	}
	sem_destroy(&ended);
	if (hogged)
		must(ns_unlink(engine_ns(e), NS_ROOT, "hog"), "unlink");
	if (x[1].op.res != (int64_t)len || x[1].n != len)
		die("read %s: %lld, not %llu", m->name, (long long)x[1].op.res,
		    (unsigned long long)len);
	for (uint64_t i = 0; i < len; i++) {
		if (x[1].got[i] != m->data[off + i] && x[1].got[i] != buf[i])
			die("read %s beside a write: byte %llu is neither old nor new", m->name,
			    (unsigned long long)(off + i));
	}
	if (!full || x[0].op.res != -ENOSPC) {
		if (x[0].op.res != (int64_t)len)
			die("write %s: %lld", m->name, (long long)x[0].op.res);
		memcpy(m->data + off, buf, len);
	}
	if (full && below(4) == 0)
		check_all("after a write beside a read");
}

static void do_seek(void)
{
	struct model *m = pick(true);
	int64_t r;

	if (!m || !m->size)
		return;
	note("seek %s", m->name);
	/* Every byte that is not zero must lie in what is called data. */
	for (uint64_t pos = 0; pos < m->size;) {
		int64_t data = engine_call(e, ENGINE_SEEK, m->ino, pos, 0, SEEK_DATA);
		uint64_t stop = data < 0 ? m->size : (uint64_t)data;

		for (uint64_t i = pos; i < stop; i++) {
			if (m->data[i])
				die("seek %s: byte %llu is in a hole", m->name,
				    (unsigned long long)i);
		}
		if (data < 0) {
			if (data != -ENXIO)
				must(data, "seek data");
			break;
		}
		r = engine_call(e, ENGINE_SEEK, m->ino, (uint64_t)data, 0, SEEK_HOLE);
		must(r, "seek hole");
		if ((uint64_t)r <= (uint64_t)data || (uint64_t)r > m->size)
			die("seek %s: data at %lld, hole at %lld", m->name, (long long)data,
			    (long long)r);
		pos = (uint64_t)r;
	}
}

static void do_rename(void)
{
	struct model *m = pick(true), *over = below(2) ? pick(true) : NULL;
	char name[32];

	if (!m || over == m)
		return;
	if (over)
		snprintf(name, sizeof(name), "%s", over->name);
	else
		snprintf(name, sizeof(name), "r%lu", op_count);
	note("rename %s %s", m->name, name);
	must(ns_rename(engine_ns(e), NS_ROOT, m->name, NS_ROOT, name, 0), "rename");
	if (over)
		over->exists = false;
	snprintf(m->name, sizeof(m->name), "%s", name);
}

static void do_unlink(void)
{
	struct model *m = pick(true);

	if (!m)
		return;
	note("unlink %s", m->name);
	must(ns_unlink(engine_ns(e), NS_ROOT, m->name), "unlink");
	m->exists = false;
}

static void do_commit(void)
{
	struct model *m = pick(true);

	if (m && below(2)) {
		note("fsync %s", m->name);
		must(engine_call(e, ENGINE_FSYNC, m->ino, 0, 0, 0), "fsync");
		if (bracket) {
			synced = true; /* durable with the end */
			return;
		}
	} else {
		int64_t r;

		note("commit");
		r = engine_call(e, ENGINE_SYNC, 0, 0, 0, 0);
		if (bracket) {
			if (r != -EBUSY)
				die("a commit inside a bracket: %lld", (long long)r);
			return;
		}
		must(r, "commit");
	}
	is_committed();
}

static void do_rollback(void)
{
	note("rollback");
	settle();
	must(engine_call(e, ENGINE_ROLLBACK, 0, 0, 0, 0), "rollback");
	bracket = false;
	copy_models(live, committed);
	check_all("after a rollback");
}

static void do_bracket(void)
{
	if (!bracket) {
		settle();
		note("begin %llu", (unsigned long long)plain_step);
		must(engine_call(e, ENGINE_STEP_BEGIN, 0, 0, 0, ++plain_step), "begin");
		synced = false;
		engine_step_names(e); /* the daemon says so when one is changed */
	} else {
		note("end %llu", (unsigned long long)plain_step);
		must(engine_call(e, ENGINE_STEP_END, 0, 0, 0, plain_step), "end");
		if (synced)
			is_committed();
	}
	bracket = !bracket;
}

static void do_remount(void)
{
	bool commit = below(4) != 0;

	note("remount, %s", commit ? "with a commit" : "without");
	settle();
	must(engine_close(e, commit), "close");
	if (commit && !bracket)
		is_committed();
	else
		copy_models(live, committed);
	bracket = false;
	start();
	check_all("after a remount");
}

static void do_scrub(void)
{
	int64_t r;

	note("scrub");
	r = engine_call(e, ENGINE_SCRUB, 0, 0, 0, 0);
	if (r)
		die("scrub found %lld damaged extents", (long long)r);
}

static void step(void)
{
	struct model *m;
	uint64_t k = below(1000);

	if (k < 60)
		do_create();
	else if (k < 500)
		do_write();
	else if (k < 740) {
		m = pick(true);
		if (m) {
			uint64_t off = odd(MAX_SIZE), len = 1 + odd(below(4) ? 9000 : MAX_SIZE);

			note("read %s %llu+%llu", m->name, (unsigned long long)off,
			     (unsigned long long)len);
			check_file(m, off, len);
		}
	} else if (k < 820)
		do_truncate();
	else if (k < 870)
		do_punch();
	else if (k < 890)
		do_allocate();
	else if (k < 910)
		do_seek();
	else if (k < 935)
		do_rename();
	else if (k < 965)
		do_unlink();
	else if (k < 985)
		do_commit();
	else if (k < 990)
		do_bracket();
	else if (k < 992)
		do_scrub();
	else if (k < 995)
		do_rollback();
	else if (k < 997)
		do_remount();
	else
		do_race();
	if (full && below(16) == 0)
		do_race();
}

static void run(uint64_t s, unsigned long ops)
{
	char cmd[512];

	seed = rng = s;
	bracket = false;
	plain_step = 0;
	snprintf(dir, sizeof(dir), "%s/momentfs-random-XXXXXX",
		 getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
	if (!mkdtemp(dir))
		die("mkdtemp: %s", strerror(errno));
	for (int i = 0; i < FILES; i++)
		live[i].exists = committed[i].exists = false;
	start();
	for (op_count = 0; op_count < ops; op_count++) {
		step();
		if (op_count % 8 == 0)
			marks_check(e);
	}
	note("end");
	check_all("at the end");
	if (bracket) {
		must(engine_call(e, ENGINE_STEP_END, 0, 0, 0, plain_step), "end");
		bracket = false;
	}
	must(engine_close(e, true), "close");
	start();
	check_all("after the last remount");
	must(engine_close(e, true), "close");
	snprintf(cmd, sizeof(cmd), "rm -rf '%s'", dir);
	if (system(cmd))
		die("cannot remove %s", dir);
}

int main(int argc, char **argv)
{
	static const struct option o[] = {{"seed", 1, NULL, 's'},  {"ops", 1, NULL, 'o'},
					  {"io", 1, NULL, 'i'},	   {"block", 1, NULL, 'b'},
					  {"seeds", 1, NULL, 'n'}, {"verbose", 0, NULL, 'v'},
					  {"full", 0, NULL, 'f'},
					  {NULL, 0, NULL, 0}};
	unsigned long ops = 4000, seeds = 1;
	uint64_t first = (uint64_t)time(NULL) << 16 ^ (uint64_t)getpid();
	int ch, io = -1;
	uint32_t block = 64u << 10;
	bool full_only = false;

	while ((ch = getopt_long(argc, argv, "", o, NULL)) != -1) {
		if (ch == 's')
			first = strtoull(optarg, NULL, 0);
		else if (ch == 'o')
			ops = strtoul(optarg, NULL, 0);
		else if (ch == 'n')
			seeds = strtoul(optarg, NULL, 0);
		else if (ch == 'b')
			block = (uint32_t)strtoul(optarg, NULL, 0);
		else if (ch == 'i')
			io = strcmp(optarg, "threads") ? IO_AUTO : IO_THREADS;
		else if (ch == 'f')
			full_only = true;
		else if (ch == 'v')
			verbose = true;
		else
			return 2;
	}
	for (int i = 0; i < FILES; i++) {
		live[i].data = calloc(1, MAX_SIZE);
		committed[i].data = calloc(1, MAX_SIZE);
	}
	for (unsigned long n = 0; n < seeds; n++) {
		for (int k = full_only ? 2 : 0; k < 3; k++) {
			enum io_engine engine = k == 1 ? IO_THREADS : IO_AUTO;

			if (io >= 0 && (enum io_engine)io != engine)
				continue;
			opts = (struct engine_opts){.ram = 20ull * block,
						    .block = block,
						    .size = k == 2 ? FULL_POOL : 0,
						    .commit_seconds = ENGINE_COMMIT_OFF,
						    .io = engine,
						    .log = log_line,
						    .holder = "test_random"};
			full = k == 2;
			printf("seed %llu, %lu operations, io=%s%s\n",
			       (unsigned long long)(first + n), ops, k == 1 ? "threads" : "auto",
			       full ? ", a full pool" : "");
			fflush(stdout);
			run(first + n, full ? ops / 8 : ops); /* it compares far more often */
		}
	}
	for (int i = 0; i < FILES; i++) {
		free(live[i].data);
		free(committed[i].data);
	}
	puts("ok");
	return 0;
}
