/* SPDX-License-Identifier: Apache-2.0 */
/* temp.h - temporary backings: made for one session, gone with it. */
#ifndef LIB_TEMP_H
#define LIB_TEMP_H

#include <stdbool.h>

struct temp {
	char *dir;     /* NULL: none */
	char *backing; /* dir/backing */
	int lock;      /* held as long as the session lives */
};

/* Removes what crashed sessions left in root (NULL: $TMPDIR or /var/tmp), then makes a new one
 * there. *on_tmpfs: it lies in RAM. */
int temp_create(struct temp *t, const char *root, bool *on_tmpfs);
void temp_remove(struct temp *t);
/* In a forked child: the lock must end with the parent. Async-signal-safe. */
void temp_forked(struct temp *t);

#endif
