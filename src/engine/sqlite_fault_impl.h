/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sqlite_fault_impl.h - what of the files would survive a power cut: sqlite_fault_track.c keeps it
 * for the VFS in sqlite_fault.c, under that one's mutex.
 *
 * A tracked file lives while it is open or differs from what is durable. Its parts: `durable`, the
 * content at the last sync; `ops`, what was done since, in order; and where the directory entry is
 * not durable either, `before`, what had that name at the last sync of the directory.
 */
#ifndef ENGINE_SQLITE_FAULT_IMPL_H
#define ENGINE_SQLITE_FAULT_IMPL_H

#include "engine/list.h"
#include "engine/types.h"

#define FAULT_SECTOR 512u

struct content {
	uint8_t *p;
	uint64_t len, cap;
};

struct tracked {
	struct list link;
	char *path;
	unsigned int opens;
	bool exists; /* now */
	struct content durable;
	struct list ops;
	bool entry_pending; /* made or removed since the last sync of the directory */
	bool existed;	    /* at that sync, and then with this content: */
	struct content before;
};

uint64_t fault_random(uint64_t *rng);
void fault_seed(uint64_t *rng, uint64_t seed);

/* The file at `path`, from now on followed; `exists`: it does, and its content is durable. */
struct tracked *tracked_get(struct list *files, const char *path, bool exists);
/* Forgets it, unless it is open or differs from what is durable. */
void tracked_put(struct tracked *t);
void tracked_forget_all(struct list *files);
void tracked_write(struct tracked *t, uint64_t off, const void *p, uint64_t len);
void tracked_truncate(struct tracked *t, uint64_t size);
void tracked_sync(struct tracked *t);
/* A sync failed: what was written so far is lost or not, until it is written again and synced. */
void tracked_doubt(struct tracked *t);
void tracked_made(struct tracked *t);
void tracked_removed(struct tracked *t);
void tracked_dirsync(struct list *files);
/* Makes the files on the drive what a cut leaves of them, by chance. */
void tracked_cut(struct list *files, uint64_t *rng);

#endif
