# SPDX-License-Identifier: Apache-2.0
# Mapped files as NumPy and PyTorch use them: shared and private, for reading and for writing.
. "$(dirname "$0")/../functions.sh"
requires_fuse
requires_python numpy torch
mnt=$tmp/mnt

cat >"$tmp/maps.py" <<'PY'
import sys
import numpy as np
import torch

path, n = sys.argv[1] + "/params/exp_avg", 3_000_001  # 12 MB, more than the RAM tier
w = np.memmap(path, np.float32, "w+", shape=(n,))
w[:] = np.arange(n, dtype=np.float32)
w.flush()
del w
r = np.memmap(path, np.float32, "r")
assert r.shape == (n,) and r[-1] == np.float32(n - 1) and float(r[12345]) == 12345
c = np.memmap(path, np.float32, "c")
c[0] = 77
assert c[0] == 77 and r[0] == 0
try:
    r[0] = 1
    raise SystemExit("a read-only map was written")
except ValueError:
    pass
rw = np.memmap(path, np.float32, "r+")
rw[::1000] *= -1
rw.flush()
assert r[2000] == -2000, "one file, two maps, two truths"
assert np.fromfile(path, np.float32, 1, offset=8_000_000)[0] == -2_000_000
t = torch.from_file(path, shared=True, size=n, dtype=torch.float32)
assert t[5000].item() == -5000
t.mul_(2)
assert r[5000] == -10000 and r[5001] == 10002
del t, rw, r, c
bf = torch.from_file(sys.argv[1] + "/params/bf16", shared=True, size=1001, dtype=torch.bfloat16)
bf.fill_(1.5)
PY
cat >"$tmp/look.py" <<'PY'
import sys
import numpy as np
r = np.fromfile(sys.argv[1] + "/params/exp_avg", np.float32)
want = np.arange(3_000_001, dtype=np.float32)
want[::1000] *= -1
want *= 2
assert np.array_equal(r, want)
b = np.fromfile(sys.argv[1] + "/params/bf16", np.uint16)
assert b.shape == (1001,) and (b == 0x3FC0).all()
PY
start_momentfs "$tmp/backing" "$mnt" ram=8M,block=256K
"$PYTHON3" "$tmp/maps.py" "$mnt"
"$PYTHON3" "$tmp/look.py" "$mnt"
stop_momentfs "$mnt"
start_momentfs "$tmp/backing" "$mnt" ram=8M
"$PYTHON3" "$tmp/look.py" "$mnt"

# A mapping that nobody flushed is kept by a lazy unmount, and by SIGTERM: the pages come when the
# process ends. (sleeps in Python, with dirty pages)
cat >"$tmp/dirty.py" <<'PY'
import mmap, os, sys, time
f = open(sys.argv[1] + "/params/" + sys.argv[2], "w+b")
f.truncate(5_000_000)
m = mmap.mmap(f.fileno(), 0)
m[4_000_000:4_000_005] = b"dirty"
open(sys.argv[3], "w").close()
time.sleep(float(sys.argv[4]))
PY
for how in TERM lazy; do
	"$PYTHON3" "$tmp/dirty.py" "$mnt" "by-$how" "$tmp/go-$how" 1.5 &
	writer=$!
	retry 10 test -e "$tmp/go-$how" || fail "the writer did not start"
	if [ $how = TERM ]; then kill -TERM "$momentfs_pid"; else umount -l "$mnt" || fusermount3 -u -z "$mnt"; fi
	wait "$writer" || fail "the writer failed: $how"
	wait "$momentfs_pid" || fail "momentfs failed: $how"
	start_momentfs "$tmp/backing" "$mnt" ram=8M
	assert_eq "$(dd if="$mnt/params/by-$how" bs=1000000 skip=4 count=1 status=none | head -c 5)" dirty \
		"mapped pages, $how"
done
stop_momentfs "$mnt"
