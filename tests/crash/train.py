#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A training loop in PyTorch to be killed (by kill.sh), and the judge of what it finds when it starts again.

A residual MLP of 32 bfloat16 parameters, whose float32 masters are part of the state (9 MB). The data of step n come
from a seed of their own, so the weights and the state of step n are the same in every run that gets there by whole
steps. An undisturbed run (--oracle) writes a digest of all bits after each step; a killed and resumed one compares:
at its start with the step that it finds, at its end with the step that it got to.

    train.py (--mount DIR | --backing DIR) --steps N --oracle FILE [--data session|embedded] [--at-least C]
             [--log FILE] [--pause US] [--err FILE]
    train.py --steps N --oracle FILE            the undisturbed run, state in a temporary backing: writes FILE
    train.py --serve                            reads such command lines from its input, and forks a trainer for each:
                                                torch is imported once. Answers with its pid, then with its exit status

Log and exit status are train.c's: 0 got there and all is right, 1 wrong bits or an older step than --at-least,
3 the library raised an error (its message is on stderr), 2 usage.
"""

import argparse
import hashlib
import os
import shlex
import sys
import time
import traceback
import warnings

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "src", "python"))

import torch  # noqa: E402
from torch import nn  # noqa: E402

import momentfs  # noqa: E402
import momentfs.torch  # noqa: E402

WIDTH, LAYERS, COMMIT_EVERY = 192, 15, 3


class Wrong(Exception):
    pass


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.gain = nn.Parameter(torch.ones(()))
        self.head = nn.Parameter(torch.randn(1001, WIDTH) * 0.05)
        self.to(torch.bfloat16)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(nn.functional.linear(x, layer.weight.float(), layer.bias.float()))
        return nn.functional.linear(x * self.gain.float(), self.head.float())


def one_step(model, opt, step):
    data = torch.Generator().manual_seed(step)
    x = torch.randn(8, WIDTH, generator=data)
    y = torch.randint(0, 1001, (8,), generator=data)
    opt.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()


def optimizer(model, ram=2 << 20, **where):
    return momentfs.torch.AdamW(model.named_parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, ram=ram,
                                block=64 << 10, threads=1, **where)


def arrays(model, opt):
    """(what, tensor) of all that makes up a step."""
    for name, p in model.named_parameters():
        yield f"{name} updates", opt.state[p]["step"] if "step" in opt.state[p] else torch.tensor(0.0)
        yield f"{name} weights", p.detach().view(torch.int16)
        for key in ("exp_avg", "exp_avg_sq", "master"):
            yield f"{name} {key}", opt.state[p][key].view(torch.int32)


def digest(model, opt):
    out = hashlib.blake2b(digest_size=16)
    for _what, t in arrays(model, opt):
        out.update(t.numpy().tobytes())
    return out.hexdigest()


def oracle(a):
    model = Model()
    with optimizer(model, ram=64 << 20) as opt, open(a.oracle + ".part", "w") as f:
        for step in range(1, a.steps + 1):
            one_step(model, opt, step)
            print(digest(model, opt), file=f)
    os.rename(a.oracle + ".part", a.oracle)


def judge(model, opt, wanted, step, when):
    if step == 0 or digest(model, opt) == wanted[step - 1]:
        return
    other = Model()
    with optimizer(other, ram=64 << 20) as ref:
        for k in range(1, step + 1):
            one_step(other, ref, k)
        wrong = [f"{what}: {int((x != y).sum())} of {x.numel()}"
                 for (what, x), (_, y) in zip(arrays(model, opt), arrays(other, ref)) if not torch.equal(x, y)]
    raise Wrong(f"{when}: these are not the bits of step {step} of the undisturbed run: "
                f"{', '.join(wrong[:8]) or 'none when read again'} ({len(wrong)} arrays)")


def train(a):
    with open(a.oracle) as f:
        wanted = f.read().split()
    log = open(a.log, "a", buffering=1)
    model = Model()
    opt = optimizer(model, mount=a.mount, backing=a.backing, data=a.data, resume=True, commit_seconds=1)
    now, committed = opt.last_step or 0, opt.committed_step or 0
    print("start", committed, file=log)
    if committed < a.at_least or now < committed:
        raise Wrong(f"the step is {now}, the committed one {committed}, but the commit of {a.at_least} had returned")
    opt.restore_weights()
    judge(model, opt, wanted, now, "at the start")
    for step in range(now + 1, a.steps + 1):
        one_step(model, opt, step)
        if step % COMMIT_EVERY == 0:
            opt.commit(wait=step % (2 * COMMIT_EVERY) == 0)
            print("committed", opt.committed_step or 0, file=log)
        time.sleep(a.pause / 1e6)
    judge(model, opt, wanted, a.steps, "at the end")
    opt.commit()
    if opt.committed_step != a.steps:
        raise Wrong(f"a commit returned, and the committed step is {opt.committed_step}, not {a.steps}")
    print("committed", a.steps, file=log)
    opt.close()


def run(argv):
    parser = argparse.ArgumentParser()
    for name in ("mount", "backing", "data", "oracle", "log", "err"):
        parser.add_argument("--" + name)
    for name in ("steps", "at-least", "pause"):
        parser.add_argument("--" + name, type=int, default=0)
    a = parser.parse_args(argv)
    if a.err:
        os.dup2(os.open(a.err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
    try:
        train(a) if a.mount or a.backing else oracle(a)
        return 0
    except momentfs.MomentError as e:
        print(f"train.py: {e}", file=sys.stderr)
        return 3
    except Wrong as e:
        print(f"train.py: {e}", file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1


def serve():
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            rc = 2
            try:
                rc = run(shlex.split(line))
                sys.stderr.flush()
            finally:
                os._exit(rc)
        print(pid, flush=True)
        rc = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(rc if rc >= 0 else 128 - rc, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["MOMENT_QUIET"] = "1"
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        sys.exit(run(sys.argv[1:]))
