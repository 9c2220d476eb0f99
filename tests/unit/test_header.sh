#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Each public header compiles alone, without a warning, as C and as C++.
. "$(dirname "$0")/../functions.sh"
cc=${CC:-gcc} cxx=${CXX:-g++}
requires "${cc%% *}" "${cxx%% *}"

n=0
for h in "$abs_srcdir"/include/moment/*.h; do
	n=$((n + 1))
	name=moment/$(basename "$h")
	# Twice, so that a missing guard shows; and with the namespace clean of our config.h.
	printf '#include <%s>\n#include <%s>\nint main(void) { return 0; }\n' "$name" "$name" >"$tmp/t.c"
	cp "$tmp/t.c" "$tmp/t.cc"
	for std in c11 gnu17; do
		$cc -std=$std -Wall -Wextra -Wstrict-prototypes -Werror -I"$abs_srcdir/include" \
			-c "$tmp/t.c" -o "$tmp/t.o" || fail "$name does not compile as $std"
	done
	for std in c++11 c++17; do
		$cxx -std=$std -Wall -Wextra -Werror -I"$abs_srcdir/include" \
			-c "$tmp/t.cc" -o "$tmp/t.o" || fail "$name does not compile as $std"
	done
done
[ "$n" -gt 0 ] || fail "no public headers"
