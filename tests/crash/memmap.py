# SPDX-License-Identifier: Apache-2.0
# memmap.py - Adam on mapped files of a mount while others fill the disk below it (for disk_full.sh).
# Parameter a has been stored a few times when the disk gets full, b never: so b has no room.
#	memmap.py train MOUNT DISK | look MOUNT
# Status 0: never a signal, an fsync fails again and again until its bytes are stored, and what is there in the end
# is what the same steps give in plain memory.
import errno
import os
import sys

import numpy as np

N = {"a": 1 << 20, "b": 1 << 21}  # 4 and 8 MiB an array: more than the pool can have free by then
ROLES = ("exp_avg", "exp_avg_sq")


def adam(arrays, step):
    m, v = arrays
    g = ((np.arange(len(m), dtype=np.int64) * 2654435761 + step * 40503) % 1009).astype(np.float32) / np.float32(1009)
    g -= np.float32(0.5)
    m *= np.float32(0.9)
    m += np.float32(0.1) * g
    v *= np.float32(0.99)
    v += np.float32(0.01) * g * g


def same(name, arrays, want):
    for role, x, y in zip(ROLES, arrays, want):
        bad = np.flatnonzero(np.asarray(x).view(np.uint32) != y.view(np.uint32))
        assert not bad.size, f"{name}/{role}: {bad.size} elements are wrong, the first is {bad[0]}"


def fill(path):
    with open(path, "wb", 0) as f:
        for size in (1 << 20, 1 << 16, 512):
            try:
                while True:
                    f.write(b"x" * size)
            except OSError as e:
                assert e.errno == errno.ENOSPC
        os.fsync(f.fileno())


def stored(path, arrays):
    """Asks for each array whether it is stored, three times over: always the same answer."""
    answer = []
    for role, x in zip(ROLES, arrays):
        with open(f"{path}/{role}", "r+b") as f:
            said = []
            for ask in (x.flush, lambda: os.fsync(f.fileno())) * 3:
                try:
                    ask()
                    said.append(0)
                except OSError as e:
                    said.append(e.errno)
            assert len(set(said)) == 1, f"{path}/{role}: stored or not, it says {said}"
            answer.append(said[0])
    return answer


def train(mount, disk):
    maps, ref = {}, {}
    for name in "ab":
        path = f"{mount}/params/{name}"
        os.mkdir(path)
        maps[name] = [np.memmap(f"{path}/{r}", np.float32, "w+", shape=(N[name],)) for r in ROLES]
        ref[name] = [np.zeros(N[name], np.float32) for _ in ROLES]
    for step in (1, 2, 3):
        adam(maps["a"], step)
        adam(ref["a"], step)
        assert stored(f"{mount}/params/a", maps["a"]) == [0, 0]
    fill(disk + "/filler")
    for step in (4, 5):
        for name in "ab":
            adam(maps[name], step)
            adam(ref[name], step)
        if step == 5:
            os.unlink(disk + "/filler")
        said = {name: stored(f"{mount}/params/{name}", maps[name]) for name in "ab"}
        print(f"step {step}:", {k: [errno.errorcode.get(e, "stored") for e in v] for k, v in said.items()})
        if step == 4:
            assert set(sum(said.values(), [])) <= {0, errno.ENOSPC}
            assert errno.ENOSPC in said["b"], "the disk was not full"
        else:
            assert said == {"a": [0, 0], "b": [0, 0]}
        for name in "ab":
            same(name, maps[name], ref[name])


def look(mount):
    for name, steps in (("a", (1, 2, 3, 4, 5)), ("b", (4, 5))):
        want = [np.zeros(N[name], np.float32) for _ in ROLES]
        for step in steps:
            adam(want, step)
        same(name, [np.fromfile(f"{mount}/params/{name}/{r}", np.float32) for r in ROLES], want)


if sys.argv[1] == "train":
    train(sys.argv[2], sys.argv[3])
else:
    look(sys.argv[2])
