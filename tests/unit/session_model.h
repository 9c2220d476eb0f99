/* SPDX-License-Identifier: Apache-2.0 */
/*
 * session_model.h - a client of the session that leases, writes and releases random blocks, and a
 * model in memory of what they must hold. Over any link: an engine in this process, or a daemon.
 *
 * Several leases are under way at once, commits run beside the next step. Which commit succeeded
 * last is what the engine says (committed_step); the model keeps the state at every boundary from
 * the last known commit on and so knows what must come back after a rollback or a remount. Steps
 * are numbered from 1 and never twice, also after a rollback.
 */
#ifndef TESTS_SESSION_MODEL_H
#define TESTS_SESSION_MODEL_H

#include <stdarg.h>

#include "session_link.h"

#define MODEL_PARAMS 14u
#define MODEL_FILES  (2 * MODEL_PARAMS) /* two arrays a parameter; handles in this order */
#define MODEL_FLIGHT 4u			/* ADVANCEs under way */
#define MODEL_KEPT   64u		/* boundaries */
#define MODEL_OUT    4096u		/* leases */

struct model_block {
	uint32_t file, n;
	bool write, out; /* out: the reply has come */
	bool refused;
	char *mem;
};

struct model_state {
	uint64_t label; /* the boundary's step; 0: before the first */
	uint64_t steps[MODEL_PARAMS];
	unsigned char *bytes;
};

struct model {
	struct wire *w;
	uint64_t seed, rng;
	uint32_t block;
	uint64_t quota, quota_small;
	uint32_t numel[MODEL_PARAMS];
	uint64_t at[MODEL_FILES]; /* in a state's bytes */
	uint64_t total;
	struct model_state live;
	struct model_state kept[MODEL_KEPT]; /* oldest first */
	unsigned int nkept;
	uint64_t durable; /* the oldest boundary that a commit may have left */
	uint64_t next_step;
	bool stepping;
	struct model_block out[MODEL_OUT];
	unsigned int nout;
	uint64_t bytes_out, small_out;
	struct {
		uint64_t id;	       /* 0: free */
		unsigned int first, n; /* in out[]; stable: see model_settle */
	} flight[MODEL_FLIGHT];
	unsigned int nflight;
	uint64_t commit_id,
		commit_label; /* a COMMIT under way that will be durable, and what it covers */
	uint64_t no_room;     /* ADVANCEs refused beside what is pinned */
	uint64_t blocks_done; /* leased, written and released */
	char last[256];
};

__attribute__((format(printf, 2, 3), noreturn)) static void model_die(struct model *m,
								      const char *fmt, ...)
{
	va_list ap;

	fprintf(stderr, "seed %llu, step %llu, last: %s: ", (unsigned long long)m->seed,
		(unsigned long long)m->next_step, m->last);
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fprintf(stderr, " (last reply: %s)\n", wire_text(m->w));
	_exit(1);
}

static uint64_t model_below(struct model *m, uint64_t n)
{
	uint64_t z = (m->rng += 0x9e3779b97f4a7c15ull);

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ z >> 27) * 0x94d049bb133111ebull;
	return (z ^ z >> 31) % n;
}

/* ---- sizes ---- */

static uint64_t model_size(const struct model *m, uint32_t file)
{
	return (uint64_t)m->numel[file / 2] * (file % 2 ? 2 : 4); /* fp32, and bf16 */
}

static uint32_t model_blocks(const struct model *m, uint32_t file)
{
	return (uint32_t)((model_size(m, file) + m->block - 1) / m->block);
}

static uint32_t model_len(const struct model *m, uint32_t file, uint32_t n)
{
	uint64_t left = model_size(m, file) - (uint64_t)n * m->block;

	return left < m->block ? (uint32_t)left : m->block;
}

static uint32_t model_piece(const struct model *m, uint32_t file, uint32_t n)
{
	uint32_t len = model_len(m, file, n), piece = 4096;

	while (piece < len)
		piece *= 2;
	return piece;
}

/* Half of the seeds have a parameter with tier=ram. */
static bool model_pins(const struct model *m)
{
	return m->seed % 2;
}

static void model_init(struct model *m, struct wire *w, uint64_t seed, uint32_t block)
{
	static const uint32_t odd[] = {0, 1, 127, 1023, 1025, 30522};

	memset(m, 0, sizeof(*m));
	m->w = w;
	m->seed = m->rng = seed;
	m->block = block;
	m->next_step = 1;
	for (uint32_t p = 0; p < MODEL_PARAMS; p++) {
		m->numel[p] = p < 6    ? odd[p]
			      : p == 6 ? 4 * (block / 4)
				       : (uint32_t)model_below(m, 12 * (block / 4));
		for (uint32_t k = 0; k < 2; k++) {
			m->at[2 * p + k] = m->total;
			m->total += model_size(m, 2 * p + k);
		}
	}
	m->live.bytes = calloc(1, m->total);
	m->kept[0].bytes = calloc(1, m->total);
	m->nkept = 1;
}

static void model_fini(struct model *m)
{
	free(m->live.bytes);
	for (unsigned int i = 0; i < m->nkept; i++)
		free(m->kept[i].bytes);
}

/* ---- boundaries ---- */

static void model_forget_before(struct model *m, uint64_t label)
{
	unsigned int drop = 0;

	while (drop < m->nkept && m->kept[drop].label < label)
		free(m->kept[drop++].bytes);
	memmove(m->kept, m->kept + drop, (m->nkept - drop) * sizeof(m->kept[0]));
	m->nkept -= drop;
}

/* What the engine says is committed. */
static void model_committed(struct model *m, uint64_t label)
{
	uint64_t l = label == MOMENT_STEP_NONE ? 0 : label;
	bool known = false;

	for (unsigned int i = 0; i < m->nkept; i++)
		known = known || m->kept[i].label == l;
	if (!known || l < m->durable)
		model_die(m, "step %llu is committed, at least %llu was", (unsigned long long)l,
			  (unsigned long long)m->durable);
	m->durable = l;
	model_forget_before(m, l);
}

static void model_boundary(struct model *m, uint64_t label)
{
	struct model_state *k;

	if (m->nkept == MODEL_KEPT)
		model_die(m, "no commit in %u steps", MODEL_KEPT);
	k = &m->kept[m->nkept++];
	m->live.label = label;
	*k = m->live;
	k->bytes = malloc(m->total ? m->total : 1);
	memcpy(k->bytes, m->live.bytes, m->total);
}

/* Back to what the engine says was the last commit. */
static void model_back(struct model *m, uint64_t label)
{
	unsigned char *bytes = m->live.bytes;

	model_committed(m, label);
	memcpy(bytes, m->kept[0].bytes, m->total);
	m->live = m->kept[0];
	m->live.bytes = bytes;
	for (unsigned int i = 1; i < m->nkept; i++)
		free(m->kept[i].bytes);
	m->nkept = 1;
	m->stepping = false;
	m->nout = m->nflight = 0;
	m->bytes_out = m->small_out = 0;
	memset(m->flight, 0, sizeof(m->flight));
	m->commit_id = 0;
}

/* ---- replies ---- */

static void model_check_block(struct model *m, const struct model_block *b, const char *when)
{
	uint32_t len = model_len(m, b->file, b->n);
	const unsigned char *want = m->live.bytes + m->at[b->file] + (uint64_t)b->n * m->block;

	for (uint32_t i = 0; i < len; i++) {
		if ((unsigned char)b->mem[i] != want[i])
			model_die(m, "%s: file %u, block %u, byte %u is %02x, not %02x", when,
				  b->file, b->n, i, (unsigned char)b->mem[i], want[i]);
	}
}

static void model_reply(struct wire *w, const struct moment_reply *r)
{
	struct model *m = w->arg;
	const struct moment_advance_reply *a = (const void *)r;

	if (r->h.id == m->commit_id) {
		if (r->status)
			model_die(m, "commit: %d", r->status);
		m->commit_id = 0;
		model_committed(
			m, ((const struct moment_info_reply *)(const void *)r)->committed_step);
		if (m->durable < m->commit_label)
			model_die(m, "a commit of step %llu left step %llu",
				  (unsigned long long)m->commit_label,
				  (unsigned long long)m->durable);
		return;
	}
	for (unsigned int i = 0; i < MODEL_FLIGHT; i++) {
		if (m->flight[i].id != r->h.id)
			continue;
		if (r->status == -E2BIG && model_pins(m)) {
			/* Within the quota, but what is pinned takes room. None of them is leased.
			 */
			for (unsigned int k = 0; k < m->flight[i].n; k++)
				m->out[m->flight[i].first + k].refused = true;
			m->no_room++;
			m->flight[i].id = 0;
			m->nflight--;
			return;
		}
		if (r->status || a->n != m->flight[i].n)
			model_die(m, "lease: %d", r->status);
		for (unsigned int k = 0; k < a->n; k++) {
			struct model_block *b = &m->out[m->flight[i].first + k];

			if (a->l[k].len != model_len(m, b->file, b->n) || a->l[k].arena % 4096)
				model_die(m, "lease of %u bytes at %llu", a->l[k].len,
					  (unsigned long long)a->l[k].arena);
			b->mem = w->l->base + a->l[k].arena;
			b->out = true;
			model_check_block(m, b, "lease");
		}
		m->flight[i].id = 0;
		m->nflight--;
		return;
	}
	model_die(m, "a reply to nothing: %llu", (unsigned long long)r->h.id);
}

/* Until no ADVANCE is under way. */
static void model_settle(struct model *m)
{
	while (m->nflight) {
		struct moment_reply *r = wire_recv(m->w, LINK_WAIT_MS);

		if (!r)
			model_die(m, "no reply to a lease");
		model_reply(m->w, r);
	}
}

static void model_wait_commit(struct model *m)
{
	while (m->commit_id) {
		struct moment_reply *r = wire_recv(m->w, LINK_WAIT_MS);

		if (!r)
			model_die(m, "no reply to a commit");
		model_reply(m->w, r);
	}
}

/* ---- attaching ---- */

/* HELLO and REGISTER; `flags` of HELLO. What the engine has must be the model's last commit. */
static void model_attach(struct model *m, uint16_t flags)
{
	const struct moment_hello_reply *h = (const void *)m->w->in;
	const struct moment_register_reply *r = (const void *)m->w->in;
	uint64_t committed;
	int x;

	snprintf(m->last, sizeof(m->last), "attach");
	m->w->other = model_reply;
	m->w->arg = m;
	x = wire_hello(m->w, flags);
	if (x)
		model_die(m, "hello: %d", x);
	m->quota = h->quota;
	m->quota_small = h->quota_small;
	committed = h->committed_step;
	wire_reg_begin(m->w, 0);
	for (uint32_t p = 0; p < MODEL_PARAMS; p++) {
		char name[32];
		struct wire_param wp = {.name = name,
					.shape = {m->numel[p]},
					.ndim = 1,
					.dtype = {MOMENT_F32, MOMENT_BF16, 0xff, 0xff},
					.tier = p == 6 && model_pins(m)};

		snprintf(name, sizeof(name), "h.%u.weight", p);
		wire_reg_add(m->w, &wp);
	}
	x = wire_call(m->w);
	if (x)
		model_die(m, "register: %d", x);
	model_back(m, committed);
	for (uint32_t p = 0; p < MODEL_PARAMS; p++) {
		if (r->e[p].step != m->live.steps[p] || r->e[p].file[0] != 2 * p ||
		    r->e[p].file[1] != 2 * p + 1)
			model_die(m, "parameter %u is at step %llu, not %llu", p,
				  (unsigned long long)r->e[p].step,
				  (unsigned long long)m->live.steps[p]);
	}
}

/* ---- doing ---- */

static bool model_is_out(const struct model *m, uint32_t file, uint32_t n)
{
	for (unsigned int i = 0; i < m->nout; i++) {
		if (m->out[i].file == file && m->out[i].n == n)
			return true;
	}
	return false;
}

/* Writes some of a leased block, in it and in the model. */
static void model_scribble(struct model *m, struct model_block *b)
{
	uint32_t len = model_len(m, b->file, b->n);
	uint32_t from = model_below(m, 2) ? 0 : (uint32_t)model_below(m, len);
	uint32_t n = model_below(m, 2) ? len - from : 1 + (uint32_t)model_below(m, len - from);
	unsigned char *to = m->live.bytes + m->at[b->file] + (uint64_t)b->n * m->block + from;
	uint64_t fill = model_below(m, UINT64_MAX);

	for (uint32_t i = 0; i < n; i++)
		to[i] = (unsigned char)(fill >> i % 8 * 8 ^ i);
	memcpy(b->mem + from, to, n);
}

/* Lease i is no more; the last one takes its place. */
static void model_drop(struct model *m, unsigned int i)
{
	uint32_t piece = model_piece(m, m->out[i].file, m->out[i].n);

	m->bytes_out -= piece;
	if (piece < m->block)
		m->small_out -= piece;
	m->out[i] = m->out[--m->nout];
}

/* Puts the release of lease i in the message. */
static void model_release(struct model *m, unsigned int i)
{
	struct model_block *b = &m->out[i];
	uint32_t flags = model_below(m, 4) ? 0 : MOMENT_RANGE_COOL;

	if (b->write) {
		if (model_below(m, 5))
			model_scribble(m, b);
		else
			flags |= MOMENT_RANGE_CLEAN;
		m->blocks_done++;
	} else {
		model_check_block(m, b, "before its release");
	}
	wire_adv_add(m->w, false, (struct moment_range){b->file, b->n, 1, flags});
	model_drop(m, i);
}

/*
 * One ADVANCE: some releases, some leases. Entries of out[] that an ADVANCE under way will fill
 * must not move, so there is a release only when none is.
 */
static void model_advance(struct model *m, bool all)
{
	struct moment_prefetch *pf;
	unsigned int slot = 0, n = 0, released = 0;

	if (all || m->nflight == MODEL_FLIGHT || !model_below(m, 3))
		model_settle(m);
	wire_adv_begin(m->w);
	if (!m->nflight) {
		for (unsigned int i = m->nout; i-- > 0;) {
			if (m->out[i].refused)
				model_drop(m, i);
		}
		while (m->nout && (all || model_below(m, 3)) && released < 1000) {
			model_release(m, (unsigned int)model_below(m, m->nout));
			released++;
		}
	}
	for (unsigned int i = 0; !all && i < 1 + model_below(m, 6); i++) {
		uint32_t file = (uint32_t)model_below(m, MODEL_FILES), first, count = 1, k = 0;
		bool write = m->stepping && model_below(m, 4);

		if (!model_blocks(m, file))
			continue;
		first = (uint32_t)model_below(m, model_blocks(m, file));
		while (k < 1 + model_below(m, 3) && first + k < model_blocks(m, file)) {
			uint32_t piece = model_piece(m, file, first + k);

			if (model_is_out(m, file, first + k) || m->bytes_out + piece > m->quota ||
			    (piece < m->block && m->small_out + piece > m->quota_small) ||
			    m->nout == MODEL_OUT)
				break;
			m->bytes_out += piece;
			if (piece < m->block)
				m->small_out += piece;
			m->out[m->nout++] =
				(struct model_block){.file = file, .n = first + k, .write = write};
			k++;
		}
		count = k;
		if (!count)
			continue;
		wire_adv_add(
			m->w, true,
			(struct moment_range){file, first, count, write ? MOMENT_RANGE_WRITE : 0});
		n += count;
	}
	while (m->flight[slot].id)
		slot++;
	m->flight[slot].id = m->w->id;
	m->flight[slot].first = m->nout - n;
	m->flight[slot].n = n;
	m->nflight++;
	snprintf(m->last, sizeof(m->last), "advance: %u released, %u leased", released, n);
	if (wire_send(m->w))
		model_die(m, "send");
	if (model_below(m, 3))
		return;
	pf = wire_begin(m->w, MOMENT_MSG_PREFETCH, 0, sizeof(*pf));
	for (unsigned int i = 0; i < 1 + model_below(m, 5); i++) {
		uint32_t file = (uint32_t)model_below(m, MODEL_FILES);

		*(struct moment_range *)wire_more(m->w, sizeof(struct moment_range)) =
			(struct moment_range){file, (uint32_t)model_below(m, 4),
					      1 + (uint32_t)model_below(m, 6), 0};
		((struct moment_prefetch *)m->w->out)->n++;
	}
	if (wire_send(m->w))
		model_die(m, "send");
}

static void model_steps(struct model *m)
{
	struct moment_steps *s = wire_begin(m->w, MOMENT_MSG_STEPS, 0, sizeof(*s));
	uint32_t n = 0;

	for (uint32_t p = 0; p < MODEL_PARAMS; p++) {
		if (model_below(m, 3))
			continue;
		*(struct moment_param_step *)wire_more(m->w, sizeof(struct moment_param_step)) =
			(struct moment_param_step){.param = p, .step = ++m->live.steps[p]};
		n++;
	}
	((struct moment_steps *)m->w->out)->n = n;
	if (wire_call(m->w))
		model_die(m, "steps");
}

static void model_commit(struct model *m)
{
	bool wait = model_below(m, 3);

	if (m->commit_id)
		return;
	snprintf(m->last, sizeof(m->last), "commit%s", wait ? ", waiting" : "");
	wire_begin(m->w, MOMENT_MSG_COMMIT, MOMENT_COMMIT_WAIT, sizeof(struct moment_simple));
	m->commit_id = m->w->id;
	m->commit_label = m->stepping ? m->next_step : m->live.label;
	if (wire_send(m->w))
		model_die(m, "send");
	if (wait && !m->stepping)
		model_wait_commit(m);
}

static void model_pre_step(struct model *m)
{
	snprintf(m->last, sizeof(m->last), "pre_step %llu", (unsigned long long)m->next_step);
	if (wire_step(m->w, MOMENT_MSG_PRE_STEP, m->next_step))
		model_die(m, "pre_step");
	m->stepping = true;
}

static void model_post_step(struct model *m)
{
	model_advance(m, true);
	model_settle(m);
	if (model_below(m, 4))
		model_steps(m);
	snprintf(m->last, sizeof(m->last), "post_step %llu", (unsigned long long)m->next_step);
	model_boundary(m, m->next_step);
	if (wire_step(m->w, MOMENT_MSG_POST_STEP, m->next_step))
		model_die(m, "post_step");
	m->next_step++;
	m->stepping = false;
	if (m->nkept > MODEL_KEPT / 2) {
		model_commit(m);
		model_wait_commit(m);
	}
}

static void model_rollback(struct model *m)
{
	const struct moment_info_reply *r = (const void *)m->w->in;

	model_advance(m, true);
	model_settle(m);
	if (!m->stepping)
		model_wait_commit(m);
	snprintf(m->last, sizeof(m->last), "rollback");
	if (m->stepping && m->commit_id)
		m->commit_label = 0; /* of a boundary that does not come: any will do */
	if (wire_simple(m->w, MOMENT_MSG_ROLLBACK, 0))
		model_die(m, "rollback");
	{
		uint64_t commit = m->commit_id, committed = r->committed_step;

		if (m->stepping)
			m->next_step++; /* its number is spent */
		model_back(m, committed);
		m->commit_id = commit;
		model_wait_commit(m);
	}
}

/* One random action of a client that has attached. */
static void model_act(struct model *m)
{
	uint64_t k = model_below(m, 100);

	if (m->stepping) {
		if (k < 88)
			model_advance(m, false);
		else if (k < 90)
			model_commit(m);
		else if (k < 91)
			model_rollback(m);
		else
			model_post_step(m);
	} else if (k < 50) {
		model_pre_step(m);
	} else if (k < 75) {
		model_advance(m, false);
	} else if (k < 98) {
		model_commit(m);
	} else {
		model_rollback(m);
	}
}

#endif
