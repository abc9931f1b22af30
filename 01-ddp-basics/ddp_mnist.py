"""Train a small CNN on handwritten digits with DistributedDataParallel, and prove it is right.

    CPU   torchrun --standalone --nproc-per-node=2 01-ddp-basics/ddp_mnist.py
    GPU   torchrun --standalone --nproc-per-node=gpu 01-ddp-basics/ddp_mnist.py

`python 01-ddp-basics/ddp_mnist.py` is the same training in one process. Look for: the same loss
on any number of ranks while --micro-batch-size times ranks stays the same, and the last table,
which sets what was measured beside what must be true.

Sources: Li et al., PyTorch Distributed (VLDB 2020); docs.pytorch.org, DistributedDataParallel.
"""

import hashlib
import math
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from dist_common import checkpoint, data, measure, runtime
from dist_common.console import Console, plot_training
from dist_common.models import SmallCNN

# Relative. fp32 sums taken in another order differ in the last bits; bf16 keeps 8 bits a number.
GRADIENT_TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 5e-2}


def loss_of(model, images, labels, precision):
    """Return the mean cross-entropy of a batch. Shapes: images (B, 1, H, W), labels (B,)."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bf16-mixed"):
        logits = model(images)  # (B, 10)
    return F.cross_entropy(logits.float(), labels)


def train_one_epoch(ddp_model, optimizer, batches, device, precision, timer):
    """Take one step on each micro-batch of this rank; return each step's loss, mean over ranks."""
    losses = []
    for images, labels in batches:
        with timer:
            optimizer.zero_grad()
            loss = loss_of(ddp_model, images.to(device), labels.to(device), precision)

            loss.backward()  # DDP all-reduces gradients meanwhile: each rank ends with their mean

            # The same gradient on the same weights: ranks stay equal, and no weight is ever sent.
            optimizer.step()
        losses.append(loss.detach())
    # A rank knows the loss of its own micro-batches only. One all-reduce an epoch, not one a step.
    means = torch.stack(losses)
    dist.all_reduce(means, op=dist.ReduceOp.SUM)
    return (means / dist.get_world_size()).tolist()


@torch.no_grad()
def evaluate(model, test_set, device):
    """Return the accuracy on the whole test set, and how many samples were counted just once."""
    mine = data.evaluation_indices(len(test_set), dist.get_rank(), dist.get_world_size())
    correct = torch.zeros(1, device=device)
    seen = torch.zeros(len(test_set), device=device)
    for chunk in mine.split(1000):
        images, labels = (tensor.to(device) for tensor in test_set[chunk])
        correct += (model(images).argmax(dim=1) == labels).sum()
        seen[chunk] += 1
    # Ranks may hold parts of different length: they meet after the loop, never inside it.
    dist.all_reduce(correct)
    dist.all_reduce(seen)
    return correct.item() / len(test_set), int((seen == 1).sum())


def check_first_gradient(results, ddp_model, loader, sampler, train_set, device, precision):
    """Hold DDP's first gradient against the one that one process gets from the global batch."""
    images, labels = (tensor.to(device) for tensor in next(iter(loader)))
    with measure.CollectiveCounter() as counter:
        loss_of(ddp_model, images, labels, precision).backward()
    averaged = torch.cat([p.grad.flatten() for p in ddp_model.parameters()])

    plain = ddp_model.module  # the model inside the wrapper: its backward sends nothing
    alone = torch.zeros_like(averaged)
    global_batch = sampler.global_order()[: len(labels) * dist.get_world_size()]
    for part in global_batch.split(len(labels)):  # in parts, as large as fit on a rank
        images, labels = (tensor.to(device) for tensor in train_set[part])
        loss = loss_of(plain, images, labels, precision) / dist.get_world_size()
        gradients = torch.autograd.grad(loss, list(plain.parameters()))
        alone += torch.cat([gradient.flatten() for gradient in gradients])

    error = (averaged - alone).abs().max() / alone.abs().max()
    dist.all_reduce(error, op=dist.ReduceOp.MAX)  # keep the largest over ranks: the worst counts
    name, source = "gradient: relative error against one process", "DDP paper, section 3.2"
    results.check(name, error.item(), 0, GRADIENT_TOLERANCE[precision], source)
    sent, gradient = counter.bytes["allreduce_"], sum(p.nbytes for p in plain.parameters())
    results.check("bytes all-reduced per step", sent, gradient, 0, "one gradient per weight")


def check_equal_weights(results, model):
    """Compare a fingerprint of the weights over all ranks."""
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    fingerprints = [None] * dist.get_world_size()  # one place for what each rank sends
    dist.all_gather_object(fingerprints, hashlib.sha256(weights.cpu().numpy()).hexdigest())
    name, source = "distinct sets of weights over all ranks", "DDP paper, section 3.1"
    results.check(name, len(set(fingerprints)), 1, 0, source)


def parse_args():
    parser = runtime.ArgumentParser(__doc__, resumes=True)  # --device, --seed, --output-dir, ...
    positive = runtime.positive_int
    parser.add_argument("--epochs", type=positive, default=10, help="passes over the data (10)")
    parser.add_argument(
        "--micro-batch-size", type=positive, default=32, help="samples per rank and step (32)"
    )
    parser.add_argument("--lr", type=runtime.positive_float, default=0.1, help="of SGD (0.1)")
    parser.add_argument("--precision", choices=GRADIENT_TOLERANCE, default="32-true")
    parser.add_argument("--data-dir", help="folder with MNIST (without: scikit-learn's digits)")
    parser.add_argument("--download", action="store_true", help="fetch MNIST into --data-dir")
    return parser.parse_args()


def main():
    args = parse_args()

    # Which process am I, of how many, and which GPU is mine? Each launcher says it its own way.
    world = runtime.discover()
    device = runtime.pick_device(args.device, world)
    # Meet the other ranks; whoever waits for one that never comes, now or later, gives up.
    dist.init_process_group(
        runtime.backend_for(device),  # gloo between CPUs, NCCL between GPUs
        timeout=timedelta(seconds=args.timeout),
        device_id=device if device.type == "cuda" else None,  # NCCL opens its connections now
    )
    console = Console(world.is_rank0)  # one voice: without it every line appears once per rank
    runtime.seed_everything(args.seed)  # the run can be repeated
    results = measure.Results("01-ddp-basics/ddp_mnist.py", args, world, device)

    images = data.load_images(args.data_dir, args.download)
    # Each rank trains on its own part of the data; without this, all would see the same batches.
    sampler = data.ShardedSampler(len(images.train), world.rank, world.world_size, args.seed)
    loader = DataLoader(images.train, args.micro_batch_size, sampler=sampler, drop_last=True)
    global_batch = args.micro_batch_size * world.world_size
    if global_batch > len(images.train):
        raise runtime.UsageError(
            f"--micro-batch-size {args.micro_batch_size} x {world.world_size} ranks is more than "
            f"the {len(images.train)} samples there are to train on"
        )

    output = measure.claim_output_dir(args, world)
    model = SmallCNN().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    first_epoch, history, state = 0, {"losses": [], "accuracies": []}, None
    if args.resume:
        state = checkpoint.load_newest(output / "checkpoints", model, console)
    if state:
        if state["data"] != images.name:
            raise runtime.UsageError(f"{output} was trained on {state['data']}, not {images.name}")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        optimizer.param_groups[0]["lr"] = args.lr  # this run's flag, not the one of the old run
        first_epoch, history = state["epoch"], state["history"]
    if first_epoch >= args.epochs:
        raise runtime.UsageError(f"{output} has {first_epoch} epochs: ask for more by --epochs")

    # Sends rank 0's weights to all, and has backward all-reduce each gradient once it is known.
    ddp_model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)

    identity = f"{args.micro_batch_size} per rank x {world.world_size} ranks"
    console.header(results, images.describe(), f"global batch {global_batch} = {identity}")
    check_first_gradient(results, ddp_model, loader, sampler, images.train, device, args.precision)
    if state:
        checkpoint.restore_rng_state(state["rng"], world.rank)
    timer = measure.StepTimer(device)
    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)  # a new order, the same one on all ranks
        batches = console.progress(loader, f"epoch {epoch + 1}")
        losses = train_one_epoch(ddp_model, optimizer, batches, device, args.precision, timer)
        # The plain model: DDP's forward can communicate, and ranks may differ in test batches.
        accuracy, counted_once = evaluate(model, images.test, device)
        loss = sum(losses) / len(losses)
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} in epoch {epoch + 1}: try a lower --lr")
        history["losses"] += losses
        history["accuracies"].append(accuracy)
        console.say(
            f"epoch {epoch + 1:2d} | loss {loss:.4f} | test accuracy {accuracy:.1%} | "
            f"{timer.median_ms():.1f} ms/step"
        )
        if output:
            state = {
                "epoch": epoch + 1,
                "data": images.name,
                "optimizer": optimizer.state_dict(),
                "rng": checkpoint.gather_rng_states(),  # a collective, so not under the `if` below
                "history": history,
            }
            if world.is_rank0:  # all ranks hold the same weights: one of them writes
                steps = len(history["losses"])
                checkpoint.save(output / "checkpoints", steps, model, state)

    check_equal_weights(results, model)
    name, source = "test samples counted exactly once", "size of the test set"
    results.check(name, counted_once, len(images.test), 0, source)
    results.metrics = {
        "test_accuracy": accuracy,
        "final_loss": loss,
        "step_time_ms": timer.median_ms(),
        "samples_per_second": global_batch / timer.median_ms() * 1e3,
        "peak_memory_gib": measure.peak_memory_gib(device),
    }
    if output and world.is_rank0:
        results.write(output)
        plot_training(output / "training.png", **history)
        console.say(f"results.json, training.png and checkpoints are in {output}")
    code = console.verdict(results, f"test accuracy {accuracy:.1%}")
    # Wait for rank 0, which may still write: a launcher that sees one rank fail ends all others.
    dist.barrier()
    # Close the connections and end their threads while the interpreter is still there for them.
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    runtime.run(main)
