"""Fill in the values that a shipped config leaves "auto", for zero_offload.py."""

AUTO = "auto"
FLAG_OF = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "grad_accum_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "lr",
}
SECTIONS = {"bf16-mixed": "bf16", "16-mixed": "fp16"}


def settle_precision(config, args):
    """Turn on the section of --precision, and the other one off."""
    for precision, section in SECTIONS.items():
        config[section]["enabled"] = precision == args.precision


def fill(config, args, dim):
    """Replace each "auto" by the value of a flag, or by a size for this width."""
    for key in FLAG_OF:
        if "." not in key:
            config.setdefault(key, AUTO)
    values = {key: getattr(args, flag) for key, flag in FLAG_OF.items()} | {
        "zero_optimization.reduce_bucket_size": dim * dim,  # elements
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * dim * dim),
        "zero_optimization.stage3_param_persistence_threshold": 10 * dim,
        "zero_optimization.offload_optimizer.nvme_path": str(args.nvme_path),
        "zero_optimization.offload_param.nvme_path": str(args.nvme_path),
    }
    for key, value in values.items():
        *sections, name = key.split(".")
        section = config
        for part in sections:
            section = section.get(part, {})
        if section.get(name) == AUTO:
            section[name] = value
