/* SPDX-License-Identifier: Apache-2.0 */
/*
 * u64map.c - see u64map.h. At most three quarters full. Whoever owns the map owns the values.
 */
#include "engine/u64map.h"

#include <errno.h>
#include <stdlib.h>

static size_t slot_of(const struct u64map *m, uint64_t key)
{
	key ^= key >> 32;
	key *= 0x9e3779b97f4a7c15u;
	key ^= key >> 29;
	return key & (m->cap - 1);
}

void u64map_fini(struct u64map *m)
{
	free(m->slots);
	*m = (struct u64map){0};
}

void *u64map_get(const struct u64map *m, uint64_t key)
{
	if (!m->n || !key)
		return NULL;
	for (size_t i = slot_of(m, key); m->slots[i].key; i = (i + 1) & (m->cap - 1))
		if (m->slots[i].key == key)
			return m->slots[i].val;
	return NULL;
}

static void put_new(struct u64map *m, uint64_t key, void *val)
{
	size_t i = slot_of(m, key);

	while (m->slots[i].key)
		i = (i + 1) & (m->cap - 1);
	m->slots[i] = (struct u64slot){key, val};
	m->n++;
}

int u64map_reserve(struct u64map *m, size_t more)
{
	struct u64map bigger = {0};

	if (m->cap && m->n + more <= m->cap / 4 * 3)
		return 0;
	bigger.cap = m->cap ? m->cap : 16;
	while (m->n + more > bigger.cap / 4 * 3)
		bigger.cap *= 2;
	bigger.slots = calloc(bigger.cap, sizeof(*bigger.slots));
	if (!bigger.slots)
		return -ENOMEM;
	for (size_t i = 0; i < m->cap; i++)
		if (m->slots[i].key)
			put_new(&bigger, m->slots[i].key, m->slots[i].val);
	free(m->slots);
	*m = bigger;
	return 0;
}

int u64map_put(struct u64map *m, uint64_t key, void *val)
{
	int res;

	if (m->n) {
		for (size_t i = slot_of(m, key); m->slots[i].key; i = (i + 1) & (m->cap - 1)) {
			if (m->slots[i].key == key) {
				m->slots[i].val = val;
				return 0;
			}
		}
	}
	res = u64map_reserve(m, 1);
	if (!res)
		put_new(m, key, val);
	return res;
}

void *u64map_del(struct u64map *m, uint64_t key)
{
	size_t mask = m->cap - 1, hole, i;
	void *val;

	if (!m->n || !key)
		return NULL;
	hole = slot_of(m, key);
	while (m->slots[hole].key != key) {
		if (!m->slots[hole].key)
			return NULL;
		hole = (hole + 1) & mask;
	}
	val = m->slots[hole].val;
	/* Whoever probed past the hole to get where it is moves into it. */
	for (i = (hole + 1) & mask; m->slots[i].key; i = (i + 1) & mask) {
		size_t home = slot_of(m, m->slots[i].key);

		if (((i - home) & mask) >= ((i - hole) & mask)) {
			m->slots[hole] = m->slots[i];
			hole = i;
		}
	}
	m->slots[hole] = (struct u64slot){0};
	m->n--;
	return val;
}

void *u64map_next(const struct u64map *m, size_t *pos)
{
	while (*pos < m->cap) {
		struct u64slot *s = &m->slots[(*pos)++];

		if (s->key)
			return s->val;
	}
	return NULL;
}
