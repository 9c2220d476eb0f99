/* SPDX-License-Identifier: Apache-2.0 */
/*
 * transport.h - how client.c's messages reach an engine: transport_socket.c, transport_embedded.c.
 *
 * One thread at a time (the session's lock). A message is whole or not at all.
 */
#ifndef LIB_TRANSPORT_H
#define LIB_TRANSPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/path.h"

struct transport;

struct transport_ops {
	const char *name;
	int (*send)(struct transport *t, const void *msg, size_t len);
	/* Waits for the next message. Its length, or -ECONNRESET when the other side is gone. */
	int64_t (*recv)(struct transport *t, void *buf, size_t cap);
	/* After the reply to HELLO: makes the arena's memory accessible. */
	int (*attach)(struct transport *t, uint64_t arena_size, void **base);
	/* A step has ended, no lease is out (may be NULL). */
	void (*rest)(struct transport *t);
	/* Frees t. The engine's result of the last commit, embedded; 0 otherwise. */
	int (*close)(struct transport *t, bool commit);
	void (*forked)(struct transport *t);
};

struct transport {
	const struct transport_ops *ops;
};

/* -ENOENT, -ECONNREFUSED, -EACCES: nobody is there, no text set. */
int transport_socket(const char *backing, struct transport **out);
int transport_embedded(const struct path_opts *o, struct transport **out);

#endif
