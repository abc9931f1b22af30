#!/usr/bin/env bash
# Start a script of this module on this machine, on several, or under SLURM.
#
#   launch_nccl.sh local       [SCRIPT] [--nproc-per-node N] [--dry-run] [arguments of the script]
#   launch_nccl.sh multi-node  [SCRIPT] --nnodes N --rdzv-endpoint HOST:PORT [--nproc-per-node N] ...
#   launch_nccl.sh slurm       [SCRIPT] --nnodes N --nproc-per-node N [--cpus-per-task N] ...
#
#   SCRIPT       bandwidth_test.py (default), collective_ops.py, point_to_point.py or topology.py
#   --ifname NAME   NCCL and gloo meet at that interface, on every machine
#   --nccl-debug    NCCL says what it finds and chooses: NCCL_DEBUG=INFO, a file for each rank
source "$(dirname "$0")/../launch.sh"

value_flags+=" --ifname"
switches+=" --nccl-debug"
least_gpus=2 # a collective of one rank sends nothing
script=bandwidth_test.py
read_mode "local, multi-node or slurm" "$@"
shift
if [[ ${1:-} == *.py ]]; then
  script="$1"
  shift
fi
[[ $script =~ ^(bandwidth_test|collective_ops|point_to_point|topology).py$ ]] \
  || fail "$script is none of bandwidth_test.py, collective_ops.py, point_to_point.py, topology.py"
read_arguments "$@"
[[ ${nproc_per_node:-1} =~ ^[1-9][0-9]*$ ]] \
  || fail "--nproc-per-node must be a whole number of at least 1, not '$nproc_per_node'"
check_counts
[[ -z $ifname ]] || variables+=(NCCL_SOCKET_IFNAME="=$ifname" GLOO_SOCKET_IFNAME="$ifname")
[[ -z $nccl_debug ]] || variables+=(NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,NET,ENV
  NCCL_DEBUG_FILE=nccl-%h-%p.log)
compose nccl "$here/$script"
run
