/* SPDX-License-Identifier: Apache-2.0 */
/*
 * policy.c - 2Q, full version (Johnson and Shasha, VLDB 1994).
 *
 * Per class:
 *
 *   A1in   blocks seen once, in order of arrival. A touch does not move them: several uses close
 *          together are one use.
 *   A1out  ghosts: the keys of blocks evicted from A1in, the oldest forgotten first.
 *   Am     blocks that came back while they were a ghost, most recently used first.
 *   cold   blocks of either queue that the cache expects not to be used soon, the latest first: in
 *          a sweep the block just done with is the one whose next use is furthest away.
 *
 *   insert  -> A1in, or Am if the key is a ghost
 *   touch   Am -> front of Am;  cold -> front of where it was;  A1in stays
 *   cool    -> front of cold
 *   remove  evicted from A1in: becomes a ghost
 *
 * Victims: cold; then A1in from its tail and after it Am from its tail, if A1in has more than a
 * quarter of the bytes (Kin), else Am before A1in. A long scan thus runs through A1in and leaves Am
 * alone. Kin is a share of what is there, not of a capacity: how much memory a class gets is
 * decided elsewhere.
 *
 * The ghosts (Kout, half the blocks that the cache holds) are in a table of fixed size. The queues
 * hold blocks of the cache and so are no longer than it.
 *
 * Loop thread only. A node is the cache's; between insert and remove its link, queue and where are
 * ours.
 */
#include "engine/bug.h"
#include "engine/policy.h"

#include <errno.h>
#include <stdlib.h>

#define KIN_DIVISOR  4 /* A1in's share of the bytes */
#define KOUT_DIVISOR 2 /* ghosts per block of the cache */

enum queue { QUEUE_COLD, QUEUE_A1IN, QUEUE_AM, QUEUES };

struct ghost {
	struct list age;     /* in class_state.ghosts, the newest first, or .unused */
	struct ghost *chain; /* next in the bucket */
	uint64_t key;
};

struct class_state {
	struct list queue[QUEUES];
	uint64_t bytes[QUEUES];
	struct list ghosts, unused;
	struct ghost *ghost;	/* [ghost_max] */
	struct ghost **buckets; /* [1 << bucket_bits] */
};

struct policy {
	struct class_state class[POLICY_CLASSES];
	unsigned int bucket_bits;
};

/* --- ghosts ------------------------------------------------------------------------------- */

/* Where the pointer to the key's ghost is, or to the NULL at the end of its bucket. */
static struct ghost **ghost_find(struct policy *p, struct class_state *c, uint64_t key)
{
	/* Fibonacci hashing: the high bits of the product depend on all bits of the key. */
	uint64_t h = (key ^ key >> 32) * 0x9e3779b97f4a7c15ull;
	struct ghost **g = &c->buckets[h >> (64 - p->bucket_bits)];

	while (*g && (*g)->key != key)
		g = &(*g)->chain;
	return g;
}

static bool ghost_forget(struct policy *p, struct class_state *c, uint64_t key)
{
	struct ghost **at = ghost_find(p, c, key);
	struct ghost *g = *at;

	if (!g)
		return false;
	*at = g->chain;
	list_remove(&g->age);
	list_push_back(&c->unused, &g->age);
	return true;
}

static void ghost_remember(struct policy *p, struct class_state *c, uint64_t key)
{
	struct ghost **at, *g;

	ghost_forget(p, c, key);
	if (list_empty(&c->unused))
		ghost_forget(p, c, list_entry(c->ghosts.prev, struct ghost, age)->key);
	g = list_first(&c->unused, struct ghost, age);
	list_remove(&g->age);
	list_push_front(&c->ghosts, &g->age);
	g->key = key;
	at = ghost_find(p, c, key);
	g->chain = *at;
	*at = g;
}

/* ------------------------------------------------------------------------------------------ */

static int class_init(struct class_state *c, uint32_t ghosts, unsigned int bucket_bits)
{
	for (int q = 0; q < QUEUES; q++)
		list_init(&c->queue[q]);
	list_init(&c->ghosts);
	list_init(&c->unused);
	c->ghost = calloc(ghosts, sizeof(*c->ghost));
	c->buckets = calloc((size_t)1 << bucket_bits, sizeof(struct ghost *));
	if (!c->ghost || !c->buckets)
		return -ENOMEM;
	for (uint32_t i = 0; i < ghosts; i++)
		list_push_back(&c->unused, &c->ghost[i].age);
	return 0;
}

int policy_create(struct policy **out, uint32_t blocks)
{
	uint32_t ghosts = blocks / KOUT_DIVISOR;
	struct policy *p = calloc(1, sizeof(*p));

	if (!p)
		return -ENOMEM;
	if (!ghosts)
		ghosts = 1;
	/* At least one bit, so that the shift in ghost_find() is defined. */
	p->bucket_bits = ghosts > 1 ? 32 - (unsigned int)__builtin_clz(ghosts - 1) : 1;
	for (int i = 0; i < POLICY_CLASSES; i++) {
		if (class_init(&p->class[i], ghosts, p -> bucket_bits)) {
			policy_destroy(p);
			return -ENOMEM;
		}
	}
	*out = p;
	return 0;
}

void policy_destroy(struct policy *p)
{
	if (!p)
		return;
	for (int i = 0; i < POLICY_CLASSES; i++) {
		free(p->class[i].ghost);
		free(p->class[i].buckets);
	}
	free(p);
}

static struct class_state *class_of(struct policy *p, const struct policy_node *n)
{
	assert(n->class < POLICY_CLASSES);
	return &p->class[n->class];
}

/* Puts a node that is in no queue at the front of `q`. */
static void enqueue(struct class_state *c, struct policy_node *n, enum queue q)
{
	n->queue = (uint8_t)q;
	list_push_front(&c->queue[q], &n->link);
	c->bytes[q] += n->bytes;
}

static void dequeue(struct class_state *c, struct policy_node *n)
{
	assert(c->bytes[n->queue] >= n->bytes);
	c->bytes[n->queue] -= n->bytes;
	list_remove(&n->link);
}

void policy_insert(struct policy *p, struct policy_node *n)
{
	struct class_state *c = class_of(p, n);

	/* `where` is the queue that the block belongs to while it is in cold. */
	n->where = ghost_forget(p, c, n->key) ? QUEUE_AM : QUEUE_A1IN;
	enqueue(c, n, n->where);
}

void policy_touch(struct policy *p, struct policy_node *n)
{
	struct class_state *c = class_of(p, n);

	if (n->queue == QUEUE_A1IN)
		return;
	dequeue(c, n);
	enqueue(c, n, n->where);
}

void policy_cool(struct policy *p, struct policy_node *n)
{
	struct class_state *c = class_of(p, n);

	dequeue(c, n);
	enqueue(c, n, QUEUE_COLD);
}

void policy_remove(struct policy *p, struct policy_node *n, bool evicted)
{
	struct class_state *c = class_of(p, n);

	dequeue(c, n);
	if (evicted && n->where == QUEUE_A1IN)
		ghost_remember(p, c, n->key);
}

struct policy_node *policy_victim(struct policy *p, enum policy_class class,
				  struct policy_node *pos)
{
	static const enum queue orders[2][QUEUES] = {
		{QUEUE_COLD, QUEUE_AM, QUEUE_A1IN},
		{QUEUE_COLD, QUEUE_A1IN, QUEUE_AM},
	};
	struct class_state *c = &p->class[class];
	uint64_t a1in = c->bytes[QUEUE_A1IN];
	bool exceeds = a1in > (a1in + c->bytes[QUEUE_AM]) / KIN_DIVISOR;
	const enum queue *order = orders[exceeds];
	int i = 0;

	if (pos) {
		struct list *next;

		while (order[i] != pos->queue)
			i++;
		/* cold is walked from its front, the others from their tails. */
		next = pos->queue == QUEUE_COLD ? pos->link.next : pos->link.prev;
		if (next != &c->queue[pos->queue])
			return list_entry(next, struct policy_node, link);
		i++;
	}
	for (; i < QUEUES; i++) {
		struct list *q = &c->queue[order[i]];

		if (!list_empty(q))
			return list_entry(order[i] == QUEUE_COLD ? q->next : q->prev,
					  struct policy_node, link);
	}
	return NULL;
}
