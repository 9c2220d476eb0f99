# SPDX-License-Identifier: Apache-2.0
# The kernel keeps no bytes, attributes or names that were changed behind its back: by a session's steps, a fresh start, a
# rollback, a removal, adoption, by O_DIRECT writes, and by writes and punches that found no room. Everything is looked at before and at once afterwards, so that
# what the kernel would keep for a second shows.
. "$(dirname "$0")/../functions.sh"
requires_fuse
requires_python numpy
mnt=$tmp/mnt

cat >"$tmp/changes.py" <<'PY'
import errno, json, mmap, os, subprocess, sys
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

# cp within the mount reads through the kernel's pages what is made up, too: each copy has the step of its time.
s = session(resume="partial")
(h, _, n), = s.register([{"name": "w", "shape": (30000,)}])
for step in range(n + 1, n + 4):
    s.step_blocks(10 + step, [(h, W, W, fill(step))])
    src = os.open(params + "/w/meta.json", os.O_RDONLY)
    dst = os.open(params + "/copy", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    while os.copy_file_range(src, dst, 4096):
        pass
    copy = json.loads(os.pread(dst, 4096, 0))
    assert copy["step"] == step, f"a copy of meta.json tells of step {copy['step']}, not {step}"
    os.close(src)
    os.close(dst)
os.unlink(params + "/copy")

# A fresh start that is refused, for one file that is open for writing, drops and changes nothing.
(h2, _, _), = s.register([{"name": "v", "shape": (30000,)}])
s.step_blocks(20, [(h, W, W, fill(5)), (h2, W, W, fill(6))])
s.commit()
s.close()
for held in "w", "v":
    before = look("before a fresh start")
    fd = os.open(f"{params}/{held}/exp_avg", os.O_RDWR)
    s = session(fresh=True)
    try:
        s.register([{"name": "w", "shape": (30000,)}])
        raise AssertionError("a fresh start over what is open for writing")
    except OSError as e:
        assert e.errno == errno.EBUSY and f"{held}/exp_avg is open for writing" in str(e), e
    s.close()
    os.close(fd)
    now = look("refused")
    assert now.keys() == before.keys(), f"a fresh start that is refused drops {before.keys() - now.keys()}"
    bytes_are_true(now, "refused")
    assert all(now[n][4] == before[n][4] for n in now if len(now[n]) > 4), "a fresh start that is refused changes bytes"
PY

# On a full pool: what is refused is not seen by whoever has the file mapped, and what happened to a part is.
cat >"$tmp/refused.py" <<'PY'
import ctypes, errno, mmap, os, sys, time
params = sys.argv[1] + "/params"
BLOCK = 65536
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

def truth(path, n):
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    b = mmap.mmap(-1, n)
    os.preadv(fd, [b], 0)
    os.close(fd)
    return b[:]

path = params + "/file"
fd = os.open(path, os.O_RDWR | os.O_CREAT)
os.pwrite(fd, b"a" * BLOCK, 0)
os.truncate(path, 8 * BLOCK)  # holes, but for the first block
os.fsync(fd)
old = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
assert sum(old[::4096]) == ord("a") * 16
hog = os.open(params + "/hog", os.O_RDWR | os.O_CREAT)
def fill_up():
    n = 0
    while n < 1000 and libc.fallocate(hog, 1, n * BLOCK, 4096) == 0:
        n += 1
fill_up()

def seen_is_true(what):
    end = time.monotonic() + 5
    while old[:] != truth(path, 8 * BLOCK):
        assert time.monotonic() < end, f"{what}: an old mapping shows what is not there"
        time.sleep(0.01)
    assert os.pread(fd, 8 * BLOCK, 0) == old[:], what

for round in range(20):  # room for no block, then for some
    byte = bytes([65 + round])
    try:
        done = os.pwrite(fd, byte * (7 * BLOCK), BLOCK)
        assert done < 7 * BLOCK, "there is room for all"
    except OSError as e:
        assert e.errno == errno.ENOSPC, e
    seen_is_true("a write that was refused")
    buf = mmap.mmap(-1, 7 * BLOCK)
    buf[:] = byte * (7 * BLOCK)
    d = os.open(path, os.O_WRONLY | os.O_DIRECT)
    try:
        done = os.pwritev(d, [buf], BLOCK)
        raise AssertionError(f"there is room for {done}")
    except OSError as e:
        assert e.errno == errno.ENOSPC, f"an O_DIRECT write that finds room for a part: {e}"
    os.close(d)
    seen_is_true("an O_DIRECT write that was refused")
    libc.fallocate(fd, 3, 100, 7 * BLOCK)
    seen_is_true("a punch")
    if round % 4 == 3:
        libc.fallocate(hog, 3, 0, BLOCK * (1 + round // 4))
        os.fsync(hog)
PY
start_momentfs "$tmp/backing" "$mnt" ram=64M,block=256K,commit=off
"$PYTHON3" "$tmp/changes.py" "$mnt" "$MOMENTCTL"

"$abs_builddir/tests/mount/direct_beside" "$mnt/params/direct" "${ROUNDS:-60}"
stop_momentfs "$mnt"
start_momentfs "$tmp/small" "$mnt" ram=4M,block=64K,size=3M,commit=off
"$PYTHON3" "$tmp/refused.py" "$mnt"
stop_momentfs "$mnt"
