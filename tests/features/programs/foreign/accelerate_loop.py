"""The training loop of accelerate's guide, on a small model and random data."""

import argparse

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--fsdp", action="store_true")
options = parser.parse_args()

accelerator = Accelerator(
    cpu=not torch.cuda.is_available(),
    gradient_accumulation_steps=options.accumulation,
    fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if options.fsdp else None,
)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(4096, 256), torch.randint(10, (4096,)))
loader = torch.utils.data.DataLoader(data, batch_size=options.batch // options.accumulation, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
while True:
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
