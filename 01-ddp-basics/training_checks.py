"""What ddp_training.py proves, and when it refuses to go on."""

import math

import torch.distributed as dist

from dist_common import cli, data, measure, proofs, runtime

# Relative. fp32 sums in another order differ in the last bits; the others keep 8 and 11 bits.
GRADIENT_TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 5e-2, "16-mixed": 1e-2}


def check_gradient(run, accumulate_gradient, summed_loss):
    """Compare a gradient with that of one process, on two sequences per rank; count its bytes.

    With --parity-steps 0 only the bytes are checked.
    """
    args, model, sampler = run.args, run.ddp_model.module, run.sampler
    halved = args.gradient_compression == "bf16"
    tolerance = GRADIENT_TOLERANCE["bf16-mixed" if halved else args.precision]

    def collated(items):
        return data.collate(args.micro_batch_size, args.seq_len, items)

    def losses_alone(indices, tokens):
        for chunk in indices.split(args.micro_batch_size):  # as many as fit at a time
            batch = collated([run.train_set[index] for index in chunk])
            inputs, targets = (tensor.to(run.report.device) for tensor in batch)
            yield summed_loss(model, inputs, targets, args.precision) / tokens

    steps = sampler.global_order().split(2 * sampler.world_size)
    for indices in steps[: max(1, args.parity_steps)]:
        mine = [run.train_set[index] for index in indices[sampler.rank :: sampler.world_size]]
        micro_batches = [collated(mine[:1]), collated(mine[1:])]
        run.optimizer.zero_grad()
        with measure.CollectiveCounter() as counter:
            accumulate_gradient(run.ddp_model, micro_batches, args.precision)
        if args.parity_steps:
            tokens = int(run.train_set.lengths[indices].sum())
            alone = proofs.gradient_of_one_process(model, losses_alone(indices, tokens))
            proofs.same_gradient(run.report, model, alone, tolerance)
        else:
            run.report.say("not compared with one process (--parity-steps 0)")
    share = 0.5 if halved else 1.0  # of float32
    proofs.one_gradient_sent(run.report, model, counter, other=8, share=share)  # 8: of tokens


def check_trained_tokens(run):
    """Check that every token up to the sampler's place was trained on, once per epoch."""
    lengths, part = run.train_set.lengths, run.sampler.global_order()[: run.sampler.position]
    expected = int(run.sampler.epoch * lengths.sum() + lengths[part].sum())
    name = "tokens trained on, from step 1"
    run.report.check(name, run.trained_tokens, expected, 0, "each once")


def check_test_tokens(report, test_set, counted):
    """Check that the evaluation counted every token of the test set once."""
    report.check("test tokens counted", counted, int(test_set.lengths.sum()), 0, "each once")


def stop_unless_finite(args, step, loss, own_sum, norm):
    """End the run when loss or gradient is infinite or no number; say on which ranks it was so.

    In float16 a norm may be infinite: GradScaler leaves out such a step.
    """
    if math.isfinite(loss) and (args.precision == "16-mixed" or math.isfinite(norm)):
        return
    ranks = [str(r) for r, own in enumerate(runtime.gather(own_sum)) if not math.isfinite(own)]
    which = f"on rank {', '.join(ranks)} of {dist.get_world_size()}" if ranks else "over all ranks"
    cli.stop_unless_finite(step, loss, norm, f" {which}")
