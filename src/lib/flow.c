/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flow.c - the pipeline: the blocks of a list of parameters pass through the RAM tier one after the
 * other.
 *
 * The unit is block i of all arrays of one parameter. Units are asked for in batches, one message
 * each: one whole block, or many small parameters. A few batches are in flight (a ring, oldest
 * first), as many as the budget allows; before a batch is computed, the next one is asked for, in
 * the same message that gives back the one computed before. So the drive, the daemon and the
 * kernels work at the same time, and what is leased and asked for together never exceeds the quota:
 * nothing can wait for itself.
 *
 * Without hints (for measuring) there is one batch of one unit at a time.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "lib/error.h"
#include "lib/flow.h"

#define FLOW_BUDGET  ((uint64_t)32 << 20)
#define BATCH_BYTES  ((uint64_t)4 << 20)
#define BATCH_UNITS  64
#define BATCH_LEASES (BATCH_UNITS * MOMENT_ROLES)
#define RING	     16

struct unit {
	size_t item;
	uint32_t block;
	uint32_t mem; /* its first lease in the batch */
};

struct batch {
	struct unit unit[BATCH_UNITS];
	uint32_t n_units;
	uint64_t bytes, small; /* small: in blocks that do not need a whole chunk */
	struct moment_range range[2 * BATCH_LEASES]; /* releases, then leases */
	struct path_mem mem[BATCH_LEASES];
	struct path_ask ask;
};

struct flow {
	struct moment_session *s;
	const struct moment_item *items;
	size_t n;
	size_t item; /* the next unit to be asked for */
	uint32_t block;
	struct batch *ring; /* RING of them, and one for releases alone */
	unsigned int head, count;
	uint64_t budget;
	uint64_t out, out_small; /* bytes asked for or leased, without `release` */
	struct moment_range release[BATCH_LEASES]; /* computed, to go with the next message */
	uint32_t n_release;
};

uint64_t flow_budget(const struct moment_session *s)
{
	uint64_t budget = s->path->quota < FLOW_BUDGET ? s->path->quota : FLOW_BUDGET;
	uint64_t left = s->path->ram > s->pinned ? (s->path->ram - s->pinned) / 2 : 0;

	return s->pinned && left < budget ? left : budget;
}

/* ---- asking ----------------------------------------------------------------------------- */

static struct param *flow_param(struct flow *f, size_t item)
{
	return &f->s->param[f->items[item].param];
}

/* Moves on to the next unit; parameters without elements have none. */
static void flow_settle(struct flow *f)
{
	while (f->item < f->n && f->block >= flow_param(f, f->item)->blocks) {
		f->item++;
		f->block = 0;
	}
}

static uint64_t unit_small(struct flow *f, const struct param *p, uint32_t block)
{
	uint64_t bytes = unit_bytes(f->s, p, block);

	return bytes < (uint64_t)p->roles * f->s->path->block ? bytes : 0;
}

/* Adds units to b as long as it stays below these bytes. One always fits: flow_room() saw to that.
 */
static void batch_fill(struct flow *f, struct batch *b, uint64_t most, uint64_t most_small)
{
	uint32_t i, leases = 0;

	b->n_units = 0;
	b->bytes = b->small = 0;
	for (flow_settle(f); f->item < f->n && b->n_units < BATCH_UNITS; flow_settle(f)) {
		const struct param *p = flow_param(f, f->item);
		uint64_t bytes = unit_bytes(f->s, p, f->block);
		uint64_t small = unit_small(f, p, f->block);

		if (b->n_units &&
		    (!f->s->hints || b->bytes + bytes > most || b->small + small > most_small))
			break;
		b->unit[b->n_units++] =
			(struct unit){.item = f->item, .block = f->block, .mem = leases};
		for (i = 0; i < p->roles; i++)
			b->range[f->n_release + leases++] =
				(struct moment_range){.file = p->file[p->role[i]],
						      .first = f->block,
						      .count = 1,
						      .flags = MOMENT_RANGE_WRITE};
		b->bytes += bytes;
		b->small += small;
		ahead_used(f->s, p, f->block);
		f->block++;
	}
	b->ask.n_lease = leases;
}

/*
 * Whether another batch may be asked for now, and how large: within the budget, except that one
 * unit may always be out (items_check() compared it with the quota).
 */
static bool flow_room(struct flow *f, uint64_t *most, uint64_t *most_small)
{
	uint64_t budget = f->budget, small = f->s->path->quota_small, unit, us;
	const struct param *p;

	flow_settle(f);
	if (f->item == f->n || f->count == RING || (f->out && !f->s->hints))
		return false;
	p = flow_param(f, f->item);
	unit = unit_bytes(f->s, p, f->block);
	us = unit_small(f, p, f->block);
	*most = budget / 4 < BATCH_BYTES ? budget / 4 : BATCH_BYTES;
	if (*most < unit)
		*most = unit;
	*most_small = small > f->out_small ? small - f->out_small : 0;
	return f->out == 0 || (f->out + *most <= budget && us <= *most_small);
}

/* Sends the releases that have gathered, with the leases of b (none if NULL). */
static int flow_send(struct flow *f, struct batch *b)
{
	int res;

	memcpy(b->range, f->release, f->n_release * sizeof(b->range[0]));
	b->ask.r = b->range;
	b->ask.mem = b->mem;
	b->ask.n_release = f->n_release;
	res = f->s->path->ops->ask(f->s->path, &b->ask);
	if (res == 0)
		f->n_release = 0;
	return res;
}

/* What was computed and had no lease to travel with is given back by itself. */
static int flow_return(struct flow *f)
{
	struct batch *b = &f->ring[RING];
	int res;

	if (!f->n_release)
		return 0;
	b->ask.n_lease = 0;
	res = flow_send(f, b);
	return res < 0 ? res : f->s->path->ops->wait(f->s->path, &b->ask);
}

/* Asks for as much as may be out. The oldest batch, which is computed next, was asked for long
 * before. */
static int flow_ask(struct flow *f)
{
	uint64_t most, most_small;

	while (flow_room(f, &most, &most_small)) {
		struct batch *b = &f->ring[(f->head + f->count) % RING];
		int res;

		batch_fill(f, b, most, most_small);
		res = flow_send(f, b);
		if (res < 0)
			return res;
		f->out += b->bytes;
		f->out_small += b->small;
		f->count++;
		ahead_hint(f->s);
	}
	return flow_return(f);
}

/* ---- computing -------------------------------------------------------------------------- */

static void *advance(const void *base, uint64_t elements, uint32_t dtype)
{
	return base ? (char *)base + elements * dtype_size(dtype) : NULL;
}

static int unit_compute(struct flow *f, const struct batch *b, const struct unit *u)
{
	const struct moment_item *it = &f->items[u->item];
	struct param *p = flow_param(f, u->item);
	struct moment_block bl = {
		.first = u->block * p->per_block, .step = p->step, .param = it->param};
	uint32_t i;
	int res;

	bl.numel = unit_len(f->s, p, u->block) / p->itemsize;
	for (i = 0; i < p->roles; i++) {
		if (b->mem[u->mem + i].len < unit_len(f->s, p, u->block))
			return err_set(-EPROTO, "parameter %s: block %u was leased with %u bytes",
				       p->name, u->block, b->mem[u->mem + i].len);
	}
	for (i = 0; i < p->roles; i++)
		bl.state[p->role[i]] = b->mem[u->mem + i].ptr;
	bl.p = advance(it->p, bl.first, it->p_dtype);
	bl.g = advance(it->g, bl.first, it->g_dtype);
	if (it->fn) {
		res = it->fn(it->arg, &bl);
		if (res == 0)
			return 0;
		return err_set(res < 0 ? res : -ECANCELED, "the update of %s ended the step (%d)",
			       p->name, res);
	}
	res = moment_update(it->optim, bl.step,
			    &(struct moment_slice){.p = bl.p,
						   .g = bl.g,
						   .m = bl.state[MOMENT_ROLE_EXP_AVG],
						   .v = bl.state[MOMENT_ROLE_EXP_AVG_SQ],
						   .master = bl.state[MOMENT_ROLE_MASTER],
						   .vmax = bl.state[MOMENT_ROLE_MAX_EXP_AVG_SQ],
						   .numel = bl.numel,
						   .p_dtype = it->p_dtype,
						   .g_dtype = it->g_dtype},
			    f->s->threads, it->extras);
	return res < 0 ? err_set(res, "parameter %s: the kernel refused", p->name) : 0;
}

/* The parameter's update begins: its count goes up, once. */
static int item_begin(struct flow *f, size_t item)
{
	struct param *p = flow_param(f, item);

	p->step = f->items[item].step ? f->items[item].step : p->step + 1;
	p->step_moved = true;
	f->s->touched = true;
	return ahead_saw(f->s, f->items[item].param);
}

/* Adds the leases of b's units to what is to be released. */
static void batch_release(struct flow *f, const struct batch *b, uint32_t first, uint32_t flags)
{
	uint32_t i;

	for (i = first; i < b->ask.n_lease; i++) {
		struct moment_range r = b->range[b->ask.n_release + i];

		r.flags = flags;
		f->release[f->n_release++] = r;
	}
}

static int batch_compute(struct flow *f, const struct batch *b)
{
	uint32_t i;
	int res = 0;

	for (i = 0; res == 0 && i < b->n_units; i++) {
		const struct unit *u = &b->unit[i];
		const struct param *p = flow_param(f, u->item);
		uint32_t cool = p->tier == MOMENT_TIER_NVME ? MOMENT_RANGE_COOL : 0, k;

		if (u->block == 0)
			res = item_begin(f, u->item);
		if (res == 0)
			res = unit_compute(f, b, u);
		for (k = 0; k < p->roles; k++) {
			struct moment_range r = b->range[b->ask.n_release + u->mem + k];

			r.flags = cool;
			f->release[f->n_release++] = r;
		}
	}
	if (res < 0 && i < b->n_units)
		batch_release(f, b, b->unit[i].mem, MOMENT_RANGE_CLEAN);
	return res;
}

/* ---- running ---------------------------------------------------------------------------- */

/* Everything that was asked for is waited for and given back unchanged. */
static void flow_drain(struct flow *f)
{
	char text[1024];

	strncpy(text, err_text(), sizeof(text) - 1);
	text[sizeof(text) - 1] = 0;
	flow_return(f);
	for (; f->count; f->count--, f->head = (f->head + 1) % RING) {
		struct batch *b = &f->ring[f->head];

		if (f->s->path->ops->wait(f->s->path, &b->ask) < 0)
			continue;
		batch_release(f, b, 0, MOMENT_RANGE_CLEAN);
		flow_return(f);
	}
	f->out = f->out_small = 0;
	err_write("%s", text);
}

/*
 * The RAM tier had no room for b beside those that are out: pinned blocks, or dirty ones that wait
 * for the drive, may crowd it. So all are given back, and from b on they are asked for again, fewer
 * at a time. Alone, a batch has to fit: then it is an error.
 */
static void flow_rewind(struct flow *f, const struct batch *b)
{
	flow_drain(f);
	f->item = b->unit[0].item;
	f->block = b->unit[0].block;
	f->budget /= 2;
}

static int flow_loop(struct flow *f)
{
	size_t i;
	int res;

	while ((res = flow_ask(f)) == 0 && f->count) {
		struct batch *b = &f->ring[f->head];

		res = f->s->path->ops->wait(f->s->path, &b->ask);
		f->head = (f->head + 1) % RING;
		f->count--;
		f->out_small -= b->small;
		f->out -= b->bytes; /* from now on its ranges are in `release`, or were never
				       granted */
		if (res == -E2BIG && f->out) {
			flow_rewind(f, b);
			continue;
		}
		if (res == 0)
			res = batch_compute(f, b);
		if (res < 0)
			return res;
	}
	for (i = 0; res == 0 && i < f->n; i++)
		if (flow_param(f, i)->blocks == 0)
			res = item_begin(f, i);
	return res;
}

int flow_run(struct moment_session *s, const struct moment_item *items, size_t n)
{
	struct flow *f = calloc(1, sizeof(*f));
	unsigned int i;
	int res;

	if (f)
		f->ring = calloc(RING + 1, sizeof(*f->ring));
	if (!f || !f->ring) {
		free(f);
		return err_set(-ENOMEM, "out of memory");
	}
	f->s = s;
	f->items = items;
	f->n = n;
	f->budget = flow_budget(s);
	res = flow_loop(f);
	if (res < 0 && res != -ECONNRESET)
		flow_drain(f);
	for (i = 0; i <= RING; i++)
		free(f->ring[i].ask.scratch);
	free(f->ring);
	free(f);
	return res;
}
