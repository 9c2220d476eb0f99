/* SPDX-License-Identifier: Apache-2.0 */
/*
 * catalog_hash.c - the canonical bytes that the catalog's hashes are over: XXH3-64 of
 * little-endian fields in the order written here, which is the order in momentfs-format.5.
 */
#include "engine/catalog_impl.h"

#include <endian.h>
#include <string.h>
#include <xxhash.h>

struct bytes {
	size_t n;
	uint8_t b[320];
};

static void put(struct bytes *b, uint64_t v)
{
	v = htole64(v);
	memcpy(b->b + b->n, &v, sizeof(v));
	b->n += sizeof(v);
}

static uint64_t finish(const struct bytes *b)
{
	return XXH3_64bits(b->b, b->n);
}

uint64_t cat_hash_bytes(const void *p, size_t len)
{
	return len ? XXH3_64bits(p, len) : 0;
}

uint64_t cat_hash_segment(uint64_t ino, uint32_t seg, const void *data, size_t len)
{
	uint8_t b[16 + BLOCKMAP_SEGMENT * BLOCKMAP_ENTRY];
	uint64_t head[2] = {htole64(ino), htole64(seg)};

	len = min_u64(len, sizeof(b) - sizeof(head));
	memcpy(b, head, sizeof(head));
	if (len)
		memcpy(b + sizeof(head), data, len);
	return XXH3_64bits(b, sizeof(head) + len);
}

uint64_t cat_hash_entry(const struct ns_row *row)
{
	struct bytes b = {0};

	put(&b, row->parent);
	memcpy(b.b + b.n, row->name, row->name_len);
	b.n += row->name_len;
	return finish(&b);
}

uint64_t cat_hash_attr(const struct ns_row *row)
{
	struct bytes b = {0};

	put(&b, row->mode);
	put(&b, row->uid);
	put(&b, row->gid);
	put(&b, row->size);
	put(&b, (uint64_t)row->mtime.tv_sec);
	put(&b, (uint64_t)row->mtime.tv_nsec);
	put(&b, (uint64_t)row->ctime.tv_sec);
	put(&b, (uint64_t)row->ctime.tv_nsec);
	put(&b, row->flags);
	return finish(&b);
}

uint64_t cat_hash_row(const struct cat_row *row)
{
	struct bytes b = {0};

	put(&b, row->ino);
	put(&b, row->entry);
	put(&b, row->attr);
	put(&b, row->xattr);
	put(&b, row->map);
	return finish(&b);
}

uint64_t cat_hash_meta(const struct cat_meta *m)
{
	struct bytes b = {0};

	put(&b, m->m.version);
	put(&b, m->m.block);
	memcpy(b.b + b.n, m->m.uuid, sizeof(m->m.uuid));
	b.n += sizeof(m->m.uuid);
	put(&b, m->m.commit_seq);
	put(&b, m->m.has_step);
	put(&b, m->m.step);
	put(&b, m->m.commit_time_ns);
	put(&b, m->next_ino);
	put(&b, m->inodes);
	put(&b, m->sum);
	return finish(&b);
}
