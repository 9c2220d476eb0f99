/* SPDX-License-Identifier: Apache-2.0 */
/*
 * state.c - the content of single arrays: read, replace, map.
 *
 * Reading and writing lease a few blocks at a time. Where the backing is mounted, mapping is the
 * kernel's own mmap of the file; elsewhere it is anonymous memory filled by reading and then made
 * read-only.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/names.h"
#include "lib/error.h"
#include "lib/flow.h"
#include "lib/session.h"

#define AT_A_TIME 16 /* blocks */

struct span {
	struct param *p;
	uint32_t role;
	uint64_t off, len; /* bytes */
	char *buf;	   /* read into, or written from */
	bool write;
};

static int span_of(struct moment_session *s, uint32_t param, uint32_t role, uint64_t first,
		   uint64_t numel, struct span *sp)
{
	struct param *p = session_param(s, param);

	if (!p)
		return -EINVAL;
	if (role >= MOMENT_ROLES || p->dtype[role] == 0xff)
		return err_set(-EINVAL, "parameter %s has no array %u", p->name, role);
	if (first > p->numel || numel > p->numel - first)
		return err_set(-EINVAL, "parameter %s: elements %llu to %llu of %llu", p->name,
			       (unsigned long long)first, (unsigned long long)(first + numel),
			       (unsigned long long)p->numel);
	*sp = (struct span){
		.p = p, .role = role, .off = first * p->itemsize, .len = numel * p->itemsize};
	return 0;
}

/* The same, to be read into or written from buf. */
static int span_to(struct moment_session *s, uint32_t param, uint32_t role, uint64_t first,
		   uint64_t numel, const void *buf, struct span *sp)
{
	int res = span_of(s, param, role, first, numel, sp);

	if (res == 0 && numel && !buf)
		res = err_set(-EINVAL, "parameter %s: no buffer (NULL) for %llu elements",
			      sp->p->name, (unsigned long long)numel);
	sp->buf = (char *)buf;
	return res;
}

/* Copies between block `b` (memory m) and the buffer. */
static void span_copy(const struct moment_session *s, const struct span *sp, uint64_t b,
		      const struct path_mem *m)
{
	uint64_t start = b * s->path->block, from = start > sp->off ? start : sp->off;
	uint64_t end = start + m->len, to = sp->off + sp->len;

	if (to > end)
		to = end;
	if (from >= to)
		return;
	if (sp->write)
		memcpy((char *)m->ptr + (from - start), sp->buf + (from - sp->off), to - from);
	else
		memcpy(sp->buf + (from - sp->off), (char *)m->ptr + (from - start), to - from);
}

static int span_run(struct moment_session *s, void *arg)
{
	const struct span *sp = arg;
	struct moment_range r[2 * AT_A_TIME];
	struct path_mem mem[AT_A_TIME];
	struct path_ask ask = {.r = r, .mem = mem};
	uint64_t block = s->path->block, b, last, most = flow_budget(s) / block;
	uint32_t i;
	int res = 0;

	if (sp->len == 0)
		return 0;
	if (most > AT_A_TIME)
		most = AT_A_TIME;
	if (most == 0)
		most = 1;
	b = sp->off / block;
	last = (sp->off + sp->len - 1) / block;
	for (;;) {
		uint32_t n = b > last ? 0 : (uint32_t)(last - b + 1 < most ? last - b + 1 : most);

		for (i = 0; i < n; i++)
			r[ask.n_release + i] =
				(struct moment_range){.file = sp->p->file[sp->role],
						      .first = (uint32_t)b + i,
						      .count = 1,
						      .flags = sp->write ? MOMENT_RANGE_WRITE : 0};
		ask.n_lease = n;
		if (n == 0 && ask.n_release == 0)
			break;
		res = s->path->ops->ask(s->path, &ask);
		if (res == 0)
			res = s->path->ops->wait(s->path, &ask);
		if (res < 0)
			break;
		for (i = 0; i < n; i++) {
			span_copy(s, sp, b + i, &mem[i]);
			r[i] = r[ask.n_release + i];
			r[i].flags = 0;
		}
		if (sp->write && n)
			s->touched = true;
		ask.n_release = n;
		b += n;
	}
	free(ask.scratch);
	return res;
}

int moment_read_state(struct moment_session *s, uint32_t param, uint32_t role, uint64_t first,
		      uint64_t numel, void *buf)
{
	struct span sp;
	int res = session_enter(s);

	if (res < 0)
		return res;
	res = span_to(s, param, role, first, numel, buf, &sp);
	if (res == 0)
		res = span_run(s, &sp);
	return session_leave(s, res);
}

int moment_write_state(struct moment_session *s, uint32_t param, uint32_t role, uint64_t first,
		       uint64_t numel, const void *buf)
{
	struct span sp;
	int res = session_enter(s);

	if (res < 0)
		return res;
	res = span_to(s, param, role, first, numel, buf, &sp);
	if (res == 0) {
		sp.write = true;
		res = step_within(s, span_run, &sp);
		if (res < 0 && s->state == STEP_OPEN && s->touched)
			s->state = STEP_TORN;
	}
	return session_leave(s, res);
}

/* ---- mapping ---------------------------------------------------------------------------- */

static int map_file(struct moment_session *s, const struct span *sp, const void **out)
{
	static const char *const names[] = {"exp_avg", "exp_avg_sq", "master", "max_exp_avg_sq"};
	char dir[NAMES_MAX + 1], *path;
	struct stat st;
	void *map;
	int fd, res;

	if (names_encode(sp->p->name, strlen(sp->p->name), dir) < 0)
		return -ENOENT;
	if (asprintf(&path, "%s/params/%s/%s", s->path->mount, dir, names[sp->role]) < 0)
		return -ENOMEM;
	fd = open(path, O_RDONLY | O_CLOEXEC);
	free(path);
	if (fd < 0)
		return -errno;
	res = fstat(fd, &st) < 0 ? -errno : (uint64_t)st.st_size < sp->len ? -ENOENT : 0;
	if (res == 0) {
		map = mmap(NULL, sp->len, PROT_READ, MAP_SHARED, fd, 0);
		res = map == MAP_FAILED ? -errno : 0;
		*out = map;
	}
	close(fd);
	return res;
}

static int map_copy(struct moment_session *s, struct span *sp, const void **out)
{
	int res;

	sp->buf = mmap(NULL, sp->len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (sp->buf == MAP_FAILED)
		return err_set(-errno, "no memory for %s of %s", err_bytes(sp->len), sp->p->name);
	res = span_run(s, sp);
	if (res < 0) {
		munmap(sp->buf, sp->len);
		return res;
	}
	mprotect(sp->buf, sp->len, PROT_READ);
	*out = sp->buf;
	return 0;
}

int moment_map_state(struct moment_session *s, uint32_t param, uint32_t role, const void **out,
		     size_t *bytes)
{
	static const char empty[8];
	struct param *p;
	struct span sp;
	int res = session_enter(s);

	if (res < 0)
		return res;
	p = session_param(s, param);
	res = p ? span_of(s, param, role, 0, p->numel, &sp) : -EINVAL;
	if (res < 0)
		return session_leave(s, res);
	*bytes = sp.len;
	*out = empty;
	if (sp.len && (!s->path->mount || map_file(s, &sp, out) < 0))
		res = map_copy(s, &sp, out);
	return session_leave(s, res);
}

int moment_unmap_state(const void *map, size_t bytes)
{
	if (bytes && munmap((void *)map, bytes) < 0)
		return err_set(-errno, "not a mapped state");
	return 0;
}
