# SPDX-License-Identifier: Apache-2.0
"""Session: libmoment's session as a Python object. Arrays are anything with an address: numpy or torch."""

import ctypes
import errno
import os
import re
import sys
import warnings
import weakref

from momentfs import _lib
from momentfs._lib import check, lib
from momentfs.signals import whole


def _close(handle, pid):
    """Of a session that nobody has closed before its last reference went, or the process ends: nobody hears an exception."""
    if os.getpid() == pid and lib.moment_close(handle) < 0 and sys.stderr is not None:
        print(f"momentfs: a session has ended without close(): {lib.moment_error().decode('utf-8', 'replace')}", file=sys.stderr)


def _path(p):
    return os.fsencode(p) if p is not None else None


def _memory(a):
    """Where a numpy array is, how many elements it has, and a type of their size: all that a step of callbacks needs."""
    dtype = {2: _lib.BF16, 4: _lib.F32, 8: _lib.F64}.get(a.itemsize)
    return (None, a.size, _lib.F32) if dtype is None else (a.ctypes.data, a.size, dtype)


def _of_ranks(backing):
    """{world size: the directories of its ranks that are in backing}."""
    out = {}
    try:
        names = sorted(os.listdir(backing))
    except OSError:  # for the library to tell
        return out
    for name in names:
        match = re.fullmatch(r"rank\d+-of-(\d+)", os.fsdecode(name))
        if match:
            out.setdefault(int(match[1]), []).append(os.fsdecode(name))
    return out


def shard_backing(backing, shard, fresh=False):
    """The backing of one rank: a directory in backing that names rank and world size, so that ranks that start together
    do not meet, and a job of another size does not take one rank's state for another's."""
    there = _of_ranks(backing) if backing is not None else {}
    if shard is None:
        if there:
            (world, ranks), *_ = there.items()
            raise _lib.MomentError(errno.EEXIST, f"{os.fsdecode(backing)} holds the state of {world} ranks "
                                   f"({', '.join(ranks)}): pass shard=(rank, {world}), or take another directory")
        return backing
    rank, world = shard
    if backing is None:
        raise ValueError("shard= needs backing=: a mount is one trainer's, so with mount= each rank has a mount of its own")
    if not 0 <= rank < world:
        raise ValueError(f"shard={shard!r}: (rank, world size), with the rank from 0 to world size - 1")
    there.pop(world, None)
    text = "; ".join(f"{n} ranks ({', '.join(ranks)})" for n, ranks in there.items())
    if there and not fresh:
        raise _lib.MomentError(errno.EEXIST, f"{os.fsdecode(backing)} holds the state of {text}, and this job has {world}: "
                               "start it with as many, take another directory, or begin anew with fresh=True")
    if there:
        warnings.warn(f"{os.fsdecode(backing)} still holds the state of {text}: remove it if nobody needs it", stacklevel=4)
    os.makedirs(backing, exist_ok=True)
    if os.path.exists(os.path.join(os.fsdecode(backing), "catalog.sqlite")):
        raise _lib.MomentError(errno.EEXIST, f"{os.fsdecode(backing)} is itself a backing, of a job that was not sharded: "
                               "take another directory")
    return os.path.join(os.fsdecode(backing), f"rank{rank}-of-{world}")


_open = weakref.WeakSet()  # the sessions that Session.shared() gave out


class Session:
    """One trainer's hold on one backing. See moment.h for the meaning of everything here.

    mount: a live mount point; backing: a directory (its daemon is joined, or else the engine runs in this process);
    neither: a temporary backing. resume: True, or the step that the state must be of, or "partial" to let parameters that
    are not there start at zero.
    shard: (rank, world size), where every rank keeps its own part: its backing is a directory in backing.
    """

    def __init__(
        self,
        mount=None,
        backing=None,
        *,
        shard=None,
        resume=False,
        fresh=False,
        readonly=False,
        data=None,
        ram=0,
        state_bytes=0,
        block=0,
        commit_seconds=0,
        threads=0,
        hints=True,
        temp_dir=None,
    ):
        if resume != "partial" and not (isinstance(resume, int) and resume >= 0):
            raise ValueError(f"resume={resume!r}: False, True, the number of a step, or 'partial'")
        backing = shard_backing(backing, shard, fresh)
        self._messages = messages = []
        # Lives as long as the session, and must not refer to it: a circle would keep both until the collector runs.
        self._on_message = _lib.MESSAGE_FN(lambda _arg, kind, text: messages.append((kind, text.decode("utf-8", "replace"))))
        flags = (
            (_lib.OPEN_RESUME if resume else 0)
            | (_lib.OPEN_NEW_OK if resume == "partial" else 0)
            | (_lib.OPEN_FRESH if fresh else 0)
            | (_lib.OPEN_READONLY if readonly else 0)
            | (0 if hints else _lib.OPEN_NO_HINTS)
        )
        opts = _lib.OpenOpts(
            size=ctypes.sizeof(_lib.OpenOpts),
            flags=flags,
            mount=_path(mount),
            backing=_path(backing),
            temp_dir=_path(temp_dir),
            data=data.encode() if data else None,
            ram=ram or 0,
            state_bytes=state_bytes,
            block=block or 0,
            commit_seconds=commit_seconds or 0,
            threads=threads or 0,
            message=self._on_message,
        )
        self._h, handle = None, ctypes.c_void_p()
        with whole():  # once it is open, the finalizer knows it
            res = lib.moment_open(ctypes.byref(opts), ctypes.byref(handle))
            if res >= 0:
                self._h = handle
                self._finalizer = weakref.finalize(self, _close, handle, os.getpid())
        try:
            self._tell()  # a warning may be an exception
        except BaseException:
            self.close()
            raise
        check(res)
        self._users = weakref.WeakSet()
        self._pid = os.getpid()
        self._asked = (bool(resume), fresh)
        if resume is not False and resume != "partial" and not isinstance(resume, bool):
            try:
                self._expect_step(resume)
            except BaseException:
                self.close()
                raise

    def _expect_step(self, step):
        found = self.last_step
        if found != step:
            raise ValueError(
                f"{self.info()['backing']}: the state is of {'no step' if found is None else f'step {found}'}, not of step {step}: "
                "load the weights of that step, or resume=True to go on all the same"
            )

    # ---- several optimizers of a process on one backing ----

    @classmethod
    def shared(cls, user, *, mount=None, backing=None, shard=None, resume=False, fresh=False, **opts):
        """The session that this process has on that mount or backing, or else a new one. user is noted, weakly; the last
        one that leaves ends the session, as does the last reference to it."""
        session = cls._open_on(mount, backing, shard)
        if session is None:
            session = cls(mount=mount, backing=backing, shard=shard, resume=resume, fresh=fresh, **opts)
            _open.add(session)
        elif session._asked != (bool(resume), fresh):
            was = {(False, False): "neither resume nor fresh", (True, False): "resume", (False, True): "fresh"}
            raise ValueError(
                f"{session.info()['backing']} is open in this process, by an optimizer that asked for "
                f"{was.get(session._asked)}: ask for the same to share it, or close() that optimizer first"
            )
        elif not isinstance(resume, (bool, str)):
            session._expect_step(resume)
        session._users.add(user)
        return session

    @staticmethod
    def _open_on(mount, backing, shard):
        if mount is None and backing is None:
            return None
        where = os.fsdecode(os.path.realpath(mount if backing is None else backing))
        if shard is not None and backing is not None:
            where = os.path.join(where, "rank{}-of-{}".format(*shard))
        for session in list(_open):
            if session._h is not None and session._pid == os.getpid():
                info = session.info()
                if where == info["mount" if backing is None else "backing"]:
                    return session
        return None

    def leave(self, user):
        """The last user's leaving closes the session."""
        self._users.discard(user)
        if not self._users:
            self.close()

    # ---- messages: gathered while the library runs, told when it has returned ----

    def _tell(self):
        messages = self._messages[:]
        del self._messages[: len(messages)]
        for kind, text in messages:
            if kind == _lib.WARNING:
                warnings.warn(text, stacklevel=4)
            elif os.environ.get("MOMENT_QUIET", "0") in ("", "0"):
                print(f"momentfs: {text}", file=sys.stderr)

    def _call(self, fn, *args, then=None):
        """then: what belongs to the call and follows it where it succeeds. (A message that is told may be an exception.)"""
        if self._h is None:
            raise ValueError("the session is closed")
        res = fn(self._h, *args)
        if then is not None and res >= 0:
            then()
        if self._messages:
            self._tell()
        return check(res)

    # ---- life ----

    def close(self):
        """Commits (embedded) and ends. Raises what the commit met; the session is gone in any case."""
        if self._h is not None:
            self._end()

    @whole()
    def _end(self):
        handle, self._h = self._h, None
        if self._finalizer.detach():
            check(lib.moment_close(handle))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def info(self):
        """A dict: data_path, mount, backing, ram, committed_step, read_bytes and so on; None where there is none."""
        info = _lib.Info()
        self._call(lib.moment_get_info, ctypes.byref(info))
        out = {name: getattr(info, name) for name, _ in _lib.Info._fields_}
        for key in ("mount", "backing"):
            out[key] = os.fsdecode(out[key]) if out[key] is not None else None
        out["data_path"] = out["data_path"].decode()
        for key in ("committed_step", "step", "open_step", "rolled_back"):
            if out[key] == _lib.STEP_NONE:
                out[key] = None
        return out

    # ---- parameters ----

    @staticmethod
    def params(entries):
        """A ctypes array of [{"name", "shape", "arrays"?, "dtypes"?, "tier"?, "hyper"?}]. Registering writes each handle into
        it, in the call itself; until then it is _lib.NO_PARAM."""
        array = (_lib.Param * len(entries))()  # ctypes keeps what is put into it alive
        for c, e in zip(array, entries):
            shape = (ctypes.c_uint64 * max(len(e["shape"]), 1))(*e["shape"])
            c.handle = _lib.NO_PARAM
            c.name = _lib.encode(e["name"])
            c.ndim = len(e["shape"])
            c.shape = shape
            for role in e.get("arrays", (_lib.EXP_AVG, _lib.EXP_AVG_SQ)):
                c.arrays |= 1 << role
            for role, dtype in e.get("dtypes", {}).items():
                c.dtype[role] = dtype
            c.tier = _lib.TIERS[e.get("tier", "auto")]
            c.hyper = e["hyper"].encode() if e.get("hyper") else None
        return array

    def register(self, entries):
        """Makes or finds parameters: dicts with name, shape, and arrays (roles), dtypes, tier, hyper where they matter; or
        the array that params() makes of them.

        Returns a list of (handle, found, step)."""
        array = entries if isinstance(entries, ctypes.Array) else self.params(entries)
        self._call(lib.moment_register, array, len(entries))
        return [(c.handle, bool(c.found), c.step) for c, _ in zip(array, entries)]

    @whole()  # what is raised in a callback cannot come through C, and would be lost
    def compare(self, entries):
        """[(kind, name, detail)] of how the backing, as it was opened, differs from entries; kind is "missing",
        "extra", "reshaped" or "retyped"."""
        out = []
        kinds = {1: "missing", 2: "extra", 3: "reshaped", 4: "retyped"}
        fn = _lib.DIFFERENCE_FN(
            lambda _a, kind, name, detail: out.append((kinds[kind], _lib.decode(name), detail.decode()))
        )
        array = self.params(entries)
        self._call(lib.moment_compare, array, len(entries), fn, None)
        return out

    @whole()
    def list(self):
        """What the backing held when it was opened: [{"name", "shape", "arrays", "step"}]."""
        out = []

        def add(_arg, p):
            c = p.contents
            out.append(
                {
                    "name": _lib.decode(c.name),
                    "shape": tuple(c.shape[i] for i in range(c.ndim)),
                    "arrays": tuple(r for r in range(_lib.ROLES) if c.arrays >> r & 1),
                    "step": c.step,
                }
            )
            return 0

        self._call(lib.moment_list, _lib.LIST_FN(add), None)
        return out

    def find(self, name):
        return self._call(lib.moment_find, _lib.encode(name))

    def remove(self, param):
        self._call(lib.moment_remove, param)

    def param_step(self, param):
        out = ctypes.c_uint64()
        self._call(lib.moment_param_step, param, ctypes.byref(out))
        return out.value

    def set_param_step(self, param, step):
        self._call(lib.moment_set_param_step, param, step)

    # ---- steps ----

    def step(self, label, items, finite=False, commit=False, then=None):
        """A whole step over a list of _lib.Item. label: its number; None: one more than last_step. then: called when it has
        been made, before anything is told of it."""
        array = items if isinstance(items, ctypes.Array) else (_lib.Item * max(len(items), 1))(*items)
        flags = (_lib.STEP_FINITE if finite else 0) | (_lib.STEP_COMMIT if commit else 0)
        self._call(lib.moment_step, _lib.STEP_NEXT if label is None else label, array, len(items), flags,
                   then=then)

    def step_blocks(self, label, updates, commit=False):
        """A whole step with your own update: updates is [(param, p, g, fn)], p and g contiguous numpy arrays (or None).

        fn(p, g, state, step) gets numpy views of one block: state is a dict by array name. It changes p and the
        state in place. An exception ends the step, which is then torn (rollback)."""
        import numpy as np

        raised = []
        items, keep = [], []
        for param, p, g, fn in updates:
            for a in (p, g):
                if a is not None and not a.flags["C_CONTIGUOUS"]:
                    raise ValueError("p and g must be contiguous")
            items.append(self._block_item(np, param, p, g, fn, raised, keep))
        try:
            self.step(label, items, commit=commit)
        except _lib.MomentError:
            if raised:
                raise raised[0]
            raise
        finally:
            raised.clear()  # or they and this frame would hold each other

    @staticmethod
    def _block_item(np, param, p, g, fn, raised, keep):
        flat_p = p.reshape(-1) if p is not None else None
        flat_g = g.reshape(-1) if g is not None else None
        names = ("exp_avg", "exp_avg_sq", "master", "max_exp_avg_sq")

        def call(_arg, block):
            b = block.contents
            lo, hi = b.first, b.first + b.numel
            state = {
                name: np.frombuffer((ctypes.c_float * b.numel).from_address(b.state[r]), dtype=np.float32)
                for r, name in enumerate(names)
                if b.state[r]
            }
            try:
                fn(
                    flat_p[lo:hi] if flat_p is not None else None,
                    flat_g[lo:hi] if flat_g is not None else None,
                    state,
                    b.step,
                )
                return 0
            except BaseException as e:  # must not pass through C; told again behind it
                raised.append(e)
                return -1

        item = _lib.Item(param=param, fn=_lib.BLOCK_FN(call))
        if p is not None:
            item.p, item.p_numel, item.p_dtype = _memory(p)
        if g is not None:
            item.g, item.g_numel, item.g_dtype = _memory(g)
        keep.append((item, p, g))
        return item

    def pre_step(self, label):
        self._call(lib.moment_pre_step, label)

    def pre_update(self, param):
        self._call(lib.moment_pre_update, param)

    def apply(self, item):
        self._call(lib.moment_apply, ctypes.byref(item))

    def post_update(self, param):
        self._call(lib.moment_post_update, param)

    def post_step(self, label, commit=False):
        self._call(lib.moment_post_step, label, _lib.STEP_COMMIT if commit else 0)

    def abort_step(self):
        self._call(lib.moment_abort_step)

    @property
    def last_step(self):
        """The number of the last step, in this session or of the state that was found; None: none yet."""
        out = ctypes.c_uint64()
        self._call(lib.moment_last_step, ctypes.byref(out))
        return None if out.value == _lib.STEP_NONE else out.value

    # ---- commits ----

    def commit(self, wait=True):
        self._call(lib.moment_commit, 1 if wait else 0)

    @property
    def committed_step(self):
        """The step that a crash would return to; None: none yet."""
        out = ctypes.c_uint64()
        self._call(lib.moment_committed_step, ctypes.byref(out))
        return None if out.value == _lib.STEP_NONE else out.value

    def rollback(self):
        self._call(lib.moment_rollback)

    # ---- content ----

    def read(self, param, role, first, numel, address):
        self._call(lib.moment_read_state, param, role, first, numel, address)

    def write(self, param, role, first, numel, address):
        self._call(lib.moment_write_state, param, role, first, numel, address)

    def map(self, param, role):
        """One array, contiguous and read-only, as a memoryview of bytes. It stays mapped as long as that lives."""
        out, size = ctypes.c_void_p(), ctypes.c_size_t()
        self._call(lib.moment_map_state, param, role, ctypes.byref(out), ctypes.byref(size))
        buf = (ctypes.c_uint8 * size.value).from_address(out.value)
        weakref.finalize(buf, lib.moment_unmap_state, out.value, size.value)
        return memoryview(buf).cast("B").toreadonly()
