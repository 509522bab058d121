"""The discrete choices of a model, such as the experts of a token, marked so that a proof can repeat them."""

from __future__ import annotations

from torch import Tensor, nn


class Choice(nn.Module):
    """Chooses the places of the `k` largest scores of each token, for example its experts.

    A choice is not continuous: where two scores are nearly equal, one rounding decides, and all gradients
    follow. The proof therefore has its simulation repeat what the ranks chose, and requires that a choice
    which differs from the simulation's own lies within rounding. It knows the choices by this module, which
    has no parameters.
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, scores: Tensor) -> Tensor:
        """Map scores (..., n) to the places (..., k), in int64, of the largest ones, the largest first.

        The tokens lie sample after sample, each in the order of its positions.
        """
        return scores.detach().topk(self.k).indices
