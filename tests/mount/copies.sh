# SPDX-License-Identifier: Apache-2.0
# cp -r, tar, tar -S and rsync -a, in parallel, there and back: equal sums, holes stay holes, with data four
# times the RAM tier.
. "$(dirname "$0")/../functions.sh"
requires_fuse
requires rsync tar cp
mnt=$tmp/mnt
src=$tmp/src

mkdir -p "$src/transformer.h.0.attn.c_attn.weight" "$src/two words" "$src/deep/er/and/deeper" "$src/many"
for n in 1 127 4096 4097 262143 262145 3000001; do
	head -c $n /dev/urandom >"$src/transformer.h.0.attn.c_attn.weight/b$n"
done
head -c 9000000 /dev/urandom >"$src/two words/exp_avg"
for i in $(seq 200); do head -c $((i * 37)) /dev/urandom >"$src/many/p$i"; done
echo '{"name": "x"}' >"$src/deep/er/and/deeper/meta.json"
chmod 640 "$src/deep/er/and/deeper/meta.json"
touch -d '2020-02-02 02:02:02.123456789' "$src/deep/er/and/deeper/meta.json"
truncate -s 40M "$src/sparse"
printf middle | dd of="$src/sparse" bs=1 seek=20000001 conv=notrunc status=none
: >"$src/empty"

sums() { (cd "$1" && find . -type f -print0 | sort -z | xargs -0 sha256sum); }
same() {
	sums "$1" >"$tmp/sums"
	cmp "$tmp/sums" "$tmp/sums.src" || fail "$2: sums differ: $(diff "$tmp/sums" "$tmp/sums.src" | head -5)"
	[ "$(stat -c '%a %y' "$1/deep/er/and/deeper/meta.json")" = \
		"$(stat -c '%a %y' "$src/deep/er/and/deeper/meta.json")" ] || [ "$2" = 'cp -r' ] ||
		fail "$2: mode or time differ"
}
sums "$src" >"$tmp/sums.src"

start_momentfs "$tmp/backing" "$mnt" ram=8M,block=256K
p=$mnt/params
mkdir "$p/cp" "$p/tar" "$p/tars" "$p/rsync"
pids=()
cp -r "$src/." "$p/cp" & pids+=($!)
tar -C "$src" --format=posix -cf - . | tar -C "$p/tar" -xpf - & pids+=($!)
tar -C "$src" --format=posix -cSf - . | tar -C "$p/tars" -xpSf - & pids+=($!)
rsync -aS "$src/" "$p/rsync/" & pids+=($!)
for i in "${pids[@]}"; do wait "$i" || fail "a copy into the mount failed"; done
same "$p/cp" 'cp -r'
same "$p/tar" tar
same "$p/tars" 'tar -S'
same "$p/rsync" 'rsync -a'
differ=$(rsync -acni --delete "$src/" "$p/rsync/")
[ -z "$differ" ] || fail "rsync finds differences where there are none: $differ"

stop_momentfs "$mnt"
start_momentfs "$tmp/backing" "$mnt" ram=8M
same "$p/rsync" 'rsync -a, remounted'
less() { [ "$(stat -c %b "$p/$1/sparse")" -lt 8192 ]; }
for how in tars rsync; do less $how || fail "$how filled the holes: $(stat -c %b "$p/$how/sparse") blocks"; done

mkdir "$tmp/back" "$tmp/back/cp" "$tmp/back/tar" "$tmp/back/tars" "$tmp/back/rsync"
pids=()
cp -r --sparse=always "$p/cp/." "$tmp/back/cp" & pids+=($!)
tar -C "$p/tar" --format=posix -cf - . | tar -C "$tmp/back/tar" -xpf - & pids+=($!)
tar -C "$p/tars" --format=posix -cSf "$tmp/back/tars.tar" . && tar -C "$tmp/back/tars" -xpSf "$tmp/back/tars.tar" & pids+=($!)
rsync -aS "$p/rsync/" "$tmp/back/rsync/" & pids+=($!)
for i in "${pids[@]}"; do wait "$i" || fail "a copy out of the mount failed"; done
same "$tmp/back/cp" 'cp -r'
same "$tmp/back/tar" 'tar back'
same "$tmp/back/tars" 'tar -S back'
same "$tmp/back/rsync" 'rsync -a back'
[ "$(stat -c %s "$tmp/back/tars.tar")" -lt 30000000 ] || fail "tar -S archived the holes of sparse"

# The trap of tar -S: data that is only in RAM must not look like a hole.
head -c 2000000 /dev/urandom >"$p/fresh"
tar -C "$p" -cSf - fresh | tar -C "$tmp/back" -xSf -
assert_eq "$(sha "$tmp/back/fresh")" "$(sha "$p/fresh")" "tar -S of what is only in RAM"
stop_momentfs "$mnt"
