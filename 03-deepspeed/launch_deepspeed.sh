#!/usr/bin/env bash
# Start deepspeed_train.py on this machine, on several, or as a SLURM job.
#
#   launch_deepspeed.sh local     [--nproc-per-node N] [--dry-run] [arguments of the script]
#   launch_deepspeed.sh hostfile  --hostfile FILE [--master-addr HOST] [--dry-run] ...
#   launch_deepspeed.sh slurm     --nnodes N --nproc-per-node N [--dry-run] ...
#
# hostfile: run it on one machine, which has pdsh and reaches the others by ssh without a password; a
# line of FILE is "node0 slots=8". slurm: one task for each GPU; the script reads rank and address from SLURM.
# Every mode prints the command it runs; with --dry-run it only prints it.
set -euo pipefail

script="$(dirname "${BASH_SOURCE[0]}")/deepspeed_train.py"

fail() {
  echo "launch_deepspeed.sh: error: $*" >&2
  exit 2
}

mode="${1:-}"
[[ $mode =~ ^(-h|--help)$ ]] && { sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0; }
[[ $mode =~ ^(local|hostfile|slurm)$ ]] \
  || fail "the first argument must be local, hostfile or slurm, not '$mode'"
shift

nproc="" nnodes="" hostfile="" address="" run=(exec) rest=()
while (($#)); do
  case "$1" in
    --nproc-per-node=* | --nnodes=* | --hostfile=* | --master-addr=*)
      set -- "${1%%=*}" "${1#*=}" "${@:2}"
      ;;
  esac
  case "$1" in
    --nproc-per-node | --nnodes | --hostfile | --master-addr)
      (($# > 1)) || fail "$1 needs a value"
      ;;&
    --nproc-per-node) nproc="$2"; shift 2 ;;
    --nnodes) nnodes="$2"; shift 2 ;;
    --hostfile) hostfile="$2"; shift 2 ;;
    --master-addr) address="$2"; shift 2 ;;
    --dry-run) run=(:); shift ;;
    *) rest+=("$1"); shift ;;
  esac
done

if [[ $mode == local ]]; then # one process per GPU
  gpus="$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)"
  : "${nproc:=$((gpus > 0 ? gpus : 2))}" "${nnodes:=1}"
fi
if [[ $mode == hostfile ]]; then # the file says how many; DeepSpeed passes over one that is missing
  [[ -z $nproc$nnodes ]] || fail "hostfile takes machines and slots from the file"
  [[ -n $hostfile ]] || fail "hostfile needs --hostfile FILE"
  [[ -r $hostfile ]] || fail "--hostfile $hostfile cannot be read"
  bad="$(grep -vnE '^[[:space:]]*(#.*)?$|^[^[:space:]]+ slots=[1-9][0-9]*[[:space:]]*$' \
    "$hostfile" || true)"
  [[ -z $bad ]] || fail "--hostfile $hostfile, line ${bad%%:*}: must be 'HOST slots=N'"
  [[ ${run[0]} == : ]] || command -v pdsh >/dev/null \
    || fail "hostfile needs pdsh on this machine, by which DeepSpeed starts the others: install it"
else
  [[ $nproc =~ ^[1-9][0-9]*$ ]] || fail "$mode needs --nproc-per-node, a whole number of at least 1"
  [[ $nnodes =~ ^[1-9][0-9]*$ ]] || fail "$mode needs --nnodes, a whole number of at least 1"
  [[ $mode != local || $nnodes == 1 ]] || fail "local is one machine: leave out --nnodes"
fi

case "$mode" in
  local) command=(deepspeed --num_gpus="$nproc" "$script") ;;
  hostfile) # without --master_addr it asks the first machine for its address, by ssh
    command=(deepspeed --hostfile="$hostfile" ${address:+--master_addr="$address"} "$script")
    ;;
  slurm) # one failed task ends all
    command=(srun --nodes="$nnodes" --ntasks-per-node="$nproc" --gpus-per-node="$nproc"
      --kill-on-bad-exit=1 python "$script")
    ;;
esac
command+=(${rest[@]+"${rest[@]}"})
line="$(printf '%q ' "${command[@]}")"
if [[ $mode == slurm ]]; then
  command=(sbatch --nodes="$nnodes" --ntasks-per-node="$nproc" --gpus-per-node="$nproc"
    --job-name=deepspeed --wrap="${line% }")
  line="$(printf '%q ' "${command[@]:0:5}")--wrap='${line% }'"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
echo "OMP_NUM_THREADS=$OMP_NUM_THREADS ${line% }"
"${run[@]}" "${command[@]}"
