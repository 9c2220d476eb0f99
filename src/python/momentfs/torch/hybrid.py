# SPDX-License-Identifier: Apache-2.0
"""CPUAdam and HybridAdam: ColossalAI's optimizers (colossalai/nn/optimizer) by signature and meaning.

The state of CPU parameters is momentfs's: nvme_offload_fraction of the elements on the drive, the rest pinned in
RAM. CUDA parameters are updated on their device: HybridAdam by torch's fused AdamW, where torch has it.
"""

import torch

from momentfs.signals import whole
from momentfs.torch.optimizer import FileOptimizer, _number


class _Colossal(FileOptimizer):
    _fused = False

    def __init__(
        self,
        model_params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0,
        adamw_mode=True,
        nvme_offload_fraction=0.0,
        nvme_offload_dir=None,
        **where,
    ):
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=bias_correction)
        self._inner = None
        self.adamw_mode = adamw_mode
        persistent = where.get("mount") is not None or where.get("backing") is not None
        if persistent and nvme_offload_dir is not None:
            raise ValueError("nvme_offload_dir is for temporary state: give it, or mount= or backing=")
        super().__init__(
            model_params,
            defaults,
            decoupled=adamw_mode,
            bias_correction=bias_correction,
            nvme_offload_fraction=nvme_offload_fraction,
            temp_dir=nvme_offload_dir,
            warn_unnamed=persistent,
            **where,
        )

    def _is_ours(self, p):
        return p.device.type == "cpu"

    @torch.no_grad()
    def step(self, closure=None, div_scale: float = -1):
        """div_scale: gradients are divided by it first, if it is positive (a loss scale)."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._div_scale = div_scale if div_scale > 0 else None
        try:
            with whole():
                self._step()
                self._step_device()
        finally:
            self._div_scale = None
        return loss

    # ---- parameters on a device: torch's ----

    def _device_groups(self):
        """[(our group, its CUDA parameters)]."""
        pairs = [(g, [p for p in g["params"] if not self._is_ours(p)]) for g in self.param_groups]
        return [(g, ps) for g, ps in pairs if ps]

    def _step_device(self):
        pairs = self._device_groups()
        if not pairs:
            return
        if any(not g["bias_correction"] for g, _ in pairs):
            raise RuntimeError("bias_correction=False is not known to torch's AdamW, which updates CUDA parameters")
        inner = self._inner_optimizer(pairs)
        for theirs, (ours, params) in zip(inner.param_groups, pairs):
            theirs.update({k: ours[k] for k in ("betas", "eps", "weight_decay")}, lr=_number(ours["lr"]))
            if self._div_scale:
                for p in params:
                    if p.grad is not None:
                        p.grad.div_(self._div_scale)
        inner.step()

    def _inner_optimizer(self, pairs):
        """One torch optimizer for all; groups that came later are added."""
        cls = torch.optim.AdamW if self.adamw_mode else torch.optim.Adam
        if self._inner is None:
            groups = [{"params": ps} for _, ps in pairs]
            try:
                self._inner = cls(groups, fused=True) if self._fused else cls(groups)
            except (TypeError, RuntimeError):  # a torch without fused, or not for these
                self._inner = cls(groups)
        for _, params in pairs[len(self._inner.param_groups) :]:
            self._inner.add_param_group({"params": params})
        return self._inner

    def _foreign_state(self, p):
        if self._is_ours(p):
            return None
        return self._inner.state[p] if self._inner is not None else {}

    def _load_foreign(self, saved):
        if saved:
            inner = self._inner_optimizer(self._device_groups())
            for p, entry in saved.items():
                inner.state[p] = {
                    k: v.to(p.device) if isinstance(v, torch.Tensor) and k != "step" else v for k, v in entry.items()
                }


class CPUAdam(_Colossal):
    """Adam (adamw_mode: AdamW) for parameters in CPU memory."""


class HybridAdam(_Colossal):
    """The same, and CUDA parameters by torch's fused AdamW."""

    _fused = True
