/* SPDX-License-Identifier: Apache-2.0 */
/*
 * item.c - the items of a step against what was registered.
 *
 * Whatever could be wrong with an item is found here, before the step begins: a call that is
 * refused has changed nothing and torn nothing. Nothing about weights and gradients is believed
 * from registering or from an earlier step: how many elements there are, and of which type, comes
 * with each item. Whether an optimizer can do its work is asked of the kernels themselves, so that
 * they have nothing to refuse later.
 */
#include "lib/item.h"

#include <errno.h>

#include "adam/kernel.h"
#include "lib/error.h"

static const char *const dtype_names[] = {"float32", "bfloat16", "float16", "float64"};

static bool dtype_known(uint32_t dtype)
{
	return dtype <= MOMENT_F64;
}

static int check_optim(const struct param *p, const struct moment_item *it)
{
	static float one;
	float *role[MOMENT_ROLES] = {NULL};
	const struct moment_optim *o = it->optim;
	struct moment_slice sl;
	const char *why;
	uint32_t i;

	for (i = 0; i < p->roles; i++) {
		if (p->dtype[p->role[i]] != MOMENT_F32)
			return err_set(-EINVAL,
				       "parameter %s: the kernels update float32 state only",
				       p->name);
		role[p->role[i]] = &one;
	}
	/* Only looked at: one element, so that no array may be missing. */
	sl = (struct moment_slice){.p = &one,
				   .g = &one,
				   .m = role[MOMENT_ROLE_EXP_AVG],
				   .v = role[MOMENT_ROLE_EXP_AVG_SQ],
				   .master = role[MOMENT_ROLE_MASTER],
				   .vmax = role[MOMENT_ROLE_MAX_EXP_AVG_SQ],
				   .numel = 1,
				   .p_dtype = it->p_dtype,
				   .g_dtype = it->g_dtype};
	why = kernel_refusal(o, it->step ? it->step : p->step + 1, &sl, it->extras);
	if (!why)
		return 0;
	return err_set(-EINVAL,
		       "parameter %s: the optimizer cannot do this: %s. It came with lr %g, beta1 %g, "
		       "beta2 %g, eps %g, weight_decay %g, grad_scale %g, %s weights and a %s gradient; "
		       "registered are%s%s%s%s",
		       p->name, why, o->lr, o->beta1, o->beta2, o->eps, o->weight_decay,
		       o->grad_scale, dtype_names[it->p_dtype], dtype_names[it->g_dtype],
		       sl.m ? " exp_avg" : "", sl.v ? " exp_avg_sq" : "", sl.master ? " master" : "",
		       sl.vmax ? " max_exp_avg_sq" : "");
}

/* The weights or the gradient. A function may do without them; an optimizer may not. */
static int check_memory(const struct param *p, const char *what, const void *base, uint64_t numel,
			uint32_t dtype, bool needed)
{
	if (!base && !numel && !needed)
		return 0;
	if (numel != p->numel)
		return err_set(
			-EINVAL,
			"parameter %s was registered with %llu elements, and its %s came with %llu (%s): nothing "
			"was changed",
			p->name, (unsigned long long)p->numel, what, (unsigned long long)numel,
			dtype_names[dtype]);
	if (!base && numel && needed)
		return err_set(-EINVAL, "parameter %s: no %s (NULL)", p->name, what);
	return 0;
}

/* Whether the arrays of one block can be leased together. */
static int check_quota(struct moment_session *s, const struct param *p)
{
	uint64_t bytes;

	if (!p->numel)
		return 0;
	bytes = unit_bytes(s, p, 0);
	if (bytes <= s->path->quota &&
	    (p->blocks > 1 || bytes >= (uint64_t)p->roles * s->path->block ||
	     bytes <= s->path->quota_small))
		return 0;
	return err_set(
		-E2BIG,
		"parameter %s: a block of all its arrays is %s, and a session may lease %s at a time: give the "
		"RAM tier more, or make the backing with smaller blocks",
		p->name, err_bytes(bytes), err_bytes(s->path->quota));
}

static int check_item(struct moment_session *s, const struct moment_item *it)
{
	const struct param *p = session_param(s, it->param);
	int res;

	if (!p)
		return -EINVAL;
	if (it->flags)
		return err_set(-EINVAL, "parameter %s: unknown flags %#x", p->name, it->flags);
	if (!it->optim == !it->fn)
		return err_set(-EINVAL, "parameter %s: either an optimizer or a function", p->name);
	if (it->step == MOMENT_STEP_NONE || (it->step == 0 && p->step + 1 == MOMENT_STEP_NONE))
		return err_set(-EINVAL, "parameter %s: this step count means 'none'", p->name);
	if (!dtype_known(it->p_dtype) || !dtype_known(it->g_dtype))
		return err_set(-EINVAL, "parameter %s: unknown type", p->name);
	res = check_memory(p, "weights", it->p, it->p_numel, it->p_dtype, it->optim);
	if (res == 0)
		res = check_memory(p, "gradient", it->g, it->g_numel, it->g_dtype, it->optim);
	if (res == 0)
		res = check_quota(s, p);
	if (res == 0 && it->optim)
		res = check_optim(p, it);
	return res;
}

int items_check(struct moment_session *s, const struct moment_item *items, size_t n)
{
	size_t i;
	int res = 0;

	if (n && !items)
		return err_set(-EINVAL, "no items (NULL)");
	for (i = 0; res == 0 && i < n; i++) {
		res = check_item(s, &items[i]);
		if (res < 0)
			break;
		if (s->param[items[i].param].in_list)
			res = err_set(-EINVAL, "parameter %s is in the list twice",
				      s->param[items[i].param].name);
		else
			s->param[items[i].param].in_list = true;
	}
	while (i-- > 0)
		s->param[items[i].param].in_list = false;
	return res;
}
