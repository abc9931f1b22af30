#!/usr/bin/env bash
# Start ddp_training.py on this machine, on several machines, elastically, or as a SLURM job.
#
#   launch_ddp.sh local       [--nproc-per-node N] [--dry-run] [arguments of the script]
#   launch_ddp.sh multi-node  --nnodes N --rdzv-endpoint HOST:PORT [--nproc-per-node N] ...
#   launch_ddp.sh elastic     [--nnodes MIN:MAX --rdzv-endpoint HOST:PORT] --output-dir DIR ...
#   launch_ddp.sh slurm       --nnodes N --nproc-per-node N [--device cpu] --output-dir DIR ...
#
# multi-node, elastic: run the same line on every machine; HOST is one of them and reaches all.
# elastic: a rank that fails has all start again from the last checkpoint, at most 3 times.
# slurm: submits ddp_training.sbatch, with a GPU for each process unless --device cpu.
# SBATCH_PARTITION, SBATCH_ACCOUNT and SBATCH_TIMELIMIT reach sbatch as they are.
# Every mode prints the command it runs; with --dry-run it only prints it.
set -euo pipefail

here="$(dirname "${BASH_SOURCE[0]}")"

fail() {
  echo "launch_ddp.sh: error: $*" >&2
  exit 2
}

mode="${1:-}"
case "$mode" in
  local | multi-node | elastic | slurm) shift ;;
  -h | --help) sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  *) fail "the first argument must be local, multi-node, elastic or slurm, not '$mode'" ;;
esac

nproc="" nnodes="" endpoint="" dry_run=no device=auto output=no arguments=()
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
    --output-dir | --output-dir=*) output=yes; arguments+=("$1"); shift ;;
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
case "$mode" in
  local) [[ -z $nnodes$endpoint ]] || fail "local is one machine: --nnodes and --rdzv-endpoint go with the other modes" ;;
  elastic) [[ ${nnodes:=1} =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] || fail "--nnodes must be like 2 or 1:4, not '$nnodes'" ;;
  *) [[ $nnodes =~ ^[1-9][0-9]*$ ]] || fail "$mode needs --nnodes, a whole number of at least 1" ;;
esac
if [[ $mode == multi-node || ($mode == elastic && $nnodes != 1) ]]; then
  [[ $endpoint =~ ^[^:]+:[0-9]+$ ]] || fail "$mode needs --rdzv-endpoint HOST:PORT"
fi
if [[ $mode == elastic || $mode == slurm ]]; then
  [[ $output == yes ]] || fail "$mode needs --output-dir, the folder of the checkpoints to go on from"
fi

meet=(--rdzv-id=ddp_training --rdzv-backend=c10d --rdzv-endpoint="$endpoint")
variables=(OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}") # torchrun sets it itself, but warns about it
case "$mode" in
  local)
    command=(torchrun --standalone --nproc-per-node="$nproc" "$here/ddp_training.py")
    ;;
  multi-node)
    command=(torchrun --nnodes="$nnodes" --nproc-per-node="$nproc" "${meet[@]}" "$here/ddp_training.py")
    ;;
  elastic)
    # Else the ranks of the second start may find addresses that those of the first one left.
    variables+=(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
    [[ $nnodes != 1 ]] || meet=(--standalone)
    command=(torchrun --nnodes="$nnodes" --nproc-per-node="$nproc" --max-restarts=3 "${meet[@]}"
      "$here/ddp_training.py" --resume)
    ;;
  slurm)
    # One task per process: the script reads rank and address from SLURM itself.
    command=(sbatch --nodes="$nnodes" --ntasks-per-node="$nproc")
    [[ $device == cpu ]] || command+=(--gpus-per-node="$nproc")
    command+=("$here/ddp_training.sbatch")
    ;;
esac
command+=(${arguments[@]+"${arguments[@]}"})

line="${variables[*]}"
for word in "${command[@]}"; do
  [[ $word =~ ^[A-Za-z0-9_./:=@%+,-]+$ ]] || word="'${word//\'/\'\\\'\'}'"
  line+=" $word"
done
echo "$line"
[[ $dry_run == yes ]] || exec env "${variables[@]}" "${command[@]}"
