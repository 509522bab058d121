"""Inference on random images, without an optimizer: under bench the script says itself where a step ends."""

import argparse
import builtins

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
options = parser.parse_args()

bench_step = getattr(builtins, "bench_step", None)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 30 * 30, 10)).to(device)
with torch.inference_mode():
    while True:
        model(torch.randn(options.batch, 3, 32, 32, device=device)).argmax(1).sum().item()
        if bench_step:
            bench_step(samples=options.batch)
