"""A model of `transformers` from a configuration, which gives its loss itself; nothing is downloaded.

`pip install transformers`, then, in this folder: bench matrix --workload py:bert:build --gpus 1..2
"""

import torch
from transformers import BertConfig, BertForSequenceClassification

from workloads import Workload


def build() -> Workload:
    config = BertConfig(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128)

    def synthetic(generator, samples):
        tokens = torch.randint(config.vocab_size, (samples, 32), generator=generator)
        return {"input_ids": tokens, "labels": torch.randint(2, (samples,), generator=generator)}

    return Workload(module=BertForSequenceClassification(config), synthetic=synthetic)
