"""A small classifier on random images, trained by Lightning's Trainer."""

import argparse
import os

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--strategy", choices=["ddp", "fsdp", "fsdp2"], default="ddp")
options = parser.parse_args()


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 64), nn.ReLU(), nn.Linear(64, 10))

    def configure_model(self):
        if options.strategy == "fsdp2" and self.device_mesh is not None:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Print(lightning.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.is_global_zero and trainer.global_step and (index + 1) % options.accumulation == 0:
            print(f"step {trainer.global_step} loss {outputs['loss'].item():.6f}", flush=True)


lightning.seed_everything(options.seed)
data = torch.utils.data.TensorDataset(torch.randn(4096, 3, 32, 32), torch.randint(10, (4096,)))
loader = torch.utils.data.DataLoader(data, batch_size=options.batch // options.accumulation, shuffle=True)
cuda = torch.cuda.is_available()
lightning.Trainer(
    accelerator="gpu" if cuda else "cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy=ModelParallelStrategy() if options.strategy == "fsdp2" else options.strategy,
    accumulate_grad_batches=options.accumulation,
    max_steps=1_000_000,
    max_epochs=-1,
    callbacks=[Print()],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
).fit(Classifier(), loader)
