# SPDX-License-Identifier: Apache-2.0
"""A tour of every operation of the mount: each with what it must do, and what it must refuse.

    tour_steps.py MOUNTPOINT BLOCK [check]      `check`: only what must have survived a remount
"""
import ctypes
import errno
import mmap
import os
import stat
import sys
import time

mnt, block = sys.argv[1], int(sys.argv[2])
params = mnt + "/params"
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
libc.renameat2.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
KEEP_SIZE, PUNCH, NOREPLACE, EXCHANGE = 1, 2, 1, 2


def fallocate(fd, mode, off, length):
    if libc.fallocate(fd, mode, off, length):
        raise OSError(ctypes.get_errno(), "fallocate")


def renameat2(a, b, flags):
    if libc.renameat2(-100, os.fsencode(a), -100, os.fsencode(b), flags):
        raise OSError(ctypes.get_errno(), "renameat2")


def refused(err, fn, *args, **kw):
    try:
        fn(*args, **kw)
    except OSError as e:
        assert e.errno == err, f"{fn.__name__}{args}: {errno.errorcode[e.errno]}, not {errno.errorcode[err]}"
        return
    raise AssertionError(f"{fn.__name__}{args} was not refused")


def retry(fn):
    """What changes when the kernel has told the daemon of a close: soon, not at once."""
    for _ in range(40):
        if fn():
            return True
        time.sleep(0.05)
    return False


def put(path, data):
    with open(path, "wb", buffering=0) as f:
        assert f.write(data) == len(data)


def get(path):
    with open(path, "rb") as f:
        return f.read()


def names():
    assert sorted(os.listdir(mnt)) == [".moment", "params"]
    assert stat.S_ISDIR(os.stat(mnt).st_mode) and os.stat(mnt).st_ino == 1
    refused(errno.EPERM, os.mkdir, mnt + "/other")
    refused(errno.EPERM, os.unlink, mnt + "/.moment/status")
    refused(errno.EPERM, os.rename, mnt + "/params", mnt + "/qarams")
    refused(errno.ENOENT, os.stat, mnt + "/nothing")

    d = params + "/names"
    os.mkdir(d, 0o755)
    refused(errno.EEXIST, os.mkdir, d)
    put(d + "/a", b"one")
    refused(errno.ENOTEMPTY, os.rmdir, d)
    refused(errno.ENOTDIR, os.mkdir, d + "/a/b")
    refused(errno.ENOTDIR, os.rmdir, d + "/a")
    refused(errno.EISDIR, os.unlink, d)
    refused(errno.ENAMETOOLONG, put, d + "/" + "x" * 256, b"")
    put(d + "/" + "x" * 255, b"long")
    os.unlink(d + "/" + "x" * 255)
    for odd in ["two words", "-rf", ".hidden", "层.0.weight", "new\nline", "a%2Eb"]:
        put(f"{d}/{odd}", odd.encode())
        assert get(f"{d}/{odd}") == odd.encode() and odd in os.listdir(d)
        os.unlink(f"{d}/{odd}")
    raw = os.fsencode(d) + b"/\xff\xfe"
    put(raw, b"raw")
    assert b"\xff\xfe" in os.listdir(os.fsencode(d))
    os.unlink(raw)

    os.rename(d + "/a", d + "/b")
    put(d + "/a", b"two")
    refused(errno.EEXIST, renameat2, d + "/a", d + "/b", NOREPLACE)
    refused(errno.EINVAL, renameat2, d + "/a", d + "/b", EXCHANGE)
    assert get(d + "/b") == b"one"
    renameat2(d + "/a", d + "/c", NOREPLACE)
    os.rename(d + "/c", d + "/b")
    assert get(d + "/b") == b"two" and os.listdir(d) == ["b"]
    os.mkdir(d + "/sub")
    os.mkdir(d + "/sub/deep")
    refused(errno.EINVAL, os.rename, d + "/sub", d + "/sub/deep/x")
    refused(errno.EISDIR, os.rename, d + "/b", d + "/sub")
    os.rename(d + "/sub/deep", d + "/deep")
    assert os.stat(d + "/deep").st_ino != os.stat(d + "/sub").st_ino
    assert os.stat(d).st_nlink == 4, os.stat(d).st_nlink
    refused(errno.EXDEV, os.rename, d + "/b", mnt + "/.moment/b")

    refused(errno.EPERM, os.symlink, "b", d + "/link")
    refused(errno.EPERM, os.link, d + "/b", d + "/hard")
    refused(errno.EPERM, os.mkfifo, d + "/fifo")
    os.mknod(d + "/node", 0o600 | stat.S_IFREG)
    assert get(d + "/node") == b""


def listing():
    d = params + "/many"
    os.mkdir(d)
    want = sorted(f"{i:04d}-{'n' * (i % 200)}" for i in range(2000))
    for n in want:
        put(f"{d}/{n}", b"")
    assert sorted(os.listdir(d)) == want
    # An entry that exists throughout is seen exactly once, whatever goes on beside it.
    seen = []
    with os.scandir(d) as it:
        for i, e in enumerate(it):
            seen.append(e.name)
            if i % 50 == 0:
                put(f"{d}/new{i}", b"")
                os.unlink(f"{d}/new{i}")
    assert sorted(n for n in seen if not n.startswith("new")) == want
    for n in want[:1990]:
        os.unlink(f"{d}/{n}")
    assert sorted(os.listdir(d)) == want[1990:]


def attributes():
    f = params + "/attributes"
    put(f, b"x" * 10)
    os.chmod(f, 0o640)
    assert stat.S_IMODE(os.stat(f).st_mode) == 0o640
    if os.geteuid() == 0:
        os.chown(f, 1234, 4321)
        st = os.stat(f)
        assert (st.st_uid, st.st_gid) == (1234, 4321)
    os.utime(f, ns=(1, 1234567890123456789))
    assert os.stat(f).st_mtime_ns == 1234567890123456789
    before = time.time_ns()
    put(f, b"y")
    assert abs(os.stat(f).st_mtime_ns - before) < 5e9
    assert os.stat(f).st_nlink == 1
    # A time set by hand stays, however soon after the write; and new data never look like a hole.
    for i in range(300):
        t = params + f"/time{i}"
        put(t, b"z" * (30000 + i))
        os.utime(t, ns=(1, 10**18 + i))
        st = os.stat(t)
        assert st.st_mtime_ns == 10**18 + i and st.st_blocks * 512 >= st.st_size, (i, st)
    for i in range(300):
        assert os.stat(params + f"/time{i}").st_mtime_ns == 10**18 + i, i
        os.unlink(params + f"/time{i}")
    old = os.umask(0o027)
    os.close(os.open(params + "/masked", os.O_CREAT | os.O_WRONLY, 0o666))
    os.umask(old)
    assert stat.S_IMODE(os.stat(params + "/masked").st_mode) == 0o640
    s = os.statvfs(mnt)
    assert s.f_namemax == 255 and s.f_blocks >= s.f_bavail > 0 and s.f_frsize == 4096

    os.setxattr(f, "user.moment.dtype", b"float32")
    os.setxattr(f, "user.other", b"")
    assert sorted(os.listxattr(f)) == ["user.moment.dtype", "user.other"]
    assert os.getxattr(f, "user.moment.dtype") == b"float32"
    refused(errno.EEXIST, os.setxattr, f, "user.other", b"", os.XATTR_CREATE)
    refused(errno.ENODATA, os.setxattr, f, "user.third", b"", os.XATTR_REPLACE)
    refused(errno.ENODATA, os.getxattr, f, "user.third")
    refused(errno.EOPNOTSUPP, os.setxattr, f, "trusted.x", b"") if os.geteuid() == 0 else None
    os.removexattr(f, "user.other")
    refused(errno.ENODATA, os.removexattr, f, "user.other")
    big = os.urandom(60000)
    os.setxattr(params, "user.big", big)
    assert os.getxattr(params, "user.big") == big
    cache = os.getxattr(f, "user.moment.cache").decode()
    assert cache.startswith("resident="), cache
    refused(errno.EPERM, os.setxattr, f, "user.moment.cache", b"x")


def data():
    f = params + "/data"
    pattern = os.urandom(3 * block + 777)
    put(f, pattern)
    assert get(f) == pattern
    fd = os.open(f, os.O_RDWR)
    os.pwrite(fd, b"HELLO", block - 2)
    want = bytearray(pattern)
    want[block - 2:block + 3] = b"HELLO"
    assert os.pread(fd, len(pattern), 0) == bytes(want)
    assert os.pread(fd, 10, len(pattern)) == b""
    assert os.pread(fd, 100, len(pattern) - 7) == bytes(want[-7:])
    os.ftruncate(fd, block + 1)
    os.ftruncate(fd, 2 * block)
    want = want[:block + 1] + bytes(block - 1)
    assert os.pread(fd, 3 * block, 0) == bytes(want)
    fallocate(fd, PUNCH | KEEP_SIZE, 100, block)
    want[100:100 + block] = bytes(block)
    assert os.pread(fd, 3 * block, 0) == bytes(want)
    fallocate(fd, KEEP_SIZE, 0, 4 * block)
    assert os.fstat(fd).st_size == 2 * block
    fallocate(fd, 0, 0, 4 * block)
    assert os.fstat(fd).st_size == 4 * block
    want += bytes(2 * block)
    refused(errno.EOPNOTSUPP, fallocate, fd, 0x10 | KEEP_SIZE, 0, 4096)  # ZERO_RANGE
    os.fsync(fd)
    os.fdatasync(fd)
    os.close(fd)
    assert get(f) == bytes(want)
    fd = os.open(f, os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"tail")
    os.close(fd)
    assert get(f)[-4:] == b"tail"
    os.truncate(f, 0)
    assert get(f) == b"" and retry(lambda: os.stat(f).st_blocks == 0)
    refused(errno.EFBIG, os.truncate, f, 1 << 45)
    put(f, pattern)

    # O_TRUNC, O_DIRECT, unlinked while open
    put(f, b"short")
    assert get(f) == b"short"
    put(f, pattern)
    buf = mmap.mmap(-1, 1 << 20)
    fd = os.open(f, os.O_RDONLY | os.O_DIRECT)
    n = os.preadv(fd, [buf], 0)
    assert buf[:n] == pattern[:n] and n == min(len(pattern), 1 << 20)
    os.close(fd)
    put(params + "/gone", pattern)
    fd = os.open(params + "/gone", os.O_RDWR)
    os.unlink(params + "/gone")
    os.pwrite(fd, b"still", 0)
    assert os.pread(fd, 5, 0) == b"still" and os.fstat(fd).st_nlink == 0
    os.close(fd)
    dirfd = os.open(params, os.O_RDONLY)
    os.fsync(dirfd)
    os.close(dirfd)


def holes():
    f = params + "/holes"
    fd = os.open(f, os.O_CREAT | os.O_RDWR)
    os.pwrite(fd, b"A" * 100, 0)
    os.pwrite(fd, b"B" * 100, 8 * block)
    # While somebody may have dirty pages that the daemon cannot see, everything is data.
    assert os.lseek(fd, 0, os.SEEK_HOLE) == 8 * block + 100
    assert os.fstat(fd).st_blocks * 512 >= 8 * block + 100
    os.close(fd)
    assert retry(lambda: os.stat(f).st_blocks * 512 < 3 * block), os.stat(f).st_blocks
    fd = os.open(f, os.O_RDONLY)
    assert os.lseek(fd, 0, os.SEEK_DATA) == 0
    assert 100 <= os.lseek(fd, 0, os.SEEK_HOLE) <= block
    assert 7 * block <= os.lseek(fd, 2 * block, os.SEEK_DATA) <= 8 * block
    assert os.lseek(fd, 8 * block + 5, os.SEEK_HOLE) == 8 * block + 100
    refused(errno.ENXIO, os.lseek, fd, 8 * block + 100, os.SEEK_DATA)
    refused(errno.ENXIO, os.lseek, fd, 8 * block + 100, os.SEEK_HOLE)
    os.close(fd)


def maps():
    f = params + "/map"
    put(f, bytes(2 * block + 100))
    with open(f, "r+b") as fh, mmap.mmap(fh.fileno(), 0) as m:
        m[block - 5:block + 5] = b"0123456789"
        m[-1:] = b"!"
        m.flush()
        assert get(f)[block - 5:block + 5] == b"0123456789"
    with open(f, "rb") as fh:
        m = mmap.mmap(fh.fileno(), 0, access=mmap.ACCESS_READ)
        assert m[-1:] == b"!"
        m.close()
        m = mmap.mmap(fh.fileno(), 0, access=mmap.ACCESS_COPY)
        m[0:4] = b"mine"
        m.close()
    assert get(f)[:4] == bytes(4)


def permissions():
    """The kernel checks modes, for root's own mount too (other users: user.sh)."""
    f = params + "/readonly"
    put(f, b"x")
    os.chmod(f, 0o400)
    if os.geteuid() != 0:
        refused(errno.EACCES, os.open, f, os.O_WRONLY)


def after():
    assert get(params + "/names/b") == b"two"
    f = params + "/holes"
    st = os.stat(f)
    assert st.st_size == 8 * block + 100 and st.st_blocks * 512 < 3 * block, st
    assert get(f) == b"A" * 100 + bytes(8 * block - 100) + b"B" * 100
    assert os.getxattr(params + "/attributes", "user.moment.dtype") == b"float32"
    assert stat.S_IMODE(os.stat(params + "/masked").st_mode) == 0o640
    assert get(params + "/map")[block - 5:block + 5] == b"0123456789"
    assert not os.path.exists(params + "/gone")
    assert len(os.listdir(params + "/many")) == 10
    assert len(os.getxattr(params, "user.big")) == 60000


if len(sys.argv) > 3:
    after()
else:
    for part in (names, listing, attributes, data, holes, maps, permissions):
        part()
        print(f"{part.__name__}: ok", flush=True)
    after()
