"""Train a transformer with DeepSpeed's ZeRO, stages 1 to 3: a template.

Copy this file and dist_common, then change both.

    CPU   deepspeed --num_gpus=2 03-deepspeed/deepspeed_train.py --deepspeed \
              --deepspeed_config 03-deepspeed/configs/zero2_config.json
    GPU   deepspeed --num_gpus=8 03-deepspeed/deepspeed_train.py --preset llama3-8b \
              --deepspeed_config 03-deepspeed/configs/zero3_config.json \
              --seq-len 4096 --micro-batch-size 1 --activation-checkpointing full

torchrun and srun start it too. It does the same job as ddp_training.py of module 01:
expect the same losses. With --output-dir and --resume the run can be killed at any
moment and started again, on any number of ranks and in another stage. --self-check
compares two steps with one process.

Sources: Rajbhandari et al., ZeRO (SC 2020); DeepSpeed's documentation, "Configuration
JSON" and "ZeRO".
"""

from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dist_common import check, cli, data, runtime, train
from dist_common.checkpoint import Checkpoints
from dist_common.deepspeed import import_deepspeed, read_config, start_engine
from dist_common.model import (
    PRESETS,
    Transformer,
    build_transformer,
    init_weights,
    load_config,
)
from dist_common.report import Report
from dist_common.train import build_optimizer, every, lr_at, set_lr

CONFIG = Path(__file__).parent / "configs" / "zero2_config.json"
MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's, of the gradient and of its square


def read_engine_config(args, dim, run):
    """Return --deepspeed_config with the values of this run.

    Raises: UsageError for settings that this script cannot use or has flags for.
    """
    fixed = {
        "train_batch_size": args.micro_batch_size * run.world_size,
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": 1,  # accumulate_gradient counts them itself
        "gradient_clipping": args.max_grad_norm,
        "bf16.enabled": args.precision == "bf16-mixed",
        "fp16.enabled": False,
        "torch_autocast.enabled": False,
        # Allow PyTorch's AdamW with offload; fused, it is as fast as DeepSpeed's.
        "zero_force_ds_cpu_optimizer": False,
        # With it DeepSpeed's functions find weights and moments at the wrong place.
        "zero_optimization.round_robin_gradients": False,
    }
    defaults = {  # numbers of elements, as in Hugging Face's Trainer
        "zero_optimization.reduce_bucket_size": dim * dim,
        "zero_optimization.stage3_prefetch_bucket_size": dim * dim * 9 // 10,
        "zero_optimization.stage3_param_persistence_threshold": 10 * dim,
    }
    config = read_config(args.deepspeed_config, defaults, fixed)
    zero = config["zero_optimization"]
    parts = ("offload_optimizer", "offload_param")
    targets = [zero.get(part, {}).get("device") for part in parts]
    if zero.get("stage") not in (1, 2, 3) or "nvme" in targets:
        raise cli.UsageError(
            f"{args.deepspeed_config}: this script trains in the stages 1, 2 and 3, "
            "with offload to cpu or none"
        )
    for section in ("optimizer", "scheduler"):
        if config.pop(section, None):
            run.print0(f"the config's {section} is not used: the script has its own")
    return config


def build_model(config, args, deepspeed, engine_config, run):
    """Return the model with its first weights; in stage 3 each rank has its shards."""
    if engine_config["zero_optimization"]["stage"] < 3:
        model = build_transformer(config, args.seed, run.device)
    else:
        with deepspeed.zero.Init(config_dict_or_path=engine_config):
            model = Transformer(config)  # shards each layer when it is complete
        weights = list(model.parameters())
        with deepspeed.zero.GatheredParameters(weights, modifier_rank=0):
            init_weights(model, args.seed)
    for block in model.blocks:
        block.activation_checkpointing = args.activation_checkpointing
    return model


def summed_loss(model, inputs, targets):
    """Return the cross-entropy summed over tokens. Shapes: inputs, targets (B, T)."""
    logits = model(inputs)  # (B, T, V)
    return F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), reduction="sum"
    )


def accumulate_gradient(engine, micro_batches, device):
    """Leave the mean gradient over all tokens of the global batch with the engine.

    Returns: this rank's sum of losses, and the number of tokens of all ranks.
    """
    counts = [(targets != data.IGNORED).sum() for _, targets in micro_batches]
    num_tokens = sum(counts).to(device, non_blocking=True)
    dist.all_reduce(num_tokens)
    loss_sum = torch.zeros((), device=device)
    for number, (inputs, targets) in enumerate(micro_batches, 1):
        inputs = inputs.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        # Stages 2 and 3 reduce in each backward, stage 1 only in the last.
        engine.set_gradient_accumulation_boundary(number == len(micro_batches))
        loss = summed_loss(engine, inputs, targets)
        # DeepSpeed averages over ranks, but we divide by the tokens of all ranks: undo
        # the average.
        mean_loss = loss * dist.get_world_size() / num_tokens
        engine.backward(mean_loss, scale_wrt_gas=False)
        loss_sum += loss.detach()
    return loss_sum, num_tokens


@torch.no_grad()
def evaluate(model, test_set, args, run):
    """Yield the tokens and the summed loss of each of this rank's test batches."""
    runtime.sync_buffers(model)
    model.eval()
    for inputs, targets in data.evaluation_batches(test_set, args, run):
        inputs = inputs.to(run.device)
        targets = targets.to(run.device)
        num_tokens = (targets != data.IGNORED).sum()
        yield num_tokens, summed_loss(model, inputs, targets)
    model.train()


def gather_whole(weight):
    """Return a weight and Adam's moments, whole and in float32. A collective."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    moments = [safe_get_full_optimizer_state(weight, key) for key in MOMENTS]
    return [safe_get_full_fp32_param(weight), *moments]


def set_whole(weight, value, moment=None):
    """Give this rank its part of a whole float32 weight, or of one of its moments."""
    from deepspeed import utils

    set_weight = utils.safe_set_full_fp32_param
    set_moment = utils.safe_set_full_optimizer_state
    if hasattr(weight, "ds_id"):  # stage 3: those fail where ranks divide unevenly
        set_weight = utils.safe_set_local_fp32_param
        set_moment = utils.safe_set_local_optimizer_state
        ranks = dist.get_world_size()
        padded = F.pad(value.flatten(), (0, -value.numel() % ranks))
        value = padded.chunk(ranks)[dist.get_rank()]
    if moment:
        set_moment(weight, value, moment)
    else:
        set_weight(weight, value)


def whole_model(engine):
    """Return the whole weights and moments as `check.first_two_steps` reads them."""
    weights, state = {}, {}
    for name, weight in engine.module.named_parameters():
        weights[name], exp_avg, _ = gather_whole(weight)
        state[weights[name]] = {"exp_avg": exp_avg}
    model = SimpleNamespace(named_parameters=weights.items)
    return model, SimpleNamespace(state=state)


class EngineCheckpoints(Checkpoints):
    """Checkpoints of whole tensors: they fit any number of ranks and any stage.

    The files of DeepSpeed's own save_checkpoint fit only the same ranks and stage.
    """

    def state(self):
        """Return every N-th weight with its moments, on N ranks, in host memory."""
        part = {}
        weights = self.model.module.named_parameters()
        for number, (name, weight) in enumerate(weights):
            tensors = gather_whole(weight)
            if number % self.run.world_size == self.run.rank:
                values = [tensor.cpu() for tensor in tensors]
                part |= zip(names_in_checkpoint(name), values, strict=True)
        return part

    def load_state(self, folder, facts):
        """Give each rank its part of the weights and moments, one weight at a time.

        Raises: CheckError if the engine's weights then differ from the checkpoint's.
        """
        import deepspeed

        weights = dict(self.model.module.named_parameters())
        for name, weight in weights.items():
            saved, *_ = self.read_whole(folder, name, weight)
            set_whole(weight, saved)
        # A step at rate 0 creates the moments, and DeepSpeed copies the float32
        # weights to those that the model computes with.
        tokens = torch.zeros(1, 1, dtype=torch.int64, device=self.run.device)
        self.model.backward(self.model(tokens).sum() * 0.0)
        set_lr(self.optimizer, 0.0)
        self.model.step()
        for state in self.optimizer.state.values():
            state["step"].fill_(facts["step"])
        for name, weight in weights.items():
            saved, *moments = self.read_whole(folder, name, weight)
            for key, moment in zip(MOMENTS, moments, strict=True):
                set_whole(weight, moment, key)
            with deepspeed.zero.GatheredParameters(weight):
                loaded = weight.detach().cpu()
            if not torch.equal(loaded, saved.to(loaded.dtype)):  # on all ranks
                raise cli.CheckError(f"{name} differs from {folder} after loading")

    def read_whole(self, folder, name, weight):
        """Return a weight and its moments from a checkpoint, in host memory."""
        shape = getattr(weight, "ds_shape", weight.shape)  # a shard of stage 3 is flat
        state = {key: torch.empty(shape) for key in names_in_checkpoint(name)}
        self.read(folder, state)
        return list(state.values())


def names_in_checkpoint(name):
    """Return the names of a weight and its moments, the same as in other templates."""
    return [f"model.{name}", *(f"optimizer.state.{name}.{key}" for key in MOMENTS)]


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    precisions = ("32-true", "bf16-mixed")
    cli.add_training_flags(
        parser, PRESETS, precisions, without=("--compile", "--async-save")
    )
    add = parser.add_argument
    add(
        "--deepspeed_config",
        type=Path,
        default=CONFIG,
        metavar="FILE",
        help=f"({CONFIG.name})",
    )
    add("--deepspeed", action="store_true", help="no effect: many commands have it")
    add("--local_rank", help="no effect: the deepspeed launcher passes it")
    args = parser.parse_args()
    cli.validate_training_args(args)
    return args


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run:
        args.precision = args.precision or runtime.default_precision(run.device)
        train_set, test_set, args.data, vocab_size = data.load_sequences(args)
        config = load_config(args.preset, args.seq_len, vocab_size)
        report = Report("03-deepspeed/deepspeed_train.py", args, run)
        engine_config = read_engine_config(args, config.dim, run)
        deepspeed = import_deepspeed(run, engine_config)
        model = build_model(config, args, deepspeed, engine_config, run)
        run.print0(f"{args.preset}: {config.num_parameters():,} weights")
        optimizer = build_optimizer(model, args)
        engine = start_engine(deepspeed, model, optimizer, engine_config, args.timeout)
        runtime.seed_everything(args.seed, run.rank)

        checkpoints = EngineCheckpoints(run, args, engine, optimizer)
        saved = checkpoints.resume()
        first_step = saved["step"] + 1
        train.settle_batch_size(args, run)
        batches = data.GlobalBatches(train_set, args, run, saved["samples_seen"])

        counter = check.CollectiveCounter()
        flops = config.flops_per_token(args.seq_len)
        log = train.Log(run, args, first_step, flops, counter)
        stop = train.StopSignal(run.cpu_group)

        for step in range(first_step, args.max_steps + 1):
            with log.step(step):
                loss_sum, num_tokens = accumulate_gradient(
                    engine, next(batches), run.device
                )
                set_lr(optimizer, lr_at(step, args))
                engine.step()  # clip, update the weights, clear the gradient
                grad_norm = engine.get_global_grad_norm()
            log.add(step, loss_sum, num_tokens, grad_norm)
            if args.self_check and step == 2 and first_step == 1:
                check.first_two_steps(
                    report,
                    log,
                    *whole_model(engine),
                    train_set,
                    lambda: build_transformer(config, args.seed, run.device),
                )
            if every(step, args.eval_every, args.max_steps):
                log.evaluation(step, evaluate(engine, test_set, args, run))
            stopping = stop.requested()
            if stopping or every(step, args.save_every, args.max_steps):
                log.flush()  # stops the run if the loss is not a number
                checkpoints.save(step, {"samples_seen": batches.samples_seen})
            if stopping:
                run.print0(f"stopped by a signal after step {step}")
                break

        report.metrics |= log.finish()
        return report.finish(log.summary())


if __name__ == "__main__":
    cli.run(main)
