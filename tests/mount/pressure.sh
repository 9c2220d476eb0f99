# SPDX-License-Identifier: Apache-2.0
# A trainer and the daemon in one control group with a limit that the trainer's mapped files exceed several times:
# its memory can only come from write-back, which is the daemon's work. The daemon has no PR_SET_IO_FLUSHER here.
# It goes on all the time; and the daemon does its part without asking for memory: no map, unmap or growth of its
# heap, and no page of its own for the first time.
. "$(dirname "$0")/../functions.sh"
requires_fuse
requires_root
requires setpriv strace
if [ "${MOMENT_CRASH:-}" = full ]; then seconds=120; else seconds=12; fi
mib=192 # limit of the group
mnt=$tmp/mnt

group=
for root in /sys/fs/cgroup/memory /sys/fs/cgroup; do
	if [ -e $root/memory.limit_in_bytes ] || grep -qw memory $root/cgroup.subtree_control 2>/dev/null; then
		mkdir $root/momentfs-test-$$ 2>/dev/null && group=$root/momentfs-test-$$ && break
	fi
done
[ -n "$group" ] || skip "no control group for memory can be made here (/sys/fs/cgroup)"
remove_group() { local i; for i in $(seq 50); do rmdir "$group" 2>/dev/null && break; sleep 0.1; done; }
cleanup_fn remove_group
if [ -e "$group/memory.limit_in_bytes" ]; then
	echo $((mib << 20)) >"$group/memory.limit_in_bytes"
else
	echo $((mib << 20)) >"$group/memory.max"
fi

# In the group, without the capability; whatever happens the connection can be cut from outside of it.
mkdir "$mnt"
bash -c 'echo $$ >"$1/cgroup.procs"; shift; exec setpriv --bounding-set -sys_resource --inh-caps -sys_resource "$@"' - \
	"$group" "$MOMENTFS" -f -o ram=32M,block=256K,commit=5 "$tmp/backing" "$mnt" >"$tmp/log" 2>&1 &
daemon=$!
end_it() { # the connection first: who waits for it cannot be killed
	local dev control=/sys/fs/fuse/connections
	dev=$(awk -v m="$mnt" '$5 == m { sub(".*:", "", $3); print $3 }' /proc/self/mountinfo)
	[ -n "$dev" ] || return 0
	[ -e $control/$dev ] || { control=$tmp/connections && mkdir "$control" && mount -t fusectl none "$control"; }
	echo 1 >"$control/$dev/abort"
	[ "$control" != "$tmp/connections" ] || umount "$control"
	umount -l "$mnt"
	kill -KILL $daemon ${trainer:-}
}
cleanup_fn end_it
mounted() { mountpoint -q "$mnt"; }
retry 20 mounted || fail "not mounted: $(cat "$tmp/log")"
retry 10 grep -q 'io_flusher: refused (needs CAP_SYS_RESOURCE)' "$tmp/log" || fail "that the flag is refused is not said: $(cat "$tmp/log")"
[[ $(status_of "$mnt" mount.memory) == *"io_flusher: refused (needs CAP_SYS_RESOURCE)"* ]] || fail "status: $(status_of "$mnt" mount.memory)"

cat >"$tmp/trainer.py" <<'PY'
import mmap, os, sys, time
folder, seconds, mib, progress = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
maps = []
for i in range(3):
    with open(f"{folder}/f{i}", "w+b") as f:
        f.truncate(mib << 20)
        maps.append(mmap.mmap(f.fileno(), 0))
end, n, done = time.monotonic() + seconds, 0, os.open(progress, os.O_WRONLY | os.O_CREAT, 0o600)
while time.monotonic() < end:
    n += 1
    for i, m in enumerate(maps):
        for off in range(0, len(m), 4096):
            m[off] = (n + i) % 251
        os.pwrite(done, b"%12d" % (3 * n + i), 0)
for i, m in enumerate(maps):
    m.flush()
    for off in range(0, len(m), 4096):
        assert m[off] == (n + i) % 251, (i, off)
print("rounds", n)
PY
# What the daemon does with its address space meanwhile.
strace -f -qq -o "$tmp/calls" -e trace=mmap,munmap,brk,mremap,clone,clone3 -p $daemon &
tracer=$!
cleanup_fn kill $tracer 2>/dev/null
tracing() { grep -q "^TracerPid:.[1-9]" /proc/$daemon/status; }
retry 10 tracing || fail "strace does not trace"
bash -c 'echo $$ >"$1/cgroup.procs"; shift; exec "$@"' - "$group" \
	"$PYTHON3" "$tmp/trainer.py" "$mnt/params" $seconds $((mib / 2)) "$tmp/progress" >"$tmp/out" 2>&1 &
trainer=$!
faults() { awk '{ sub(".*\\) ", ""); print $8 }' /proc/$daemon/stat; } # minor ones, of all its threads
before=$(faults)
last= stuck=0
while ! _gone $trainer; do
	now=$(cat "$tmp/progress" 2>/dev/null || true)
	if [ "$now" = "$last" ]; then stuck=$((stuck + 1)); else stuck=0; fi
	[ $stuck -lt 120 ] || fail "no progress for 60 s: $(_what_it_does $daemon; _what_it_does $trainer)"
	last=$now
	sleep 0.5
done
wait $trainer || fail "the trainer: $(cat "$tmp/out")"
pages=$(($(faults) - before))
kill $tracer
wait $tracer 2>/dev/null || true
late=$(grep -c 'mmap(NULL, 1056768' "$tmp/calls" || true)
pages=$((pages - late * 259))
echo "$(cat "$tmp/out"), $late receive buffers more, else $pages page faults of the daemon"
[ $pages -lt 500 ] || fail "the daemon touched $pages pages for the first time while it wrote back"
# A receive buffer is mapped when all were in use for 100 ms: nothing waits for that one.
! grep -vE '(mmap\(NULL|munmap\(0x[0-9a-f]*), 1056768' "$tmp/calls" | head -5 | grep . || fail "the daemon asked for memory while it wrote back"
"$MOMENTCTL" umount "$mnt" || fail "umount"
rc=0
wait $daemon || rc=$?
assert_eq $rc 0 "the daemon's end: $(cat "$tmp/log")"
