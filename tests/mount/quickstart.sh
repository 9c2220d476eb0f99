#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# tools/quickstart on the small model: by each way to the bytes the losses agree and the figures are all there;
# an interrupt at any moment leaves nothing mounted, running or behind; bad usage is told.
. "$(dirname "$0")/../functions.sh"
requires python3
requires_python torch
requires_fuse
export TMPDIR=$tmp
quickstart=$abs_srcdir/tools/quickstart
model='--model nanogpt-char'
rc=0

# Nothing of ours may be left: no folder, no mount, no process that was given a path under $tmp.
nothing_left() {
	assert_eq "$(find "$tmp" -maxdepth 1 -name 'momentfs-quickstart.*')" "" "left behind"
	if grep -F "$tmp/" /proc/self/mounts; then fail "left mounted (above)"; fi
	! _ours_running || fail "left running: $(_ours_running)"
}
# (The bracket keeps grep from finding itself.)
_ours_running() { grep -al "$tmp/[m]omentfs-quickstart" /proc/[0-9]*/cmdline 2>/dev/null; }
_kill_quickstart() { [ -z "$pid" ] || kill -KILL "$pid"; }
pid=
cleanup_fn _kill_quickstart

for data in session mmap embedded; do
	# shellcheck disable=SC2086
	"$quickstart" $model --data $data --json >"$tmp/out" 2>"$tmp/err" || { cat "$tmp/err"; fail "--data $data"; }
	"$PYTHON3" - "$tmp/out" $data <<'END' || fail "--data $data: the figures"
import json, sys
lines = open(sys.argv[1]).read().splitlines()
assert len(lines) == 1, lines
r = json.loads(lines[0])
print(r)
assert r["data"] == sys.argv[2]
assert len(r["loss_ram"]) == len(r["loss_momentfs"]) == 3
for a, b in zip(r["loss_ram"] + r["loss_ram_next"], r["loss_momentfs"] + r["loss_resumed"]):
    assert abs(a - b) <= 1e-4 * a, (a, b)
for key in "seconds_ram seconds_momentfs rss_ram_mib rss_momentfs_mib daemon_written_mib state_mib".split():
    assert r[key] > 0, key
assert (r["daemon_rss_mib"] > 0) == (r["data"] != "embedded")
assert abs(r["state_mib"] - 82.0) < 0.1
END
	nothing_left
done

# Interrupted while training in RAM, while training on the mount, while the trainer starts again.
for when in 'in RAM  step 2' 'momentfs  step 1' 'momentfs  step 3'; do
	rm -f "$tmp/err" # the last run's words would be taken for this one's
	# A shell's background jobs ignore SIGINT, so the signal is set free first.
	# shellcheck disable=SC2086
	"$PYTHON3" -c 'import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])' "$quickstart" $model >"$tmp/out" 2>"$tmp/err" &
	pid=$!
	retry 90 grep -qs "$when" "$tmp/err" || { cat "$tmp/err"; fail "never came to '$when'"; }
	kill -INT $pid
	rc=0
	wait $pid || rc=$?
	pid=
	assert_eq $rc 130 "status after an interrupt at '$when'"
	nothing_left
done

# Where there is no /dev/fuse it says so and runs embedded: here with a /dev that lacks it.
if [ "$(id -u)" = 0 ]; then
	private_mounts bash -euc '
		mkdir "$1" && mount -t tmpfs dev "$1" && mkdir "$1/shm"
		for node in null zero full random urandom tty; do
			touch "$1/$node" && mount --bind "/dev/$node" "$1/$node"
		done
		ln -s /proc/self/fd "$1/fd"
		mount --rbind "$1" /dev && exec "${@:2}"' \
		_ "$tmp/dev" "$quickstart" --model nanogpt-char --steps 1 >"$tmp/out" 2>"$tmp/err" ||
		{ cat "$tmp/err"; fail "without /dev/fuse"; }
	grep -q 'no /dev/fuse. The engine runs embedded' "$tmp/out" || fail "did not say that there is no /dev/fuse"
	nothing_left
fi

expect_failure 'not empty' "$quickstart" $model --keep "$abs_srcdir"
expect_failure 'at least 1' "$quickstart" --steps 0
expect_failure 'invalid choice' "$quickstart" --model nonesuch
nothing_left
