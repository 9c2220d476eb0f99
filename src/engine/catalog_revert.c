/* SPDX-License-Identifier: Apache-2.0 */
/*
 * catalog_revert.c - back to what was committed: single inodes, or the whole tree.
 *
 * What the database says is checked again, also against what is known of the rows in RAM. Work
 * thread, with no transaction open.
 */
#include "engine/catalog_impl.h"

#include <errno.h>
#include <stdlib.h>

typedef int map_fn(void *arg, uint64_t ino, uint64_t size, const struct extent *map, uint32_t n);

static int revert_one(struct catalog *c, uint64_t ino, map_fn *on_map, void *arg)
{
	static const struct ns_moment step = {"user.moment.step", "0", 1};
	const struct cat_row *known = u64map_get(&c->rows, ino);
	struct cat_rec rec = {0};
	struct ns_inode *i;
	uint64_t size = 0;
	bool file;
	int res = 0;

	if (known) {
		res = cat_load_one(c, ino, &rec);
		if (res == -ENOENT || (!res && cat_hash_row(&rec.hashes) != cat_hash_row(known)))
			res = -EUCLEAN;
		if (res < 0)
			goto out_fini;
	}
	pthread_mutex_lock(&c->ns->lock);
	i = ns_find_locked(c->ns, ino);
	if (!i)
		res = -ESTALE;
	else if (known)
		res = ns_row_put_locked(c->ns, i, &rec.row);
	file = i && !ns_is_dir(i) && !(i->flags & NS_GENERATED);
	size = i ? i->size : 0;
	pthread_mutex_unlock(&c->ns->lock);
	/* Never committed: back to what it was when it was made, zeros and no step. */
	if (!res && !known && ns_getxattr(c->ns, ino, step.name, NULL, 0) >= 0)
		res = ns_set_moment(c->ns, ino, &step, 1);
	if (!res && file && on_map)
		res = on_map(arg, ino, size, rec.map, rec.n_map);
out_fini:
	cat_rec_fini(&rec);
	return res;
}

static bool stop_at_problem(void *arg, uint64_t ino, const char *text)
{
	(void)arg;
	(void)ino;
	(void)text;
	return false;
}

static int revert_all(struct catalog *c, map_fn *on_map, void *arg)
{
	struct cat_check check = {.problem = stop_at_problem};
	struct cat_image img;
	uint64_t *gone = NULL;
	size_t n_gone = 0;
	int res = cat_load(c->db, &img, &check);

	if (res < 0)
		return res;
	if (cat_hash_meta(&img.meta) != cat_hash_meta(&c->meta))
		res = -EUCLEAN;
	if (!res)
		res = cat_install(c, &img, &gone, &n_gone);
	for (size_t g = 0; !res && g < n_gone; g++)
		ns_gone(c->ns, gone[g]);
	for (size_t r = 0; !res && on_map && r < img.n; r++) {
		const struct ns_row *row = &img.recs[r].row;

		if (S_ISREG(row->mode) && !(row->flags & NS_GENERATED))
			res = on_map(arg, row->ino, row->size, img.recs[r].map, img.recs[r].n_map);
	}
	free(gone);
	cat_image_fini(&img);
	return res;
}

int catalog_revert(struct catalog *c, const uint64_t *inos, size_t n,
		   int (*on_map)(void *arg, uint64_t ino, uint64_t size, const struct extent *map,
				 uint32_t n_map),
		   void *arg)
{
	int res = 0;

	if (c->readonly)
		return -EROFS;
	if (c->in_txn)
		return -EBUSY;
	if (!inos)
		return revert_all(c, on_map, arg);
	for (size_t k = 0; !res && k < n; k++)
		res = revert_one(c, inos[k], on_map, arg);
	return res;
}
