"""What each part of one run takes, by name as in `RankRecord.spent_ns`: a model of it, for planning.

Costs follow from the time of a step and from the number of parameters, which is built, hashed, copied and
simulated anew beside the steps. Where a strategy is not yet in its stride (a warm-up of a compressor), the
proof takes more steps than is counted here.
"""

from __future__ import annotations

from results.cell import GPU_BLOCK_S, GPU_LONGEST_WARM_UP_S, Cell
from results.parts import VALUE_BYTES
from results.proof_limits import COPIES, LATE_SHARE, LATE_STEPS, LONGEST_S, STEPS, SUMMED_BYTES_PER_S
from results.recorded import RECORDED_STEPS
from strategies.catalog import OPTIMIZERS, STRATEGIES

SETUP_S = 1.0
"""Of one run whatever its size: data and strategy, counting FLOPs, the network's peak. Assumed."""
VALUES_PER_S = 100e6
"""Initial values that one core draws: 96 million a second for gpt-nano, 136 for gpt2-small, measured on a
2-core x86 machine with torch 2.13."""
HASHED_BYTES_PER_S = 1.1e9
"""BLAKE2b on one core: 1.10 to 1.26 GB/s on the same machine."""
COPIED_BYTES_PER_S = 2.5e9
"""Into new host memory: 2.6 to 5.5 GB/s on the same machine. Assumed from a GPU too."""
QUAD_BLOCKS = 4


def longest_unknown_step_s(cell: Cell) -> float:
    """The longest step of which the measuring budget holds the fewest blocks: for a step that nothing is
    known of."""
    period = STRATEGIES.facts(cell.strategy).promise.every
    return cell.steps.budget_s / (cell.steps.min_blocks * cell.steps.steps_of_block(period))


def run_parts(cell: Cell, step_s: float, *, parameters: int, proves: bool) -> dict[str, float]:
    """Seconds of each part of a run whose step takes `step_s`.

    `parameters` are those of the whole model. A run is taken to use its whole budget and the longest warm-up.
    The simulation of a step does the work of every replica that it simulates, with that of all its ranks and
    without a bubble.
    """
    policy, period = cell.steps, STRATEGIES.facts(cell.strategy).promise.every
    by_time = cell.device == "cuda" and policy.warmup_max_steps > 0
    block_s = policy.steps_of_block(period, step_s if by_time else None) * step_s
    if by_time:
        block_s = max(block_s, GPU_BLOCK_S)
    hash_s = VALUE_BYTES * parameters / HASHED_BYTES_PER_S
    measured_s = {
        "warm-up": GPU_LONGEST_WARM_UP_S + block_s if by_time else policy.warmup_max_steps * step_s,
        "measure": min(max(policy.budget_s, policy.min_blocks * block_s), policy.max_blocks * block_s),
    }
    begins = max(STEPS, period)
    first_s = _proof_s(cell, step_s, parameters, begins) + hash_s if proves else begins * step_s
    parts = {"build": SETUP_S + parameters / VALUES_PER_S, "proof" if proves else "first steps": first_s}
    parts |= measured_s
    if cell.gpus > 1:
        undone_s = 2 * _held_bytes(cell, parameters) / COPIED_BYTES_PER_S
        parts["exposed"] = policy.quads * (QUAD_BLOCKS * block_s + undone_s)
        parts["recording"] = _recorded_steps(cell) * step_s
    parts["hash"] = hash_s
    parts["late proof"] = _late_s(cell, step_s, parameters, sum(measured_s.values())) + hash_s
    return parts


def _proof_s(cell: Cell, step_s: float, parameters: int, steps: int) -> float:
    """The first steps with their checks. Where simulating all replicas takes one rank too long, one is
    simulated; then the ranks simulate one each, or nothing where that takes too long as well."""
    one_s, longest_s = _simulated_s(cell, step_s), LONGEST_S / steps
    build_s = parameters / VALUES_PER_S
    alone_s, shared_s = cell.replicas * one_s, one_s + VALUE_BYTES * parameters / SUMMED_BYTES_PER_S
    if alone_s <= longest_s:
        return build_s + steps * (step_s + alone_s + _compared_s(parameters))
    checked = steps if cell.replicas > 1 and shared_s <= longest_s else 0
    compared_s = _compared_s(parameters)
    return build_s + steps * step_s + one_s + compared_s + checked * (shared_s + compared_s)


def _late_s(cell: Cell, step_s: float, parameters: int, measured_s: float) -> float:
    """Up to as many steps as may lie before the first that is checked, and the checked ones."""
    facts = STRATEGIES.facts(cell.strategy)
    promise = facts.promise
    by_each = (cell.model_parallel == 1 and not facts.shards) or promise.of == "parameters"
    simulated_s = (1 if by_each else cell.replicas) * _simulated_s(cell, step_s)
    checked_s = step_s + min(simulated_s, LONGEST_S) + _compared_s(parameters)
    fewest = min(promise.every, LATE_STEPS) if promise.of == "parameters" else 1
    allowed_s = min(LONGEST_S, LATE_SHARE * measured_s, LATE_STEPS * checked_s)
    before = max(LATE_STEPS - 1, 2 * promise.every)
    return before * step_s + parameters / VALUES_PER_S + max(fewest * checked_s, allowed_s)


def _simulated_s(cell: Cell, step_s: float) -> float:
    """A step of one replica on one device."""
    return step_s * cell.model_parallel / (1 + STRATEGIES.facts(cell.strategy).bubble(cell.gpus))


def _compared_s(parameters: int) -> float:
    """Beside the simulation of a step: all is copied."""
    return COPIES * VALUE_BYTES * parameters / COPIED_BYTES_PER_S


def _held_bytes(cell: Cell, parameters: int) -> float:
    """Of parameters and optimizer state on one rank: what a snapshot copies."""
    ranks = cell.gpus if STRATEGIES.facts(cell.strategy).shards else cell.model_parallel
    values = 1 + OPTIMIZERS.facts(cell.optimizer).state_values
    return VALUE_BYTES * values * parameters / ranks


def _recorded_steps(cell: Cell) -> int:
    """Whole periods, with the one before them."""
    steps = STRATEGIES.facts(cell.strategy).promise.every
    return (max(1, RECORDED_STEPS // steps) + 1) * steps
