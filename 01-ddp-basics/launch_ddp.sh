#!/usr/bin/env bash
# Start ddp_training.py on this machine, on several machines, elastically, or as a SLURM job.
#
#   launch_ddp.sh local       [--nproc-per-node N] [--dry-run] [arguments of the script]
#   launch_ddp.sh multi-node  --nnodes N --rdzv-endpoint HOST:PORT [--nproc-per-node N] ...
#   launch_ddp.sh elastic     [--nnodes MIN:MAX --rdzv-endpoint HOST:PORT] --output-dir DIR ...
#   launch_ddp.sh slurm       --nnodes N --nproc-per-node N [--cpus-per-task N] --output-dir DIR ...
#
#   elastic      like multi-node; when a rank fails, all restart from the last checkpoint, 3 times
source "$(dirname "$0")/../launch.sh"

read_mode "local, multi-node, elastic or slurm" "$@"
read_arguments "${@:2}"
check_counts
script="$here/ddp_training.py"
compose ddp_training "$script"
if [[ $mode == elastic ]]; then
  need_folder
  # Otherwise restarted ranks may read the addresses of the dead ones.
  variables+=(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
  [[ $nnodes != 1 ]] || meet=(--standalone)
  command=(torchrun --nnodes="$nnodes" --nproc-per-node="$nproc_per_node" --max-restarts=3
    "${meet[@]}" "$script" --resume)
elif [[ $mode == slurm ]]; then
  batch ddp_training "$script"
fi
run
