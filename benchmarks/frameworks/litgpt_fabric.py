"""The one job in LitGPT's own model, trained by Fabric.

    CPU   python benchmarks/frameworks/litgpt_fabric.py
    GPU   the same

`litgpt pretrain` needs GPUs for two ranks. LitGPT needs an older huggingface_hub than
transformers 5 does, so it has its own environment:

    python -m venv .venv-litgpt
    .venv-litgpt/bin/python -m pip install --editable '.[litgpt]'
Source: LitGPT's `Config`, `GPT` and `pretrain.py`.
"""

from lightning.fabric import Fabric
from litgpt import GPT, Config
from torch import cat
from torch.utils.data import DataLoader

import framework_job as job


def build_model(args):
    """Return LitGPT's model in the shape and with the weights of the other ports."""
    ours = job.build_model(args)
    shape = ours.config
    model = GPT(
        Config(
            block_size=shape.max_seq_len,
            n_layer=shape.num_layers,
            n_embd=shape.dim,
            n_head=shape.num_heads,
            n_query_groups=shape.num_kv_heads,
            mlp_class_name="LLaMAMLP",
            intermediate_size=shape.ffn_dim,
            norm_class_name="RMSNorm",
            norm_eps=shape.norm_eps,
            rope_base=shape.rope_theta,
            rotary_percentage=1.0,  # else a quarter of each head turns
            padded_vocab_size=shape.vocab_size,
            vocab_size=shape.vocab_size,  # else 512 at least
            bias=False,
            parallel_residual=False,
        )
    )
    weights = {
        "transformer.wte.weight": ours.embedding.weight,
        "transformer.ln_f.weight": ours.norm.weight,
        "lm_head.weight": ours.head.weight,
    }
    for i, block in enumerate(ours.blocks):
        attention = block.attention
        weights |= {
            f"transformer.h.{i}.{name}.weight": weight
            for name, weight in {
                "norm_1": block.attention_norm.weight,
                "attn.qkv": cat(
                    (attention.wq.weight, attention.wk.weight, attention.wv.weight)
                ),
                "attn.proj": attention.wo.weight,
                "norm_2": block.ffn_norm.weight,
                "mlp.fc_1": block.gate.weight,
                "mlp.fc_2": block.up.weight,
                "mlp.proj": block.down.weight,
            }.items()
        }
    model.load_state_dict(weights)
    if shape.tied_embeddings:
        model.lm_head.weight = model.transformer.wte.weight
    return model


def train(args):
    fabric = Fabric(accelerator=args.device, devices=args.world_size, strategy="ddp")
    fabric.launch()
    dataset = job.build_dataset(args)
    loader = DataLoader(dataset, args.micro_batch_size, shuffle=False)
    loader = fabric.setup_dataloaders(loader)
    model = build_model(args)
    optimizer, schedule = job.build_optimizer(model, args)
    model, optimizer = fabric.setup(model, optimizer)
    record = job.Record(args, fabric.global_rank, fabric.world_size)
    for inputs, targets in loader:
        loss = job.loss_of(model, inputs, targets)
        optimizer.zero_grad()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=job.MAX_NORM)
        optimizer.step()
        schedule.step()
        record.step(loss)
    return record.finish(fabric.all_reduce)


if __name__ == "__main__":
    job.run(train, __doc__)
