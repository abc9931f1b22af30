#!/usr/bin/env bash
# Start fsdp_transformer.py on this machine, on several, or as a SLURM job; or predict its memory.
#
#   launch_fsdp.sh local       [--nproc-per-node N] [--dry-run] [arguments of the script]
#   launch_fsdp.sh multi-node  --nnodes N --rdzv-endpoint HOST:PORT [--nproc-per-node N] ...
#   launch_fsdp.sh slurm       --nnodes N --nproc-per-node N [--cpus-per-task N] ...
#   launch_fsdp.sh predict     --nnodes N --nproc-per-node N ...
#
#   predict      runs fsdp_memory.py, which needs no GPU: what each rank would hold at its peak
source "$(dirname "$0")/../launch.sh"

read_mode "local, multi-node, slurm or predict" "$@"
read_arguments "${@:2}"
check_counts
compose fsdp "$here/fsdp_transformer.py"
case "$mode" in
  predict)
    ranks="$((nnodes * nproc_per_node))"
    command=(python "$here/fsdp_memory.py" --world-size="$ranks")
    ;;
  slurm) batch fsdp ;;
esac
run
