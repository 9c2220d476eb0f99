#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""momentfs.torch.AdamW as an optimizer: names, groups, ties, types, schedules, state_dict, resume, bad gradients.

Cases A23 to A27, A29 and A30 of the collected faults are here, each as a test of its kind.
"""

import copy
import os
import subprocess
import sys
import textwrap
import warnings

import support
import torch
from support import Case, bits, gradient, set_gradients, weights
from torch import nn

import momentfs
import momentfs.torch
from momentfs.torch import Adam, AdamW


def small():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 11), nn.LayerNorm(11), nn.Linear(11, 3))


class OptimCase(Case):
    def adamw(self, params, cls=AdamW, **kw):
        where = {"temp_dir": self.folder} if not {"mount", "backing"} & set(kw) else {}
        return self.keep(cls(params, **{"ram": 2 << 20, "block": 65536, **where, **kw}))

    def both(self, make_params, settings=None, **kw):
        """An optimizer of ours and one of torch on equal parameters: (ours, opt, theirs, ref)."""
        ours, theirs = make_params(), make_params()
        opt = self.adamw(ours, **(settings or {}), **kw)
        ref = torch.optim.AdamW([p for _, p in theirs], foreach=False, **(settings or {}))
        return ours, opt, theirs, ref

    def assertSame(self, ours, theirs):
        for (name, p), (_, q) in zip(ours, theirs):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


class AsAnOptimizer(OptimCase):
    def test_it_is_one(self):
        model = small()
        opt = self.adamw(model.named_parameters(), lr=0.1)
        self.assertIsInstance(opt, torch.optim.Optimizer)
        self.assertEqual(opt.defaults["lr"], 0.1)
        self.assertEqual(opt.defaults["weight_decay"], 1e-2)
        self.assertEqual(self.adamw(small().named_parameters(), cls=Adam).defaults["weight_decay"], 0)
        self.assertIn("lr: 0.1", repr(opt))
        x = torch.randn(5, 7)

        def closure():
            opt.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss

        first = opt.step(closure)
        for _ in range(20):
            last = opt.step(closure)
        self.assertLess(last.item(), first.item())
        opt.zero_grad(set_to_none=True)
        self.assertTrue(all(p.grad is None for p in model.parameters()))
        before = [p.detach().clone() for p in model.parameters()]
        opt.step()  # nothing has a gradient: nothing is done
        self.assertEqual(opt.last_step, 21)
        for p, q in zip(model.parameters(), before):
            self.assertBits(p, q)
        with self.assertRaises(TypeError):
            copy.deepcopy(opt)

    def test_schedulers(self):
        for make in (
            lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 0.9**s),
            lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.01, total_steps=12),  # moves betas too
            lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        ):
            ours, opt, theirs, ref = self.both(lambda: weights({"a": (33, 5), "b": (7,)}), dict(lr=1e-2))
            schedules = [make(opt), make(ref)]
            for step in range(10):
                set_gradients(ours, step)
                set_gradients(theirs, step)
                opt.step()
                ref.step()
                for s in schedules:
                    s.step()
            self.assertSame(ours, theirs)
            self.assertEqual(opt.param_groups[0]["lr"], ref.param_groups[0]["lr"])
            self.assertEqual(opt.param_groups[0]["betas"], ref.param_groups[0]["betas"])

    def test_lr_may_be_a_tensor_and_groups_are_read_at_every_step(self):
        ours, opt, theirs, ref = self.both(lambda: weights({"a": (10, 10)}), dict(lr=1e-2))
        for step, lr in enumerate((1e-2, 3e-3, 0.0, 5e-2)):
            opt.param_groups[0]["lr"] = torch.tensor(lr, dtype=torch.float64)
            ref.param_groups[0]["lr"] = lr
            for o in (opt, ref):
                o.param_groups[0]["weight_decay"] = lr * 3
                o.param_groups[0]["eps"] = 1e-8 * (step + 1)
            set_gradients(ours, step)
            set_gradients(theirs, step)
            opt.step()
            ref.step()
        self.assertSame(ours, theirs)

    def test_gradient_accumulation_and_clipping(self):
        models = [small(), small()]
        opt = self.adamw(models[0].named_parameters(), lr=1e-2)
        ref = torch.optim.AdamW(models[1].parameters(), lr=1e-2, foreach=False)
        for step in range(3):
            for model, o in zip(models, (opt, ref)):
                o.zero_grad()
                for micro in range(8):
                    (model(gradient(step, f"x{micro}", (4, 7))).square().mean() / 8).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                o.step()
        self.assertSame(list(models[0].named_parameters()), list(models[1].named_parameters()))

    def test_wrong_arguments(self):
        p = weights({"a": (3,)})
        for bad in (dict(lr=-1), dict(betas=(1.0, 0.9)), dict(eps=-1), dict(weight_decay=-1), dict(nonfinite="maybe"),
                    dict(resume="yes"), dict(nvme_offload_fraction=2.0), dict(capturable=True)):
            with self.subTest(**bad), self.assertRaises(ValueError):
                self.adamw(p, **bad)
        with self.assertRaises(ValueError):
            self.adamw([])
        with self.assertRaises(TypeError):
            self.adamw(p[0][1])
        with self.assertRaises(TypeError):
            self.adamw([("a", "b")])
        with self.assertRaisesRegex(TypeError, "float64"):
            self.adamw([("x", nn.Parameter(torch.zeros(3, dtype=torch.float64)))])
        with self.assertRaisesRegex(ValueError, "two parameters are called"):
            self.adamw([("x", nn.Parameter(torch.zeros(3))), ("x", nn.Parameter(torch.zeros(3)))])
        for name in ("", "a\0b"):
            with self.assertRaises(ValueError):
                self.adamw([(name, nn.Parameter(torch.zeros(3)))])
        with self.assertRaises(momentfs.MomentError):
            self.adamw(p, mount=self.folder)  # not a mount
        with self.assertRaisesRegex(RuntimeError, "sparse"):
            e = nn.Embedding(5, 2, sparse=True)
            opt = self.adamw(e.named_parameters())
            e(torch.tensor([1])).sum().backward()
            opt.step()

    def test_closed(self):
        p = weights({"a": (3,)})
        with self.adamw(p) as opt:
            set_gradients(p, 1)
            opt.step()
        with self.assertRaisesRegex(ValueError, "closed"):
            opt.step()
        opt.close()


class Shapes(OptimCase):
    def test_scalar_empty_and_odd_shapes(self):
        shapes = {"s": (), "e": (0,), "e2": (4, 0, 2), "one": (1,), "odd": (3, 5, 7), "page": (1024,), "long": (70001,)}
        ours, opt, theirs, ref = self.both(lambda: weights(shapes))
        for step in range(4):
            set_gradients(ours, step)
            set_gradients(theirs, step)
            opt.step()
            ref.step()
        self.assertSame(ours, theirs)
        for name, p in ours:
            self.assertEqual(tuple(opt.state[p]["exp_avg"].shape), shapes[name])

    def test_non_contiguous_parameters_and_gradients(self):
        def make():
            t = gradient(0, "t", (40, 30))
            return [("turned", nn.Parameter(t.clone().t())), ("flat", nn.Parameter(gradient(0, "f", (6, 4))))]

        ours, opt, theirs, ref = self.both(make)
        wide = nn.Parameter(gradient(0, "w", (9, 20)))
        conv = nn.Parameter(gradient(0, "c", (4, 3, 5, 5)).to(memory_format=torch.channels_last))
        part, part_ref = wide.detach()[:, 3:11], wide.detach().clone()[:, 3:11]
        self.assertFalse(part.is_contiguous() or conv.is_contiguous() or ours[0][1].is_contiguous())
        opt.add_param_group({"params": [("part", part.requires_grad_()), ("conv", conv)]})
        conv_ref = nn.Parameter(conv.detach().clone())
        ref.add_param_group({"params": [part_ref.requires_grad_(), conv_ref]})
        rest = wide.detach().clone()
        for step in range(3):
            for name, p in (*ours, ("part", part), ("conv", conv)):
                p.grad = gradient(step, name, tuple(reversed(p.shape))).permute(*reversed(range(p.dim())))
            for name, p in (*theirs, ("part", part_ref), ("conv", conv_ref)):
                p.grad = gradient(step, name, tuple(reversed(p.shape))).permute(*reversed(range(p.dim()))).contiguous()
            opt.step()
            ref.step()
        self.assertSame([*ours, ("part", part), ("conv", conv)], [*theirs, ("part", part_ref), ("conv", conv_ref)])
        rest[:, 3:11] = part.detach()
        self.assertBits(wide, rest, "what lies around a view")

    def test_more_than_one_block_and_odd_lengths_in_low_precision(self):
        for dtype in (torch.bfloat16, torch.float16):
            ours = weights({"w": (50001,), "x": (3,)}, dtype)
            exact = [(n, nn.Parameter(p.detach().float())) for n, p in ours]
            opt = self.adamw(ours, lr=1e-2)
            ref = torch.optim.AdamW([p for _, p in exact], lr=1e-2, foreach=False)
            for step in range(5):
                set_gradients(ours, step)
                for (n, p), (_, q) in zip(ours, exact):
                    q.grad = p.grad.float()
                opt.step()
                ref.step()
            for (n, p), (_, q) in zip(ours, exact):
                master = opt.state[p]["master"]
                torch.testing.assert_close(master, q.detach(), rtol=1e-6, atol=1e-8)
                self.assertBits(p, master.to(dtype), "weights are their master, rounded")


class Names(OptimCase):
    def test_from_a_model_pairs_and_groups(self):
        model = small()
        names = [n for n, _ in model.named_parameters()]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            by_model = self.adamw(model.parameters(), model=model)
            by_pairs = self.adamw(list(model.named_parameters()))
            by_group = self.adamw([{"params": list(model.named_parameters())[:2]},
                                   {"params": list(model.named_parameters())[2:], "lr": 5e-4}])
        for opt in (by_model, by_pairs, by_group):
            self.assertEqual([opt.name_of(p) for p in model.parameters()], names)
        self.assertEqual([g["lr"] for g in by_group.param_groups], [1e-3, 5e-4])

    def test_unnamed_lists_get_places_and_a_warning(self):
        model = small()
        with self.assertWarnsRegex(UserWarning, "named_parameters"):
            opt = self.adamw(model.parameters())
        self.assertEqual(opt.name_of(model[0].weight), "unnamed.0")

    def test_tied_parameters_have_one_state(self):
        """A29."""

        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(3)
                self.wte = nn.Embedding(20, 8)
                self.lm_head = nn.Linear(8, 20, bias=False)
                self.lm_head.weight = self.wte.weight

            def forward(self, x):
                return self.lm_head(self.wte(x))

        reference = Tied()
        ref = torch.optim.AdamW(reference.parameters(), foreach=False)
        makes = {
            "model": lambda m: self.adamw(m.parameters(), model=m),
            "pairs": lambda m: self.adamw(m.named_parameters()),
            "all pairs": lambda m: self.adamw([("wte.weight", m.wte.weight), ("lm_head.weight", m.lm_head.weight)]),
        }
        models = {k: Tied() for k in makes}
        opts = {k: make(models[k]) for k, make in makes.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            models["twice"] = Tied()
            opts["twice"] = self.adamw([models["twice"].wte.weight, models["twice"].wte.weight])
        x = torch.arange(20)
        for _ in range(3):
            for m, o in ((reference, ref), *((models[k], opts[k]) for k in opts)):
                o.zero_grad()
                m(x).square().mean().backward()
                o.step()
        for k, m in models.items():
            self.assertSame([(k, m.wte.weight)], [(k, reference.wte.weight)])
            self.assertEqual(len(opts[k].state), 1)
            self.assertEqual(opts[k].state[m.wte.weight]["step"].item(), 3)
        for k in ("model", "all pairs"):
            self.assertIs(opts[k].parameter("lm_head.weight"), models[k].wte.weight)
            self.assertIs(opts[k].parameter("wte.weight"), models[k].wte.weight)
        with self.assertRaisesRegex(ValueError, "more than one"):  # as torch does
            self.adamw([{"params": [("a", reference.wte.weight)]}, {"params": [("a", reference.wte.weight)]}])

    def test_a_new_tensor_at_an_old_address_gets_new_state(self):
        opt = self.adamw([("keep", nn.Parameter(torch.ones(4)))])
        for i in range(20):
            p = nn.Parameter(torch.zeros(1000))
            opt.add_param_group({"params": [(f"p{i}", p)]})
            p.grad = torch.full((1000,), float(i + 1))
            opt.step()
            self.assertEqual(opt.state[p]["step"].item(), 1)
            torch.testing.assert_close(opt.state[p]["exp_avg"], torch.full((1000,), 0.1 * (i + 1)))
            p.grad = None
            opt.param_groups.pop()
            del p

    def test_any_name_is_one_parameter(self):
        names = ["a", "a.b", "a/b", "a_b", "a%2Eb", "A", "..", "../../etc/x", ".hidden", "-rf", "exp_avg", "层.0.weight",
                 "\u00e9", "e\u0301", "two words", "new\nline", "\udcff", "x" * 300 + "1", "x" * 300 + "2", "y" * 5000]
        named = [(n, nn.Parameter(torch.full((8,), float(i)))) for i, n in enumerate(names)]
        opt = self.adamw(named, backing=self.backing())
        for i, (n, p) in enumerate(named):
            p.grad = torch.full((8,), float(i + 1))
        opt.step()
        opt.close()
        again = [(n, nn.Parameter(torch.zeros(8))) for n, _ in reversed(named)]
        opt = self.adamw(again, backing=self.backing(), resume=True)
        for n, p in again:
            want = 0.1 * (names.index(n) + 1)
            torch.testing.assert_close(opt.state[p]["exp_avg"], torch.full((8,), want), msg=repr(n))
        self.assertEqual(sorted(e["name"] for e in opt._session.list()), sorted(names))


class Resume(OptimCase):
    def steps(self, opt, named, first, last):
        for step in range(first, last + 1):
            set_gradients(named, step)
            opt.step()

    def usage(self):
        return sum(os.stat(os.path.join(d, f)).st_blocks for d, _, fs in os.walk(self.backing()) for f in fs)

    def test_runs_that_resume_take_no_more_room(self):
        """A23: the same names, the same places, the same disk usage."""
        shapes = {f"layer.{i}": (100, 30 + i) for i in range(10)}
        named = weights(shapes)
        used = []
        for run in range(4):
            opt = self.adamw(named, backing=self.backing(), resume=run > 0)
            self.assertEqual(opt.last_step, 3 * run if run else None)
            self.steps(opt, named, 3 * run + 1, 3 * run + 3)
            opt.close()
            used.append(self.usage())
        self.assertLessEqual(max(used[1:]), used[1] * 1.05 + 64)

    def test_what_is_there_is_neither_taken_nor_dropped_unasked(self):
        """A23."""
        shapes = {f"p{i}": (4, 4) for i in range(10)}
        named = weights(shapes)
        opt = self.adamw(named, backing=self.backing())
        self.steps(opt, named, 1, 2)
        opt.close()
        with self.assertRaisesRegex(momentfs.MomentError, "resume"):
            self.adamw(weights(shapes), backing=self.backing())
        changed = dict(shapes)
        del changed["p3"]
        changed["p4"] = (4, 5)
        changed["renamed"] = changed.pop("p5")
        with self.assertRaises(momentfs.MomentError) as e:
            self.adamw(weights(changed), backing=self.backing(), resume=True)
        for part in ("missing: renamed", "extra: p3, p5", "p4 (have 4x4, want 4x5)"):
            self.assertIn(part, str(e.exception))
        changed["p4"] = (4, 4)
        with self.assertRaisesRegex(momentfs.MomentError, 'resume="partial"'):
            self.adamw(weights(changed), backing=self.backing(), resume=True)
        some = weights(changed)
        opt = self.adamw(some, backing=self.backing(), resume="partial")
        self.assertEqual({n: opt._session.param_step(opt._slots[p].handle) for n, p in some},
                         {n: 0 if n == "renamed" else 2 for n in changed})
        opt.close()
        fresh = weights({"p0": (9, 9)})
        opt = self.adamw(fresh, backing=self.backing(), fresh=True)
        self.assertIsNone(opt.last_step)
        opt.close()
        opt = self.adamw(fresh, backing=self.backing())
        self.assertEqual([e["name"] for e in opt._session.list()], ["p0"])

    def test_resume_of_nothing_starts_with_a_warning(self):
        with self.assertWarnsRegex(UserWarning, "no state to resume"):
            opt = self.adamw(weights({"a": (3,)}), backing=self.backing(), resume=True)
        self.assertIsNone(opt.last_step)

    def test_order_groups_and_unfreezing(self):
        """A30: by name, whatever the order and the groups; files only for what trains."""
        shapes = {"p1": (4, 4), "p2": (4, 4), **{f"frozen{i}": (5,) for i in range(20)}}
        reference, named = dict(weights(shapes)), dict(weights(shapes))
        for d in (reference, named):
            for n, p in d.items():
                p.requires_grad_(n in ("p1", "p2"))
        ref = torch.optim.AdamW([reference["p1"], reference["p2"]], foreach=False)
        opt = self.adamw([(n, p) for n, p in named.items()], backing=self.backing())
        self.assertEqual(len(opt.state), 2)

        def run(first, last, active):
            for step in range(first, last + 1):
                for d in (reference, named):
                    for n in active:
                        d[n].grad = gradient(step, n, shapes[n])
                opt.step()
                ref.step()

        run(1, 4, ["p1", "p2"])
        for d in (reference, named):  # unfrozen while it trains, in a group of its own
            d["frozen7"].requires_grad_()
            d["frozen8"].requires_grad_()
        ref.add_param_group({"params": [reference["frozen7"], reference["frozen8"]], "lr": 0.1})
        opt.param_groups[0]["params"] = [p for p in opt.param_groups[0]["params"]
                                         if p is not named["frozen7"] and p is not named["frozen8"]]
        opt.add_param_group({"params": [("frozen7", named["frozen7"]), ("frozen8", named["frozen8"])], "lr": 0.1})
        run(5, 8, ["p1", "p2", "frozen7", "frozen8"])
        opt.close()
        # All in another order, in other groups: each finds its own.
        opt = self.adamw([{"params": [("frozen8", named["frozen8"]), ("frozen7", named["frozen7"])], "lr": 0.1},
                          {"params": [("p2", named["p2"]), ("p1", named["p1"])]}],
                         backing=self.backing(), resume=True)
        run(9, 12, ["p1", "p2", "frozen7", "frozen8"])
        for n in ("p1", "p2", "frozen7", "frozen8", "frozen1"):
            self.assertSame([(n, named[n])], [(n, reference[n])])
        self.assertEqual(opt.state[named["frozen8"]]["step"].item(), 8)

    def unnamed(self, params, **kw):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.adamw(params, backing=self.backing(), **kw)

    def test_another_order_of_unnamed_parameters_is_noticed_by_the_weights(self):
        """A30."""
        for dtype in (torch.float32, torch.bfloat16):
            ps = [p for _, p in weights({"p1": (4, 4), "p2": (4, 4), "p3": (70, 300), "p4": (70, 300), "p5": (4, 4), "p6": (2,)},
                                        dtype)]
            ps += [nn.Parameter(gradient(0, f"turned{i}", (30, 40), dtype).t()) for i in range(2)]
            ps += [nn.Parameter(torch.ones(5, dtype=dtype)) for _ in range(70)]  # more than one table; all the same
            opt = self.unnamed(ps, fresh=True)
            for step in (1, 2):
                for i, p in enumerate(ps):  # the last 70 stay alike
                    p.grad = gradient(step, str(min(i, 8)), p.shape, dtype)
                opt.step()
            opt.close()
            for a, b in ((0, 1), (2, 3), (6, 7), (0, 4)):
                loaded = [nn.Parameter(p.detach().clone()) for p in ps]
                loaded[a], loaded[b] = loaded[b], loaded[a]
                with self.assertRaises(ValueError) as e:
                    self.unnamed(loaded, resume=True)
                for text in (f"unnamed.{a} has the weights of unnamed.{b}", f"unnamed.{b} has the weights of unnamed.{a}",
                             "named_parameters"):
                    self.assertIn(text, str(e.exception))
                # Weights that are loaded after the optimizer was made: before the first step, and nothing is changed.
                late = [nn.Parameter(torch.zeros_like(p)) for p in ps]
                opt = self.unnamed(late, resume=True)
                before = {i: opt.state[p]["exp_avg_sq"] for i, p in enumerate(late)}
                for p, q in zip(late, loaded):
                    p.data.copy_(q.data)
                    p.grad = torch.ones_like(p)
                with self.assertRaisesRegex(ValueError, "another order"):
                    opt.step()
                for i, p in enumerate(late):
                    self.assertBits(opt.state[p]["exp_avg_sq"], before[i])
                self.assertEqual(opt.last_step, 2)
                opt.close()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.filterwarnings("ignore", "parameters without names")
                opt = self.adamw(ps, backing=self.backing(), resume=True)  # the old order
                opt.step()
            opt.rollback()
            opt.close()

    def test_unnamed_parameters_whose_weights_tell_nothing_get_a_warning(self):
        ps = [p for _, p in weights({"p1": (4, 4), "p2": (4, 4)})]
        opt = self.unnamed(ps)
        for p in ps:
            p.grad = torch.ones_like(p)
        opt.step()
        opt.close()
        others = [nn.Parameter(p.detach() + 1) for p in ps]
        opt = self.unnamed(others, resume=True)
        for p in others:
            p.grad = torch.ones_like(p)
        with self.assertWarnsRegex(UserWarning, "not those of the step"):
            opt.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            opt.step()
        self.assertEqual(opt.last_step, 3)
        opt.close()

    def test_unnamed_state_without_samples_is_resumed(self):
        """Of a version that did not keep them; and what is not there twice."""
        ps = [p for _, p in weights({"p1": (4, 4), "p2": (4, 4)})]
        with momentfs.Session(backing=self.backing(), ram=2 << 20, block=65536) as s:
            s.register([{"name": f"unnamed.{i}", "shape": (4, 4)} for i in range(2)])
            for i in range(2):
                s.set_param_step(i, 1)
        for run in range(2):
            opt = self.unnamed(ps, resume=True)
            self.assertEqual(len(opt.state), 2)
            for p in ps:
                p.grad = torch.ones_like(p)
            opt.step()
            opt.add_param_group({"params": [nn.Parameter(torch.ones(3)) for _ in range(70)]})
            self.assertEqual(sorted(e for e in self.names(opt)), [f"unnamed.{i}" for i in (0, 1)] if run == 0 else
                             sorted([f"unnamed.{i}" for i in range(72)] + ["unnamed.samples.0", "unnamed.samples.1"]))
            opt.step()
            opt.close()

    @staticmethod
    def names(opt):
        return [e["name"] for e in opt._session.list()]

    def test_later_groups_of_a_resumed_run(self):
        named = weights({"a": (5,), "b": (6,)})
        opt = self.adamw(named, backing=self.backing())
        self.steps(opt, named, 1, 3)
        opt.close()
        opt = self.adamw(named[:1], backing=self.backing(), resume=True)
        opt.add_param_group({"params": [named[1], ("new", nn.Parameter(torch.ones(3)))]})
        self.assertEqual(opt.state[named[1][1]]["step"].item(), 3)
        self.assertEqual(len(opt.state[opt.parameter("new")]), 0)

    def test_rollback_and_commit(self):
        named = weights({"a": (500,), "b": (6,)})
        opt = self.adamw(named, backing=self.backing(), commit_seconds=-1)
        self.steps(opt, named, 1, 2)
        self.assertNotEqual(opt.committed_step, 2)
        opt.commit()
        self.assertEqual(opt.committed_step, 2)
        kept = {n: (p.detach().clone(), opt.state[p]["exp_avg"]) for n, p in named}
        self.steps(opt, named, 3, 5)
        opt.rollback()
        self.assertEqual(opt.last_step, 2)
        for n, p in named:
            self.assertBits(opt.state[p]["exp_avg"], kept[n][1])
            self.assertEqual(opt.state[p]["step"].item(), 2)

    def test_a_process_that_is_killed_leaves_whole_steps(self):
        script = textwrap.dedent("""
            import os, signal, sys, torch, momentfs.torch
            ps = [(f"p{i}", torch.nn.Parameter(torch.ones(3000))) for i in range(4)]
            opt = momentfs.torch.AdamW(ps, lr=0, betas=(0.999, 0.9995), weight_decay=0, backing=sys.argv[1], resume=True,
                                       ram=2 << 20, block=65536, commit_seconds=-1)
            for step in range(1, 8):
                for _, p in ps: p.grad = torch.ones_like(p)
                opt.step()
                if step == 5: opt.commit()
            os.kill(os.getpid(), signal.SIGKILL)
        """)
        out = subprocess.run([sys.executable, "-W", "ignore", "-c", script, self.backing()], capture_output=True, text=True)
        self.assertEqual(out.returncode, -9, out.stderr)
        named = [(f"p{i}", nn.Parameter(torch.ones(3000))) for i in range(4)]
        opt = self.adamw(named, backing=self.backing(), resume=True)
        self.assertEqual((opt.committed_step, opt.last_step), (5, 5))
        for _, p in named:  # 1 - beta^t tells t
            torch.testing.assert_close(opt.state[p]["exp_avg"], torch.full((3000,), 1 - 0.999**5), rtol=1e-5, atol=0)
            self.assertEqual(opt.state[p]["step"].item(), 5)


class Counts(OptimCase):
    def test_each_parameter_counts_its_own_updates(self):
        """A24: missing gradients, two groups of betas, one to three sub-steps; and from 1000 on."""
        shapes = {"A": (1000,), "B": (1000,), "C": (1000,)}
        betas = {"A": (0.9, 0.999), "B": (0.9, 0.999), "C": (0.8, 0.95)}

        def groups(named, pairs):
            of = dict(named)
            return [{"params": [(n, of[n]) if pairs else of[n] for n in names], "betas": betas[names[0]]}
                    for names in (["A", "B"], ["C"])]

        theirs = weights(shapes)
        ref = torch.optim.AdamW(groups(theirs, False), foreach=False)
        variants = [weights(shapes) for _ in range(3)]
        opts = [self.adamw(groups(v, True), threads=1 + k % 2) for k, v in enumerate(variants)]
        for step in range(1, 51):
            active = ["A", "C"] if step % 2 else ["A", "B", "C"]
            for k, (v, opt) in enumerate(zip(variants, opts)):
                for part in range(k + 1):  # the same update in k + 1 calls of step()
                    for i, (n, p) in enumerate(v):
                        p.grad = gradient(step, n, p.shape) if n in active and i % (k + 1) == part else None
                    opt.step()
            for n, p in theirs:
                p.grad = gradient(step, n, p.shape) if n in active else None
            ref.step()
            if step == 40:
                for k, (v, opt) in enumerate(zip(variants, opts)):
                    for n, p in v:
                        opt.state[p]["step"] = 1000
                for n, p in theirs:
                    ref.state[p]["step"] = torch.tensor(1000.0)
        for v, opt in zip(variants, opts):
            self.assertSame(v, theirs)
            for (n, p), (_, q), (_, first) in zip(v, theirs, variants[0]):
                self.assertBits(p, first, n)
                self.assertEqual(opt.state[p]["step"].item(), 1005 if n == "B" else 1010)

    def test_counts_are_exact_whatever_the_default_type(self):
        """A25."""
        before = torch.get_default_dtype()
        p = nn.Parameter(torch.zeros(5, dtype=torch.float32))
        q = nn.Parameter(torch.zeros(5, dtype=torch.float32))
        opt = self.adamw([("p", p)], lr=1e-3)
        ref = torch.optim.AdamW([q], lr=1e-3, foreach=False)
        try:
            torch.set_default_dtype(torch.bfloat16)
            for _ in range(300):
                p.grad = torch.full((5,), 0.1, dtype=torch.float32)
                opt.step()
        finally:
            torch.set_default_dtype(before)
        for _ in range(300):
            q.grad = torch.full((5,), 0.1)
            ref.step()
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)
        step = opt.state_dict()["state"][0]["step"]
        self.assertEqual((step.dtype, step.dim(), step.device.type, step.item()), (torch.float32, 0, "cpu", 300.0))

    def test_every_form_of_a_count_is_taken_or_refused(self):
        """A25."""
        p = nn.Parameter(torch.zeros(5))
        opt = self.adamw([("p", p)])
        p.grad = torch.ones(5)
        opt.step()
        sd = opt.state_dict()
        forms = {7: 7, 8.0: 8, 16777217: 16777217}
        tensors = [torch.tensor(9.0), torch.tensor([10.0]), torch.tensor(11), torch.tensor(256.0, dtype=torch.bfloat16),
                   torch.tensor(12.0, dtype=torch.float64)]
        for form, want in [*forms.items(), *((t, int(t)) for t in tensors)]:
            sd["state"][0]["step"] = form
            opt.load_state_dict(sd)
            self.assertEqual(opt._session.param_step(opt._slots[p].handle), want)
        for bad in (torch.tensor(300.0, dtype=torch.bfloat16), torch.tensor(4096.0, dtype=torch.float16), 1.5, -1,
                    torch.tensor([1.0, 2.0])):
            sd["state"][0]["step"] = bad
            with self.assertRaises(ValueError):
                opt.load_state_dict(sd)
        self.assertEqual(opt._session.param_step(opt._slots[p].handle), 12)


class StateDict(OptimCase):
    shapes = {"a": (31, 9), "b": (9,), "c": ()}

    def stepped(self, cls=AdamW, steps=3, dtype=torch.float32, **kw):
        named = weights(self.shapes, dtype)
        opt = self.adamw(named, cls=cls, **kw)
        for step in range(steps):
            set_gradients(named, step)
            opt.step()
        return named, opt

    def test_both_ways_with_torch(self):
        for cls, torch_cls in ((AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam)):
            for amsgrad in (False, True):
                named, opt = self.stepped(cls, amsgrad=amsgrad)
                theirs = [(n, nn.Parameter(p.detach().clone())) for n, p in named]
                ref = torch_cls([p for _, p in theirs], lr=9.0, amsgrad=amsgrad, foreach=False)
                ref.load_state_dict(opt.state_dict())  # ours into torch's
                self.assertEqual(ref.param_groups[0]["lr"], 1e-3)
                again = [(n, nn.Parameter(p.detach().clone())) for n, p in named]
                back = self.adamw(again, cls=cls, lr=9.0, amsgrad=amsgrad)
                back.load_state_dict(ref.state_dict())  # and back
                for (_, p), (_, q), (_, r) in zip(named, theirs, again):
                    for key in opt.state[p]:
                        self.assertBits(opt.state[p][key], torch.as_tensor(ref.state[q][key], dtype=torch.float32), key)
                        self.assertBits(opt.state[p][key], back.state[r][key], key)
                for step in range(3, 6):
                    for n in (named, theirs, again):
                        set_gradients(n, step)
                    for o in (opt, ref, back):
                        o.step()
                self.assertSame(named, theirs)
                for (n, p), (_, r) in zip(named, again):
                    self.assertBits(p, r, n)

    def test_by_name_in_any_order(self):
        named, opt = self.stepped()
        again = [(n, nn.Parameter(p.detach().clone())) for n, p in reversed(named)]
        back = self.adamw(again)
        back.load_state_dict(opt.state_dict())
        for (n, p) in named:
            self.assertBits(opt.state[p]["exp_avg"], back.state[dict(again)[n]]["exp_avg"])

    def test_bits_of_low_precision_training_are_kept(self):
        """A26: moments and masters are not rounded to the parameters' type."""
        named, opt = self.stepped(dtype=torch.bfloat16)
        sd = opt.state_dict()
        again = [(n, nn.Parameter(p.detach().clone())) for n, p in named]
        back = self.adamw(again)
        back.load_state_dict(sd)
        for (n, p), (_, q) in zip(named, again):
            for key in ("exp_avg", "exp_avg_sq", "master"):
                self.assertEqual(sd["state"][[m for m, _ in named].index(n)][key].dtype, torch.float32)
                self.assertBits(opt.state[p][key], back.state[q][key], f"{n} {key}")
        for step in range(3, 5):
            for o, ps in ((opt, named), (back, again)):
                set_gradients(ps, step)
                o.step()
        for (n, p), (_, q) in zip(named, again):
            self.assertBits(p, q, n)

    def test_weights_loaded_later_are_not_undone(self):
        """A26: the master is read again, whichever way the weights came."""
        new = {n: gradient("ckpt", n, s, torch.bfloat16, 0.5) for n, s in self.shapes.items()}
        ways = {
            "copy_": lambda p, w: p.data.copy_(w),
            "load": lambda p, w: p.copy_(w),
            "another storage": lambda p, w: setattr(p, "data", w.clone()),
        }
        for way, load in ways.items():
            named, opt = self.stepped(dtype=torch.bfloat16)
            with torch.no_grad():
                for n, p in named:
                    load(p, new[n])
            opt.param_groups[0]["lr"] = 0.0
            set_gradients(named, 9)
            opt.step()
            for n, p in named:
                self.assertBits(p, new[n], f"{n} after {way}")
        # Resumed, with other weights in the model than the state's last.
        named = weights(self.shapes, torch.bfloat16)
        opt = self.adamw(named, backing=self.backing())
        set_gradients(named, 1)
        opt.step()
        master = {n: opt.state[p]["master"] for n, p in named}
        opt.close()
        opt = self.adamw(named, lr=0.0, backing=self.backing(), resume=True)
        set_gradients(named, 2)
        opt.step()
        for n, p in named:  # those that agree keep all of their bits
            self.assertBits(opt.state[p]["master"], master[n])
        opt.close()
        named = [(n, nn.Parameter(new[n].clone())) for n in self.shapes]
        opt = self.adamw(named, lr=0.0, backing=self.backing(), resume=True)
        set_gradients(named, 2)
        opt.step()
        for n, p in named:
            self.assertBits(p, new[n], n)
        opt.close()
        opt = self.adamw(weights(self.shapes, torch.bfloat16), backing=self.backing(), resume=True)
        opt.restore_weights()  # a model whose weights were not loaded takes them from the masters
        for n in self.shapes:
            self.assertBits(opt.parameter(n), new[n], n)

    def test_masters_that_were_never_filled_are_not_taken_for_weights(self):
        """A run that was killed between registering and filling them."""
        shapes = {"w": (40, 30), "b": (40,)}
        with momentfs.Session(backing=self.backing(), ram=2 << 20, block=65536) as s:
            arrays = (momentfs.EXP_AVG, momentfs.EXP_AVG_SQ, momentfs.MASTER)
            s.register([{"name": n, "shape": shape, "arrays": arrays} for n, shape in shapes.items()])
        named, other = weights(shapes, torch.bfloat16), weights(shapes, torch.bfloat16)
        opt, ref = self.adamw(named, backing=self.backing(), resume=True), self.adamw(other)
        opt.restore_weights()
        for step in (1, 2):
            for o, n in ((opt, named), (ref, other)):
                set_gradients(n, step)
                o.step()
        for (n, p), (_, q) in zip(named, other):
            self.assertBits(p, q, n)
            self.assertBits(opt.state[p]["master"], ref.state[q]["master"], n)

    def test_foreign_layouts_are_refused_by_their_keys(self):
        named, opt = self.stepped()
        good = opt.state_dict()
        before = {n: opt.state[p]["exp_avg"] for n, p in named}
        foreign = copy.deepcopy(good)
        foreign["state"][0] = {"step": 1, "state1": torch.zeros(31, 9), "state2": torch.zeros(31, 9), "qmap1": torch.zeros(256)}
        lacking = copy.deepcopy(good)
        del lacking["state"][1]["exp_avg_sq"]
        shape = copy.deepcopy(good)
        shape["state"][2]["exp_avg"] = torch.zeros(2)
        double = copy.deepcopy(good)
        double["state"][0]["exp_avg"] = torch.zeros(31, 9, dtype=torch.float64)
        more = copy.deepcopy(good)
        more["param_groups"].append(more["param_groups"][0])
        other = copy.deepcopy(good)
        other["param_groups"][0]["param_names"] = ["a", "b", "z"]
        fewer = copy.deepcopy(good)
        fewer["param_groups"][0]["params"] = [0, 1]
        fewer["param_groups"][0]["param_names"] = ["a", "b"]
        for bad, part in ((foreign, "state1, state2, qmap1"), (lacking, "lacks exp_avg_sq"), (shape, "shape"),
                          (double, "float64"), (more, "2 parameter groups"), (other, "z"), (fewer, "group 0"),
                          ({"model": 1}, "it has model"), ([], "list")):
            with self.subTest(part), self.assertRaisesRegex(ValueError, part):
                opt.load_state_dict(bad)
        for n, p in named:
            self.assertBits(opt.state[p]["exp_avg"], before[n], "nothing was changed")

    def test_state_shows_the_files(self):
        named, opt = self.stepped(steps=1)
        a = named[0][1]
        self.assertEqual(sorted(opt.state[a]), ["exp_avg", "exp_avg_sq", "step"])
        self.assertEqual({opt.name_of(p) for p in opt.state}, set(self.shapes))
        torch.testing.assert_close(opt.state[a]["exp_avg"], gradient(0, "a", (31, 9)) * 0.1)
        opt.state[a]["exp_avg"] = torch.full((31, 9), 2.5)
        self.assertBits(opt.state[a]["exp_avg"], torch.full((31, 9), 2.5))
        with self.assertRaises(KeyError):
            opt.state[a]["max_exp_avg_sq"]
        with self.assertRaises(ValueError):
            opt.state[a]["exp_avg"] = torch.zeros(3)


class Scaler:
    """What torch's GradScaler does around a step, where there is no CUDA: unscale, look, skip, lower."""

    def __init__(self):
        self.scale = 65536.0

    def step(self, opt):
        grads = [p.grad for g in opt.param_groups for p in g["params"] if p.grad is not None]
        for g in grads:
            g.div_(self.scale)
        if all(torch.isfinite(g).all() for g in grads):
            opt.step()
        else:
            self.scale /= 2


class BadGradients(OptimCase):
    """A27."""

    def test_a_skipped_step_changes_nothing(self):
        n = 1000003
        p = nn.Parameter(torch.ones(n))
        opt = self.adamw([("p", p)], backing=self.backing())
        p.grad = torch.ones(n)
        opt.step()
        opt.commit()
        m, committed = opt.state[p]["exp_avg"], opt.committed_step
        written = opt.info()["written_bytes"]
        scaler = Scaler()
        for bad in (float("inf"), float("nan")):
            p.grad = torch.ones(n)
            p.grad[n - 1] = bad
            scaler.step(opt)
        self.assertEqual(scaler.scale, 65536.0 / 4)
        opt.commit()
        self.assertBits(opt.state[p]["exp_avg"], m)
        self.assertEqual((opt.state[p]["step"].item(), opt.last_step, opt.committed_step), (1, 1, committed))
        self.assertLess(opt.info()["written_bytes"] - written, 1 << 20)

    def test_torchs_own_scaler_where_it_works_on_a_cpu(self):
        make = getattr(getattr(torch, "amp", None), "GradScaler", None)
        if make is None:
            self.assertLess(tuple(map(int, torch.__version__.split(".")[:2])), (2, 3))
            return
        p = nn.Parameter(torch.ones(10))
        opt = self.adamw([("p", p)])
        scaler = make("cpu", init_scale=65536.0)
        for grad in (1.0, float("inf"), 1.0):
            opt.zero_grad()
            scaler.scale((p * grad).sum()).backward()
            scaler.step(opt)
            scaler.update()
        self.assertEqual(opt.state[p]["step"].item(), 2)
        self.assertTrue(torch.isfinite(p).all())

    def test_by_default_as_torch_and_on_request_refused(self):
        n = 1000003
        for bad in (float("inf"), float("nan")):
            ours, opt, theirs, ref = self.both(lambda: [("q", nn.Parameter(torch.ones(5))), ("p", nn.Parameter(torch.ones(n)))])
            for named in (ours, theirs):
                for _, p in named:
                    p.grad = torch.ones_like(p)
                named[1][1].grad[n - 1] = bad
            opt.step()
            ref.step()
            for (name, p), (_, q) in zip(ours, theirs):
                torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8, equal_nan=True)
            strict = self.adamw(ours, nonfinite="raise")
            before = ours[0][1].detach().clone()
            with self.assertRaisesRegex(momentfs.NonFiniteGradient, "gradient of p"):
                strict.step()
            self.assertBits(ours[0][1], before)
            self.assertEqual(len(strict.state[ours[0][1]]), 0)
            self.assertIsNone(strict.last_step)
            ours[1][1].grad[n - 1] = 1.0
            strict.step()
            self.assertEqual(strict.last_step, 1)

    def test_huge_zero_and_clipped_gradients(self):
        def make():
            return [("p", nn.Parameter(torch.ones(1001)))]

        for fill, clip in ((3e38, None), (0.0, None), (1.0, 1.0), (float("inf"), 1.0)):
            ours, opt, theirs, ref = self.both(make)
            for _ in range(2):
                for named, o in ((ours, opt), (theirs, ref)):
                    named[0][1].grad = torch.full((1001,), fill)
                    if clip:
                        nn.utils.clip_grad_norm_([named[0][1]], clip)
                    o.step()
            torch.testing.assert_close(ours[0][1], theirs[0][1], rtol=1e-6, atol=1e-8, equal_nan=True)
            v = opt.state[ours[0][1]]["exp_avg_sq"]
            torch.testing.assert_close(v, ref.state[theirs[0][1]]["exp_avg_sq"], rtol=1e-6, atol=0, equal_nan=True)
            if fill == 0.0:
                self.assertFalse(torch.isnan(ours[0][1]).any())


class Threads(OptimCase):
    def test_another_python_thread_runs_during_a_step(self):
        """A11: the GIL is free while the library works."""
        import threading
        import time

        named = weights({f"p{i}": (1 << 20,) for i in range(24)})
        opt = self.adamw(named, ram=32 << 20, block=1 << 20, threads=1)
        set_gradients(named, 1)
        opt.step()
        ticks, stop, longest = 0, threading.Event(), [0.0]

        def tick():
            nonlocal ticks
            last = time.monotonic()
            while not stop.is_set():
                ticks += 1
                now = time.monotonic()
                longest[0] = max(longest[0], now - last)
                last = now

        t = threading.Thread(target=tick)
        t.start()
        began = time.monotonic()
        for _ in range(3):
            opt.step()
        took = time.monotonic() - began
        stop.set()
        t.join()
        self.assertGreater(ticks, 100)
        self.assertLess(longest[0], max(0.5 * took, 0.1), f"{ticks} ticks in {took:.3f} s")

    def test_a_data_loader_that_forks(self):
        p = nn.Parameter(torch.ones(1000))
        opt = self.adamw([("p", p)])
        data = torch.utils.data.TensorDataset(torch.arange(64.0))
        for _epoch in range(2):
            for (x,) in torch.utils.data.DataLoader(data, batch_size=16, num_workers=2):
                p.grad = torch.full((1000,), x.mean().item())
                opt.step()
        self.assertEqual(opt.last_step, 8)
        pid = os.fork()
        if pid == 0:
            try:
                opt.step()
                os._exit(1)
            except momentfs.MomentError as e:
                os._exit(0 if "forked" in str(e) else 2)
        self.assertEqual(os.waitpid(pid, 0)[1], 0)
        opt.step()


if __name__ == "__main__":
    support.main()
