/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ns_meta.c - the generated meta.json of a registered parameter: what the extended attributes say,
 * for tools that drop extended attributes.
 *
 * Rendered under the lock at each read and each stat, from the directory's attributes and its
 * files; it is a few hundred bytes. The result is always valid JSON in UTF-8, whatever is in the
 * attributes: a byte of a name that is not UTF-8 becomes \udcXX, as Python's surrogateescape does.
 */
#include "engine/ns_impl.h"

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/names.h"

#define META_FORMAT  "momentfs-param"
#define META_VERSION 1
#define JSON_DEPTH   64

/* --- a checker for JSON that comes from an attribute ----------------------------------------- */

struct json {
	const char *p, *end;
};

static bool json_value(struct json *j, unsigned int depth);

static void json_space(struct json *j)
{
	while (j->p < j->end && memchr(" \t\r\n", *j->p, 4))
		j->p++;
}

static bool json_take(struct json *j, char c)
{
	if (j->p == j->end || *j->p != c)
		return false;
	j->p++;
	return true;
}

static bool json_string(struct json *j)
{
	if (!json_take(j, '"'))
		return false;
	while (j->p < j->end && *j->p != '"') {
		size_t left = (size_t)(j->end - j->p), n = names_utf8_len(j->p, left);

		if ((unsigned char)*j->p < 0x20 || !n)
			return false;
		if (*j->p == '\\') {
			n = 2;
			if (left < 2 || !strchr("\"\\/bfnrtu", j->p[1]) || !j->p[1])
				return false;
			for (; j->p[1] == 'u' && n < 6; n++)
				if (left <= n || !isxdigit((unsigned char)j->p[n]))
					return false;
		}
		j->p += n;
	}
	return json_take(j, '"');
}

static bool json_digits(struct json *j)
{
	const char *from = j->p;

	while (j->p < j->end && *j->p >= '0' && *j->p <= '9')
		j->p++;
	return j->p > from;
}

static bool json_number(struct json *j)
{
	json_take(j, '-');
	if (!json_take(j, '0') && !json_digits(j))
		return false;
	if (json_take(j, '.') && !json_digits(j))
		return false;
	if (json_take(j, 'e') || json_take(j, 'E')) {
		if (!json_take(j, '+'))
			json_take(j, '-');
		return json_digits(j);
	}
	return true;
}

/* The members of an object or an array, behind its opening bracket. */
static bool json_members(struct json *j, char close, unsigned int depth)
{
	json_space(j);
	if (json_take(j, close))
		return true;
	do {
		json_space(j);
		if (close == '}') {
			if (!json_string(j))
				return false;
			json_space(j);
			if (!json_take(j, ':'))
				return false;
		}
		if (!json_value(j, depth))
			return false;
		json_space(j);
	} while (json_take(j, ','));
	return json_take(j, close);
}

static bool json_value(struct json *j, unsigned int depth)
{
	static const char *const words[] = {"true", "false", "null"};

	if (depth >= JSON_DEPTH)
		return false;
	json_space(j);
	if (json_take(j, '{'))
		return json_members(j, '}', depth + 1);
	if (json_take(j, '['))
		return json_members(j, ']', depth + 1);
	if (j->p < j->end && *j->p == '"')
		return json_string(j);
	for (size_t w = 0; w < sizeof(words) / sizeof(*words); w++) {
		size_t n = strlen(words[w]);

		if ((size_t)(j->end - j->p) >= n && !memcmp(j->p, words[w], n)) {
			j->p += n;
			return true;
		}
	}
	return json_number(j);
}

static bool is_json_object(const char *text, size_t len)
{
	struct json j = {text, text + len};

	json_space(&j);
	if (j.p == j.end || *j.p != '{' || !json_value(&j, 0))
		return false;
	json_space(&j);
	return j.p == j.end;
}

/* --- rendering ------------------------------------------------------------------------------ */

static void put_string(FILE *f, const char *s, size_t len)
{
	fputc('"', f);
	while (len) {
		unsigned char c = (unsigned char)*s;
		size_t n = names_utf8_len(s, len);

		if (!n)
			fprintf(f, "\\udc%02x", c);
		else if (c == '"' || c == '\\')
			fprintf(f, "\\%c", c);
		else if (c < 0x20 || c == 0x7f)
			fprintf(f, "\\u%04x", c);
		else
			fwrite(s, 1, n, f);
		n += !n;
		s += n;
		len -= n;
	}
	fputc('"', f);
}

static bool is_integer(const char *s, size_t len)
{
	struct json j = {s, s + len};

	return len && len < 20 && *s != '-' && (json_take(&j, '0') || json_digits(&j)) &&
	       j.p == j.end;
}

/* "768,2304", "[768, 2304]" or "768x2304"; "" and "[]" are a scalar's. */
static void put_shape(FILE *f, const struct ns_xattr *x)
{
	char dims[1024] = "";
	size_t used = 0, at = 0;
	const char *s;

	s = x ? ns_xattr_value(x) : NULL;
	if (!x || x->size >= sizeof(dims) / 2)
		goto out_null;
	while (at < x->size) {
		size_t n = 0;

		while (at + n < x->size && isdigit((unsigned char)s[at + n]))
			n++;
		if (!n) {
			if (!memchr(" ,x[]()", s[at], 7))
				goto out_null;
			at++;
			continue;
		}
		if (!is_integer(s + at, n) || used + n + 3 > sizeof(dims))
			goto out_null;
		used += (size_t)snprintf(dims + used, sizeof(dims) - used, "%s%.*s",
					 used ? ", " : "", (int)n, s + at);
		at += n;
	}
	fprintf(f, "[%s]", dims);
	return;

out_null:
	fputs("null", f);
}

static void put_name(FILE *f, const struct ns_inode *dir, const struct ns_xattr *x)
{
	char name[NAMES_MAX + 1];
	size_t len = sizeof(name);

	if (x)
		put_string(f, ns_xattr_value(x), x->size);
	else if (dir->name && names_decode(dir->name, name, &len) == 0)
		put_string(f, name, len);
	else
		fputs("null", f);
}

static void put_files(FILE *f, const struct ns_inode *dir)
{
	const char *sep = "";

	for (size_t s = 0; s < dir->n_slots; s++) {
		const struct ns_inode *i = dir->slots[s].inode;
		const struct ns_xattr *dtype;

		if (!i || ns_is_dir(i) || i->flags & NS_GENERATED)
			continue;
		dtype = ns_xattr_find(i, "user.moment.dtype");
		fprintf(f, "%s\n    ", sep);
		put_string(f, i->name, strlen(i->name));
		fputs(": {\"dtype\": ", f);
		if (dtype)
			put_string(f, ns_xattr_value(dtype), dtype->size);
		else
			fputs("null", f);
		fprintf(f, ", \"bytes\": %llu}", (unsigned long long)i->size);
		sep = ",";
	}
	if (*sep)
		fputs("\n  ", f);
}

int ns_meta_render_locked(const struct ns_inode *dir, char **out, size_t *len)
{
	const struct ns_xattr *step = ns_xattr_find(dir, "user.moment.step");
	const struct ns_xattr *hyper = ns_xattr_find(dir, "user.moment.hyper");
	FILE *f = open_memstream(out, len);
	bool failed;

	if (!f)
		return -ENOMEM;
	fprintf(f, "{\n  \"format\": \"%s\",\n  \"version\": %d,\n  \"name\": ", META_FORMAT,
		META_VERSION);
	put_name(f, dir, ns_xattr_find(dir, "user.moment.name"));
	fputs(",\n  \"shape\": ", f);
	put_shape(f, ns_xattr_find(dir, "user.moment.shape"));
	fputs(",\n  \"step\": ", f);
	if (step && is_integer(ns_xattr_value(step), step->size))
		fwrite(ns_xattr_value(step), 1, step->size, f);
	else
		fputs("null", f);
	fputs(",\n  \"files\": {", f);
	put_files(f, dir);
	fputs("}", f);
	if (hyper && is_json_object(ns_xattr_value(hyper), hyper->size)) {
		fputs(",\n  \"hyper\": ", f);
		fwrite(ns_xattr_value(hyper), 1, hyper->size, f);
	}
	fputs("\n}\n", f);
	failed = ferror(f);
	if (fclose(f) || failed) {
		free(*out);
		return -ENOMEM;
	}
	return 0;
}

int ns_generate(struct ns *ns, uint64_t ino, char **out, size_t *len)
{
	struct ns_inode *i;
	int res = -ESTALE;

	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	if (i && i->parent && i->flags & NS_GENERATED)
		res = ns_meta_render_locked(i->parent, out, len);
	else if (i && !(i->flags & NS_GENERATED))
		res = -EINVAL;
	pthread_mutex_unlock(&ns->lock);
	return res;
}

int ns_make_meta(struct ns *ns, uint64_t dir, uint64_t ino)
{
	struct ns_inode *d, *i = NULL, *made = NULL;
	char *name = strdup(NS_META_NAME);
	struct timespec now = ns_now();
	int res;

	pthread_mutex_lock(&ns->lock);
	res = ns_find_dir_locked(ns, dir, &d);
	if (res < 0)
		goto out_unlock;
	res = -ENOENT;
	if (!d->linked)
		goto out_unlock;
	i = ns_child_locked(ns, d, NS_META_NAME);
	if (i) {
		res = -EISDIR;
		if (ns_is_dir(i))
			goto out_unlock;
		res = -EAGAIN;
		if (!(i->flags & NS_GENERATED) && i->ino != ino)
			goto out_unlock;
		res = -EBUSY;
		if (i->writers || i->flags & NS_REGISTERED)
			goto out_unlock;
	} else {
		res = -ENOMEM;
		made = ns_inode_new(ns->next_ino, S_IFREG | (d->mode & 0666));
		if (!made || !name || ns_link_prepare_locked(ns, d) < 0 ||
		    u64map_put(&ns->inodes, made->ino, made) < 0)
			goto out_unlock;
		ns->next_ino++;
		i = made;
		made = NULL;
		i->uid = d->uid;
		i->gid = d->gid;
		i->mtime = i->ctime = now;
		ns_link_locked(ns, d, i, name, 0);
		name = NULL;
		d->mtime = d->ctime = now;
		ns_dirty_locked(ns, d);
	}
	if (!(i->flags & NS_GENERATED)) {
		ns_stale_locked(ns, i, NS_STALE_ATTR | NS_STALE_DATA);
		i->flags |= NS_GENERATED;
		i->mode &= ~0222u;
		ns->counts.bytes -= i->size;
		i->size = i->bytes = 0;
		i->ctime = now;
		ns_dirty_locked(ns, i);
	}
	res = 0;
out_unlock:
	pthread_mutex_unlock(&ns->lock);
	ns_inode_free(made);
	free(name);
	return res;
}
