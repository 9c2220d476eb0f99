/* SPDX-License-Identifier: Apache-2.0 */
/*
 * status.c - what the engine says about itself: JSON for programs, Prometheus text for a scraper.
 *
 * The figures are collected on the loop thread in one go, so they belong together.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/engine_impl.h"
#include "engine/names.h"

void status_string(FILE *f, const char *s)
{
	size_t len = strlen(s);

	fputc('"', f);
	while (len) {
		unsigned char ch = (unsigned char)*s;
		size_t n = names_utf8_len(s, len);

		if (ch == '"' || ch == '\\')
			fprintf(f, "\\%c", ch);
		else if (ch < 0x20 || ch == 0x7f)
			fprintf(f, "\\u%04x", ch);
		else if (n)
			fwrite(s, 1, n, f);
		else
			fputs("\\ufffd", f);
		n = n ? n : 1;
		s += n;
		len -= n;
	}
	fputc('"', f);
}

#define U(x) ((unsigned long long)(x))

static void put_step(FILE *f, const char *key, uint64_t step)
{
	if (step == STEP_NONE)
		fprintf(f, "\"%s\":null", key);
	else
		fprintf(f, "\"%s\":%llu", key, U(step));
}

static void put_reason(FILE *f, const char *key, const char *text)
{
	fprintf(f, "\"%s\":", key);
	status_string(f, text ? text : "");
}

static void put_errors(struct engine *e, FILE *f)
{
	uint64_t first = e->nerrors > ENGINE_ERRORS ? e->nerrors - ENGINE_ERRORS : 0;

	fprintf(f, "\"errors\":{\"count\":%llu,\"uncured_blocks\":%u,\"last\":[", U(e->nerrors),
		e->c.error_blocks);
	for (uint64_t i = first; i < e->nerrors; i++) {
		const struct engine_error *x = &e->errors[i % ENGINE_ERRORS];

		fprintf(f, "%s{\"time\":%.3f,\"what\":", i > first ? "," : "",
			(double)x->time_ns / 1e9);
		status_string(f, x->what);
		fputs(",\"error\":", f);
		status_string(f, strerror(-x->err));
		if (x->ino) {
			fputs(",\"file\":", f);
			status_string(f, x->path);
			fprintf(f, ",\"offset\":%llu,\"length\":%llu", U(x->off), U(x->len));
		}
		fputc(',', f);
		put_step(f, "step", x->step);
		fputc('}', f);
	}
	fputs("]}", f);
}

/* What both texts are made of. */
struct figures {
	struct arena_info ai;
	struct io_info io;
	struct pool_info pi;
	struct commit_info ci;
	struct ns_counts nc;
	uint64_t rows;	/* bytes of memory of the catalog */
	uint64_t slots; /* and of the data side: files, slots, blocks, what a commit collects */
};

/* Memory that goes by what is stored, beside the RAM tier. */
static uint64_t memory_bytes(const struct figures *g)
{
	return g->nc.memory + g->rows + g->slots;
}

static void figures_get(struct engine *e, struct figures *g)
{
	arena_get_info(e->arena, &g->ai);
	io_get_info(e->io, &g->io);
	pool_get_info(e->pool, &g->pi);
	commit_get_info(&e->c, &g->ci);
	ns_count(e->c.ns, &g->nc);
	g->rows = catalog_memory(e->cat);
	g->slots = e->c.heap + u64map_heap(&e->c.files) + commit_memory(&e->c);
}

struct out {
	struct engine *e;
	FILE *f;
};

static void collect(void *arg)
{
	struct out *o = arg;
	struct engine *e = o->e;
	struct cache *c = &e->c;
	FILE *f = o->f;
	struct figures g;
	uint64_t cached = policy_bytes(c->policy, POLICY_WHOLE) +
			  policy_bytes(c->policy, POLICY_SMALL);

	figures_get(e, &g);
	fputs("{\"backing\":", f);
	status_string(f, e->path);
	fprintf(f, ",\"pid\":%ld,\"block_bytes\":%u,\"readonly\":%s,\"uptime_seconds\":%.1f",
		(long)getpid(), c->block, c->readonly ? "true" : "false",
		(double)(loop_now_ns() - e->start_ns) / 1e9);
	fprintf(f,
		",\"ram\":{\"bytes\":%llu,\"used_bytes\":%llu,\"cached_bytes\":%llu,\"dirty_bytes\":%llu,"
		"\"leased_bytes\":%llu,\"huge_bytes\":%llu,\"chunks\":%u,\"chunks_free\":%u,"
		"\"chunks_small\":%u,\"chunks_small_max\":%u,\"window_bytes\":%llu,",
		U(g.ai.size), U(g.ai.used), U(cached), U(c->dirty_bytes), U(c->leased), U(g.ai.huge),
		g.ai.chunks, g.ai.chunks_free, g.ai.chunks_small, g.ai.small_max, U(c->window));
	put_reason(f, "pages", g.ai.kind);
	fputc(',', f);
	put_reason(f, "pages_reason", g.ai.reason);
	fprintf(f, ",\"registered\":%s,", g.io.registered ? "true" : "false");
	put_reason(f, "registered_reason", g.io.registered_reason);
	fprintf(f,
		"},\"memory\":{\"files\":%llu,\"bytes\":%llu,\"names_bytes\":%llu,\"rows_bytes\":%llu,"
		"\"slots_bytes\":%llu",
		U(g.nc.inodes), U(memory_bytes(&g)), U(g.nc.memory), U(g.rows), U(g.slots));
	fputs("},\"io\":{", f);
	put_reason(f, "engine", g.io.engine);
	fputc(',', f);
	put_reason(f, "engine_reason", g.io.engine_reason);
	fprintf(f, ",\"direct\":%s,", g.io.direct ? "true" : "false");
	put_reason(f, "direct_reason", g.io.direct_reason);
	fprintf(f,
		",\"align\":%u,\"reads\":%llu,\"read_bytes\":%llu,\"writes\":%llu,\"write_bytes\":%llu,"
		"\"syncs\":%llu,\"errors\":%llu,\"retries\":%llu,\"in_flight\":%llu,"
		"\"read_seconds\":%.3f,\"write_seconds\":%.3f}",
		g.io.align, U(g.io.reads), U(g.io.read_bytes), U(g.io.writes), U(g.io.write_bytes),
		U(g.io.syncs), U(g.io.errors), U(g.io.retries), U(g.io.inflight),
		(double)g.io.read_ns / 1e9, (double)g.io.write_ns / 1e9);
	fprintf(f,
		",\"pool\":{\"bytes\":%llu,\"limit_bytes\":%llu,\"used_bytes\":%llu,\"free_bytes\":%llu,"
		"\"available_bytes\":%llu,\"unreserved_bytes\":%llu,\"growths\":%llu,\"reserves\":%s,",
		U(g.pi.size), U(g.pi.limit), U(g.pi.used), U(g.pi.free), U(g.pi.available),
		U(g.pi.unreserved), U(g.pi.grown), g.pi.reserves ? "true" : "false");
	put_reason(f, "host_fs", g.pi.host_fs);
	fprintf(f,
		"},\"catalog\":{\"files\":%llu,\"directories\":%llu,\"bytes\":%llu,\"ballast_bytes\":%llu}",
		U(g.nc.files), U(g.nc.dirs), U(g.nc.bytes), U(catalog_ballast(e->cat)));
	fprintf(f,
		",\"commit\":{\"sequence\":%llu,\"count\":%llu,\"time\":%.3f,\"running\":%s,"
		"\"pending_blocks\":%llu,\"last_bytes\":%llu,\"last_seconds\":%.6f,\"error\":",
		U(g.ci.seq), U(g.ci.count), (double)g.ci.time_ns / 1e9,
		g.ci.running ? "true" : "false", U(g.ci.pending), U(g.ci.last_bytes),
		(double)g.ci.last_ns / 1e9);
	if (g.ci.error)
		status_string(f, strerror(-g.ci.error));
	else
		fputs("null", f);
	fprintf(f, ",\"failures\":%u,\"failing_seconds\":%.1f,\"steps_refused\":%s,\"cause\":",
		g.ci.failures,
		g.ci.failures ? (double)(loop_now_ns() - g.ci.failing_ns) / 1e9 : 0.0,
		commit_stalled(c) ? "true" : "false");
	if (g.ci.failures)
		status_string(f, g.ci.cause);
	else
		fputs("null", f);
	fprintf(f, ",\"interval_seconds\":%d}", e->opts.commit_seconds);
	fputs(",\"step\":{", f);
	put_step(f, "committed", g.ci.step);
	fputc(',', f);
	put_step(f, "boundary", commit_boundary(c));
	fputc(',', f);
	put_step(f, "open", e->open_step);
	fprintf(f, ",\"torn\":%s,\"bracket\":%s}", e->torn || e->telling ? "true" : "false",
		e->plain ? "true" : "false");
	fputs(",\"sessions\":", f);
	session_status(e, f);
	fprintf(f,
		",\"cache\":{\"hits\":%llu,\"misses\":%llu,\"evictions\":%llu,\"writebacks\":%llu,"
		"\"prefetches\":%llu,\"prefetch_hits\":%llu,\"reading\":%u,\"writing\":%u,"
		"\"visits\":%llu}",
		U(c->stats.hits), U(c->stats.misses), U(c->stats.evictions), U(c->stats.writebacks),
		U(c->stats.prefetches), U(c->stats.prefetch_hits), c->reading, c->writing,
		U(policy_visits(c->policy)));
	fprintf(f, ",\"served\":{\"ops\":%llu,\"read_bytes\":%llu,\"write_bytes\":%llu}",
		U(c->stats.ops), U(c->stats.op_read_bytes), U(c->stats.op_write_bytes));
	fprintf(f,
		",\"scrub\":{\"running\":%s,\"done_bytes\":%llu,\"total_bytes\":%llu,\"extents\":%llu,"
		"\"damaged\":%llu,\"finished\":%.3f},",
		e->scrub.running ? "true" : "false", U(e->scrub.done), U(e->scrub.total),
		U(e->scrub.extents), U(e->scrub.damaged), (double)e->scrub.finished_ns / 1e9);
	oldest_status(e, f);
	fputc(',', f);
	put_errors(e, f);
	fputc('}', f);
}

static char *collected(struct engine *e, void (*fn)(void *))
{
	char *text = NULL;
	size_t len;
	struct out o = {.e = e, .f = open_memstream(&text, &len)};

	if (!o.f)
		return NULL;
	loop_call(e->loop, fn, &o);
	if (fclose(o.f)) {
		free(text);
		return NULL;
	}
	return text;
}

char *engine_status_json(struct engine *e)
{
	return collected(e, collect);
}

static void metric(FILE *f, const char *name, const char *type, const char *help, double v)
{
	fprintf(f, "# HELP momentfs_%s %s\n# TYPE momentfs_%s %s\nmomentfs_%s %.17g\n", name, help,
		name, type, name, v);
}

static void collect_stats(void *arg)
{
	struct out *o = arg;
	struct engine *e = o->e;
	struct cache *c = &e->c;
	FILE *f = o->f;
	struct figures g;

	figures_get(e, &g);
	metric(f, "ram_bytes", "gauge", "Size of the RAM tier.", (double)g.ai.size);
	metric(f, "ram_used_bytes", "gauge", "Bytes of the RAM tier that hold blocks.",
	       (double)g.ai.used);
	metric(f, "memory_bytes", "gauge",
	       "Bytes of memory beside the RAM tier that go by the number of files and blocks.",
	       (double)memory_bytes(&g));
	metric(f, "pool_bytes", "gauge", "Size of the pool file.", (double)g.pi.size);
	metric(f, "pool_used_bytes", "gauge", "Bytes of the pool in use.", (double)g.pi.used);
	metric(f, "pool_available_bytes", "gauge", "Bytes that can still be stored.",
	       (double)g.pi.available);
	metric(f, "read_bytes_total", "counter", "Bytes read from the drive.",
	       (double)g.io.read_bytes);
	metric(f, "written_bytes_total", "counter", "Bytes written to the drive.",
	       (double)g.io.write_bytes);
	metric(f, "io_errors_total", "counter", "Failed requests at the drive.",
	       (double)g.io.errors);
	metric(f, "cache_hits_total", "counter", "Blocks found in the RAM tier.",
	       (double)c->stats.hits);
	metric(f, "cache_misses_total", "counter", "Blocks not found in the RAM tier.",
	       (double)c->stats.misses);
	metric(f, "cache_evictions_total", "counter", "Blocks evicted.",
	       (double)c->stats.evictions);
	metric(f, "checksum_errors_total", "counter", "Blocks whose checksum was wrong.",
	       (double)c->stats.checksum_errors);
	metric(f, "uncured_blocks", "gauge", "Dirty blocks whose last write failed.",
	       (double)c->error_blocks);
	metric(f, "commits_total", "counter", "Durable commits since the mount.",
	       (double)g.ci.count);
	metric(f, "commit_failures", "gauge", "Commits that have failed in a row.",
	       (double)g.ci.failures);
	metric(f, "commit_last_seconds", "gauge", "Duration of the last commit.",
	       (double)g.ci.last_ns / 1e9);
	metric(f, "commit_time_seconds", "gauge",
	       "When the last commit became durable (Unix time).", (double)g.ci.time_ns / 1e9);
	if (g.ci.step != STEP_NONE)
		metric(f, "committed_step", "gauge", "Step of the last commit.", (double)g.ci.step);
	metric(f, "step_torn", "gauge", "1 if a step was begun and its process died.",
	       e->torn || e->telling ? 1 : 0);
}

char *engine_stats_text(struct engine *e)
{
	return collected(e, collect_stats);
}

struct query {
	struct engine *e;
	void *out;
};

static void query_statfs(void *arg)
{
	struct query *q = arg;
	struct engine_statfs *s = q->out;
	struct pool_info pi;
	struct ns_counts nc;

	pool_get_info(q->e->pool, &pi);
	ns_count(q->e->c.ns, &nc);
	s->block = MOMENT_UNIT;
	s->total = pi.used + pi.available;
	s->free = pi.available;
	s->files = nc.files + nc.dirs;
}

void engine_get_statfs(struct engine *e, struct engine_statfs *s)
{
	struct query q = {e, s};

	loop_call(e->loop, query_statfs, &q);
}

static void query_moved(void *arg)
{
	struct query *q = arg;
	struct io_info io;
	struct commit_info ci;

	io_get_info(q->e->io, &io);
	commit_get_info(&q->e->c, &ci);
	*(uint64_t *)q->out = io.reads + io.writes + io.syncs + io.errors + io.retries +
			      io.read_bytes + io.write_bytes + q->e->c.stats.ops + ci.count +
			      ci.pending + ci.running;
}

uint64_t engine_moved(struct engine *e)
{
	uint64_t sum;
	struct query q = {e, &sum};

	loop_call(e->loop, query_moved, &q);
	return sum;
}

static void query_step(void *arg)
{
	struct query *q = arg;
	struct engine *e = q->e;
	struct engine_step_state *s = q->out;
	struct commit_info ci;

	commit_get_info(&e->c, &ci);
	s->committed = ci.step;
	s->open = e->open_step;
	s->boundary = commit_boundary(&e->c);
	s->torn = e->torn || e->telling;
	s->error = ci.error ? ci.error : e->c.error_blocks ? -EIO : 0;
}

void engine_get_step(struct engine *e, struct engine_step_state *s)
{
	struct query q = {e, s};

	loop_call(e->loop, query_step, &q);
}
