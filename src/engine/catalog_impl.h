/* SPDX-License-Identifier: Apache-2.0 */
/*
 * catalog_impl.h - inside the catalog: shared by catalog*.c and fsck.
 *
 * The row of an inode is hashed in four parts, so that a commit can write one part without knowing
 * the others: the entry (parent, name), the attributes, the extended attributes, the block map.
 * The hash in the row is over the number and the four; struct cat_row keeps them in RAM for every
 * row that is in the database. The sum of the row hashes is in the meta row, which has a hash too.
 * The hash of the block map is the sum of its segments' hashes, so that a commit can exchange one.
 */
#ifndef ENGINE_CATALOG_IMPL_H
#define ENGINE_CATALOG_IMPL_H

#include <limits.h>
#include <pthread.h>
#include <sqlite3.h>

#include "engine/catalog.h"
#include "engine/ns_impl.h"
#include "engine/u64map.h"

#define CATALOG_FILE	"catalog.sqlite"
#define CATALOG_WAL	"catalog.sqlite-wal"
#define CATALOG_TMP	"catalog.sqlite.new" /* being created; renamed when complete */
#define CATALOG_BALLAST "ballast"
#define CATALOG_APP_ID	0x6d6d6673 /* "mmfs" */
#define CATALOG_VERSION 2
#define CATALOG_V1	1 /* the block map in one blob, in table inode */
#define CATALOG_STR_(x) #x
#define CATALOG_STR(x)	CATALOG_STR_(x)
#define CATALOG_PAGE	4096u
#define CATALOG_WAL_LIMIT 8388608 /* bytes: what is longer is cut to that when it is written anew */
#define CATALOG_WAL_MAX 1024u /* pages in the WAL after which a commit ends in a checkpoint */

/* What is known of a row that is in the database. */
struct cat_row {
	uint64_t ino;
	uint64_t entry, attr, xattr, map; /* hashes of the parts */
	uint64_t size;			  /* the file's; not hashed again */
	uint32_t n_map;			  /* entries of its map */
};

struct cat_meta {
	struct catalog_meta m;
	uint64_t next_ino;
	uint64_t inodes;
	uint64_t sum; /* of the row hashes, mod 2^64 */
};

enum cat_stmt {
	ST_BEGIN,
	ST_COMMIT,
	ST_ROLLBACK,
	ST_INSERT,
	ST_UPDATE,	 /* entry and attributes */
	ST_UPDATE_ENTRY, /* entry */
	ST_UPDATE_HASH,	 /* nothing but the map */
	ST_DELETE,
	ST_MAP_GET, /* one segment */
	ST_MAP_PUT,
	ST_MAP_DELETE,
	ST_MAP_DROP, /* all of an inode's */
	ST_XATTR_INSERT,
	ST_XATTR_DELETE,
	ST_META,
	ST_SELECT,
	ST_SELECT_XATTR,
	ST_SELECT_MAP,
	ST_COUNT
};

struct catalog {
	sqlite3 *db; /* NULL when read-only: all of it has been read */
	sqlite3_stmt *st[ST_COUNT];
	struct ns *ns;
	int dirfd;
	bool readonly;
	struct u64map rows; /* number -> struct cat_row, as committed */
	bool in_txn;
	unsigned int wal_pages;
	uint64_t ballast;  /* bytes */
	uint64_t wal_room; /* bytes from the WAL's start that are its own, written or not */
	bool uncertain;	  /* the last commit failed and may yet come back after a crash */
	bool unsettled;	  /* the WAL is to be emptied before the next commit; work thread */
	bool making;	  /* in catalog.c's create(): no ballast, no checkpoint yet */

	pthread_mutex_t lock; /* of meta, ballast, uncertain and heap for readers on other threads */
	struct cat_meta meta; /* as committed */
	uint64_t heap;	      /* bytes of memory that the rows take */
};

/* --- catalog.c ------------------------------------------------------------------------------ */

void cat_rows_free(struct u64map *rows);
uint64_t cat_rows_heap(const struct u64map *rows); /* bytes of memory */
/* Reads as it is or, when there is a WAL, a private copy in a folder of its own. */
struct cat_reader {
	sqlite3 *db;
	char copy[PATH_MAX]; /* the folder; "": none */
	int copy_fd;	     /* of it, while db is open */
};

int cat_open_readonly(const char *dir, int dirfd, const char *vfs, struct cat_reader *r, char *err,
		      size_t errlen);
void cat_close_readonly(struct cat_reader *r);

/* --- catalog_sql.c: SQLite ------------------------------------------------------------------ */

extern const char cat_schema[];
extern const char cat_schema_map[];
extern const char cat_select_v1[]; /* with the map, as the last column */
extern const char *const cat_sql[ST_COUNT];

/* -errno for a result code of this connection (db may be NULL). */
int cat_errno(sqlite3 *db, int rc);
int cat_exec(sqlite3 *db, const char *sql);
int cat_prepare(struct catalog *c);
void cat_finalize(struct catalog *c);
/* A file of an open directory, which must stay open as long as a connection to it; `dir` is for
 * messages. */
struct cat_place {
	int dirfd;
	const char *dir, *name;
};

/* Opens and sets up a connection. vfs NULL: ours. */
int cat_db_open(const struct cat_place *p, const char *vfs, bool immutable, sqlite3 **out,
		char *err, size_t errlen);
/* Runs a statement that returns no rows, resets it and clears its bindings. */
int cat_run(sqlite3_stmt *st);
void cat_message(char *err, size_t errlen, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

/* --- catalog_vfs.c: the way to the files ------------------------------------------------------ */

const char *cat_vfs(void); /* its name; NULL: SQLite has none at all */
/* Whether what is there of the files that SQLite opens, and the ballast, is ours. 0 or -errno and a
 * message. */
int cat_check_files(int dirfd, const char *dir, bool readonly, char *err, size_t errlen);

/* --- catalog_hash.c: what is hashed --------------------------------------------------------- */

uint64_t cat_hash_entry(const struct ns_row *row);
uint64_t cat_hash_attr(const struct ns_row *row);
uint64_t cat_hash_bytes(const void *p, size_t len);
uint64_t cat_hash_segment(uint64_t ino, uint32_t seg, const void *data, size_t len);
uint64_t cat_hash_row(const struct cat_row *row);
uint64_t cat_hash_meta(const struct cat_meta *m);

/* --- catalog_load.c: reading and checking all of it ------------------------------------------ */

struct cat_rec {
	struct ns_row row;
	struct cat_row hashes;
	struct map_copy *map; /* NULL: no data */
	bool bad; /* was reported: leave it alone */
};

struct cat_image {
	struct cat_meta meta;
	struct cat_rec *recs; /* by number */
	size_t n, cap;
};

/* Told each problem; returning false ends the reading with -EUCLEAN. `ino` 0: none in particular.
 */
typedef bool cat_problem_fn(void *arg, uint64_t ino, const char *text);

struct cat_check {
	cat_problem_fn *problem;
	void *arg;
	uint64_t problems;
};

/* Reports; 0 to go on, -EUCLEAN to stop. */
int cat_problem(struct cat_check *check, uint64_t ino, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));
int cat_load_meta(sqlite3 *db, struct cat_meta *m, struct cat_check *check);
/* Reads every row and checks it by itself and against the sum; then the shape of the tree. 0 with
 * problems counted in check->problems, or -errno. */
int cat_load(sqlite3 *db, struct cat_image *img, struct cat_check *check);
void cat_image_fini(struct cat_image *img);
/* One row with its extended attributes and map. -ENOENT, -EUCLEAN. */
int cat_load_one(struct catalog *c, uint64_t ino, struct cat_rec *rec);
void cat_rec_fini(struct cat_rec *rec);
int cat_quick_check(sqlite3 *db, struct cat_check *check);

/* --- catalog_tree.c: its shape, and into the namespace ---------------------------------------- */

const struct cat_rec *cat_image_find(const struct cat_image *img, uint64_t ino);
int cat_check_tree(struct cat_image *img, struct cat_check *check);
/* Replaces the tree of c->ns and c->rows by the image. *gone: malloc'ed numbers for on_gone. */
int cat_install(struct catalog *c, struct cat_image *img, uint64_t **gone, size_t *n_gone);

/* --- catalog_commit.c ------------------------------------------------------------------------ */

int cat_settle(sqlite3 *db);
/* A failed commit that might come back after a crash cannot any more. Work thread, no transaction. */
int cat_make_certain(struct catalog *c);
int cat_write_meta(sqlite3_stmt *st, const struct cat_meta *m); /* ST_META */
/* One segment, n > 0 entries without holes at the end; its hash is added to *sum. ST_MAP_PUT. */
int cat_write_segment(sqlite3_stmt *st, uint64_t ino, uint32_t seg, const struct extent *e,
		      uint32_t n, uint64_t *sum);

/* --- catalog_upgrade.c ----------------------------------------------------------------------- */

/* Writes what was read from a catalog of version 1 as one of this version, in one transaction. */
int cat_upgrade(struct catalog *c, struct cat_image *img);

/* --- catalog_ballast.c ----------------------------------------------------------------------- */

void cat_ballast_restore(struct catalog *c); /* makes it as large as it should be, if there is room
					      */
/* Before SQLite makes a WAL: where little is free the ballast becomes it, so that nobody can take the
 * space in between. */
void cat_wal_from_ballast(struct catalog *c);
/* The WAL has gone, with `freed` bytes. */
void cat_ballast_keep(struct catalog *c, uint64_t freed);
bool cat_ballast_drop(struct catalog *c);    /* true: something was freed */

#endif
