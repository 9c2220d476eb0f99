# SPDX-License-Identifier: Apache-2.0
"""Adam and AdamW as torch.optim.Optimizer, over a momentfs session.

A parameter is registered when it requires a gradient (or first has one). A step collects the parameters that have
gradients and hands all of them to libmoment in one call, which streams their state from the drive and back.
"""

import math

import torch

from momentfs import _lib
from momentfs._lib import EXP_AVG, EXP_AVG_SQ, MASTER, MAX_EXP_AVG_SQ
from momentfs.session import Session
from momentfs.signals import whole
from momentfs.torch import layout
from momentfs.torch.copies import storage_of
from momentfs.torch.names import Names, group_of, groups_of
from momentfs.torch.samples import Samples

DTYPES = {torch.float32: _lib.F32, torch.bfloat16: _lib.BF16, torch.float16: _lib.F16}
# Made here and not where an optimizer is made: the first one of a process has torch load modules, and what those keep of
# the stack would keep our optimizer until the collector runs.
TORCHS_DEFAULTS = {kind: kind([torch.zeros(1)]).defaults for kind in (torch.optim.Adam, torch.optim.AdamW)}
SMALLEST = torch.finfo(torch.float32).tiny


class Slot:
    """What is known of one registered parameter besides its tensor."""

    __slots__ = ("handle", "name", "master", "amsgrad", "shape", "dtype")

    def __init__(self, p, name, master, amsgrad):
        self.handle = None  # until it is registered
        self.name, self.master, self.amsgrad = name, master, amsgrad
        self.shape, self.dtype = tuple(p.shape), p.dtype

    @property
    def roles(self):
        out = {"exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ}
        if self.amsgrad:
            out["max_exp_avg_sq"] = MAX_EXP_AVG_SQ
        if self.master:
            out["master"] = MASTER
        return out


class Closed:
    """What takes the session's place when the optimizer has been closed."""

    def __init__(self, last_step):
        self.last_step = last_step

    def __getattr__(self, name):
        raise ValueError("the optimizer is closed")


def _number(x):
    return x.item() if isinstance(x, torch.Tensor) else float(x)


def _is_whole(t):
    """Whether its storage holds all of its elements. Some resize storages under tensors, to free memory for a while."""
    if t.numel() == 0:
        return True
    last = t.storage_offset() + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
    return (last + 1) * t.element_size() <= storage_of(t).nbytes()


def _counters(params):
    """Of each something that shares its version counter, for _written(): made before the step, for want of memory."""
    if hasattr(torch.autograd.graph, "increment_version"):
        return params
    return [(p.detach() if p.dim() else p.detach().unsqueeze(0)).narrow(0, 0, 0) for p in params]


def _written(counters):
    """Tells autograd that these were changed in place, so that a graph made before refuses to go backward."""
    for c in counters:
        if hasattr(torch.autograd.graph, "increment_version"):
            torch.autograd.graph.increment_version(c)
        else:
            c.zero_()  # none of its elements, which counts all the same


def _check_hyper(lr, betas, eps, weight_decay):
    for what, value in (("learning rate", lr), ("epsilon value", eps), ("weight_decay value", weight_decay)):
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise ValueError(f"Tensor {'lr' if value is lr else what} must be 1-element")
        if not _number(value) >= 0 or math.isinf(_number(value)):
            raise ValueError(f"Invalid {what}: {value}")  # torch's words, here and below: code looks for them
    if 0 < _number(eps) < SMALLEST:
        raise ValueError(f"Invalid epsilon value: {eps} (below {SMALLEST:.3g} float32 has no full precision, and it counts as 0 here)")
    for i in (0, 1):
        if not 0.0 <= _number(betas[i]) < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {betas[i]}")


class FileOptimizer(torch.optim.Optimizer):
    """What Adam, AdamW, CPUAdam and HybridAdam share."""

    def __init__(
        self,
        params,
        defaults,
        *,
        decoupled,
        bias_correction=True,
        model=None,
        mount=None,
        backing=None,
        shard=None,
        resume=False,
        fresh=False,
        ram=None,
        block=None,
        data=None,
        threads=None,
        master=True,
        nonfinite="allow",
        nvme_offload_fraction=None,
        hints=True,
        commit_seconds=None,
        temp_dir=None,
        warn_unnamed=True,
    ):
        if nonfinite not in ("allow", "raise"):
            raise ValueError(f"nonfinite={nonfinite!r}: 'allow' (as torch does) or 'raise'")
        if nvme_offload_fraction is not None and not 0.0 <= nvme_offload_fraction <= 1.0:
            raise ValueError(f"nvme_offload_fraction={nvme_offload_fraction}: from 0.0 to 1.0")
        _check_hyper(defaults["lr"], defaults["betas"], defaults["eps"], defaults["weight_decay"])
        self._session = None
        self._names = Names(model, warn_unnamed)
        self._known, self._new = {}, []  # see _slots
        self._owed, self._owed_of = [], []  # see _copy_back()
        self._tiers = {}  # name -> tier, where not auto
        self._div_scale = None
        self._decoupled, self._bias_correction = decoupled, bias_correction
        self._use_master, self._nonfinite = master, nonfinite
        groups = groups_of(self._names, params)
        for group in groups:
            self._check_params(group["params"])
        super().__init__(groups, defaults)
        self._states = layout.States(self)
        everything = [p for g in self.param_groups for p in g["params"]]
        if nvme_offload_fraction is not None:
            ram = self._place(everything, nvme_offload_fraction, ram, block or 2 << 20, mount)
        self._session = Session.shared(
            self,
            mount=mount,
            backing=backing,
            shard=shard,
            resume=resume,
            fresh=fresh,
            data=data,
            ram=ram,
            block=block,
            state_bytes=sum(4 * p.numel() * len(self._arrays(p, g)) for g in self.param_groups for p in g["params"]),
            threads=threads,
            hints=hints,
            commit_seconds=commit_seconds,
            temp_dir=temp_dir,
        )
        try:
            self._samples = None if self._session.info()["temporary"] else Samples(self._session, self._names)
            self._register([p for p in everything if p.requires_grad])
        except BaseException:
            session, self._session = self._session, None
            session.leave(self)
            raise

    @property
    def state(self):
        """Looks like torch's: a dict by parameter of "step", "exp_avg" and so on. What it gives are copies, which cannot be
        edited in place; set an entry to change it."""
        return self._states

    @state.setter
    def state(self, value):
        if "_states" in self.__dict__:  # before that it is torch's own constructor
            layout.replace(self, value)

    # ---- parameters ----

    def _is_ours(self, p):
        """Whether its state is on the drive. (HybridAdam leaves CUDA parameters to torch.)"""
        return True

    def _check_params(self, params):
        for p in params:
            if not self._is_ours(p):
                continue
            name = self._names.of(p)
            if p.device.type != "cpu":
                raise ValueError(f"parameter {name} is on {p.device}: this optimizer updates CPU parameters "
                                 "(HybridAdam leaves CUDA ones to torch)")
            if p.dtype not in DTYPES:
                raise TypeError(f"parameter {name} is {p.dtype}: float32, bfloat16 and float16 are known")
            if p.is_sparse or p.layout != torch.strided:
                raise TypeError(f"parameter {name} is not a dense tensor")

    @whole()
    def add_param_group(self, param_group):
        if self._session is None:  # the constructor's, prepared already
            super().add_param_group(param_group)
            return
        if not isinstance(param_group, dict):
            raise TypeError("param group must be a dict")
        group, new = group_of(self._names, param_group)
        try:
            self._check_params(group["params"])
            merged = {**self.defaults, **group}
            _check_hyper(merged["lr"], merged["betas"], merged["eps"], merged["weight_decay"])
            super().add_param_group(group)
        except BaseException:
            self._names.forget(new)
            raise
        self._register([p for p in group["params"] if p.requires_grad])

    def _groups(self):
        """id of a parameter -> its group."""
        return {id(p): g for g in self.param_groups for p in g["params"]}

    def _arrays(self, p, group):
        arrays = [EXP_AVG, EXP_AVG_SQ]
        if self._use_master and p.dtype != torch.float32:
            arrays.append(MASTER)
        if group.get("amsgrad"):
            arrays.append(MAX_EXP_AVG_SQ)
        return tuple(arrays)

    def _place(self, params, fraction, ram, block, mount):
        """Gives parameters their tier; returns the RAM tier that a session of our own needs to hold the rest."""
        chosen = _lib.offload_select([p.numel() for p in params], fraction, [self._is_ours(p) for p in params])
        pinned, groups = 0, self._groups()
        for p, nvme in zip(params, chosen):
            if not self._is_ours(p):
                continue
            self._tiers[self._names.of(p)] = "nvme" if nvme else "ram"
            if not nvme:
                size = 4 * p.numel()
                rest = size % block
                piece = 4096
                while piece < rest:
                    piece *= 2
                one = size - rest + (0 if not rest else block if piece > block // 4 else piece)
                pinned += one * len(self._arrays(p, groups[id(p)]))
        if ram or mount:
            return ram
        # The engine keeps an eighth for small pieces and eight blocks for streaming out of what may be pinned.
        return max((pinned + 8 * block) * 8 // 7, pinned + (32 << 20)) + (64 << 20)

    @property
    def _slots(self):
        """{tensor: Slot} of what is registered, in that order. The library writes a handle into memory of _new in the call
        that registers, so that nothing which comes between that call and the next line can leave it unknown here."""
        for p, slot, param in self._new:
            if param.handle != _lib.NO_PARAM:
                slot.handle = param.handle
                self._known[p] = slot
        if self._new:
            self._new = []
        return self._known

    def _register(self, params):
        """Registers those that are not."""
        params = [p for p in params if p not in self._slots and self._is_ours(p)]
        if not params:
            return
        entries, slots, groups = [], [], self._groups()
        for p in params:
            name, group = self._names.of(p), groups[id(p)]
            arrays = self._arrays(p, group)
            entries.append(
                {"name": name, "shape": tuple(p.shape), "arrays": arrays, "tier": self._tiers.get(name, "auto")}
            )
            slots.append(Slot(p, name, MASTER in arrays, MAX_EXP_AVG_SQ in arrays))
        first, later = self._samples.tables(params) if self._samples else ([], [])
        array = self._session.params(entries + first)
        self._new = list(zip(params, slots, array))
        self._session.register(array)
        if later:
            self._session.register(later)
        self._slots  # takes them over now, where nothing has come between: what ctypes made can go
        if self._samples:
            self._samples.registered(params, array)

    # ---- reading and writing state ----

    def _writing(self):
        """One small step around several writes: all of them or none are committed."""
        return layout.writing(self._session, self._session.last_step or 0)

    def _write_flat(self, handle, role, tensor, chunk=1 << 24):
        flat = tensor.reshape(-1)
        for at in range(0, flat.numel(), chunk):
            part = flat[at : at + chunk].to(torch.float32).contiguous()
            self._session.write(handle, role, at, part.numel(), part.data_ptr())

    def _read_flat(self, p, role):
        out = torch.empty(self._slots[p].shape, dtype=torch.float32)
        if out.numel():
            self._session.read(self._slots[p].handle, role, 0, out.numel(), out.data_ptr())
        return out

    @torch.no_grad()
    @whole()
    def restore_weights(self):
        """Sets 16-bit weights from their fp32 masters, for a model whose own weights were not loaded."""
        for p, slot in self._slots.items():
            if slot.master:
                self._check_parameter(p, {})
        for p, slot in self._slots.items():
            if not slot.master:
                continue
            master = self._read_flat(p, MASTER)
            if self._session.param_step(slot.handle) == 0 and not master.any():
                continue  # its first step will fill it
            p.copy_(master)

    # ---- the step ----

    def _optim(self, group):
        beta1, beta2 = group["betas"]
        flags = (
            (_lib.DECOUPLED if self._decoupled else 0)
            | (_lib.BIAS_CORRECTION if group.get("bias_correction", self._bias_correction) else 0)
            | (_lib.MAXIMIZE if group.get("maximize") else 0)
            | (_lib.AMSGRAD if group.get("amsgrad") else 0)
            | (_lib.TAKE_P if self._use_master else 0)  # weights that somebody has written become their masters
        )
        return _lib.Optim(
            kind=_lib.ADAM,
            flags=flags,
            lr=_number(group["lr"]),
            beta1=_number(beta1),
            beta2=_number(beta2),
            eps=_number(group["eps"]),
            weight_decay=_number(group["weight_decay"]),
            grad_scale=self._div_scale or 0.0,
        )

    def _check_parameter(self, p, group):
        """What it is now against what was registered: nothing may be written by what it once was."""
        slot = self._slots[p]
        if tuple(p.shape) != slot.shape or p.dtype != slot.dtype or p.device.type != "cpu":
            raise ValueError(
                f"parameter {slot.name} was registered as {slot.dtype}, shape {slot.shape}, and is {p.dtype}, shape "
                f"{tuple(p.shape)}, on {p.device} now: its state does not fit. Put back its data, or make a new optimizer"
            )
        if not _is_whole(p):
            raise ValueError(f"parameter {slot.name}: the storage of its data has been made smaller than its shape "
                             f"{tuple(p.shape)} needs. Put back its data")
        if group.get("amsgrad") and not slot.amsgrad:
            raise ValueError(f"amsgrad was switched on for parameter {slot.name}, whose state was made without max_exp_avg_sq: "
                             "say so when the optimizer is made")

    def _gradient(self, p):
        g = p.grad
        if g.is_sparse:
            raise RuntimeError(f"parameter {self._names.of(p)} has a sparse gradient, which Adam does not take")
        if g.dtype not in DTYPES or g.device.type != "cpu" or g.shape != p.shape:
            raise RuntimeError(f"parameter {self._names.of(p)}: a gradient of {g.dtype}, shape {tuple(g.shape)}, on {g.device}")
        if not _is_whole(g):
            raise RuntimeError(f"parameter {self._names.of(p)}: the storage of its gradient has been made smaller than its "
                               f"shape {tuple(g.shape)} needs")
        return g.detach().contiguous()

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @whole()  # state, weights and what is noted of them belong together
    def _step(self):
        if isinstance(self._session, Closed):
            raise ValueError("the optimizer is closed")
        self._settle()
        todo = [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None and self._is_ours(p)]
        if not todo:
            return
        params = [p for p, _ in todo]
        for g in self.param_groups:
            _check_hyper(g["lr"], g["betas"], g["eps"], g["weight_decay"])
        self._register(params)
        for p, g in todo:
            self._check_parameter(p, g)
        gradients = [self._gradient(p) for p in params]
        if self._samples:
            self._samples.check(last=True)
        optims = {id(g): self._optim(g) for g in self.param_groups}
        items = [_lib.Item() for _ in todo]
        keep, copies = [], []
        for item, (p, group), grad in zip(items, todo, gradients):
            weight = p.detach()
            if not weight.is_contiguous():
                weight = weight.contiguous()
                copies.append((p, weight))
            keep.append((grad, weight))
            item.param = self._slots[p].handle
            item.p, item.g = weight.data_ptr(), grad.data_ptr()
            item.p_numel, item.g_numel = weight.numel(), grad.numel()
            item.p_dtype, item.g_dtype = DTYPES[weight.dtype], DTYPES[grad.dtype]
            item.optim = _lib.ctypes.pointer(optims[id(group)])
        if self._samples:
            more, calls = self._samples.items([(p, weight) for p, (_, weight) in zip(params, keep)])
            items += more
            keep.append(calls)
        counters = _counters(params)

        def then():  # all memory for it is there
            self._owed = copies
            try:
                self._copy_back()
            finally:
                _written(counters)
                self._owed_of = [(p.data_ptr(), p._version) for p, _ in self._owed]

        self._session.step(None, items, finite=self._nonfinite == "raise", then=then)

    def _copy_back(self):
        """What the last step has made of weights that are not contiguous goes to them. It belongs to the step: what cannot
        be copied is tried again, and at last kept until the next call, while an exception tells whose weights they are."""
        error = None
        for _ in range(3 if self._owed else 0):
            for one in list(self._owed):
                try:
                    one[0].copy_(one[1])
                    self._owed = [other for other in self._owed if other is not one]
                except Exception as e:
                    error = e
        if self._owed:
            names = ", ".join(self._names.of(p) for p, _ in self._owed[:4])
            raise RuntimeError(f"step {self.last_step} is made, but the weights of {names}{' and others' * (len(self._owed) > 4)} "
                               f"could not be written ({error!r}): they are kept, and the next step(), commit() or state_dict() "
                               "writes them") from error

    @torch.no_grad()
    def _settle(self):
        """The same when weights were left over, but for those that somebody has set since."""
        if self._owed:
            self._owed = [one for one, of in zip(self._owed, self._owed_of) if of == (one[0].data_ptr(), one[0]._version)]
            try:
                self._copy_back()
            finally:
                self._owed_of = [(p.data_ptr(), p._version) for p, _ in self._owed]

    # ---- commits ----

    def commit(self, wait=True):
        """Makes the last step durable. Without wait: starts that."""
        self._settle()
        self._session.commit(wait)

    @property
    def committed_step(self):
        """The step (steps are counted from 1 over all runs) that a crash would return to; None: none yet."""
        return self._session.committed_step

    @property
    def last_step(self):
        """The last step that was made, in this run or the one resumed, by whichever of the optimizers that share the
        session; None: none yet."""
        return self._session.last_step or None  # 0 is what a fresh start writes down

    @whole()
    def rollback(self):
        """Returns the state, not the weights, to the last commit."""
        self._session.rollback()
        self._owed = []

    @whole()
    def close(self):
        """Ends the session; embedded, that commits. A closed optimizer steps no more."""
        if not isinstance(self._session, Closed):
            session, self._session = self._session, Closed(self._session.last_step)
            session.leave(self)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    # ---- looking ----

    @property
    def data_path(self):
        """How the state is reached: "session", "mmap" or "embedded"."""
        return self._session.info()["data_path"]

    def info(self):
        return self._session.info()

    def name_of(self, p):
        return self._names.of(p)

    def parameter(self, name):
        """The tensor of that name; a tied tensor answers to all of its names."""
        return self._names.tensor(name)

    # ---- state_dict ----

    def state_dict(self):
        """torch.optim.AdamW's own layout, with param_names in the groups. All of the state in memory: for a large one
        commit and copy the files instead."""
        self._settle()
        for hook in self._hooks("state_dict_pre"):
            hook(self)
        state_dict = layout.export(self)
        for hook in self._hooks("state_dict_post"):
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def _hooks(self, when):
        """Those that torch's register_..._hook() noted; torch 1 has none."""
        return list(getattr(self, f"_optimizer_{when}_hooks", {}).values())

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Takes what state_dict() gave, or torch.optim.Adam's or AdamW's own; by name where it has names."""
        if isinstance(state_dict, dict):
            state_dict = state_dict.copy()  # a hook may change it
        for hook in self._hooks("load_state_dict_pre"):
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        layout.load(self, state_dict)
        for hook in self._hooks("load_state_dict_post"):
            hook(self)

    def __getstate__(self):
        raise TypeError("an optimizer with a session cannot be pickled or copied: use state_dict()")


class _AsTorchs(FileOptimizer):
    """An optimizer with the signature and the defaults of one of torch's."""

    _torchs = None  # the class; as exported groups have all keys of its own, they fit this version of torch
    _decays_apart = False  # not told by comparing classes: people put ours in the place of torch.optim.AdamW

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=None,
        amsgrad=False,
        *,
        maximize=False,
        foreach=None,
        capturable=False,
        differentiable=False,
        fused=None,
        **where,
    ):
        if capturable or differentiable:
            raise ValueError("capturable and differentiable are for torch's own optimizers")
        if foreach and fused:
            raise ValueError("`fused` and `foreach` cannot be `True` together")
        if isinstance(betas[0], torch.Tensor) != isinstance(betas[1], torch.Tensor):
            raise ValueError("betas must be either both floats or both Tensors")
        for what, value in (("lr", lr), ("betas[0]", betas[0]), ("betas[1]", betas[1])):
            if isinstance(value, torch.Tensor) and foreach:
                raise ValueError(f"{what} as a Tensor is not supported for capturable=False and foreach=True")
        defaults = dict(TORCHS_DEFAULTS[self._torchs])
        defaults.update(lr=lr, betas=betas, eps=eps, amsgrad=amsgrad, maximize=maximize)
        if weight_decay is not None:
            defaults["weight_decay"] = weight_decay
        super().__init__(params, defaults, decoupled=self._decays_apart, **where)


class AdamW(_AsTorchs):
    """torch.optim.AdamW with its state on the drive.

    params: named_parameters(), (name, tensor) pairs, groups of these, or plain tensors with model=. Without names they
    are known by their order; a few weights are kept with the state, by which a resumed run notices another (ValueError).
    mount: a live mount point. backing: a directory. Neither: temporary. What is there already is refused unless
    resume=True (names and shapes are checked; "partial" lets new parameters start at zero), resume=N (True, if the state
    is of step N: else ValueError) or fresh=True. Optimizers of one process that name one backing or mount share its
    session: they commit together, number their steps together, and the last one to be closed ends it. Steps are numbered
    from 1 over all runs. state_dict() has the number of the step that it is of, and load_state_dict() goes on from that
    one, also from an older one; a dict of torch's own has none, and the largest of its counts is taken.
    shard: (rank, world size), for ranks that each keep the state of their own shards: backing has a directory a rank.
    nonfinite="raise": NonFiniteGradient before anything is written. master=False: 16-bit weights are updated in place
    instead of through fp32 masters. 16-bit weights may be written at any time (loaded, clamped, through .data): the next
    step finds each element that its master does not round to, and the master becomes that. nvme_offload_fraction: as ColossalAI's; the rest stays in the RAM tier.
    ram, block (bytes), commit_seconds: of an engine in this process. data: "session", "mmap", "embedded".
    weight_decay: torch's own default if it is not given, 1e-2.
    """

    _torchs = torch.optim.AdamW
    _decays_apart = True


class Adam(_AsTorchs):
    """torch.optim.Adam with its state on the drive; see AdamW. Its weight_decay is 0 if it is not given."""

    _torchs = torch.optim.Adam
