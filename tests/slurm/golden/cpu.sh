#!/bin/bash
#SBATCH --account=ml-systems
#SBATCH --chdir=/home/me/bench
#SBATCH --constraint=icelake
#SBATCH --cpus-per-task=64
#SBATCH --job-name=study-4x8
#SBATCH --mem=64G
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/home/me/bench/runs/study/jobs/job-%j.log
#SBATCH --partition=standard
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --time=0-01:30:00
set -eu
# Slurm's word that the time is nearly over would end this shell; the program below listens to it.
trap '' USR1

# Modules and activate scripts read variables that may not be set.
set +u
source "$HOME/bench/.venv/bin/activate"
set -u
# Relative paths of the command are of this folder, wherever these lines have gone.
cd -- /home/me/bench

# A folder where the job happens to stand must not shadow an installed package.
export PYTHONSAFEPATH=1
export GLOO_SOCKET_IFNAME=eth0

# Where the nodes meet: the first one's address, because its name may not resolve on the others.
JOB_HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${JOB_HOSTS%%$'\n'*}
if [[ $(scontrol --oneliner show node "$MASTER_ADDR") =~ \ NodeAddr=([^\ ]+) ]]; then
    MASTER_ADDR=${BASH_REMATCH[1]}
fi
export JOB_HOSTS MASTER_ADDR
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 750 * 16))

# In place of this shell, so that Slurm's signals reach it.
exec /opt/bench/bin/python -m supervisor 'runs/my study'
