# SPDX-License-Identifier: Apache-2.0
"""Profile `tree` of random_ops.py: a tree of --files FILES small files and its directories, in which names and files
change at random, with commits, rollbacks, kills and mounts of all of it.

A file's bytes follow from a number and a length, so the model has two numbers a file. A look at everything takes its
time; in between, what was changed last is looked at, and some others, found by chance.
"""
import errno
import os

from random_base import Failure, Ops, expect_error


class TreeOps(Ops):
    REMOUNTS = 2
    WEIGHTS = [("create", 20), ("write", 20), ("cut", 5), ("unlink", 12), ("rename", 12), ("rename_dir", 2), ("replace", 5),
               ("mkdir", 4), ("rmdir", 3), ("look_at_some", 20), ("list_dir", 5), ("fsync", 1), ("commit", 1),
               ("rollback", 0.3), ("crash", 0.3)]

    @staticmethod
    def options(args):
        return f"ram={args.ram or '16M'}"

    def __init__(self, mount, rng, args):
        super().__init__(mount, rng, args)
        self.files = {}  # (directory, name) -> (number, length); a directory is a number, so that renaming it is cheap
        self.order = []  # the same keys, to choose from
        self.at = {}  # key -> its place in order
        self.dirs = {0: (None, "")}  # number -> (parent, name)
        self.inside = {0: 0}  # number of entries of a directory
        self.since = {}  # what the last commit had of keys that have changed since: None, or the value
        self.dirs_saved = dict(self.dirs)

    # -- the model
    def where(self, d):
        parts = []
        while d:
            d, name = self.dirs[d]
            parts.append(name)
        return "/".join([self.m.params] + parts[::-1])

    def file_path(self, key):
        return self.where(key[0]) + "/" + key[1]

    def put(self, key, value):
        if value != self.files.get(key):
            self.since.setdefault(key, self.files.get(key))
        if key not in self.files:
            self.at[key] = len(self.order)
            self.order.append(key)
            self.inside[key[0]] += 1
        self.files[key] = value

    def drop(self, key):
        self.since.setdefault(key, self.files.pop(key))
        i, last = self.at.pop(key), self.order.pop()
        if last != key:
            self.order[i] = last
            self.at[last] = i
        self.inside[key[0]] -= 1

    def save(self):
        self.since = {}
        self.dirs_saved = dict(self.dirs)

    def back(self):
        for key, value in list(self.since.items()):
            self.inside.setdefault(key[0], 0)
            if value is not None:
                self.put(key, value)
            elif key in self.files:
                self.drop(key)
        self.dirs = dict(self.dirs_saved)
        self.inside = {d: 0 for d in self.dirs}
        for d, _ in self.files:
            self.inside[d] += 1
        for d, (parent, _) in self.dirs.items():
            if d:
                self.inside[parent] += 1
        self.since = {}

    def content(self, value):
        n, length = value
        at = n * 7919 % (len(self.noise) - length)
        return self.noise[at:at + length]

    def some_value(self):
        self.serial += 1
        return self.serial, self.r.choice([0, 1, 100, 100, 100, 4096, self.r.randrange(300), self.r.randrange(9000)])

    def some_dir(self):
        return self.r.choice(list(self.dirs)) if len(self.dirs) < 100 else self.r.choice(self.dir_list)

    @property
    def dir_list(self):
        if getattr(self, "_dirs_of", None) is not self.dirs or len(self._dir_list) != len(self.dirs):
            self._dirs_of, self._dir_list = self.dirs, list(self.dirs)
        return self._dir_list

    def some_file(self):
        return self.r.choice(self.order) if self.order else None

    # -- operations
    def begin(self):
        n = self.args.files
        for _ in range(max(1, n // 200)):
            self.mkdir()
        dirs = list(self.dirs)
        for i in range(n):
            self.make(dirs[i % len(dirs)])
        self.commit()

    def make(self, d):
        value = self.some_value()
        key = (d, f"f{value[0]}")
        fd = os.open(self.file_path(key), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        try:
            if os.write(fd, self.content(value)) != value[1]:
                raise Failure("a short write")
        finally:
            os.close(fd)
        self.put(key, value)
        return key

    def create(self):
        self.note(f"create {self.make(self.some_dir())}")

    def write(self):
        key = self.some_file()
        if key is None:
            return
        value = self.some_value()
        self.note(f"write {key} {value}")
        with open(self.file_path(key), "wb", buffering=0) as f:
            f.write(self.content(value))
        self.put(key, value)
        self.same_file(key)

    def cut(self):
        key = self.some_file()
        if key is None or not self.files[key][1]:
            return
        value = self.files[key]  # the bytes depend on the length: what is cut off is written again
        length = value[1]
        new = self.r.randrange(length)
        self.note(f"cut {key} {length} -> {new}, and back")
        os.truncate(self.file_path(key), new)
        with open(self.file_path(key), "r+b", buffering=0) as f:
            got = f.read()
            if got != self.content(value)[:new]:
                raise Failure(f"{key} has other bytes after it was cut")
            f.write(self.content(value)[new:])
        self.same_file(key)

    def unlink(self):
        key = self.some_file()
        if key is None:
            return
        self.note(f"unlink {key}")
        os.unlink(self.file_path(key))
        path = self.file_path(key)
        self.drop(key)
        expect_error(errno.ENOENT, os.stat, path)

    def rename(self):
        key = self.some_file()
        if key is None:
            return
        self.serial += 1
        to = (self.some_dir(), f"r{self.serial}")
        self.note(f"rename {key} {to}")
        os.rename(self.file_path(key), self.file_path(to))
        value = self.files[key]
        self.drop(key)
        self.put(to, value)
        self.same_file(to)

    def replace(self):
        """What editors do: a new file takes the name of an old one."""
        key = self.some_file()
        if key is None:
            return
        new = self.make(key[0])
        self.note(f"{new} replaces {key}")
        os.rename(self.file_path(new), self.file_path(key))
        value = self.files[new]
        self.drop(new)
        self.put(key, value)
        self.same_file(key)

    def mkdir(self):
        d = self.some_dir() if len(self.dirs) < 50 or self.r.random() < 0.5 else 0
        if sum(1 for _ in self.parents(d)) > 20:
            d = 0
        self.serial += 1
        self.note(f"mkdir d{self.serial} in {d}")
        os.mkdir(f"{self.where(d)}/d{self.serial}")
        self.dirs[self.serial] = (d, f"d{self.serial}")
        self.inside[self.serial] = 0
        self.inside[d] += 1

    def parents(self, d):
        while d:
            yield d
            d = self.dirs[d][0]

    def rmdir(self):
        d = self.some_dir()
        if not d:
            return
        self.note(f"rmdir {d}")
        if self.inside[d]:
            return expect_error(errno.ENOTEMPTY, os.rmdir, self.where(d))
        os.rmdir(self.where(d))
        self.inside[self.dirs[d][0]] -= 1
        del self.dirs[d]
        del self.inside[d]

    def rename_dir(self):
        d, to = self.some_dir(), self.some_dir()
        if not d:
            return
        self.serial += 1
        name = f"d{self.serial}"
        self.note(f"rename directory {d} into {to} as {name}")
        if d in self.parents(to):
            return expect_error(errno.EINVAL, os.rename, self.where(d), f"{self.where(to)}/{name}")
        os.rename(self.where(d), f"{self.where(to)}/{name}")
        self.inside[self.dirs[d][0]] -= 1
        self.inside[to] += 1
        self.dirs[d] = (to, name)

    def fsync(self):
        key = self.some_file()
        if key is None:
            return
        self.note(f"fsync {key}")
        fd = os.open(self.file_path(key), os.O_RDWR)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        self.save()

    def commit(self):
        super().commit()
        self.save()

    def rollback(self):
        self.note("rollback")
        changed = list(self.since)
        self.m.command("rollback")
        self.back()
        self.look_at(changed)

    def remount(self):
        self.note("remount")
        self.m.stop()
        self.m.fsck()
        self.save()
        self.m.start()
        self.check_all()

    def crash(self):
        self.note("crash")
        changed = list(self.since)
        self.m.crash()
        self.m.fsck()
        self.m.start()
        self.back()
        self.look_at(changed)

    # -- comparing
    def same_file(self, key):
        with open(self.file_path(key), "rb", buffering=0) as f:
            got = f.read()
        want = self.content(self.files[key])
        if got != want:
            raise Failure(f"{self.file_path(key)}: {len(got)} bytes, expected {len(want)}, or other ones")

    def look_at(self, keys):
        for key in keys:
            if key in self.files:
                self.same_file(key)
            elif key[0] in self.dirs and os.path.lexists(self.file_path(key)):
                raise Failure(f"{self.file_path(key)} is there")
        for _ in range(3):
            self.list_dir()

    def look_at_some(self):
        for _ in range(5):
            key = self.some_file()
            if key is not None:
                self.same_file(key)

    def list_dir(self):
        d = self.some_dir()
        self.note(f"list {d}")
        found = os.listdir(self.where(d))
        if len(found) != self.inside[d] or len(set(found)) != len(found):
            raise Failure(f"{self.where(d)} has {len(found)} names, expected {self.inside[d]}")
        for name in found:
            if (d, name) not in self.files and not os.path.isdir(f"{self.where(d)}/{name}"):
                raise Failure(f"{self.where(d)}/{name} is there")

    def check_all(self):
        n = 0
        for d in self.dirs:
            found = os.listdir(self.where(d))
            if len(found) != self.inside[d]:
                raise Failure(f"{self.where(d)} has {len(found)} names, expected {self.inside[d]}")
            for name in found:
                if (d, name) in self.files:
                    self.same_file((d, name))
                    n += 1
        if n != len(self.files):
            raise Failure(f"{n} files, expected {len(self.files)}")
        held = self.m.status()["catalog"]
        if held["files"] != n or held["directories"] != len(self.dirs):
            raise Failure(f"status tells of {held}, there are {n} files and {len(self.dirs)} directories")

    def end(self):
        self.check_all()
        return f"{len(self.files)} files in {len(self.dirs)} directories at the end"
