#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Each public header compiles alone, without a warning, as C and as C++; and a step is written alike in both.
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

# Members are named in the order in which they are declared: C++ wants that.
cat >"$tmp/step.c" <<'END'
#include <moment/moment.h>
int step(struct moment_session *s, uint32_t w, float *p, const float *g, uint64_t n, const struct moment_optim *o);
int step(struct moment_session *s, uint32_t w, float *p, const float *g, uint64_t n, const struct moment_optim *o)
{
	struct moment_item it = {.param = w, .p = p, .g = g, .p_numel = n, .g_numel = n, .p_dtype = MOMENT_F32,
				 .g_dtype = MOMENT_F32, .optim = o};
	return moment_step(s, 1, &it, 1, MOMENT_STEP_FINITE);
}
END
cp "$tmp/step.c" "$tmp/step.cc"
set -- -Wall -Wextra -Wno-missing-field-initializers -Werror -I"$abs_srcdir/include" -c -o "$tmp/t.o"
$cc -std=c11 "$@" "$tmp/step.c" || fail "a step does not compile as C"
$cxx -std=c++20 "$@" "$tmp/step.cc" || fail "a step does not compile as C++"
