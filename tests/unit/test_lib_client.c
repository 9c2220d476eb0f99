/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_lib_client.c - the client against a daemon that is played here: replies out of order,
 * errors, nonsense, and a daemon that dies at each of its messages. What is real is the socket, the
 * memfd and the client.
 */
#include <pthread.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "lib_fixture.h"
#include "moment/protocol.h"

#define ARENA	  (64u * BLOCK)
#define NO_ARRAYS UINT32_MAX

/* How the daemon misbehaves. */
struct script {
	unsigned int die_at;	  /* the n-th message is the last it sees; 0: none */
	unsigned int nonsense_at; /* the n-th is answered by noise */
	bool backwards;		  /* two leases in flight are answered last first */
	int fail_lease;		  /* the n-th lease is refused with -EIO */
	int crowd;		  /* the n-th lease is refused with -E2BIG, once */
	int short_lease;	  /* the n-th lease is shorter than its blocks */
	bool unsealed;		  /* the arena could shrink under the client */
	uint64_t arena_more;	  /* bytes that the greeting makes it larger than it is */
	uint32_t version;
};

struct daemon {
	struct script script;
	char dir[4096], path[4200];
	int listener, memfd;
	char *arena;
	pthread_t thread;
	unsigned int messages, leases, outstanding, most_outstanding;
	uint64_t out_bytes, most_bytes;
	unsigned char held;
	char late[4096]; /* a reply that waits for the next one */
	size_t late_len;
};

static void send_to(int fd, const void *m, size_t len)
{
	if (send(fd, m, len, MSG_NOSIGNAL) < 0)
		return; /* the client has gone: its business */
}

static void send_arena(int fd, int memfd, const void *m, size_t len)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int))];
	} c = {.bytes = {0}};
	struct iovec iov = {.iov_base = (void *)m, .iov_len = len};
	struct msghdr mh = {.msg_iov = &iov,
			    .msg_iovlen = 1,
			    .msg_control = c.bytes,
			    .msg_controllen = sizeof(c.bytes)};
	struct cmsghdr *h = CMSG_FIRSTHDR(&mh);

	h->cmsg_level = SOL_SOCKET;
	h->cmsg_type = SCM_RIGHTS;
	h->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(h), &memfd, sizeof(int));
	if (sendmsg(fd, &mh, MSG_NOSIGNAL) < 0)
		return;
}

static void say_error(int fd, const struct moment_msg *m, int status, const char *text)
{
	struct {
		struct moment_reply r;
		char text[200];
	} e = {.r = {.h = *m, .status = status, .text_len = (uint32_t)strlen(text)}};

	e.r.h.len = (uint32_t)(sizeof(e.r) + strlen(text));
	strcpy(e.text, text);
	send_to(fd, &e, e.r.h.len);
}

static void say_hello(struct daemon *d, int fd, const struct moment_msg *m)
{
	struct moment_hello_reply r = {
		.r = {.h = *m},
		.version = d->script.version ? d->script.version : MOMENT_PROTOCOL_VERSION,
		.block = BLOCK,
		.arena_size = ARENA + d->script.arena_more,
		.quota = 16 * BLOCK,
		.quota_small = 8 * BLOCK,
		.window = 8 * BLOCK,
		.committed_step = 41,
		.rolled_back = MOMENT_STEP_NONE,
		.ram = ARENA,
		.daemon_pid = 4711,
	};

	r.r.h.len = sizeof(r);
	send_arena(fd, d->memfd, &r, sizeof(r));
}

/* Handles are given in order, two files each. */
static void say_registered(int fd, const struct moment_register *m)
{
	size_t len =
		sizeof(struct moment_register_reply) + m->n * sizeof(struct moment_reg_reply_entry);
	struct moment_register_reply *r = calloc(1, len);
	uint32_t i;

	r->r.h = m->h;
	r->r.h.len = (uint32_t)len;
	r->n = m->n;
	for (i = 0; i < m->n; i++)
		r->e[i] = (struct moment_reg_reply_entry){
			.param = i,
			.flags = MOMENT_REG_CREATED,
			.file = {2 * i, 2 * i + 1, NO_ARRAYS, NO_ARRAYS}};
	send_to(fd, r, len);
	free(r);
}

static void say_leased(struct daemon *d, int fd, const struct moment_advance *m)
{
	size_t len = sizeof(struct moment_advance_reply) + m->n_lease * sizeof(struct moment_lease);
	struct moment_advance_reply *r = calloc(1, len);
	uint32_t i;

	d->outstanding -= m->n_release;
	if (m->n_lease)
		d->leases++;
	if (m->n_lease && (int)d->leases == d->script.fail_lease) {
		say_error(fd, &m->h, -EIO, "file 3, block 1: checksum");
		free(r);
		return;
	}
	if (m->n_lease && (int)d->leases == d->script.crowd) {
		say_error(fd, &m->h, -E2BIG, "no room");
		free(r);
		return;
	}
	d->outstanding += m->n_lease;
	if (d->outstanding > d->most_outstanding)
		d->most_outstanding = d->outstanding;
	r->r.h = m->h;
	r->r.h.len = (uint32_t)len;
	r->n = m->n_lease;
	for (i = 0; i < m->n_lease; i++) /* a place for each block: 2 files, 30 blocks */
		r->l[i] = (struct moment_lease){
			.arena = (m->r[m->n_release + i].file * 31ull +
				  m->r[m->n_release + i].first) %
				 (ARENA / BLOCK) * BLOCK,
			.len = (int)d->leases == d->script.short_lease ? BLOCK - 4 : BLOCK};
	if (d->script.backwards && m->n_lease && !d->late_len && m->n_lease < 100) {
		memcpy(d->late, r, len);
		d->late_len = len;
	} else {
		send_to(fd, r, len);
	}
	free(r);
}

static void say_done(int fd, const struct moment_msg *m)
{
	struct moment_info_reply r = {.r = {.h = *m},
				      .committed_step = 42,
				      .step = MOMENT_STEP_NONE,
				      .open_step = MOMENT_STEP_NONE};

	r.r.h.len = sizeof(r);
	send_to(fd, &r, sizeof(r));
}

static void serve(struct daemon *d, int fd)
{
	static _Alignas(8) char buf[MOMENT_MSG_MAX];
	const struct moment_msg *m = (const void *)buf;
	ssize_t n;

	while ((n = recv(fd, buf, sizeof(buf), 0)) >= (ssize_t)sizeof(*m)) {
		struct pollfd p = {.fd = fd, .events = POLLIN};

		d->messages++;
		if (d->messages == d->script.die_at)
			return;
		if (d->messages == d->script.nonsense_at) {
			send_to(fd, "nonsense", 8);
			continue;
		}
		switch (m->type) {
		case MOMENT_MSG_HELLO:
			say_hello(d, fd, m);
			break;
		case MOMENT_MSG_REGISTER:
			say_registered(fd, (const void *)buf);
			break;
		case MOMENT_MSG_LIST: {
			struct moment_list_reply r = {.r = {.h = *m}};

			r.r.h.len = sizeof(r);
			send_to(fd, &r, sizeof(r));
			break;
		}
		case MOMENT_MSG_ADVANCE:
			say_leased(d, fd, (const void *)buf);
			break;
		case MOMENT_MSG_PREFETCH:
			break;
		default:
			say_done(fd, m);
		}
		/* The late reply goes out when nothing else comes: the client waits for it. */
		if (d->late_len && (m->type != MOMENT_MSG_ADVANCE || poll(&p, 1, 20) == 0)) {
			send_to(fd, d->late, d->late_len);
			d->late_len = 0;
		}
	}
}

static void *daemon_run(void *arg)
{
	struct daemon *d = arg;
	int fd = accept(d->listener, NULL, NULL);

	if (fd >= 0) {
		serve(d, fd);
		close(fd);
	}
	return NULL;
}

static struct daemon *daemon_start(const char *folder, struct script script)
{
	struct sockaddr_un sa = {.sun_family = AF_UNIX};
	struct daemon *d = calloc(1, sizeof(*d));

	d->script = script;
	snprintf(d->dir, sizeof(d->dir), "%s/backing", folder);
	mkdir(d->dir, 0755);
	snprintf(d->path, sizeof(d->path), "%s/" MOMENT_SOCKET_NAME, d->dir);
	unlink(d->path);
	assert_true(strlen(d->path) < sizeof(sa.sun_path));
	memcpy(sa.sun_path, d->path, strlen(d->path) + 1);
	d->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	assert_int_equal(bind(d->listener, (void *)&sa, sizeof(sa)), 0);
	assert_int_equal(listen(d->listener, 1), 0);
	d->memfd = memfd_create("arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	assert_int_equal(ftruncate(d->memfd, ARENA), 0);
	if (!script.unsealed)
		assert_int_equal(fcntl(d->memfd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
	d->arena = mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_SHARED, d->memfd, 0);
	assert_int_equal(pthread_create(&d->thread, NULL, daemon_run, d), 0);
	return d;
}

static void daemon_end(struct daemon *d)
{
	shutdown(d->listener, SHUT_RDWR);
	pthread_join(d->thread, NULL);
	close(d->listener);
	close(d->memfd);
	munmap(d->arena, ARENA);
	free(d);
}

static int count_block(void *arg, const struct moment_block *b)
{
	assert_int_equal(b->numel, BLOCK / sizeof(float));
	((float *)b->state[0])[0] += 1; /* it is memory that we may write */
	(*(int *)arg)++;
	return 0;
}

/* Opens, registers two parameters of 10 blocks, makes two steps. How far that got: 0, or the first
 * error. */
static int train(const char *folder, int *blocks)
{
	static const uint64_t n = 10 * BLOCK / sizeof(float);
	struct moment_param p[] = {{.name = "a", .ndim = 1, .shape = &n},
				   {.name = "b", .ndim = 1, .shape = &n}};
	struct moment_open_opts o = opts_for(folder, 0);
	struct moment_item it[] = {{.fn = count_block, .arg = blocks},
				   {.fn = count_block, .arg = blocks}};
	struct moment_session *s;
	int step, res;

	o.data = "session";
	res = moment_open(&o, &s);
	if (res < 0)
		return res;
	res = moment_register(s, p, 2);
	it[0].param = p[0].handle;
	it[1].param = p[1].handle;
	for (step = 1; step <= 2 && res == 0; step++)
		res = moment_step(s, (uint64_t)step, it, 2, 0);
	if (res == 0)
		res = moment_commit(s, 1);
	moment_close(s);
	return res;
}

static void blocks_stream_within_the_quota(void **state)
{
	struct daemon *d = daemon_start(*state, (struct script){.die_at = 0});
	int blocks = 0;

	ok(train(*state, &blocks));
	assert_int_equal(blocks, 40);
	assert_int_equal(d->outstanding, 0);
	assert_true(d->most_outstanding <= 16);
	assert_true(d->most_outstanding > 4); /* several were in flight */
	daemon_end(d);
}

static void replies_in_any_order(void **state)
{
	struct daemon *d = daemon_start(*state, (struct script){.backwards = true});
	int blocks = 0;

	ok(train(*state, &blocks));
	assert_int_equal(blocks, 40);
	assert_int_equal(d->outstanding, 0);
	daemon_end(d);
}

static void a_refused_lease_ends_the_step_with_all_given_back(void **state)
{
	struct daemon *d = daemon_start(*state, (struct script){.fail_lease = 3});
	int blocks = 0;

	refused(train(*state, &blocks), -EIO, "file 3, block 1: checksum");
	assert_true(blocks < 20);
	assert_int_equal(d->outstanding, 0);
	daemon_end(d);
}

static void a_crowded_tier_is_asked_for_less(void **state)
{
	struct daemon *d = daemon_start(*state, (struct script){.crowd = 3});
	int blocks = 0;

	ok(train(*state, &blocks));
	assert_int_equal(blocks, 40); /* each once a step, whatever was given back */
	assert_int_equal(d->outstanding, 0);
	daemon_end(d);
}

static void death_at_every_message_is_an_error_that_names_it(void **state)
{
	unsigned int at, total;
	int blocks = 0;
	struct daemon *d = daemon_start(*state, (struct script){.die_at = 0});

	ok(train(*state, &blocks));
	total = d->messages;
	daemon_end(d);
	assert_true(total > 10);
	for (at = 1; at <= total; at++) {
		int res;

		d = daemon_start(*state, (struct script){.die_at = at});
		blocks = 0;
		res = train(*state, &blocks);
		assert_int_equal(res, -ECONNRESET);
		assert_non_null(strstr(moment_error(), "daemon"));
		if (at > 1) /* after its greeting its number is known */
			assert_non_null(strstr(moment_error(), "4711"));
		daemon_end(d);
	}
}

static void nonsense_is_an_error(void **state)
{
	unsigned int at;
	int blocks = 0;

	for (at = 1; at < 12; at++) {
		struct daemon *d = daemon_start(*state, (struct script){.nonsense_at = at});

		assert_true(train(*state, &blocks) < 0);
		daemon_end(d);
	}
}

static void another_version_is_refused(void **state)
{
	struct daemon *d = daemon_start(*state, (struct script){.version = 99});
	int blocks = 0;

	refused(train(*state, &blocks), -EPROTO, "protocol 99");
	daemon_end(d);
}

/* What would make the client touch memory that is not there. */
static void memory_that_is_not_there_is_refused(void **state)
{
	int blocks = 0;
	struct daemon *d = daemon_start(*state, (struct script){.arena_more = 4096});

	refused(train(*state, &blocks), -EPROTO, "memory");
	daemon_end(d);
	d = daemon_start(*state, (struct script){.unsealed = true});
	refused(train(*state, &blocks), -EPROTO, "memory");
	daemon_end(d);
	d = daemon_start(*state, (struct script){.short_lease = 2});
	refused(train(*state, &blocks), -EPROTO, "65532 bytes");
	assert_true(blocks < 20);
	assert_int_equal(d->outstanding, 0);
	daemon_end(d);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_folder, drop_folder)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(blocks_stream_within_the_quota),
		TEST(replies_in_any_order),
		TEST(a_refused_lease_ends_the_step_with_all_given_back),
		TEST(a_crowded_tier_is_asked_for_less),
		TEST(death_at_every_message_is_an_error_that_names_it),
		TEST(nonsense_is_an_error),
		TEST(another_version_is_refused),
		TEST(memory_that_is_not_there_is_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
