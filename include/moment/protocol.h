/* SPDX-License-Identifier: Apache-2.0 */
/*
 * protocol.h - the messages between a session's client (libmoment) and the engine.
 *
 * Transport: a SOCK_SEQPACKET Unix socket, `session.sock` in the backing directory (also named in
 * .moment/status), one message a packet, at most MOMENT_MSG_MAX bytes; or, embedded, the same
 * messages handed to the engine in the client's own process. Same machine, so native byte order and
 * the arena's own memory. The reply to HELLO carries the arena's memfd (SCM_RIGHTS); the client
 * maps all of it once, MAP_SHARED. The peer must run as the mount's owner or as root.
 *
 * Requests carry an id of the client's choosing; the reply repeats it. Requests are started in
 * order, but a reply that has to wait (a lease that waits for the drive) does not hold up those
 * behind it: match replies by id. So a client asks for its next leases before it computes on the
 * ones it has. With 1024 requests under way, further REGISTERs and COMMITs are refused (-EBUSY).
 *
 * The unit of a lease is a block (moment_hello_reply.block bytes; a file's last block is as long as
 * the file says). Leased memory is the RAM tier's own: valid from the reply until the release. A
 * write lease excludes every other lease, and write-back. A read lease excludes write leases of
 * others only in that both parties are the same session: readers in other processes may see a mix
 * within a step.
 *
 * One step: PRE_STEP, any number of ADVANCE and PREFETCH and STEPS, POST_STEP. Write leases are
 * granted only inside a step. All leases must be released before POST_STEP. If the connection ends
 * inside a step, or with PRE_STEP unanswered by POST_STEP, the state is torn: the next session must
 * ROLLBACK first (or ask for it in HELLO).
 *
 * A connection that never says HELLO is a waiter: when the daemon ends it gets one struct
 * moment_reply with type 0, the result of the last commit as its status and a text when that
 * failed.
 */
#ifndef MOMENT_PROTOCOL_H
#define MOMENT_PROTOCOL_H

#include <stdint.h>
#include <sys/ioctl.h>

#include "moment/types.h"

/*
 * For programs that map state files through the mount: ioctl(fd, MOMENT_IOC_CLAIM) on a descriptor
 * opened for writing. From then on until it is closed and unmapped, or MOMENT_IOC_UNCLAIM, nobody
 * else opens the file for writing, and nobody cuts, renames or removes it (EBUSY). EBUSY: somebody
 * else has it open for writing; ENOTTY: not a momentfs file.
 */
#define MOMENT_IOC_CLAIM   _IO('M', 0x71)
#define MOMENT_IOC_UNCLAIM _IO('M', 0x72)

#ifdef __cplusplus
extern "C" {
#endif

#define MOMENT_PROTOCOL_VERSION 1u
#define MOMENT_MSG_MAX		65536u
#define MOMENT_SOCKET_NAME	"session.sock"
#define MOMENT_NAME_MAX		65535u /* bytes in a parameter's name; what fits a message */
#define MOMENT_NDIM_MAX		64u

enum moment_msg_type {
	MOMENT_MSG_HELLO = 1,
	MOMENT_MSG_REGISTER,
	MOMENT_MSG_LIST,
	MOMENT_MSG_ADVANCE,
	MOMENT_MSG_PREFETCH, /* no reply */
	MOMENT_MSG_PRE_STEP,
	MOMENT_MSG_STEPS,
	MOMENT_MSG_POST_STEP,
	MOMENT_MSG_COMMIT,
	MOMENT_MSG_ROLLBACK,
	MOMENT_MSG_INFO,
	MOMENT_MSG_REMOVE,
};

/* Every message starts with this. A request's and its reply's type are the same. */
struct moment_msg {
	uint16_t type;
	uint16_t flags; /* by type, below */
	uint32_t len;	/* of the whole message, this header included */
	uint64_t id;
};

/*
 * Every reply starts with this. With status < 0 the rest of the message is a text for people,
 * text_len bytes, not terminated (what, which, how much, what to do), and nothing else.
 */
struct moment_reply {
	struct moment_msg h;
	int32_t status; /* 0 or -errno */
	uint32_t text_len;
};

/* HELLO. -EPROTO: other version; -EACCES: other user; -EBUSY: another session writes (its pid in
 * the text), or keeps what the rollback needs; -ESTALE: the state is torn and ROLLBACK was not
 * asked for. */
#define MOMENT_HELLO_READONLY 1u /* readers without limit; no steps */
#define MOMENT_HELLO_ROLLBACK 2u /* return a torn state to the last commit first */

struct moment_hello {
	struct moment_msg h;
	uint32_t version;
	uint32_t pid;
	char client[48]; /* for status, NUL-terminated */
};

struct moment_hello_reply {
	struct moment_reply r;
	uint32_t version;
	uint32_t block;	     /* bytes */
	uint64_t arena_size; /* bytes to map */
	uint64_t quota;	 /* most bytes leased at once, pieces rounded up to powers of two; above:
			    -E2BIG */
	uint64_t window; /* bytes of prefetch ahead that the cache keeps for this session */
	uint64_t committed_step; /* MOMENT_STEP_NONE: never */
	uint64_t rolled_back;	 /* the torn step that was dropped, or MOMENT_STEP_NONE */
	uint64_t ram;		 /* of the tier, bytes */
	uint64_t quota_small;	 /* the part of the quota that blocks of up to half a block size may
				    take */
	uint32_t daemon_pid;
	uint32_t pad;
};

/*
 * REGISTER: n entries, each `size` bytes (a multiple of 8). Creates the parameter's directory and
 * files, or finds them; reserves their disk space (committed plus one copy); pins them to this
 * session. All or nothing per message: on an error nothing of this message is made. Errors: -ENOSPC
 * (bytes needed and free), -EINVAL (shape or dtype differs from what is there: both in the text),
 * -ENOENT (MOMENT_REG_EXIST and not there), -EEXIST (MOMENT_REG_NEW and there), -EBUSY (a file is
 * open for writing; which).
 */
#define MOMENT_REG_NEW	 1u /* must not exist */
#define MOMENT_REG_EXIST 2u /* must exist */
#define MOMENT_REG_FRESH \
	4u /* if it exists, with any shape, its content becomes zeros and its step 0; arrays that \
	      are not asked for go */
#define MOMENT_REG_CHECK 8u /* change nothing: only tell what would happen */

struct moment_reg_entry {
	uint32_t size;
	uint32_t name_len; /* bytes */
	uint64_t numel;
	uint32_t ndim;
	uint32_t hyper_len; /* bytes of a JSON object with hyperparameters for meta.json, 0: none */
	uint8_t dtype[MOMENT_ROLES]; /* by role; 0xff: the parameter does not have that array */
	uint8_t tier;		     /* 0 auto, 1 ram (pinned), 2 nvme */
	uint8_t pad[3];
	/* then: uint64_t shape[ndim]; char name[name_len]; char hyper[hyper_len]; zero bytes up to
	 * size */
};

struct moment_reg_reply_entry {
	uint32_t param;		     /* handle; handles are dense from 0 in order of registering */
	uint32_t flags;		     /* MOMENT_REG_CREATED | MOMENT_REG_FOUND */
	uint64_t step;		     /* this parameter's own step count */
	uint32_t file[MOMENT_ROLES]; /* handles for ranges; UINT32_MAX: no such array */
};
#define MOMENT_REG_CREATED 1u
#define MOMENT_REG_FOUND   2u

struct moment_register {
	struct moment_msg h;
	uint32_t n, flags;
	/* struct moment_reg_entry entries */
};

struct moment_register_reply {
	struct moment_reply r;
	uint32_t n, pad;
	uint64_t reserved; /* bytes of disk this session has reserved so far */
	uint64_t free;	   /* bytes of disk left */
	struct moment_reg_reply_entry e[];
};

/*
 * LIST: the parameters that the backing holds (directories with a user.moment.name attribute), from
 * cookie 0 on. Reply entries are moment_reg_entry (dtype, shape, name), each followed by nothing
 * else; `step` comes in `steps`-like order inside: see moment_list_entry.
 */
struct moment_list {
	struct moment_msg h;
	uint64_t cookie;
};

struct moment_list_entry {
	uint64_t step;
	struct moment_reg_entry e; /* with its tail */
};

struct moment_list_reply {
	struct moment_reply r;
	uint64_t cookie; /* for the next call; 0: that was all */
	uint32_t n, pad;
	/* struct moment_list_entry, each of sizeof(step) + e.size bytes */
};

/* A run of blocks of one file. */
struct moment_range {
	uint32_t file, first, count;
	uint32_t flags;
};
#define MOMENT_RANGE_WRITE 1u /* lease: for writing (becomes dirty when released) */
#define MOMENT_RANGE_COOL  2u /* release: not needed again in this step, evict early */
#define MOMENT_RANGE_CLEAN 4u /* release: a write lease whose memory was not changed after all */

/*
 * ADVANCE: releases the first n_release ranges, then leases the n_lease that follow, all or
 * nothing. The reply comes when all are there. Errors: -E2BIG (above the quota: need, quota), -EIO
 * (a read failed or its checksum is wrong: which file and offset; the others are released), -EINVAL
 * (not a block of the file, already leased by this session, not leased), -EPERM (write lease
 * outside a step), -ENOSPC.
 */
struct moment_advance {
	struct moment_msg h;
	uint32_t n_release, n_lease;
	struct moment_range r[];
};

struct moment_lease {
	uint64_t arena; /* offset in the arena, bytes */
	uint32_t len;	/* bytes of the file in this block */
	uint32_t pad;
};

struct moment_advance_reply {
	struct moment_reply r;
	uint32_t n, pad; /* blocks, in the order of the request */
	struct moment_lease l[];
};

/* PREFETCH: what will be leased next, in this order. Hints replace nothing and may be dropped. No
 * reply. */
struct moment_prefetch {
	struct moment_msg h;
	uint32_t n, pad;
	struct moment_range r[];
};

/* PRE_STEP: step is a label (the optimizer's step number, or what the trainer likes; need not
 * grow). -EBUSY: a step is open. -EROFS. -EIO: a write error is not cured yet. When commits have been
 * failing a commit is tried first, and if it fails the step does not begin: its error, with a text. */
struct moment_pre_step {
	struct moment_msg h;
	uint64_t step;
};

/* STEPS: parameters' own step counts after this step; take effect with POST_STEP. Batched, inside a
 * step. */
struct moment_param_step {
	uint32_t param, pad;
	uint64_t step;
};

struct moment_steps {
	struct moment_msg h;
	uint32_t n, pad;
	struct moment_param_step p[];
};

/* POST_STEP: replies when readers cannot see older bytes any more. -EBUSY: leases are out. Starts a
 * commit behind the reply when `commit=SECONDS` is due. */
#define MOMENT_POST_COMMIT 1u /* start a commit of this boundary now, behind the reply */
struct moment_post_step {
	struct moment_msg h;
	uint64_t step;
};

/* COMMIT: asks for a commit at the last boundary (or the next one, if a step is open). -ESTALE:
 * torn; -EIO, -ENOSPC: failed; state stays dirty and a later one may succeed. */
#define MOMENT_COMMIT_WAIT 1u /* reply when durable; else at once */
/* ROLLBACK: everything of the session's files back to the last commit; no leases may be out. Closes
 * an open step. Readers have two seconds to give back what they lease of these files, and are
 * granted nothing meanwhile; else -EBUSY (whose pid in the text), and nothing has changed. */
struct moment_simple {
	struct moment_msg h;
};

struct moment_info_reply { /* of PRE_STEP, POST_STEP, STEPS, COMMIT, ROLLBACK, INFO, REMOVE */
	struct moment_reply r;
	uint64_t committed_step; /* MOMENT_STEP_NONE: never */
	uint64_t step;		 /* of the last boundary, MOMENT_STEP_NONE: none since the mount */
	uint64_t open_step;	 /* MOMENT_STEP_NONE: none is open */
	uint64_t read_bytes, written_bytes; /* of the pool since the engine started */
	uint64_t hits, misses;		    /* blocks */
	int32_t error;			    /* uncured write error, 0 or -errno */
	uint32_t pad;
};

/* REMOVE: deletes parameters of this session (their files and reservation). n handles follow. Not
 * inside a step. */
struct moment_remove {
	struct moment_msg h;
	uint32_t n, pad;
	uint32_t param[];
};

#ifdef __cplusplus
}
#endif

#endif
