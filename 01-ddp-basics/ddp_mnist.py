"""Train a small CNN on handwritten digits with DDP, and check that it is right.

    CPU   torchrun --standalone --nproc-per-node=2 01-ddp-basics/ddp_mnist.py
    GPU   torchrun --standalone --nproc-per-node=gpu 01-ddp-basics/ddp_mnist.py

`python 01-ddp-basics/ddp_mnist.py` trains in one process. Look for: the same losses on
any number of ranks as long as --micro-batch-size times ranks stays the same, and the
table of checks at the end. With --output-dir the script draws training.png.

Sources: Li et al., PyTorch Distributed (VLDB 2020), sections 3.1 and 3.2.
"""

import hashlib
import math
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from dist_common import cli, runtime
from dist_common.data import load_digits
from dist_common.report import Report
from dist_common.train import peak_memory_gib


class SmallCNN(nn.Module):
    """Two convolutions and two linear layers: 151,306 weights.

    There is no batch norm and no dropout, so the loss of a sample does not depend on
    the other samples of its rank. Shapes: (B, 1, 8, 8) -> logits (B, 10).
    """

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3, padding=1)
        self.hidden = nn.Linear(64 * 4 * 4, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, images):
        x = (images - 0.31) / 0.38  # mean 0 and standard deviation 1 over the data set
        x = F.gelu(self.conv1(x))  # (B, 32, 8, 8)
        x = F.avg_pool2d(F.gelu(self.conv2(x)), 2)  # (B, 64, 4, 4)
        return self.head(F.gelu(self.hidden(x.flatten(1))))  # (B, 10)


def train_one_epoch(ddp_model, optimizer, loader, device):
    """Train on this rank's samples; return the losses of all steps, mean over ranks."""
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp_model(images.to(device)), labels.to(device))

        loss.backward()  # DDP all-reduces the gradients: every rank gets their mean

        optimizer.step()  # the same step on every rank, so the weights stay equal
        losses.append(loss.detach())
    means = torch.stack(losses)
    dist.all_reduce(means)  # one all-reduce per epoch, because only the log needs it
    return (means / dist.get_world_size()).tolist()


@torch.no_grad()
def evaluate(model, test_set, device):
    """Return the accuracy on the test set, and how many samples were counted once."""
    # lab: hole test
    # Every world_size-th sample. DistributedSampler would repeat some samples, so that
    # all ranks get equally many.
    mine = torch.arange(len(test_set))[dist.get_rank() :: dist.get_world_size()]
    correct = torch.zeros(1, device=device)
    seen = torch.zeros(len(test_set), device=device)
    for chunk in mine.split(1000):
        images, labels = (tensor.to(device) for tensor in test_set[chunk])
        correct += (model(images).argmax(dim=1) == labels).sum()
        seen[chunk] += 1
    # Ranks may have different numbers of chunks, so no collective is in the loop.
    dist.all_reduce(correct)
    dist.all_reduce(seen)
    return correct.item() / len(test_set), int((seen == 1).sum())
    # lab: end


def gradient_of(model):
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def check_first_gradient(report, ddp_model, loader, train_set):
    """Compare DDP's first gradient with the gradient of one process."""
    device = report.run.device
    images, labels = next(iter(loader))
    F.cross_entropy(ddp_model(images.to(device)), labels.to(device)).backward()
    averaged = gradient_of(ddp_model)

    # One process: the same shuffle, and the whole global batch at once.
    generator = torch.Generator().manual_seed(report.args.seed)
    order = torch.randperm(len(train_set), generator=generator)
    images, labels = train_set[order[: len(labels) * report.run.world_size]]
    model = ddp_model.module  # the model inside the wrapper: its backward sends nothing
    model.zero_grad()
    F.cross_entropy(model(images.to(device)), labels.to(device)).backward()
    expected = gradient_of(model)

    error = (averaged - expected).norm() / expected.norm()
    dist.all_reduce(error, op=dist.ReduceOp.MAX)  # the worst rank counts
    report.check("relative error of the first gradient", error.item(), 0, 1e-5)


def count_distinct_replicas(model, group):
    """Return how many different sets of weights the ranks hold, bit by bit."""
    digest = hashlib.sha256()
    for weight in model.parameters():
        digest.update(weight.detach().cpu().numpy().tobytes())
    return len(set(runtime.gather(digest.hexdigest(), group)))


def draw(path, losses, accuracies):
    """Draw the loss of each step and the accuracy after each epoch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    loss_plot, accuracy_plot = figure.subplots(1, 2)
    loss_plot.semilogy(range(1, len(losses) + 1), losses)
    loss_plot.set(title="Training loss", xlabel="step", ylabel="cross-entropy")
    accuracy_plot.plot(range(1, len(accuracies) + 1), accuracies, marker="o")
    accuracy_plot.set(
        title="Test accuracy", xlabel="epoch", ylabel="share of the test set"
    )
    for axes in (loss_plot, accuracy_plot):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def parse_args():
    parser = cli.ArgumentParser(__doc__)  # --device, --seed, --timeout, --output-dir
    add = parser.add_argument
    add("--epochs", type=cli.positive_int, default=10, help="passes over the data (10)")
    add(
        "--micro-batch-size",
        type=cli.positive_int,
        default=32,
        help="samples per rank and step (32)",
    )
    add("--lr", type=cli.positive_float, default=0.1, help="of SGD (0.1)")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run:
        report = Report("01-ddp-basics/ddp_mnist.py", args, run)
        train_set, test_set = load_digits()
        global_batch = args.micro_batch_size * run.world_size
        if global_batch > len(train_set):
            raise cli.UsageError(
                f"--micro-batch-size {args.micro_batch_size} x {run.world_size} ranks "
                f"is more than the {len(train_set)} training samples"
            )
        run.print0(
            f"global batch {global_batch} = {args.micro_batch_size} per rank x "
            f"{run.world_size} ranks"
        )
        # All ranks shuffle the same way, and each takes every world_size-th sample.
        sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
        loader = DataLoader(
            train_set, args.micro_batch_size, sampler=sampler, drop_last=True
        )
        runtime.seed_everything(args.seed)
        model = SmallCNN().to(run.device)
        ddp_model = DDP(model)  # all ranks start with the weights of rank 0
        optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
        check_first_gradient(report, ddp_model, loader, train_set)

        all_losses, accuracies, times_ms = [], [], []
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)  # another shuffle in each epoch
            started = time.perf_counter()
            losses = train_one_epoch(ddp_model, optimizer, loader, run.device)
            times_ms.append((time.perf_counter() - started) * 1e3 / len(losses))
            loss = statistics.fmean(losses)
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss is {loss}: try a lower --lr")
            accuracy, counted_once = evaluate(model, test_set, run.device)
            run.print0(
                f"epoch {epoch + 1:2d} | loss {loss:.4f} | "
                f"test accuracy {accuracy:.1%} | {times_ms[-1]:.1f} ms/step"
            )
            all_losses += losses
            accuracies.append(accuracy)

        replicas = count_distinct_replicas(model, run.cpu_group)
        report.check("distinct sets of weights over all ranks", replicas, 1, 0)
        name = "test samples counted exactly once"
        report.check(name, counted_once, len(test_set), 0)
        step_time_ms = statistics.median(times_ms)
        report.metrics = {
            "test_accuracy": accuracy,
            "final_loss": loss,
            "losses": all_losses,
            "step_time_ms": step_time_ms,
            "samples_per_second": global_batch / step_time_ms * 1e3,
            "peak_memory_gib": peak_memory_gib(run.device),
        }
        if args.output_dir and run.rank == 0:
            draw(args.output_dir / "training.png", all_losses, accuracies)
        return report.finish(f"test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    cli.run(main)
