/* SPDX-License-Identifier: Apache-2.0 */
/*
 * index.c - see index.h. Open addressing with linear probing, at most half full. A name that was
 * taken out keeps its entry for when it comes back.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/hash.h"
#include "lib/index.h"

void index_fini(struct index *x)
{
	free(x->entry);
	*x = (struct index){0};
}

/* The entry of that name, or the free one where it would be. There is always a free one. */
static struct index_entry *find(struct index *x, const char *name)
{
	size_t i = hash_block(name, strlen(name)) & (x->cap - 1);

	for (;; i = (i + 1) & (x->cap - 1)) {
		struct index_entry *e = &x->entry[i];

		x->probes++;
		if (!e->name || strcmp(e->name, name) == 0)
			return e;
	}
}

uint32_t index_get(struct index *x, const char *name)
{
	const struct index_entry *e = x->n ? find(x, name) : NULL;

	return e && e->name ? e->value : INDEX_NONE;
}

static int grow(struct index *x)
{
	struct index more = {.cap = x->cap ? 2 * x->cap : 64, .n = x->n, .probes = x->probes};

	more.entry = calloc(more.cap, sizeof(*more.entry));
	if (!more.entry)
		return -ENOMEM;
	for (size_t i = 0; i < x->cap; i++) {
		if (x->entry[i].name)
			*find(&more, x->entry[i].name) = x->entry[i];
	}
	free(x->entry);
	*x = more;
	return 0;
}

int index_put(struct index *x, const char *name, uint32_t value)
{
	struct index_entry *e = x->n ? find(x, name) : NULL;

	if (e && e->name) {
		/* The newer pointer: the one before may go with its owner. */
		*e = (struct index_entry){name, value};
		return 0;
	}
	if (2 * (x->n + 1) > x->cap && grow(x))
		return -ENOMEM;
	*find(x, name) = (struct index_entry){name, value};
	x->n++;
	return 0;
}
