#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The same bits whatever the way to the state: session, mmap, embedded; all RAM, all NVMe, mixed; 1 and 2
threads; resumed or not. And torch's own numbers, for the settings that people use."""

import os

import support
import torch
from support import Case, gradient, seed_of, set_gradients, shapes_of, weights

import momentfs.torch

SHAPES = {
    "embed.weight": (3001, 257),  # several blocks of 1 MiB, the last one odd
    "block.0.weight": (640, 384),
    "block.0.bias": (640,),
    "block.1.weight": (1023,),
    "block.1.bias": (1,),
    "scale": (),
    "nothing": (0, 7),
    "head": (1024, 256),
}


class Bits(Case):
    def test_the_same_whichever_way_the_state_goes(self):
        small = dict(ram=6 << 20, block=256 << 10)
        ways = {
            "embedded, all in RAM": dict(ram=64 << 20),
            "embedded, all NVMe": dict(nvme_offload_fraction=1.0, **small),
            "embedded, mixed": dict(nvme_offload_fraction=0.4),
            "embedded, one thread, no hints": dict(threads=1, hints=False, **small),
            "embedded, two threads": dict(threads=2, **small),
            "embedded, master off for fp32": dict(master=False, **small),
        }
        if support.fuse_missing() is None:
            for data in ("session", "mmap"):
                for threads in (1, 2):
                    m = self.mount("ram=32M,block=1M,commit=off", name=f"{data}-{threads}",
                                   backing=self.backing(f"{data}-{threads}-b"))
                    ways[f"{data}, {threads} threads"] = dict(mount=m.path, data=data, threads=threads)
        elif support.CI:
            self.fail(support.fuse_missing())
        models = {}
        for way, where in ways.items():
            named = weights(SHAPES)
            if "mount" not in where:
                where["temp_dir"] = self.folder
            opt = self.keep(momentfs.torch.AdamW(named, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, **where))
            self.assertEqual(opt.data_path, way.split(",")[0])
            models[way] = (named, opt)
        for step in range(1, 21):
            grads = {n: gradient(step, n, s) for n, s in SHAPES.items()}
            for named, opt in models.values():
                for name, p in named:
                    p.grad = grads[name]
                opt.step()
        first, (ref_named, ref) = next(iter(models.items()))
        for way, (named, opt) in models.items():
            for (name, p), (_, q) in zip(ref_named, named):
                self.assertBits(p, q, f"{name}, {first} and {way}")
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    self.assertBits(ref.state[p][key], opt.state[q][key], f"{name}.{key}, {first} and {way}")

    def test_300_steps_of_nanogpt_char_with_resume(self):
        """One run undisturbed; one each way that is closed and resumed after steps 5 and 150; and torch's."""
        shapes = shapes_of("nanogpt-char")
        settings = dict(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)

        def groups(named):
            return [
                {"params": [(n, p) for n, p in named if p.dim() >= 2], "weight_decay": 0.1},
                {"params": [(n, p) for n, p in named if p.dim() < 2], "weight_decay": 0.0},
            ]

        steps = int(os.environ.get("MOMENT_TEST_STEPS", "300"))
        places = {"undisturbed": dict(backing=self.backing("one"), data="embedded", ram=128 << 20),
                  "embedded": dict(backing=self.backing("two"), data="embedded", ram=48 << 20)}
        if support.fuse_missing() is None:
            for data in ("session", "mmap"):
                m = self.mount("ram=48M,block=1M,commit=off", name=data, backing=self.backing(data + "-b"))
                places[data] = dict(mount=m.path, data=data)
        models = {way: weights(shapes) for way in places}
        opts = {way: self.keep(momentfs.torch.AdamW(groups(models[way]), **settings, **where))
                for way, where in places.items()}
        theirs = weights(shapes)
        plain = [{**g, "params": [p for _, p in g["params"]]} for g in groups(theirs)]
        torchs = torch.optim.AdamW(plain, foreach=False, **settings)
        numbers = {n: gradient(0, n, s).reshape(-1) for n, s in shapes.items()}

        def turned(step, n):  # still of (step, name) alone, and many times cheaper than new ones
            return numbers[n].roll(seed_of(step, n) % numbers[n].numel()).reshape(shapes[n])

        for step in range(1, steps + 1):
            lr = 1e-3 * min(1.0, step / 100)
            grads = {n: turned(step, n) for n in shapes}
            for opt in (*opts.values(), torchs):
                for g in opt.param_groups:
                    g["lr"] = lr
            for way, named in (*models.items(), ("torch", theirs)):
                for name, p in named:
                    p.grad = grads[name]
            for opt in (*opts.values(), torchs):
                opt.step()
            if step in (5, 150):
                for way, where in places.items():
                    if way == "undisturbed":
                        continue
                    opts[way].commit()
                    self.assertEqual(opts[way].committed_step, step)
                    opts[way].close()
                    # The weights are the trainer's to keep; a new process would load them.
                    models[way] = [(n, torch.nn.Parameter(p.detach().clone())) for n, p in models[way]]
                    opts[way] = self.keep(
                        momentfs.torch.AdamW(groups(models[way]), resume=True, **settings, **where))
                    self.assertEqual(opts[way].last_step, step)
        for way, named in models.items():
            for (name, p), (_, q), (_, t) in zip(models["undisturbed"], named, theirs):
                self.assertBits(p, q, f"{name} {way}")
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    self.assertBits(opts["undisturbed"].state[p][key], opts[way].state[q][key], f"{name}.{key} {way}")
                self.assertTrue(torch.allclose(q, t, rtol=1e-4, atol=1e-6), name)


class AgainstTorch(Case):
    """notes/workflows.md: for each workflow its settings and a stand-in for its shapes; 50 steps."""

    # From 2.0 on torch makes exp_avg by lerp: where it cancels to nearly nothing the two differ by a rounding of the
    # gradients, which are of about 1.
    MOMENTS_ATOL = 1e-10 if int(torch.__version__.split(".")[0]) < 2 else 2e-7
    DECAY_BY_RANK, ONE_GROUP = "by rank", "one"
    WORKFLOWS = {
        "B1 HF + DeepSpeed": ("gpt2", dict(lr=5e-5, weight_decay=0.0), "by rank", 1.0),
        "B2 DeepSpeed test": (None, dict(lr=1.5e-4, weight_decay=0.0), "one", None),
        "B3 accelerate": ("bert-base-mlm", dict(lr=2e-5), "one", 1.0),
        "B4 nanoGPT": ("nanogpt-124m", dict(lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1), "by rank", 1.0),
        "B5 nanoGPT char": ("nanogpt-char", dict(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1), "by rank", 1.0),
        "B6 HF plain": ("gpt2", dict(lr=5e-5, weight_decay=0.0), "by rank", 1.0),
        "B7 torchtune Llama": ("llama-3.2-1b", dict(lr=2e-5), "one", None),
        "B8 torchtune Qwen": ("qwen2.5-0.5b", dict(lr=2e-5), "one", None),
        "B8 axolotl": ("qwen2.5-0.5b", dict(lr=2e-4, weight_decay=0.01), "one", None),
        "B9 LLaMA-Factory": ("qwen2.5-0.5b", dict(lr=1e-5, weight_decay=0.0), "by rank", 1.0),
        "B10 TinyLlama": ("tinyllama-1.1b", dict(lr=4e-4, betas=(0.9, 0.95), weight_decay=0.1), "one", 1.0),
        "B11 ColossalAI": ("gpt2", dict(lr=1e-3, weight_decay=0.0), "one", None),
        "B11 TensorNVMe": ("gpt2", dict(lr=1e-3, weight_decay=0.0, eps=1e-12), "one", None),
        "torchtitan": ("llama-3.2-1b", dict(lr=8e-4, betas=(0.9, 0.95), weight_decay=0.1), "one", 1.0),
    }

    @staticmethod
    def small(tsv):
        """The model's names and ranks, its sizes cut down: the first dimensions to at most 96, odd sizes kept odd."""
        if tsv is None:
            return {"linears.0.weight": (64, 64), "linears.0.bias": (64,), "linears.1.weight": (64, 64),
                    "linears.1.bias": (64,)}
        return {n: tuple(min(d, 95 + d % 2) for d in s) for n, s in shapes_of(tsv, 40).items()}

    def run_both(self, cls, torch_cls, shapes, settings, by_rank, clip, steps=50):
        def groups(named, pairs):
            if not by_rank:
                return named if pairs else [p for _, p in named]
            split = [[(n, p) for n, p in named if (p.dim() >= 2) == decays] for decays in (True, False)]
            wd = settings.get("weight_decay", 1e-2)
            return [{"params": g if pairs else [p for _, p in g], "weight_decay": w}
                    for g, w in zip(split, (wd, 0.0))]

        ours, theirs = weights(shapes), weights(shapes)
        opt = self.keep(cls(groups(ours, True), temp_dir=self.folder, ram=2 << 20, block=65536, **settings))
        ref = torch_cls(groups(theirs, False), foreach=False, **settings)
        schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(1.0, (s + 1) / 10)) for o in (opt, ref)]
        for step in range(1, steps + 1):
            for named in (ours, theirs):
                set_gradients(named, step)
                if clip:
                    torch.nn.utils.clip_grad_norm_([p for _, p in named], clip)
            opt.step()
            ref.step()
            for s in schedules:
                s.step()
        for (name, p), (_, q) in zip(ours, theirs):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")
            for key in ("step", "exp_avg", "exp_avg_sq"):
                self.assertTrue(
                    torch.allclose(opt.state[p][key], torch.as_tensor(ref.state[q][key], dtype=torch.float32),
                                   rtol=1e-5, atol=self.MOMENTS_ATOL), f"{name}.{key}")
        opt.close()

    def test_workflows(self):
        for name, (tsv, settings, groups, clip) in self.WORKFLOWS.items():
            with self.subTest(workflow=name):
                self.run_both(momentfs.torch.AdamW, torch.optim.AdamW, self.small(tsv), settings,
                              groups == self.DECAY_BY_RANK, clip)

    def test_adam_and_amsgrad_and_maximize(self):
        for settings in (dict(weight_decay=0.1), dict(amsgrad=True), dict(maximize=True), dict()):
            with self.subTest(**settings):
                self.run_both(momentfs.torch.Adam, torch.optim.Adam, self.small("nanogpt-char"), settings, False, None)
        for settings in (dict(amsgrad=True), dict(maximize=True)):
            with self.subTest("adamw", **settings):
                self.run_both(momentfs.torch.AdamW, torch.optim.AdamW, self.small("nanogpt-char"), settings, False, None)

    def test_bert_pretraining_without_bias_correction(self):
        """B12: eps 1e-6, no bias correction, decoupled decay: what torch has not, written out here."""
        shapes = self.small("bert-base-mlm")
        ours, theirs = weights(shapes), weights(shapes)
        opt = self.keep(momentfs.torch.CPUAdam(ours, lr=5e-5, eps=1e-6, weight_decay=0.01, bias_correction=False,
                                               nvme_offload_fraction=1.0, nvme_offload_dir=self.folder))
        state = {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in theirs}
        for step in range(1, 51):
            set_gradients(ours, step)
            opt.step(div_scale=128.0)
            for name, p in theirs:
                g = gradient(step, name, p.shape) / 128.0
                m, v = state[name]
                m.mul_(0.9).add_(g, alpha=0.1)
                v.mul_(0.999).addcmul_(g, g, value=0.001)
                p.data.mul_(1 - 5e-5 * 0.01)
                p.data.sub_(5e-5 * m / (v.sqrt() + 1e-6))
        for (name, p), (_, q) in zip(ours, theirs):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


if __name__ == "__main__":
    support.main()
