/* SPDX-License-Identifier: Apache-2.0 */
/*
 * catalog_commit.c - a commit: freeze what changed, write it in one SQLite transaction, or fail
 * and leave everything as it was.
 *
 * A row is written in the parts that changed (catalog_impl.h). An inode that is held keeps its
 * committed attributes and map, but a new name is always written: else two rows could have the same
 * name, or one a directory that is gone. Numbers removed stay in ns->dead until the transaction has
 * succeeded, so a failure has nothing to put back but marks.
 *
 * A failed COMMIT may have left a complete transaction in the WAL that a crash would bring to life.
 * So after such a failure the WAL is settled (cat_settle); where that fails too, catalog_uncertain(),
 * and it is tried again before the next commit. That one must not be added to a WAL of which a sync
 * has failed: what was written there before, and not synced, may be missing in front of it.
 *
 * freeze, txn_map, txn_end: loop thread. commit: work thread; it changes nothing in the catalog
 * but flags and ballast, txn_end() does that.
 */
#include "engine/catalog_impl.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/blockmap.h"

/* A segment that changed. */
struct segment {
	uint32_t seg, n;
	bool same; /* as what is stored */
	struct extent e[];
};

enum change_kind {
	CHANGE_ROW,   /* entry, attributes, extended attributes */
	CHANGE_ENTRY, /* held: only the entry */
	CHANGE_MAP,   /* nothing but the map */
};

struct change {
	enum change_kind kind;
	bool held;
	bool is_new;
	struct ns_row row; /* unless CHANGE_MAP */
	bool has_map;
	uint32_t n_map;		 /* entries of the whole map */
	struct segment **segs; /* ascending */
	uint32_t n_segs, cap_segs;
	struct cat_row *after; /* malloc'ed, becomes the catalog's */
};

struct catalog_txn {
	struct catalog *c;
	struct u64map changes;	/* number -> struct change */
	struct change **sorted; /* by number, made by prepare(): SQLite likes that order */
	size_t n_sorted;
	struct u64map dead_set; /* the rows to delete, by number */
	uint64_t *dead;		/* the same in the order of their removal */
	size_t n_dead;
	size_t n_dead_seen; /* so many of ns->dead are dealt with when this succeeds */
	uint64_t heap;	    /* bytes of memory of the changes */
	uint64_t blame;	    /* the inode at which writing failed, or 0 */
	struct cat_meta meta;
};

/* --- freeze --------------------------------------------------------------------------------- */

static void change_free(struct change *ch)
{
	if (!ch)
		return;
	ns_row_fini(&ch->row);
	for (uint32_t s = 0; s < ch->n_segs; s++)
		free(ch->segs[s]);
	free(ch->segs);
	free(ch->after);
	free(ch);
}

static void txn_free(struct catalog_txn *t)
{
	struct change *ch;
	size_t pos = 0;

	while ((ch = u64map_next(&t->changes, &pos)))
		change_free(ch);
	u64map_fini(&t->changes);
	free(t->sorted);
	u64map_fini(&t->dead_set);
	free(t->dead);
	free(t);
}

/* A new change of `ino`, in the transaction. */
static struct change *change_new(struct catalog_txn *t, uint64_t ino, enum change_kind kind)
{
	struct change *ch = calloc(1, sizeof(*ch));
	const struct cat_row *before = u64map_get(&t->c->rows, ino);

	if (!ch)
		return NULL;
	ch->kind = kind;
	ch->is_new = !before;
	ch->after = calloc(1, sizeof(*ch->after));
	if (!ch->after || u64map_put(&t->changes, ino, ch) < 0) {
		change_free(ch);
		return NULL;
	}
	if (before)
		*ch->after = *before;
	ch->after->ino = ino;
	t->heap += heap_cost(sizeof(*ch)) + heap_cost(sizeof(*ch->after));
	return ch;
}

/* Takes what changed of one inode. Held ones stay marked for the commit after. */
static int freeze_inode(struct catalog_txn *t, struct ns_inode *i)
{
	const struct cat_row *before = u64map_get(&t->c->rows, i->ino);
	bool held = i->flags & NS_HELD;
	struct ns_row row;
	struct change *ch;
	int res = ns_row_get_locked(i, &row);

	if (res < 0)
		return res;
	if (held && before && before->entry == cat_hash_entry(&row)) {
		ns_row_fini(&row);
		return 0;
	}
	ch = change_new(t, i->ino, held && before ? CHANGE_ENTRY : CHANGE_ROW);
	if (!ch) {
		ns_row_fini(&row);
		return -ENOMEM;
	}
	ch->row = row;
	t->heap += heap_cost(row.name_len + 1) + (row.xattrs_len ? heap_cost(row.xattrs_len) : 0);
	ch->held = held;
	i->maybe_stored = true;
	if (!held)
		list_remove(&i->dirty);
	return 0;
}

static void mark_again_locked(struct catalog_txn *t)
{
	struct ns *ns = t->c->ns;
	struct change *ch;
	size_t pos = 0;

	while ((ch = u64map_next(&t->changes, &pos))) {
		struct ns_inode *i = ns_find_locked(ns, ch->after->ino);

		if (i && ch->kind != CHANGE_MAP)
			ns_dirty_locked(ns, i);
	}
}

int catalog_freeze(struct catalog *c, uint64_t step, bool has_step, struct catalog_txn **out,
		   bool *changed)
{
	struct catalog_txn *t;
	struct ns *ns = c->ns;
	struct timespec now = ns_now();
	int res = 0;

	if (c->readonly)
		return -EROFS;
	if (c->in_txn)
		return -EALREADY;
	t = calloc(1, sizeof(*t));
	if (!t)
		return -ENOMEM;
	t->c = c;
	t->meta = c->meta;
	t->meta.m.commit_seq++;
	t->meta.m.step = has_step ? step : 0;
	t->meta.m.has_step = has_step;
	t->meta.m.commit_time_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;

	pthread_mutex_lock(&ns->lock);
	t->meta.next_ino = ns->next_ino;
	t->n_dead_seen = ns->n_dead;
	t->dead = malloc((ns->n_dead + 1) * sizeof(*t->dead));
	res = t->dead ? u64map_reserve(&t->dead_set, ns->n_dead) : -ENOMEM;
	for (size_t d = 0; !res && d < ns->n_dead; d++) {
		void *row = u64map_get(&c->rows, ns->dead[d]);

		if (!row)
			continue;
		t->dead[t->n_dead++] = ns->dead[d];
		u64map_put(&t->dead_set, ns->dead[d], row);
	}
	list_for_each_safe(l, next, &ns->dirty)
	{
		if (!res)
			res = freeze_inode(t, list_entry(l, struct ns_inode, dirty));
	}
	if (!res) /* so that txn_end cannot fail */
		res = u64map_reserve(&c->rows, t->changes.n);
	if (res < 0)
		mark_again_locked(t);
	pthread_mutex_unlock(&ns->lock);
	if (res < 0) {
		txn_free(t);
		return res;
	}
	*changed = t->changes.n || t->n_dead || t->meta.m.has_step != c->meta.m.has_step ||
		   t->meta.m.step != c->meta.m.step;
	c->in_txn = true;
	*out = t;
	return 0;
}

/* --- maps ----------------------------------------------------------------------------------- */

static bool is_held(struct ns *ns, uint64_t ino)
{
	struct ns_inode *i;
	bool held;

	pthread_mutex_lock(&ns->lock);
	i = ns_find_locked(ns, ino);
	held = i && i->flags & NS_HELD;
	pthread_mutex_unlock(&ns->lock);
	return held;
}

int catalog_txn_map(struct catalog_txn *t, uint64_t ino, uint32_t n)
{
	struct change *ch = u64map_get(&t->changes, ino);

	if (ch ? ch->held : is_held(t->c->ns, ino))
		return -EINVAL;
	if (!ch && !u64map_get(&t->c->rows, ino))
		return -ENOENT;
	if (u64map_get(&t->dead_set, ino))
		return -ENOENT;
	if (!ch)
		ch = change_new(t, ino, CHANGE_MAP);
	if (!ch)
		return -ENOMEM;
	ch->has_map = true;
	ch->n_map = n;
	return 0;
}

int catalog_txn_segment(struct catalog_txn *t, uint64_t ino, uint32_t seg, const struct extent *e,
			uint32_t n)
{
	struct change *ch = u64map_get(&t->changes, ino);
	struct segment *s;

	if (!ch || !ch->has_map || n > BLOCKMAP_SEGMENT ||
	    (ch->n_segs && ch->segs[ch->n_segs - 1]->seg >= seg))
		return -EINVAL;
	if (ch->n_segs == ch->cap_segs) {
		uint32_t cap = ch->cap_segs ? ch->cap_segs * 2 : 1;
		struct segment **segs = realloc(ch->segs, cap * sizeof(struct segment *));

		if (!segs)
			return -ENOMEM;
		if (ch->cap_segs)
			t->heap -= heap_cost(ch->cap_segs * sizeof(*segs));
		t->heap += heap_cost(cap * sizeof(*segs));
		ch->segs = segs;
		ch->cap_segs = cap;
	}
	s = malloc(sizeof(*s) + n * sizeof(*e));
	if (!s)
		return -ENOMEM;
	*s = (struct segment){.seg = seg, .n = n};
	if (n)
		memcpy(s->e, e, n * sizeof(*e));
	t->heap += heap_cost(sizeof(*s) + n * sizeof(*e));
	ch->segs[ch->n_segs++] = s;
	return 0;
}

struct extent *catalog_txn_segment_get(struct catalog_txn *t, uint64_t ino, uint32_t seg,
				       uint32_t *n)
{
	struct change *ch = u64map_get(&t->changes, ino);
	uint32_t lo = 0, hi = ch ? ch->n_segs : 0;

	*n = 0;
	while (lo < hi) {
		uint32_t mid = lo + (hi - lo) / 2;
		struct segment *s = ch->segs[mid];

		if (s->seg == seg) {
			*n = s->n;
			return s->e;
		}
		if (s->seg < seg)
			lo = mid + 1;
		else
			hi = mid;
	}
	return NULL;
}

bool catalog_txn_has(const struct catalog_txn *t, uint64_t ino)
{
	return u64map_get(&t->changes, ino);
}

uint64_t catalog_txn_seq(const struct catalog_txn *t)
{
	return t->meta.m.commit_seq;
}

uint64_t catalog_txn_memory(const struct catalog_txn *t)
{
	return t->heap + u64map_heap(&t->changes) + u64map_heap(&t->dead_set) +
	       t->n_dead * sizeof(*t->dead) + t->changes.n * sizeof(*t->sorted);
}

uint64_t catalog_txn_blame(const struct catalog_txn *t)
{
	return t->blame;
}

/* --- writing -------------------------------------------------------------------------------- */

/* Runs an UPDATE or INSERT that must hit one row. */
static int run_one(sqlite3 *db, sqlite3_stmt *st)
{
	int res = cat_run(st);

	return res || sqlite3_changes(db) == 1 ? res : -EUCLEAN;
}

static void bind_blob(sqlite3_stmt *st, int at, const void *p, size_t len)
{
	sqlite3_bind_blob64(st, at, len ? p : "", len, SQLITE_STATIC);
}

static void bind_row(sqlite3_stmt *st, const struct ns_row *row, bool entry_only)
{
	sqlite3_bind_int64(st, 1, (int64_t)row->ino);
	sqlite3_bind_int64(st, 2, (int64_t)row->parent);
	bind_blob(st, 3, row->name, row->name_len);
	if (entry_only)
		return;
	sqlite3_bind_int64(st, 4, row->mode);
	sqlite3_bind_int64(st, 5, row->uid);
	sqlite3_bind_int64(st, 6, row->gid);
	sqlite3_bind_int64(st, 7, (int64_t)row->size);
	sqlite3_bind_int64(st, 8, row->mtime.tv_sec);
	sqlite3_bind_int64(st, 9, row->mtime.tv_nsec);
	sqlite3_bind_int64(st, 10, row->ctime.tv_sec);
	sqlite3_bind_int64(st, 11, row->ctime.tv_nsec);
	sqlite3_bind_int64(st, 12, row->flags);
}

static int write_xattrs(struct catalog *c, const struct ns_row *row, bool replace)
{
	sqlite3_stmt *st = c->st[ST_XATTR_INSERT];
	const uint8_t *value;
	uint32_t name_len, size;
	const char *name;
	size_t pos = 0;
	int res = 0;

	if (replace) {
		sqlite3_bind_int64(c->st[ST_XATTR_DELETE], 1, (int64_t)row->ino);
		res = cat_run(c->st[ST_XATTR_DELETE]);
	}
	while (!res && ns_xattrs_next(row->xattrs, row->xattrs_len, &pos, &name, &name_len, &value,
				      &size) > 0) {
		sqlite3_bind_int64(st, 1, (int64_t)row->ino);
		bind_blob(st, 2, name, name_len);
		bind_blob(st, 3, value, size);
		res = run_one(c->db, st);
	}
	return res;
}

/* Runs one of the statements that write a row of table inode. */
static int write_row(struct catalog *c, enum cat_stmt which, const struct change *ch)
{
	sqlite3_stmt *st = c->st[which];

	sqlite3_bind_int64(st, 1, (int64_t)ch->after->ino);
	if (which != ST_UPDATE_HASH)
		bind_row(st, &ch->row, which == ST_UPDATE_ENTRY);
	sqlite3_bind_int64(st, 13, (int64_t)cat_hash_row(ch->after));
	return run_one(c->db, st);
}

int cat_write_segment(sqlite3_stmt *st, uint64_t ino, uint32_t seg, const struct extent *e,
		      uint32_t n, uint64_t *sum)
{
	uint8_t blob[BLOCKMAP_SEGMENT * BLOCKMAP_ENTRY];
	uint64_t hash;

	blockmap_encode(e, n, blob);
	hash = cat_hash_segment(ino, seg, blob, (size_t)n * BLOCKMAP_ENTRY);
	*sum += hash;
	sqlite3_bind_int64(st, 1, (int64_t)ino);
	sqlite3_bind_int64(st, 2, seg);
	bind_blob(st, 3, blob, (size_t)n * BLOCKMAP_ENTRY);
	sqlite3_bind_int64(st, 4, (int64_t)hash);
	return cat_run(st);
}

static int write_segments(struct catalog *c, const struct change *ch)
{
	sqlite3_stmt *del = c->st[ST_MAP_DELETE];
	uint64_t sum = 0;
	int res = 0;

	for (uint32_t n = 0; !res && n < ch->n_segs; n++) {
		const struct segment *s = ch->segs[n];

		if (s->same)
			continue;
		if (s->n) {
			res = cat_write_segment(c->st[ST_MAP_PUT], ch->after->ino, s->seg, s->e,
						s->n, &sum);
			continue;
		}
		sqlite3_bind_int64(del, 1, (int64_t)ch->after->ino);
		sqlite3_bind_int64(del, 2, s->seg);
		res = run_one(c->db, del);
	}
	return res;
}

static int write_change(struct catalog *c, const struct change *ch)
{
	const struct cat_row *before = u64map_get(&c->rows, ch->after->ino);
	int res = 0;

	if (ch->is_new)
		res = write_row(c, ST_INSERT, ch);
	else if (ch->kind != CHANGE_MAP)
		res = write_row(c, ch->kind == CHANGE_ROW ? ST_UPDATE : ST_UPDATE_ENTRY, ch);
	else if (ch->after->map != before->map)
		res = write_row(c, ST_UPDATE_HASH, ch);
	if (!res)
		res = write_segments(c, ch);
	if (!res && ch->kind == CHANGE_ROW && ch->after->xattr != (before ? before->xattr : 0))
		res = write_xattrs(c, &ch->row, !ch->is_new);
	return res;
}

int cat_write_meta(sqlite3_stmt *st, const struct cat_meta *m)
{
	sqlite3_bind_int64(st, 1, m->m.version);
	sqlite3_bind_int64(st, 2, m->m.block);
	bind_blob(st, 3, m->m.uuid, sizeof(m->m.uuid));
	sqlite3_bind_int64(st, 4, (int64_t)m->m.commit_seq);
	if (m->m.has_step)
		sqlite3_bind_int64(st, 5, (int64_t)m->m.step);
	sqlite3_bind_int64(st, 6, (int64_t)m->m.commit_time_ns);
	sqlite3_bind_int64(st, 7, (int64_t)m->next_ino);
	sqlite3_bind_int64(st, 8, (int64_t)m->inodes);
	sqlite3_bind_int64(st, 9, (int64_t)m->sum);
	sqlite3_bind_int64(st, 10, (int64_t)cat_hash_meta(m));
	return cat_run(st);
}

/* One attempt. *tried: COMMIT itself was run. */
static int write_txn(struct catalog *c, struct catalog_txn *t, bool *tried)
{
	int res;

	res = cat_run(c->st[ST_BEGIN]);
	if (res < 0)
		return res;
	for (size_t d = 0; !res && d < t->n_dead; d++) {
		sqlite3_bind_int64(c->st[ST_DELETE], 1, (int64_t)t->dead[d]);
		res = run_one(c->db, c->st[ST_DELETE]);
		sqlite3_bind_int64(c->st[ST_XATTR_DELETE], 1, (int64_t)t->dead[d]);
		if (!res)
			res = cat_run(c->st[ST_XATTR_DELETE]);
		sqlite3_bind_int64(c->st[ST_MAP_DROP], 1, (int64_t)t->dead[d]);
		if (!res)
			res = cat_run(c->st[ST_MAP_DROP]);
	}
	for (size_t n = 0; !res && n < t->n_sorted; n++) {
		res = write_change(c, t->sorted[n]);
		if (res == -EUCLEAN || res == -EFBIG)
			t->blame = t->sorted[n]->after->ino;
	}
	if (!res)
		res = cat_write_meta(c->st[ST_META], &t->meta);
	if (!res) {
		*tried = true;
		res = cat_run(c->st[ST_COMMIT]);
	}
	if (res < 0 && !sqlite3_get_autocommit(c->db))
		cat_run(c->st[ST_ROLLBACK]);
	return res;
}

/* Blocks of a file, as many as a map may have entries. */
static uint64_t blocks_of(const struct catalog *c, uint64_t size)
{
	return size / c->meta.m.block + (size % c->meta.m.block != 0);
}

static int by_number(const void *pa, const void *pb)
{
	const struct change *a = *(struct change *const *)pa, *b = *(struct change *const *)pb;

	return a->after->ino < b->after->ino ? -1 : a->after->ino > b->after->ino;
}

/* The hash of what is stored of a segment, 0: nothing. It is checked: the sums of what is written
 * are made with it. */
static int stored_hash(struct catalog *c, uint64_t ino, uint32_t seg, uint64_t *hash)
{
	sqlite3_stmt *st = c->st[ST_MAP_GET];
	int rc, res;

	*hash = 0;
	sqlite3_bind_int64(st, 1, (int64_t)ino);
	sqlite3_bind_int64(st, 2, seg);
	errno = 0;
	rc = sqlite3_step(st);
	res = cat_errno(c->db, rc);
	if (rc == SQLITE_ROW) {
		*hash = (uint64_t)sqlite3_column_int64(st, 1);
		if (*hash != cat_hash_segment(ino, seg, sqlite3_column_blob(st, 0),
					      (size_t)sqlite3_column_bytes(st, 0)))
			res = -EUCLEAN;
	}
	sqlite3_reset(st);
	return res;
}

/* Which segments are other than what is stored, and the hash of the map with them. */
static int prepare_map(struct catalog *c, struct change *ch)
{
	uint8_t blob[BLOCKMAP_SEGMENT * BLOCKMAP_ENTRY];
	struct cat_row *after = ch->after;

	for (uint32_t k = 0; k < ch->n_segs; k++) {
		struct segment *s = ch->segs[k];
		uint64_t before = 0, now = 0;
		int res;

		s->n = blockmap_trim(s->e, s->n);
		for (uint32_t b = 0; b < s->n; b++)
			if (blockmap_check(&s->e[b], c->meta.m.block))
				return -EINVAL;
		if (s->n && (uint64_t)s->seg * BLOCKMAP_SEGMENT + s->n > ch->n_map)
			return -EINVAL;
		if (!ch->is_new) {
			res = stored_hash(c, after->ino, s->seg, &before);
			if (res < 0)
				return res;
		}
		blockmap_encode(s->e, s->n, blob);
		if (s->n)
			now = cat_hash_segment(after->ino, s->seg, blob,
					       (size_t)s->n * BLOCKMAP_ENTRY);
		s->same = now == before;
		after->map += now - before;
	}
	after->n_map = ch->n_map;
	return 0;
}

/* The hashes, the sum and the count as they will be. -EINVAL: a map that the file cannot have,
 * which no mount would accept. */
static int prepare(struct catalog *c, struct catalog_txn *t)
{
	struct change *ch;
	size_t pos = 0;

	t->sorted = malloc((t->changes.n + 1) * sizeof(*t->sorted));
	if (!t->sorted)
		return -ENOMEM;
	t->meta.sum = c->meta.sum;
	t->meta.inodes = c->meta.inodes;
	while ((ch = u64map_next(&t->changes, &pos))) {
		struct cat_row *after = ch->after;

		t->sorted[t->n_sorted++] = ch;
		t->blame = after->ino;
		if (!ch->is_new)
			t->meta.sum -= cat_hash_row(u64map_get(&c->rows, after->ino));
		else
			t->meta.inodes++;
		if (ch->kind != CHANGE_MAP)
			after->entry = cat_hash_entry(&ch->row);
		if (ch->kind == CHANGE_ROW) {
			after->attr = cat_hash_attr(&ch->row);
			after->xattr = cat_hash_bytes(ch->row.xattrs, ch->row.xattrs_len);
			after->size = ch->row.size;
		}
		if (ch->has_map) {
			int res = prepare_map(c, ch);

			if (res < 0)
				return res;
		}
		if (after->n_map > blocks_of(c, after->size))
			return -EINVAL;
		t->meta.sum += cat_hash_row(after);
	}
	for (size_t d = 0; d < t->n_dead; d++)
		t->meta.sum -= cat_hash_row(u64map_get(&c->rows, t->dead[d]));
	t->meta.inodes -= t->n_dead;
	t->blame = 0;
	qsort(t->sorted, t->n_sorted, sizeof(struct change *), by_number);
	return 0;
}

/*
 * All that is in the WAL goes to the database, and both are durable: so a failed commit in the WAL
 * cannot come back, and what was read from the WAL at the start cannot get lost. The WAL keeps its
 * length, for that is room that no other program can take on a full disk: its header is wiped, which
 * makes it an empty one for whoever opens it next. SQLite itself starts it anew, since all of it is
 * in the database.
 */
int cat_settle(sqlite3 *db)
{
	static const char wiped[32];
	sqlite3_file *wal = NULL, *file = NULL;
	sqlite3_int64 size = 0;
	int rc, frames = 0, done = 0;

	errno = 0;
	rc = sqlite3_wal_checkpoint_v2(db, NULL, SQLITE_CHECKPOINT_RESTART, &frames, &done);
	if (rc == SQLITE_OK && frames != done)
		rc = SQLITE_BUSY;
	if (rc == SQLITE_OK)
		rc = sqlite3_file_control(db, "main", SQLITE_FCNTL_FILE_POINTER, &file);
	if (rc == SQLITE_OK && file && file->pMethods)
		rc = file->pMethods->xSync(file, SQLITE_SYNC_FULL);
	if (rc == SQLITE_OK)
		rc = sqlite3_file_control(db, "main", SQLITE_FCNTL_JOURNAL_POINTER, &wal);
	if (rc != SQLITE_OK || !wal || !wal->pMethods)
		return cat_errno(db, rc);
	rc = wal->pMethods->xFileSize(wal, &size);
	if (rc == SQLITE_OK && size)
		rc = wal->pMethods->xWrite(wal, wiped, sizeof(wiped), 0);
	if (rc == SQLITE_OK)
		rc = wal->pMethods->xSync(wal, SQLITE_SYNC_FULL);
	return cat_errno(db, rc);
}

static void set_uncertain(struct catalog *c, bool uncertain)
{
	pthread_mutex_lock(&c->lock);
	c->uncertain = uncertain;
	pthread_mutex_unlock(&c->lock);
}

/* With the ballast, if need be. */
static int settle(struct catalog *c)
{
	int res = cat_settle(c->db);

	if (res == -ENOSPC && cat_ballast_drop(c))
		res = cat_settle(c->db);
	c->unsettled = res < 0;
	if (!res)
		set_uncertain(c, false);
	return res;
}

int cat_make_certain(struct catalog *c)
{
	return catalog_uncertain(c) ? settle(c) : 0;
}

int catalog_commit(struct catalog *c, struct catalog_txn *t)
{
	bool tried = false;
	int res = prepare(c, t);

	if (res < 0)
		return res;
	if (c->unsettled) {
		res = settle(c);
		if (res < 0)
			return res;
	}
	res = write_txn(c, t, &tried);
	/* Where there is no space the WAL has room at its start, once its content is in the database; and
	 * what the ballast gave. */
	if (res == -ENOSPC) {
		int settled = settle(c);

		if (settled == 0 || settled == -ENOSPC)
			res = write_txn(c, t, &tried);
		if (res == -ENOSPC && cat_ballast_drop(c))
			res = write_txn(c, t, &tried);
		if (!res)
			c->unsettled = false; /* a database that cannot grow can wait */
	}
	if (res < 0 && tried) {
		set_uncertain(c, true);
		settle(c);
	}
	if (res < 0 || c->making)
		return res;
	/* Housekeeping: a failure here costs space, not the commit. */
	if (c->wal_pages >= CATALOG_WAL_MAX &&
	    sqlite3_wal_checkpoint_v2(c->db, NULL, SQLITE_CHECKPOINT_PASSIVE, NULL, NULL))
		c->unsettled = true;
	cat_ballast_restore(c);
	return 0;
}

/* --- the end -------------------------------------------------------------------------------- */

static void apply(struct catalog *c, struct catalog_txn *t)
{
	struct ns *ns = c->ns;
	struct change *ch;
	size_t pos = 0;

	while ((ch = u64map_next(&t->changes, &pos))) {
		free(u64map_get(&c->rows, ch->after->ino));
		u64map_put(&c->rows, ch->after->ino, ch->after);
		ch->after = NULL;
	}
	for (size_t d = 0; d < t->n_dead; d++)
		free(u64map_del(&c->rows, t->dead[d]));
	pthread_mutex_lock(&ns->lock);
	ns->n_dead -= t->n_dead_seen;
	if (ns->n_dead)
		memmove(ns->dead, ns->dead + t->n_dead_seen, ns->n_dead * sizeof(*ns->dead));
	pthread_mutex_unlock(&ns->lock);
	pthread_mutex_lock(&c->lock);
	c->meta = t->meta;
	c->heap = cat_rows_heap(&c->rows);
	pthread_mutex_unlock(&c->lock);
}

void catalog_txn_end(struct catalog *c, struct catalog_txn *t, int res)
{
	if (res == 0) {
		apply(c, t);
	} else {
		pthread_mutex_lock(&c->ns->lock);
		mark_again_locked(t);
		pthread_mutex_unlock(&c->ns->lock);
	}
	c->in_txn = false;
	txn_free(t);
}
