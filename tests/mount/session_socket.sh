# SPDX-License-Identifier: Apache-2.0
# The session socket: who may attach, what is no message, what a connection costs, deep paths.
. "$(dirname "$0")/../functions.sh"
requires_fuse
mnt=$tmp/mnt
# longer than the address of a socket holds
back=$tmp/$(printf 'deep%.0s' $(seq 30))/backing
mkdir -p "$back"

cat >"$tmp/talk.py" <<'PY'
import array, os, socket, struct, sys, time

def connect(back):
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    d = os.open(back, os.O_PATH | os.O_DIRECTORY)
    s.connect(f"/proc/self/fd/{d}/session.sock")
    os.close(d)
    s.settimeout(5)
    return s

def hello(flags=0, version=1, id=77):
    return struct.pack("<HHIQII48s", 1, flags, 72, id, version, os.getpid(), b"talk.py")

def receive(s):
    msg, anc, _, _ = s.recvmsg(65536, socket.CMSG_SPACE(4))
    if not msg:
        return None
    fd = -1
    for level, kind, data in anc:
        if kind == socket.SCM_RIGHTS:
            fd = array.array("i", data)[0]
    type, flags, len_, id, status, text_len = struct.unpack_from("<HHIQiI", msg)
    assert len_ == len(msg), (len_, len(msg))
    return type, id, status, msg[24:], fd

what, back = sys.argv[1], sys.argv[2]
s = connect(back)
if what == "hello":
    s.send(hello())
    type, id, status, rest, fd = receive(s)
    assert (type, id, status) == (1, 77, 0), (type, id, status, rest)
    version, block, arena = struct.unpack_from("<IIQ", rest)
    assert version == 1 and block == 262144 and fd >= 0, (version, block, fd)
    assert os.fstat(fd).st_size == arena, "the arena's fd"
elif what == "refused":
    s.send(hello())
    type, id, status, rest, fd = receive(s)
    assert (type, id, status) == (1, 77, -13) and fd == -1, (type, id, status)
    assert b"uid 65533" in rest, rest
    assert receive(s) is None, "not hung up on"
elif what == "version":
    s.send(hello(version=999))
    assert receive(s)[2] == -71
elif what == "garbage":
    for junk in (b"x", b"\0" * 16, b"\xff" * 70000, struct.pack("<HHIQ", 1, 0, 5, 1)):
        t = connect(back)
        try:
            t.send(junk)
            assert receive(t) is None, junk[:20]
        except (ConnectionError, OSError) as e:
            assert e.errno in (104, 32, 90), e
elif what == "many":
    held = [connect(back) for _ in range(60)]
    s.send(hello(flags=1))
    assert receive(s)[2] == 0
elif what == "fds":
    # Descriptors that come with a message stay nowhere.
    count = lambda: len(os.listdir(f"/proc/{int(sys.argv[3])}/fd"))
    s.send(hello(flags=1))
    assert receive(s)[2] == 0
    before = count()
    for i in range(20):
        s.sendmsg([struct.pack("<HHIQ", 11, 0, 16, i)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 50))])
        assert receive(s)[2] == 0
    assert count() == before, (count(), before)
elif what == "crowd":
    # More connections than the daemon takes: those above are hung up on, the others are served.
    kept, away = [], 0
    for i in range(300):
        t = connect(back)
        try:
            t.send(hello(flags=1))
            if receive(t):
                kept.append(t)
            else:
                away += 1
        except (ConnectionError, OSError):
            away += 1
    assert len(kept) == 256 - 1 and away == 45, (len(kept), away) # s is one of them
    kept.pop().close()
    s.send(hello(flags=1))
    assert receive(s)[2] == 0
    for t in kept:
        t.send(struct.pack("<HHIQ", 11, 0, 16, 5))
        assert receive(t)[2] == 0
elif what == "starve":
    # A daemon without a descriptor left: neither does it spin, nor does it leave anybody waiting.
    pid = int(sys.argv[3])
    ticks = lambda: sum(map(int, open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[11:13]))
    kept, away, before = [s], 0, ticks()
    for i in range(100):
        t = connect(back)
        try:
            t.send(hello(flags=1))
            away += not receive(t)
        except (ConnectionError, OSError):
            away += 1
        kept.append(t)
    assert away >= 50, away
    time.sleep(1)
    assert ticks() - before < 50, f"{ticks() - before} ticks"
    for t in kept:
        t.close()
elif what == "flood":
    # Asks and never reads: must not make the daemon keep more than a bound.
    s.send(hello(flags=1))
    receive(s)
    s.settimeout(0.5)
    sent = 0
    try:
        while sent < 200000:
            s.send(struct.pack("<HHIQ", 11, 0, 16, sent))
            sent += 1
    except (TimeoutError, ConnectionError, socket.timeout):
        pass
    assert sent < 200000, "nothing ever stopped it"
elif what == "leave":
    s.send(hello())
    receive(s)
    open(sys.argv[3], "w").close()
    time.sleep(0.4)
PY
talk() { "${PYTHON3:-/usr/bin/python3}" "$tmp/talk.py" "$1" "$back" "${2:-}"; }

start_momentfs "$back" "$mnt" ram=16M,block=256K
assert_eq "$(status_of "$mnt" mount.sessions)" 0 sessions
talk hello
talk version
talk garbage
talk many
talk flood
talk fds "$momentfs_pid"
talk crowd
none_left() { [ "$(status_of "$mnt" mount.sessions)" = 0 ]; }
retry 3 none_left || fail "sessions are left over: $(status_of "$mnt" sessions)"
rss=$(awk '/^RssAnon/ { print $2 }' "/proc/$momentfs_pid/status")
[ "$rss" -lt 65536 ] || fail "the flood made the daemon grow to $rss KiB"
if command -v prlimit >/dev/null; then
	limit=$(prlimit --pid "$momentfs_pid" --nofile --noheadings --output SOFT)
	prlimit --pid "$momentfs_pid" --nofile=$(($(find "/proc/$momentfs_pid/fd" | wc -l) + 20)):
	talk starve "$momentfs_pid"
	prlimit --pid "$momentfs_pid" --nofile="$limit:"
fi
retry 3 none_left || fail "sessions are left over: $(status_of "$mnt" sessions)"
talk hello

if [ "$(id -u)" = 0 ] && command -v setpriv >/dev/null; then
	chmod 0755 "$tmp" "$back" "$(dirname "$back")"
	as() { setpriv --reuid=65533 --regid=65533 --clear-groups "$@"; }
	# By its mode no other user can connect ...
	! as "${PYTHON3:-/usr/bin/python3}" "$tmp/talk.py" hello "$back" 2>/dev/null || fail "another user attached"
	# ... and where somebody has opened it, the peer's uid is what counts.
	chmod 0666 "$back/session.sock"
	as "${PYTHON3:-/usr/bin/python3}" "$tmp/talk.py" refused "$back"
fi

# A session keeps `momentctl umount` from pulling the rug; --force is an answer.
"${PYTHON3:-/usr/bin/python3}" - "$back" "$tmp/attached" "$tmp/talk.py" <<'PY' &
import os, socket, struct, sys, time
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
d = os.open(sys.argv[1], os.O_PATH)
s.connect(f"/proc/self/fd/{d}/session.sock")
s.send(struct.pack("<HHIQII48s", 1, 0, 72, 1, 1, os.getpid(), b"holder"))
s.recv(65536)
open(sys.argv[2], "w").close()
assert s.recv(65536) == b""  # until we are hung up on
PY
holder=$!
retry 5 test -e "$tmp/attached" || fail "the session did not attach"
rc=0
"$MOMENTCTL" umount "$mnt" 2>"$tmp/err" || rc=$?
assert_eq $rc 1 "umount under a session"
grep -q 'session' "$tmp/err" || fail "umount under a session: $(cat "$tmp/err")"
mountpoint -q "$mnt" || fail "it was unmounted under a session"
"$MOMENTCTL" umount --force "$mnt" || fail "umount --force"
wait "$momentfs_pid" || fail "momentfs ended with $?"
wait "$holder" || fail "the session was not hung up on"
[ ! -e "$back/session.sock" ] || fail "the socket is left over"

# One that ends just then does not.
start_momentfs "$back" "$mnt" ram=16M
talk leave "$tmp/leaves" &
holder=$!
retry 5 test -e "$tmp/leaves" || fail "the session did not attach"
"$MOMENTCTL" umount "$mnt" || fail "umount beside a session that ends"
wait "$holder" || fail "leave"
