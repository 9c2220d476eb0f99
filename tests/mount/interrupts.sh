# SPDX-License-Identifier: Apache-2.0
# A signal that has a handler ends no call on a file, as on a host's file system; a fatal one does, at once.
. "$(dirname "$0")/../functions.sh"
requires_fuse
mnt=$tmp/mnt

cat >"$tmp/busy.py" <<'PY'
import mmap, os, signal, sys, time

seen = 0
def tick(*_):
    global seen
    seen += 1
signal.signal(signal.SIGALRM, tick)
signal.siginterrupt(signal.SIGALRM, True)  # without SA_RESTART: what a call says is what the file system said
libc_calls = 0
f = os.open(sys.argv[1] + "/params/busy", os.O_RDWR | os.O_CREAT)
os.truncate(f, 8 << 20)
m = mmap.mmap(f, 8 << 20)
import ctypes
libc = ctypes.CDLL(None, use_errno=True)   # Python's own wrappers would try again after EINTR
libc.pwrite.argtypes = libc.pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long]
libc.ftruncate.argtypes = [ctypes.c_int, ctypes.c_long]
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
libc.lseek.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_int]
libc.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
buf = ctypes.create_string_buffer(300_000)
at = ctypes.addressof(ctypes.c_char.from_buffer(m))
errors, calls = {}, 0
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
end = time.monotonic() + 1.5
while time.monotonic() < end:
    calls += 1
    m[calls % (8 << 20)] = calls % 256
    for what, r in (("pwrite", libc.pwrite(f, buf, len(buf), calls * 4321 % (7 << 20))), ("fsync", libc.fsync(f)),
                    ("fdatasync", libc.fdatasync(f)), ("msync", libc.msync(at, 8 << 20, 4)),
                    ("fallocate", libc.fallocate(f, 0, 0, 8 << 20)), ("lseek", libc.lseek(f, 0, 3)),
                    ("ftruncate", libc.ftruncate(f, 8 << 20)), ("pread", libc.pread(f, buf, len(buf), 0))):
        if r < 0:
            errors[what] = errors.get(what, 0) + 1
signal.setitimer(signal.ITIMER_REAL, 0)
assert seen > 20 and calls > 3, (seen, calls)
assert not errors, f"{calls} rounds, {seen} signals, failed: {errors}"
PY
export MOMENT_FAULTS="sync.delay=10ms:1,file=$tmp/slow" # so that signals meet calls under way
touch "$tmp/slow"
start_momentfs "$tmp/backing" "$mnt" ram=16M,block=256K,commit=off
"${PYTHON3:-/usr/bin/python3}" "$tmp/busy.py" "$mnt"
stop_momentfs "$mnt"

# An fsync that takes long: a signal with a handler does not end it; one that kills afterwards does, at once. The
# kernel tells of the first signal only.
export MOMENT_FAULTS="sync.delay=15s:1,file=$tmp/stuck"
cat >"$tmp/wait.py" <<'PY'
import ctypes, os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: None)
signal.siginterrupt(signal.SIGUSR1, True)
libc = ctypes.CDLL(None, use_errno=True)
f = os.open(sys.argv[1] + "/params/wait", os.O_RDWR | os.O_CREAT)
os.write(f, b"x" * 100000)
open(sys.argv[2], "w").close()
r = libc.fsync(f)
print(f"fsync returned {r}, errno {ctypes.get_errno()}")
PY
start_momentfs "$tmp/backing" "$mnt" ram=16M,commit=off
: >"$tmp/stuck"
for how in "USR1 TERM" "KILL" "USR1 KILL"; do
	rm -f "$tmp/go"
	"${PYTHON3:-/usr/bin/python3}" "$tmp/wait.py" "$mnt" "$tmp/go" >"$tmp/said" 2>&1 &
	pid=$!
	retry 5 test -e "$tmp/go" || fail "the program did not start"
	in_fsync() { [ "$(cut -d ' ' -f 1 "/proc/$pid/syscall" 2>/dev/null)" = 74 ]; }
	[ "$(uname -m)" != x86_64 ] || retry 5 in_fsync || fail "no fsync is under way"
	assert_eq "$(status_of "$mnt" oldest_request.kind), $(status_of "$mnt" oldest_request.file), $(status_of "$mnt" oldest_request.waits_for)" \
		"fsync, wait, a commit" "the request that waits longest"
	for signal in $how; do
		[ "$signal" = USR1 ] || sleep 0.3
		kill "-$signal" "$pid"
	done
	retry 5 _gone "$pid" || fail "signals $how: a killed program hangs in fsync"
	wait "$pid" 2>/dev/null || true
	assert_eq "$(cat "$tmp/said")" "" "signals $how: what fsync said"
done
rm "$tmp/stuck"
kill_momentfs "$mnt"
