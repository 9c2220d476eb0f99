#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a test program with a temporary folder of its own, which goes when the program ends, however it ends.
dir=$(mktemp -d "${TMPDIR:-/tmp}/momentfs-test.XXXXXX") || exit 99
trap 'rm -rf --one-file-system "$dir"' EXIT
trap 'exit 143' INT TERM HUP
TMPDIR=$dir "$@"
