#!/usr/bin/env bash
# Start a script of this module on this machine, on several, or as a SLURM job.
#
#   launch_advanced.sh local       [SCRIPT] [--nproc-per-node N] [--dry-run] [arguments of the script]
#   launch_advanced.sh multi-node  [SCRIPT] --nnodes N --rdzv-endpoint HOST:PORT ...
#   launch_advanced.sh slurm       [SCRIPT] --nnodes N --nproc-per-node N [--cpus-per-task N] ...
#
#   SCRIPT       hybrid_parallelism.py (default) or another lesson of this folder that uses ranks
source "$(dirname "$0")/../launch.sh"

script=hybrid_parallelism.py
known="activation_checkpointing communication_overlap expert_parallel gradient_accumulation"
known+=" gradient_compression hybrid_parallelism local_sgd low_precision pipeline_parallel"
known+=" ring_attention tensor_parallel tensor_parallel_dtensor ulysses"
read_mode "local, multi-node or slurm" "$@"
shift
if [[ ${1:-} == *.py ]]; then
  script="$1"
  shift
fi
[[ " $known " == *" ${script%.py} "* ]] || fail "$script is none of ${known// /.py, }.py"
read_arguments "$@"
check_counts
compose "${script%.py}" "$here/$script"
[[ $mode != slurm ]] || batch "${script%.py}"
run
