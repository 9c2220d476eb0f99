#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""torch.optim.AdamW itself, unmodified: its state tensors are mapped files of a mount.

usage: torch_adamw_mapped.py MOUNT STEPS
"""

import os
import sys

import torch


def map_state(opt, named, mount):
    """Gives every parameter its state, in files of the mount. torch updates it in place, so it stays there.
    Returns the files."""
    paths = []
    for name, p in named:
        folder = f"{mount}/params/{name}"
        os.makedirs(folder, exist_ok=True)
        state = {"step": torch.tensor(0.0)}
        for key in ("exp_avg", "exp_avg_sq"):
            with open(f"{folder}/{key}", "ab") as f:
                os.posix_fallocate(f.fileno(), 0, 4 * p.numel())
            flat = torch.from_file(f"{folder}/{key}", shared=True, size=p.numel(), dtype=torch.float32)
            state[key] = flat.view(p.shape)
            paths.append(f"{folder}/{key}")
        opt.state[p] = state
    return paths


def flush(paths):
    """What was stored to the mappings goes to the daemon."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def run(mount, steps):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.Tanh(), torch.nn.Linear(500, 200))
    opt = torch.optim.AdamW(model.parameters(), foreach=False)
    paths = map_state(opt, model.named_parameters(), mount) if mount else []
    for t in range(1, steps + 1):
        opt.zero_grad()
        model(torch.full((4, 300), 0.1 * t)).square().mean().backward()
        if mount:
            with open(f"{mount}/.moment/step", "w") as f:
                f.write(f"begin {t}\n")
        opt.step()
        if mount:
            flush(paths)
            with open(f"{mount}/.moment/step", "w") as f:
                f.write(f"end {t}\n")
    return model


if __name__ == "__main__":
    print(sum(p.double().sum().item() for p in run(sys.argv[1], int(sys.argv[2])).parameters()))
