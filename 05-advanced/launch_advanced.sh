#!/usr/bin/env bash
# Start a script of this module on this machine, on several, or as a SLURM job.
#
#   launch_advanced.sh local       [SCRIPT] [--nproc-per-node N] [--dry-run] [arguments of the script]
#   launch_advanced.sh multi-node  [SCRIPT] --nnodes N --rdzv-endpoint HOST:PORT ...
#   launch_advanced.sh slurm       [SCRIPT] --nnodes N --nproc-per-node N [--cpus-per-task N] ...
#
#   SCRIPT       hybrid_parallelism.py (default) or another lesson of this folder that uses ranks
source "$(dirname "$0")/../launch.sh"

read_mode "local, multi-node or slurm" "$@"
# Lessons whose docstring starts them by torchrun: the others are no job of several ranks.
read_script hybrid_parallelism.py "CPU +torchrun" "${@:2}"
check_counts
compose "${script%.py}" "$here/$script"
[[ $mode != slurm ]] || batch "${script%.py}" "$here/$script"
run
