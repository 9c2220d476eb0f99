#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The host's disk is filled by others in every phase of a training, on ext4, xfs and btrfs (cases A2, A3): before
# the first start, between runs, while steps and commits are under way. Registering needs space and says so; what
# is registered goes on, even beside a program that takes whatever gets free; or (where the file system cannot reserve) fails with ENOSPC; never a wrong byte, never a
# signal, and when there is space again it goes on from a whole step. The same through mappings of the mounted files,
# by libmoment and by NumPy (ext4).
#	disk_full.sh [FS]...
. "$(dirname "$0")/../functions.sh"
requires_root
requires losetup
[ $# -gt 0 ] || set -- ext4 xfs btrfs
losetup -f >/dev/null 2>&1 || skip "no loop devices here"

train=$abs_builddir/tests/crash/train
disk=$tmp/disk
mkdir "$disk"
ran=

fill() { dd if=/dev/zero of="$disk/filler$1" bs=64K conv=fsync status=none 2>/dev/null || true; }
fill_small() { fill "$1"; dd if=/dev/zero of="$disk/filler$1.small" bs=512 conv=fsync status=none 2>/dev/null || true; }
free() { rm -f "$disk"/filler*; sync -f "$disk"; }

# run STATUS STEPS: 0 must get there, 3 must end with an error about space, any: one of them.
run() {
	local rc=0
	timeout 120 "$train" --backing "$disk/back" --data embedded --steps "$2" --commit 3 --log "$tmp/log" \
		--at-least "$(awk '{ c = $2 } END { print c + 0 }' "$tmp/log")" 2>"$tmp/err" || rc=$?
	[ "$rc" = 0 ] || [ "$rc" = 3 ] || { cat "$tmp/err" >&2; fail "$fs: step $2: ended with $rc"; }
	if [ "$1" != any ] && [ "$rc" != "$1" ]; then
		cat "$tmp/err" >&2
		fail "$fs: step $2: ended with $rc, not $1"
	fi
	if [ "$rc" = 3 ]; then
		grep -qi 'space' "$tmp/err" || { cat "$tmp/err" >&2; fail "$fs: the message does not speak of space"; }
	fi
}

lines() { [ "$(wc -l <"$tmp/maplog")" -ge "$1" ]; }

mapped() {
	local mnt=$tmp/mnt opts=ram=4M,block=64K,commit=off trainer rc=0
	requires_fuse
	requires_python numpy
	rm -f "$tmp/img"
	truncate -s 64M "$tmp/img"
	mkfs.ext4 -q "$tmp/img"
	mount -o loop "$tmp/img" "$disk"

	# What libmoment registers has its places, so every step works; the log has a line a step.
	start_momentfs "$disk/maps" "$mnt" "$opts"
	: >"$tmp/maplog"
	timeout 120 "$train" --mount "$mnt" --data mmap --steps 6 --commit 1 --pause 700000 --log "$tmp/maplog" \
		2>"$tmp/err" &
	trainer=$!
	retry 30 lines 4 || fail "no three steps: $(cat "$tmp/err")"
	fill_small 8
	retry 30 lines 6 || fail "no steps on a full disk: $(cat "$tmp/err")"
	free
	wait "$trainer" || rc=$?
	[ "$rc" = 0 ] || { cat "$tmp/err" >&2; fail "the mapped training ended with $rc"; }
	timeout 120 "$train" --mount "$mnt" --data mmap --steps 8 --at-least 6 --log "$tmp/maplog" 2>"$tmp/err" ||
		{ cat "$tmp/err" >&2; fail "the mapped training does not go on: $?"; }
	stop_momentfs "$mnt"
	rm -rf "$disk/maps"

	start_momentfs "$disk/maps" "$mnt" "$opts"
	timeout 120 "$PYTHON3" "$abs_srcdir/tests/crash/memmap.py" train "$mnt" "$disk" || fail "mapped by NumPy: $?"
	status_of "$mnt" errors | grep -q 'b/exp_avg' || fail "status does not name the file that had no room"
	stop_momentfs "$mnt"
	start_momentfs "$disk/maps" "$mnt" "$opts"
	"$PYTHON3" "$abs_srcdir/tests/crash/memmap.py" look "$mnt" || fail "mapped by NumPy, after a new mount"
	stop_momentfs "$mnt"
	rm -rf "$disk/maps"
}

for fs; do
	command -v "mkfs.$fs" >/dev/null || { echo "no mkfs.$fs: left out"; continue; }
	case $fs in ext4) size=64M ;; xfs) size=300M ;; btrfs) size=110M ;; esac
	rm -f "$tmp/img" "$tmp/log"
	: >"$tmp/log"
	truncate -s "$size" "$tmp/img"
	"mkfs.$fs" -q "$tmp/img" >/dev/null || { echo "mkfs.$fs refuses $size: left out"; continue; }
	mount -o loop "$tmp/img" "$disk" 2>/dev/null || { echo "$fs cannot be mounted here: left out"; continue; }
	cleanup_fn eval 'umount -l "$disk" 2>/dev/null || true'
	ran="$ran $fs"

	fill_small 1 # before the first start
	run 3 5
	[ ! -e "$disk/back/pool" ] || [ -e "$disk/back/catalog.sqlite" ] || fail "$fs: half a backing was made"
	free
	run 0 10

	fill 2 # between two runs: all is reserved, the engine itself needs little
	case $fs in btrfs) run any 20 ;; *) run 0 20 ;; esac
	free
	run 0 25

	for i in 1 2 3 4 5; do # at any moment of a run, also its first and its commits
		(sleep "0.$((RANDOM % 4))"; fill $((2 + i))) &
		filler=$!
		case $fs in btrfs) run any $((25 + 30 * i)) ;; *) run 0 $((25 + 30 * i)) ;; esac
		wait "$filler"
		free
	done
	run 0 200

	for when in 0.2 0; do # somebody takes whatever gets free, at once: from within a run on, or before it begins
		touch "$tmp/greedy"
		(
			sleep "$when"
			while [ -e "$tmp/greedy" ]; do
				dd if=/dev/zero of="$disk/filler9" bs=4K oflag=append conv=notrunc status=none 2>/dev/null || true
			done
		) &
		filler=$!
		[ "$when" != 0 ] || sleep 0.7
		last=$(awk '{ c = $2 } END { print c + 0 }' "$tmp/log")
		case $fs in btrfs) run any $((last + 200)) ;; *) run 0 $((last + 200)) ;; esac
		rm "$tmp/greedy"
		wait "$filler"
		free
		run 0 $((last + 220))
	done
	umount "$disk"
done
[ -n "$ran" ] || skip "no file system could be made and mounted"
echo "filled in every phase:$ran"
case $ran in *ext4*) mapped ;; esac
