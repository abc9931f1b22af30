"""Train on ranks whose data loaders have different numbers of batches.

    CPU   torchrun --standalone --nproc-per-node=2 01-ddp-basics/uneven_data.py
    GPU   torchrun --standalone --nproc-per-node=gpu 01-ddp-basics/uneven_data.py

The digits are in files of different lengths, and every loader worker of every rank
reads its own files. --end says when an epoch ends: when the last rank has run out of
data, when the first one has, or each rank with its own data: then the others hang.
Look for: the samples that are left out, and the error against one process.

Sources: docs.pytorch.org, IterableDataset; torchdata, StatefulDataLoader.
"""

import random
import warnings
from itertools import islice, zip_longest

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import IterableDataset, default_collate, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from dist_common import check, cli, data, runtime
from dist_common.report import Report

warnings.filterwarnings("ignore", ".*set_vital")  # torchdata calls it


class FileStream(IterableDataset):
    """Read each file in one worker of one rank. Yields: number, image, label."""

    def __init__(self, samples, seed, run):
        self.samples = samples
        self.rank = run.rank
        self.world_size = run.world_size
        cuts = sorted(random.Random(seed).sample(range(1, len(samples)), 23))
        self.files = torch.arange(len(samples)).tensor_split(cuts)  # 24 files
        self.num_read = 0  # samples of this epoch that this worker has read
        self.start = 0  # where a resumed epoch continues

    def __iter__(self):
        worker = get_worker_info()  # None if the rank itself reads
        num_workers = worker.num_workers if worker else 1
        reader = self.rank * num_workers + (worker.id if worker else 0)
        files = self.files[reader :: self.world_size * num_workers]
        numbers = sum((file.tolist() for file in files), [])
        self.num_read, self.start = self.start, 0
        for number in numbers[self.num_read :]:
            self.num_read += 1
            yield number, *self.samples[number]

    def state_dict(self):
        return {"num_read": self.num_read}

    def load_state_dict(self, state):
        self.num_read = self.start = state["num_read"]


def make_loader(samples, args, run):
    stream = FileStream(samples, args.seed, run)
    return StatefulDataLoader(stream, batch_size=16, num_workers=2)


def share_steps(loader, run, end):
    """Yield (batch, weight, samples of all ranks), equally often on every rank.

    The weight of a batch is 1. A rank without a batch gets a spare one with weight 0.
    """
    batches = iter(loader)
    spare = default_collate([(0, *loader.dataset.samples[0])])
    while True:
        batch = next(batches, None)
        sizes = torch.zeros(run.world_size)
        sizes[run.rank] = len(batch[0]) if batch else 0
        dist.all_reduce(sizes)  # is anyone left?
        if not (sizes.all() if end == "first" else sizes.any()):
            return
        yield batch or spare, 1.0 if batch else 0.0, sizes.sum().item()


def build_model(args, run):
    torch.manual_seed(args.seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).to(run.device)


def train(model, steps, run):
    """Train; return the numbers of this rank's samples in each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained = []
    for (numbers, images, labels), weight, num_samples in steps:
        logits = model(images.to(run.device))
        loss = F.cross_entropy(logits, labels.to(run.device), reduction="sum") * weight
        # DDP and FSDP average over ranks, but we divide by the samples of all ranks:
        # undo the average.
        (loss * run.world_size / num_samples).backward()
        optimizer.step()
        optimizer.zero_grad()
        trained.append(numbers.tolist() if weight else [])
    return trained


def train_alone(samples, steps, args, run):
    """Return a model that one process trains on the samples of all ranks."""
    model = build_model(args, run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for numbers in steps:
        images, labels = samples[numbers]
        logits = model(images.to(run.device))
        F.cross_entropy(logits, labels.to(run.device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def read_with_a_stop(samples, args, run, num_batches):
    """Read some batches; let a new loader continue with the state of the first one."""
    stopped = make_loader(samples, args, run)
    batches = list(islice(stopped, num_batches))
    resumed = make_loader(samples, args, run)
    resumed.load_state_dict(stopped.state_dict())  # a job saves it with the weights
    return [batch[0].tolist() for batch in batches + list(resumed)]


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--strategy", choices=("ddp", "fsdp"), default="ddp", help="(ddp)")
    add("--end", choices=("last", "first", "own"), default="last", help="(last)")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run:
        report = Report("01-ddp-basics/uneven_data.py", args, run)
        samples, _ = data.load_digits()
        loader = make_loader(samples, args, run)
        batches = [batch[0].tolist() for batch in loader]
        resumed = read_with_a_stop(samples, args, run, len(batches) * 9 // 10)
        run.print0(f"batches of each rank: {runtime.gather(len(batches))}")

        steps = share_steps(loader, run, args.end)
        if args.end == "own":
            steps = ((batch, 1.0, len(batch[0]) * run.world_size) for batch in loader)
        model = build_model(args, run)
        distributed = DDP(model) if args.strategy == "ddp" else fully_shard(model)
        trained = train(distributed, steps, run)
        by_rank = runtime.gather(trained, run.cpu_group)
        steps = [sum(step, []) for step in zip_longest(*by_rank, fillvalue=[])]
        alone = train_alone(samples, steps, args, run)

        counts = torch.tensor(sum(steps, [])).bincount(minlength=len(samples))
        wrong = int((counts != 1).sum())
        report.check("samples not trained exactly once", wrong, 0, 0)
        weights = {name: check.whole(w) for name, w in model.named_parameters()}
        error = check.relative_error(weights, dict(alone.named_parameters()))
        report.check("weights: relative error against one process", error, 0, 1e-5)
        differ = sum(runtime.gather(resumed != batches))
        report.check("ranks whose batches differ after a resume", differ, 0, 0)
        return report.finish(f"{len(steps)} steps")


if __name__ == "__main__":
    cli.run(main)
