#!/usr/bin/env bash
# Start a script of this module on this machine, on several, or under SLURM; or print a job file.
#
#   launch_nccl.sh local       [SCRIPT] [--nproc-per-node N] [--dry-run] [arguments of the script]
#   launch_nccl.sh multi-node  [SCRIPT] --nnodes N --rdzv-endpoint HOST:PORT [--nproc-per-node N] ...
#   launch_nccl.sh slurm       [SCRIPT] --nnodes N --nproc-per-node N [--cpus-per-task N] ...
#   launch_nccl.sh sbatch      [SCRIPT] [--nnodes N] [--nproc-per-node N] [--cpus-per-task N] ...
#
#   SCRIPT       bandwidth_test.py (default) or another one of this folder; cluster/README.md has
#                the programs that check the nodes first
#   sbatch       prints a file to adapt and to submit (2 nodes x 8 tasks x 12 cores unless said)
#   --ifname NAME            NCCL and gloo meet at that interface, on every machine
#   --nccl-debug             NCCL says what it finds and chooses: a file for each rank
#   --container-image IMAGE  sbatch: run inside it (pyxis and enroot)
source "$(dirname "$0")/../launch.sh"

value_flags+=" --ifname --container-image"
switches+=" --nccl-debug"
least_gpus=2 # a collective of one rank sends nothing
read_mode "local, multi-node, slurm or sbatch" "$@"
read_script bandwidth_test.py runtime.init "${@:2}"
[[ ${nproc_per_node:-1} =~ ^[1-9][0-9]*$ ]] \
  || fail "--nproc-per-node must be a whole number of at least 1, not '$nproc_per_node'"
[[ -z $container_image || $mode == sbatch ]] || fail "--container-image goes with sbatch"
job_file=""
if [[ $mode == sbatch ]]; then
  mode=slurm
  job_file=yes
  : "${nnodes:=2}" "${nproc_per_node:=8}" "${cpus_per_task:=12}"
fi
check_counts
[[ -z $ifname ]] || variables+=(NCCL_SOCKET_IFNAME="=$ifname" GLOO_SOCKET_IFNAME="$ifname")
[[ -z $nccl_debug ]] || variables+=(NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,NET,ENV
  NCCL_DEBUG_FILE=nccl-%h-%p.log)
compose nccl "$here/$script"
[[ -n $job_file ]] || run

cat <<END
#!/usr/bin/env bash
# Submit from the top of the repository, in the environment of this guide: sbatch THIS_FILE
#SBATCH --job-name=nccl
$(printf '#SBATCH %s\n' "${resources[@]}")
# No other job's traffic in the figures:
#SBATCH --exclusive
#SBATCH --time=00:30:00
#SBATCH --output=nccl-%j.out
set -euo pipefail
export $(quoted "${variables[@]}")

# In a container (pyxis and enroot) the image must see the repository and what the host says of
# itself: NCCL's settings, and on a virtual machine the file that NCCL_TOPO_FILE names.
image=$(quoted "$container_image")
mounts="\$SLURM_SUBMIT_DIR:\$SLURM_SUBMIT_DIR"
[[ ! -e /etc/nccl.conf ]] || mounts+=",/etc/nccl.conf:/etc/nccl.conf:ro"
container=(--container-image="\$image" --container-mounts="\$mounts"
  --container-workdir="\$SLURM_SUBMIT_DIR")
[[ -n \$image ]] || container=()

# srun does not take --cpus-per-task over from sbatch (since SLURM 22.05) and would bind each task to
# one core. One failure ends all tasks.
step=(srun --cpus-per-task="\$SLURM_CPUS_PER_TASK" --cpu-bind=cores --kill-on-bad-exit=1
  \${container[@]+"\${container[@]}"} python)

"\${step[@]}" $(quoted "$here/$script" ${rest[@]+"${rest[@]}"})
END
