/* SPDX-License-Identifier: Apache-2.0 */
/*
 * catalog_sql.c - the catalog's SQL: schema, statements, opening a connection, error numbers.
 *
 * The connection is in exclusive locking mode: the index of the WAL is then on the heap, so there
 * is no shared-memory file that a full disk could turn into a SIGBUS. Numbers of 64 bits without a
 * sign are stored as SQLite's signed ones, bit for bit.
 */
#include "engine/catalog_impl.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define SQLITE_PATH_MAX 512

const char cat_schema[] = "CREATE TABLE meta("
			  " id INTEGER PRIMARY KEY,"
			  " version INTEGER NOT NULL,"
			  " block INTEGER NOT NULL,"
			  " uuid BLOB NOT NULL,"
			  " commit_seq INTEGER NOT NULL,"
			  " step INTEGER,"
			  " commit_time INTEGER NOT NULL,"
			  " next_ino INTEGER NOT NULL,"
			  " inodes INTEGER NOT NULL,"
			  " hash_sum INTEGER NOT NULL,"
			  " hash INTEGER NOT NULL) STRICT;"
			  "CREATE TABLE inode("
			  " ino INTEGER PRIMARY KEY,"
			  " parent INTEGER NOT NULL,"
			  " name BLOB NOT NULL,"
			  " mode INTEGER NOT NULL,"
			  " uid INTEGER NOT NULL,"
			  " gid INTEGER NOT NULL,"
			  " size INTEGER NOT NULL,"
			  " mtime INTEGER NOT NULL,"
			  " mtime_ns INTEGER NOT NULL,"
			  " ctime INTEGER NOT NULL,"
			  " ctime_ns INTEGER NOT NULL,"
			  " flags INTEGER NOT NULL,"
			  " hash INTEGER NOT NULL) STRICT;"
			  "CREATE TABLE xattr("
			  " ino INTEGER NOT NULL,"
			  " name BLOB NOT NULL,"
			  " value BLOB NOT NULL,"
			  " PRIMARY KEY(ino, name)) STRICT, WITHOUT ROWID;";

const char cat_schema_map[] = "CREATE TABLE map("
			      " ino INTEGER NOT NULL,"
			      " seg INTEGER NOT NULL,"
			      " data BLOB NOT NULL,"
			      " hash INTEGER NOT NULL,"
			      " PRIMARY KEY(ino, seg)) STRICT, WITHOUT ROWID;";

const char cat_select_v1[] = "SELECT ino, parent, name, mode, uid, gid, size, mtime, mtime_ns,"
			     " ctime, ctime_ns, flags, hash, map FROM inode"
			     " WHERE ino >= ?1 AND ino <= ?2 ORDER BY ino";

const char *const cat_sql[ST_COUNT] = {
	[ST_BEGIN] = "BEGIN IMMEDIATE",
	[ST_COMMIT] = "COMMIT",
	[ST_ROLLBACK] = "ROLLBACK",
	/* The numbers of what is bound are the same in these four. */
	[ST_INSERT] = "INSERT INTO inode(ino, parent, name, mode, uid, gid, size, mtime, mtime_ns,"
		      " ctime, ctime_ns, flags, hash)"
		      " VALUES(?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)",
	[ST_UPDATE] = "UPDATE inode SET parent = ?2, name = ?3, mode = ?4, uid = ?5, gid = ?6,"
		      " size = ?7, mtime = ?8, mtime_ns = ?9, ctime = ?10, ctime_ns = ?11,"
		      " flags = ?12, hash = ?13 WHERE ino = ?1",
	[ST_UPDATE_ENTRY] = "UPDATE inode SET parent = ?2, name = ?3, hash = ?13 WHERE ino = ?1",
	[ST_UPDATE_HASH] = "UPDATE inode SET hash = ?13 WHERE ino = ?1",
	[ST_DELETE] = "DELETE FROM inode WHERE ino = ?1",
	[ST_MAP_GET] = "SELECT data, hash FROM map WHERE ino = ?1 AND seg = ?2",
	[ST_MAP_PUT] = "INSERT OR REPLACE INTO map(ino, seg, data, hash) VALUES(?1, ?2, ?3, ?4)",
	[ST_MAP_DELETE] = "DELETE FROM map WHERE ino = ?1 AND seg = ?2",
	[ST_MAP_DROP] = "DELETE FROM map WHERE ino = ?1",
	[ST_XATTR_INSERT] = "INSERT INTO xattr(ino, name, value) VALUES(?1, ?2, ?3)",
	[ST_XATTR_DELETE] = "DELETE FROM xattr WHERE ino = ?1",
	[ST_META] = "INSERT OR REPLACE INTO meta(id, version, block, uuid, commit_seq, step,"
		    " commit_time, next_ino, inodes, hash_sum, hash)"
		    " VALUES(1, ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
	[ST_SELECT] = "SELECT ino, parent, name, mode, uid, gid, size, mtime, mtime_ns, ctime,"
		      " ctime_ns, flags, hash FROM inode WHERE ino >= ?1 AND ino <= ?2"
		      " ORDER BY ino",
	[ST_SELECT_XATTR] = ("SELECT ino, name, value FROM xattr WHERE ino >= ?1 AND ino <= ?2"
			     " ORDER BY ino, name"),
	[ST_SELECT_MAP] = ("SELECT ino, seg, data, hash FROM map WHERE ino >= ?1 AND ino <= ?2"
			   " ORDER BY ino, seg"),
};

void cat_message(char *err, size_t errlen, const char *fmt, ...)
{
	va_list ap;

	if (!errlen)
		return;
	va_start(ap, fmt);
	vsnprintf(err, errlen, fmt, ap);
	va_end(ap);
}

/*
 * errno of the failed call. sqlite3_system_errno() is not set when a COMMIT fails, so the VFS is
 * asked; whoever runs a statement sets errno to 0 before.
 */
static int system_errno(sqlite3 *db)
{
	sqlite3_vfs *vfs = NULL;

	if (!db || sqlite3_file_control(db, "main", SQLITE_FCNTL_VFS_POINTER, &vfs) || !vfs ||
	    !vfs->xGetLastError)
		return 0;
	return vfs->xGetLastError(vfs, 0, NULL);
}

int cat_errno(sqlite3 *db, int rc)
{
	int primary = rc & 0xff;
	int sys = primary == SQLITE_IOERR || primary == SQLITE_CANTOPEN ? system_errno(db) : 0;

	switch (primary) {
	case SQLITE_OK:
	case SQLITE_ROW:
	case SQLITE_DONE:
		return 0;
	case SQLITE_FULL:
		return -ENOSPC;
	case SQLITE_IOERR:
		if (rc == SQLITE_IOERR_NOMEM)
			return -ENOMEM;
		if (sys == ENOSPC || sys == EDQUOT)
			return -ENOSPC;
		return sys > 0 ? -sys : -EIO;
	case SQLITE_CANTOPEN:
		return sys > 0 ? -sys : -EIO;
	case SQLITE_TOOBIG:
		return -EFBIG;
	case SQLITE_NOMEM:
		return -ENOMEM;
	case SQLITE_BUSY:
	case SQLITE_LOCKED:
		return -EBUSY;
	case SQLITE_READONLY:
		return -EROFS;
	case SQLITE_PERM:
	case SQLITE_AUTH:
		return -EACCES;
	case SQLITE_CORRUPT:
	case SQLITE_NOTADB:
	case SQLITE_FORMAT:
	case SQLITE_SCHEMA:
	case SQLITE_ERROR: /* our SQL is right: a table or a column is missing */
	case SQLITE_CONSTRAINT:
	case SQLITE_MISMATCH:
		return -EUCLEAN;
	default:
		return -EIO;
	}
}

int cat_exec(sqlite3 *db, const char *text)
{
	errno = 0;
	return cat_errno(db, sqlite3_exec(db, text, NULL, NULL, NULL));
}

int cat_prepare(struct catalog *c)
{
	for (int s = 0; s < ST_COUNT; s++) {
		int rc = sqlite3_prepare_v3(c->db, cat_sql[s], -1, SQLITE_PREPARE_PERSISTENT,
					    &c->st[s], NULL);

		if (rc != SQLITE_OK)
			return cat_errno(c->db, rc);
	}
	return 0;
}

void cat_finalize(struct catalog *c)
{
	for (int s = 0; s < ST_COUNT; s++) {
		sqlite3_finalize(c->st[s]);
		c->st[s] = NULL;
	}
}

int cat_run(sqlite3_stmt *st)
{
	int rc, res;

	errno = 0;
	rc = sqlite3_step(st);
	res = rc == SQLITE_ROW ? -EUCLEAN : cat_errno(sqlite3_db_handle(st), rc);

	sqlite3_reset(st);
	sqlite3_clear_bindings(st);
	return res;
}

/* "file:" and the path with what means something in a URI escaped. */
static char *uri_of(const char *path, const char *options)
{
	sqlite3_str *s = sqlite3_str_new(NULL);

	sqlite3_str_appendall(s, "file:");
	for (; *path; path++) {
		if (strchr("%?#", *path))
			sqlite3_str_appendf(s, "%%%02x", *path);
		else
			sqlite3_str_appendchar(s, 1, *path);
	}
	sqlite3_str_appendall(s, options);
	return sqlite3_str_finish(s);
}

int cat_db_open(const struct cat_place *p, const char *vfs, bool immutable, sqlite3 **out,
		char *err, size_t errlen)
{
	int flags = SQLITE_OPEN_URI | SQLITE_OPEN_FULLMUTEX;
	char path[PATH_MAX], *uri;
	sqlite3 *db = NULL;
	int rc, res;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", p->dirfd);
	if (faccessat(AT_FDCWD, path, F_OK, 0) < 0) /* no /proc: SQLite's limits hold */
		snprintf(path, sizeof(path), "%s", p->dir);
	if (strlen(path) + strlen(p->name) + sizeof("/-journal") > SQLITE_PATH_MAX) {
		cat_message(err, errlen,
			    "%s/%s: its path is too long for SQLite, which takes %d bytes where "
			    "/proc is not mounted: mount /proc, or choose a shorter path",
			    p->dir, p->name, SQLITE_PATH_MAX);
		return -ENAMETOOLONG;
	}
	snprintf(path + strlen(path), sizeof(path) - strlen(path), "/%s", p->name);
	uri = uri_of(path, immutable ? "?immutable=1" : "?cache=private");
	if (!uri)
		return -ENOMEM;
	flags |= immutable ? SQLITE_OPEN_READONLY : SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE;
	rc = sqlite3_open_v2(uri, &db, flags, vfs ? vfs : cat_vfs());
	sqlite3_free(uri);
	res = cat_errno(db, rc);
	if (res < 0)
		goto out_close;
	sqlite3_extended_result_codes(db, 1);
	sqlite3_busy_timeout(db, 2000);
	sqlite3_db_config(db, SQLITE_DBCONFIG_DEFENSIVE, 1, (int *)NULL);
	sqlite3_db_config(db, SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0, (int *)NULL);
	res = cat_exec(db, "PRAGMA locking_mode = EXCLUSIVE; PRAGMA cell_size_check = ON;"
			   "PRAGMA temp_store = MEMORY; PRAGMA mmap_size = 0;"
			   "PRAGMA cache_size = -16384; PRAGMA synchronous = FULL;");
	if (res < 0)
		goto out_close;
	*out = db;
	return 0;

out_close:
	if (res == -EBUSY)
		cat_message(err, errlen,
			    "%s/%s: another program has it open; close it and try again", p->dir,
			    p->name);
	else if (res == -EUCLEAN)
		cat_message(err, errlen, "%s/%s: damaged: %s", p->dir, p->name, sqlite3_errmsg(db));
	else
		cat_message(err, errlen, "%s/%s: %s: %s", p->dir, p->name,
			    db ? sqlite3_errmsg(db) : "open", strerror(-res));
	sqlite3_close(db);
	return res;
}
