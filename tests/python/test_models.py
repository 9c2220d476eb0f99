#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The models of tools/quickstart are the real ones: names, shapes and order as in tests/data, heads tied,
positions and causality right, and two processes' worth of training from one seed the same."""

import os
import sys
import unittest

TOP = os.environ.get("abs_srcdir") or os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(TOP, "tools", "quickstart.d"))

try:
    import torch
except ImportError:
    print("SKIP: no Python module torch (tools/setup installs it)")
    sys.exit(1 if os.environ.get("CI") == "true" else 77)

import models  # noqa: E402
import train  # noqa: E402


def listed(name):
    with open(os.path.join(TOP, "tests", "data", name + ".tsv")) as f:
        return [tuple(line.rstrip("\n").split("\t")) for line in f]


def small_qwen():
    return models.Qwen2(2, 64, 4, 2, 96, 65)


class Models(unittest.TestCase):
    def test_names_shapes_and_order_are_those_of_the_published_models(self):
        for name, recipe in models.MODELS.items():
            with self.subTest(model=name):
                model = recipe["make"]()
                got = [(n, "x".join(map(str, p.shape)), str(p.numel())) for n, p in model.named_parameters()]
                self.assertEqual(got, listed(name))

    def test_loss_starts_near_that_of_guessing(self):
        torch.manual_seed(0)
        for model in (models.MODELS["nanogpt-char"]["make"](), small_qwen()):
            tokens = torch.randint(65, (2, 33))
            loss = model(tokens[:, :-1], tokens[:, 1:]).item()
            self.assertAlmostEqual(loss, torch.tensor(65.0).log().item(), delta=0.3)

    def test_a_token_does_not_see_the_future(self):
        torch.manual_seed(0)
        for model in (models.MODELS["nanogpt-char"]["make"](), small_qwen()):
            tokens = torch.randint(65, (1, 16))
            changed = tokens.clone()
            changed[0, 12:] = (changed[0, 12:] + 1) % 65
            targets = torch.randint(65, (1, 16))
            # Only the first 12 places are scored, so only the past of place 12 may matter.
            targets[0, 12:] = -100
            self.assertEqual(model(tokens, targets).item(), model(changed, targets).item())
            changed[0, 3] = (changed[0, 3] + 1) % 65
            self.assertNotEqual(model(tokens, targets).item(), model(changed, targets).item())

    def test_positions_matter(self):
        torch.manual_seed(0)
        for model in (models.MODELS["nanogpt-char"]["make"](), small_qwen()):
            tokens = torch.tensor([[1, 2, 3, 4]])
            swapped = torch.tensor([[2, 1, 3, 4]])
            targets = torch.tensor([[-100, -100, -100, 5]])
            self.assertNotEqual(model(tokens, targets).item(), model(swapped, targets).item())

    def test_all_parameters_get_a_gradient(self):
        for model in (models.MODELS["nanogpt-char"]["make"](), small_qwen()):
            tokens = torch.randint(65, (2, 9))
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            for name, p in model.named_parameters():
                self.assertGreater(p.grad.abs().max().item(), 0.0, name)


class Text(unittest.TestCase):
    def test_batches_repeat_by_step_and_differ_between_steps(self):
        tokens = train.read_tokens(65)
        self.assertLess(int(tokens.max()), 65)
        a, b = train.batch_of(tokens, 1, 1), train.batch_of(tokens, 1, 1)
        self.assertTrue(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]))
        self.assertTrue(torch.equal(a[0][:, 1:], a[1][:, :-1]))
        self.assertFalse(torch.equal(a[0], train.batch_of(tokens, 1, 2)[0]))


if __name__ == "__main__":
    unittest.main(verbosity=2)
