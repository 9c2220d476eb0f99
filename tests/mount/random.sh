# SPDX-License-Identifier: Apache-2.0
# Random operations through the mount against a model: short here; tests/mount/random_ops.py --ops 20000 for long.
. "$(dirname "$0")/../functions.sh"
requires_fuse
python=${PYTHON3:-/usr/bin/python3}
export TMPDIR=$tmp

"$python" "$abs_srcdir/tests/mount/random_ops.py" --ops "${RANDOM_OPS:-2500}" --io auto
"$python" "$abs_srcdir/tests/mount/random_ops.py" --ops "${RANDOM_OPS:-2500}" --io threads
