#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Backings that are not like the others: on tmpfs, overlayfs, a drive of 4096-byte sectors (case A14: direct I/O is
# tried, not assumed); read-only, forbidden, over quota (A3: a reason and the way out, nothing half done); and a
# memory limit (A17: the RAM tier respects it).
. "$(dirname "$0")/../functions.sh"
requires_root
requires losetup setpriv

train=$abs_builddir/tests/crash/train
tests=0
did() { tests=$((tests + 1)); echo "done: $*"; }
detach() { umount -l "$1" 2>/dev/null || true; }
at() { # at DIR: a new folder that is cleaned up, also when it is mounted upon
	mkdir -p "$1"
	cleanup_fn eval "detach '$1'"
}

# trains DIR [COMMAND...]: 20 steps, a kill, 20 more, all bytes looked at.
trains() {
	local dir=$1
	shift
	"$@" timeout 60 "$train" --backing "$dir" --data embedded --steps 20 2>"$tmp/err" || { cat "$tmp/err" >&2; fail "training in $dir"; }
	"$@" "$train" --backing "$dir" --data embedded --steps 100000 2>/dev/null &
	sleep 0.3
	kill -KILL $!
	wait $! 2>/dev/null || true
	"$@" timeout 60 "$train" --backing "$dir" --data embedded --steps 20 --at-least 20 2>"$tmp/err" || { cat "$tmp/err" >&2; fail "training again in $dir"; }
}

# refused PATTERN DIR [COMMAND...]: an error with that text, at once, and no signal.
refused() {
	local pattern=$1 dir=$2 rc=0
	shift 2
	"$@" timeout 20 "$train" --backing "$dir" --data embedded --steps 20 2>"$tmp/err" || rc=$?
	[ "$rc" = 3 ] || { cat "$tmp/err" >&2; fail "$dir: ended with $rc, an error was due"; }
	grep -Eqi -- "$pattern" "$tmp/err" || { cat "$tmp/err" >&2; fail "$dir: the message does not match /$pattern/"; }
}

# --- A14 ---
at "$tmp/tmpfs"
mount -t tmpfs -o size=64M none "$tmp/tmpfs"
trains "$tmp/tmpfs/b"
did tmpfs

at "$tmp/overlay"
mkdir "$tmp/lower"
at "$tmp/upper"
mount -t tmpfs -o size=64M none "$tmp/upper"
mkdir "$tmp/upper/u" "$tmp/upper/w"
if mount -t overlay -o "lowerdir=$tmp/lower,upperdir=$tmp/upper/u,workdir=$tmp/upper/w" none "$tmp/overlay" 2>/dev/null; then
	trains "$tmp/overlay/b"
	did overlayfs
fi

at "$tmp/sectors"
truncate -s 64M "$tmp/img4k"
if loop=$(losetup --sector-size 4096 --show -f "$tmp/img4k" 2>/dev/null); then
	cleanup_fn losetup -d "$loop"
	mkfs.ext4 -q "$loop" && mount "$loop" "$tmp/sectors"
	trains "$tmp/sectors/b"
	did 4096-byte sectors
fi

# --- A3 ---
trains "$tmp/plain"
at "$tmp/ro"
mount --bind "$tmp/plain" "$tmp/ro"
mount -o remount,ro,bind "$tmp/ro"
refused 'read-only' "$tmp/ro"
if [ -c /dev/fuse ]; then
	start_momentfs "$tmp/ro" "$tmp/mnt" ro,ram=16M
	[ "$(stat -c %s "$tmp/mnt/params/scalar/exp_avg")" = 4 ] || fail "-o ro does not show the state"
	rc=0
	timeout 20 "$train" --mount "$tmp/mnt" --steps 30 2>"$tmp/err" || rc=$?
	assert_eq "$rc" 3 "training on -o ro"
	grep -qi 'read-only' "$tmp/err" || { cat "$tmp/err" >&2; fail "a step on -o ro does not say why not"; }
	stop_momentfs "$tmp/mnt"
fi
umount "$tmp/ro"
did read-only

chmod 0755 "$tmp"
nobody=(setpriv --reuid=65534 --regid=65534 --clear-groups)
if "${nobody[@]}" test -x "$train" && "${nobody[@]}" "$train" --nonsense 2>/dev/null; [ $? = 2 ]; then
	mkdir -m 0700 "$tmp/mine"
	chown 65534:65534 "$tmp/mine"
	trains "$tmp/mine" "${nobody[@]}"
	chmod 0500 "$tmp/mine"
	refused 'mine.*uid 65534' "$tmp/mine" "${nobody[@]}"
	chmod 0700 "$tmp/mine"
	chown 0:0 "$tmp/mine"
	refused 'mine' "$tmp/mine" "${nobody[@]}"
	did forbidden

	if command -v xfs_quota >/dev/null; then
		at "$tmp/quota"
		truncate -s 300M "$tmp/imgq"
		limit() { xfs_quota -x -c "limit -u bsoft=$1k bhard=$1k 65534" "$tmp/quota"; }
		if mkfs.xfs -q "$tmp/imgq" && mount -o loop,uquota "$tmp/imgq" "$tmp/quota" 2>/dev/null; then
			chmod 0777 "$tmp/quota"
			limit 1500
			refused 'quota|space' "$tmp/quota/b" "${nobody[@]}"
			limit 0
			trains "$tmp/quota/b" "${nobody[@]}"
			# What is registered goes on when the quota is reached meanwhile.
			limit $(($(du -sk "$tmp/quota/b" | cut -f1) + 4))
			"${nobody[@]}" timeout 60 "$train" --backing "$tmp/quota/b" --data embedded --steps 60 2>"$tmp/err" ||
				{ cat "$tmp/err" >&2; fail "a full quota fails a step"; }
			did quota
		else
			echo "left out: no quotas in this kernel"
		fi
	fi
fi

# --- A17 ---
memory=/sys/fs/cgroup/memory
if [ -c /dev/fuse ] && [ -f $memory/memory.limit_in_bytes ] && mkdir "$memory/momentfs-test-$$" 2>/dev/null; then
	group=$memory/momentfs-test-$$
	cleanup_fn rmdir "$group"
	echo $((256 << 20)) >"$group/memory.limit_in_bytes"
	inside() { bash -c 'echo $$ >"$1/cgroup.procs" && shift && exec "$@"' _ "$group" "$@"; }
	mkdir "$tmp/mem"
	# More than fits is refused, with both amounts; without ram= it takes what fits.
	expect_failure 'ram=.*does not fit' inside "$MOMENTFS" -f -o ram=8G "$tmp/memback" "$tmp/mem"
	printf '#!/bin/bash\necho $$ >%q/cgroup.procs && exec %q "$@"\n' "$group" "$MOMENTFS" >"$tmp/limited"
	chmod +x "$tmp/limited"
	MOMENTFS=$tmp/limited start_momentfs "$tmp/memback" "$tmp/mem" block=256K
	inside dd if=/dev/zero of="$tmp/mem/params/big" bs=1M count=600 status=none || fail "writing under a memory limit"
	inside cmp -n $((600 << 20)) "$tmp/mem/params/big" /dev/zero || fail "reading under a memory limit"
	assert_eq "$(awk '/^oom_kill / { print $2 }' "$group/memory.oom_control")" 0 "oom_kill"
	stop_momentfs "$tmp/mem"
	did memory limit
fi
[ "$tests" -gt 0 ] || skip "nothing could be mounted"
