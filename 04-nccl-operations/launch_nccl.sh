#!/usr/bin/env bash
# Start a script of this module on this machine, on several, or under SLURM.
#
#   launch_nccl.sh local       [SCRIPT] [--nproc-per-node N] [--dry-run] [arguments of the script]
#   launch_nccl.sh multi-node  [SCRIPT] --nnodes N --rdzv-endpoint HOST:PORT [--nproc-per-node N] ...
#   launch_nccl.sh slurm       [SCRIPT] --nnodes N --nproc-per-node N [--device cpu] ...
#
# SCRIPT: bandwidth_test.py (if none is named), collective_ops.py, point_to_point.py, topology.py.
# --ifname NAME  has NCCL and gloo meet at that interface, on every machine.
# --nccl-debug   has NCCL tell what it finds and chooses: NCCL_DEBUG=INFO, a file for each rank.
# multi-node: run the same line on every machine; HOST is one of them and reaches all.
# slurm: one task for each GPU; the script reads rank and address from SLURM.
# Every mode prints the command it runs; with --dry-run it only prints it.
set -euo pipefail

here="$(dirname "${BASH_SOURCE[0]}")"

fail() {
  echo "launch_nccl.sh: error: $*" >&2
  exit 2
}

mode="${1:-}"
[[ $mode =~ ^(-h|--help)$ ]] && { sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0; }
[[ $mode =~ ^(local|multi-node|slurm)$ ]] \
  || fail "the first argument must be local, multi-node or slurm, not '$mode'"
shift
script=bandwidth_test.py
if [[ ${1:-} == *.py ]]; then
  script="$1"
  shift
  [[ $script =~ ^(bandwidth_test|collective_ops|point_to_point|topology).py$ ]] \
    || fail "$script is none of bandwidth_test.py, collective_ops.py, point_to_point.py, topology.py"
fi

nproc="" nnodes="" endpoint="" run=exec device=auto rest=()
variables=(OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}") # torchrun sets it itself, but warns about it
while (($#)); do
  case "$1" in # --flag=value is --flag value
    --nproc-per-node=* | --nnodes=* | --rdzv-endpoint=* | --ifname=* | --device=*)
      set -- "${1%%=*}" "${1#*=}" "${@:2}"
      ;;
  esac
  case "$1" in
    --nproc-per-node | --nnodes | --rdzv-endpoint | --ifname | --device)
      (($# > 1)) || fail "$1 needs a value"
      ;;&
    --nproc-per-node) nproc="$2"; shift 2 ;;
    --nnodes) nnodes="$2"; shift 2 ;;
    --rdzv-endpoint) endpoint="$2"; shift 2 ;;
    --ifname) variables+=(NCCL_SOCKET_IFNAME="=$2" GLOO_SOCKET_IFNAME="$2"); shift 2 ;;
    --nccl-debug)
      variables+=(NCCL_DEBUG=INFO "NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,NET,ENV"
        NCCL_DEBUG_FILE=nccl-%h-%p.log)
      shift
      ;;
    --device) device="$2"; rest+=("$1" "$2"); shift 2 ;;
    --dry-run) run=:; shift ;;
    *) rest+=("$1"); shift ;;
  esac
done
if [[ -z $nproc ]]; then
  # A machine to log in to need not look like the machines that the job will run on.
  [[ $mode != slurm ]] || fail "slurm needs --nproc-per-node, the GPUs of one machine"
  gpus="$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)"
  nproc="$((gpus > 1 ? gpus : 2))" # one process per GPU; without two GPUs, two on the CPU
fi
[[ $nproc =~ ^[1-9][0-9]*$ ]] \
  || fail "--nproc-per-node must be a whole number of at least 1, not '$nproc'"
if [[ $mode == local ]]; then
  [[ -z $nnodes$endpoint ]] \
    || fail "local is one machine: --nnodes and --rdzv-endpoint go with the other modes"
else
  [[ $nnodes =~ ^[1-9][0-9]*$ ]] || fail "$mode needs --nnodes, a whole number of at least 1"
fi

case "$mode" in
  local) command=(torchrun --standalone --nproc-per-node="$nproc" "$here/$script") ;;
  multi-node)
    [[ $endpoint =~ ^[^:]+:[0-9]+$ ]] || fail "multi-node needs --rdzv-endpoint HOST:PORT"
    command=(torchrun --nnodes="$nnodes" --nproc-per-node="$nproc" --rdzv-id=nccl
      --rdzv-backend=c10d --rdzv-endpoint="$endpoint" "$here/$script")
    ;;
  slurm) # one failed task ends all
    [[ -z $endpoint ]] || fail "slurm needs no --rdzv-endpoint: the script asks SLURM"
    command=(srun --nodes="$nnodes" --ntasks-per-node="$nproc")
    [[ $device == cpu ]] || command+=(--gpus-per-node="$nproc")
    command+=(--kill-on-bad-exit=1 python "$here/$script")
    ;;
esac
command+=(${rest[@]+"${rest[@]}"})
line="$(printf '%q ' "${variables[@]}" "${command[@]}")"
line="${line% }"
echo "${line//\\,/,}"
$run env "${variables[@]}" "${command[@]}"
