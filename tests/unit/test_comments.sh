#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Comments read as they were written: every line of a block comment begins with a star and a space. A formatter that
# reflows text leaves lines without either.
. "$(dirname "$0")/../functions.sh"

# shellcheck disable=SC2046 # names of ours: no spaces
bad=$(cd "$abs_srcdir" && awk '
	FNR == 1 { in_comment = 0 }
	in_comment && !/^[ \t]*\*([ \t\/]|$)/ { print FILENAME ":" FNR ": " $0 }
	in_comment && /\*\// { in_comment = 0; next }
	!in_comment && /^[ \t]*\/\*/ && !/\*\// { in_comment = 1 }
' $(find include src tests -name '*.[ch]')) || exit 1
[ -z "$bad" ] || fail "lines of comments that do not begin with a star and a space:
$bad"
grep -q '^ReflowComments: *false' "$abs_srcdir/.clang-format" || fail ".clang-format may reflow comments"
