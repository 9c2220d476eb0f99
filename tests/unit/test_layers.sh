#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Includes point downward only (src/README.md has the picture). A part may include itself, what is listed
# for it, and system headers; adam (plain memory) only its own public header.
. "$(dirname "$0")/../functions.sh"
cd "$abs_srcdir"

bad=0
complain() { printf '%s: must not include "%s"\n' "$1" "$2" >&2; bad=1; }

# Our own headers that FILE includes, by their path under src/ or include/.
includes() {
	local dir=${1%/*}
	sed -nE 's/^[[:space:]]*#[[:space:]]*include[[:space:]]*["<]([^">]+)[">].*/\1/p' "$1" | while read -r h; do
		if [ -e "$dir/$h" ]; then realpath --relative-to=. "$dir/$h" | sed -E 's@^(src|include)/@@'
		elif [ -e "src/$h" ] || [ -e "include/$h" ]; then echo "$h"
		elif [[ $h == fuse*.h ]]; then echo "$h"
		fi
	done
}

# allow DIR PATTERN: the sources of src/DIR may include only what matches.
seen=0
allow() {
	local f h
	for f in $(find "$1" -name '*.[ch]'); do
		seen=$((seen + 1))
		for h in $(includes "$f"); do [[ $h =~ $2 ]] || complain "$f" "$h"; done
	done
}

allow src/adam '^(adam/|moment/(kernels|dtype)\.h)'
allow src/engine '^(engine|moment)/'
allow src/daemon '^(daemon|engine|moment|fuse3?)(/|_|\.|$)'
allow src/lib '^(lib|engine|adam|moment)/'
allow include/moment '^moment/'
[ "$seen" -gt 0 ] || fail "no sources found under $PWD"

# Inside the engine: the lower modules know nothing of those that drive them.
below() { # below MODULE PATTERN-OF-WHAT-IT-MUST-NOT-INCLUDE
	local f h
	for f in src/engine/$1*.[ch]; do
		[ -e "$f" ] || continue
		for h in $(includes "$f"); do
			if [[ $h =~ ^engine/($2) ]]; then complain "$f" "$h"; fi
		done
	done
}
below policy 'io|arena|pool|cache|catalog|engine|loop|commit'
below loop 'pool|cache|catalog|engine|policy|commit'
below io 'pool|cache|catalog|engine|policy|commit'
below arena 'pool|cache|catalog|engine|policy|commit'
below pool 'cache|catalog|engine\.|policy|commit'
below catalog 'cache|engine\.|policy|commit'

[ "$bad" = 0 ] || fail "includes point upward"
