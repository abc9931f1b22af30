"""Train a small CNN on handwritten digits with DistributedDataParallel, and prove it is right.

    CPU   torchrun --standalone --nproc-per-node=2 01-ddp-basics/ddp_mnist.py
    GPU   torchrun --standalone --nproc-per-node=gpu 01-ddp-basics/ddp_mnist.py

`python 01-ddp-basics/ddp_mnist.py` is the same training in one process. Look for: the same loss
on any number of ranks while --micro-batch-size times ranks stays the same, and the last table,
which sets what was measured beside what must be true.

Sources: Li et al., PyTorch Distributed (VLDB 2020); docs.pytorch.org, DistributedDataParallel.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from ddp_parts import digits
from legacy_common import checkpoint, cli, data, measure, runtime
from legacy_common.lab import proofs, traffic
from legacy_common.lab.figure import figure
from legacy_common.report import Report


def train_one_epoch(ddp_model, optimizer, batches, device, timer):
    """Take one step on each micro-batch of this rank; return each step's loss, mean over ranks."""
    losses = []
    for images, labels in batches:
        with timer:
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp_model(images.to(device)), labels.to(device))

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
    # lab: hole test
    # Every world_size-th sample: DistributedSampler would repeat some, to make parts equally long.
    mine = torch.arange(len(test_set))[dist.get_rank() :: dist.get_world_size()]
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
    # lab: end


def check_first_gradient(report, ddp_model, loader, train_set):
    """Compare DDP's first gradient with the one that one process gets from the global batch."""
    images, labels = (tensor.to(report.device) for tensor in next(iter(loader)))
    with traffic.TrafficCounter() as counter:
        F.cross_entropy(ddp_model(images), labels).backward()
    together = torch.cat([weight.grad.flatten() for weight in ddp_model.parameters()])

    model = ddp_model.module  # the model inside the wrapper: its backward sends nothing
    model.zero_grad()
    ranks = dist.get_world_size()
    global_batch = loader.sampler.global_order()[: len(labels) * ranks]
    for part in global_batch.split(len(labels)):  # what each rank took, one after the other
        images, labels = (tensor.to(report.device) for tensor in train_set[part])
        loss = F.cross_entropy(model(images), labels) / ranks
        loss.backward()  # adds to what the parts before left
    alone = torch.cat([weight.grad.flatten() for weight in model.parameters()])

    error = (together - alone).abs().max() / alone.abs().max()
    dist.all_reduce(error, op=dist.ReduceOp.MAX)  # the worst rank counts
    name = "gradient: relative error against one process"
    report.check(name, error.item(), 0, 1e-5, "one process on the global batch")
    proofs.one_gradient_sent(report, model, counter)


def save(report, epoch, images, store, history):
    """Write a checkpoint. All ranks call it; as all hold the same weights, rank 0 writes them."""
    facts = {"epoch": epoch, "data": images.name, "history": history}
    checkpoint.save(report.output / "checkpoints", len(history["losses"]), store, facts)


def resume(report, images, store, optimizer):
    """Load the newest checkpoint, if there is one; return the epochs done and their history."""
    found = checkpoint.find(report.output / "checkpoints", report, store)
    if found is None:
        return 0, {"losses": [], "accuracies": []}
    folder, facts = found
    if facts["data"] != images.name:
        raise cli.UsageError(
            f"{report.output} was trained on {facts['data']}, not on {images.name}"
        )
    if facts["epoch"] >= report.args.epochs:
        raise cli.UsageError(
            f"{report.output} has {facts['epoch']} epochs: ask for more by --epochs"
        )
    rng = checkpoint.load(folder, store)
    optimizer.param_groups[0]["lr"] = report.args.lr  # from the command line, not the checkpoint
    checkpoint.set_rng_state(rng)
    return facts["epoch"], facts["history"]


def draw(path, losses, accuracies):
    """Draw the loss of each step and the accuracy after each epoch."""
    with figure(path, 1, 2, figsize=(9, 3.2)) as (left, right):
        left.plot(range(1, len(losses) + 1), losses, linewidth=1)
        left.set(title="Training loss (mean over ranks)", xlabel="step", ylabel="cross-entropy")
        left.set_yscale("log")
        percent = [100 * accuracy for accuracy in accuracies]
        right.plot(range(1, len(percent) + 1), percent, marker="o", markersize=3)
        right.set(title=f"Test accuracy: {percent[-1]:.1f}%", xlabel="epoch", ylabel="percent")
        for axes in (left, right):
            axes.grid(alpha=0.3)


def parse_args():
    parser = cli.ArgumentParser(__doc__, resumes=True)  # --device, --seed, --output-dir, ...
    add = parser.add_argument
    add("--epochs", type=cli.positive_int, default=10, help="passes over the data (10)")
    add("--micro-batch-size", type=cli.positive_int, default=32,
        help="samples per rank and step (32)")  # fmt: skip
    add("--lr", type=cli.positive_float, default=0.1, help="of SGD (0.1)")
    add("--data-dir", help="folder with MNIST (without: scikit-learn's digits)")
    add("--download", action="store_true", help="fetch MNIST into --data-dir")
    return parser.parse_args()


def train(report, ddp_model, optimizer, loader, images):
    """Train from the first epoch or a checkpoint; return the history and the last evaluation."""
    args, model = report.args, ddp_model.module
    first_epoch, history = 0, {"losses": [], "accuracies": []}
    store = checkpoint.Replicated(model, optimizer=optimizer)
    if args.resume:
        first_epoch, history = resume(report, images, store, optimizer)
    timer = measure.StepTimer(report.device)
    for epoch in range(first_epoch, args.epochs):
        loader.sampler.set_epoch(epoch)  # a new order, the same one on all ranks
        batches = report.progress(loader, f"epoch {epoch + 1}")
        losses = train_one_epoch(ddp_model, optimizer, batches, report.device, timer)
        # The plain model: DDP's forward can communicate, and ranks may differ in test batches.
        accuracy, counted_once = evaluate(model, images.test, report.device)
        loss = sum(losses) / len(losses)
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} in epoch {epoch + 1}: try a lower --lr")
        history["losses"] += losses
        history["accuracies"].append(accuracy)
        report.say(
            f"epoch {epoch + 1:2d} | loss {loss:.4f} | test accuracy {accuracy:.1%} | "
            f"{timer.median_ms():.1f} ms/step"
        )
        if report.output:
            save(report, epoch + 1, images, store, history)
    report.metrics = {
        "test_accuracy": accuracy,
        "final_loss": loss,
        "step_time_ms": timer.median_ms(),
        "samples_per_second": loader.batch_size * dist.get_world_size() / timer.median_ms() * 1e3,
        "peak_memory_gib": measure.peak_memory_gib(report.device),
    }
    return history, counted_once


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("01-ddp-basics/ddp_mnist.py", args, world, device)  # prints from rank 0
        runtime.seed_everything(args.seed)
        images = digits.load_images(args.data_dir, args.download)
        # Each rank trains on its own part of the data; without this, all see the same batches.
        sampler = data.ShardedSampler(len(images.train), world.rank, world.world_size, args.seed)
        loader = DataLoader(images.train, args.micro_batch_size, sampler=sampler, drop_last=True)
        global_batch = args.micro_batch_size * world.world_size
        if global_batch > len(images.train):
            raise cli.UsageError(
                f"--micro-batch-size {args.micro_batch_size} x {world.world_size} ranks is more "
                f"than the {len(images.train)} samples there are to train on"
            )
        report.start(
            images.describe(),
            f"global batch {global_batch} = {args.micro_batch_size} per rank x "
            f"{world.world_size} ranks",
        )
        model = digits.SmallCNN().to(device)
        optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)

        # Sends rank 0's weights to all, and has backward all-reduce each gradient once it is known.
        ddp_model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)

        check_first_gradient(report, ddp_model, loader, images.train)
        history, counted_once = train(report, ddp_model, optimizer, loader, images)
        proofs.same_weights(report, model)
        name, source = "test samples counted exactly once", "size of the test set"
        report.check(name, counted_once, len(images.test), 0, source)
        if report.output and world.is_rank0:
            draw(report.output / "training.png", **history)
            report.say(f"results.json, training.png and checkpoints are in {report.output}")
        return report.finish(f"test accuracy {history['accuracies'][-1]:.1%}")


if __name__ == "__main__":
    cli.run(main)
