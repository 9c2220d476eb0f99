/* SPDX-License-Identifier: Apache-2.0 */
/*
 * setid.c - which requests take the set-ID bits off a file: one rule for writing, cutting,
 * allocating, punching and a change of owner.
 *
 * Having promised FUSE_HANDLE_KILLPRIV_V2 (init_reply.c) the kernel leaves it to us. With a WRITE,
 * and with a SETATTR that cuts, it says whether the caller may keep the bits (CAP_FSETID); with a
 * FALLOCATE it does not, with a change of owner it says that they go whoever does it, and of a
 * caller's groups it says nothing at all: those are read in /proc, only where the file has such a
 * bit. A caller whom /proc does not show (another pid namespace) has the groups and the privilege
 * of the ids in its request.
 *
 * The rule is Linux': set-user-ID goes; set-group-ID goes where the group may execute, and
 * elsewhere if the caller is not of the group. A change of owner does this to everybody, the rest
 * only to those who have no privilege.
 *
 * Runs in the handler, before the request is submitted. What the kernel writes back of its own
 * pages has no such flag (a store through a mapping takes no bits, as elsewhere on Linux), so
 * nothing here is on the way of a write-back.
 */
#include <linux/capability.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "daemon/daemon.h"

struct caller {
	bool fsetid; /* may keep the bits of any file */
	bool member; /* of the file's group */
};

static bool is_among(const char *numbers, gid_t group)
{
	char *end;

	for (unsigned long n; n = strtoul(numbers, &end, 10), end != numbers; numbers = end)
		if (n == group)
			return true;
	return false;
}

/*
 * Of the user's capabilities only those of the superuser count: a user namespace gives all of them
 * to anybody, and what is not known to be of ours is none.
 */
static struct caller caller_of(const struct fuse_ctx *ctx, gid_t group)
{
	struct caller c = {.fsetid = ctx->uid == 0, .member = ctx->gid == group};
	char path[64], *line = NULL;
	unsigned long long caps;
	size_t size = 0;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/status", (int)ctx->pid);
	f = fopen(path, "re");
	if (!f)
		return c;
	while (getline(&line, &size, f) > 0) {
		if (!strncmp(line, "Groups:", 7))
			c.member = c.member || is_among(line + 7, group);
		else if (sscanf(line, "CapEff: %llx", &caps) == 1)
			c.fsetid = c.fsetid && caps >> CAP_FSETID & 1;
	}
	free(line);
	fclose(f);
	return c;
}

void setid_changed(fuse_req_t req, uint64_t ino, enum setid_change what)
{
	struct ns *ns = daemon_of(req)->ns;
	uint32_t kill = S_ISUID;
	struct caller c;
	struct ns_attr a;

	if (what == SETID_KERNEL_SAYS && !rx_kills_setid())
		return;
	if (ns_getattr(ns, ino, &a) || !S_ISREG(a.mode) || !(a.mode & (S_ISUID | S_ISGID)))
		return;
	c = caller_of(fuse_req_ctx(req), a.gid);
	if (what == SETID_KERNEL_SAYS)
		c.fsetid = false;
	if (what != SETID_OWNER && c.fsetid)
		return;
	if (a.mode & S_IXGRP || !(c.member || c.fsetid))
		kill |= S_ISGID;
	ns_kill_setid(ns, ino, kill);
}
