#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# xfstests' generic tests on a mount: those of the group `quick' (all of `auto' with MOMENT_SUITES=long), less what
# xfstests.without names, each with its reason.
. "$(dirname "$0")/../functions.sh"
suite=${SUITES:-}/xfstests
[ -x "$suite/check" ] || skip "no checkout of xfstests in '${SUITES:-}'"
requires_fuse
requires_root
requires make libtoolize mkfs.ext4 unshare bc attr setfacl

# Everything is mounted in a namespace of the test's own, where /sbin/mount.fuse3 can be another.
alone "$@"
[ "${1:-}" = inside ] || skip "no mount namespace can be made here"
shift

without=$abs_srcdir/tests/suites/xfstests.without
cp -r "$suite" "$tmp/suite"
make -C "$tmp/suite" -j2 >"$tmp/build.log" 2>&1 || fail "xfstests does not build: $(tail -n 5 "$tmp/build.log")"
# The type that the kernel shows.
sed -i "s#-e 's/fuse.ceph-fuse/ceph-fuse/'#& -e 's/fuse.momentfs/fuse/'#" "$tmp/suite/common/rc"

# Other users go through here.
chmod 755 "$tmp"
# What fills its disk does so in an image, and the disk that the image is on has room for all of it: else a test that
# fills one would fill the other. What tests remove is given back at once (discard).
size=$(numfmt --from=iec "${MOMENT_SUITES_DISK:-16G}")
free=$(df --output=avail -B1 "$tmp" | tail -n 1)
[ "$free" -gt $((size + (4 << 30))) ] ||
	skip "$(df --output=target "$tmp" | tail -n 1) has $((free >> 30)) GiB free; the tests may take $((size >> 30)), and 4 are to stay (MOMENT_SUITES_DISK=SIZE changes that)"
truncate -s "$size" "$tmp/image"
mkfs.ext4 -q "$tmp/image"
mkdir "$tmp/disk" "$tmp/test" "$tmp/scratch" "$tmp/bin"
mount -o loop,discard "$tmp/image" "$tmp/disk"
cleanup_fn umount -l "$tmp/disk"

# mount.fuse3 SOURCE MOUNTPOINT [OPTION]...: the tests' root is params/. The mount that it lies in is let go at once
# and ends with it.
cat >"$tmp/bin/mount.fuse3" <<END
#!/bin/bash
set -e
[[ " \$* " != *ro,* && " \$* " != *,ro* && " \$* " != *' ro '* ]] || ro=,ro
hidden=\$(mktemp -d "$tmp/hidden.XXXXXX")
"$MOMENTFS" -o ram=192M,commit=off,allow_other\$ro "\$1" "\$hidden" 2>>"$tmp/momentfs.log"
mount --bind "\$hidden/params" "\$2"
umount -l "\$hidden"
rmdir "\$hidden"
END
# The tests unmount by device. Ours is a directory, which umount(8) takes for a mount point; and they expect that
# nobody has the device afterwards.
cat >"$tmp/bin/umount" <<END
#!/bin/bash
args=("\$@")
dev=
for i in "\${!args[@]}"; do
	case \${args[i]} in
	$tmp/disk/test | $tmp/test) args[i]=$tmp/test dev=$tmp/disk/test ;;
	$tmp/disk/scratch | $tmp/scratch) args[i]=$tmp/scratch dev=$tmp/disk/scratch ;;
	esac
done
$(type -P umount) "\${args[@]}" || exit
[ -n "\$dev" ] || exit 0
for ((i = 0; i < 200; i++)); do
	pgrep -f -- "$MOMENTFS .* \$dev " >/dev/null || exit 0
	sleep 0.1
done
exit 0
END
chmod +x "$tmp"/bin/*
mount --bind "$tmp/bin/mount.fuse3" "$(readlink -f "$(PATH=/sbin:/usr/sbin type -P mount.fuse3)")"
export PATH=$tmp/bin:$PATH

_unmount_all() { umount "$tmp/test" "$tmp/scratch" 2>/dev/null || true; }
cleanup_fn _unmount_all
for user in fsgqa fsgqa2; do
	id $user >/dev/null 2>&1 || { useradd -M -s /bin/sh $user && cleanup_fn userdel $user; }
done
cat >"$tmp/suite/local.config" <<END
export TEST_DEV=$tmp/disk/test TEST_DIR=$tmp/test SCRATCH_DEV=$tmp/disk/scratch SCRATCH_MNT=$tmp/scratch
export FSTYP=fuse FUSE_SUBTYP=.momentfs DUMP_CORRUPT_FS=0
END
sed -n 's/^\(generic\/[0-9]*\):.*/\1/p' "$without" >"$tmp/without"

cd "$tmp/suite"
rc=0
if [ $# -gt 0 ]; then
	./check "$@" >"$tmp/out" 2>&1 || rc=$?
else
	group=quick
	[ "${MOMENT_SUITES:-}" != long ] || group=auto
	./check -g generic/$group -E "$tmp/without" >"$tmp/out" 2>&1 || rc=$?
fi
cd /
cat "$tmp/out"
for t in $(sed -n 's/^Failures://p' "$tmp/out"); do
	diff -u "$tmp/suite/tests/$t.out" "$tmp/suite/results/$t.out.bad" | head -n 30 || true
done
sed -n 's/^generic/left out: &/p' "$without"
# What the suite itself found not to apply, and how many tests each reason took.
sed -n "/\[not run\]/{s#.*\[not run\] *##; s#require $tmp[^ ]* to be#needs a#; s#$tmp/suite/##; s#$tmp/##; p}" "$tmp/out" |
	sort | uniq -c | sort -rn | sed -E 's/^ *([0-9]+) /left out: \1 of generic: /'
passed=$(grep -cE '^generic/[0-9]+ .*[0-9]s *$' "$tmp/out" || true)
printf 'xfstests: %d passed, %d not run for the reasons above\n' "$passed" "$(grep -c '\[not run\]' "$tmp/out" || true)"
[ "$rc" = 0 ] || fail "xfstests: $(grep '^Failures:' "$tmp/out" || echo "check ended with $rc")"
[ "$passed" -gt 0 ] || fail "xfstests: no test ran"
