#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every source, test and manual page is named in Makefile.am: what is not listed is neither built, run nor in the
# tarball, and nobody notices. Folders that are listed whole cover what is in them.
. "$(dirname "$0")/../functions.sh"
cd "$abs_srcdir"

grep -oE '[A-Za-z0-9_./-]+' Makefile.am | sort -u >"$tmp/words"
n=0
while read -r f; do
	n=$((n + 1))
	# A test program is named without its .c.
	for name in "$f" "${f%.c}" "${f%/*}"; do
		grep -qxF -- "$name" "$tmp/words" && continue 2
	done
	printf 'not in Makefile.am: %s\n' "$f" >&2
	bad=1
done < <(find src include man tools tests -type f \( -name '*.[ch1-8]' -o -name '*.map' \) -print \
	-o -path 'tests/*' -type f \( -name '*.sh' -o -name '*.py' \) -print)
# Two scripts of one name in one folder would share a log, and make would run either.
twice=$(find tests -type f \( -name '*.sh' -o -name '*.py' \) | sed 's/\.[a-z]*$//' | sort | uniq -d)
[ -z "$twice" ] || fail "tests that differ only in .sh and .py: $twice"
[ "$n" -gt 10 ] || fail "only $n files found under $PWD"
[ -z "${bad:-}" ] || fail "files are missing from Makefile.am (above)"
