/* SPDX-License-Identifier: Apache-2.0 */
/* marks.h - whether the policy knows what can be done with each block as it is now. */
#ifndef TESTS_MARKS_H
#define TESTS_MARKS_H

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/engine_impl.h"

/* Loop thread: as if by chance, between two things that it does. */
static void marks_look(void *arg)
{
	struct engine *e = arg;
	struct cache *c = &e->c;
	uint64_t dirty = 0;

	for (unsigned int class = 0; class < POLICY_CLASSES; class ++) {
		uint64_t counts = 0;

		for (struct policy_node *p = policy_victim(c->policy, class, 0, NULL); p;
		     p = policy_victim(c->policy, class, 0, p)) {
			struct block *b = container_of(p, struct block, pol);

			if (p->marks != block_marks(b) ||
			    policy_counts_before(c->policy, p) != counts) {
				fprintf(stderr,
					"file %" PRIu64 ", block %u, %s: its marks are %#x, due %#x; "
					"%" PRIu64 " bytes before it, due %" PRIu64 "\n",
					b->f->ino, b->n, block_state_name(b->state), p->marks,
					block_marks(b), policy_counts_before(c->policy, p), counts);
				abort();
			}
			counts += p->marks & POLICY_COUNTS ? p->bytes : 0;
			dirty += b->state == BLOCK_DIRTY || b->state == BLOCK_WRITING ? b->piece : 0;
		}
	}
	if (dirty != c->dirty_bytes) {
		fprintf(stderr, "%" PRIu64 " bytes are dirty, counted are %" PRIu64 "\n", dirty,
			c->dirty_bytes);
		abort();
	}
}

static inline void marks_check(struct engine *e)
{
	loop_call(engine_loop(e), marks_look, e);
}

static inline uint64_t marks_visits(struct engine *e)
{
	return policy_visits(e->c.policy);
}

#endif
