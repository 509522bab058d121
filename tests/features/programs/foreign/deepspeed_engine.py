"""A small model and random data in DeepSpeed's engine."""

import argparse

import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--stage", type=int, default=0)
options = parser.parse_args()

micro_batch = options.batch // options.accumulation
deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": options.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": options.stage},
    },
)
while True:
    inputs = torch.randn(micro_batch, 256, device=engine.device)
    labels = torch.randint(10, (micro_batch,), device=engine.device)
    engine.backward(nn.functional.cross_entropy(engine(inputs), labels))
    engine.step()
