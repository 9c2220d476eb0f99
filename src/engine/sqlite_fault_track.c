/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sqlite_fault_track.c - see sqlite_fault_impl.h. For tests: no memory is the end.
 */
#include "engine/sqlite_fault_impl.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct op {
	struct list link;
	bool truncate;
	bool doubtful;	   /* a sync has failed since: no later one makes it durable */
	uint64_t off, len; /* of a truncation: off is the new size */
	uint8_t data[];
};

uint64_t fault_random(uint64_t *rng)
{
	*rng ^= *rng << 13;
	*rng ^= *rng >> 7;
	*rng ^= *rng << 17;
	return *rng;
}

void fault_seed(uint64_t *rng, uint64_t seed)
{
	*rng = (seed + 1) * 0x9e3779b97f4a7c15u | 1;
}

static void op_free(struct op *op)
{
	list_remove(&op->link);
	free(op);
}

/* --- contents ------------------------------------------------------------------------------- */

static void content_free(struct content *c)
{
	free(c->p);
	*c = (struct content){0};
}

/* For tests: no memory is the end. */
static void content_resize(struct content *c, uint64_t len)
{
	if (len > c->cap) {
		c->cap = round_up_u64(len, 65536);
		c->p = realloc(c->p, c->cap);
		if (!c->p)
			abort();
	}
	if (len > c->len)
		memset(c->p + c->len, 0, len - c->len);
	c->len = len;
}

static void content_write(struct content *c, const void *p, uint64_t len, uint64_t off)
{
	if (off + len > c->len)
		content_resize(c, off + len);
	if (len)
		memcpy(c->p + off, p, len);
}

static void content_read_file(struct content *c, const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	struct stat st;

	if (fd < 0)
		return;
	if (fstat(fd, &st) == 0) {
		content_resize(c, (uint64_t)st.st_size);
		if (pread(fd, c->p, c->len, 0) != (ssize_t)c->len)
			abort();
	}
	close(fd);
}

static void content_write_file(const struct content *c, const char *path)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);

	if (fd < 0)
		return;
	if (ftruncate(fd, (off_t)c->len) < 0 ||
	    pwrite(fd, c->p ? (const void *)c->p : "", c->len, 0) != (ssize_t)c->len)
		abort();
	close(fd);
}

static void op_apply(struct content *c, const struct op *op)
{
	if (op->truncate)
		content_resize(c, op->off);
	else
		content_write(c, op->data, op->len, op->off);
}

/* --- tracked files -------------------------------------------------------------------------- */

static struct tracked *tracked_find(struct list *files, const char *path)
{
	list_for_each(l, files)
	{
		struct tracked *t = list_entry(l, struct tracked, link);

		if (!strcmp(t->path, path))
			return t;
	}
	return NULL;
}

struct tracked *tracked_get(struct list *files, const char *path, bool exists)
{
	struct tracked *t = tracked_find(files, path);

	if (t)
		return t;
	t = calloc(1, sizeof(*t));
	if (!t || !(t->path = strdup(path)))
		abort();
	list_init(&t->ops);
	t->exists = exists;
	if (exists)
		content_read_file(&t->durable, path);
	list_push_back(files, &t->link);
	return t;
}

static void ops_drop(struct tracked *t)
{
	while (!list_empty(&t->ops)) {
		op_free(list_first(&t->ops, struct op, link));
	}
}

static void tracked_free(struct tracked *t)
{
	list_remove(&t->link);
	ops_drop(t);
	content_free(&t->durable);
	content_free(&t->before);
	free(t->path);
	free(t);
}

void tracked_put(struct tracked *t)
{
	if (!t->opens && !t->entry_pending && list_empty(&t->ops))
		tracked_free(t);
}

static struct op *op_new(bool truncate, uint64_t off, const void *p, uint64_t len)
{
	struct op *op = malloc(sizeof(*op) + len);

	if (!op)
		abort();
	op->truncate = truncate;
	op->doubtful = false;
	op->off = off;
	op->len = len;
	if (len)
		memcpy(op->data, p, len);
	return op;
}

static void tracked_op(struct tracked *t, bool truncate, uint64_t off, const void *p, uint64_t len)
{
	list_push_back(&t->ops, &op_new(truncate, off, p, len)->link);
}

void tracked_write(struct tracked *t, uint64_t off, const void *p, uint64_t len)
{
	tracked_op(t, false, off, p, len);
}

void tracked_truncate(struct tracked *t, uint64_t size)
{
	tracked_op(t, true, size, NULL, 0);
}

/* A part of `op`, [from, to) of the file, takes its place in the order. */
static void op_part(struct op *op, uint64_t from, uint64_t to)
{
	struct op *part;

	if (from >= to)
		return;
	part = op_new(false, from, op->data + (from - op->off), to - from);
	part->doubtful = true;
	list_push_back(&op->link, &part->link); /* before it */
}

/* `now` is durable: what older, doubtful writes did to the same bytes is of the past. */
static void doubts_settle(struct tracked *t, const struct op *now)
{
	uint64_t lo = now->off, hi = now->truncate ? UINT64_MAX : now->off + now->len;

	list_for_each_safe(l, next, &t->ops)
	{
		struct op *op = list_entry(l, struct op, link);
		uint64_t end = op->off + op->len;

		if (op == now)
			break;
		if (op->off >= hi || end <= lo)
			continue;
		op_part(op, op->off, lo);
		op_part(op, hi, end);
		op_free(op);
	}
}

void tracked_sync(struct tracked *t)
{
	list_for_each_safe(l, next, &t->ops)
	{
		struct op *op = list_entry(l, struct op, link);

		if (op->doubtful)
			continue;
		op_apply(&t->durable, op);
		doubts_settle(t, op);
		op_free(op);
	}
}

/* Sizes are the host file system's own affair: it has a journal, or stops. */
void tracked_doubt(struct tracked *t)
{
	list_for_each(l, &t->ops)
	{
		struct op *op = list_entry(l, struct op, link);

		op->doubtful = !op->truncate;
	}
}

/* Its directory entry is about to change: remembers what was durable under this name. */
static void entry_changes(struct tracked *t)
{
	if (t->entry_pending)
		return;
	t->entry_pending = true;
	t->existed = t->exists;
	t->before = t->durable;
	t->durable = (struct content){0};
	if (t->existed)
		content_write(&t->durable, t->before.p, t->before.len, 0);
}

void tracked_dirsync(struct list *files)
{
	list_for_each_safe(l, next, files)
	{
		struct tracked *t = list_entry(l, struct tracked, link);

		t->entry_pending = false;
		content_free(&t->before);
		tracked_put(t);
	}
}

void tracked_made(struct tracked *t)
{
	entry_changes(t);
	t->exists = true;
}

void tracked_removed(struct tracked *t)
{
	entry_changes(t);
	t->exists = false;
	ops_drop(t);
	content_resize(&t->durable, 0);
}

void tracked_forget_all(struct list *files)
{
	while (!list_empty(files))
		tracked_free(list_first(files, struct tracked, link));
}

/* --- the cut -------------------------------------------------------------------------------- */

static void survive(uint64_t *rng, struct content *c, const struct op *op)
{
	if (op->truncate) {
		if (fault_random(rng) >> 63)
			content_resize(c, op->off);
		return;
	}
	for (uint64_t at = 0; at < op->len;) {
		uint64_t n = min_u64(FAULT_SECTOR - (op->off + at) % FAULT_SECTOR, op->len - at);

		if (fault_random(rng) >> 63)
			content_write(c, op->data + at, n, op->off + at);
		at += n;
	}
}

static void cut_file(uint64_t *rng, struct tracked *t)
{
	/* Of an entry made or removed: the old state, or the new one, or what is between. */
	unsigned int fate = t->entry_pending ? fault_random(rng) >> 62 : 3;

	if (fate == 0) {
		if (t->existed)
			content_write_file(&t->before, t->path);
		else
			unlink(t->path);
	} else if (!t->exists || (fate == 1 && t->existed)) {
		unlink(t->path);
	} else {
		list_for_each(l, &t->ops)
		{
			survive(rng, &t->durable, list_entry(l, struct op, link));
		}
		content_write_file(&t->durable, t->path);
	}
}

void tracked_cut(struct list *files, uint64_t *rng)
{
	list_for_each(l, files)
	{
		cut_file(rng, list_entry(l, struct tracked, link));
	}
}
