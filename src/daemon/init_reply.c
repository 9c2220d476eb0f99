/* SPDX-License-Identifier: Apache-2.0 */
/*
 * init_reply.c - one flag that libfuse 3.14 does not know: FUSE_HANDLE_KILLPRIV_V2.
 *
 * Without it the kernel asks for the attribute security.capability before every single write(2):
 * measured, that is a third of the time of a 1 MiB write. With it the file system promises to take
 * set-ID bits and capabilities away when a file is written, cut or given to somebody else: the
 * kernel says with some requests whether the bits go, setid.c decides for all of them; the attribute
 * is refused, so there are no capabilities.
 *
 * The flag is set in the reply to INIT, the first that is ever sent, on its way out. A kernel that
 * does not know it ignores it.
 */
#include <errno.h>
#include <linux/fuse.h>
#include <stddef.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "daemon/daemon.h"

static atomic_bool sent;

static ssize_t write_reply(int fd, struct iovec *iov, int count, void *userdata)
{
	(void)userdata;
	if (!atomic_load_explicit(&sent, memory_order_relaxed) && !atomic_exchange(&sent, true)) {
		const struct fuse_out_header *h = iov[0].iov_base;
		uint32_t flags;

		if (count >= 2 && iov[0].iov_len == sizeof(*h) && !h->error &&
		    iov[1].iov_len >= offsetof(struct fuse_init_out, flags) + sizeof(flags)) {
			char *at = (char *)iov[1].iov_base + offsetof(struct fuse_init_out, flags);

			memcpy(&flags, at, sizeof(flags));
			flags |= FUSE_HANDLE_KILLPRIV_V2;
			memcpy(at, &flags, sizeof(flags));
		}
	}
	return writev(fd, iov, count);
}

static ssize_t read_request(int fd, void *buf, size_t len, void *userdata)
{
	(void)userdata;
	return read(fd, buf, len);
}

int init_reply_hook(struct daemon *d)
{
	static const struct fuse_custom_io io = {.writev = write_reply, .read = read_request};

	return fuse_session_custom_io(d->se, &io, fuse_session_fd(d->se));
}
