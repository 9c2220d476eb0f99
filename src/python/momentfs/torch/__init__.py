# SPDX-License-Identifier: Apache-2.0
"""PyTorch optimizers whose state lives on NVMe.

    opt = momentfs.torch.AdamW(model.named_parameters(), lr=1e-3, mount="/mnt/job7", resume=True)

AdamW and Adam take the place of torch.optim's; CPUAdam and HybridAdam have ColossalAI's signatures.
Everything else about them is ordinary: groups, schedulers, closures, clipping, GradScaler, state_dict.
"""

from momentfs._lib import MomentError, NonFiniteGradient
from momentfs.torch.hybrid import CPUAdam, HybridAdam
from momentfs.torch.optimizer import Adam, AdamW

__all__ = ["Adam", "AdamW", "CPUAdam", "HybridAdam", "MomentError", "NonFiniteGradient"]
