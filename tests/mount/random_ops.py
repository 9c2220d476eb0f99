#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Random operations through the mount, compared with a model in memory.

Files of odd sizes, several times the RAM tier in all, are created, written at odd places, truncated,
renamed, removed, punched, written through mappings, synced, committed; the mount is unmounted and mounted
again. Each read is compared at once, everything at the end and after each remount.

    random_ops.py --seed 7 --ops 20000 --io threads
"""
import argparse
import ctypes
import errno
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

MAX_FILE = 3 << 20
MAX_FILES = 70
BLOCK = 64 << 10
PUNCH = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
AT_FDCWD = -100
RENAME_NOREPLACE = 1

libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
libc.renameat2.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]


def check(res, what):
    if res < 0:
        e = ctypes.get_errno()
        raise OSError(e, os.strerror(e), what)


class Failure(Exception):
    pass


def expect_error(err, fn, *args):
    try:
        fn(*args)
    except OSError as e:
        if e.errno != err:
            raise Failure(f"{fn.__name__}{args}: {errno.errorcode[e.errno]}, expected {errno.errorcode[err]}")
        return
    raise Failure(f"{fn.__name__}{args} succeeded, expected {errno.errorcode[err]}")


class Mount:
    def __init__(self, top, args):
        self.backing, self.point, self.args = top + "/backing", top + "/mnt", args
        os.mkdir(self.point)
        self.params = self.point + "/params"
        self.daemon = None

    def start(self):
        opts = f"ram={self.args.ram},block={BLOCK},commit=off,io={self.args.io}"
        self.daemon = subprocess.Popen([self.args.momentfs, "-f", "-o", opts, self.backing, self.point])
        for _ in range(400):
            if os.path.ismount(self.point):
                return
            if self.daemon.poll() is not None:
                raise Failure(f"momentfs ended with {self.daemon.returncode} before it mounted")
            time.sleep(0.05)
        raise Failure("nothing was mounted within 20 s")

    def stop(self):
        subprocess.run([self.args.momentctl, "umount", self.point], check=True)
        if self.daemon.wait(timeout=60):
            raise Failure(f"momentfs ended with {self.daemon.returncode}")
        self.daemon = None

    def command(self, word):
        with open(self.point + "/.moment/control", "wb", buffering=0) as f:
            f.write(word.encode())

    def kill(self):
        if os.path.ismount(self.point) or self.daemon:
            subprocess.run(["umount", "-l", self.point], stderr=subprocess.DEVNULL)
            subprocess.run(["fusermount3", "-u", "-z", "-q", self.point], stderr=subprocess.DEVNULL)
        if self.daemon and self.daemon.poll() is None:
            self.daemon.kill()
            self.daemon.wait()


class Ops:
    def __init__(self, mount, rng):
        self.m, self.r = mount, rng
        self.files = {}  # path below params -> bytearray
        self.attrs = {}  # path -> {name: value}
        self.dirs = [""]
        self.serial = 0
        self.noise = rng.randbytes(2 * MAX_FILE)

    # -- choosing
    def path(self, p):
        return self.m.params + "/" + p

    def any_file(self):
        return self.r.choice(list(self.files)) if self.files else None

    def new_name(self):
        self.serial += 1
        d = self.r.choice(self.dirs)
        return (d + "/" if d else "") + f"f{self.serial}"

    def size(self):
        edge = self.r.choice([0, 1, 127, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5])
        return self.r.choice([edge, self.r.randrange(1, 700000), self.r.randrange(1, 5000)])

    def data(self, n):
        at = self.r.randrange(len(self.noise) - n + 1)
        return self.noise[at:at + n]

    def place(self, content):
        """An odd place, mostly inside the file, sometimes behind its end."""
        return self.r.randrange(min(MAX_FILE - 700000, len(content) + 70000) + 1)

    # -- operations
    def create(self):
        if len(self.files) >= MAX_FILES:
            return self.unlink()
        p, n = self.new_name(), self.size()
        d = self.data(n)
        fd = os.open(self.path(p), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        try:
            if n and os.write(fd, d) != n:
                raise Failure(f"short write of {n} bytes to {p}")
        finally:
            os.close(fd)
        self.files[p] = bytearray(d)
        expect_error(errno.EEXIST, os.open, self.path(p), os.O_CREAT | os.O_EXCL | os.O_WRONLY)

    def write(self):
        p = self.any_file()
        if p is None:
            return self.create()
        c, n = self.files[p], self.size()
        off, d = self.place(c), self.data(n)
        flags = os.O_WRONLY | (os.O_APPEND if self.r.random() < 0.1 else 0)
        if flags & os.O_APPEND:
            off = len(c)
        if off + n > MAX_FILE:
            return self.truncate()
        fd = os.open(self.path(p), flags)
        try:
            done = os.write(fd, d) if flags & os.O_APPEND else os.pwrite(fd, d, off)
        finally:
            os.close(fd)
        if done != n:
            raise Failure(f"short write of {n} bytes at {off} to {p}: {done}")
        if n:
            if off > len(c):
                c.extend(bytes(off - len(c)))
            c[off:off + n] = d

    def read(self):
        p = self.any_file()
        if p is None:
            return
        c = self.files[p]
        off, n = self.place(c), self.size()
        fd = os.open(self.path(p), os.O_RDONLY)
        try:
            got = os.pread(fd, n, off)
        finally:
            os.close(fd)
        self.same(p, off, got, bytes(c[off:off + n]))

    def read_direct(self):
        """Past the kernel's cache: what the daemon has."""
        p = self.any_file()
        if p is None:
            return
        c = self.files[p]
        off = self.place(c) // 4096 * 4096
        buf = mmap.mmap(-1, 1 << 20)
        fd = os.open(self.path(p), os.O_RDONLY | os.O_DIRECT)
        try:
            n = os.preadv(fd, [buf], off)
        finally:
            os.close(fd)
        got = buf[:n]
        buf.close()
        self.same(p, off, got, bytes(c[off:off + (1 << 20)]))

    def same(self, p, off, got, want):
        if got == want:
            return
        if len(got) != len(want):
            raise Failure(f"{p} at {off}: {len(got)} bytes, expected {len(want)}")
        i = next(i for i in range(len(got)) if got[i] != want[i])
        raise Failure(f"{p}: byte {off + i} is {got[i]:#x}, expected {want[i]:#x} "
                      f"(read of {len(got)} at {off}, file of {len(self.files[p])})")

    def truncate(self):
        p = self.any_file()
        if p is None:
            return
        c = self.files[p]
        n = self.r.choice([self.size(), self.r.randrange(len(c) + 1), len(c) // 2])
        os.truncate(self.path(p), n)
        if n < len(c):
            del c[n:]
        else:
            c.extend(bytes(n - len(c)))

    def punch(self):
        p = self.any_file()
        if p is None or not self.files[p]:
            return
        c = self.files[p]
        off, n = self.r.randrange(len(c)), self.r.randrange(1, 400000)
        fd = os.open(self.path(p), os.O_RDWR)
        try:
            check(libc.fallocate(fd, PUNCH, off, n), "punch")
        finally:
            os.close(fd)
        end = min(len(c), off + n)
        c[off:end] = bytes(end - off)

    def allocate(self):
        p = self.any_file()
        if p is None:
            return
        c = self.files[p]
        off, n = self.place(c), self.r.randrange(1, 200000)
        keep = self.r.random() < 0.5
        fd = os.open(self.path(p), os.O_RDWR)
        try:
            check(libc.fallocate(fd, 1 if keep else 0, off, n), "fallocate")
        finally:
            os.close(fd)
        if not keep and off + n > len(c):
            c.extend(bytes(off + n - len(c)))

    def map_write(self):
        p = self.any_file()
        if p is None or not self.files[p]:
            return
        c = self.files[p]
        fd = os.open(self.path(p), os.O_RDWR)
        try:
            with mmap.mmap(fd, 0) as m:
                for _ in range(self.r.randrange(1, 6)):
                    off = self.r.randrange(len(c))
                    d = self.data(min(self.size(), len(c) - off))
                    m[off:off + len(d)] = d
                    c[off:off + len(d)] = d
                if self.r.random() < 0.3:
                    m.flush()
                if self.r.random() < 0.5:
                    off = self.r.randrange(len(c))
                    self.same(p, off, m[off:off + 5000], bytes(c[off:off + 5000]))
        finally:
            os.close(fd)

    def rename(self):
        p = self.any_file()
        if p is None:
            return
        q = self.new_name()
        if self.r.random() < 0.3:
            q = self.any_file()
            if q != p:
                src, dst = os.fsencode(self.path(p)), os.fsencode(self.path(q))
                if libc.renameat2(AT_FDCWD, src, AT_FDCWD, dst, RENAME_NOREPLACE) == 0:
                    raise Failure(f"rename of {p} with NOREPLACE replaced {q}")
                if ctypes.get_errno() != errno.EEXIST:
                    raise Failure(f"NOREPLACE: {errno.errorcode[ctypes.get_errno()]}")
        os.rename(self.path(p), self.path(q))
        if q != p:
            self.files[q] = self.files.pop(p)
            self.attrs.pop(q, None)
            if p in self.attrs:
                self.attrs[q] = self.attrs.pop(p)

    def unlink(self):
        p = self.any_file()
        if p is None:
            return
        fd = os.open(self.path(p), os.O_RDONLY) if self.r.random() < 0.3 else -1
        os.unlink(self.path(p))
        c = self.files.pop(p)
        self.attrs.pop(p, None)
        expect_error(errno.ENOENT, os.stat, self.path(p))
        if fd >= 0:  # it lives on while it is open
            got = os.pread(fd, 100000, len(c) // 2)
            os.close(fd)
            if got != bytes(c[len(c) // 2:len(c) // 2 + 100000]):
                raise Failure(f"{p}: other bytes after unlink")

    def mkdir(self):
        if len(self.dirs) > 12:
            d = self.r.choice(self.dirs[1:])
            inside = [x for x in list(self.files) + self.dirs if x.startswith(d + "/")]
            if inside:
                return expect_error(errno.ENOTEMPTY, os.rmdir, self.path(d))
            os.rmdir(self.path(d))
            self.dirs.remove(d)
            return
        d = self.new_name()
        os.mkdir(self.path(d))
        self.dirs.append(d)

    def xattr(self):
        p = self.any_file()
        if p is None:
            return
        a = self.attrs.setdefault(p, {})
        name, value = f"user.n{self.r.randrange(4)}", self.data(self.r.choice([0, 3, 500, 9000]))
        if name in a and self.r.random() < 0.3:
            os.removexattr(self.path(p), name)
            del a[name]
        else:
            os.setxattr(self.path(p), name, value)
            a[name] = value
        self.check_attrs(p)

    def fsync(self):
        p = self.any_file()
        if p is None:
            return
        fd = os.open(self.path(p), os.O_RDWR)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def commit(self):
        self.m.command("commit")

    def drop(self):
        if os.geteuid() == 0:
            with open("/proc/sys/vm/drop_caches", "w") as f:
                f.write("1")

    def remount(self):
        self.m.stop()
        self.m.start()
        self.check_all()

    # -- comparing
    def check_attrs(self, p):
        a = self.attrs.get(p, {})
        names = sorted(os.listxattr(self.path(p)))
        if names != sorted(a):
            raise Failure(f"{p}: attributes {names}, expected {sorted(a)}")
        for n, v in a.items():
            if os.getxattr(self.path(p), n) != v:
                raise Failure(f"{p}: attribute {n} differs")

    def check_all(self):
        found_files, found_dirs = [], []
        for top, dirs, files in os.walk(self.m.params):
            base = os.path.relpath(top, self.m.params)
            base = "" if base == "." else base + "/"
            found_dirs += [base + d for d in dirs]
            found_files += [base + f for f in files]
        if sorted(found_files) != sorted(self.files):
            raise Failure(f"files differ: {set(found_files) ^ set(self.files)}")
        if sorted(found_dirs) != sorted(self.dirs[1:]):
            raise Failure(f"directories differ: {set(found_dirs) ^ set(self.dirs[1:])}")
        for p, c in self.files.items():
            with open(self.path(p), "rb", buffering=0) as f:
                got = f.read()
            self.same(p, 0, got, bytes(c))
            self.check_attrs(p)


WEIGHTS = [("write", 26), ("read", 22), ("read_direct", 6), ("create", 10), ("truncate", 6), ("punch", 5),
           ("allocate", 2), ("map_write", 8), ("rename", 5), ("unlink", 4), ("mkdir", 2), ("xattr", 3),
           ("fsync", 0.7), ("commit", 0.5), ("drop", 0.3)]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    ap.add_argument("--ops", type=int, default=1500)
    ap.add_argument("--io", default="auto", choices=["auto", "uring", "threads"])
    ap.add_argument("--ram", default="3M")
    ap.add_argument("--momentfs", default=os.environ.get("MOMENTFS", "momentfs"))
    ap.add_argument("--momentctl", default=os.environ.get("MOMENTCTL", "momentctl"))
    ap.add_argument("--remounts", type=int, default=4)
    args = ap.parse_args()
    print(f"seed {args.seed}, {args.ops} operations, io={args.io}", flush=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    top = tempfile.mkdtemp(prefix="momentfs-random.")
    mount = Mount(top, args)
    rng = random.Random(args.seed)
    ops = Ops(mount, rng)
    names, weights = zip(*WEIGHTS)
    counts = {}
    i, name = 0, "start"
    start = time.monotonic()
    try:
        mount.start()
        every = max(1, args.ops // (args.remounts + 1))
        for i in range(1, args.ops + 1):
            name = "remount" if i % every == 0 else rng.choices(names, weights)[0]
            counts[name] = counts.get(name, 0) + 1
            getattr(ops, name)()
        name = "the last look"
        ops.check_all()
        total = sum(map(len, ops.files.values()))
        mount.stop()
    except (Failure, OSError, subprocess.SubprocessError) as e:
        print(f"FAIL: operation {i} ({name}), seed {args.seed}: {e}", file=sys.stderr)
        return 1
    finally:
        mount.kill()
        shutil.rmtree(top, ignore_errors=True)
    print(f"passed in {time.monotonic() - start:.1f} s; {len(ops.files)} files, {total} bytes at the end; "
          + ", ".join(f"{n} {c}" for n, c in sorted(counts.items())))
    return 0


sys.exit(main())
