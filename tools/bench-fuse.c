/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench-fuse.c - a FUSE file system that does nothing, for tools/bench files: what the kernel's
 *side of every read(2) and write(2) costs on this machine, whoever serves them.
 *
 *	bench-fuse MIB MOUNTPOINT	until it is unmounted
 *
 * One file, `file`, of MIB mebibytes. Reads are answered from memory by the thread that received
 * them, writes are thrown away; other files can be created and forget all but their length.
 * Limits and cache flags are those of momentfs; its bdi limits are for the caller to raise.
 */
#define FUSE_USE_VERSION 312
#include <errno.h>
#include <fuse3/fuse_lowlevel.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define FILE_INO 2
#define NEW_INO	 3
#define TIMEOUT	 1.0

static char *data;
static uint64_t size, new_size;

static void fill(fuse_ino_t ino, struct stat *st)
{
	memset(st, 0, sizeof(*st));
	st->st_ino = ino;
	st->st_mode = ino == FUSE_ROOT_ID ? S_IFDIR | 0755 : S_IFREG | 0644;
	st->st_nlink = 1;
	st->st_size = (off_t)(ino == FILE_INO ? size : ino == NEW_INO ? new_size : 0);
}

static void on_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
	struct fuse_entry_param e = {.attr_timeout = TIMEOUT, .entry_timeout = TIMEOUT};

	(void)parent;
	if (strcmp(name, "file")) {
		fuse_reply_err(req, ENOENT);
		return;
	}
	e.ino = FILE_INO;
	fill(e.ino, &e.attr);
	fuse_reply_entry(req, &e);
}

static void on_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	struct stat st;

	(void)fi;
	fill(ino, &st);
	fuse_reply_attr(req, &st, TIMEOUT);
}

static void on_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	(void)ino;
	fi->keep_cache = 1;
	fuse_reply_open(req, fi);
}

/* Each new file is number NEW_INO of another generation: the kernel's pages of the last one are
 * gone. */
static void on_create(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode,
		      struct fuse_file_info *fi)
{
	static uint64_t generation;
	struct fuse_entry_param e = {
		.ino = NEW_INO, .generation = ++generation, .attr_timeout = TIMEOUT};

	(void)parent, (void)name, (void)mode;
	new_size = 0;
	fill(e.ino, &e.attr);
	fi->keep_cache = 1;
	fuse_reply_create(req, &e, fi);
}

static void on_unlink(fuse_req_t req, fuse_ino_t parent, const char *name)
{
	(void)parent, (void)name;
	fuse_reply_err(req, 0);
}

static void on_read(fuse_req_t req, fuse_ino_t ino, size_t len, off_t off,
		    struct fuse_file_info *fi)
{
	(void)ino, (void)fi;
	if ((uint64_t)off >= size)
		len = 0;
	else if (len > size - (uint64_t)off)
		len = size - (uint64_t)off;
	fuse_reply_buf(req, len ? data + off : NULL, len);
}

static void on_write(fuse_req_t req, fuse_ino_t ino, const char *buf, size_t len, off_t off,
		     struct fuse_file_info *fi)
{
	(void)ino, (void)buf, (void)fi;
	if ((uint64_t)off + len > new_size)
		new_size = (uint64_t)off + len;
	fuse_reply_write(req, len);
}

/* Asked before every write(2); not again after this answer. */
static void on_getxattr(fuse_req_t req, fuse_ino_t ino, const char *name, size_t len)
{
	(void)ino, (void)name, (void)len;
	fuse_reply_err(req, ENOSYS);
}

static void on_init(void *arg, struct fuse_conn_info *conn)
{
	(void)arg;
	if (conn->max_write > 1u << 20)
		conn->max_write = 1u << 20;
	conn->max_background = 64;
	conn->congestion_threshold = 48;
	conn->want &= ~(unsigned int)FUSE_CAP_AUTO_INVAL_DATA;
}

int main(int argc, char **argv)
{
	static const struct fuse_lowlevel_ops ops = {
		.init = on_init,
		.lookup = on_lookup,
		.getattr = on_getattr,
		.open = on_open,
		.create = on_create,
		.unlink = on_unlink,
		.read = on_read,
		.write = on_write,
		.getxattr = on_getxattr,
	};
	char *args[] = {argv[0], NULL};
	struct fuse_args fa = FUSE_ARGS_INIT(1, args);
	struct fuse_loop_config *loop = fuse_loop_cfg_create();
	struct fuse_session *se;
	int res = 1;

	if (argc != 3 || !loop) {
		fprintf(stderr, "usage: bench-fuse MIB MOUNTPOINT\n");
		return 2;
	}
	size = strtoull(argv[1], NULL, 10) << 20;
	data = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (data == MAP_FAILED) {
		perror("bench-fuse");
		return 1;
	}
	madvise(data, size, MADV_HUGEPAGE);
	memset(data, 1, size);
	se = fuse_session_new(&fa, &ops, sizeof(ops), NULL);
	if (se && !fuse_session_mount(se, argv[2])) {
		res = fuse_session_loop_mt(se, loop);
		fuse_session_unmount(se);
	}
	if (se)
		fuse_session_destroy(se);
	fuse_loop_cfg_destroy(loop);
	return res ? 1 : 0;
}
