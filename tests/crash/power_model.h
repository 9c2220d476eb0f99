/* SPDX-License-Identifier: Apache-2.0 */
/*
 * power_model.h - of test_power.c: what it knows of parameters and plain files, and what it does to
 * plain files. Every word of a plain file is its number and the version that wrote it.
 */
#ifndef TEST_CRASH_POWER_MODEL_H
#define TEST_CRASH_POWER_MODEL_H

#include "driver.h"

#define BLOCK	   65536u
#define PARAMS	   40
#define FILES	   24
#define FILE_MAX   (5u * BLOCK)
#define BOUNDARIES 4096
#define ROLES	   3 /* exp_avg, exp_avg_sq, master */

/* ---- the model ---- */

enum param_state { P_NONE, P_ASKED, P_LIVE, P_REMOVED };

struct param_model {
	enum param_state state;
	bool durable; /* a commit since has it */
	char name[24];
	uint64_t numel;
	unsigned int roles;
	/* of this session */
	uint32_t handle, file[ROLES];
};

/* What the parameters are at a step boundary. */
struct boundary {
	uint64_t label; /* STEP_NONE: before the first */
	uint32_t val[PARAMS];
};

struct version {
	bool exists;
	char name[24];
	uint32_t vmin, vmax; /* words may be of these versions, 0: zeros */
	uint64_t smin, smax; /* sizes it may have */
};

struct file_model {
	bool used;
	uint32_t id;
	uint64_t ino;
	struct version durable, now;
	uint64_t slo, shi; /* sizes since the last durable moment */
	/* names it has had since the last durable moment */
	char names[8][24];
	unsigned int nnames;
};

static struct param_model params[PARAMS];
static struct boundary hist[BOUNDARIES]; /* hist[0]: known to be durable */
static unsigned int nhist;
static struct boundary next; /* of the open step */
static struct file_model files[FILES];
static uint64_t next_label;
static uint32_t next_id;
static char dir[300];
static struct engine_opts opts;
static bool stepping, with_faults = true, faulty;
static bool want_faults; /* errors may come from the drive now */
static bool dropped;	 /* and it may have dropped writes */
static uint64_t stats_cuts, stats_under_way, stats_commits, stats_rollbacks, stats_torn,
	stats_faults, stats_dropped, stats_full, stats_died;

static uint64_t bytes_of(const struct param_model *p)
{
	return p->numel * 4;
}

static uint32_t blocks_of(const struct param_model *p)
{
	return (uint32_t)((bytes_of(p) + BLOCK - 1) / BLOCK);
}

static float element(unsigned int role, uint32_t val)
{
	if (!val)
		return 0;
	return role == 0 ? (float)val : role == 1 ? -(float)val : (float)val + 0.5f;
}

static const char *const role_names[ROLES] = {"exp_avg", "exp_avg_sq", "master"};

/* ---- what is durable ---- */

static void durable_label(uint64_t label)
{
	unsigned int i;

	for (i = nhist; i-- > 0;) {
		if (hist[i].label == label)
			break;
	}
	if (i == UINT32_MAX)
		die("the committed step is said to be %llu, not one of this history",
		    (unsigned long long)label);
	if (i) {
		memmove(hist, hist + i, (nhist - i) * sizeof(hist[0]));
		nhist -= i;
	}
}

static void plain_is_durable(void)
{
	for (int i = 0; i < FILES; i++) {
		struct file_model *f = &files[i];

		if (!f->used)
			continue;
		f->durable = f->now;
		f->slo = f->now.smin;
		f->shi = f->now.smax;
		f->nnames = 0;
		if (!f->now.exists)
			f->used = false;
	}
	for (int i = 0; i < PARAMS; i++) {
		if (params[i].state == P_REMOVED)
			params[i].state = P_NONE;
		if (params[i].state == P_LIVE)
			params[i].durable = true;
	}
}

/* Every reply that carries it tells what is durable. */
static void look_at_info(void)
{
	durable_label(client.reply.info.committed_step);
}

/* A commit of everything, asked for now or before, has returned. */
static void all_is_durable(void)
{
	plain_is_durable();
	if (!stepping) {
		if (client.s && hist[nhist - 1].label != STEP_NONE)
			durable_label(hist[nhist - 1].label);
	}
	stats_commits++;
}

/* ---- plain files ---- */

static struct file_model *pick_file(bool exists)
{
	unsigned int k = (unsigned int)below(FILES);

	for (unsigned int i = 0; i < FILES; i++) {
		struct file_model *f = &files[(k + i) % FILES];

		if (exists ? f->used && f->now.exists : !f->used)
			return f;
	}
	return NULL;
}

static void name_was(struct file_model *f, const char *name)
{
	if (f->nnames < 8)
		strcpy(f->names[f->nnames++], name);
}

static bool allowed(int64_t r)
{
	return r >= 0 || (want_faults && (r == -EIO || r == -ENOSPC || r == -EDQUOT));
}

/* A write or truncation of a plain file may find the pool full; nothing else may. */
static bool allowed_write(int64_t r)
{
	if (opts.size && r == -ENOSPC)
		stats_full++;
	return allowed(r) || (opts.size && r == -ENOSPC);
}

static int file_write(struct file_model *f)
{
	static uint64_t buf[FILE_MAX / 8];
	uint32_t v = f->now.vmax + 1;
	uint64_t size = 8 * (1 + below(below(3) ? 1500 : FILE_MAX / 8));
	uint64_t pos = 0;
	bool ok = true;

	note("write %s (file %u) version %u, %llu bytes", f->now.name, f->id, v,
	     (unsigned long long)size);
	for (uint64_t i = 0; i < size / 8; i++)
		buf[i] = (uint64_t)f->id << 32 | v;
	f->now.vmax = v;
	if (size > f->now.smax)
		f->now.smax = size;
	if (f->now.smax > f->shi)
		f->shi = f->now.smax;
	if (size < f->slo)
		f->slo = size;
	while (pos < size) {
		uint64_t len = 8 * (1 + below(below(2) ? 512 : 20000));
		int64_t r;

		if (len > size - pos)
			len = size - pos;
		r = drive_op(ENGINE_WRITE, f->ino, pos, len, 0, (char *)buf + pos);
		if (!allowed_write(r))
			die("write: %s", strerror((int)-r));
		ok = ok && r == (int64_t)len; /* short: room ended in it */
		pos += len;
	}
	if (!ok) {
		f->now.vmin = 0; /* what failed may have left holes */
		return -EIO;
	}
	f->now.smin = f->now.smin > size ? f->now.smin : size;
	if (size < f->now.smax || below(4) == 0) {
		int64_t r;

		f->now.smin = size < f->now.smin ? size : f->now.smin;
		r = drive_op(ENGINE_TRUNCATE, f->ino, 0, size, 0, NULL);
		if (!allowed(r))
			die("truncate: %s", strerror((int)-r));
		if (r < 0)
			return (int)r;
	}
	f->now.vmin = v;
	f->now.smin = f->now.smax = size;
	return 0;
}

static void do_create(void)
{
	struct file_model *f = pick_file(false);
	struct ns_attr a;

	if (!f)
		return;
	memset(f, 0, sizeof(*f));
	f->id = ++next_id;
	snprintf(f->now.name, sizeof(f->now.name), "f%u", f->id);
	note("create %s", f->now.name);
	must(ns_create(engine_ns(e), NS_ROOT, f->now.name, 0644, 0, 0, false, &a), "create");
	f->used = f->now.exists = true;
	f->ino = a.ino;
	name_was(f, f->now.name);
	file_write(f);
}

static void do_rename(void)
{
	struct file_model *f = pick_file(true), *over = below(2) ? pick_file(true) : NULL;
	char name[24];

	if (!f || f == over)
		return;
	if (over)
		strcpy(name, over->now.name);
	else
		snprintf(name, sizeof(name), "r%u", ++next_id);
	note("rename %s %s", f->now.name, name);
	must(ns_rename(engine_ns(e), NS_ROOT, f->now.name, NS_ROOT, name, 0), "rename");
	if (over)
		over->now.exists = false;
	strcpy(f->now.name, name);
	name_was(f, name);
}

static void do_unlink(void)
{
	struct file_model *f = pick_file(true);

	if (!f)
		return;
	note("unlink %s", f->now.name);
	must(ns_unlink(engine_ns(e), NS_ROOT, f->now.name), "unlink");
	f->now.exists = false;
}

static void do_fsync(void)
{
	struct file_model *f = pick_file(true);
	int64_t r;

	if (!f)
		return;
	note("fsync %s", f->now.name);
	r = drive_op(ENGINE_FSYNC, f->ino, 0, 0, 0, NULL);
	if (!allowed(r))
		die("fsync: %s", strerror((int)-r));
	if (!r)
		all_is_durable();
}

static void do_sync(void)
{
	int64_t r;

	note("sync");
	r = drive_op(ENGINE_SYNC, 0, 0, 0, 0, NULL);
	if (!allowed(r))
		die("sync: %s", strerror((int)-r));
	if (!r)
		all_is_durable();
}

static void plain_op(void)
{
	struct file_model *f;

	switch (below(10)) {
	case 0:
	case 1:
		do_create();
		break;
	case 2:
	case 3:
	case 4:
		f = pick_file(true);
		if (f)
			file_write(f);
		break;
	case 5:
		do_rename();
		break;
	case 6:
		do_unlink();
		break;
	case 7:
	case 8:
		do_fsync();
		break;
	case 9:
		if (below(4) == 0)
			do_sync();
		break;
	}
}

#endif
