/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_concurrent.c - many threads, few blocks: ops of all kinds at once on a RAM tier of the least
 * size, which holds a fraction of the data.
 *
 * Every 4 KiB page of a file says which file it is of, which page, and of which writing. What each
 * page must hold is known exactly: a lock a cell (half a block) keeps a page's readers and writers
 * apart, a lock a file keeps its size. So neighbours in a block, and all files in the tier, meet in
 * the engine and nowhere else. One that waits for ever is ended by the alarm.
 *
 *	test_concurrent [--seed N] [--ops N] [--threads N] [--io uring|threads]
 */
#include <errno.h>
#include <getopt.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/engine.h"
#include "early_write.h"

#define BLOCK	(64u << 10)
#define RAM	(16u * BLOCK)
#define FILES	8
#define PAGE	4096u
#define CELL	8u /* pages */
#define CELLS	48u
#define PAGES	(CELLS * CELL)
#define RUN_MAX 40u /* cells that one op touches: more than 1 MiB */
#define THREADS 64u

struct shadow {
	pthread_rwlock_t size_lock; /* of size, ino */
	pthread_rwlock_t cell[CELLS];
	uint64_t ino;
	uint32_t pages;	     /* the size, in pages */
	uint32_t id;	     /* changes when it is made anew */
	uint32_t gen[PAGES]; /* 0: zeros */
};

static struct shadow files[FILES];
static pthread_rwlock_t world = PTHREAD_RWLOCK_INITIALIZER; /* for writing: nobody else is at it */
static struct engine *e;
static atomic_uint next_gen, next_id;
static uint64_t seed;
static unsigned long ops_each;
static char dir[256];
static bool limited; /* the pool */
static atomic_ulong no_space, cancelled, done_ops;

__attribute__((format(printf, 1, 2), noreturn)) static void die(const char *fmt, ...)
{
	va_list ap;

	fprintf(stderr, "seed %llu: ", (unsigned long long)seed);
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputc('\n', stderr);
	_exit(1);
}

static uint64_t mix(uint64_t z)
{
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ z >> 27) * 0x94d049bb133111ebull;
	return z ^ z >> 31;
}

struct worker {
	pthread_t thread;
	uint64_t rng;
	unsigned char *buf;
};

static uint64_t below(struct worker *w, uint64_t n)
{
	return mix(w->rng += 0x9e3779b97f4a7c15ull) % n;
}

/* ---- pages ---- */

static void page_fill(void *page, uint32_t id, uint32_t n, uint32_t gen)
{
	uint64_t *v = page, z = mix((uint64_t)id << 40 ^ (uint64_t)n << 20 ^ gen);

	v[0] = gen;
	v[1] = (uint64_t)id << 32 | n;
	for (unsigned int i = 2; i < PAGE / 8; i++)
		v[i] = z + i;
}

static bool page_is(const void *page, uint32_t id, uint32_t n, uint32_t gen)
{
	unsigned char want[PAGE];

	if (gen)
		page_fill(want, id, n, gen);
	else
		memset(want, 0, sizeof(want));
	return !memcmp(page, want, PAGE);
}

static void check_pages(const struct shadow *f, const unsigned char *buf, uint32_t first,
			uint32_t n, const char *when)
{
	for (uint32_t i = 0; i < n; i++) {
		const uint64_t *v = (const void *)(buf + (size_t)i * PAGE);

		if (!page_is(v, f->id, first + i, f->gen[first + i]))
			die("%s: page %u of file %u (writing %u) has writing %llu of file %llu, page %llu",
			    when, first + i, f->id, f->gen[first + i], (unsigned long long)v[0],
			    (unsigned long long)v[1] >> 32,
			    (unsigned long long)(v[1] & UINT32_MAX));
	}
}

static void lock_cells(struct shadow *f, uint32_t first, uint32_t n, bool write)
{
	for (uint32_t i = first; i < first + n; i++) {
		if (write)
			pthread_rwlock_wrlock(&f->cell[i]);
		else
			pthread_rwlock_rdlock(&f->cell[i]);
	}
}

static void unlock_cells(struct shadow *f, uint32_t first, uint32_t n)
{
	for (uint32_t i = first; i < first + n; i++)
		pthread_rwlock_unlock(&f->cell[i]);
}

static uint32_t cells(uint32_t pages)
{
	return (pages + CELL - 1) / CELL;
}

/* ---- ops ---- */

/* A run of pages within the size; its cells are [*cell, +*ncells). Size lock held. */
static bool pick_run(struct worker *w, struct shadow *f, uint32_t *first, uint32_t *n,
		     uint32_t *cell, uint32_t *ncells)
{
	uint32_t most = below(w, 4) ? CELL * 3 : CELL * RUN_MAX;

	if (!f->pages)
		return false;
	*first = (uint32_t)below(w, f->pages);
	*n = 1 + (uint32_t)below(w, most);
	if (*n > f->pages - *first)
		*n = f->pages - *first;
	*cell = *first / CELL;
	*ncells = cells(*first + *n) - *cell;
	return true;
}

static void do_read(struct worker *w, struct shadow *f)
{
	uint32_t first, n, cell, ncells;
	int64_t r;

	pthread_rwlock_rdlock(&f->size_lock);
	if (pick_run(w, f, &first, &n, &cell, &ncells)) {
		lock_cells(f, cell, ncells, false);
		r = engine_pread(e, f->ino, w->buf, (uint64_t)n * PAGE, (uint64_t)first * PAGE);
		if (r != (int64_t)n * PAGE)
			die("read of %u pages: %lld", n, (long long)r);
		check_pages(f, w->buf, first, n, "read");
		unlock_cells(f, cell, ncells);
	}
	pthread_rwlock_unlock(&f->size_lock);
}

/* A write that found no room for all may have written some of it: each page is the old or the new. */
static void adopt(struct worker *w, struct shadow *f, uint32_t first, uint32_t n, uint32_t gen)
{
	int64_t r = engine_pread(e, f->ino, w->buf, (uint64_t)n * PAGE, (uint64_t)first * PAGE);

	if (r < 0)
		die("read after ENOSPC: %lld", (long long)r);
	for (uint32_t i = 0; i < (uint64_t)r / PAGE; i++) {
		if (page_is(w->buf + (size_t)i * PAGE, f->id, first + i, gen))
			f->gen[first + i] = gen;
	}
	check_pages(f, w->buf, first, (uint32_t)((uint64_t)r / PAGE), "after ENOSPC");
}

static void write_pages(struct worker *w, struct shadow *f, uint32_t first, uint32_t n)
{
	uint32_t gen = atomic_fetch_add(&next_gen, 1) + 1;
	int64_t r;

	for (uint32_t i = 0; i < n; i++)
		page_fill(w->buf + (size_t)i * PAGE, f->id, first + i, gen);
	r = (below(w, 2) ? engine_pwrite : early_pwrite)(e, f->ino, w->buf, (uint64_t)n * PAGE,
							 (uint64_t)first * PAGE);
	if (r == (int64_t)n * PAGE) {
		for (uint32_t i = 0; i < n; i++)
			f->gen[first + i] = gen;
	} else if (r == -ENOSPC || (r > 0 && r < (int64_t)n * PAGE)) {
		atomic_fetch_add(&no_space, 1);
		adopt(w, f, first, n, gen);
	} else {
		die("write of %u pages: %lld", n, (long long)r);
	}
}

static void do_write(struct worker *w, struct shadow *f)
{
	uint32_t first, n, cell, ncells;

	pthread_rwlock_rdlock(&f->size_lock);
	if (pick_run(w, f, &first, &n, &cell, &ncells)) {
		lock_cells(f, cell, ncells, true);
		write_pages(w, f, first, n);
		unlock_cells(f, cell, ncells);
	}
	pthread_rwlock_unlock(&f->size_lock);
}

static void take_size(struct shadow *f)
{
	struct ns_attr a;

	if (ns_getattr(engine_ns(e), f->ino, &a) || a.size % PAGE)
		die("file %u is gone, or of an odd size", f->id);
	f->pages = (uint32_t)(a.size / PAGE);
}

static void do_append(struct worker *w, struct shadow *f)
{
	uint32_t n = 1 + (uint32_t)below(w, 4 * CELL);

	pthread_rwlock_wrlock(&f->size_lock);
	if (n > PAGES - f->pages)
		n = PAGES - f->pages;
	if (n)
		write_pages(w, f, f->pages, n);
	take_size(f);
	pthread_rwlock_unlock(&f->size_lock);
}

static void do_truncate(struct worker *w, struct shadow *f)
{
	uint32_t to = (uint32_t)below(w, PAGES + 1);
	int64_t r;

	pthread_rwlock_wrlock(&f->size_lock);
	r = engine_call(e, ENGINE_TRUNCATE, f->ino, 0, (uint64_t)to * PAGE, 0);
	if (r)
		die("truncate: %lld", (long long)r);
	for (uint32_t i = to; i < PAGES; i++)
		f->gen[i] = 0;
	f->pages = to;
	pthread_rwlock_unlock(&f->size_lock);
}

static void do_punch(struct worker *w, struct shadow *f)
{
	uint32_t first, n, cell, ncells;
	int64_t r;

	pthread_rwlock_rdlock(&f->size_lock);
	if (pick_run(w, f, &first, &n, &cell, &ncells)) {
		lock_cells(f, cell, ncells, true);
		r = engine_call(e, ENGINE_PUNCH, f->ino, (uint64_t)first * PAGE, (uint64_t)n * PAGE,
				0);
		if (r && r != -ENOSPC)
			die("punch: %lld", (long long)r);
		for (uint32_t i = first; !r && i < first + n; i++)
			f->gen[i] = 0;
		for (uint32_t i = first; r && i < first + n; i++) {
			if (engine_pread(e, f->ino, w->buf, PAGE, (uint64_t)i * PAGE) != PAGE)
				die("read after a punch");
			if (page_is(w->buf, f->id, i, 0))
				f->gen[i] = 0;
		}
		unlock_cells(f, cell, ncells);
	}
	pthread_rwlock_unlock(&f->size_lock);
}

static void do_allocate(struct worker *w, struct shadow *f)
{
	uint32_t first, n, cell, ncells;
	int64_t r;

	pthread_rwlock_rdlock(&f->size_lock);
	if (pick_run(w, f, &first, &n, &cell, &ncells)) {
		r = engine_call(e, ENGINE_ALLOCATE, f->ino, (uint64_t)first * PAGE,
				(uint64_t)n * PAGE, 1);
		if (r && r != -ENOSPC)
			die("allocate: %lld", (long long)r);
	}
	pthread_rwlock_unlock(&f->size_lock);
}

static void make_file(struct shadow *f)
{
	char name[32];
	struct ns_attr a;

	f->id = atomic_fetch_add(&next_id, 1) + 1;
	snprintf(name, sizeof(name), "f%u", f->id);
	if (ns_create(engine_ns(e), NS_ROOT, name, 0644, 0, 0, true, &a))
		die("create %s", name);
	f->ino = a.ino;
	f->pages = 0;
	memset(f->gen, 0, sizeof(f->gen));
}

static void do_replace(struct shadow *f)
{
	char name[32];

	pthread_rwlock_wrlock(&f->size_lock);
	snprintf(name, sizeof(name), "f%u", f->id);
	if (ns_unlink(engine_ns(e), NS_ROOT, name))
		die("unlink %s", name);
	/* It can still be read. */
	if (f->pages) {
		unsigned char page[PAGE];

		if (engine_pread(e, f->ino, page, PAGE, 0) != PAGE)
			die("read of a removed file");
		check_pages(f, page, 0, 1, "removed");
	}
	ns_forget(engine_ns(e), f->ino, 1);
	make_file(f);
	pthread_rwlock_unlock(&f->size_lock);
}

static void do_sync(struct worker *w, struct shadow *f)
{
	int64_t r;

	pthread_rwlock_rdlock(&f->size_lock);
	r = below(w, 2) ? engine_call(e, ENGINE_FSYNC, f->ino, 0, 0, 0)
			: engine_call(e, ENGINE_SYNC, 0, 0, 0, 0);
	if (r)
		die("sync: %lld", (long long)r);
	pthread_rwlock_unlock(&f->size_lock);
}

static void do_look(struct worker *w, struct shadow *f)
{
	struct engine_statfs fs;
	struct engine_step_state st;
	char *text;
	int64_t r;

	pthread_rwlock_rdlock(&f->size_lock);
	switch (below(w, 6)) {
	case 0:
		text = engine_status_json(e);
		if (!text || text[0] != '{')
			die("status");
		free(text);
		break;
	case 1:
		text = engine_stats_text(e);
		if (!text)
			die("stats");
		free(text);
		break;
	case 2:
		engine_get_statfs(e, &fs);
		engine_get_step(e, &st);
		if (st.torn || fs.free > fs.total)
			die("statfs: %llu of %llu free", (unsigned long long)fs.free,
			    (unsigned long long)fs.total);
		break;
	case 3:
		engine_call(e, ENGINE_RESIDENT, f->ino, 0, 0, 0);
		break;
	case 4:
		r = engine_call(e, ENGINE_SCRUB, 0, 0, 0, 0);
		if (r && r != -EBUSY)
			die("scrub: %lld", (long long)r);
		break;
	default:
		r = engine_call(e, ENGINE_PREFETCH, f->ino, below(w, PAGES) * PAGE,
				below(w, PAGES) * PAGE, 0);
		if (r)
			die("prefetch: %lld", (long long)r);
	}
	pthread_rwlock_unlock(&f->size_lock);
}

/* An op that is called back. */
struct async {
	struct engine_op op;
	pthread_mutex_t lock;
	pthread_cond_t cond;
	bool done;
};

static void async_done(struct engine_op *op)
{
	struct async *a = (struct async *)op;

	pthread_mutex_lock(&a->lock);
	a->done = true;
	pthread_cond_signal(&a->cond);
	pthread_mutex_unlock(&a->lock);
}

static void do_cancel(struct worker *w, struct shadow *f)
{
	struct async a = {.op = {.done = async_done}};

	pthread_rwlock_rdlock(&f->size_lock);
	a.op.kind = below(w, 2) ? ENGINE_READ : below(w, 2) ? ENGINE_FSYNC : ENGINE_SYNC;
	a.op.ino = f->ino;
	a.op.len = a.op.kind == ENGINE_READ ? ENGINE_OP_MAX : 0;
	pthread_mutex_init(&a.lock, NULL);
	pthread_cond_init(&a.cond, NULL);
	lock_cells(f, 0, ENGINE_OP_MAX / PAGE / CELL, false);
	engine_submit(e, &a.op);
	if (below(w, 2))
		usleep((useconds_t)below(w, 300));
	engine_cancel(e, &a.op);
	pthread_mutex_lock(&a.lock);
	while (!a.done)
		pthread_cond_wait(&a.cond, &a.lock);
	pthread_mutex_unlock(&a.lock);
	unlock_cells(f, 0, ENGINE_OP_MAX / PAGE / CELL);
	if (a.op.res == -EINTR)
		atomic_fetch_add(&cancelled, 1);
	else if (a.op.res < 0)
		die("op to be cancelled: %lld", (long long)a.op.res);
	pthread_mutex_destroy(&a.lock);
	pthread_cond_destroy(&a.cond);
	pthread_rwlock_unlock(&f->size_lock);
}

static void check_all(struct worker *w, const char *when)
{
	for (int i = 0; i < FILES; i++) {
		struct shadow *f = &files[i];
		int64_t r = engine_pread(e, f->ino, w->buf, (uint64_t)PAGES * PAGE, 0);

		if (r != (int64_t)f->pages * PAGE)
			die("%s: file %u has %lld bytes, not %u pages", when, f->id, (long long)r,
			    f->pages);
		check_pages(f, w->buf, 0, f->pages, when);
	}
}

/* A commit, changes that come to nothing, and a rollback with everything that may run beside it. */
static void do_rollback(struct worker *w)
{
	struct async a[6];
	int64_t r = engine_call(e, ENGINE_SYNC, 0, 0, 0, 0);

	if (r)
		die("commit: %lld", (long long)r);
	for (int i = 0; i < 20; i++) {
		struct shadow *f = &files[below(w, FILES)];
		uint64_t off = below(w, PAGES) * PAGE, len = (1 + below(w, 4 * CELL)) * PAGE;

		memset(w->buf, 0x5a, len);
		/* Where room is short a write may ask for a commit. */
		if (below(w, 4) && !limited)
			r = early_pwrite(e, f->ino, w->buf, len, off);
		else
			r = engine_call(e, limited || below(w, 2) ? ENGINE_TRUNCATE : ENGINE_PUNCH,
					f->ino, 0, off, 0);
		if (r < 0 && r != -ENOSPC)
			die("change before a rollback: %lld", (long long)r);
	}
	for (unsigned int i = 0; i < 6; i++) {
		static const enum engine_op_kind kinds[] = {ENGINE_READ,     ENGINE_PREFETCH,
							    ENGINE_ROLLBACK, ENGINE_READ,
							    ENGINE_SCRUB,    ENGINE_SYNC};

		a[i] = (struct async){.op = {.kind = kinds[i],
					     .ino = files[i].ino,
					     .len = ENGINE_OP_MAX,
					     .done = async_done}};
		pthread_mutex_init(&a[i].lock, NULL);
		pthread_cond_init(&a[i].cond, NULL);
		engine_submit(e, &a[i].op);
	}
	for (unsigned int i = 0; i < 6; i++) {
		pthread_mutex_lock(&a[i].lock);
		while (!a[i].done)
			pthread_cond_wait(&a[i].cond, &a[i].lock);
		pthread_mutex_unlock(&a[i].lock);
		if (a[i].op.res < 0 && !(a[i].op.res == -EBUSY && a[i].op.kind == ENGINE_SCRUB))
			die("op %u beside a rollback: %lld", i, (long long)a[i].op.res);
		pthread_mutex_destroy(&a[i].lock);
		pthread_cond_destroy(&a[i].cond);
	}
	check_all(w, "after a rollback");
}

static void *work(void *arg)
{
	struct worker *w = arg;

	for (unsigned long i = 0; i < ops_each; i++) {
		struct shadow *f = &files[below(w, FILES)];
		uint64_t k = below(w, 1000);

		if (k == 0) {
			pthread_rwlock_wrlock(&world);
			do_rollback(w);
			pthread_rwlock_unlock(&world);
			continue;
		}
		pthread_rwlock_rdlock(&world);
		if (k < 350)
			do_read(w, f);
		else if (k < 650)
			do_write(w, f);
		else if (k < 730)
			do_append(w, f);
		else if (k < 760)
			do_truncate(w, f);
		else if (k < 800)
			do_punch(w, f);
		else if (k < 820)
			do_allocate(w, f);
		else if (k < 835)
			do_replace(f);
		else if (k < 860)
			do_sync(w, f);
		else if (k < 930)
			do_look(w, f);
		else
			do_cancel(w, f);
		pthread_rwlock_unlock(&world);
		atomic_fetch_add(&done_ops, 1);
	}
	return NULL;
}

/* ---- all dirty, everybody reads as much as a READ may ---- */

static void *read_much(void *arg)
{
	struct worker *w = arg;

	for (unsigned long i = 0; i < ops_each / 10 + 1; i++) {
		struct shadow *f = &files[below(w, FILES)];
		uint32_t first = (uint32_t)below(w, PAGES - 256), cell = first / CELL;
		uint32_t ncells = cells(first + 256) - cell;
		int64_t r;

		lock_cells(f, cell, ncells, true);
		r = engine_pread(e, f->ino, w->buf, 256 * PAGE, (uint64_t)first * PAGE);
		if (r != 256 * PAGE)
			die("read of 1 MiB: %lld", (long long)r);
		check_pages(f, w->buf, first, 256, "1 MiB");
		write_pages(w, f, first, 1 + (uint32_t)below(w, 256));
		unlock_cells(f, cell, ncells);
	}
	return NULL;
}

static void fill_all(struct worker *w)
{
	for (int i = 0; i < FILES; i++) {
		files[i].pages = 0;
		write_pages(w, &files[i], 0, PAGES);
		take_size(&files[i]);
		if (files[i].pages != PAGES)
			die("no room");
	}
}

/* ---- */

static void start(enum io_engine io, uint64_t limit)
{
	struct engine_opts o = {.ram = RAM,
				.block = BLOCK,
				.size = limit,
				.commit_seconds = ENGINE_COMMIT_OFF,
				.io = io,
				.holder = "test_concurrent"};
	char err[1024];

	if (engine_open(dir, &o, &e, err, sizeof(err)))
		die("%s", err);
}

static void run(enum io_engine io, uint64_t limit, void *(*fn)(void *), unsigned int threads)
{
	static struct worker w[THREADS];
	char cmd[512];

	printf("seed %llu, %u threads, %lu operations each, io=%s, size=%lluM, %s\n",
	       (unsigned long long)seed, threads, ops_each, io == IO_AUTO ? "auto" : "threads",
	       (unsigned long long)limit >> 20, fn == work ? "all kinds" : "large reads");
	fflush(stdout);
	snprintf(dir, sizeof(dir), "%s/momentfs-concurrent-XXXXXX",
		 getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
	if (!mkdtemp(dir))
		die("mkdtemp: %s", strerror(errno));
	limited = limit != 0;
	start(io, limit);
	for (int i = 0; i < FILES; i++)
		make_file(&files[i]);
	for (unsigned int i = 0; i < threads; i++) {
		w[i].rng = mix(seed + i * 1000003ull);
		w[i].buf = malloc((size_t)PAGES * PAGE);
	}
	if (fn != work)
		fill_all(&w[0]);
	for (unsigned int i = 0; i < threads; i++) {
		if (pthread_create(&w[i].thread, NULL, fn, &w[i]))
			die("no thread");
	}
	for (unsigned int i = 0; i < threads; i++)
		pthread_join(w[i].thread, NULL);
	check_all(&w[0], "at the end");
	if (engine_close(e, true))
		die("close");
	start(io, limit);
	for (int i = 0; i < FILES; i++) {
		char name[32];
		struct ns_attr a;

		snprintf(name, sizeof(name), "f%u", files[i].id);
		if (ns_peek(engine_ns(e), NS_ROOT, name, &a))
			die("%s is gone", name);
		files[i].ino = a.ino;
	}
	check_all(&w[0], "after a remount");
	if (engine_call(e, ENGINE_SCRUB, 0, 0, 0, 0))
		die("scrub");
	engine_close(e, true);
	for (unsigned int i = 0; i < threads; i++)
		free(w[i].buf);
	snprintf(cmd, sizeof(cmd), "rm -rf '%s'", dir);
	if (system(cmd))
		die("cannot remove %s", dir);
}

int main(int argc, char **argv)
{
	static const struct option o[] = {{"seed", 1, NULL, 's'},
					  {"ops", 1, NULL, 'o'},
					  {"threads", 1, NULL, 't'},
					  {"io", 1, NULL, 'i'},
					  {NULL, 0, NULL, 0}};
	unsigned int threads = 16;
	int ch, io = -1;

	seed = (uint64_t)time(NULL) << 16 ^ (uint64_t)getpid();
	ops_each = 150;
	while ((ch = getopt_long(argc, argv, "", o, NULL)) != -1) {
		if (ch == 's')
			seed = strtoull(optarg, NULL, 0);
		else if (ch == 'o')
			ops_each = strtoul(optarg, NULL, 0);
		else if (ch == 't')
			threads = (unsigned int)strtoul(optarg, NULL, 0);
		else if (ch == 'i')
			io = strcmp(optarg, "threads") ? IO_AUTO : IO_THREADS;
		else
			return 2;
	}
	if (!threads || threads > THREADS)
		return 2;
	for (int i = 0; i < FILES; i++) {
		pthread_rwlock_init(&files[i].size_lock, NULL);
		for (unsigned int k = 0; k < CELLS; k++)
			pthread_rwlock_init(&files[i].cell[k], NULL);
	}
	alarm(ops_each < 1000 ? 600 : 3600); /* something hangs */
	for (int k = 0; k < 2; k++) {
		enum io_engine engine = k ? IO_THREADS : IO_AUTO;

		if (io >= 0 && (enum io_engine)io != engine)
			continue;
		run(engine, 0, read_much, threads);
		run(engine, 0, work, threads);
		run(engine, 7u << 20, work, threads);
	}
	printf("%lu operations, %lu found no room, %lu were cancelled\nok\n", done_ops, no_space,
	       cancelled);
	return 0;
}
