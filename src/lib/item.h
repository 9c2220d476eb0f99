/* SPDX-License-Identifier: Apache-2.0 */
/* item.h - the items of a step: whether they fit what was registered. */
#ifndef LIB_ITEM_H
#define LIB_ITEM_H

#include "lib/session.h"

/* Everything about the items that could be wrong, looked at before anything is changed. */
int items_check(struct moment_session *s, const struct moment_item *items, size_t n);

#endif
