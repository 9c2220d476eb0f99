#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A C client of the session socket: 10,000 random blocks leased, written and released against a model, and read
# through the mount; killed while it holds leases; with a forked child that lives on.
. "$(dirname "$0")/../functions.sh"
requires_fuse
client=$abs_builddir/tests/mount/session_client
blocks=${MOMENT_SESSION_BLOCKS:-$([ -z "${SANITIZER:-}" ] && echo 10000 || echo 1500)}
seed=${MOMENT_SEED:-$((RANDOM * 32768 + RANDOM))}
printf 'seed %s\n' "$seed"
back=$tmp/b mnt=$tmp/m
ram=ram=1280k,block=64k,commit=off

# What the daemon says of its sessions: "<sessions> <leases> <torn>".
sessions() {
	"${PYTHON3:-/usr/bin/python3}" -c '
import json, sys
s = json.load(open(sys.argv[1] + "/.moment/status"))
s = s.get("engine", s)
print(len(s["sessions"]), sum(x["leases"] for x in s["sessions"]), s["step"]["torn"])' "$mnt"
}
pid= child=
end_clients() {
	[ -z "$pid" ] || kill -KILL "$pid"
	[ -z "$child" ] || kill -KILL "$child"
	pid= child=
}
cleanup_fn end_clients
is_torn() { [ "$(sessions)" = "0 0 True" ]; }

for io in auto threads; do
	rm -rf "$back"
	start_momentfs "$back" "$mnt" "$ram,io=$io"
	"$client" random "$back" "$mnt" "$seed" "$blocks" "$tmp/state" || fail "random, io=$io"
	[ "$(sessions)" = "0 0 False" ] || fail "left behind: $(sessions)"
	"$client" verify "$back" "$mnt" "$seed" "$tmp/state" || fail "verify, io=$io"
	stop_momentfs "$mnt"
	start_momentfs "$back" "$mnt" "$ram,io=$io"
	"$client" verify "$back" "$mnt" "$seed" "$tmp/state" || fail "verify after a remount, io=$io"

	for how in hold fork; do
		rm -f "$tmp/out"
		"$client" "$how" "$back" "$seed" "$tmp/state" >"$tmp/out" &
		pid=$!
		retry 20 grep -qs holding "$tmp/out" || fail "it never held its leases"
		child=$(cut -s -d' ' -f2 "$tmp/out")
		read -r n leases torn <<<"$(sessions)"
		[ "$n" = 1 ] && [ "$leases" -ge 6 ] && [ "$torn" = False ] || fail "holding: $(sessions)"
		kill -KILL "$pid"
		retry 1 is_torn || fail "1 s after the death of the client ($how): $(sessions)"
		wait "$pid" 2>/dev/null || true
		pid=
		[ -z "$child" ] || kill -0 "$child" || fail "the child has gone too"
		# The state is the last commit's again, child or no child.
		"$client" verify "$back" "$mnt" "$seed" "$tmp/state" || fail "after the death of a client ($how)"
		end_clients
	done
	stop_momentfs "$mnt"
	"$MOMENTCTL" fsck "$back" || fail "fsck, io=$io"
done
