# SPDX-License-Identifier: Apache-2.0
# Wrong calls get a message that names the thing, a documented exit status, and do no harm (issue A, case A15).
. "$(dirname "$0")/../functions.sh"
requires_fuse
mnt=$tmp/mnt
back=$tmp/backing
mkdir "$mnt"

# refuses STATUS PATTERN ARG...: momentfs must end with that status and say so, quickly, without mounting.
refuses() {
	local status=$1 pattern=$2 rc=0 out start=$SECONDS
	shift 2
	out=$(timeout 20 "$MOMENTFS" "$@" 2>&1) || rc=$?
	assert_eq "$rc" "$status" "exit status of: momentfs $* ($out)"
	grep -Eqi -- "$pattern" <<<"$out" || fail "momentfs $*: message does not match /$pattern/: $out"
	[ $((SECONDS - start)) -le 3 ] || fail "momentfs $*: took $((SECONDS - start)) s"
	! mountpoint -q "$mnt" || fail "momentfs $*: has mounted"
}

# --- 1: usage
refuses 1 'BACKING and MOUNTPOINT are missing'
refuses 1 'MOUNTPOINT is missing' "$back"
refuses 1 "too many: 'c'" a b c
refuses 1 'empty string' '' "$mnt"
refuses 1 'usage' -z "$back" "$mnt"
refuses 1 "unknown option 'rma=1G'.*ram, block" -o rma=1G "$back" "$mnt"
refuses 1 'option ram needs a value' -o ram "$back" "$mnt"
refuses 1 'option ro takes no value' -o ro=1 "$back" "$mnt"
for bad in ram=12Q ram=-1 ram=0 ram= ram=200% ram=x ram=0x10 size=abc size=99999999999G block=3M block=4K block=1G \
	commit=0 commit=-5 commit=1.5 commit=never io=fast direct=maybe hugepages=yes; do
	refuses 1 "option ${bad%%=*}=.*allowed: " -o "$bad" "$back" "$mnt"
done
refuses 1 'remount: not possible' -o remount,ro "$back" "$mnt"
[ ! -e "$back" ] || fail "a wrong call has made the backing"

# --- 2: BACKING
echo text >"$tmp/file"
refuses 2 'file.*not a directory' "$tmp/file" "$mnt"
mkdir "$tmp/full"
echo precious >"$tmp/full/thesis.txt"
refuses 2 'full.*not empty.*thesis.txt' "$tmp/full" "$mnt"
assert_eq "$(ls "$tmp/full")" thesis.txt "what is in the folder"
refuses 2 'does not exist' "$tmp/no/such/folder" "$mnt"
refuses 2 "lies inside MOUNTPOINT" "$mnt/backing" "$mnt"
refuses 2 "lies inside MOUNTPOINT" "$mnt" "$mnt"
refuses 2 "MOUNTPOINT $mnt lies inside it" "$tmp" "$mnt"
ln -s "$mnt" "$tmp/link"
refuses 2 "lies inside MOUNTPOINT" "$tmp/link/backing" "$mnt"
refuses 2 'ram.*too small.*block=' -o ram=1M "$back" "$mnt"
refuses 2 'ram.*(memory|available|machine)' -o ram=900T "$back" "$mnt"
rm -rf "$back"
if [ "$(id -u)" = 0 ]; then
	mkdir "$tmp/ro"
	mount -t tmpfs -o ro none "$tmp/ro"
	cleanup_fn umount "$tmp/ro"
	refuses 2 'read-only' "$tmp/ro/backing" "$mnt"
fi

# in use, of another block size, of a newer format, damaged
start_momentfs "$back" "$mnt" ram=16M,block=256K
mkdir "$tmp/mnt2"
rc=0
out=$("$MOMENTFS" -o ram=16M "$back" "$tmp/mnt2" 2>&1) || rc=$?
assert_eq $rc 2 "status: in use"
grep -q "in use by momentfs on $mnt (pid $momentfs_pid" <<<"$out" || fail "in use by whom? $out"
rc=0
out=$("$MOMENTFS" -o ram=16M "$tmp/backing2" "$mnt" 2>&1) || rc=$?
assert_eq $rc 3 "status: mounted already"
grep -q "momentfs is mounted there already, of $back" <<<"$out" || fail "mounted already: $out"
rc=0
out=$("$MOMENTFS" -o ram=16M "$mnt/params/inner" "$tmp/mnt2" 2>&1) || rc=$?
assert_eq $rc 2 "status: backing in a mount"
grep -q "lies inside the momentfs mount at $mnt" <<<"$out" || fail "backing in a mount: $out"
echo intact >"$mnt/params/f"
stop_momentfs "$mnt"
refuses 2 'block' -o ram=16M,block=512K "$back" "$mnt"

cp -r "$back" "$tmp/newer"
"${PYTHON3:-/usr/bin/python3}" - "$tmp/newer/catalog.sqlite" <<'PY'
import sqlite3, sys
db = sqlite3.connect(sys.argv[1])
v = db.execute("PRAGMA user_version").fetchone()[0]
db.execute(f"PRAGMA user_version = {v + 1000}")
db.commit()
PY
refuses 2 'newer|version|format' "$tmp/newer" "$mnt"
cp -r "$back" "$tmp/damaged"
dd if=/dev/urandom of="$tmp/damaged/catalog.sqlite" bs=1024 count=8 conv=notrunc status=none
refuses 2 'damaged|corrupt' "$tmp/damaged" "$mnt"
cp -r "$back" "$tmp/nopool"
rm "$tmp/nopool/pool"
refuses 2 'pool' "$tmp/nopool" "$mnt"

# --- 3: MOUNTPOINT
refuses 3 'does not exist.*mkdir' "$back" "$tmp/nothing"
refuses 3 'not a directory' "$back" "$tmp/file"
refuses 3 "not empty.*thesis.txt" "$back" "$tmp/full"

# --- 4: no FUSE. Each cause its own message (in a mount namespace of its own).
if [ "$(id -u)" = 0 ] && command -v unshare setpriv >/dev/null; then
	in_ns() { private_mounts bash -c "$1" _ "$MOMENTFS" "$back" "$mnt" "$tmp"; }
	mkdir "$tmp/dev"
	no_fuse() { # PATTERN SCRIPT
		local rc=0 out start=$SECONDS
		out=$(in_ns "$2" 2>&1) || rc=$?
		assert_eq "$rc" 4 "exit status without FUSE ($1): $out"
		grep -Eqi -- "$1" <<<"$out" || fail "message does not match /$1/: $out"
		[ $((SECONDS - start)) -le 2 ] || fail "took $((SECONDS - start)) s: $1"
	}
	no_fuse 'no /dev/fuse.*modprobe fuse.*--device /dev/fuse' 'mount -t tmpfs none /dev; "$1" "$2" "$3"'
	chmod 0755 "$tmp" "$mnt"
	mknod -m 0600 "$tmp/fuse0600" c 10 229
	mknod -m 0666 "$tmp/fuse0666" c 10 229
	user='setpriv --reuid=65534 --regid=65534 --clear-groups'
	mkdir "$tmp/user"
	chown 65534 "$tmp/user" "$mnt"
	no_fuse 'no permission to open /dev/fuse.*0600' \
		'mount --bind "$4/fuse0600" /dev/fuse; exec '"$user"' "$1" "$4/user/b" "$3"'
	no_fuse 'fusermount3 not found.*fuse3' \
		'mount --bind "$4/fuse0666" /dev/fuse; mount --bind /dev/null "$(command -v fusermount3)"
		[ ! -e /bin/fusermount3 ] || [ ! -x /bin/fusermount3 ] || mount --bind /dev/null /bin/fusermount3
		exec '"$user"' "$1" "$4/user/b" "$3"'
	no_fuse 'CAP_SYS_ADMIN.*--cap-add SYS_ADMIN' 'exec setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin "$1" "$2" "$3"'
	no_fuse 'no_new_privs|not setuid' \
		'mount --bind "$4/fuse0666" /dev/fuse; exec '"$user"' --no-new-privs "$1" "$4/user/b" "$3"'
	no_fuse 'allow_other.*user_allow_other' \
		'mount --bind "$4/fuse0666" /dev/fuse; mount --bind /dev/null /etc/fuse.conf
		exec '"$user"' "$1" -o allow_other "$4/user/b" "$3"'
	rm "$tmp/fuse0600" "$tmp/fuse0666"
	chown 0 "$mnt"
fi

# What fstab and mount(8) say besides is nobody's business, in both orders; and nothing was harmed.
start_momentfs "$back" "$mnt" ram=16M,auto,noauto,user,nofail,_netdev,rw,nosuid,nodev,defaults,x-systemd.automount,noatime
assert_eq "$(cat "$mnt/params/f")" intact "content after all this"
stop_momentfs "$mnt"
ln -s "$MOMENTFS" "$tmp/mount.momentfs"
"$tmp/mount.momentfs" "$back" "$mnt" -n -o rw,ram=16M || fail "as mount.momentfs"
assert_eq "$(cat "$mnt/params/f")" intact "content, through mount.momentfs"
"$MOMENTCTL" umount "$mnt"
"$tmp/mount.momentfs" -f "$back" "$mnt" && ! mountpoint -q "$mnt" || fail "mount -f is a dry run"
