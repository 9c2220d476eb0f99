# SPDX-License-Identifier: Apache-2.0
"""Tensors that are copies of state on the drive, and know it: an edit in place, which would be lost, raises."""

import torch

# In-place operators by their Python names; the others end in one underscore.
OPERATORS = {f"__{name}__" for name in ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand",
                                        "ior", "ixor", "ilshift", "irshift", "set")}
HARMLESS = {"requires_grad_", "retain_grad_"}


def _storage(t):
    return t.untyped_storage() if hasattr(t, "untyped_storage") else t._storage()


class StateCopy(torch.Tensor):
    """What opt.state[p]["exp_avg"] gives. Views of it are of this type too; what is computed from it is a plain tensor."""

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
        out = kwargs.get("out")
        if isinstance(out, cls):
            raise RuntimeError("out=: this is a copy of state on the drive, and what is written to it would be lost")
        with torch._C.DisableTorchFunction():
            result = func(*args, **kwargs)
        if name == "numpy":
            result.flags.writeable = False
        if not isinstance(result, torch.Tensor):
            return result
        ours = next((a for a in args if isinstance(a, cls)), None)
        if ours is None or result.layout != torch.strided or _storage(result).data_ptr() != _storage(ours).data_ptr():
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
