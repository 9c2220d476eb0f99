# SPDX-License-Identifier: Apache-2.0
"""What the Python tests share: skipping, folders, mounts that are taken down, gradients from (step, name)."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

TOP = os.environ.get("abs_srcdir") or os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ.get("MOMENT_BUILD") or os.path.join(TOP, "build", "release")
MOMENTFS = os.environ.get("MOMENTFS") or os.path.join(BUILD, "momentfs")
MOMENTCTL = os.environ.get("MOMENTCTL") or os.path.join(BUILD, "momentctl")
CI = os.environ.get("CI") == "true"

os.environ.setdefault("MOMENT_QUIET", "1")
sys.path.insert(0, os.path.join(TOP, "src", "python"))


def skip_all(why):
    print(f"SKIP: {why}")
    sys.exit(1 if CI else 77)


try:
    import numpy  # noqa: F401
    import torch
except ImportError as e:
    skip_all(f"no Python module {e.name} (tools/setup installs it)")

torch.set_num_threads(2)


def fuse_missing():
    if not os.path.exists("/dev/fuse"):
        return "no /dev/fuse on this machine"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no permission on /dev/fuse"
    if not shutil.which("fusermount3"):
        return "no fusermount3"
    return None


def main():
    """unittest.main with the exit status that automake wants: 77 when every test was skipped."""
    program = unittest.main(module="__main__", exit=False, argv=sys.argv)
    result = program.result
    for _test, why in result.skipped:
        print(f"SKIP: {why}")
    if not result.wasSuccessful() or (CI and result.skipped):
        sys.exit(1)
    sys.exit(77 if result.testsRun == len(result.skipped) else 0)


class Mount:
    """A momentfs in the foreground on a folder of its own."""

    def __init__(self, folder, options="", name="mnt", backing=None, env=None):
        self.backing = backing or os.path.join(folder, "backing")
        self.path = os.path.join(folder, name)
        self.options = options
        self.log = os.path.join(folder, name + ".log")
        self.env = {**os.environ, **(env or {})}
        os.makedirs(self.path, exist_ok=True)
        self.process = None
        self.start()

    def start(self):
        command = [MOMENTFS, "-f"] + (["-o", self.options] if self.options else []) + [self.backing, self.path]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError("momentfs ended: " + self.told())
            try:  # not by ismount(): a dead mount that is yet to be cleared is one too
                with open(os.path.join(self.path, ".moment", "status")) as f:
                    if f.read():
                        return
            except OSError:
                pass
            time.sleep(0.02)
        raise AssertionError("nothing mounted within 20 s: " + self.told())

    def told(self):
        with open(self.log, errors="replace") as f:
            return f.read()

    def file(self, name, array):
        return os.path.join(self.path, "params", name, array)

    def unmount(self):
        """The clean way down."""
        out = subprocess.run([MOMENTCTL, "umount", self.path], capture_output=True, text=True, timeout=60)
        if out.returncode != 0:
            raise AssertionError(f"momentctl umount: {out.stdout}{out.stderr}")
        if self.process.wait(20) != 0:
            raise AssertionError("momentfs ended badly: " + self.told())

    def kill(self):
        self.process.kill()
        self.process.wait()

    def clear(self):
        subprocess.run(["umount", "-l", self.path], capture_output=True)

    def end(self):
        """At the end of a test, in whatever state this is."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if os.path.ismount(self.path) or not os.path.exists(self.path):
            self.clear()


class Case(unittest.TestCase):
    """A test with a folder and the mounts that it starts."""

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="momentfs-test-", dir="/var/tmp")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.opened = []
        self.addCleanup(self._close)

    def _close(self):
        for o in self.opened:
            try:
                o.close()
            except Exception:
                pass

    def keep(self, o):
        """Closed at the end of the test, before its mounts are taken down."""
        self.opened.append(o)
        return o

    def mount(self, options="ram=64M,block=1M,commit=off", **where):
        why = fuse_missing()
        if why:
            self.skipTest(why)
        m = Mount(self.folder, options, **where)
        self.addCleanup(m.end)
        self.addCleanup(self._close)  # cleanups run last first
        return m

    def backing(self, name="backing"):
        return os.path.join(self.folder, name)

    def assertBits(self, a, b, what=""):
        self.assertEqual((a.dtype, tuple(a.shape)), (b.dtype, tuple(b.shape)), what)
        differs = int((bits(a) != bits(b)).sum())
        self.assertEqual(differs, 0, f"{what}: {differs} of {a.numel()} elements differ")


def bits(t):
    """A tensor's bits as integers, so that NaN equals itself and -0.0 is not 0.0."""
    return t.detach().reshape(-1).contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def seed_of(step, name):
    return int.from_bytes(hashlib.blake2b(f"{step}/{name}".encode(), digest_size=7).digest(), "little")


def gradient(step, name, shape, dtype=torch.float32, scale=0.1):
    """Numbers that depend on step and name only."""
    g = torch.Generator().manual_seed(seed_of(step, name))
    return (torch.randn(shape, generator=g) * scale).to(dtype)


def weights(shapes, dtype=torch.float32):
    """[(name, Parameter)] of {name: shape}, from the names alone."""
    return [(n, torch.nn.Parameter(gradient("init", n, s, dtype, 0.5))) for n, s in shapes.items()]


def set_gradients(named, step, dtype=None):
    for name, p in named:
        p.grad = gradient(step, name, p.shape, dtype or p.dtype)


def shapes_of(tsv, limit=None):
    """{name: shape} of tests/data/<tsv>.tsv."""
    out = {}
    with open(os.path.join(TOP, "tests", "data", tsv + ".tsv")) as f:
        for line in f:
            name, shape, _ = line.rstrip("\n").split("\t")
            out[name] = tuple(int(x) for x in shape.split("x"))
            if limit and len(out) == limit:
                break
    return out


def sha256(path):
    with open(path, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()
