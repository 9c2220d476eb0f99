/* SPDX-License-Identifier: Apache-2.0 */
/*
 * steady.c - memory that is there before it is needed.
 *
 * When memory is short the kernel writes dirty pages of mapped files back, and who waits for memory
 * waits for that. For a file of ours it is this process that does it, so this process must not wait
 * for memory itself: not when it answers a WRITE. In a limited control group that it shares with
 * the trainer this is not far-fetched. The kernel has a flag for such processes
 * (PR_SET_IO_FLUSHER), but it takes CAP_SYS_RESOURCE. So, with it or without:
 *
 * - malloc() has one heap, which grows in advance: RESERVE bytes at its top have been touched and
 *   are free. Nothing smaller is mapped or unmapped for itself, and free() gives nothing back, since
 *   both take the lock of the address space. A thread of its own looks once a second, takes new
 *   reserve when some was used, and gives back what is too much. It is the only one that changes
 *   the address space, and nobody waits for it.
 * - Threads are started, and their stacks touched, before the mount serves. The receive buffers are
 *   receive.c's care.
 * - All of the process, its code too, is locked into memory where that is allowed (CAP_IPC_LOCK, or
 *   a large enough limit); else it is touched once, and may be taken away by the system later.
 *
 * What the kernel takes for itself to do the I/O (requests, the page cache for the catalog, and for
 * the pool with direct=off) is out of reach; for that there is only the flag.
 */
#include <errno.h>
#include <malloc.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "daemon/daemon.h"

#ifndef PR_SET_IO_FLUSHER
#define PR_SET_IO_FLUSHER 57
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ  22
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MCL_ONFAULT
#define MCL_ONFAULT 4
#endif

#define RESERVE	   (8u << 20)
#define STACK	   (512u << 10)
#define KEEPER	   (128u << 10)	 /* its stack */
#define TOUCH_MOST (64ull << 20) /* of one mapping; the RAM tier has been touched by itself */
#define KEEP_NS	   1000000000ull /* between two looks */

static int flusher_error, lock_error;
static uint64_t next_look;
static pthread_t keeper;
static sem_t wake;
static atomic_bool started, stop;

void steady_begin(void)
{
#ifndef __SANITIZE_ADDRESS__
	pthread_attr_t ta;

	pthread_attr_init(&ta);
	pthread_attr_setstacksize(&ta, STACK);
	pthread_setattr_default_np(&ta);
	pthread_attr_destroy(&ta);
#endif
	mallopt(M_ARENA_MAX, 1);
	mallopt(M_MMAP_THRESHOLD, 4 * RESERVE); /* what the reserve could not give */
	mallopt(M_TRIM_THRESHOLD, -1);
	mallopt(M_TOP_PAD, 1 << 20);
	/* Threads inherit it. */
	flusher_error = prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) ? errno : 0;
}

static void take_reserve(void)
{
	char *p = malloc(RESERVE);

	if (!p)
		return;
	memset(p, 1, RESERVE);
	/* Or the compiler leaves both out. */
	__asm__ volatile("" : : "r"(p) : "memory");
	free(p);
}

/* What cannot be locked is touched at least: code, data, stacks. */
static void touch_all(void)
{
	FILE *f = fopen("/proc/self/maps", "re");
	unsigned long long from, to;
	char line[512], perms[8];

	while (f && fgets(line, sizeof(line), f)) {
		if (sscanf(line, "%llx-%llx %7s", &from, &to, perms) != 3 || perms[0] != 'r' ||
		    perms[3] != 'p' || to - from > TOUCH_MOST || strstr(line, "[v"))
			continue;
		madvise((void *)(uintptr_t)from, to - from,
			perms[1] == 'w' ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
	}
	if (f)
		fclose(f);
}

static void keep_reserve(void)
{
	uint64_t now = loop_now_ns(), took;
	struct mallinfo2 m;

	if (now < next_look)
		return;
	m = mallinfo2();
	took = loop_now_ns() - now;
	if (m.keepcost < RESERVE / 2)
		take_reserve();
	else if (m.keepcost > 4ull * RESERVE)
		malloc_trim(RESERVE);
	/* It looks at all that is free: at most a thousandth of the time goes there. */
	next_look = now + max_u64(KEEP_NS, 1000 * took);
}

static void *keeper_main(void *arg)
{
	struct timespec until;

	while (!atomic_load(&stop)) {
		keep_reserve();
		receive_keep(arg);
		clock_gettime(CLOCK_MONOTONIC, &until);
		until.tv_sec++;
		sem_clockwait(&wake, CLOCK_MONOTONIC, &until);
	}
	return NULL;
}

static int start_keeper(struct daemon *d)
{
	sigset_t all, old;
	pthread_attr_t ta;
	int res;

	sem_init(&wake, 0, 0);
	pthread_attr_init(&ta);
	pthread_attr_setstacksize(&ta, KEEPER);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	res = -pthread_create(&keeper, &ta, keeper_main, d);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	pthread_attr_destroy(&ta);
	atomic_store(&started, !res);
	return res;
}

int steady_ready(struct daemon *d)
{
	char text[256];
	int res;

	take_reserve();
	res = start_keeper(d);
	if (res < 0)
		return res;
	/* What is mapped later is locked when it is touched. */
	lock_error = mlockall(MCL_CURRENT) ? errno : 0;
	if (lock_error)
		touch_all();
	else if (mlockall(MCL_FUTURE | MCL_ONFAULT))
		lock_error = errno;
	if (!flusher_error && !lock_error)
		return 0;
	steady_text(text, sizeof(text));
	log_notice("when memory is short, writing back mapped files may wait for memory: %s", text);
	return 0;
}

void steady_wake(void)
{
	if (atomic_load(&started))
		sem_post(&wake);
}

void steady_stop(void)
{
	if (!atomic_load(&started))
		return;
	atomic_store(&stop, true);
	steady_wake();
	pthread_join(keeper, NULL);
	atomic_store(&started, false);
}

void steady_text(char *buf, size_t len)
{
	snprintf(buf, len, "io_flusher: %s; locked: %s",
		 !flusher_error		  ? "yes"
		 : flusher_error == EPERM ? "refused (needs CAP_SYS_RESOURCE)"
					  : "no (the kernel has none)",
		 lock_error ? "refused (needs CAP_IPC_LOCK, or ulimit -l unlimited)" : "yes");
}
