# SPDX-License-Identifier: Apache-2.0
# A directory that is read while its entries are renamed: each is met once, and the reading ends. Read again from the
# start it has the new names.
. "$(dirname "$0")/../functions.sh"
requires_fuse
mnt=$tmp/mnt
start_momentfs "$tmp/backing" "$mnt" ram=16M,block=64K,commit=off
"$PYTHON3" - "$mnt/params" <<'END' || fail "renaming what is read"
import os, sys

os.chdir(sys.argv[1])
os.mkdir("d")
N = 3000
for i in range(N):
    open(f"d/old{i:05}", "w").close()
met = 0
with os.scandir("d") as entries:
    for e in entries:
        os.rename(e.path, f"d/new{met:05}")
        met += 1
        assert met <= N, "entries are met again under their new names"
assert met == N, met
names = sorted(os.listdir("d"))
assert len(names) == N and names[0] == "new00000", names[:3]

# What is removed meanwhile does not hide others, and rewinddir() shows what is new.
fd = os.open("d", os.O_RDONLY | os.O_DIRECTORY)
with os.scandir(fd) as entries:
    for n, e in enumerate(entries):
        os.unlink(e.name, dir_fd=fd)
assert n == N - 1 and os.listdir("d") == [], n
open("d/late", "w").close()
assert os.listdir(fd) == ["late"]
os.close(fd)
os.unlink("d/late")
os.rmdir("d")
END
stop_momentfs "$mnt"
