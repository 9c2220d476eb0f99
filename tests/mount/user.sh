# SPDX-License-Identifier: Apache-2.0
# An ordinary user: mounts, works, unmounts; another user is kept out; allow_other lets him in as the modes say.
. "$(dirname "$0")/../functions.sh"
requires_fuse
requires rsync tar
if [ "$(id -u)" != 0 ]; then
	skip "needs root, to become two other users"
fi
mkdir -m 0755 "$tmp/own"
chown 65534:65534 "$tmp/own"
chmod 0755 "$tmp"

cat >"$tmp/user.sh" <<'SH'
set -eu -o pipefail
cd "$1"
fail() { echo "FAIL: $*" >&2; exit 1; }
mkdir mnt
"$MOMENTFS" -o ram=16M,block=256K "$1/backing" "$1/mnt" 2>err || fail "mounting as a user: $(cat err)"
trap 'fusermount3 -u -z -q "$1/mnt" || true' EXIT
head -c 20000000 /dev/urandom >ref
cp ref mnt/params/a
[ "$(stat -c %u mnt/params/a)" = "$(id -u)" ] || fail "owner"
"$MOMENTCTL" commit mnt
cmp ref mnt/params/a
tar -C mnt/params -cf - a | tar -xOf - | cmp - ref
rsync -a mnt/params/ copy/ && cmp ref copy/a
python=${PYTHON3:-/usr/bin/python3}
$python "$abs_srcdir/tests/mount/tour_steps.py" "$1/mnt" 262144 >/dev/null || fail "the tour as a user"
[ "$(stat -c %a backing/session.sock)" = 600 ] || fail "mode of the socket"
"$MOMENTCTL" umount mnt || fail "umount as a user"
"$MOMENTFS" -o ram=16M backing mnt
cmp ref mnt/params/a || fail "content after a remount"
pid=$($python -c 'import json; print(json.load(open("mnt/.moment/status"))["mount"]["pid"])')
kill -TERM "$pid"
for i in $(seq 100); do mountpoint -q mnt || break; sleep 0.05; done
! mountpoint -q mnt || fail "SIGTERM does not detach a user's mount"
for i in $(seq 100); do "$MOMENTFS" -o ram=16M backing mnt && break; sleep 0.05; done
cmp ref mnt/params/a || fail "content after SIGTERM"
# a dead one
pid=$($python -c 'import json; print(json.load(open("mnt/.moment/status"))["mount"]["pid"])')
kill -KILL "$pid"
sleep 0.2
"$MOMENTFS" -o ram=16M backing mnt 2>err || fail "over a dead mount: $(cat err)"
grep -q 'cleared the mount' err || fail "a user's dead mount: $(cat err)"
cmp ref mnt/params/a
echo "$1/mnt" >mounted
for i in $(seq 200); do [ -e go ] && break; sleep 0.05; done # the other user looks
"$MOMENTCTL" umount mnt
SH
# The source may lie where no other user can go.
install -D -m 0755 -t "$tmp/bin" "$MOMENTFS" "$MOMENTCTL"
install -D -m 0644 -t "$tmp/src/tests/mount" "$abs_srcdir/tests/mount/tour_steps.py"
chmod 0755 "$tmp/bin" "$tmp/src" "$tmp/src/tests" "$tmp/src/tests/mount"
MOMENTFS=$tmp/bin/momentfs MOMENTCTL=$tmp/bin/momentctl abs_srcdir=$tmp/src
export MOMENTFS MOMENTCTL abs_srcdir

# Both users live in one mount namespace.
cat >"$tmp/both.sh" <<'SH'
set -eu
fail() { echo "FAIL: $*" >&2; exit 1; }
as() { setpriv --reuid="$1" --regid="$1" --clear-groups "${@:2}"; }
mount --bind "$2" /dev/fuse
as 65534 bash "$1/user.sh" "$1/own" &
user=$!
for i in $(seq 1200); do [ -e "$1/own/mounted" ] || ! kill -0 $user 2>/dev/null || { sleep 0.05; continue; }; break; done
if [ -e "$1/own/mounted" ]; then
	! as 65533 ls "$1/own/mnt" 2>/dev/null || fail "another user can look into a private mount"
	as 65534 touch "$1/own/go"
fi
wait $user

# allow_other, by root
mkdir "$1/open"
"$MOMENTFS" -o ram=16M,block=256K,allow_other "$1/open-backing" "$1/open"
trap 'umount -l "$1/open"' EXIT
p=$1/open/params
mkdir -m 1777 "$p/shared"
echo public >"$p/public"
echo secret >"$p/secret"
chmod 600 "$p/secret"
[ "$(as 65533 cat "$p/public")" = public ] || fail "allow_other: reading"
! as 65533 cat "$p/secret" 2>/dev/null || fail "allow_other: a mode of 600 keeps nobody out"
! as 65533 touch "$p/mine" 2>/dev/null || fail "allow_other: writing where only root may"
as 65533 touch "$p/shared/mine" || fail "allow_other: a directory for all"
[ "$(stat -c %u:%g "$p/shared/mine")" = 65533:65533 ] || fail "allow_other: owner"
! as 65534 rm -f "$p/shared/mine" 2>/dev/null || fail "allow_other: the sticky bit"
! as 65533 bash -c "echo commit >'$1/open/.moment/control'" 2>/dev/null || fail "control is for the owner"
! as 65533 bash -c "echo 'begin 1' >'$1/open/.moment/step'" 2>/dev/null || fail "step is for the owner"
as 65533 cat "$1/open/.moment/status" >/dev/null || fail "status is for all"
trap - EXIT
"$MOMENTCTL" umount "$1/open"
SH
mknod -m 0666 "$tmp/fuse" c 10 229
private_mounts bash "$tmp/both.sh" "$tmp" "$tmp/fuse"
