"""Keep each rank's training state in its neighbour's memory too, lose a rank, and train on.

    CPU   torchrun --standalone --nproc-per-node=4 05-advanced/recovery_in_memory.py
    also  python 05-advanced/recovery_in_memory.py          (four ranks on this machine)

It trains on the CPU: what is lost and restored is in host memory, and groups are gloo's. Weights
and optimizer are sharded as in ZeRO, so a rank that dies takes its part with it. Each process that
torchrun starts forks a worker that trains, and another one when that is killed by SIGKILL.

Look for: steps lost and seconds until the state is back, from memory and from disk; losses equal to
those of a run that lost nothing, to the last bit; two neighbours lost at once.
Sources: Wang et al., Gemini (SOSP 2023); torchft; the ZeRO paper for the shards.
"""

import time

import torch
import torch.distributed as dist
from torch import nn

from advanced_parts import recovery_in_memory as part
from advanced_parts.recovery_in_memory import Job, Worker, supervise
from dist_common import checkpoint, cli
from dist_common.report import Report
from dist_common.runtime import all_gather_single, gather, reduce_scatter_single

LEARNING_RATE = 3e-3


class Shard:
    """A model whose weights each rank has whole, and updates 1/N of: its part is lost with it.

    `state` has the part and both of Adam's moments, (3, n/N): all that a rank needs to go on.
    """

    def __init__(self, model: nn.Module) -> None:
        self.weights = list(model.parameters())
        whole = nn.utils.parameters_to_vector(self.weights).detach()
        ranks, rank = dist.get_world_size(), dist.get_rank()
        self.length = -(-len(whole) // ranks)
        whole = nn.functional.pad(whole, (0, self.length * ranks - len(whole)))
        self.state = torch.zeros(3, self.length)
        self.state[0] = whole.view(ranks, -1)[rank]
        self.part = nn.Parameter(self.state[0])  # a view: the optimizer changes `state`
        self.optimizer = torch.optim.AdamW([self.part], LEARNING_RATE)
        self.begin_at(0)

    def begin_at(self, step: int) -> None:
        """Take `state` as that after `step` steps: make the whole weights from all parts."""
        names = {"exp_avg": self.state[1], "exp_avg_sq": self.state[2]}
        self.optimizer.state[self.part] = {"step": torch.tensor(float(step)), **names}
        self.gather()

    def gather(self) -> None:
        whole = torch.empty(self.length * dist.get_world_size())
        all_gather_single(whole, self.state[0])
        with torch.no_grad():
            nn.utils.vector_to_parameters(
                whole[: sum(w.numel() for w in self.weights)], self.weights
            )

    def reduce(self) -> None:
        """Average all ranks' gradients, each rank its own part."""
        whole = torch.cat([weight.grad.flatten() for weight in self.weights])
        ranks = dist.get_world_size()
        whole = nn.functional.pad(whole, (0, self.length * ranks - len(whole))) / ranks
        self.part.grad = torch.empty(self.length)
        reduce_scatter_single(self.part.grad, whole)

    def update(self) -> None:
        self.optimizer.step()
        self.gather()


class Copies:
    """By step: this rank's own state, and that of the rank before it, both in host memory."""

    def __init__(self) -> None:
        self.own: dict[int, torch.Tensor] = {}
        self.held: dict[int, torch.Tensor] = {}
        self.sending: tuple | None = None

    def start(self, step: int, state: torch.Tensor) -> None:
        """Send a copy of the state to the next rank while training goes on."""
        for older in sorted(self.own)[:-1]:  # all ranks have the newest: they all reduced since
            del self.own[older], self.held[older]
        rank, ranks = dist.get_rank(), dist.get_world_size()
        own = state.clone()  # the next update changes the state itself
        held = torch.empty_like(own)

        works = [dist.isend(own, (rank + 1) % ranks), dist.irecv(held, (rank - 1) % ranks)]

        self.sending = step, own, held, works

    def finish(self) -> None:
        """Count the copy from now on; before all of it has arrived the last one counts."""
        if self.sending:
            step, own, held, works = self.sending
            for work in works:
                work.wait()
            self.own[step], self.held[step] = own, held
            self.sending = None

    def restore(self, state: torch.Tensor) -> int | None:
        """Go back to the newest step that all ranks' states exist of; None if there is none.

        Who survived has its own; who is new gets it from the next rank, if that survived.
        """
        self.sending = None
        rank = dist.get_rank()
        have = gather((sorted(self.own), sorted(self.held)))
        after = have[1:] + have[:1]
        states = [{*own, *held} for (own, _), (_, held) in zip(have, after, strict=True)]
        common = set.intersection(*states)  # of steps
        if not common:
            return None
        step = max(common)
        for lost in (r for r, (own, _) in enumerate(have) if step not in own):
            holder = (lost + 1) % len(have)
            if rank == holder:
                dist.send(self.held[step], lost)
            elif rank == lost:
                dist.recv(state, holder)
        if step in self.own:
            state.copy_(self.own[step])
        return step


def save(folder, step: int, state: torch.Tensor) -> None:
    with checkpoint.sealed(folder, step, {}) as partial:
        torch.save(state, partial / f"rank-{dist.get_rank()}.pt")


def restore_from_disk(folder, report: Report, state: torch.Tensor) -> int:
    """Read each rank's part of the newest checkpoint; return its step, 0 if there is none."""
    found = checkpoint.newest(folder, report)
    if found is None:
        return 0
    path, facts = found
    state.copy_(torch.load(path / f"rank-{dist.get_rank()}.pt"))
    return facts["step"]


def train(worker: Worker, job: Job, args, report: Report) -> None:
    """Be one rank of a run: train to the last step, in a new process group after each loss."""
    copies = Copies()
    while True:
        worker.join()  # wait for all ranks; who was killed comes back as a new process
        try:
            model = part.make_model(args)
            shard = Shard(model)
            step = go_on(worker, job, shard, copies, report) if worker.generation else 0
            shard.begin_at(step)
            while step < args.max_steps:
                step += 1
                with worker.counted(step):
                    loss = part.loss_of(model, args, step)
                    loss.backward()
                    copies.finish()  # of the step before: it travelled beside forward and backward
                    shard.reduce()
                    worker.lose_power(step)  # the ranks that this job is to lose end here
                    shard.update()
                    if job.copies and step % args.copy_every == 0:
                        copies.start(step, shard.state)
                if step % args.save_every == 0:
                    save(job.folder, step, shard.state)
                worker.note_step(step, loss)
            copies.finish()
            worker.note_memory(copies, shard.state)
            return worker.leave()
        except RuntimeError as error:
            worker.note_loss(error)  # or raise it, if nobody died
        # What is in flight keeps connections of the old group open, and so does an error's
        # traceback: others would wait for this rank.
        copies.sending = None
        worker.leave_broken_group()


def go_on(worker: Worker, job: Job, shard: Shard, copies: Copies, report: Report) -> int:
    """Return the step that all ranks have gone back to: from memory if possible, or from disk."""
    started = time.perf_counter()
    step = copies.restore(shard.state) if job.copies else None
    if job.copies and step is None:
        report.say(f"{job.name}: a state and its copy are lost together: back to the disk")
    source = "memory" if step is not None else "disk"
    if step is None:
        step = restore_from_disk(job.folder, report, shard.state)
    dist.barrier()
    worker.note(source=source, restored_step=step, restore_s=time.perf_counter() - started)
    return step


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add, count = parser.add_argument, cli.positive_int
    add("--ranks", type=count, default=4, help="where no launcher says how many (4)")
    add("--num-layers", type=count, default=2, help="of the tiny model (2)")
    add("--max-steps", type=count, default=16, help="of each run (16)")
    add("--fail-at", type=count, default=13, metavar="STEP", help="that ranks die in (13)")
    add("--copy-every", type=count, default=1, metavar="STEPS", help="to the next rank (1)")
    add("--save-every", type=count, default=5, metavar="STEPS", help="to disk (5)")
    args = parser.parse_args()
    if args.device == "cuda":
        raise cli.UsageError(
            "--device cuda: this lesson is about host memory and trains on the CPU"
        )
    if not args.save_every < args.fail_at <= args.max_steps:
        between = f"above --save-every {args.save_every}, at most --max-steps {args.max_steps}"
        raise cli.UsageError(f"--fail-at {args.fail_at}: must be {between}")
    return args


def main():
    args = parse_args()
    with part.launched(args) as (world, own_ranks, store):
        report = Report("05-advanced/recovery_in_memory.py", args, world, torch.device("cpu"))
        report.start(part.describe(args, world))
        jobs = part.jobs_of(args, world, store, report)
        for job in jobs:
            supervise(own_ranks, store, args, report, job, train)
        part.compare(report, args, jobs, store)
        return report.finish("a lost rank's state came back from its neighbour")


if __name__ == "__main__":
    cli.run(main)
