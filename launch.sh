#!/usr/bin/env bash
# The launch_*.sh of all modules source this file. Modes and flags mean the same in each:
#
#   local        start on this machine, one process per GPU unless --nproc-per-node says otherwise
#   multi-node   run the same line on every machine; HOST is one of them, and all can reach it
#   slurm        --nproc-per-node processes on each machine, with a GPU each unless --device cpu;
#                a job (launch.sbatch) reads SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT, and
#                is queued again when its time is up
#   --cpus-per-task N   slurm: cores for each process (cores of a machine / --nproc-per-node)
#   --dry-run    print the command and do not run it
set -euo pipefail

here="$(dirname "$0")" # the folder of the launcher and its scripts
least_gpus=1           # a machine with fewer gets two processes on the CPU
value_flags="--nproc-per-node --nnodes --rdzv-endpoint --cpus-per-task"
passed_flags="--device --output-dir" # read here, and passed on to the script
switches="--dry-run"
rest=()                                             # arguments of the script
variables=(OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}") # torchrun sets it itself, but warns about it
# A GPU's memory that was freed in pieces serves a larger tensor. The second is the older name.
[[ -n ${PYTORCH_ALLOC_CONF+set}${PYTORCH_CUDA_ALLOC_CONF+set} ]] \
  || variables+=(PYTORCH_ALLOC_CONF=expandable_segments:True)

fail() {
  echo "${0##*/}: error: $*" >&2
  exit 2
}

# read_mode "A, B or C" [ARGUMENT...]: set mode to the first argument; --help ends here.
read_mode() {
  local file known="${1//,/}"
  mode="${2:-}"
  if [[ $mode == -h || $mode == --help ]]; then
    for file in "$0" "${BASH_SOURCE[0]}"; do
      sed -n -e 1d -e '/^#/!q' -e 's/^# \{0,1\}//p' "$file"
      echo
    done
    exit 0
  fi
  [[ -n $mode && " ${known/ or / } " == *" $mode "* ]] \
    || fail "the first argument must be $1, not '$mode'"
}

# Set a variable for each flag, nproc_per_node for --nproc-per-node; unknown ones go to `rest`.
read_arguments() {
  local flag name words
  for flag in $value_flags $passed_flags $switches; do
    name="${flag#--}"
    printf -v "${name//-/_}" %s ""
  done
  while (($#)); do
    words=("$1")
    flag="${1%%=*}" # --flag=value is --flag value
    name="${flag#--}"
    if [[ " $switches " == *" $1 "* ]]; then
      printf -v "${name//-/_}" %s yes
    elif [[ " $value_flags $passed_flags " == *" $flag "* ]]; then
      if [[ $1 == "$flag" ]]; then
        (($# > 1)) || fail "$1 needs a value"
        words+=("$2")
        shift
      fi
      printf -v "${name//-/_}" %s "${1#"$flag="}"
      [[ " $value_flags " == *" $flag "* ]] || rest+=("${words[@]}")
    else
      rest+=("$1")
    fi
    shift
  done
}

# read_script DEFAULT PATTERN [ARGUMENT...]: set `script` to the first argument if it names one, of
# those in this folder that hold the pattern; read the other arguments.
read_script() {
  local known="$(cd "$here" && grep -lE -e "$2" -- *.py | xargs)"
  script="$1"
  shift 2
  if [[ ${1:-} == *.py ]]; then
    script="$1"
    shift
  fi
  [[ " $known " == *" $script "* ]] || fail "$script is none of ${known// /, }"
  read_arguments "$@"
}

need_whole_number() {
  [[ $2 =~ ^[1-9][0-9]*$ ]] || fail "$mode needs $1, a whole number of at least 1${2:+, not '$2'}"
}

# Check how many processes and machines there are to be, and where they meet.
check_counts() {
  local gpus
  if [[ $mode == local || $mode == multi-node || $mode == elastic ]]; then
    # Elsewhere the job runs on other machines than this one.
    gpus="$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)"
    : "${nproc_per_node:=$((gpus >= least_gpus ? gpus : 2))}"
  fi
  need_whole_number --nproc-per-node "$nproc_per_node"
  case "$mode" in
    local)
      [[ ${nnodes:=1} == 1 && -z $rdzv_endpoint ]] \
        || fail "local is one machine: --nnodes and --rdzv-endpoint go with the other modes"
      ;;
    elastic)
      [[ ${nnodes:=1} =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] \
        || fail "--nnodes must be like 2 or 1:4, not '$nnodes'"
      ;;
    *) need_whole_number --nnodes "$nnodes" ;;
  esac
  if [[ $mode == multi-node || ($mode == elastic && $nnodes != 1) ]]; then
    [[ $rdzv_endpoint =~ ^[^:]+:[0-9]+$ ]] || fail "$mode needs --rdzv-endpoint HOST:PORT"
  fi
  if [[ $mode == slurm ]]; then
    [[ -z $rdzv_endpoint ]] || fail "slurm needs no --rdzv-endpoint: the script asks SLURM"
    : "${cpus_per_task:=${SLURM_CPUS_PER_TASK:-}}" # salloc sets it, and srun does not read it
    [[ -z $cpus_per_task ]] || need_whole_number --cpus-per-task "$cpus_per_task"
  else
    [[ -z $cpus_per_task ]] || fail "--cpus-per-task goes with slurm"
  fi
}

# compose JOB SCRIPT: set `command` for local, multi-node or slurm, and what other modes build on:
# `meet` says torchrun where ranks meet, `resources` says SLURM what each machine has to have.
compose() {
  meet=(--rdzv-id="$1" --rdzv-backend=c10d --rdzv-endpoint="$rdzv_endpoint")
  resources=(--nodes="$nnodes" --ntasks-per-node="$nproc_per_node")
  [[ $device == cpu ]] || resources+=(--gpus-per-node="$nproc_per_node")
  [[ -z $cpus_per_task ]] || resources+=(--cpus-per-task="$cpus_per_task")
  case "$mode" in
    multi-node)
      command=(torchrun --nnodes="$nnodes" --nproc-per-node="$nproc_per_node" "${meet[@]}" "$2")
      ;;
    # One task per process; the script reads rank and address from SLURM. One failure ends all.
    slurm) command=(srun "${resources[@]}" --kill-on-bad-exit=1 python "$2") ;;
    *) command=(torchrun --standalone --nproc-per-node="$nproc_per_node" "$2") ;;
  esac
}

need_folder() {
  [[ -n $output_dir ]] \
    || fail "$mode needs --output-dir, the folder of the checkpoints to resume from"
}

# batch JOB SCRIPT: have sbatch queue launch.sbatch, which starts the script; one that can resume does
# so whenever the job starts again.
batch() {
  local job_file="$here/../launch.sbatch" resume=()
  [[ $here == *[/.]* ]] || job_file=launch.sbatch
  if grep -qE "resumes=True|add_training_flags" "$2"; then
    need_folder
    [[ " ${rest[*]-} " == *" --resume "* ]] || resume=(--resume)
  fi
  command=(sbatch "${resources[@]}" --job-name="$1" "$job_file" "$2" ${resume[@]+"${resume[@]}"})
}

# Print words as one would type them: --text-file='my notes.txt'.
quoted() {
  local word name line="" plain='^[A-Za-z0-9_./:=@%+,-]+$' flag='^--[a-z-]+=' quote="'\\''"
  for word in "$@"; do
    if [[ ! $word =~ $plain ]]; then
      name=""
      [[ ! $word =~ $flag ]] || name="${BASH_REMATCH[0]}"
      word="${word#"$name"}"
      word="$name'${word//\'/$quote}'"
    fi
    line+=" $word"
  done
  echo "${line# }"
}

# Print the command, then become it.
run() {
  command+=(${rest[@]+"${rest[@]}"})
  quoted "${variables[@]}" "${command[@]}"
  [[ -z $dry_run ]] || exit 0
  command -v "${command[0]}" >/dev/null \
    || fail "there is no ${command[0]} here: torchrun and deepspeed are in the environment of this" \
      "guide (source .venv/bin/activate), srun and sbatch on a machine with SLURM"
  [[ $mode != slurm || -n $cpus_per_task ]] \
    || echo "warning: without --cpus-per-task SLURM may give each process one core" >&2
  exec env "${variables[@]}" "${command[@]}"
}
