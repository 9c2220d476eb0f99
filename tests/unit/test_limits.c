/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_limits.c - libmoment in a process with limits: of file sizes, of threads; and what may be
 * said about threads.
 */
#include <grp.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "lib_fixture.h"

/* Runs fn() in a child, which prints what goes wrong there. */
static void in_child(void (*fn)(const char *dir), const char *dir)
{
	int status, waited;
	pid_t child = fork();

	if (child == 0) {
		fn(dir);
		_exit(0);
	}
	waited = (int)waitpid(child, &status, 0);
	assert_int_equal(waited, child);
	if (WIFSIGNALED(status))
		fail_msg("the child was ended by signal %d (%s)", WTERMSIG(status),
			 strsignal(WTERMSIG(status)));
	assert_int_equal(WEXITSTATUS(status), 0);
}

#define CHECK(cond) \
	do { \
		if (!(cond)) { \
			fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #cond, \
				moment_error()); \
			_exit(1); \
		} \
	} while (0)

static void small_files_only(const char *dir)
{
	struct moment_open_opts o = opts_for(dir, 0);
	struct moment_session *s = NULL;

	CHECK(setrlimit(RLIMIT_FSIZE, &(struct rlimit){1 << 20, 1 << 20}) == 0);
	CHECK(moment_open(&o, &s) == -EFBIG);
	CHECK(strstr(moment_error(), "ulimit -f") && strstr(moment_error(), "1.0 MiB"));
}

static void a_limit_of_file_sizes_is_an_error_not_a_signal(void **state)
{
	in_child(small_files_only, *state);
}

/* Two steps and a commit, the limit of threads reached after the session was opened. */
static void no_more_threads(const char *dir)
{
	struct moment_open_opts o = opts_for(dir, 0);
	struct moment_session *s = NULL;
	struct model *m = model_new();
	struct moment_item items[TENSORS];

	/* Root may always start more. */
	CHECK(setgroups(0, NULL) == 0 && setgid(65534) == 0 && setuid(65534) == 0);
	CHECK(moment_open(&o, &s) == 0);
	CHECK(setrlimit(RLIMIT_NPROC, &(struct rlimit){1, 1}) == 0);
	CHECK(moment_register(s, m->param, TENSORS) == 0);
	for (uint64_t step = 1; step <= 2; step++)
		CHECK(moment_step(s, step, items, model_items(m, step, items), 0) == 0);
	CHECK(moment_commit(s, 1) == 0);
	CHECK(!strstr(said, "warning"));
	CHECK(moment_close(s) == 0);
	model_free(m);
}

static void commits_where_no_more_threads_may_start(void **state)
{
	char *dir = *state, *slash = strrchr(dir, '/');

	if (geteuid() != 0)
		return; /* such a limit is somebody else's there */
	assert_int_equal(chown(dir, 65534, 65534), 0);
	*slash = 0; /* the folder above is this test's too (in-tmp.sh), or everybody's */
	if (getenv("TMPDIR"))
		assert_int_equal(chmod(dir, 0711), 0);
	*slash = '/';
	in_child(no_more_threads, *state);
}

static int open_with(const char *dir, const char *threads, const char *ranks, int *got)
{
	struct moment_open_opts o = opts_for(dir, 0);
	struct moment_session *s = NULL;
	struct moment_info info;
	int res;

	o.threads = 0;
	unsetenv("OMP_NUM_THREADS");
	if (threads)
		setenv("MOMENT_THREADS", threads, 1);
	if (ranks)
		setenv("LOCAL_WORLD_SIZE", ranks, 1);
	res = moment_open(&o, &s);
	unsetenv("MOMENT_THREADS");
	unsetenv("LOCAL_WORLD_SIZE");
	if (res < 0)
		return res;
	ok(moment_get_info(s, &info));
	*got = info.threads;
	ok(moment_close(s));
	return 0;
}

static void threads_are_a_number_or_refused(void **state)
{
	static const char *const wrong[] = {"0", "-3", "x", "2x", "1025", " "};
	int n;

	for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
		refused(open_with(*state, wrong[i], NULL, &n), -EINVAL, "MOMENT_THREADS");
	assert_int_equal(open_with(*state, "3", NULL, &n), 0);
	assert_int_equal(n, 3);
}

static void ranks_of_a_machine_share_its_cpus(void **state)
{
	int all, share;

	assert_int_equal(open_with(*state, NULL, NULL, &all), 0);
	assert_int_equal(open_with(*state, NULL, "2", &share), 0);
	assert_int_equal(share, all / 2 > 0 ? all / 2 : 1);
	assert_int_equal(open_with(*state, NULL, "100000", &share), 0);
	assert_int_equal(share, 1);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, make_folder, drop_folder)
	const struct CMUnitTest tests[] = {
		T(a_limit_of_file_sizes_is_an_error_not_a_signal),
		T(commits_where_no_more_threads_may_start),
		T(threads_are_a_number_or_refused),
		T(ranks_of_a_machine_share_its_cpus),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
