/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool_super.c - the superblock, byte by byte.
 *
 * The first POOL_SUPER_SIZE (64 KiB) of the pool file are not for extents:
 *
 *	     0 ..  4095   slot 0
 *	  4096 ..  8191   slot 1
 *	  8192 .. 32767   zeros, reserved
 *	 32768 .. 36863   scratch: the O_DIRECT probe writes here
 *	 36864 .. 65535   zeros, reserved
 *
 * A slot; numbers are little-endian:
 *
 *	offset  size
 *	     0     8   magic "MOMENTFS"
 *	     8     4   version, now 1
 *	    12     4   block size in bytes, a power of two from 64 KiB to 64 MiB
 *	    16    16   uuid of the backing, the same as in the catalog
 *	    32     8   commit_seq: a commit that was durable when this was written
 *	    40     8   generation: 1 more with each write of either slot
 *	    48  4040   zeros, reserved
 *	  4088     8   XXH3-64 of the 4088 bytes before it
 *
 * The slots are written in turn, so a write that power loss tears leaves the other one. Of two
 * valid slots the one with the higher generation counts (commit_seq is no measure: a catalog
 * restored from a copy counts from lower on). Magic, version, generation and checksum keep their
 * places in all versions, so that an older program can tell "newer" from "damaged".
 *
 * Stateless. pool_super_write() runs on a work thread, reading at opening.
 */
#include "engine/bug.h"
#include "engine/pool_super.h"

#include <endian.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

struct slot {
	char magic[8];
	uint32_t version;
	uint32_t block;
	uint8_t uuid[16];
	uint64_t commit_seq;
	uint64_t generation;
	uint8_t reserved[4040];
	uint64_t checksum;
};

_Static_assert(sizeof(struct slot) == POOL_SLOT_SIZE, "slot is an on-disk format");
_Static_assert(offsetof(struct slot, version) == 8, "slot is an on-disk format");
_Static_assert(offsetof(struct slot, block) == 12, "slot is an on-disk format");
_Static_assert(offsetof(struct slot, uuid) == 16, "slot is an on-disk format");
_Static_assert(offsetof(struct slot, commit_seq) == 32, "slot is an on-disk format");
_Static_assert(offsetof(struct slot, generation) == 40, "slot is an on-disk format");
_Static_assert(offsetof(struct slot, reserved) == 48, "slot is an on-disk format");
_Static_assert(offsetof(struct slot, checksum) == 4088, "slot is an on-disk format");
_Static_assert(POOL_SLOTS *POOL_SLOT_SIZE <= POOL_PROBE_OFF, "slots end before the probe");
_Static_assert(POOL_PROBE_OFF + MOMENT_UNIT <= POOL_SUPER_SIZE, "the probe is in the superblock");

static uint64_t checksum(const struct slot *s)
{
	return htole64(XXH3_64bits(s, offsetof(struct slot, checksum)));
}

/* Bytes read, fewer only at the end of the file; or -errno. */
static ssize_t read_at(int fd, void *buf, size_t len, off_t off)
{
	size_t done = 0;

	while (done < len) {
		ssize_t n = pread(fd, (char *)buf + done, len - done, off + (off_t)done);

		if (n < 0 && errno != EINTR)
			return -errno;
		if (n == 0)
			break;
		if (n > 0)
			done += (size_t)n;
	}
	return (ssize_t)done;
}

static int fail(const char **why, int rc, const char *text)
{
	*why = text;
	return rc;
}

int pool_super_read(int fd, struct pool_super_slot *out, const char **why)
{
	struct slot slots[POOL_SLOTS];
	const struct slot *best = NULL;
	bool ours = false, cut;
	ssize_t n;

	memset(slots, 0, sizeof(slots));
	n = read_at(fd, slots, sizeof(slots), 0);
	if (n < 0)
		return fail(why, (int)n, "the superblock cannot be read");
	cut = n < (ssize_t)sizeof(slots);
	for (unsigned int i = 0; i < POOL_SLOTS; i++) {
		const struct slot *s = &slots[i];

		if (memcmp(s->magic, POOL_MAGIC, sizeof(s->magic)))
			continue;
		ours = true;
		if (s->checksum != checksum(s))
			continue;
		if (!best || le64toh(s->generation) > le64toh(best->generation))
			best = s;
	}
	if (!ours)
		return fail(why, -EINVAL, "not a momentfs pool: no superblock at its start");
	if (!best && cut)
		return fail(why, -EUCLEAN, "cut off within its superblock: restore it from a copy");
	if (!best)
		return fail(why, -EUCLEAN,
			    "both copies of its superblock are damaged: restore it from a copy");
	if (le32toh(best->version) > POOL_VERSION)
		return fail(why, -EPROTONOSUPPORT,
			    "written by a newer momentfs: use that version or a later one");

	*out = (struct pool_super_slot){
		.super.version = le32toh(best->version),
		.super.block = le32toh(best->block),
		.super.commit_seq = le64toh(best->commit_seq),
		.generation = le64toh(best->generation),
		.slot = (unsigned int)(best - slots),
	};
	memcpy(out->super.uuid, best->uuid, sizeof(best->uuid));
	/* The checksum is right, so these were written like that. */
	if (out->super.version < 1 || out->super.block < POOL_BLOCK_MIN ||
	    out->super.block > POOL_BLOCK_MAX || (out->super.block & (out->super.block - 1)))
		return fail(why, -EUCLEAN, "its superblock makes no sense: restore it from a copy");
	return 0;
}

int pool_super_write(int fd, const struct pool_super_slot *in)
{
	struct slot s = {
		.version = htole32(in->super.version),
		.block = htole32(in->super.block),
		.commit_seq = htole64(in->super.commit_seq),
		.generation = htole64(in->generation),
	};
	size_t done = 0;

	assert(in->slot < POOL_SLOTS);
	memcpy(s.magic, POOL_MAGIC, sizeof(s.magic));
	memcpy(s.uuid, in->super.uuid, sizeof(s.uuid));
	s.checksum = checksum(&s);
	while (done < sizeof(s)) {
		ssize_t n = pwrite(fd, (const char *)&s + done, sizeof(s) - done,
				   (off_t)(in->slot * POOL_SLOT_SIZE + done));

		if (n < 0 && errno != EINTR)
			return -errno;
		if (n > 0)
			done += (size_t)n;
	}
	return 0;
}
