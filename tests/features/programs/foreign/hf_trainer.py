"""A tiny GPT-2 with random weights on random tokens, trained by Hugging Face's Trainer."""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--fsdp", action="store_true")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--output", default="out")
options = parser.parse_args()


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        tokens = torch.randint(256, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Print(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']}", flush=True)


torch.manual_seed(options.seed)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=64, n_layer=2, n_head=2))
fsdp = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"transformer_layer_cls_to_wrap": ["GPT2Block"]}}
Trainer(
    model=model,
    train_dataset=Tokens(),
    callbacks=[Print()],
    args=TrainingArguments(
        output_dir=options.output,
        per_device_train_batch_size=options.batch // options.accumulation,
        gradient_accumulation_steps=options.accumulation,
        max_steps=1_000_000,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        seed=options.seed,
        disable_tqdm=True,
        **(fsdp if options.fsdp else {}),
    ),
).train()
