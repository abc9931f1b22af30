"""Send weights from FSDP trainers to a sampler, as reinforcement learning needs it.

The last rank samples; all other ranks train one model, sharded with FSDP.

    CPU   torchrun --standalone --nproc-per-node=3 05-advanced/weight_sync.py
    GPU   the same, with one GPU per rank

Look for: the same logits on both sides, and no rollout older than --max-staleness.

Sources: Zhao et al., PyTorch FSDP (VLDB 2023); vLLM's documentation, Weight Transfer
and Async Reinforcement Learning; Noukhovitch et al., Asynchronous RLHF (ICLR 2025).
"""

import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import default_collate

from dist_common import cli, data, runtime
from dist_common.model import PRESETS, Transformer, build_transformer, init_weights
from dist_common.report import Report

CONFIG = PRESETS["tiny"]
SEQ_LEN = 64
PROMPT = torch.arange(SEQ_LEN).unsqueeze(0)  # (1, T)
GLOBAL_BATCH = 12  # sequences per step, for 1, 2, 3, 4 or 6 trainers
STOP = -2  # instead of a version: the trainers have finished


def divide_into_buckets(model):
    """Return lists of weights that travel together, such as a block's.

    Both sides divide the same model, so names and shapes need not be sent.
    """
    parts = (model.embedding, *model.blocks, model.norm, model.head)
    return [list(part.parameters()) for part in parts]


def send_weights(buckets, version, group, is_sender):
    """Gather the weights, one bucket at a time; the sender broadcasts each bucket.

    Every trainer calls this. `full_tensor` is a collective: under `if is_sender` it
    would wait forever for the other trainers.
    """
    for bucket in buckets:
        whole = [weight.detach().full_tensor().flatten() for weight in bucket]
        if is_sender:
            dist.broadcast(torch.tensor([version]), src=0, group=group)
            dist.broadcast(torch.cat(whole), src=0, group=group)


@torch.no_grad()
def receive_weights(buckets, group):
    """Fill the sampler's model; return the version, or STOP.

    The sampler does not sample meanwhile, so no rollout mixes two versions.
    """
    versions = set()
    for bucket in buckets:
        version = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(version, src=0, group=group)
        versions.add(version.item())
        if STOP in versions:
            return STOP
        sizes = [weight.numel() for weight in bucket]
        flat = torch.empty(sum(sizes), device=bucket[0].device)
        dist.broadcast(flat, src=0, group=group)
        for weight, part in zip(bucket, flat.split(sizes), strict=True):
            weight.copy_(part.view_as(weight))
    (version,) = versions  # all buckets carry the same one
    return version


class Requests:
    """The sampler's requests, received in a thread so that training need not wait.

    A request says that a rollout is ready, and with which version it was made.
    """

    def __init__(self, run, group, timeout_s):
        self.sampler = run.world_size - 1
        self.group = group
        self.timeout_s = timeout_s
        self.thread = ThreadPoolExecutor(1)
        self.newest = float("-inf")  # version of the newest rollout
        self.listen()

    def listen(self):
        self.request = self.thread.submit(self.receive)

    def receive(self):
        version = torch.zeros(1, dtype=torch.int64)
        dist.recv(version, src=self.sampler, group=self.group)
        return version.item()

    def pending(self, oldest):
        """Say whether the sampler asks for weights.

        Wait for it only if the newest rollout was made with a version before `oldest`.
        Raises: TimeoutError if the sampler is silent.
        """
        if self.newest >= oldest and not self.request.done():
            return False
        self.newest = self.request.result(timeout=self.timeout_s)
        return True


def train(args, run, trainers, group, control):
    """Train, and send weights whenever the sampler asks.

    Returns: the staleness of the newest rollout at each step, in steps (rank 0 only),
    and the logits of the prompt by version.
    """
    model = Transformer(CONFIG).to(run.device)
    mesh = DeviceMesh.from_group(trainers, run.device.type)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    init_weights(model, args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    buckets = divide_into_buckets(model)
    text = data.Sequences(data.load_text(), SEQ_LEN)
    is_sender = run.rank == 0
    requests = Requests(run, control, args.timeout) if is_sender else None
    staleness, logits = [], {}
    for step in range(1, args.max_steps + 1):
        version = step - 1  # the number of updates that the weights have had
        asks = is_sender and requests.pending(version - args.max_staleness)
        if runtime.from_rank0(asks, trainers):
            send_weights(buckets, version, group, is_sender)
            with torch.no_grad():
                logits[version] = model(PROMPT.to(run.device)).cpu()
            if is_sender:
                requests.listen()
        inputs, targets = load_batch(text, args, step, run)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach(), op=dist.ReduceOp.AVG, group=trainers)
        if is_sender:
            staleness.append(version - requests.newest)
            run.print0(f"step {step} | loss {loss:.4f} | rollout {requests.newest}")
    if is_sender:
        requests.pending(float("inf"))
        dist.broadcast(torch.tensor([STOP]), src=0, group=group)
    return staleness, logits


def sample(args, run, group, control):
    """Ask for weights, make a rollout, and so on, until the trainers stop.

    Returns: the logits of the prompt by version.
    """
    model = build_transformer(CONFIG, args.seed + 1, run.device)  # other weights
    buckets = divide_into_buckets(model)
    version = -1  # before the first weights
    logits = {}
    while version != STOP:
        dist.send(torch.tensor([version]), dst=0, group=control)
        version = receive_weights(buckets, group)
        with torch.no_grad():
            logits[version] = model(PROMPT.to(run.device)).cpu()
        time.sleep(args.rollout_ms / 1000)  # stands for thousands of tokens
    return logits


def load_batch(text, args, step, run):
    """Return this trainer's share of a step's sequences. Shapes: (B, T) each."""
    generator = torch.Generator().manual_seed(args.seed + step)
    indices = torch.randint(len(text), (GLOBAL_BATCH,), generator=generator)
    share = indices[run.rank :: run.world_size - 1]
    inputs, targets = default_collate([text[index] for index in share.tolist()])
    return inputs.to(run.device), targets.to(run.device)


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--max-steps", type=cli.positive_int, default=12, help="of training (12)")
    add("--max-staleness", type=cli.positive_int, default=3, help="steps (3)")
    add("--rollout-ms", type=cli.whole_number, default=800, help="of sampling (800)")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run:
        num_trainers = run.world_size - 1
        if num_trainers < 1 or GLOBAL_BATCH % num_trainers:
            raise cli.UsageError(
                f"{run.world_size} ranks: start 2, 3, 4, 5, 7 or 13; one samples"
            )
        report = Report("05-advanced/weight_sync.py", args, run)
        sampler = run.world_size - 1
        trainers = dist.new_group(list(range(num_trainers)))
        group = dist.new_group([0, sampler])  # for weights
        control = dist.new_group([0, sampler], backend="gloo")  # for requests
        if run.rank == sampler:
            result = sample(args, run, group, control)
        else:
            result = train(args, run, trainers, group, control)
        results = runtime.gather(result, run.cpu_group)
        staleness, trained = results[0]
        sampled = results[sampler]

        run.print0(f"versions sent: {', '.join(map(str, trained))}")
        differences = [(trained[v] - sampled[v]).abs().max().item() for v in trained]
        report.check("largest difference of logits", max(differences), 0, 1e-4)
        excess = max(0, max(staleness) - args.max_staleness)
        report.check("steps beyond --max-staleness", excess, 0, 0)
        return report.finish(f"{args.max_steps} steps, {len(trained)} versions sent")


if __name__ == "__main__":
    cli.run(main)
