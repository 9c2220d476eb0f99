/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool_pack.c - places for many blocks at once, in a pool that is nearly full.
 *
 * pool_alloc() takes the next run that is long enough, and so may cut up the one run that a longer
 * place would have needed. Here all lengths are known beforehand: the longest goes first, and each
 * where the least is left over (best fit decreasing; D. S. Johnson, "Near-optimal bin packing
 * algorithms", 1973). It is not perfect, but a state that had its places in these runs before finds
 * them again.
 *
 * Loop thread only.
 */
#include <errno.h>
#include <stdlib.h>

#include "engine/pool.h"

struct run {
	uint64_t off, units;
	struct run *next; /* in its bucket */
};

struct runs {
	struct run *v, **bucket; /* by length; the last one has all that are longer than any place */
	size_t n, cap;
	uint64_t most;
};

static int longest_first(const void *pa, const void *pb)
{
	const struct pool_place *a = pa, *b = pb;

	if (a->len != b->len)
		return a->len > b->len ? -1 : 1;
	return a->tag < b->tag ? -1 : a->tag > b->tag;
}

static void put(struct runs *r, struct run *x)
{
	struct run **b = &r->bucket[min_u64(x->units, r->most + 1)];

	x->next = *b;
	*b = x;
}

static int collect(struct pool *p, struct runs *r)
{
	uint64_t off = 0, len;

	for (; pool_next_free(p, &off, &len); off += len) {
		if (r->n == r->cap) {
			size_t cap = max_u64(64, 2 * r->cap);
			struct run *v = realloc(r->v, cap * sizeof(*v));

			if (!v)
				return -ENOMEM;
			r->v = v;
			r->cap = cap;
		}
		r->v[r->n++] = (struct run){.off = off, .units = len / MOMENT_UNIT};
	}
	r->bucket = calloc(r->most + 2, sizeof(struct run *));
	if (!r->bucket)
		return -ENOMEM;
	for (size_t i = r->n; i-- > 0;) /* of equal ones the first in the file is on top */
		put(r, &r->v[i]);
	return 0;
}

static struct run *take(struct runs *r, uint64_t units)
{
	for (uint64_t k = units; k <= r->most + 1; k++) {
		struct run *x = r->bucket[k];

		if (x) {
			r->bucket[k] = x->next;
			return x;
		}
	}
	return NULL;
}

int pool_pack(struct pool *p, struct pool_place *v, size_t n)
{
	struct runs r = {0};
	size_t done = 0;
	int res = 0;

	if (!n)
		return 0;
	qsort(v, n, sizeof(*v), longest_first);
	r.most = v[0].len / MOMENT_UNIT;
	res = collect(p, &r);
	for (; !res && done < n; done++) {
		uint64_t units = v[done].len / MOMENT_UNIT;
		struct run *x = take(&r, units);

		if (!x) {
			res = -ENOSPC;
			break;
		}
		v[done].off.o = x->off;
		x->off += v[done].len;
		x->units -= units;
		if (x->units)
			put(&r, x);
		res = pool_mark(p, &(struct extent){.off = v[done].off.o, .len = v[done].len});
	}
	while (res && done > 0) {
		done--;
		pool_free(p, v[done].off, v[done].len);
	}
	free(r.bucket);
	free(r.v);
	return res;
}
