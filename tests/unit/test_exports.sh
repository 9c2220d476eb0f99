#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# libmoment.so shows moment_ symbols and nothing else, and every function that moment.h, or kernels.h
# which it includes, declares is there.
. "$(dirname "$0")/../functions.sh"
requires nm
lib=${LIBMOMENT:-$abs_builddir/.libs/libmoment.so}
[ -e "$lib" ] || fail "$lib is not built"

nm -D --defined-only "$lib" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' | sort -u >"$tmp/exported"
if grep -v '^moment_' "$tmp/exported"; then fail "exported without the moment_ prefix (above)"; fi
[ -s "$tmp/exported" ] || fail "$lib exports nothing"

header=$tmp/header.h
cat "$abs_srcdir"/include/moment/{moment,kernels}.h >"$header"
sed -E 's@//.*@@' "$header" | tr '\n' ' ' | sed -E 's@/\*[^*]*\*+([^/*][^*]*\*+)*/@ @g' |
	grep -oE '\bmoment_[a-z0-9_]+ *\(' | tr -d ' (' | sort -u >"$tmp/declared"
# Callback types and macros are not functions: what is neither exported nor called a type is missing.
sed -nE 's/.*\(\*(moment_[a-z0-9_]+)\).*/\1/p' "$header" | sort -u >"$tmp/types"
missing=$(comm -23 "$tmp/declared" "$tmp/exported" | comm -23 - "$tmp/types")
[ -z "$missing" ] || fail "declared in moment.h but not exported: $missing"
undeclared=$(comm -13 "$tmp/declared" "$tmp/exported")
[ -z "$undeclared" ] || fail "exported but not declared in moment.h: $undeclared"
