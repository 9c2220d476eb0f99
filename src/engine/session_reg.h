/* SPDX-License-Identifier: Apache-2.0 */
/*
 * session_reg.h - a REGISTER under way, shared by session_check.c (what is asked for, does it fit
 * what is there) and session_register.c (making, reserving, recording).
 */
#ifndef ENGINE_SESSION_REG_H
#define ENGINE_SESSION_REG_H

#include "engine/names.h"
#include "engine/session.h"

#define SHAPE_TEXT (MOMENT_NDIM_MAX * 21 + 3) /* "[", numbers of up to 20 digits, "," or "]" */

struct entry {
	const struct moment_reg_entry *m;
	const uint64_t *shape;
	const char *name, *hyper;
	char dirname[NAMES_MAX + 1];
	char label[128]; /* the name, for messages */
	uint64_t dir;
	bool made;
	uint64_t pinned; /* bytes of memory */
	uint64_t step;
	uint64_t ino[MOMENT_ROLES]; /* 0: does not have it */
	bool made_file[MOMENT_ROLES];
	bool ref[MOMENT_ROLES]; /* a reference is held */
	bool registered[MOMENT_ROLES];
	struct file *f[MOMENT_ROLES];
};

struct reg {
	struct session *s;
	struct moment_msg *msg; /* a copy */
	uint32_t flags, n;
	struct entry *e;
	struct waiter w;
	struct commit_wait cw;
	struct patience patience;
	/* where reserving has got to */
	uint32_t i, block;
	unsigned int role;
	uint64_t reserved, need;
	uint64_t pool_size; /* when reserving began */
	unsigned int waits; /* for the total */
	bool checked;	    /* the total can be had */
	uint64_t pinned;
	struct moment_register_reply *reply; /* waits until the kernel has been told */
	size_t reply_len;
	char err[768];
};

/* Notes the text for the reply; returns res. */
int reg_error(struct reg *r, int res, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
int reg_in_use(struct reg *r, const struct entry *e, const char *file); /* -EBUSY */

/* One entry of the message, `left` bytes at `at`. */
int reg_parse(struct reg *r, struct entry *e, const char *at, size_t left);
/* All entries against what the backing holds; changes nothing there. */
int reg_check(struct reg *r);
uint64_t reg_bytes(const struct entry *e, unsigned int role); /* of one of its files */
void reg_shape(const struct entry *e, char out[SHAPE_TEXT]);  /* "[2,3]" */

#endif
