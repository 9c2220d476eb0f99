# SPDX-License-Identifier: Apache-2.0
"""Tensors that are copies of state on the drive, and know it: an edit in place, which would be lost, raises."""

import torch

# In-place operators by their Python names; the others end in one underscore.
OPERATORS = {f"__{name}__" for name in ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand",
                                        "ior", "ixor", "ilshift", "irshift", "set")}
HARMLESS = {"requires_grad_", "retain_grad_"}
# What gives out the memory itself, to be written where no operator sees it. (numpy() gives it for reading.)
MEMORY = {"storage", "typed_storage", "untyped_storage", "_typed_storage", "__dlpack__"}


def _all_of(cls, x):
    """Those of a class among arguments, also in lists, tuples and dicts."""
    if isinstance(x, cls):
        yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from _all_of(cls, y)
    elif isinstance(x, dict):
        for y in x.values():
            yield from _all_of(cls, y)


def storage_of(t):
    with torch._C.DisableTorchFunction():
        return t.untyped_storage() if hasattr(t, "untyped_storage") else t._storage()


class StateCopy(torch.Tensor):
    """What opt.state[p]["exp_avg"] gives. Views of it are of this type too; what is computed from it is a plain tensor.

    No subclass is asked by torch._C._to_dlpack(copy), torch.Tensor(copy) and torch.asarray(copy): they give ordinary tensors
    with the copy's memory, whose edits change nothing on the drive."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.__name__
        in_place = name in OPERATORS or (name.endswith("_") and not name.endswith("__") and name not in HARMLESS)
        if in_place and args and isinstance(args[0], cls):
            raise RuntimeError(
                f"{name}: this is a copy of state on the drive, and an edit in place would be lost. Set the whole: "
                "opt.state[p][key] = tensor"
            )
        if name in MEMORY and args and isinstance(args[0], cls):
            raise RuntimeError(f"{name}: this is a copy of state on the drive, and what is written to its memory would be lost. "
                               "Take that of its clone(), and set the whole: opt.state[p][key] = tensor")
        ours = list(_all_of(cls, (args, kwargs)))
        with torch._C.DisableTorchFunction():
            versions = [t._version for t in ours]
            result = func(*args, **kwargs)
            if versions != [t._version for t in ours]:  # whatever its name, and wherever among the arguments
                raise RuntimeError(f"{name}: it has changed a copy of state on the drive, where the change would be lost. Set "
                                   "the whole: opt.state[p][key] = tensor")
        if name == "numpy" or name == "__array__":
            result.flags.writeable = False
        return cls._wrap(result, ours)

    @classmethod
    def _wrap(cls, result, ours):
        """Views of ours are of this type, also in tuples; what was computed is plain."""
        if type(result) in (list, tuple):
            return type(result)(cls._wrap(r, ours) for r in result)
        if not isinstance(result, torch.Tensor):
            return result
        if result.layout != torch.strided or all(storage_of(result).data_ptr() != storage_of(t).data_ptr() for t in ours):
            return plain(result)
        return result.as_subclass(cls)

    def __reduce_ex__(self, protocol):
        return plain(self).__reduce_ex__(protocol)  # saved as what it looks like

    def __deepcopy__(self, memo):
        return plain(self).clone()


def plain(t):
    """The same memory as an ordinary tensor."""
    with torch._C.DisableTorchFunction():
        return t.as_subclass(torch.Tensor)
