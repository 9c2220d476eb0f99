#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Training while others look: the files of a live mount read, mapped, copied; a daemon that dies; faults under load.

Cases A8 to A11 and A16 of the collected faults.
"""

import json
import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import support
import torch
from support import Case, gradient, set_gradients, sha256, weights

import momentfs
from momentfs.torch import AdamW

SHAPES = {"w": (1024, 1024), "b": (1023,), "s": ()}


class MountCase(Case):
    def train(self, m, shapes=SHAPES, steps=1, **kw):
        named = weights(shapes)
        opt = self.keep(AdamW(named, mount=m.path, **kw))
        for step in range(1, steps + 1):
            set_gradients(named, step)
            opt.step()
        return named, opt

    def agree(self, m, opt, named, read, what):
        for name, p in named:
            for key in ("exp_avg", "exp_avg_sq"):
                got = torch.from_numpy(np.array(read(m.file(name, key)), dtype=np.float32)).reshape(p.shape)
                self.assertBits(got, opt.state[p][key], f"{what}: {name}.{key}")


class Looking(MountCase):
    def test_every_way_to_map_a_live_file(self):
        """A8."""
        m = self.mount()
        for data in ("session", "mmap"):
            named, opt = self.train(m, data=data, fresh=True)
            ways = {
                "memmap r": lambda f: np.memmap(f, np.float32, "r"),
                "memmap c": lambda f: np.memmap(f, np.float32, "c"),
                "fromfile": lambda f: np.fromfile(f, np.float32),
                "mmap": lambda f: np.frombuffer(
                    mmap.mmap(os.open(f, os.O_RDONLY), 0, access=mmap.ACCESS_READ), np.float32),
                "torch private": lambda f: torch.from_file(f, shared=False, size=os.stat(f).st_size // 4).numpy(),
            }
            for what, read in ways.items():
                self.agree(m, opt, named, read, f"{data}, {what}")
            # What is written to a private mapping stays there.
            path = m.file("w", "exp_avg")
            before = sha256(path)
            private = np.memmap(path, np.float32, "c")
            private[:] = 7
            torch.from_file(path, shared=False, size=1024 * 1024).fill_(8)
            self.assertEqual(sha256(path), before)
            opt.close()
        # Nobody trains: the files are ordinary ones, written by mapping too.
        array = np.memmap(path, np.float32, "r+")
        array[5] = 123.0
        array.flush()
        del array
        self.assertEqual(np.fromfile(path, np.float32)[5], 123.0)

    def test_others_cannot_write_what_a_trainer_holds(self):
        """By its session, or by the claims on the files that it has mapped."""
        m = self.mount()
        for data in ("session", "mmap"):
            named, opt = self.train(m, data=data, fresh=data == "mmap")
            path = m.file("w", "exp_avg")
            other = os.path.join(m.path, "params", "other")
            open(other, "w").close()
            for attempt in (lambda: np.memmap(path, np.float32, "r+"), lambda: os.truncate(path, 0),
                            lambda: open(path, "w"), lambda: os.rename(other, path),
                            lambda: os.unlink(path), lambda: os.rename(path, path + ".old"),
                            lambda: os.rename(os.path.dirname(path), other + ".dir")):
                with self.assertRaises(OSError, msg=data) as e:
                    attempt()
                self.assertEqual(e.exception.errno, 16, data + ": EBUSY")  # a store would be lost, or undo a step
            set_gradients(named, 2)
            opt.step()
            opt.close()
            holder = open(path, "r+b")  # at once: what the trainer had is free when close() has returned
            with self.assertRaisesRegex(momentfs.MomentError, "open for writing"):
                AdamW(weights(SHAPES), mount=m.path, data=data, resume=True)
            holder.close()
            os.rename(path, path + ".old")
            os.rename(path + ".old", path)

    def test_a_trainer_that_maps_is_told_what_limit_it_meets(self):
        m = self.mount("ram=64M,block=64K,commit=off")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        shapes = {f"p{i}": (3,) for i in range(100)}
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
        try:  # 200 files: the limit that may be raised is raised
            self.train(m, shapes, data="mmap")[1].close()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        code = ("import resource, torch, momentfs.torch; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128));"
                "momentfs.torch.AdamW([(f'q{i}', torch.nn.Parameter(torch.zeros(3))) for i in range(100)],"
                f" mount={m.path!r}, data='mmap', fresh=True)")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stderr, "200 state files takes about [0-9]+ file descriptors.*may have 128.*ulimit -n")
        self.assertFalse(os.path.exists(os.path.join(m.path, "params", "q0")), "nothing half made")

    def test_a_mount_that_vanishes_is_named(self):
        m = self.mount()
        named, opt = self.train(m, data="mmap")
        subprocess.run(["umount", "-l", m.path], check=True)
        set_gradients(named, 2)
        with self.assertRaisesRegex(Exception, "daemon|mount") as e:
            for _ in range(3):
                opt.step()
                opt.commit()
        self.assertNotIn("No such file", str(e.exception))
        opt.close()

    def test_all_readers_see_the_step_that_has_returned(self):
        """A9: by held descriptor, by map, by fresh open, from another process; evicted between or not."""
        for options in ("ram=64M,block=1M,commit=off", "ram=16M,block=1M,commit=off"):
            m = self.mount(options, name=options[4:6], backing=self.backing(options[4:6] + "b"))
            for data in ("session", "mmap"):
                named, opt = self.train(m, data=data, fresh=True)
                path = m.file("w", "exp_avg")
                held = open(path, "rb", buffering=0)
                mapped = mmap.mmap(held.fileno(), 0, access=mmap.ACCESS_READ)
                first = bytes(mapped), held.read(4 << 20)
                self.assertEqual(*first)
                for step in range(2, 6):
                    set_gradients(named, step)
                    opt.step()
                    want = opt.state[named[0][1]]["exp_avg"].numpy().tobytes()
                    self.assertNotEqual(want, first[0])
                    self.assertTrue(bytes(mapped) == want, f"{data} step {step}: the mapping is old")
                    held.seek(0)
                    self.assertTrue(held.read(len(want)) == want, f"{data} step {step}: the descriptor is old")
                    with open(path, "rb") as f:
                        self.assertTrue(f.read() == want, f"{data} step {step}: a fresh open is old")
                    out = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout
                    again = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout
                    self.assertEqual(out, again)
                    self.assertEqual(out.split()[0], __import__("hashlib").sha256(want).hexdigest())
                mapped.close()
                held.close()
                opt.close()
            m.unmount()

    def test_sizes_attributes_and_meta(self):
        m = self.mount()
        for data in ("session", "mmap"):
            named, opt = self.train(m, data=data, fresh=True, steps=3)
            for name, p in named:
                for key in ("exp_avg", "exp_avg_sq"):
                    path = m.file(name, key)
                    self.assertEqual(os.stat(path).st_size, 4 * p.numel())
                    attr = {k: os.getxattr(path, "user.moment." + k).decode() for k in ("dtype", "shape", "step", "name")}
                    self.assertEqual(attr, {"dtype": "float32", "shape": "[" + ",".join(map(str, p.shape)) + "]",
                                            "step": "3", "name": name})
            if data == "session":
                with open(os.path.join(m.path, "params", "w", "meta.json")) as f:
                    meta = json.load(f)
                self.assertEqual((meta["name"], meta["shape"], meta["step"]), ("w", [1024, 1024], 3))
            opt.close()

    def test_mtime_moves_with_the_state_and_only_with_it(self):
        m = self.mount()
        named, opt = self.train(m, data="session")
        path = m.file("w", "exp_avg")
        first = os.stat(path).st_mtime_ns
        np.fromfile(path, np.float32)
        self.assertEqual(os.stat(path).st_mtime_ns, first)
        time.sleep(0.01)
        set_gradients(named, 2)
        opt.step()
        self.assertGreater(os.stat(path).st_mtime_ns, first)

    def test_one_way_after_another_on_the_same_mount(self):
        """What one data path wrote, the others take over; and the mount once it is down, embedded."""
        m = self.mount()
        reference = weights(SHAPES)
        ref = self.keep(AdamW(reference, temp_dir=self.folder))
        named = weights(SHAPES)
        step = 0
        for where in (dict(mount=m.path, data="session"), dict(mount=m.path, data="mmap"),
                      dict(backing=m.backing), dict(mount=m.path, data="mmap"), dict(backing=m.backing, data="embedded")):
            if where.get("data") == "embedded":
                m.unmount()
            opt = self.keep(AdamW(named, resume=step > 0, **where))
            self.assertEqual(opt.data_path, where.get("data", "session"))
            for _ in range(2):
                step += 1
                set_gradients(named, step)
                set_gradients(reference, step)
                opt.step()
                ref.step()
            opt.close()
        for (n, p), (_, q) in zip(named, reference):
            self.assertBits(p, q, n)

    def test_without_the_socket_it_goes_through_the_files(self):
        m = self.mount()
        os.rename(os.path.join(m.backing, "session.sock"), os.path.join(m.backing, "hidden"))
        with self.assertWarnsRegex(UserWarning, "session socket"):
            named, opt = self.train(m)
        self.assertEqual(opt.data_path, "mmap")
        opt.close()
        with self.assertRaisesRegex(momentfs.MomentError, "cannot be reached"):
            AdamW(weights({"x": (3,)}), mount=m.path, data="session")
        os.environ["MOMENT_DATA"] = "mmap"
        self.addCleanup(os.environ.pop, "MOMENT_DATA", None)
        named, opt = self.train(m, fresh=True)
        self.assertEqual(opt.data_path, "mmap")

    def test_unnamed_parameters_in_another_order(self):
        """A30: what tells that is with the state, whichever way that goes."""
        m = self.mount()
        for data in ("session", "mmap"):
            ps = [p for _, p in weights({"a": (64, 64), "b": (64, 64), "c": (5,)})]
            for p in ps:
                p.grad = gradient(1, "g", p.shape)
            with self.assertWarnsRegex(UserWarning, "without names"):
                opt = self.keep(AdamW(ps, mount=m.path, data=data, fresh=True))
            opt.step()
            opt.close()
            m.unmount()
            m.start()
            with self.assertWarns(UserWarning), self.assertRaisesRegex(ValueError, "unnamed.0 has the weights of unnamed.1"):
                AdamW([ps[1], ps[0], ps[2]], mount=m.path, data=data, resume=True)
            with self.assertWarns(UserWarning):
                opt = self.keep(AdamW(ps, mount=m.path, data=data, resume=True))
            opt.step()
            self.assertEqual(opt.last_step, 2)
            opt.close()

    def test_two_trainers(self):
        m = self.mount()
        for data in ("session", "mmap"):
            named, opt = self.train(m, data=data, fresh=True)
            if data == "session":
                with self.assertRaisesRegex(momentfs.MomentError, rf"pid {os.getpid()}|process {os.getpid()}"):
                    momentfs.Session(mount=m.path, resume=True, data="session")
            with momentfs.Session(mount=m.path, readonly=True) as reader:  # readers without limit
                self.assertEqual({e["name"] for e in reader.list()}, set(SHAPES))
                (handle, found, step), = reader.register([{"name": "w", "shape": SHAPES["w"]}])
                self.assertEqual((found, step), (True, 1))
                view = np.frombuffer(reader.map(handle, momentfs.EXP_AVG), np.float32)
                self.assertBits(torch.from_numpy(view.copy()).reshape(SHAPES["w"]), opt.state[named[0][1]]["exp_avg"])
                del view
            opt.close()


class Dying(MountCase):
    """A10."""

    def test_a_killed_daemon_is_an_exception_and_training_goes_on_after_a_restart(self):
        for data in ("session", "mmap"):
            m = self.mount("ram=32M,block=1M,commit=off", name=data, backing=self.backing(data + "b"))
            reference = weights(SHAPES)
            ref = self.keep(AdamW(reference, temp_dir=self.folder))
            named, opt = self.train(m, data=data, steps=4)
            opt.commit()
            kept = {n: p.detach().clone() for n, p in named}
            self.assertEqual(opt.committed_step, 4)
            for step in (5, 6):
                set_gradients(named, step)
                opt.step()
            m.kill()
            with self.assertRaises(momentfs.MomentError) as e:
                for step in range(7, 10):
                    set_gradients(named, step)
                    opt.step()
            self.assertIn("daemon", str(e.exception))
            self.assertIn(str(m.process.pid), str(e.exception))
            with self.assertRaises(momentfs.MomentError):
                opt.step()
            try:
                opt.close()
            except momentfs.MomentError:
                pass
            with self.assertRaisesRegex(momentfs.MomentError, "fusermount3 -u|has ended"):
                AdamW(weights(SHAPES), mount=m.path, resume=True)
            m.start()  # clears its own dead mount
            with torch.no_grad():
                for n, p in named:
                    p.copy_(kept[n])
            opt = self.keep(AdamW(named, mount=m.path, resume=True, data=data))
            self.assertEqual((opt.committed_step, opt.last_step), (4, 4))
            for step in range(1, 8):
                set_gradients(reference, step)
                ref.step()
                if step > 4:
                    set_gradients(named, step)
                    opt.step()
            for (n, p), (_, q) in zip(named, reference):
                self.assertBits(p, q, f"{data}: {n}")
            opt.close()
            m.unmount()

    def test_a_killed_trainer_leaves_the_last_commit(self):
        script = (
            "import os, signal, sys, torch, momentfs.torch\n"
            "p = torch.nn.Parameter(torch.ones(300000))\n"
            "opt = momentfs.torch.AdamW([('p', p)], lr=0, betas=(0.999, 0.9995), weight_decay=0, mount=sys.argv[1], data=sys.argv[2])\n"
            "for step in range(1, 7):\n"
            "    p.grad = torch.ones_like(p)\n"
            "    opt.step()\n"
            "    if step == 4: opt.commit()\n"
            "opt._session.pre_step(7)\n"
            "if sys.argv[2] == 'mmap':  # a session needs no change to be torn\n"
            "    opt._session.write(opt._slots[p].handle, momentfs.EXP_AVG, 0, 4, torch.full((4,), 7.0).data_ptr())\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        for data in ("session", "mmap"):
            m = self.mount("ram=32M,block=1M,commit=off", name=data, backing=self.backing(data + "b"))
            out = subprocess.run([sys.executable, "-c", script, m.path, data], capture_output=True, text=True)
            self.assertEqual(out.returncode, -signal.SIGKILL, out.stderr)
            p = torch.nn.Parameter(torch.ones(300000))
            with self.assertRaises(momentfs.MomentError):  # torn, and nobody said what to do
                AdamW([("p", p)], mount=m.path, data=data)
            opt = self.keep(AdamW([("p", p)], mount=m.path, data=data, resume=True))
            self.assertEqual((opt.committed_step, opt.last_step), (4, 4))
            self.assertEqual(opt.state[p]["step"].item(), 4)
            torch.testing.assert_close(opt.state[p]["exp_avg"], torch.full((300000,), 1 - 0.999**4), rtol=1e-5, atol=0)
            opt.close()


class UnderLoad(MountCase):
    """A11."""

    def test_faults_msync_and_eviction_together(self):
        m = self.mount("ram=32M,block=1M,commit=off", name="load")
        files = []
        os.makedirs(os.path.join(m.path, "params", "load"))
        for i in range(12):
            path = os.path.join(m.path, "params", "load", f"f{i}")
            with open(path, "wb") as f:
                f.truncate(8 << 20)
            files.append(path)
        stop, errors = threading.Event(), []

        def guarded(fn, *args):
            try:
                fn(*args)
            except Exception as e:
                errors.append(e)

        def fault(path, k):
            array = np.memmap(path, np.uint8, "r+")
            for turn in range(1, 4):
                array[::4096] = k + turn
                if not (array[::4096] == k + turn).all():
                    raise AssertionError(f"{path}: not what was written")

        def sync():
            array = np.memmap(files[0], np.uint8, "r+")
            while not stop.is_set():
                array.flush()

        workers = [threading.Thread(target=guarded, args=(fault, f, k)) for k, f in enumerate(files)]
        syncers = [threading.Thread(target=guarded, args=(sync,)) for _ in range(2)]
        began = time.monotonic()
        for t in workers + syncers:
            t.start()
        for t in workers:
            t.join(60)
            self.assertFalse(t.is_alive(), "still stuck after 60 s")
        stop.set()
        for t in syncers:
            t.join(60)
            self.assertFalse(t.is_alive(), "msync is stuck")
        self.assertEqual(errors, [])
        self.assertLess(time.monotonic() - began, 60)

    def test_training_with_readers_on_a_small_tier(self):
        m = self.mount("ram=16M,block=1M,commit=1", name="small")
        reference, named = weights({"a": (2000, 1500), "b": (1024, 1024)}), weights({"a": (2000, 1500), "b": (1024, 1024)})
        ref = self.keep(AdamW(reference, temp_dir=self.folder, ram=128 << 20))
        opt = self.keep(AdamW(named, mount=m.path, data="session"))
        stop, seen = threading.Event(), []

        def look():
            while not stop.is_set():
                for name, _ in named:
                    seen.append(len(np.fromfile(m.file(name, "exp_avg"), np.float32)))

        readers = [threading.Thread(target=look) for _ in range(3)]
        for t in readers:
            t.start()
        for step in range(1, 9):
            set_gradients(named, step)
            set_gradients(reference, step)
            opt.step()
            ref.step()
        stop.set()
        for t in readers:
            t.join(30)
            self.assertFalse(t.is_alive())
        self.assertGreater(len(seen), 0)
        for (n, p), (_, q) in zip(named, reference):
            self.assertBits(p, q, n)


class Users(MountCase):
    """A16."""

    def as_nobody(self, code, *args):
        def drop():
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)

        # The source may lie where no other user can go.
        public = os.path.join(self.folder, "public")
        if not os.path.exists(public):
            package = os.path.dirname(os.path.abspath(momentfs.__file__))
            shutil.copytree(package, os.path.join(public, "momentfs"))
            shutil.copy(os.environ.get("MOMENT_LIBRARY") or os.environ["LIBMOMENT"], os.path.join(public, "libmoment.so"))
        env = {**os.environ, "HOME": "/", "PYTHONPATH": public, "MOMENT_LIBRARY": os.path.join(public, "libmoment.so")}
        return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, preexec_fn=drop,
                              env=env, cwd="/")

    def test_another_user(self):
        if os.getuid() != 0:
            self.skipTest("needs root")
        read = "import numpy as np, sys; print(np.memmap(sys.argv[1], np.float32, sys.argv[2])[:3].sum())"
        os.chmod(self.folder, 0o755)
        m = self.mount(name="own")
        self.train(m)[1].close()
        out = self.as_nobody(read, m.file("w", "exp_avg"), "r")
        self.assertNotEqual(out.returncode, 0)
        self.assertIn("Permission denied", out.stderr)
        m.unmount()
        m = self.mount("ram=32M,block=1M,commit=off,allow_other", name="all", backing=self.backing("all-b"))
        self.train(m)[1].close()
        path = m.file("w", "exp_avg")
        out = self.as_nobody(read, path, "r")  # 0600, as it was made
        self.assertIn("Permission denied", out.stderr)
        os.chmod(path, 0o644)
        self.assertEqual(self.as_nobody(read, path, "r").returncode, 0)
        self.assertIn("Permission denied", self.as_nobody(read, path, "r+").stderr)
        session = "import momentfs, sys\ntry: momentfs.Session(mount=sys.argv[1], data='session')\nexcept momentfs.MomentError as e: print(e.errno)"
        self.assertIn(self.as_nobody(session, m.path).stdout.strip(), ("13", "1"))


if __name__ == "__main__":
    support.main()
