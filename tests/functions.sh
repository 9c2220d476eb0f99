# SPDX-License-Identifier: Apache-2.0
# What every script test begins with:   . "$(dirname "$0")/../functions.sh"
# It gives a private folder $tmp, clean-up that also runs on failure and on signals, `requires`, and a
# daemon that is started in the foreground, watched, and taken down by pid.
# Exit status: 0 passed, 77 skipped, anything else failed.

set -eu -o pipefail
export LC_ALL=C

abs_srcdir=${abs_srcdir:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
abs_builddir=${abs_builddir:-$PWD}
MOMENTFS=${MOMENTFS:-$abs_builddir/momentfs}
MOMENTCTL=${MOMENTCTL:-$abs_builddir/momentctl}
export MOMENTFS MOMENTCTL

fail() { printf 'FAIL: %s\n' "$*" >&2; exit 1; }

# A skip is for a user's machine. In CI nothing may be missing, so there it fails.
skip() {
	if [ "${CI:-}" = true ]; then fail "CI=true, but: $*"; fi
	printf 'SKIP: %s\n' "$*" >&2
	exit 77
}

# requires COMMAND...: skip unless all are installed.
requires() {
	local c
	for c in "$@"; do command -v "$c" >/dev/null || skip "$c is not installed (tools/setup installs it)"; done
}

requires_root() { [ "$(id -u)" = 0 ] || skip "needs root"; }

# requires_fuse: skip where nothing can be mounted.
requires_fuse() {
	[ -c /dev/fuse ] || skip "no /dev/fuse on this machine"
	[ -r /dev/fuse ] && [ -w /dev/fuse ] || skip "no permission on /dev/fuse"
	requires fusermount3
}

requires_python() {
	local m
	for m in "$@"; do "${PYTHON3:-/usr/bin/python3}" -c "import $m" 2>/dev/null || skip "no Python module $m"; done
}

# cleanup_fn COMMAND ARG...: run it when the test ends, in whatever way; the last registered runs first.
_cleanups=()
cleanup_fn() { _cleanups+=("$(printf '%q ' "$@")"); }
_run_cleanups() {
	local rc=$? i
	trap - EXIT
	trap '' INT TERM HUP
	set +e
	for ((i = ${#_cleanups[@]} - 1; i >= 0; i--)); do eval "${_cleanups[i]}"; done
	exit "$rc"
}
trap _run_cleanups EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

tmp=$(mktemp -d "${TMPDIR:-/tmp}/momentfs-test.XXXXXX")
cleanup_fn rm -rf --one-file-system "$tmp"

# private_mounts COMMAND...: in a mount namespace of its own. Mounts of other tests that run beside are not kept in
# it: a momentfs that is unmounted goes on as long as another namespace has it, and momentctl umount says so.
private_mounts() {
	unshare -m --propagation private bash -c 'mine=$1
		shift
		while read -r _ _ _ _ point _; do
			case $point in "$mine"/*) ;; *) umount -l "$point" ;; esac
		done < <(grep -s " - fuse.momentfs " /proc/self/mountinfo)
		exec "$@"' - "$tmp" "$@"
}

# alone "$@": the script begins again in a mount namespace of its own, where that can be had: nobody who walks over the
# machine's files (du, an indexer) is in its mounts when they are to be unmounted.
alone() {
	local rc=0
	[ "${1:-}" != inside ] && unshare -m true 2>/dev/null || return 0
	private_mounts "$BASH" "$0" inside "$@" || rc=$?
	exit $rc
}

# retry SECONDS COMMAND...: until it succeeds; false when the time is over.
retry() {
	local end=$((${EPOCHREALTIME/./} + $1 * 1000000))
	shift
	until "$@"; do
		[ "${EPOCHREALTIME/./}" -lt "$end" ] || return 1
		sleep 0.05
	done
}

_gone() { ! kill -0 "$1" 2>/dev/null; }
_mounted_or_dead() { mountpoint -q "$1" || _gone "$2"; }

# What the threads of a process wait for.
_what_it_does() {
	local t
	for t in /proc/"$1"/task/*; do
		echo "$(cat "$t/comm") waits in $(cat "$t/wchan" 2>/dev/null): $(tr '\n' ' ' <"$t/stack" 2>/dev/null)"
	done
}

# start_momentfs BACKING MOUNTPOINT [OPTIONS]: mounts, waits until it serves, sets $momentfs_pid and
# $momentfs_log. Unmounted and checked for leftovers at the end of the test.
start_momentfs() {
	local backing=$1 mnt=$2 opts=${3:-}
	mkdir -p "$mnt"
	momentfs_log=$tmp/momentfs-$(basename "$mnt").log
	"$MOMENTFS" -f ${opts:+-o "$opts"} "$backing" "$mnt" >>"$momentfs_log" 2>&1 &
	momentfs_pid=$!
	cleanup_fn _end_momentfs "$momentfs_pid" "$mnt"
	if ! retry 20 _mounted_or_dead "$mnt" "$momentfs_pid"; then
		cat "$momentfs_log" >&2
		_what_it_does "$momentfs_pid" >&2
		fail "nothing mounted on $mnt within 20 s"
	fi
	if _gone "$momentfs_pid"; then
		cat "$momentfs_log" >&2
		fail "momentfs -o '$opts' ended before it mounted"
	fi
}

_end_momentfs() {
	if mountpoint -q "$2" || ! stat "$2" >/dev/null 2>&1; then
		umount -l "$2" 2>/dev/null || fusermount3 -u -z -q "$2" 2>/dev/null
	fi
	_gone "$1" && return
	kill -TERM "$1" 2>/dev/null
	retry 10 _gone "$1" || kill -KILL "$1" 2>/dev/null
	wait "$1" 2>/dev/null
	return 0
}

# stop_momentfs MOUNTPOINT [PID]: the clean way down; fails when that is not clean.
stop_momentfs() {
	local mnt=$1 pid=${2:-$momentfs_pid} rc=0
	"$MOMENTCTL" umount "$mnt" || {
		if command -v fuser >/dev/null; then { fuser -vm "$mnt" 2>&1 | grep -v '^Cannot stat' >&2; } || true; fi
		fail "momentctl umount $mnt"
	}
	wait "$pid" || rc=$?
	[ "$rc" = 0 ] || { cat "$momentfs_log" >&2; fail "momentfs ended with $rc"; }
	! mountpoint -q "$mnt" || fail "$mnt is still mounted"
}

# kill_momentfs MOUNTPOINT [PID]: a crash. The dead mount is cleared, as a user would.
kill_momentfs() {
	local mnt=$1 pid=${2:-$momentfs_pid}
	kill -KILL "$pid"
	wait "$pid" 2>/dev/null || true
	umount -l "$mnt" 2>/dev/null || fusermount3 -u -z "$mnt"
}

# status_of MOUNTPOINT KEY: one value of .moment/status; nested keys with dots.
status_of() {
	"${PYTHON3:-/usr/bin/python3}" -c '
import json, sys
v = json.load(open(sys.argv[1] + "/.moment/status"))
for k in sys.argv[2].split("."):
    v = v[k]
print(json.dumps(v) if isinstance(v, (dict, list, bool)) else v)' "$1" "$2"
}

# expect_failure PATTERN COMMAND...: must exit non-zero, not by a signal, and say something that matches.
expect_failure() {
	local pattern=$1 out rc=0
	shift
	out=$("$@" 2>&1) || rc=$?
	[ "$rc" != 0 ] || fail "should have failed: $*"
	[ "$rc" -lt 124 ] || fail "ended with status $rc: $*"
	grep -Eqi -- "$pattern" <<<"$out" || fail "message of '$*' does not match /$pattern/: $out"
}

assert_eq() { [ "$1" = "$2" ] || fail "${3:-values differ}: got '$1', expected '$2'"; }
sha() { sha256sum <"$1" | cut -d' ' -f1; }
