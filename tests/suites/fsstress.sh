#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# fsstress, from a checkout of xfstests, with the daemon killed under it again and again: after each kill the backing
# is whole (fsck), it mounts, and every file can be read.
. "$(dirname "$0")/../functions.sh"
suite=${SUITES:-}/xfstests
[ -e "$suite/ltp/fsstress.c" ] || skip "no checkout of xfstests in '${SUITES:-}'"
requires_fuse
alone "$@"
requires make libtoolize
rounds=${FSSTRESS_ROUNDS:-10}
[ "${MOMENT_SUITES:-}" != long ] || rounds=${FSSTRESS_ROUNDS:-50}

if [ -x "$suite/ltp/fsstress" ]; then
	cp "$suite/ltp/fsstress" "$tmp"
else
	cp -r "$suite" "$tmp/suite"
	make -C "$tmp/suite" -j2 >"$tmp/build.log" 2>&1 || fail "xfstests does not build: $(tail -n 5 "$tmp/build.log")"
	cp "$tmp/suite/ltp/fsstress" "$tmp"
fi
mnt=$tmp/mnt
for ((round = 1; round <= rounds; round++)); do
	seed=$((RANDOM * 32768 + RANDOM))
	start_momentfs "$tmp/backing" "$mnt" ram=16M,block=64K,commit=1,size=1G
	mkdir -p "$mnt/params/s"
	"$tmp/fsstress" -d "$mnt/params/s" -n 100000 -p 4 -s $seed -f link=0 -f symlink=0 -f mknod=0 >"$tmp/stress.out" 2>&1 &
	stress=$!
	sleep "$(awk -v s=$seed 'BEGIN { srand(s); print 1 + 3 * rand() }')"
	kill_momentfs "$mnt"
	wait $stress 2>/dev/null || true
	"$MOMENTCTL" fsck "$tmp/backing" >"$tmp/fsck.out" 2>&1 || fail "round $round, seed $seed: $(cat "$tmp/fsck.out")"
	start_momentfs "$tmp/backing" "$mnt" ram=16M
	# Larger ones are nearly all hole: fsstress truncates to terabytes.
	find "$mnt/params" -type f -size -65536k -exec sha256sum {} + >"$tmp/sums" 2>"$tmp/errors" ||
		fail "round $round, seed $seed: files cannot be read: $(head -n 3 "$tmp/errors")"
	stop_momentfs "$mnt"
	"$MOMENTCTL" fsck "$tmp/backing" >"$tmp/fsck.out" 2>&1 || fail "round $round, seed $seed: $(cat "$tmp/fsck.out")"
	start_momentfs "$tmp/backing" "$mnt" ram=16M
	(cd "$mnt/params" && sha256sum --quiet -c "$tmp/sums") >"$tmp/errors" 2>&1 ||
		fail "round $round, seed $seed: files are not what they were before the remount: $(head -n 3 "$tmp/errors")"
	stop_momentfs "$mnt"
done
files=$(wc -l <"$tmp/sums")
echo "fsstress: $rounds kills, $files files at the end"
[ "$files" -gt 0 ] || fail "fsstress: no file was left to read"
