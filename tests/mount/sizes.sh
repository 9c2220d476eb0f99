# SPDX-License-Identifier: Apache-2.0
# Files of awkward sizes, and a sparse one over 5 GiB, have the right size, content and st_blocks before
# eviction, after it, and after a remount. (Cases A1, A4: tails that are no multiple of anything, 64-bit offsets.)
. "$(dirname "$0")/../functions.sh"
requires_fuse
mnt=$tmp/mnt
block=$((256 * 1024))
sparse=$((5 * 1024 * 1024 * 1024 + 12345))

sizes=(0 1 127 128 4095 4096 4097 $((block - 1)) $block $((block + 1)) 122088 $((3 * block + 4097)))
if [ "$(id -u)" = 0 ]; then drop() { echo 1 >/proc/sys/vm/drop_caches; }; else drop() { :; }; fi

# look WHEN: sizes, hashes and allocated space of everything.
look() {
	local n f blocks
	for n in "${sizes[@]}"; do
		f=$mnt/params/s$n
		assert_eq "$(stat -c %s "$f")" "$n" "$1: size of s$n"
		assert_eq "$(sha "$f")" "$(sha "$tmp/ref/s$n")" "$1: content of s$n"
		blocks=$(stat -c %b "$f")
		# All of it is data; at most one unit of 4096 bytes, or the rest of one piece, is rounding.
		[ $((blocks * 512)) -ge "$n" ] || fail "$1: st_blocks of s$n is $blocks, too few"
		[ $((blocks * 512)) -lt $((n + 4096)) ] || fail "$1: st_blocks of s$n is $blocks, too many"
	done
	assert_eq "$(stat -c %s "$mnt/params/sparse")" "$sparse" "$1: size of sparse"
	blocks=$(stat -c %b "$mnt/params/sparse")
	[ $((blocks * 512)) -ge 8192 ] || fail "$1: st_blocks of sparse is $blocks, too few"
	[ $((blocks * 512)) -le $((4 * block)) ] || fail "$1: st_blocks of sparse is $blocks, too many"
	assert_eq "$(tail -c 13 "$mnt/params/sparse")" "the very end." "$1: tail of sparse"
	assert_eq "$(dd if="$mnt/params/sparse" bs=4096 skip=1048576 count=1 status=none | head -c 9)" \
		"at 4 GiB." "$1: sparse at 4 GiB"
	assert_eq "$(dd if="$mnt/params/sparse" bs=1M skip=3000 count=1 status=none | tr -d '\0' | wc -c)" 0 \
		"$1: a hole of sparse"
}

mkdir "$tmp/ref"
start_momentfs "$tmp/backing" "$mnt" ram=16M,block=256K
for n in "${sizes[@]}"; do
	head -c "$n" /dev/urandom >"$tmp/ref/s$n"
	cp "$tmp/ref/s$n" "$mnt/params/s$n"
done
truncate -s "$sparse" "$mnt/params/sparse"
printf 'at 4 GiB.' | dd of="$mnt/params/sparse" bs=4096 seek=1048576 conv=notrunc status=none
printf 'the very end.' | dd of="$mnt/params/sparse" bs=1 seek=$((sparse - 13)) conv=notrunc status=none

# What is only in RAM has its st_blocks, once the kernel has told of the close.
full() { [ "$(stat -c %b "$mnt/params/s4097")" -gt 0 ] && [ "$(stat -c %b "$mnt/params/sparse")" -lt 10000 ]; }
retry 5 full || fail "st_blocks of sparse stays full after close: $(stat -c %b "$mnt/params/sparse")"
look 'in RAM'
"$MOMENTCTL" commit "$mnt"
look 'committed'

# 64 MiB of whole blocks and 12 MiB of small pieces through a 16 MiB tier: nothing of the above stays.
dd if=/dev/zero of="$mnt/params/filler" bs=1M count=64 status=none
mkdir "$mnt/params/fillers"
"${PYTHON3:-/usr/bin/python3}" -c '
import sys
for i in range(1500):
    open(f"{sys.argv[1]}/{i}", "wb").write(bytes(4097))' "$mnt/params/fillers"
"$MOMENTCTL" commit "$mnt"
drop
stays=$("$MOMENTCTL" ls --json "$mnt" | "${PYTHON3:-/usr/bin/python3}" -c '
import json, sys
print(*(r["path"] for r in json.load(sys.stdin) if r["path"][0] == "s" and r["resident"]))')
assert_eq "$stays" "" "still in RAM"
look 'evicted'

stop_momentfs "$mnt"
start_momentfs "$tmp/backing" "$mnt" ram=16M
look 'remounted'
stop_momentfs "$mnt"
