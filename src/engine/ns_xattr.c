/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ns_xattr.c - extended attributes, and their packed form for the catalog.
 *
 * Kept sorted by name, so that the packed form is canonical and can be hashed. What a session's
 * parameter means is in user.moment.*; nobody else changes these on a registered file or on a
 * directory above one. Any thread.
 */
#include "engine/ns_impl.h"

#include <endian.h>
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/xattr.h>

#define PACK_HEAD 6u /* u16 name length, u32 value length */

static const char moment_prefix[] = "user.moment.";

const struct ns_xattr *ns_xattr_find(const struct ns_inode *i, const char *name)
{
	for (const struct ns_xattr *x = i->xattrs; x; x = x->next)
		if (!strcmp(x->name, name))
			return x;
	return NULL;
}

void ns_xattrs_free(struct ns_xattr *list)
{
	while (list) {
		struct ns_xattr *next = list->next;

		free(list);
		list = next;
	}
}

static struct ns_xattr *xattr_new(const char *name, size_t name_len, const void *value, size_t size)
{
	struct ns_xattr *x = malloc(sizeof(*x) + name_len + 1 + size);

	if (!x)
		return NULL;
	x->next = NULL;
	x->size = (uint32_t)size;
	x->name_len = (uint8_t)name_len;
	memcpy(x->name, name, name_len);
	x->name[name_len] = '\0';
	if (size)
		memcpy(x->name + name_len + 1, value, size);
	return x;
}

static int name_check(const char *name)
{
	static const char *const known[] = {"user.", "trusted.", "security."};
	size_t len = strnlen(name, NS_XATTR_NAME_MAX + 1);

	if (len > NS_XATTR_NAME_MAX)
		return -ERANGE;
	for (size_t k = 0; k < sizeof(known) / sizeof(*known); k++)
		if (!strncmp(name, known[k], strlen(known[k])))
			return len > strlen(known[k]) ? 0 : -EINVAL;
	return -EOPNOTSUPP; /* among them access control lists, which nobody here would enforce */
}

int64_t ns_getxattr(struct ns *ns, uint64_t ino, const char *name, void *buf, size_t size)
{
	const struct ns_xattr *x;
	struct ns_inode *i;
	int64_t res = -ESTALE;

	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	if (!i)
		goto out_unlock;
	res = -ENODATA;
	x = ns_xattr_find(i, name);
	if (!x)
		goto out_unlock;
	res = -ERANGE;
	if (size && size < x->size)
		goto out_unlock;
	if (size && x->size)
		memcpy(buf, ns_xattr_value(x), x->size);
	res = x->size;
out_unlock:
	pthread_mutex_unlock(&ns->lock);
	return res;
}

int64_t ns_listxattr(struct ns *ns, uint64_t ino, char *buf, size_t size)
{
	struct ns_inode *i;
	size_t used = 0;
	int64_t res = -ESTALE;

	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	if (!i)
		goto out_unlock;
	for (const struct ns_xattr *x = i->xattrs; x; x = x->next) {
		if (!strcmp(x->name, NS_XATTR_ATIME))
			continue;
		res = -ERANGE;
		if (size && used + x->name_len + 1 > size)
			goto out_unlock;
		if (size)
			memcpy(buf + used, x->name, (size_t)x->name_len + 1);
		used += (size_t)x->name_len + 1;
	}
	res = (int64_t)used;
out_unlock:
	pthread_mutex_unlock(&ns->lock);
	return res;
}

/* Bytes of names (with their NULs) and of all, without `name`. */
static void totals(const struct ns_inode *i, const char *name, size_t *names, size_t *all)
{
	*names = *all = 0;
	for (const struct ns_xattr *x = i->xattrs; x; x = x->next) {
		if (!strcmp(x->name, name))
			continue;
		*names += (size_t)x->name_len + 1;
		*all += (size_t)x->name_len + 1 + x->size;
	}
}

/* Puts x (or nothing: removes) in the place of `name`. */
static void replace(struct ns *ns, struct ns_inode *i, const char *name, struct ns_xattr *x)
{
	struct ns_xattr **at = &i->xattrs;

	while (*at && strcmp((*at)->name, name) < 0)
		at = &(*at)->next;
	if (*at && !strcmp((*at)->name, name)) {
		struct ns_xattr *old = *at;

		*at = old->next;
		ns->heap -= ns_xattr_heap(old);
		free(old);
	}
	if (x) {
		x->next = *at;
		*at = x;
		ns->heap += ns_xattr_heap(x);
	}
}

struct timespec ns_atime(const struct ns_inode *i)
{
	const struct ns_xattr *x = i->xattrs;
	struct timespec t = i->mtime;
	uint64_t sec;
	uint32_t nsec;

	/* Sorted: most inodes have none that could be it. */
	while (x && strcmp(x->name, NS_XATTR_ATIME) < 0)
		x = x->next;
	if (!x || strcmp(x->name, NS_XATTR_ATIME) != 0 || x->size != 12)
		return t;
	memcpy(&sec, ns_xattr_value(x), 8);
	memcpy(&nsec, (const char *)ns_xattr_value(x) + 8, 4);
	t.tv_sec = (time_t)le64toh(sec);
	t.tv_nsec = min_u64(le32toh(nsec), 999999999);
	return t;
}

int ns_set_atime(struct ns *ns, struct ns_inode *i, const struct timespec *t)
{
	struct ns_xattr *x = NULL;
	char value[12];
	uint64_t sec = htole64(t ? (uint64_t)t->tv_sec : 0);
	uint32_t nsec = htole32(t ? (uint32_t)t->tv_nsec : 0);

	memcpy(value, &sec, 8);
	memcpy(value + 8, &nsec, 4);
	if (t && !(x = xattr_new(NS_XATTR_ATIME, strlen(NS_XATTR_ATIME), value, sizeof(value))))
		return -ENOMEM;
	replace(ns, i, NS_XATTR_ATIME, x);
	return 0;
}

static bool is_pinned_name(const struct ns_inode *i, const char *name)
{
	return (i->flags & NS_REGISTERED || i->pins) &&
	       !strncmp(name, moment_prefix, sizeof(moment_prefix) - 1);
}

int ns_setxattr(struct ns *ns, uint64_t ino, const char *name, const void *value, size_t size,
		int flags)
{
	struct ns_xattr *x = NULL;
	struct ns_inode *i;
	size_t names, all;
	int res = name_check(name);

	if (res < 0)
		return res;
	if (flags & ~(XATTR_CREATE | XATTR_REPLACE))
		return -EINVAL;
	if (size > NS_XATTR_VALUE_MAX)
		return -E2BIG;
	pthread_mutex_lock(&ns->lock);
	res = -ESTALE;
	i = ns_find_locked(ns, ino);
	if (!i)
		goto out_unlock;
	res = -EBUSY;
	if (is_pinned_name(i, name))
		goto out_unlock;
	res = ns_xattr_find(i, name) ? -EEXIST : -ENODATA;
	if (flags & (res == -EEXIST ? XATTR_CREATE : XATTR_REPLACE))
		goto out_unlock;
	totals(i, name, &names, &all);
	res = -ENOSPC;
	if (names + strlen(name) + 1 > XATTR_LIST_MAX ||
	    all + strlen(name) + 1 + size > NS_XATTR_TOTAL)
		goto out_unlock;
	res = -ENOMEM;
	x = xattr_new(name, strlen(name), value, size);
	if (!x)
		goto out_unlock;
	replace(ns, i, name, x);
	i->ctime = ns_now();
	ns_dirty_locked(ns, i);
	res = 0;
out_unlock:
	pthread_mutex_unlock(&ns->lock);
	return res;
}

int ns_removexattr(struct ns *ns, uint64_t ino, const char *name)
{
	struct ns_inode *i;
	int res = -ESTALE;

	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	if (!i)
		goto out_unlock;
	res = -ENODATA;
	if (!ns_xattr_find(i, name))
		goto out_unlock;
	res = -EBUSY;
	if (is_pinned_name(i, name))
		goto out_unlock;
	replace(ns, i, name, NULL);
	i->ctime = ns_now();
	ns_dirty_locked(ns, i);
	res = 0;
out_unlock:
	pthread_mutex_unlock(&ns->lock);
	return res;
}

int ns_set_moment(struct ns *ns, uint64_t ino, const struct ns_moment *m, size_t n)
{
	struct ns_xattr *made = NULL, *x;
	struct ns_inode *i;
	int res = 0;

	/* All memory first, so that it is all or nothing. The list is in reverse order. */
	for (size_t k = 0; k < n; k++) {
		if (m[k].size > NS_XATTR_VALUE_MAX)
			res = -E2BIG;
		if (!res)
			res = name_check(m[k].name);
		if (res < 0)
			goto out_free;
		if (!m[k].value)
			continue;
		res = -ENOMEM;
		x = xattr_new(m[k].name, strlen(m[k].name), m[k].value, m[k].size);
		if (!x)
			goto out_free;
		x->next = made;
		made = x;
		res = 0;
	}
	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	if (!i) {
		res = -ESTALE;
		goto out_unlock;
	}
	for (size_t k = n; k--;) {
		x = NULL;
		if (m[k].value) {
			x = made;
			made = x->next;
		}
		replace(ns, i, m[k].name, x);
	}
	if (n) {
		i->ctime = ns_now();
		ns_dirty_locked(ns, i);
	}
out_unlock:
	pthread_mutex_unlock(&ns->lock);
out_free:
	ns_xattrs_free(made);
	return res;
}

/* --- packed --------------------------------------------------------------------------------- */

int ns_xattrs_pack(const struct ns_xattr *list, uint8_t **out, size_t *len)
{
	size_t total = 0;
	uint8_t *p;

	*out = NULL;
	*len = 0;
	for (const struct ns_xattr *x = list; x; x = x->next)
		total += PACK_HEAD + x->name_len + x->size;
	if (!total)
		return 0;
	p = malloc(total);
	if (!p)
		return -ENOMEM;
	*out = p;
	*len = total;
	for (const struct ns_xattr *x = list; x; x = x->next) {
		uint16_t name_len = htole16(x->name_len);
		uint32_t size = htole32(x->size);

		memcpy(p, &name_len, 2);
		memcpy(p + 2, &size, 4);
		memcpy(p + PACK_HEAD, x->name, x->name_len);
		memcpy(p + PACK_HEAD + x->name_len, ns_xattr_value(x), x->size);
		p += PACK_HEAD + x->name_len + x->size;
	}
	return 0;
}

int ns_xattrs_next(const uint8_t *buf, size_t len, size_t *pos, const char **name,
		   uint32_t *name_len, const uint8_t **value, uint32_t *size)
{
	uint16_t n;
	uint32_t v;

	if (*pos == len)
		return 0;
	if (len - *pos < PACK_HEAD)
		return -EUCLEAN;
	memcpy(&n, buf + *pos, 2);
	memcpy(&v, buf + *pos + 2, 4);
	*name_len = le16toh(n);
	*size = le32toh(v);
	if (!*name_len || *name_len > NS_XATTR_NAME_MAX || *size > NS_XATTR_VALUE_MAX ||
	    len - *pos - PACK_HEAD < (size_t)*name_len + *size)
		return -EUCLEAN;
	*name = (const char *)buf + *pos + PACK_HEAD;
	*value = buf + *pos + PACK_HEAD + *name_len;
	if (memchr(*name, '\0', *name_len))
		return -EUCLEAN;
	*pos += PACK_HEAD + *name_len + *size;
	return 1;
}

int ns_xattrs_unpack(const uint8_t *buf, size_t len, struct ns_xattr **out)
{
	struct ns_xattr *list = NULL, **end = &list, *last = NULL;
	const uint8_t *value;
	uint32_t name_len, size;
	const char *name;
	size_t pos = 0;
	int res;

	while ((res = ns_xattrs_next(buf, len, &pos, &name, &name_len, &value, &size)) > 0) {
		struct ns_xattr *x = xattr_new(name, name_len, value, size);

		res = -ENOMEM;
		if (!x)
			break;
		*end = x;
		end = &x->next;
		res = -EUCLEAN;
		if (last && strcmp(last->name, x->name) >= 0)
			break;
		last = x;
	}
	if (res < 0) {
		ns_xattrs_free(list);
		list = NULL;
	}
	*out = list;
	return res;
}
