# SPDX-License-Identifier: Apache-2.0
# How a mount ends, in every way, and that what was written is there afterwards; the background; dead mounts.
. "$(dirname "$0")/../functions.sh"
requires_fuse
mnt=$tmp/mnt
back=$tmp/backing
mkdir "$mnt"
opts=ram=16M,block=256K,commit=off

ended() { wait "$momentfs_pid" || fail "$1: momentfs ended with $?: $(tail -3 "$momentfs_log")"; }
n=0
again() { # the last round's file is there; write the next
	start_momentfs "$back" "$mnt" $opts
	[ $n = 0 ] || assert_eq "$(cat "$mnt/params/round")" "$n" "after: $1"
	n=$((n + 1))
	echo $n >"$mnt/params/round"
}

again first
fusermount3 -u "$mnt"
ended 'fusermount3 -u'
again 'fusermount3 -u'
umount "$mnt" 2>/dev/null || fusermount3 -u "$mnt" # an ordinary user has no umount
ended umount
again umount
"$MOMENTCTL" umount "$mnt"
ended 'momentctl umount'
again 'momentctl umount'
kill -TERM "$momentfs_pid"
ended SIGTERM
again SIGTERM
kill -INT "$momentfs_pid"
ended SIGINT
again SIGINT
"$MOMENTCTL" umount --lazy "$mnt"
ended 'momentctl umount --lazy'
again 'momentctl umount --lazy'

# A new mount at once, while the old daemon is still committing: it waits, and says so if it had to.
dd if=/dev/urandom of="$mnt/params/big" bs=1M count=100 status=none
fusermount3 -u "$mnt"
again 'a mount right after the unmount'
[ "$(stat -c %s "$mnt/params/big")" = 104857600 ] || fail "big is not complete"

# With a file held open, SIGTERM detaches and waits; a reader goes on; a second signal shortens it.
exec 7<"$mnt/params/round"
kill -TERM "$momentfs_pid"
gone() { ! mountpoint -q "$mnt"; }
retry 5 gone || fail "SIGTERM did not detach"
sleep 0.3
kill -0 "$momentfs_pid" || fail "SIGTERM did not wait for the open file"
assert_eq "$(cat <&7)" "$n" "reading while it ends"
exec 7<&-
ended 'SIGTERM, the user went'
again 'SIGTERM with a user'
exec 7<"$mnt/params/round"
start=$SECONDS
kill -TERM "$momentfs_pid"
retry 5 gone
kill -TERM "$momentfs_pid"
ended 'two SIGTERMs'
[ $((SECONDS - start)) -lt 5 ] || fail "a second signal does not hurry it: $((SECONDS - start)) s"
exec 7<&-
again 'two SIGTERMs'

# kill -9: what was committed is there, and the dead mount is cleared by the next start.
"$MOMENTCTL" commit "$mnt"
echo lost >"$mnt/params/round"
kill -KILL "$momentfs_pid"
wait "$momentfs_pid" 2>/dev/null || true
rc=0
"$MOMENTCTL" status "$mnt" 2>"$tmp/err" || rc=$?
assert_eq $rc 2 "status of a dead mount"
grep -q "has died; clear it with: fusermount3 -u -z" "$tmp/err" || fail "dead mount: $(cat "$tmp/err")"
"$MOMENTFS" -o $opts "$back" "$mnt" 2>"$tmp/err" || fail "mounting over a dead mount: $(cat "$tmp/err")"
grep -q "cleared the mount of $back" "$tmp/err" || fail "clearing a dead mount is not told: $(cat "$tmp/err")"
assert_eq "$(cat "$mnt/params/round")" "$n" "after kill -9: the last commit"

# That one is in the background, by the way: it outlives its caller, and ends well.
pid=$(status_of "$mnt" mount.pid)
assert_eq "$(ps -o tty= -p "$pid" | tr -d ' ')" '?' "terminal of the daemon"
assert_eq "$(readlink "/proc/$pid/fd/2")" /dev/null "stderr of the daemon"
"$MOMENTCTL" umount "$mnt"
dead() { ! [ -d "/proc/$pid" ] || grep -q '^State:.Z' "/proc/$pid/status"; }
retry 5 dead || fail "the daemon is still there"
! mountpoint -q "$mnt" || fail "still mounted"

# Late errors reach the caller of a background mount, with their status.
rc=0
out=$("$MOMENTFS" -o ram=900T "$back" "$mnt" 2>&1) || rc=$?
assert_eq $rc 2 "late error in the background"
grep -q ram <<<"$out" || fail "late error in the background: $out"
rc=0
out=$(MOMENT_FAULTS=nonsense "$MOMENTFS" -o $opts "$back" "$mnt" 2>&1) || rc=$?
assert_eq $rc 2 "late error in the background"

# The limits of the mount are raised by root.
if [ "$(id -u)" = 0 ]; then
	start_momentfs "$back" "$mnt" $opts
	dev=$(awk -v m="$mnt" '$5 == m { print $3 }' /proc/self/mountinfo)
	assert_eq "$(cat "/sys/class/bdi/$dev/read_ahead_kb")" 1024 read_ahead_kb
	assert_eq "$(cat "/sys/class/bdi/$dev/max_ratio")" 100 max_ratio
	[ ! -e "/sys/class/bdi/$dev/strict_limit" ] || assert_eq "$(cat "/sys/class/bdi/$dev/strict_limit")" 0 strict_limit
	stop_momentfs "$mnt"
fi
