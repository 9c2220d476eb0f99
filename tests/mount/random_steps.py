# SPDX-License-Identifier: Apache-2.0
"""Profile `steps` of random_ops.py: the steps of a plain writer (.moment/step), sessions, adoption, fresh starts and
rollbacks, at random beside plain writes, with deaths of the writer, of the trainer and of the daemon.

Three processes: this one, which is nobody's step; a writer, which brackets its steps and may die inside one; a trainer,
which holds a session. The model has each file and parameter as it is and as the last commit has it. What is promised is
in momentfs(8) and libmoment(3):
- from `begin` to `end` nothing is committed; an fsync by the writer is durable with `end`
- a writer that dies in its step: what steps have changed since the last commit goes back to it, all if names changed
- a session that dies in its step: its parameters go back when the next one begins, all else stays
- a parameter's directory that cp made is a parameter when the next session begins
- a fresh start makes zeros of what is registered and drops the other parameters, or is refused and changes nothing
- a commit takes all there is; a rollback, a crash, a mount give the last commit
"""
import errno
import json
import mmap
import multiprocessing
import os
import signal
import subprocess
import threading
import time

from random_base import BLOCK, Failure, Ops, expect_error

SIZES = {"a": 1000, "b": 16384, "c": 50000, "d": 1, "e": 20001}  # elements; copies are called a1, a2, ...
ARRAYS = ("exp_avg", "exp_avg_sq")


class Actor:
    """A process that does what it is told: methods of `kind`, by name."""

    maps = {}  # what a child must not keep mapped

    def __init__(self, kind, *args):
        fork = multiprocessing.get_context("fork")
        self.pipe, theirs = fork.Pipe()
        self.process = fork.Process(target=self._run, args=(kind, args, theirs, self.pipe), daemon=True)
        self.process.start()
        theirs.close()

    @staticmethod
    def _run(kind, args, pipe, other):
        other.close()
        Actor.maps.clear()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        it = kind(*args)
        while True:
            try:
                name, args = pipe.recv()
            except EOFError:
                os._exit(0)
            try:
                answer = (None, getattr(it, name)(*args))
            except OSError as e:
                answer = (e.errno, str(e))
            except Exception as e:
                answer = (-1, f"{type(e).__name__}: {e}")
            pipe.send(answer)

    def tell(self, name, *args):
        """The result, or OSError."""
        self.pipe.send((name, args))
        if not self.pipe.poll(60):
            raise Failure(f"{name}{args}: no answer within 60 s")
        err, value = self.pipe.recv()
        if err == -1:
            raise Failure(f"{name}{args}: {value}")
        if err is not None:
            raise OSError(err, value)
        return value

    def refuses(self, err, name, *args):
        expect_error(err, self.tell, name, *args)

    def die(self):
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Writer:
    def __init__(self, mount):
        self.mount = mount

    def step(self, line):
        with open(self.mount + "/.moment/step", "w") as f:
            f.write(line + "\n")

    def control(self, word):
        with open(self.mount + "/.moment/control", "wb", buffering=0) as f:
            f.write(word.encode())

    def write(self, path, off, data):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            if os.pwrite(fd, data, off) != len(data):
                raise Failure("a short write")
        finally:
            os.close(fd)

    def store(self, path, off, data, flush):
        fd = os.open(path, os.O_RDWR)
        try:
            with mmap.mmap(fd, 0) as m:
                m[off:off + len(data)] = data
                if flush:
                    m.flush()
        finally:
            os.close(fd)

    def truncate(self, path, n):
        os.truncate(path, n)

    def rename(self, a, b):
        os.rename(a, b)

    def unlink(self, path):
        os.unlink(path)

    def fsync(self, path):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def hold(self, path):
        """Maps a file for writing and keeps that."""
        fd = os.open(path, os.O_RDWR)
        self.held = mmap.mmap(fd, 0)
        os.close(fd)

    def let_go(self):
        self.held.close()


def numbers(p, a, b):
    """What a step makes of an array; p has the index of each element."""
    import numpy as np
    return p * np.float32(a) + np.float32(b)


class Trainer:
    def __init__(self, mount):
        self.mount = mount

    def open(self, resume, fresh, names):
        import warnings
        from momentfs.session import Session
        warnings.simplefilter("ignore")  # that there is nothing to resume
        s = Session(mount=self.mount, resume="partial" if resume else False, fresh=fresh)
        try:
            out = s.register([{"name": n, "shape": (SIZES[n[0]],)} for n in names])
        except OSError:
            s.close()
            raise
        self.s, self.h = s, {n: h for n, (h, _, _) in zip(names, out)}
        return {n: (found, step) for n, (_, found, step) in zip(names, out)}

    def _updates(self, values):
        import numpy as np
        out = []
        for n, (a, b) in values.items():
            def fn(p, g, state, step, a=a, b=b):
                state["exp_avg"][:] = numbers(p, a, b)
                state["exp_avg_sq"][:] = numbers(p, b, a)
            p = np.arange(SIZES[n[0]], dtype=np.float32)
            out.append((self.h[n], p, p, fn))
        return out

    def step(self, label, values, commit):
        self.s.step_blocks(label, self._updates(values), commit=commit)

    def half_step(self, label, values):
        import numpy as np
        self.s.pre_step(label)
        self.raised, self.keep = [], []
        for h, p, g, fn in self._updates(values):
            self.s.apply(self.s._block_item(np, h, p, g, fn, self.raised, self.keep))

    def commit(self):
        self.s.commit()

    def rollback(self):
        self.s.rollback()

    def remove(self, n):
        self.s.remove(self.h.pop(n))

    def close(self):
        self.s.close()


class Node:
    """A plain file: moves with its inode."""

    def __init__(self, data, stepped=False):
        self.data, self.stepped = bytearray(data), stepped


class Param:
    def __init__(self, name, step=0, arrays=None):
        self.name, self.step = name, step
        self.arrays = arrays or {a: bytes(4 * SIZES[name[0]]) for a in ARRAYS}

    def copy(self, name=None):
        return Param(name or self.name, self.step, dict(self.arrays))


class StepOps(Ops):
    MAX_FILE = 1 << 20
    MAX_FILES = 12
    REMOUNTS = 4
    WEIGHTS = [("plain_write", 10), ("plain_create", 3), ("plain_truncate", 3), ("plain_rename", 3), ("plain_unlink", 2),
               ("plain_map", 3), ("plain_fsync", 3), ("commit", 3), ("rollback", 3), ("begin_or_end", 16),
               ("step_write", 12), ("step_store", 6), ("step_names", 2), ("step_fsync", 4), ("writer_dies", 4),
               ("session", 10), ("train", 22), ("session_commit", 5), ("session_rollback", 4), ("session_remove", 1),
               ("session_ends", 5), ("trainer_dies", 4), ("copy_param", 4), ("fresh_refused", 3), ("look", 4),
               ("crash", 2), ("killed_in_step", 1)]

    @staticmethod
    def options(args):
        return f"ram={args.ram or '6M'}"

    def __init__(self, mount, rng, args):
        super().__init__(mount, rng, args)
        self.params = {}  # name -> Param
        self.names = False  # steps since the last commit have changed names
        self.bracket = None  # the number of the step that is open
        self.changed = False  # it has changed something
        self.synced = False  # an fsync was asked for in it
        self.label = 0
        self.adoptable = False  # cp has made parameters
        self.session_of = None  # names of a session's parameters; None: there is no session
        self.half = False  # it is inside a step
        self.maps = Actor.maps  # path of a file -> an old mapping of it
        self.writer = self.trainer = None
        self.save()

    def begin(self):
        self.writer, self.trainer = Actor(Writer, self.m.point), Actor(Trainer, self.m.point)

    def close(self):
        self.maps.clear()
        for a in (self.writer, self.trainer):
            if a:
                a.die()

    # -- the model
    def save(self, but=()):
        """A commit of everything, but for files and parameters that it leaves out."""
        was = dict(self.saved_files) if but else {}
        params = dict(self.saved_params) if but else {}
        self.saved_files = {p: (n, bytes(n.data)) for p, n in self.files.items() if n not in but}
        for p, n in self.files.items():
            if n in but:
                old = next((d for m, d in was.values() if m is n), None)
                if old is not None:
                    self.saved_files[p] = (n, old)
        self.saved_params = {n: params.get(n, q.copy()) if n in but else q.copy() for n, q in self.params.items()}
        for n in self.files.values():
            if n not in but:
                n.stepped = False
        self.names = False

    def back(self):
        """Everything is at the last commit."""
        self.files = {}
        for p, (n, d) in self.saved_files.items():
            n.data, n.stepped = bytearray(d), False
            self.files[p] = n
        self.params = {n: q.copy() for n, q in self.saved_params.items()}
        self.names = self.changed = False

    def steps_back(self):
        """What steps have changed since the last commit is at it."""
        if self.names:
            return self.back()
        for p, n in self.files.items():
            if not n.stepped:
                continue
            old = next((d for m, d in self.saved_files.values() if m is n), None)
            if old is None:  # no commit knows it: zeros
                with open(self.path(p), "rb") as f:
                    got = f.read()
                if any(got):
                    raise Failure(f"{p}, which no commit knows, is not zeros after a torn step")
                old = got
            n.data, n.stepped = bytearray(old), False

    # -- choosing
    def name(self):
        self.serial += 1
        return f"f{self.serial}"

    def step_file(self):
        with open(self.m.point + "/.moment/step") as f:
            return dict(line.rstrip("\n").split(" ", 1) for line in f)

    def some_params(self):
        return sorted(self.r.sample(sorted(SIZES), self.r.randrange(1, len(SIZES) + 1)))

    def values(self):
        names = self.r.sample(sorted(self.session_of), self.r.randrange(1, len(self.session_of) + 1))
        return {n: (self.r.randrange(1, 1 << 10) / 8, self.r.randrange(1 << 10) / 8) for n in sorted(names)}

    def trained(self, values):
        import numpy as np
        for n, (a, b) in values.items():
            p = np.arange(SIZES[n[0]], dtype=np.float32)
            q = self.params[n]
            q.arrays = {"exp_avg": numbers(p, a, b).tobytes(), "exp_avg_sq": numbers(p, b, a).tobytes()}
            q.step += 1

    # -- plain operations of this process, which is in no step
    def plain_create(self):
        if len(self.files) >= self.MAX_FILES:
            return self.plain_unlink()
        p, d = self.name(), self.data(self.r.randrange(1, 200000))
        self.note(f"create {p} of {len(d)}")
        with open(self.path(p), "xb", buffering=0) as f:
            f.write(d)
        self.files[p] = Node(d)

    def plain_write(self):
        p = self.any_file()
        if p is None:
            return self.plain_create()
        c = self.files[p].data
        off, d = self.r.randrange(min(len(c), 400000) + 1), self.data(self.r.randrange(1, 100000))
        self.note(f"write {p} {off}+{len(d)}")
        fd = os.open(self.path(p), os.O_WRONLY)
        try:
            os.pwrite(fd, d, off)
        finally:
            os.close(fd)
        c[off:off + len(d)] = d

    def plain_truncate(self):
        p = self.any_file()
        if p is None:
            return
        c = self.files[p].data
        n = self.r.randrange(len(c) + BLOCK)
        self.note(f"truncate {p} {len(c)} -> {n}")
        os.truncate(self.path(p), n)
        self.cut(c, n)

    @staticmethod
    def cut(c, n):
        if n < len(c):
            del c[n:]
        else:
            c.extend(bytes(n - len(c)))

    def plain_map(self):
        """Closing it hands over what is dirty; in somebody's step that would be his."""
        p = self.any_file()
        if p is None or self.bracket is not None or not self.files[p].data:
            return
        c = self.files[p].data
        off = self.r.randrange(len(c))
        d = self.data(self.r.randrange(1, len(c) - off + 1))
        self.note(f"store {p} {off}+{len(d)}")
        Writer.store(None, self.path(p), off, d, False)
        c[off:off + len(d)] = d

    def plain_rename(self):
        p = self.any_file()
        if p is None:
            return
        q = self.name() if self.r.random() < 0.6 else self.any_file()
        self.note(f"rename {p} {q}")
        os.rename(self.path(p), self.path(q))
        self.files[q] = self.files.pop(p)

    def plain_unlink(self):
        p = self.any_file()
        if p is None:
            return
        self.note(f"unlink {p}")
        os.unlink(self.path(p))
        del self.files[p]

    def plain_fsync(self):
        p = self.any_file()
        if p is None:
            return
        self.note(f"fsync {p}")
        sync = Writer(None).fsync
        if self.bracket is None:
            sync(self.path(p))
            self.save(self.held())
        elif self.files[p].stepped:
            expect_error(errno.EBUSY, sync, self.path(p))
        else:  # waits for the end of the step
            out = []

            def wait():
                try:
                    sync(self.path(p))
                    out.append(0)
                except OSError as e:
                    out.append(e.errno)
            t = threading.Thread(target=wait)
            t.start()
            t.join(0.1)
            if out == [0]:
                raise Failure(f"an fsync of {p} is done inside somebody's step")
            self.begin_or_end()
            t.join(30)
            if out != [0]:
                raise Failure(f"an fsync of {p} that waited for the end of a step: {out}")
            self.save()

    def commit(self):
        self.note("commit")
        if self.bracket is not None:
            return expect_error(errno.EBUSY, self.m.command, "commit")
        self.m.command("commit")
        self.save(self.held())

    def held(self):
        """What a commit leaves out: the parameters of a session inside its step."""
        return set(self.session_of) if self.half else ()

    def rollback(self):
        self.note("rollback")
        if self.bracket is not None and self.r.random() < 0.3:
            self.note("by the writer")
            self.writer.tell("control", "rollback")
            self.bracket = None
        elif self.bracket is not None or self.session_of is not None:
            return expect_error(errno.EBUSY, self.m.command, "rollback")
        else:
            self.m.command("rollback")
        self.back()
        self.look()

    # -- the writer's steps
    def begin_or_end(self):
        if self.bracket is None:
            self.label += 1
            self.note(f"begin {self.label}")
            if self.session_of is not None:
                return self.writer.refuses(errno.EBUSY, "step", f"begin {self.label}")
            self.writer.tell("step", f"begin {self.label}")
            self.bracket, self.changed, self.synced = self.label, False, False
            return
        self.note(f"end {self.bracket}")
        if self.r.random() < 0.1:
            self.writer.refuses(errno.EINVAL, "step", f"end {self.bracket + 1}")
        self.writer.tell("step", f"end {self.bracket}")
        self.bracket = None
        if self.synced:
            self.save()

    def touched(self, node):
        if self.bracket is not None:
            self.changed = node.stepped = True

    def step_write(self):
        p = self.any_file()
        if p is None:
            return
        n = self.files[p]
        if self.r.random() < 0.2:
            size = self.r.randrange(len(n.data) + BLOCK)
            self.note(f"writer truncates {p} to {size}")
            self.writer.tell("truncate", self.path(p), size)
            self.cut(n.data, size)
        else:
            off, d = self.r.randrange(min(len(n.data), 400000) + 1), self.data(self.r.randrange(1, 100000))
            self.note(f"writer writes {p} {off}+{len(d)}")
            self.writer.tell("write", self.path(p), off, d)
            n.data[off:off + len(d)] = d
        self.touched(n)

    def step_store(self):
        p = self.any_file()
        if p is None or not self.files[p].data:
            return
        n = self.files[p]
        off = self.r.randrange(len(n.data))
        d = self.data(self.r.randrange(1, len(n.data) - off + 1))
        flush = self.r.random() < 0.3
        self.note(f"writer stores {p} {off}+{len(d)} flush {flush}")
        self.writer.tell("store", self.path(p), off, d, flush)
        n.data[off:off + len(d)] = d
        self.touched(n)
        if flush:
            self.writer_synced()

    def writer_synced(self):
        if self.bracket is None:
            self.save(self.held())
        else:
            self.synced = True

    def step_names(self):
        p = self.any_file()
        if p is None:
            return
        way = self.r.randrange(3)
        self.note(f"writer {['makes', 'renames', 'removes'][way]} {p}")
        if way == 0:
            p = self.name()
            d = self.data(self.r.randrange(1, 50000))
            self.writer.tell("write", self.path(p), 0, d)
            self.files[p] = Node(d)
            self.touched(self.files[p])
        elif way == 1:
            q = self.any_file()
            self.writer.tell("rename", self.path(p), self.path(q))
            if p == q:
                return
            self.files[q] = self.files.pop(p)
        else:
            self.writer.tell("unlink", self.path(p))
            del self.files[p]
        if self.bracket is not None:
            self.changed = self.names = True

    def step_fsync(self):
        p = self.any_file()
        if p is None:
            return
        self.note(f"writer fsyncs {p}")
        self.writer.tell("fsync", self.path(p))
        self.writer_synced()

    def writer_dies(self):
        self.note("the writer dies")
        p = self.any_file() if self.r.random() < 0.4 else None
        kept = os.open(self.path(p), os.O_RDWR) if p else -1  # by somebody: then it may take a while
        self.writer.die()
        if self.bracket is not None and self.changed and kept >= 0 and (self.names or self.files[p].stepped):
            self.wait_for(lambda s: s["torn"] != "no", "the step of a dead writer is not torn")
            expect_error(errno.ESTALE, os.fsync, kept)
            time.sleep(0.15)
            if self.step_file()["torn"] == "no":
                raise Failure("a torn step went back under one who has a file open for writing")
        if kept >= 0:
            os.close(kept)
        self.wait_for(lambda s: s["torn"] == "no" and s["open"] == "none", "a torn step does not go back")
        if self.bracket is not None and self.changed:
            self.steps_back()
        self.bracket = None
        self.writer = Actor(Writer, self.m.point)
        self.look()

    def wait_for(self, fn, what):
        end = time.monotonic() + 10
        while not fn(self.step_file()):
            if time.monotonic() > end:
                raise Failure(f"{what}: {self.step_file()}")
            time.sleep(0.01)

    # -- sessions
    def session(self):
        if self.session_of:
            return self.train()
        if self.session_of is not None:  # all its parameters are removed
            return self.session_ends()
        names = self.some_params()
        fresh = self.r.random() < 0.3
        for n in sorted(self.params):
            if n not in SIZES and self.r.random() < 0.7:
                names.append(n)
        self.note(f"session of {names} fresh {fresh}")
        if self.bracket is not None:
            self.trainer.refuses(errno.EBUSY, "open", not fresh, fresh, names)
            return
        got = self.trainer.tell("open", not fresh, fresh, names)
        new = False
        for n in names:
            found, step = got[n]
            have = self.params.get(n)
            if found != (have is not None and not fresh) or step != (0 if fresh or have is None else have.step):
                raise Failure(f"{n}: found {found}, at step {step}; there is {have and have.step}")
            if fresh or have is None:
                self.params[n] = Param(n)
                new = True
        if fresh:
            self.params = {n: q for n, q in self.params.items() if n in names}
        if new or self.adoptable:
            self.save()
        self.adoptable = False
        self.session_of = set(names)
        self.look()

    def train(self):
        if self.session_of is None or not self.session_of:
            return self.session()
        v, commit = self.values(), self.r.random() < 0.2
        self.label += 1
        self.note(f"step {self.label} of {sorted(v)}{', committed' if commit else ''}")
        self.trainer.tell("step", self.label, v, commit)
        self.trained(v)
        if commit:
            self.trainer.tell("commit")  # behind the reply: now it is there
            self.save()
        if self.r.random() < 0.2:
            self.look_at_params()

    def session_commit(self):
        if self.session_of is not None:
            self.note("the session commits")
            self.trainer.tell("commit")
            self.save()

    def session_rollback(self):
        """Of its parameters; inside a step, too."""
        if not self.session_of:
            return
        inside = self.r.random() < 0.5
        self.note(f"the session rolls back, {'inside a step' if inside else 'between steps'}")
        if inside:
            self.label += 1
            self.trainer.tell("half_step", self.label, self.values())
        self.trainer.tell("rollback")
        for n in self.session_of:
            self.params[n] = self.saved_params[n].copy()
        self.look()

    def session_remove(self):
        if not self.session_of:
            return
        n = self.r.choice(sorted(self.session_of))
        self.note(f"the session removes {n}")
        self.trainer.tell("remove", n)
        self.session_of.discard(n)
        del self.params[n]
        if os.path.exists(self.path(n)):
            raise Failure(f"{n} is there after it was removed")

    def session_ends(self):
        if self.session_of is None:
            return
        self.note("the session ends")
        self.trainer.tell("close")
        self.session_of = None

    def trainer_dies(self):
        if not self.session_of:
            return
        inside = self.r.random() < 0.6
        self.note(f"the trainer dies, {'inside a step' if inside else 'between steps'}")
        if inside:
            self.label += 1
            v = self.values()
            self.trainer.tell("half_step", self.label, v)
            self.half = True
            if self.r.random() < 0.5:  # what is plain is committed beside it
                self.commit()
            else:
                self.rollback()
        self.trainer.die()
        self.trainer = Actor(Trainer, self.m.point)
        if not inside:
            self.wait_for(lambda s: not self.m.status()["sessions"], "a dead session stays")
            self.session_of = None
            return
        self.wait_for(lambda s: s["torn"] != "no", "a session that died inside its step left nothing torn")
        if self.r.random() < 0.5:
            self.plain_write()
            self.commit()
        self.half, names, self.session_of = False, self.session_of, None
        for n in names:
            self.params[n] = self.saved_params[n].copy()
        if self.r.random() < 0.4:
            self.note("and rollback")  # of what is torn
            self.m.command("rollback")
        else:
            self.session()  # which goes back first
        self.look()

    def copy_param(self):
        """By plain tools, which drop attributes: the next session takes it as what meta.json says."""
        if not self.params or self.bracket is not None or len(self.params) > 14:
            return
        n = self.r.choice(sorted(self.params))
        self.serial += 1
        q = f"{n[0]}{self.serial}"
        self.note(f"cp -r {n} {q}")
        subprocess.run(["cp", "-r", self.path(n), self.path(q)], check=True)
        self.params[q] = self.params[n].copy(q)
        self.adoptable = True
        if self.session_of is None and self.r.random() < 0.5:
            with open(self.path(q) + "/exp_avg", "r+b", buffering=0) as f:
                d = self.data(4)
                f.write(d)
            c = self.params[q].arrays
            c["exp_avg"] = d + c["exp_avg"][4:]

    def fresh_refused(self):
        """Somebody stores through a mapping: a fresh start over it is refused, and everything is as it was."""
        if self.session_of is not None or self.bracket is not None or not self.params:
            return
        n = self.r.choice(sorted(self.params))
        names = sorted(set(self.some_params()) ^ {n} | {"d"})  # n among them, or to be dropped
        self.note(f"fresh start of {names} while {n} is mapped for writing")
        self.writer.tell("hold", self.path(n) + "/exp_avg")
        self.trainer.refuses(errno.EBUSY, "open", False, True, names)
        self.writer.tell("let_go")
        self.look()

    # -- life of the mount
    def all_closed(self):
        self.maps.clear()
        if self.session_of is not None:
            self.session_ends()

    def remount(self):
        self.all_closed()
        if self.bracket is not None:
            self.begin_or_end()
        self.note("remount")
        self.m.stop()
        self.m.fsck()
        self.save()
        self.m.start()
        self.look()

    def crash(self):
        self.note("crash")
        self.maps.clear()
        self.m.daemon.kill()
        self.trainer.die()
        self.writer.die()
        self.m.crash()
        self.m.fsck()
        self.m.start()
        self.begin()
        self.session_of = self.bracket = None
        self.back()
        self.look()

    def killed_in_step(self):
        """SIGTERM while a plain step is open: what it changed is dropped, all else is committed."""
        if self.bracket is None or not self.changed:
            return
        self.note("SIGTERM inside a step")
        self.maps.clear()
        self.m.daemon.terminate()
        self.m.ended(6 if self.names or any(n.stepped for n in self.files.values()) else 0)
        self.m.fsck()
        self.m.start()
        self.writer.die()
        self.writer = Actor(Writer, self.m.point)
        self.bracket = None
        self.steps_back()
        self.save()
        self.look()

    # -- comparing
    def compare(self, path, want):
        """By read(2), past the kernel's pages, and by a mapping that may be old."""
        p = os.path.relpath(path, self.m.params)
        size = os.stat(path).st_size
        if size != len(want):
            raise Failure(f"{p} has {size} bytes, expected {len(want)}")
        m = self.maps.get(path)
        if m and m[1] == len(want):
            self.differ(p + " by an old mapping", m[0][:], want)
        fd = os.open(path, os.O_RDONLY)
        try:
            self.differ(p, os.pread(fd, size + 1, 0), want)
            if want and path not in self.maps and self.r.random() < 0.2:
                self.maps[path] = (mmap.mmap(fd, 0, prot=mmap.PROT_READ), size, os.fstat(fd).st_ino)
        finally:
            os.close(fd)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, size + 4096) as b:
                self.differ(p + " past the pages", b[:os.preadv(fd, [b], 0)], want)
        finally:
            os.close(fd)

    def differ(self, p, got, want):
        if got == bytes(want):
            return
        i = next((i for i in range(min(len(got), len(want))) if got[i] != want[i]), min(len(got), len(want)))
        raise Failure(f"{p}: {len(got)} bytes, expected {len(want)}; they differ from {i} on "
                      f"({bytes(got[i:i + 8]).hex()}, expected {bytes(want[i:i + 8]).hex()})")

    def look_at_params(self):
        for n, q in self.params.items():
            d = self.path(n)
            if sorted(os.listdir(d)) != sorted(ARRAYS + ("meta.json",)):
                raise Failure(f"{n} has {os.listdir(d)}")
            for a in ARRAYS:
                self.compare(f"{d}/{a}", q.arrays[a])
            with open(d + "/meta.json") as f:
                step = json.load(f)["step"]
            if step != q.step:
                raise Failure(f"{n} is at step {step}, expected {q.step}")
            if self.session_of and n in self.session_of:
                expect_error(errno.EBUSY, os.open, d + "/exp_avg", os.O_RDWR)
                expect_error(errno.EBUSY, os.unlink, d + "/exp_avg")

    def look(self):
        for path in list(self.maps):  # of files that are gone or others now
            try:
                if os.stat(path).st_ino != self.maps[path][2] or os.stat(path).st_size != self.maps[path][1]:
                    del self.maps[path]
            except FileNotFoundError:
                del self.maps[path]
        found = set(os.listdir(self.m.params))
        if found != set(self.files) | set(self.params):
            raise Failure(f"names differ: {found ^ (set(self.files) | set(self.params))}")
        for p, n in self.files.items():
            self.compare(self.path(p), n.data)
        self.look_at_params()

    def end(self):
        self.all_closed()
        if self.bracket is not None:
            self.begin_or_end()
        self.look()
        self.maps.clear()
        return f"{len(self.files)} files, {len(self.params)} parameters at the end, step {self.label}"
