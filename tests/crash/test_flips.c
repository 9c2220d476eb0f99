/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_flips.c - single bytes of a backing are changed, one at a time, each put back before the
 * next.
 *
 * In the pool: the byte belongs to an extent, then exactly the files and blocks that it is part of
 * answer EIO, everything else is right, and scrub and fsck name the file; or it does not, then
 * nothing changes. In the superblock, the catalog, and the WAL of an engine that was killed: the
 * backing is refused with a message, or everything in it is right.
 *
 *	test_flips [--seed N] [--flips N] [--dir DIR]
 */
#include <fcntl.h>
#include <getopt.h>
#include <sys/stat.h>

#include "driver.h"
#include "engine/fsck.h"

#define BLOCK 65536u
#define FILES 12
#define MAX   (3u * BLOCK + 5000)

static char dir[300];
static struct engine_opts opts = {
	.ram = 16ull * BLOCK, .block = BLOCK, .commit_seconds = ENGINE_COMMIT_OFF};
static struct {
	char name[16];
	uint64_t size, ino;
	unsigned char data[MAX];
} files[FILES];
static uint64_t found, harmless, refused, same;
static uint64_t pool_start = UINT64_MAX, pool_end; /* where extents are */

static int open_file(const char *name)
{
	char path[400];
	int fd;

	snprintf(path, sizeof(path), "%s/%s", dir, name);
	fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		die("%s: %s", path, strerror(errno));
	return fd;
}

static off_t size_of(const char *name)
{
	char path[400];
	struct stat st;

	snprintf(path, sizeof(path), "%s/%s", dir, name);
	return stat(path, &st) ? 0 : st.st_size;
}

/* Changes a byte; returns what it was. */
static unsigned char put(const char *name, off_t off, unsigned char x, bool flip)
{
	int fd = open_file(name);
	unsigned char old;

	if (pread(fd, &old, 1, off) != 1)
		die("%s: cannot be read at %lld", name, (long long)off);
	if (flip)
		x ^= old;
	if (pwrite(fd, &x, 1, off) != 1)
		die("%s: cannot be written", name);
	close(fd);
	return old;
}

static void make(void)
{
	drive_open(dir, &opts);
	for (int i = 0; i < FILES; i++) {
		struct ns_attr a;

		snprintf(files[i].name, sizeof(files[i].name), "file%d", i);
		files[i].size = i < 3 ? 100 + below(5000) : 1 + below(MAX);
		for (uint64_t k = 0; k < files[i].size; k++)
			files[i].data[k] = (unsigned char)rnd();
		must(ns_create(engine_ns(e), NS_ROOT, files[i].name, 0644, 0, 0, false, &a),
		     "create");
		files[i].ino = a.ino;
		must(engine_pwrite(e, a.ino, files[i].data, files[i].size, 0), "write");
		must(ns_setxattr(engine_ns(e), a.ino, "user.note", files[i].name,
				 strlen(files[i].name), 0),
		     "setxattr");
	}
	must(engine_call(e, ENGINE_SYNC, 0, 0, 0, 0), "commit");
	for (int i = 0; i < FILES; i++) {
		struct file *f = file_find(&e->c, files[i].ino); /* the loop is idle */

		for (uint32_t n = 0; n < file_nblocks(&e->c, f); n++) {
			const struct extent *x = &file_slot(f, n)->live;

			if (x->off < pool_start)
				pool_start = x->off;
			if (x->off + x->len > pool_end)
				pool_end = x->off + x->len;
		}
	}
	must(engine_close(e, true), "close");
}

/* How many blocks answer EIO; dies of a wrong byte. `bad_file` gets the last such file. */
static unsigned int read_all(int *bad_file)
{
	unsigned int bad = 0;
	struct ns_counts nc;

	ns_count(engine_ns(e), &nc);
	if (nc.files != FILES)
		die("%llu files, not %d", (unsigned long long)nc.files, FILES);
	for (int i = 0; i < FILES; i++) {
		static unsigned char buf[BLOCK];
		char note_text[32];
		struct ns_attr a;
		int64_t n;

		must(ns_peek(engine_ns(e), NS_ROOT, files[i].name, &a), files[i].name);
		if (a.size != files[i].size)
			die("%s: %llu bytes, not %llu", files[i].name, (unsigned long long)a.size,
			    (unsigned long long)files[i].size);
		n = ns_getxattr(engine_ns(e), a.ino, "user.note", note_text, sizeof(note_text));
		if (n != (int64_t)strlen(files[i].name) ||
		    memcmp(note_text, files[i].name, (size_t)n))
			die("%s: its attribute is wrong", files[i].name);
		for (uint64_t at = 0; at < a.size; at += BLOCK) {
			uint64_t len = a.size - at < BLOCK ? a.size - at : BLOCK;

			n = engine_pread(e, a.ino, buf, len, at);
			if (n == -EIO) {
				bad++;
				*bad_file = i;
			} else if (n != (int64_t)len || memcmp(buf, files[i].data + at, len)) {
				die("%s: wrong bytes in the block at %llu", files[i].name,
				    (unsigned long long)at);
			}
		}
	}
	return bad;
}

struct verdict {
	unsigned int problems;
	char path[300];
};

static void fsck_problem(void *arg, const struct fsck_problem *p)
{
	struct verdict *v = arg;

	if (!strcmp(p->kind, "leftover"))
		return;
	v->problems++;
	snprintf(v->path, sizeof(v->path), "%s", p->path);
	if (!p->text[0])
		die("fsck: a problem without a text");
}

static struct verdict fsck(void)
{
	struct verdict v = {0};
	struct fsck_opts o = {.dir = dir, .problem = fsck_problem, .arg = &v};
	struct fsck_result r;
	char err[512];

	if (fsck_run(&o, &r, err, sizeof(err)))
		v.problems++;
	return v;
}

static void pool_flip(void)
{
	/* Some behind the last extent, as far as the pool goes, some between them; what is before is
	 * the superblock's. */
	uint64_t span = (pool_end - pool_start) / 4 * 5;
	uint64_t there = (uint64_t)size_of("pool") - pool_start;
	off_t off = (off_t)(pool_start + below(span < there ? span : there));
	unsigned char old = put("pool", off, (unsigned char)(1 + below(255)), true);
	int bad_file = -1;
	unsigned int bad;
	struct verdict v = fsck();
	int64_t scrub;
	char *json;

	note("pool byte %lld", (long long)off);
	drive_open(dir, &opts);
	bad = read_all(&bad_file);
	scrub = engine_call(e, ENGINE_SCRUB, 0, 0, 0, 0);
	json = engine_status_json(e);
	if (bad > 1)
		die("one byte and %u blocks are damaged", bad);
	if (scrub != bad)
		die("%u blocks are damaged, scrub says %lld", bad, (long long)scrub);
	if (v.problems != bad)
		die("%u blocks are damaged, fsck says %u", bad, v.problems);
	if (bad && strcmp(v.path, files[bad_file].name))
		die("%s is damaged, fsck names \"%s\"", files[bad_file].name, v.path);
	if (bad && (!json || !strstr(json, files[bad_file].name)))
		die("%s is damaged, status does not name it: %s", files[bad_file].name, json);
	free(json);
	found += bad;
	harmless += !bad;
	must(engine_close(e, false), "close");
	put("pool", off, old, false);
}

static void catalog_flip(const char *name)
{
	off_t size = !strcmp(name, "pool") ? (off_t)pool_start : size_of(name);
	off_t off = (off_t)below((uint64_t)size);
	unsigned char old = put(name, off, (unsigned char)(1 + below(255)), true);
	char err[1024] = "";
	int r, bad_file;

	note("%s byte %lld of %lld", name, (long long)off, (long long)size);
	r = drive_try_open(dir, &opts, err, sizeof(err));
	if (r) {
		if (!err[0])
			die("refused without a message");
		if (r != -EUCLEAN && r != -EPROTONOSUPPORT && r != -EIO && r != -EINVAL)
			die("refused with %s: %s", strerror(-r), err);
		refused++;
		return;
	}
	if (read_all(&bad_file))
		die("opened, and blocks cannot be read");
	same++;
	engine_abandon(e);
	(void)old;
}

static void command(const char *fmt, ...)
{
	char cmd[1000];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(cmd, sizeof(cmd), fmt, ap);
	va_end(ap);
	if (system(cmd))
		die("failed: %s", cmd);
}

int main(int argc, char **argv)
{
	static const struct option o[] = {{"seed", 1, NULL, 's'},
					  {"flips", 1, NULL, 'f'},
					  {"dir", 1, NULL, 'd'},
					  {NULL, 0, NULL, 0}};
	const char *where = getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp";
	const char *full = getenv("MOMENT_CRASH");
	unsigned long flips = full && !strcmp(full, "full") ? 1000 : 150;
	char top[256];
	int ch;

	seed = (uint64_t)time(NULL) << 16 ^ (uint64_t)getpid();
	while ((ch = getopt_long(argc, argv, "", o, NULL)) != -1) {
		if (ch == 's')
			seed = strtoull(optarg, NULL, 0);
		else if (ch == 'f')
			flips = strtoul(optarg, NULL, 0);
		else if (ch == 'd')
			where = optarg;
		else
			return 2;
	}
	printf("seed %llu, %lu flips\n", (unsigned long long)seed, flips);
	fflush(stdout);
	rng = seed;
	drive_init();
	snprintf(top, sizeof(top), "%s/momentfs-flips-XXXXXX", where);
	if (!mkdtemp(top))
		die("mkdtemp %s: %s", top, strerror(errno));
	snprintf(dir, sizeof(dir), "%s/back", top);
	drive_folder = top;
	make();
	if (fsck().problems)
		die("fsck finds problems before anything was done");
	for (unsigned long i = 0; i < flips; i++)
		pool_flip();
	if (fsck().problems)
		die("fsck finds problems when every byte has been put back");

	/* What a killed engine leaves: the last commits are in the WAL. */
	drive_open(dir, &opts);
	for (int i = 0; i < FILES; i++) {
		for (uint64_t k = 0; k < files[i].size; k += 997)
			files[i].data[k] ^= 0xff; /* an older commit would show */
		must(engine_pwrite(e, files[i].ino, files[i].data, files[i].size, 0), "write");
	}
	must(engine_call(e, ENGINE_SYNC, 0, 0, 0, 0), "commit");
	command("cp -r '%s' '%s/killed'", dir, top);
	engine_abandon(e);
	must(engine_close((drive_open(dir, &opts), e), true), "close");
	command("mv '%s' '%s/clean'", dir, top);
	for (unsigned long i = 0; i < flips / 2; i++) {
		bool killed = below(2);
		const char *name = below(8) == 0	? "pool"
				   : killed && below(2) ? "catalog.sqlite-wal"
							: "catalog.sqlite";

		command("rm -rf '%s' && cp -r '%s/%s' '%s'", dir, top, killed ? "killed" : "clean",
			dir);
		if (!size_of(name))
			die("%s is empty: the test is not what it says", name);
		catalog_flip(name);
	}
	command("rm -rf '%s'", top);
	printf("pool: %llu found, %llu in free space; superblock and catalog: %llu refused, %llu without effect\n",
	       (unsigned long long)found, (unsigned long long)harmless, (unsigned long long)refused,
	       (unsigned long long)same);
	if (!found || !harmless || !refused)
		die("the flips were not where they should have been");
	sqlite_fault_destroy(vfs);
	return 0;
}
