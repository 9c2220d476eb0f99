/* SPDX-License-Identifier: Apache-2.0 */
/* flow.h - the pipeline of one step: leases ahead, computing, releasing. */
#ifndef LIB_FLOW_H
#define LIB_FLOW_H

#include "lib/session.h"

/* Updates them, in order, inside the open step. On an error all leases are back; s->touched tells
 * whether anything was changed. */
int flow_run(struct moment_session *s, const struct moment_item *items, size_t n);

/* Bytes that may be leased at a time. */
uint64_t flow_budget(const struct moment_session *s);

#endif
