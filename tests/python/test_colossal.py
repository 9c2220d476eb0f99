#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""CPUAdam and HybridAdam mean what ColossalAI's do: its optimizer grid and kernel grid, with its tolerances, and its rule
for which parameters are offloaded."""

import inspect
import itertools
import os

import support
import torch
from support import Case, set_gradients, weights
from torch import nn

from momentfs import _lib
from momentfs.torch import CPUAdam, HybridAdam


class Toy(nn.Module):
    """d 8, 2 layers; the vocabulary cut from 50257 to 5025."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(5025, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 5025, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, x):
        h = self.wte(x)
        for layer in self.layers:
            h = h + torch.relu(layer(h))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), x.flatten())


class Colossal(Case):
    def test_signature(self):
        for cls in (CPUAdam, HybridAdam):
            parameters = inspect.signature(cls).parameters
            got = {n: p.default for n, p in parameters.items() if n not in ("model_params", "where")}
            self.assertEqual(got, dict(lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0,
                                       adamw_mode=True, nvme_offload_fraction=0.0, nvme_offload_dir=None))
            self.assertEqual(inspect.signature(cls.step).parameters["div_scale"].default, -1)

    def test_its_optimizer_grid(self):
        os.environ["TMPDIR"] = self.folder
        self.addCleanup(os.environ.pop, "TMPDIR", None)
        offload = os.path.join(self.folder, "offload")
        for fraction, where, cls in itertools.product((0.0, 0.5, 1.0), (offload, None), (CPUAdam, HybridAdam)):
            with self.subTest(fraction=fraction, dir=where, cls=cls.__name__):
                model, other = Toy(), Toy()
                opt = self.keep(cls(model.parameters(), lr=0.1, nvme_offload_fraction=fraction, nvme_offload_dir=where))
                ref = torch.optim.Adam(other.parameters(), lr=0.1)
                x = torch.arange(64).reshape(4, 16)
                for _ in range(3):
                    for m, o in ((model, opt), (other, ref)):
                        o.zero_grad()
                        m(x).backward()
                        o.step()
                for p, q in zip(model.parameters(), other.parameters()):
                    torch.testing.assert_close(p, q, atol=1e-3, rtol=0)
                opt.close()
                if where:  # nothing is left of a temporary backing
                    self.assertEqual(os.listdir(where), [])
        self.assertEqual([f for f in os.listdir(self.folder) if f.startswith("momentfs-tmp")], [])

    def test_its_kernel_grid(self):
        types = [(torch.float32, torch.float16), (torch.float32, torch.float32), (torch.float16, torch.float16)]
        for adamw, wd, (p_type, g_type) in itertools.product((False, True), (0.0, 0.1), types):
            with self.subTest(adamw=adamw, wd=wd, p=p_type, g=g_type):
                torch.manual_seed(1)
                start = torch.rand(64)
                p, q = nn.Parameter(start.to(p_type)), nn.Parameter(start.to(p_type).float())
                opt = self.keep(CPUAdam([("p", p)], lr=1e-3, weight_decay=wd, adamw_mode=adamw,
                                        nvme_offload_fraction=1.0, nvme_offload_dir=self.folder))
                ref = (torch.optim.AdamW if adamw else torch.optim.Adam)([q], lr=1e-3, weight_decay=wd, foreach=False)
                for _ in range(3):
                    g = torch.rand(64).to(g_type)
                    # torch wants a gradient of the parameter's type; the kernels take any: handed over below torch.
                    if g_type == p_type:
                        p.grad = g
                        opt.step()
                    else:
                        optim = opt._optim(opt.param_groups[0])
                        item = _lib.Item(param=opt._slots[p].handle, p=p.data_ptr(), g=g.data_ptr(), p_numel=p.numel(),
                                         g_numel=g.numel(), p_dtype=_lib.F32, g_dtype=_lib.F16, optim=_lib.ctypes.pointer(optim))
                        opt._session.step(1, [item])
                    q.grad = g.float()
                    ref.step()
                rtol, atol = (1e-5, 1e-8) if p_type == torch.float32 else (1e-3, 1e-3)
                torch.testing.assert_close(p.float(), q, rtol=rtol, atol=atol)

    def test_tensornvme_gradients_and_eps(self):
        """eps 1e-12, all gradients 0.12345: bit-equal to all in RAM."""
        runs = []
        for fraction in (0.0, 0.5, 1.0):
            named = weights({"a": (300, 77), "b": (77,), "c": (40000,)})
            opt = self.keep(CPUAdam(named, lr=1e-3, eps=1e-12, nvme_offload_fraction=fraction,
                                    nvme_offload_dir=self.folder))
            for _ in range(3):
                for _n, p in named:
                    p.grad = torch.full_like(p, 0.12345)
                opt.step()
            runs.append(named)
        for run in runs[1:]:
            for (n, p), (_, q) in zip(runs[0], run):
                self.assertBits(p, q, n)

    def test_div_scale_and_what_is_offloaded(self):
        sizes = {"g0": 80, "a": 32, "b": 8, "c": 8, "d": 32, "e": 4, "f": 4, "g": 4, "h": 16, "i": 4, "z": 8}
        self.assertEqual(
            _lib.offload_select([80, 32, 8, 8, 8, 32, 4, 4, 4, 16, 4], 0.5, [0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1]),
            [False, True, True, False, True, True, True, True, True, False, True])
        named = weights({n: (s,) for n, s in sizes.items()})
        opt = self.keep(CPUAdam(named, nvme_offload_fraction=0.5, nvme_offload_dir=self.folder))
        on_drive = [n for n, _ in named if opt._tiers[n] == "nvme"]
        self.assertEqual(on_drive, ["g0", "b", "c", "e"])  # 80 + 8 + 8 + 4 of 100
        other = weights({n: (s,) for n, s in sizes.items()})
        ref = torch.optim.AdamW([p for _, p in other], weight_decay=0.0, foreach=False)
        for step in range(3):
            set_gradients(named, step)
            set_gradients(other, step)
            for _, p in named:
                p.grad.mul_(512.0)
            opt.step(div_scale=512.0)
            ref.step()
        for (n, p), (_, q) in zip(named, other):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8, msg=lambda m, n=n: f"{n}: {m}")

    def test_cuda_parameters_are_torchs(self):
        if not torch.cuda.is_available():
            return  # said by test_signature: there is nothing more to see without a device
        for adamw in (True, False):
            named = weights({"cpu": (100,), "cuda": (100,)})
            named[1] = ("cuda", nn.Parameter(named[1][1].detach().cuda()))
            other = [(n, nn.Parameter(p.detach().clone())) for n, p in named]
            opt = self.keep(HybridAdam(named, lr=1e-2, weight_decay=0.1, adamw_mode=adamw, nvme_offload_fraction=1.0,
                                       nvme_offload_dir=self.folder))
            ref = (torch.optim.AdamW if adamw else torch.optim.Adam)([p for _, p in other], lr=1e-2, weight_decay=0.1)
            for step in range(5):
                for ps in (named, other):
                    for n, p in ps:
                        p.grad = support.gradient(step, n, p.shape).to(p.device)
                opt.step()
                ref.step()
            for (n, p), (_, q) in zip(named, other):
                torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
            sd = opt.state_dict()
            self.assertEqual(set(sd["state"]), {0, 1})
            opt.load_state_dict(sd)


if __name__ == "__main__":
    support.main()
