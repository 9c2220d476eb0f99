# SPDX-License-Identifier: Apache-2.0
# The bracket of a plain writer: what a sync inside it promises, to its writer and to others; a writer that dies in it.
. "$(dirname "$0")/../functions.sh"
requires_fuse
mnt=$tmp/mnt
back=$tmp/backing
mkdir "$mnt"
opts=ram=16M,block=256K,commit=off
py=${PYTHON3:-/usr/bin/python3}
p=$mnt/params
step_is() { grep -qx "$1" "$mnt/.moment/step"; }

# What is durable now.
crash() { kill_momentfs "$mnt"; start_momentfs "$back" "$mnt" $opts; }

start_momentfs "$back" "$mnt" $opts
echo zero >"$p/state"
"$MOMENTCTL" commit "$mnt"

# A writer that syncs inside the bracket does not wait; when its end is written all is durable.
"$py" - "$mnt" <<'PY'
import mmap, os, sys
mnt = sys.argv[1]
f = open(f"{mnt}/params/mapped", "wb+")
f.truncate(5000)
m = mmap.mmap(f.fileno(), 0)
with open(f"{mnt}/.moment/step", "w", buffering=1) as step:
    print("begin 1", file=step)
    m[:] = b"1" * 5000
    m.flush()
    os.fsync(os.open(f"{mnt}/params", os.O_RDONLY))
    print("end 1", file=step)
PY
step_is 'committed 1' || fail "a step that was synced is not durable with its end: $(cat "$mnt/.moment/step")"
crash
assert_eq "$(tr -d 1 <"$p/mapped" | wc -c)/$(stat -c %s "$p/mapped")" 0/5000 "the synced step after a crash"

# Shells open the file for each line; what they start is theirs.
echo 'begin 2' >"$mnt/.moment/step"
echo two >"$tmp/two"
cp "$tmp/two" "$p/state"
timeout 5 sync "$p/state" || fail "a sync by the writer's own child waits for the end"
timeout 5 sync "$p" || fail "a sync of a directory inside a bracket: $?"
echo 'end 2' >"$mnt/.moment/step"
step_is 'committed 2' || fail "step 2 is not durable: $(cat "$mnt/.moment/step")"

# Somebody else's sync inside the bracket: durable or refused. One process is the writer, this shell is not.
writer() { # writes what it reads into the mount, and lives until its input ends
	exec 3<&0
	exec "$py" -c '
import os, sys
mnt = sys.argv[1]
print("ready", flush=True)
for line in os.fdopen(3):
    word, rest = line.rstrip("\n").split(" ", 1)
    if word == "step":
        with open(f"{mnt}/.moment/step", "w") as f: f.write(rest + "\n")
    elif word == "control":
        with open(f"{mnt}/.moment/control", "w") as f: f.write(rest)
    elif word == "put":
        name, text = rest.split(" ", 1)
        with open(f"{mnt}/params/{name}", "r+") as f: f.write(text)
    elif word == "rename":
        name, text = rest.split(" ", 1)
        with open(f"{mnt}/params/.tmp", "w") as f: f.write(text)
        os.rename(f"{mnt}/params/.tmp", f"{mnt}/params/{name}")
    print("done", flush=True)' "$mnt"
}
begin_writer() { coproc W { writer; }; wpid=$W_PID; tell_fd=${W[1]}; hear_fd=${W[0]}; read -r _ <&"$hear_fd"; }
tell() { echo "$*" >&"$tell_fd"; read -r -t 10 _ <&"$hear_fd" || fail "the writer does not answer to: $*"; }
begin_writer
tell step begin 3
tell put state "333"
echo other >"$p/other"
expect_failure 'busy' sync "$p/state" # of a file that the step has changed
(sync "$p/other"; echo $? >"$tmp/rc") &
syncing=$!
sleep 0.3
[ ! -e "$tmp/rc" ] || [ "$(cat "$tmp/rc")" != 0 ] || fail "a sync of another file says that it is durable inside the bracket"
tell step end 3
wait "$syncing"
assert_eq "$(cat "$tmp/rc")" 0 "a sync that waited for the end"
crash
assert_eq "$(cat "$p/other")" other "what was synced beside a step"
assert_eq "$(cat "$p/state")" 333 "the step"
kill -KILL "$wpid"; wait "$wpid" 2>/dev/null || true

# The writer dies: what its step changed goes back, what others wrote meanwhile stays, and everything goes on.
"$MOMENTCTL" commit "$mnt"
begin_writer
tell step begin 4
tell put state "444"
echo precious >"$p/precious"
kill -KILL "$wpid"; wait "$wpid" 2>/dev/null || true
untorn() { step_is 'torn no' && step_is 'open none'; }
retry 5 untorn || fail "the torn step is not undone: $(cat "$mnt/.moment/step")"
sync "$p/precious" || fail "no sync after a torn step"
assert_eq "$(cat "$p/state")" 333 "what the torn step changed"
crash
assert_eq "$(cat "$p/precious")" precious "what was synced after a torn step"

# One that had changed nothing leaves nothing torn. The process that said `begin` is gone at once.
bash -c "echo 'begin 5' >'$mnt/.moment/step'"
echo more >"$p/more"
sync "$p/more" || fail "a sync while a bracket's writer is gone"
stop_momentfs "$mnt"

# What the step changed may have been removed or replaced by others meanwhile, and still be open.
start_momentfs "$back" "$mnt" $opts
begin_writer
printf old >"$p/gone"
mkdir "$p/dir"
printf old >"$p/dir/gone"
"$MOMENTCTL" commit "$mnt"
tell step begin 6
tell put gone new
tell put dir/gone new
tell put state "666"
exec 4<"$p/gone" 5<"$p/dir/gone"
rm "$p/dir/gone"
echo replaced >"$p/.tmp"
mv "$p/.tmp" "$p/gone"
# While it is open only its writer can give it up.
expect_failure 'busy' bash -c "echo rollback >'$mnt/.moment/control'"
kill -KILL "$wpid"; wait "$wpid" 2>/dev/null || true
retry 5 untorn || fail "a torn step whose files lost their names is not undone: $(cat "$mnt/.moment/step")"
assert_eq "$(cat "$p/state")/$(cat "$p/gone")" 333/replaced "after a torn step whose files lost their names"
exec 4<&- 5<&-
rm -r "$p/dir"
begin_writer
tell step begin 6
tell put state "666"
tell control rollback
step_is 'open none' || fail "the writer's own rollback: $(cat "$mnt/.moment/step")"
assert_eq "$(cat "$p/state")" 333 "the writer's own rollback"
kill -KILL "$wpid"; wait "$wpid" 2>/dev/null || true
stop_momentfs "$mnt"

# It changed names: all goes back to the last commit.
start_momentfs "$back" "$mnt" $opts
assert_eq "$(cat "$p/more")" more "what was synced"
begin_writer
tell step begin 6
tell rename state "666"
kill -KILL "$wpid"; wait "$wpid" 2>/dev/null || true
retry 5 untorn || fail "the torn step with names is not undone: $(cat "$mnt/.moment/step")"
assert_eq "$(cat "$p/state")" 333 "a file that the torn step had replaced"
[ ! -e "$p/.tmp" ] || fail "a name that the torn step made is still there"

# The mount ends inside a step: exit statuses say that something is dropped, and the log says what.
begin_writer
tell step begin 7
tell put state "777"
echo kept >"$p/kept"
kill -TERM "$momentfs_pid"
rc=0; wait "$momentfs_pid" || rc=$?
assert_eq $rc 6 "exit status of a daemon that dropped an open step"
grep -q 'step 7 was begun and not ended: .* 1 files .*dropped' "$momentfs_log" || fail "not told: $(tail -4 "$momentfs_log")"
kill -KILL "$wpid"; wait "$wpid" 2>/dev/null || true
start_momentfs "$back" "$mnt" $opts
assert_eq "$(cat "$p/state")/$(cat "$p/kept")" 333/kept "after a mount that ended inside a step"
begin_writer
tell step begin 8
tell put state "888"
expect_failure 'step' "$MOMENTCTL" umount "$mnt"
expect_failure 'step 8 was begun and not ended' "$MOMENTCTL" umount --force "$mnt"
rc=0; wait "$momentfs_pid" || rc=$?
assert_eq $rc 6 "exit status after umount --force inside a step"
kill -KILL "$wpid"; wait "$wpid" 2>/dev/null || true
