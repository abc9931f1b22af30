#!/usr/bin/env bash
# Start a template on this machine, on several, or as a SLURM job; or predict its memory.
#
#   launch_fsdp.sh local       [SCRIPT] [--nproc-per-node N] [--dry-run] [arguments of the script]
#   launch_fsdp.sh multi-node  [SCRIPT] --nnodes N --rdzv-endpoint HOST:PORT [--nproc-per-node N] ...
#   launch_fsdp.sh slurm       [SCRIPT] --nnodes N --nproc-per-node N --output-dir DIR ...
#   launch_fsdp.sh predict     --nnodes N --nproc-per-node N ...
#
#   SCRIPT       fsdp_transformer.py (default) or fsdp_finetune.py
#   predict      runs fsdp_memory.py, which needs no GPU: what each rank would hold at its peak
source "$(dirname "$0")/../launch.sh"

read_mode "local, multi-node, slurm or predict" "$@"
read_script fsdp_transformer.py "^(To copy:|Copy this file)" "${@:2}"
check_counts
compose "${script%.py}" "$here/$script"
case "$mode" in
  predict)
    [[ $script == fsdp_transformer.py ]] || fail "predict knows fsdp_transformer.py, not $script"
    ranks="$((nnodes * nproc_per_node))"
    command=(python "$here/fsdp_memory.py" --world-size="$ranks")
    ;;
  slurm) batch "${script%.py}" "$here/$script" ;;
esac
run
