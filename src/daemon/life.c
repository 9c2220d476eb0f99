/* SPDX-License-Identifier: Apache-2.0 */
/*
 * life.c - the life of a mount, all of it on the main thread: open the backing, mount, serve, and
 * the way down.
 *
 * The way down is longer than it looks, because dirty pages may exist that only the kernel knows
 * (mapped files), and they come as WRITEs when the last user goes. So a signal detaches the mount
 * (nobody can open anything any more) and goes on serving until the kernel ends the connection, or
 * until the deadline. Only then everything stops, from the edges to the core; the last thing is the
 * commit.
 *
 * The daemon never calls into its own mount: what it needs to know about it comes from
 * /proc/self/mountinfo, and umount2() with UMOUNT_NOFOLLOW asks nothing of the file system.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mount.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "daemon/checks.h"
#include "daemon/daemon.h"
#include "daemon/mountinfo.h"

#define INIT_MS	  10000u /* for the kernel's INIT */
#define LINGER_MS 10000u /* for the last user, after a signal or `detach` */
#define HURRY_MS  1000u	 /* after a second signal; a third: at once */
#define DETACH_MOST 1000  /* mounts of one device */
#define READAHEAD "1024" /* KiB */
#define STALLED_S 600u	 /* without any sign of the drive, while requests are in flight */
#define MS_NONE	  UINT64_MAX

struct life {
	struct daemon *d;
	int signal_fd;
	unsigned int signals;
	uint64_t deadline; /* ms, MS_NONE: none */
	bool ended, init, ending;
};

static uint64_t now_ms(void)
{
	return loop_now_ns() / 1000000;
}

void daemon_raise(struct daemon *d, enum daemon_event event)
{
	uint64_t one = 1;
	ssize_t n;

	atomic_fetch_or(&d->events, event);
	do
		n = write(d->event_fd, &one, sizeof(one));
	while (n < 0 && errno == EINTR);
}

/* ---- mounting ------------------------------------------------------------------------------- */

static int add_option(struct fuse_args *args, const char *opt)
{
	return fuse_opt_add_arg(args, "-o") || fuse_opt_add_arg(args, opt) ? -ENOMEM : 0;
}

static int make_args(struct daemon *d, const char *backing, struct fuse_args *args)
{
	char fixed[128], *fsname = NULL, *list = NULL;
	int res = -ENOMEM;

	/* The source may have commas and backslashes in it. */
	if (asprintf(&fsname, "fsname=%s", backing) < 0)
		return -ENOMEM;
	snprintf(fixed, sizeof(fixed), "subtype=momentfs,default_permissions,max_read=%u%s%s",
		 ENGINE_OP_MAX, d->o->allow_other ? ",allow_other" : "",
		 d->o->readonly ? ",ro" : "");
	if (!fuse_opt_add_opt_escaped(&list, fsname) && !fuse_opt_add_arg(args, "momentfs") &&
	    !add_option(args, list) && !add_option(args, fixed) &&
	    (!d->o->kernel || !add_option(args, d->o->kernel)) &&
	    (!d->o->debug || !fuse_opt_add_arg(args, "-d")))
		res = 0;
	free(fsname);
	free(list);
	return res;
}

static int mount_it(struct daemon *d, const char *backing)
{
	struct fuse_args args = FUSE_ARGS_INIT(0, NULL);
	struct mountinfo m;
	int res = make_args(d, backing, &args);

	if (!res) {
		d->se = fuse_session_new(&args, &daemon_ops, sizeof(daemon_ops), d);
		res = d->se ? 0 : -EINVAL;
	}
	fuse_opt_free_args(&args);
	if (res) {
		log_error("libfuse would not make a session: %s", strerror(-res));
		return EXIT_FUSE;
	}
	if (fuse_session_mount(d->se, d->mountpoint)) {
		log_error(
			"cannot mount on %s; in a container, the flags to add are: --device /dev/fuse "
			"--cap-add SYS_ADMIN --security-opt apparmor=unconfined",
			d->mountpoint);
		fuse_session_destroy(d->se);
		d->se = NULL;
		return EXIT_FUSE;
	}
	if (init_reply_hook(d))
		log_notice("libfuse takes no hook: each write costs a request more");
	if (mountinfo_at(d->mountpoint, &m) && !strcmp(m.type, MOMENTFS_TYPE))
		snprintf(d->device, sizeof(d->device), "%s", m.device);
	return 0;
}

static bool tune_one(const char *device, const char *name, const char *value)
{
	char path[128];
	int fd;
	bool ok;

	snprintf(path, sizeof(path), "/sys/class/bdi/%s/%s", device, name);
	fd = open(path, O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return false;
	ok = write(fd, value, strlen(value)) > 0;
	close(fd);
	return ok;
}

/*
 * A FUSE mount starts with 1% of memory for dirty pages and 128 KiB of readahead: with those,
 * mapped files crawl. What the kernel does not have is skipped.
 */
static void tune(const struct daemon *d)
{
	if (!d->device[0])
		return;
	if (geteuid() != 0) {
		log_notice(
			"mapped files would be faster with larger kernel limits; as root: cd "
			"/sys/class/bdi/%s && echo 0 >strict_limit; echo 100 >max_ratio; echo %s "
			">read_ahead_kb",
			d->device, READAHEAD);
		return;
	}
	tune_one(d->device, "strict_limit", "0");
	tune_one(d->device, "max_ratio", "100");
	tune_one(d->device, "read_ahead_kb", READAHEAD);
}

/* ---- waiting -------------------------------------------------------------------------------- */

static void take_signal(struct life *l)
{
	struct signalfd_siginfo si;

	if (read(l->signal_fd, &si, sizeof(si)) == sizeof(si))
		l->signals++;
}

/* Waits until something happens or the time (ms, MS_NONE: none) has come; returns the events. */
static unsigned int wait_event(struct life *l, uint64_t until)
{
	struct pollfd p[2] = {{.fd = l->signal_fd, .events = POLLIN},
			      {.fd = l->d->event_fd, .events = POLLIN}};
	uint64_t now = now_ms(), count;
	int timeout = until == MS_NONE ? -1 : until > now ? (int)min_u64(until - now, 1000) : 0;
	unsigned int events;

	if (poll(p, 2, timeout) > 0) {
		if (p[0].revents)
			take_signal(l);
		if (p[1].revents && read(l->d->event_fd, &count, sizeof(count)) < 0)
			count = 0;
	}
	events = atomic_exchange(&l->d->events, 0);
	if (events & EVENT_ENDED)
		l->ended = true;
	if (events & EVENT_INIT)
		l->init = true;
	return events;
}

static int wait_init(struct life *l)
{
	uint64_t until = now_ms() + INIT_MS;

	while (!l->init && !l->ended && !l->signals && now_ms() < until)
		wait_event(l, until);
	if (l->init)
		return 0;
	log_error("the kernel did not start the mount on %s%s", l->d->mountpoint,
		  l->signals ? ": interrupted" : "");
	return EXIT_FUSE;
}

/* ---- the way down --------------------------------------------------------------------------- */

/* Nobody finds the mount any more; who is inside may go on. */
static int detach(struct daemon *d)
{
	struct mountinfo m;
	int res = 0;

	/* Bind mounts of it, or of a folder in it, are mounts of the same device: all of them. */
	for (int i = 0; i < DETACH_MOST && !res && mountinfo_of_device(d->device, &m); i++) {
		res = umount2(m.point, MNT_DETACH | UMOUNT_NOFOLLOW) ? -errno : 0;
		if (res == -EPERM)
			res = check_fusermount_detach(m.point);
	}
	return res;
}

static void begin_ending(struct life *l)
{
	if (!l->ending)
		systemd_ending(l->d->mountpoint);
	l->ending = true;
}

static void begin_detach(struct life *l, const char *why)
{
	struct daemon *d = l->d;
	int res;

	if (atomic_exchange(&d->detaching, true))
		return;
	log_notice("%s: unmounting %s", why, d->mountpoint);
	begin_ending(l);
	l->deadline = now_ms() + LINGER_MS;
	res = detach(d);
	if (res < 0) {
		log_warning("unmounting %s: %s; going on without", d->mountpoint, strerror(-res));
		if (l->signals == 0) {
			control_answer_detach(d, res, "detach: the mount could not be unmounted");
			atomic_store(&d->detaching, false);
			l->deadline = MS_NONE;
			return;
		}
	}
	engine_hurry(d->e);
}

static bool is_idle(struct daemon *d)
{
	return !atomic_load(&d->handles) &&
	       (atomic_load(&d->forced) || !session_socket_sessions(d->socket));
}

/* Who asked for `detach` is told how the commit went, when no other user is left. */
static void answer_detach(struct life *l)
{
	struct daemon *d = l->d;
	unsigned int handles = atomic_load(&d->handles);
	char text[128];
	int64_t res = engine_call(d->e, ENGINE_SYNC, 0, 0, 0, 0);

	if (res < 0)
		snprintf(text, sizeof(text), "detach: the commit failed: %s", strerror((int)-res));
	else
		snprintf(text, sizeof(text), "detached, committed; %u files were still open",
			 handles);
	control_answer_detach(d, res < 0 ? (int)res : 0, text);
}

static void on_control(struct life *l)
{
	struct daemon *d = l->d;
	bool given_up;

	pthread_mutex_lock(&d->lock);
	given_up = d->detach && fuse_req_interrupted(d->detach->req);
	pthread_mutex_unlock(&d->lock);
	if (given_up)
		control_answer_detach(d, -EINTR, "detach: it goes on by itself");
	begin_detach(l, "asked to detach");
}

static bool detach_waits(struct daemon *d)
{
	bool waits;

	pthread_mutex_lock(&d->lock);
	waits = d->detach != NULL;
	pthread_mutex_unlock(&d->lock);
	return waits;
}

static void on_signals(struct life *l, unsigned int seen)
{
	if (l->signals == seen)
		return;
	begin_detach(l, "ending on a signal");
	if (l->signals == 2)
		l->deadline = min_u64(l->deadline, now_ms() + HURRY_MS);
	else if (l->signals > 2)
		l->deadline = now_ms();
}

static void serve(struct life *l)
{
	struct daemon *d = l->d;

	while (!l->ended && now_ms() < l->deadline) {
		unsigned int seen = l->signals;
		unsigned int events = wait_event(l, l->deadline);

		on_signals(l, seen);
		if (events & EVENT_CONTROL)
			on_control(l);
		if (atomic_load(&d->detaching) && is_idle(d) && detach_waits(d))
			answer_detach(l);
	}
	if (detach_waits(d))
		answer_detach(l);
	if (!l->ended)
		log_warning("still in use (%u files are open); ending all the same",
			    atomic_load(&d->handles));
}

/*
 * A session needs no mount. If somebody unmounted by hand under one that is at work, it is not
 * thrown out; on a signal it has until the deadline.
 */
static void serve_sessions(struct life *l)
{
	struct daemon *d = l->d;
	char who[64];

	if (!session_socket_sessions(d->socket) || atomic_load(&d->forced))
		return;
	log_notice("unmounted, but a session is attached (%s); serving it until it ends",
		   holder_who(who, session_socket_writer(d->socket)));
	atomic_store(&d->detaching, true); /* the last session raises EVENT_IDLE */
	while (session_socket_sessions(d->socket) && now_ms() < l->deadline) {
		unsigned int seen = l->signals;

		wait_event(l, l->deadline);
		if (l->signals == seen)
			continue;
		begin_ending(l);
		l->deadline = l->deadline == MS_NONE ? now_ms() + LINGER_MS : now_ms();
	}
}

/* From the edges to the core. Returns the exit status. */
static int take_down(struct life *l)
{
	struct daemon *d = l->d;
	struct session_socket *s = d->socket;
	char text[512] = "committed", dropped[256];
	int res, status;

	begin_ending(l);
	control_answer_detach(d, -ECANCELED, "detach: the daemon is ending");
	engine_hurry(d->e);
	/* Dropping the kernel's pages brings those that are dirty: of who is still inside with a
	 * mapped file. */
	if (d->receive && !l->ended)
		notify_fetch(d->notify);
	/* The notify thread needs the receive threads to answer while it waits, so it goes first.
	 */
	if (s)
		session_socket_stop(s);
	notify_stop(d);
	if (d->receive)
		receive_stop(d);
	if (!requests_drain(d, STALLED_S)) {
		log_error("%s: requests are in flight and the drive has done nothing for %u s; ending "
			  "without a last commit, what is on disk is the one before",
			  d->mountpoint, STALLED_S);
		_exit(EXIT_RUNTIME); /* nothing that still runs may be taken away under its feet */
	}
	interrupts_stop(d);
	if (d->se) {
		/* Who is still inside gets ENOTCONN from here on, rather than no answer. */
		fuse_session_unmount(d->se);
		fuse_session_destroy(d->se);
	}
	bracket_stop(d);
	res = engine_end(d->e, true, dropped, sizeof(dropped));
	status = res < 0 ? EXIT_RUNTIME : dropped[0] ? EXIT_DROPPED : 0;
	if (res < 0) {
		snprintf(text, sizeof(text),
			 "the last commit failed: %s; what is on disk is the commit before it",
			 strerror(-res));
		log_error("%s: %s", d->mountpoint, text);
	}
	if (!res && dropped[0]) {
		res = -ESTALE;
		snprintf(text, sizeof(text), "%s", dropped);
		log_error("%s: %s", d->mountpoint, text);
	}
	if (s)
		session_socket_farewell(s, res, text);
	steady_stop();
	receive_destroy(d);
	interrupts_destroy(d);
	notify_destroy(d);
	return status;
}

/* ---- all of it ------------------------------------------------------------------------------ */

static int open_engine(struct daemon *d, const char *backing)
{
	const struct options *o = d->o;
	char holder[PATH_MAX + 32], err[2 * PATH_MAX + 1024] = "";
	struct engine_opts eo = {
		.ram = o->ram,
		.ram_forced = o->ram != 0,
		.block = (uint32_t)o->block,
		.size = o->size,
		.commit_seconds = o->commit_seconds,
		.io = (enum io_engine)o->io,
		.direct = (enum io_direct)o->direct,
		.huge = (enum arena_huge)o->huge,
		.readonly = o->readonly,
		.wait = true,
		.holder = holder,
		.trace = o->trace,
		.log = log_engine,
		.boundary = notify_boundary,
		.arg = d,
	};
	int res;

	snprintf(holder, sizeof(holder), "momentfs on %s", d->mountpoint);
	res = engine_open(backing, &eo, &d->e, err, sizeof(err));
	if (res < 0) {
		log_error("%s", err[0] ? err : strerror(-res));
		return EXIT_BACKING;
	}
	d->ns = engine_ns(d->e);
	return 0;
}

int life_run(struct daemon *d, const char *backing, int signal_fd, void (*ready)(void))
{
	struct life l = {.d = d, .signal_fd = signal_fd, .deadline = MS_NONE};
	char err[PATH_MAX + 128];
	int status, down;

	d->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (d->event_fd < 0 || notify_create(d) < 0 || interrupts_create(d) < 0) {
		log_error("cannot start: %s", strerror(errno));
		return EXIT_RUNTIME;
	}
	clock_gettime(CLOCK_REALTIME, &d->mounted);
	status = open_engine(d, backing);
	if (status) {
		interrupts_stop(d);
		interrupts_destroy(d);
		notify_stop(d);
		notify_destroy(d);
		goto out_event;
	}
	status = mount_it(d, engine_backing(d->e));
	if (status)
		goto out_down;
	if (!engine_readonly(d->e) && session_socket_start(d, err, sizeof(err)) < 0)
		log_warning("no session socket: %s; programs can use the mounted files only", err);
	if (receive_start(d) < 0) {
		log_error("cannot start the threads that serve the mount");
		status = EXIT_RUNTIME;
		goto out_down;
	}
	status = wait_init(&l);
	if (status)
		goto out_down;
	tune(d);
	if (steady_ready(d) < 0) {
		log_error("cannot start the thread that keeps memory ready");
		status = EXIT_RUNTIME;
		goto out_down;
	}
	ready();
	systemd_tell("READY=1\nMAINPID=%d\nSTATUS=serving %s", (int)getpid(), d->mountpoint);
	serve(&l);
	serve_sessions(&l);
out_down:
	down = take_down(&l);
	status = status ? status : down;
out_event:
	close(d->event_fd);
	return status;
}
