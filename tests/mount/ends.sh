# SPDX-License-Identifier: Apache-2.0
# How a mount ends while the drive is slow: with the last commit, however long that takes, and a service manager is told.
. "$(dirname "$0")/../functions.sh"
requires_fuse
mnt=$tmp/mnt
back=$tmp/backing
mkdir "$mnt"
opts=ram=64M,block=64K,commit=off

# A scrub of a drive that takes seconds for each read is cancelled; what was written meanwhile is committed.
export NOTIFY_SOCKET=$tmp/notify
"${PYTHON3:-/usr/bin/python3}" - "$NOTIFY_SOCKET" >"$tmp/told" <<'PY' &
import socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.bind(sys.argv[1])
while True:
    text = s.recv(4096).decode()
    print(text, flush=True)
    if text == "over":
        break
PY
listener=$!
retry 5 test -S "$NOTIFY_SOCKET" || fail "no socket to be told at"
MOMENT_FAULTS="read.delay=1s:1,file=$tmp/slow" start_momentfs "$back" "$mnt" $opts
unset NOTIFY_SOCKET
head -c 8M /dev/urandom >"$mnt/params/old"
"$MOMENTCTL" commit "$mnt"
head -c 1M /dev/urandom >"$tmp/new"
cp "$tmp/new" "$mnt/params/new"
touch "$tmp/slow"
(echo scrub >"$mnt/.moment/control") 2>/dev/null &
scrub=$!
scrubbing() { [ "$(status_of "$mnt" scrub.running)" = true ]; }
retry 5 scrubbing || fail "no scrub: $(status_of "$mnt" scrub)"
kill -TERM "$momentfs_pid"
wait "$momentfs_pid" || fail "SIGTERM during a scrub: momentfs ended with $?: $(tail -3 "$momentfs_log")"
! wait "$scrub" || fail "a scrub that was cancelled counts as done"
rm "$tmp/slow"
"${PYTHON3:-/usr/bin/python3}" - "$tmp/notify" <<'PY'
import socket, sys
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"over", sys.argv[1])
PY
wait "$listener"
for line in "READY=1" "MAINPID=$momentfs_pid" "STOPPING=1" "EXTEND_TIMEOUT_USEC=60000000"; do
	grep -qx "$line" "$tmp/told" || fail "the service manager was not told $line: $(cat "$tmp/told")"
done
start_momentfs "$back" "$mnt" $opts
cmp "$tmp/new" "$mnt/params/new" || fail "what was written before SIGTERM is not there"
stop_momentfs "$mnt"

# Somebody stays inside with a mapped file: what he stored before the end is committed, too.
start_momentfs "$back" "$mnt" $opts
"${PYTHON3:-/usr/bin/python3}" - "$mnt/params/mapped" "$tmp/stored" <<'PY' &
import mmap, sys, time
with open(sys.argv[1], "wb+") as f:
    f.truncate(100000)
    m = mmap.mmap(f.fileno(), 0)
    m[:] = b"m" * 100000
    open(sys.argv[2], "w").close()
    time.sleep(60)
PY
user=$!
cleanup_fn eval "kill $user 2>/dev/null || true"
retry 5 test -e "$tmp/stored" || fail "nothing was stored"
kill -TERM "$momentfs_pid"
gone() { ! mountpoint -q "$mnt"; }
retry 5 gone || fail "SIGTERM did not detach"
kill -TERM "$momentfs_pid" # one second more for him, not ten
wait "$momentfs_pid" || fail "SIGTERM with a mapped file: momentfs ended with $?: $(tail -3 "$momentfs_log")"
kill "$user" 2>/dev/null || true
start_momentfs "$back" "$mnt" $opts
assert_eq "$(tr -d m <"$mnt/params/mapped" | wc -c)" 0 "bytes that were stored to a mapping and lost"
assert_eq "$(stat -c %s "$mnt/params/mapped")" 100000 "size of the mapped file"
stop_momentfs "$mnt"
