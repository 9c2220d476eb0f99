/* SPDX-License-Identifier: Apache-2.0 */
/*
 * unsure.h - what was written before an fdatasync that failed counts as not stored until it has
 * been written again. Loop thread only.
 */
#ifndef ENGINE_UNSURE_H
#define ENGINE_UNSURE_H

#include "engine/cache.h"

/*
 * A sync has failed, that of commit `seq`: slot.unsure of all that no earlier commit holds. Call
 * when the commit's extents have been given up (seq 0), or are still its own.
 */
void unsure_mark(struct cache *c, uint64_t seq);

/* Extents that are unsure and whose content is not in memory as a dirty block. */
struct unsure_place {
	uint64_t ino;
	uint32_t n;
	struct extent e;
};

/*
 * Writes them again. While it runs nobody else may write to these places: they are part of a commit
 * under way.
 */
struct unsure_run {
	struct cache *c;
	struct unsure_place *v;
	size_t n, cap, i;
	void *buf; /* of one block */
	uint64_t hash, bytes;
	struct io_op io;
	struct loop_work work;
	int res; /* the first error; it goes on with the others all the same */
	uint64_t res_ino;
	const char *res_what;
	bool lost; /* bytes of a block are nowhere any more */
	void (*done)(struct unsure_run *u);
};

int unsure_room(struct unsure_run *u, size_t more); /* so that unsure_add() cannot fail */
void unsure_add(struct unsure_run *u, const struct file *f, uint32_t n, const struct extent *e);
void unsure_start(struct unsure_run *u); /* done() is called later, or at once if there are none */
void unsure_fini(struct unsure_run *u);

#endif
