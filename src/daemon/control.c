/* SPDX-License-Identifier: Apache-2.0 */
/*
 * control.c - what can be written to the files of .moment/.
 *
 *   .moment/step      `begin N` and `end N`: the bracket of a plain writer
 *   .moment/prefetch  `PATH OFFSET LENGTH` a line: hints; PATH as seen from the mount's root
 *   .moment/control   commit, rollback, scrub, trim, detach [force]: the write returns when it is done,
 * with its errno; the text of the last failure is in status (mount.control.message)
 *
 * For step and control each write is complete in itself, with or without a newline at its end;
 * prefetch takes what a buffered writer sends, cut anywhere.
 *
 * Handlers run on the receive threads, finish_*() where the engine completes (the loop thread), the
 * answer to `detach` on the main thread.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/daemon.h"
#include "moment/protocol.h"

#define TAIL_MAX 8192u /* of one line in prefetch */

/* ---- commands ------------------------------------------------------------------------------- */

static void control_begin(struct daemon *d, const char *command)
{
	pthread_mutex_lock(&d->lock);
	snprintf(d->control.command, sizeof(d->control.command), "%.15s", command);
	d->control.running = true;
	d->control.result = 0;
	d->control.message[0] = '\0';
	pthread_mutex_unlock(&d->lock);
}

__attribute__((format(printf, 3, 4))) static void control_end(struct daemon *d, int res,
							      const char *fmt, ...)
{
	va_list ap;

	pthread_mutex_lock(&d->lock);
	d->control.running = false;
	d->control.result = res;
	va_start(ap, fmt);
	vsnprintf(d->control.message, sizeof(d->control.message), fmt, ap);
	va_end(ap);
	pthread_mutex_unlock(&d->lock);
}

/* Fails a write before anything was started. */
__attribute__((format(printf, 5, 6))) static void refuse(struct daemon *d, fuse_req_t req,
							 const char *command, int res,
							 const char *fmt, ...)
{
	char message[256];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(message, sizeof(message), fmt, ap);
	va_end(ap);
	control_begin(d, command);
	control_end(d, res, "%s", message);
	reply_err(req, res);
}

static void explain(struct daemon *d, const char *command, int res)
{
	if (res == -EBUSY)
		control_end(
			d, res,
			"%s: refused while a file is open for writing (%u are), a step is open, or a "
			"session keeps blocks leased (momentctl status: sessions)",
			command, ns_open_writers_total(d->ns));
	else if (res == -ESTALE)
		control_end(
			d, res,
			"%s: the state is torn (a step was begun, and its process ended inside it); "
			"momentctl rollback returns to the last commit",
			command);
	else if (res == -ENOSPC)
		control_end(d, res,
			    "%s: the drive is full; free some space and try again, nothing is lost",
			    command);
	else if (res == -EINTR)
		control_end(d, res, "%s: the waiting was interrupted; it goes on by itself",
			    command);
	else
		control_end(d, res, "%s: %s", command, strerror(-res));
}

static bool finish_commit(struct request *r, int64_t res)
{
	if (res < 0) {
		explain(r->d, "commit", (int)res);
		reply_err(r->req, (int)res);
	} else {
		control_end(r->d, 0, "committed");
		fuse_reply_write(r->req, r->size);
	}
	return false;
}

static bool finish_rollback(struct request *r, int64_t res)
{
	if (res >= 0)
		bracket_ended(r->d);
	if (res < 0) {
		explain(r->d, "rollback", (int)res);
		reply_err(r->req, (int)res);
	} else {
		control_end(r->d, 0, "rolled back to the last commit");
		fuse_reply_write(r->req, r->size);
	}
	return false;
}

static bool finish_scrub(struct request *r, int64_t res)
{
	if (res == 0) {
		control_end(r->d, 0, "every extent is as it was written");
		fuse_reply_write(r->req, r->size);
		return false;
	}
	if (res > 0) {
		control_end(r->d, -EIO, "scrub: %lld damaged extents; status lists them",
			    (long long)res);
		res = -EIO;
	} else {
		explain(r->d, "scrub", (int)res);
	}
	reply_err(r->req, (int)res);
	return false;
}

static bool finish_trim(struct request *r, int64_t res)
{
	if (res < 0) {
		explain(r->d, "trim", (int)res);
		reply_err(r->req, (int)res);
		return false;
	}
	control_end(r->d, 0, "trim: %" PRId64 " bytes of the pool were given back to the host", res);
	fuse_reply_write(r->req, r->size);
	return false;
}

void control_answer_detach(struct daemon *d, int res, const char *message)
{
	struct request *r;

	pthread_mutex_lock(&d->lock);
	r = d->detach;
	d->detach = NULL;
	pthread_mutex_unlock(&d->lock);
	if (!r)
		return;
	control_end(d, res, "%s", message);
	fuse_req_interrupt_func(r->req, NULL, NULL);
	if (res < 0)
		reply_err(r->req, res);
	else
		fuse_reply_write(r->req, r->size);
	request_destroy(r);
}

/* Who asked does not wait any longer; main answers. */
static void detach_interrupted(fuse_req_t req, void *arg)
{
	(void)arg;
	daemon_raise(daemon_of(req), EVENT_CONTROL);
}

static void start_detach(struct daemon *d, fuse_req_t req, size_t size, bool force)
{
	unsigned int sessions = session_socket_sessions(d->socket);
	struct request *r;
	char who[64];
	bool taken;

	if (sessions && !force) {
		refuse(d, req, "detach", -EBUSY,
		       "a session is attached (%s); end it first, or use --force, which drops what "
		       "it has not committed",
		       holder_who(who, session_socket_writer(d->socket)));
		return;
	}
	r = request_create(req, ENGINE_SYNC, 0, finish_commit);
	if (!r)
		return;
	r->size = size;
	pthread_mutex_lock(&d->lock);
	taken = !d->detach;
	if (taken)
		d->detach = r;
	pthread_mutex_unlock(&d->lock);
	if (!taken) {
		reply_err(req, -EALREADY);
		request_destroy(r);
		return;
	}
	control_begin(d, "detach");
	if (force)
		atomic_store(&d->forced, true);
	fuse_req_interrupt_func(req, detach_interrupted, NULL);
	daemon_raise(d, EVENT_CONTROL);
}

static void run_command(struct daemon *d, fuse_req_t req, const char *word, size_t size)
{
	static const struct {
		const char *word;
		enum engine_op_kind kind;
		bool (*finish)(struct request *, int64_t);
	} commands[] = {
		{"commit", ENGINE_SYNC, finish_commit},
		{"rollback", ENGINE_ROLLBACK, finish_rollback},
		{"scrub", ENGINE_SCRUB, finish_scrub},
		{"trim", ENGINE_TRIM, finish_trim},
	};
	struct request *r;

	if (!strcmp(word, "detach") || !strcmp(word, "detach force")) {
		start_detach(d, req, size, word[6] != '\0');
		return;
	}
	for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
		if (strcmp(word, commands[i].word))
			continue;
		r = request_create(req, commands[i].kind, 0, commands[i].finish);
		if (!r)
			return;
		r->size = size;
		control_begin(d, word);
		request_submit(r);
		return;
	}
	refuse(d, req, "", -EINVAL,
	       "control: '%.40s' is not a command; there are commit, rollback, scrub, trim, detach",
	       word);
}

/* ---- the step's bracket --------------------------------------------------------------------- */

/* Takes the next line off r->text; NULL at the end. */
static char *next_line(struct request *r)
{
	while (r->pos < r->done) {
		char *line = r->text + r->pos;
		char *end = memchr(line, '\n', r->done - r->pos);

		if (!end)
			end = r->text + r->done;
		*end = '\0'; /* there is one byte more than `done` */
		r->pos = (size_t)(end - r->text) + 1;
		line += strspn(line, " \t\r");
		if (*line)
			return line;
	}
	return NULL;
}

/* "begin 42", "end 42": the op, or -EINVAL. */
static int parse_step(const char *line, struct engine_op *op)
{
	const char *number;
	char *end;

	if (!strncmp(line, "begin ", 6))
		op->kind = ENGINE_STEP_BEGIN;
	else if (!strncmp(line, "end ", 4))
		op->kind = ENGINE_STEP_END;
	else
		return -EINVAL;
	number = strchr(line, ' ');
	number += strspn(number, " \t");
	if (*number < '0' || *number > '9')
		return -EINVAL;
	errno = 0;
	op->arg = strtoull(number, &end, 10);
	end += strspn(end, " \t\r");
	return errno || *end || op->arg == MOMENT_STEP_NONE ? -EINVAL : 0;
}

/* Starts the next line, or replies; true: the engine has the request. */
static bool step_next(struct request *r)
{
	char *line = next_line(r);

	if (!line) {
		fuse_reply_write(r->req, r->size);
		return false;
	}
	if (parse_step(line, &r->op) < 0) {
		control_begin(r->d, "step");
		control_end(r->d, -EINVAL, "step: '%.40s' is not `begin N` or `end N`", line);
		reply_err(r->req, -EINVAL);
		return false;
	}
	request_submit(r);
	return true;
}

static bool finish_step(struct request *r, int64_t res)
{
	const char *word = r->op.kind == ENGINE_STEP_BEGIN ? "begin" : "end";

	if (r->op.kind == ENGINE_STEP_BEGIN && res >= 0)
		bracket_began(r->d, r->owner, r->handle, r->op.arg);
	/* Refused in the form of -EINVAL; with any other error it has ended, but is not durable. */
	if (r->op.kind == ENGINE_STEP_END && res != -EINVAL && (res != -ENOMEM || r->op.text))
		bracket_ended(r->d);
	if (res >= 0)
		return step_next(r);
	control_begin(r->d, "step");
	if (r->op.text)
		control_end(r->d, (int)res, "step %" PRIu64 " %s: %s", r->op.arg,
			    r->op.kind == ENGINE_STEP_BEGIN
				    ? "is not begun, it could not be stored"
				    : "has ended, but what its writer synced is not on the drive",
			    r->op.text);
	else if (res == -EBUSY)
		control_end(r->d, -EBUSY, "step: %s %" PRIu64 ": another step is open, or goes back to the last commit", word,
			    r->op.arg);
	else if (res == -EINVAL)
		control_end(r->d, -EINVAL, "step: %s %" PRIu64 ": that step is not open", word,
			    r->op.arg);
	else
		control_end(r->d, (int)res, "step: %s %" PRIu64 ": %s", word, r->op.arg,
			    strerror((int)-res));
	reply_err(r->req, (int)res);
	return false;
}

static void write_step(fuse_req_t req, const struct text *t, const char *buf, size_t size)
{
	struct request *r = request_create(req, ENGINE_STEP_BEGIN, 0, finish_step);

	if (!r)
		return;
	r->text = malloc(size + 1);
	if (!r->text) {
		reply_err(req, -ENOMEM);
		request_destroy(r);
		return;
	}
	memcpy(r->text, buf, size);
	r->done = r->size = size;
	r->handle = t;
	r->owner = bracket_owner(r->tid);
	if (!step_next(r))
		request_destroy(r);
}

/* ---- hints ---------------------------------------------------------------------------------- */

static void hint_done(struct engine_op *op)
{
	free(op);
}

/* `PATH OFFSET LENGTH`; the path may have spaces, so the numbers are taken from the end. */
static int hint(struct daemon *d, char *line)
{
	static const char prefix[] = "params/";
	uint64_t number[2];
	struct engine_op *op;
	struct ns_attr a;
	int res;

	for (int i = 1; i >= 0; i--) {
		char *space = strrchr(line, ' '), *end;

		if (!space || space[1] < '0' || space[1] > '9')
			return -EINVAL;
		errno = 0;
		number[i] = strtoull(space + 1, &end, 10);
		if (errno || *end)
			return -EINVAL;
		*space = '\0';
	}
	if (strncmp(line, prefix, sizeof(prefix) - 1))
		return -ENOENT;
	res = ns_walk(d->ns, line + sizeof(prefix) - 1, &a);
	if (res < 0)
		return res;
	if (!S_ISREG(a.mode))
		return -EISDIR;
	op = calloc(1, sizeof(*op));
	if (!op)
		return 0; /* only a hint */
	op->kind = ENGINE_PREFETCH;
	op->ino = a.ino;
	op->off = number[0];
	op->len = number[1];
	op->done = hint_done;
	engine_submit(d->e, op);
	return 0;
}

/* All lines are tried; the first failure is told. Under t->lock. */
static int hint_lines_locked(struct daemon *d, struct text *t, const char *buf, size_t size)
{
	int first = 0;

	while (size) {
		const char *nl = memchr(buf, '\n', size);
		size_t len = nl ? (size_t)(nl - buf) : size;
		char *grown;
		int res;

		if (t->tail_len + len > TAIL_MAX)
			return -EINVAL;
		grown = realloc(t->tail, t->tail_len + len + 1);
		if (!grown)
			return -ENOMEM;
		t->tail = grown;
		memcpy(t->tail + t->tail_len, buf, len);
		t->tail_len += len;
		t->tail[t->tail_len] = '\0';
		if (!nl)
			break;
		res = t->tail_len ? hint(d, t->tail) : 0;
		first = first ? first : res;
		t->tail_len = 0;
		buf += len + 1;
		size -= len + 1;
	}
	return first;
}

static void write_hints(struct daemon *d, fuse_req_t req, struct text *t, const char *buf,
			size_t size)
{
	int res;

	pthread_mutex_lock(&t->lock);
	res = hint_lines_locked(d, t, buf, size);
	if (res == -EINVAL)
		t->tail_len = 0;
	pthread_mutex_unlock(&t->lock);
	if (res < 0)
		refuse(d, req, "prefetch", res,
		       "prefetch: %s; a line is `params/PATH OFFSET LENGTH`",
		       res == -ENOENT ? "no such file" : strerror(-res));
	else
		fuse_reply_write(req, size);
}

int virt_flush(struct daemon *d, uint64_t ino, struct text *t)
{
	int res = 0;

	if (ino != VIRT_INO(VIRT_PREFETCH) || !t)
		return 0;
	pthread_mutex_lock(&t->lock);
	if (t->tail_len)
		res = hint(d, t->tail);
	t->tail_len = 0;
	pthread_mutex_unlock(&t->lock);
	return res;
}

/* ---- write ---------------------------------------------------------------------------------- */

void virt_write(struct daemon *d, fuse_req_t req, uint64_t ino, struct text *t, const char *buf,
		size_t size)
{
	char word[64];
	size_t len = size;

	if (ino == VIRT_INO(VIRT_STEP)) {
		write_step(req, t, buf, size);
	} else if (ino == VIRT_INO(VIRT_PREFETCH)) {
		write_hints(d, req, t, buf, size);
	} else if (ino == VIRT_INO(VIRT_CONTROL)) {
		while (len && (buf[len - 1] == '\n' || buf[len - 1] == ' '))
			len--;
		if (len >= sizeof(word))
			len = sizeof(word) - 1;
		memcpy(word, buf, len);
		word[len] = '\0';
		run_command(d, req, word, size);
	} else {
		reply_err(req, -EACCES);
	}
}
