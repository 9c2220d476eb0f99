/* SPDX-License-Identifier: Apache-2.0 */
/*
 * register.c - parameters: what the backing holds, what is asked for, and whether the two agree.
 *
 * What the backing held is read once, when the session opens. The first registering judges it:
 * stepped state is never taken over or dropped unasked. Once registered, a parameter keeps its
 * handle for the session's life.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/error.h"
#include "lib/fsize.h"
#include "lib/session.h"

#define NAME_BYTES_MAX 65000u /* what fits a message with its shape */
#define NAMES_TOLD     16     /* of each kind, in a text */

static const char *const dtype_names[] = {"float32", "bfloat16", "float16", "float64"};
static const char *const role_names[] = {"exp_avg", "exp_avg_sq", "master", "max_exp_avg_sq"};

/* ---- what the backing held -------------------------------------------------------------- */

static int listed_add(void *arg, const struct path_param *p)
{
	struct moment_session *s = arg;
	struct listed *more, *l;

	if ((s->n_listed & (s->n_listed - 1)) == 0) {
		more = realloc(s->listed, (s->n_listed ? 2 * s->n_listed : 1) * sizeof(*more));
		if (!more)
			return err_set(-ENOMEM, "out of memory");
		s->listed = more;
	}
	l = &s->listed[s->n_listed];
	l->p = *p;
	l->p.hyper = NULL;
	l->name = strdup(p->name);
	l->shape = calloc(p->ndim + 1, sizeof(*l->shape));
	if (!l->name || !l->shape) {
		free(l->name);
		free(l->shape);
		return err_set(-ENOMEM, "out of memory");
	}
	if (p->ndim)
		memcpy(l->shape, p->shape, p->ndim * sizeof(*l->shape));
	s->n_listed++;
	return 0;
}

static int listed_order(const void *a, const void *b)
{
	return strcmp(((const struct listed *)a)->name, ((const struct listed *)b)->name);
}

static struct listed *listed_find(struct moment_session *s, const char *name)
{
	struct listed key = {.name = (char *)name};

	return s->n_listed ? bsearch(&key, s->listed, s->n_listed, sizeof(key), listed_order)
			   : NULL;
}

int listed_load(struct moment_session *s)
{
	struct moment_info info = {.step = MOMENT_STEP_NONE, .committed_step = MOMENT_STEP_NONE};
	size_t i;
	int res = s->path->ops->list(s->path, listed_add, s);

	if (res < 0)
		return res;
	for (i = 0; i < s->n_listed; i++) { /* only now: the array has stopped moving */
		s->listed[i].p.name = s->listed[i].name;
		s->listed[i].p.shape = s->listed[i].shape;
	}
	if (s->n_listed)
		qsort(s->listed, s->n_listed, sizeof(*s->listed), listed_order);
	res = s->path->ops->info(s->path, &info);
	s->last_step = info.step != MOMENT_STEP_NONE ? info.step : info.committed_step;
	return res;
}

void listed_free(struct moment_session *s)
{
	size_t i;

	for (i = 0; i < s->n_listed; i++) {
		free(s->listed[i].name);
		free(s->listed[i].shape);
	}
	free(s->listed);
}

static uint32_t arrays_of(const uint8_t *dtype)
{
	uint32_t role, arrays = 0;

	for (role = 0; role < MOMENT_ROLES; role++)
		if (dtype[role] != 0xff)
			arrays |= MOMENT_ARRAY(role);
	return arrays;
}

int moment_list(struct moment_session *s, int (*fn)(void *arg, const struct moment_param *param),
		void *arg)
{
	int res = session_enter(s);
	size_t i;
	uint32_t role;

	if (res < 0)
		return res;
	for (i = 0; res == 0 && i < s->n_listed; i++) {
		const struct path_param *l = &s->listed[i].p;
		struct moment_param p = {
			.name = l->name,
			.ndim = l->ndim,
			.shape = l->shape,
			.arrays = arrays_of(l->dtype),
			.tier = l->tier,
			.found = 1,
			.numel = l->numel,
			.step = l->step,
			.handle = UINT32_MAX,
		};

		for (role = 0; role < MOMENT_ROLES; role++)
			p.dtype[role] = l->dtype[role] == 0xff ? 0 : l->dtype[role];
		res = fn(arg, &p);
	}
	return session_leave(s, res);
}

/* ---- comparing -------------------------------------------------------------------------- */

typedef void difference_fn(void *arg, enum moment_difference kind, const char *name,
			   const char *detail);

static char *shape_text(char *buf, size_t len, uint32_t ndim, const uint64_t *shape)
{
	size_t n = 0;
	uint32_t i;

	snprintf(buf, len, "scalar");
	for (i = 0; i < ndim && n + 1 < len; i++)
		n += (size_t)snprintf(buf + n, len - n, "%s%llu", i ? "x" : "",
				      (unsigned long long)shape[i]);
	return buf;
}

static char *types_text(char *buf, size_t len, const uint8_t *dtype)
{
	size_t n = 0;
	uint32_t i;

	buf[0] = 0;
	for (i = 0; i < MOMENT_ROLES && n + 1 < len; i++)
		if (dtype[i] != 0xff)
			n += (size_t)snprintf(buf + n, len - n, "%s%s %s", n ? ", " : "",
					      role_names[i],
					      dtype[i] < 4 ? dtype_names[dtype[i]] : "unknown");
	return buf;
}

static int param_order(const void *a, const void *b)
{
	return strcmp((*(struct path_param *const *)a)->name,
		      (*(struct path_param *const *)b)->name);
}

static int compare(struct moment_session *s, const struct path_param *want, size_t n,
		   difference_fn *fn, void *arg)
{
	const struct path_param **sorted = calloc(n + 1, sizeof(*sorted));
	char a[300], b[300], detail[640];
	int count = 0;
	size_t i;

	if (!sorted)
		return err_set(-ENOMEM, "out of memory");
	for (i = 0; i < n; i++) {
		const struct path_param *w = sorted[i] = &want[i];
		const struct listed *l = listed_find(s, w->name);
		const struct path_param *h = l ? &l->p : NULL;

		if (!h) {
			fn(arg, MOMENT_MISSING, w->name, "not in the backing");
		} else if (h->ndim != w->ndim ||
			   (w->ndim && memcmp(h->shape, w->shape, w->ndim * sizeof(*w->shape)))) {
			snprintf(detail, sizeof(detail), "have %s, want %s",
				 shape_text(a, sizeof(a), h->ndim, h->shape),
				 shape_text(b, sizeof(b), w->ndim, w->shape));
			fn(arg, MOMENT_RESHAPED, w->name, detail);
		} else if (memcmp(h->dtype, w->dtype, sizeof(w->dtype))) {
			snprintf(detail, sizeof(detail), "have %s, want %s",
				 types_text(a, sizeof(a), h->dtype),
				 types_text(b, sizeof(b), w->dtype));
			fn(arg, MOMENT_RETYPED, w->name, detail);
		} else {
			continue;
		}
		count++;
	}
	qsort(sorted, n, sizeof(*sorted), param_order);
	for (i = 0; i < s->n_listed; i++) {
		const struct path_param key = {.name = s->listed[i].name}, *k = &key;

		if (index_get(&s->names, key.name) != INDEX_NONE ||
		    bsearch(&k, sorted, n, sizeof(*sorted), param_order))
			continue;
		fn(arg, MOMENT_EXTRA, key.name, "in the backing, not asked for");
		count++;
	}
	free(sorted);
	return count;
}

/* The differences as a text, the first few of each kind by name. */
struct report {
	size_t count[5];
	char *text[5];
};

static void report_add(void *arg, enum moment_difference kind, const char *name, const char *detail)
{
	struct report *r = arg;
	bool detailed = kind == MOMENT_RESHAPED || kind == MOMENT_RETYPED;
	char *more;

	if (r->count[kind]++ >= NAMES_TOLD)
		return;
	if (asprintf(&more, "%s%s%.200s%s%s%s", r->text[kind] ? r->text[kind] : "",
		     r->text[kind] ? ", " : "", name, detailed ? " (" : "", detailed ? detail : "",
		     detailed ? ")" : "") < 0)
		return;
	free(r->text[kind]);
	r->text[kind] = more;
}

static void report_join(const struct report *r, char *buf, size_t len)
{
	static const char *const what[] = {"", "missing", "extra", "other shape", "other type"};
	size_t n = 0;
	int kind;

	buf[0] = 0;
	for (kind = 1; kind < 5; kind++) {
		if (!r->count[kind] || n + 1 >= len)
			continue;
		n += (size_t)snprintf(buf + n, len - n, "%s%s: %s", n ? "; " : "", what[kind],
				      r->text[kind] ? r->text[kind] : "");
		if (n + 1 < len && r->count[kind] > NAMES_TOLD)
			n += (size_t)snprintf(buf + n, len - n, " and %zu more",
					      r->count[kind] - NAMES_TOLD);
	}
}

static void report_free(struct report *r)
{
	int kind;

	for (kind = 0; kind < 5; kind++)
		free(r->text[kind]);
}

/* ---- judging and making ----------------------------------------------------------------- */

static bool is_power_of_types(const struct path_param *p, uint32_t *itemsize)
{
	uint32_t role;

	*itemsize = 0;
	for (role = 0; role < MOMENT_ROLES; role++) {
		if (p->dtype[role] == 0xff)
			continue;
		if (p->dtype[role] > MOMENT_F64)
			return false;
		if (*itemsize && *itemsize != dtype_size(p->dtype[role]))
			return false;
		*itemsize = dtype_size(p->dtype[role]);
	}
	return *itemsize != 0;
}

/* A caller's parameter, checked. */
static int wanted(const struct moment_param *in, struct path_param *out)
{
	uint32_t arrays = in->arrays ? in->arrays : ARRAYS_DEFAULT, role, i, itemsize;

	if (!in->name || !in->name[0])
		return err_set(-EINVAL, "a parameter without a name");
	if (strlen(in->name) > NAME_BYTES_MAX)
		return err_set(-ENAMETOOLONG,
			       "parameter %.80s...: its name has %zu bytes, at most %u", in->name,
			       strlen(in->name), NAME_BYTES_MAX);
	if (in->ndim > MOMENT_NDIM_MAX || (in->ndim && !in->shape))
		return err_set(-EINVAL, "parameter %s: %u dimensions", in->name, in->ndim);
	if (arrays >> MOMENT_ROLES || in->tier > MOMENT_TIER_NVME)
		return err_set(-EINVAL, "parameter %s: arrays %#x, tier %u", in->name, arrays,
			       in->tier);
	*out = (struct path_param){.name = in->name,
				   .numel = 1,
				   .ndim = in->ndim,
				   .shape = in->shape,
				   .tier = in->tier,
				   .hyper = in->hyper};
	for (role = 0; role < MOMENT_ROLES; role++)
		out->dtype[role] = arrays & MOMENT_ARRAY(role) ? in->dtype[role] : 0xff;
	for (i = 0; i < in->ndim; i++)
		if (__builtin_mul_overflow(out->numel, in->shape[i], &out->numel))
			return err_set(-EOVERFLOW, "parameter %s: more than 2^64 elements",
				       in->name);
	if (!is_power_of_types(out, &itemsize))
		return err_set(-EINVAL,
			       "parameter %s: its arrays must have known types of one size",
			       in->name);
	if (out->numel > ((uint64_t)4 << 40) / itemsize)
		return err_set(
			-EFBIG,
			"parameter %s: %llu elements of %u bytes; an array has at most 4 TiB",
			in->name, (unsigned long long)out->numel, itemsize);
	return 0;
}

static int wanted_all(struct moment_session *s, const struct moment_param *in, size_t n,
		      struct path_param *out)
{
	const struct path_param **sorted = calloc(n + 1, sizeof(*sorted));
	size_t i;
	int res = sorted ? 0 : err_set(-ENOMEM, "out of memory");

	for (i = 0; res == 0 && i < n; i++) {
		res = wanted(&in[i], &out[i]);
		sorted[i] = &out[i];
		if (res == 0 && index_get(&s->names, in[i].name) != INDEX_NONE)
			res = err_set(-EEXIST, "parameter %s is registered already", in[i].name);
	}
	if (res == 0) {
		qsort(sorted, n, sizeof(*sorted), param_order);
		for (i = 1; res == 0 && i < n; i++)
			if (strcmp(sorted[i - 1]->name, sorted[i]->name) == 0)
				res = err_set(-EEXIST, "parameter %s is given twice",
					      sorted[i]->name);
	}
	free(sorted);
	return res;
}

/* Whether what the backing held may be used for (or dropped for) these. First registering only. */
static int judge(struct moment_session *s, const struct path_param *want, size_t n)
{
	const char *where = s->path->backing;
	struct report r = {.count = {0}};
	uint64_t most = 0;
	char text[1600];
	size_t i, stepped = 0;
	bool same, must = s->flags & (MOMENT_OPEN_RESUME | MOMENT_OPEN_READONLY);
	int res;

	for (i = 0; i < s->n_listed; i++) {
		stepped += s->listed[i].p.step > 0;
		if (s->listed[i].p.step > most)
			most = s->listed[i].p.step;
	}
	if (s->flags & MOMENT_OPEN_FRESH)
		return 0;
	if (!must) {
		if (stepped)
			return err_set(
				-EEXIST,
				"%s holds the state of %zu parameters that have been stepped (up to %llu times): "
				"resume from it, or ask for a fresh start, which drops it",
				where, stepped, (unsigned long long)most);
		return 0;
	}
	if (s->n_listed == 0 && !(s->flags & MOMENT_OPEN_READONLY)) {
		session_say(s, MOMENT_WARNING, "%s holds no state to resume: starting at zero",
			    where);
		return 0;
	}
	res = compare(s, want, n, report_add, &r);
	if (res < 0)
		return res;
	report_join(&r, text, sizeof(text));
	same = !r.count[MOMENT_RESHAPED] && !r.count[MOMENT_RETYPED];
	if (!same)
		res = err_set(-EINVAL, "the state in %s is of another model. %s", where, text);
	else if (r.count[MOMENT_MISSING] && !(s->flags & MOMENT_OPEN_NEW_OK))
		res = err_set(
			-ENOENT,
			"the state in %s lacks parameters. %s. If they are new, allow new ones to start at zero "
			"(MOMENT_OPEN_NEW_OK; in Python resume=\"partial\")",
			where, text);
	else
		res = 0;
	if (res == 0 && r.count[MOMENT_EXTRA] && !(s->flags & MOMENT_OPEN_READONLY))
		session_say(s, MOMENT_NOTICE, "%s: not all of the state there is used. %s", where,
			    text);
	report_free(&r);
	return res;
}

/* A fresh start drops whatever optimizer state the backing holds: also that of parameters not asked
 * for. */
static int drop_extras(struct moment_session *s, const struct path_param *want, size_t n)
{
	struct path_param *extra = calloc(s->n_listed + 1, sizeof(*extra));
	uint32_t *handles = calloc(s->n_listed + 1, sizeof(*handles));
	struct index wanted = {.n = 0};
	size_t i, k = 0;
	int res = extra && handles ? 0 : -ENOMEM;

	for (i = 0; res == 0 && i < n; i++)
		res = index_put(&wanted, want[i].name, 0);
	for (i = 0; res == 0 && i < s->n_listed; i++) {
		if (index_get(&wanted, s->listed[i].name) == INDEX_NONE)
			extra[k++] = s->listed[i].p;
	}
	index_fini(&wanted);
	if (res < 0)
		err_write("out of memory");
	if (res == 0 && k) {
		res = s->path->ops->add(s->path, extra, k, 0);
		for (i = 0; i < k; i++)
			handles[i] = extra[i].handle;
		if (res == 0)
			res = s->path->ops->remove(s->path, handles, k);
		if (res < 0)
			err_write_before("dropping the old state in %s", s->path->backing);
		else
			session_say(s, MOMENT_NOTICE,
				    "%s: dropped the state of %zu parameters of an earlier run",
				    s->path->backing, k);
	}
	free(extra);
	free(handles);
	return res;
}

/* Of the RAM tier, as the engine counts what is pinned there. */
static uint64_t pin_bytes(const struct moment_session *s, const struct param *p)
{
	uint64_t len = p->numel * p->itemsize, block = s->path->block, rest = len % block;
	uint64_t piece = rest ? path_piece(rest) : 0;

	return p->roles * (len - rest + (piece > block / 4 ? block : piece));
}

static int keep(struct moment_session *s, const struct path_param *w, uint32_t *out)
{
	struct param *p;
	uint32_t role;
	int res;

	if (s->n_params == s->cap_params) {
		uint32_t cap = s->cap_params ? 2 * s->cap_params : 64;

		p = realloc(s->param, cap * sizeof(*p));
		if (!p)
			return err_set(-ENOMEM, "out of memory");
		s->param = p;
		s->cap_params = cap;
	}
	p = &s->param[s->n_params];
	*p = (struct param){.ndim = w->ndim,
			    .numel = w->numel,
			    .handle = w->handle,
			    .tier = w->tier,
			    .step = w->step,
			    .place = UINT32_MAX};
	p->name = strdup(w->name);
	p->shape = calloc(w->ndim + 1, sizeof(*p->shape));
	if (!p->name || !p->shape) {
		free(p->name);
		free(p->shape);
		return err_set(-ENOMEM, "out of memory");
	}
	if (w->ndim)
		memcpy(p->shape, w->shape, w->ndim * sizeof(*p->shape));
	memcpy(p->file, w->file, sizeof(p->file));
	memcpy(p->dtype, w->dtype, sizeof(p->dtype));
	is_power_of_types(w, &p->itemsize);
	for (role = 0; role < MOMENT_ROLES; role++)
		if (w->dtype[role] != 0xff)
			p->role[p->roles++] = role;
	p->per_block = s->path->block / p->itemsize;
	p->blocks = (uint32_t)((p->numel + p->per_block - 1) / p->per_block);
	res = index_put(&s->names, p->name, s->n_params);
	if (res < 0) {
		free(p->name);
		free(p->shape);
		return err_set(res, "out of memory");
	}
	if (p->tier == MOMENT_TIER_RAM)
		s->pinned += pin_bytes(s, p);
	*out = s->n_params++;
	return ahead_add(s, *out);
}

void params_free(struct moment_session *s)
{
	uint32_t i;

	for (i = 0; i < s->n_params; i++) {
		free(s->param[i].name);
		free(s->param[i].shape);
	}
	free(s->param);
	index_fini(&s->names);
}

/* What was dropped for a fresh start takes its label along: state at zero is that of step 0. */
static int label_begin(struct moment_session *s)
{
	int res = step_begin(s, 0);

	if (res == 0)
		res = step_end(s, 0);
	return res < 0 ? step_fail(s, res) : 0;
}

static int register_locked(struct moment_session *s, struct moment_param *params, size_t n,
			   struct path_param *want)
{
	bool readonly = s->flags & MOMENT_OPEN_READONLY, made = false, found = false;
	bool first = !s->registered;
	uint32_t flags = readonly ? MOMENT_REG_EXIST
				  : (s->flags & MOMENT_OPEN_RESUME ? 0 : MOMENT_REG_FRESH);
	char of_step[40] = "";
	uint64_t bytes = 0;
	uint32_t role;
	size_t i;
	int res;

	if (s->state != STEP_NONE)
		return err_set(-EBUSY, "a step is open");
	res = wanted_all(s, params, n, want);
	if (res == 0 && first)
		res = judge(s, want, n);
	if (res == 0 && first && (s->flags & MOMENT_OPEN_FRESH)) {
		/* Nothing is dropped for a start that is then refused. */
		res = s->path->ops->add(s->path, want, n, flags | MOMENT_REG_CHECK);
		if (res == 0)
			res = drop_extras(s, want, n);
	}
	if (res == 0)
		res = s->path->ops->add(s->path, want, n, flags);
	for (i = 0; res == 0 && i < n; i++) {
		res = keep(s, &want[i], &params[i].handle);
		params[i].found =
			!(want[i].found & MOMENT_REG_CREATED) && !(flags & MOMENT_REG_FRESH);
		params[i].numel = want[i].numel;
		params[i].step = want[i].step;
		made |= !params[i].found;
		found |= params[i].found;
		for (role = 0; role < MOMENT_ROLES; role++)
			if (want[i].dtype[role] != 0xff)
				bytes += want[i].numel * dtype_size(want[i].dtype[role]);
	}
	if (res < 0)
		return res;
	s->registered = true;
	if (readonly)
		return 0;
	if (first && (s->flags & MOMENT_OPEN_FRESH) && s->last_step != MOMENT_STEP_NONE)
		res = label_begin(s);
	/* So that a rollback before the first step's commit finds them there. */
	if (res == 0 && made && !s->temp.dir)
		res = s->path->ops->commit(s->path, true);
	if (found && s->last_step != MOMENT_STEP_NONE)
		snprintf(of_step, sizeof(of_step), " of step %llu", (unsigned long long)s->last_step);
	if (res == 0 && n)
		session_say(s, MOMENT_NOTICE,
			    "%zu parameters, %s of state%s on %s: %s of disk reserved, %s left (%s)",
			    n, err_bytes(bytes), of_step, s->path->backing,
			    err_bytes(s->path->reserved), err_bytes(s->path->free),
			    s->path->ops->name);
	return res;
}

int moment_register(struct moment_session *s, struct moment_param *params, size_t n)
{
	struct fsize_guard limit;
	struct path_param *want;
	int res = session_enter(s);

	if (res < 0)
		return res;
	fsize_enter(&limit);
	want = calloc(n + 1, sizeof(*want));
	res = want ? register_locked(s, params, n, want) : err_set(-ENOMEM, "out of memory");
	free(want);
	return session_leave(s, fsize_leave(&limit, res));
}

int moment_compare(struct moment_session *s, const struct moment_param *params, size_t n,
		   void (*fn)(void *arg, enum moment_difference kind, const char *name,
			      const char *detail),
		   void *arg)
{
	struct path_param *want;
	int res = session_enter(s);
	size_t i;

	if (res < 0)
		return res;
	want = calloc(n + 1, sizeof(*want));
	if (!want)
		res = err_set(-ENOMEM, "out of memory");
	for (i = 0; res == 0 && i < n; i++)
		res = wanted(&params[i], &want[i]);
	if (res == 0)
		res = compare(s, want, n, fn, arg);
	free(want);
	return session_leave(s, res);
}

int64_t moment_find(struct moment_session *s, const char *name)
{
	int64_t res = session_enter(s);
	uint32_t i;

	if (res < 0)
		return res;
	i = index_get(&s->names, name);
	if (i == INDEX_NONE)
		res = err_set(-ENOENT, "parameter %s is not registered", name);
	else
		res = i;
	pthread_mutex_unlock(&s->lock);
	return res;
}

int moment_remove(struct moment_session *s, uint32_t handle)
{
	struct param *p;
	int res = session_enter(s);

	if (res < 0)
		return res;
	p = session_param(s, handle);
	if (!p)
		res = -EINVAL;
	else if (s->state != STEP_NONE)
		res = err_set(-EBUSY, "a step is open");
	else
		res = s->path->ops->remove(s->path, &p->handle, 1);
	if (res == 0) {
		p->dead = true;
		index_put(&s->names, p->name, INDEX_NONE);
		if (p->tier == MOMENT_TIER_RAM)
			s->pinned -= pin_bytes(s, p);
		ahead_reset(s);
	}
	return session_leave(s, res);
}

/* ---- step counts ------------------------------------------------------------------------ */

static int reload_one(void *arg, const struct path_param *p)
{
	struct moment_session *s = arg;
	uint32_t i = index_get(&s->names, p->name);

	if (i != INDEX_NONE) {
		s->param[i].step = p->step;
		s->param[i].step_moved = false;
	}
	return 0;
}

int params_reload(struct moment_session *s)
{
	uint32_t i;

	for (i = 0; i < s->n_params; i++) {
		s->param[i].step = 0;
		s->param[i].step_moved = false;
	}
	return s->path->ops->list(s->path, reload_one, s);
}

int moment_param_step(struct moment_session *s, uint32_t param, uint64_t *step)
{
	struct param *p;
	int res = session_enter(s);

	if (res < 0)
		return res;
	p = session_param(s, param);
	if (p)
		*step = p->step;
	return session_leave(s, p ? 0 : -EINVAL);
}

struct set_step {
	struct param *p;
	uint64_t step;
};

static int set_step(struct moment_session *s, void *arg)
{
	struct set_step *set = arg;

	set->p->step = set->step;
	set->p->step_moved = true;
	s->touched = true;
	return 0;
}

int moment_set_param_step(struct moment_session *s, uint32_t param, uint64_t step)
{
	struct set_step set = {.step = step};
	int res = session_enter(s);

	if (res < 0)
		return res;
	set.p = session_param(s, param);
	if (!set.p)
		res = -EINVAL;
	else if (step == MOMENT_STEP_NONE)
		res = err_set(-EINVAL, "parameter %s: this step count means 'none'", set.p->name);
	else
		res = step_within(s, set_step, &set);
	return session_leave(s, res);
}

/* ---- nvme_offload_fraction -------------------------------------------------------------- */

uint64_t moment_offload_select(const uint64_t *numel, const uint8_t *cpu, size_t n, double fraction,
			       uint8_t *offload)
{
	uint64_t total = 0, quota, used = 0;
	size_t i;

	for (i = 0; i < n; i++)
		total += numel[i];
	fraction = fraction < 0 ? 0 : fraction > 1 ? 1 : fraction;
	quota = fraction == 1 ? total : (uint64_t)((double)total * fraction);
	for (i = 0; i < n; i++) {
		offload[i] = (!cpu || cpu[i]) && numel[i] <= quota - used;
		if (offload[i])
			used += numel[i];
	}
	return used;
}
