# SPDX-License-Identifier: Apache-2.0
"""State as torch.optim shows it: opt.state, and state_dict in torch.optim.AdamW's own layout."""

import contextlib
import weakref
from collections.abc import MutableMapping

import torch

from momentfs.signals import whole
from momentfs.torch.copies import StateCopy, plain

KNOWN = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")
COUNT_END = 2**64 - 1  # the library counts to below this
# The largest count up to which a float type holds every integer.
EXACT = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.float32: 2**24, torch.float64: 2**53}


@contextlib.contextmanager
def writing(session, label):
    """A step of its own around several writes, under the last step's label. Handlers of signals wait for its end: it is
    neither left open nor torn by an interrupt."""
    with whole():
        session.pre_step(label)
        try:
            yield
        except BaseException:
            try:
                session.abort_step()
            except OSError:
                pass  # something was written: torn, as the session will say; the first error is the one to tell
            raise
        session.post_step(label)


class State(MutableMapping):
    """opt.state[p]: looks like torch's dict, but each array is read from its file when it is asked for."""

    def __init__(self, opt, p):
        self._opt, self._p = opt, p

    def _names(self):
        slot = self._opt._slots.get(self._p)
        if slot is None or self._opt._session.param_step(slot.handle) == 0:
            return ()  # torch has nothing before the first update
        return ("step", *slot.roles)

    def __getitem__(self, key):
        slot = self._opt._slots.get(self._p)
        if slot is None:
            raise KeyError(key)
        if key == "step":
            step = torch.tensor(float(self._opt._session.param_step(slot.handle)), dtype=torch.float32)
            return step.as_subclass(StateCopy)
        if key not in slot.roles:
            raise KeyError(key)
        return self._opt._read_flat(self._p, slot.roles[key]).as_subclass(StateCopy)

    def _checked(self, key, value):
        """value as it can be written, or an exception, before anything is changed."""
        slot = self._opt._slots.get(self._p)
        if slot is None or (key != "step" and key not in slot.roles):
            raise KeyError(key)
        if key == "step":
            return count_of(value, slot.name)
        value = exact_float32(value, slot.name, key)
        if tuple(value.shape) != slot.shape:
            raise ValueError(f"{slot.name}: {key} has shape {tuple(value.shape)}, not {slot.shape}, as registered")
        if key == "master":
            self._opt._check_parameter(self._p, {})
        return value

    def _write(self, key, value):
        """Inside a step."""
        slot = self._opt._slots[self._p]
        if key == "step":
            self._opt._session.set_param_step(slot.handle, value)
            return
        self._opt._write_flat(slot.handle, slot.roles[key], value)
        if key == "master":  # the weights are their masters, rounded, or they would be taken for newer
            self._p.detach().copy_(value)

    def __setitem__(self, key, value):
        value = self._checked(key, value)
        with self._opt._writing():
            self._write(key, value)

    def __delitem__(self, key):
        if key not in self:
            raise KeyError(key)
        raise TypeError(f"{self._opt._names.of(self._p)}: state on the drive is forgotten as a whole, by del opt.state[p] or "
                        f"opt.state[p].clear(), not key by key. To begin with other values: opt.state[p][{key!r}] = tensor")

    def clear(self):
        """As before the first update."""
        self._opt.state[self._p] = {}

    def __iter__(self):
        return iter(self._names())

    def __len__(self):
        return len(self._names())

    def __repr__(self):
        return f"<state of {self._opt._names.of(self._p)}: {', '.join(self._names()) or 'no updates yet'}>"


class States(MutableMapping):
    """opt.state. It does not keep the optimizer, which keeps it: without a circle both are freed at once."""

    def __init__(self, opt):
        self._ref = weakref.ref(opt)
        self._extra = {}  # what others keep under keys of their own, as in torch's defaultdict

    @property
    def _opt(self):
        opt = self._ref()
        if opt is None:
            raise ReferenceError("the optimizer that this state was of is gone")
        return opt

    def __getitem__(self, p):
        if not isinstance(p, torch.Tensor):
            return self._extra.setdefault(p, {})
        other = self._opt._foreign_state(p) if hasattr(self._opt, "_foreign_state") else None
        return other if other is not None else State(self._opt, p)

    def __setitem__(self, p, value):
        self._set({p: value})

    def _checked(self, p, value):
        """What is to be written of a parameter of ours: {key: value}, empty for one that begins anew, None for nothing."""
        slot = self._opt._slots.get(p)
        if (isinstance(value, State) and value._p is p) or (slot is None and not value):
            return None
        need = {"step", *slot.roles} - {"master"} if slot else set(KNOWN)
        if value and not need <= set(value):
            raise ValueError(f"{self._opt._names.of(p)}: state that is set needs {', '.join(sorted(need))}; "
                             f"{', '.join(sorted(need - set(value)))} is missing. An empty dict begins anew")
        return {key: self[p]._checked(key, value[key]) for key in value}

    @whole()
    def _set(self, values):
        """All of them, or an exception and nothing."""
        ready, others = {}, {}
        for p, value in values.items():
            if isinstance(p, torch.Tensor) and isinstance(self[p], State):
                ready[p] = self._checked(p, value)
            else:
                others[p] = value
        todo = {p: value for p, value in ready.items() if value is not None}
        if todo:
            with self._opt._writing():
                for p, value in todo.items():
                    if not value:
                        begin_anew(self._opt, p)
                    for key in value:
                        self[p]._write(key, value[key])
        for p, value in others.items():
            if isinstance(p, torch.Tensor):  # torch's own
                state = self[p]
                state.clear()
                state.update(value)
            else:
                self._extra[p] = value

    def __delitem__(self, p):
        """Forgets: it is as before the first update. The files stay, of zeros, as does the parameter's place in them."""
        if p not in self:
            raise KeyError(p)
        if isinstance(p, torch.Tensor):
            self[p] = {}
        else:
            del self._extra[p]

    def pop(self, p, *default):
        if default and p not in self:
            return default[0]
        was = self[p] if p in self else None
        if isinstance(was, State):  # which will read what is there then
            was = {key: plain(value) for key, value in was.items()}
        del self[p]
        return was

    def popitem(self):
        raise TypeError("which one? pop(p) gives and forgets the state of a parameter, clear() forgets all")

    def clear(self):
        """Forgets all of it, in one step."""
        self._set({p: {} for p in self._opt._slots})
        self._extra.clear()

    def __contains__(self, p):
        return p in (self._opt._slots if isinstance(p, torch.Tensor) else self._extra)

    def __iter__(self):
        return iter([*self._opt._slots, *self._extra])

    def __len__(self):
        return len(self._opt._slots) + len(self._extra)


def begin_anew(opt, p):
    """As before the first update. Inside a step."""
    slot = opt._slots[p]
    zero = torch.zeros(slot.shape)
    for key, role in slot.roles.items():
        if key != "master":
            opt._write_flat(slot.handle, role, zero)
    opt._session.set_param_step(slot.handle, 0)


def replace(opt, value):
    """opt.state = value, as for a dict that torch would go on with."""
    if isinstance(value, States) and value._ref() is opt:
        return
    unknown = [p for p in value if isinstance(p, torch.Tensor) and p not in opt._slots]
    if unknown:
        raise ValueError(f"state for {len(unknown)} tensors that are not parameters of this optimizer")
    opt.state._set({**{p: {} for p in opt._slots if p not in value}, **value})


def count_of(step, name):
    """An update count from any of the forms that are in use: int, float, tensors of 0 or 1 elements."""
    if isinstance(step, torch.Tensor):
        if step.numel() != 1:
            raise ValueError(f"{name}: step is a tensor of {step.numel()} elements")
        value = step.reshape(()).item()
        limit = EXACT.get(step.dtype)
        if limit is not None and value > limit and step.dtype in (torch.bfloat16, torch.float16):
            raise ValueError(f"{name}: step is {value:.0f} in {step.dtype}, which counts exactly to {limit} only: "
                             "the true count is lost; set it by hand")
    else:
        value = step
    if value != int(value) or not 0 <= value < COUNT_END:
        raise ValueError(f"{name}: step is {step!r}, not a count")
    return int(value)


def exact_float32(value, name, key):
    """value for a float32 file, if no bit is lost by that."""
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        raise ValueError(f"{name}: {key} is not a tensor of floating-point numbers")
    if value.dtype == torch.float64:
        raise ValueError(f"{name}: {key} is float64; state is kept in float32, which would round it")
    value = value.detach().to("cpu", torch.float32)
    return plain(value) if isinstance(value, StateCopy) else value


def _numbered(opt):
    """(tensor, number) of all parameters, as torch numbers them: by place, one in two groups by its first."""
    out = {}
    for i, p in enumerate(p for g in opt.param_groups for p in g["params"]):
        out.setdefault(p, i)
    return out


def export(opt):
    state, numbers = {}, _numbered(opt)
    for p, i in numbers.items():
        entry = {key: plain(v) if isinstance(v, StateCopy) else v for key, v in opt.state[p].items()}
        if entry:
            state[i] = entry
    state.update(opt.state._extra)
    groups = []
    for g in opt.param_groups:
        out = {k: v for k, v in g.items() if k != "params"}
        out["params"] = [numbers[p] for p in g["params"]]
        if all(opt._names.place(p) is None for p in g["params"]):  # a place is no name
            out["param_names"] = [opt._names.of(p) for p in g["params"]]
        groups.append(out)
    return {"state": state, "param_groups": groups, "last_step": opt.last_step or 0}


def _match(opt, saved_groups):
    """{number in the saved dict: our tensor}: by names if it has them, else by place, as torch does."""
    groups = opt.param_groups
    if len(saved_groups) != len(groups):
        raise ValueError(f"the state dict has {len(saved_groups)} parameter groups, the optimizer {len(groups)}")
    out = {}
    for n, (saved, group) in enumerate(zip(saved_groups, groups)):
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(f"group {n} has {len(group['params'])} parameters, in the state dict {len(saved['params'])}")
        names = saved.get("param_names")
        if not names or any(opt._names.place(p) is not None for p in group["params"]):
            out.update(zip(saved["params"], group["params"]))
            continue
        ours = {opt._names.of(p): p for p in group["params"]}
        unknown = sorted(set(names) - set(ours))
        missing = sorted(set(ours) - set(names))
        if unknown or missing:
            raise ValueError(f"group {n}: not in this optimizer: {', '.join(unknown) or 'none'}; "
                             f"not in the state dict: {', '.join(missing) or 'none'}")
        out.update((number, ours[name]) for number, name in zip(saved["params"], names))
    return out


def _check_entry(opt, p, entry):
    """Everything that could be wrong with one parameter's saved state, before anything is changed."""
    name = opt._names.of(p)
    foreign = [k for k in entry if k not in KNOWN]
    if foreign:
        raise ValueError(f"{name}: state of another kind of optimizer, with {', '.join(map(str, foreign))}; "
                         f"known are {', '.join(KNOWN)}")
    slot = opt._slots[p]
    need = {"step", *slot.roles} - {"master"}
    if not need <= set(entry):
        raise ValueError(f"{name}: the state dict lacks {', '.join(sorted(need - set(entry)))}")
    extra = set(entry) - {"step", "master", *slot.roles}
    if extra:
        raise ValueError(f"{name}: the state dict has {', '.join(sorted(extra))}, which this optimizer does not keep")
    count_of(entry["step"], name)
    for key in entry:
        if key == "step":
            continue
        value = exact_float32(entry[key], name, key)
        if tuple(value.shape) != slot.shape:
            raise ValueError(f"{name}: {key} has shape {tuple(value.shape)}, the parameter {slot.shape}")


def _label(opt, state_dict, ours):
    """The number of the step that a state dict is of: it says so itself. Where somebody has left that out, or never had
    it, as torch's: the one that we are at, if it has our counts of updates, else the largest of its counts."""
    said = state_dict.get("last_step")
    if said is not None:
        return count_of(said, "last_step")
    counts = {p: count_of(e["step"], "") for p, e in ours.items()}
    slots = ((p, opt._slots.get(p)) for p in _numbered(opt))  # of those in groups, which are all that a dict can have
    if all(counts.get(p, 0) == opt._session.param_step(s.handle) for p, s in slots if s):
        return opt.last_step or 0
    return max(counts.values(), default=0)


@whole()
def load(opt, state_dict):
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= set(state_dict):
        keys = ", ".join(map(str, state_dict)) if isinstance(state_dict, dict) else type(state_dict).__name__
        raise ValueError(f"not an optimizer's state dict: it has {keys}; state and param_groups are needed")
    tensors = _match(opt, state_dict["param_groups"])
    saved, extra = {}, {}
    for number, entry in state_dict["state"].items():
        if isinstance(number, str):
            extra[number] = entry
            continue
        if number not in tensors:
            raise ValueError(f"the state dict has state for parameter {number!r}, which is in none of its groups")
        if entry:  # torch has an empty one where somebody has looked for state that was not there, or has cleared it
            saved[tensors[number]] = entry
    ours = {p: e for p, e in saved.items() if opt._is_ours(p)}
    opt._register([p for p in ours])
    for p, entry in ours.items():
        _check_entry(opt, p, entry)
    with writing(opt._session, _label(opt, state_dict, ours)):
        for p, slot in opt._slots.items():
            entry = ours.get(p)
            if entry is None:  # never updated, says the dict
                begin_anew(opt, p)
                continue
            for key, role in slot.roles.items():
                if key in entry:
                    opt._write_flat(slot.handle, role, exact_float32(entry[key], slot.name, key))
            opt._session.set_param_step(slot.handle, count_of(entry["step"], slot.name))
    opt.state._extra.update(extra)
    if hasattr(opt, "_load_foreign"):
        opt._load_foreign({p: e for p, e in saved.items() if p not in ours})
    for saved_group, group in zip(state_dict["param_groups"], opt.param_groups):
        for key in set(group) - set(saved_group) - set(opt.defaults) - {"params"}:
            del group[key]  # as torch does: a scheduler that came later begins anew, by its initial_lr
        for key, value in saved_group.items():
            if key not in ("params", "param_names"):
                group[key] = value
        if "param_names" in saved_group and any(opt._names.place(p) is not None for p in group["params"]):
            group["param_names"] = saved_group["param_names"]  # as torch does; ours are known by their places
