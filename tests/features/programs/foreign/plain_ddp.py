"""A plain script: a small model under DistributedDataParallel, or under fully_shard, on random data."""

import argparse
import itertools
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--fsdp", action="store_true")
parser.add_argument("--one-batch", action="store_true")
parser.add_argument("--print-every", type=int, default=1)
parser.add_argument("--slow-rank", type=int, default=-1)
parser.add_argument("--slow-ms", type=float, default=30)
options = parser.parse_args()

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
torch.manual_seed(0)
width = options.width
model = nn.Sequential(
    nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
)
model = model.to(device)
if options.fsdp:
    model = fully_shard(model, mesh=dist.init_device_mesh(device.type, (dist.get_world_size(),)))
else:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(dist.get_rank())
for step in itertools.count(1):
    if step == 1 or not options.one_batch:
        inputs = torch.randn(options.batch, width, device=device)
        labels = torch.randint(10, (options.batch,), device=device)
    outputs = model(inputs)
    if dist.get_rank() == options.slow_rank:
        outputs.register_hook(lambda gradient: time.sleep(options.slow_ms / 1e3))
    loss = nn.functional.cross_entropy(outputs, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % options.print_every == 0:
        print(f"step {step} loss {loss.item():.6f}")
