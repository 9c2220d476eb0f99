# SPDX-License-Identifier: Apache-2.0
# A full pool: ENOSPC when bytes are written, never later; what was there is intact; the space can be used again
# after a delete and a commit.
. "$(dirname "$0")/../functions.sh"
requires_fuse
mnt=$tmp/mnt

start_momentfs "$tmp/backing" "$mnt" ram=16M,block=256K,size=64M
p=$mnt/params
head -c 20000000 /dev/urandom >"$tmp/first"
cp "$tmp/first" "$p/first"
"$MOMENTCTL" commit "$mnt"
avail=$(stat -f -c '%a' "$mnt")
[ $((avail * 4096)) -lt 50000000 ] || fail "statfs shows $avail units free of a 64 MiB pool"

expect_failure 'no space left' dd if=/dev/zero of="$p/second" bs=1M count=100 status=none
wrote=$(stat -c %s "$p/second")
[ "$wrote" -ge 10000000 ] || fail "only $wrote bytes fit"
expect_failure 'no space left' fallocate -l 40M "$p/third"
cmp "$tmp/first" "$p/first" || fail "ENOSPC has damaged another file"
cmp -n "$wrote" "$p/second" /dev/zero || fail "bytes that were accepted are not there"
"$MOMENTCTL" commit "$mnt" || fail "what was accepted cannot be committed"
mkdir "$p/still" || fail "names cannot be made on a full pool"
rmdir "$p/still"

rm "$p/second"
"$MOMENTCTL" commit "$mnt"
head -c 20000000 /dev/urandom >"$tmp/again"
cp "$tmp/again" "$p/again" || fail "the space of a removed file cannot be used again"
for i in 1 2 3 4 5 6; do # the same place over and over: no leak
	rm "$p/again"
	cp "$tmp/again" "$p/again" || fail "round $i: the space is lost"
done
stop_momentfs "$mnt"
start_momentfs "$tmp/backing" "$mnt" ram=16M,size=64M
cmp "$tmp/first" "$p/first"
cmp "$tmp/again" "$p/again"
# A larger pool is a matter of mounting.
stop_momentfs "$mnt"
start_momentfs "$tmp/backing" "$mnt" ram=16M,size=128M
head -c 60000000 /dev/zero >"$p/more" || fail "size=128M does not give more room"
stop_momentfs "$mnt"
