#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Case A22 of the collected faults: one job twice, two optimizers on one path, many ranks in one place, and owners that
were killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import support
import torch
from support import Case, set_gradients, shapes_of, weights

import momentfs
from momentfs.torch import AdamW

RAM = dict(ram=2 << 20, block=65536)
WORLD = 4


def shapes():
    """The first of GPT-2's, cut down, and some that four ranks cannot share evenly."""
    out = {n: tuple(min(d, 37 * 4) for d in s) for n, s in shapes_of("gpt2", 16).items()}
    return {**out, "odd": (5, 300), "few": (2, 7), "one": (1,)}


def shard(t, rank, world):
    """A rank's part along the first dimension, as torch.chunk gives it; the last ones may have nothing."""
    size = -(-t.shape[0] // world)
    return t[min(rank * size, t.shape[0]) : min((rank + 1) * size, t.shape[0])]


def train(rank, world, steps, backing, resume):
    """One rank: its shards of the weights and gradients of the whole. Returns {name: exp_avg}."""
    whole = weights(shapes())
    mine = [(n, torch.nn.Parameter(shard(p.detach(), rank, world).clone())) for n, p in whole]
    with AdamW(mine, backing=backing, shard=(rank, world), resume=resume, **RAM) as opt:
        first = (opt.last_step or 0) + 1
        for step in range(first, first + steps):
            set_gradients(whole, step)
            for (_, p), (_, q) in zip(mine, whole):
                p.grad = shard(q.grad, rank, world).clone()
            opt.step()
        opt.commit()
        return {n: opt.state[p]["exp_avg"] for n, p in mine}


class OwnersCase(Case):
    def python(self, code, *args):
        """Another process, with this folder's helpers at hand."""
        code = "import os, sys, time, signal, json, torch, momentfs, support, test_owners as t\n" + textwrap.dedent(code)
        path = os.pathsep.join([os.path.dirname(os.path.abspath(__file__)), os.path.join(support.TOP, "src", "python")])
        p = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code, *args], stdout=subprocess.PIPE, text=True,
                             stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path})
        self.addCleanup(self.end, p)
        return p

    @staticmethod
    def end(p):
        if p.poll() is None:
            p.kill()
        p.communicate()

    def owner(self, **where):
        """A process that has trained a step and holds on: killed at the end of the test, or before."""
        p = self.python("""
            named = t.weights({"w": (300, 70)})
            opt = t.AdamW(named, **json.loads(sys.argv[1]))
            t.set_gradients(named, 1)
            opt.step()
            opt.commit()
            print("has it", flush=True)
            time.sleep(60)
        """, json.dumps({**RAM, **where}))
        line = p.stdout.readline()
        self.assertEqual(line, "has it\n", p.stderr.read() if not line else line)
        return p

    def assertRefused(self, pid, *texts, **where):
        began = time.monotonic()
        with self.assertRaises(momentfs.MomentError) as e:
            AdamW(weights({"w": (300, 70)}), resume=True, **{**RAM, **where})
        self.assertLess(time.monotonic() - began, 2.0)
        self.assertEqual(e.exception.errno, 16, e.exception)  # EBUSY
        for text in (f"pid {pid} ", *texts):
            self.assertIn(text, str(e.exception))


class Owners(OwnersCase):
    def test_the_same_job_twice(self):
        p = self.owner(backing=self.backing())
        self.assertRefused(p.pid, f"on host {socket.gethostname()}", self.backing(), backing=self.backing())
        self.assertRefused(p.pid, f"on host {socket.gethostname()}", backing=self.backing(), data="embedded")
        m = self.mount(name="m", backing=self.backing("m-b"))
        for data in ("session", "mmap"):
            p = self.owner(mount=m.path, data=data, fresh=True)
            for second in ("session", "mmap"):
                self.assertRefused(p.pid, "on this host", mount=m.path, data=second)
            self.assertRefused(p.pid, "on this host", backing=m.backing)
            self.assertRefused(m.process.pid, f"on host {socket.gethostname()}", backing=m.backing, data="embedded")
            self.end(p)

    def test_a_second_optimizer_for_the_same_parameters_in_one_process(self):
        first = weights({"w": (300, 70)})
        ways = [dict(backing=self.backing())]
        if support.fuse_missing() is None:
            m = self.mount(name="m", backing=self.backing("m-b"))
            ways += [dict(mount=m.path, data=data) for data in ("session", "mmap")]
        for way in ways:
            opt = self.keep(AdamW(first, fresh=True, **{**RAM, **way}))
            set_gradients(first, 1)
            opt.step()
            state = opt.state[first[0][1]]["exp_avg"]
            with self.assertRaisesRegex(ValueError, "open in this process, by an optimizer that asked for fresh"):
                AdamW(weights({"w": (300, 70)}), resume=True, **{**RAM, **way})
            with self.assertRaisesRegex(momentfs.MomentError, "parameter w is registered already"):
                AdamW(weights({"w": (300, 70)}), fresh=True, **{**RAM, **way})
            self.assertBits(opt.state[first[0][1]]["exp_avg"], state)  # and the first one goes on
            opt.step()
            opt.close()
            again = self.keep(AdamW(first, resume=True, **{**RAM, **way}))
            self.assertEqual(again.last_step, 2)
            again.close()

    def test_a_killed_owner_leaves_nothing_locked(self):
        ways = [dict(backing=self.backing())]
        if support.fuse_missing() is None:
            m = self.mount(name="m", backing=self.backing("m-b"))
            ways += [dict(mount=m.path, data=data) for data in ("session", "mmap")]
        for way in ways:
            p = self.owner(**way, fresh=True)
            p.send_signal(signal.SIGKILL)
            p.wait()
            began = time.monotonic()
            opt = self.keep(AdamW(weights({"w": (300, 70)}), resume=True, **{**RAM, **way}))
            self.assertLess(time.monotonic() - began, 2.0, way)
            self.assertEqual(opt.last_step, 1, way)
            opt.close()
        if support.fuse_missing() is None:  # the daemon too
            m.kill()
            m.start()
            opt = self.keep(AdamW(weights({"w": (300, 70)}), resume=True, mount=m.path))
            self.assertEqual(opt.committed_step, 1)


class Ranks(OwnersCase):
    JOB = """
        backing, world, steps, resume = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "resume"
        torch.set_num_threads(1)
        pids = []
        for rank in range(world):  # all at once, before anybody has made a folder
            pids.append(os.fork())
            if pids[-1] == 0:
                try:
                    out = t.train(rank, world, steps, backing, resume)
                    torch.save(out, f"{backing}-{rank}.pt")
                    os._exit(0)
                except momentfs.MomentError as e:
                    print(f"rank {rank}: {e}", flush=True)
                    os._exit(3)
                except BaseException as e:
                    print(f"rank {rank}: {type(e).__name__}: {e}", flush=True)
                    os._exit(1)
        print(*[os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) for p in pids])
    """

    def job(self, world, steps=3, resume=False):
        """(what it printed, the exit status of each rank)."""
        p = self.python(self.JOB, self.backing("job"), str(world), str(steps), "resume" if resume else "new")
        out, err = p.communicate(timeout=120)
        self.assertEqual(p.returncode, 0, err)
        *said, codes = out.splitlines()
        return "\n".join(said), [int(c) for c in codes.split()]

    def whole(self, steps):
        named = weights(shapes())
        with AdamW(named, temp_dir=self.folder, **RAM) as opt:
            for step in range(1, steps + 1):
                set_gradients(named, step)
                opt.step()
            return {n: opt.state[p]["exp_avg"] for n, p in named}

    def test_ranks_that_start_together_and_resume(self):
        for turn in (1, 2):
            said, codes = self.job(WORLD, resume=turn == 2)
            self.assertEqual(codes, [0] * WORLD, said)
            parts = [torch.load(f"{self.backing('job')}-{r}.pt") for r in range(WORLD)]
            for n, want in self.whole(3 * turn).items():
                self.assertBits(torch.cat([p[n] for p in parts]), want, n)
        self.assertEqual(sorted(os.listdir(self.backing("job"))), [f"rank{r}-of-{WORLD}" for r in range(WORLD)])

    def test_another_world_size_is_refused(self):
        self.assertEqual(self.job(WORLD, steps=1)[1], [0] * WORLD)
        for resume in (True, False):
            said, codes = self.job(2, resume=resume)
            self.assertEqual(codes, [3, 3], said)
            for part in ("rank 0:", "rank 1:", f"state of {WORLD} ranks", "rank0-of-4", "rank3-of-4", "this job has 2"):
                self.assertIn(part, said)
        with self.assertRaisesRegex(momentfs.MomentError, f"{WORLD} ranks.*shard="):
            AdamW(weights(shapes()), backing=self.backing("job"), resume=True, **RAM)
        self.assertEqual(self.job(WORLD, steps=1, resume=True)[1], [0] * WORLD)  # nothing was harmed
        with self.assertWarnsRegex(UserWarning, "4 ranks.*remove"):
            AdamW(weights({"a": (3,)}), backing=self.backing("job"), shard=(0, 2), fresh=True, **RAM).close()

    def test_folders_named_by_hand_are_told_apart_by_shape(self):
        def mine(rank, world):
            return [(n, torch.nn.Parameter(shard(p.detach(), rank, world).clone())) for n, p in weights(shapes())]

        named = mine(1, 2)
        opt = AdamW(named, backing=self.backing("1"), **RAM)
        set_gradients(named, 1)
        opt.step()
        opt.close()
        with self.assertRaises(momentfs.MomentError) as e:
            AdamW(mine(1, 4), backing=self.backing("1"), resume=True, **RAM)
        self.assertRegex(str(e.exception), r"other shape: .*\(have 74x148, want 37x148\)")

    def test_wrong_shards(self):
        p = weights({"a": (3,)})
        for bad in ((4, 4), (-1, 4), (0, 0)):
            with self.assertRaisesRegex(ValueError, "world size"):
                AdamW(p, backing=self.backing(), shard=bad)
        with self.assertRaisesRegex(ValueError, "backing="):
            AdamW(p, shard=(0, 2))
        AdamW(p, backing=self.backing(), **RAM).close()
        with self.assertRaisesRegex(momentfs.MomentError, "itself a backing"):
            AdamW(p, backing=self.backing(), shard=(0, 2), **RAM)


if __name__ == "__main__":
    support.main()
