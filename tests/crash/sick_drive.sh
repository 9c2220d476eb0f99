#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A drive that fails 1% of all reads, writes and syncs, and moves less than asked for, for 200 steps on a small
# ext4: never a wrong byte, never a hang. Then a drive that takes no write at all: every fsync and commit fails and
# status says so until it is cured, not only the first time; then all that was accepted is stored.
. "$(dirname "$0")/../functions.sh"

train=$abs_builddir/tests/crash/train
back=$tmp/disk
mkdir "$back"
if [ "$(id -u)" = 0 ] && truncate -s 64M "$tmp/img" && mkfs.ext4 -q "$tmp/img" 2>/dev/null &&
	mount -o loop "$tmp/img" "$back" 2>/dev/null; then
	cleanup_fn eval 'umount -l "$back" 2>/dev/null || true'
else
	echo "no loop device: on the ordinary file system"
fi
sick=$tmp/sick
: >"$tmp/log"

# --- 1% of everything, for 200 steps ---
touch "$sick"
runs=0 errors=0
while :; do
	runs=$((runs + 1))
	[ "$runs" -le 400 ] || fail "no end in sight after $runs runs"
	rc=0
	MOMENT_FAULTS="seed=$((RANDOM + runs)),error=EIO:0.01,short=0.01,delay=1ms:0.01,file=$sick" \
		timeout 100 "$train" --backing "$back/b" --data embedded --steps 200 --commit 2 --log "$tmp/log" \
		--at-least "$(awk '{ c = $2 } END { print c + 0 }' "$tmp/log")" 2>"$tmp/err" || rc=$?
	case $rc in
	0) break ;;
	3)
		errors=$((errors + 1))
		grep -qi 'input/output error\|could not be written\|catalog' "$tmp/err" || { cat "$tmp/err" >&2; fail "the message does not name the fault"; }
		;;
	124) fail "it hangs" ;;
	*) cat "$tmp/err" >&2; fail "run $runs ended with $rc" ;;
	esac
done
echo "200 steps in $runs runs, $errors of them ended by an error"
rm "$sick" # cured
timeout 100 "$train" --backing "$back/b" --data embedded --steps 230 --at-least 200 --log "$tmp/log" 2>"$tmp/err" ||
	{ cat "$tmp/err" >&2; fail "after the cure: $?"; }

# --- no write at all ---
requires_fuse
mnt=$tmp/mnt
# dd ... conv=fsync would open and write again: here fsync alone is asked, again and again.
fsyncs() { "${PYTHON3:-/usr/bin/python3}" -c '
import os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
got = []
for _ in range(3):
    try:
        os.fsync(fd)
        got.append("ok")
    except OSError as e:
        got.append(os.strerror(e.errno))
print(",".join(got))' "$1"; }

export MOMENT_FAULTS="write.error=EIO:1,file=$sick"
start_momentfs "$back/c" "$mnt" ram=4M,block=64K,commit=1
head -c 700000 /dev/urandom >"$tmp/want"
cp "$tmp/want" "$mnt/params/before"
"$MOMENTCTL" commit "$mnt"
touch "$sick"
cp "$tmp/want" "$mnt/params/after" || fail "bytes for which there is room are not accepted"
assert_eq "$(fsyncs "$mnt/params/after")" "Input/output error,Input/output error,Input/output error" "fsync on a dead drive"
expect_failure 'error' "$MOMENTCTL" commit "$mnt"
[ "$(status_of "$mnt" commit.error)" != None ] || fail "status does not show the failed commit"
[ "$(status_of "$mnt" errors)" != "[]" ] || fail "status does not list the errors"
status_of "$mnt" errors | grep -q 'after' || fail "status does not name the file"
cmp "$tmp/want" "$mnt/params/after" || fail "what could not be stored yet reads wrong"
cmp "$tmp/want" "$mnt/params/before"
rc=0
timeout 60 "$train" --mount "$mnt" --data session --steps 5 --log "$tmp/log2" 2>"$tmp/err" || rc=$?
assert_eq "$rc" 3 "training on a dead drive"
grep -qi 'commit\|written\|error' "$tmp/err" || fail "the trainer is not told: $(cat "$tmp/err")"
rm "$sick"
assert_eq "$(fsyncs "$mnt/params/after")" "ok,ok,ok" "fsync after the cure"
retry 10 "$MOMENTCTL" commit "$mnt" || fail "commit after the cure"
assert_eq "$(status_of "$mnt" commit.error)" None "commit.error after the cure"
timeout 60 "$train" --mount "$mnt" --data session --steps 5 --log "$tmp/log2" 2>"$tmp/err" || { cat "$tmp/err" >&2; fail "training after the cure: $?"; }
kill_momentfs "$mnt"
unset MOMENT_FAULTS
start_momentfs "$back/c" "$mnt" ram=4M
cmp "$tmp/want" "$mnt/params/after" || fail "what fsync said was stored is not"
stop_momentfs "$mnt"

# --- writes succeed, and no commit: whoever steps is stopped, by whichever way, and goes on by himself after the cure ---
export MOMENT_FAULTS="sync.error=EIO:1,file=$sick"
start_momentfs "$back/d" "$mnt" ram=4M,block=64K,commit=off
timeout 60 "$train" --mount "$mnt" --data session --steps 5 --commit 1 2>"$tmp/err" || { cat "$tmp/err" >&2; fail "five steps: $?"; }
touch "$sick"
for data in session mmap; do
	echo x >"$mnt/params/p.$data"
	for i in 1 2 3; do expect_failure 'error' "$MOMENTCTL" commit "$mnt"; done
	rc=0
	timeout 60 "$train" --mount "$mnt" --data "$data" --steps 9 --commit 100 2>"$tmp/err" || rc=$?
	assert_eq "$rc" 3 "training by $data where no commit succeeds"
	grep -q 'step 6.*commits failed.*fdatasync.*step 5' "$tmp/err" || fail "the trainer is not told by $data: $(cat "$tmp/err")"
	"$MOMENTCTL" status "$mnt" >"$tmp/status"
	grep -q 'no step begins before a commit succeeds' "$tmp/status" || fail "status does not say it: $(cat "$tmp/status")"
done
expect_failure 'error' bash -c "echo begin 77 >'$mnt/.moment/step'"
rm "$sick"
echo begin 77 >"$mnt/.moment/step" || fail "a bracket does not begin after the cure"
echo end 77 >"$mnt/.moment/step"
"$MOMENTCTL" commit "$mnt"
stop_momentfs "$mnt"
