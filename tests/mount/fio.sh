# SPDX-License-Identifier: Apache-2.0
# fio writes four times the RAM tier with a checksum in each block and verifies it, with write(2), mapped, and with
# io_uring.
. "$(dirname "$0")/../functions.sh"
requires_fuse
requires fio
mnt=$tmp/mnt
cd "$tmp" # fio leaves files where it runs

start_momentfs "$tmp/backing" "$mnt" ram=16M,block=256K
for engine in psync mmap io_uring; do
	fio --name=$engine --directory="$mnt/params" --ioengine=$engine --rw=randwrite --bs=4k-256k \
		--size=32M --numjobs=2 --verify=xxhash --verify_fatal=1 --do_verify=1 --randseed=7 --iodepth=8 \
		--group_reporting --minimal >"$tmp/fio.out" 2>"$tmp/fio.err" ||
		fail "fio --ioengine=$engine: $(cat "$tmp/fio.err")"
	! grep -i verify "$tmp/fio.err" || fail "fio --ioengine=$engine found wrong bytes"
done
# Again from the drive, after a remount.
stop_momentfs "$mnt"
start_momentfs "$tmp/backing" "$mnt" ram=16M
fio --name=psync --directory="$mnt/params" --ioengine=psync --rw=randwrite --bs=4k-256k --size=32M \
	--numjobs=2 --verify=xxhash --verify_fatal=1 --verify_only --randseed=7 --minimal >"$tmp/fio.out" \
	2>"$tmp/fio.err" || fail "after a remount: $(cat "$tmp/fio.err")"
stop_momentfs "$mnt"
