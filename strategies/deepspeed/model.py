"""DeepSpeed's own engine as a strategy: replicas, and ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054).

DeepSpeed's forward, backward, averaging, clipping and update run as they are, and the `Trainer` calls them in
its phases. They exchange over the group of the cell, which DeepSpeed takes for its data-parallel group. bench
divides the loss by the micro-batches, so that a micro-batch has the gradients that a serial loop gives it,
and sends the buffers of rank 0 at the start of a step, as all its strategies do. At stage 0 bench also clips.

A rank updates flat vectors, which DeepSpeed copies into the parameters after an update. What else replaces
their values (a checkpoint, steps that are undone) is copied before the next use.

A rank sends in one step, with P bytes of parameters over p ranks: at stages 1 and 2 2 (p - 1) / p P for the
gradients, as DeepSpeed averages all of a bucket by one all-reduce, at stage 2 in every micro-batch; and
(p - 1) / p P for the updated parameters. At stage 3 (p - 1) / p P for gathering, forward and again backward,
and as much for the gradients, in every micro-batch.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from results.errors import UsageError
from strategies.advice import WHOLE
from strategies.collectives.link import Link
from strategies.deepspeed.facts import DeepSpeed
from strategies.optimizers import optimizer_call
from strategies.training.boxes import Owned, run_of, whole
from strategies.training.layouts import require_dense
from strategies.training.loss import Batch, loss_of
from strategies.training.observer import Phase
from strategies.training.parallel import GradientTask, OptimizerState, ParallelModel, Setting
from strategies.training.replicas import Buffers, take_from_first


@contextmanager
def replaced(linear: Callable[..., Tensor]) -> Iterator[None]:
    """Let modules call this linear function until the context ends."""
    before, nn.functional.linear = nn.functional.linear, linear
    try:
        yield
    finally:
        nn.functional.linear = before


@dataclass(frozen=True, slots=True)
class Run:
    """Elements of a parameter, counted row by row, that lie in a vector of this rank from `place` on."""

    name: str
    shape: tuple[int, ...]
    elements: range
    place: int


class Everyone:
    """The groups of a launch in which all ranks train one model, as DeepSpeed asks a model parallel unit."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def get_data_parallel_group(self) -> ProcessGroup:
        return self._link.group

    def get_data_parallel_rank(self) -> int:
        return self._link.rank

    def get_data_parallel_world_size(self) -> int:
        return self._link.size

    def get_model_parallel_group(self) -> None:
        return None

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size


class DeepSpeedModel(ParallelModel):
    """A module under DeepSpeed's engine, which is made together with the optimizer."""

    def __init__(self, module: nn.Module, setting: Setting) -> None:
        """Collective: all ranks take the buffers of rank 0; `build_optimizer` takes its parameters.

        Raises UsageError if DeepSpeed cannot be used on this device, and for a model that it does not take:
        with another data type than float32, or with sparse gradients.
        """
        super().__init__(module)
        require_dense(module, "deepspeed", WHOLE)
        types = {parameter.dtype for parameter in module.parameters()}
        if types != {torch.float32}:
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))
            raise UsageError(f"deepspeed takes parameters in float32, not {names}: {WHOLE}")
        self._facts, self._device = cast(DeepSpeed, setting.facts), setting.device
        self._link = Link(setting.exchange.group)
        self._deepspeed = imported(setting.device)
        self._buffers = Buffers(module)
        take_from_first(self._link, self._buffers.now())
        self._engine: Any = None
        self._vectors: list[tuple[Tensor, list[Run]]] = []
        """The vectors that this rank updates, and its parts of parameters that are not trained."""
        self._seen: list[int] = []
        """The versions of the vectors whose values the parameters have."""
        self._norm: Tensor | None = None
        """The norm of the step that is under way, which its update fills in."""

    def build_optimizer(self, text: str) -> torch.optim.Optimizer:
        """Build the engine around the optimizer that a spec text names. Collective.

        Returns an optimizer of the same class over this rank's vectors, whose step is the engine's. Raises
        UsageError without a Trainer, as the engine takes a step in its own way.
        """
        if self.settings is None:
            raise UsageError("deepspeed takes the whole step by its own engine: train by a Trainer")
        trained = [parameter for parameter in self.bare.parameters() if parameter.requires_grad]
        kind, arguments = optimizer_call(text, trained)
        inner = kind(trained, **arguments)
        self.module = self._engine = engine = self._initialized(inner)
        self._vectors = list(self._found())
        self._seen = self._versions()

        def step(outer: torch.optim.Optimizer) -> None:
            for ours, theirs in zip(outer.param_groups, inner.param_groups, strict=True):
                # A schedule changes the rates of the trainer's optimizer.
                theirs.update({key: value for key, value in ours.items() if key != "params"})
            engine.step()
            self._seen = self._versions()
            if not engine.was_step_applied():
                # DeepSpeed leaves out an update whose gradients are not finite, and the run would seem well.
                with torch.no_grad():
                    for vector in self.parameters():
                        vector.fill_(math.nan)
            if self._norm is not None:
                self._norm.copy_(torch.as_tensor(engine.get_global_grad_norm()))

        outer = stepping(kind)(list(self.parameters()), **arguments)
        outer.take_step, outer.state = step, inner.state
        return cast(torch.optim.Optimizer, outer)

    def _initialized(self, inner: torch.optim.Optimizer) -> Any:
        """Make the engine. Raises UsageError if DeepSpeed opens a process group."""
        from deepspeed.runtime import torch_autocast
        from deepspeed.utils import debug, groups

        # What an engine of an earlier cell left in DeepSpeed's modules.
        groups.mpu = groups._WORLD_GROUP = None
        torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
        known = torch.distributed.distributed_c10d._world.pg_map
        before = len(known)
        # Stage 3 has a linear function that keeps no weight, and the serial simulation is to use torch's.
        with replaced(nn.functional.linear):
            engine, *_ = self._deepspeed.initialize(
                args=SimpleNamespace(device_rank=self._device.index or 0),
                model=self.bare,
                optimizer=inner,
                config=self._config(),
                mpu=Everyone(self._link),
                dist_init_required=False,
            )
            self._linear = nn.functional.linear
        if len(known) != before:
            raise UsageError("deepspeed has opened a process group, and must use the groups of the worker")
        # Names for messages alone, and hooks in autograd's nodes, would keep the model for ever.
        debug.debug_clear_module_and_param_names()
        weakref.finalize(self, engine.destroy)
        return engine

    def _config(self) -> dict[str, Any]:
        facts, settings = self._facts, self.settings
        assert settings is not None
        spec, clips = facts.spec, facts.stage and settings.clip_norm
        zero: dict[str, Any] = {
            "stage": facts.stage,
            "reduce_bucket_size": spec.integer("reduce_bucket_size"),
            "stage3_prefetch_bucket_size": spec.integer("prefetch_bucket_size"),
            "stage3_max_live_parameters": facts.live,
            "stage3_max_reuse_distance": facts.live,
            # DeepSpeed would leave small parameters whole.
            "stage3_param_persistence_threshold": 0,
        }
        if spec.options["overlap_comm"] is not None:
            zero["overlap_comm"] = spec.flag("overlap_comm")
        if facts.offloads:
            host = {"device": "cpu", "pin_memory": self._device.type == "cuda"}
            zero["offload_optimizer"] = host
            if facts.stage == 3:
                zero["offload_param"] = host
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": settings.accumulation,
            "gradient_clipping": clips or 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            # Without modules that are safe in lower precision gradients are averaged in single precision.
            "torch_autocast": {
                "enabled": settings.precision == "bf16",
                "dtype": "bfloat16",
                "lower_precision_safe_modules": [],
            },
            # It would wait for the device in every step.
            "timers": {"throughput": {"enabled": False}},
            "steps_per_print": 10**9,
        }

    def _found(self) -> Iterator[tuple[Tensor, list[Run]]]:
        """Yield the vectors of this rank, each with its runs of elements of parameters."""
        stage, zero, rank = self._facts.stage, self._engine.optimizer, self._link.rank
        names = {parameter: name for name, parameter in self.bare.named_parameters()}

        def cut(each: Any, at: int, part: range) -> Run:
            """The elements of a parameter, the first of which is at place `at`, in a part of these places."""
            shape = tuple(getattr(each, "ds_shape", each.shape))
            begin = min(max(part.start - at, 0), math.prod(shape))
            stop = max(begin, min(part.stop - at, math.prod(shape)))
            return Run(names[each], shape, range(begin, stop), at + begin)

        def part_of_third(each: Any, place: int) -> Run:
            size = each.ds_tensor.numel()
            return cut(each, place - rank * size, range(place, place + size))

        if stage in (1, 2):
            # One vector of all parameters, one after another, is cut into equal parts.
            for members, vector in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
                part = range(vector.numel())
                places = accumulate((each.numel() for each in members), initial=-rank * len(part))
                yield vector, [cut(each, at, part) for each, at in zip(members, places, strict=False)]
        if stage == 3:
            # Each parameter is cut into equal parts, of which the last ones may be short or empty.
            for members, vector in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
                places = accumulate((each.ds_tensor.numel() for each in members), initial=0)
                yield vector, list(map(part_of_third, members, places))
        for each in names:
            if stage == 3 and not each.requires_grad:
                yield cast(Any, each).ds_tensor, [part_of_third(each, 0)]
            elif not stage or not each.requires_grad:
                yield each, [cut(each, 0, range(each.numel()))]

    def parameters(self) -> Iterator[nn.Parameter]:
        """The vectors that this rank updates."""
        return (cast(nn.Parameter, vector) for vector, _ in self._vectors if vector.requires_grad)

    def owned(self) -> Iterator[Owned]:
        for vector, runs in self._vectors:
            if self._facts.stage and vector.dim() == 1:
                boxes = (box for run in runs for box in run_of(run.name, run.shape, run.elements, run.place))
                yield Owned(vector, tuple(boxes))
            else:
                yield whole(runs[0].name, vector)

    def _versions(self) -> list[int]:
        return [vector._version for vector in self.parameters()]

    def _refresh(self) -> None:
        """Give the parameters the values of the vectors, if others than the engine have changed these;
        collective."""
        if self._facts.stage and self._versions() != self._seen:
            zero = self._engine.optimizer
            if self._facts.stage < 3:
                zero.update_lp_params()
            else:
                zero._partition_all_parameters()
                for index in range(len(zero.fp16_groups)):
                    zero._reassign_or_swap_out_partitioned_parameters(index)
            self._seen = self._versions()

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Collective at stage 3."""
        self._refresh()
        for name, parameter in self.bare.named_parameters():
            with self._deepspeed.zero.GatheredParameters([parameter], enabled=self._facts.stage == 3):
                value = parameter.detach()
                value = value.clone() if self._facts.stage == 3 else value
            yield name, value

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Collective."""
        if not self._facts.stage:
            yield from super().named_gradients()
            return
        for name, parameter in self.bare.named_parameters():
            if parameter.requires_grad:
                yield name, self._deepspeed.utils.safe_get_full_grad(parameter)

    def named_state(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, OptimizerState]]:
        """Collective."""
        if not self._facts.stage:
            yield from super().named_state(optimizer)
            return
        for vector, runs in self._vectors:
            state = optimizer.state.get(vector, {})
            for run in runs if state else ():
                yield (
                    run.name,
                    {
                        key: self._whole(run, value)
                        if isinstance(value, Tensor) and value.shape == vector.shape
                        else value
                        for key, value in sorted(state.items())
                    },
                )

    def _whole(self, run: Run, values: Tensor) -> Tensor:
        """Gather the elements of a parameter from the vectors of all ranks; collective."""
        complete = torch.zeros(math.prod(run.shape), dtype=values.dtype, device=self._device)
        complete[run.elements.start : run.elements.stop] = values[run.place : run.place + len(run.elements)]
        self._link.all_reduce(complete)
        return complete.view(run.shape)

    def compute_gradients(self, batches: Iterator[Batch], task: GradientTask) -> Tensor:
        total = torch.zeros((), device=task.device)
        for index in range(task.accumulation):
            task.observer.begins(Phase.DATA)
            batch = next(batches)
            task.observer.begins(Phase.FORWARD)
            if index == 0:
                self.started()
            self._engine.set_gradient_accumulation_boundary(index == task.accumulation - 1)
            with replaced(self._linear):
                with task.autocast():
                    loss = loss_of(self.module, batch, task.loss) / task.accumulation
                task.observer.begins(Phase.BACKWARD)
                self._engine.backward(loss, scale_wrt_gas=False)
            total = total + loss.detach()
        return total

    def started(self) -> None:
        self._refresh()
        take_from_first(self._link, self._buffers.now())

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Return a scalar that gets the norm when the engine clips, in its step; at stage 0 clip at once."""
        if not self._facts.stage:
            return super().clip_gradients(max_norm)
        self._norm = torch.zeros((), device=self._device)
        return self._norm

    def load_strategy_state(self, state: Mapping[str, object]) -> None:
        """Collective if vectors were replaced before; what replaces them later is used by the next step."""
        super().load_strategy_state(state)
        self._refresh()

    def start_from(self, steps: int) -> None:
        self._refresh()


def stepping(kind: type[torch.optim.Optimizer]) -> Any:
    """Return a class of optimizers of a `kind`, and with its name, that make steps by their `take_step`."""

    class Stepping(kind):  # type: ignore[misc, valid-type]
        take_step: Callable[[torch.optim.Optimizer], None]

        def step(self, closure: object = None) -> None:
            self.take_step(self)

        def zero_grad(self, set_to_none: bool = True) -> None:
            """Leave gradients to the engine, which has freed them, or keeps their memory."""

        def load_state_dict(self, state_dict: object) -> None:
            """Raises UsageError: the state lies in vectors of this rank, from which the engine trains."""
            raise UsageError(
                "deepspeed keeps the optimizer's state for its engine: call trainer.resume(folder), or "
                "trainer.load_state_dict(state) on every rank, instead of optimizer.load_state_dict(state)"
            )

    Stepping.__name__ = kind.__name__
    return Stepping


def imported(device: torch.device) -> Any:
    """Import DeepSpeed for a device. Raises UsageError if it cannot be imported, or works on another one."""
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    deepspeed = DeepSpeed.engine.load(device.type)
    # DeepSpeed would try every operation that it can compile, and compile the one that inference uses. A
    # process that is killed meanwhile leaves a lock for which all later ones wait for ever.
    deepspeed.ops.__compatible_ops__ = {}
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # In every step torch would tell that its collectives have other names now.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    accelerator = deepspeed.accelerator.get_accelerator()
    on, by = accelerator.device_name(), accelerator.communication_backend_name()
    if on != device.type or by not in ("gloo", "nccl"):
        raise UsageError(
            f"deepspeed works on {on} by {by} here, and the cell on {device.type} by Gloo or NCCL: "
            f"start a process without DS_ACCELERATOR"
        )
    return deepspeed
