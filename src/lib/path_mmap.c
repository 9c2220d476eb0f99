/* SPDX-License-Identifier: Apache-2.0 */
/*
 * path_mmap.c - the data path through the mounted files, for where the session socket cannot be
 * reached.
 *
 * Plain file system calls only, as any other program could make them: the state files are mapped
 * shared, a step is bracketed by lines to .moment/step, hints go to .moment/prefetch. "Leasing" a
 * block faults its pages in with MADV_POPULATE, which reads the whole range in large requests and
 * turns a failed read into an error where a plain touch would be a SIGBUS. "Releasing" it starts
 * the write-back and lets go of the page table, so that the process stays small; the end of the
 * step waits for the write-backs (sync_file_range, not msync, which would ask for a commit). Only
 * then is the bracket closed: what the daemon commits is whole.
 *
 * Each file is claimed (protocol.h), so that nobody changes it behind the mapping, and stays open:
 * write-back and its errors go by the descriptor.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "moment/protocol.h"
#include "engine/engine.h"
#include "lib/error.h"
#include "lib/json.h"
#include "lib/path_mmap.h"
#include "lib/status.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ  22
#define MADV_POPULATE_WRITE 23
#endif

#define CLAIM_TRIES 100u /* 10 ms apart */
#define SPARE_FDS   64u	 /* for the rest of the process */
#define SPARE_MAPS  1024u
#define WINDOW	    ((uint64_t)32 << 20)

/* Whether something else is at the mount point's path now: the daemon was unmounted under us. */
static bool unmounted(const struct mm *m)
{
	struct stat now, ours;

	return m->dir >= 0 && (fstat(m->dir, &ours) < 0 || stat(m->path.mount, &now) < 0 ||
			       now.st_dev != ours.st_dev);
}

int mm_error(struct mm *m, int res, const char *what)
{
	if (res == -ENOTCONN || res == -ECONNABORTED || res == -ENODEV ||
	    (res == -ENOENT && unmounted(m)))
		return err_set(
			-ECONNRESET,
			"the momentfs daemon (process %u) that served %s has ended. The state on disk is its last "
			"commit. Clear the dead mount (`fusermount3 -u %s`), start `momentfs %s %s` again and open a "
			"new session with resume",
			m->path.holder_pid, m->path.mount, m->path.mount, m->path.backing,
			m->path.mount);
	return err_set(res, "%s/%s: %s", m->path.mount, what, strerror(-res));
}

/* ---- files and mappings ----------------------------------------------------------------- */

/* Our own handles of a moment ago may still be on their way to the daemon. */
static bool try_again(unsigned int *tries)
{
	struct timespec nap = {.tv_nsec = 10 * 1000 * 1000};

	return (*tries)++ < CLAIM_TRIES && nanosleep(&nap, NULL) == 0;
}

/* Opens the file and has it alone from then on. A daemon that knows no claims answers ENOTTY. */
int mm_open(struct mm *m, const char *rel, int flags, int *out)
{
	unsigned int tries = 0;
	int fd;

	do
		fd = openat(m->dir, rel, (m->readonly ? O_RDONLY : O_RDWR) | flags | O_CLOEXEC,
			    0644);
	while (fd < 0 && errno == EBUSY && try_again(&tries));
	if (fd < 0)
		return mm_error(m, -errno, rel);
	*out = fd;
	while (!m->readonly && ioctl(fd, MOMENT_IOC_CLAIM) < 0 && errno != ENOTTY) {
		if (errno == EBUSY && try_again(&tries))
			continue;
		close(fd);
		return errno == EBUSY ? err_set(-EBUSY,
						"%s/%s is open for writing in another program: end that one first",
						m->path.mount, rel)
				      : mm_error(m, -errno, rel);
	}
	return 0;
}

void mm_close_file(struct mm *m, int fd)
{
	/* At once, and not when the kernel gets round to telling that the file was closed. */
	if (!m->readonly)
		ioctl(fd, MOMENT_IOC_UNCLAIM);
	close(fd);
}

int mm_map(struct mm *m, struct mfile *f)
{
	int prot = PROT_READ | (m->readonly ? 0 : PROT_WRITE), res;
	void *map;

	if (f->map || f->len == 0)
		return 0;
	res = f->fd < 0 ? mm_open(m, f->rel, 0, &f->fd) : 0;
	if (res < 0)
		return res;
	map = mmap(NULL, f->len, prot, MAP_SHARED, f->fd, 0);
	if (map == MAP_FAILED)
		return mm_error(m, -errno, f->rel);
	madvise(map, f->len, MADV_DONTFORK);
	f->map = map;
	return 0;
}

void mm_unmap(struct mm *m, struct mfile *f)
{
	if (f->map)
		munmap(f->map, f->len);
	f->map = NULL;
	if (f->fd >= 0)
		mm_close_file(m, f->fd);
	f->fd = -1;
}

/* Descriptors that this process may still open: the limit is raised if it may be. */
static int descriptors_for(size_t files)
{
	struct rlimit limit, raised;
	uint64_t need;
	int fd = dup(STDERR_FILENO); /* the lowest that is free: about as many are in use */

	if (fd >= 0)
		close(fd);
	need = files + (uint64_t)(fd > 0 ? fd : 0) + SPARE_FDS;
	if (getrlimit(RLIMIT_NOFILE, &limit) < 0 || limit.rlim_cur >= need)
		return 0;
	raised = (struct rlimit){.rlim_cur = need, .rlim_max = limit.rlim_max};
	if (limit.rlim_max >= need && setrlimit(RLIMIT_NOFILE, &raised) == 0)
		return 0;
	return err_set(-EMFILE,
		       "mapping %zu state files takes about %llu file descriptors, and this process may have "
		       "%llu: raise that (ulimit -n), or use data path 'session', which needs none",
		       files, (unsigned long long)need, (unsigned long long)limit.rlim_max);
}

static int mappings_for(size_t files)
{
	unsigned long long most = 0, have = 0;
	FILE *f = fopen("/proc/sys/vm/max_map_count", "re");
	int c;

	if (!f)
		return 0;
	if (fscanf(f, "%llu", &most) != 1)
		most = 0;
	fclose(f);
	f = most ? fopen("/proc/self/maps", "re") : NULL;
	if (!f)
		return 0;
	while ((c = getc(f)) != EOF)
		have += c == '\n';
	fclose(f);
	if (have + files + SPARE_MAPS <= most)
		return 0;
	return err_set(-ENOMEM,
		       "mapping %zu state files takes as many mappings; this process has %llu and may have "
		       "%llu: raise that (sysctl vm.max_map_count), or use data path 'session', which needs one",
		       files, have, most);
}

int mm_room_for(struct mm *m, size_t files)
{
	int res = files ? mappings_for(files) : 0;

	(void)m;
	return res < 0 || !files ? res : descriptors_for(files);
}

static int write_back(struct mm *m, struct mfile *f, uint64_t from, uint64_t to, bool wait)
{
	unsigned int how = SYNC_FILE_RANGE_WRITE |
			   (wait ? SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WAIT_AFTER : 0);

	if (sync_file_range(f->fd, (off_t)from, (off_t)(to - from), how) < 0)
		return mm_error(m, -errno, f->rel);
	return 0;
}

/* ---- leases ----------------------------------------------------------------------------- */

static int range_of(struct mm *m, const struct moment_range *r, struct mfile **f, uint64_t *off,
		    uint64_t *len)
{
	if (r->file >= m->n_files)
		return err_set(-EINVAL, "file %u is not registered", r->file);
	*f = &m->file[r->file];
	*off = (uint64_t)r->first * m->path.block;
	*len = (uint64_t)r->count * m->path.block;
	if (*off >= (*f)->len)
		return err_set(-EINVAL, "%s: block %u is beyond its end", (*f)->rel, r->first);
	if (*len > (*f)->len - *off)
		*len = (*f)->len - *off;
	return 0;
}

static int mm_release(struct mm *m, const struct moment_range *r)
{
	struct mfile *f;
	uint64_t off, len;
	int res = range_of(m, r, &f, &off, &len);

	if (res < 0)
		return res;
	if (f->dirty_to > off && !(r->flags & MOMENT_RANGE_CLEAN))
		res = write_back(m, f, off, off + len, false);
	madvise(f->map + off, len, MADV_DONTNEED);
	return res;
}

/* Nothing is started here: the hints told the daemon. wait() faults in. */
static int mm_ask(struct path *p, struct path_ask *ask)
{
	struct mm *m = mm_of(p);
	uint32_t i;
	int res = 0;

	for (i = 0; res == 0 && i < ask->n_release; i++)
		res = mm_release(m, &ask->r[i]);
	return res;
}

static int fault_in(struct mm *m, struct mfile *f, uint64_t off, uint64_t len, bool write)
{
	if (madvise(f->map + off, len, write ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) == 0)
		return 0;
	if (errno == EINVAL)
		return 0; /* before Linux 5.14: on touch, then */
	if (errno == EFAULT || errno == EIO || errno == EHWPOISON) {
		char c;

		/* Which of its reasons? An ordinary read tells. */
		if (pread(f->fd, &c, 1, (off_t)off) < 0)
			return mm_error(m, -errno, f->rel);
		return err_set(-EIO,
			       "%s/%s: bytes %llu to %llu cannot be read (status has the reason)",
			       m->path.mount, f->rel, (unsigned long long)off,
			       (unsigned long long)(off + len));
	}
	return mm_error(m, -errno, f->rel);
}

static int mm_wait(struct path *p, struct path_ask *ask)
{
	struct mm *m = mm_of(p);
	uint32_t i;
	int res;

	for (i = 0; i < ask->n_lease; i++) {
		const struct moment_range *r = &ask->r[ask->n_release + i];
		bool write = r->flags & MOMENT_RANGE_WRITE;
		struct mfile *f;
		uint64_t off, len;

		res = range_of(m, r, &f, &off, &len);
		if (res == 0)
			res = mm_map(m, f);
		if (res == 0)
			res = fault_in(m, f, off, len, write);
		if (res < 0)
			return res;
		ask->mem[i] = (struct path_mem){.ptr = f->map + off, .len = (uint32_t)len};
		if (!write)
			continue;
		if (f->dirty_from == f->dirty_to || off < f->dirty_from)
			f->dirty_from = off;
		if (f->dirty_to < off + len)
			f->dirty_to = off + len;
	}
	return 0;
}

static void mm_prefetch(struct path *p, const struct moment_range *r, size_t n)
{
	struct mm *m = mm_of(p);
	char lines[8192];
	size_t used = 0, i;

	for (i = 0; i < n && m->hint_fd >= 0; i++) {
		struct mfile *f;
		uint64_t off, len;
		int k;

		if (range_of(m, &r[i], &f, &off, &len) < 0)
			return;
		k = snprintf(lines + used, sizeof(lines) - used, "%s %llu %llu\n", f->rel,
			     (unsigned long long)off, (unsigned long long)len);
		if ((size_t)k >= sizeof(lines) - used) {
			if (!used || write(m->hint_fd, lines, used) < 0)
				return;
			used = 0;
			i--;
			continue;
		}
		used += (size_t)k;
	}
	if (used && write(m->hint_fd, lines, used) < 0)
		return;
}

/* ---- steps and commits ------------------------------------------------------------------ */

/* What the daemon says about the command that it has just refused. */
static int refused(struct mm *m, int res, const char *command)
{
	char *status, *text;

	if (res == -ENOTCONN || res == -ECONNABORTED || res == -ENODEV ||
	    status_read(m->path.mount, &status) < 0)
		return mm_error(m, res, command);
	text = json_string(json_find(status, "mount.control.message"));
	err_write("%s: %s", m->path.mount, text && text[0] ? text : strerror(-res));
	free(text);
	free(status);
	return res;
}

static int command(int fd, const char *text)
{
	ssize_t n;

	do
		n = write(fd, text, strlen(text));
	while (n < 0 && errno == EINTR);
	return n < 0 ? -errno : 0;
}

static int bracket(struct mm *m, const char *word, uint64_t step)
{
	char line[64];
	int res;

	snprintf(line, sizeof(line), "%s %llu\n", word, (unsigned long long)step);
	res = command(m->step_fd, line);
	return res < 0 ? refused(m, res, ".moment/step") : 0;
}

static int mm_pre_step(struct path *p, uint64_t step)
{
	struct mm *m = mm_of(p);
	int res = bracket(m, "begin", step);

	if (res == 0)
		m->open_step = step;
	return res;
}

static int mm_post_step(struct path *p, uint64_t step, uint32_t flags)
{
	struct mm *m = mm_of(p);
	uint32_t i;
	int res = 0;

	(void)step; /* a bracket ends with the number it began with */
	for (i = 0; res == 0 && i < m->n_files; i++) {
		struct mfile *f = &m->file[i];

		if (f->dirty_from == f->dirty_to)
			continue;
		res = write_back(m, f, f->dirty_from, f->dirty_to, true);
		f->dirty_from = f->dirty_to = 0;
	}
	if (res == 0)
		res = bracket(m, "end", m->open_step);
	if (res < 0)
		return res;
	m->open_step = MOMENT_STEP_NONE;
	return flags & MOMENT_POST_COMMIT ? p->ops->commit(p, false) : 0;
}

/* There is no call that only starts a commit: it is waited for. */
static int mm_commit(struct path *p, bool wait)
{
	struct mm *m = mm_of(p);
	int res;

	(void)wait;
	if (m->readonly)
		return err_set(-EROFS, "the session was opened to look only");
	if (m->open_step != MOMENT_STEP_NONE)
		return err_set(-EBUSY, "step %llu is open", (unsigned long long)m->open_step);
	res = command(m->control_fd, "commit");
	return res < 0 ? refused(m, res, ".moment/control") : 0;
}

/* A rollback is refused while a file is open for writing, and a handle lives a moment longer than
 * its last mapping: so it is tried for two seconds. */
static int mm_rollback(struct path *p)
{
	struct mm *m = mm_of(p);
	struct timespec nap = {.tv_nsec = 20 * 1000 * 1000};
	uint32_t i;
	int res, tries = 100;

	for (i = 0; i < m->n_files; i++) {
		mm_unmap(m, &m->file[i]);
		m->file[i].dirty_from = m->file[i].dirty_to = 0;
	}
	while ((res = command(m->control_fd, "rollback")) == -EBUSY && tries-- > 0)
		nanosleep(&nap, NULL);
	if (res < 0)
		return refused(m, res, ".moment/control");
	m->open_step = MOMENT_STEP_NONE;
	return 0;
}

static uint64_t step_line(const char *text, const char *word)
{
	const char *at = strstr(text, word);

	if (!at || (at != text && at[-1] != '\n'))
		return MOMENT_STEP_NONE;
	at += strlen(word);
	return *at >= '0' && *at <= '9' ? strtoull(at, NULL, 10) : MOMENT_STEP_NONE;
}

static void mm_space(struct mm *m)
{
	struct statvfs v;

	if (fstatvfs(m->dir, &v) == 0)
		m->path.free = (uint64_t)v.f_bavail * v.f_frsize;
}

static int mm_info(struct path *p, struct moment_info *info)
{
	struct mm *m = mm_of(p);
	char text[256] = "";
	int fd = openat(m->dir, ".moment/step", O_RDONLY | O_CLOEXEC);
	ssize_t n;

	if (fd < 0)
		return mm_error(m, -errno, ".moment/step");
	n = read(fd, text, sizeof(text) - 1);
	if (n < 0) {
		int res = -errno;

		close(fd);
		return mm_error(m, res, ".moment/step");
	}
	close(fd);
	info->committed_step = step_line(text, "committed ");
	info->step = step_line(text, "boundary ");
	info->open_step = step_line(text, "open ");
	mm_space(m);
	return 0;
}

/* ---- life ------------------------------------------------------------------------------- */

static int mm_close(struct path *p, bool commit)
{
	struct mm *m = mm_of(p);
	int fds[] = {m->dir, m->step_fd, m->hint_fd, m->control_fd};
	uint32_t i;

	(void)commit; /* the daemon's own business */
	for (i = 0; i < m->n_files; i++) {
		mm_unmap(m, &m->file[i]);
		free(m->file[i].rel);
	}
	for (i = 0; i < m->n_params; i++)
		free(m->param[i].rel);
	for (i = 0; i < 4; i++)
		if (fds[i] >= 0)
			close(fds[i]);
	free(m->file);
	free(m->param);
	free(p->mount);
	free(p->backing);
	free(m);
	return 0;
}

/* The mappings were not inherited; the descriptors would keep the files open for writing. */
static void mm_forked(struct path *p)
{
	struct mm *m = mm_of(p);
	uint32_t i;

	for (i = 0; i < m->n_files; i++) {
		if (m->file[i].fd >= 0)
			close(m->file[i].fd);
		m->file[i].fd = -1;
	}
	close(m->dir);
	if (!m->readonly) {
		close(m->step_fd);
		close(m->hint_fd);
		close(m->control_fd);
	}
}

static const struct path_ops mmap_ops = {
	.name = "mmap",
	.list = mm_list,
	.add = mm_add,
	.remove = mm_remove,
	.ask = mm_ask,
	.wait = mm_wait,
	.prefetch = mm_prefetch,
	.pre_step = mm_pre_step,
	.steps = mm_steps,
	.post_step = mm_post_step,
	.commit = mm_commit,
	.rollback = mm_rollback,
	.info = mm_info,
	.close = mm_close,
	.forked = mm_forked,
};

static int open_control(struct mm *m, const char *name, int *fd)
{
	*fd = openat(m->dir, name, O_WRONLY | O_CLOEXEC);
	return *fd < 0 ? mm_error(m, -errno, name) : 0;
}

/*
 * One trainer at a time. Those that work through the files lock .moment/step: the kernel that has
 * it mounted keeps the lock, and it ends with the process. Byte 0 is what excludes; the byte at our
 * pid only tells who has it.
 */
static int take_lock(struct mm *m)
{
	struct flock lk = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
	int res;

	if (fcntl(m->step_fd, F_OFD_SETLK, &lk) == 0) {
		lk.l_start = getpid();
		fcntl(m->step_fd, F_OFD_SETLK, &lk);
		return 0;
	}
	res = -errno;
	if (res == -EAGAIN || res == -EACCES) {
		res = path_mmap_held(m->path.mount);
		return res ? res
			   : err_set(-EBUSY, "%s: another trainer ends just now: try again",
				     m->path.mount);
	}
	return mm_error(m, res, ".moment/step");
}

int path_mmap_held(const char *mount)
{
	struct flock lk = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 1};
	char *name;
	int fd = -1, res = 0;

	if (asprintf(&name, "%s/.moment/step", mount) >= 0) {
		fd = open(name, O_RDONLY | O_CLOEXEC);
		free(name);
	}
	if (fd < 0)
		return 0;
	if (fcntl(fd, F_OFD_GETLK, &lk) == 0 && lk.l_type != F_UNLCK)
		res = err_set(
			-EBUSY,
			"%s already has a trainer, working through its files (pid %ld on this host); one at a "
			"time, end that one first",
			mount, (long)lk.l_start);
	close(fd);
	return res;
}

/* A writing session has the files to itself. */
static int no_session(struct mm *m, const char *status)
{
	const char *s;
	char who[64];

	for (s = json_first(json_find(status, "sessions")); s; s = json_next(s)) {
		const char *writes = json_find(s, "writes");

		if (writes && strncmp(writes, "true", 4) == 0)
			return err_set(
				-EBUSY,
				"%s already has a writing session (%s); one at a time, "
				"end that one first",
				m->path.mount,
				holder_who(who, (long)json_u64(json_find(s, "pid"), 0)));
	}
	return 0;
}

int path_open_mmap(const struct path_opts *o, struct path **out)
{
	struct mm *m = calloc(1, sizeof(*m));
	struct moment_info info;
	char *status;
	int res;

	if (!m)
		return err_set(-ENOMEM, "out of memory");
	m->path.ops = &mmap_ops;
	m->readonly = o->readonly;
	m->open_step = MOMENT_STEP_NONE;
	m->dir = m->step_fd = m->hint_fd = m->control_fd = -1;
	m->path.rolled_back = MOMENT_STEP_NONE;
	m->path.mount = realpath(o->mount, NULL);
	m->path.backing = strdup(o->backing);
	if (!m->path.mount || !m->path.backing) {
		res = err_set(-errno, "%s: %s", o->mount, strerror(errno));
		goto out_close;
	}
	res = status_read(m->path.mount, &status);
	if (res < 0)
		goto out_close;
	m->path.block = (uint32_t)json_u64(json_find(status, "block_bytes"), 2u << 20);
	m->path.ram = json_u64(json_find(status, "ram.bytes"), 0);
	m->path.holder_pid = (uint32_t)json_u64(json_find(status, "mount.pid"), 0);
	if (!m->readonly)
		res = no_session(m, status);
	free(status);
	if (res < 0)
		goto out_close;
	m->path.quota = m->path.window = WINDOW;
	if (m->path.quota < (uint64_t)MOMENT_ROLES * m->path.block)
		m->path.quota = (uint64_t)MOMENT_ROLES * m->path.block;
	m->path.quota_small = m->path.quota;
	if (m->path.ram < 2 * m->path.quota)
		m->path.ram = 2 * m->path.quota;
	m->dir = open(m->path.mount, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (m->dir < 0) {
		res = mm_error(m, -errno, "");
		goto out_close;
	}
	if (!m->readonly) {
		res = open_control(m, ".moment/step", &m->step_fd);
		if (res == 0)
			res = open_control(m, ".moment/prefetch", &m->hint_fd);
		if (res == 0)
			res = open_control(m, ".moment/control", &m->control_fd);
		if (res == 0)
			res = take_lock(m);
		if (res < 0)
			goto out_close;
	}
	/* A bracket that a dead trainer left open is torn state: the way back is a rollback. */
	res = mm_info(&m->path, &info);
	if (res == 0 && !m->readonly && info.open_step != MOMENT_STEP_NONE) {
		if (o->rollback)
			res = mm_rollback(&m->path);
		else
			res = err_set(
				-EBUSY,
				"%s: step %llu is open, by another trainer or one that has died: `momentctl "
				"rollback %s` returns to the last commit",
				m->path.mount, (unsigned long long)info.open_step, m->path.mount);
		if (res == 0)
			m->path.rolled_back = info.open_step;
	}
	if (res < 0)
		goto out_close;
	*out = &m->path;
	return 0;
out_close:
	mm_close(&m->path, false);
	return res;
}
