#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Random operations on an engine against a model in memory: four seeds, on io_uring and on the thread fallback.
# Sanitizer builds, ten times slower, do a tenth. MOMENT_RANDOM_OPS=N for longer; tests/unit/test_random --seed replays.
. "$(dirname "$0")/../functions.sh"
ops=${MOMENT_RANDOM_OPS:-$([ -z "${SANITIZER:-}" ] && echo 100000 || echo 10000)}
export TMPDIR=$tmp
"$abs_builddir/tests/unit/test_random" --seeds 4 --ops "$ops"
# Leases of a session, and many threads at once, for as long in proportion.
"$abs_builddir/tests/unit/test_session_random" --seeds 4 --blocks $((ops / 10))
"$abs_builddir/tests/unit/test_concurrent" --ops $((ops / 200))
