#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The kernels on CPUs that lack AVX-512, AVX2, FMA or F16C: the right level is chosen, no illegal
# instruction is met, and the bits are those of every other machine. Also: MOMENT_SIMD only lowers.
. "$(dirname "$0")/../functions.sh"
[ "$(uname -m)" = x86_64 ] || skip "the levels are x86-64's"
dir=$abs_builddir/tests/unit

# level_of COMMAND...: what test_adam says it uses; its checks must pass too.
level_of() {
	local out
	out=$("$@" "$dir/test_adam" nofork) || fail "$* test_adam ended with $?"
	sed -n 's/^level in use: //p' <<<"$out"
}

best=$(level_of env -u MOMENT_SIMD)
assert_eq "$(level_of env MOMENT_SIMD=scalar)" scalar "MOMENT_SIMD=scalar"
[ "$best" = scalar ] || assert_eq "$(level_of env MOMENT_SIMD=avx2)" avx2 "MOMENT_SIMD=avx2"
[ "$best" = avx512-bf16 ] ||
	assert_eq "$(level_of env MOMENT_SIMD=avx512-bf16)" "$best" "above what the CPU has"

[ -z "${SANITIZER:-}" ] || skip "sanitizers do not run in an emulator"
requires qemu-x86_64
while read -r cpu level more; do
	emulate=(env -u MOMENT_SIMD qemu-x86_64 -cpu "$cpu")
	rc=0
	"${emulate[@]}" "$dir/test_adam_bits" small >"$tmp/out" 2>"$tmp/err" || rc=$?
	[ "$rc" = 0 ] || { cat "$tmp/out" "$tmp/err" >&2; fail "$cpu: test_adam_bits ended with $rc"; }
	assert_eq "$(sed -n 's/.*best level //p' "$tmp/out")" "$level" "$cpu"
	[ -z "$more" ] || assert_eq "$(level_of "${emulate[@]}" 2>"$tmp/err")" "$level" "$cpu, in use"
done <<'CPUS'
Nehalem scalar test_adam
Haswell,-fma scalar
Haswell,-f16c scalar
Haswell avx2 test_adam
CPUS
