# SPDX-License-Identifier: Apache-2.0
# Files of a backing that go while it is in use: commits fail and say why, nobody else gets in, and what is put back is
# taken again. Room that a pool has lost is taken again at the mount. Errors that are alike are few lines in the log.
. "$(dirname "$0")/../functions.sh"
requires_fuse
mnt=$tmp/mnt
b=$tmp/backing

start_momentfs "$b" "$mnt" ram=16M,block=64K,commit=off
p=$mnt/params
echo one >"$p/f"
sync "$p/f"

for name in pool catalog.sqlite catalog.sqlite-wal; do
	mv "$b/$name" "$tmp/away"
	expect_failure 'input/output error' "$MOMENTCTL" commit "$mnt" # with nothing to commit, too
	echo "$name" >"$p/f"
	expect_failure 'input/output error' sync "$p/f"
	cp "$tmp/away" "$b/$name" # another file of that name
	expect_failure 'input/output error' sync "$p/f"
	rc=0
	"$MOMENTCTL" umount "$mnt" 2>"$tmp/err" || rc=$?
	assert_eq $rc 1 "umount without $name"
	mv "$tmp/away" "$b/$name"
	sync "$p/f" || fail "$name is back, and still nothing can be committed"
done

# The lock is more than a file that can be removed.
rm "$b/lock"
mkdir -p "$tmp/other"
expect_failure 'in use' "$MOMENTFS" -o ro,ram=16M "$b" "$tmp/other"
expect_failure 'in use' "$MOMENTFS" -o ram=16M "$b" "$tmp/other"
expect_failure 'in use' "$MOMENTCTL" fsck "$b"
echo last >"$p/f"
stop_momentfs "$mnt"
"$MOMENTCTL" fsck "$b" >/dev/null || fail "fsck finds damage"

# Holes in the pool: the room is taken again.
start_momentfs "$b" "$mnt" ram=16M,commit=off
assert_eq "$(cat "$p/f")" last "content after all that"
head -c 3000000 /dev/zero >"$p/zeros"
stop_momentfs "$mnt"
if fallocate -d "$b/pool" && [ "$(($(stat -c '%b * 512' "$b/pool")))" -lt "$(stat -c %s "$b/pool")" ]; then
	start_momentfs "$b" "$mnt" ram=16M,commit=off
	[ "$(($(stat -c '%b * 512' "$b/pool")))" -ge "$(stat -c %s "$b/pool")" ] || fail "the room was not taken again"
	assert_eq "$(status_of "$mnt" pool.unreserved_bytes)" 0 "unreserved bytes"
	cmp -n 3000000 "$p/zeros" /dev/zero
	stop_momentfs "$mnt"
fi

# A drive that fails for every block is a few lines.
export MOMENT_FAULTS=seed=7,write.error=EIO:1
start_momentfs "$b" "$mnt" ram=16M,commit=off
unset MOMENT_FAULTS
head -c 8000000 /dev/urandom >"$p/many" || true
for i in 1 2 3; do "$MOMENTCTL" commit "$mnt" 2>/dev/null && fail "a commit to a drive that takes nothing"; done
lines=$(grep -c 'write error' "$tmp"/*.log || true)
[ "$(grep -h 'write error' "$tmp"/*.log | wc -l)" -le 8 ] || fail "too many lines: $lines"
"$MOMENTCTL" umount --force "$mnt" 2>/dev/null || true
