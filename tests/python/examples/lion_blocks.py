#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Any element-wise optimizer at the speed of the drive: Lion (Chen et al. 2023) as a callback over blocks.

Its state passes through the RAM tier block by block while the next blocks are read; the callback sees numpy views.

usage: lion_blocks.py MOUNT STEPS     (MOUNT "-": a temporary backing, without a mount)
"""

import sys

import numpy as np

import momentfs


def lion(lr=1e-3, b1=0.9, b2=0.99, decay=0.01):
    def update(p, g, state, _step):
        m = state["exp_avg"]
        direction = np.sign(b1 * m + (1 - b1) * g)
        p *= 1 - lr * decay
        p -= lr * direction
        m += (1 - b2) * (g - m)

    return update


def run(mount, steps):
    names = {"lion.a": (600, 700), "lion.b": (700,)}
    weights = {n: np.linspace(-1, 1, int(np.prod(s)), dtype=np.float32) for n, s in names.items()}
    where = {} if mount == "-" else {"mount": mount}
    with momentfs.Session(ram=64 << 20, **where) as session:
        entries = [{"name": n, "shape": s, "arrays": (momentfs.EXP_AVG,)} for n, s in names.items()]
        handles = [handle for handle, _found, _step in session.register(entries)]
        for t in range(1, steps + 1):
            grads = [np.sin(w * t) for w in weights.values()]
            session.step_blocks(t, [(h, w, g, lion()) for h, w, g in zip(handles, weights.values(), grads)])
    return weights


if __name__ == "__main__":
    print(sum(w.astype(np.float64).sum() for w in run(sys.argv[1], int(sys.argv[2])).values()))
