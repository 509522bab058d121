#!/bin/bash
#SBATCH --account=ml-systems
#SBATCH --chdir=/home/me/bench
#SBATCH --cpus-per-task=1
#SBATCH --job-name=study-report
#SBATCH --mem=4G
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --open-mode=append
#SBATCH --output=/home/me/bench/runs/study/jobs/job-%j.log
#SBATCH --partition=cpu
#SBATCH --requeue
#SBATCH --time=0-00:15:00
set -eu
# Slurm's word that the time is nearly over would end this shell; the program below listens to it.
trap '' USR1

# Modules and activate scripts read variables that may not be set.
set +u
source /etc/profile || true
module load cuda/12.8
source "$HOME/bench/.venv/bin/activate" || { echo "no environment in $HOME/bench/.venv on $HOSTNAME" >&2; exit 1; }
set -u
# Relative paths of the command are of this folder, wherever these lines have gone.
cd -- /home/me/bench

# A folder where the job happens to stand must not shadow an installed package.
export PYTHONSAFEPATH=1
export GLOO_SOCKET_IFNAME=ib0
export NCCL_SOCKET_IFNAME=ib0

# In place of this shell, so that Slurm's signals reach it.
exec /opt/bench/bin/bench report runs/study
