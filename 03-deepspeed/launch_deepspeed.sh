#!/usr/bin/env bash
# Start deepspeed_train.py on this machine, on several, or as a SLURM job.
#
#   launch_deepspeed.sh local     [--nproc-per-node N] [--dry-run] [arguments of the script]
#   launch_deepspeed.sh hostfile  --hostfile FILE [--master-addr HOST] ...
#   launch_deepspeed.sh slurm     --nnodes N --nproc-per-node N --output-dir DIR [--cpus-per-task N] ...
#
#   hostfile     on one machine, which has pdsh and reaches the others by ssh without a password; a
#                line of FILE is "node0 slots=8"
#   --bind-cores-to-rank   local, hostfile: cores of its own for each rank, near its memory; needs
#                numactl on each machine
source "$(dirname "$0")/../launch.sh"

# The file says how many machines and processes; DeepSpeed ignores a file that is missing.
check_hostfile() {
  [[ -z $nproc_per_node$nnodes ]] || fail "hostfile takes machines and slots from the file"
  [[ -n $hostfile ]] || fail "hostfile needs --hostfile FILE"
  [[ -r $hostfile ]] || fail "--hostfile $hostfile cannot be read"
  local line='^[[:space:]]*(#.*)?$|^[^[:space:]]+ slots=[1-9][0-9]*[[:space:]]*$'
  local bad="$(grep -vnE "$line" "$hostfile" || true)"
  [[ -z $bad ]] || fail "--hostfile $hostfile, line ${bad%%:*}: must be 'HOST slots=N'"
  [[ -n $dry_run ]] || command -v pdsh >/dev/null \
    || fail "hostfile needs pdsh on this machine, by which DeepSpeed starts the others: install it"
}

value_flags+=" --hostfile --master-addr"
switches+=" --bind-cores-to-rank"
script="$here/deepspeed_train.py"
read_mode "local, hostfile or slurm" "$@"
read_arguments "${@:2}"
if [[ $mode == hostfile ]]; then check_hostfile; else check_counts; fi
bind=(${bind_cores_to_rank:+--bind_cores_to_rank})
[[ $mode != slurm || -z $bind_cores_to_rank ]] || fail "slurm binds cores by --cpus-per-task"
compose deepspeed "$script"
case "$mode" in
  local) command=(deepspeed --num_gpus="$nproc_per_node" ${bind[@]+"${bind[@]}"} "$script") ;;
  # Without --master_addr DeepSpeed asks the first machine for its address, by ssh.
  hostfile)
    command=(deepspeed --hostfile="$hostfile" ${master_addr:+--master_addr="$master_addr"})
    command+=(${bind[@]+"${bind[@]}"} "$script")
    ;;
  slurm) batch deepspeed "$script" ;;
esac
run
