/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_power.c - the power goes out, thousands of times, while parameters are registered, stepped,
 * committed, rolled back and removed, and plain files made, written, renamed and deleted.
 *
 * Every element of a parameter tells the step that wrote it: exp_avg = step, exp_avg_sq = -step,
 * master = step + 0.5. Every word of a plain file tells which file and which version. After each
 * cut (or kill, or a drive that failed for a while) the backing must open without repair, fsck must
 * find nothing, all parameters must show one and the same step, no older than the last commit that
 * was reported, and a plain file nothing older than its last fsync.
 *
 *	test_power [--seed N] [--cuts N] [--dir DIR] [--io uring|threads] [--no-faults] [--verbose]
 *
 * 200 cuts, 3000 with MOMENT_CRASH=full (tools/check), any number with --cuts.
 *
 * A run is a chain of lives of one backing; a new backing every LIVES lives. Each chain prints its
 * seed. The threads' timing is not part of the seed: a replay may need a few tries.
 */
#include <getopt.h>

#include "engine/fsck.h"
#include "power_model.h"

#define LIVES 25

/* ---- the session ---- */

static size_t add_entry(char *at, const struct param_model *p)
{
	struct moment_reg_entry *m = (struct moment_reg_entry *)at;
	size_t name = strlen(p->name);

	*m = (struct moment_reg_entry){.numel = p->numel, .ndim = 1, .name_len = (uint32_t)name};
	memset(m->dtype, 0xff, sizeof(m->dtype));
	memset(m->dtype, MOMENT_F32, p->roles);
	memcpy(at + sizeof(*m), &p->numel, 8);
	memcpy(at + sizeof(*m) + 8, p->name, name);
	m->size = (uint32_t)round_up_u64(sizeof(*m) + 8 + name, 8);
	return m->size;
}

/* Registers the parameters `which[0..n)`. */
static int do_register(const int *which, int n, bool new)
{
	static char buf[8192] __attribute__((aligned(8)));
	struct moment_register *m = (struct moment_register *)buf;
	size_t len = sizeof(*m);
	int r;

	memset(buf, 0, sizeof(buf));
	m->n = (uint32_t)n;
	m->flags = new ? MOMENT_REG_NEW : MOMENT_REG_EXIST;
	for (int i = 0; i < n; i++) {
		note("register %s, %llu elements, %u arrays%s", params[which[i]].name,
		     (unsigned long long)params[which[i]].numel, params[which[i]].roles,
		     new ? ", new" : "");
		len += add_entry(buf + len, &params[which[i]]);
	}
	r = client_call(&m->h, MOMENT_MSG_REGISTER, len);
	if (r)
		return r;
	for (int i = 0; i < n; i++) {
		struct param_model *p = &params[which[i]];
		const struct moment_reg_reply_entry *x = &client.reply.reg.e[i];
		uint32_t val = hist[nhist - 1].val[which[i]];

		p->handle = x->param;
		memcpy(p->file, x->file, sizeof(p->file));
		if (!new && x->step != val)
			die("%s: its step is %llu when found, not %u", p->name,
			    (unsigned long long)x->step, val);
	}
	return 0;
}

static void register_new(void)
{
	int which[3], n = 0, want = 1 + (int)below(3);

	for (int i = 0; i < PARAMS && n < want; i++) {
		if (params[i].state != P_NONE)
			continue;
		params[i] = (struct param_model){
			.state = P_ASKED,
			.numel = below(3) == 0 ? 1 + below(2000)
				 : below(2)    ? 16384 * (1 + below(4))
					       : 10000 + below(70000),
			.roles = 2 + (unsigned int)below(2),
		};
		snprintf(params[i].name, sizeof(params[i].name), "p%u.w", ++next_id);
		for (unsigned int k = 0; k < nhist; k++)
			hist[k].val[i] = 0;
		which[n++] = i;
	}
	if (!n)
		return;
	if (do_register(which, n, true)) {
		struct ns_attr a;

		if (!want_faults && !(opts.size && client.reply.r.status == -ENOSPC))
			die("register: %s", client_text());
		stats_full += opts.size != 0;
		for (int i = 0; i < n; i++) {
			/* A commit may have passed by and recorded it, before it was undone. */
			params[which[i]].state = P_REMOVED;
			if (ns_peek(engine_ns(e), NS_ROOT, params[which[i]].name, &a) != -ENOENT)
				die("%s was not registered, and is there", params[which[i]].name);
		}
		return;
	}
	for (int i = 0; i < n; i++) {
		params[which[i]].state = P_LIVE;
		params[which[i]].durable = true;
	}
	all_is_durable(); /* registering is a commit */
}

static int live_params(int *which)
{
	int n = 0;

	for (int i = 0; i < PARAMS; i++) {
		if (params[i].state == P_LIVE)
			which[n++] = i;
	}
	return n;
}

/* A session, and all parameters registered with it. */
static void session_begin(void)
{
	int which[PARAMS], n, r;

	note("hello");
	r = client_open(true);
	if (r) { /* the way back from a torn step */
		if (!want_faults)
			die("hello: %s", client_text());
		return;
	}
	durable_label(client.reply.hello.committed_step);
	if (client.reply.hello.rolled_back != STEP_NONE) {
		stats_rollbacks++;
		nhist = 1;
	}
	stepping = false;
	n = live_params(which);
	for (int at = 0; at < n; at += 20) {
		r = do_register(which + at, n - at < 20 ? n - at : 20, false);
		if (!r)
			continue;
		if (!want_faults && !(opts.size && r == -ENOSPC))
			die("register again: %s", client_text());
		/* The drive fails now, or plain files have taken the space: later. */
		client_close();
		return;
	}
}

static void session_end(void)
{
	note("the session ends%s", stepping ? " inside a step" : "");
	client_close();
	if (stepping)
		stats_torn++;
	/* Torn: what has not been committed goes back when the next one begins. */
}

static int do_rollback(void)
{
	int r;

	note("rollback");
	r = client_simple(MOMENT_MSG_ROLLBACK, 0);
	if (r) {
		if (!want_faults)
			die("rollback: %s", client_text());
		return r;
	}
	look_at_info();
	nhist = 1;
	stepping = false;
	stats_rollbacks++;
	return 0;
}

static void fill(unsigned int i, uint32_t block, unsigned int k, const struct moment_lease *l)
{
	float *x = (float *)(client.arena + l->arena), old = element(k, hist[nhist - 1].val[i]),
	      new = element(k, next.val[i]);

	for (uint32_t j = 0; j < l->len / 4; j++) {
		if (x[j] != old && x[j] != new)
			die("%s/%s: element %llu is %g, not %g", params[i].name, role_names[k],
			    (unsigned long long)block * (BLOCK / 4) + j, (double)x[j], (double)old);
		x[j] = new;
	}
}

struct ranges {
	struct moment_advance m;
	struct moment_range r[2 * ROLES];
};

/* All blocks of a parameter, each leased while the one before it is released. */
static int step_param(unsigned int i)
{
	struct param_model *p = &params[i];
	uint32_t nb = blocks_of(p);
	bool out = false, skip = below(12) == 0; /* let it be unchanged after all */
	unsigned int clean = skip ? MOMENT_RANGE_CLEAN : 0;

	if (!skip)
		next.val[i] = (uint32_t)next.label;
	for (uint32_t b = 0; b <= nb; b++) {
		struct ranges x = {
			.m = {.n_release = out ? p->roles : 0, .n_lease = b < nb ? p->roles : 0}};
		unsigned int n = 0;
		int r;

		for (unsigned int k = 0; out && k < p->roles; k++)
			x.r[n++] = (struct moment_range){
				p->file[k], b - 1, 1, clean | (below(4) ? 0 : MOMENT_RANGE_COOL)};
		for (unsigned int k = 0; b < nb && k < p->roles; k++)
			x.r[n++] = (struct moment_range){p->file[k], b, 1, MOMENT_RANGE_WRITE};
		r = client_call(&x.m.h, MOMENT_MSG_ADVANCE, sizeof(x.m) + n * sizeof(x.r[0]));
		if (r) {
			if (!want_faults)
				die("lease: %s", client_text());
			return r;
		}
		out = b < nb;
		for (unsigned int k = 0; out && k < p->roles; k++) {
			if (!skip)
				fill(i, b, k, &client.reply.adv.l[k]);
		}
	}
	return 0;
}

static int do_step(void)
{
	int which[PARAMS], n = live_params(which), r;
	struct {
		struct moment_steps m;
		struct moment_param_step p[PARAMS];
	} steps = {0};
	bool commit;

	if (nhist == BOUNDARIES)
		return 0;
	next = hist[nhist - 1];
	next.label = next_label++;
	note("step %llu", (unsigned long long)next.label);
	r = client_step(MOMENT_MSG_PRE_STEP, next.label, 0);
	if (r) {
		if (!want_faults)
			die("pre_step: %s", client_text());
		return r;
	}
	stepping = true;
	for (int j = 0; j < n; j++) {
		int i = which[(j + (below(10) ? 0 : 1)) % n];

		if (below(15) == 0 || next.val[i] == next.label)
			continue;
		r = step_param((unsigned int)i);
		if (r)
			return r;
		if (next.val[i] == next.label)
			steps.p[steps.m.n++] = (struct moment_param_step){.param = params[i].handle,
									  .step = next.label};
		if (below(8) == 0)
			plain_op();
		if (below(12) == 0) {
			note("commit asked for inside the step");
			client_send(&(struct moment_simple){0}.h, MOMENT_MSG_COMMIT,
				    sizeof(struct moment_simple));
		}
		if (below(60) == 0) {
			session_end();
			return 0;
		}
		if (below(60) == 0)
			return do_rollback();
	}
	r = client_call(&steps.m.h, MOMENT_MSG_STEPS,
			sizeof(steps.m) + steps.m.n * sizeof(steps.p[0]));
	must(r, "steps");
	commit = below(3) == 0;
	hist[nhist++] = next; /* from here on a commit may have it */
	note("post_step %llu%s", (unsigned long long)next.label, commit ? " and commit" : "");
	r = client_step(MOMENT_MSG_POST_STEP, next.label, commit ? MOMENT_POST_COMMIT : 0);
	if (r)
		die("post_step: %s", client_text());
	stepping = false;
	look_at_info();
	return 0;
}

static void do_commit(void)
{
	bool wait = below(3) != 0;
	int r;

	note("commit%s", wait ? " and wait" : "");
	r = client_simple(MOMENT_MSG_COMMIT, wait ? MOMENT_COMMIT_WAIT : 0);
	if (r) {
		if (!want_faults)
			die("commit: %s", client_text());
		return;
	}
	look_at_info();
	if (wait) {
		if (client.reply.info.committed_step != hist[nhist - 1].label)
			die("a commit returned and the committed step is %llu, not %llu",
			    (unsigned long long)client.reply.info.committed_step,
			    (unsigned long long)hist[nhist - 1].label);
		all_is_durable();
	}
}

static void do_remove(void)
{
	int which[PARAMS], n = live_params(which), i;
	struct {
		struct moment_remove m;
		uint32_t p[2];
	} m = {.m.n = 1};

	if (n < 6)
		return;
	i = which[below((uint64_t)n)];
	note("remove %s", params[i].name);
	m.p[0] = params[i].handle;
	/* From here on a commit may have it, whether or not the answer comes before the power goes. */
	params[i].state = P_REMOVED;
	must(client_call(&m.m.h, MOMENT_MSG_REMOVE, sizeof(m.m) + sizeof(m.p[0])), "remove");
}

/* ---- looking ---- */

static void check_text(uint64_t ino, const char *path, const char *attr, uint32_t val)
{
	char text[64], want[24];
	int64_t n = ns_getxattr(engine_ns(e), ino, attr, text, sizeof(text) - 1);

	text[n > 0 ? n : 0] = 0;
	snprintf(want, sizeof(want), "%u", val);
	if (strcmp(text, want))
		die("%s: %s says \"%s\", the elements tell step %s", path, attr, text, want);
}

static void check_param(unsigned int i, uint64_t ino, uint32_t val)
{
	static char buf[1 << 20];
	struct param_model *p = &params[i];
	struct ns_attr a;
	char path[64], json[32], *meta;
	size_t len;

	check_text(ino, p->name, "user.moment.step", val);
	must(ns_peek(engine_ns(e), ino, "meta.json", &a), "meta.json");
	must(ns_generate(engine_ns(e), a.ino, &meta, &len), "meta.json");
	snprintf(json, sizeof(json), "\"step\": %u,", val);
	if (!strstr(meta, json)) {
		snprintf(json, sizeof(json), "\"step\":%u,", val);
		if (!strstr(meta, json))
			die("%s/meta.json does not say step %u: %s", p->name, val, meta);
	}
	free(meta);
	for (unsigned int k = 0; k < p->roles; k++) {
		float want = element(k, val);
		int r = ns_peek(engine_ns(e), ino, role_names[k], &a);

		snprintf(path, sizeof(path), "%s/%s", p->name, role_names[k]);
		if (r)
			die("%s: %s", path, strerror(-r));
		if (a.size != bytes_of(p))
			die("%s: %llu bytes, not %llu", path, (unsigned long long)a.size,
			    (unsigned long long)bytes_of(p));
		check_text(a.ino, path, "user.moment.step", val);
		for (uint64_t at = 0; at < a.size; at += sizeof(buf)) {
			int64_t n = engine_pread(e, a.ino, buf, sizeof(buf), at);

			if (n < 0)
				die("%s: cannot be read at %llu: %s", path, (unsigned long long)at,
				    strerror((int)-n));
			for (int64_t j = 0; j < n / 4; j++) {
				float x;

				memcpy(&x, buf + 4 * j, 4);
				if (x != want)
					die("%s: element %llu is %g, not %g", path,
					    (unsigned long long)(at / 4) + (unsigned long long)j,
					    (double)x, (double)want);
			}
		}
	}
}

static void check_plain(struct file_model *f, const char *name, const struct ns_attr *a)
{
	static uint64_t buf[FILE_MAX / 8];
	const struct version *lo = f->durable.exists ? &f->durable : NULL;
	uint64_t smin = lo ? f->slo : 0, smax = f->shi;
	uint32_t vmin = lo ? lo->vmin : 0;
	int64_t n;

	if (a->size < smin || a->size > smax)
		die("%s (file %u) has %llu bytes, not %llu to %llu", name, f->id,
		    (unsigned long long)a->size, (unsigned long long)smin,
		    (unsigned long long)smax);
	n = engine_pread(e, a->ino, buf, sizeof(buf), 0);
	if (n != (int64_t)a->size)
		die("%s (file %u): read %lld of %llu bytes", name, f->id, (long long)n,
		    (unsigned long long)a->size);
	for (int64_t i = 0; i < n / 8; i++) {
		uint32_t id = (uint32_t)(buf[i] >> 32), v = (uint32_t)buf[i];

		if (buf[i] == 0 ? vmin == 0 : id == f->id && v >= vmin && v <= f->now.vmax)
			continue;
		/* What was cut off and grown again since may be zeros. */
		if (buf[i] == 0 && f->now.vmin != vmin)
			continue;
		die("%s (file %u): word %lld is file %u version %u, not version %u to %u", name,
		    f->id, (long long)i, id, v, vmin, f->now.vmax);
	}
}

struct listed {
	unsigned int n;
	char name[PARAMS + FILES + 8][32];
	struct ns_attr a[PARAMS + FILES + 8];
};

static bool list_one(void *arg, const char *name, const struct ns_attr *a, uint64_t cookie)
{
	struct listed *l = arg;

	(void)cookie;
	if (l->n == sizeof(l->a) / sizeof(l->a[0]))
		return false;
	snprintf(l->name[l->n], sizeof(l->name[0]), "%s", name);
	l->a[l->n++] = *a;
	return true;
}

static struct file_model *owner(const char *name, uint64_t ino)
{
	for (int i = 0; i < FILES; i++) {
		struct file_model *f = &files[i];
		bool ok = false;

		if (!f->used || f->ino != ino)
			continue;
		ok = f->durable.exists && !strcmp(f->durable.name, name);
		for (unsigned int k = 0; k < f->nnames; k++)
			ok = ok || !strcmp(f->names[k], name);
		/* More renames than are remembered. */
		return ok || f->nnames == 8 ? f : NULL;
	}
	return NULL;
}

/* What is there now is what the model starts from. */
static void look(const char *when)
{
	static struct listed l;
	struct engine_step_state st;
	bool seen_param[PARAMS] = {false}, seen_file[FILES] = {false};
	struct boundary b;

	engine_get_step(e, &st);
	if (st.torn || st.open != STEP_NONE)
		die("%s: the step is torn", when);
	if (st.committed != hist[0].label)
		stats_under_way++;
	durable_label(st.committed);
	nhist = 1;
	b = hist[0];
	l.n = 0;
	ns_readdir(engine_ns(e), NS_ROOT, 0, false, list_one, &l);
	note("%s: committed step %lld, %u entries", when, (long long)st.committed, l.n);
	for (unsigned int i = 0; i < l.n; i++) {
		struct file_model *f;
		unsigned int p;

		if (S_ISDIR(l.a[i].mode)) {
			for (p = 0; p < PARAMS; p++) {
				if (params[p].state != P_NONE && !strcmp(params[p].name, l.name[i]))
					break;
			}
			if (p == PARAMS)
				die("%s: a directory %s that should not be there", when, l.name[i]);
			check_param(p, l.a[i].ino, b.val[p]);
			seen_param[p] = true;
			params[p].state = P_LIVE;
			params[p].durable = true;
			continue;
		}
		f = owner(l.name[i], l.a[i].ino);
		if (!f)
			die("%s: a file %s (inode %llu) that should not be there", when, l.name[i],
			    (unsigned long long)l.a[i].ino);
		check_plain(f, l.name[i], &l.a[i]);
		seen_file[f - files] = true;
		strcpy(f->now.name, l.name[i]);
		f->now.exists = true;
		f->now.vmin = f->durable.exists && f->durable.vmin < f->now.vmin ? f->durable.vmin
			      : f->durable.exists				 ? f->now.vmin
										 : 0;
		f->now.smin = f->now.smax = l.a[i].size;
		f->durable = f->now;
		f->slo = f->shi = l.a[i].size;
		f->nnames = 0;
	}
	for (unsigned int p = 0; p < PARAMS; p++) {
		if (params[p].state == P_LIVE && params[p].durable && !seen_param[p])
			die("%s: parameter %s is gone", when, params[p].name);
		if (!seen_param[p])
			params[p].state = P_NONE;
	}
	for (int i = 0; i < FILES; i++) {
		struct file_model *f = &files[i];

		if (!f->used || seen_file[i])
			continue;
		if (f->durable.exists && f->now.exists)
			die("%s: file %s (file %u) is gone", when, f->durable.name, f->id);
		f->used = false;
	}
}

static void fsck_problem(void *arg, const struct fsck_problem *p)
{
	(void)arg;
	if (!strcmp(p->kind, "leftover"))
		return;
	die("fsck: %s %s: %s", p->kind, p->path, p->text);
}

static void fsck(void)
{
	struct fsck_opts o = {.dir = dir, .problem = fsck_problem};
	struct fsck_result r;
	char err[512];
	int x = fsck_run(&o, &r, err, sizeof(err));

	if (x)
		die("fsck cannot run: %s", err);
}

/* ---- lives ---- */

static void random_faults(void)
{
	static const char *const specs[] = {
		"write.error=EIO:0.1",
		"read.error=EIO:0.1",
		"sync.error=EIO:0.3",
		"sync.error=EIO:0.5,delay=2ms:0.5",
		"drop,sync.error=EIO:0.5",
		"write.error=ENOSPC:0.2",
		"write.error=EDQUOT:0.2",
		"write.short=0.3,read.short=0.3",
		"delay=2ms:0.2",
		"read.flip=0.05",
		"write.error=EIO:0.05,read.error=EIO:0.05,short=0.1,delay=500us:0.1",
		"write.error=EIO:1",
	};
	static const char *const catalog[] = {"write.error=EIO:0.1", "sync.error=EIO:0.2",
					      "sync.error=EIO:0.6", "write.error=ENOSPC:1",
					      "write.short=0.1"};
	static char spec[200];
	const char *s = specs[below(sizeof(specs) / sizeof(specs[0]))];

	snprintf(spec, sizeof(spec), "seed=%llu,journal,%s", (unsigned long long)below(1u << 30),
		 s);
	want_faults = true;
	stats_faults++;
	if (below(4)) {
		drive_faults(spec);
		dropped = dropped || !strncmp(s, "drop", 4);
	}
	if (below(3) == 0) {
		snprintf(spec, sizeof(spec), "seed=%llu,%s", (unsigned long long)below(1u << 30),
			 catalog[below(sizeof(catalog) / sizeof(catalog[0]))]);
		note("catalog faults \"%s\"", spec);
		must(sqlite_fault_set(vfs, spec, NULL, 0), "sqlite_fault_set");
	}
}

/*
 * The drive is well again: after a commit everything must be as if nothing had been. Where it has
 * dropped what it was given, blocks that had left memory may be gone: then no commit may succeed,
 * and the last one is what is there.
 */
static void cure(void)
{
	int64_t r;

	drive_faults("seed=1,journal,delay=0us:0");
	must(sqlite_fault_set(vfs, "", NULL, 0), "sqlite_fault_set");
	want_faults = false;
	if (dropped) {
		r = drive_op(ENGINE_SYNC, 0, 0, 0, 0, NULL);
		if (!r && !stepping)
			all_is_durable();
		note("sync after drops: %s", strerror((int)-r));
		stats_dropped += r != 0;
		power_cut();
	}
	if (client.s && stepping) {
		/* The step could not be finished: leases may be out, so its process ends. */
		session_end();
		return;
	}
	note("commit after the cure");
	r = drive_op(ENGINE_SYNC, 0, 0, 0, 0, NULL);
	must(r, "a commit after the cure");
	all_is_durable();
}

static void some_op(void)
{
	uint64_t k = below(100);

	if (faulty && below(12) == 0) {
		if (want_faults)
			cure();
		else
			random_faults();
	}
	if (!client.s) {
		if (k < 40)
			plain_op();
		else
			session_begin();
		return;
	}
	if (k < 12) {
		register_new();
	} else if (k < 50) {
		if (do_step() && stepping)
			session_end();
	} else if (k < 70) {
		plain_op();
	} else if (k < 85) {
		do_commit();
	} else if (k < 88) {
		do_rollback();
	} else if (k < 92) {
		do_remove();
	} else if (k < 95) {
		session_end();
	}
}

static void life(void)
{
	unsigned long ops;

	if (setjmp(cut_jump)) {
		stats_cuts += was_cut;
		stats_died += died;
		drive_abandon();
	} else {
		faulty = with_faults && below(3) == 0;
		if (below(4) == 0)
			drive_die_in_sync(1 + (unsigned int)below(10));
		drive_cut_at(below(below(2) ? 60 : 400), below(3) ? (unsigned int)below(3000) : 0);
		ops = 30 + below(60);
		for (unsigned long i = 0; i < ops; i++)
			some_op();
		/* The cut was planned too late: a clean end, an end without a commit, or a kill. */
		cut_planned = false;
		if (want_faults)
			cure();
		if (below(2)) {
			int64_t r;
			bool was_torn = stepping;

			note("the end, with a commit");
			client_close();
			r = engine_close(e, true);
			e = NULL;
			died = sqlite_fault_is_dead(vfs);
			sqlite_fault_revive(vfs);
			if (died) {
				note("the process died in a sync of its end");
				stats_died++;
			} else {
				must(r, "engine_close");
				if (!was_torn && hist[nhist - 1].label != STEP_NONE)
					durable_label(hist[nhist - 1].label);
				plain_is_durable();
			}
		} else {
			note("killed");
			drive_abandon();
		}
	}
	want_faults = dropped = false;
	must(sqlite_fault_set(vfs, "", NULL, 0), "sqlite_fault_set");
	stepping = false;
	fsck();
	drive_open(dir, &opts);
	look("after it");
}

static void chain(uint64_t s, unsigned long cuts, const char *where)
{
	seed = rng = s;
	snprintf(dir, sizeof(dir), "%s/momentfs-power-XXXXXX", where);
	if (!mkdtemp(dir))
		die("mkdtemp %s: %s", dir, strerror(errno));
	drive_folder = dir;
	memset(params, 0, sizeof(params));
	memset(files, 0, sizeof(files));
	memset(&hist[0], 0, sizeof(hist[0]));
	hist[0].label = STEP_NONE;
	nhist = 1;
	next_label = 1;
	next_id = 0;
	drive_open(dir, &opts);
	for (unsigned long i = 0; i < cuts; i++) {
		alarm(300);
		life();
	}
	must(engine_close(e, true), "engine_close");
	e = NULL;
	drive_remove();
}

int main(int argc, char **argv)
{
	static const struct option o[] = {{"seed", 1, NULL, 's'},      {"cuts", 1, NULL, 'c'},
					  {"dir", 1, NULL, 'd'},       {"io", 1, NULL, 'i'},
					  {"no-faults", 0, NULL, 'n'}, {"verbose", 0, NULL, 'v'},
					  {NULL, 0, NULL, 0}};
	const char *where = getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp";
	uint64_t first = (uint64_t)time(NULL) << 16 ^ (uint64_t)getpid();
	const char *full = getenv("MOMENT_CRASH");
	unsigned long cuts = full && !strcmp(full, "full") ? 3000 : 200;
	unsigned int jobs, job = 0;
	int ch, io = -1;

	while ((ch = getopt_long(argc, argv, "", o, NULL)) != -1) {
		if (ch == 's')
			first = strtoull(optarg, NULL, 0);
		else if (ch == 'c')
			cuts = strtoul(optarg, NULL, 0);
		else if (ch == 'd')
			where = optarg;
		else if (ch == 'i')
			io = strcmp(optarg, "threads") ? IO_AUTO : IO_THREADS;
		else if (ch == 'n')
			with_faults = false;
		else if (ch == 'v')
			verbose = true;
		else
			return 2;
	}
	jobs = cuts > 1000 ? DRIVE_JOBS : 1;
	drive_init();
	if (jobs > 1)
		where = drive_jobs(where, &job);
	for (unsigned long done = 0, n = 0; done < cuts; done += LIVES, n++) {
		if (n % jobs != job)
			continue;
		opts = (struct engine_opts){.ram = 24ull * BLOCK,
					    .block = BLOCK,
					    .size = n % 4 == 1 ? 8u << 20 : 0, /* gets full */
					    .commit_seconds = n % 3 ? ENGINE_COMMIT_OFF : 1,
					    .io = io >= 0 ? (enum io_engine)io
						  : n % 2 ? IO_THREADS
							  : IO_AUTO};
		printf("seed %llu, io=%s%s\n", (unsigned long long)(first + n),
		       opts.io == IO_THREADS ? "threads" : "auto",
		       opts.size ? ", a small pool" : "");
		fflush(stdout);
		chain(first + n, cuts - done < LIVES ? cuts - done : LIVES, where);
	}
	printf("%llu cuts, %llu of them with a later step than the last known one committed; %llu commits, "
	       "%llu rollbacks, %llu torn steps, %llu times faults, %llu times blocks lost, %llu times no space, "
	       "%llu deaths in a sync\n",
	       (unsigned long long)stats_cuts, (unsigned long long)stats_under_way,
	       (unsigned long long)stats_commits, (unsigned long long)stats_rollbacks,
	       (unsigned long long)stats_torn, (unsigned long long)stats_faults,
	       (unsigned long long)stats_dropped, (unsigned long long)stats_full,
	       (unsigned long long)stats_died);
	return 0;
}
