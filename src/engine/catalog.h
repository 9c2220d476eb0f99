/* SPDX-License-Identifier: Apache-2.0 */
/*
 * catalog.h - the namespace and block maps on disk: SQLite, written only by a commit.
 *
 * The file is `catalog.sqlite` in the backing, with a WAL and synchronous=FULL; checkpoints are
 * bounded. It needs no locking_mode=EXCLUSIVE, since the backing's lock keeps others out. The schema
 * has a version. There is one row for an inode (number, parent, name, mode, owner, size, times,
 * flags, row hash), one for a segment of a block map (blockmap.h), one for an extended attribute, and
 * a `meta` table: format version, block size, uuid, commit sequence, committed step, number of inodes
 * and the sum (mod 2^64) of all row hashes, with a hash of its own. So any flipped byte in what we stored is noticed at mount and refused with a message that
 * says which row; SQLite's own pages are checked by `PRAGMA quick_check` at mount after an unclean
 * end and by fsck always.
 *
 * A commit, as the loop thread drives it:
 *	catalog_freeze()     loop thread; an instant: collects the rows that changed (takes the ns
 *			     lock)
 *	catalog_txn_map()    loop thread; a file's map, with its segments that changed
 *	catalog_commit()     work thread; one SQLite transaction, durable when it returns 0
 *	catalog_txn_end()    loop thread; forgets, or on failure marks everything changed again
 *			     (not the maps: hand those over again)
 *
 * One transaction is under way at a time.
 */
#ifndef ENGINE_CATALOG_H
#define ENGINE_CATALOG_H

#include "engine/blockmap.h"
#include "engine/namespace.h"
#include "engine/types.h"

struct catalog;
struct catalog_txn;

struct catalog_opts {
	const char *dir; /* the backing directory */
	bool create;	 /* make it; -EEXIST if there */
	bool readonly; /* opens even if the directory is not writable (a WAL that needs recovery is
			  then read through a private copy, or refused with a reason) */
	uint32_t block;
	uint8_t uuid[16]; /* when creating */
	/* Called while loading for each file that has a map, before catalog_open returns; the map
	 * is the callee's. 0 or -errno (aborts with it). */
	int (*on_map)(void *arg, struct map_copy *map);
	/* Called (no lock held, any thread) when a removed inode has lost its last reference: its
	 * data can go. */
	void (*on_gone)(void *arg, uint64_t ino);
	void *arg;
	const char *vfs; /* SQLite VFS name, NULL: the default (fault injection in tests) */
};

struct catalog_meta {
	uint32_t version, block;
	uint8_t uuid[16];
	uint64_t commit_seq;
	uint64_t step;		 /* the committed step */
	bool has_step;		 /* false: no step was ever committed */
	uint64_t commit_time_ns; /* CLOCK_REALTIME of the last commit */
};

/* err gets a message for people (what, which row, what to do). -ENOENT: no catalog there; -EUCLEAN:
 * damaged; -EPROTONOSUPPORT: newer format. */
int catalog_open(const struct catalog_opts *opts, struct catalog **out, char *err, size_t errlen);
/* Checkpoints and closes; never writes changes that were not committed. */
void catalog_close(struct catalog *c);
struct ns *catalog_ns(struct catalog *c);
void catalog_get_meta(const struct catalog *c, struct catalog_meta *m);

/*
 * Collects what changed since the last freeze: inodes made, changed, removed. Inodes with NS_HELD
 * are left out, except those that were never committed: these go in with an empty map. *changed
 * tells whether there is anything to commit besides maps. `step`/`has_step`: what the meta row will
 * say after this commit.
 */
int catalog_freeze(struct catalog *c, uint64_t step, bool has_step, struct catalog_txn **out,
		   bool *changed);
/* The map of a file changes, and has n entries now. Its segments that changed follow, by
 * catalog_txn_segment(); the others stay as they are committed. -EINVAL, -ENOENT: a held or removed
 * inode must not be added. */
int catalog_txn_map(struct catalog_txn *t, uint64_t ino, uint32_t n);
/* Segments in ascending order: n entries (trailing holes may be cut; copied); all holes: it is not
 * stored any more. */
int catalog_txn_segment(struct catalog_txn *t, uint64_t ino, uint32_t seg, const struct extent *e,
			uint32_t n);
/* The copy made by catalog_txn_segment, to be completed by the loop thread as the frozen blocks get
 * their extents; valid until catalog_commit. */
struct extent *catalog_txn_segment_get(struct catalog_txn *t, uint64_t ino, uint32_t seg,
				       uint32_t *n);
bool catalog_txn_has(const struct catalog_txn *t,
		     uint64_t ino); /* this inode's row is in the transaction */
uint64_t catalog_txn_seq(const struct catalog_txn *t);
/* After catalog_commit() has failed: the inode whose row it could not accept, or 0. */
uint64_t catalog_txn_blame(const struct catalog_txn *t);

/* Loop thread: bytes of memory that it takes. */
uint64_t catalog_txn_memory(const struct catalog_txn *t);

int catalog_commit(struct catalog *c, struct catalog_txn *t);
/*
 * After a commit that failed: true when it may nevertheless be what a mount finds after a crash
 * (the sync failed, and the failure could not be undone). Until a later commit succeeds, neither
 * the extents of that commit nor those it was to replace may be reused.
 */
bool catalog_uncertain(const struct catalog *c);
void catalog_txn_end(struct catalog *c, struct catalog_txn *t, int res);

/*
 * Returns inodes to their committed rows: attributes, extended attributes, size; on_map is called
 * with the committed map (without blocks also for an inode that was never committed). `inos` NULL:
 * the whole tree, names too: inodes that are not committed disappear (those still referenced become
 * removed ones), removed ones come back. Blocks on SQLite reads: work thread, no transaction open.
 */
int catalog_revert(struct catalog *c, const uint64_t *inos, size_t n,
		   int (*on_map)(void *arg, struct map_copy *map), void *arg);

/* Bytes that the ballast can give the catalog on a full disk, and a text for status when it is
 * spent. */
uint64_t catalog_ballast(const struct catalog *c);
/* Bytes of memory that it keeps of the rows, beside the namespace. */
uint64_t catalog_memory(const struct catalog *c);

#endif
