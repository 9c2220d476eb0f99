/* SPDX-License-Identifier: Apache-2.0 */
/*
 * commit_fails.c - when commits fail: what is remembered of it, when steps must not go on, and what
 * people are told.
 *
 * Loop thread only.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "engine/commit.h"

/* May it go away by itself, or by what somebody does beside us? */
static bool curable(int err)
{
	switch (-err) {
	case ENOSPC:
	case EDQUOT:
	case EIO:
	case EROFS:
	case ENOMEM:
	case ENOBUFS:
	case EAGAIN:
	case EINTR:
	case EBUSY:
	case EMFILE:
	case ENFILE:
	case ENODEV:
	case ENXIO:
	case ETIMEDOUT:
		return true;
	default:
		return false;
	}
}

void commit_info_failed(struct commit_info *i, struct ns *ns, int err, bool lost, uint64_t ino,
			const char *what)
{
	char path[200];

	if (!i->failures++)
		i->failing_ns = loop_now_ns();
	i->error = err;
	i->hopeless = lost || !curable(err);
	if (ino && ns_path(ns, ino, path, sizeof(path)))
		snprintf(path, sizeof(path), "(removed file, inode %llu)", (unsigned long long)ino);
	if (ino)
		snprintf(i->cause, sizeof(i->cause), "params/%s: %s", path, what);
	else
		snprintf(i->cause, sizeof(i->cause), "%s", what);
}

void commit_info_well(struct commit_info *i)
{
	i->error = 0;
	i->failures = 0;
	i->hopeless = false;
	i->cause[0] = 0;
}

bool commit_info_stalled(const struct commit_info *i, int seconds)
{
	uint64_t patience = seconds > 0 ? (uint64_t)seconds * 1000000000ull : 0;

	if (!i->failures)
		return false;
	return i->hopeless || (i->failures >= COMMIT_PATIENCE &&
			       loop_now_ns() - i->failing_ns >= patience);
}

void commit_explain(const struct cache *c, char *buf, size_t len)
{
	const char *todo = "cure the drive (momentctl status has the details); the next commit that "
			   "succeeds lets steps go on";
	char step[40] = "no step";
	struct commit_info i;

	commit_get_info(c, &i);
	if (i.step != UINT64_MAX)
		snprintf(step, sizeof(step), "step %llu", (unsigned long long)i.step);
	if (i.hopeless)
		todo = "waiting does not cure that: remove what is named, or return to what is stored "
		       "(momentctl rollback, or a new start)";
	else if (i.error == -ENOSPC || i.error == -EDQUOT)
		todo = "free some space there; the next commit that succeeds lets steps go on";
	snprintf(buf, len,
		 "the last %u commit%s failed, over %llu s: %s: %s; stored is commit %llu (%s); %s",
		 i.failures, i.failures == 1 ? "" : "s",
		 (unsigned long long)((loop_now_ns() - i.failing_ns) / 1000000000u), i.cause,
		 strerror(-i.error), (unsigned long long)i.seq, step, todo);
}
