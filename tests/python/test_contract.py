#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What code that was written for torch.optim relies on: lifetime, sharing, words, hooks, state dicts. (torch_suite.py
runs torch's own tests, where there is a checkout of them.)"""

import collections
import gc
import io
import os
import random
import signal
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
import warnings
import weakref

import support
import numpy as np
import torch
from support import Case, set_gradients, weights

import momentfs
import momentfs.torch
from momentfs.signals import whole
from momentfs.torch import Adam, AdamW

SHAPES = {"w": (40, 30), "b": (7,)}
SMALL = dict(ram=2 << 20, block=65536)


class Lifetime(Case):
    def setUp(self):
        super().setUp()
        gc.disable()  # nothing here may need the collector
        self.addCleanup(gc.enable)

    def train(self, steps=2, **kw):
        named = weights(SHAPES)
        opt = AdamW(named, backing=self.backing(), **SMALL, **kw)
        for step in range(1, steps + 1):
            set_gradients(named, step)
            opt.step()
        opt.commit()
        return weakref.ref(opt)

    def test_a_function_that_ends_frees_its_optimizer(self):
        self.assertIsNone(self.train()())
        self.assertIsNone(self.train(resume=True)())

    def test_a_warning_that_is_an_error_leaves_nothing_open(self):
        if os.statvfs("/dev/shm").f_bavail < 1 << 10:
            self.skipTest("no room in /dev/shm")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as in_ram, warnings.catch_warnings():
            warnings.simplefilter("error")
            with self.assertRaisesRegex(UserWarning, "in RAM"):
                momentfs.Session(temp_dir=in_ram, **SMALL)
            self.assertEqual([name for name in os.listdir(in_ram) if name.startswith("momentfs-tmp")], [])

    def test_it_leaves_nothing_to_the_collector(self):
        opt = AdamW(weights(SHAPES), **SMALL)
        gc.collect()
        del opt
        self.assertEqual(gc.collect(), 0)

    def test_an_exception_frees_it(self):
        try:
            named = weights(SHAPES)
            opt = AdamW(named, backing=self.backing(), **SMALL)
            set_gradients(named, 1)
            opt.step()
            del opt
            raise RuntimeError("the training loop failed")
        except RuntimeError:
            pass
        self.assertIsNone(self.train(fresh=True)())

    def test_an_interrupt_frees_it(self):
        def stop(*_):
            raise KeyboardInterrupt

        def interrupted():
            named = weights(SHAPES)
            opt = AdamW(named, backing=self.backing(), **SMALL, resume="partial")
            set_gradients(named, 1)
            opt._check_parameter = lambda *_: signal.raise_signal(signal.SIGALRM)  # in the midst of what is done as a whole
            refs.append(weakref.ref(opt))
            opt.step()

        self.addCleanup(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, stop))
        refs = []
        for _ in range(2):
            try:  # assertRaises() would clear the frames
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    interrupted()
                self.fail("not interrupted")
            except KeyboardInterrupt:
                pass
            self.assertIsNone(refs.pop()())

    def test_state_that_outlives_its_optimizer_says_so(self):
        opt = AdamW(weights(SHAPES), **SMALL)
        state = opt.state
        del opt
        with self.assertRaisesRegex(ReferenceError, "gone"):
            len(state)

    def test_memory_in_proportion_to_the_state(self):
        code = (
            "import torch, momentfs.torch as m\n"
            "def rss(): return int(next(l for l in open('/proc/self/status') if l.startswith('VmRSS')).split()[1]) // 1024\n"
            "def made(n): return [m.AdamW([('w', torch.nn.Parameter(torch.zeros(1000)))]) for _ in range(n)]\n"
            "first = made(1)\n"
            "before = rss(); more = made(20); print(rss() - before)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "MOMENT_QUIET": "1"})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertLess(int(done.stdout), 20 * 12, "MiB for 20 optimizers of 8 KB of state each")


class Sharing(Case):
    def pair(self, **kw):
        one, two = weights({"one." + k: s for k, s in SHAPES.items()}), weights({"two." + k: s for k, s in SHAPES.items()})
        return (one, self.keep(AdamW(one, backing=self.backing(), **SMALL, **kw)),
                two, self.keep(Adam(two, lr=1e-2, backing=self.backing(), **SMALL, **kw)))

    def test_two_optimizers_of_a_process_share_a_backing(self):
        one, a, two, b = self.pair()
        self.assertIs(a._session, b._session)
        for step in range(1, 4):
            for named, opt in ((one, a), (two, b)):
                set_gradients(named, step)
                opt.step()
        a.commit()
        want = {n: (o.state[p]["exp_avg"].clone(), p.detach().clone()) for named, o in ((one, a), (two, b)) for n, p in named}
        a.close()
        set_gradients(two, 4)  # the other one goes on
        b.step()
        b.rollback()
        b.close()
        one, a, two, b = self.pair(resume=True)
        for named, opt in ((one, a), (two, b)):
            for n, p in named:
                self.assertBits(opt.state[p]["exp_avg"], want[n][0], n)
                self.assertEqual(int(opt.state[p]["step"]), 3)

    def test_they_number_their_steps_together(self):
        one, a, two, b = self.pair()
        for step in (1, 2):
            for named, opt in ((one, a), (two, b)):
                set_gradients(named, step)
                opt.step()
        self.assertEqual((a.last_step, b.last_step), (4, 4))
        set_gradients(one, 3)
        a.step()  # between the two: another state than of step 4, and another number
        b.commit()
        self.assertEqual((a.last_step, a.committed_step, b.committed_step), (5, 5, 5))
        set_gradients(two, 3)
        b.step()
        a.rollback()
        self.assertEqual((a.last_step, b.last_step), (5, 5))
        a.close()
        self.assertEqual(a.last_step, 5)
        b.close()
        with self.assertRaisesRegex(ValueError, "of step 5, not of step 6"):
            self.pair(resume=6)
        one, a, two, b = self.pair(resume=5)
        set_gradients(one, 4)
        a.step()
        with self.assertRaisesRegex(ValueError, "of step 6, not of step 5"):
            AdamW(weights({"x": (3,)}), backing=self.backing(), **SMALL, resume=5)
        set_gradients(two, 4)
        b.step()  # who was refused has not ended the session of the others
        self.assertEqual(a.last_step, 7)

    def test_a_second_one_that_wants_it_otherwise_is_told_what_is_there(self):
        one, a, two, b = self.pair()
        with self.assertRaisesRegex(ValueError, "in this process.*neither resume nor fresh.*close"):
            AdamW(weights({"x": (3,)}), backing=self.backing(), fresh=True)
        with self.assertRaisesRegex(momentfs.MomentError, "in this process already"):
            momentfs.Session(backing=self.backing(), data="embedded")
        del one, a, two, b


class Resuming(Case):
    def test_resume_names_the_step(self):
        def train(**kw):
            opt = self.keep(AdamW(named, backing=self.backing(), **SMALL, **kw))
            for step in (1, 2, 3):
                set_gradients(named, step)
                opt.step()
            opt.close()
            return opt

        named = weights(SHAPES)
        train()
        with self.assertRaisesRegex(ValueError, "of step 3, not of step 2"):
            AdamW(named, backing=self.backing(), **SMALL, resume=2)
        train(resume=3)
        with self.assertRaisesRegex(ValueError, "resume='yes'"):
            AdamW(named, backing=self.backing(), resume="yes")


class Words(Case):
    def test_texts_of_torchs_own_exceptions(self):
        p = torch.nn.Parameter(torch.zeros(3))
        for error, text, make in (
            (ValueError, "Invalid learning rate: -1", lambda c: c([("p", p)], lr=-1)),
            (ValueError, "Invalid epsilon value: -1", lambda c: c([("p", p)], eps=-1)),
            (ValueError, "Invalid beta parameter at index 0: 1.0", lambda c: c([("p", p)], betas=(1.0, 0.9))),
            (ValueError, "Invalid beta parameter at index 1: -0.5", lambda c: c([("p", p)], betas=(0.5, -0.5))),
            (ValueError, "Invalid weight_decay value: -1", lambda c: c([("p", p)], weight_decay=-1)),
            (ValueError, "optimizer got an empty parameter list", lambda c: c([])),
            (TypeError, "params argument given to the optimizer should be an iterable of Tensors or dicts", lambda c: c(p)),
            (TypeError, "optimizer can only optimize Tensors", lambda c: c([3])),
            (ValueError, "some parameters appear in more than one parameter group",
             lambda c: c([{"params": [("p", p)]}, {"params": [("p", p)]}])),
        ):
            for kind in (Adam, AdamW):
                with self.assertRaisesRegex(error, text):
                    make(kind)

    def test_duplicates_are_warned_about(self):
        p = torch.nn.Parameter(torch.zeros(3))
        with self.assertWarnsRegex(UserWarning, "a parameter group with duplicate parameters"):
            self.keep(AdamW([p, p], **SMALL, warn_unnamed=False))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.keep(AdamW([("a", p), ("b", p)], **SMALL))  # a tied one, under each of its names

    def test_a_tensor_put_into_a_group_is_named_by_what_it_is(self):
        named = weights(SHAPES)
        opt = self.keep(AdamW(named, **SMALL))
        opt.param_groups[0]["params"][0] = torch.nn.Parameter(torch.zeros(5, 5))
        opt.param_groups[0]["params"][0].grad = torch.zeros(5, 5)
        with self.assertRaisesRegex(ValueError, r"shape \(5, 5\).*add_param_group"):
            opt.step()

    def test_in_the_place_of_torchs_own_class_decay_stays_decoupled(self):
        self.addCleanup(setattr, torch.optim, "AdamW", torch.optim.AdamW)
        torch.optim.AdamW = AdamW
        p = torch.nn.Parameter(torch.ones(4))
        opt = self.keep(torch.optim.AdamW([("p", p)], lr=0.1, weight_decay=0.5, **SMALL))
        p.grad = torch.zeros(4)
        opt.step()
        self.assertTrue(torch.equal(p.detach(), torch.full((4,), 1 - 0.1 * 0.5)))


class Steps(Case):
    def test_what_a_parameter_is_now_is_compared_with_what_was_registered(self):
        for change in (lambda p: p.data.new_zeros(3), lambda p: p.data.new_zeros(900), lambda p: p.data.bfloat16(),
                       lambda p: p.data.reshape(-1)):
            named = weights(SHAPES)
            opt = self.keep(AdamW(named, **SMALL))
            set_gradients(named, 1)
            opt.step()
            (name, p), before = named[0], opt.state[named[0][1]]["exp_avg"].clone()
            p.data = change(p)
            p.grad = torch.zeros_like(p)
            other = named[1][1].detach().clone()
            with self.assertRaisesRegex(ValueError, rf"parameter {name} was registered as torch.float32, shape \(40, 30\)"):
                opt.step()
            self.assertTrue(torch.equal(named[1][1].detach(), other), "nothing is done by half")
            self.assertEqual(opt.last_step, 1)
            p.data = torch.zeros(SHAPES["w"])
            self.assertBits(opt.state[p]["exp_avg"], before)
            opt.close()

    def test_bad_arguments_are_refused_before_the_step(self):
        named = weights(SHAPES)
        opt = self.keep(AdamW(named, **SMALL))
        for step in (1, 2):
            set_gradients(named, step)
            opt.step()
        group = opt.param_groups[0]
        for key, bad, text in (("amsgrad", True, "amsgrad was switched on for parameter"), ("lr", -1.0, "Invalid learning rate"),
                               ("lr", float("nan"), "Invalid learning rate"), ("betas", (0.9, 1.0), "Invalid beta parameter"),
                               ("eps", 1e-40, "Invalid epsilon"), ("weight_decay", -1.0, "Invalid weight_decay")):
            good, group[key] = group[key], bad
            with self.assertRaisesRegex(ValueError, text):
                opt.step()
            group[key] = good
        opt.step()
        self.assertEqual(opt.last_step, 3)

    def test_a_graph_made_before_a_step_does_not_go_backward_after_it(self):
        for p in (torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.tensor(2.0)),
                  torch.nn.Parameter(torch.ones(4, 6).t())):
            opt = self.keep(AdamW([("p", p)], **SMALL))
            loss = (p * p).sum()
            p.grad = torch.ones_like(p)
            opt.step()
            with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                loss.backward()
            opt.close()

    def test_an_interrupt_does_not_part_weights_and_state(self):
        p = torch.nn.Parameter(torch.zeros(50, 30).t())  # not contiguous: copied back after the step
        opt = self.keep(AdamW([("w", p)], lr=1e-3, weight_decay=0.0, **SMALL))
        p.grad = torch.ones_like(p)

        def stop(*_):
            raise KeyboardInterrupt

        old = signal.signal(signal.SIGALRM, stop)
        self.addCleanup(signal.signal, signal.SIGALRM, old)
        interrupted = 0
        for n in range(150):
            weight, count = p.detach()[0, 0].item(), opt.last_step or 0
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(5e-5, 1e-3))
                opt.step()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            moved = p.detach()[0, 0].item() != weight
            self.assertEqual(moved, (opt.last_step or 0) > count)
        self.assertGreater(interrupted, 0)
        if opt.last_step:
            self.assertEqual(int(opt.state[p]["step"]), opt.last_step)

    def test_an_interrupt_leaves_no_change_of_state_half_made(self):
        a, b = torch.nn.Parameter(torch.randn(50, 30).bfloat16()), torch.nn.Parameter(torch.randn(70))
        opt = self.keep(AdamW([("a", a), ("b", b)], **SMALL))

        def stop(*_):
            raise KeyboardInterrupt

        def step():  # with masters to be renewed before it
            a.data.mul_(1.01)
            opt.step()

        def add():
            n = len(opt.param_groups)
            opt.add_param_group({"params": [(f"more {n}", torch.nn.Parameter(torch.randn(20 + n).bfloat16()))]})

        def edit():
            opt.state[b]["exp_avg"] = torch.randn(70)

        def begin_anew():
            opt.state[b] = {}

        def load():
            opt.load_state_dict(opt.state_dict())

        def gradients():
            for p in (p for g in opt.param_groups for p in g["params"]):
                p.grad = torch.randn_like(p)

        gradients()
        opt.step()
        old = signal.signal(signal.SIGALRM, stop)
        self.addCleanup(signal.signal, signal.SIGALRM, old)
        interrupted = 0
        for n in range(200):
            gradients()
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1e-3))
                (step, edit, begin_anew, load, add if n < 60 else step)[n % 5]()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            gradients()
            opt.step()  # neither torn, nor a step left open, nor a parameter half known
        self.assertGreater(interrupted, 0)
        self.assertEqual(opt.last_step, opt._session.info()["step"])

    def test_an_interrupt_in_a_callback_is_not_lost(self):
        def stop(*_):
            raise KeyboardInterrupt

        def decode(raw):
            signal.raise_signal(signal.SIGALRM)
            return raw.decode()

        named = weights(SHAPES)
        self.keep(AdamW(named, backing=self.backing(), **SMALL)).close()
        session = self.keep(momentfs.Session(backing=self.backing(), resume=True))
        self.addCleanup(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, stop))
        self.addCleanup(setattr, momentfs._lib, "decode", momentfs._lib.decode)
        momentfs._lib.decode = decode
        for call in (session.list, lambda: session.compare([])):
            with self.assertRaises(KeyboardInterrupt):
                call()

    def test_handlers_that_raise_while_they_are_put_back(self):
        called = []

        def raising(number, _frame):
            called.append(number)
            raise KeyError(number)

        numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
        old = {n: signal.signal(n, raising) for n in numbers}
        self.addCleanup(lambda: [signal.signal(n, h) for n, h in old.items()])
        with self.assertRaises(KeyError):
            with whole(), whole():
                for n in numbers:
                    signal.raise_signal(n)
                self.assertEqual(called, [])
        self.assertEqual(sorted(called), sorted(numbers))
        self.assertEqual([signal.getsignal(n) for n in numbers], [raising] * 3)

    def test_storage_that_was_made_smaller_is_noticed(self):
        for what in ("data", "grad"):
            named = weights(SHAPES)
            opt = self.keep(AdamW(named, **SMALL))
            set_gradients(named, 1)
            opt.step()
            name, p = named[0]
            before, other = opt.state[p]["exp_avg"].clone(), named[1][1].detach().clone()
            t = getattr(p, what)
            storage = t.untyped_storage() if hasattr(t, "untyped_storage") else t.storage()
            for size in (40, 0):
                storage.resize_(size)
                with self.assertRaisesRegex((ValueError, RuntimeError), f"parameter {name}: the storage of its"):
                    opt.step()
                self.assertTrue(torch.equal(named[1][1].detach(), other))
                self.assertBits(opt.state[p]["exp_avg"], before)
            self.assertEqual(opt.last_step, 1)
            opt.close()

    def test_state_has_the_registered_shape_whatever_the_data_are_now(self):
        p = torch.nn.Parameter(torch.randn(40, 30))
        opt = self.keep(AdamW([("w", p)], **SMALL))
        p.grad = torch.randn(40, 30)
        opt.step()
        before = {k: v.clone() for k, v in opt.state[p].items()}
        for data in (torch.zeros(10, 30), torch.zeros(90, 30)):
            whole_data, p.data = p.data, data
            self.assertEqual(opt.state[p]["exp_avg"].shape, (40, 30))
            for key, value in opt.state_dict()["state"][0].items():
                self.assertBits(value, before[key])
            with self.assertRaisesRegex(ValueError, r"not \(40, 30\), as registered"):
                opt.state[p]["exp_avg"] = torch.zeros_like(data)
            opt.load_state_dict(opt.state_dict())
            p.data = whole_data
            for key in before:
                self.assertBits(opt.state[p][key], before[key])
            p.data = data
            opt.state[p] = {}
            p.data = whole_data
            opt.state[p]["step"] = 1
            self.assertFalse(any(opt.state[p][key].any() for key in ("exp_avg", "exp_avg_sq")))
            opt.state[p] = before

    def test_state_is_set_as_a_whole_or_not_at_all(self):
        named = weights(SHAPES)
        opt = self.keep(AdamW(named, **SMALL))
        set_gradients(named, 1)
        opt.step()
        a, b = (p for _, p in named)
        before = {p: {k: v.clone() for k, v in opt.state[p].items()} for p in (a, b)}
        good = {"step": torch.tensor(9.0), "exp_avg": torch.ones(SHAPES["w"]), "exp_avg_sq": torch.ones(SHAPES["w"])}
        bad = {**good, "exp_avg_sq": torch.ones(3)}

        def replace(value):
            opt.state = value

        for change in (lambda: opt.state.__setitem__(a, bad), lambda: opt.state.__setitem__(a, {**good, "other": 1}),
                       lambda: opt.state.__setitem__(a, {**good, "exp_avg": [1.0]}), lambda: replace({a: good, b: bad}),
                       lambda: replace({b: bad}), lambda: opt.state[a].__setitem__("step", 2**64 - 1),
                       lambda: opt.state[a].__setitem__("step", 1e30)):
            with self.assertRaises((ValueError, KeyError)):
                change()
            for p in (a, b):
                for key in before[p]:
                    self.assertBits(opt.state[p][key], before[p][key])
        opt.step()
        self.assertEqual(opt.last_step, 2)


class Parting(Case):
    """Nothing that comes between a call of the library and the next line of Python parts what the two know."""

    def test_memory_that_is_lacking_after_a_step_does_not_part_weights_and_state(self):
        named = [(n, torch.nn.Parameter(torch.zeros(6, 5).t())) for n in "ab"]
        other = [(n, torch.nn.Parameter(torch.zeros(6, 5).t())) for n in "ab"]
        opt, ref = self.keep(AdamW(named, lr=0.1, **SMALL)), self.keep(AdamW(other, lr=0.1, **SMALL))
        copy, fails = torch.Tensor.copy_, []

        def copy_(self, *args):
            if fails:
                fails.pop()
                raise MemoryError("none left")
            return copy(self, *args)

        def step(lacking):
            for o, n in ((ref, other), (opt, named)):
                for _, p in n:
                    p.grad = torch.ones_like(p)
                fails[:] = [1] * lacking * (o is opt)
                o.step()

        with unittest.mock.patch.object(torch.Tensor, "copy_", copy_):
            step(0)
            step(1)
            for (n, p), (_, q) in zip(named, other):
                self.assertBits(p, q, n)
            with self.assertRaisesRegex(RuntimeError, "step 3 is made.*weights of a, b could not.*MemoryError.*kept"):
                step(6)
            opt.commit()
            for (n, p), (_, q) in zip(named, other):
                self.assertBits(p, q, n)
            with self.assertRaisesRegex(RuntimeError, "weights of a, b"):
                step(6)
            named[0][1].data.fill_(7)  # .data has no counter; so by an operation that has one
            with torch.no_grad():
                named[0][1].fill_(7)
            opt.state_dict()
            self.assertEqual(named[0][1][0, 0].item(), 7, "weights that were set since stay")
            self.assertBits(named[1][1], other[1][1])

    def test_a_warning_that_is_an_error_does_not_either(self):
        p, q = (torch.nn.Parameter(torch.zeros(6, 5).t()) for _ in range(2))
        opt, ref = self.keep(AdamW([("w", p)], **SMALL)), self.keep(AdamW([("w", q)], **SMALL))
        for x, o in ((q, ref), (p, opt)):
            x.grad = torch.ones_like(x)
            if o is opt:
                opt._session._messages.append((momentfs._lib.WARNING, "something to know"))
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                try:
                    o.step()
                except UserWarning as e:
                    self.assertIn("something to know", str(e))
                    self.assertIs(o, opt)
        self.assertBits(p, q)
        self.assertEqual((opt.last_step, int(opt.state[p]["step"])), (1, 1))

    def test_the_tables_of_parameters_without_names_are_made_late_if_need_be(self):
        one, two = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(5))
        with AdamW([("a", one)], backing=self.backing(), **SMALL) as opt:
            one.grad = torch.ones_like(one)
            opt.step()
        opt = self.keep(AdamW([("a", one)], backing=self.backing(), **SMALL, resume=True, warn_unnamed=False))
        session, register = opt._session, opt._session.register

        def once(entries):
            session.register = lambda entries: (_ for _ in ()).throw(MemoryError("none left"))
            return register(entries)

        session.register = once
        with self.assertRaises(MemoryError):
            opt.add_param_group({"params": [two]})
        session.register = register
        two.grad = torch.ones_like(two)
        opt.step()
        self.assertEqual(int(opt.state[two]["step"]), 1)
        self.assertIsNotNone(opt._samples._table(0))

    def test_a_session_that_ends_by_itself_says_what_its_commit_met(self):
        told = io.StringIO()
        with unittest.mock.patch.object(momentfs.session.lib, "moment_close", lambda handle: -28), \
                unittest.mock.patch.object(momentfs.session.lib, "moment_error", lambda: b"the last commit failed: ENOSPC"), \
                unittest.mock.patch.object(sys, "stderr", told):
            momentfs.session._close(None, os.getpid())
        self.assertIn("without close(): the last commit failed: ENOSPC", told.getvalue())

    def test_what_is_registered_is_known_whatever_comes_next(self):
        one, two = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(5))
        for names in (("a", "b"), (None, None)):  # (those without names have a table besides)
            def given(i, p):
                return [(names[i], p)] if names[i] else [p]

            opt = self.keep(AdamW(given(0, one), backing=self.backing(str(names[0])), **SMALL, warn_unnamed=False))
            session, register = opt._session, opt._session.register

            def warned(entries):
                session._messages.append((momentfs._lib.WARNING, "something to know"))
                return register(entries)

            with warnings.catch_warnings(), self.assertRaises(UserWarning), unittest.mock.patch.object(session, "register", warned):
                warnings.simplefilter("error")
                opt.add_param_group({"params": given(1, two)})
            self.assertIn(two, opt.state)
            for _ in range(2):
                for p in (one, two):
                    p.grad = torch.ones_like(p)
                opt.step()
            self.assertEqual([int(opt.state[p]["step"]) for p in (one, two)], [2, 2])
            opt.close()


class Editing(Case):
    """An edit of the state takes effect, as torch's does, or it raises."""

    def trained(self, make):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(8, 4))
        opt = make(p)
        for _ in range(3):
            p.grad = torch.ones(8, 4)
            opt.step()
        return p, opt

    def both(self, edit):
        out = []
        for make in (lambda p: self.keep(AdamW([("w", p)], lr=0.1, **SMALL)), lambda p: torch.optim.AdamW([p], lr=0.1, foreach=False)):
            p, opt = self.trained(make)
            edit(opt, p)
            p.grad = -torch.ones(8, 4)
            opt.step()
            out.append(p.detach())
        torch.testing.assert_close(*out, rtol=1e-6, atol=1e-7)

    def test_what_takes_effect(self):
        zero = lambda: {"step": torch.tensor(0.0), "exp_avg": torch.zeros(8, 4), "exp_avg_sq": torch.zeros(8, 4)}
        self.both(lambda o, p: o.state.__setitem__(p, {}))
        self.both(lambda o, p: o.state.__setitem__(p, zero()))
        self.both(lambda o, p: setattr(o, "state", collections.defaultdict(dict)))
        self.both(lambda o, p: o.state[p].__setitem__("exp_avg", o.state[p]["exp_avg"] * 0.5))
        self.both(lambda o, p: o.state[p].__setitem__("step", torch.tensor(7.0)))
        self.both(lambda o, p: o.state.__setitem__(p, o.state[p]))
        self.both(lambda o, p: o.state.__delitem__(p))
        self.both(lambda o, p: o.state[p].clear())
        self.both(lambda o, p: o.state.clear())
        self.both(lambda o, p: o.state.__setitem__(p, o.state.pop(p)))

        def popped(o, p):
            was = o.state.pop(p)
            self.assertEqual((set(was), float(was["step"])), ({"step", "exp_avg", "exp_avg_sq"}, 3.0))
            self.assertFalse(o.state.get(p))
            self.assertIs(o.state.pop(torch.zeros(1), None), None)
            with self.assertRaises(KeyError):
                del o.state[torch.zeros(1)]

        self.both(popped)

    def test_what_raises(self):
        p, opt = self.trained(lambda p: self.keep(AdamW([("w", p)], lr=0.1, **SMALL)))
        moment = lambda: opt.state[p]["exp_avg"]
        before = moment().clone()
        storage = lambda t: t.untyped_storage() if hasattr(t, "untyped_storage") else t._storage()
        for edit in (
            lambda: moment().zero_(), lambda: moment().mul_(2), lambda: moment().__setitem__(slice(2, 4), 0.0),
            lambda: moment()[2:4].zero_(), lambda: moment()[1].fill_(3), lambda: moment().data.copy_(torch.zeros(8, 4)),
            lambda: moment().detach().add_(1), lambda: moment().view(-1).sub_(1), lambda: moment().t().__imul__(2),
            lambda: torch.add(before, 1, out=moment()), lambda: moment().copy_(before), lambda: opt.state[p]["step"].zero_(),
            lambda: opt.state[p]["step"].add_(1), lambda: moment().numpy().__setitem__(0, 1),
            lambda: [row.zero_() for row in moment()], lambda: [part.zero_() for part in moment().chunk(2)],
            lambda: moment().unbind()[0].zero_(), lambda: torch._foreach_mul_([moment()], 0.0),
            lambda: torch.narrow(input=moment(), dim=0, start=0, length=2).zero_(),
            lambda: torch.max(before, 0, out=(moment()[0], torch.zeros(4, dtype=torch.long))),
            lambda: np.asarray(moment()).__setitem__(0, 1), lambda: torch.nn.init.zeros_(moment()),
            lambda: opt.state[p].pop("exp_avg"), lambda: opt.state.popitem(),
            lambda: torch.utils.dlpack.from_dlpack(moment()).zero_(), lambda: np.from_dlpack(moment()), lambda: moment().storage(),
            lambda: moment()[1].__dlpack__(), lambda: storage(moment()).fill_(0), lambda: storage(moment().data),  lambda: opt.state.__setitem__(p, {"step": 1}),
            lambda: setattr(opt, "state", {torch.zeros(2): {}}),
        ):
            with self.assertRaises((RuntimeError, TypeError, ValueError)):
                edit()
        self.assertBits(moment().clone(), before)
        self.assertIs(type(moment() + 1), torch.Tensor)
        self.assertIs(type(opt.state_dict()["state"][0]["exp_avg"]), torch.Tensor)
        f = io.BytesIO()
        torch.save(moment(), f)
        f.seek(0)
        self.assertIs(type(torch.load(f)), torch.Tensor)

    def test_any_16_bit_weight_that_is_written_is_the_new_truth(self):
        for dtype in (torch.bfloat16, torch.float16):
            p = torch.nn.Parameter(torch.ones(100, 97, dtype=dtype).t())  # not contiguous either
            opt = self.keep(AdamW([("w", p)], lr=0.0, **SMALL))
            master = lambda: opt.state[p]["master"]
            p.grad = torch.ones_like(p)
            opt.step()
            self.assertBits(master().clone(), torch.ones(97, 100), "filled by the first step")
            opt.state[p]["master"] = master() + 2**-14  # still 1 in 16 bits
            opt.step()
            for at, value in (((3, 5), 0.5), ((96, 99), -2.0), ((50, 0), 0.0)):
                p.data[at] = value  # torch's version counter does not see it
                want = master().clone()
                want[at] = value
                opt.step()
                self.assertBits(master().clone(), want, f"{at}: that one and no other")
                self.assertEqual(p[at].item(), value)
            p.data.copy_(p.data.float().clamp(-1, 0.25))
            opt.step()
            self.assertEqual((p.max().item(), master().max().item(), master().min().item()), (0.25, 0.25, -1.0))
            opt.state[p]["master"] = master() * 2
            self.assertEqual((p.max().item(), p.min().item()), (0.5, -2.0), "a master that is set sets the weights")
            opt.step()
            self.assertEqual(master().max().item(), 0.5)
            opt.close()

    def test_loading_what_is_there_keeps_the_step(self):
        named = weights(SHAPES)
        opt = self.keep(AdamW(named, backing=self.backing(), **SMALL))
        for step in range(1, 7):
            set_gradients(named, step)
            if step % 2:
                named[0][1].grad = None
            opt.step()
        named[1][1].grad = None
        opt.load_state_dict(opt.state_dict())
        opt.commit()
        self.assertEqual((opt.last_step, opt.committed_step), (6, 6))
        for p in (q for _, q in named):
            p.grad = None
        saved = opt.state_dict()
        for entry in saved["state"].values():
            entry["step"] = torch.tensor(2.0)
        del saved["last_step"]  # as torch's own
        opt.load_state_dict(saved)
        self.assertEqual(opt.last_step, 2)

    def test_a_dict_that_names_no_step_is_of_this_one_also_when_a_group_is_gone(self):
        named = weights(SHAPES)
        opt = self.keep(AdamW([{"params": named[:1]}, {"params": named[1:]}], **SMALL))
        for step in range(1, 4):
            set_gradients(named[1:] if step > 1 else named, step)
            opt.step()
            opt.zero_grad(set_to_none=True)
        opt.param_groups.pop()
        saved = opt.state_dict()
        del saved["last_step"]
        opt.load_state_dict(saved)
        self.assertEqual((opt.last_step, int(opt.state[named[0][1]]["step"])), (3, 1))

    def test_an_older_state_dict_goes_on_from_its_step(self):
        named = weights(SHAPES)
        opt = self.keep(AdamW(named, backing=self.backing(), **SMALL))

        def train(first, last):
            for step in range(first, last):
                set_gradients(named, step)
                named[step % 2][1].grad = None  # each is updated in half of the steps
                opt.step()

        empty = opt.state_dict()
        train(1, 6)
        saved = opt.state_dict()
        ours = [[p.detach().clone() for _, p in named]]
        train(6, 11)
        opt.commit()
        opt.load_state_dict(saved)
        for (_, p), w in zip(named, ours[0]):
            p.data.copy_(w)
        self.assertEqual((opt.last_step, opt.committed_step), (5, 10), "what is stored is still of step 10")
        train(6, 8)
        opt.commit()
        self.assertEqual((opt.last_step, opt.committed_step), (7, 7))
        theirs = torch.optim.AdamW([p for _, p in named])
        theirs.load_state_dict(saved)  # torch's own takes it
        opt.close()
        with self.assertRaisesRegex(ValueError, "of step 7, not of step 10"):
            AdamW(named, backing=self.backing(), **SMALL, resume=10)
        opt = self.keep(AdamW(named, backing=self.backing(), **SMALL, resume=7))
        opt.load_state_dict(empty)
        self.assertIsNone(opt.last_step)
        train(1, 2)
        self.assertEqual(opt.last_step, 1)

    def test_a_closed_one_says_so(self):
        opt = self.keep(AdamW(weights(SHAPES), **SMALL))
        opt.close()
        opt.close()
        for use in (opt.step, opt.commit, opt.rollback, opt.info, opt.state_dict, lambda: opt.committed_step):
            with self.assertRaisesRegex(ValueError, "the optimizer is closed"):
                use()
        self.assertIsNone(opt.last_step)


class StateDicts(Case):
    def test_a_parameter_in_two_groups_keeps_one_number(self):
        named = weights(SHAPES)
        opt = self.keep(AdamW(named, **SMALL))
        opt.param_groups.append(opt.param_groups[0])
        groups = opt.state_dict()["param_groups"]
        self.assertEqual([g["params"] for g in groups], [[0, 1], [0, 1]])

    def test_loads_with_weights_only(self):
        named = weights(SHAPES)
        opt = self.keep(AdamW(named, **SMALL))
        set_gradients(named, 1)
        opt.step()
        f = io.BytesIO()
        torch.save(opt.state_dict(), f)
        f.seek(0)
        try:
            saved = torch.load(f, weights_only=True)
        except Exception as e:
            if torch.__version__ >= "2" or "Unsupported operand" not in str(e):
                raise
            return  # torch 1.13 cannot load its own optimizers' state so
        self.assertEqual(set(saved["state"]), {0, 1})
        opt.load_state_dict(saved)

    def test_an_empty_entry_is_a_parameter_without_updates(self):
        named, theirs = weights(SHAPES), weights(SHAPES)
        opt = self.keep(AdamW(named, **SMALL))
        ref = torch.optim.AdamW([p for _, p in theirs], foreach=False)
        for o, ps in ((opt, named), (ref, theirs)):
            set_gradients(ps, 1)
            o.step()
        ref.state[theirs[0][1]].clear()
        opt.load_state_dict(ref.state_dict())
        self.assertEqual([len(opt.state[p]) for _, p in named], [0, 3])
        set_gradients(named, 2)
        opt.step()
        self.assertEqual([int(opt.state[p]["step"]) for _, p in named], [1, 2])

    def test_a_groups_keys_are_those_of_the_dict(self):
        named = weights(SHAPES)
        got = []
        for opt in (self.keep(AdamW(named, **SMALL)), torch.optim.AdamW([p for _, p in named], foreach=False)):
            saved = opt.state_dict()
            torch.optim.lr_scheduler.StepLR(opt, 1)
            opt.param_groups[0]["more"] = 1
            opt.load_state_dict(saved)
            got.append(sorted(opt.param_groups[0]))
        self.assertEqual(*got)

    def test_names_only_where_they_were_given(self):
        ps = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(4))]
        plain = self.keep(AdamW(ps, **SMALL, warn_unnamed=False))
        self.assertNotIn("param_names", plain.state_dict()["param_groups"][0])
        with self.assertRaisesRegex(ValueError, "with/without names"):
            AdamW([("a", ps[0]), ps[1]], **SMALL)

    def test_hooks_run(self):
        if not hasattr(torch.optim.Optimizer, "register_state_dict_pre_hook"):
            return  # they came with torch 2.1
        named = weights(SHAPES)
        opt = self.keep(AdamW(named, **SMALL))
        ran = []
        opt.register_state_dict_pre_hook(lambda o: ran.append("pre"))
        opt.register_state_dict_post_hook(lambda o, d: {**d, "extra": 1})
        opt.register_load_state_dict_pre_hook(lambda o, d: ran.append("load") or {k: v for k, v in d.items() if k != "extra"})
        opt.register_load_state_dict_post_hook(lambda o: ran.append("loaded"))
        saved = opt.state_dict()
        self.assertEqual(saved["extra"], 1)
        opt.load_state_dict(saved)
        self.assertEqual(ran, ["pre", "load", "loaded"])


if __name__ == "__main__":
    support.main()
