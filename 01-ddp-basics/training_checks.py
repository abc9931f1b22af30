"""What ddp_training.py proves: the gradient of one process, and every token counted once."""

import torch.distributed as dist

from dist_common import data, measure, proofs

# Relative. fp32 sums in another order differ in the last bits; the others keep 8 and 11 bits.
GRADIENT_TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 5e-2, "16-mixed": 1e-2}


def check_gradient(run, accumulate_gradient, summed_loss):
    """Compare a gradient with that of one process, on two sequences per rank; count its bytes.

    With --parity-steps 0 only the bytes are checked.
    """
    args, model, ranks = run.args, run.ddp_model.module, dist.get_world_size()

    def collated(items):
        return data.collate(args.micro_batch_size, args.seq_len, items)

    def losses_alone(indices, tokens):
        for chunk in indices.split(args.micro_batch_size):  # as many as fit at a time
            batch = collated([run.train_set[index] for index in chunk])
            inputs, targets = (tensor.to(run.report.device) for tensor in batch)
            yield summed_loss(model, inputs, targets, args.precision) / tokens

    for indices in run.sampler.global_order().split(2 * ranks)[: max(1, args.parity_steps)]:
        mine = [run.train_set[index] for index in indices[dist.get_rank() :: ranks]]
        micro_batches = [collated(mine[:1]), collated(mine[1:])]
        run.optimizer.zero_grad()
        with measure.CollectiveCounter() as counter:
            accumulate_gradient(run.ddp_model, micro_batches, args.precision)
        if args.parity_steps:
            tokens = int(run.train_set.lengths[indices].sum())
            alone = proofs.gradient_of_one_process(model, losses_alone(indices, tokens))
            proofs.same_gradient(run.report, model, alone, GRADIENT_TOLERANCE[args.precision])
    proofs.one_gradient_sent(run.report, model, counter, other=8)  # and the number of tokens


def check_tokens(run):
    """Check that every token was trained on once per epoch, and every test token counted once."""
    lengths, part = run.train_set.lengths, run.sampler.global_order()[: run.sampler.position]
    expected = int(run.sampler.epoch * lengths.sum() + lengths[part].sum())
    name = "tokens trained on, from step 1"
    run.report.check(name, run.trained_tokens, expected, 0, "each once")
    if run.step == run.args.max_steps:
        expected = int(run.test_set.lengths.sum())
        run.report.check("test tokens counted", run.test_tokens, expected, 0, "each once")
        run.report.metrics["test_loss"] = run.test_loss
