/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fsck.c - see fsck.h. One thread, no loop; the backing's lock is held throughout, shared unless
 * something may be repaired.
 *
 * Order: leftovers, superblock, catalog, then what needs both. Each part is checked as far as it
 * can be when another one is bad. What is repaired is repaired where it is found, but the number of
 * the commit: only when all else is well.
 */
#include "engine/fsck.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/engine_impl.h"
#include "engine/fsck_impl.h"
#include "engine/ours.h"
#include "engine/pool_super.h"

#define POOL_FILE "pool"

/* --- telling -------------------------------------------------------------------------------- */

/* The path of an inode of the image below params/, "" when it has none; "?/" stands for what is
 * lost of it. */
static void path_of(const struct fsck *f, uint64_t ino, char *buf, size_t len)
{
	const struct cat_rec *up[64];
	size_t n = 0, used = 0;

	buf[0] = '\0';
	while (ino && ino != NS_ROOT && n < 64 && (up[n] = cat_image_find(&f->img, ino)))
		ino = up[n++]->row.parent;
	if (n && ino != NS_ROOT)
		used = (size_t)snprintf(buf, len, "?/");
	while (n-- && used < len)
		used += (size_t)snprintf(buf + used, len - used, "%s%s", up[n]->row.name,
					 n ? "/" : "");
}

void fsck_tell(struct fsck *f, const char *kind, uint64_t ino, const char *fix, bool fixed,
	       const char *fmt, ...)
{
	char text[800], path[4096] = "";
	struct fsck_problem p = {
		.kind = kind,
		.ino = ino,
		.path = path,
		.text = text,
		.fix = fix ? fix : "",
		.fixed = fixed,
	};
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	path_of(f, ino, path, sizeof(path));
	f->res->problems++;
	f->res->fixed += fixed;
	f->opts->problem(f->opts->arg, &p);
}

/* --- leftovers ------------------------------------------------------------------------------ */

static void check_leftovers(struct fsck *f)
{
	static const char *const names[] = {CATALOG_TMP, CATALOG_TMP "-wal", CATALOG_TMP "-shm",
					    CATALOG_TMP "-journal"};

	for (size_t n = 0; n < sizeof(names) / sizeof(*names); n++) {
		bool fixed;

		if (faccessat(f->dirfd, names[n], F_OK, AT_SYMLINK_NOFOLLOW) < 0)
			continue;
		fixed = f->opts->repair && unlinkat(f->dirfd, names[n], 0) == 0;
		fsck_tell(f, "leftover", 0, "remove the file", fixed,
			  "%s: left by a making of this backing that was cut short", names[n]);
	}
}

/* --- superblock ----------------------------------------------------------------------------- */

/* Neither zeros (never written) nor right: the slot was damaged, or its writing was cut short. */
static bool slot_is_bad(int fd, unsigned int slot)
{
	uint8_t buf[POOL_SLOT_SIZE], zeros[POOL_SLOT_SIZE] = {0};
	uint64_t hash;

	if (io_pread_all(fd, buf, sizeof(buf), (uint64_t)slot * POOL_SLOT_SIZE) < 0)
		return true;
	if (!memcmp(buf, zeros, sizeof(buf)))
		return false;
	memcpy(&hash, buf + sizeof(buf) - 8, 8);
	return memcmp(buf, POOL_MAGIC, 8) || le64toh(hash) != cat_hash_bytes(buf, sizeof(buf) - 8);
}

static bool repair_slot(struct fsck *f, struct pool_super_slot next)
{
	int fd, res;

	if (!f->opts->repair)
		return false;
	fd = ours_open(f->dirfd, POOL_FILE, O_RDWR, NULL);
	if (fd < 0)
		return false;
	next.generation++;
	next.slot = (next.slot + 1) % POOL_SLOTS;
	res = pool_super_write(fd, &next);
	if (!res && fdatasync(fd) < 0)
		res = -errno;
	close(fd);
	return !res;
}

/* Opens the pool, read-only. -EPROTONOSUPPORT when it is newer. */
static int check_pool(struct fsck *f, const uint8_t *uuid, char *err, size_t errlen)
{
	struct pool_opts opts = {.dirfd = f->dirfd, .name = POOL_FILE, .readonly = true};
	struct pool_super_slot super;
	const char *why = "";
	int fd, res;

	fd = ours_open(f->dirfd, POOL_FILE, O_RDONLY, &why);
	if (fd < 0) {
		fsck_tell(f, "pool", 0, NULL, false, "the pool file cannot be opened: %s%s",
			  *why ? why : strerror(-fd),
			  fd == -ENOENT ? "; without it there are no data: restore it from a copy"
					: "");
		return 0;
	}
	res = pool_super_read(fd, &super, &why);
	if (res == -EPROTONOSUPPORT)
		cat_message(err, errlen, "%s/" POOL_FILE ": %s", f->opts->dir, why);
	else if (res < 0)
		fsck_tell(f, "superblock", 0, NULL, false, "the pool: %s", why);
	else if (slot_is_bad(fd, (super.slot + 1) % POOL_SLOTS))
		fsck_tell(f, "superblock", 0, "write it anew from the other one",
			  repair_slot(f, super), "slot %u of the superblock is damaged",
			  (super.slot + 1) % POOL_SLOTS);
	close(fd);
	if (res < 0)
		return res == -EPROTONOSUPPORT ? res : 0;
	memcpy(opts.uuid, uuid ? uuid : super.super.uuid, sizeof(opts.uuid));
	res = pool_open(&opts, &f->pool, &why);
	if (res == -ENOMEM)
		return res;
	if (res < 0)
		fsck_tell(f, "pool", 0, NULL, false, "the pool: %s", *why ? why : strerror(-res));
	return 0;
}

/* --- catalog -------------------------------------------------------------------------------- */

struct orphans {
	struct fsck *f;
	bool any;
};

static bool catalog_problem(void *arg, uint64_t ino, const char *text)
{
	static const char orphan[] = ", but no row"; /* of extended attributes or a block map */
	struct orphans *o = arg;
	bool is_orphan = strstr(text, orphan) != NULL;

	o->any |= is_orphan;
	fsck_tell(o->f, ino ? "inode" : "catalog", ino,
		  is_orphan ? "drop what no file has" : NULL,
		  is_orphan && o->f->opts->repair, "%s", text);
	return true;
}

/* They are in no row's hash, so that nothing else changes. */
static int drop_orphans(const struct fsck *f, char *err, size_t errlen)
{
	const struct cat_place place = {f->dirfd, f->opts->dir, CATALOG_FILE};
	sqlite3 *db;
	int res;

	res = cat_check_files(f->dirfd, f->opts->dir, false, err, errlen);
	if (!res)
		res = cat_db_open(&place, NULL, false, &db, err, errlen);
	if (res < 0)
		return res;
	res = cat_exec(db, "DELETE FROM xattr WHERE ino NOT IN (SELECT ino FROM inode)");
	if (!res && f->img.meta.m.version != CATALOG_V1)
		res = cat_exec(db, "DELETE FROM map WHERE ino NOT IN (SELECT ino FROM inode)");
	if (res < 0)
		cat_message(err, errlen, "%s/" CATALOG_FILE ": dropping what no inode has: %s",
			    f->opts->dir, sqlite3_errmsg(db));
	sqlite3_close(db);
	return res;
}

static void count(struct fsck *f)
{
	for (size_t r = 0; r < f->img.n; r++) {
		f->res->files += S_ISREG(f->img.recs[r].row.mode) != 0;
		f->res->dirs += S_ISDIR(f->img.recs[r].row.mode) != 0;
	}
	f->res->has_catalog = true;
	f->res->commit_seq = f->img.meta.m.commit_seq;
	f->res->has_step = f->img.meta.m.has_step;
	f->res->step = f->img.meta.m.step;
}

static int check_catalog(struct fsck *f, char *err, size_t errlen)
{
	struct orphans orphans = {.f = f};
	struct cat_check check = {.problem = catalog_problem, .arg = &orphans};
	struct cat_reader reader;
	sqlite3 *db;
	int res;

	if (faccessat(f->dirfd, CATALOG_FILE, F_OK, AT_SYMLINK_NOFOLLOW) < 0) {
		fsck_tell(f, "catalog", 0, NULL, false,
			  "there is no " CATALOG_FILE
			  ": without it nobody knows what is where in the "
			  "pool: restore it from a copy");
		return 0;
	}
	res = cat_open_readonly(f->opts->dir, f->dirfd, NULL, &reader, err, errlen);
	if (res == -EUCLEAN)
		fsck_tell(f, "catalog", 0, NULL, false, "%s", err);
	if (res < 0)
		return res == -EUCLEAN ? 0 : res;
	db = reader.db;
	res = cat_quick_check(db, &check);
	if (!res || res == -EUCLEAN)
		res = cat_load(db, &f->img, &check);
	if (res == -EPROTONOSUPPORT)
		cat_message(err, errlen, "%s: made by a newer momentfs: use the newer one",
			    f->opts->dir);
	else if (res == -EUCLEAN && !check.problems)
		fsck_tell(f, "catalog", 0, NULL, false, "cannot be read: %s", sqlite3_errmsg(db));
	else if (res < 0 && res != -EUCLEAN)
		cat_message(err, errlen, "%s/" CATALOG_FILE ": %s: %s", f->opts->dir,
			    sqlite3_errmsg(db), strerror(-res));
	cat_close_readonly(&reader);
	if (res == -EUCLEAN)
		return 0; /* was told */
	if (res < 0)
		return res;
	count(f);
	if (orphans.any && f->opts->repair)
		res = drop_orphans(f, err, errlen);
	return res;
}

/* --- both ----------------------------------------------------------------------------------- */

/*
 * The superblock has seen a commit that the catalog does not have: its WAL was damaged or lost, or
 * it is an older copy. What that older commit needs may have been overwritten since; but if every
 * checksum is right it was not, and then going back to it loses nothing but the later commits.
 */
static void check_commit(struct fsck *f)
{
	uint64_t seq = f->img.meta.m.commit_seq;
	struct pool_super super;
	bool whole = f->res->problems == f->res->fixed && !f->opts->no_data, fixed = false;
	char fix[160] = "";

	pool_get_super(f->pool, &super);
	if (super.commit_seq <= seq)
		return;
	if (whole)
		snprintf(fix, sizeof(fix),
			 "go back to commit %llu, which is whole; the later ones are lost",
			 (unsigned long long)seq);
	if (whole && f->opts->repair) {
		struct pool_super_slot slot;
		const char *why;

		fixed = pool_super_read(pool_fd(f->pool), &slot, &why) == 0;
		slot.super.commit_seq = seq;
		fixed = fixed && repair_slot(f, slot);
	}
	fsck_tell(
		f, "commit", 0, fix, fixed,
		"commit %llu was durable, but the catalog is at commit %llu: " CATALOG_FILE
		" or its -wal file was damaged, removed or replaced by an older one; if you have a copy "
		"of them, restore it",
		(unsigned long long)super.commit_seq, (unsigned long long)seq);
}

static int check_all(struct fsck *f, char *err, size_t errlen)
{
	int res;

	check_leftovers(f);
	res = check_catalog(f, err, errlen);
	if (!res)
		res = check_pool(f, f->res->has_catalog ? f->img.meta.m.uuid : NULL, err, errlen);
	if (res < 0 || !f->res->has_catalog || !f->pool)
		return res;
	res = fsck_extents(f);
	if (!res)
		check_commit(f);
	return res;
}

int fsck_run(const struct fsck_opts *opts, struct fsck_result *res, char *err, size_t errlen)
{
	struct engine_opts holder = {.holder = "momentctl fsck"};
	struct fsck f = {.opts = opts, .res = res};
	int lock = -1, rc;

	*res = (struct fsck_result){0};
	cat_message(err, errlen, "%s", "");
	f.dirfd = open(opts->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (f.dirfd < 0) {
		rc = -errno;
		cat_message(err, errlen, "%s: %s", opts->dir, strerror(-rc));
		return rc;
	}
	rc = ours_check_dir(f.dirfd, opts->dir, err, errlen);
	if (rc < 0)
		goto out_close;
	rc = -ENOENT;
	if (faccessat(f.dirfd, CATALOG_FILE, F_OK, AT_SYMLINK_NOFOLLOW) < 0 &&
	    faccessat(f.dirfd, POOL_FILE, F_OK, AT_SYMLINK_NOFOLLOW) < 0) {
		cat_message(err, errlen,
			    "%s: not a momentfs backing: it has neither a catalog nor a pool",
			    opts->dir);
		goto out_close;
	}
	rc = holder_take(f.dirfd, opts->dir, &holder, !opts->repair, &lock, err, errlen);
	if (rc < 0)
		goto out_close;
	rc = check_all(&f, err, errlen);
	if (rc < 0 && errlen && !*err)
		cat_message(err, errlen, "%s: %s", opts->dir, strerror(-rc));
	pool_close(f.pool);
	cat_image_fini(&f.img);
	holder_release(f.dirfd, lock);
out_close:
	close(f.dirfd);
	return rc;
}
