#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Random operations on our optimizers and on torch.optim's beside them: after each one the two agree bit for bit, or ours
has raised, and its weights, state, groups and step numbers are what they were.

What the bits are compared with: torch.optim's own optimizer, over fp32 shadows of the weights (for 16-bit weights these
are the masters). Its arithmetic differs from our kernels' in the last bits, by design (lerp and addcmul against fused
multiply-adds). So after each of its steps what it made is compared with what moment_update() makes of the same numbers
in plain memory, within the tolerance of test_parity.py (for one step, which is all that the two have to part), and then
replaced by that. Groups, counts, state dicts and schedulers are torch's own all the way.

    test_random_optimizer.py [--ops N] [--seed S] [-v]

Without arguments three short runs, one of them through a mount; with MOMENT_CRASH=full four of 10,000 operations and a
mounted one of 1,000. The same seed gives the same
operations, those with interrupts by the clock excepted. A failure prints the seed and the last operations.
"""

import argparse
import collections
import copy
import ctypes
import gc
import io
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import unittest
import warnings

import support
import torch
from support import Case, bits

import momentfs.torch
from momentfs import _lib
from momentfs._lib import MomentError
from momentfs.torch.optimizer import DTYPES

KINDS = {"AdamW": (momentfs.torch.AdamW, torch.optim.AdamW), "Adam": (momentfs.torch.Adam, torch.optim.Adam)}
KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
SHAPES = [(), (0, 3), (1,), (2, 2), (7,), (33, 5), (129,), (40, 30), (3, 4, 5), (5, 1), (300, 70)]
HYPER = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "initial_lr")
REFUSALS = (ValueError, TypeError, KeyError, RuntimeError, MomentError)


class Slice(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("p", "g", "m", "v", "master", "vmax")] + [
        ("numel", ctypes.c_size_t), ("p_dtype", ctypes.c_uint32), ("g_dtype", ctypes.c_uint32)]


_lib.lib.moment_update.argtypes = [ctypes.POINTER(_lib.Optim), ctypes.c_uint64, ctypes.POINTER(Slice), ctypes.c_int,
                                   ctypes.c_void_p]


class Failure(AssertionError):
    pass


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def number(x):
    return x.item() if isinstance(x, torch.Tensor) else x


def clone_state(state):
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


class Weight:
    """One parameter: ours, torch's shadow of it, and what is due."""

    def __init__(self, name, p):
        self.name, self.p = name, p
        self.want = p.detach().clone()
        self.master = torch.zeros(p.shape)  # what is kept behind 16 bits; begins as zeros
        self.s = torch.nn.Parameter(p.detach().float().clone(memory_format=torch.contiguous_format))
        self.registered = False
        self.has_max = False  # whether it was registered with max_exp_avg_sq
        self.shape = tuple(p.shape)  # as registered

    @property
    def low(self):
        return self.p.dtype != torch.float32

    FIELDS = ("p", "registered", "has_max", "shape")

    def save(self):
        return ({f: getattr(self, f) for f in self.FIELDS}, self.want.clone(), self.master.clone(), self.s.detach().clone())

    def load(self, saved):
        fields, self.want, self.master, s = saved
        self.__dict__.update(fields)
        self.s.data = s


class Pair:
    """One of our optimizers and torch's."""

    def __init__(self, tag, kind, master, nonfinite):
        self.tag, self.kind, self.master, self.nonfinite = tag, kind, master, nonfinite
        self.ours = self.ref = None
        self.weights = []  # in groups, in any
        self.by_shadow = {}
        self.schedulers = None
        self.saved = []  # state dicts of before: (ours, [names of each group])

    def of(self, s):
        return self.by_shadow[id(s)]

    def save(self):
        groups = [{**g, "params": list(g["params"])} for g in self.ref.param_groups]
        state = {s: clone_state(v) for s, v in self.ref.state.items()}
        return groups, state, list(self.weights), [w.save() for w in self.weights]

    def load(self, saved):
        groups, state, self.weights, weights = saved
        self.ref.param_groups[:] = [{**g, "params": list(g["params"])} for g in groups]
        self.ref.state = collections.defaultdict(dict, {s: clone_state(v) for s, v in state.items()})
        for w, x in zip(self.weights, weights):
            w.load(x)
        self.by_shadow = {id(w.s): w for w in self.weights}


class World:
    def __init__(self, seed, folder, mount=None, verbose=False):
        self.seed, self.folder, self.mount, self.verbose = seed, folder, mount, verbose
        self.r = random.Random(seed)
        torch.manual_seed(seed)
        self.names = 0
        self.log = collections.deque(maxlen=25)
        self.count = collections.Counter()
        self.raised = collections.Counter()
        self.interrupted = collections.Counter()
        self.label = None
        self.stored = {}  # name -> state of those that no optimizer has registered
        self.committed = (None, {})
        self.pairs = [Pair("a", "AdamW", True, "raise"), Pair("b", "Adam", self.r.random() < 0.5, "allow")]
        for pair in self.pairs:
            pair.groups = self.split([self.new_weight(pair) for _ in range(self.r.randint(2, 6))])
            self.open(pair)
        self.commit_model()
        for pair in self.pairs:
            pair.ours.commit()

    # ---- drawing ----

    def chance(self, p):
        return self.r.random() < p

    def tensor(self, shape, dtype, scale=0.5):
        return (torch.randn(shape) * scale).to(dtype)

    def laid_out(self, t):
        """The same numbers in some layout."""
        way = self.r.choice(("plain", "plain", "turned", "stride"))
        if way == "turned" and t.dim() >= 2:
            return t.transpose(0, -1).contiguous().transpose(0, -1)
        if way == "stride" and t.dim() >= 1 and t.numel():
            big = torch.zeros((*t.shape[:-1], 2 * t.shape[-1]), dtype=t.dtype)
            big[..., ::2] = t
            return big[..., ::2]
        return t.contiguous()

    def new_weight(self, pair):
        self.names += 1
        dtype = self.r.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
        p = torch.nn.Parameter(self.laid_out(self.tensor(self.r.choice(SHAPES), dtype)))
        if self.chance(0.1):
            p.requires_grad_(False)
        return Weight(f"{pair.tag}.{self.names}", p)

    def hyper(self):
        return dict(lr=self.r.choice((1e-1, 1e-2, 1e-3, 0.0)), eps=self.r.choice((1e-8, 1e-6, 1e-3)),
                    betas=self.r.choice(((0.9, 0.999), (0.9, 0.95), (0.0, 0.9), (0.5, 0.5))),
                    weight_decay=self.r.choice((0.0, 0.01, 0.3)), maximize=self.chance(0.2))

    def split(self, weights):
        """Groups of weights, those with max_exp_avg_sq apart: [(weights, options)]."""
        parts = collections.defaultdict(list)
        for w in weights:
            known = w.has_max if w.registered or w.name in self.stored else self.chance(0.3)
            if w.name in self.stored:
                known = "max_exp_avg_sq" in self.stored[w.name]
            parts[known, self.r.randint(0, 1)].append(w)
        return [(ws, {**self.hyper(), "amsgrad": ams}) for (ams, _), ws in parts.items()]

    def some(self, pair, test=lambda w: True):
        fit = [w for w in pair.weights if test(w)]
        return self.r.choice(fit) if fit else None

    def stepped(self, pair):
        """One that has state to edit."""
        return self.some(pair, lambda w: w.registered and len(pair.ref.state.get(w.s, ())) > 0)

    # ---- opening and closing ----

    def where(self):
        return dict(mount=self.mount.path) if self.mount else dict(backing=os.path.join(self.folder, "backing"), ram=8 << 20,
                                                                   block=65536, commit_seconds=-1)

    def make(self, pair, resume):
        groups = [{**options, "params": [(w.name, w.p) for w in ws]} for ws, options in pair.groups]
        return KINDS[pair.kind][0](groups, resume=resume, master=pair.master, nonfinite=pair.nonfinite, **self.where())

    def open(self, pair, resume="partial"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pair.ours = self.make(pair, resume)
        self.opened(pair)

    def opened(self, pair):
        """torch's side of an optimizer that has been made of pair.groups."""
        pair.weights = [w for ws, _ in pair.groups for w in ws]
        pair.by_shadow = {id(w.s): w for w in pair.weights}
        pair.ref = KINDS[pair.kind][1]([{**o, "params": [w.s for w in ws]} for ws, o in pair.groups], foreach=False)
        pair.schedulers, pair.saved = None, []
        self.register(pair, [w for w in pair.weights if w.p.requires_grad])

    def group_of(self, pair, w):
        return next(g for g in pair.ref.param_groups if any(s is w.s for s in g["params"]))

    def register(self, pair, weights):
        """What a step, a group or a state dict registers is committed at once if it is made, with all else."""
        weights = [w for w in weights if not w.registered]
        made = [w for w in weights if w.name not in self.stored]
        for w in weights:
            w.registered, w.shape = True, tuple(w.p.shape)
            w.has_max = bool(self.group_of(pair, w)["amsgrad"])
            found = self.stored.pop(w.name, None)
            w.master = torch.zeros(w.shape)
            if found:
                if found["master"] is not None:
                    w.master = found["master"].clone()
                if number(found["step"]):
                    pair.ref.state[w.s] = clone_state({k: found[k] for k in ("step", *KEYS) if k in found})
        if made:
            self.commit_model()

    def registered_all_the_same(self):
        """By an operation that was refused or interrupted after that."""
        for pair in self.pairs:
            self.register(pair, [w for w in pair.weights if w.p in pair.ours._slots])

    def state_of(self, pair, w):
        """What is on the drive of one that is registered."""
        state = pair.ref.state.get(w.s) or {}
        out = {"step": torch.tensor(0.0), **{k: torch.zeros(w.shape) for k in KEYS[: 3 if w.has_max else 2]}}
        out.update(clone_state(state))
        out["master"] = w.master.clone() if w.low and pair.master else None
        return out

    def all_state(self):
        out = dict(self.stored)
        for pair in self.pairs:
            out.update({w.name: self.state_of(pair, w) for w in pair.weights if w.registered})
        return out

    def commit_model(self):
        self.committed = (self.label, self.all_state())

    def rollback_model(self):
        self.label, states = self.committed
        self.stored = {n: states.get(n, s) for n, s in self.stored.items()}
        for pair in self.pairs:
            for w in pair.weights:
                if not w.registered:
                    continue
                old = states.get(w.name)
                pair.ref.state.pop(w.s, None)
                w.master = torch.zeros(w.shape)
                if old:
                    if number(old["step"]):
                        pair.ref.state[w.s] = clone_state({k: v for k, v in old.items() if k in ("step", *KEYS)})
                    if old["master"] is not None:
                        w.master = old["master"].clone()

    # ---- comparing ----

    def save(self):
        return self.label, dict(self.stored), self.committed, [p.save() for p in self.pairs]

    def load(self, saved):
        self.label, stored, self.committed, pairs = saved
        self.stored = dict(stored)
        for p, x in zip(self.pairs, pairs):
            p.load(x)

    def differences(self, state=True):
        out = []
        for pair in self.pairs:
            out += self.of_pair(pair, state)
        return out

    def of_pair(self, pair, state):
        out, opt = [], pair.ours
        if opt is None:
            return ["closed"]
        for w in pair.weights:
            if not same(w.p.detach(), w.want):
                out.append(f"weights of {w.name}")
        if not state:
            return out
        if opt.last_step != (self.label or None):
            out.append(f"{pair.tag}: last step {opt.last_step}, not {self.label}")
        if (opt.committed_step or None) != (self.committed[0] or None):
            out.append(f"{pair.tag}: committed step {opt.committed_step}, not {self.committed[0]}")
        if len(opt.param_groups) != len(pair.ref.param_groups):
            return out + [f"{pair.tag}: {len(opt.param_groups)} groups, not {len(pair.ref.param_groups)}"]
        for n, (ours, theirs) in enumerate(zip(opt.param_groups, pair.ref.param_groups)):
            for key in HYPER:
                if str(ours.get(key)) != str(theirs.get(key)):
                    out.append(f"group {n} of {pair.tag}: {key} is {ours.get(key)}, not {theirs.get(key)}")
            if len(ours["params"]) != len(theirs["params"]) or any(
                    p is not pair.of(s).p for p, s in zip(ours["params"], theirs["params"])):
                out.append(f"group {n} of {pair.tag}: other parameters")
        for w in pair.weights:
            want = pair.ref.state.get(w.s) or {}
            got = opt.state[w.p]
            keys = set(want) | ({"master"} if want and w.low and pair.master else set())
            if set(got) != keys:
                out.append(f"state of {w.name}: {sorted(got)}, not {sorted(keys)}")
                continue
            for key in want:
                x = torch.as_tensor(want[key], dtype=torch.float32)
                if not same(got[key].detach().clone(), x):
                    out.append(f"{key} of {w.name}: {got[key].reshape(-1)[:4].tolist()}, not {x.reshape(-1)[:4].tolist()}")
            if "master" in keys and not same(got["master"].detach().clone(), w.master):
                out.append(f"master of {w.name}")
        return out

    # ---- one operation ----

    def attempt(self, what, ours, ref=lambda: None, may=(), must=False):
        """Ours and torch's. may: what ours may refuse that torch takes. must: ours has to refuse it."""
        self.log.append(what)
        before = self.save()
        refused = None
        try:
            ref()
        except REFUSALS as e:
            refused = e
            self.load(before)
        way = self.interrupts and not must and self.r.choice(("", "", "trace", "trace", "alarm"))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                {"trace": self.traced, "alarm": self.alarmed}.get(way, lambda f: f())(ours)
        except KeyboardInterrupt:
            self.interrupted[what.split()[0]] += 1
            self.log.append(f"  interrupted ({way})")
            after = self.differences()
            if after:
                self.load(before)
                self.registered_all_the_same()
                now = self.differences()
                if now:
                    raise Failure(f"{what}, interrupted: neither done ({'; '.join(after[:4])}) nor undone ({'; '.join(now[:4])})")
                return False
            return True
        except REFUSALS as e:
            self.raised[f"{what.split()[0]}: {type(e).__name__}"] += 1
            self.log.append(f"  {type(e).__name__}: {str(e)[:150]}")
            if not (refused or must or isinstance(e, may)):
                raise Failure(f"{what}: torch takes it, ours: {type(e).__name__}: {e}") from e
            self.load(before)
            self.registered_all_the_same()
            self.agree(what + ", refused")
            return False
        if refused is not None:
            raise Failure(f"{what}: torch refuses it ({type(refused).__name__}: {refused}), ours does not")
        if must:
            raise Failure(f"{what}: has to be refused, and is not")
        self.agree(what)
        return True

    def agree(self, what):
        found = self.differences()
        if found:
            raise Failure(f"{what}: {'; '.join(found[:6])}")

    def refused(self, what, fn):
        self.log.append(what)
        try:
            fn()
        except REFUSALS:
            return
        raise Failure(f"{what}: not refused")

    def traced(self, fn):
        """A signal at one instruction of Python's, in our files or those that they rest on."""
        at, every = int(10 ** self.r.uniform(0, 3.7)), self.chance(0.5)
        n = 0

        def tracer(frame, _event, _arg):
            nonlocal n
            name = frame.f_code.co_filename
            if "momentfs" not in name and not name.endswith("contextlib.py"):
                return None
            if "tests" in name:
                return None
            frame.f_trace_opcodes = every
            n += 1
            if n == at:
                signal.raise_signal(signal.SIGINT)
            return tracer

        sys.settrace(tracer)
        try:
            fn()
        finally:
            sys.settrace(None)

    def alarmed(self, fn):
        try:
            signal.setitimer(signal.ITIMER_REAL, 10 ** self.r.uniform(-5, -2.5))
            fn()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    # ---- steps ----

    def op_step(self, pair):
        share = self.r.choice((0.1, 0.5, 0.9, 1.0))
        bad = None
        for w in pair.weights:
            w.p.grad = w.s.grad = None
            if not w.p.requires_grad or not self.chance(share) or w.p.shape != w.want.shape:
                continue
            scale = self.r.choice((0.0, 1e-3, 1.0, 1.0, 1.0, 100.0))
            g = self.laid_out(self.tensor(w.p.shape, w.p.dtype, scale))
            if self.chance(0.01) and g.numel() and pair.nonfinite == "raise":
                g.reshape(-1)[0] = self.r.choice((float("inf"), float("nan")))
                g = g.clone() if g.is_contiguous() else torch.full_like(g, float("nan"))
                bad = w.name
            w.p.grad, w.s.grad = g, g.float().contiguous() if tuple(g.shape) == tuple(w.s.shape) else None
        stepped = [(w, g) for g in pair.ref.param_groups for w in map(pair.of, g["params"])
                   if w.p.grad is not None]
        wrong = [w for w, g in stepped if tuple(w.p.shape) != w.shape and w.registered]
        off = [w for w, g in stepped if g["amsgrad"] and not self.may_have_max(w)]
        tiny = any(0 < number(g["eps"]) < 1e-38 for g in pair.ref.param_groups)
        must = bool(stepped) and bool(bad or wrong or off or tiny)
        way = self.r.choice(("", "", "", "closure", "thread"))

        def ours():
            if way == "closure":
                if pair.ours.step(lambda: torch.tensor(3.0)) != 3:
                    raise Failure("the closure's loss is not what step() returns")
            elif way == "thread":
                errors = []

                def run():
                    try:
                        pair.ours.step()
                    except BaseException as e:
                        errors.append(e)

                thread = threading.Thread(target=run)
                thread.start()
                thread.join()
                if errors:
                    raise errors[0]
            else:
                pair.ours.step()

        def ref():
            if not must and stepped:
                self.reference_step(pair, stepped)

        if way == "thread":
            interrupts, self.interrupts = self.interrupts, False
        self.attempt(f"step {pair.tag} of {' '.join(w.name for w, _ in stepped)} {way}", ours, ref, must=must)
        if way == "thread":
            self.interrupts = interrupts

    def reference_step(self, pair, stepped):
        """torch's step, compared with the kernel's on the same numbers, which are then taken."""
        self.register(pair, [w for w, _ in stepped])
        self.label = (self.label or 0) + 1
        due = []
        for w, group in stepped:
            kept = w.low and pair.master
            p = w.want.clone(memory_format=torch.contiguous_format)
            master = w.master.clone() if kept else None
            start = p.float().clone()
            if kept:
                start = torch.where(bits(master.to(p.dtype)).view(p.shape) == bits(p).view(p.shape), master, start)
            state = pair.ref.state.get(w.s) or {}
            old = [state[k].clone() if k in state else torch.zeros(w.shape) for k in KEYS]
            if not state and w.has_max and not group["amsgrad"]:
                state = None  # ours keeps what it was registered with
            step = int(number((pair.ref.state.get(w.s) or {}).get("step", 0))) + 1
            flags = (_lib.BIAS_CORRECTION | (_lib.DECOUPLED if pair.kind == "AdamW" else 0) | (_lib.TAKE_P if pair.master else 0)
                     | (_lib.MAXIMIZE if group["maximize"] else 0) | (_lib.AMSGRAD if group["amsgrad"] else 0))
            o = _lib.Optim(kind=_lib.ADAM, flags=flags, lr=number(group["lr"]), beta1=group["betas"][0], beta2=group["betas"][1],
                           eps=group["eps"], weight_decay=group["weight_decay"])
            g = w.p.grad.contiguous()
            m, v, vmax = (x.contiguous() for x in old)
            piece = Slice(p.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr(), master.data_ptr() if kept else None,
                          vmax.data_ptr(), p.numel(), DTYPES[p.dtype], DTYPES[g.dtype])
            if p.numel() and _lib.lib.moment_update(ctypes.byref(o), step, ctypes.byref(piece), 1, None) != 0:
                raise Failure("moment_update refuses")
            w.s.data = start.clone()
            due.append((w, group, start, p, master, (m, v, vmax), step))
        pair.ref.step()
        for w, group, start, p, master, arrays, step in due:
            state = pair.ref.state[w.s]
            exact = w.s.detach()
            made = p.float() if master is None else master
            lr = number(group["lr"])
            room = 2e-6 * exact.abs() + 2e-5 * (exact - start).abs() + 1e-7 + 5e-5 * lr
            if w.low and master is None:
                room = room + 2**-7 * exact.abs() + 1e-6
            wrong = (made - exact).abs() > room
            if bool(wrong.any()) or int(number(state["step"])) != step:
                raise Failure(f"{w.name} ({w.p.dtype}, step {step}, {({k: group[k] for k in HYPER if k in group})}): the kernel's {made[wrong][:4].tolist()}, torch's {exact[wrong][:4].tolist()}")
            if w.has_max and "max_exp_avg_sq" not in state:
                state["max_exp_avg_sq"] = torch.zeros(w.shape)
            for key, x in zip(KEYS, arrays):
                if key in state:
                    size = 2e-6 * (float(x.abs().max()) if x.numel() else 0)
                    if not torch.allclose(state[key], x, rtol=1e-5, atol=size + 1e-10):
                        raise Failure(f"{w.name}: {key} differs from torch's")
                    state[key].copy_(x)
            w.want = p.clone()
            if master is not None:
                w.master = master
            w.s.data = made.clone()

    # ---- groups and parameters ----

    def may_have_max(self, w):
        if w.registered:
            return w.has_max
        return w.name not in self.stored or "max_exp_avg_sq" in self.stored[w.name]

    def op_zero_grad(self, pair):
        none = self.chance(0.5)
        self.attempt("zero_grad", lambda: pair.ours.zero_grad(set_to_none=none))

    def op_add_group(self, pair):
        if len(pair.weights) > 14:
            return self.op_drop_group(pair)
        weights = [self.new_weight(pair) for _ in range(self.r.randint(1, 2))]
        options = {**self.hyper(), "amsgrad": self.chance(0.3)}
        wrong = self.r.choice((None, None, None, "lr", "known", "betas", "eps"))
        may, must = (), False
        if wrong == "lr":
            options["lr"], must = -1.0, True
        elif wrong == "betas":
            options["betas"], must = (1.0, 0.9), True
        elif wrong == "eps":
            options["eps"], must = 1e-41, True
        elif wrong == "known":
            weights.append(self.r.choice(pair.weights))

        def ref():
            if must:
                return
            for w in weights:
                pair.by_shadow[id(w.s)] = w
            pair.ref.add_param_group({**options, "params": [w.s for w in weights]})
            if pair.schedulers:
                pair.ref.param_groups[-1]["initial_lr"] = options["lr"]
            pair.weights += [w for w in weights if w not in pair.weights]
            self.register(pair, [w for w in weights if w.p.requires_grad])

        def ours():
            pair.ours.add_param_group({**options, "params": [(w.name, w.p) for w in weights],
                                       **({"initial_lr": options["lr"]} if pair.schedulers else {})})

        what = f"add_param_group {pair.tag} {' '.join(w.name for w in weights)} {wrong or ''}"
        if not self.attempt(what, ours, ref, may, must) and not wrong:
            keep, self.interrupts = self.interrupts, False
            for w in weights:
                w.registered = False
            self.attempt(what + " again", ours, ref)
            self.interrupts = keep

    def op_drop_group(self, pair):
        """param_groups.pop() is a list's own: its parameters are no more updated, their state stays."""
        if len(pair.ref.param_groups) < 2 or pair.schedulers:
            return
        n = self.r.randrange(len(pair.ref.param_groups))
        self.log.append(f"drop group {n} of {pair.tag}")
        for s in pair.ref.param_groups[n]["params"]:
            w = pair.of(s)
            if w.registered:
                self.stored[w.name] = self.state_of(pair, w)
            pair.ref.state.pop(s, None)
            pair.weights.remove(w)
        del pair.ref.param_groups[n], pair.ours.param_groups[n]
        pair.saved = []

    def op_freeze(self, pair):
        w = self.some(pair)
        w.p.requires_grad_(not w.p.requires_grad)
        w.p.grad = None
        self.log.append(f"{'thaw' if w.p.requires_grad else 'freeze'} {w.name}")

    def op_hyper(self, pair):
        n = self.r.randrange(len(pair.ref.param_groups))
        key = self.r.choice(("lr", "lr", "lr tensor", "betas", "eps", "weight_decay", "maximize", "amsgrad", "tiny"))
        value = self.hyper().get(key)
        if key == "lr tensor":
            key, value = "lr", torch.tensor(self.r.choice((1e-2, 1e-3)))
            if int(torch.__version__.split(".")[0]) < 2:
                value = float(value)
        if key == "amsgrad":
            value = not pair.ref.param_groups[n]["amsgrad"]
            if any(w.name in self.stored and not w.registered for w in map(pair.of, pair.ref.param_groups[n]["params"])):
                return  # what it is registered with is then more or less than what is stored
        if key == "tiny":
            key, value = "eps", self.r.choice((1e-41, 1e-8, 1e-8))
        pair.ref.param_groups[n][key] = pair.ours.param_groups[n][key] = value
        self.log.append(f"group {n} of {pair.tag}: {key} = {value}")

    def op_usual(self, pair):
        """All groups back to settings with which steps are made."""
        for ours, theirs in zip(pair.ours.param_groups, pair.ref.param_groups):
            has = [pair.of(s).has_max for s in theirs["params"] if pair.of(s).registered]
            for g in (ours, theirs):
                g["eps"] = 1e-8
                if not all(has):
                    g["amsgrad"] = False
        self.log.append(f"usual settings for {pair.tag}")

    def op_replace(self, pair):
        """group["params"][i] = other, and back again."""
        n = self.r.randrange(len(pair.ref.param_groups))
        params = pair.ours.param_groups[n]["params"]
        i = self.r.randrange(len(params))
        other = torch.nn.Parameter(self.tensor(self.r.choice((params[i].shape, (3, 3))), params[i].dtype))
        kept = other.detach().clone()
        for w in pair.weights:
            w.p.grad = torch.ones_like(w.p) if w.p.requires_grad else None
        other.grad = torch.ones_like(other)
        old, params[i] = params[i], other
        try:
            for what, refused in (("step", pair.ours.step), ("state_dict", pair.ours.state_dict)):
                self.refused(f"{what} with another tensor in the place of {pair.of(pair.ref.param_groups[n]['params'][i]).name}", refused)
        finally:
            params[i] = old
        if not same(other.detach(), kept):
            raise Failure("the tensor that was refused has changed")
        self.agree("parameter put back")

    def op_resize(self, pair):
        """p.data = other size: refused by steps until it is put back."""
        w = self.some(pair, lambda w: w.registered and w.p.dim() > 0)
        if w is None:
            return
        old = w.p.data
        shape = self.r.choice([(2, *w.shape), (*w.shape[:-1], w.shape[-1] + 1), (*w.shape[:-1], w.shape[-1] // 2), (0,), ()])
        if tuple(shape) == w.shape:
            return
        w.p.grad = None
        w.p.data = self.tensor(shape, w.p.dtype)
        w.want = w.p.detach().clone()
        for v in pair.weights:
            v.p.grad = torch.ones_like(v.p) if v.p.requires_grad else None
        w.p.requires_grad_(True)
        w.p.grad = torch.ones_like(w.p)
        keep, self.interrupts = self.interrupts, False
        self.attempt(f"step {pair.tag} with {w.name} of shape {shape}, not {w.shape}", pair.ours.step, must=True)
        self.interrupts = keep
        w.p.grad = None
        w.p.data = old
        w.want = old.clone()
        self.agree("size put back")

    def op_data(self, pair):
        """The trainer writes weights, or gives them other memory."""
        w = self.some(pair)
        way = self.r.choice(("other memory", "mul", "row", "copy", "set", "zero"))
        with torch.no_grad():
            if way == "other memory":
                w.p.data = self.laid_out(w.p.data.clone())
            elif way == "mul":
                w.p.mul_(0.5)
            elif way == "row" and w.p.dim():
                w.p.data[:1] = 0.25
            elif way == "copy":
                w.p.copy_(self.tensor(w.p.shape, w.p.dtype))
            elif way == "set":
                w.p.data = self.laid_out(self.tensor(w.p.shape, w.p.dtype))
            elif way == "zero":
                w.p.data.zero_()
        w.want = w.p.detach().clone()
        self.log.append(f"weights of {w.name}: {way}")

    def op_restore_weights(self, pair):
        if not pair.master:
            return

        def ref():
            for w in pair.weights:
                if w.low and w.registered and (pair.ref.state.get(w.s) or w.master.any()):
                    w.want = w.master.to(w.p.dtype)

        self.attempt(f"restore_weights {pair.tag}", pair.ours.restore_weights, ref)

    # ---- state ----

    def full_state(self, pair, w):
        out = {"step": torch.tensor(float(self.r.randint(1, 50))), "exp_avg": self.tensor(w.shape, torch.float32, 0.1),
               "exp_avg_sq": self.tensor(w.shape, torch.float32, 0.1).square() + 1e-4}
        if w.has_max:
            out["max_exp_avg_sq"] = out["exp_avg_sq"] * 2
        return out

    def op_state(self, pair):
        w = self.stepped(pair)
        if w is None:
            return
        way = self.r.choice(("begin anew", "whole", "exp_avg", "exp_avg_sq", "step", "max_exp_avg_sq", "master", "all", "empty", "own",
                             "del", "pop", "clear"))
        opt, ref = pair.ours, pair.ref
        value = self.full_state(pair, w)

        def none():
            pass

        if way == "begin anew":
            ours, theirs = lambda: opt.state.__setitem__(w.p, {}), lambda: ref.state.pop(w.s)
        elif way == "whole":
            ours = lambda: opt.state.__setitem__(w.p, value)
            theirs = lambda: ref.state.__setitem__(w.s, clone_state(value))
        elif way in ("del", "pop", "clear"):
            do = {"del": lambda state, p: state.__delitem__(p), "pop": lambda state, p: state.pop(p),
                  "clear": lambda state, p: state[p].clear()}[way]
            ours, theirs = lambda: do(opt.state, w.p), lambda: do(ref.state, w.s)
        elif way == "own":
            ours, theirs = lambda: opt.state.__setitem__(w.p, opt.state[w.p]), none
        elif way == "all":
            def ours():
                opt.state = {w.p: value}

            def theirs():
                ref.state = collections.defaultdict(dict, {w.s: clone_state(value)})
        elif way == "empty":
            if not self.chance(0.3):
                return

            def ours():
                opt.state = collections.defaultdict(dict)

            def theirs():
                ref.state = collections.defaultdict(dict)
        elif way == "master":
            if not (w.low and pair.master):
                return
            new = self.tensor(w.shape, torch.float32)
            ours = lambda: opt.state[w.p].__setitem__("master", new)

            def theirs():
                w.master, w.want = new.clone(), new.to(w.p.dtype)
        else:
            if way not in value:
                return
            ours = lambda: opt.state[w.p].__setitem__(way, value[way])
            theirs = lambda: ref.state[w.s].__setitem__(way, value[way].clone())
        self.attempt(f"state of {w.name}: {way}", ours, theirs)

    def op_state_refused(self, pair):
        """Edits that have no effect have to raise."""
        w = self.stepped(pair)
        if w is None or len(w.shape) == 0 or w.p.numel() == 0:
            return
        opt, state = pair.ours, lambda: pair.ours.state[w.p]
        moment = lambda: state()["exp_avg"]
        full = self.full_state(pair, w)
        edits = {
            "zero_": lambda: moment().zero_(), "mul_": lambda: moment().mul_(0.5), "row": lambda: moment().__setitem__(0, 1.0),
            "data": lambda: moment().data.copy_(torch.ones(w.shape)), "step": lambda: state()["step"].zero_(),
            "view": lambda: moment().view(-1).add_(1), "out": lambda: torch.add(torch.ones(w.shape), 1, out=moment()),
            "foreach": lambda: torch._foreach_mul_([moment()], 0.0), "numpy": lambda: moment().numpy().__setitem__(0, 1),
            "shape": lambda: state().__setitem__("exp_avg", torch.ones((*w.shape, 2))),
            "lacks": lambda: opt.state.__setitem__(w.p, {"step": full["step"]}),
            "unknown": lambda: opt.state.__setitem__(w.p, {**full, "other": 1}),
            "wrong last": lambda: opt.state.__setitem__(w.p, {**full, "exp_avg_sq": torch.zeros(1, 1, 1)}),
            "count": lambda: state().__setitem__("step", -1), "double": lambda: state().__setitem__("exp_avg", full["exp_avg"].double()),
            "stranger": lambda: setattr(opt, "state", {torch.zeros(2): {}}), "pickle": lambda: pickle.dumps(opt),
            "copy": lambda: copy.deepcopy(opt), "init": lambda: torch.nn.init.zeros_(moment()),
        }
        way = self.r.choice(list(edits))
        self.attempt(f"state of {w.name}, refused: {way}", edits[way], must=True)

    # ---- state dicts ----

    def op_state_dict(self, pair):
        """Ours against torch's."""
        self.log.append(f"state_dict {pair.tag}")
        ours, theirs = pair.ours.state_dict(), pair.ref.state_dict()
        if [g["params"] for g in ours["param_groups"]] != [g["params"] for g in theirs["param_groups"]]:
            raise Failure("state_dict: other numbers of parameters")
        if set(ours["state"]) != {k for k, v in theirs["state"].items() if v}:
            raise Failure(f"state_dict: state of {sorted(ours['state'])}, not {sorted(theirs['state'])}")
        for i, entry in ours["state"].items():
            for key in theirs["state"][i]:
                if not same(entry[key], torch.as_tensor(theirs["state"][i][key], dtype=torch.float32)):
                    raise Failure(f"state_dict: {key} of parameter {i}")
        pair.saved.append((ours, [[id(s) for s in g["params"]] for g in pair.ref.param_groups]))
        del pair.saved[:-4]

    def op_load(self, pair):
        now = [[id(s) for s in g["params"]] for g in pair.ref.param_groups]
        fit = [sd for sd, groups in pair.saved if groups == now]
        way = self.r.choice(("own", "old", "old", "torch's", "file", "bad"))
        if way == "old" and not fit:
            way = "own"
        try:
            saved = {"own": pair.ours.state_dict, "old": lambda: self.r.choice(fit), "torch's": pair.ref.state_dict,
                     "file": pair.ours.state_dict, "bad": pair.ours.state_dict}[way]()
        except REFUSALS as e:
            raise Failure(f"state_dict: {e}")
        if way == "file":
            f = io.BytesIO()
            torch.save(saved, f)
            f.seek(0)
            saved = torch.load(f)
        saved = copy.deepcopy(saved)
        must = way == "bad"
        if must:
            what = self.r.choice(("groups", "lacks", "shape", "number", "key"))
            entries = [e for e in saved["state"].values()]
            if what == "groups":
                saved["param_groups"].append(copy.deepcopy(saved["param_groups"][0]))
            elif what == "number":
                saved["state"][10**6] = {}
            elif not entries:
                return
            elif what == "lacks":
                del entries[-1]["exp_avg_sq"]
            elif what == "shape":
                entries[-1]["exp_avg"] = torch.zeros(9, 9, 9)
            else:
                entries[-1]["momentum_buffer"] = torch.zeros(3)
        ordered = [w for g in pair.ref.param_groups for w in map(pair.of, g["params"])]
        # What an unregistered one gets, or one without its max_exp_avg_sq, may be refused.
        may = (ValueError,) if any(
            (ordered[i].has_max if ordered[i].registered else self.group_of(pair, ordered[i])["amsgrad"]) != ("max_exp_avg_sq" in e)
            for i, e in saved["state"].items() if i < len(ordered)) else ()

        def ref():
            if must:
                return
            counts = {i: int(number(e["step"])) for i, e in saved["state"].items() if e}
            if "last_step" in saved:
                label = saved["last_step"]
            else:
                mine = {i: int(number((pair.ref.state.get(w.s) or {"step": 0})["step"])) for i, w in enumerate(ordered)
                        if w.registered}
                label = (self.label or 0) if all(counts.get(i, 0) == n for i, n in mine.items()) else max(counts.values(), default=0)
            self.register(pair, [w for i, w in enumerate(ordered) if saved["state"].get(i)])
            theirs = {**saved, "state": {i: {k: v for k, v in e.items() if k != "master"} for i, e in saved["state"].items()
                                         if e}}  # some versions of torch cannot load the empty ones that they have
            theirs["param_groups"] = [{k: v for k, v in g.items() if k != "param_names"} for g in theirs["param_groups"]]
            pair.ref.load_state_dict(theirs)
            for i, w in enumerate(ordered):
                master = saved["state"].get(i, {}).get("master")
                if master is not None:
                    w.master = master.clone()
            self.label = label

        def ours():
            pair.ours.load_state_dict(saved)

        self.attempt(f"load_state_dict {pair.tag}, {way}", ours, ref, may, must)

    def op_scheduler(self, pair):
        if pair.schedulers is None:
            make = self.r.choice((lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.7),
                                  lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (1 + s % 7)),
                                  lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10)))
            self.log.append(f"a scheduler for {pair.tag}")
            pair.schedulers = [make(o) for o in (pair.ours, pair.ref)]
            self.agree("a new scheduler")
            return
        if len(pair.schedulers[0].base_lrs) != len(pair.ref.param_groups):  # groups have been added
            for o in (pair.ours, pair.ref):
                for g in o.param_groups:
                    g.pop("initial_lr", None)
            pair.schedulers = None
            return
        if self.chance(0.1):
            for s in pair.schedulers:
                s.load_state_dict(s.state_dict())
        self.interrupts = False  # it is torch's own code that runs, and sets one group after the other
        self.attempt(f"scheduler {pair.tag}", pair.schedulers[0].step, pair.schedulers[1].step)

    # ---- commits, and the end of an optimizer ----

    def op_commit(self, pair):
        self.attempt(f"commit {pair.tag}", pair.ours.commit, self.commit_model)
        if "interrupted" in self.log[-1]:  # whether it came to be done is not always to be seen
            pair.ours.commit()
            self.commit_model()

    def op_rollback(self, pair):
        def ref():
            self.rollback_model()

        self.attempt(f"rollback {pair.tag}", pair.ours.rollback, ref)

    def op_torn(self, pair):
        """A step that was begun and not ended: nothing but a rollback is taken."""
        w = self.some(pair, lambda w: w.registered and w.p.numel() > 0)
        if w is None:
            return
        session, slot = pair.ours._session, pair.ours._slots[w.p]
        self.log.append(f"torn step of {pair.tag} ({w.name})")
        junk = torch.full((w.p.numel(),), 7.0)
        session.pre_step((self.label or 0) + 1)
        session.write(slot.handle, _lib.EXP_AVG, 0, junk.numel(), junk.data_ptr())
        try:
            session.abort_step()
        except MomentError:
            pass
        for q in self.pairs:
            for v in q.weights:
                v.p.grad = torch.ones_like(v.p) if v.p.requires_grad else None
            if not any(v.p.grad is not None for v in q.weights):
                continue
            for refused in (q.ours.step, q.ours.commit):
                try:
                    refused()
                except REFUSALS:
                    continue
                raise Failure(f"{refused.__name__} of {q.tag} after a torn step")
        found = self.differences(state=False)
        if found:
            raise Failure(f"torn: {found}")
        pair.ours.rollback()
        self.rollback_model()
        self.agree("rollback of a torn step")

    def maybe_traced(self, fn, what):
        """Until it is done. True: was interrupted."""
        try:
            if self.interrupts and self.chance(0.5):
                self.traced(fn)
            else:
                fn()
            return False
        except KeyboardInterrupt:
            self.interrupted[what] += 1
            self.log.append(f"  {what} interrupted")
            return True

    def op_reopen(self, _pair):
        """All closed, or just let go of, and made anew over what is there."""
        pairs = self.r.sample(self.pairs, len(self.pairs))
        way = self.r.choice(("close", "close", "del"))
        self.log.append(f"{way} {' '.join(p.tag for p in pairs)}")
        for p in pairs:
            for w in p.weights:
                w.p.grad = None
            p.schedulers = None
            if way == "close":
                while p.ours._session and self.maybe_traced(p.ours.close, "close"):
                    pass
                self.refused("step when closed", p.ours.step) if any(w.p.grad is not None for w in p.weights) else None
            p.ours = None
        gc.collect()  # exceptions that this test has kept refer to what they were raised in
        for p in pairs:
            for w in p.weights:
                if w.registered:
                    self.stored[w.name] = self.state_of(p, w)
                w.registered = False
                if self.chance(0.5):
                    w.p = torch.nn.Parameter(self.laid_out(w.want.clone()), requires_grad=w.p.requires_grad)
                    w.want = w.p.detach().clone()
        if not self.mount:  # an engine that ends commits; the daemon goes on
            self.commit_model()
        for p in pairs:
            weights = self.r.sample(p.weights, len(p.weights))
            if self.chance(0.2) and len(weights) > 2:
                weights.pop()  # its state stays where it is
            if self.chance(0.2):
                weights.append(self.new_weight(p))
            if not any(w.p.requires_grad for w in weights):
                weights[0].p.requires_grad_(True)
            p.groups, p.ref, p.weights = self.split(weights), None, []
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # An optimizer of which only the making was interrupted leaves its names in a session that others
                # share, until the last of them closes: so only the first is interrupted.
                if p is not pairs[0]:
                    p.ours = self.make(p, "partial")
                else:
                    while self.maybe_traced(lambda: setattr(p, "ours", self.make(p, "partial")), "open"):
                        p.ours = None
                        gc.collect()
            self.opened(p)
        self.agree("made anew")

    OPS = {"step": 40, "zero_grad": 2, "add_group": 4, "drop_group": 1, "freeze": 4, "hyper": 6, "usual": 3, "replace": 2, "resize": 2,
           "data": 6, "restore_weights": 1, "state": 8, "state_refused": 5, "state_dict": 4, "load": 7, "scheduler": 5, "commit": 4,
           "rollback": 3, "torn": 1, "reopen": 2}

    def run(self, ops):
        names, weights = list(self.OPS), list(self.OPS.values())
        for n in range(ops):
            pair, name = self.r.choice(self.pairs), self.r.choices(names, weights)[0]
            self.interrupts = self.chance(0.3)
            if self.verbose and n % 500 == 0:
                print(f"seed {self.seed}: {n} operations", flush=True)
            self.count[name] += 1
            try:
                getattr(self, "op_" + name)(pair)
            except BaseException as e:
                last = "\n  ".join(self.log)
                print(f"test_random_optimizer: seed {self.seed}, operation {n} ({name}): {e}\nThe last operations:\n  {last}", file=sys.stderr)
                raise
        if self.verbose:
            print(f"seed {self.seed}: {ops} operations: {dict(self.count)}\n  refused: {dict(self.raised)}\n"
                  f"  interrupted: {dict(self.interrupted)}")

    def close(self):
        for pair in self.pairs:
            if pair.ours is not None:
                pair.ours.close()


def stop(*_):
    raise KeyboardInterrupt


class Random(Case):
    FULL = os.environ.get("MOMENT_CRASH") == "full"
    VERBOSE, SEEDS, OPS = False, (1, 2, 3, 4) if FULL else (1, 2), 10000 if FULL else 200

    def world(self, seed, ops, mount=None):
        for number in (signal.SIGINT, signal.SIGALRM):
            self.addCleanup(signal.signal, number, signal.signal(number, stop))
        folder = tempfile.mkdtemp(prefix="random-", dir=self.folder)
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        world = World(seed, folder, mount, self.VERBOSE)
        try:
            world.run(ops)
        finally:
            try:
                world.close()
            except REFUSALS:
                pass
            shutil.rmtree(folder, ignore_errors=True)

    def test_embedded(self):
        for seed in self.SEEDS:
            self.world(seed, self.OPS)

    def test_mounted(self):
        self.world(self.SEEDS[0], max(self.OPS // 10, 50), self.mount())


def arguments():
    parser = argparse.ArgumentParser(description="random operations on our optimizers and torch's")
    parser.add_argument("--ops", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("-v", "--verbose", action="store_true")
    args, rest = parser.parse_known_args()  # the rest is unittest's
    Random.OPS = args.ops or Random.OPS
    Random.VERBOSE = args.verbose
    if args.seed is not None:
        Random.SEEDS = (args.seed,)
    sys.argv[1:] = rest


if __name__ == "__main__":
    arguments()
    support.main()
