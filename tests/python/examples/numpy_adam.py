#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Any optimizer, with nothing but files: Adam in numpy over memory-mapped files of a mount.

usage: numpy_adam.py MOUNT STEPS
"""

import os
import sys

import numpy as np


def adam(mount, name, p, gradient_of, steps, lr=1e-3, b1=0.9, b2=0.999, eps=1e-8):
    folder = f"params/{name}"
    os.makedirs(f"{mount}/{folder}", exist_ok=True)
    state = {}
    for key in ("exp_avg", "exp_avg_sq"):
        path = f"{mount}/{folder}/{key}"
        if not os.path.exists(path):
            with open(path, "wb") as f:
                os.posix_fallocate(f.fileno(), 0, p.nbytes)  # so that no store can meet a full disk
        state[key] = np.memmap(path, np.float32, "r+", shape=p.shape)
    m, v = state["exp_avg"], state["exp_avg_sq"]
    with open(f"{mount}/.moment/step", "w", buffering=1) as step, open(f"{mount}/.moment/prefetch", "w") as hint:
        for t in range(1, steps + 1):
            for key in state:
                print(f"{folder}/{key} 0 {p.nbytes}", file=hint, flush=True)  # read it while we compute the gradient
            g = gradient_of(t)
            print(f"begin {t}", file=step)
            m += (1 - b1) * (g - m)
            v += (1 - b2) * (g * g - v)
            p -= lr / (1 - b1**t) * m / (np.sqrt(v / (1 - b2**t)) + eps)
            m.flush()  # inside the bracket that does not wait for the drive ...
            v.flush()
            print(f"end {t}", file=step)  # ... and this does: from here on a crash returns to step t or a later one


if __name__ == "__main__":
    weights = np.linspace(-1, 1, 300000, dtype=np.float32)
    adam(sys.argv[1], "numpy.weight", weights, lambda t: np.sin(weights * t), int(sys.argv[2]))
    print(weights.astype(np.float64).sum())
