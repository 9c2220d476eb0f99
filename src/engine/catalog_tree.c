/* SPDX-License-Identifier: Apache-2.0 */
/*
 * catalog_tree.c - is what was read one tree? And its way into the namespace.
 *
 * Every inode but the root has a name that no other has in its directory, a parent that is a
 * directory, and a way up to the root.
 */
#include "engine/catalog_impl.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

const struct cat_rec *cat_image_find(const struct cat_image *img, uint64_t ino)
{
	size_t lo = 0, hi = img->n;

	while (lo < hi) {
		size_t mid = lo + (hi - lo) / 2;

		if (img->recs[mid].row.ino < ino)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo < img->n && img->recs[lo].row.ino == ino ? &img->recs[lo] : NULL;
}

/* What is wrong with this row by itself, or NULL. */
static const char *check_row(const struct cat_image *img, const struct ns_row *row)
{
	const struct cat_rec *parent;

	if ((!S_ISREG(row->mode) && !S_ISDIR(row->mode)) || row->mode & ~(S_IFMT | 07777u))
		return "neither a file nor a directory";
	if (row->flags & ~NS_STORED_FLAGS)
		return "unknown flags";
	if (row->ino >= img->meta.next_ino)
		return "a number that was never given out";
	if (row->ino == NS_ROOT) {
		if (row->parent || row->name_len || !S_ISDIR(row->mode))
			return "not a root directory";
		return NULL;
	}
	if (strlen(row->name) != row->name_len || ns_name_check(row->name) < 0)
		return "a name that no file can have";
	if (S_ISDIR(row->mode) && row->size)
		return "a directory with a size";
	parent = cat_image_find(img, row->parent);
	if (!parent)
		return "its directory does not exist";
	if (!S_ISDIR(parent->row.mode))
		return "its parent is not a directory";
	return NULL;
}

static int by_entry(const void *pa, const void *pb)
{
	const struct ns_row *a = *(const struct ns_row *const *)pa;
	const struct ns_row *b = *(const struct ns_row *const *)pb;

	if (a->parent != b->parent)
		return a->parent < b->parent ? -1 : 1;
	return strcmp(a->name, b->name);
}

static int check_unique(struct cat_image *img, struct cat_check *check)
{
	const struct ns_row **rows = calloc(img->n + 1, sizeof(const struct ns_row *));
	int res = 0;

	if (!rows)
		return -ENOMEM;
	for (size_t r = 0; r < img->n; r++)
		rows[r] = &img->recs[r].row;
	qsort(rows, img->n, sizeof(*rows), by_entry);
	for (size_t r = 1; !res && r < img->n; r++)
		if (!by_entry(&rows[r - 1], &rows[r]))
			res = cat_problem(check, rows[r]->ino,
					  "inodes %llu and %llu have the same name \"%s\" in "
					  "directory %llu",
					  (unsigned long long)rows[r - 1]->ino,
					  (unsigned long long)rows[r]->ino, rows[r]->name,
					  (unsigned long long)rows[r]->parent);
	free(rows);
	return res;
}

/* Climbs from every inode until one is met that is known to lead to the root. */
static int check_cycles(struct cat_image *img, struct cat_check *check)
{
	uint32_t *seen = calloc(img->n + 1, sizeof(*seen)); /* the climb that came by first */
	int res = 0;

	if (!seen)
		return -ENOMEM;
	for (size_t r = 0; !res && r < img->n; r++) {
		const struct cat_rec *at = &img->recs[r];

		while (at && !at->bad && at->row.ino != NS_ROOT && !seen[at - img->recs]) {
			seen[at - img->recs] = (uint32_t)r + 1;
			at = cat_image_find(img, at->row.parent);
		}
		if (at && !at->bad && at->row.ino != NS_ROOT && seen[at - img->recs] == r + 1) {
			img->recs[at - img->recs].bad = true;
			res = cat_problem(check, at->row.ino,
					  "inode %llu (\"%s\"): a directory inside itself",
					  (unsigned long long)at->row.ino, at->row.name);
		}
	}
	free(seen);
	return res;
}

int cat_check_tree(struct cat_image *img, struct cat_check *check)
{
	int res = 0;

	if (!cat_image_find(img, NS_ROOT))
		res = cat_problem(check, NS_ROOT, "inode 2, the root directory, is missing");
	for (size_t r = 0; !res && r < img->n; r++) {
		const struct ns_row *row = &img->recs[r].row;
		const char *why = check_row(img, row);

		if (!why)
			continue;
		img->recs[r].bad = true;
		res = cat_problem(check, row->ino, "inode %llu (\"%s\" in directory %llu): %s",
				  (unsigned long long)row->ino, row->name,
				  (unsigned long long)row->parent, why);
	}
	if (!res)
		res = check_unique(img, check);
	if (!res)
		res = check_cycles(img, check);
	return res;
}

int cat_install(struct catalog *c, struct cat_image *img, uint64_t **gone, size_t *n_gone)
{
	struct ns_row *ns_rows = calloc(img->n + 1, sizeof(*ns_rows));
	struct u64map rows = {0};
	struct cat_row *row;
	size_t pos = 0;
	int res = -ENOMEM;

	*gone = NULL;
	*n_gone = 0;
	if (!ns_rows || u64map_reserve(&rows, img->n) < 0)
		goto out_free;
	for (size_t r = 0; r < img->n; r++) {
		ns_rows[r] = img->recs[r].row; /* name and attributes stay the image's */
		row = malloc(sizeof(*row));
		if (!row)
			goto out_free;
		*row = img->recs[r].hashes;
		u64map_put(&rows, row->ino, row);
	}
	pthread_mutex_lock(&c->ns->lock);
	*gone = calloc(c->ns->inodes.n + 1, sizeof(**gone));
	if (*gone)
		res = ns_replace_locked(c->ns, ns_rows, img->n, *gone, n_gone);
	pthread_mutex_unlock(&c->ns->lock);
	if (!res) {
		struct u64map old = c->rows;

		c->rows = rows;
		rows = old;
		pthread_mutex_lock(&c->lock);
		c->heap = cat_rows_heap(&c->rows);
		pthread_mutex_unlock(&c->lock);
	}
out_free:
	while ((row = u64map_next(&rows, &pos)))
		free(row);
	u64map_fini(&rows);
	free(ns_rows);
	return res;
}
