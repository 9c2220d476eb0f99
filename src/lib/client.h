/* SPDX-License-Identifier: Apache-2.0 */
/*
 * client.h - inside the client of protocol.h: client.c (requests, leases, steps), client_params.c
 * (registering, listing).
 */
#ifndef LIB_CLIENT_H
#define LIB_CLIENT_H

#include "lib/path.h"
#include "lib/transport.h"

struct client {
	struct path path;
	struct transport *t;
	uint64_t last_id;
	struct call *pending; /* sent, not answered */
	bool dead;
	char *arena;
	uint64_t arena_size;
	uint64_t committed; /* the last that we heard of; for the text when the daemon dies */
	char *out, *in;	    /* MOMENT_MSG_MAX bytes each; `out` is where requests are built */
};

static inline struct client *client_of(struct path *p)
{
	return (struct client *)p;
}

/* Sends the message at m (m->type and m->len set; an id is given to it). The call is pending until
 * waited for. */
int client_send(struct client *c, struct moment_msg *m, struct call *call, void *reply, size_t cap);
/* Waits for its reply. 0, the reply's error with the text set, or -ECONNRESET. */
int client_wait(struct client *c, struct call *call);
/* Both. */
int client_call(struct client *c, struct moment_msg *m, void *reply, size_t cap);

/* client_params.c */
int client_list(struct path *p, path_list_fn *fn, void *arg);
int client_add(struct path *p, struct path_param *pp, size_t n, uint32_t flags);
int client_remove(struct path *p, const uint32_t *handles, size_t n);

#endif
