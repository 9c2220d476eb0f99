#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# momentctl fsck: exit statuses, lines, JSON. What it finds is test_fsck.c's to prove.
. "$(dirname "$0")/../functions.sh"
back=$tmp/back
mkdir "$back"
"$abs_builddir/tests/unit/test_fsck" --make "$back" || fail "no backing was made"

# Runs fsck; $status and $out.
check() { status=0; out=$("$MOMENTCTL" fsck "$@" 2>&1) || status=$?; }

check "$back"
[ $status = 0 ] || fail "a good backing: exit $status: $out"
[[ $out == *"commit 2, 3 files, 3 directories"*clean ]] || fail "a good backing: $out"
check --json "$back"
[ $status = 0 ] || fail "--json: exit $status"
"$PYTHON3" - "$out" <<'PY' || fail "--json: $out"
import json, sys
r = json.loads(sys.argv[1])
assert r["problems"] == [] and r["problems_found"] == 0, r
assert (r["files"], r["directories"], r["extents"], r["bytes_checked"]) == (3, 3, 6, 49152), r
assert (r["commit"], r["step"]) == (2, 41), r
PY

# Damaged data: listed, and nothing to be done about it.
cp -r "$back" "$tmp/bad"
printf X | dd of="$tmp/bad/pool" bs=1 seek=70000 conv=notrunc status=none
check --json "$tmp/bad"
[ $status = 1 ] || fail "damaged data: exit $status: $out"
"$PYTHON3" - "$out" <<'PY' || fail "damaged data: $out"
import json, sys
p, = json.loads(sys.argv[1])["problems"]
assert (p["kind"], p["path"], p["inode"], p["fix"], p["fixed"]) == ("data", "d/f", 4, "", False), p
PY
check --no-data "$tmp/bad"
[ $status = 0 ] || fail "--no-data: exit $status: $out"

# What can be mended: said before, done with --repair, gone afterwards.
: >"$back/catalog.sqlite.new"
check "$back"
[ $status = 1 ] && [[ $out == *"[--repair would: remove the file]"* ]] || fail "leftover: exit $status: $out"
check --repair "$back"
[ $status = 0 ] && [[ $out == *"[repaired: remove the file]"* ]] || fail "repair: exit $status: $out"
check "$back"
[ $status = 0 ] || fail "after the repair: exit $status: $out"

# It could not run.
check "$tmp/nowhere"
[ $status = 2 ] && [[ $out == *"$tmp/nowhere"* ]] || fail "no such folder: exit $status: $out"
mkdir "$tmp/empty"
check "$tmp/empty"
[ $status = 2 ] && [[ $out == *"not a momentfs backing"* ]] || fail "empty folder: exit $status: $out"
check
[ $status = 2 ] || fail "no argument: exit $status: $out"
check --json "$tmp/empty" 2>/dev/null
[ $status = 2 ] || fail "--json without a backing: exit $status"
check --help
[ $status = 0 ] && [[ $out == *--repair* ]] || fail "--help: exit $status: $out"
