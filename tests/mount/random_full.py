# SPDX-License-Identifier: Apache-2.0
"""Profile `full` of random_ops.py: a pool that is nearly always full, files that live on without a name, O_DIRECT and
asynchronous writes, beside processes that read the same files through the kernel's pages.

What is promised: a write that finds no room changes nothing, or is short; what is cut off, removed or punched is no
loss for others; a range that was allocated can be written, through a mapping too; whoever reads after an operation has
returned sees what it did, by read(2), by a mapping that is older, or past the kernel's pages.

A file that lost its name is kept in the model as /proc/self/fd/N, by which it can be opened again.
"""
import ctypes
import errno
import mmap
import os
import platform
import random
import signal
import time

from random_base import BLOCK, Failure, Ops, PUNCH, check, expect_error, libc

SYS_IO_SETUP, SYS_IO_GETEVENTS, SYS_IO_SUBMIT = {"x86_64": (206, 208, 209)}.get(platform.machine(), (0, 4, 2))
LANES = 8
LANE = 128 << 10


class Iocb(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64), ("key", ctypes.c_uint32), ("rw_flags", ctypes.c_int32),
                ("opcode", ctypes.c_uint16), ("prio", ctypes.c_int16), ("fd", ctypes.c_uint32), ("buf", ctypes.c_uint64),
                ("nbytes", ctypes.c_uint64), ("offset", ctypes.c_int64), ("reserved", ctypes.c_uint64),
                ("flags", ctypes.c_uint32), ("resfd", ctypes.c_uint32)]


class IoEvent(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64), ("obj", ctypes.c_uint64), ("res", ctypes.c_int64), ("res2", ctypes.c_int64)]


class Readers:
    """Processes that read and map whatever files there are, so that the kernel has pages of them at any moment.

    They let go of everything while they are paused: a mount in use is not unmounted.
    """

    def __init__(self, folder, n):
        self.words = mmap.mmap(-1, 4096)  # [0]: paused; [1 + i]: reader i has let go
        self.n = n
        self.pids = []
        for i in range(n):
            pid = os.fork()
            if pid == 0:
                try:
                    self._run(folder, i)
                finally:
                    os._exit(1)
            self.pids.append(pid)

    def _run(self, folder, i):
        rng = random.Random(i)
        parent = os.getppid()
        while os.getppid() == parent:
            if self.words[0]:
                self.words[1 + i] = 1
                time.sleep(0.005)
                continue
            self.words[1 + i] = 0
            try:
                names = [e.path for e in os.scandir(folder) if e.is_file()]
                if names:
                    self._look(rng.choice(names), rng)
            except (OSError, ValueError):  # removed, or cut meanwhile
                pass
            time.sleep(0.002)  # a core is needed elsewhere

    @staticmethod
    def _look(path, rng):
        fd = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            for _ in range(3):
                os.pread(fd, 200000, rng.randrange(size + 1))
            if size:
                # write(2) from a mapping into a pipe fails with EFAULT behind the end of a file that was cut: no SIGBUS.
                with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as m, open(os.devnull, "wb", buffering=0) as null:
                    at = rng.randrange(size)
                    r, w = os.pipe()
                    try:
                        os.write(w, memoryview(m)[at:at + 4096])
                    finally:
                        os.close(r)
                        os.close(w)
        finally:
            os.close(fd)

    def pause(self):
        self.words[0] = 1
        for i in range(self.n):
            self.words[1 + i] = 0
        end = time.monotonic() + 20
        while not all(self.words[1 + i] for i in range(self.n)):
            if time.monotonic() > end:
                raise Failure("a reader hangs")
            time.sleep(0.002)

    def go_on(self):
        self.words[0] = 0

    def close(self):
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.pids = []


class FullOps(Ops):
    MAX_FILE = 2 << 20
    MAX_FILES = 40
    REMOUNTS = 6
    WEIGHTS = [("write", 22), ("write_direct", 8), ("write_aio", 8), ("read", 12), ("read_direct", 4), ("create", 14),
               ("truncate", 10), ("punch", 4), ("allocate", 3), ("store", 8), ("store_reserved", 3), ("keep_map", 3),
               ("rename", 4), ("unlink", 3), ("let_go", 4), ("seek", 2), ("uncache", 6), ("xattr", 1), ("fsync", 0.7),
               ("commit", 1), ("crash", 0.4), ("make_room", 0.3)]

    @staticmethod
    def options(args):
        return f"ram={args.ram or '3M'},size={args.size or '5M'}"

    def __init__(self, mount, rng, args):
        super().__init__(mount, rng, args)
        self.nameless = {}  # /proc/self/fd/N -> N
        self.maps = {}  # name in files -> a mapping that readers have had for long
        self.buf = mmap.mmap(-1, LANES * LANE)
        self.buf_at = ctypes.addressof(ctypes.c_char.from_buffer(self.buf))
        self.ctx = ctypes.c_uint64()
        if libc.syscall(SYS_IO_SETUP, ctypes.c_long(LANES), ctypes.byref(self.ctx)):
            raise Failure(f"io_setup: {os.strerror(ctypes.get_errno())}")
        self.refused = 0
        self.readers = None

    def begin(self):
        self.readers = Readers(self.m.params, 2)

    def close(self):
        if self.readers:
            self.readers.close()
        self.maps.clear()
        for fd in self.nameless.values():
            os.close(fd)
        self.nameless.clear()

    # -- choosing
    def path(self, p):
        return p if p in self.nameless else super().path(p)

    def named(self):
        names = [p for p in self.files if p not in self.nameless]
        return self.r.choice(names) if names else None

    def size(self):
        return min(super().size(), 400000)

    def place(self, content):
        return self.r.randrange(min(self.MAX_FILE - 400000, len(content) + 70000) + 1)

    # -- what is there after an operation
    def took(self, p, off, d, done):
        """The first `done` bytes of a write were taken."""
        c = self.files[p]
        if done < len(d):
            self.refused += 1
            self.note(f"({done} taken)")
        if done:
            if off > len(c):
                c.extend(bytes(off - len(c)))
            c[off:off + done] = d[:done]

    def settled(self, p, off=0, n=None):
        """By every way of looking it is what the model has."""
        c = self.files[p]
        n = len(c) - off if n is None else n
        want = bytes(c[off:off + n])
        size = os.stat(self.path(p)).st_size
        if size != len(c):
            raise Failure(f"{p} has {size} bytes, expected {len(c)}")
        if p in self.maps:
            m = self.maps[p]
            end = min(len(m), len(c), off + n)
            # A write that is refused may be seen for a moment: the kernel drops its pages after the answer.
            until = time.monotonic() + 2
            while off < end and m[off:end] != want[:end - off] and time.monotonic() < until:
                time.sleep(0.001)
            if off < end:
                self.same(p + " by an old mapping", off, m[off:end], want[:end - off], len(c))
        fd = os.open(self.path(p), os.O_RDONLY)
        try:
            self.same(p, off, os.pread(fd, n, off), want)
        finally:
            os.close(fd)
        fd = os.open(self.path(p), os.O_RDONLY | os.O_DIRECT)
        try:
            start = off // 4096 * 4096
            with mmap.mmap(-1, max(1, off + n - start)) as b:
                got = os.preadv(fd, [b], start)
                self.same(p + " past the pages", off, b[off - start:got], want, len(c))
        finally:
            os.close(fd)

    def same(self, p, off, got, want, size=None):
        if size is None:
            return super().same(p, off, got, want)
        if got == want:
            return
        i = next((i for i in range(min(len(got), len(want))) if got[i] != want[i]), min(len(got), len(want)))
        raise Failure(f"{p}: {len(got)} bytes at {off}, expected {len(want)}; they differ from {off + i} on "
                      f"({got[i:i + 4].hex()}, expected {want[i:i + 4].hex()}; file of {size})")

    def around(self, p, off, n):
        """Where an operation was, and a little more."""
        a, b = max(0, off - 5000), min(len(self.files[p]), off + n + 5000)
        if a < b:
            self.settled(p, a, b - a)
        else:
            self.settled(p, 0, min(100, len(self.files[p])))

    def room(self, fn, *args):
        """False: there was none."""
        try:
            return fn(*args)
        except OSError as e:
            if e.errno != errno.ENOSPC:
                raise
            return None

    # -- operations
    def create(self):
        if len(self.files) >= self.MAX_FILES:
            return self.unlink()
        p, d = self.new_name(), self.data(self.size())
        self.note(f"create {p} of {len(d)}")
        fd = os.open(self.path(p), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        try:
            self.files[p] = bytearray()
            self.took(p, 0, d, self.room(os.write, fd, d) or 0)
        finally:
            os.close(fd)
        expect_error(errno.EEXIST, os.open, self.path(p), os.O_CREAT | os.O_EXCL | os.O_WRONLY)

    def write(self):
        p = self.any_file()
        if p is None:
            return self.create()
        c, d = self.files[p], self.data(self.size())
        off = self.place(c)
        flags = os.O_WRONLY | (os.O_APPEND if self.r.random() < 0.1 else 0)
        if flags & os.O_APPEND:
            off = len(c)
        if off + len(d) > self.MAX_FILE:
            return self.truncate()
        self.note(f"write {p} {off}+{len(d)}, file of {len(c)}{', O_APPEND' if flags & os.O_APPEND else ''}")
        fd = os.open(self.path(p), flags)
        try:
            done = self.room(os.write, fd, d) if flags & os.O_APPEND else self.room(os.pwrite, fd, d, off)
        finally:
            os.close(fd)
        self.took(p, off, d, done or 0)
        self.around(p, off, len(d))

    @staticmethod
    def growing(c, off, n):
        """O_DIRECT beyond the end: of one block only, since a part of it that was written makes the file longer."""
        return min(n, BLOCK - off % BLOCK) if off + n > len(c) else n

    def write_direct(self):
        p = self.any_file()
        if p is None:
            return
        c = self.files[p]
        off = self.place(c) // 512 * 512
        n = self.growing(c, off, min(self.r.randrange(1, 600) * 512, self.MAX_FILE - off))
        d = self.data(n)
        self.buf[:n] = d
        self.note(f"write {p} {off}+{n}, O_DIRECT, file of {len(c)}")
        fd = os.open(self.path(p), os.O_WRONLY | os.O_DIRECT)
        try:
            done = self.room(os.pwritev, fd, [memoryview(self.buf)[:n]], off)
        finally:
            os.close(fd)
        if done is None:
            self.refused_direct(p, off, d)
        else:
            self.took(p, off, d, done)
        self.around(p, off, n)

    def refused_direct(self, p, off, d):
        """With O_DIRECT a write is never short: if all of it has no room, a part may be written."""
        self.refused += 1
        self.note("(refused)")
        c = self.files[p]
        with mmap.mmap(-1, self.MAX_FILE) as b:
            fd = os.open(self.path(p), os.O_RDONLY | os.O_DIRECT)
            try:
                size = os.preadv(fd, [b], 0)
            finally:
                os.close(fd)
            if not len(c) <= size <= max(len(c), off + len(d)):
                raise Failure(f"{p}: {size} bytes after a write of {len(d)} at {off} that was refused, it had {len(c)}")
            c.extend(bytes(size - len(c)))
            end = min(size, off + len(d))
            for k in range(off, end):
                if b[k] != c[k] and b[k] != d[k - off]:
                    raise Failure(f"{p}: byte {k} after a write that was refused: neither old nor new")
            if off < end:
                c[off:end] = b[off:end]

    def write_aio(self):
        """Several writes at once, at places that do not overlap; who reads meanwhile sees old or new bytes."""
        p = self.any_file()
        if p is None:
            return
        c = self.files[p]
        lanes, off = [], self.place(c) // 4096 * 4096
        for i in range(self.r.randrange(1, LANES + 1)):
            n = self.growing(c, off, self.r.choice([4096, 12288, 40960, LANE]))
            if off + n > self.MAX_FILE:
                break
            lanes.append((i, off, self.data(n)))
            off += n + self.r.choice([0, 0, 4096, 65536])
        if not lanes:
            return
        self.note(f"write {p} by AIO {[(o, len(d)) for _, o, d in lanes]}, file of {len(c)}")
        fd = os.open(self.path(p), os.O_RDWR | os.O_DIRECT)
        cbs = (Iocb * len(lanes))()
        for cb, (i, o, d) in zip(cbs, lanes):
            self.buf[i * LANE:i * LANE + len(d)] = d
            cb.opcode, cb.fd, cb.buf, cb.nbytes, cb.offset, cb.data = 1, fd, self.buf_at + i * LANE, len(d), o, i
        todo = (ctypes.c_void_p * len(lanes))(*[ctypes.addressof(cb) for cb in cbs])
        events = (IoEvent * len(lanes))()
        try:
            sent = libc.syscall(SYS_IO_SUBMIT, self.ctx, ctypes.c_long(len(lanes)), todo)
            if sent != len(lanes):
                raise Failure(f"io_submit: {sent}")
            beside = self.path(p)
            with open(beside, "rb", buffering=0) as f:
                seen = os.pread(f.fileno(), 300000, lanes[0][1])
            if libc.syscall(SYS_IO_GETEVENTS, self.ctx, ctypes.c_long(sent), ctypes.c_long(sent), events, None) != sent:
                raise Failure("io_getevents")
        finally:
            os.close(fd)
        before, refused = bytes(c), []
        for ev in sorted(events, key=lambda ev: ev.data):
            i, o, d = lanes[ev.data]
            if ev.res < 0 and ev.res != -errno.ENOSPC:
                raise Failure(f"a write of {len(d)} at {o} ended with {os.strerror(-ev.res)}")
            if ev.res >= 0:
                self.took(p, o, d, ev.res)
            else:
                refused.append((o, d))
        for o, d in refused:
            self.refused_direct(p, o, d)
        for k, b in enumerate(seen):
            at = lanes[0][1] + k
            if b != c[at] if at < len(c) else True:
                lane = next((d[at - o] for _, o, d in lanes if o <= at < o + len(d)), None)
                if b != lane and not (at < len(before) and b == before[at]) and not (at >= len(before) and b == 0):
                    raise Failure(f"{p}: byte {at} is {b:#x} beside a write: neither old nor new")
        self.around(p, lanes[0][1], off - lanes[0][1])

    def truncate(self):
        p = self.any_file()
        if p is None:
            return
        c = self.files[p]
        n = self.r.choice([self.size(), self.r.randrange(len(c) + 1), len(c) // 2, len(c) // BLOCK * BLOCK])
        self.note(f"truncate {p} {len(c)} -> {n}")
        os.truncate(self.path(p), n)
        was = len(c)
        if n < was:
            del c[n:]
        else:
            c.extend(bytes(n - was))
        self.around(p, min(n, was), abs(n - was))

    def punch(self):
        p = self.any_file()
        if p is None or not self.files[p]:
            return
        c = self.files[p]
        off, n = self.r.randrange(len(c)), self.r.randrange(1, 400000)
        end = min(len(c), off + n)
        self.note(f"punch {p} {off}+{n}")
        fd = os.open(self.path(p), os.O_RDWR)
        try:
            if libc.fallocate(fd, PUNCH, off, n) == 0:
                c[off:end] = bytes(end - off)
            elif ctypes.get_errno() != errno.ENOSPC:
                check(-1, "punch")
            else:  # some of it may be zeros: the edges take room
                self.note("(refused)")
                self.refused += 1
                got = os.pread(fd, end - off, off)
                for k, b in enumerate(got):
                    if b != c[off + k] and b:
                        raise Failure(f"{p}: byte {off + k} after a punch that was refused: {b:#x}")
                c[off:end] = got
        finally:
            os.close(fd)
        self.around(p, off, n)

    def allocate(self):
        p = self.any_file()
        if p is None:
            return
        c = self.files[p]
        off, n = self.place(c), self.r.randrange(1, 200000)
        keep = self.r.random() < 0.5
        self.note(f"allocate {p} {off}+{n} keep {keep}")
        fd = os.open(self.path(p), os.O_RDWR)
        try:
            if libc.fallocate(fd, 1 if keep else 0, off, n) == 0:
                if not keep and off + n > len(c):
                    c.extend(bytes(off + n - len(c)))
            elif ctypes.get_errno() != errno.ENOSPC:
                check(-1, "fallocate")
            else:
                self.note("(refused)")
                self.refused += 1
        finally:
            os.close(fd)
        self.around(p, off, n)

    def store(self):
        """Through a mapping: what finds no room is told by msync, and is lost."""
        p = self.any_file()
        if p is None or not self.files[p]:
            return
        c = self.files[p]
        fd = os.open(self.path(p), os.O_RDWR)
        try:
            with mmap.mmap(fd, 0) as m:
                off = self.r.randrange(len(c))
                d = self.data(min(self.size(), len(c) - off))
                self.note(f"store {p} {off}+{len(d)}")
                m[off:off + len(d)] = d
                told = False
                try:
                    m.flush()
                except OSError as e:
                    if e.errno not in (errno.ENOSPC, errno.EIO):
                        raise
                    told = True
            if not told:
                c[off:off + len(d)] = d
        finally:
            os.close(fd)
        if told:
            self.lost(p, off, d)
        else:
            self.around(p, off, len(d))

    def lost(self, p, off, d):
        """A store found no room. Each sync says so until the bytes are given up, here by cutting them off."""
        self.note("(refused)")
        self.refused += 1
        c, fd = self.files[p], os.open(self.path(p), os.O_RDWR)
        try:
            try:
                os.fsync(fd)
            except OSError as e:
                if e.errno != errno.ENOSPC:
                    raise
            else:
                raise Failure(f"{p}: a second fsync succeeds, though a store at {off} is lost")
            off = off // 4096 * 4096
            os.ftruncate(fd, off)
            del c[off:]
            os.fsync(fd)
        finally:
            os.close(fd)
        self.settled(p)

    def store_reserved(self):
        """What was allocated has room: no store into it is refused, however full the pool."""
        p = self.any_file()
        if p is None or not self.files[p]:
            return
        c = self.files[p]
        off = self.r.randrange(len(c))
        n = min(self.r.randrange(1, 200000), len(c) - off)
        fd = os.open(self.path(p), os.O_RDWR)
        try:
            self.note(f"allocate {p} {off}+{n} and store")
            if libc.fallocate(fd, 1, off, n):
                if ctypes.get_errno() != errno.ENOSPC:
                    check(-1, "fallocate")
                self.refused += 1
                return
            for _ in range(3):
                a = self.r.randrange(n)
                d = self.data(self.r.randrange(1, n - a + 1))
                way = self.r.randrange(3)
                self.note(f"{['store', 'write', 'commit'][way]} {off + a}+{len(d)}")
                if way == 0:
                    with mmap.mmap(fd, 0) as m:
                        m[off + a:off + a + len(d)] = d
                        m.flush()
                elif way == 1:
                    done = os.pwrite(fd, d, off + a)
                    if done != len(d):
                        raise Failure(f"{p}: {done} of {len(d)} bytes at {off + a} taken, in an allocated range")
                else:
                    self.m.command("commit")
                    continue
                c[off + a:off + a + len(d)] = d
        finally:
            os.close(fd)
        self.around(p, off, n)

    def keep_map(self):
        """A mapping that stays, also when the file loses its name."""
        if len(self.maps) >= 6 and self.maps:
            self.maps.pop(self.r.choice(list(self.maps)))
        p = self.any_file()
        if p is None or not self.files[p] or p in self.maps:
            return
        self.note(f"map {p}")
        fd = os.open(self.path(p), os.O_RDONLY)
        try:
            self.maps[p] = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self.settled(p)

    def hold(self, p):
        """p is about to lose its name: half of the time somebody has it open."""
        if self.r.random() < 0.5 or len(self.nameless) >= 6:
            self.files.pop(p)
            self.maps.pop(p, None)
            return
        fd = os.open(self.path(p), os.O_RDONLY)
        q = f"/proc/self/fd/{fd}"
        self.note(f"(held as {q})")
        self.nameless[q] = fd
        self.files[q] = self.files.pop(p)
        if p in self.maps:
            self.maps[q] = self.maps.pop(p)

    def rename(self):
        p = self.named()
        if p is None:
            return
        q = self.new_name() if self.r.random() < 0.5 else self.named()
        self.note(f"rename {p} {q}")
        if q != p and q in self.files:
            self.hold(q)
        os.rename(self.path(p), self.path(q))
        if q != p:
            self.files[q] = self.files.pop(p)
            self.attrs.pop(q, None)
            if p in self.attrs:
                self.attrs[q] = self.attrs.pop(p)
            if p in self.maps:
                self.maps[q] = self.maps.pop(p)
        self.settled(q)

    def unlink(self):
        p = self.named()
        if p is None:
            return
        self.note(f"unlink {p}")
        path = self.path(p)
        self.hold(p)
        self.attrs.pop(p, None)
        os.unlink(path)
        expect_error(errno.ENOENT, os.stat, path)

    def let_go(self):
        """The last one who has a nameless file open closes it."""
        if not self.nameless:
            return
        q = self.r.choice(list(self.nameless))
        self.note(f"close {q}")
        self.settled(q)
        self.files.pop(q)
        self.maps.pop(q, None)
        os.close(self.nameless.pop(q))

    def make_room(self):
        for _ in range(8):
            self.unlink()
        self.commit()

    def seek(self):
        """Every byte that is not zero lies in what is called data."""
        p = self.any_file()
        if p is None:
            return
        c, pos = self.files[p], 0
        self.note(f"seek {p}")
        fd = os.open(self.path(p), os.O_RDONLY)
        try:
            while pos < len(c):
                try:
                    data = os.lseek(fd, pos, os.SEEK_DATA)
                except OSError as e:
                    if e.errno != errno.ENXIO:
                        raise
                    data = len(c)
                if any(c[pos:data]):
                    raise Failure(f"{p}: a hole from {pos} to {data} is not all zeros")
                pos = os.lseek(fd, data, os.SEEK_HOLE) if data < len(c) else data
        finally:
            os.close(fd)

    def uncache(self):
        p = self.any_file()
        if p is None:
            return
        self.note(f"uncache {p}")
        fd = os.open(self.path(p), os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def xattr(self):
        if any(p not in self.nameless for p in self.files):
            name = self.named()
            a = self.attrs.setdefault(name, {})
            value = self.data(self.r.choice([0, 3, 500, 9000]))
            os.setxattr(self.path(name), "user.n", value)
            a["user.n"] = value

    def drop_open(self):
        self.readers.pause()
        self.maps.clear()
        while self.nameless:
            self.let_go()

    def remount(self):
        self.note("remount")
        self.drop_open()
        self.m.stop()
        self.m.fsck()
        self.m.start()
        self.check_all()
        self.readers.go_on()

    def crash(self):
        """What was committed is there, and all was."""
        self.note("crash")
        self.drop_open()
        self.commit()
        self.m.crash()
        self.m.fsck()
        self.m.start()
        self.check_all()
        self.readers.go_on()

    def check_attrs(self, p):
        if p not in self.nameless:
            super().check_attrs(p)

    def check_all(self):
        held = {q: self.files.pop(q) for q in self.nameless}
        super().check_all()
        self.files.update(held)
        for p in self.files:
            self.settled(p)

    def end(self):
        self.check_all()
        told = super().end() + f", {self.refused} refused"
        # When everything is gone, so is all that it took.
        self.drop_open()
        for p in list(self.files):
            os.unlink(self.path(p))
        self.commit()
        self.commit()
        used = self.m.status()["pool"]
        self.files.clear()
        self.attrs.clear()
        if used["used_bytes"]:
            raise Failure(f"an empty mount uses {used}")
        return told
