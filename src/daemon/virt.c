/* SPDX-License-Identifier: Apache-2.0 */
/*
 * virt.c - what the daemon itself puts into the mount: its root directory and .moment/.
 *
 *   .moment/status    JSON, made when it is opened
 *   .moment/stats     Prometheus text, likewise
 *   .moment/step      see control.c; reading tells the steps
 *   .moment/prefetch, .moment/control: see control.c
 *
 * All of them are opened for direct I/O: nothing is kept by the kernel. Everything runs on the
 * receive threads. A text belongs to the open handle.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/daemon.h"
#include "engine/names.h"
#include "moment/protocol.h"

/* ---- the directories ------------------------------------------------------------------------ */

/* More directories of the mount's root (snapshots/, views/) get their line here. */
static const struct virt_entry root_entries[] = {
	{"params", NS_ROOT},
	{".moment", VIRT_INO(VIRT_DIR)},
};

static const struct virt_entry moment_entries[] = {
	{"status", VIRT_INO(VIRT_STATUS)},   {"stats", VIRT_INO(VIRT_STATS)},
	{"step", VIRT_INO(VIRT_STEP)},	     {"prefetch", VIRT_INO(VIRT_PREFETCH)},
	{"control", VIRT_INO(VIRT_CONTROL)},
};

static const mode_t virt_modes[VIRT_COUNT] = {
	[VIRT_DIR] = S_IFDIR | 0755,	  [VIRT_STATUS] = S_IFREG | 0444,
	[VIRT_STATS] = S_IFREG | 0444,	  [VIRT_STEP] = S_IFREG | 0644,
	[VIRT_PREFETCH] = S_IFREG | 0200, [VIRT_CONTROL] = S_IFREG | 0200,
};

const struct virt_entry *virt_list(uint64_t dir, size_t *n)
{
	if (dir == FUSE_ROOT_ID) {
		*n = sizeof(root_entries) / sizeof(root_entries[0]);
		return root_entries;
	}
	if (dir == VIRT_INO(VIRT_DIR)) {
		*n = sizeof(moment_entries) / sizeof(moment_entries[0]);
		return moment_entries;
	}
	return NULL;
}

int virt_getattr(struct daemon *d, uint64_t ino, struct stat *st)
{
	memset(st, 0, sizeof(*st));
	if (ino == FUSE_ROOT_ID)
		st->st_mode = S_IFDIR | 0755;
	else if (ino - VIRT_FIRST < VIRT_COUNT)
		st->st_mode = virt_modes[ino - VIRT_FIRST];
	else
		return -ENOENT;
	st->st_ino = ino;
	st->st_nlink = S_ISDIR(st->st_mode) ? (ino == FUSE_ROOT_ID ? 4 : 2) : 1;
	st->st_uid = d->uid;
	st->st_gid = d->gid;
	st->st_blksize = MOMENT_UNIT;
	st->st_mtim = st->st_ctim = st->st_atim = d->mounted;
	return 0;
}

/* ---- text ----------------------------------------------------------------------------------- */

struct text *text_create(char *data, size_t len)
{
	struct text *t = data ? calloc(1, sizeof(*t)) : NULL;

	if (!t) {
		free(data);
		return NULL;
	}
	t->data = data;
	t->len = len;
	pthread_mutex_init(&t->lock, NULL);
	return t;
}

void text_destroy(struct text *t)
{
	if (!t)
		return;
	pthread_mutex_destroy(&t->lock);
	free(t->tail);
	free(t->data);
	free(t);
}

void text_read(struct text *t, fuse_req_t req, size_t size, off_t off)
{
	if (off < 0 || (uint64_t)off >= t->len)
		fuse_reply_buf(req, NULL, 0);
	else
		fuse_reply_buf(req, t->data + off, min_u64(size, t->len - (uint64_t)off));
}

/* s as a JSON string; a byte that is no UTF-8 becomes \udcXX, as in meta.json. */
static void put_json(FILE *f, const char *s)
{
	size_t len = strlen(s), n;

	fputc('"', f);
	for (; len; s += n, len -= n) {
		n = names_utf8_len(s, len);
		if (!n) {
			fprintf(f, "\\udc%02x", (unsigned char)*s);
			n = 1;
		} else if (*s == '"' || *s == '\\') {
			fprintf(f, "\\%c", *s);
		} else if ((unsigned char)*s < 0x20) {
			fprintf(f, "\\u%04x", *s);
		} else {
			fwrite(s, 1, n, f);
		}
	}
	fputc('"', f);
}

static void put_mount(FILE *f, struct daemon *d)
{
	struct control_state c;
	char *path = NULL, memory[256];

	steady_text(memory, sizeof(memory));
	pthread_mutex_lock(&d->lock);
	c = d->control;
	pthread_mutex_unlock(&d->lock);
	fputs("\"mount\": {\"point\": ", f);
	put_json(f, d->mountpoint);
	fprintf(f, ", \"pid\": %d, \"pid_namespace\": %" PRIu64 ", \"uid\": %u, \"socket\": ",
		(int)getpid(), holder_pid_namespace(), d->uid);
	if (d->socket && asprintf(&path, "%s/%s", engine_backing(d->e), MOMENT_SOCKET_NAME) >= 0)
		put_json(f, path);
	else
		fputs("null", f);
	free(path);
	fprintf(f,
		", \"memory\": \"%s\", \"sessions\": %u, \"handles\": %u, \"writers\": %u, \"detaching\": %s, "
		"\"control\": {\"command\": ",
		memory, session_socket_sessions(d->socket), atomic_load(&d->handles),
		ns_open_writers_total(d->ns), atomic_load(&d->detaching) ? "true" : "false");
	put_json(f, c.command);
	fprintf(f, ", \"running\": %s, \"result\": %d, \"message\": ", c.running ? "true" : "false",
		c.result);
	put_json(f, c.message);
	fputs("}}", f);
}

/* The engine's object, with ours as its first member. */
static int make_status(struct daemon *d, char **out, size_t *len)
{
	char *json = engine_status_json(d->e);
	const char *rest;
	FILE *f;

	if (!json)
		return -ENOMEM;
	f = open_memstream(out, len);
	if (!f) {
		free(json);
		return -ENOMEM;
	}
	rest = strchr(json, '{');
	fputc('{', f);
	put_mount(f, d);
	if (rest) {
		rest += 1 + strspn(rest + 1, " \n\t");
		fprintf(f, "%s%s", *rest == '}' ? "" : ",\n ", rest);
	} else {
		fputs("}", f);
	}
	free(json);
	return fclose(f) ? -ENOMEM : 0;
}

static int make_step(struct daemon *d, char **out, size_t *len)
{
	struct engine_step_state s;
	FILE *f = open_memstream(out, len);
	const char *const names[] = {"committed", "boundary", "open"};
	uint64_t values[3];

	if (!f)
		return -ENOMEM;
	engine_get_step(d->e, &s);
	values[0] = s.committed;
	values[1] = s.boundary;
	values[2] = s.open;
	for (int i = 0; i < 3; i++) {
		if (values[i] == MOMENT_STEP_NONE)
			fprintf(f, "%s none\n", names[i]);
		else
			fprintf(f, "%s %" PRIu64 "\n", names[i], values[i]);
	}
	fprintf(f, "torn %s\n", s.torn ? "yes" : "no");
	return fclose(f) ? -ENOMEM : 0;
}

int virt_open(struct daemon *d, uint64_t ino, struct text **out)
{
	char *data = NULL;
	size_t len = 0;
	int res = 0;

	if (ino == VIRT_INO(VIRT_STATUS)) {
		res = make_status(d, &data, &len);
	} else if (ino == VIRT_INO(VIRT_STATS)) {
		data = engine_stats_text(d->e);
		len = data ? strlen(data) : 0;
	} else if (ino == VIRT_INO(VIRT_STEP)) {
		res = make_step(d, &data, &len);
	} else {
		data = calloc(1, 1);
	}
	if (res < 0)
		return res;
	*out = text_create(data, len);
	return *out ? 0 : -ENOMEM;
}
