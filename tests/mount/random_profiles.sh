# SPDX-License-Identifier: Apache-2.0
# Random operations through the mount against models: full pools, steps and sessions, many files (random_ops.py --help
# tells what each does). Short here; RANDOM_OPS=20000 (tools/check --long) for long, with 100,000 files.
. "$(dirname "$0")/../functions.sh"
requires_fuse
requires_python numpy
python=${PYTHON3:-/usr/bin/python3}
export TMPDIR=$tmp MOMENT_QUIET=1

ops=${RANDOM_OPS:-600}
files=2000
[ "$ops" -lt 20000 ] || files=100000
random() { "$python" "$abs_srcdir/tests/mount/random_ops.py" "$@"; }

random --profile full --ops "$ops" --io uring
random --profile full --ops "$ops" --io threads
random --profile steps --ops $((ops / 3)) --io uring
random --profile steps --ops $((ops / 3)) --io threads
random --profile tree --ops $((ops / 2)) --files $files --io auto
