"""The sampled proof: projections and elements of gradients, before their exchange and after it.

Where a step cannot be simulated, a mean over all replicas cannot be checked from some of them. But it is
linear: for a vector r that all ranks draw alike, the mean of the replicas' <r, gradient> is <r, mean>.
Parameter by parameter, each rank projects the gradients of its backward passes, before any code of a strategy
gets them, and the gradients that the exchange left. A Gloo group in host memory adds up the projections of
the former over the ranks. So a wrong divisor, a replica left out, a bucket skipped, a stale buffer or a shard
at a wrong place are seen whatever collectives the strategy has, and no rank has more than its own model.

The bound. r has independent normal elements, drawn from a seed that rank 0 takes from the operating system
in each step, so that they are independent of all rounding. Of a difference e, <r, e> is normal with the
deviation |e|. By rounding |e| <= gamma(n) / p sum |g_r| for p replicas and n terms of a sum and its factor
(Higham, see `comparison`), and |<r, e>| > `DEVIATIONS` times that has a probability of 1e-12. Each element of
some drawn places must agree within gamma(n) / p sum |g_r| there.

What is missed. A defect d of a parameter's gradient passes a projection only if |<r, d>| is within twice the
bound B, which has at most the probability 4 B / (sqrt(2 pi) |d|); and all of `PROJECTIONS`, independent, with
that to their power. An element among `ELEMENTS` of N drawn finds what is off in a share s of them with the
probability 1 - (1 - s)^ELEMENTS, however little it is off beyond its rounding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from harness.worker.proof.comparison import ProofFinding
from harness.worker.proof.reference import SMALLEST_NORMAL, Beat, dense
from harness.worker.rank.control import Control, hash_number
from results.cell import Cell
from strategies.catalog import STRATEGIES
from strategies.training.parallel import ParallelModel

PROJECTIONS = 4
"""Number of projections of each gradient."""
ELEMENTS = 16
"""Number of elements of each gradient, at drawn places."""
DEVIATIONS = 7.2
"""Deviations that a normal variable exceeds with the probability erfc(7.2 / sqrt(2)) = 6e-13."""
MISSED = 1e-6
"""The probability for which the size of a defect is stated."""
PIECE = 2**18
"""Number of elements that are projected at a time, so that no vector of a gradient's size is drawn."""
_NORM = PROJECTIONS + 2 * ELEMENTS
_ROW = _NORM + 2
"""Length of a row: projections, elements, their absolute values, the norm, and 1."""


def averages_whole_gradients(cell: Cell) -> bool:
    """Return whether a cell's gradients are the mean over all replicas, each of one rank."""
    promise = STRATEGIES.facts(cell.strategy).promise
    averages = promise.averages_all_gradients(promise.after) and not cell.compresses
    return averages and cell.model_parallel == 1


def cannot_sample(cell: Cell) -> bool:
    """Return whether projections of a cell's gradients say nothing.

    The gradients of a replica on several ranks lie on several ranks, not every exchange is a mean over all
    replicas, and one replica is its own mean.
    """
    # The compiler does not call the hooks by which the whole parameters of shards are found.
    unseen = cell.compile and STRATEGIES.facts(cell.strategy).shards
    return not averages_whole_gradients(cell) or cell.replicas == 1 or unseen


class Sampling:
    """The projections of one step on this rank."""

    def __init__(
        self, cell: Cell, model: ParallelModel, control: Control, *, seed: int, beat: Beat = lambda: None
    ) -> None:
        """`seed` is the same on all ranks, and nothing in training follows from it."""
        self._cell, self._model, self._control, self._seed = cell, model, control, seed
        self._beat = beat
        self._rows: dict[str, Tensor] = {}
        self._watched: set[str] = set()
        self._roundoff = 0.0
        """The largest unit roundoff of the summed values."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Project each gradient of a parameter that a backward pass computes in this context.

        With FSDP2 the model holds shards, and the parameters only while they are used.
        """
        bare = self._model.bare
        names = {id(parameter): name for name, parameter in bare.named_parameters()}
        slots = {(module, key): names[id(there)] for module, key, there in _held(bare)}
        hooked: dict[int, nn.Parameter] = {}

        def find(module: nn.Module, _: object = None) -> None:
            for part, key, there in _held(module):
                if there.requires_grad and type(there.data) is Tensor and id(there) not in hooked:
                    name = slots[part, key]
                    self._watched.add(name)
                    handle = there.register_hook(partial(self._project, name))  # type: ignore[no-untyped-call]
                    hooks.enter_context(handle)
                    hooked[id(there)] = there

        with ExitStack() as hooks:
            find(bare)
            if any(type(there.data) is not Tensor for _, _, there in _held(bare)):
                for module in bare.modules():
                    hooks.enter_context(module.register_forward_pre_hook(find))
            yield

    def _project(self, name: str, gradient: Tensor) -> None:
        if self._cell.accumulation > 1:
            # The exchange gets the sum of the micro-batches, which is rounded in the type of the gradients.
            self._roundoff = max(self._roundoff, torch.finfo(gradient.dtype).eps / 2)
        row = self._row(name, gradient)
        self._rows[name] = self._rows[name] + row if name in self._rows else row

    @torch.no_grad()
    def _row(self, name: str, values: Tensor) -> Tensor:
        """Return (`_ROW`,) numbers in double precision on the cell's device.

        They are linear in `values`, except the absolute values and the norm, which are subadditive.
        """
        flat = dense(values.detach()).to(self._control.device).reshape(-1)
        drawn = self._generator(name)
        sums = flat.new_zeros(PROJECTIONS, dtype=torch.float64)
        for piece in torch.split(flat, PIECE):
            sums += _normal(drawn, piece.numel()).double() @ piece.double()
            self._beat()
        places = torch.randint(max(1, flat.numel()), (ELEMENTS,), generator=drawn, device=flat.device)
        elements = flat[places].double() if flat.numel() else flat.new_zeros(ELEMENTS, dtype=torch.float64)
        norm = torch.linalg.vector_norm(flat, dtype=torch.float64)
        return torch.cat([sums, elements, elements.abs(), norm[None], torch.ones_like(norm)[None]])

    def _generator(self, name: str) -> torch.Generator:
        key = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=7).digest()
        return torch.Generator(self._control.device).manual_seed(int.from_bytes(key))

    def compare(self) -> tuple[list[ProofFinding], float] | None:
        """Compare the gradients that the exchange left on this rank with what all ranks projected;
        collective.

        Returns a finding for each parameter, and the size of a defect that is missed with the probability
        `MISSED`, in parts of a parameter's gradient (the mean of its replicas' L2 norms): the largest over
        the parameters. Returns None for a step with a gradient that is not finite, which the loss scaler
        leaves out, if a parameter could not be watched, and if the ranks draw different vectors.
        """
        if not self._draw_alike():
            return None
        sizes: dict[str, int] = {}
        left: dict[str, Tensor] = {}
        for name, value in self._model.named_gradients():
            sizes[name], left[name] = value.numel(), self._row(name, value).cpu()
            self._roundoff = max(self._roundoff, torch.finfo(value.dtype).eps / 2)
        names = [name for name, _ in self._model.bare.named_parameters()]
        nothing = torch.zeros(_ROW, dtype=torch.float64)
        own = torch.stack([self._rows.get(name, nothing).cpu() for name in names])
        watched = torch.tensor([[float(name in self._watched)] for name in names], dtype=torch.float64)
        total = self._control.sum_of_all(torch.cat([own, watched], dim=1))
        replicas = self._cell.replicas
        unseen = {name for name, row in zip(names, total, strict=True) if int(row[-1]) < replicas}
        if unseen & set(left) or not total.isfinite().all():
            return None
        findings, smallest = [], 0.0
        for name, row in zip(names, total, strict=True):
            if name not in unseen:
                finding, size = self._compared(name, row[:-1] / replicas, left.get(name), sizes.get(name, 0))
                findings.append(finding)
                smallest = max(smallest, size)
        return findings, smallest

    def _draw_alike(self) -> bool:
        """Return whether all ranks draw the same vectors; collective.

        Ranks on devices of two kinds may draw different vectors from one seed: a GPU's generator divides a
        vector among as many threads as it has, and a CPU's kernels depend on its instructions.
        """
        drawn = self._generator("")
        vectors = [("", _normal(drawn, PIECE)) for _ in range(2)]
        return self._control.agree(hash_number(vectors))

    def _compared(
        self, name: str, mean: Tensor, left: Tensor | None, size: int
    ) -> tuple[ProofFinding, float]:
        """Compare one parameter; also return the size of a defect that is missed with probability
        `MISSED`."""
        if (left is None) != (mean[-1] == 0) or left is None:
            what = f"gradient of {name} exists before the exchange or after it, and not on both sides"
            passed = left is None and float(mean[-1]) == 0
            return ProofFinding(passed=passed, of="names", what=what, difference=1.0, bound=0.0), 0.0
        # The allowed error of a mean of the replicas' micro-batches, relative to their mean size: all sums
        # but one of each term round, and at most three factors.
        rounded = (self._cell.replicas * self._cell.accumulation + 3) * self._roundoff
        norm, gamma = float(mean[_NORM]), rounded / (1 - rounded) if rounded < 1 else math.inf
        # The products and sums of the projections themselves, in double precision.
        own = 2 * (min(size, PIECE) + size / PIECE) * 2.0**-53 * math.sqrt(size) * norm
        bound = DEVIATIONS * gamma * (norm + SMALLEST_NORMAL * math.sqrt(size)) + own
        difference = (left - mean)[:_NORM].abs()
        projected, elements = difference[:PROJECTIONS], difference[PROJECTIONS : PROJECTIONS + ELEMENTS]
        allowed = gamma * (mean[PROJECTIONS + ELEMENTS : _NORM] + SMALLEST_NORMAL)
        passed = bool((projected <= bound).all() and (elements <= allowed).all())
        finding = ProofFinding(
            passed=passed,
            of="gradient",
            what=f"gradient of {name} is not the mean of the replicas': sampled, it differs by "
            f"{float(projected.max()):.3g}, more than {bound:.3g}, or in one of {ELEMENTS} elements",
            difference=float(projected.max()),
            bound=bound,
        )
        missed = 4 * bound / math.sqrt(2 * math.pi) * MISSED ** (-1 / PROJECTIONS)
        return finding, missed / norm if norm else 0.0


def _normal(drawn: torch.Generator, elements: int) -> Tensor:
    """Draw (`PROJECTIONS`, elements) independent normal numbers."""
    return torch.randn(PROJECTIONS, elements, generator=drawn, device=drawn.device)


def _held(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield every place of a parameter in a module and its submodules."""
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                yield part, key, parameter
