/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ahead.c - what comes next: the order of updates, and hints of it to the data path.
 *
 * The order is that of registering, then that of the last step, or exactly known when a whole list
 * is stepped. What has been hinted and not yet used is one run of positions in it, [from, to);
 * `bytes` is its weight and is kept below the path's window. Using a position inside the run moves
 * `from` past it; using one outside means that the guess was wrong, and the run starts anew behind
 * it. A wrong guess costs time only.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "lib/error.h"
#include "lib/session.h"

#define HINT_RANGES 256

uint32_t unit_len(const struct moment_session *s, const struct param *p, uint32_t block)
{
	uint64_t first = (uint64_t)block * p->per_block, left = p->numel - first;

	(void)s;
	return (uint32_t)((left < p->per_block ? left : p->per_block) * p->itemsize);
}

uint64_t unit_bytes(const struct moment_session *s, const struct param *p, uint32_t block)
{
	return p->roles * path_piece(unit_len(s, p, block));
}

/* Whether there is anything to read for it. */
static bool weighs(const struct param *p)
{
	return p->blocks && !p->dead;
}

static void ahead_restart(struct ahead *a, uint32_t place, uint32_t block)
{
	a->from_place = a->place = place;
	a->from_block = a->block = block;
	a->bytes = 0;
}

/* The position after (*place, *block), over empty parameters too. */
static void next_position(struct moment_session *s, uint32_t *place, uint32_t *block)
{
	struct ahead *a = &s->ahead;

	if (*place < a->n && *block + 1 < s->param[a->order[*place]].blocks) {
		(*block)++;
		return;
	}
	(*place)++;
	*block = 0;
}

static bool before(uint32_t place_a, uint32_t block_a, uint32_t place_b, uint32_t block_b)
{
	return place_a < place_b || (place_a == place_b && block_a < block_b);
}

static void places_set(struct moment_session *s)
{
	struct ahead *a = &s->ahead;
	uint32_t i;

	for (i = 0; i < s->n_params; i++) {
		s->param[i].place = UINT32_MAX;
		s->param[i].seen = false;
	}
	for (i = 0; i < a->n; i++)
		s->param[a->order[i]].place = i;
}

static int room(uint32_t **array, uint32_t n, uint32_t *cap)
{
	uint32_t more = *cap ? *cap : 64, *p;

	if (n <= *cap)
		return 0;
	while (more < n)
		more *= 2;
	p = realloc(*array, more * sizeof(*p));
	if (!p)
		return err_set(-ENOMEM, "out of memory");
	*array = p;
	*cap = more;
	return 0;
}

int ahead_add(struct moment_session *s, uint32_t handle)
{
	struct ahead *a = &s->ahead;
	int res = room(&a->order, a->n + 1, &a->cap);

	if (res < 0)
		return res;
	s->param[handle].place = a->n;
	a->order[a->n++] = handle;
	return 0;
}

void ahead_expect(struct moment_session *s, const struct moment_item *items, size_t n)
{
	struct ahead *a = &s->ahead;
	uint32_t i;
	bool same = n == a->n;

	for (i = 0; same && i < n; i++)
		same = a->order[i] == items[i].param;
	if (same || n > UINT32_MAX || room(&a->order, (uint32_t)n, &a->cap) < 0)
		return;
	for (i = 0; i < n; i++)
		a->order[i] = items[i].param;
	a->n = (uint32_t)n;
	places_set(s);
	ahead_restart(a, 0, 0);
}

int ahead_saw(struct moment_session *s, uint32_t handle)
{
	struct ahead *a = &s->ahead;
	int res;

	if (s->param[handle].seen)
		return 0;
	res = room(&a->seen, a->n_seen + 1, &a->cap_seen);
	if (res < 0)
		return res;
	s->param[handle].seen = true;
	a->seen[a->n_seen++] = handle;
	return 0;
}

void ahead_used(struct moment_session *s, const struct param *p, uint32_t block)
{
	struct ahead *a = &s->ahead;
	uint32_t place = p->place, b = block;

	if (place == UINT32_MAX)
		return;
	if (before(place, block, a->from_place, a->from_block) ||
	    !before(place, block, a->place, a->block)) {
		next_position(s, &place, &b);
		ahead_restart(a, place, b);
		return;
	}
	while (!before(place, block, a->from_place, a->from_block)) {
		const struct param *q = &s->param[a->order[a->from_place]];

		if (weighs(q))
			a->bytes -= unit_bytes(s, q, a->from_block);
		next_position(s, &a->from_place, &a->from_block);
	}
}

void ahead_hint(struct moment_session *s)
{
	struct ahead *a = &s->ahead;
	struct moment_range r[HINT_RANGES];
	size_t n = 0;

	while (s->hints && a->place < a->n && a->bytes < s->path->window) {
		const struct param *p = &s->param[a->order[a->place]];
		uint32_t i;

		if (weighs(p)) {
			uint64_t bytes = unit_bytes(s, p, a->block);

			if (a->bytes + bytes > s->path->window)
				break;
			if (n + p->roles > HINT_RANGES) {
				s->path->ops->prefetch(s->path, r, n);
				n = 0;
			}
			for (i = 0; i < p->roles; i++)
				r[n++] = (struct moment_range){
					.file = p->file[p->role[i]], .first = a->block, .count = 1};
			a->bytes += bytes;
		}
		next_position(s, &a->place, &a->block);
	}
	if (n)
		s->path->ops->prefetch(s->path, r, n);
}

void ahead_goto(struct moment_session *s, const struct param *p)
{
	struct ahead *a = &s->ahead;

	if (p->place == UINT32_MAX)
		return;
	if (before(p->place, 0, a->from_place, a->from_block) ||
	    before(a->place, a->block, p->place, 0))
		ahead_restart(a, p->place, 0);
	ahead_hint(s);
}

/* The step is over: its order is the next one's, whose beginning can be read during the next
 * forward pass. */
void ahead_end(struct moment_session *s)
{
	struct ahead *a = &s->ahead;

	if (a->n_seen) {
		uint32_t *order = a->order, cap = a->cap;

		a->order = a->seen;
		a->cap = a->cap_seen;
		a->n = a->n_seen;
		a->seen = order;
		a->cap_seen = cap;
		a->n_seen = 0;
		places_set(s);
		ahead_restart(a, 0, 0);
	}
	ahead_hint(s);
}

void ahead_reset(struct moment_session *s)
{
	uint32_t i;

	for (i = 0; i < s->n_params; i++)
		s->param[i].seen = false;
	s->ahead.n_seen = 0;
	ahead_restart(&s->ahead, 0, 0);
}

void ahead_free(struct moment_session *s)
{
	free(s->ahead.order);
	free(s->ahead.seen);
}
