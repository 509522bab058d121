"""From planned launches to real processes: torchrun on this machine, or by hand on several."""
