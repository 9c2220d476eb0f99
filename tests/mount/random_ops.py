#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Random operations through the mount, compared with a model in memory.

    random_ops.py [--profile NAME] --seed 7 --ops 20000 --io threads

Profiles:
  plain  files of odd sizes, several times the RAM tier in all, are created, written at odd places, truncated, renamed,
         removed, punched, written through mappings, synced, committed; the mount is unmounted and mounted again
  full   the same on a pool that is nearly always full, with files that are removed or replaced and stay open, O_DIRECT
         and asynchronous O_DIRECT writes, processes that read and map the files meanwhile, and kills of the daemon
  steps  the steps of plain writers and of sessions, adoption, fresh starts, rollbacks, and deaths of each process
  tree   a tree of --files FILES small files, names above all

Each read is compared at once, everything at the end and after each remount. Operation I of a seed draws from numbers
of its own, so that a seed gives the same operations whatever the drive did with the ones before. A failure prints the
seed and the last operations.
"""
import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from random_base import Failure, Mount, Ops
from random_full import FullOps
from random_steps import StepOps
from random_tree import TreeOps

PROFILES = {"plain": Ops, "full": FullOps, "steps": StepOps, "tree": TreeOps}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--profile", default="plain", choices=PROFILES)
    ap.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    ap.add_argument("--ops", type=int, default=1500)
    ap.add_argument("--io", default="auto", choices=["auto", "uring", "threads"])
    ap.add_argument("--ram")
    ap.add_argument("--size", help="of the pool (full)")
    ap.add_argument("--files", type=int, default=2000, help="that there are at the beginning (tree)")
    ap.add_argument("--momentfs", default=os.environ.get("MOMENTFS", "momentfs"))
    ap.add_argument("--momentctl", default=os.environ.get("MOMENTCTL", "momentctl"))
    ap.add_argument("--remounts", type=int)
    ap.add_argument("--verbose", action="store_true")
    args = ap.parse_args()
    profile = PROFILES[args.profile]
    print(f"profile {args.profile}, seed {args.seed}, {args.ops} operations, io={args.io}", flush=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    top = tempfile.mkdtemp(prefix="momentfs-random.")
    mount = Mount(top, args, profile.options(args))
    ops = profile(mount, random.Random(args.seed), args)
    names, weights = zip(*profile.WEIGHTS)
    counts = {}
    i, name = 0, "start"
    start = time.monotonic()
    try:
        mount.start()
        ops.begin()
        began = time.monotonic() - start
        every = max(1, args.ops // ((profile.REMOUNTS if args.remounts is None else args.remounts) + 1))
        for i in range(1, args.ops + 1):
            ops.r.seed(f"{args.seed} {i}")
            name = "remount" if i % every == 0 else ops.r.choices(names, weights)[0]
            counts[name] = counts.get(name, 0) + 1
            ops.note(f"{i} {name}:")
            if args.verbose:
                print(f"{i} {name}", flush=True)
            getattr(ops, name)()
        name = "the last look"
        told = ops.end()
        mount.stop()
    except (Failure, OSError, EOFError, subprocess.SubprocessError) as e:
        print(f"the daemon said: {mount.told()}the last operations: {' '.join(ops.last)}\n"
              f"FAIL: operation {i} ({name}), profile {args.profile}, seed {args.seed}, io={args.io}: {e}", file=sys.stderr)
        return 1
    finally:
        ops.close()
        mount.kill()
        shutil.rmtree(top, ignore_errors=True)
    print(f"passed in {time.monotonic() - start:.1f} s ({began:.1f} to begin); {told}; " + ", ".join(f"{n} {c}" for n, c in sorted(counts.items())))
    return 0


sys.exit(main())
