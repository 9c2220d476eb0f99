# SPDX-License-Identifier: Apache-2.0
"""libmoment by ctypes: finding it, its structs and functions (include/moment/moment.h), its errors.

ctypes releases the GIL around every call, so a step in one thread does not hold up the others.
"""

import ctypes
import ctypes.util
import errno
import glob
import os
import subprocess
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t
from ctypes import c_uint8, c_uint32, c_uint64, c_void_p

STEP_NONE, STEP_NEXT = 2**64 - 1, 2**64 - 2
NO_PARAM = 2**32 - 1  # no handle
ROLES = 4
EXP_AVG, EXP_AVG_SQ, MASTER, MAX_EXP_AVG_SQ = range(ROLES)
F32, BF16, F16, F64 = range(4)
TIERS = {"auto": 0, "ram": 1, "nvme": 2}

OPEN_RESUME, OPEN_FRESH, OPEN_NEW_OK, OPEN_READONLY, OPEN_NO_HINTS = 1, 2, 4, 8, 16
STEP_FINITE, STEP_COMMIT = 1, 2
WARNING, NOTICE = 1, 2

ADAM, LION, ADAGRAD, SGD = range(4)
DECOUPLED, BIAS_CORRECTION, MAXIMIZE, AMSGRAD, NESTEROV, TAKE_P = 1, 2, 4, 8, 16, 32


class MomentError(OSError):
    """A call of libmoment failed: errno and a sentence that names the thing, the amount and the way out."""

    def __str__(self):
        return self.strerror or os.strerror(self.errno)


class NonFiniteGradient(MomentError, FloatingPointError):
    """A gradient has an infinity or NaN, and the optimizer was asked to refuse it. Nothing was changed."""


class Optim(ctypes.Structure):
    _fields_ = [
        ("kind", c_uint32),
        ("flags", c_uint32),
        ("lr", c_double),
        ("beta1", c_double),
        ("beta2", c_double),
        ("eps", c_double),
        ("weight_decay", c_double),
        ("dampening", c_double),
        ("grad_scale", c_double),
    ]


class Block(ctypes.Structure):
    _fields_ = [
        ("state", c_void_p * ROLES),
        ("p", c_void_p),
        ("g", c_void_p),
        ("first", c_uint64),
        ("numel", c_size_t),
        ("step", c_uint64),
        ("param", c_uint32),
        ("reserved", c_uint32),
    ]


BLOCK_FN = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(Block))
MESSAGE_FN = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_char_p)


class OpenOpts(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("flags", c_uint32),
        ("mount", c_char_p),
        ("backing", c_char_p),
        ("temp_dir", c_char_p),
        ("data", c_char_p),
        ("ram", c_uint64),
        ("state_bytes", c_uint64),
        ("block", c_uint32),
        ("commit_seconds", c_int32),
        ("threads", c_int32),
        ("reserved", c_uint32),
        ("message", MESSAGE_FN),
        ("message_arg", c_void_p),
        ("reserved2", c_uint64),
    ]


class Param(ctypes.Structure):
    _fields_ = [
        ("name", c_char_p),
        ("ndim", c_uint32),
        ("arrays", c_uint32),
        ("shape", POINTER(c_uint64)),
        ("dtype", c_uint8 * ROLES),
        ("tier", c_uint8),
        ("pad", c_uint8 * 3),
        ("hyper", c_char_p),
        ("handle", c_uint32),
        ("found", c_uint32),
        ("numel", c_uint64),
        ("step", c_uint64),
    ]


class Item(ctypes.Structure):
    _fields_ = [
        ("param", c_uint32),
        ("flags", c_uint32),
        ("p", c_void_p),
        ("g", c_void_p),
        ("p_numel", c_uint64),
        ("g_numel", c_uint64),
        ("p_dtype", c_uint32),
        ("g_dtype", c_uint32),
        ("optim", POINTER(Optim)),
        ("extras", c_void_p),
        ("fn", BLOCK_FN),
        ("arg", c_void_p),
        ("step", c_uint64),
    ]


class Info(ctypes.Structure):
    _fields_ = [
        ("data_path", c_char_p),
        ("mount", c_char_p),
        ("backing", c_char_p),
        ("holder_pid", c_uint32),
        ("block", c_uint32),
        ("ram", c_uint64),
        ("quota", c_uint64),
        ("window", c_uint64),
        ("committed_step", c_uint64),
        ("step", c_uint64),
        ("open_step", c_uint64),
        ("rolled_back", c_uint64),
        ("reserved_bytes", c_uint64),
        ("free_bytes", c_uint64),
        ("read_bytes", c_uint64),
        ("written_bytes", c_uint64),
        ("hits", c_uint64),
        ("misses", c_uint64),
        ("error", c_int32),
        ("threads", c_int32),
        ("temporary", c_int32),
        ("hints", c_int32),
    ]


DIFFERENCE_FN = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_char_p, c_char_p)
LIST_FN = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(Param))

S = c_void_p  # struct moment_session *
_FUNCTIONS = {
    "version": (c_char_p, []),
    "error": (c_char_p, []),
    "open": (c_int, [POINTER(OpenOpts), POINTER(S)]),
    "close": (c_int, [S]),
    "get_info": (c_int, [S, POINTER(Info)]),
    "register": (c_int, [S, POINTER(Param), c_size_t]),
    "compare": (c_int, [S, POINTER(Param), c_size_t, DIFFERENCE_FN, c_void_p]),
    "list": (c_int, [S, LIST_FN, c_void_p]),
    "find": (c_int64, [S, c_char_p]),
    "remove": (c_int, [S, c_uint32]),
    "param_step": (c_int, [S, c_uint32, POINTER(c_uint64)]),
    "set_param_step": (c_int, [S, c_uint32, c_uint64]),
    "offload_select": (c_uint64, [POINTER(c_uint64), POINTER(c_uint8), c_size_t, c_double, POINTER(c_uint8)]),
    "step": (c_int, [S, c_uint64, POINTER(Item), c_size_t, c_uint32]),
    "pre_step": (c_int, [S, c_uint64]),
    "pre_update": (c_int, [S, c_uint32]),
    "apply": (c_int, [S, POINTER(Item)]),
    "post_update": (c_int, [S, c_uint32]),
    "post_step": (c_int, [S, c_uint64, c_uint32]),
    "abort_step": (c_int, [S]),
    "last_step": (c_int, [S, POINTER(c_uint64)]),
    "is_finite": (c_int, [c_void_p, c_size_t, c_uint32]),
    "commit": (c_int, [S, c_int]),
    "committed_step": (c_int, [S, POINTER(c_uint64)]),
    "rollback": (c_int, [S]),
    "read_state": (c_int, [S, c_uint32, c_uint32, c_uint64, c_uint64, c_void_p]),
    "write_state": (c_int, [S, c_uint32, c_uint32, c_uint64, c_uint64, c_void_p]),
    "map_state": (c_int, [S, c_uint32, c_uint32, POINTER(c_void_p), POINTER(c_size_t)]),
    "unmap_state": (c_int, [c_void_p, c_size_t]),
}


def _candidates():
    """Where libmoment may be, best first. Names without a slash are left to the dynamic linker."""
    for var in ("MOMENT_LIBRARY", "LIBMOMENT"):
        if os.environ.get(var):
            yield os.environ[var]
    here = os.path.dirname(os.path.abspath(__file__))
    yield from sorted(glob.glob(os.path.join(here, "libmoment.so*")))
    top = os.path.dirname(os.path.dirname(os.path.dirname(here)))  # a source tree: src/python/momentfs
    if os.path.exists(os.path.join(top, "src", "lib", "libmoment.map")):
        for build in (os.environ.get("MOMENT_BUILD"), top, os.path.join(top, "build", "release")):
            if build:
                yield os.path.join(build, ".libs", "libmoment.so")
    try:
        libdir = subprocess.run(
            ["pkg-config", "--variable=libdir", "moment"], capture_output=True, text=True, timeout=10
        ).stdout.strip()
        if libdir:
            yield os.path.join(libdir, "libmoment.so")
    except (OSError, subprocess.SubprocessError):
        pass
    yield "libmoment.so.0"
    found = ctypes.util.find_library("moment")
    if found:
        yield found


def _load():
    tried = []
    for path in _candidates():
        if "/" in path and not os.path.exists(path):
            tried.append(f"{path}: not there")
            continue
        try:
            lib = ctypes.CDLL(path)
            lib.moment_open
        except (OSError, AttributeError) as e:
            tried.append(f"{path}: {e}")
            continue
        for name, (result, args) in _FUNCTIONS.items():
            fn = getattr(lib, "moment_" + name)
            fn.restype, fn.argtypes = result, args
        return lib, path
    raise ImportError(
        "libmoment was not found. Build it (tools/check or make), install it, or name it in MOMENT_LIBRARY. Tried:\n  "
        + "\n  ".join(tried)
    )


lib, _path = _load()


def library_path():
    """The libmoment that is in use."""
    return _path


def version():
    """Version and instruction set, as "momentfs 0.1.0, avx512"."""
    return lib.moment_version().decode()


def encode(name):
    """A parameter's name as bytes. Any str: what is no UTF-8 came in by surrogateescape."""
    raw = name if isinstance(name, bytes) else name.encode("utf-8", "surrogateescape")
    if not raw:
        raise ValueError("a parameter's name is empty")
    if b"\0" in raw:
        raise ValueError(f"a parameter's name has a NUL byte: {name!r}")
    return raw


def decode(raw):
    return raw.decode("utf-8", "surrogateescape")


def check(res):
    """res of a call, or the exception that it stands for."""
    if res >= 0:
        return res
    text = lib.moment_error().decode("utf-8", "replace")
    kind = NonFiniteGradient if res == -errno.EDOM else MomentError
    raise kind(-res, text)


def offload_select(numel, fraction, cpu=None):
    """Which parameters an nvme_offload_fraction puts on the drive; a list of bool."""
    n = len(numel)
    out = (c_uint8 * n)()
    on_cpu = (c_uint8 * n)(*[1 if c else 0 for c in cpu]) if cpu is not None else None
    lib.moment_offload_select((c_uint64 * n)(*numel), on_cpu, n, fraction, out)
    return [bool(x) for x in out]
