/* SPDX-License-Identifier: Apache-2.0 */
/*
 * io_fault_spec.c - reads the words that say how a drive shall fail (see io_fault.c).
 *
 * A spec is a list of words with commas between them; KIND is read, write or sync:
 *
 *   KIND.error=ERRNO:RATE   fail with that errno (EIO, ENOSPC, EDQUOT, any name or number)
 *   KIND.short=RATE         move less than asked for, and report any number of bytes (not sync)
 *   KIND.flip=RATE          flip one bit: in memory after a read, on the drive after a write
 *   KIND.delay=TIME:RATE    start later; TIME as 300us, 2ms, 1s
 *   error=, short=, flip=, delay=     the same for every kind that can
 *   journal                 keep what writes replace until the next sync, for io_fault_cut()
 *   drop                    a sync that fails drops part of what was written since the last
 *                           good one at once, not only at a power cut; implies journal
 *   cut=N                   the power goes out after N writes; implies journal
 *   cut=N:exit              and the process dies with it (exit status 70)
 *   file=PATH               all rates count only while PATH exists (not a comma in it)
 *   seed=N                  of the random numbers
 *
 * RATE is a probability, 0 to 1, per kernel call. Example:
 *   seed=1,read.error=EIO:0.01,write.short=0.05,delay=2ms:0.1,write.flip=0.001
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/io_fault_spec.h"
#include "engine/io_impl.h"

static bool parse_rate(const char *s, double *rate)
{
	char *end;

	*rate = strtod(s, &end);
	return end != s && !*end && *rate >= 0 && *rate <= 1;
}

static bool parse_u64(const char *s, uint64_t *v)
{
	char *end;

	if (*s < '0' || *s > '9')
		return false;
	errno = 0;
	*v = strtoull(s, &end, 10);
	return !*end && !errno;
}

static bool parse_errno(const char *s, int *errnum)
{
	uint64_t n;

	if (parse_u64(s, &n)) {
		*errnum = (int)n;
		return n > 0 && n < 4096;
	}
	for (int e = 1; e < 200; e++) {
		const char *name = strerrorname_np(e);

		if (name && !strcmp(name, s)) {
			*errnum = e;
			return true;
		}
	}
	return false;
}

static bool parse_time(const char *s, uint64_t *ns)
{
	char *end;
	double v = strtod(s, &end);

	if (end == s || !(v >= 0 && v <= 3600e6))
		return false;
	if (!strcmp(end, "us"))
		*ns = (uint64_t)(v * 1e3);
	else if (!strcmp(end, "ms"))
		*ns = (uint64_t)(v * 1e6);
	else if (!strcmp(end, "s") && v <= 3600)
		*ns = (uint64_t)(v * 1e9);
	else
		return false;
	return true;
}

/* Cuts "A:B" in two; NULL if there is no colon. */
static char *cut_colon(char *s)
{
	char *colon = strrchr(s, ':');

	if (colon)
		*colon++ = '\0';
	return colon;
}

/* One of error, short, flip, delay for one kind. */
static bool parse_fault(struct fault_kind *k, const char *what, char *value)
{
	char *rate;

	if (!strcmp(what, "short"))
		return parse_rate(value, &k->shorten);
	if (!strcmp(what, "flip"))
		return parse_rate(value, &k->flip);
	rate = cut_colon(value);
	if (!strcmp(what, "error"))
		return rate && parse_errno(value, &k->errnum) && parse_rate(rate, &k->error);
	if (!strcmp(what, "delay"))
		return rate && parse_time(value, &k->delay_ns) && parse_rate(rate, &k->delay);
	return false;
}

static bool parse_kinds(struct fault_spec *spec, const char *key, const char *value)
{
	static const char *const names[] = {"read", "write", "sync"};
	const char *dot = strchr(key, '.');
	const char *what = dot ? dot + 1 : key;
	bool no_sync = !strcmp(what, "short") || !strcmp(what, "flip");
	bool any = false;
	char copy[64];

	for (int i = 0; i < 3; i++) {
		if (dot && (strlen(names[i]) != (size_t)(dot - key) ||
			    strncmp(names[i], key, (size_t)(dot - key))))
			continue;
		if (i == IO_CALL_SYNC && no_sync)
			continue;
		snprintf(copy, sizeof(copy), "%s", value);
		if (!parse_fault(&spec->kind[i], what, copy))
			return false;
		any = true;
	}
	return any;
}

static bool parse_word(struct fault_spec *spec, char *word)
{
	char *value = strchr(word, '='), *exits;

	if (!value) {
		spec->drop |= !strcmp(word, "drop");
		spec->journal |= spec->drop || !strcmp(word, "journal");
		return !strcmp(word, "journal") || !strcmp(word, "drop");
	}
	*value++ = '\0';
	if (!strcmp(word, "seed"))
		return parse_u64(value, &spec->seed);
	if (!strcmp(word, "file")) {
		snprintf(spec->file, sizeof(spec->file), "%s", value);
		return *value && strlen(value) < sizeof(spec->file);
	}
	if (!strcmp(word, "cut")) {
		spec->cut = spec->journal = true;
		exits = cut_colon(value);
		spec->cut_exit = exits != NULL;
		return parse_u64(value, &spec->cut_after) && (!exits || !strcmp(exits, "exit"));
	}
	return parse_kinds(spec, word, value);
}

int io_fault_spec_parse(const char *text, struct fault_spec *spec, char *why, size_t why_len)
{
	char *copy = strdup(text), *save = NULL, word[320];
	int ret = 0;

	if (!copy)
		return -ENOMEM;
	*spec = (struct fault_spec){.seed = 1};
	for (char *w = strtok_r(copy, ",", &save); w; w = strtok_r(NULL, ",", &save)) {
		snprintf(word, sizeof(word), "%s", w);
		if (!parse_word(spec, w)) {
			snprintf(why, why_len,
				 "fault injection (MOMENT_FAULTS): \"%s\" is not understood; "
				 "examples: read.error=EIO:0.01, short=0.1, delay=2ms:0.5, cut=100",
				 word);
			ret = -EINVAL;
			break;
		}
	}
	free(copy);
	return ret;
}
