# SPDX-License-Identifier: Apache-2.0
# Every attribute that can be set is set or refused, never accepted and dropped: through a path and a descriptor, on files,
# directories, registered and made-up files; what stat says of allocated space; whose a session's files are.
. "$(dirname "$0")/../functions.sh"
requires_fuse
requires_root
requires_python numpy
mnt=$tmp/mnt

cat >"$tmp/attrs.py" <<'PY'
import ctypes, errno, os, socket, stat, subprocess, sys, time
import numpy as np
from momentfs.session import Session

mnt, part = sys.argv[1:3]
params = mnt + "/params"
MODE, TIMES = 0o7777, ("st_atime_ns", "st_mtime_ns")
OMIT, NOW = (1 << 30) - 2, (1 << 30) - 1
libc = ctypes.CDLL(None, use_errno=True)

def fails(err, fn, *args, **kw):
    try:
        fn(*args, **kw)
    except OSError as e:
        assert e.errno == err, (fn, args, e)
        return
    raise AssertionError(f"{fn.__name__}{args} was accepted")

def utimens(path, fd, a, m):
    """a, m: (seconds, nanoseconds), the latter may be OMIT or NOW."""
    t = (ctypes.c_long * 4)(*a, *m)
    r = libc.futimens(fd, t) if fd is not None else libc.utimensat(-100, path.encode(), t, 0)
    if r:
        raise OSError(ctypes.get_errno(), path)

def look(path, fd=None):
    """By stat; statx and fstat must agree."""
    a = os.stat(path)
    b = os.fstat(fd) if fd is not None else a
    x = subprocess.run(["stat", "-c", "%s %a %u %g %.9X %.9Y %b", path], check=True, capture_output=True, text=True,
                       env={"LC_ALL": "C", "PATH": os.environ["PATH"]}).stdout.split()
    ns = lambda text: int(text.replace(".", ""))
    assert (a.st_size, f"{a.st_mode & MODE:o}", a.st_uid, a.st_gid, a.st_atime_ns, a.st_mtime_ns, a.st_blocks) == \
        (int(x[0]), x[1], int(x[2]), int(x[3]), ns(x[4]), ns(x[5]), int(x[6])), (x, a)
    assert (a.st_mode, a.st_atime_ns, a.st_mtime_ns) == (b.st_mode, b.st_atime_ns, b.st_mtime_ns)
    return a

def is_set(path, fd, what, **want):
    a = look(path, fd)
    for key, value in want.items():
        got = getattr(a, key) & MODE if key == "st_mode" else getattr(a, key)
        assert got == value, f"{what} of {path}: {key} is {got:o}, not {value:o}" if key == "st_mode" else (what, path, key, got, value)
    return a

def all_of(path, fd, regular):
    target = path if fd is None else fd
    before = look(path, fd)
    time.sleep(0.005)
    # times: each alone, both, now, omitted; before 1970, after 2106
    for a, m in (((1000000000, 123456789), (0, OMIT)), ((0, OMIT), (1100000000, 987654321)), ((-5, 1), (2 ** 33, 999999999)),
                 ((7, 7), (7, 7)), ((8, 8), (0, OMIT))):
        old = look(path, fd)
        utimens(path, fd, a, m)
        want = [getattr(old, k) if t[1] == OMIT else t[0] * 10 ** 9 + t[1] for k, t in zip(TIMES, (a, m))]
        new = is_set(path, fd, f"utimens {a} {m}", st_atime_ns=want[0], st_mtime_ns=want[1])
        assert new.st_ctime_ns > before.st_ctime_ns, "ctime"
    near = lambda ns: abs(ns - time.time_ns()) < 60 * 10 ** 9
    utimens(path, fd, (0, NOW), (0, OMIT))
    new = is_set(path, fd, "atime now", st_mtime_ns=7000000007)
    assert near(new.st_atime_ns), new
    utimens(path, fd, (5, 0), (0, NOW))
    new = is_set(path, fd, "mtime now", st_atime_ns=5000000000)
    assert near(new.st_mtime_ns), new
    # modes
    for mode in (0o600, 0o4755, 0o2755, 0o6711, 0o1644, 0o7777, 0o644):
        os.chmod(target, mode)
        is_set(path, fd, f"chmod {mode:o}", st_mode=mode)
    # owners; set-ID bits go with them, not those of directories
    os.chmod(target, 0o6755)
    os.chown(target, 12, -1)
    is_set(path, fd, "chown 12", st_uid=12, st_mode=0o755 if regular else 0o6755)
    os.chmod(target, 0o2745)
    os.chown(target, -1, 13)
    is_set(path, fd, "chgrp 13", st_uid=12, st_gid=13, st_mode=0o2745)
    os.chown(target, 0, 0)
    os.chmod(target, 0o644 if regular else 0o755)

def as_nobody(fn, groups=()):
    pid = os.fork()
    if not pid:
        os.setgroups(groups)
        os.setgid(65534)
        os.setuid(65534)
        try:
            fn()
            os._exit(0)
        except BaseException as e:
            print(e, file=sys.stderr)
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

if part == "set":
    file = params + "/file"
    open(file, "wb").write(b"x" * 100_000)
    os.mkdir(params + "/dir")
    for path, regular in ((file, True), (params + "/dir", False), (params, False)):
        all_of(path, None, regular)
        fd = os.open(path, os.O_RDONLY)
        all_of(path, fd, regular)
        os.close(fd)
    # A size, with and without a descriptor.
    os.truncate(file, 5000)
    is_set(file, None, "truncate", st_size=5000)
    fd = os.open(file, os.O_RDWR)
    os.ftruncate(fd, 6000)
    is_set(file, fd, "ftruncate", st_size=6000)
    os.close(fd)
    # Set-ID bits go when somebody else than root writes, cuts or allocates.
    def write():
        with open(file, "r+b") as f:
            f.write(b"y")
    def direct():
        import mmap
        fd = os.open(file, os.O_WRONLY | os.O_DIRECT)
        os.pwrite(fd, mmap.mmap(-1, 4096), 0)
    def punch():
        assert libc.fallocate(os.open(file, os.O_RDWR), 3, ctypes.c_long(0), ctypes.c_long(50)) == 0
    def allocate():
        os.posix_fallocate(os.open(file, os.O_RDWR), 0, 9000)
    changes = (("write", write), ("direct", direct), ("truncate", lambda: os.truncate(file, 100)), ("trunc", lambda: open(file, "w").close()),
               ("fallocate", allocate), ("punch", punch))
    # What the group may not execute keeps set-group-ID where its members change it. 77 is not nobody's but by setgroups.
    rules = ((65534, (), 0o6755, 0o755), (77, (), 0o6755, 0o755), (77, (77,), 0o6755, 0o755), (77, (), 0o2674, 0o674), (77, (), 0o4644, 0o644),
             (65534, (), 0o6744, 0o2744), (77, (), 0o6744, 0o744), (77, (5, 77), 0o6744, 0o2744), (77, (), 0o2666, 0o666))
    for gid, groups, mode, left in rules:
        os.chown(file, 65534, gid)
        for what, fn in changes:
            os.chmod(file, mode)
            fn()
            is_set(file, None, f"{what} by root", st_mode=mode)
            as_nobody(fn, groups)
            is_set(file, None, f"{what} by nobody in {groups}, of group {gid}, mode {mode:o}", st_mode=left)
        # By the owner, to another group that is his.
        os.chmod(file, mode)
        as_nobody(lambda: os.chown(file, -1, 78), (78, *groups))
        is_set(file, None, f"chgrp by nobody in {groups}, of group {gid}, mode {mode:o}", st_gid=78, st_mode=left)
    # The privilege is not the superuser's number.
    os.chown(file, 0, 77)
    for cmd in (["fallocate", "-l", "9000"], ["truncate", "-s", "200"]):
        os.chmod(file, 0o6744)
        subprocess.run(["setpriv", "--clear-groups", "--bounding-set", "-fsetid", "--inh-caps", "-all", *cmd, file], check=True)
        is_set(file, None, f"{cmd} by root without CAP_FSETID", st_mode=0o744)
    # Below a directory with the set-group-ID bit: its group.
    os.chown(params + "/dir", 0, 77)
    os.chmod(params + "/dir", 0o2777)
    as_nobody(lambda: (os.mkdir(params + "/dir/sub"), open(params + "/dir/sub/f", "w").close()))
    is_set(params + "/dir/sub", None, "a directory below", st_uid=65534, st_gid=77)
    assert os.stat(params + "/dir/sub").st_mode & stat.S_ISGID
    is_set(params + "/dir/sub/f", None, "a file below", st_uid=65534, st_gid=77)
    # What there is not is refused.
    fails(errno.EPERM, os.mkfifo, params + "/fifo")
    fails(errno.EPERM, os.mknod, params + "/dev", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    fails(errno.EPERM, socket.socket(socket.AF_UNIX).bind, params + "/sock")
    fails(errno.EPERM, os.symlink, "x", params + "/link")
    fails(errno.EPERM, os.link, file, params + "/hard")
    for name in ("step", "status", "control"):
        path = f"{mnt}/.moment/{name}"
        fails(errno.EPERM, os.chmod, path, 0o777)
        fails(errno.EPERM, os.chown, path, 1, 1)
        fails(errno.EPERM, os.utime, path)
        fails(errno.EPERM, utimens, path, None, (0, OMIT), (5, 5))
        fails(errno.EPERM, os.truncate, path, 5)
    open(mnt + "/.moment/prefetch", "w").close()
    # Allocated space: what fallocate takes, and no more when it is written (of unaligned ranges, too).
    path = params + "/allocated"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, 3_000_000)
    os.close(fd)
    assert 3_000_000 <= os.stat(path).st_blocks * 512 < 3_100_000, os.stat(path)
    path = params + "/two"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    libc.fallocate(fd, 0, ctypes.c_long(4095), ctypes.c_long(2))
    before = os.stat(path).st_blocks
    os.pwrite(fd, b"ab", 4095)
    os.close(fd)
    assert before >= 16 and os.stat(path).st_blocks <= before, (before, os.stat(path).st_blocks)
    # Access is where it was put, whatever is read or written afterwards; also after a remount ("again").
    utimens(file, None, (1234567890, 42), (0, OMIT))
    open(file, "ab").write(b"more")
    open(file, "rb").read()
    is_set(file, None, "atime after a write", st_atime_ns=1234567890000000042)
    os.chmod(file, 0o4711)
    assert os.listxattr(file) == [], os.listxattr(file)

elif part == "again":
    is_set(params + "/file", None, "after a remount", st_atime_ns=1234567890000000042, st_mode=0o4711)
    # Of a session: registered files have their attributes too, the made-up one no times of its own.
    os.setgroups([])
    os.setegid(55)
    s = Session(mount=mnt)
    os.setegid(0)
    (h, _, _), = s.register([{"name": "w", "shape": (300_000,)}])
    for name in ("w", "w/exp_avg", "w/exp_avg_sq"):
        is_set(f"{params}/{name}", None, "a session's", st_uid=0, st_gid=55)
    blocks = os.stat(params + "/w/exp_avg").st_blocks * 512
    assert 1_200_000 <= blocks < 1_300_000, f"a registered file takes space: {blocks}"
    fd = os.open(params + "/w/exp_avg", os.O_RDONLY)
    assert os.lseek(fd, 0, os.SEEK_HOLE) == 0, "a file that was never written has no data"
    os.close(fd)
    all_of(params + "/w/exp_avg", None, True)
    all_of(params + "/w", None, False)
    meta = params + "/w/meta.json"
    fails(errno.EPERM, os.utime, meta)
    fails(errno.EPERM, utimens, meta, None, (0, OMIT), (5, 5))
    fails(errno.EACCES, os.truncate, meta, 0)
    fails(errno.EBUSY, os.truncate, params + "/w/exp_avg", 0)
    s.close()
PY
start_momentfs "$tmp/backing" "$mnt" ram=64M,allow_other
chmod 755 "$tmp"
"$PYTHON3" "$tmp/attrs.py" "$mnt" set
stop_momentfs "$mnt"
start_momentfs "$tmp/backing" "$mnt" ram=64M,allow_other
"$PYTHON3" "$tmp/attrs.py" "$mnt" again
stop_momentfs "$mnt"
