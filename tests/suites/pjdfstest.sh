#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# pjdfstest, cut to regular files and directories (pjdfstest_cut.sh says how), on a mount.
. "$(dirname "$0")/../functions.sh"
suite=${SUITES:-}/pjdfstest
[ -d "$suite/tests" ] || skip "no checkout of pjdfstest in '${SUITES:-}'"
requires_fuse
alone "$@"
requires_root
requires autoreconf gcc make openssl

# What a folder or a file of the suite is about, where that does not apply.
declare -A apart=(
	[chflags]="the flags are the BSDs'"
	[granular]="NFSv4 access lists are the BSDs'"
	[link]="hard links are refused (momentfs(8))"
	[symlink]="symbolic links are refused"
	[mkfifo]="fifos are refused"
	[mknod]="devices are refused"
	[utimensat/05.t]="follows symbolic links"
)

cp -r "$suite" "$tmp/suite"
(cd "$tmp/suite" && autoreconf -ifs && ./configure && make pjdfstest) >"$tmp/build.log" 2>&1 ||
	fail "pjdfstest does not build: $(tail -n 5 "$tmp/build.log")"
cat "$abs_srcdir/tests/suites/pjdfstest_cut.sh" >>"$tmp/suite/tests/misc.sh"
# Loops over kinds of files are left with two of them.
find "$tmp/suite/tests" -name '*.t' -exec sed -Ei \
	'/^[[:space:]]*for [a-z0-9]+ in /{s/\b(fifo|block|char|socket|symlink)\b//g; s/ +;/;/}' {} +

start_momentfs "$tmp/backing" "$tmp/mnt" ram=64M,commit=off,allow_other,size=1G
mkdir "$tmp/mnt/params/t"
chmod 755 "$tmp" "$tmp/mnt/params"
cd "$tmp/mnt/params/t"
passed=0 cut=0 failed=0
for t in "$tmp"/suite/tests/*/*.t; do
	about=$(basename "$(dirname "$t")")
	name=$about/$(basename "$t")
	[ -z "${apart[$about]:-}${apart[$name]:-}" ] || continue
	timeout 300 bash "$t" >"$tmp/out" 2>&1 || true
	p=$(grep -c '^ok' "$tmp/out" || true)
	c=$(grep -c '^ok.*# SKIP' "$tmp/out" || true)
	n=$(grep '^not ok' "$tmp/out" | grep -vc '# TODO' || true)
	passed=$((passed + p - c)) cut=$((cut + c))
	if [ "$n" != 0 ] || [ "$p" = 0 ]; then
		failed=$((failed + 1))
		printf '%s: %d expectations not met\n' "$name" "$n"
		{ grep '^not ok' "$tmp/out" || tail -n 3 "$tmp/out"; } | head -n 5 | sed 's/pjdfstest_\(....\)[0-9a-f]*/\1/g; s/^/  /' || true
	fi
done
cd /
rm -rf --one-file-system "$tmp/mnt/params/t"
stop_momentfs "$tmp/mnt"
for about in "${!apart[@]}"; do printf 'left out: %s: %s\n' "$about" "${apart[$about]}"; done
printf 'pjdfstest: %d expectations met, %d not applicable\n' "$passed" "$cut"
[ "$failed" = 0 ] || fail "pjdfstest: $failed files with expectations that were not met"
[ "$passed" -gt 1500 ] || fail "pjdfstest: only $passed expectations were checked"
