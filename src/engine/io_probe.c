/* SPDX-License-Identifier: Apache-2.0 */
/*
 * io_probe.c - does O_DIRECT work on this file, and with what alignment?
 *
 * Neither the flag nor its acceptance by open(2) tells: tmpfs refuses it, overlay may accept it and
 * fail at the first read, ext4 with data journalling accepts it and quietly goes buffered. So we
 * ask statx where the kernel knows, and then write and read one unit for real. The probe writes
 * back what it found there, so a crash in the middle changes nothing.
 *
 * The file is opened anew through /proc/self/fd: flags belong to the open file description,
 * and the caller's must stay buffered. Runs once, in io_create(), on the caller's thread.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/io_impl.h"

/* Our own description of the file behind fd. */
static int reopen(int fd, int flags)
{
	char path[32];
	int ret;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	ret = open(path, flags | O_CLOEXEC);
	return ret < 0 ? -errno : ret;
}

__attribute__((format(printf, 2, 3))) static void reason(struct io *io, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(io->direct_reason, sizeof(io->direct_reason), fmt, ap);
	va_end(ap);
}

/* What the kernel says: 0 and io->align, or -errno with a reason. */
static int ask_alignment(struct io *io, int fd)
{
	io->align = MOMENT_UNIT;
#ifdef STATX_DIOALIGN
	struct statx st;

	if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &st) || !(st.stx_mask & STATX_DIOALIGN))
		return 0; /* it does not say; the trial will tell */
	if (!st.stx_dio_offset_align || !st.stx_dio_mem_align) {
		reason(io, "the file system has no direct I/O for this file");
		return -EOPNOTSUPP;
	}
	io->align = st.stx_dio_offset_align > st.stx_dio_mem_align ? st.stx_dio_offset_align
								   : st.stx_dio_mem_align;
	if (MOMENT_UNIT % io->align) {
		reason(io, "direct I/O on this file needs an alignment of %u bytes, ours is %u",
		       io->align, MOMENT_UNIT);
		return -EOPNOTSUPP;
	}
#else
	(void)fd;
#endif
	return 0;
}

static ssize_t pread_eintr(int fd, void *buf, size_t len, uint64_t off)
{
	ssize_t n;

	do
		n = pread(fd, buf, len, (off_t)off);
	while (n < 0 && errno == EINTR);
	return n < 0 ? -errno : n;
}

/* Writes one unit over itself and reads it again through `fd`, which is O_DIRECT. */
static int trial(struct io *io, const struct io_opts *opts, int fd)
{
	uint64_t off = opts->readonly ? 0 : opts->probe_off;
	char *found = NULL, *seen;
	const char *what;
	struct stat st;
	ssize_t n;
	int ret;

	ret = -posix_memalign((void **)&found, MOMENT_UNIT, 2 * MOMENT_UNIT);
	if (ret)
		return ret;
	seen = found + MOMENT_UNIT;
	memset(found, 0, MOMENT_UNIT);

	what = "reading";
	if (fstat(opts->fd, &st)) {
		ret = -errno;
		goto out;
	}
	n = pread_eintr(opts->fd, found, MOMENT_UNIT, off);
	if (n < 0) {
		ret = (int)n;
		goto out;
	}
	if (!opts->readonly) {
		what = "writing";
		n = pwrite(fd, found, MOMENT_UNIT, (off_t)off);
		if (n != MOMENT_UNIT) {
			ret = n < 0 ? -errno : -EIO;
			goto out;
		}
		/* A file that ended before the place has become longer. */
		if ((uint64_t)st.st_size < off + MOMENT_UNIT && ftruncate(opts->fd, st.st_size)) {
			ret = -errno;
			goto out;
		}
	}
	what = "reading";
	n = pread_eintr(fd, seen, MOMENT_UNIT, off);
	if (n < 0)
		ret = (int)n;
	else if (memcmp(seen, found, (size_t)n))
		ret = -EIO;
out:
	if (ret)
		reason(io, "%s one block with O_DIRECT: %s", what, strerror(-ret));
	free(found);
	return ret;
}

static int open_direct(struct io *io, const struct io_opts *opts, int flags)
{
	int fd, ret;

	ret = ask_alignment(io, opts->fd);
	if (ret)
		return ret;
	fd = reopen(opts->fd, flags | O_DIRECT);
	if (fd < 0) {
		reason(io,
		       fd == -ENOENT ? "/proc is needed to open the file with O_DIRECT: %s"
				     : "opening the file with O_DIRECT: %s",
		       strerror(-fd));
		return fd;
	}
	ret = trial(io, opts, fd);
	if (ret) {
		close(fd);
		return ret;
	}
	io->fd = fd;
	io->direct = true;
	return 0;
}

int io_probe_open(struct io *io, const struct io_opts *opts, char *why, size_t why_len)
{
	int flags = opts->readonly ? O_RDONLY : O_RDWR;
	int ret;

	if (opts->direct != IO_DIRECT_OFF) {
		ret = open_direct(io, opts, flags);
		if (!ret)
			return 0;
		if (opts->direct == IO_DIRECT_ON) {
			snprintf(
				why, why_len,
				"direct=on, but: %s; put the backing on a file system with direct I/O "
				"(ext4, xfs on a drive) or use direct=auto",
				io->direct_reason);
			return ret;
		}
	} else {
		reason(io, "buffered I/O was asked for");
	}
	io->align = MOMENT_UNIT;
	io->fd = reopen(opts->fd, flags);
	if (io->fd < 0)
		io->fd = fcntl(opts->fd, F_DUPFD_CLOEXEC, 0);
	if (io->fd < 0) {
		ret = -errno;
		snprintf(why, why_len, "opening the pool file again: %s", strerror(errno));
		return ret;
	}
	return 0;
}
