# SPDX-License-Identifier: Apache-2.0
# Shared by the scripts of this folder: where the source is, and how to have a build of it.

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
jobs=$(nproc)

die() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 1; }

# make_configure: configure is made once, and again when its source is newer.
make_configure() {
	(
		cd "$top"
		mkdir -p build-aux m4
		if [ ! -e configure ] || [ ! -e Makefile.in ] || [ configure.ac -nt configure ] ||
			[ Makefile.am -nt Makefile.in ]; then
			autoreconf -fi
		fi
	)
}

# build_in DIR [CONFIGURE OPTION]...: configures DIR if that was not done, and builds.
# Everything that is printed on the way goes to DIR/build.log.
build_in() {
	local dir=$1
	shift
	if [ -e "$top/config.status" ] && [ "$dir" != "$top" ]; then
		echo "this source folder is configured for a build of its own; run \`make distclean' in it first" >&2
		return 1
	fi
	mkdir -p "$dir"
	{
		make_configure &&
			if [ ! -e "$dir/Makefile" ] || [ "$top/configure" -nt "$dir/config.status" ] ||
				[ "$(cat "$dir/.options" 2>/dev/null)" != "$*" ]; then
				(cd "$dir" && "$top/configure" "$@") && echo "$*" >"$dir/.options"
			fi &&
			make -C "$dir" -j"$jobs" all
	} >"$dir/build.log" 2>&1
}

# use_build: has a build of what a user runs, and exports where it is. It is in build/release, or in the source
# folder if that was configured, or in MOMENT_BUILD, which is taken as it is (the tests set it).
use_build() {
	local dir=${MOMENT_BUILD:-$top/build/release}
	if [ -z "${MOMENT_BUILD:-}" ]; then
		if [ -e "$top/config.status" ]; then dir=$top; fi
		build_in "$dir" || {
			tail -n 30 "$dir/build.log" >&2
			die "the build failed; its log is $dir/build.log"
		}
	fi
	export MOMENTFS=$dir/momentfs MOMENTCTL=$dir/momentctl LIBMOMENT=$dir/.libs/libmoment.so
	export MOMENT_BUILD=$dir PYTHONPATH=$top/src/python${PYTHONPATH:+:$PYTHONPATH}
	PYTHON3=/usr/bin/python3
	[ -x $PYTHON3 ] || PYTHON3=python3
	export PYTHON3 PYTHONDONTWRITEBYTECODE=1
}
