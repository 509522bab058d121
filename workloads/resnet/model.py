"""Residual networks, version 1.5: the stride is in the 3x3 convolution of a bottleneck.

He et al. 2015, arXiv:1512.03385. Modules are named, and initialised, as in torchvision.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from results.layout import ModelLayout
from workloads.resnet import ResNetShape
from workloads.workload import ImageInput, Workload


def build_resnet(shape: ResNetShape) -> Workload:
    """Build the network with its cross-entropy, for images (n, 3, px, px)."""
    takes = ImageInput(shape=(3, shape.px, shape.px), classes=shape.classes)
    blocks = (f"layer{s}.{b}" for s, count in enumerate(shape.blocks, start=1) for b in range(count))
    return Workload(
        module=ResNet(shape),
        loss=F.cross_entropy,
        synthetic=takes.synthetic,
        unit="images",
        layout=ModelLayout(
            blocks=tuple(blocks),
            stem=("conv1", "bn1", "relu", "maxpool"),
            head=("avgpool", "fc"),
            sample=takes.shape,
        ),
        input=takes,
    )


def _convolution(inputs: int, outputs: int, kernel: int, *, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


def _downsample(inputs: int, outputs: int, *, stride: int) -> nn.Sequential | None:
    """Return the layer that brings a block's input to the size of its output; None if it has that size."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_convolution(inputs, outputs, 1, stride=stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, whose result is added to the input."""

    def __init__(self, inputs: int, width: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, width, 3, stride=stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _convolution(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _downsample(inputs, width, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        y: Tensor = self.relu(self.bn2(self.conv2(x)) + shortcut)
        return y


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, whose result, of four times the width, is added to the input."""

    def __init__(self, inputs: int, width: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, stride=stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, 4 * width, 1)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(inputs, 4 * width, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        y: Tensor = self.relu(self.bn3(self.conv3(x)) + shortcut)
        return y


class ResNet(nn.Module):
    """Images (n, 3, px, px) to logits (n, classes)."""

    def __init__(self, shape: ResNetShape) -> None:
        super().__init__()
        self.conv1 = _convolution(3, 64, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(shape, 0)
        self.layer2 = _stage(shape, 1)
        self.layer3 = _stage(shape, 2)
        self.layer4 = _stage(shape, 3)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(shape.features, shape.classes)
        # Kaiming's initialisation for convolutions; BatchNorm and the classifier keep torch's own.
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer4(self.layer3(self.layer2(self.layer1(self.stem(x))))))

    def stem(self, x: Tensor) -> Tensor:
        """Map images to the input of the first block, (n, 64, px / 4, px / 4)."""
        y: Tensor = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return y

    def head(self, x: Tensor) -> Tensor:
        """Map the output of the last block to logits."""
        y: Tensor = self.fc(self.avgpool(x).flatten(1))
        return y


def _stage(shape: ResNetShape, stage: int) -> nn.Sequential:
    kind = Bottleneck if shape.bottleneck else BasicBlock
    width = 64 << stage
    outputs = width * shape.expansion
    inputs = 64 if stage == 0 else outputs // 2
    first = kind(inputs, width, stride=1 if stage == 0 else 2)
    rest = (kind(outputs, width, stride=1) for _ in range(shape.blocks[stage] - 1))
    return nn.Sequential(first, *rest)
