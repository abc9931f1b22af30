#!/usr/bin/env bash
# Start ddp_mnist.py on this machine, on several machines, or as a SLURM job.
#
#   launch_ddp.sh local       [--nproc-per-node N] [--dry-run] [arguments of the script]
#   launch_ddp.sh multi-node  --nnodes N --rdzv-endpoint HOST:PORT [--nproc-per-node N] ...
#   launch_ddp.sh slurm       --nnodes N --nproc-per-node N [--device cpu] ...
#
# multi-node: run the same line on every machine; HOST is one of them and reaches all.
# slurm: submits a job, with a GPU for each process unless --device cpu. SBATCH_PARTITION,
# SBATCH_ACCOUNT and SBATCH_TIMELIMIT reach sbatch as they are.
# Every mode prints the command it runs; with --dry-run it only prints it.
set -euo pipefail

script="$(dirname "${BASH_SOURCE[0]}")/ddp_mnist.py"

fail() {
  echo "launch_ddp.sh: error: $*" >&2
  exit 2
}

mode="${1:-}"
case "$mode" in
  local | multi-node | slurm) shift ;;
  -h | --help) sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  *) fail "the first argument must be local, multi-node or slurm, not '$mode'" ;;
esac

nproc="" nnodes="" endpoint="" dry_run=no device=auto arguments=()
while (($#)); do
  case "$1" in  # --flag=value is --flag value
    --nproc-per-node=* | --nnodes=* | --rdzv-endpoint=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
  esac
  case "$1" in
    --nproc-per-node | --nnodes | --rdzv-endpoint) (($# > 1)) || fail "$1 needs a value" ;;
  esac
  case "$1" in
    --nproc-per-node) nproc="$2"; shift 2 ;;
    --nnodes) nnodes="$2"; shift 2 ;;
    --rdzv-endpoint) endpoint="$2"; shift 2 ;;
    --dry-run) dry_run=yes; shift ;;
    --device) device="${2:-}"; arguments+=("$1"); shift ;;
    --device=*) device="${1#*=}"; arguments+=("$1"); shift ;;
    *) arguments+=("$1"); shift ;;
  esac
done
if [[ -z $nproc ]]; then
  # A machine to log in to need not look like the machines that the job will run on.
  [[ $mode != slurm ]] || fail "slurm needs --nproc-per-node, the GPUs of one machine"
  gpus="$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)"
  nproc="$((gpus > 0 ? gpus : 2))" # one process per GPU; without a GPU, two on the CPU
fi
[[ $nproc =~ ^[1-9][0-9]*$ ]] || fail "--nproc-per-node must be a whole number of at least 1, not '$nproc'"
if [[ $mode == local ]]; then
  [[ -z $nnodes$endpoint ]] || fail "local is one machine: --nnodes and --rdzv-endpoint go with multi-node and slurm"
else
  [[ $nnodes =~ ^[1-9][0-9]*$ ]] || fail "$mode needs --nnodes, a whole number of at least 1"
fi

case "$mode" in
  local)
    command=(torchrun --standalone --nproc-per-node="$nproc")
    ;;
  multi-node)
    [[ $endpoint =~ ^[^:]+:[0-9]+$ ]] || fail "multi-node needs --rdzv-endpoint HOST:PORT"
    command=(torchrun --nnodes="$nnodes" --nproc-per-node="$nproc" --rdzv-id=ddp_mnist
      --rdzv-backend=c10d --rdzv-endpoint="$endpoint")
    ;;
  slurm)
    # One task per process: the script reads rank and address from SLURM itself. If one task
    # fails, srun ends the others.
    step="srun --kill-on-bad-exit=1 python $(printf '%q ' "$script" ${arguments[@]+"${arguments[@]}"})"
    command=(sbatch --job-name=ddp_mnist --nodes="$nnodes" --ntasks-per-node="$nproc")
    [[ $device == cpu ]] || command+=(--gpus-per-node="$nproc")
    command+=(--wrap "${step% }")
    ;;
esac
[[ $mode == slurm ]] || command+=("$script" ${arguments[@]+"${arguments[@]}"})

# torchrun sets one thread per process itself, but warns about it.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
line="OMP_NUM_THREADS=$OMP_NUM_THREADS"
for word in "${command[@]}"; do
  [[ $word =~ ^[A-Za-z0-9_./:=@%+,-]+$ ]] || word="'${word//\'/\'\\\'\'}'"
  line+=" $word"
done
echo "$line"
[[ $dry_run == yes ]] || exec "${command[@]}"
