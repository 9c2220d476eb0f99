# SPDX-License-Identifier: Apache-2.0
# Lines of fstab and the command lines of mount(8): every word that mount(8) may pass on is accepted and in the man
# page; those that mean something have their effect; of two that contradict each other the last counts.
. "$(dirname "$0")/../functions.sh"
requires_fuse
mnt=$tmp/mnt
mkdir "$mnt"
ln -s "$MOMENTFS" "$tmp/mount.momentfs"
# as mount(8) calls it
by_mount() { "$tmp/mount.momentfs" "$tmp/backing" "$mnt" -s -v -o "ram=16M,block=256K,$1" -t fuse.momentfs; }
flags() { awk -v m="$mnt" '$5 == m { print $6 "," $NF }' /proc/self/mountinfo; }
has() { case ,$(flags), in *,"$1",*) ;; *) fail "mounted with $2: no $1 in $(flags)" ;; esac; }
has_not() { case ,$(flags), in *,"$1",*) fail "mounted with $2: $1 in $(flags)" ;; esac; }

words="auto noauto user nouser users nousers owner noowner group nogroup nofail _netdev defaults rw suid nosuid dev
nodev exec noexec async sync dirsync atime noatime diratime nodiratime relatime norelatime strictatime nostrictatime
lazytime nolazytime iversion noiversion mand nomand silent loud symfollow nosymfollow default_permissions
x-systemd.automount X-mount.mkdir=0700 x-gvfs-show comment=systemd.automount user=somebody helper=x uhelper=udisks2"
man=$(sed 's/\\//g' "$abs_srcdir/man/momentfs.8")
for w in $words; do
	key=$w
	case $w in x-* | X-*) key=${w%%-*}- ;; *=*) key=${w%%=*}= ;; esac
	grep -qE "^\.BR? $key( ,|$|[. ])" <<<"$man" || fail "$w is not in the man page"
done
all=$(tr -s ' \n' , <<<"$words")
by_mount "${all%,}" || fail "the whole list of mount(8)"
[ -d "$mnt/params" ] || fail "the whole list: nothing is mounted"
"$MOMENTCTL" umount "$mnt"

by_mount rw,noexec,nosuid,nodev,user=somebody || fail "what mount(8) makes of 'user'"
for f in noexec nosuid nodev rw; do has $f user; done
printf '#!/bin/sh\n' >"$mnt/params/script"
chmod +x "$mnt/params/script" 2>/dev/null || true
! "$mnt/params/script" 2>/dev/null || fail "noexec, but a script runs"
"$MOMENTCTL" umount "$mnt"
by_mount noexec,exec,ro,rw
has_not noexec noexec,exec
has rw ro,rw
"$MOMENTCTL" umount "$mnt"
by_mount sync,exec,noexec,rw,ro
has sync sync
has noexec exec,noexec
has ro rw,ro
"$MOMENTCTL" umount "$mnt"
expect_failure "unknown option 'noexecc'" by_mount noexecc
expect_failure "unknown option 'noexec=1'" by_mount noexec=1
expect_failure 'option remount: not possible' by_mount remount
