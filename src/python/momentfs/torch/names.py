# SPDX-License-Identifier: Apache-2.0
"""What a parameter is called. The name is the identity of its state: across runs nothing else stays the same."""

import warnings

import torch


class Names:
    """Names of tensors, from pairs, from a model, or by position. Tensors are told apart by identity."""

    def __init__(self, model=None, warn_unnamed=True):
        self._name = {}  # id -> name; ids stay valid because _tensor keeps the tensors
        self._tensor = {}  # name -> tensor, aliases of tied ones included
        self._place = {}  # id -> place, of those without a name
        self._warn = warn_unnamed
        self._model = model
        self._aliases = None  # see _from_model()

    def _from_model(self):
        """Names known to the model, tied tensors under each of theirs; gathered once a group."""
        if self._aliases is None:
            self._aliases = {}
            if self._model is not None:
                for prefix, module in self._model.named_modules(remove_duplicate=False):
                    for name, p in module.named_parameters(recurse=False):
                        self._aliases.setdefault(id(p), []).append(f"{prefix}.{name}" if prefix else name)
        return self._aliases

    def look_again(self):
        """The model may have grown since the last group."""
        self._aliases = None

    def add(self, tensor, name=None):
        """Notes a name; False if the tensor had one, and this is only another (a tied parameter)."""
        known = self._name.get(id(tensor))
        if name is None:
            if known is not None:
                return False
            aliases = self._from_model().get(id(tensor))
            if aliases:
                for alias in aliases:
                    self._claim(tensor, alias)
                self._name[id(tensor)] = aliases[0]
                return True
            self._place[id(tensor)] = len(self._place)
            name = f"unnamed.{self._place[id(tensor)]}"
            if self._warn:
                self._warn = False
                warnings.warn(
                    "parameters without names: they are called unnamed.0, unnamed.1, ... in the order given. A run that "
                    "resumes must give them in the same order, and notices another one only by the weights it has "
                    "loaded. Pass model.named_parameters() or model=",
                    stacklevel=5,
                )
        self._claim(tensor, name)
        if known is not None:
            return False
        self._name[id(tensor)] = name
        return True

    def _claim(self, tensor, name):
        other = self._tensor.setdefault(name, tensor)
        if other is not tensor:
            raise ValueError(f"two parameters are called {name!r}")

    def forget(self, tensors):
        """As if they had never been added (their group was refused)."""
        gone = {id(t) for t in tensors}
        for t in gone:
            self._name.pop(t, None)
            self._place.pop(t, None)
        self._tensor = {name: t for name, t in self._tensor.items() if id(t) not in gone}

    def of(self, tensor):
        name = self._name.get(id(tensor))
        if name is None:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} is in a parameter group that did not come through the constructor "
                "or add_param_group(): its state is not known. Put back the parameter that was there, or add a group"
            )
        return name

    def place(self, tensor):
        """n of one that is called unnamed.n for want of a name, else None."""
        return self._place.get(id(tensor))

    def tensor(self, name):
        return self._tensor[name]


# torch's own words: code looks for them.
DUPLICATES = (
    "optimizer contains a parameter group with duplicate parameters; in future, this will cause an error; "
    "see github.com/pytorch/pytorch/issues/40967 for more information"
)


def group_of(names, group):
    """A param group as torch wants it: a list of distinct tensors, their names noted. group is a dict whose "params"
    are a tensor, tensors, or (name, tensor) pairs. Also returns the tensors that are new here."""
    params = group["params"]
    if isinstance(params, torch.Tensor):
        params = [params]
    elif not isinstance(params, set):
        params = list(params)
    elif isinstance(params, set):
        raise TypeError("optimizer parameters need to be organized in ordered collections, but the ordering of tensors in "
                        "sets will change between runs. Please use a list instead.")
    names.look_again()
    out, new, twice = [], [], False
    seen = set()
    given_names = group.get("param_names")
    pairs = sum(isinstance(e, (tuple, list)) for e in params)
    if 0 < pairs < len(params):
        raise ValueError("all optimizer params should be with/without names. Some param names are missing")
    for i, entry in enumerate(params):
        if isinstance(entry, (tuple, list)) and len(entry) == 2 and isinstance(entry[0], (str, bytes)):
            name, tensor = entry
            name = name.decode("utf-8", "surrogateescape") if isinstance(name, bytes) else name
        else:
            name, tensor = (given_names[i] if given_names else None), entry
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"optimizer can only optimize Tensors, but one of the params is {torch.typename(tensor)}")
        if names.add(tensor, name):
            new.append(tensor)
        if id(tensor) not in seen:  # tied, or given twice: updated once
            seen.add(id(tensor))
            out.append(tensor)
        elif name is None or name == names.of(tensor):  # (a tied one comes under another name)
            twice = True
    if twice:
        warnings.warn(DUPLICATES, stacklevel=5)
    return {**{k: v for k, v in group.items() if k != "param_names"}, "params": out}, new


def groups_of(names, params):
    """The same for all that an optimizer's constructor takes."""
    if isinstance(params, torch.Tensor):
        raise TypeError("params argument given to the optimizer should be an iterable of Tensors or dicts, but got "
                        + torch.typename(params))
    params = list(params)
    if not params:
        raise ValueError("optimizer got an empty parameter list")
    if not isinstance(params[0], dict):
        params = [{"params": params}]
    return [group_of(names, g)[0] for g in params]
