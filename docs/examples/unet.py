"""A U-Net (Ronneberger et al. 2015, arXiv:1505.04597) that gives a mask and its edges, with a loss for each.

In this folder: bench matrix --workload py:unet:build --gpus 1..2 --memory-format channels_last
"""

import torch
from torch import nn
from torch.nn import functional as F

from workloads import Workload

CHANNELS = (8, 16, 32)
EDGES = 0.5
"""Weight of the second loss."""


class Convolutions(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(4, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.ReLU(),
        )


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inputs = (3, *CHANNELS)
        self.down = nn.ModuleList(Convolutions(inputs[i], inputs[i + 1]) for i in range(len(CHANNELS)))
        upwards = list(zip(CHANNELS[:0:-1], CHANNELS[-2::-1], strict=True))
        self.wider = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in upwards)
        self.up = nn.ModuleList(Convolutions(2 * b, b) for _, b in upwards)
        self.mask, self.edges = (nn.Conv2d(CHANNELS[0], 1, 1) for _ in range(2))

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        kept, x = [], image
        for index, convolutions in enumerate(self.down):
            x = convolutions(F.max_pool2d(x, 2) if index else x)
            kept.append(x)
        for wider, convolutions, beside in zip(self.wider, self.up, kept[-2::-1], strict=True):
            x = convolutions(torch.cat([wider(x), beside], dim=1))
        return {"mask": self.mask(x), "edges": self.edges(x)}


def step(model, batch):
    found = model(batch["image"])
    mask = F.binary_cross_entropy_with_logits(found["mask"], batch["mask"])
    edges = F.l1_loss(found["edges"], batch["edges"])
    return {"loss": mask + EDGES * edges, "mask": mask.detach(), "edges": edges.detach()}


def build() -> Workload:
    def synthetic(generator, samples):
        image = torch.randn(samples, 3, 32, 32, generator=generator)
        mask = (image.mean(dim=1, keepdim=True) > 0).float()
        edges = F.max_pool2d(mask, 3, stride=1, padding=1) - mask
        return {"image": image, "mask": mask, "edges": edges}

    return Workload(module=UNet(), step=step, synthetic=synthetic, unit="images")
