/* SPDX-License-Identifier: Apache-2.0 */
/*
 * early_write.h - engine_pwrite() that comes back as soon as the engine has accepted the bytes, as
 * a write(2) on the mount does: they may still lie in the caller's memory, here a copy of its own.
 */
#ifndef EARLY_WRITE_H
#define EARLY_WRITE_H

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"

struct early_write {
	struct engine_op op;
	pthread_mutex_t lock;
	pthread_cond_t cond;
	bool answered;
	unsigned int users; /* the engine and the caller */
	int64_t res;
	unsigned char data[];
};

static void early_put(struct early_write *x)
{
	bool last = --x->users == 0;

	pthread_mutex_unlock(&x->lock);
	if (!last)
		return;
	pthread_mutex_destroy(&x->lock);
	pthread_cond_destroy(&x->cond);
	memset(x->data, 0xee, x->op.len);
	free(x);
}

static struct early_write *early_tell(struct engine_op *op)
{
	struct early_write *x = (struct early_write *)op;

	pthread_mutex_lock(&x->lock);
	x->answered = true;
	x->res = op->res;
	pthread_cond_signal(&x->cond);
	return x;
}

static void early_accepted(struct engine_op *op)
{
	pthread_mutex_unlock(&early_tell(op)->lock);
}

static void early_done(struct engine_op *op)
{
	early_put(early_tell(op));
}

static int64_t early_write_one(struct engine *on, uint64_t ino, const void *buf, uint64_t len,
			       uint64_t off)
{
	struct early_write *x = calloc(1, sizeof(*x) + len);
	int64_t res;

	if (!x)
		return -ENOMEM;
	memcpy(x->data, buf, len);
	pthread_mutex_init(&x->lock, NULL);
	pthread_cond_init(&x->cond, NULL);
	x->users = 2;
	x->op = (struct engine_op){.kind = ENGINE_WRITE,
				   .ino = ino,
				   .off = off,
				   .len = len,
				   .data = x->data,
				   .done = early_done,
				   .accepted = early_accepted};
	engine_submit(on, &x->op);
	pthread_mutex_lock(&x->lock);
	while (!x->answered)
		pthread_cond_wait(&x->cond, &x->lock);
	res = x->res;
	early_put(x);
	return res;
}

static int64_t early_pwrite(struct engine *on, uint64_t ino, const void *buf, uint64_t len,
			    uint64_t off)
{
	uint64_t put = 0;

	while (put < len) {
		uint64_t n = len - put < ENGINE_OP_MAX ? len - put : ENGINE_OP_MAX;
		int64_t r = early_write_one(on, ino, (const char *)buf + put, n, off + put);

		if (r < 0)
			return put ? (int64_t)put : r;
		put += (uint64_t)r;
	}
	return (int64_t)put;
}

#endif
