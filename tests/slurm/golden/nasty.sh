#!/bin/bash
#SBATCH --chdir="/it's a \"$(touch pwned)\" `id` \\ #1; 50% && <x>"
#SBATCH --comment="it's a \"$(touch pwned)\" `id` \\ #1; 50% && <x>"
#SBATCH --contiguous
#SBATCH --gres=gpu:8
#SBATCH --job-name="it's a \"$(touch pwned)\" `id` \\ #1; 50% && <x>"
#SBATCH --no-requeue
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output="/it's a \"$(touch pwned)\" `id`  #1; 50%% && <x>/job-%j.log"
#SBATCH --partition="it's a \"$(touch pwned)\" `id` \\ #1; 50% && <x>"
#SBATCH --signal=B:USR1@120
#SBATCH --time=0-01:30:00
set -eu
# Slurm's word that the time is nearly over would end this shell; the program below listens to it.
trap '' USR1

# Modules and activate scripts read variables that may not be set.
set +u
echo 'as it stands: $HOME {{ x }} {% y %}'
set -u
# Relative paths of the command are of this folder, wherever these lines have gone.
cd -- '/it'"'"'s a "$(touch pwned)" `id` \ #1; 50% && <x>'

# A folder where the job happens to stand must not shadow an installed package.
export PYTHONSAFEPATH=1
export A='two
lines'
export B='it'"'"'s a "$(touch pwned)" `id` \ #1; 50% && <x>'

# Where the nodes meet: the first one's address, because its name may not resolve on the others.
JOB_HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${JOB_HOSTS%%$'\n'*}
if [[ $(scontrol --oneliner show node "$MASTER_ADDR") =~ \ NodeAddr=([^\ ]+) ]]; then
    MASTER_ADDR=${BASH_REMATCH[1]}
fi
export JOB_HOSTS MASTER_ADDR
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 750 * 16))

# On each node once, before any program starts there.
srun --nodes=4 --ntasks=4 --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none --mpi=none --export=ALL bash -c 'set -e
echo it'"'"'s done
true'

# In place of this shell, so that Slurm's signals reach it.
exec /bin/echo 'it'"'"'s a "$(touch pwned)" `id` \ #1; 50% && <x>' 'two
lines' '' '~' -n
