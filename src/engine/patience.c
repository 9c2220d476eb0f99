/* SPDX-License-Identifier: Apache-2.0 */
/*
 * patience.c - waiting for a block, but not for ever for a lease.
 *
 * A block that the drive, a commit or a plain op has comes free by itself, and is waited for as long
 * as that takes. One that a session has leased comes free when that program pleases. Who waits for
 * blocks of a file in which leases may be out waits here too: when PATIENCE_NS are over and a
 * session does keep a block of that file, it gives up with -EBUSY, and says who has it. Truncating,
 * punching, writing past the end of a file and a fresh start are such waits; a rollback, which is
 * held up by leases of any file, has a patience of its own (revert.c). What nobody waits for (the
 * blocks of a removed file) needs none.
 *
 * Loop thread only. Whoever waits looks again when woken, whether or not it has given up.
 */
#include "engine/engine_impl.h"

#define LOOK_NS 100000000ull

static void look(struct loop_timer *t)
{
	struct engine *e = container_of(t, struct engine, patience_timer);
	uint64_t now = loop_now_ns();
	bool again;

	do { /* one that gives up may be the end of others */
		again = false;
		list_for_each(l, &e->patience)
		{
			struct patience *p = list_entry(l, struct patience, link);
			const struct session *by;

			if (now < p->until_ns || !list_linked(&p->w->link))
				continue;
			by = session_lessee_of(e, p->f);
			p->until_ns = now + LOOK_NS;
			if (by && p->give_up(p, by)) {
				again = true;
				break;
			}
		}
	} while (again);
	if (!list_empty(&e->patience))
		loop_timer_set(e->loop, &e->patience_timer, LOOK_NS);
}

void patience_begin(struct engine *e, struct patience *p, struct file *f, struct waiter *w)
{
	p->f = f;
	p->w = w;
	if (list_linked(&p->link))
		return;
	p->until_ns = loop_now_ns() + PATIENCE_NS;
	list_push_back(&e->patience, &p->link);
	if (list_linked(&e->patience_timer.link))
		return;
	e->patience_timer.fire = look;
	loop_timer_set(e->loop, &e->patience_timer, LOOK_NS);
}

void patience_end(struct patience *p)
{
	list_remove(&p->link);
}
