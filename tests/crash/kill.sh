#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# kill -9 at random moments of a training loop: of the daemon, of the trainer (by session and by mmap), of a
# trainer with the engine in its own process. Whoever starts next must find, bit for bit, the state of one whole step,
# no older than the last commit that had returned; training then goes on from it, and ends with the bits of an
# undisturbed run.
#	kill.sh [--kills N] [--seed N]		default: 12 kills, 50 with MOMENT_CRASH=full (tools/check)
. "$(dirname "$0")/../functions.sh"

kills=12 seed=$$
[ "${MOMENT_CRASH:-}" != full ] || kills=50
while [ $# -gt 0 ]; do
	case $1 in
	--kills) kills=$2 ;;
	--seed) seed=$2 ;;
	*) fail "unknown option $1" ;;
	esac
	shift 2
done
RANDOM=$seed
echo "seed $seed, $kills kills"

train=$abs_builddir/tests/crash/train
[ -x "$train" ] || fail "$train is not built"
victims=(embedded)
if [ -c /dev/fuse ] && [ -r /dev/fuse ] && [ -w /dev/fuse ]; then
	victims=(daemon trainer embedded mmap)
else
	echo "no /dev/fuse: only embedded trainers"
fi

mnt=$tmp/mnt
mkdir "$mnt"
daemon=
cleanup_fn eval '[ -z "$daemon" ] || kill -KILL "$daemon"; umount -l "$mnt" 2>/dev/null'

_serving() { [ -e "$mnt/.moment/status" ] || _gone "$daemon"; }

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

stop_daemon() {
	[ -n "$daemon" ] || return 0
	"$MOMENTCTL" umount "$mnt" || fail "momentctl umount"
	wait "$daemon" || fail "the daemon ended with $?"
	daemon=
}

# The last commit that returned, by the trainer's log.
last_commit() { awk '$1 == "committed" { c = $2 } $1 == "start" { c = $2 } END { print c + 0 }' "$tmp/log"; }

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
		fail "kill $i ($victim): the trainer ended with $1"
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

finish() {
	local end=$(($(last_commit) + 20))
	[ "$victim" = mmap ] && [ "$rolled" = no ] || victim=${victims[RANDOM % ${#victims[@]}]}
	where
	"$train" "${at[@]}" --steps "$end" --at-least "$(last_commit)" --log "$tmp/log" 2>"$tmp/err" ||
		{ cat "$tmp/err" >&2; fail "after the kills ($victim): the run to step $end ended with $?"; }
	stop_daemon
	rm -rf "$backing"
}

i=0 round=0 steps=0 victim=none rolled=yes
while [ "$i" -lt "$kills" ]; do
	if [ $((i % 40)) = 0 ]; then
		if [ "$i" -gt 0 ]; then steps=$((steps + $(last_commit))); finish; fi
		round=$((round + 1))
		backing=$tmp/backing$round
		: >"$tmp/log"
	fi
	i=$((i + 1))
	# After a killed mmap trainer without a rollback the next one has to be its like.
	[ "$victim" = mmap ] && [ "$rolled" = no ] || victim=${victims[i % ${#victims[@]}]}
	where
	"$train" "${at[@]}" --steps $(($(last_commit) + 300)) --at-least "$(last_commit)" --log "$tmp/log" \
		--pause $((RANDOM % 3000)) 2>"$tmp/err" &
	pid=$!
	sleep "0.$(printf %03d $((RANDOM % 900)))"
	if [ "$victim" = daemon ]; then
		kill -KILL "$daemon"
		wait "$daemon" 2>/dev/null || true
		daemon=
	else
		kill -KILL "$pid" 2>/dev/null || true
	fi
	rc=0
	wait "$pid" 2>/dev/null || rc=$?
	check_end "$rc"
	# Nobody can tell that the writer of a plain bracket is dead: a session says what to do, and that helps.
	rolled=no
	if [ "$victim" = mmap ] && [ $((RANDOM % 2)) = 0 ]; then
		retry 10 "$MOMENTCTL" rollback "$mnt" || fail "kill $i: momentctl rollback"
		rolled=yes
	fi
done
steps=$((steps + $(last_commit)))
finish
echo "$kills kills, $steps steps committed"
