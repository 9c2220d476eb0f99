/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arena_map.c - gets the arena's memory from the kernel: all of it at creation, or an error.
 *
 * A drive takes a limited number of memory segments per request, so memory scattered in 4 KiB pages
 * halves its speed. Three ways, in this order:
 *
 * collapsed    MADV_COLLAPSE (Linux 6.1) on each 2 MiB; needs no privilege, no reservation and no
 *              shmem_enabled. One page of each 2 MiB is there before, so collapsing moves next to
 *              nothing: fully populated memory takes twenty times as long.
 * hugetlb      where the administrator has reserved pages of 2 MiB.
 * small pages  otherwise, with the reason kept for the status.
 *
 * Memory is allocated by fallocate(), which returns an error when there is none, and only then
 * touched, so nothing here can end in SIGBUS; and never more is asked for than is available, so it
 * does not end in the OOM killer either.
 *
 * The order is the caller's to keep: create, then register with the ring. Memory that is already
 * registered cannot be collapsed (EAGAIN), and punching it (MADV_REMOVE, FALLOC_FL_PUNCH_HOLE)
 * would part the registration from the mapping. Nobody does that: the seals forbid a change of
 * size, and nothing in here gives memory back before the end.
 */
#include "engine/arena_map.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "engine/memory.h"

#define HUGE_PAGE (2ull << 20)
#define GIVE_UP	  64 /* failures in a row: each may have the kernel compact memory for long */

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef MFD_HUGE_2MB
#define MFD_HUGE_2MB (21U << 26)
#endif

static int sealed_memfd(uint64_t size, unsigned int flags)
{
	int fd, rc;

	flags |= MFD_CLOEXEC | MFD_ALLOW_SEALING;
	/* First with it: vm.memfd_noexec=2 refuses what is executable; Linux before 6.3 does not
	 * know the flag. */
	fd = memfd_create("momentfs-arena", flags | MFD_NOEXEC_SEAL);
	if (fd < 0 && errno == EINVAL)
		fd = memfd_create("momentfs-arena", flags);
	if (fd < 0)
		return -errno;
	if (ftruncate(fd, (off_t)size) ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) {
		rc = -errno;
		close(fd);
		return rc;
	}
	return fd;
}

/* Maps the file at an address that is a multiple of 2 MiB, as huge pages need it. */
static int map_aligned(int fd, uint64_t size, void **out)
{
	size_t room = (size_t)(size + HUGE_PAGE);
	char *start, *base;

	start = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (start == MAP_FAILED)
		return -errno;
	base = (char *)(uintptr_t)round_up_u64((uintptr_t)start, HUGE_PAGE);
	if (mmap(base, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
		int rc = -errno;

		munmap(start, room);
		return rc;
	}
	if (base > start)
		munmap(start, (size_t)(base - start));
	if (base + size < start + room)
		munmap(base + size, (size_t)(start + room - (base + size)));
	*out = base;
	return 0;
}

static int map_open(struct arena_map *m, uint64_t size, unsigned int flags)
{
	int rc;

	*m = (struct arena_map){.size = size, .kind = "small pages"};
	m->fd = sealed_memfd(size, flags);
	if (m->fd < 0)
		return m->fd;
	rc = map_aligned(m->fd, size, &m->base);
	if (rc)
		close(m->fd);
	return rc;
}

void arena_map_destroy(struct arena_map *m)
{
	munmap(m->base, m->size);
	close(m->fd);
}

static int allocate(const struct arena_map *m, uint64_t off, uint64_t len)
{
	while (fallocate(m->fd, 0, (off_t)off, (off_t)len)) {
		if (errno == ENOSPC)
			return -ENOMEM;
		if (errno != EINTR)
			return -errno;
	}
	return 0;
}

static void touch(const struct arena_map *m, uint64_t off)
{
	volatile char *p = (char *)m->base + off;

	*p = 0;
}

/*
 * How much of the mapping the kernel really maps by huge pages. The return values of MADV_COLLAPSE
 * say what was made; this says what is. -errno where /proc cannot tell.
 */
static int64_t measure_huge(const struct arena_map *m)
{
	char line[512];
	uint64_t bytes = 0;
	bool ours = false, seen = false;
	FILE *f = fopen("/proc/self/smaps", "re");

	if (!f)
		return -errno;
	while (fgets(line, sizeof(line), f)) {
		uint64_t from, to, kib;
		char field[64];

		if (sscanf(line, "%" SCNx64 "-%" SCNx64 " ", &from, &to) == 2)
			ours = from >= (uintptr_t)m->base && to <= (uintptr_t)m->base + m->size;
		else if (ours && sscanf(line, "%63[A-Za-z_]: %" SCNu64 " kB", field, &kib) == 2 &&
			 (!strcmp(field, "ShmemPmdMapped") || !strcmp(field, "FilePmdMapped"))) {
			bytes += kib << 10;
			seen = true;
		}
	}
	fclose(f);
	return seen ? (int64_t)bytes : -ENOENT;
}

/* 0 or an errno. EAGAIN: the page was busy for a moment. */
static int collapse_at(const struct arena_map *m, uint64_t off)
{
	for (int tries = 3;; tries--) {
		if (!madvise((char *)m->base + off, HUGE_PAGE, MADV_COLLAPSE))
			return 0;
		if (errno != EAGAIN || !tries)
			return errno;
	}
}

static time_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec;
}

/* Populates the memfd, by huge pages as far as `collapse` and the kernel allow. */
static int populate(struct arena_map *m, const struct arena_opts *opts, bool collapse)
{
	uint64_t whole = m->size / HUGE_PAGE, got = 0;
	time_t told = now();
	unsigned int failures = 0; /* in a row */
	int64_t measured;
	int rc, why = 0;

	for (uint64_t off = 0; off < m->size; off += HUGE_PAGE) {
		uint64_t len = min_u64(HUGE_PAGE, m->size - off);

		if (opts->progress && now() - told >= ARENA_PROGRESS) {
			told = now();
			opts->progress(opts->arg, off, m->size);
		}
		if (collapse && len == HUGE_PAGE && failures < GIVE_UP) {
			rc = allocate(m, off, MOMENT_UNIT);
			if (rc)
				return rc;
			touch(m, off);
			rc = collapse_at(m, off);
			if (!rc) {
				touch(m, off); /* maps it: collapsing may leave that to a fault */
				got++;
				failures = 0;
				continue;
			}
			why = rc;
			failures = why == EINVAL && !got ? GIVE_UP : failures + 1;
		}
		rc = allocate(m, off, len);
		if (rc)
			return rc;
	}
	/* All pages are there; this only saves the page faults. Linux before 5.14 has them. */
	madvise(m->base, m->size, MADV_POPULATE_WRITE);

	m->huge = got * HUGE_PAGE;
	if (got) {
		measured = measure_huge(m);
		if (measured >= 0)
			m->huge = (uint64_t)measured;
		m->kind = "collapsed";
	}
	if (!collapse)
		snprintf(m->reason, sizeof(m->reason), "switched off");
	else if (!whole)
		snprintf(m->reason, sizeof(m->reason), "smaller than one huge page of 2 MiB");
	else if (why == EINVAL && !got)
		snprintf(
			m->reason, sizeof(m->reason),
			"the kernel does not collapse shared memory (MADV_COLLAPSE: Linux 6.1, and "
			"shmem_enabled not \"deny\"); reserve huge pages (vm.nr_hugepages)");
	else if (why)
		snprintf(m->reason, sizeof(m->reason),
			 "%" PRIu64 " of %" PRIu64 " huge pages could not be made (%s); free or "
			 "compact memory (vm.compact_memory), or reserve huge pages "
			 "(vm.nr_hugepages)",
			 whole - got, whole, strerrordesc_np(why));
	return 0;
}

static int map_small(struct arena_map *m, uint64_t size, const struct arena_opts *opts,
		     bool collapse)
{
	int rc;

	if (size > memory_available())
		return -ENOMEM;
	rc = map_open(m, size, 0);
	if (rc)
		return rc;
	rc = populate(m, opts, collapse);
	if (rc)
		arena_map_destroy(m);
	return rc;
}

static int map_hugetlb(struct arena_map *m, uint64_t size, uint32_t chunk)
{
	int rc;

	size = size / HUGE_PAGE * HUGE_PAGE / chunk * chunk;
	if (size / chunk < 4)
		return -EINVAL;
	/* The mapping reserves its pages, so a shortage shows in map_open() as ENOMEM. */
	rc = map_open(m, size, MFD_HUGETLB | MFD_HUGE_2MB);
	if (rc)
		return rc;
	rc = allocate(m, 0, size);
	if (rc) {
		arena_map_destroy(m);
		return rc;
	}
	madvise(m->base, size, MADV_POPULATE_WRITE);
	m->huge = size;
	m->kind = "hugetlb";
	return 0;
}

int arena_map_create(struct arena_map *m, uint64_t size, const struct arena_opts *opts)
{
	struct arena_map better;
	int rc;

	switch (opts->huge) {
	case ARENA_HUGE_HUGETLB:
		return map_hugetlb(m, size, opts->chunk);
	case ARENA_HUGE_OFF:
		return map_small(m, size, opts, false);
	case ARENA_HUGE_AUTO:
		break;
	}
	rc = map_small(m, size, opts, true);
	if (!rc && !m->reason[0])
		return 0;
	if (map_hugetlb(&better, size, opts->chunk))
		return rc;
	if (!rc)
		arena_map_destroy(m);
	*m = better;
	return 0;
}
