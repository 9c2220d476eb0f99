#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# kill -9 at random moments of a training loop: of the daemon, of the trainer (by session and by mmap), of a
# trainer with the engine in its own process. Whoever starts next must find, bit for bit, the state of one whole step,
# no older than the last commit that had returned; training then goes on from it, and ends with the bits of an
# undisturbed run. The trainer is a C program (train.c), then PyTorch with momentfs.torch.AdamW (train.py).
#	kill.sh [--kills N] [--seed N]		N: kills of each; default 12 and 5, 50 and 50 with MOMENT_CRASH=full (tools/check)
. "$(dirname "$0")/../functions.sh"

kills=12 torch_kills=5 seed=$$
[ "${MOMENT_CRASH:-}" != full ] || kills=50 torch_kills=50
while [ $# -gt 0 ]; do
	case $1 in
	--kills) kills=$2 torch_kills=$2 ;;
	--seed) seed=$2 ;;
	*) fail "unknown option $1" ;;
	esac
	shift 2
done
RANDOM=$seed
echo "seed $seed"

train=$abs_builddir/tests/crash/train
[ -x "$train" ] || fail "$train is not built"
fuse=no
if [ -c /dev/fuse ] && [ -r /dev/fuse ] && [ -w /dev/fuse ]; then
	fuse=yes
else
	echo "no /dev/fuse: only embedded trainers"
fi

mnt=$tmp/mnt
mkdir "$mnt"
daemon=
cleanup_fn eval '[ -z "$daemon" ] || kill -KILL "$daemon"; umount -l "$mnt" 2>/dev/null'

# Read, not only looked for: of a dead mount the kernel may still know that the file was there.
_serving() { grep -q . "$mnt/.moment/status" 2>/dev/null || _gone "$daemon"; }

# The mount that a killed daemon left is its successor's to clear.
start_daemon() {
	"$MOMENTFS" -f -o ram=2M,block=64K,commit=1 "$backing" "$mnt" >>"$tmp/daemon.log" 2>&1 &
	daemon=$!
	retry 20 _serving || fail "the daemon does not serve within 20 s"
	if _gone "$daemon"; then
		tail -n 20 "$tmp/daemon.log" >&2
		fail "the daemon does not start again"
	fi
}

# A step that the trainer was killed in is dropped, which the exit statuses tell as well.
_unmounted() { "$MOMENTCTL" umount "$mnt" 2>"$tmp/umount" || grep -q 'was begun and not ended' "$tmp/umount"; }

stop_daemon() {
	local rc=0
	[ -n "$daemon" ] || return 0
	# A trainer's end is noticed a moment after it.
	retry 5 _unmounted || { cat "$tmp/umount" >&2; fail "momentctl umount"; }
	wait "$daemon" || rc=$?
	[ "$rc" = 0 ] || { [ "$rc" = 6 ] && [ -s "$tmp/umount" ]; } || fail "the daemon ended with $rc"
	daemon=
}

# The last commit that returned, by the trainer's log.
last_commit() { awk '$1 == "committed" { c = $2 } $1 == "start" { c = $2 } END { print c + 0 }' "$tmp/log"; }

# ---- the two trainers: launch ARG... sets pid, await sets rc ----

launch_c() {
	"$train" "$@" 2>"$tmp/err" &
	pid=$!
}

await_c() {
	rc=0
	wait "$pid" 2>/dev/null || rc=$?
}

# Torch is imported once, by a process that forks the trainers.
launch_torch() {
	: >"$tmp/err"
	echo "$@" --oracle "$tmp/oracle" --err "$tmp/err" >&"${server[1]}"
	read -r -t 60 pid <&"${server[0]}" || { cat "$tmp/server.err" >&2; fail "train.py --serve has ended"; }
}

await_torch() { read -r -t 300 rc <&"${server[0]}" || fail "no news of the trainer (pid $pid) for 300 s"; }

launch() { "launch_$kind" "$@"; }
await() { "await_$kind"; }

# ---- rounds ----

# check_end STATUS: how a trainer may end that was, or whose daemon was, killed.
check_end() {
	case $1 in
	0 | 137) ;;
	3)
		[ "$victim" = daemon ] || { cat "$tmp/err" >&2; fail "kill $i ($victim): the trainer met an error"; }
		grep -qi 'daemon\|momentfs' "$tmp/err" || { cat "$tmp/err" >&2; fail "the message does not name the daemon"; }
		;;
	*)
		cat "$tmp/err" >&2
		fail "kill $i ($kind, $victim): the trainer ended with $1"
		;;
	esac
}

where() {
	case $victim in
	embedded) stop_daemon; at=(--backing "$backing" --data embedded) ;;
	mmap) [ -n "$daemon" ] || start_daemon; at=(--mount "$mnt" --data mmap) ;;
	*) [ -n "$daemon" ] || start_daemon; at=(--mount "$mnt" --data session) ;;
	esac
}

# Undisturbed to the end: the last judgement.
finish() {
	local end=$(($(last_commit) + 20))
	[ "$end" -le "$longest" ] || end=$longest
	steps=$((steps + $(last_commit)))
	[ "$victim" = mmap ] && [ "$rolled" = no ] || victim=${victims[RANDOM % ${#victims[@]}]}
	where
	launch "${at[@]}" --steps "$end" --at-least "$(last_commit)" --log "$tmp/log"
	await
	[ "$rc" = 0 ] || { cat "$tmp/err" >&2; fail "after the kills ($kind, $victim): the run to step $end ended with $rc"; }
	stop_daemon
	rm -rf "$backing"
}

# One kill, after at most $1 ms.
kill_once() {
	local end=$(($(last_commit) + 300))
	[ "$end" -le "$longest" ] || end=$longest
	# After a killed mmap trainer without a rollback the next one has to be its like.
	[ "$victim" = mmap ] && [ "$rolled" = no ] || victim=${victims[i % ${#victims[@]}]}
	where
	launch "${at[@]}" --steps "$end" --at-least "$(last_commit)" --log "$tmp/log" --pause $((RANDOM % 3000))
	sleep "0.$(printf %03d $((RANDOM % $1)))"
	if [ "$victim" = daemon ]; then
		kill -KILL "$daemon"
		wait "$daemon" 2>/dev/null || true
		daemon=
	else
		kill -KILL "$pid" 2>/dev/null || true
	fi
	await
	check_end "$rc"
	# Nobody can tell that the writer of a plain bracket is dead: a session says what to do, and that helps.
	rolled=no
	if [ "$victim" = mmap ] && [ $((RANDOM % 2)) = 0 ]; then
		retry 10 "$MOMENTCTL" rollback "$mnt" 2>"$tmp/rollback" ||
			{ cat "$tmp/rollback" >&2; fail "kill $i: momentctl rollback"; }
		rolled=yes
	fi
}

# rounds KIND KILLS LONGEST EACH VICTIM...: a new backing after EACH kills, or when a trainer got to step LONGEST.
rounds() {
	local each=$4
	kind=$1 longest=$3 steps=0 victim=none rolled=yes i=0
	local n=$2 round=0
	shift 4
	victims=("$@")
	while [ "$i" -lt "$n" ]; do
		if [ "$round" = 0 ] || [ $((i % each)) = 0 ] || [ "$(last_commit)" -ge "$longest" ]; then
			[ "$round" = 0 ] || finish
			round=$((round + 1))
			backing=$tmp/backing-$kind-$round
			: >"$tmp/log"
		fi
		i=$((i + 1))
		# Every third PyTorch trainer is killed while it begins: finds the state, registers, reads its weights.
		if [ "$kind" = torch ] && [ $((RANDOM % 3)) = 0 ]; then kill_once 150; else kill_once 999; fi
	done
	finish
	echo "$kind: $n kills, $steps steps committed"
}

if [ "$fuse" = yes ]; then all=(daemon trainer embedded); else all=(embedded); fi
mmap=()
[ "$fuse" = no ] || mmap=(mmap)
rounds c "$kills" 1000000000 40 "${all[@]}" "${mmap[@]}"

PYTHON3=${PYTHON3:-/usr/bin/python3}
if ! "$PYTHON3" -c 'import torch' 2>/dev/null; then
	[ "${CI:-}" != true ] || fail "CI=true, but there is no Python module torch"
	echo "no Python module torch (tools/setup installs it): no PyTorch trainers"
	exit 0
fi
export LIBMOMENT=${LIBMOMENT:-$abs_builddir/.libs/libmoment.so} PYTHONDONTWRITEBYTECODE=1 TMPDIR=$tmp
length=$((torch_kills < 50 ? 60 : 200))
coproc server { exec "$PYTHON3" "$abs_srcdir/tests/crash/train.py" --serve 2>>"$tmp/server.err"; }
server_pid=$!
cleanup_fn eval 'kill -KILL "$server_pid" 2>/dev/null'
kind=torch
launch --steps "$length"
await
[ "$rc" = 0 ] || { cat "$tmp/err" >&2; fail "the undisturbed run ended with $rc"; }
rounds torch "$torch_kills" "$length" 20 "${all[@]}"
