"""Train with transformers' Trainer and sharded parameters: `torchrun --nproc-per-node 2 examples/trainer_native.py`."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from zeroshard.integrations.transformers import ZeroTrainer

torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4)
text = torch.frombuffer(bytearray(b"neither the stage nor the place changes the result. " * 200), dtype=torch.uint8)
data = [{"input_ids": row, "labels": row} for row in text[:10240].long().view(-1, 64)]
args = TrainingArguments(
    "trainer_native", per_device_train_batch_size=4, max_steps=40, learning_rate=1e-3, logging_steps=10, save_steps=20,
    report_to=[], use_cpu=not torch.accelerator.is_available(),
)  # fmt: skip
trainer = ZeroTrainer(LlamaForCausalLM(config), args, zero=3, train_dataset=data)
trainer.train()
trainer.save_model("trainer_native/final")  # on every rank; from_pretrained loads the folder
