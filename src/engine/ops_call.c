/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ops_call.c - ops for callers that want to wait: any thread but the loop's.
 */
#include <pthread.h>
#include <string.h>

#include "engine/bug.h"
#include "engine/engine_impl.h"

struct call {
	struct engine_op op;
	void *buf;
	pthread_mutex_t lock;
	pthread_cond_t cond;
	bool done;
};

static void call_done(struct engine_op *op)
{
	struct call *k = container_of(op, struct call, op);

	if (op->kind == ENGINE_READ && k->buf) {
		char *to = k->buf;

		for (int i = 0; i < op->iovcnt; i++) {
			memcpy(to, op->iov[i].iov_base, op->iov[i].iov_len);
			to += op->iov[i].iov_len;
		}
	}
	pthread_mutex_lock(&k->lock);
	k->done = true;
	pthread_cond_signal(&k->cond);
	pthread_mutex_unlock(&k->lock);
}

static int64_t call(struct engine *e, struct call *k)
{
	assert(!loop_is_current(e->loop));
	pthread_mutex_init(&k->lock, NULL);
	pthread_cond_init(&k->cond, NULL);
	k->op.done = call_done;
	engine_submit(e, &k->op);
	pthread_mutex_lock(&k->lock);
	while (!k->done)
		pthread_cond_wait(&k->cond, &k->lock);
	pthread_mutex_unlock(&k->lock);
	pthread_mutex_destroy(&k->lock);
	pthread_cond_destroy(&k->cond);
	return k->op.res;
}

int64_t engine_call(struct engine *e, enum engine_op_kind kind, uint64_t ino, uint64_t off,
		    uint64_t len, uint64_t arg)
{
	struct call k = {.op = {.kind = kind, .ino = ino, .off = off, .len = len, .arg = arg}};

	return call(e, &k);
}

int64_t engine_pread(struct engine *e, uint64_t ino, void *buf, uint64_t len, uint64_t off)
{
	uint64_t got = 0;

	while (got < len) {
		struct call k = {.op = {.kind = ENGINE_READ,
					.ino = ino,
					.off = off + got,
					.len = min_u64(len - got, ENGINE_OP_MAX)},
				 .buf = (char *)buf + got};
		int64_t r = call(e, &k);

		if (r < 0)
			return r;
		if (r == 0)
			break;
		got += (uint64_t)r;
	}
	return (int64_t)got;
}

int64_t engine_pwrite(struct engine *e, uint64_t ino, const void *buf, uint64_t len, uint64_t off)
{
	uint64_t put = 0;

	while (put < len) {
		struct call k = {.op = {.kind = ENGINE_WRITE,
					.ino = ino,
					.off = off + put,
					.len = min_u64(len - put, ENGINE_OP_MAX),
					.data = (const char *)buf + put}};
		int64_t r = call(e, &k);

		if (r < 0)
			return put ? (int64_t)put : r;
		put += (uint64_t)r;
	}
	return (int64_t)put;
}
