#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# fsx, from a checkout of xfstests, on a mount with a small tier: buffered and mapped, O_DIRECT, asynchronous; a
# checker remembers every byte. Commits and evictions run beside it.
. "$(dirname "$0")/../functions.sh"
suite=${SUITES:-}/xfstests
[ -e "$suite/ltp/fsx.c" ] || skip "no checkout of xfstests in '${SUITES:-}'"
requires_fuse
alone "$@"
requires make libtoolize
ops=${FSX_OPS:-20000}
[ "${MOMENT_SUITES:-}" != long ] || ops=${FSX_OPS:-200000}

if [ -x "$suite/ltp/fsx" ]; then
	cp "$suite/ltp/fsx" "$tmp"
else
	cp -r "$suite" "$tmp/suite"
	make -C "$tmp/suite" -j2 >"$tmp/build.log" 2>&1 || fail "xfstests does not build: $(tail -n 5 "$tmp/build.log")"
	cp "$tmp/suite/ltp/fsx" "$tmp"
fi
start_momentfs "$tmp/backing" "$tmp/mnt" ram=16M,block=64K,commit=1,size=1G
cd "$tmp" # fsx leaves its notes where it runs

# fsx_run NAME OPTION...
fsx_run() {
	local name=$1 seed=$((RANDOM * 32768 + RANDOM))
	shift
	./fsx -q -N "$ops" -S $seed -l 4194304 -o 262144 -P "$tmp" "$@" "mnt/params/$name" >"$name.out" 2>&1 ||
		fail "fsx $* -S $seed: $(tail -n 20 "$name.out")"
	echo "fsx: $ops operations with seed $seed${*:+, $*}"
}
fsx_run mapped
fsx_run unmapped -R -W
fsx_run direct -Z -R -W -r 4096 -w 4096 -t 4096
fsx_run async -A -Z -R -W -r 4096 -w 4096 -t 4096
fsx_run reopened -c 50
stop_momentfs "$tmp/mnt"
