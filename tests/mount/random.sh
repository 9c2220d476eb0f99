# SPDX-License-Identifier: Apache-2.0
# Random operations through the mount against a model: short here; tests/mount/random_ops.py --ops 20000 for long. More
# profiles are in random_profiles.sh.
. "$(dirname "$0")/../functions.sh"
requires_fuse
python=${PYTHON3:-/usr/bin/python3}
export TMPDIR=$tmp

"$python" "$abs_srcdir/tests/mount/random_ops.py" --ops "${RANDOM_OPS:-1500}" --io auto
"$python" "$abs_srcdir/tests/mount/random_ops.py" --ops "${RANDOM_OPS:-1500}" --io threads
