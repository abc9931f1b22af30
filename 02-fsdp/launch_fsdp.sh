#!/usr/bin/env bash
# Start fsdp_transformer.py on this machine, on several, or as a SLURM job; or predict its memory.
#
#   launch_fsdp.sh local       [--nproc-per-node N] [--dry-run] [arguments of the script]
#   launch_fsdp.sh multi-node  --nnodes N --rdzv-endpoint HOST:PORT [--nproc-per-node N] ...
#   launch_fsdp.sh slurm       --nnodes N --nproc-per-node N ...
#   launch_fsdp.sh predict     --nnodes N --nproc-per-node N ...
#
# multi-node: run the same line on every machine; HOST is one of them and reaches all.
# slurm: one task for each GPU. SBATCH_PARTITION, SBATCH_ACCOUNT and SBATCH_TIMELIMIT reach sbatch.
# predict: needs no GPU; says what each of the job's ranks would hold at its peak.
# Every mode prints the command it runs; with --dry-run it only prints it.
set -euo pipefail

script="$(dirname "${BASH_SOURCE[0]}")/fsdp_transformer.py"

fail() {
  echo "launch_fsdp.sh: error: $*" >&2
  exit 2
}

mode="${1:-}"
[[ $mode =~ ^(-h|--help)$ ]] && { sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0; }
[[ $mode =~ ^(local|multi-node|slurm|predict)$ ]] \
  || fail "the first argument must be local, multi-node, slurm or predict, not '$mode'"
shift

nproc="" nnodes="" endpoint="" run=(exec) rest=()
while (($#)); do
  case "$1" in
    --nproc-per-node=* | --nnodes=* | --rdzv-endpoint=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
  esac
  case "$1" in
    --nproc-per-node | --nnodes | --rdzv-endpoint) (($# > 1)) || fail "$1 needs a value" ;;&
    --nproc-per-node) nproc="$2"; shift 2 ;;
    --nnodes) nnodes="$2"; shift 2 ;;
    --rdzv-endpoint) endpoint="$2"; shift 2 ;;
    --dry-run) run=(:); shift ;;
    *) rest+=("$1"); shift ;;
  esac
done

if [[ $mode == local || $mode == multi-node ]]; then # on the machine itself: one process per GPU
  gpus="$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)"
  : "${nproc:=$((gpus > 0 ? gpus : 2))}"
fi
[[ $mode != local ]] || : "${nnodes:=1}"
[[ $nproc =~ ^[1-9][0-9]*$ ]] || fail "$mode needs --nproc-per-node, a whole number of at least 1"
[[ $nnodes =~ ^[1-9][0-9]*$ ]] || fail "$mode needs --nnodes, a whole number of at least 1"
[[ $mode != local || $nnodes == 1 ]] || fail "local is one machine: leave out --nnodes"
[[ $mode != multi-node || $endpoint =~ ^[^:]+:[0-9]+$ ]] \
  || fail "multi-node needs --rdzv-endpoint HOST:PORT"

case "$mode" in
  local) command=(torchrun --standalone --nproc-per-node="$nproc" "$script") ;;
  multi-node)
    command=(torchrun --nnodes="$nnodes" --nproc-per-node="$nproc" --rdzv-id=fsdp
      --rdzv-backend=c10d --rdzv-endpoint="$endpoint" "$script")
    ;;
  slurm) # the script reads rank and address from SLURM itself; one failed task ends all
    command=(srun --nodes="$nnodes" --ntasks-per-node="$nproc" --gpus-per-node="$nproc"
      --kill-on-bad-exit=1 python "$script")
    ;;
  predict) command=(python "$script" --dry-run --world-size="$((nnodes * nproc))") ;;
esac
command+=(${rest[@]+"${rest[@]}"})
line="$(printf '%q ' "${command[@]}")"
if [[ $mode == slurm ]]; then
  command=(sbatch --nodes="$nnodes" --ntasks-per-node="$nproc" --gpus-per-node="$nproc"
    --job-name=fsdp --wrap="${line% }")
  line="$(printf '%q ' "${command[@]:0:5}")--wrap='${line% }'"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # torchrun sets it itself, but warns about it
echo "OMP_NUM_THREADS=$OMP_NUM_THREADS ${line% }"
"${run[@]}" "${command[@]}"
