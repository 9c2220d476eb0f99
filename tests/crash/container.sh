#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Inside a memory limit (case A17): state several times as large as the limit is trained, daemon and trainer in one
# control group, then each in one of its own; nobody is killed for memory, every element is right, and a RAM tier
# that is larger than the limit is refused in words.
# One Llama-3.2-1B layer under 192 MiB for 3 steps; with MOMENT_CRASH=full four layers (243,286,016 elements,
# 1.8 GiB of state) under 512 MiB for 10 steps.
. "$(dirname "$0")/../functions.sh"
requires_root
requires_fuse

case ${MOMENT_CRASH:-} in
full) layers=0-3 limit=512 steps=10 ;;
*) layers=0 limit=192 steps=3 ;;
esac
mnt=$tmp/mnt
container=$abs_builddir/tests/crash/container

# --- a control group of either version, below our own ---
own=$(awk -F: '$2 == "memory" { print $3 }' /proc/self/cgroup)
if [ -n "$own" ] && [ -d /sys/fs/cgroup/memory ]; then
	groups=/sys/fs/cgroup/memory${own%/} max=memory.limit_in_bytes swap=memory.memsw.limit_in_bytes
	swapmax=$((limit << 20)) kills=memory.oom_control peak=memory.max_usage_in_bytes
	[ -d "$groups" ] || groups=/sys/fs/cgroup/memory
else
	own=$(awk -F: '$1 == 0 { print $3 }' /proc/self/cgroup)
	groups=/sys/fs/cgroup${own%/} max=memory.max swap=memory.swap.max swapmax=0 kills=memory.events
	peak=memory.peak
	[ -d "$groups" ] || groups=/sys/fs/cgroup
fi

# Not skip(): that this may be done in a container is more than CI can be asked for.
no_groups() { echo "SKIP: $1" >&2; exit 77; }
# group NAME: makes it; its folder is in $group.
group() {
	group=$groups/momentfs-test.$$.$1
	mkdir "$group" 2>/dev/null || no_groups "no control group can be made in $groups"
	cleanup_fn eval "retry 10 rmdir '$group' 2>/dev/null"
	echo $((limit << 20)) >"$group/$max" 2>/dev/null || no_groups "no memory limit can be set in $groups"
	echo "$swapmax" >"$group/$swap" 2>/dev/null || true # where swap is not counted there is none to hide in
}
# within GROUP COMMAND...: runs it there.
within() {
	local g=$1
	shift
	sh -c 'echo $$ >"$1/cgroup.procs" && shift && exec "$@"' sh "$g" "$@"
}
no_kills() {
	local k
	k=$(awk '$1 == "oom_kill" { print $2 }' "$1/$kills")
	[ "${k:-0}" = 0 ] || fail "$k processes were killed for memory $2"
}

# mount_in GROUP OPTIONS: start_momentfs there.
mount_in() {
	cat >"$tmp/momentfs-in" <<-'SH'
		#!/bin/sh
		echo $$ >"$GROUP/cgroup.procs" && exec "$REAL" "$@"
	SH
	chmod +x "$tmp/momentfs-in"
	GROUP=$1 REAL=$MOMENTFS MOMENTFS=$tmp/momentfs-in start_momentfs "$tmp/back" "$mnt" "$2"
}
# train GROUP STEPS
train() {
	timeout 500 sh -c 'echo $$ >"$1/cgroup.procs" && shift && exec "$@"' sh "$1" \
		"$container" --mount "$mnt" --model "$tmp/model.tsv" --steps "$2" || fail "training ended with $?"
}
tier() { status_of "$mnt" ram.bytes; }

awk -v l="$layers" -F '\t' '$1 ~ "^model\\.layers\\.[" l "]\\."' "$abs_srcdir/tests/data/llama-3.2-1b.tsv" >"$tmp/model.tsv"

group both
both=$group
mount_in "$both" ""
[ "$(tier)" -lt $((limit << 20)) ] || fail "a tier of $(tier) bytes under a limit of $limit MiB"
echo "limit $limit MiB, tier $(($(tier) >> 20)) MiB"
train "$both" "$steps"
no_kills "$both" "in one group"
if [ -e "$both/$peak" ]; then
	echo "at most $(($(cat "$both/$peak") >> 20)) MiB were used"
	[ "$(cat "$both/$peak")" -gt "$(tier)" ] || fail "that is less than the tier: the test is wrong"
fi
stop_momentfs "$mnt"

expect_failure 'ram=8.*does not fit' within "$both" "$MOMENTFS" -f -o ram=8G "$tmp/back" "$mnt"

group daemon
mount_in "$group" ""
daemon=$group
group trainer
train "$group" $((steps + 1))
no_kills "$daemon" "in the daemon's group"
no_kills "$group" "in the trainer's group"
stop_momentfs "$mnt"
