# SPDX-License-Identifier: Apache-2.0
"""AdamW on one parameter: the kernels and torch.optim take turns on equal memory, in one process.

Run by tools/bench.d/kernels. torch's foreach and, where it has it for the CPU, fused implementation; torch's pool
and the kernels' helpers are both alive, as in a training program.
"""
import ctypes
import inspect
import json
import os
import statistics
import sys
import time

import torch

NUMEL = 32 << 20
ROUNDS = 11
MADV_HUGEPAGE = 14
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class Optim(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_uint32), ("flags", ctypes.c_uint32)] + [
        (name, ctypes.c_double)
        for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "dampening", "grad_scale")
    ]


class Slice(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("p", "g", "m", "v", "master", "vmax")] + [
        ("numel", ctypes.c_size_t), ("p_dtype", ctypes.c_uint32), ("g_dtype", ctypes.c_uint32)]


lib = ctypes.CDLL(os.environ["LIBMOMENT"])
libc = ctypes.CDLL(None, use_errno=True)
lib.moment_simd_level.restype = ctypes.c_char_p
ADAMW = Optim(0, 3, 1e-3, 0.9, 0.999, 1e-8, 0.01)


def huge(tensor):
    """Asks for huge pages under a tensor not yet touched: the same for all contenders."""
    start = (tensor.data_ptr() + 4095) // 4096 * 4096
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // 4096 * 4096
    libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_HUGEPAGE)
    return tensor


def kernels(dtype, threads):
    p, g = (huge(torch.empty(NUMEL, dtype=dtype)).normal_() for _ in range(2))
    m, v = (huge(torch.empty(NUMEL)).zero_() for _ in range(2))
    s = Slice(p.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr(), None, None, NUMEL, DTYPES[dtype], DTYPES[dtype])
    steps = iter(range(1, 1 << 30))

    def step(keep=(p, g, m, v)):
        if lib.moment_update(ctypes.byref(ADAMW), ctypes.c_uint64(next(steps)), ctypes.byref(s), threads, None):
            sys.exit("moment_update failed")

    return step


def torch_adamw(dtype, **how):
    p = torch.nn.Parameter(huge(torch.empty(NUMEL, dtype=dtype)).normal_())
    p.grad = huge(torch.empty(NUMEL, dtype=dtype)).normal_()
    opt = torch.optim.AdamW([p], lr=1e-3, weight_decay=0.01, **how)
    opt.step()  # makes the state, and says so here if this torch has no such implementation
    return opt.step


def contenders(dtype, threads):
    yield "momentfs", kernels(dtype, threads)
    for name, how in (("torch foreach", {"foreach": True}), ("torch fused", {"fused": True})):
        if next(iter(how)) not in inspect.signature(torch.optim.AdamW).parameters:
            continue
        try:
            yield name, torch_adamw(dtype, **how)
        except RuntimeError as why:
            print(f"{name}: not on this torch's CPU side ({str(why).splitlines()[0]})", file=sys.stderr)


def main():
    as_json = "--json" in sys.argv
    cpus = len(os.sched_getaffinity(0))
    if not as_json:
        print(f"\nAdamW next to torch {torch.__version__}, {NUMEL} elements, medians of {ROUNDS} rounds, "
              f"level {lib.moment_simd_level().decode()}\n"
              f"{'p, g':5} {'':14} {'threads':>7} {'Mparams/s':>11} {'times':>7}")
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        for threads in sorted({1, cpus}):
            torch.set_num_threads(threads)
            runs = dict(contenders(dtype, threads))
            took = {who: [] for who in runs}
            for _ in range(ROUNDS + 1):
                for who, step in runs.items():
                    start = time.perf_counter()
                    step()
                    took[who].append(time.perf_counter() - start)
            # The first round touches fresh pages.
            median = {who: statistics.median(t[1:]) for who, t in took.items()}
            for who, t in median.items():
                if as_json:
                    print(json.dumps({"types": name, "who": who, "threads": threads, "params_per_s": NUMEL / t,
                                      "torch": torch.__version__}))
                else:
                    note = " (its moments are bf16 too)" if name == "bf16" and who != "momentfs" else ""
                    print(f"{name:5} {who:14} {threads:7} {NUMEL / t * 1e-6:11.0f} "
                          f"{median[who] / median['momentfs']:7.1f}{note}", flush=True)


main()
