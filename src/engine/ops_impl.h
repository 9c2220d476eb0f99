/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ops_impl.h - an op under way, shared by the files of the ops.
 */
#ifndef ENGINE_OPS_IMPL_H
#define ENGINE_OPS_IMPL_H

#include "engine/engine_impl.h"

struct op_run {
	struct engine *e;
	struct engine_op *op; /* NULL for a drop */
	struct file *f;
	struct get g;
	struct waiter w;
	struct loop_work work;
	struct loop_task task;
	struct commit_wait cw;
	struct patience patience;
	struct loop_timer timer; /* bracket.c */
	uint64_t pos, end;
	uint64_t pool_size;  /* before: ALLOCATE, TRIM */
	unsigned int waits;  /* ALLOCATE: for its total */
	bool checked;	     /* ALLOCATE: the total can be had; TRIM: begun */
	void (*resume)(struct op_run *);
	char *own; /* memory: the bytes of a READ that goes block by block; for each block of an
		      ALLOCATE, whether it is the one that keeps it */
	unsigned int n;
	struct list link; /* in engine.runs */
	struct want want[];
};

struct op_run *run_new(struct engine *e, struct engine_op *op, unsigned int n);
void run_free(struct op_run *r);
/* The op's end: frees its run, calls done(). */
void op_end(struct engine_op *op, int64_t res);

void op_sync(struct engine *e, struct engine_op *op);

/* bracket.c */
void op_step(struct engine *e, struct engine_op *op);
/* An fsync: 1: it is a commit's business, 2: it waits, else its answer. */
int bracket_sync(struct engine *e, struct engine_op *op, const struct file *f);
/* The op changes the file: if a step is open and it is the step's, so is the file. */
void bracket_changes(struct engine *e, struct file *f, const struct engine_op *op);

/* ops_read.c */
void op_read(struct engine *e, struct engine_op *op);

#endif
