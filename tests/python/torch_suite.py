#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own tests of Adam, AdamW and the learning rate schedulers, run on ours in their place.

usage: torch_suite.py DIR [PATTERN]

DIR is the folder `test` of PyTorch's source, of the release that is installed or one near it (Debian's source package
of python3-torch has it). What cannot apply is in torch_suite.without, each with its reason: a pattern that matches a
test's name, a colon, the reason. PATTERN runs only what matches it. The last line is `N passed, N failed, N skipped`.
"""

import importlib
import inspect
import os
import re
import sys
import unittest
import warnings
import weakref

os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"

import torch
import torch.optim

import momentfs.torch

HERE = os.path.dirname(os.path.abspath(__file__))
OPEN = []


def small(ours, torchs):
    """Our class as a test makes it: hundreds in a process, without names."""

    class Optimizer(ours):
        def __init__(self, params, *args, **kw):
            kw = {k: v for k, v in kw.items() if k not in ("momentum", "dampening", "nesterov")}
            super().__init__(params, *args, ram=2 << 20, block=65536, threads=1, warn_unnamed=False, **kw)
            OPEN.append(weakref.ref(self))

    Optimizer.__name__ = Optimizer.__qualname__ = torchs.__name__
    Optimizer.__module__ = torchs.__module__
    return Optimizer


OURS = {"Adam": small(momentfs.torch.Adam, torch.optim.Adam), "AdamW": small(momentfs.torch.AdamW, torch.optim.AdamW)}


def patch_database():
    """Torch 2.x: the tests are made from a table of optimizers."""
    from torch.testing._internal import common_optimizers as common

    for info in common.optim_db:
        ours = OURS.get(info.optim_cls.__name__)
        if ours:
            info.optim_cls = ours
            info.supported_impls = tuple(i for i in info.supported_impls if i != "differentiable")
    common.optim_db[:] = [info for info in common.optim_db if info.optim_cls in OURS.values()]


def modules(folder):
    """The modules with tests, of torch 1.x or 2.x, with our classes in them."""
    sys.path.insert(0, folder)
    for name, ours in OURS.items():
        setattr(torch.optim, name, ours)
    if os.path.exists(os.path.join(folder, "optim", "test_lrscheduler.py")):
        patch_database()
        found = [importlib.import_module(m) for m in ("optim.test_lrscheduler", "test_optim")]
    else:
        found = [importlib.import_module("test_optim")]
    for module in found:
        for name in ("SGD", "Adam"):  # what the schedulers are tried on
            if hasattr(module, name):
                setattr(module, name, OURS["Adam"])
    return found


def wanted(test):
    """Those that make an Adam or an AdamW, or a scheduler over one."""
    kind, name = type(test).__name__, test._testMethodName
    if kind.startswith("TestOptimRenewed"):
        return True
    if kind == "TestLRScheduler":
        return True
    return kind == "TestOptim" and bool(re.search(r"adamw?$|adamw?_|duplicate|empty|invalid|no_grad|step_|fused_adam", name))


def tests_of(suite):
    for t in suite:
        if isinstance(t, unittest.TestSuite):
            yield from tests_of(t)
        else:
            yield t


def exceptions():
    out = []
    with open(os.path.join(HERE, "torch_suite.without")) as f:
        for line in f:
            if line.strip() and not line.startswith("#"):
                pattern, reason = line.rstrip("\n").split(": ", 1)
                out.append((re.compile(pattern), reason))
    return out


def main():
    if len(sys.argv) not in (2, 3) or not os.path.isdir(sys.argv[1]):
        sys.exit(__doc__)
    only = re.compile(sys.argv[2] if len(sys.argv) == 3 else "")
    without, used = exceptions(), {}
    passed, failed, skipped = [], [], []
    loader, seen = unittest.TestLoader(), set()
    for module in modules(sys.argv[1]):
        for kind in [c for _, c in inspect.getmembers(module, inspect.isclass) if issubclass(c, unittest.TestCase)]:
            for test in tests_of(loader.loadTestsFromTestCase(kind)):
                name = f"{type(test).__name__}.{test._testMethodName}"
                if name in seen or not wanted(test) or not only.search(name):
                    continue
                seen.add(name)
                reason = next((r for p, r in without if p.search(name)), None)
                if reason:
                    used[reason] = used.get(reason, 0) + 1
                    continue
                result = unittest.TestResult()
                with warnings.catch_warnings():
                    warnings.simplefilter("default")
                    test.run(result)
                while OPEN:
                    opt = OPEN.pop()()
                    if opt is not None:
                        opt.close()
                bad = result.failures + result.errors
                if bad:
                    failed.append(name)
                    said = [line for line in bad[0][1].splitlines() if re.match(r"\w*(Error|Exception|Warning)\b", line)]
                    print(f"FAILED {name}: {(said or bad[0][1].strip().splitlines())[-1][:300]}")
                elif result.skipped:
                    skipped.append(name)
                else:
                    passed.append(name)
    for reason, n in used.items():
        print(f"left out, {n}: {reason}")
    print(f"{len(passed)} passed, {len(failed)} failed, {len(skipped)} skipped")
    sys.exit(bool(failed) or not passed)


if __name__ == "__main__":
    main()
