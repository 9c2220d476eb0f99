# SPDX-License-Identifier: Apache-2.0
"""One training run of tools/quickstart, in a process of its own so that its memory is its own.

Prints one JSON object a line: {"event": "ready"}, {"event": "loss", "step", "loss", "seconds"} and so on,
and {"event": "done", ...} last. Two runs with the same --seed see the same weights, text and order.
"""

import argparse
import glob
import json
import pathlib
import signal
import sys
import time

import torch

from models import MODELS

BATCH, LENGTH = 4, 128
TEXTS = "/usr/share/common-licenses/*"


def emit(event, **fields):
    print(json.dumps(dict(event=event, **fields)), flush=True)


def peak_rss_mib():
    """The most memory this process had resident, shared mappings (momentfs's RAM tier) included."""
    with open("/proc/self/status") as f:
        for line in f:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def own_io_mib():
    """What this process read from and wrote to drives: with the engine embedded, that is the engine."""
    try:
        with open("/proc/self/io") as f:
            io = dict(line.split(": ") for line in f.read().splitlines())
    except OSError:
        return 0.0, 0.0
    return int(io["read_bytes"]) / 2**20, int(io["write_bytes"]) / 2**20


def read_tokens(vocab):
    """Bytes of real text; a vocabulary below 256 gets the commonest bytes, and one token for all others."""
    files = sorted({pathlib.Path(p).resolve() for p in glob.glob(TEXTS)})
    text = b"".join(p.read_bytes() for p in files if p.is_file())
    if len(text) < 100 * LENGTH:
        sys.exit("train: not enough text in %s" % TEXTS)
    if vocab < 256:
        common = sorted(range(256), key=lambda b: (-text.count(b), b))[: vocab - 1]
        rank = {b: i for i, b in enumerate(common)}
        text = text.translate(bytes(rank.get(b, vocab - 1) for b in range(256)))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch_of(tokens, seed, step):
    """The same step always gets the same text, whichever process asks."""
    rng = torch.Generator().manual_seed(seed * 1000003 + step)
    at = torch.randint(len(tokens) - LENGTH - 1, (BATCH,), generator=rng)
    rows = torch.stack([tokens[i : i + LENGTH + 1] for i in at.tolist()]).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def parameters_of(model, recipe):
    """What an optimizer is given: (name, parameter) pairs, or nanoGPT's two groups."""
    named = list(model.named_parameters())
    if not recipe["decay_matrices_only"]:
        return named
    decay = recipe["adamw"]["weight_decay"]
    return [
        dict(params=[(n, p) for n, p in named if p.dim() >= 2], weight_decay=decay),
        dict(params=[(n, p) for n, p in named if p.dim() < 2], weight_decay=0.0),
    ]


def without_names(params):
    """torch before 2.6 takes no pairs."""
    if isinstance(params[0], dict):
        return [dict(g, params=[p for _, p in g["params"]]) for g in params]
    return [p for _, p in params]


def make_optimizer(args, params, settings):
    if args.optimizer == "torch":
        return torch.optim.AdamW(without_names(params), **settings)
    import momentfs.torch

    where = dict(mount=args.mount) if args.mount else dict(backing=args.backing)
    if args.ram_mib and args.backing:
        where["ram"] = args.ram_mib * 2**20
    return momentfs.torch.AdamW(params, resume=args.resume, **where, **settings)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--optimizer", choices=["torch", "momentfs"], required=True)
    ap.add_argument("--model", choices=sorted(MODELS), required=True)
    ap.add_argument("--steps", type=int, required=True)
    ap.add_argument("--first", type=int, default=1, help="number of the first step")
    ap.add_argument("--ahead", action="store_true", help="after the steps and their figures: one more, and a look")
    ap.add_argument("--mount")
    ap.add_argument("--backing")
    ap.add_argument("--ram-mib", type=int, help="of the RAM tier, with --backing")
    ap.add_argument("--resume", action="store_true")
    ap.add_argument("--load", help="weights to start from")
    ap.add_argument("--save", help="where to leave the weights")
    ap.add_argument("--seed", type=int, default=1)
    args = ap.parse_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)

    recipe = MODELS[args.model]
    model = recipe["make"]()
    if args.load:
        model.load_state_dict(torch.load(args.load))
    tokens = read_tokens(model.vocab)
    opt = make_optimizer(args, parameters_of(model, recipe), recipe["adamw"])
    emit("ready", parameters=sum(p.numel() for p in model.parameters()), data=getattr(opt, "data_path", None))

    def train(step):
        began = time.monotonic()
        loss = model(*batch_of(tokens, args.seed, step))
        loss.backward()
        if recipe["clip"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe["clip"])
        emit("update", step=step)
        opt.step()
        opt.zero_grad(set_to_none=True)
        emit("loss", step=step, loss=loss.item(), seconds=time.monotonic() - began)

    began = time.monotonic()
    last = args.first + args.steps
    for step in range(args.first, last):
        train(step)
    done = dict(seconds=time.monotonic() - began, rss_mib=peak_rss_mib())
    done["read_mib"], done["written_mib"] = own_io_mib()
    emit("figures", **done)

    if args.ahead:
        train(last)
        last += 1
    with torch.no_grad():
        emit("look", step=last, loss=model(*batch_of(tokens, args.seed, last)).item())
    if args.save:
        torch.save(model.state_dict(), args.save)
    if hasattr(opt, "close"):
        opt.close()
    emit("done")


if __name__ == "__main__":
    main()
