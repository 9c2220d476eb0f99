# SPDX-License-Identifier: Apache-2.0
# The files of .moment/, and momentctl on top of them.
. "$(dirname "$0")/../functions.sh"
requires_fuse
mnt=$tmp/mnt
c=$mnt/.moment

start_momentfs "$tmp/backing" "$mnt" ram=16M,block=256K,commit=off
p=$mnt/params

# status and stats
"${PYTHON3:-/usr/bin/python3}" -m json.tool "$c/status" >/dev/null || fail "status is not JSON"
assert_eq "$(status_of "$mnt" mount.pid)" "$momentfs_pid" pid
assert_eq "$(status_of "$mnt" mount.socket)" "$tmp/backing/session.sock" socket
[ -S "$tmp/backing/session.sock" ] || fail "no socket"
assert_eq "$(stat -c %a "$tmp/backing/session.sock")" 600 "mode of the socket"
grep -q '^momentfs_ram_bytes 16777216$' "$c/stats" || fail "stats lacks ram_bytes: $(head -5 "$c/stats")"
expect_failure 'denied|permitted' bash -c "echo x >'$c/status'"

# step: the bracket of a plain writer. Inside it nothing plain is committed.
echo old >"$p/f"
echo commit >"$c/control"
assert_eq "$(cat "$c/step")" "$(printf 'committed none\nboundary none\nopen none\ntorn no')" step
printf 'begin 41\n' >"$c/step"
grep -q '^open 41$' "$c/step" || fail "step 41 is not open: $(cat "$c/step")"
expect_failure 'busy' bash -c "echo 'begin 42' >'$c/step'"
grep -q 'another step is open' <<<"$(status_of "$mnt" mount.control.message)" || fail "no reason in status"
expect_failure 'invalid' bash -c "echo 'end 40' >'$c/step'"
for bad in 'begin' 'begin x' 'begin -1' 'begin 1 2' 'finish 41' 'begin 18446744073709551616'; do
	expect_failure 'invalid' bash -c "echo '$bad' >'$c/step'"
done
printf 'end 41\nbegin 42\nend 42\n' >"$c/step" # several lines in one write
grep -q '^boundary 42$' "$c/step" || fail "no boundary 42: $(cat "$c/step")"
echo commit >"$c/control"
grep -q '^committed 42$' "$c/step" || fail "step 42 is not committed: $(cat "$c/step")"

# prefetch: lines cut anywhere, paths with spaces; wrong ones are told
mkdir "$p/two words"
head -c 3000000 /dev/urandom >"$p/two words/exp avg"
"$MOMENTCTL" commit "$mnt"
stop_momentfs "$mnt"
start_momentfs "$tmp/backing" "$mnt" ram=16M,commit=off
resident() { getfattr --only-values -n user.moment.cache "$1" | sed 's/.*resident=\([0-9]*\).*/\1/'; }
"${PYTHON3:-/usr/bin/python3}" - "$c/prefetch" <<'PY'
import sys
with open(sys.argv[1], "wb", buffering=0) as f:
    f.write(b"params/two words/exp avg 0 10")
    f.write(b"00000\nparams/two words/ex")
    f.write(b"p avg 1000000 2000000")  # ends with the close
PY
if command -v getfattr >/dev/null; then
	all_there() { [ "$(resident "$p/two words/exp avg")" -ge 3000000 ]; }
	retry 5 all_there || fail "hints fetched $(resident "$p/two words/exp avg") of 3000000 bytes"
fi
expect_failure 'no such file' bash -c "echo 'params/nothing 0 1' >'$c/prefetch'"
expect_failure 'invalid' bash -c "echo 'params/f zero 1' >'$c/prefetch'"
expect_failure 'invalid' bash -c "echo 'params/f' >'$c/prefetch'"

# commit, rollback, scrub
echo new >"$p/f"
exec 9>"$p/open"
expect_failure 'open for writing' "$MOMENTCTL" rollback "$mnt"
exec 9>&-
retry 5 "$MOMENTCTL" rollback "$mnt" 2>/dev/null || fail "rollback: $("$MOMENTCTL" rollback "$mnt" 2>&1)"
assert_eq "$(cat "$p/f")" old "content after rollback"
[ ! -e "$p/open" ] || retry 3 test ! -e "$p/open" || fail "a file made after the commit is still there"
echo newer >"$p/f"
"$MOMENTCTL" commit "$tmp/backing" # a backing names its mount, too
"$MOMENTCTL" rollback "$mnt"
assert_eq "$(cat "$p/f")" newer "content after commit and rollback"
# Who has a file open that goes with a rollback is told so: it neither reads zeros nor its old bytes.
printf 'gone %05000d' 1 >"$p/away"
exec 9<"$p/away"
"$MOMENTCTL" rollback "$mnt"
[ ! -e "$p/away" ] || retry 3 test ! -e "$p/away" || fail "a file made after the commit is still there"
expect_failure 'stale' cat <&9
assert_eq "$(stat -L -c %h /proc/self/fd/9)" 0 "link count of a file that a rollback took"
exec 9<&-
"$MOMENTCTL" scrub "$mnt" || fail "scrub finds damage"
# trim: what was removed goes back to the host's disk
head -c 20000000 /dev/zero >"$p/large"
"$MOMENTCTL" commit "$mnt"
before=$(stat -c %s "$tmp/backing/pool")
rm "$p/large"
"$MOMENTCTL" trim "$mnt" >"$tmp/trimmed" || fail "trim fails"
grep -Eq '[1-9][0-9.]* [MG]iB given back to the host, the pool has' "$tmp/trimmed" || fail "trim says: $(cat "$tmp/trimmed")"
[ "$(stat -c %s "$tmp/backing/pool")" -le $((before - 20000000)) ] || fail "the pool has not become shorter"
assert_eq "$(cat "$p/f")" newer "content after trim"
expect_failure 'not a command|invalid' bash -c "echo explode >'$c/control'"
grep -q 'explode' <<<"$(status_of "$mnt" mount.control.message)" || fail "the wrong command is not named"

# momentctl status and ls
"$MOMENTCTL" status "$mnt/params/two words" | grep -q "^mount *$mnt of $tmp/backing" || fail "status"
"$MOMENTCTL" status --json "$mnt" | "${PYTHON3:-/usr/bin/python3}" -m json.tool >/dev/null || fail "status --json"
mkdir "$p/w"
head -c 4000 /dev/zero >"$p/w/exp_avg"
"${PYTHON3:-/usr/bin/python3}" - "$p/w" <<'PY'
import os, sys
os.setxattr(sys.argv[1], "user.moment.shape", b"[10, 100]")
os.setxattr(sys.argv[1], "user.moment.step", b"7")
os.setxattr(sys.argv[1] + "/exp_avg", "user.moment.dtype", b"float32")
PY
"$MOMENTCTL" ls "$p/w" >"$tmp/ls"
grep -Eq '4000 +float32 +\[10, 100\] +7 +100 +100 +w/exp_avg' "$tmp/ls" || fail "ls: $(cat "$tmp/ls")"
(cd "$mnt" && "$MOMENTCTL" ls --json) | "${PYTHON3:-/usr/bin/python3}" -c '
import json, sys
rows = {r["path"]: r for r in json.load(sys.stdin)}
assert rows["w/exp_avg"]["dtype"] == "float32" and rows["w/exp_avg"]["step"] == 7, rows
assert rows["two words/exp avg"]["size"] == 3000000 and rows["f"]["dtype"] is None, rows'

# exit codes: 2 cannot be tried, 1 was refused
rc=0; "$MOMENTCTL" status /usr 2>/dev/null || rc=$?; assert_eq $rc 2 "status of no mount"
rc=0; "$MOMENTCTL" status "$tmp/nothing" 2>/dev/null || rc=$?; assert_eq $rc 2 "status of nothing"
rc=0; "$MOMENTCTL" explode 2>/dev/null || rc=$?; assert_eq $rc 2 "unknown command"
rc=0; "$MOMENTCTL" commit --fast "$mnt" 2>/dev/null || rc=$?; assert_eq $rc 2 "unknown option"
rc=0; "$MOMENTCTL" commit 2>/dev/null || rc=$?; assert_eq $rc 2 "no operand"
for cmd in status ls commit umount rollback scrub trim; do
	"$MOMENTCTL" $cmd --help | grep -q "^Usage: momentctl $cmd" || fail "$cmd --help"
done
exec 8<"$p/f"
rc=0; "$MOMENTCTL" umount "$mnt" 2>"$tmp/err" || rc=$?
assert_eq $rc 1 "umount of what is in use"
grep -q 'in use' "$tmp/err" || fail "umount does not say that it is in use: $(cat "$tmp/err")"
exec 8<&-
"$MOMENTCTL" umount "$tmp/backing"
wait "$momentfs_pid" || fail "momentfs ended with $?"
