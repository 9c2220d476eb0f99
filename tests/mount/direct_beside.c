/* SPDX-License-Identifier: Apache-2.0 */
/*
 * direct_beside.c - writes with O_DIRECT beside buffered readers, for kernel_cache.sh.
 *
 *	direct_beside FILE ROUNDS
 *		Each round writes all of FILE with another byte, by asynchronous O_DIRECT writes (Linux AIO) or,
 *		every third round, by pwrite(2), while child processes read it through the kernel's pages. When a
 *		round's writes are done, read(2) and a mapping must show them and nothing else.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHUNK	40960u
#define CHUNKS	16u
#define SIZE	(CHUNK * CHUNKS)
#define READERS 2

static unsigned char got[SIZE];

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static void reader(const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (fd < 0)
		die(path);
	for (;;)
		if (pread(fd, got, SIZE, 0) < 0)
			die("reader");
}

static void check(const unsigned char *p, unsigned char want, int round, const char *by)
{
	size_t wrong = 0, first = 0;

	for (size_t i = SIZE; i-- > 0;) {
		if (p[i] == want)
			continue;
		first = i;
		wrong++;
	}
	if (!wrong)
		return;
	fprintf(stderr, "round %d: %s shows %zu old bytes, from %zu on\n", round, by, wrong, first);
	exit(1);
}

static void write_aio(aio_context_t ctx, int fd, unsigned char *buf)
{
	struct iocb cb[CHUNKS], *list[CHUNKS];
	struct io_event ev[CHUNKS];
	long n;

	memset(cb, 0, sizeof(cb));
	for (unsigned int i = 0; i < CHUNKS; i++) {
		cb[i].aio_lio_opcode = IOCB_CMD_PWRITE;
		cb[i].aio_fildes = (unsigned int)fd;
		cb[i].aio_buf = (unsigned long)(buf + i * CHUNK);
		cb[i].aio_nbytes = CHUNK;
		cb[i].aio_offset = i * CHUNK;
		list[i] = &cb[i];
	}
	n = syscall(SYS_io_submit, ctx, (long)CHUNKS, list);
	if (n != CHUNKS)
		die("io_submit");
	n = syscall(SYS_io_getevents, ctx, (long)CHUNKS, (long)CHUNKS, ev, NULL);
	if (n != CHUNKS)
		die("io_getevents");
	for (unsigned int i = 0; i < CHUNKS; i++) {
		if (ev[i].res == CHUNK)
			continue;
		fprintf(stderr, "a write ended with %lld\n", (long long)ev[i].res);
		exit(1);
	}
}

int main(int argc, char **argv)
{
	aio_context_t ctx = 0;
	unsigned char *buf, *map;
	pid_t child[READERS];
	int fd, look;

	if (argc != 3)
		return 2;
	fd = open(argv[1], O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0644);
	look = open(argv[1], O_RDONLY | O_CLOEXEC);
	if (fd < 0 || look < 0)
		die(argv[1]);
	if (posix_memalign((void **)&buf, 4096, SIZE))
		die("memory");
	memset(buf, 0, SIZE);
	if (pwrite(fd, buf, SIZE, 0) != SIZE)
		die("pwrite");
	map = mmap(NULL, SIZE, PROT_READ, MAP_SHARED, look, 0);
	if (map == MAP_FAILED)
		die("mmap");
	if (syscall(SYS_io_setup, CHUNKS, &ctx))
		die("io_setup");
	for (int i = 0; i < READERS; i++) {
		child[i] = fork();
		if (child[i] < 0)
			die("fork");
		if (child[i] == 0)
			reader(argv[1]);
	}
	for (int round = 1; round <= atoi(argv[2]); round++) {
		memset(buf, round & 0xff, SIZE);
		if (round % 3)
			write_aio(ctx, fd, buf);
		else if (pwrite(fd, buf, SIZE, 0) != SIZE)
			die("pwrite");
		if (pread(look, got, SIZE, 0) != SIZE)
			die("pread");
		check(got, (unsigned char)round, round, "read(2)");
		check(map, (unsigned char)round, round, "a mapping");
	}
	for (int i = 0; i < READERS; i++) {
		kill(child[i], SIGKILL);
		waitpid(child[i], NULL, 0);
	}
	return 0;
}
