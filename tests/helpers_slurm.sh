#!/usr/bin/env bash
# helpers_slurm.py starts this on each node of a virtual cluster, in a namespace of mounts of its own:
#
#   helpers_slurm.sh PACKAGES FOLDER NODE
#
# shows the unpacked PACKAGES as if they were installed, and becomes SLURM's daemon of that node.
# node0 is also the head. FOLDER has slurm.conf, and gets what the daemons write.
set -euo pipefail
packages="$1" folder="$2" node="$3"

# SLURM has the paths of its plugins and of slurmstepd compiled in.
[[ $packages == / ]] || mount -t overlay slurm -o lowerdir="$packages/usr:/usr" /usr
export PATH="$PATH:/usr/sbin"
config="$folder/slurm.conf" socket="$folder/munge.socket"

if [[ $node == node0 && ! -e $socket ]]; then
  (umask 077 && head -c 128 /dev/urandom >"$folder/munge.key")
  munged --force --num-threads=2 --key-file="$folder/munge.key" --socket="$socket" \
    --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munge.seed"
  slurmctld -D -f "$config" &
fi
until [[ -e $socket ]]; do
  sleep 0.1
done
exec slurmd -D -f "$config" -N "$node"
