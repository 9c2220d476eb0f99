/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_io_fallback.c - machines that lack something: no io_uring, little lockable memory, no
 * O_DIRECT. What is missing is taken away in a forked child, with a seccomp filter, a
 * limit, or a capability. Each time: the same bytes, and a reason that says what to do.
 */
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/magic.h>
#include <linux/seccomp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "io_fixture.h"

#define SKIPPED 77

/* --- taking things away ---------------------------------------------------------------------- */

/* System call `nr` fails with `err` from now on; if `arg` >= 0, where that argument has `bits`. */
static void forbid(int nr, int arg, uint32_t bits, int err)
{
	const uint32_t arg_at =
		(uint32_t)(offsetof(struct seccomp_data, args) + 8u * (arg > 0 ? arg : 0));
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)nr, 0, 3),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, arg_at),
		BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, bits, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (uint32_t)err),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog prog = {.len = sizeof(code) / sizeof(code[0]), .filter = code};

	if (arg < 0) { /* whatever the arguments */
		code[2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K,
						       SECCOMP_RET_ERRNO | (uint32_t)err);
	}
	check(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
	if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog)) {
		perror("seccomp");
		_exit(SKIPPED);
	}
}

static void drop_capability(int cap)
{
	struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[2];

	check(syscall(SYS_capget, &head, data) == 0);
	data[cap / 32].effective &= ~(1u << (cap % 32));
	data[cap / 32].permitted &= ~(1u << (cap % 32));
	check(syscall(SYS_capset, &head, data) == 0);
}

/* Runs fn() in a child and expects it to come to its end. */
static void in_child(void (*fn)(void))
{
	int status = 0;
	pid_t pid;

	fflush(NULL);
	pid = fork();
	assert_true(pid >= 0);
	if (!pid) {
		alarm(60);
		fn();
		_exit(0);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	if (WIFEXITED(status) && WEXITSTATUS(status) == SKIPPED) {
		printf("# cannot be tried here\n");
		return;
	}
	assert_true(WIFEXITED(status));
	assert_int_equal(WEXITSTATUS(status), 0);
}

/* --- what must hold afterwards --------------------------------------------------------------- */

static void open_file(struct fixture *f)
{
	fixture_open(f, NULL, 4 * MIB, 2 * MIB);
	f->opts.probe_off = 2 * MIB;
}

/* Creates the io, moves bytes both ways, and returns what it says about itself. */
static struct io_info use(struct fixture *f)
{
	static struct io_info info;
	char *got;

	fixture_io(f);
	got = f->arena + MIB;
	fill(f->arena, MIB, 0, 1);
	check(io_one(f->io, IO_WRITE, f->arena, 0, MIB) == 0);
	check(io_one(f->io, IO_READ, got, 0, MIB) == 0);
	check(!memcmp(f->arena, got, MIB));
	memset(got, 0, MIB);
	check(io_pread_all(f->fd, got, MIB, 0) == 0);
	check(!memcmp(f->arena, got, MIB));
	io_get_info(f->io, &info);
	return info;
}

static void expect_threads(int err, const char *word)
{
	struct io_info info;
	struct fixture f;

	open_file(&f);
	info = use(&f);
	check(!strcmp(info.engine, "threads"));
	check(strstr(info.engine_reason, "seccomp"));
	check(strstr(info.engine_reason, word));
	check(!info.registered && info.registered_reason[0]);
	io_destroy(f.io);

	f.opts.engine = IO_URING; /* asked for by name: no silent exchange */
	check(io_create(&f.opts, &f.io) == -err);
	check(!f.io);
	check(strstr(f.why, "seccomp"));
	fixture_close(&f);
}

static void ring_enosys(void)
{
	forbid(SYS_io_uring_setup, -1, 0, ENOSYS);
	expect_threads(ENOSYS, "5.6");
}

static void ring_eperm(void)
{
	forbid(SYS_io_uring_setup, -1, 0, EPERM);
	expect_threads(EPERM, "kernel.io_uring_disabled");
}

/* A filter with a hole: the ring can be made, and never used. */
static void ring_enter_eperm(void)
{
	struct fixture f;

	open_file(&f);
	f.opts.engine = IO_URING;
	if (io_create(&f.opts, &f.io))
		_exit(SKIPPED); /* no ring to begin with */
	fixture_close(&f);
	forbid(SYS_io_uring_enter, -1, 0, EPERM);
	expect_threads(EPERM, "io_uring_enter");
}

static void test_no_ring_falls_back_to_threads(void **state)
{
	(void)state;
	in_child(ring_enosys);
	in_child(ring_eperm);
	in_child(ring_enter_eperm);
}

static void little_memlock(void)
{
	struct rlimit rl = {.rlim_cur = 64 * KIB, .rlim_max = 64 * KIB};
	struct io_info info;
	struct fixture f;

	check(setrlimit(RLIMIT_MEMLOCK, &rl) == 0);
	drop_capability(CAP_IPC_LOCK);
	open_file(&f);
	f.opts.engine = IO_URING;
	if (io_create(&f.opts, &f.io))
		_exit(SKIPPED);
	io_destroy(f.io);
	info = use(&f);
	check(!strcmp(info.engine, "io_uring"));
	check(!info.registered);
	check(strstr(info.registered_reason, "64 KiB"));
	check(strstr(info.registered_reason, "ulimit -l"));
	fixture_close(&f);
}

static void test_little_memlock_only_drops_registration(void **state)
{
	(void)state;
	in_child(little_memlock);
}

static void expect_buffered(struct fixture *f, const char *word, int err)
{
	struct io_info info = use(f);

	check(!info.direct);
	check(strstr(info.direct_reason, "O_DIRECT"));
	check(strstr(info.direct_reason, word));
	io_destroy(f->io);

	f->opts.direct = IO_DIRECT_ON;
	check(io_create(&f->opts, &f->io) == -err);
	check(strstr(f->why, "direct=on"));
	check(strstr(f->why, word));
	f->io = NULL;
}

static void direct_refused(void)
{
	struct fixture f;

	open_file(&f);
	forbid(SYS_openat, 2, O_DIRECT, EINVAL);
	expect_buffered(&f, "opening", EINVAL);
	f.opts.direct = IO_DIRECT_AUTO;
	f.opts.engine = IO_THREADS;
	expect_buffered(&f, "opening", EINVAL);
	fixture_close(&f);
}

/* As overlay file systems do: the flag is taken, the first write fails. */
static void direct_fails_later(void)
{
	struct io_info info;
	struct fixture f;

	open_file(&f);
	info = use(&f);
	if (!info.direct || strcmp(info.engine, "io_uring"))
		_exit(SKIPPED);
	io_destroy(f.io);
	forbid(SYS_pwrite64, -1, 0, EINVAL); /* what the probe uses, and the ring does not */
	expect_buffered(&f, "writing", EINVAL);
	fixture_close(&f);
}

/* A real file system without O_DIRECT: ramfs, where we may mount it. */
static void direct_on_ramfs(void)
{
	char dir[] = "/tmp/test_io_ramfs.XXXXXX";
	struct io_info info;
	struct fixture f;
	bool mounted;

	check(mkdtemp(dir));
	mounted = unshare(CLONE_NEWNS) == 0 &&
		  mount("none", "/", "none", MS_REC | MS_PRIVATE, NULL) == 0 &&
		  mount("ramfs", dir, "ramfs", 0, NULL) == 0;
	if (!mounted) {
		rmdir(dir);
		_exit(SKIPPED);
	}
	memset(&f, 0, sizeof(f));
	snprintf(f.why, sizeof(f.why), "%s/file", dir);
	f.fd = open(f.why, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	check(f.fd >= 0 && ftruncate(f.fd, 4 * MIB) == 0);
	unlink(f.why);
	f.arena = aligned(2 * MIB);
	f.opts = (struct io_opts){.fd = f.fd, .why = f.why, .why_len = sizeof(f.why)};
	info = use(&f);
	check(info.direct || info.direct_reason[0]);
	fixture_close(&f);
	umount2(dir, MNT_DETACH);
	rmdir(dir);
}

static void test_without_o_direct(void **state)
{
	(void)state;
	in_child(direct_refused);
	in_child(direct_fails_later);
	in_child(direct_on_ramfs);
}

/* --- other things about the file ------------------------------------------------------------- */

static void test_asked_for_buffered(void **state)
{
	struct io_info info;
	struct fixture f;

	(void)state;
	open_file(&f);
	f.opts.direct = IO_DIRECT_OFF;
	info = use(&f);
	assert_false(info.direct);
	assert_true(info.direct_reason[0] != '\0');
	fixture_close(&f);
}

/* The pages that a buffered write dirtied are on the drive and gone when it completes. */
static void test_buffered_writes_leave_no_pages(void **state)
{
	const size_t pages = 2 * MIB / 4096;
	unsigned char seen[2 * MIB / 4096];
	struct statfs sfs;
	struct fixture f;
	size_t resident = 0;
	void *map;

	(void)state;
	for (int engine = IO_AUTO; engine <= IO_THREADS; engine += IO_THREADS - IO_AUTO) {
		open_file(&f);
		assert_int_equal(fstatfs(f.fd, &sfs), 0);
		f.opts.direct = IO_DIRECT_OFF;
		f.opts.engine = (enum io_engine)engine;
		fixture_io(&f);
		assert_int_equal(io_one(f.io, IO_WRITE, f.arena, 0, 2 * MIB), 0);
		map = mmap(NULL, 2 * MIB, PROT_READ, MAP_SHARED, f.fd, 0);
		assert_true(map != MAP_FAILED);
		assert_int_equal(mincore(map, 2 * MIB, seen), 0);
		for (size_t i = 0; i < pages; i++)
			resident += seen[i] & 1;
		munmap(map, 2 * MIB);
		if (sfs.f_type != TMPFS_MAGIC) /* whose pages are the file */
			assert_true(resident < pages / 4);
		fixture_close(&f);
	}
}

/* The probe writes; nobody can see that it did. */
static void test_probe_leaves_no_trace(void **state)
{
	char *before, *after;
	struct stat st;
	struct fixture f;

	(void)state;
	open_file(&f);
	before = aligned(4 * MIB);
	after = aligned(4 * MIB);
	fill(before, 4 * MIB, 0, 7);
	assert_int_equal(io_pwrite_all(f.fd, before, 4 * MIB, 0), 0);
	fixture_io(&f);
	io_destroy(f.io);
	f.opts.probe_off = 4 * MIB; /* where the file ends, and beyond */
	fixture_io(&f);
	io_destroy(f.io);
	f.opts.probe_off = 64 * MIB;
	fixture_io(&f);
	assert_int_equal(fstat(f.fd, &st), 0);
	assert_int_equal(st.st_size, 4 * MIB);
	assert_int_equal(io_pread_all(f.fd, after, 4 * MIB, 0), 0);
	assert_memory_equal(before, after, 4 * MIB);
	fixture_close(&f);
	free(before);
	free(after);
}

/* O_DIRECT is ours alone: the caller's descriptor goes on as it was. */
static void test_callers_descriptor_is_untouched(void **state)
{
	struct fixture f;
	char byte = 1;
	int flags;

	(void)state;
	open_file(&f);
	flags = fcntl(f.fd, F_GETFL);
	use(&f);
	assert_int_equal(fcntl(f.fd, F_GETFL), flags);
	assert_int_equal(pwrite(f.fd, &byte, 1, 3), 1); /* unaligned */
	fixture_close(&f);
}

static void test_readonly(void **state)
{
	char path[40];
	struct fixture f;
	int rw;

	(void)state;
	for (int engine = IO_AUTO; engine <= IO_THREADS; engine += IO_THREADS - IO_AUTO) {
		open_file(&f);
		rw = f.fd;
		fill(f.arena, MIB, 0, 3);
		assert_int_equal(io_pwrite_all(rw, f.arena, MIB, 0), 0);
		snprintf(path, sizeof(path), "/proc/self/fd/%d", rw);
		f.fd = f.opts.fd = open(path, O_RDONLY | O_CLOEXEC);
		assert_true(f.fd >= 0);
		close(rw);
		f.opts.readonly = true;
		f.opts.engine = (enum io_engine)engine;
		fixture_io(&f);
		assert_int_equal(io_one(f.io, IO_READ, f.arena + MIB, 0, MIB), 0);
		assert_memory_equal(f.arena, f.arena + MIB, MIB);
		assert_int_equal(io_one(f.io, IO_WRITE, f.arena, 0, MIB), -EBADF);
		fixture_close(&f);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_no_ring_falls_back_to_threads),
		cmocka_unit_test(test_little_memlock_only_drops_registration),
		cmocka_unit_test(test_without_o_direct),
		cmocka_unit_test(test_asked_for_buffered),
		cmocka_unit_test(test_buffered_writes_leave_no_pages),
		cmocka_unit_test(test_probe_leaves_no_trace),
		cmocka_unit_test(test_callers_descriptor_is_untouched),
		cmocka_unit_test(test_readonly),
	};

	alarm(180); /* a hang is a failure */
	return cmocka_run_group_tests(tests, NULL, NULL);
}
