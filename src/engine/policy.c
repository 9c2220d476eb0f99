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
 * A queue is a tree whose order from left to right is that of the victims: a treap (Seidel and
 * Aragon, "Randomized search trees", Algorithmica 1996), that is a binary tree which is a heap by
 * random priorities and so is about as deep as the logarithm of its size, whatever comes and goes.
 * Each node knows which marks there are in its subtree and how many bytes have them; a search for
 * the next victim that can be evicted or written descends only where there is one, and the bytes
 * before it are summed up on the way to the root. Blocks come in at one of the two ends only, so
 * no key is compared.
 *
 * Loop thread only. A node is the cache's; between insert and remove all of it but key, bytes and
 * class is ours.
 */
#include "engine/bug.h"
#include "engine/policy.h"

#include <errno.h>
#include <stdatomic.h>
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
	struct policy_node *queue[QUEUES]; /* the roots */
	uint64_t bytes[QUEUES];
	struct list ghosts, unused;
	struct ghost *ghost;	/* [ghost_max] */
	struct ghost **buckets; /* [1 << bucket_bits] */
};

struct policy {
	struct class_state class[POLICY_CLASSES];
	unsigned int bucket_bits;
	uint32_t random;
	_Atomic uint64_t visits; /* one writer; tests read it meanwhile */
};

static void visited(struct policy *p)
{
	uint64_t n = atomic_load_explicit(&p->visits, memory_order_relaxed);

	atomic_store_explicit(&p->visits, n + 1, memory_order_relaxed);
}

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
	p->random = 2463534242u;
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

/* --- the trees ---------------------------------------------------------------------------- */

/* Works out what a node knows of its subtree; false if that is what it knew. */
static bool refresh(struct policy *p, struct policy_node *n)
{
	const struct policy_node *l = n->before, *r = n->behind;
	uint8_t below = n->marks;
	uint64_t counts = n->marks & POLICY_COUNTS ? n->bytes : 0;
	uint64_t evict = n->marks & POLICY_EVICT ? n->bytes : 0;

	visited(p);
	if (l) {
		below |= l->below;
		counts += l->counts;
		evict += l->evict;
	}
	if (r) {
		below |= r->below;
		counts += r->counts;
		evict += r->evict;
	}
	if (below == n->below && counts == n->counts && evict == n->evict)
		return false;
	n->below = below;
	n->counts = counts;
	n->evict = evict;
	return true;
}

static void refresh_up(struct policy *p, struct policy_node *n)
{
	for (; n; n = n->up)
		refresh(p, n);
}

static uint32_t next_random(struct policy *p) /* xorshift: Marsaglia, 2003 */
{
	p->random ^= p->random << 13;
	p->random ^= p->random >> 17;
	p->random ^= p->random << 5;
	return p->random;
}

/*
 * Puts a node that is in no queue where the best victim of `q` is (cold) or the worst one. On the
 * way along that side of the tree it takes over the first subtree of lower priority.
 */
static void enqueue(struct policy *p, struct class_state *c, struct policy_node *n, enum queue q)
{
	struct policy_node **at = &c->queue[q], *up = NULL;
	bool best = q == QUEUE_COLD;

	n->queue = (uint8_t)q;
	n->prio = next_random(p);
	while (*at && (*at)->prio >= n->prio) {
		up = *at;
		at = best ? &up->before : &up->behind;
	}
	n->before = best ? NULL : *at;
	n->behind = best ? *at : NULL;
	if (*at)
		(*at)->up = n;
	n->up = up;
	*at = n;
	refresh_up(p, n);
	c->bytes[q] += n->bytes;
}

/* Takes a node out; its two subtrees become one in its place. */
static void dequeue(struct policy *p, struct class_state *c, struct policy_node *n)
{
	struct policy_node *l = n->before, *r = n->behind, *up = n->up, **at;

	assert(c->bytes[n->queue] >= n->bytes);
	c->bytes[n->queue] -= n->bytes;
	at = !up ? &c->queue[n->queue] : up->before == n ? &up->before : &up->behind;
	while (l && r) {
		if (l->prio >= r->prio) {
			*at = l;
			l->up = up;
			up = l;
			at = &l->behind;
			l = l->behind;
		} else {
			*at = r;
			r->up = up;
			up = r;
			at = &r->before;
			r = r->before;
		}
	}
	*at = l ? l : r;
	if (*at)
		(*at)->up = up;
	refresh_up(p, up);
	n->up = n->before = n->behind = NULL;
}

/* The first node of a subtree that has the marks; `mark` 0: the first one. */
static struct policy_node *first_of(struct policy *p, struct policy_node *n, unsigned int mark)
{
	if (!n || (n->below & mark) != mark)
		return NULL;
	for (;;) {
		visited(p);
		if (n->before && (n->before->below & mark) == mark)
			n = n->before;
		else if ((n->marks & mark) == mark)
			return n;
		else
			n = n->behind;
	}
}

static struct policy_node *next_of(struct policy *p, struct policy_node *n, unsigned int mark)
{
	struct policy_node *found = first_of(p, n->behind, mark);

	while (!found && n->up) {
		struct policy_node *from = n;

		visited(p);
		n = n->up;
		if (n->before != from)
			continue;
		found = (n->marks & mark) == mark ? n : first_of(p, n->behind, mark);
	}
	return found;
}

void policy_insert(struct policy *p, struct policy_node *n)
{
	struct class_state *c = class_of(p, n);

	/* `where` is the queue that the block belongs to while it is in cold. */
	n->where = ghost_forget(p, c, n->key) ? QUEUE_AM : QUEUE_A1IN;
	n->marks = 0;
	enqueue(p, c, n, n->where);
}

void policy_touch(struct policy *p, struct policy_node *n)
{
	struct class_state *c = class_of(p, n);

	if (n->queue == QUEUE_A1IN)
		return;
	dequeue(p, c, n);
	enqueue(p, c, n, n->where);
}

void policy_cool(struct policy *p, struct policy_node *n)
{
	struct class_state *c = class_of(p, n);

	dequeue(p, c, n);
	enqueue(p, c, n, QUEUE_COLD);
}

void policy_remove(struct policy *p, struct policy_node *n, bool evicted)
{
	struct class_state *c = class_of(p, n);

	dequeue(p, c, n);
	if (evicted && n->where == QUEUE_A1IN)
		ghost_remember(p, c, n->key);
}

void policy_mark(struct policy *p, struct policy_node *n, unsigned int marks)
{
	if (n->marks == marks)
		return;
	n->marks = (uint8_t)marks;
	while (n && refresh(p, n))
		n = n->up;
}

/* The queues from the best victims to the worst. */
static const enum queue *order_of(const struct class_state *c)
{
	static const enum queue orders[2][QUEUES] = {
		{QUEUE_COLD, QUEUE_AM, QUEUE_A1IN},
		{QUEUE_COLD, QUEUE_A1IN, QUEUE_AM},
	};
	uint64_t a1in = c->bytes[QUEUE_A1IN];

	return orders[a1in > (a1in + c->bytes[QUEUE_AM]) / KIN_DIVISOR];
}

struct policy_node *policy_victim(struct policy *p, enum policy_class class, unsigned int mark,
				  struct policy_node *pos)
{
	struct class_state *c = &p->class[class];
	const enum queue *order = order_of(c);
	struct policy_node *found = NULL;
	int i = 0;

	if (pos) {
		while (order[i] != pos->queue)
			i++;
		found = next_of(p, pos, mark);
		i++;
	}
	for (; i < QUEUES && !found; i++)
		found = first_of(p, c->queue[order[i]], mark);
	return found;
}

uint64_t policy_counts_before(struct policy *p, const struct policy_node *n)
{
	const struct class_state *c = &p->class[n->class];
	const enum queue *order = order_of(c);
	uint64_t sum = n->before ? n->before->counts : 0;

	for (int i = 0; order[i] != n->queue; i++)
		sum += c->queue[order[i]] ? c->queue[order[i]]->counts : 0;
	for (; n->up; n = n->up) {
		const struct policy_node *up = n->up;

		visited(p);
		if (up->behind != n)
			continue;
		sum += up->marks & POLICY_COUNTS ? up->bytes : 0;
		sum += up->before ? up->before->counts : 0;
	}
	return sum;
}

uint64_t policy_evictable(const struct policy *p, enum policy_class class)
{
	uint64_t sum = 0;

	for (int q = 0; q < QUEUES; q++)
		sum += p->class[class].queue[q] ? p->class[class].queue[q]->evict : 0;
	return sum;
}

uint64_t policy_bytes(const struct policy *p, enum policy_class class)
{
	uint64_t sum = 0;

	for (int q = 0; q < QUEUES; q++)
		sum += p->class[class].bytes[q];
	return sum;
}

uint64_t policy_visits(const struct policy *p)
{
	return atomic_load_explicit(&p->visits, memory_order_relaxed);
}
