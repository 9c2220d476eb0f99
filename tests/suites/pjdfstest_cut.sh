# SPDX-License-Identifier: Apache-2.0
# Read by pjdfstest's misc.sh, at its end: cuts the suite to what params/ holds, regular files and directories.
#
# What is to be made there and is neither (a symbolic or hard link, a fifo, a device, a socket) must be refused with
# EPERM, and every later expectation that names it is counted as not applicable; but a call that would have followed a
# symbolic link is made on what it was to point to. All others are pjdfstest's own.

eval "$(declare -f expect | sed '1s/expect/suite_expect/')"
eval "$(declare -f test_check | sed '1s/test_check/suite_test_check/')"
undone=
refused=" " # names of what was refused
declare -A points_to # the refused symbolic links
holders=" " # the directories in which that was

not_applicable()
{
	echo "ok ${ntest} # SKIP not a regular file or directory: $*"
	: $((ntest += 1))
}

# names_refused WORD...: whether one of the words is something refused, or lies in it.
names_refused()
{
	local w r
	for w in "$@"; do
		case "$refused" in *" $w "*) return 0 ;; esac
		for r in $refused; do
			case "$w" in "$r"/*) return 0 ;; esac
		done
	done
	return 1
}

# The way to what the refused symbolic link NAME was to point to.
target_of()
{
	local to="${points_to[$1]:-}"

	case "$to,$1" in
	,* | /*) echo "$to" ;;
	*,*/*) echo "${1%/*}/$to" ;;
	*) echo "$to" ;;
	esac
}

expect()
{
	local want="$1" op at name=
	shift
	undone=
	local words=("$@")

	# Options of pjdfstest come before the call: -u UID -g GID -U MASK, and -- where a number may be negative.
	for ((at = 0; at < $#; at += 2)); do
		case "${words[at]}" in -[ugU]) ;; *) break ;; esac
	done
	[ "${words[at]}" != -- ] || : $((at += 1))
	op=${words[at]}
	case "$op" in
	symlink | link) name=${words[at + 2]} ;;
	mkfifo | mknod | bind) name=${words[at + 1]} ;;
	esac
	if [ -n "$name" ]; then # something that is not made here
		if [ "$want" != 0 ] || { [ "$op" = link ] && names_refused "${words[at + 1]}"; }; then
			${fstest} "$@" >/dev/null 2>&1
			not_applicable "$@"
		else
			suite_expect EPERM "$@"
		fi
		refused="$refused$name "
		case "$name" in */*) holders="$holders${name%/*} " ;; esac
		[ "$op" != symlink ] || points_to[$name]=${words[at + 1]}
		return
	fi
	name=${words[at + 1]:-}
	case "$op,$want" in
	# Something else of this name is made now.
	create,* | mkdir,*) names_refused "${name%/*}" || refused=${refused// $name / } ;;
	# A symbolic link would have been followed.
	*,ELOOP) ;;
	chmod,* | chown,* | stat,* | truncate,*)
		name=$(target_of "$name")
		if [ -n "$name" ]; then
			words[at + 1]=$name
			suite_expect "$want" "${words[@]}"
			return
		fi
		;;
	# The directory that was to hold something is empty.
	rmdir,*ENOTEMPTY* | rename,*ENOTEMPTY*)
		for name in "${words[@]}"; do
			case "$holders" in *" $name "*) refused="$refused$name " ;; esac
		done
		;;
	# A second name was refused.
	lstat,*,2)
		${fstest} "$@" >/dev/null 2>&1
		not_applicable "$@"
		return
		;;
	esac
	if names_refused "$@"; then
		${fstest} "$@" >/dev/null 2>&1
		not_applicable "$@"
		case "$op,$want" in
		unlink,*) undone=1 ;;
		rename,0) undone=1 refused="$refused${words[at + 2]} " ;;
		esac
	else
		suite_expect "$want" "$@"
	fi
}

# Times before and after something that was not done.
test_check()
{
	case "$undone $*" in
	1* | *ENOENT*) not_applicable "$@" ;;
	*) suite_test_check "$@" ;;
	esac
}
