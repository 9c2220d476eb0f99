/* SPDX-License-Identifier: Apache-2.0 */
/*
 * list.h - intrusive doubly linked list with a sentinel, the usual kernel idea.
 *
 * A node that is in no list points at itself, so removing twice is harmless and
 * list_linked() tells whether a node is queued somewhere.
 */
#ifndef ENGINE_LIST_H
#define ENGINE_LIST_H

#include <stdbool.h>
#include <stddef.h>

struct list {
	struct list *next, *prev;
};

static inline void list_init(struct list *l)
{
	l->next = l->prev = l;
}

static inline bool list_linked(const struct list *l)
{
	return l->next != l;
}

static inline bool list_empty(const struct list *l)
{
	return l->next == l;
}

static inline void list_insert_between(struct list *n, struct list *prev, struct list *next)
{
	n->prev = prev;
	n->next = next;
	prev->next = n;
	next->prev = n;
}

static inline void list_push_back(struct list *head, struct list *n)
{
	list_insert_between(n, head->prev, head);
}

static inline void list_push_front(struct list *head, struct list *n)
{
	list_insert_between(n, head, head->next);
}

static inline void list_remove(struct list *n)
{
	n->prev->next = n->next;
	n->next->prev = n->prev;
	list_init(n);
}

/* Moves all of `from` to the end of `to`; `from` is empty afterwards. */
static inline void list_splice_back(struct list *to, struct list *from)
{
	if (list_empty(from))
		return;
	from->next->prev = to->prev;
	to->prev->next = from->next;
	from->prev->next = to;
	to->prev = from->prev;
	list_init(from);
}

#define list_entry(ptr, type, member)  ((type *)((char *)(ptr)-offsetof(type, member)))
#define list_first(head, type, member) list_entry((head)->next, type, member)
#define list_for_each(pos, head) \
	for (struct list *pos = (head)->next; pos != (head); pos = pos->next)
#define list_for_each_safe(pos, tmp, head) \
	for (struct list *pos = (head)->next, *tmp = pos->next; pos != (head); \
	     pos = tmp, tmp = tmp->next)

#endif
