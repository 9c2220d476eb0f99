# SPDX-License-Identifier: Apache-2.0
# One mount is seen from more than one place: copies in other mount namespaces, bind mounts, pids of other pid
# namespaces. Whoever unmounts is told within seconds who still holds it, and what to do.
. "$(dirname "$0")/../functions.sh"
requires_fuse
requires_root
requires unshare nsenter
unshare -m --propagation private true || skip "no mount namespaces can be made here"
opts=ram=16M,block=256K
mnt=$tmp/mnt
back=$tmp/back

# held PATTERN: umount says who holds it, within seconds and with status 3; what was written is committed.
held() {
	local rc=0 start=$SECONDS
	timeout 60 "$MOMENTCTL" umount "$mnt" 2>"$tmp/err" || rc=$?
	assert_eq $rc 3 "umount of a mount that others hold ($(cat "$tmp/err"))"
	grep -Eq "$1" "$tmp/err" || fail "who holds it is not told as /$1/: $(cat "$tmp/err")"
	grep -q "kill $momentfs_pid " "$tmp/err" || fail "the way to end the daemon is not told: $(cat "$tmp/err")"
	kill -0 "$momentfs_pid" || fail "the daemon has ended under its users"
	! mountpoint -q "$mnt" || fail "still mounted here"
}

# 1. another mount namespace
start_momentfs "$back" "$mnt" $opts
echo one >"$mnt/params/f"
private_mounts bash -c 'echo $$ >"$1"; exec sleep 300' - "$tmp/holder" &
retry 10 test -s "$tmp/holder" || fail "no second namespace"
holder=$(cat "$tmp/holder")
cleanup_fn kill "$holder"
other_ns() { [ "$(readlink /proc/$holder/ns/mnt)" != "$(readlink /proc/self/ns/mnt)" ] && grep -q "$mnt" /proc/$holder/mountinfo; }
retry 5 other_ns || fail "no second namespace"
held "pid $holder \(sleep\) has it at $mnt in another mount namespace.*nsenter -t $holder -m umount"
# By the name of its backing it is found through that process, and serves.
"$MOMENTCTL" status "$back" >"$tmp/out" || fail "status of a mount in another namespace"
grep -q "of $back (pid $momentfs_pid)" "$tmp/out" || fail "status of a mount in another namespace: $(cat "$tmp/out")"
"$MOMENTCTL" commit "$back" || fail "commit of a mount in another namespace"
expect_failure "another mount namespace only.*nsenter -t [0-9]+ -m momentctl umount '$mnt'" "$MOMENTCTL" umount "$back"
kill "$holder"
rc=0
wait "$momentfs_pid" || rc=$?
assert_eq $rc 0 "the daemon when the last holder has gone"

# 2. a bind mount of a folder of it
start_momentfs "$back" "$mnt" $opts
assert_eq "$(cat "$mnt/params/f")" one "what was committed while others held the mount"
mkdir "$tmp/bind" "$mnt/params/d"
mount --bind "$mnt/params" "$tmp/bind"
cleanup_fn umount -l "$tmp/bind" 2>/dev/null
held "also mounted at $tmp/bind: umount '$tmp/bind'"
echo two >"$tmp/bind/f"
# A signal ends it under them, with a commit, and leaves no dead mount.
kill "$momentfs_pid"
rc=0
wait "$momentfs_pid" || rc=$?
assert_eq $rc 0 "a signal to a daemon whose mount is held by a bind mount"
! grep -q "$tmp/bind" /proc/self/mountinfo || fail "a dead bind mount is left"
start_momentfs "$back" "$mnt" $opts
assert_eq "$(cat "$mnt/params/f")" two "what was written through the bind mount"
# ... also while both mounts are there
mount --bind "$mnt/params" "$tmp/bind"
kill "$momentfs_pid"
wait "$momentfs_pid" || fail "a signal to a daemon with a bind mount"
! grep -q "fuse.momentfs $back " /proc/self/mountinfo || fail "a dead mount is left: $(grep "$back" /proc/self/mountinfo)"

# 3. a holder in another pid namespace is not called by a number that is somebody else's here
if unshare -p -f --mount-proc true 2>/dev/null; then
	private_mounts unshare -p -f --mount-proc "$MOMENTFS" -f -o $opts "$back" "$mnt" >"$tmp/log" 2>&1 &
	outer=$!
	cleanup_fn kill "$outer"
	locked() { grep -q 'state running' "$back/lock"; }
	retry 20 locked || fail "no daemon in another pid namespace: $(cat "$tmp/log")"
	mkdir "$tmp/mnt2"
	expect_failure "another pid namespace \(a container\).*where its pid is 1:" "$MOMENTFS" -o $opts "$back" "$tmp/mnt2"
	# What it started (unshare, and the daemon in there), but not a helper that it started for a moment.
	child=$(pgrep -P "$(pgrep -P "$outer" unshare)" -x "$(basename "$MOMENTFS" | cut -c1-15)")
	kill -TERM "$child"
	wait "$outer" || true
fi
