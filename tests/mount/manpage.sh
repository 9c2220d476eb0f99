# SPDX-License-Identifier: Apache-2.0
# The manual pages say what the programs say: the options of momentfs come from one table.
. "$(dirname "$0")/../functions.sh"
page=$abs_srcdir/man/momentfs.8

"$MOMENTFS" --help-man >"$tmp/options"
sed -n '/^\.\\" begin options/,/^\.\\" end options/p' "$page" | sed '1d;$d' >"$tmp/page"
diff -u "$tmp/page" "$tmp/options" ||
	fail "man/momentfs.8 and the table differ: put the output of momentfs --help-man between the markers"
"$MOMENTFS" --help >"$tmp/help"
for option in $(sed -n 's/^\.BI* \([a-z_]*\).*/\1/p' "$tmp/options"); do
	grep -Eq "^  $option(=|$)" "$tmp/help" || fail "--help does not name $option"
done
"$MOMENTFS" --version | grep -q '^momentfs [0-9]' || fail "--version"
"$MOMENTCTL" --help | sed -n 's/^  \([a-z]\{2,\}\) .*/\1/p' >"$tmp/commands"
[ -s "$tmp/commands" ] || fail "momentctl --help names no commands"
while read -r command; do
	grep -Eq "^\.(B|BI|BR|SS) \"?$command\b" "$abs_srcdir/man/momentctl.1" || fail "momentctl.1 does not know $command"
done <"$tmp/commands"
if command -v man >/dev/null; then
	for p in momentfs.8 momentctl.1; do
		warnings=$(LC_ALL=C.UTF-8 MANROFFSEQ='' MANWIDTH=80 man --warnings -E UTF-8 -l -Tutf8 -Z "$abs_srcdir/man/$p" 2>&1 >/dev/null)
		[ -z "$warnings" ] || fail "$p: $warnings"
	done
fi
