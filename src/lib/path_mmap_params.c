/* SPDX-License-Identifier: Apache-2.0 */
/*
 * path_mmap_params.c - parameters through the mount: directories, files and extended attributes,
 * made so that a later session of any kind takes them for its own.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "engine/names.h"
#include "lib/error.h"
#include "lib/path_mmap.h"

static const char *const role_names[] = {"exp_avg", "exp_avg_sq", "master", "max_exp_avg_sq"};
static const char *const dtype_names[] = {"float32", "bfloat16", "float16", "float64"};
static const char *const tier_names[] = {"auto", "ram", "nvme"};

/* ---- attributes ------------------------------------------------------------------------- */

static int attr_get(struct mm *m, const char *rel, const char *name, char *buf, size_t cap)
{
	char *full;
	ssize_t n;

	if (asprintf(&full, "%s/%s", m->path.mount, rel) < 0)
		return -ENOMEM;
	n = getxattr(full, name, buf, cap - 1);
	free(full);
	if (n < 0)
		return -errno;
	buf[n] = 0;
	return 0;
}

static int attr_set(struct mm *m, const char *rel, const char *name, const char *value)
{
	char *full;
	int res = 0;

	if (asprintf(&full, "%s/%s", m->path.mount, rel) < 0)
		return -ENOMEM;
	if (setxattr(full, name, value, strlen(value), 0) < 0)
		res = -errno;
	free(full);
	return res < 0 ? mm_error(m, res, rel) : 0;
}

static uint8_t find_name(const char *const *names, uint8_t n, const char *text)
{
	uint8_t i;

	for (i = 0; i < n; i++)
		if (strcmp(names[i], text) == 0)
			return i;
	return 0xff;
}

/* The numbers in a shape: "2304x768", "[2304, 768]"; none for a scalar. */
static uint32_t shape_parse(const char *text, uint64_t shape[MOMENT_NDIM_MAX])
{
	uint32_t n = 0;

	while (*text && n < MOMENT_NDIM_MAX) {
		char *end;

		if (*text < '0' || *text > '9') {
			text++;
			continue;
		}
		shape[n++] = strtoull(text, &end, 10);
		text = end;
	}
	return n;
}

static void shape_write(char *buf, size_t len, const struct path_param *p)
{
	size_t n = 0;
	uint32_t i;

	n += (size_t)snprintf(buf, len, "[");
	for (i = 0; i < p->ndim && n + 1 < len; i++)
		n += (size_t)snprintf(buf + n, len - n, "%s%llu", i ? "," : "",
				      (unsigned long long)p->shape[i]);
	if (n + 1 < len)
		snprintf(buf + n, len - n, "]");
}

/* What a directory says it is. -ENODATA: no parameter. `p` points into name and shape. */
static int describe(struct mm *m, const char *rel, struct path_param *p, char *name, size_t cap,
		    uint64_t shape[MOMENT_NDIM_MAX])
{
	char text[2048];
	uint32_t role, i;
	int res = attr_get(m, rel, "user.moment.name", name, cap);

	if (res < 0)
		return res;
	*p = (struct path_param){
		.name = name, .numel = 1, .shape = shape, .found = MOMENT_REG_FOUND};
	if (attr_get(m, rel, "user.moment.shape", text, sizeof(text)) == 0)
		p->ndim = shape_parse(text, shape);
	for (i = 0; i < p->ndim; i++)
		p->numel *= shape[i];
	if (attr_get(m, rel, "user.moment.step", text, sizeof(text)) == 0)
		p->step = strtoull(text, NULL, 10);
	for (role = 0; role < MOMENT_ROLES; role++) {
		char *file;
		struct stat st;

		p->dtype[role] = 0xff;
		if (asprintf(&file, "%s/%s", rel, role_names[role]) < 0)
			return -ENOMEM;
		if (fstatat(m->dir, file, &st, 0) == 0)
			p->dtype[role] = attr_get(m, file, "user.moment.dtype", text, sizeof(text))
						 ? MOMENT_F32
						 : find_name(dtype_names, 4, text);
		if (attr_get(m, file, "user.moment.tier", text, sizeof(text)) == 0)
			p->tier = find_name(tier_names, 3, text) % 3;
		free(file);
	}
	return 0;
}

int mm_list(struct path *p, path_list_fn *fn, void *arg)
{
	struct mm *m = mm_of(p);
	int fd = openat(m->dir, "params", O_RDONLY | O_DIRECTORY | O_CLOEXEC), res = 0;
	char *name = malloc(65536), *rel;
	struct dirent *e;
	DIR *d = fd < 0 ? NULL : fdopendir(fd);

	if (!d || !name) {
		res = fd < 0 ? mm_error(m, -errno, "params") : err_set(-ENOMEM, "out of memory");
		goto out;
	}
	while (res == 0 && (e = readdir(d)) != NULL) {
		uint64_t shape[MOMENT_NDIM_MAX];
		struct path_param pp;

		if (e->d_name[0] == '.')
			continue;
		if (asprintf(&rel, "params/%s", e->d_name) < 0) {
			res = err_set(-ENOMEM, "out of memory");
			break;
		}
		if (describe(m, rel, &pp, name, 65536, shape) == 0)
			res = fn(arg, &pp);
		free(rel);
	}
out:
	if (d)
		closedir(d);
	else if (fd >= 0)
		close(fd);
	free(name);
	return res;
}

/* ---- making ----------------------------------------------------------------------------- */

/* How what is there differs from what is wanted: 0 not at all, -EINVAL with the text, -ENODATA not
 * there. */
static int conflicts(struct mm *m, const char *rel, const struct path_param *want, uint64_t *step)
{
	uint64_t shape[MOMENT_NDIM_MAX];
	struct path_param have;
	char *name = malloc(65536);
	uint32_t role;
	int res = name ? describe(m, rel, &have, name, 65536, shape) : -ENOMEM;

	if (res == 0) {
		*step = have.step;
		if (have.numel != want->numel || have.ndim != want->ndim ||
		    (have.ndim && memcmp(shape, want->shape, have.ndim * sizeof(*shape))))
			res = err_set(-EINVAL, "parameter %s is there with another shape",
				      want->name);
		for (role = 0; role < MOMENT_ROLES && res == 0; role++)
			if (have.dtype[role] != want->dtype[role])
				res = err_set(-EINVAL,
					      "parameter %s is there with another type of %s",
					      want->name, role_names[role]);
	}
	free(name);
	return res == -ENOENT ? -ENODATA : res;
}

/* Makes the file, or gives it its length; *out is open and claimed if this succeeds. */
static int make_file(struct mm *m, const char *rel, uint64_t len, bool zero, int *out)
{
	struct stat st;
	int fd, res = mm_open(m, rel, O_CREAT, &fd);

	if (res < 0)
		return res;
	if (zero && ftruncate(fd, 0) < 0)
		res = -errno;
	if (res == 0 && fstat(fd, &st) < 0)
		res = -errno;
	if (res == 0 && (uint64_t)st.st_size != len && ftruncate(fd, (off_t)len) < 0)
		res = -errno;
	if (res == 0 && len && fallocate(fd, 0, 0, (off_t)len) < 0 && errno != EOPNOTSUPP)
		res = -errno;
	if (res == 0) {
		*out = fd;
		return 0;
	}
	mm_close_file(m, fd);
	if (res == -ENOSPC || res == -EDQUOT)
		return err_set(res, "%s: no space for %s: %s are needed, %s are free", rel,
			       err_bytes(len), err_bytes(2 * len), err_bytes(m->path.free));
	return mm_error(m, res, rel);
}

static void drop_dir(struct mm *m, const char *rel)
{
	uint32_t role;
	char *file;

	for (role = 0; role < MOMENT_ROLES; role++) {
		if (asprintf(&file, "%s/%s", rel, role_names[role]) < 0)
			return;
		unlinkat(m->dir, file, 0);
		free(file);
	}
	unlinkat(m->dir, rel, AT_REMOVEDIR);
}

/* Takes over rel and fd (-1: not open yet). */
static int add_file(struct mm *m, char *rel, uint64_t len, int fd, uint32_t *out)
{
	struct mfile *more = realloc(m->file, (m->n_files + 1) * sizeof(*more));

	if (!more) {
		if (fd >= 0)
			mm_close_file(m, fd);
		free(rel);
		return err_set(-ENOMEM, "out of memory");
	}
	m->file = more;
	*out = m->n_files;
	m->file[m->n_files++] = (struct mfile){.rel = rel, .len = len, .fd = fd};
	return mm_map(m, &m->file[*out]);
}

/* What directory and files have in common. */
static int describe_to(struct mm *m, const char *rel, const struct path_param *p)
{
	char text[2048];
	int res = attr_set(m, rel, "user.moment.name", p->name);

	shape_write(text, sizeof(text), p);
	if (res == 0)
		res = attr_set(m, rel, "user.moment.shape", text);
	snprintf(text, sizeof(text), "%llu", (unsigned long long)p->step);
	if (res == 0)
		res = attr_set(m, rel, "user.moment.step", text);
	return res;
}

static int make_param(struct mm *m, struct path_param *p, const char *rel, bool fresh)
{
	bool made = mkdirat(m->dir, rel, 0755) == 0;
	struct mparam *more, *mp;
	uint32_t role;
	int res = made || errno == EEXIST ? 0 : mm_error(m, -errno, rel);

	more = res == 0 ? realloc(m->param, (m->n_params + 1) * sizeof(*more)) : NULL;
	if (!more)
		return res < 0 ? res : err_set(-ENOMEM, "out of memory");
	m->param = more;
	mp = &m->param[m->n_params];
	*mp = (struct mparam){.rel = strdup(rel)};
	p->handle = m->n_params++;
	p->found = made ? MOMENT_REG_CREATED : MOMENT_REG_FOUND;
	for (role = 0; role < MOMENT_ROLES && res == 0; role++) {
		uint64_t len = p->numel * dtype_size(p->dtype[role]);
		int fd = -1;
		char *file;

		mp->file[role] = p->file[role] = UINT32_MAX;
		if (p->dtype[role] == 0xff)
			continue;
		if (asprintf(&file, "%s/%s", rel, role_names[role]) < 0)
			return err_set(-ENOMEM, "out of memory");
		if (!m->readonly)
			res = make_file(m, file, len, fresh && !made, &fd);
		if (res == 0 && !m->readonly)
			res = attr_set(m, file, "user.moment.dtype", dtype_names[p->dtype[role]]);
		if (res == 0 && !m->readonly)
			res = attr_set(m, file, "user.moment.tier", tier_names[p->tier]);
		if (res == 0 && !m->readonly)
			res = describe_to(m, file, p);
		if (res < 0) {
			if (fd >= 0)
				mm_close_file(m, fd);
			free(file);
			break;
		}
		m->path.reserved += 2 * len;
		res = add_file(m, file, len, fd, &p->file[role]);
		mp->file[role] = p->file[role];
	}
	if (m->readonly || res < 0)
		return res;
	res = describe_to(m, rel, p);
	if (res == 0 && p->hyper)
		res = attr_set(m, rel, "user.moment.hyper", p->hyper);
	return res;
}

static int add_one(struct mm *m, struct path_param *p, uint32_t flags)
{
	char dir[NAMES_MAX + 1], rel[NAMES_MAX + 16];
	uint64_t step = 0;
	int res = names_encode(p->name, strlen(p->name), dir);

	if (res < 0)
		return err_set(res, "parameter %.80s: its name cannot be a directory's", p->name);
	snprintf(rel, sizeof(rel), "params/%s", dir);
	res = conflicts(m, rel, p, &step);
	if (res == -ENODATA && (flags & MOMENT_REG_EXIST))
		return err_set(-ENOENT, "parameter %s is not there", p->name);
	if (res == -ENODATA || (res == -EINVAL && (flags & MOMENT_REG_FRESH)))
		res = 0;
	if (res < 0 || (flags & MOMENT_REG_CHECK))
		return res;
	p->step = flags & MOMENT_REG_FRESH ? 0 : step;
	return make_param(m, p, rel, flags & MOMENT_REG_FRESH);
}

int mm_add(struct path *path, struct path_param *pp, size_t n, uint32_t flags)
{
	struct mm *m = mm_of(path);
	uint32_t first = m->n_params;
	char text[1024];
	size_t i, files = 0;
	uint32_t role;
	int res;

	for (i = 0; i < n; i++)
		for (role = 0; role < MOMENT_ROLES; role++)
			files += pp[i].dtype[role] != 0xff;
	res = mm_room_for(m, files);
	for (i = 0; res == 0 && i < n; i++)
		res = add_one(m, &pp[i], flags | MOMENT_REG_CHECK);
	if (flags & MOMENT_REG_CHECK)
		return res;
	for (i = 0; res == 0 && i < n; i++)
		res = add_one(m, &pp[i], flags);
	if (res == 0 || m->readonly)
		return res;
	strncpy(text, err_text(), sizeof(text) - 1);
	text[sizeof(text) - 1] = 0;
	for (i = 0; first + i < m->n_params && i < n; i++)
		if (pp[i].found & MOMENT_REG_CREATED)
			mm_remove(path, &pp[i].handle, 1);
	return err_set(res, "%s", text);
}

int mm_remove(struct path *path, const uint32_t *handles, size_t n)
{
	struct mm *m = mm_of(path);
	uint32_t role;
	size_t i;

	for (i = 0; i < n; i++) {
		struct mparam *p;

		if (handles[i] >= m->n_params || m->param[handles[i]].dead)
			return err_set(-EINVAL, "parameter %u is not registered", handles[i]);
		p = &m->param[handles[i]];
		for (role = 0; role < MOMENT_ROLES; role++)
			if (p->file[role] != UINT32_MAX)
				mm_unmap(m, &m->file[p->file[role]]);
		drop_dir(m, p->rel);
		p->dead = true;
	}
	return 0;
}

static int step_set(struct mm *m, const struct mparam *p, const char *text)
{
	int res = attr_set(m, p->rel, "user.moment.step", text);
	uint32_t role;

	for (role = 0; role < MOMENT_ROLES && res == 0; role++)
		if (p->file[role] != UINT32_MAX)
			res = attr_set(m, m->file[p->file[role]].rel, "user.moment.step", text);
	return res;
}

int mm_steps(struct path *path, const struct moment_param_step *s, size_t n)
{
	struct mm *m = mm_of(path);
	char text[32];
	size_t i;
	int res = 0;

	for (i = 0; res == 0 && i < n; i++) {
		snprintf(text, sizeof(text), "%llu", (unsigned long long)s[i].step);
		res = step_set(m, &m->param[s[i].param], text);
	}
	return res;
}
