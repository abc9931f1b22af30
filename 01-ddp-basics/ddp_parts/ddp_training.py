"""What ddp_training.py proves: a gradient as of one process, sent once, and equal weights."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice

from legacy_common import data
from legacy_common.job import Step
from legacy_common.lab import proofs, traffic

# Relative. fp32 sums in another order differ in the last bits; the others keep 8 and 11 bits.
GRADIENT_TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 5e-2, "16-mixed": 1e-2}


def proven_steps(run, steps: Iterable[Step], *functions: Callable) -> Iterator[Step]:
    """Yield the run's steps between the proofs."""
    model, report = run.ddp_model.module, run.job.report
    before = partial(check_gradient, run, *functions)
    after = partial(proofs.same_weights, report, model)
    return proofs.proven_steps(run.job, steps, model, run.optimizer, before, after)


def check_gradient(run, accumulate_gradient: Callable, summed_loss: Callable) -> None:
    """Compare a gradient with that of one process, on two sequences per rank; count its bytes.

    With --parity-steps 0 only the bytes are checked.
    """
    job, model = run.job, run.ddp_model.module
    args, report, sampler = job.args, job.report, job.sampler
    halved = args.gradient_compression == "bf16"
    tolerance = GRADIENT_TOLERANCE["bf16-mixed" if halved else args.precision]

    def collated(items):
        return data.collate(args.micro_batch_size, args.seq_len, items)

    def losses_alone(indices, tokens):
        for chunk in indices.split(args.micro_batch_size):  # as many as fit at a time
            batch = collated([job.train_set[index] for index in chunk])
            inputs, targets = (tensor.to(report.device) for tensor in batch)
            yield summed_loss(model, inputs, targets, args.precision) / tokens

    steps = sampler.at_start().ahead(2 * sampler.world_size)
    for indices in islice(steps, max(1, args.parity_steps)):
        mine = [job.train_set[index] for index in indices[sampler.rank :: sampler.world_size]]
        micro_batches = [collated(mine[:1]), collated(mine[1:])]
        run.optimizer.zero_grad()
        with traffic.TrafficCounter() as counter:
            accumulate_gradient(run.ddp_model, micro_batches, args.precision)
        if args.compile:  # which the counter does not see: this one is to be compared
            run.optimizer.zero_grad()
            accumulate_gradient(run.ddp_model, micro_batches, args.precision)
        if args.parity_steps:
            tokens = int(job.train_set.lengths[indices].sum())
            alone = proofs.gradient_of_one_process(model, losses_alone(indices, tokens))
            proofs.same_gradient(report, model, alone, tolerance)
        else:
            report.say("not compared with one process (--parity-steps 0)")
    share = 0.5 if halved else 1.0  # of float32
    proofs.one_gradient_sent(report, model, counter, other=8, share=share)  # 8: of tokens
