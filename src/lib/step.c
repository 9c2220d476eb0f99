/* SPDX-License-Identifier: Apache-2.0 */
/*
 * step.c - steps: begin, updates, end, and what remains when one fails.
 *
 * A session is between steps (STEP_NONE), inside one (STEP_OPEN), or was hurt in one (STEP_TORN:
 * something had been written when it failed; only a rollback helps). The updates themselves are
 * flow.c's.
 */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "lib/error.h"
#include "lib/flow.h"
#include "lib/item.h"
#include "lib/session.h"

/* State that is to be dropped has no label. */
static uint64_t last_label(const struct moment_session *s)
{
	return s->flags & MOMENT_OPEN_FRESH && !s->registered ? MOMENT_STEP_NONE : s->last_step;
}

int step_begin(struct moment_session *s, uint64_t step)
{
	int res;

	if (s->state == STEP_OPEN)
		return err_set(-EBUSY, "step %llu is open", (unsigned long long)s->open_step);
	if (s->state == STEP_TORN)
		return err_set(
			-ESTALE,
			"step %llu failed part-way and its state is torn: moment_rollback() first",
			(unsigned long long)s->open_step);
	if (s->flags & MOMENT_OPEN_READONLY)
		return err_set(-EROFS, "the session was opened to look only");
	if (step == MOMENT_STEP_NONE)
		return err_set(-EINVAL, "this step number means 'none'");
	if (step == MOMENT_STEP_NEXT)
		step = last_label(s) == MOMENT_STEP_NONE ? 1 : last_label(s) + 1;
	res = s->path->ops->pre_step(s->path, step);
	if (res < 0)
		return res;
	s->state = STEP_OPEN;
	s->open_step = step;
	s->touched = false;
	return 0;
}

static int send_steps(struct moment_session *s)
{
	struct moment_param_step *m = calloc(s->n_params + 1, sizeof(*m));
	size_t n = 0;
	uint32_t i;
	int res;

	if (!m)
		return err_set(-ENOMEM, "out of memory");
	for (i = 0; i < s->n_params; i++) {
		if (!s->param[i].step_moved)
			continue;
		m[n++] = (struct moment_param_step){.param = s->param[i].handle,
						    .step = s->param[i].step};
	}
	res = s->path->ops->steps(s->path, m, n);
	free(m);
	for (i = 0; res == 0 && i < s->n_params; i++)
		s->param[i].step_moved = false;
	return res;
}

int step_end(struct moment_session *s, uint32_t flags)
{
	uint64_t step = s->open_step;
	int res = send_steps(s);

	if (res == 0)
		res = s->path->ops->post_step(s->path, step,
					      flags & MOMENT_STEP_COMMIT ? MOMENT_POST_COMMIT : 0);
	if (res < 0)
		return res;
	s->state = STEP_NONE;
	s->last_step = step;
	ahead_end(s);
	return 0;
}

/* Nothing was written: the step ends, and the boundary gets its old label back. */
static int step_cancel(struct moment_session *s)
{
	const struct path_ops *ops = s->path->ops;
	int res;

	if (s->last_step ==
	    MOMENT_STEP_NONE) /* there was no boundary yet: the state is the last commit's */
		return ops->rollback(s->path);
	res = ops->post_step(s->path, s->open_step, 0);
	if (res == 0 && s->open_step != s->last_step) {
		res = ops->pre_step(s->path, s->last_step);
		if (res == 0)
			res = ops->post_step(s->path, s->last_step, 0);
	}
	return res;
}

int step_fail(struct moment_session *s, int res)
{
	char text[1024];

	if (s->state != STEP_OPEN)
		return res;
	if (s->touched) {
		s->state = STEP_TORN;
		return res;
	}
	strncpy(text, err_text(), sizeof(text) - 1);
	text[sizeof(text) - 1] = 0;
	s->state = step_cancel(s) < 0 ? STEP_TORN : STEP_NONE;
	ahead_reset(s);
	err_write("%s", text);
	return res;
}

int step_within(struct moment_session *s, int (*fn)(struct moment_session *s, void *arg), void *arg)
{
	uint64_t label = s->last_step == MOMENT_STEP_NONE ? 0 : s->last_step;
	int res;

	if (s->state == STEP_OPEN)
		return fn(s, arg);
	res = step_begin(s, label);
	if (res < 0)
		return res;
	res = fn(s, arg);
	if (res == 0)
		res = step_end(s, 0);
	return res < 0 ? step_fail(s, res) : 0;
}

/* ---- public: piece by piece ------------------------------------------------------------- */

static int must_be_open(struct moment_session *s)
{
	if (s->state == STEP_OPEN)
		return 0;
	if (s->state == STEP_TORN)
		return err_set(
			-ESTALE,
			"step %llu failed part-way and its state is torn: moment_rollback() first",
			(unsigned long long)s->open_step);
	return err_set(-EINVAL, "no step is open: moment_pre_step() first");
}

int moment_pre_step(struct moment_session *s, uint64_t step)
{
	int res = session_enter(s);

	if (res < 0)
		return res;
	res = step_begin(s, step);
	if (res == 0)
		ahead_hint(s);
	return session_leave(s, res);
}

int moment_pre_update(struct moment_session *s, uint32_t param)
{
	struct param *p;
	int res = session_enter(s);

	if (res < 0)
		return res;
	res = must_be_open(s);
	p = res == 0 ? session_param(s, param) : NULL;
	if (p)
		ahead_goto(s, p);
	else if (res == 0)
		res = -EINVAL;
	return session_leave(s, res);
}

int moment_apply(struct moment_session *s, const struct moment_item *item)
{
	int res = session_enter(s);

	if (res < 0)
		return res;
	res = must_be_open(s);
	if (res == 0)
		res = items_check(s, item, 1);
	if (res == 0) { /* what was refused has hurt nothing, however much the step has done before */
		res = flow_run(s, item, 1);
		if (res < 0 && s->state == STEP_OPEN && s->touched)
			s->state = STEP_TORN;
	}
	return session_leave(s, res);
}

int moment_post_update(struct moment_session *s, uint32_t param)
{
	int res = session_enter(s);

	if (res < 0)
		return res;
	res = must_be_open(s);
	if (res == 0 && !session_param(s, param))
		res = -EINVAL;
	return session_leave(s, res); /* moment_apply() has released everything */
}

int moment_post_step(struct moment_session *s, uint64_t step, uint32_t flags)
{
	int res = session_enter(s);

	if (res < 0)
		return res;
	res = must_be_open(s);
	if (res == 0 && step != s->open_step && step != MOMENT_STEP_NEXT) {
		res = err_set(-EINVAL, "step %llu is open, not %llu",
			      (unsigned long long)s->open_step, (unsigned long long)step);
	} else if (res == 0 && (flags & ~MOMENT_STEP_COMMIT)) {
		res = err_set(-EINVAL, "unknown flags %#x: step %llu is still open",
			      flags & ~MOMENT_STEP_COMMIT, (unsigned long long)s->open_step);
	} else if (res == 0) {
		res = step_end(s, flags);
		if (res < 0)
			res = step_fail(s, res);
	}
	return session_leave(s, res);
}

int moment_last_step(struct moment_session *s, uint64_t *step)
{
	int res = session_enter(s);

	if (res < 0)
		return res;
	*step = last_label(s);
	return session_leave(s, 0);
}

int moment_abort_step(struct moment_session *s)
{
	int res = session_enter(s);

	if (res < 0)
		return res;
	res = must_be_open(s);
	if (res == 0) {
		step_fail(s, 0);
		res = s->state == STEP_NONE
			      ? 0
			      : err_set(-ESTALE,
					"step %llu had changed state, which is torn now: moment_rollback() first",
					(unsigned long long)s->open_step);
	}
	return session_leave(s, res);
}

/* ---- public: a whole step --------------------------------------------------------------- */

static int all_finite(struct moment_session *s, const struct moment_item *items, size_t n)
{
	size_t i;

	for (i = 0; i < n; i++) {
		const struct param *p = &s->param[items[i].param];

		if (items[i].g && moment_is_finite(items[i].g, p->numel, items[i].g_dtype) == 0)
			return err_set(
				-EDOM,
				"the gradient of %s has an infinity or NaN; nothing was changed",
				p->name);
	}
	return 0;
}

static int step_locked(struct moment_session *s, uint64_t step, const struct moment_item *items,
		       size_t n, uint32_t flags)
{
	int res;

	if (flags & ~(MOMENT_STEP_FINITE | MOMENT_STEP_COMMIT))
		return err_set(-EINVAL, "unknown flags %#x", flags);
	res = items_check(s, items, n);
	if (res == 0 && (flags & MOMENT_STEP_FINITE))
		res = all_finite(s, items, n);
	if (res == 0)
		res = step_begin(s, step);
	if (res < 0)
		return res;
	ahead_expect(s, items, n);
	res = flow_run(s, items, n);
	if (res == 0)
		res = step_end(s, flags);
	return res < 0 ? step_fail(s, res) : 0;
}

int moment_step(struct moment_session *s, uint64_t step, const struct moment_item *items, size_t n,
		uint32_t flags)
{
	sigset_t block, old;
	int res = session_enter(s);

	if (res < 0)
		return res;
	/* A handler must not see (or, by longjmp or exit, leave) half a step. Faults of our own are
	 * not held back. */
	sigfillset(&block);
	sigdelset(&block, SIGSEGV);
	sigdelset(&block, SIGBUS);
	sigdelset(&block, SIGFPE);
	sigdelset(&block, SIGILL);
	sigdelset(&block, SIGTRAP);
	sigdelset(&block, SIGABRT);
	pthread_sigmask(SIG_BLOCK, &block, &old);
	res = step_locked(s, step, items, n, flags);
	pthread_mutex_unlock(&s->lock);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return res;
}
