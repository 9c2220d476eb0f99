#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A short run of every fuzz target with clang's libFuzzer, under AddressSanitizer and UBSan: no crash, no leak, no
# allocation above a limit. MOMENT_FUZZ_SECONDS=N for each target (default 2, or 10 with MOMENT_CRASH=full).
. "$(dirname "$0")/../functions.sh"
seconds=${MOMENT_FUZZ_SECONDS:-$([ "${MOMENT_CRASH:-}" = full ] && echo 10 || echo 2)}
clang=$(command -v clang || command -v clang-14 || command -v clang-16 || command -v clang-18) || skip "clang is not installed"
printf 'int LLVMFuzzerTestOneInput(const unsigned char *d, unsigned long n) { return d && n > 1u << 30; }\n' >"$tmp/t.c"
"$clang" -fsanitize=fuzzer,address,undefined -o "$tmp/t" "$tmp/t.c" 2>/dev/null || skip "this clang has no libFuzzer"

flags=(-g -O1 -std=gnu17 -include "$abs_builddir/config.h" -D_GNU_SOURCE -DFUZZ_ENGINE -I"$abs_srcdir/include"
	-I"$abs_srcdir/src" -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined)
read -ra fuse <<<"$(pkg-config --cflags fuse3)"
read -ra libs <<<"$(pkg-config --libs liburing libxxhash sqlite3)"

mkdir "$tmp/o"
printf '%s\0' "$abs_srcdir"/src/engine/*.c |
	xargs -0 -P "$(nproc)" -I{} sh -c 'o=$1; shift; f={}; exec "$@" -c -o "$o/$(basename "$f" .c).o" "$f"' _ "$tmp/o" \
		"$clang" "${flags[@]}" || fail "the engine does not compile with $clang"

export TMPDIR=$tmp
for c in "$abs_srcdir"/tests/fuzz/fuzz_*.c; do
	name=$(basename "$c" .c)
	more=()
	case $name in
	fuzz_control) more=("$abs_srcdir/src/daemon/control.c") ;;
	fuzz_options) more=("$abs_srcdir/src/daemon/options.c") ;;
	esac
	"$clang" "${flags[@]}" -fsanitize=fuzzer "${fuse[@]}" -o "$tmp/$name" "$c" "${more[@]}" "$tmp"/o/*.o "${libs[@]}" -lm -pthread ||
		fail "$name does not build"
	mkdir "$tmp/corpus"
	cp "$abs_srcdir/tests/fuzz/corpus-${name#fuzz_}"/* "$tmp/corpus/"
	(cd "$tmp" && "./$name" -max_total_time="$seconds" -max_len=4096 -rss_limit_mb=1024 -malloc_limit_mb=256 -timeout=20 \
		-print_final_stats=1 corpus) >"$tmp/log" 2>&1 || {
		tail -n 60 "$tmp/log" >&2
		base64 "$tmp"/crash-* "$tmp"/leak-* "$tmp"/oom-* "$tmp"/timeout-* >&2 2>/dev/null || true
		fail "$name"
	}
	echo "$name: $(sed -n 's/^stat::number_of_executed_units: *//p' "$tmp/log") inputs"
	rm -rf "$tmp/corpus"
done
