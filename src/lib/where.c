/* SPDX-License-Identifier: Apache-2.0 */
/*
 * where.c - which backing, and by which data path: from the options, MOMENT_DATA and what can be
 * reached.
 *
 *	mount given	its daemon's socket, else its files by mmap
 *	backing given	the socket of the daemon that has it, else embedded
 *	neither		a temporary backing, embedded
 * A data path that was asked for by name is used or refused, never replaced.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "engine/memory.h"
#include "lib/error.h"
#include "lib/json.h"
#include "lib/session.h"
#include "lib/status.h"

enum data { DATA_ANY, DATA_SESSION, DATA_MMAP, DATA_EMBEDDED };

static int data_parse(const char *text, enum data *out)
{
	static const struct {
		const char *name;
		enum data data;
	} names[] = {
		{"session", DATA_SESSION},   {"mmap", DATA_MMAP},
		{"embedded", DATA_EMBEDDED}, {"", DATA_ANY},
		{"auto", DATA_ANY},
	};
	const char *env = getenv("MOMENT_DATA");
	size_t i;

	if (!text)
		text = env ? env : "";
	for (i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		if (strcmp(text, names[i].name) == 0) {
			*out = names[i].data;
			return 0;
		}
	}
	return err_set(-EINVAL, "data path '%s': session, mmap, embedded or auto", text);
}

/* Nobody there, as opposed to somebody who refused. */
static bool unreachable(int res)
{
	return res == -ENOENT || res == -ECONNREFUSED || res == -EACCES || res == -EPERM ||
	       res == -ENOTDIR;
}

/* The daemon sees that files are open for writing; that a trainer has them, and which, we see. */
static int open_session(const struct path_opts *po, struct path **out)
{
	int res = po->mount && !po->readonly ? path_mmap_held(po->mount) : 0;

	return res < 0 ? res : path_open_session(po, out);
}

static int open_mount(const struct moment_open_opts *o, struct moment_session *s, enum data data,
		      struct path_opts *po)
{
	char *status, *backing;
	int res;

	res = status_read(o->mount, &status);
	if (res < 0)
		return res;
	backing = json_string(json_find(status, "backing"));
	free(status);
	if (!backing)
		return err_set(-EPROTO, "%s/.moment/status does not say where the backing is",
			       o->mount);
	po->mount = o->mount;
	po->backing = backing;
	if (data == DATA_EMBEDDED) {
		res = err_set(
			-EINVAL,
			"%s is mounted: data path 'embedded' is for a backing that nobody has mounted",
			o->mount);
	} else if (data == DATA_MMAP) {
		res = path_open_mmap(po, &s->path);
	} else {
		res = open_session(po, &s->path);
		if (unreachable(res) && data == DATA_ANY) {
			session_say(
				s, MOMENT_WARNING,
				"the session socket in %s cannot be reached (%s): working through the mounted "
				"files, which is slower",
				backing, err_name(res));
			res = path_open_mmap(po, &s->path);
		} else if (unreachable(res)) {
			err_write("the session socket %s/%s cannot be reached: %s", backing,
				  MOMENT_SOCKET_NAME, err_name(res));
		}
	}
	free(backing);
	return res;
}

/* Embedded; but if the backing is held, whoever holds it may be a daemon that is only just
 * starting. */
static int open_embedded(struct moment_session *s, enum data data, struct path_opts *po)
{
	struct timespec nap = {.tv_nsec = 100 * 1000 * 1000};
	int tries, res;

	for (tries = 0;; tries++) {
		res = path_open_embedded(po, &s->path);
		if (res != -EBUSY || data == DATA_EMBEDDED || tries == 15)
			return res;
		nanosleep(&nap, NULL);
		res = path_open_session(po, &s->path);
		if (!unreachable(res))
			return res;
	}
}

static int open_backing(const struct moment_open_opts *o, struct moment_session *s, enum data data,
			struct path_opts *po)
{
	char *mount = mount_of_backing(o->backing);
	int res;

	po->backing = o->backing;
	po->mount = mount;
	if (data == DATA_MMAP) {
		res = mount ? path_open_mmap(po, &s->path)
			    : err_set(-ENOENT,
				      "%s is not mounted, and data path 'mmap' needs a mount: `momentfs %s MOUNTPOINT`",
				      o->backing, o->backing);
		goto out;
	}
	if (data != DATA_EMBEDDED) {
		res = open_session(po, &s->path);
		if (!unreachable(res))
			goto out;
		if (data == DATA_SESSION) {
			err_write("no daemon serves %s: `momentfs %s MOUNTPOINT` starts one",
				  o->backing, o->backing);
			goto out;
		}
	}
	po->mount = NULL; /* if it shows a mount, that is a dead one */
	res = open_embedded(s, data, po);
out:
	free(mount);
	return res;
}

static int open_temporary(const struct moment_open_opts *o, struct moment_session *s,
			  enum data data, struct path_opts *po)
{
	bool on_tmpfs = false;
	int res;

	if (data == DATA_SESSION || data == DATA_MMAP)
		return err_set(
			-EINVAL,
			"a temporary backing is embedded: name a mount point or a backing for another data path");
	res = temp_create(&s->temp, o->temp_dir, &on_tmpfs);
	if (res < 0)
		return res;
	if (on_tmpfs)
		session_say(
			s, MOMENT_WARNING,
			"the temporary backing %s is on a tmpfs, that is in RAM, so nothing is gained: set TMPDIR to a "
			"folder on the drive or name a backing",
			s->temp.dir);
	po->backing = s->temp.backing;
	po->commit_seconds = -1; /* nobody will ever look for it */
	return path_open_embedded(po, &s->path);
}

#define BLOCK_DEFAULT (2u << 20)
#define BLOCK_LEAST   (64u << 10)

/* For a temporary backing: small state in small blocks, of which the RAM tier holds some dozens at
 * least. Many small optimizers in a process then cost what their state does. */
static uint32_t block_default(uint64_t state)
{
	uint32_t block = BLOCK_DEFAULT;

	while (state && block > BLOCK_LEAST && state / 64 < block)
		block /= 2;
	return block;
}

/* All of the state, what the engine keeps for small pieces and for streaming, and a little more;
 * but at most a quarter of the memory. Memory that is not needed would still have to be touched:
 * seconds for a large machine. */
static uint64_t ram_default(uint64_t state, uint32_t block)
{
	uint64_t quarter = memory_available() / 4, want;

	want = (state ? state : (uint64_t)1 << 30) / 6 * 7 + 64ull * block;
	return want < quarter ? want : quarter;
}

int where_open(const struct moment_open_opts *o, struct moment_session *s)
{
	char comm[17] = "", client[48];
	struct path_opts po = {
		.client = client,
		.ram_forced = o->ram != 0,
		.block = o->block,
		.commit_seconds = o->commit_seconds ? o->commit_seconds : 60,
		.readonly = o->flags & MOMENT_OPEN_READONLY,
		.rollback = o->flags & (MOMENT_OPEN_RESUME | MOMENT_OPEN_FRESH),
	};
	enum data data = DATA_ANY;
	int res;

	if (!po.block && !o->mount && !o->backing)
		po.block = block_default(o->state_bytes);
	po.ram = o->ram ? o->ram
			: ram_default(o->state_bytes, po.block ? po.block : BLOCK_DEFAULT);
	prctl(PR_GET_NAME, comm);
	snprintf(client, sizeof(client), "%s", comm);
	res = data_parse(o->data, &data);
	if (res < 0)
		return res;
	if (o->mount)
		return open_mount(o, s, data, &po);
	if (o->backing)
		return open_backing(o, s, data, &po);
	return open_temporary(o, s, data, &po);
}
