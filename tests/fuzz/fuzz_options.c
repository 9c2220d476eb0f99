/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_options.c - any bytes as the command line of momentfs, an argument a line: understood, with
 * every value in its range, or refused with the status for that.
 */
#include <fcntl.h>
#include <getopt.h>
#include <stdarg.h>
#include <unistd.h>

#include "daemon/daemon.h"
#include "daemon/options.h"
#include "fuzz.h"

#define ARGS 64

/* log.c's. Formatted, so that a sanitizer sees what is formatted. */
void log_msg(enum engine_log_level level, const char *fmt, ...)
{
	char text[1024];
	va_list ap;

	(void)level;
	va_start(ap, fmt);
	must(vsnprintf(text, sizeof(text), fmt, ap) > 0);
	va_end(ap);
}

/* libfuse's, for --version */
const char *fuse_pkgversion(void)
{
	return "0";
}

/* and for words that are the kernel's */
int fuse_opt_add_opt_escaped(char **opts, const char *opt)
{
	char *both;

	must(asprintf(&both, "%s%s%s", *opts ? *opts : "", *opts ? "," : "", opt) > 0);
	free(*opts);
	*opts = both;
	return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static int null_fd = -1, out_fd, err_fd;
	char *argv[ARGS + 2], *text = malloc(size + 1);
	struct options o;
	int argc = 1, res;

	must(text);
	memcpy(text, data, size);
	text[size] = 0;
	argv[0] = "momentfs";
	for (char *p = text; p < text + size && argc <= ARGS;) {
		argv[argc++] = p;
		p += strcspn(p, "\n");
		*p++ = 0;
	}
	argv[argc] = NULL;
	if (null_fd < 0) {
		null_fd = open("/dev/null", O_WRONLY | O_CLOEXEC);
		out_fd = dup(1);
		err_fd = dup(2);
		must(null_fd >= 0 && out_fd >= 0 && err_fd >= 0);
	}
	fflush(stdout); /* what the parser says is not for us */
	dup2(null_fd, 1);
	if (!getenv("FUZZ_LOUD"))
		dup2(null_fd, 2);
	optind = 0; /* glibc: from the start */
	res = options_parse(argc, argv, &o);
	fflush(stdout);
	dup2(out_fd, 1);
	dup2(err_fd, 2);
	if (res < 0) {
		must(res == -1 && o.backing && o.mountpoint);
		must(!o.block || (o.block >= 65536 && (o.block & (o.block - 1)) == 0));
		must(o.commit_seconds >= -1);
		must(o.io >= 0 && o.io < 3 && o.direct >= 0 && o.direct < 3 && o.huge >= 0 &&
		     o.huge < 4);
	} else {
		must(res == 0 || res == EXIT_USAGE);
	}
	options_fini(&o);
	free(text);
	return 0;
}

#ifndef FUZZ_ENGINE
int main(int argc, char **argv)
{
	return fuzz_main(argc, argv, "corpus-options", 3000);
}
#endif
