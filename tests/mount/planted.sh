# SPDX-License-Identifier: Apache-2.0
# A backing's directory may be another's, or others may write to it: what somebody planted there is not followed,
# truncated, written over or read, whatever file of the backing it stands for, and the message names the file and
# the way out. Paths of any length are as good as short ones.
. "$(dirname "$0")/../functions.sh"
requires_fuse
opts=ram=16M,block=256K
mnt=$tmp/mnt
mkdir "$mnt" "$tmp/old"
"$MOMENTFS" -o $opts "$tmp/good" "$mnt"
echo content >"$mnt/params/f"
"$MOMENTCTL" umount "$mnt"

# refused NAME PATTERN [OPTIONS]: mounting $tmp/b fails for its file NAME; what it leads to is as it was.
refused() {
	expect_failure "/$1: .*($2)" "$MOMENTFS" -o "$opts${3:+,$3}" "$tmp/b" "$mnt"
	assert_eq "$(cat "$tmp/victim")" "$precious" "what $1 led to, $2"
	! mountpoint -q "$mnt" || fail "$1: mounted all the same"
}
precious=$(printf 'root:x:0:0:precious\nmore')
names="lock pool ballast catalog.sqlite catalog.sqlite-wal catalog.sqlite-shm catalog.sqlite-journal"
for name in $names; do
	for kind in link hardlink fifo dir; do
		[ $name = lock ] || [ $name = catalog.sqlite-wal ] || [[ $kind == *link ]] || continue
		rm -rf "$tmp/b"
		cp -r "$tmp/good" "$tmp/b"
		rm -f "$tmp/b/$name" "$tmp/victim"
		echo "$precious" >"$tmp/victim"
		case $kind in
		link) ln -s "$tmp/victim" "$tmp/b/$name" && refused $name 'symbolic link.*remove the link' ;;
		hardlink) ln "$tmp/victim" "$tmp/b/$name" && refused $name 'second name.*put a copy' ;;
		fifo) mkfifo "$tmp/b/$name" && refused $name 'not a regular file: remove' ;;
		dir) mkdir "$tmp/b/$name" && refused $name 'not a regular file: remove' ;;
		esac
		[ $kind != link ] || refused $name 'symbolic link' ro
	done
done
# A link that leads nowhere makes nothing where it leads.
rm -rf "$tmp/b"
mkdir "$tmp/b"
ln -s "$tmp/made" "$tmp/b/lock"
refused lock 'symbolic link'
[ ! -e "$tmp/made" ] || fail "a file was made through a dangling link"
expect_failure 'catalog.sqlite-wal: is a symbolic link' env MOMENT_QUIET=1 bash -c '
	cp -r "$1/good" "$1/c" && ln -s "$1/victim" "$1/c/catalog.sqlite-wal" && "$MOMENTCTL" fsck "$1/c"' - "$tmp"
# Hard links of a backup (rsnapshot, cp -al) can be looked at.
cp -al "$tmp/good" "$tmp/linked"
"$MOMENTFS" -o $opts,ro "$tmp/linked" "$mnt"
assert_eq "$(cat "$mnt/params/f")" content "a backup made of hard links, read-only"
"$MOMENTCTL" umount "$mnt"
rm -r "$tmp/linked"

# The socket's place: something else there stays, and the mount works without a session socket.
cp -r "$tmp/good" "$tmp/s"
echo "$precious" >"$tmp/s/session.sock"
start_momentfs "$tmp/s" "$mnt" $opts
grep -q "session.sock.*remove what is in its place" "$momentfs_log" || fail "session.sock: $(cat "$momentfs_log")"
assert_eq "$(cat "$tmp/s/session.sock")" "$precious" "a file in the socket's place"
stop_momentfs "$mnt"

# trace=FILE
ln -s "$tmp/victim" "$tmp/trace"
expect_failure 'trace=.*symbolic link' "$MOMENTFS" -o "$opts,trace=$tmp/trace" "$tmp/good" "$mnt"
assert_eq "$(cat "$tmp/victim")" "$precious" "what trace= led to"

# The directory. A group of the owner's own may write (umask 002), everybody may not, nor another's directory be used.
chmod 0777 "$tmp/good"
expect_failure 'everybody may write.*chmod go-w' "$MOMENTFS" -o $opts "$tmp/good" "$mnt"
expect_failure 'everybody may write.*chmod go-w' "$MOMENTCTL" fsck "$tmp/good"
chmod 1777 "$tmp/good"
expect_failure 'everybody may write.*chmod go-w' "$MOMENTFS" -o $opts,ro "$tmp/good" "$mnt"
chmod 0755 "$tmp/good"
if [ "$(id -u)" = 0 ]; then
	chmod 0775 "$tmp/good" # root:root
	"$MOMENTFS" -o $opts "$tmp/good" "$mnt"
	"$MOMENTCTL" umount "$mnt"
	chgrp 65533 "$tmp/good"
	expect_failure 'members of group 65533 may write.*chmod g-w' "$MOMENTFS" -o $opts "$tmp/good" "$mnt"
	chmod 0755 "$tmp/good"
	chown 65533 "$tmp/good"
	expect_failure 'belongs to uid 65533.*run it as uid 65533, or.*chown -R 0' "$MOMENTFS" -o $opts "$tmp/good" "$mnt"
	chown 0:0 "$tmp/good"
	chown 65533 "$tmp/good/pool"
	expect_failure 'good/pool: belongs to another user.*chown' "$MOMENTFS" -o $opts "$tmp/good" "$mnt"
	chown 0:0 "$tmp/good/pool"
fi

# Paths: SQLite takes 512 bytes, a socket's address 108; blanks and their like are escaped in lists of mounts.
part=$(printf 'x%.0s' $(seq 240))
odd=$'a b\tc\\d\ne#f%g?h,i\'j'
for back in "$tmp/$part/$part/$part/$odd" "$tmp/$odd"; do
	mkdir -p "${back%/*}" "$tmp/$odd.m"
	cp -r "$tmp/good" "$back"
	start_momentfs "$back" "$tmp/$odd.m" $opts
	assert_eq "$(cat "$tmp/$odd.m/params/f")" content "a backing at a path of ${#back} bytes"
	"$PYTHON3" - "$back" <<'PY' || fail "the session socket of a backing at a path of ${#back} bytes"
import os, socket, sys
os.chdir(sys.argv[1])
socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect("session.sock")
PY
	"$MOMENTCTL" status "$back" >"$tmp/out" || fail "status by the name of the backing"
	PYTHONPATH=$abs_srcdir/src/python MOMENT_LIBRARY=$abs_builddir/.libs/libmoment.so MOMENT_QUIET=1 MOMENT_DATA=mmap \
		"$PYTHON3" - "$back" <<'PY' || fail "the mount of a backing at a path of ${#back} bytes is not found"
import sys
from momentfs.session import Session
Session(backing=sys.argv[1]).close()
PY
	stop_momentfs "$tmp/$odd.m"
	"$MOMENTCTL" fsck "$back" || fail "fsck of a backing at a path of ${#back} bytes"
done
kill_test=$tmp/$part/$part/$part/killed
start_momentfs "$kill_test" "$mnt" $opts
echo more >"$mnt/params/f"
"$MOMENTCTL" commit "$mnt"
kill_momentfs "$mnt"
start_momentfs "$kill_test" "$mnt" $opts,ro # with a WAL, read through a copy
assert_eq "$(cat "$mnt/params/f")" more "read-only after a kill, at a path of ${#kill_test} bytes"
stop_momentfs "$mnt"
