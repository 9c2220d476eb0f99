/* SPDX-License-Identifier: Apache-2.0 */
/*
 * daemon.h - what the parts of the mount daemon share.
 *
 * Threads of the daemon, besides the engine's own:
 *   main      starts and ends everything, waits for signals (main.c, life.c)
 *   receive   a few; read requests from /dev/fuse and run the handlers (receive.c). A handler never
 *             waits for the drive: it replies at once from memory, or hands an op to the engine and
 *             the reply is made by the op's callback
 *   interrupt one; looks whether a caller that got a signal is to die (interrupt.c)
 *   keeper    one; keeps memory ready, so that nobody else asks for any (steady.c)
 *   notify    one; tells the kernel what it holds and is stale (notify.c)
 * The session socket is served by the engine's loop thread (session_socket.c).
 *
 * A FUSE request has exactly one owner at any time: the handler, then (after request_submit) the
 * engine, then the callback that replies. Errors are -errno everywhere; the sign flips in
 * reply_err().
 */
#ifndef DAEMON_DAEMON_H
#define DAEMON_DAEMON_H

#ifndef FUSE_USE_VERSION
#define FUSE_USE_VERSION 312
#endif
#include <fuse3/fuse_lowlevel.h>
#include <pthread.h>
#include <stdatomic.h>

#include "engine/engine.h"
#include "daemon/log.h"
#include "daemon/options.h"

#define EXIT_USAGE	1
#define EXIT_BACKING	2
#define EXIT_MOUNTPOINT 3
#define EXIT_FUSE	4
#define EXIT_RUNTIME	5
#define EXIT_DROPPED	6

struct receive;
struct notify;
struct interrupts;
struct session_socket;
struct rx_buf;

/* What main waits for, as bits in daemon.events; raised by daemon_raise(). */
enum daemon_event {
	EVENT_INIT = 1,	   /* the kernel has sent INIT: the mount serves */
	EVENT_ENDED = 2,   /* the receive threads have ended: unmounted, or the connection broke */
	EVENT_CONTROL = 4, /* a `detach` was written to .moment/control, or its writer gave up */
	EVENT_IDLE = 8,	   /* the last handle or session has gone (only while detaching) */
};

/* The command that was last written to .moment/control, for status. Under daemon.lock. */
struct control_state {
	char command[16];
	bool running;
	int result;
	char message[512];
};

/* The plain step that is open: bracket.c. */
#define BRACKET_NONE	0
#define BRACKET_UNKNOWN (-1)
struct bracket {
	_Atomic pid_t owner;
	const struct text *_Atomic handle; /* that stands for an owner who cannot be watched */
	_Atomic uint64_t step;
	struct loop_watch watch; /* of the owner; fd -1: none */
};

struct daemon {
	struct engine *e;
	struct ns *ns;
	struct fuse_session *se;
	const struct options *o;
	const char *mountpoint; /* absolute */
	char device[24];	/* "major:minor" of the mount, "" before it is mounted */
	uid_t uid;		/* the owner of the mount */
	gid_t gid;
	struct timespec mounted;

	struct receive *receive;
	struct notify *notify;
	struct interrupts *interrupts;
	struct bracket bracket;
	struct session_socket *socket;

	int event_fd;
	atomic_uint events;
	atomic_bool initialized; /* INIT came and its answer is on its way */
	atomic_bool detaching;
	atomic_bool forced;  /* sessions do not hold up the end */
	atomic_uint handles; /* open files and directories, those of .moment/ excepted */

	pthread_mutex_t lock; /* a leaf: what follows */
	pthread_cond_t drained;
	unsigned int requests; /* handed to the engine and not answered */
	struct control_state control;
	struct list lost;	/* lost.c */
	atomic_uint nlost;	/* also without the lock */
	struct request *detach; /* the `detach` that waits for its answer */
};

void daemon_raise(struct daemon *d, enum daemon_event event);

/* life.c: opens the backing, mounts, serves until the mount has ended, takes everything down.
 * Returns the exit status. ready() is called when the mount serves. Signals come by signal_fd. */
int life_run(struct daemon *d, const char *backing, int signal_fd, void (*ready)(void));

/* fuse_ops.c: names and attributes; fuse_dir.c and fuse_data.c fill in the rest. */
extern const struct fuse_lowlevel_ops daemon_ops;

static inline struct daemon *daemon_of(fuse_req_t req)
{
	return fuse_req_userdata(req);
}

static inline void reply_err(fuse_req_t req, int err)
{
	fuse_reply_err(req, -err);
}

/* ---- inode numbers ------------------------------------------------------------------------
 * 1 is the mount's root, NS_ROOT params/, the numbers up to NS_LAST are the namespace's. Those from
 * VIRT_FIRST on are made by the daemon (virt.c).
 */
#define VIRT_FIRST ((uint64_t)1 << 62)

enum virt {
	VIRT_DIR, /* .moment/ */
	VIRT_STATUS,
	VIRT_STATS,
	VIRT_STEP,
	VIRT_PREFETCH,
	VIRT_CONTROL,
	VIRT_COUNT
};

#define VIRT_INO(v) (VIRT_FIRST + (v))

static inline bool ino_is_virtual(uint64_t ino)
{
	return ino >= VIRT_FIRST || ino == FUSE_ROOT_ID;
}

/* The name under which the residency of a file can be read (momentctl ls); in no list of names. */
#define XATTR_CACHE "user.moment.cache"

/* How long the kernel may keep names and attributes, seconds, if it is not told (notify.c). */
#define ATTR_TIMEOUT 1.0

void attr_to_stat(const struct ns_attr *a, struct stat *st);
/* Attributes of any inode, and how long the kernel may keep them. */
int daemon_getattr(struct daemon *d, uint64_t ino, struct stat *st, double *timeout);

/* What the kernel gets with a name. It carries a reference; daemon_forget() is for when it fails.
 */
void daemon_fill_entry(const struct ns_attr *a, struct fuse_entry_param *e);
void daemon_forget(struct daemon *d, uint64_t ino, uint64_t n);

/* ---- lost.c: mapped bytes that could not be taken ----------------------------------------------
 */

/* True: the first ones of this file. */
bool lost_add(struct daemon *d, uint64_t ino, uint64_t off, uint64_t len, int err);
void lost_found(struct daemon *d, uint64_t ino, uint64_t off,
		uint64_t end);			/* written, or given up */
int lost_error(struct daemon *d, uint64_t ino); /* 0: none of this file */
void lost_fini(struct daemon *d);

/* ---- fuse_dir.c ----------------------------------------------------------------------------- */

void dir_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi);
void dir_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi);
void dir_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi);
void dir_readplus(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off,
		  struct fuse_file_info *fi);

/* ---- virt.c: the root directory and .moment/; control.c: what can be written there ---------- */

struct virt_entry {
	const char *name;
	uint64_t ino;
};

const struct virt_entry *virt_list(uint64_t dir, size_t *n); /* NULL: not a directory of ours */
int virt_getattr(struct daemon *d, uint64_t ino, struct stat *st);

/* The handle of a file whose content is made when it is opened, or that takes lines of text. */
struct text {
	char *data;
	size_t len;
	pthread_mutex_t lock; /* of the tail */
	char *tail;	      /* an unfinished line (prefetch) */
	size_t tail_len;
};

struct text *text_create(char *data, size_t len); /* takes data (malloc'ed) over, also on failure */
void text_destroy(struct text *t);
void text_read(struct text *t, fuse_req_t req, size_t size, off_t off);

int virt_open(struct daemon *d, uint64_t ino, struct text **out);
void virt_write(struct daemon *d, fuse_req_t req, uint64_t ino, struct text *t, const char *buf,
		size_t size);
int virt_flush(struct daemon *d, uint64_t ino, struct text *t);
/* Answers the waiting `detach`, if there is one: res 0 or -errno. */
void control_answer_detach(struct daemon *d, int res, const char *message);

/* ---- fuse_data.c ---------------------------------------------------------------------------- */

/* Something for the notify thread (notify.c): drops the pages of `ino` from off on, if len. */
struct notify_job {
	struct notify_job *next;
	struct notify *notify;
	void (*run)(struct notify_job *);
	uint64_t ino, off, len;
	struct engine_boundary *boundary;
};

/*
 * A FUSE request that the engine works on. `finish` replies and may resubmit (then it returns
 * true); it runs where the op's done() or accepted() runs: on a work thread for READ, else on the
 * loop thread or, for WRITE, one of the two.
 */
struct request {
	struct engine_op op;
	fuse_req_t req;
	struct daemon *d;
	bool (*finish)(struct request *r, int64_t res);
	bool answered;	    /* before the engine was done with it */
	struct rx_buf *buf; /* the receive buffer that holds op.data, or NULL */
	char *text;	    /* malloc'ed, freed with the request: lines still to do (control.c) */
	const struct text *handle; /* of .moment/step (control.c) */
	pid_t owner;
	size_t size, pos, done;
	int64_t result;
	bool direct; /* a WRITE that goes past the kernel's pages */
	struct notify_job notify;
	atomic_uint refs;
	atomic_bool interrupted;
	pthread_mutex_t lock; /* what follows */
	bool with_engine, ended;
	struct loop_task cancel;    /* posted at most once */
	pid_t tid;		    /* who asked; 0: not known */
	struct list interrupt_link; /* interrupt.c */
};

struct request *request_create(fuse_req_t req, enum engine_op_kind kind, uint64_t ino,
			       bool (*finish)(struct request *, int64_t));
void request_submit(struct request *r);
void request_destroy(struct request *r); /* after the reply */
void request_put(struct request *r);	 /* one reference */
/* Its caller is to die: the op ends with -EINTR if it can. False: the engine has not got it now. */
bool request_give_up(struct request *r);
/* Waits until the engine has answered all; false: nothing has moved there for so long. */
bool requests_drain(struct daemon *d, unsigned int stalled_seconds);

void data_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi);
void data_create_handle(struct daemon *d, uint64_t ino, struct fuse_file_info *fi);
void data_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi);
/* MOMENT_IOC_CLAIM and _UNCLAIM (protocol.h) */
void data_ioctl(fuse_req_t req, fuse_ino_t ino, unsigned int cmd, void *arg,
		struct fuse_file_info *fi, unsigned int flags, const void *in_buf, size_t in_size,
		size_t out_size);
void data_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi);
void data_write(fuse_req_t req, fuse_ino_t ino, const char *buf, size_t size, off_t off,
		struct fuse_file_info *fi);
void data_flush(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi);
void data_fsync(fuse_req_t req, fuse_ino_t ino, int datasync, struct fuse_file_info *fi);
void data_fsyncdir(fuse_req_t req, fuse_ino_t ino, int datasync, struct fuse_file_info *fi);
void data_fallocate(fuse_req_t req, fuse_ino_t ino, int mode, off_t off, off_t len,
		    struct fuse_file_info *fi);
void data_lseek(fuse_req_t req, fuse_ino_t ino, off_t off, int whence, struct fuse_file_info *fi);
void data_truncate(fuse_req_t req, uint64_t ino, uint64_t size, bool by_handle);
void data_residency(fuse_req_t req, uint64_t ino, size_t size);

/* ---- bracket.c ------------------------------------------------------------------------------ */

/* Has that thread nothing to do with the plain step that is open? (0: not known.) */
bool bracket_foreign(struct daemon *d, pid_t tid, bool unknown_is_foreign);
void bracket_name(fuse_req_t req); /* it is about to change a name */
pid_t bracket_owner(pid_t tid);
/* Loop thread: the engine has begun, has ended the step. */
void bracket_began(struct daemon *d, pid_t owner, const struct text *handle, uint64_t step);
void bracket_ended(struct daemon *d);
void bracket_released(struct daemon *d, const struct text *t); /* a handle of .moment/step */
void bracket_stop(struct daemon *d);

/* ---- receive.c ------------------------------------------------------------------------------ */

int receive_start(struct daemon *d);
void receive_stop(struct daemon *d); /* ends the threads, also those that wait in read(2) */
/* In a handler: takes the buffer that holds the request over, to be given back later. */
struct rx_buf *rx_take(void);
/* For setid.c: this WRITE or SETATTR says that the caller may not keep set-ID bits. */
bool rx_kills_setid(void);
void rx_put(struct receive *rx, struct rx_buf *b); /* b may be NULL */
void receive_destroy(struct daemon *d);

/* ---- setid.c -------------------------------------------------------------------------------- */

enum setid_change {
	SETID_KERNEL_SAYS, /* a WRITE, or a SETATTR of a size: the request says whether */
	SETID_ALLOCATE,	   /* also punching: it does not */
	SETID_OWNER,	   /* owner or group: whoever does it */
};

/* In the handler of such a request, before rx_take(): takes off the file those that are to go. */
void setid_changed(fuse_req_t req, uint64_t ino, enum setid_change what);

/* ---- interrupt.c ---------------------------------------------------------------------------- */

int interrupts_create(struct daemon *d);
void interrupts_stop(struct daemon *d); /* ends the thread */
void interrupts_destroy(struct daemon *d);
/* The request's caller got a signal. Never waits. */
void interrupts_add(struct interrupts *n, struct request *r);
bool interrupt_is_fatal(pid_t tid); /* is that thread to die? */

/* Now and then, and after steady_wake(), from steady.c's thread: maps buffers that are waited for,
 * unmaps those that are not needed any more. */
void receive_keep(struct daemon *d);

/* ---- steady.c: memory that is there before it is needed ------------------------------------ */
void steady_begin(void); /* before any other thread */
/* All other threads are there, and the mount does not serve yet. Starts one that keeps it so; until
 * steady_stop(), which comes when the connection has ended, and before receive_destroy(). */
int steady_ready(struct daemon *d);
void steady_stop(void);
void steady_wake(void); /* any thread: receive_keep() has something to do */
/* What could be had of it: "io_flusher: yes; locked: yes". After steady_ready(), any thread. */
void steady_text(char *buf, size_t len);

/* ---- init_reply.c: after mounting --------------------------------------------------------- */
int init_reply_hook(struct daemon *d);

/* ---- systemd.c ------------------------------------------------------------------------------ */

/* Lines for the service manager, if there is one that listens. */
void systemd_tell(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* The end has begun; from now on the manager is asked to wait. Once. */
void systemd_ending(const char *mountpoint);

/* ---- notify.c ------------------------------------------------------------------------------- */

int notify_create(struct daemon *d);
void notify_stop(struct daemon *d);    /* does what is queued, then ends the thread ... */
void notify_destroy(struct daemon *d); /* ... when the engine is closed: frees */
/* The engine's boundary hook; arg: the daemon. */
void notify_boundary(void *arg, struct engine_boundary *b);
/* The kernel gives up its pages of all that is open for writing: those that are dirty come as WRITEs. */
void notify_fetch(struct notify *n);
/* j->run() is called on the notify thread when the pages of j's range are gone. False: there are
 * none, nothing will be called. */
bool notify_pages(struct notify *n, struct notify_job *j);

/* ---- session_socket.c ----------------------------------------------------------------------- */

int session_socket_start(struct daemon *d, char *err, size_t errlen);
unsigned int session_socket_sessions(const struct session_socket *s);
pid_t session_socket_writer(const struct session_socket *s); /* of any session, for a message */
/*
 * Ends all sessions and stops listening. Connections that never said HELLO wait for the last word:
 * they are moved to session_socket_farewell(), which tells them the result of the last commit.
 */
void session_socket_stop(struct session_socket *s);
void session_socket_farewell(struct session_socket *s, int result, const char *text);

#endif
