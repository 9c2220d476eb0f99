# SPDX-License-Identifier: Apache-2.0
"""Optimizer state on NVMe, for Python.

momentfs.torch has PyTorch optimizers (import it by itself: it needs torch). Session is libmoment's
moment.h for any other use: register arrays by name, step over them in blocks, read, map, commit.
"""

from momentfs._lib import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    MAX_EXP_AVG_SQ,
    MomentError,
    NonFiniteGradient,
    library_path,
    version,
)
from momentfs.session import Session

__all__ = [
    "EXP_AVG",
    "EXP_AVG_SQ",
    "MASTER",
    "MAX_EXP_AVG_SQ",
    "MomentError",
    "NonFiniteGradient",
    "Session",
    "library_path",
    "version",
]
__version__ = "0.1.0"
