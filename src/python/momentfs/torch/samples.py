# SPDX-License-Identifier: Apache-2.0
"""Whether parameters without names still stand in their old order.

Such a parameter is known by its place, so in another order it would get the state of another of the same shape. As a
witness, each step also writes a few of its weights, as they are after it, to a small table in the backing:
params/unnamed.samples.0/master has a row of 16 for each of 64 places. It is an array like any other, so the rows are
of the step that the state is of. A resumed run compares: a parameter whose weights are exactly the row of another place
proves another order. Rows of one number (a bias at zero) or that several places have prove nothing, and weights that were
not loaded, or are of another step, are like no row.
"""

import ctypes
import warnings

import torch

from momentfs import _lib
from momentfs._lib import MASTER

WIDTH, ROWS = 16, 64


def sample(t):
    """WIDTH elements of t, evenly spread, as float32 (which has every bfloat16 and float16 exactly)."""
    flat = t.detach().reshape(-1)
    out = torch.zeros(WIDTH, dtype=torch.float32)
    few = flat[:: max(1, flat.numel() // WIDTH)][:WIDTH]
    out[: few.numel()] = few
    return out


class Samples:
    """The tables of one optimizer. Its session has them beside the parameters of the optimizer itself."""

    def __init__(self, session, names):
        self._session, self._names = session, names
        self._tables = {}  # number -> handle, see _table()
        self._there = {e["name"] for e in session.list()}
        self._places = {}  # place -> tensor, of those whose state was found

    @staticmethod
    def _entry(number):
        return {"name": f"unnamed.samples.{number}", "shape": (ROWS, WIDTH), "arrays": (MASTER,)}

    def _table(self, number):
        """Its handle, as the session has it; None: not registered."""
        if number not in self._tables:
            try:
                self._tables[number] = self._session.find(self._entry(number)["name"])
            except _lib.MomentError:
                return None
        return self._tables[number]

    def tables(self, params):
        """What is to be registered with params: (entries for the same call, entries for a call of their own)."""
        places = [self._names.place(p) for p in params]
        numbers = sorted({place // ROWS for place in places if place is not None})
        entries = [self._entry(n) for n in numbers if self._table(n) is None]
        # What the backing has goes with the rest, lest it be told as left over. What a backing of other state lacks (an
        # older version kept none) goes by a call of its own: only the first one is compared.
        lacks = [e for e in entries if self._there and e["name"] not in self._there]
        return [e for e in entries if e not in lacks], lacks

    def registered(self, params, answer):
        for p, c in zip(params, answer):
            place = self._names.place(p)
            if place is not None and c.found and c.step:
                self._places[place] = p
        self.check()

    def _rows(self):
        """{place: its row's bytes}, of rows that can tell something."""
        out = {}
        for number in {place // ROWS for place in self._places}:
            table = torch.empty(ROWS, WIDTH)
            self._session.read(self._table(number), MASTER, 0, table.numel(), table.data_ptr())
            for row, values in enumerate(table):
                if bool((values != values[0]).any()):
                    out[number * ROWS + row] = values.numpy().tobytes()
        return out

    def check(self, last=False):
        """Refuses another order. last: before a first step changes the weights, with a warning if they tell nothing."""
        if not self._places:
            return
        rows = self._rows()
        owners = {}
        for place, row in rows.items():
            if place in self._places:
                owners.setdefault((tuple(self._places[place].shape), row), []).append(place)
        swapped, same = [], 0
        for place, p in self._places.items():
            own = owners.get((tuple(p.shape), sample(p).numpy().tobytes()), [])
            if place in own:
                same += 1
            elif len(own) == 1:
                swapped.append(f"unnamed.{place} has the weights of unnamed.{own[0]}")
        if swapped:
            more = f" and {len(swapped) - 4} more" if len(swapped) > 4 else ""
            raise ValueError(
                f"the parameters are in another order than the state's: {', '.join(swapped[:4])}{more}. Give them in the "
                "old order. With names (model.named_parameters(), or model=) the order would not matter"
            )
        if last or same:
            if last and not same and owners:
                warnings.warn(
                    "the weights are not those of the step that the state is of, so nothing tells whether the parameters, "
                    "which have no names, are in their old order",
                    stacklevel=6,
                )
            self._places.clear()

    def items(self, updated):
        """What a step over updated, [(parameter, contiguous weights)], has to write besides: (items, what they need)."""
        rows = {}
        for p, weight in updated:
            place = self._names.place(p)
            if place is not None:
                rows.setdefault(place // ROWS, []).append((place % ROWS, weight))
        lacking = [self._entry(n) for n in rows if self._table(n) is None]
        if lacking:  # an exception came between the calls that register the parameters and their tables
            self._session.register(lacking)
        calls = [_lib.BLOCK_FN(self._writer(todo)) for todo in rows.values()]
        return [_lib.Item(param=self._table(n), fn=call) for n, call in zip(rows, calls)], calls

    @staticmethod
    def _writer(todo):
        def write(_arg, block):
            try:  # an exception must not pass through C
                at = block.contents.state[MASTER]
                for row, weight in todo:
                    few = sample(weight)
                    ctypes.memmove(at + 4 * WIDTH * row, few.data_ptr(), 4 * WIDTH)
                return 0
            except Exception:
                return -1

        return write
