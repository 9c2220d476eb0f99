/* SPDX-License-Identifier: Apache-2.0 */
/*
 * catalog_revert.c - back to what was committed: single inodes, or the whole tree.
 *
 * What the database says is checked again, also against what is known of the rows in RAM. All of it is
 * read, and its maps handed over, before the first inode is changed: a catalog that cannot be read
 * leaves names and attributes as they belong to the data. A commit that failed, but might be found
 * after a crash all the same, is made impossible first: else a trainer that went back to step 10, and
 * on from there, could be shown step 12 of the history that it left. Work thread, with no transaction
 * open.
 */
#include "engine/catalog_impl.h"

#include <errno.h>
#include <stdlib.h>

typedef int map_fn(void *arg, struct map_copy *map);

/* Hands over the map of a record, or an empty one. */
static int hand_over(struct cat_rec *rec, uint64_t ino, uint64_t size, map_fn *on_map, void *arg)
{
	struct map_copy *m = rec->map ? rec->map : map_copy_new(ino, size, 0);

	rec->map = NULL;
	return m ? on_map(arg, m) : -ENOMEM;
}

/* An inode and what was committed of it. */
struct back {
	uint64_t ino;
	bool known; /* has a row; else it goes back to what it was when it was made: zeros, no step */
	struct cat_rec rec;
	struct ns_xattr *xattrs;
};

static int back_read(struct catalog *c, struct back *b, map_fn *on_map, void *arg)
{
	const struct cat_row *known = u64map_get(&c->rows, b->ino);
	struct ns_inode *i;
	uint64_t size = 0;
	bool file = false;
	int res = 0;

	b->known = known;
	if (known) {
		res = cat_load_one(c, b->ino, &b->rec);
		if (res == -ENOENT || (!res && cat_hash_row(&b->rec.hashes) != cat_hash_row(known)))
			res = -EUCLEAN;
		if (!res)
			res = ns_xattrs_unpack(b->rec.row.xattrs, b->rec.row.xattrs_len, &b->xattrs);
		if (res < 0)
			return res;
	}
	pthread_mutex_lock(&c->ns->lock);
	i = ns_find_locked(c->ns, b->ino);
	if (i) {
		file = !ns_is_dir(i) && !(i->flags & NS_GENERATED);
		size = known ? b->rec.row.size : i->size;
	}
	pthread_mutex_unlock(&c->ns->lock);
	/* It may be gone: then there is nothing to put back. */
	return file && on_map ? hand_over(&b->rec, b->ino, size, on_map, arg) : 0;
}

static int back_put(struct catalog *c, struct back *b)
{
	static const struct ns_moment step = {"user.moment.step", "0", 1};
	struct ns_inode *i;

	if (!b->known)
		return ns_getxattr(c->ns, b->ino, step.name, NULL, 0) >= 0
			       ? ns_set_moment(c->ns, b->ino, &step, 1)
			       : 0;
	pthread_mutex_lock(&c->ns->lock);
	i = ns_find_locked(c->ns, b->ino);
	if (i) {
		ns_row_put_locked(c->ns, i, &b->rec.row, b->xattrs);
		b->xattrs = NULL;
	}
	pthread_mutex_unlock(&c->ns->lock);
	return 0;
}

static int revert_some(struct catalog *c, const uint64_t *inos, size_t n, map_fn *on_map, void *arg)
{
	struct back *b = calloc(n ? n : 1, sizeof(*b));
	int res = b ? 0 : -ENOMEM;

	for (size_t k = 0; !res && k < n; k++) {
		b[k].ino = inos[k];
		res = back_read(c, &b[k], on_map, arg);
	}
	/* Those that may fail for memory come first. */
	for (int known = 0; known < 2; known++) {
		for (size_t k = 0; !res && k < n; k++) {
			if (b[k].known == known)
				res = back_put(c, &b[k]);
		}
	}
	for (size_t k = 0; b && k < n; k++) {
		ns_xattrs_free(b[k].xattrs);
		cat_rec_fini(&b[k].rec);
	}
	free(b);
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
	for (size_t r = 0; !res && on_map && r < img.n; r++) {
		const struct ns_row *row = &img.recs[r].row;

		if (S_ISREG(row->mode) && !(row->flags & NS_GENERATED))
			res = hand_over(&img.recs[r], row->ino, row->size, on_map, arg);
	}
	if (!res)
		res = cat_install(c, &img, &gone, &n_gone);
	for (size_t g = 0; !res && g < n_gone; g++)
		ns_gone(c->ns, gone[g]);
	free(gone);
	cat_image_fini(&img);
	return res;
}

int catalog_revert(struct catalog *c, const uint64_t *inos, size_t n,
		   int (*on_map)(void *arg, struct map_copy *map), void *arg)
{
	int res;

	if (c->readonly)
		return -EROFS;
	if (c->in_txn)
		return -EBUSY;
	/* Who is told that this is the state must not find a later one after a crash. */
	res = cat_make_certain(c);
	if (res < 0)
		return res;
	return inos ? revert_some(c, inos, n, on_map, arg) : revert_all(c, on_map, arg);
}
