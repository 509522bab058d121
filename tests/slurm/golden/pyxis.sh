#!/bin/bash
#SBATCH --account=ml-systems
#SBATCH --chdir=/home/me/bench
#SBATCH --cpus-per-task=112
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --job-name=study-4x8
#SBATCH --mem=0
#SBATCH --no-requeue
#SBATCH --nodes=32
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/home/me/bench/runs/study/jobs/job-%j.log
#SBATCH --partition=batch
#SBATCH --signal=B:USR1@120
#SBATCH --switches=1@2:00:00
#SBATCH --time=0-01:30:00
set -eu
# Slurm's word that the time is nearly over would end this shell; the program below listens to it.
trap '' USR1

# A folder where the job happens to stand must not shadow an installed package.
export PYTHONSAFEPATH=1
export NCCL_IB_HCA=mlx5
export NCCL_NVLS_ENABLE=1

# Where the nodes meet: the first one's address, because its name may not resolve on the others.
JOB_HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${JOB_HOSTS%%$'\n'*}
if [[ $(scontrol --oneliner show node "$MASTER_ADDR") =~ \ NodeAddr=([^\ ]+) ]]; then
    MASTER_ADDR=${BASH_REMATCH[1]}
fi
export JOB_HOSTS MASTER_ADDR
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 750 * 16))

# On each node once, before any program starts there.
srun --nodes=32 --ntasks=32 --ntasks-per-node=1 --cpus-per-task=112 --kill-on-bad-exit=1 --cpu-bind=none --mpi=none --export=ALL bash -c 'set -e
mkdir -p /local/bench
cd /local/bench
test -e pytorch.sqsh || { cp /shared/images/pytorch-26.06.sqsh new.sqsh && mv new.sqsh pytorch.sqsh; }'

# In place of this shell, so that Slurm's signals reach it.
exec /opt/bench/bin/python -m supervisor 'runs/my study'
