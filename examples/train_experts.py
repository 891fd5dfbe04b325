"""Train a mixture of experts, divided over pairs of ranks: torchrun --nproc-per-node 4 train_experts.py (on CPUs)."""

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.expert_parallel import apply_expert_parallelism

import zeroshard

dist.init_process_group()
ranks, experts = dist.get_world_size(), 2  # the number of ranks that divide the experts
mesh = init_device_mesh("cpu", (ranks // experts, experts, 1), mesh_dim_names=("dp", "ep", "tp"))

torch.manual_seed(0)
config = transformers.Qwen3MoeConfig(
    vocab_size=64, hidden_size=32, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, num_experts=8, num_experts_per_tok=2,
)  # fmt: skip
model = transformers.Qwen3MoeForCausalLM(config)
plan: dict[str, str] = {}
for number in range(config.num_hidden_layers):
    name = f"model.layers.{number}.mlp.experts"
    plan |= {f"{name}.gate_up_proj": "grouped_gemm", f"{name}.down_proj": "grouped_gemm", name: "ep_dispatch_experts"}
apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
sharded = zeroshard.shard(model, optimizer, 3, group=mesh["dp", "ep"])
generator = torch.Generator().manual_seed(dist.get_rank())  # every rank has its own batches
for step in range(10):
    starts = torch.randint(0, 64, (4, 1), generator=generator)
    tokens = (starts + torch.arange(16)) % 64  # to be learnt: each token is the one before it, plus one
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    norm = sharded.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss = sharded.sum_over_ranks(loss.detach()) / ranks
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss:.3f}, norm {norm:.3f}")
sharded.save("checkpoints", "last")  # it loads with any number of ranks, of experts' ranks, and at any stage
sharded.remove()
dist.destroy_process_group()
