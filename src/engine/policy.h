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

/* Embedded in each cached block. */
struct policy_node {
	struct list link;
	uint64_t key; /* identifies the block across eviction: inode number << 24 ^ block number,
			 hashed as the policy likes */
	uint32_t bytes;
	uint8_t class;
	uint8_t queue; /* the policy's */
	uint8_t where; /* the policy's */
};

/* `blocks`: about how many blocks the cache can hold, to size queues and ghosts. */
int policy_create(struct policy **out, uint32_t blocks);
void policy_destroy(struct policy *p);

/* A block came into the cache (key, bytes, class set by the caller, who leaves them alone until
 * policy_remove()). */
void policy_insert(struct policy *p, struct policy_node *n);
/* It was used (a lease, a read, a write): not called for the use that inserted it. */
void policy_touch(struct policy *p, struct policy_node *n);
/* It will not be used again soon: a hint, evict it early. */
void policy_cool(struct policy *p, struct policy_node *n);
/* It left the cache: evicted (remember it as a ghost) or dropped (deleted, truncated: forget it).
 */
void policy_remove(struct policy *p, struct policy_node *n, bool evicted);

/*
 * Walks the blocks of a class from the best victim on: the first call with pos = NULL gives the
 * best one, then the next best after `pos`; NULL at the end. The list must not change in between.
 * The cache skips what it cannot evict (pinned, leased) and writes back what is dirty.
 */
struct policy_node *policy_victim(struct policy *p, enum policy_class class,
				  struct policy_node *pos);

#endif
