# SPDX-License-Identifier: Apache-2.0
# The kernel keeps no bytes, attributes or names that were changed behind its back: by a session's steps, a fresh start, a
# rollback, a removal, adoption, and by O_DIRECT writes. Everything is looked at before and at once afterwards, so that
# what the kernel would keep for a second shows.
. "$(dirname "$0")/../functions.sh"
requires_fuse
requires_python numpy
mnt=$tmp/mnt

cat >"$tmp/changes.py" <<'PY'
import json, mmap, os, subprocess, sys
import numpy as np
from momentfs.session import Session

mnt, ctl = sys.argv[1:3]
params = mnt + "/params"

def look(what):
    """Names, attributes and bytes of all, opened files among them, so that the kernel has them."""
    out = {}
    for top, dirs, files in os.walk(params):
        for name in sorted(dirs + files):
            st = os.stat(os.path.join(top, name))
            out[os.path.relpath(os.path.join(top, name), params)] = [st.st_size, st.st_mtime_ns, st.st_ctime_ns, st.st_nlink]
    for name in out:
        if os.path.isfile(os.path.join(params, name)):
            out[name].append(open(os.path.join(params, name), "rb").read())
    return out

def truth(name):
    """The bytes, read past the kernel's pages."""
    fd = os.open(os.path.join(params, name), os.O_RDONLY | os.O_DIRECT)
    size, off, out = 1 << 20, 0, b""
    buf = mmap.mmap(-1, size)
    while n := os.preadv(fd, [buf], off):
        out, off = out + buf[:n], off + n
    os.close(fd)
    return out

def bytes_are_true(now, what):
    for name, (size, *_, data) in now.items():
        if os.path.isdir(os.path.join(params, name)):
            continue
        assert len(data) == size, (what, name, len(data), size)
        if not name.endswith("meta.json"):
            assert data == truth(name), f"{what}: {name} shows old bytes"

def session(**more):
    return Session(mount=mnt, **more)

W = np.zeros(30000, np.float32)
def fill(value):
    def fn(p, g, state, step):
        for a in state.values():
            a[:] = value
    return fn

# A step.
s = session()
(h, _, _), (h2, _, _) = s.register([{"name": "w", "shape": (30000,)}, {"name": "v", "shape": (30000,)}])
s.step_blocks(1, [(h, W, W, fill(7)), (h2, W, W, fill(7))])
before = look("before a step")
bytes_are_true(before, "after step 1")
mapped = mmap.mmap(os.open(params + "/w/exp_avg", os.O_RDONLY), 0, prot=mmap.PROT_READ)
assert np.frombuffer(mapped, np.float32)[0] == 7
s.step_blocks(2, [(h, W, W, fill(8))])
now = look("after a step")
bytes_are_true(now, "after step 2")
assert np.frombuffer(mapped, np.float32)[-1] == 8, "a mapping keeps the bytes of the last step"
assert now["w/exp_avg"][1] > before["w/exp_avg"][1], "the time of a file that was looked at is from before the step"
assert now["w"][2] > before["w"][2], "the directory's time"
assert json.loads(now["w/meta.json"][4])["step"] == 2 and now["v/exp_avg"][1] == before["v/exp_avg"][1]
s.commit()
step2 = look("committed")

# A rollback: the bytes and the times of the last commit.
s.step_blocks(3, [(h, W, W, fill(9))])
assert look("step 3")["w/exp_avg"][1] > step2["w/exp_avg"][1]
s.pre_step(4)
s.rollback()
now = look("rolled back")
bytes_are_true(now, "after a rollback")
assert np.frombuffer(mapped, np.float32)[0] == 8 and now["w/exp_avg"][1] == step2["w/exp_avg"][1], "a rollback"
s.close()

# A fresh start.
s = session(fresh=True)
(h, _, n), (h2, _, _) = s.register([{"name": "w", "shape": (30000,)}, {"name": "v", "shape": (30000,)}])
now = look("fresh")
bytes_are_true(now, "after a fresh start")
assert np.frombuffer(mapped, np.float32)[0] == 0, "a mapping keeps what was before a fresh start"
assert now["w/exp_avg"][1] > step2["w/exp_avg"][1]

# A removal.
assert os.path.exists(params + "/v/exp_avg")
s.remove(h2)
assert not os.path.exists(params + "/v/exp_avg") and "v" not in os.listdir(params), "a removed parameter's names"
assert os.stat(params).st_nlink == 3, os.stat(params)
s.close()
del mapped

# momentctl rollback: names that are gone, names that come back, sizes.
open(params + "/kept", "wb").write(b"k" * 5000)
os.mkdir(params + "/dir")
open(params + "/dir/file", "wb").write(b"f" * 100)
subprocess.run([ctl, "commit", mnt], check=True, stdout=subprocess.DEVNULL)
open(params + "/kept", "wb").write(b"other")
open(params + "/new", "wb").write(b"new")
os.rename(params + "/dir/file", params + "/moved")
look("before the rollback")
subprocess.run([ctl, "rollback", mnt], check=True, stdout=subprocess.DEVNULL)
for gone in ("new", "moved"):
    assert not os.path.exists(f"{params}/{gone}"), f"{gone} is there after the rollback"
assert os.stat(params + "/kept").st_size == 5000, "the size after the rollback"
now = look("after the rollback")
bytes_are_true(now, "after the rollback")
assert now["kept"][4] == b"k" * 5000 and now["dir/file"][4] == b"f" * 100

# What cp brings is adopted when a session begins: meta.json is made up from then on.
subprocess.run(["cp", "-r", params + "/w", params + "/x"], check=True)
meta = open(params + "/x/meta.json").read()
os.stat(params + "/x/meta.json")
s = session()
text = open(params + "/x/meta.json").read()
assert json.loads(text)["name"] == "x" and os.stat(params + "/x/meta.json").st_size == len(text), "adopted meta.json"
s.close()
subprocess.run(["rm", "-r", params + "/x"], check=True)
PY
start_momentfs "$tmp/backing" "$mnt" ram=64M,block=256K,commit=off
"$PYTHON3" "$tmp/changes.py" "$mnt" "$MOMENTCTL"

"$abs_builddir/tests/mount/direct_beside" "$mnt/params/direct" "${ROUNDS:-60}"
stop_momentfs "$mnt"
