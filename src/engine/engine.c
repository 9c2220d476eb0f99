/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engine.c - opening a backing directory and letting go of it.
 *
 * The order of opening is the order of dependence: lock, arena, catalog (names and maps), pool
 * (what the maps use), io (registers the arena), loop, commit. Nothing is written to the backing
 * before it is known to be ours. What was read counts as committed, so catalog and pool make it durable
 * while they open: a process before may have died between a write and its sync.
 *
 * A backing holds: lock, catalog.sqlite (with -wal and -shm beside it), pool, ballast,
 * session.sock.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "engine/blockmap.h"
#include "engine/engine_impl.h"
#include "engine/memory.h"
#include "engine/ours.h"

#define DEFAULT_BLOCK	(2u << 20)
#define MIN_BLOCK	(64u << 10)
#define MAX_BLOCK	(64u << 20)
#define MIN_CHUNKS	16u	      /* the window: two blocks of each of four arrays, twice */
#define RAM_HEADROOM	(64ull << 20) /* kept free below a memory limit */
#define DEFAULT_RAM_MIN (64ull << 20)

void engine_log(struct engine *e, enum engine_log_level level, const char *fmt, ...)
{
	char msg[PATH_MAX + 1024];
	va_list ap;

	if (!e->opts.log)
		return;
	va_start(ap, fmt);
	vsnprintf(msg, sizeof(msg), fmt, ap);
	va_end(ap);
	e->opts.log(e->opts.arg, level, msg);
}

static void human(uint64_t v, char out[32])
{
	static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
	unsigned int u = 0;
	double d = (double)v;

	while (d >= 1024 && u < 4) {
		d /= 1024;
		u++;
	}
	snprintf(out, 32, d == (double)(uint64_t)d ? "%.0f %s" : "%.1f %s", d, unit[u]);
}

/* ---- hooks ---- */

static void taking_memory(void *arg, uint64_t done, uint64_t size)
{
	char a[32], b[32];

	human(done, a);
	human(size, b);
	engine_log(arg, ENGINE_LOG_NOTICE,
		   "taking memory for the RAM tier: %s of %s (ram=SIZE for less)", a, b);
}

static void report(void *arg, int err, uint64_t ino, uint64_t off, uint64_t len, const char *what)
{
	engine_report(arg, err, ino, off, len, what);
}

/* What is written goes nowhere if the file has been removed, or another one has its name. */
static int intact(void *arg)
{
	struct engine *e = arg;

	for (unsigned int i = 0; i < KEPT_FILES; i++) {
		struct kept_file *k = &e->kept[i];
		struct stat st;
		bool there = !fstatat(e->dirfd, k->name, &st, AT_SYMLINK_NOFOLLOW);

		if (!there && errno != ENOENT)
			continue;
		if (!k->ino && there) { /* the WAL, made by the first commit */
			k->dev = st.st_dev;
			k->ino = st.st_ino;
		}
		if (!k->ino || (there && st.st_dev == k->dev && st.st_ino == k->ino))
			continue;
		if (!e->told_gone)
			engine_log(
				e, ENGINE_LOG_ERROR,
				"%s/%s was %s while it is in use: nothing can be made durable any more; what was "
				"written since the last commit is in memory only: copy what you need out of the "
				"mount before it ends",
				e->path, k->name, there ? "replaced" : "removed");
		e->told_gone = true;
		return -EIO;
	}
	e->told_gone = false;
	return 0;
}

static int remember_files(struct engine *e)
{
	static const char *const names[KEPT_FILES] = {"pool", "catalog.sqlite",
						      "catalog.sqlite-wal"};
	struct stat st;

	for (unsigned int i = 0; i < KEPT_FILES; i++)
		e->kept[i].name = names[i];
	if (fstat(pool_fd(e->pool), &st))
		return -errno;
	e->kept[0].dev = st.st_dev;
	e->kept[0].ino = st.st_ino;
	return e->c.readonly ? 0 : intact(e);
}

struct gone {
	struct loop_task task;
	struct engine *e;
	uint64_t ino;
};

static void gone_run(struct loop_task *t)
{
	struct gone *g = container_of(t, struct gone, task);

	if (!g->e->closing)
		ops_drop_file(g->e, g->ino);
	free(g);
}

static void on_gone(void *arg, uint64_t ino)
{
	struct engine *e = arg;
	struct gone *g;

	if (!e->loop)
		return;
	g = calloc(1, sizeof(*g));
	if (!g)
		return; /* its space comes back at the next mount */
	g->e = e;
	g->ino = ino;
	g->task.run = gone_run;
	loop_post(e->loop, &g->task);
}

static int on_map(void *arg, struct map_copy *map)
{
	struct engine *e = arg;

	list_push_back(&e->loaded, &map->link);
	return 0;
}

/* ---- the backing directory ---- */

/* With what a making that was cut short leaves: catalog.c starts over. */
static const char *const own_names[] = {"lock",
					"catalog.sqlite",
					"catalog.sqlite-wal",
					"catalog.sqlite-shm",
					"pool",
					"ballast",
					"session.sock",
					"lost+found",
					"catalog.sqlite.new",
					"catalog.sqlite.new-wal",
					"catalog.sqlite.new-shm",
					"catalog.sqlite.new-journal"};

/* 1: ours, 0: empty, -errno. `foreign` gets a name that is not ours. */
static int look_around(int dirfd, char *foreign, size_t len)
{
	int fd = openat(dirfd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *d = fd < 0 ? NULL : fdopendir(fd);
	struct dirent *de;
	bool catalog = false;

	foreign[0] = 0;
	if (!d) {
		int r = -errno;

		if (fd >= 0)
			close(fd);
		return r;
	}
	while ((de = readdir(d))) {
		bool known = !strcmp(de->d_name, ".") || !strcmp(de->d_name, "..");

		for (size_t i = 0; i < sizeof(own_names) / sizeof(own_names[0]); i++)
			known = known || !strcmp(de->d_name, own_names[i]);
		if (!strcmp(de->d_name, "catalog.sqlite"))
			catalog = true;
		if (!known)
			snprintf(foreign, len, "%s", de->d_name);
	}
	closedir(d);
	return catalog ? 1 : 0;
}

static int open_dir(struct engine *e, const char *backing, char *err, size_t errlen)
{
	struct stat st;
	int r;

	if (stat(backing, &st)) {
		if (errno != ENOENT || e->opts.readonly) {
			r = -errno;
			snprintf(err, errlen, "backing %s: %s", backing, strerror(-r));
			return r;
		}
		if (mkdir(backing, 0700)) {
			r = -errno;
			snprintf(err, errlen, "backing %s: cannot make the directory: %s%s",
				 backing, strerror(-r),
				 r == -ENOENT ? " (its parent directory does not exist)" : "");
			return r;
		}
		e->made_dir = true;
	} else if (!S_ISDIR(st.st_mode)) {
		snprintf(err, errlen,
			 "backing %s is not a directory: give a directory on the NVMe drive",
			 backing);
		return -ENOTDIR;
	}
	e->path = realpath(backing, NULL);
	e->dirfd = open(backing, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (!e->path || e->dirfd < 0) {
		r = -errno;
		snprintf(err, errlen, "backing %s: %s (running as uid %ld)", backing, strerror(-r),
			 (long)geteuid());
		return r;
	}
	r = ours_check_dir(e->dirfd, e->path, err, errlen);
	if (r)
		return r;
	if (!e->opts.readonly && faccessat(e->dirfd, ".", W_OK | X_OK, AT_EACCESS)) {
		r = -errno;
		snprintf(err, errlen, "backing %s is not writable for uid %ld: %s%s", e->path,
			 (long)geteuid(), strerror(-r),
			 r == -EROFS ? " (mount it with -o ro to look at it)" : "");
		return r;
	}
	return 0;
}

/* ---- memory ---- */

static int choose_ram(struct engine *e, uint32_t block, uint64_t *ram, char *err, size_t errlen)
{
	uint64_t avail = memory_available();
	uint64_t most = avail > RAM_HEADROOM ? avail - RAM_HEADROOM : 0;
	uint64_t min = (uint64_t)MIN_CHUNKS * block;
	char a[32], b[32], m[32];

	e->ram_available = avail;
	*ram = e->opts.ram;
	if (!*ram) {
		*ram = max_u64(avail / 4, min_u64(DEFAULT_RAM_MIN, most));
		*ram = max_u64(*ram, min);
	}
	*ram = *ram / block * block;
	human(*ram, a);
	human(most, b);
	human(min, m);
	if (*ram < min) {
		uint32_t fits = block;
		char c[32];

		while (fits > MIN_BLOCK && e->opts.ram < (uint64_t)MIN_CHUNKS * fits)
			fits /= 2;
		human(fits, c);
		snprintf(
			err, errlen,
			"ram=%s is too small: with blocks of %u KiB the window needs at least %s%s%s%s",
			a, block >> 10, m,
			e->opts.ram >= (uint64_t)MIN_CHUNKS * fits ? "; a new backing with block="
								   : "",
			e->opts.ram >= (uint64_t)MIN_CHUNKS * fits ? c : "",
			e->opts.ram >= (uint64_t)MIN_CHUNKS * fits ? " would do with it" : "");
		return -EINVAL;
	}
	if (*ram > most) {
		if (e->opts.ram_forced || most < min) {
			snprintf(
				err, errlen,
				"ram=%s does not fit: this process may use %s more (memory limit or free memory, "
				"less 64 MiB headroom)",
				a, b);
			return -ENOMEM;
		}
		*ram = most / block * block;
	}
	return 0;
}

/* ---- open ---- */

/* Catalog and pool, made or opened; checks that they belong together. */
static int open_stores(struct engine *e, char *err, size_t errlen)
{
	struct cache *c = &e->c;
	char foreign[NAME_MAX + 1];
	struct catalog_meta meta;
	struct pool_super super;
	const char *why = "";
	struct stat st;
	int ours = look_around(e->dirfd, foreign, sizeof(foreign));
	bool create = ours == 0;
	struct catalog_opts co = {
		.dir = e->path,
		.readonly = e->opts.readonly,
		.on_map = on_map,
		.on_gone = on_gone,
		.arg = e,
		.vfs = e->opts.vfs,
	};
	struct pool_opts po = {
		.dirfd = e->dirfd,
		.name = "pool",
		.limit = e->opts.size,
		.readonly = e->opts.readonly,
	};
	int r;

	if (ours < 0) {
		snprintf(err, errlen, "backing %s: %s", e->path, strerror(-ours));
		return ours;
	}
	if (create && foreign[0]) {
		snprintf(
			err, errlen,
			"backing %s is not empty and not a momentfs backing (it has \"%s\"): give an empty or new "
			"directory",
			e->path, foreign);
		return -ENOTEMPTY;
	}
	if (create && e->opts.readonly) {
		snprintf(err, errlen,
			 "backing %s holds no state yet, so there is nothing to see with -o ro",
			 e->path);
		return -ENOENT;
	}
	if (create) {
		co.create = po.create = true;
		co.block = po.block = e->opts.block ? e->opts.block : DEFAULT_BLOCK;
		if (getrandom(co.uuid, sizeof(co.uuid), 0) != sizeof(co.uuid))
			return -EIO;
		memcpy(po.uuid, co.uuid, sizeof(po.uuid));
		/* A backing whose making was cut short has a pool with nothing in it. */
		if (!fstatat(e->dirfd, "pool", &st, AT_SYMLINK_NOFOLLOW) &&
		    st.st_size > (off_t)POOL_SUPER_SIZE) {
			snprintf(
				err, errlen,
				"backing %s has a pool but no catalog.sqlite, without which its %lld bytes cannot be told "
				"apart: restore catalog.sqlite, or remove the pool if the state is not wanted",
				e->path, (long long)st.st_size);
			return -EUCLEAN;
		}
		unlinkat(e->dirfd, "pool", 0);
		r = pool_open(&po, &e->pool, &why);
		if (r)
			goto pool_error;
	}
	r = catalog_open(&co, &e->cat, err, errlen);
	if (r) {
		if (create)
			unlinkat(e->dirfd, "pool", 0);
		return r;
	}
	catalog_get_meta(e->cat, &meta);
	memcpy(e->uuid, meta.uuid, sizeof(e->uuid));
	c->block = meta.block;
	if (e->opts.block && e->opts.block != meta.block) {
		snprintf(
			err, errlen,
			"backing %s has blocks of %u KiB, not %u KiB: leave out block=, it is fixed when a backing is made",
			e->path, meta.block >> 10, e->opts.block >> 10);
		return -EINVAL;
	}
	if (!create) {
		memcpy(po.uuid, meta.uuid, sizeof(po.uuid));
		po.block = meta.block;
		r = pool_open(&po, &e->pool, &why);
		if (r)
			goto pool_error;
	}
	pool_get_super(e->pool, &super);
	if (super.commit_seq > meta.commit_seq) {
		snprintf(
			err, errlen,
			"backing %s: the catalog is at commit %llu, but commit %llu was durable: catalog.sqlite or its -wal "
			"file was damaged or replaced; restore it from a copy, or see momentctl fsck",
			e->path, (unsigned long long)meta.commit_seq,
			(unsigned long long)super.commit_seq);
		return -EUCLEAN;
	}
	/* The catalog was made durable when it was opened. */
	if (!e->opts.readonly && super.commit_seq < meta.commit_seq)
		pool_write_super(e->pool, meta.commit_seq); /* a hint: its failure loses nothing */
	return 0;

pool_error:
	snprintf(err, errlen, "%s/pool: %s%s%s", e->path, why[0] ? why : strerror(-r),
		 r == -ENOSPC ? " (free some space on this file system)" : "",
		 r == -ENOENT && !create ? ": the pool file is missing, its data are lost" : "");
	return r;
}

/* What the block maps use is taken; the rest of the pool is free. */
static int load_maps(struct engine *e, char *err, size_t errlen)
{
	struct cache *c = &e->c;
	struct catalog_meta meta;

	catalog_get_meta(e->cat, &meta);
	while (!list_empty(&e->loaded)) {
		struct map_copy *m = list_first(&e->loaded, struct map_copy, link);
		struct file *f = file_get(c, m->ino);
		int r;

		if (!f)
			return -ENOMEM;
		for (uint32_t i = 0; i < m->n; i++) {
			const struct extent *x = &m->v[i].e;
			char path[512] = "?";

			if (!pool_mark(e->pool, x) && x->valid <= x->len && x->len <= c->block)
				continue;
			ns_path(c->ns, m->ino, path, sizeof(path));
			snprintf(
				err, errlen,
				"backing %s: block %u of %s is damaged in the catalog (place %llu, %u bytes); see "
				"momentctl fsck",
				e->path, m->v[i].block, path, (unsigned long long)x->off, x->len);
			return -EUCLEAN;
		}
		r = file_load_map(c, f, m, meta.commit_seq ? meta.commit_seq : 1);
		if (r)
			return r;
		file_publish(c, f, false);
		list_remove(&m->link);
		free(m);
	}
	return 0;
}

static int start(struct engine *e, char *err, size_t errlen)
{
	struct cache *c = &e->c;
	const char *faults = e->opts.faults ? e->opts.faults : getenv("MOMENT_FAULTS");
	struct io_opts io = {
		.engine = e->opts.io,
		.direct = e->opts.direct,
		.fd = pool_fd(e->pool),
		.readonly = e->opts.readonly,
		.probe_off = POOL_PROBE_OFF,
		.buf = arena_base(e->arena),
		.buf_len = arena_size(e->arena),
		.faults = faults,
	};
	struct io_info info;
	int r = io_create(&io, &e->io);

	if (r) {
		snprintf(err, errlen, "%s/pool: cannot start I/O (io=%s direct=%s): %s", e->path,
			 e->opts.io == IO_URING	    ? "uring"
			 : e->opts.io == IO_THREADS ? "threads"
						    : "auto",
			 e->opts.direct == IO_DIRECT_ON	   ? "on"
			 : e->opts.direct == IO_DIRECT_OFF ? "off"
							   : "auto",
			 strerror(-r));
		return r;
	}
	io_get_info(e->io, &info);
	if (info.engine_reason[0] && e->opts.io != IO_THREADS)
		engine_log(e, ENGINE_LOG_NOTICE, "using threads for I/O: %s", info.engine_reason);
	if (info.direct_reason[0] && e->opts.direct != IO_DIRECT_OFF)
		engine_log(e, ENGINE_LOG_NOTICE, "using buffered I/O: %s", info.direct_reason);
	r = loop_create(&e->loop, e->io, 0);
	if (r) {
		snprintf(err, errlen, "cannot start threads: %s", strerror(-r));
		return r;
	}
	c->loop = e->loop;
	c->io = e->io;
	return 0;
}

static void commit_timer_call(void *arg)
{
	commit_timer_start(arg);
}

static void fini(struct engine *e)
{
	if (e->loop)
		loop_destroy(e->loop);
	e->loop = NULL;
	map_copies_free(&e->loaded);
	if (e->c.commit)
		commit_fini(&e->c);
	ops_fini(e);
	if (e->io)
		io_destroy(e->io);
	trace_close(e->c.trace);
	if (e->cache_ready)
		cache_fini(&e->c);
	if (e->cat)
		catalog_close(e->cat);
	if (e->pool)
		pool_close(e->pool);
	if (e->arena)
		arena_destroy(e->arena);
	holder_release(e->dirfd, e->lockfd);
	if (e->dirfd >= 0)
		close(e->dirfd);
	free(e->path);
	free(e->holder);
	free(e);
}

int engine_open(const char *backing, const struct engine_opts *opts, struct engine **out, char *err,
		size_t errlen)
{
	struct engine *e = calloc(1, sizeof(*e));
	struct cache *c;
	struct arena_info ai;
	uint64_t ram;
	int r;

	err[0] = 0;
	if (!e)
		return -ENOMEM;
	c = &e->c;
	e->opts = *opts;
	e->dirfd = e->lockfd = -1;
	e->open_step = STEP_NONE;
	e->start_ns = loop_now_ns();
	list_init(&e->sessions);
	list_init(&e->parked);
	list_init(&e->after);
	list_init(&e->runs);
	list_init(&e->watch.link);
	list_init(&e->patience);
	list_init(&e->bracket_waits);
	list_init(&e->torn_timer.link);
	list_init(&e->patience_timer.link);
	list_init(&e->loaded);
	list_init(&e->repeat.link);
	c->readonly = opts->readonly;
	c->report = report;
	c->intact = intact;
	c->arg = e;
	if (opts->block && (opts->block & (opts->block - 1) || opts->block < MIN_BLOCK ||
			    opts->block > MAX_BLOCK)) {
		snprintf(err, errlen, "block=%u: a power of two from 64K to 64M", opts->block);
		r = -EINVAL;
		goto out_fini;
	}
	r = open_dir(e, backing, err, errlen);
	if (r)
		goto out_fini;
	{
		char foreign[NAME_MAX + 1];

		/* Before the lock file is made: leave what is not ours as it is. */
		r = look_around(e->dirfd, foreign, sizeof(foreign));
		if (r == 0 && foreign[0]) {
			snprintf(
				err, errlen,
				"backing %s is not empty and not a momentfs backing (it has \"%s\"): give an empty or "
				"new directory",
				e->path, foreign);
			r = -ENOTEMPTY;
			goto out_fini;
		}
	}
	r = holder_take(e->dirfd, e->path, opts, opts->readonly, &e->lockfd, err, errlen);
	if (r)
		goto out_fini;
	/* Before anything is made: a new backing with these options must be able to run. */
	r = choose_ram(e, opts->block ? opts->block : MIN_BLOCK, &ram, err, errlen);
	if (r)
		goto out_fini;
	r = open_stores(e, err, errlen);
	if (r)
		goto out_fini;
	r = choose_ram(e, c->block, &ram, err, errlen);
	if (r)
		goto out_fini;
	r = arena_create(&(struct arena_opts){.size = ram,
					      .chunk = c->block,
					      .huge = opts->huge,
					      .progress = taking_memory,
					      .arg = e},
			 &e->arena);
	if (r) {
		char a[32];

		human(ram, a);
		snprintf(err, errlen, "ram=%s: cannot get the memory: %s", a, strerror(-r));
		goto out_fini;
	}
	arena_get_info(e->arena, &ai);
	if (ai.reason[0])
		engine_log(e, ENGINE_LOG_NOTICE, "the RAM tier is not on huge pages (%s): %s",
			   ai.kind, ai.reason);
	c->arena = e->arena;
	c->pool = e->pool;
	c->cat = e->cat;
	c->ns = catalog_ns(e->cat);
	r = cache_init(c);
	if (r)
		goto out_fini;
	e->cache_ready = true;
	r = remember_files(e);
	if (r)
		goto out_fini;
	r = load_maps(e, err, errlen);
	if (r)
		goto out_fini;
	{
		struct pool_info pi;

		pool_get_info(e->pool, &pi);
		if (pi.unreserved) {
			char a[32], b[32];

			human(pi.unreserved, a);
			human(pi.size, b);
			engine_log(
				e, ENGINE_LOG_WARNING,
				"%s of the %s of %s/pool have lost their room on the disk (a copy with holes, or "
				"fallocate -d) and the disk has not enough for them: writes may fail late; free "
				"some space and mount again",
				a, b, e->path);
		}
		if (!pi.reserves && !opts->readonly)
			engine_log(
				e, ENGINE_LOG_WARNING,
				"%s cannot reserve space: if %s fills up, writes may fail late (they stay in RAM "
				"and are retried)",
				pi.host_fs, e->path);
	}
	if (!e->opts.trace)
		e->opts.trace = getenv("MOMENT_TRACE");
	if (e->opts.trace && e->opts.trace[0]) {
		const char *why = NULL;

		r = trace_open(e->opts.trace, &c->trace, &why);
		if (r) {
			snprintf(err, errlen, "trace=%s: %s", e->opts.trace, why ? why : strerror(-r));
			goto out_fini;
		}
	}
	r = start(e, err, errlen);
	if (r)
		goto out_fini;
	r = commit_init(c, opts->commit_seconds);
	if (r)
		goto out_fini;
	loop_call(e->loop, commit_timer_call, c);
	*out = e;
	return 0;

out_fini:
	if (!err[0])
		snprintf(err, errlen, "%s: %s", backing, strerror(-r));
	if (e->made_dir && e->dirfd >= 0 && !e->cat) {
		unlinkat(e->dirfd, "lock", 0);
		rmdir(e->path);
	}
	fini(e);
	return r;
}

/* ---- close ---- */

struct ending {
	struct engine *e;
	struct commit_wait w;
	bool commit, done;
	int res;
	char *dropped;
	size_t dropped_len;
	pthread_mutex_t lock;
	pthread_cond_t cond;
};

static void end_done(struct commit_wait *w, int res)
{
	struct ending *x = container_of(w, struct ending, w);

	pthread_mutex_lock(&x->lock);
	x->res = res;
	x->done = true;
	pthread_cond_signal(&x->cond);
	pthread_mutex_unlock(&x->lock);
}

static void end_begin(void *arg)
{
	struct ending *x = arg;
	struct engine *e = x->e;
	struct cache *c = &e->c;

	scrub_stop(e);
	session_destroy_all(e);
	cache_prefetch_clear(c);
	if (x->commit && !c->readonly)
		bracket_close(e, x->dropped, x->dropped_len);
	if (!x->commit || c->readonly || e->plain) {
		end_done(&x->w, 0);
		return;
	}
	list_init(&x->w.link);
	x->w.done = end_done;
	commit_request(c, &x->w);
}

/* Nothing more may be queued: what is in flight ends, and then the loop. */
static void end_quiet(void *arg)
{
	struct engine *e = arg;
	struct cache *c = &e->c;

	loop_timer_clear(e->loop, &c->retry);
	report_flush(e);
	commit_stop(c);
	while (!list_empty(&c->write_queue))
		list_remove(c->write_queue.next);
	cache_quiet(c);
	e->closing = true;
}

static void end_trim(void *arg)
{
	space_trim_all(arg);
}

int engine_end(struct engine *e, bool commit, char *dropped, size_t len)
{
	struct ending x = {.e = e, .commit = commit, .dropped = dropped, .dropped_len = len};

	dropped[0] = 0;

	holder_closing(e->c.readonly ? -1 : e->lockfd);
	pthread_mutex_init(&x.lock, NULL);
	pthread_cond_init(&x.cond, NULL);
	loop_call(e->loop, end_begin, &x);
	pthread_mutex_lock(&x.lock);
	while (!x.done)
		pthread_cond_wait(&x.cond, &x.lock);
	pthread_mutex_unlock(&x.lock);
	pthread_mutex_destroy(&x.lock);
	pthread_cond_destroy(&x.cond);
	loop_call(e->loop, end_quiet, e);
	if (commit && !x.res)
		loop_call(e->loop, end_trim, &e->c);
	fini(e);
	return x.res;
}

int engine_close(struct engine *e, bool commit)
{
	char dropped[256];

	return engine_end(e, commit, dropped, sizeof(dropped));
}

void engine_abandon(struct engine *e)
{
	engine_close(e, false);
}

/* ---- small things ---- */

void engine_forked(struct engine *e)
{
	if (e->lockfd >= 0)
		close(e->lockfd);
	if (e->dirfd >= 0)
		close(e->dirfd); /* it is locked, too */
	e->lockfd = e->dirfd = -1;
}

struct ns *engine_ns(struct engine *e)
{
	return e->c.ns;
}

struct loop *engine_loop(struct engine *e)
{
	return e->loop;
}

struct arena *engine_arena(struct engine *e)
{
	return e->arena;
}

uint32_t engine_block(const struct engine *e)
{
	return e->c.block;
}

bool engine_readonly(const struct engine *e)
{
	return e->c.readonly;
}

const char *engine_backing(const struct engine *e)
{
	return e->path;
}

int engine_dirfd(const struct engine *e)
{
	return e->dirfd;
}
