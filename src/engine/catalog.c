/* SPDX-License-Identifier: Apache-2.0 */
/*
 * catalog.c - making, opening and closing the catalog.
 *
 * A new catalog is made under another name and renamed when it is complete and durable, so there
 * is never half a one. Opening reads everything into RAM and checks all of it (catalog_load.c);
 * from then on the database is only written (catalog_commit.c), but for reverts.
 *
 * Read-only: without a WAL the file is read as it is; with one, it and its WAL are copied to a
 * private folder, and recovered there. Either way the connection is closed after reading.
 */
#include "engine/catalog_impl.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/ours.h"

static int path_of(char path[PATH_MAX], const char *dir, const char *name)
{
	int n = snprintf(path, PATH_MAX, "%s/%s", dir, name);

	return n < 0 || n >= PATH_MAX ? -ENAMETOOLONG : 0;
}

/* --- making --------------------------------------------------------------------------------- */

static void unlink_tmp(int dirfd)
{
	unlinkat(dirfd, CATALOG_TMP "-wal", 0);
	unlinkat(dirfd, CATALOG_TMP "-shm", 0);
	unlinkat(dirfd, CATALOG_TMP "-journal", 0);
	unlinkat(dirfd, CATALOG_TMP, 0);
}

/* The rows of an empty tree: the meta row and the root directory. */
static int fill_new(struct catalog *c, const struct catalog_opts *opts)
{
	struct catalog_txn *t;
	bool changed;
	int res;

	c->meta.m.version = CATALOG_VERSION;
	c->meta.m.block = opts->block;
	memcpy(c->meta.m.uuid, opts->uuid, sizeof(c->meta.m.uuid));
	c->meta.next_ino = NS_FIRST;
	pthread_mutex_lock(&c->ns->lock);
	c->ns->root->uid = geteuid();
	c->ns->root->gid = getegid();
	ns_dirty_locked(c->ns, c->ns->root);
	pthread_mutex_unlock(&c->ns->lock);
	res = catalog_freeze(c, 0, false, &t, &changed);
	if (res < 0)
		return res;
	res = catalog_commit(c, t);
	catalog_txn_end(c, t, res);
	return res;
}

static int create(const struct catalog_opts *opts, int dirfd, char *err, size_t errlen)
{
	const struct cat_place place = {dirfd, opts->dir, CATALOG_TMP};
	struct catalog c = {.dirfd = dirfd, .making = true};
	int res, fd;

	if (opts->block < MOMENT_UNIT || opts->block & (opts->block - 1)) {
		cat_message(err, errlen, "block size %u: not a power of two from 4096 on",
			    opts->block);
		return -EINVAL;
	}
	unlink_tmp(dirfd);
	fd = openat(dirfd, CATALOG_TMP, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd < 0) {
		res = -errno;
		cat_message(err, errlen, "making %s/" CATALOG_TMP ": %s", opts->dir,
			    strerror(-res));
		return res;
	}
	close(fd);
	pthread_mutex_init(&c.lock, NULL);
	res = cat_db_open(&place, opts->vfs, false, &c.db, err, errlen);
	if (res < 0)
		goto out_destroy;
	res = cat_exec(
		c.db,
		"PRAGMA page_size = 4096; PRAGMA application_id = " CATALOG_STR(CATALOG_APP_ID) "; PRAGMA user_version = " CATALOG_STR(
			CATALOG_VERSION) "; PRAGMA journal_mode = WAL;");
	if (!res)
		res = cat_exec(c.db, cat_schema);
	if (!res)
		res = cat_exec(c.db, cat_schema_map);
	if (!res)
		res = cat_prepare(&c);
	if (res < 0)
		goto out_message;
	c.ns = ns_new(NULL, NULL);
	res = c.ns ? fill_new(&c, opts) : -ENOMEM;
	if (!res)
		res = cat_errno(c.db, sqlite3_wal_checkpoint_v2(
					      c.db, NULL, SQLITE_CHECKPOINT_TRUNCATE, NULL, NULL));
out_message:
	if (res < 0)
		cat_message(err, errlen, "making %s/" CATALOG_TMP ": %s (%s)", opts->dir,
			    strerror(-res), sqlite3_errmsg(c.db));
	cat_finalize(&c);
	sqlite3_close(c.db);
	if (!res && (renameat(dirfd, CATALOG_TMP, dirfd, CATALOG_FILE) < 0 || fsync(dirfd) < 0)) {
		res = -errno;
		cat_message(err, errlen, "renaming %s/" CATALOG_TMP ": %s", opts->dir,
			    strerror(-res));
	}
	if (res < 0)
		unlink_tmp(dirfd);
	cat_rows_free(&c.rows);
	ns_delete(c.ns);
out_destroy:
	pthread_mutex_destroy(&c.lock);
	return res;
}

/* --- a private copy for reading --------------------------------------------------------------- */

static int copy_file(int dirfd, const char *name, int to_dirfd)
{
	char buf[65536];
	int from, to, res = 0;
	ssize_t n;

	from = ours_open(dirfd, name, O_RDONLY, NULL);
	if (from < 0)
		return from;
	to = openat(to_dirfd, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (to < 0) {
		res = -errno;
		goto out_close;
	}
	while (!res && (n = read(from, buf, sizeof(buf))) != 0) {
		if (n < 0 || write(to, buf, (size_t)n) != n)
			res = n < 0 || errno ? -errno : -EIO;
	}
	close(to);
out_close:
	close(from);
	return res;
}

static void drop_copy(const char *dir)
{
	static const char *const names[] = {CATALOG_FILE, CATALOG_FILE "-wal", CATALOG_FILE "-shm"};
	char path[PATH_MAX];

	for (size_t n = 0; n < sizeof(names) / sizeof(*names); n++)
		if (!path_of(path, dir, names[n]))
			unlink(path);
	rmdir(dir);
}

static int make_copy(int dirfd, struct cat_reader *r)
{
	const char *tmp = getenv("TMPDIR");
	int res;

	res = path_of(r->copy, tmp && *tmp ? tmp : "/tmp", "momentfs-ro-XXXXXX");
	if (!res && !mkdtemp(r->copy))
		res = -errno;
	if (res < 0) {
		r->copy[0] = '\0';
		return res;
	}
	r->copy_fd = open(r->copy, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (r->copy_fd < 0)
		return -errno;
	res = copy_file(dirfd, CATALOG_FILE, r->copy_fd);
	return res ? res : copy_file(dirfd, CATALOG_FILE "-wal", r->copy_fd);
}

int cat_open_readonly(const char *dir, int dirfd, const char *vfs, struct cat_reader *r, char *err,
		      size_t errlen)
{
	struct cat_place place = {dirfd, dir, CATALOG_FILE};
	struct stat st;
	bool wal;
	int res;

	*r = (struct cat_reader){.copy_fd = -1};
	res = cat_check_files(dirfd, dir, true, err, errlen);
	if (res < 0)
		return res;
	wal = fstatat(dirfd, CATALOG_FILE "-wal", &st, AT_SYMLINK_NOFOLLOW) == 0 && st.st_size > 0;
	if (wal) {
		res = make_copy(dirfd, r);
		if (res < 0)
			cat_message(err, errlen,
				    "%s: not unmounted cleanly; for read-only use its catalog is "
				    "copied to TMPDIR and recovered there, which failed: %s",
				    dir, strerror(-res));
		place = (struct cat_place){r->copy_fd, r->copy, CATALOG_FILE};
	}
	if (!res)
		res = cat_db_open(&place, vfs, !wal, &r->db, err, errlen);
	if (res < 0)
		cat_close_readonly(r);
	return res;
}

void cat_close_readonly(struct cat_reader *r)
{
	sqlite3_close(r->db);
	if (r->copy_fd >= 0)
		close(r->copy_fd);
	if (r->copy[0])
		drop_copy(r->copy);
	*r = (struct cat_reader){.copy_fd = -1};
}

/* --- opening -------------------------------------------------------------------------------- */

struct first_problem {
	char *err;
	size_t errlen;
	const char *dir;
};

static bool keep_first(void *arg, uint64_t ino, const char *text)
{
	struct first_problem *f = arg;

	(void)ino;
	cat_message(f->err, f->errlen,
		    "%s/" CATALOG_FILE ": damaged: %s; `momentctl fsck %s` lists all problems",
		    f->dir, text, f->dir);
	return false;
}

static int count_wal(void *arg, sqlite3 *db, const char *name, int pages)
{
	struct catalog *c = arg;

	(void)db;
	(void)name;
	c->wal_pages = (unsigned int)pages;
	return SQLITE_OK;
}

/* SQLite stays with another journal where it cannot, without an error. */
static int use_wal(sqlite3 *db)
{
	sqlite3_stmt *st = NULL;
	int rc = sqlite3_prepare_v2(db, "PRAGMA journal_mode = WAL", -1, &st, NULL);
	int res;

	errno = 0;
	if (rc == SQLITE_OK)
		rc = sqlite3_step(st);
	res = cat_errno(db, rc);
	if (rc == SQLITE_ROW && strcmp((const char *)sqlite3_column_text(st, 0), "wal"))
		res = -EOPNOTSUPP;
	sqlite3_finalize(st);
	return res;
}

/*
 * What was read may be only in the kernel's cache: a process before us died between a write and its
 * sync, or somebody has just copied the files. From here on it counts as committed, and places that
 * it does not use are written over: so it is made durable first.
 */
static int make_durable(struct catalog *c, char *err, size_t errlen)
{
	int res = cat_settle(c->db);

	if (res == -ENOSPC && cat_ballast_drop(c))
		res = cat_settle(c->db);
	if (!res && fsync(c->dirfd) < 0)
		res = -errno;
	if (res < 0)
		cat_message(err, errlen,
			    "what " CATALOG_FILE " and its -wal hold could not be made durable: %s%s",
			    strerror(-res),
			    res == -ENOSPC ? " (free some space on this file system)" : "");
	return res;
}

/* Reads all of it and checks it. */
static int load(const struct catalog_opts *opts, sqlite3 *db, struct cat_image *img, char *err,
		size_t errlen)
{
	struct first_problem first = {err, errlen, opts->dir};
	struct cat_check check = {.problem = keep_first, .arg = &first};
	int res = cat_quick_check(db, &check);

	if (!res)
		res = cat_load(db, img, &check);
	if (res == -EPROTONOSUPPORT)
		cat_message(
			err, errlen,
			"%s: made by a newer momentfs: this one reads formats up to %d; use the "
			"newer one",
			opts->dir, CATALOG_VERSION);
	else if (res < 0 && !check.problems)
		cat_message(err, errlen, "%s/" CATALOG_FILE ": %s: %s", opts->dir,
			    sqlite3_errmsg(db), strerror(-res));
	return res;
}

/* What was read becomes the tree, and the maps the caller's; they are handed over one by one when
 * the rest of what was read is freed. */
static int install(struct catalog *c, const struct catalog_opts *opts, struct cat_image *img)
{
	uint64_t *gone = NULL;
	struct list maps;
	size_t n_gone;
	int res;

	c->meta = img->meta;
	res = cat_install(c, img, &gone, &n_gone);
	free(gone); /* an empty tree was replaced */
	c->ns->next_ino = img->meta.next_ino;
	list_init(&maps);
	for (size_t r = 0; r < img->n; r++) {
		if (!img->recs[r].map)
			continue;
		list_push_back(&maps, &img->recs[r].map->link);
		img->recs[r].map = NULL;
	}
	cat_image_fini(img);
	while (!res && opts->on_map && !list_empty(&maps)) {
		struct map_copy *m = list_first(&maps, struct map_copy, link);

		list_remove(&m->link);
		res = opts->on_map(opts->arg, m);
	}
	map_copies_free(&maps);
	return res;
}

static int upgrade(struct catalog *c, const struct catalog_opts *opts, struct cat_image *img,
		   char *err, size_t errlen)
{
	int res = img->meta.m.version == CATALOG_VERSION ? 0 : cat_upgrade(c, img);

	if (res < 0)
		cat_message(err, errlen,
			    "%s/" CATALOG_FILE
			    ": is of format %d and could not be written as format %d: %s%s; it is as "
			    "it was",
			    opts->dir, CATALOG_V1, CATALOG_VERSION, strerror(-res),
			    res == -ENOSPC ? " (free some space on this file system)" : "");
	return res;
}

int catalog_open(const struct catalog_opts *opts, struct catalog **out, char *err, size_t errlen)
{
	struct cat_place place = {.dir = opts->dir, .name = CATALOG_FILE};
	struct cat_image img = {0};
	struct cat_reader reader;
	struct catalog *c;
	struct stat st;
	int res;

	cat_message(err, errlen, "%s", "");
	c = calloc(1, sizeof(*c));
	if (!c)
		return -ENOMEM;
	pthread_mutex_init(&c->lock, NULL);
	c->readonly = opts->readonly;
	c->dirfd = open(opts->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	place.dirfd = c->dirfd;
	res = c->dirfd < 0 ? -errno : ours_check_dir(c->dirfd, opts->dir, err, errlen);
	if (!res)
		res = cat_check_files(c->dirfd, opts->dir, opts->readonly, err, errlen);
	if (!res && fstatat(c->dirfd, CATALOG_FILE, &st, AT_SYMLINK_NOFOLLOW) < 0)
		res = -errno;
	if (opts->create && !res)
		res = -EEXIST;
	else if (opts->create && res == -ENOENT && c->dirfd >= 0)
		res = create(opts, c->dirfd, err, errlen);
	if (res < 0)
		goto out_close;
	c->ns = ns_new(opts->on_gone, opts->arg);
	res = -ENOMEM;
	if (!c->ns)
		goto out_close;
	if (opts->readonly) {
		res = cat_open_readonly(opts->dir, c->dirfd, opts->vfs, &reader, err, errlen);
		if (!res) {
			res = load(opts, reader.db, &img, err, errlen);
			cat_close_readonly(&reader);
		}
	} else {
		cat_wal_from_ballast(c);
		res = cat_db_open(&place, opts->vfs, false, &c->db, err, errlen);
		/* SQLite makes the WAL anew: on a full disk the ballast gives it room. */
		if (res < 0 && res != -EUCLEAN && res != -EBUSY && cat_ballast_drop(c)) {
			cat_message(err, errlen, "%s", "");
			res = cat_db_open(&place, opts->vfs, false, &c->db, err, errlen);
		}
		if (!res)
			res = load(opts, c->db, &img, err, errlen);
		if (!res)
			res = use_wal(c->db);
		if (!res)
			res = cat_exec(c->db, "PRAGMA journal_size_limit = " CATALOG_STR(CATALOG_WAL_LIMIT) ";");
		if (!res) {
			sqlite3_wal_hook(c->db, count_wal, c);
			res = make_durable(c, err, errlen);
		}
		if (!res)
			res = upgrade(c, opts, &img, err, errlen);
		if (!res)
			res = cat_prepare(c);
		if (!res)
			cat_ballast_restore(c);
	}
	if (!res)
		res = install(c, opts, &img);
	if (!res) {
		*out = c;
		return 0;
	}
out_close:
	cat_image_fini(&img);
	if (res < 0 && errlen && !*err)
		cat_message(err, errlen, "%s/" CATALOG_FILE ": %s", opts->dir, strerror(-res));
	catalog_close(c);
	return res;
}

void cat_rows_free(struct u64map *rows)
{
	struct cat_row *row;
	size_t pos = 0;

	while ((row = u64map_next(rows, &pos)))
		free(row);
	u64map_fini(rows);
}

uint64_t cat_rows_heap(const struct u64map *rows)
{
	return u64map_heap(rows) + rows->n * heap_cost(sizeof(struct cat_row));
}

void catalog_close(struct catalog *c)
{
	uint64_t wal = 0;
	struct stat st;

	if (!c)
		return;
	cat_finalize(c);
	if (c->db && !c->readonly && fstatat(c->dirfd, CATALOG_WAL, &st, AT_SYMLINK_NOFOLLOW) == 0)
		wal = (uint64_t)st.st_blocks * 512;
	sqlite3_close(c->db); /* the last connection: checkpoints and removes the WAL */
	if (wal)
		cat_ballast_keep(c, wal);
	cat_rows_free(&c->rows);
	ns_delete(c->ns);
	if (c->dirfd >= 0)
		close(c->dirfd);
	pthread_mutex_destroy(&c->lock);
	free(c);
}

struct ns *catalog_ns(struct catalog *c)
{
	return c->ns;
}

void catalog_get_meta(const struct catalog *c, struct catalog_meta *m)
{
	pthread_mutex_t *lock = (pthread_mutex_t *)&c->lock;

	pthread_mutex_lock(lock);
	*m = c->meta.m;
	pthread_mutex_unlock(lock);
}

uint64_t catalog_ballast(const struct catalog *c)
{
	pthread_mutex_t *lock = (pthread_mutex_t *)&c->lock;
	uint64_t bytes;

	pthread_mutex_lock(lock);
	bytes = c->ballast;
	pthread_mutex_unlock(lock);
	return bytes;
}

uint64_t catalog_memory(const struct catalog *c)
{
	pthread_mutex_t *lock = (pthread_mutex_t *)&c->lock;
	uint64_t bytes;

	pthread_mutex_lock(lock);
	bytes = c->heap;
	pthread_mutex_unlock(lock);
	return bytes;
}

bool catalog_uncertain(const struct catalog *c)
{
	pthread_mutex_t *lock = (pthread_mutex_t *)&c->lock;
	bool uncertain;

	pthread_mutex_lock(lock);
	uncertain = c->uncertain;
	pthread_mutex_unlock(lock);
	return uncertain;
}
