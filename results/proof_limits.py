"""How many steps the proof of a run checks, and what that may take: for the ranks, and for estimates."""

from __future__ import annotations

STEPS = 3
"""The first steps that are checked, of a strategy without a period."""
LONGEST_S = 60.0
"""For their simulations; where they would take longer, a weaker check is made."""
LATE_STEPS = 10
"""After the timed blocks, at most: a defect of every tenth step, or more often, is then met for certain."""
LATE_SHARE = 0.05
"""Of the time that warm-up and timed blocks took: what the check after them may take."""
COPIES = 6
"""Of its parameters, in host memory: about what a rank that simulates a step holds beside the model. They are
parameters and gradients as the strategy has them, those of the simulation, and the state of an optimizer."""
SHARED_COPIES = 5
"""The same of a rank that simulates one replica and compares nothing: what it gathers of the start, its model
and gradients with their sizes, and what it sends."""
SUMMED_BYTES_PER_S = 1e9
"""Of gradients that ranks have simulated, summed over Gloo in host memory. Assumed."""
