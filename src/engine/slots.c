/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slots.c - a file's slots by block number, and which of them the next commit must look at.
 *
 * Memory goes by the blocks that were touched, wherever they lie. A small file has its first slot
 * in struct file; slots 1, 2-3, 4-7, 8-15, 16-31 are made when one of them is wanted, so there are
 * at most twice as many as are used. From 32 on slots are in leaves of SLOT_LEAF, which hang from a
 * radix tree of nodes with SLOT_FAN places; it is as high as the highest block needs. A slot never
 * moves, so a pointer to one is good until slots_tidy() or the file's end.
 *
 * The blocks of a leaf are those of one segment of the catalog's map (blockmap.h), as are the first
 * 32 together. A segment is marked when something changes that a commit would record of it: by
 * slot_written(), slot_drop_live() and block_set_state() themselves, so that nobody can forget it.
 * A commit takes the marked segments of the changed files, and only those.
 *
 * Loop thread only.
 */
#include <stdlib.h>
#include <string.h>

#include "engine/blockmap.h"
#include "engine/cache.h"

_Static_assert(SLOT_LEAF == BLOCKMAP_SEGMENT, "a leaf is a segment");

#define FAN_BITS 6u
#define SLOT_FAN (1u << FAN_BITS)

struct slot_leaf {
	struct slot_leaf *next; /* in the file's marked ones */
	uint32_t seg;
	bool marked;
	struct slot slot[SLOT_LEAF];
};

struct slot_node {
	void *child[SLOT_FAN]; /* nodes; leaves at the lowest level */
};

static void *take(struct cache *c, size_t size)
{
	void *p = calloc(1, size);

	if (p)
		c->heap += heap_cost(size);
	return p;
}

static void give(struct cache *c, void *p, size_t size)
{
	if (p)
		c->heap -= heap_cost(size);
	free(p);
}

/* ---- finding ---- */

/* Of the arrays for slots 1 to 31, the one that has slot n. */
static unsigned int few_of(uint32_t n)
{
	return 31u - (unsigned int)__builtin_clz(n);
}

/* Leaves below one place of a node that is `level` levels above the leaves. */
static uint64_t span(unsigned int level)
{
	return (uint64_t)1 << (FAN_BITS * (level - 1));
}

static struct slot_leaf *leaf_find(const struct file *f, uint32_t seg)
{
	void *at = f->tree;

	if (seg >= span(f->height + 1u))
		return NULL;
	for (unsigned int level = f->height; at && level; level--)
		at = ((struct slot_node *)at)->child[seg / span(level) % SLOT_FAN];
	return at;
}

struct slot *file_slot(struct file *f, uint32_t n)
{
	struct slot_leaf *leaf;

	if (n == 0)
		return &f->first;
	if (n < SLOT_LEAF) {
		struct slot *few = f->few ? f->few[few_of(n)] : NULL;

		return few ? few + (n - (1u << few_of(n))) : NULL;
	}
	leaf = leaf_find(f, n / SLOT_LEAF);
	return leaf ? &leaf->slot[n % SLOT_LEAF] : NULL;
}

/* The first leaf from *seg on. */
static struct slot_leaf *leaf_next(const struct file *f, uint64_t *seg)
{
	uint64_t end = f->tree ? span(f->height + 1u) : 0;

	while (*seg < end) {
		void *at = f->tree;
		unsigned int level = f->height;

		for (; at && level; level--) {
			void *child = ((struct slot_node *)at)->child[*seg / span(level) % SLOT_FAN];

			if (!child)
				break;
			at = child;
		}
		if (!level)
			return at;
		*seg = (*seg / span(level) + 1) * span(level);
	}
	return NULL;
}

struct slot *file_slot_next(struct file *f, uint32_t *n)
{
	struct slot_leaf *leaf;
	uint64_t seg;

	for (; *n < SLOT_LEAF; *n = *n ? 2u << few_of(*n) : 1) {
		struct slot *s = file_slot(f, *n);

		if (s)
			return s;
	}
	seg = *n / SLOT_LEAF;
	leaf = leaf_next(f, &seg);
	if (!leaf)
		return NULL;
	if (seg != *n / SLOT_LEAF)
		*n = (uint32_t)(seg * SLOT_LEAF);
	return &leaf->slot[*n % SLOT_LEAF];
}

/* ---- making ---- */

static struct slot *few_make(struct cache *c, struct file *f, uint32_t n)
{
	unsigned int k = few_of(n);

	if (!f->few)
		f->few = take(c, SLOT_FEW * sizeof(*f->few));
	if (!f->few)
		return NULL;
	if (!f->few[k])
		f->few[k] = take(c, sizeof(struct slot) << k);
	return f->few[k] ? f->few[k] + (n - (1u << k)) : NULL;
}

/* Another level on top, until the tree holds this segment. */
static int tree_grow(struct cache *c, struct file *f, uint32_t seg)
{
	while (!f->height || seg >= span(f->height + 1u)) {
		struct slot_node *node = NULL;

		if (f->tree || !f->height) {
			node = take(c, sizeof(*node));
			if (!node)
				return -1;
			node->child[0] = f->tree;
		}
		f->tree = node;
		f->height++;
	}
	return 0;
}

struct slot *file_slot_make(struct cache *c, struct file *f, uint32_t n)
{
	struct slot *s = file_slot(f, n);
	uint32_t seg = n / SLOT_LEAF;
	struct slot_leaf *leaf;
	void **at;

	if (s)
		return s;
	if (n < SLOT_LEAF)
		return few_make(c, f, n);
	if (tree_grow(c, f, seg))
		return NULL;
	at = &f->tree;
	for (unsigned int level = f->height; level; level--) {
		if (!*at)
			*at = take(c, sizeof(struct slot_node));
		if (!*at)
			return NULL;
		at = &((struct slot_node *)*at)->child[seg / span(level) % SLOT_FAN];
	}
	leaf = take(c, sizeof(*leaf));
	if (!leaf)
		return NULL;
	leaf->seg = seg;
	*at = leaf;
	return &leaf->slot[n % SLOT_LEAF];
}

/* ---- what a map needs ---- */

bool slot_has_content(const struct slot *s)
{
	return !extent_is_hole(&s->live) ||
	       (s->b && (s->b->state == BLOCK_DIRTY || s->b->state == BLOCK_WRITING));
}

/* The same below a node or a leaf; 0: nothing. */
static uint32_t map_len_below(const void *at, unsigned int level)
{
	const struct slot_node *node = at;
	const struct slot_leaf *leaf = at;

	for (unsigned int k = SLOT_LEAF; !level && k-- > 0;)
		if (slot_has_content(&leaf->slot[k]))
			return leaf->seg * SLOT_LEAF + k + 1;
	for (unsigned int k = SLOT_FAN; level && k-- > 0;) {
		uint32_t n = node->child[k] ? map_len_below(node->child[k], level - 1) : 0;

		if (n)
			return n;
	}
	return 0;
}

uint32_t file_map_len(struct file *f)
{
	uint32_t n = f->tree ? map_len_below(f->tree, f->height) : 0;

	for (uint32_t i = SLOT_LEAF; !n && i-- > 0;) {
		const struct slot *s = file_slot(f, i);

		if (s && slot_has_content(s))
			n = i + 1;
	}
	return n;
}

/* ---- marks ---- */

void slot_changed(struct cache *c, struct file *f, uint32_t n)
{
	struct slot_leaf *leaf;

	file_changed(c, f);
	if (n < SLOT_LEAF) {
		f->marked_first = true;
		return;
	}
	leaf = leaf_find(f, n / SLOT_LEAF);
	if (!leaf || leaf->marked)
		return;
	leaf->marked = true;
	leaf->next = f->marked;
	f->marked = leaf;
}

void file_changed_all(struct cache *c, struct file *f)
{
	uint32_t n = 0;

	while (file_slot_next(f, &n)) {
		slot_changed(c, f, n);
		n = (n / SLOT_LEAF + 1) * SLOT_LEAF;
	}
}

uint32_t slots_marked(const struct file *f)
{
	uint32_t n = f->marked_first;

	for (const struct slot_leaf *leaf = f->marked; leaf; leaf = leaf->next)
		n++;
	return n;
}

static int by_number(const void *pa, const void *pb)
{
	const uint32_t *a = pa, *b = pb;

	return *a < *b ? -1 : *a > *b;
}

void slots_marked_get(const struct file *f, uint32_t *segs)
{
	uint32_t n = 0;

	if (f->marked_first)
		segs[n++] = 0;
	for (const struct slot_leaf *leaf = f->marked; leaf; leaf = leaf->next)
		segs[n++] = leaf->seg;
	if (n)
		qsort(segs, n, sizeof(*segs), by_number);
}

static bool content_from(struct file *f, uint32_t seg, uint32_t n)
{
	for (uint32_t i = max_u32(n, seg * SLOT_LEAF); i / SLOT_LEAF == seg; i++) {
		const struct slot *s = file_slot(f, i);

		if (s && slot_has_content(s))
			return true;
	}
	return false;
}

void slots_unmark(struct file *f, uint32_t n)
{
	struct slot_leaf *leaf = f->marked, *next;

	f->marked_first = f->marked_first && content_from(f, 0, n);
	f->marked = NULL;
	for (; leaf; leaf = next) {
		next = leaf->next;
		leaf->marked = content_from(f, leaf->seg, n);
		leaf->next = leaf->marked ? f->marked : NULL;
		if (leaf->marked)
			f->marked = leaf;
	}
}

/* ---- giving memory back ---- */

static bool slot_is_empty(const struct slot *s)
{
	return !s->b && !s->nspare && !s->keep && !s->acct && !s->unsure &&
	       extent_is_hole(&s->live);
}

/* Frees what is below and empty, or with `all` everything. True: nothing is left of it. */
static bool tidy_below(struct cache *c, void *at, unsigned int level, bool all)
{
	struct slot_node *node = at;
	struct slot_leaf *leaf = at;
	bool empty = true;

	for (unsigned int k = 0; !level && !all && k < SLOT_LEAF; k++)
		empty = empty && slot_is_empty(&leaf->slot[k]);
	if (!level && (!empty || (leaf->marked && !all)))
		return false;
	for (unsigned int k = 0; level && k < SLOT_FAN; k++) {
		if (node->child[k] && tidy_below(c, node->child[k], level - 1, all))
			node->child[k] = NULL;
		empty = empty && !node->child[k];
	}
	if (!empty)
		return false;
	give(c, at, level ? sizeof(*node) : sizeof(*leaf));
	return true;
}

void slots_tidy(struct cache *c, struct file *f)
{
	f->untidy = false;
	if (!f->tree || !tidy_below(c, f->tree, f->height, false))
		return;
	f->tree = NULL;
	f->height = 0;
}

void slots_fini(struct cache *c, struct file *f)
{
	for (unsigned int k = 0; f->few && k < SLOT_FEW; k++)
		give(c, f->few[k], sizeof(struct slot) << k);
	give(c, f->few, SLOT_FEW * sizeof(*f->few));
	if (f->tree)
		tidy_below(c, f->tree, f->height, true);
	f->few = NULL;
	f->tree = NULL;
}
