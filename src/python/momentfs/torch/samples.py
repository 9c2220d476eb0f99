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
        self._tables = {}  # number -> handle
        self._there = {e["name"] for e in session.list()}
        self._places = {}  # place -> tensor, of those whose state was found

    @staticmethod
    def _entry(number):
        return {"name": f"unnamed.samples.{number}", "shape": (ROWS, WIDTH), "arrays": (MASTER,)}

    def register(self, entries, params):
        """Session.register() of entries, which are params', and of the tables that these need."""
        places = [self._names.place(p) for p in params]
        new = {place // ROWS for place in places if place is not None} - set(self._tables)
        entries_of = {number: self._entry(number) for number in sorted(new)}
        # What the backing has goes with the rest, lest it be told as left over. What a backing of other state lacks (an
        # older version kept none) goes by a call of its own: only the first one is compared.
        lacks = [n for n, e in entries_of.items() if self._there and e["name"] not in self._there]
        first = [n for n in entries_of if n not in lacks]
        answer = self._session.register(entries + [entries_of[n] for n in first])
        self._tables.update(zip(first, (handle for handle, _, _ in answer[len(entries) :])))
        if lacks:
            more = self._session.register([entries_of[n] for n in lacks])
            self._tables.update(zip(lacks, (handle for handle, _, _ in more)))
        for p, place, (_, found, step) in zip(params, places, answer):
            if place is not None and found and step:
                self._places[place] = p
        self.check()
        return answer[: len(entries)]

    def _rows(self):
        """{place: its row's bytes}, of rows that can tell something."""
        out = {}
        for number in {place // ROWS for place in self._places}:
            table = torch.empty(ROWS, WIDTH)
            self._session.read(self._tables[number], MASTER, 0, table.numel(), table.data_ptr())
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
        calls = [_lib.BLOCK_FN(self._writer(todo)) for todo in rows.values()]
        return [_lib.Item(param=self._tables[n], fn=call) for n, call in zip(rows, calls)], calls

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
