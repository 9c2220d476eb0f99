/* SPDX-License-Identifier: Apache-2.0 */
/*
 * policy.h - pure decisions: which block to evict next, which to write back early.
 *
 * No I/O, no lock, no allocation after creation (ghost entries live in a fixed table). The cache
 * tells it what happens; it answers questions. Two classes of blocks are kept apart, since memory
 * of one is of no use to the other: whole chunks and small pieces (arena.h).
 *
 * The first policy is 2Q (Johnson and Shasha, VLDB 1994, "2Q: a low overhead high performance
 * buffer management replacement algorithm", full version: A1in FIFO, A1out ghosts, Am LRU). A
 * second one that knows the order of the last step and evicts by Belady's MIN is to come: keep the
 * interface free of 2Q's details.
 */
#ifndef ENGINE_POLICY_H
#define ENGINE_POLICY_H

#include "engine/types.h"
#include "engine/list.h"

struct policy;

enum policy_class { POLICY_WHOLE, POLICY_SMALL, POLICY_CLASSES };

/*
 * What the cache could do with a block as it is now. The cache says so whenever it changes; so the
 * best victim that has a mark is found in a time that grows with the logarithm of the number of
 * blocks, however many of them are in use, dirty or being written.
 */
enum policy_mark {
	POLICY_EVICT = 1,  /* can be evicted */
	POLICY_SPENT = 2,  /* the same, and it is not read ahead for a use that is still to come */
	POLICY_WRITE = 4,  /* can be queued to be written back */
	POLICY_COUNTS = 8, /* its bytes are room for others, now or once it is written */
};

/* Embedded in each cached block. */
struct policy_node {
	uint64_t key; /* identifies the block across eviction: inode number << 24 ^ block number,
			 hashed as the policy likes */
	uint32_t bytes;
	uint8_t class;
	/* the policy's */
	uint8_t queue, where;
	uint8_t marks;
	uint8_t below; /* marks of the subtree */
	uint32_t prio;
	struct policy_node *up, *before, *behind;
	uint64_t counts, evict; /* bytes with these marks in the subtree */
};

/* `blocks`: about how many blocks the cache can hold, to size queues and ghosts. */
int policy_create(struct policy **out, uint32_t blocks);
void policy_destroy(struct policy *p);

/* A block came into the cache (key, bytes, class set by the caller, who leaves them alone until
 * policy_remove()), without marks. */
void policy_insert(struct policy *p, struct policy_node *n);
/* It was used (a lease, a read, a write): not called for the use that inserted it. */
void policy_touch(struct policy *p, struct policy_node *n);
/* It will not be used again soon: a hint, evict it early. */
void policy_cool(struct policy *p, struct policy_node *n);
/* It left the cache: evicted (remember it as a ghost) or dropped (deleted, truncated: forget it).
 */
void policy_remove(struct policy *p, struct policy_node *n, bool evicted);

/* Its marks are these from now on. */
void policy_mark(struct policy *p, struct policy_node *n, unsigned int marks);

/*
 * The blocks of a class that have a mark (0: all blocks), from the best victim on: pos = NULL gives
 * the best one, else the next best behind `pos`; NULL: there is none. Marks may change between two
 * calls, the blocks and their order must not.
 */
struct policy_node *policy_victim(struct policy *p, enum policy_class class, unsigned int mark,
				  struct policy_node *pos);

/* Bytes with the mark POLICY_COUNTS in better victims than `n`. */
uint64_t policy_counts_before(struct policy *p, const struct policy_node *n);

/* Bytes of a class that can be evicted; of all blocks of a class. */
uint64_t policy_evictable(const struct policy *p, enum policy_class class);
uint64_t policy_bytes(const struct policy *p, enum policy_class class);

/* Nodes looked at since it was made: what tests hold the work to. */
uint64_t policy_visits(const struct policy *p);

#endif
