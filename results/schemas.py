"""The schemas of a study's files, with their histories."""

from __future__ import annotations

from results.cell import Cell
from results.checkpoint import Checkpoint
from results.job import Job, JobEnd, Submission
from results.launch import Attempt, Launch
from results.network import NetworkTable
from results.plan import Plan
from results.record import RankRecord
from results.review import ReviewEntry
from results.run import RunResult
from results.schema import Json, Schema


def _one_order(old: Json) -> Json:
    """Unite the orders of both kinds that there were; a plan or launch had one of them at most."""
    found = [(kind, old.get(name)) for name, kind in (("training", "trained"), ("network", "network"))]
    order = next(({"kind": kind, "values": values} for kind, values in found if values is not None), None)
    return {name: value for name, value in old.items() if name not in ("training", "network")} | {
        "order": order
    }


def _losses_of_warmup(old: Json) -> Json:
    return {**old, "warmup_loss": old.get("warmup", {}).get("loss", [])}


# History: version, bench, what came. Version 1 of every schema is of 0.1.0, the first; those of
# checkpoint, network and review are unreleased. Features have the schemas of their own files.
# A line with `-` has optional fields that came without a new number: results/schema.py says when.
#   plan    2  0.1.0  collectives, links, node_size; collective and link of series, skips and patterns
#   cell    2  0.1.0  collective, node_size, link_mbit_per_s
#   launch  2  0.1.0  link_mbit_per_s
#   launch  3  0.1.0  job_id, silence_s
#   launch  4  0.1.0  trace, tensorboard
#   attempt 2  0.1.0  heartbeats, out_of_memory_kills, scheduler
#   job     2  0.1.0  trace and tensorboard of the options
#   rank-record 2, run-result 2  0.1.0  allocation of the environment
#   rank-record 3  0.1.0  recorded, link_peak, telemetry, first_step_ns, first_steps, period;
#                          off_step_ns of quads
#   run-result  3  0.1.0  budget, communication, ranks, telemetry, energy_j, bubble_ideal, first_step_ns,
#                         startup_ns, losses, first_steps
#   plan    3  0.1.0  memory_limit_mb; selective activation_checkpointing
#   cell    3  0.1.0  model_parallel, memory_limit_mb; selective activation_checkpointing
#   rank-record -, run-result -  0.2.0  training
#   launch -, job -, rank-record -, run-result -  0.2.0  extensions of the code
#   rank-record -  unreleased  updates of the work; late_first and late_steps of the proof; spent_ns;
#                             trained_steps; sampled-gradients of the proof
#   run-result  -  unreleased  late_first and late_steps of the proof; spent_ns
#   plan    -  unreleased  rule and predicate of skips; command, predicted_bytes, unpredicted,
#                             training; gpu_model, network_gbit_per_s and batches of the request
#   launch  -  unreleased  job_variables, forks, training, python
#   job     -  unreleased  arguments
#   rank-record -, run-result -  unreleased  transports, attention, settings, process_group, interfaces and
#                             program of the environment; user_commit and user_dirty of its code, as in
#                             launch and job
#   rank-record 4, run-result 4  unreleased  the outcome proof_failed
#   rank-record -, run-result -  unreleased  left of the buckets; exchange_backward_left
#   plan    -, launch -, rank-record -  unreleased  network
#   launch -, job -  unreleased  proof: whether a run whose proof fails measures on
#   rank-record -, run-result -  unreleased  copies_ns, of quads and of the result
#   rank-record 5  unreleased  warmup_loss, instead of all columns of the warm-up's steps
#   plan 4, launch 5  unreleased  order, instead of training and network
#   rank-record -  unreleased  measured, of kinds of study of other packages
#   plan    -  unreleased  round
#   rank-record 6  unreleased  steps without phases; work whose parameters and exchange are unknown
#   rank-record -, run-result -  unreleased  stages and bubble_replayed of recorded; layout; bubble_replayed;
#                             dimensions of the communication
#   rank-record -  unreleased  expert of the layout
#   rank-record -, run-result -  unreleased  experts, even_workload; busiest_expert; dropped_share;
#                             rows of the ranks; imbalance of the budget
#   cell 4, plan 5  unreleased  the precision float8
PLAN = Schema("plan", 5, Plan, upgrades={3: _one_order})
CELL = Schema("cell", 4, Cell)
LAUNCH = Schema("launch", 5, Launch, upgrades={4: _one_order})
ATTEMPT = Schema("attempt", 2, Attempt, measured=True)
RANK_RECORD = Schema("rank-record", 6, RankRecord, upgrades={4: _losses_of_warmup}, measured=True)
RUN_RESULT = Schema("run-result", 4, RunResult, measured=True)
JOB = Schema("job", 2, Job)
SUBMISSION = Schema("submission", 1, Submission)
JOB_END = Schema("job-end", 1, JobEnd)
CHECKPOINT = Schema("checkpoint", 1, Checkpoint)
NETWORK = Schema(
    "network", 1, NetworkTable, advice="measure it again by bench network, or leave --network out"
)
REVIEW = Schema("review", 1, ReviewEntry, advice="the other lines count; bench review adds it again")
