# SPDX-License-Identifier: Apache-2.0
# The daemon's resident memory stays within the RAM tier plus 64 MiB while eight times the tier is written and
# read, through read, write and maps, by several processes at once.
. "$(dirname "$0")/../functions.sh"
requires_fuse
mnt=$tmp/mnt
ram=64 # MiB
opts=ram=${ram}M

start_momentfs "$tmp/backing" "$mnt" $opts
peak=0
watch() {
	local now
	now=$(awk '/^VmHWM/ { print $2 }' "/proc/$momentfs_pid/status")
	[ "$now" -le "$peak" ] || peak=$now
}
for i in 1 2 3 4; do
	dd if=/dev/zero of="$mnt/params/f$i" bs=1M count=$((ram * 2)) status=none &
	pids[i]=$!
done
for i in 1 2 3 4; do wait "${pids[i]}" || fail "writing f$i"; done
watch
"${PYTHON3:-/usr/bin/python3}" - "$mnt/params" <<'PY'
import mmap, sys
for i in (1, 2):
    f = open(f"{sys.argv[1]}/f{i}", "r+b")
    m = mmap.mmap(f.fileno(), 0)
    for off in range(0, len(m), 4096):
        m[off] = 1
    m.flush()
PY
watch
[ "$(id -u)" != 0 ] || echo 1 >/proc/sys/vm/drop_caches
for i in 1 2 3 4; do
	dd if="$mnt/params/f$i" of=/dev/null bs=1M status=none &
	pids[i]=$!
done
for i in 1 2 3 4; do wait "${pids[i]}" || fail "reading f$i"; done
for i in $(seq 3000); do echo "$i" >"$mnt/params/small$i"; done
"$MOMENTCTL" commit "$mnt"
watch
echo "peak of the daemon's resident memory: $((peak / 1024)) MiB with ram=$ram MiB"
if [ -z "${SANITIZER:-}" ]; then
	[ "$peak" -le $(((ram + 64) * 1024)) ] || fail "that is $((peak / 1024 - ram)) MiB above the tier; 64 are allowed"
fi
stop_momentfs "$mnt"
