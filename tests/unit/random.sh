#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Random operations on an engine against a model in memory: four seeds, on io_uring and on the thread fallback.
# MOMENT_RANDOM_OPS says how many operations a seed (tools/check --long: 100,000); sanitizer builds are slower and do
# fewer. tests/unit/test_random --seed replays one.
. "$(dirname "$0")/../functions.sh"
case ${SANITIZER:-} in
'') ops=${MOMENT_RANDOM_OPS:-20000} ;;
*thread*) ops=3000 ;;
*) ops=10000 ;;
esac
export TMPDIR=$tmp
"$abs_builddir/tests/unit/test_random" --seeds 4 --ops "$ops"
