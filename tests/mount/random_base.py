# SPDX-License-Identifier: Apache-2.0
"""What the profiles of random_ops.py share: the mount, and plain operations with their model.

The model of a file is a bytearray, the model of the tree a dict of paths. A profile is a class with WEIGHTS, the
names of its operations, and the mount's options; it may replace operations of this one.
"""
import collections
import ctypes
import errno
import json
import mmap
import os
import subprocess
import time

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
    def __init__(self, top, args, options):
        self.backing, self.point, self.args = top + "/backing", top + "/mnt", args
        os.mkdir(self.point)
        self.params = self.point + "/params"
        self.options = f"block={BLOCK},commit=off,io={args.io},{options}"
        self.daemon, self.log = None, top + "/log"

    def told(self):
        """What the daemon has said lately."""
        with open(self.log, errors="replace") as f:
            return "".join(f.readlines()[-12:])

    def start(self):
        with open(self.log, "ab") as log:
            self.daemon = subprocess.Popen([self.args.momentfs, "-f", "-o", self.options, self.backing, self.point],
                                           stdout=log, stderr=log)
        for _ in range(400):
            if os.path.ismount(self.point):
                return
            if self.daemon.poll() is not None:
                raise Failure(f"momentfs ended with {self.daemon.returncode} before it mounted")
            time.sleep(0.05)
        raise Failure("nothing was mounted within 20 s")

    def ended(self, status=0):
        if self.daemon.wait(timeout=60) != status:
            raise Failure(f"momentfs ended with {self.daemon.returncode}, expected {status}")
        self.daemon = None

    def stop(self):
        for left in range(3, -1, -1):  # others on the machine may look at a mount for a moment
            done = subprocess.run([self.args.momentctl, "umount", self.point], stderr=subprocess.PIPE, text=True)
            if done.returncode and not left:
                users = subprocess.run(["fuser", "-vm", self.point], capture_output=True, text=True)
                raise Failure(f"momentctl umount: {done.stderr}{users.stderr}")
            if done.returncode == 0:
                break
            time.sleep(0.3)
        self.ended()

    def crash(self):
        """kill -9; the dead mount is cleared."""
        self.daemon.kill()
        self.ended(-9)
        if subprocess.run(["umount", "-l", self.point], stderr=subprocess.DEVNULL).returncode:
            subprocess.run(["fusermount3", "-u", "-z", self.point], check=True)

    def fsck(self):
        done = subprocess.run([self.args.momentctl, "fsck", self.backing], capture_output=True, text=True)
        if done.returncode:
            raise Failure(f"momentctl fsck: {done.stdout}{done.stderr}")

    def command(self, word):
        with open(self.point + "/.moment/control", "wb", buffering=0) as f:
            f.write(word.encode())

    def status(self):
        with open(self.point + "/.moment/status") as f:
            return json.load(f)

    def kill(self):
        if os.path.ismount(self.point) or self.daemon:
            subprocess.run(["umount", "-l", self.point], stderr=subprocess.DEVNULL)
            subprocess.run(["fusermount3", "-u", "-z", "-q", self.point], stderr=subprocess.DEVNULL)
        if self.daemon and self.daemon.poll() is None:
            self.daemon.kill()
            self.daemon.wait()


class Ops:
    MAX_FILE = 3 << 20
    MAX_FILES = 70
    REMOUNTS = 4
    WEIGHTS = [("write", 26), ("read", 22), ("read_direct", 6), ("create", 10), ("truncate", 6), ("punch", 5),
               ("allocate", 2), ("map_write", 8), ("rename", 5), ("unlink", 4), ("mkdir", 2), ("xattr", 3),
               ("fsync", 0.7), ("commit", 0.5), ("drop", 0.3)]

    @staticmethod
    def options(args):
        return f"ram={args.ram or '3M'}"

    def __init__(self, mount, rng, args):
        self.m, self.r, self.args = mount, rng, args
        self.last = collections.deque(maxlen=24)  # what the last operations were, for whoever looks into a failure
        self.files = {}  # path below params -> bytearray
        self.attrs = {}  # path -> {name: value}
        self.dirs = [""]
        self.serial = 0
        self.noise = rng.randbytes(2 * self.MAX_FILE)

    def begin(self):
        """When the mount is there."""

    def end(self):
        """After the last operation."""
        self.check_all()
        return f"{len(self.files)} files, {sum(map(len, self.files.values()))} bytes at the end"

    def close(self):
        """Whatever happened: what was started is ended."""

    def note(self, text):
        self.last.append(text)

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
        return self.r.randrange(min(self.MAX_FILE - 700000, len(content) + 70000) + 1)

    # -- operations
    def create(self):
        if len(self.files) >= self.MAX_FILES:
            return self.unlink()
        p, n = self.new_name(), self.size()
        d = self.data(n)
        self.note(f"create {p} of {n}")
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
        if off + n > self.MAX_FILE:
            return self.truncate()
        self.note(f"write {p} {off}+{n}, file of {len(c)}{', O_APPEND' if flags & os.O_APPEND else ''}")
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
        self.note(f"truncate {p} {len(c)} -> {n}")
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
        self.note(f"punch {p} {off}+{n}")
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
        self.note(f"allocate {p} {off}+{n} keep {keep}")
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
                    self.note(f"store {p} {off}+{len(d)}")
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
        self.note(f"rename {p} {q}")
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
        self.note(f"unlink {p}")
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
        self.note("commit")
        self.m.command("commit")

    def drop(self):
        if os.geteuid() == 0:
            with open("/proc/sys/vm/drop_caches", "w") as f:
                f.write("1")

    def remount(self):
        self.note("remount")
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
