# SPDX-License-Identifier: Apache-2.0
# Every operation of the mount, and what must have survived a remount.
. "$(dirname "$0")/../functions.sh"
requires_fuse
mnt=$tmp/mnt

start_momentfs "$tmp/backing" "$mnt" ram=16M,block=256K
"${PYTHON3:-/usr/bin/python3}" "$abs_srcdir/tests/mount/tour_steps.py" "$mnt" 262144
stop_momentfs "$mnt"
start_momentfs "$tmp/backing" "$mnt" ram=16M
"${PYTHON3:-/usr/bin/python3}" "$abs_srcdir/tests/mount/tour_steps.py" "$mnt" 262144 check
stop_momentfs "$mnt"

# Read-only: everything is there, nothing can be changed.
start_momentfs "$tmp/backing" "$mnt" ram=16M,ro
"${PYTHON3:-/usr/bin/python3}" "$abs_srcdir/tests/mount/tour_steps.py" "$mnt" 262144 check
expect_failure 'read-only' touch "$mnt/params/new"
expect_failure 'read-only' rm "$mnt/params/map"
[ ! -e "$tmp/backing/session.sock" ] || fail "a read-only mount has a session socket"
stop_momentfs "$mnt"

# Nothing that the daemon said along the way was a complaint.
! grep -Ei 'warning|error' "$momentfs_log" || fail "the daemon complained"
