#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Any optimizer: the four examples of the README are run, and compute what they would in plain memory."""

import importlib.util
import os
import shlex
import subprocess
import sys

import numpy as np
import support
import torch
from support import Case

import momentfs

EXAMPLES = os.path.join(support.TOP, "tests", "python", "examples")


def example(name):
    spec = importlib.util.spec_from_file_location(name, os.path.join(EXAMPLES, name + ".py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Examples(Case):
    def run_it(self, name, *args):
        return subprocess.run([sys.executable, os.path.join(EXAMPLES, name), *args], capture_output=True, text=True,
                              check=True, timeout=120).stdout

    def committed(self, m):
        with open(os.path.join(m.path, ".moment", "step")) as f:
            return dict(line.split() for line in f)

    def test_numpy_over_mapped_files(self):
        m = self.mount()
        got = float(self.run_it("numpy_adam.py", m.path, "5"))
        w = np.linspace(-1, 1, 300000, dtype=np.float32)
        first, second = np.zeros_like(w), np.zeros_like(w)
        for t in range(1, 6):
            g = np.sin(w * t)
            first += (1 - 0.9) * (g - first)
            second += (1 - 0.999) * (g * g - second)
            w -= 1e-3 / (1 - 0.9**t) * first / (np.sqrt(second / (1 - 0.999**t)) + 1e-8)
        self.assertAlmostEqual(got, w.astype(np.float64).sum(), places=6)
        np.testing.assert_array_equal(np.fromfile(m.file("numpy.weight", "exp_avg"), np.float32), first)
        np.testing.assert_array_equal(np.fromfile(m.file("numpy.weight", "exp_avg_sq"), np.float32), second)
        self.assertEqual(self.committed(m)["boundary"], "5")
        m.unmount()
        m.start()  # and it is still there
        self.assertEqual(self.committed(m)["committed"], "5")
        np.testing.assert_array_equal(np.fromfile(m.file("numpy.weight", "exp_avg"), np.float32), first)

    def test_torchs_own_adamw_with_mapped_state(self):
        m = self.mount()
        got = float(self.run_it("torch_adamw_mapped.py", m.path, "4"))
        model = example("torch_adamw_mapped").run(None, 4)
        self.assertEqual(got, sum(p.double().sum().item() for p in model.parameters()))
        self.assertGreater(np.abs(np.fromfile(m.file("0.weight", "exp_avg"), np.float32)).max(), 0)
        self.assertEqual(self.committed(m)["boundary"], "4")

    def test_lion_as_a_callback(self):
        lion = example("lion_blocks")
        w = {n: np.linspace(-1, 1, int(np.prod(s)), dtype=np.float32)
             for n, s in {"lion.a": (600, 700), "lion.b": (700,)}.items()}
        state = {n: {"exp_avg": np.zeros_like(x)} for n, x in w.items()}
        for t in range(1, 6):
            for n, x in w.items():
                lion.lion()(x, np.sin(x * t), state[n], t)
        for n, x in lion.run("-", 5).items():
            np.testing.assert_array_equal(x, w[n])
        m = self.mount()
        self.assertEqual(float(self.run_it("lion_blocks.py", m.path, "5")),
                         sum(x.astype(np.float64).sum() for x in w.values()))
        np.testing.assert_array_equal(np.fromfile(m.file("lion.a", "exp_avg"), np.float32), state["lion.a"]["exp_avg"])

    def test_the_kernels_lion_is_the_same_optimizer(self):
        lib = momentfs._lib
        p = np.linspace(-1, 1, 4096, dtype=np.float32)
        q, m, g = p.copy(), np.zeros_like(p), np.sin(p * 3)
        optim = lib.Optim(kind=lib.LION, flags=lib.DECOUPLED, lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.01)
        with momentfs.Session(ram=64 << 20, temp_dir=self.folder) as s:
            (h, _, _), = s.register([{"name": "p", "shape": p.shape, "arrays": (momentfs.EXP_AVG,)}])
            s.step(1, [lib.Item(param=h, p=p.ctypes.data, g=g.ctypes.data, p_numel=p.size, g_numel=g.size,
                                optim=lib.ctypes.pointer(optim))])
        example("lion_blocks").lion()(q, g, {"exp_avg": m}, 1)
        np.testing.assert_allclose(p, q, rtol=1e-6, atol=1e-9)

    def test_an_exception_in_a_callback_comes_through(self):
        def bad(p, g, state, step):
            raise KeyError("mine")

        with momentfs.Session(ram=64 << 20, temp_dir=self.folder) as s:
            (h, _, _), = s.register([{"name": "p", "shape": (100,)}])
            w = np.zeros(100, np.float32)
            with self.assertRaisesRegex(KeyError, "mine"):
                s.step_blocks(1, [(h, w, w, bad)])
            with self.assertRaisesRegex(momentfs.MomentError, "torn"):
                s.step_blocks(2, [(h, w, w, lambda *a: None)])
            s.rollback()
            s.step_blocks(1, [(h, w, w, lambda *a: None)])

    def test_arrays_of_another_size_are_refused_before_the_step(self):
        lib = momentfs._lib
        optim = lib.Optim(kind=lib.ADAM, lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8)
        called = []
        with momentfs.Session(ram=64 << 20, temp_dir=self.folder) as s:
            (a, _, _), (b, _, _) = s.register([{"name": "a", "shape": (100,)}, {"name": "b", "shape": (50, 2)}])
            right, words = np.zeros(100, np.float32), "parameter b was registered with 100 elements, and its"
            for p, g, came in ((np.zeros(60, np.float32), right, "weights came with 60"), (np.zeros(0), right, "weights came with 0"),
                               (right, np.zeros(200, np.float16), "gradient came with 200"),
                               (np.zeros(99, np.int8), None, "weights came with 99")):
                with self.assertRaisesRegex(momentfs.MomentError, f"{words} {came}"):
                    s.step_blocks(1, [(a, right, right, lambda *x: called.append(x)), (b, p, g, lambda *x: called.append(x))])
            memory = np.full(100, 7, np.float32)  # the weights are the front half of it
            with self.assertRaisesRegex(momentfs.MomentError, f"{words} weights came with 50"):
                s.step(1, [lib.Item(param=b, p=memory.ctypes.data, g=right.ctypes.data, p_numel=50, g_numel=100,
                                    optim=lib.ctypes.pointer(optim))])
            self.assertTrue((memory == 7).all())
            self.assertEqual(called, [])
            self.assertIsNone(s.info()["step"])
            s.step_blocks(1, [(a, right, right, lambda *x: called.append(x)), (b, None, right, lambda *x: called.append(x))])
            self.assertEqual(len(called), 2)

    def test_a_c_program(self):
        program = os.path.join(self.folder, "any_optimizer")
        lib = os.path.realpath(momentfs.library_path())
        cc = shlex.split(os.environ.get("CC") or "cc")
        subprocess.run([*cc, "-Wall", "-Wextra", "-Werror", "-I", os.path.join(support.TOP, "include"),
                        os.path.join(EXAMPLES, "any_optimizer.c"), "-o", program, lib,
                        f"-Wl,-rpath,{os.path.dirname(lib)}"], check=True)

        def run(steps):
            return subprocess.run([program, self.backing(), str(steps)], capture_output=True, text=True, check=True,
                                  timeout=120).stdout

        self.assertEqual(run(3), "3 steps, by the embedded path\n")
        self.assertEqual(run(2), "5 steps, by the embedded path\n")
        if support.fuse_missing() is None:
            m = self.mount("ram=64M,commit=off")
            self.assertEqual(run(2), "7 steps, by the session path\n")
            self.assertEqual(os.getxattr(m.file("adamw.weight", "exp_avg"), "user.moment.step"), b"7")
        bad = subprocess.run([program, "/proc/nowhere", "1"], capture_output=True, text=True)
        self.assertEqual(bad.returncode, 1)
        self.assertIn("/proc/nowhere", bad.stderr)


class Installed(Case):
    def test_by_pip_without_a_compiler(self):
        """A wheel of pure Python, that finds the library by MOMENT_LIBRARY."""
        site = os.path.join(self.folder, "site")
        source = os.path.join(self.folder, "source")
        import shutil

        shutil.copytree(os.path.join(support.TOP, "src", "python"), source,
                        ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
        out = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
                              "--no-index", "--target", site, source], capture_output=True, text=True)
        if out.returncode and ("No module named pip" in out.stderr or "No module named 'setuptools'" in out.stderr):
            self.skipTest("no pip or no setuptools for this Python")
        self.assertEqual(out.returncode, 0, out.stderr)
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LIBMOMENT")}
        env.update(PYTHONPATH=site, MOMENT_LIBRARY=momentfs.library_path(), PATH="/nonexistent")
        code = "import momentfs, momentfs.torch; print(momentfs.__file__, momentfs.version())"
        shown = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
        self.assertTrue(shown.startswith(site), shown)
        self.assertIn("momentfs 0.", shown)
        env["MOMENT_LIBRARY"] = "/nonexistent/libmoment.so"
        lost = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        if lost.returncode:
            self.assertIn("name it in MOMENT_LIBRARY", lost.stderr)


if __name__ == "__main__":
    support.main()
