"""Compile a model that FSDP2 shards: one graph for all blocks, and the same losses.

    CPU   torchrun --standalone --nproc-per-node=2 02-fsdp/compile_blocks.py
    GPU   torchrun --standalone --nproc-per-node=gpu 02-fsdp/compile_blocks.py \
              --preset 124m --seq-len 1024 --micro-batch-size 8

Look for: the number of graphs of each case; which mistakes fullgraph=True refuses. On a
GPU the last table has step times: eager, compiled, and compiled with float8.

Sources: Ansel et al., PyTorch 2 (ASPLOS 2024); Liang et al., TorchTitan (2024).
"""

import logging
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dist_common import cli, data, runtime
from dist_common.model import PRESETS, build_transformer, load_config
from dist_common.report import Report
from dist_common.train import peak_memory_gib
from fsdp_basics import build_mesh, build_optimizer, relative_error, train

NUM_STEPS = 3
POLICY = MixedPrecisionPolicy()  # float32
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
TOLERANCE = 1e-3  # of float32 losses: compiled kernels add in another order


def note_graphs(backend, graphs):
    """Return a backend of torch.compile that adds each captured graph to a list."""
    compile_graph = torch._dynamo.lookup_backend(backend)  # as in PyTorch's tutorials

    def note_and_compile(graph_module, example_inputs):
        graphs.append(graph_module)
        return compile_graph(graph_module, example_inputs)

    return note_and_compile


def compile_blocks(model, mesh, backend, fullgraph=True, policy=POLICY):
    """Checkpoint, compile and shard each block, in this order. backend None: eager."""
    for block in model.blocks:
        block.activation_checkpointing = "full"  # 1. the compiler sees it
        if backend:
            block.compile(backend=backend, fullgraph=fullgraph)  # 2.
        fully_shard(block, mesh=mesh, mp_policy=policy)  # 3. gathers outside the graph
    return fully_shard(model, mesh=mesh, mp_policy=policy)


# Mistakes


def compile_whole_model(model, mesh, backend, fullgraph=False):
    """Compile the sharded model as a whole: FSDP's gathers break its graph."""
    compile_blocks(model, mesh, backend=None)
    return torch.compile(model, backend=backend, fullgraph=fullgraph)


def read_in_hooks(model, mesh, backend, fullgraph=False):
    """Read a number from the device inside of each compiled block."""
    norms = []
    for block in model.blocks:
        block.attention.register_forward_hook(
            lambda module, inputs, output: norms.append(output.norm().item())
        )
    return compile_blocks(model, mesh, backend, fullgraph)


# Measurement


def load_batches(args, run):
    """Return tokens of all ranks. Shape: (steps, micro-batches, N * B, T + 1)."""
    text = torch.tensor(data.load_text()).long()
    shape = (NUM_STEPS, 1, run.world_size * args.micro_batch_size)
    generator = torch.Generator().manual_seed(args.seed)
    begins = torch.randint(len(text) - args.seq_len, shape, generator=generator)
    positions = begins.unsqueeze(-1) + torch.arange(args.seq_len + 1)
    return text[positions].to(run.device)


def measure_step_ms(model, steps):
    """Return the median time of ten steps on a GPU, after three for warmup."""
    optimizer = build_optimizer(model)
    times = []
    for _ in range(13):
        torch.cuda.synchronize()
        started = time.perf_counter()
        train(model, optimizer, steps[:1])
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[3:])


def compare_speed(report, build, mesh, steps):
    """Print step times on a GPU: eager, compiled, float8 if the GPU multiplies it."""
    run = report.run
    if run.device.type != "cuda":
        run.print0("step times of eager, compiled and float8 blocks need a GPU")
        return
    rows = []
    for name in ("eager", "compiled", "compiled, float8"):
        model = build()
        if "float8" in name:
            if torch.cuda.get_device_capability() < (8, 9):
                run.print0("float8 needs a GPU of compute capability 8.9 or later")
                break
            from torchao.float8 import convert_to_float8_training

            convert_to_float8_training(model.blocks)  # before the blocks are compiled
        torch.compiler.reset()
        torch.cuda.reset_peak_memory_stats()
        backend = None if name == "eager" else "inductor"
        step_ms = measure_step_ms(
            compile_blocks(model, mesh, backend, policy=BF16), steps
        )
        report.metrics[f"step_time_ms {name}"] = step_ms
        memory = f"{peak_memory_gib(run.device):.2f} GiB"
        rows.append((name, f"{step_ms:.1f} ms", memory))
    report.table(rows, ("blocks in bf16-mixed", "step time", "peak memory"))


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="tiny", help="the model's shape (tiny)")
    add("--seq-len", type=cli.positive_int, default=16, help="tokens (16)")
    add("--micro-batch-size", type=cli.positive_int, default=2, help="sequences (2)")
    return parser.parse_args()


def main():
    args = parse_args()
    with runtime.init(args.device, args.timeout) as run:
        # The backend `eager` captures graphs and runs them without a compiler.
        backend = "inductor" if run.device.type == "cuda" else "eager"
        torch._logging.set_logs(dynamo=logging.ERROR)  # no warnings for the mistakes
        config = load_config(args.preset, args.seq_len, 256)
        report = Report("02-fsdp/compile_blocks.py", args, run)
        mesh = build_mesh("full", run)
        batches = load_batches(args, run)
        steps = batches.chunk(run.world_size, dim=2)[run.rank]
        lengths = [step[..., 4 * n :] for n, step in enumerate(steps)]

        def build():
            return build_transformer(config, args.seed, run.device)

        rows = []

        def run_case(name, change, steps=steps):
            """Train in one way; return the mean losses and the number of graphs."""
            torch.compiler.reset()
            graphs = []
            model = change(build(), mesh, note_graphs(backend, graphs))
            losses = train(model, build_optimizer(model), steps) / run.world_size
            dist.all_reduce(losses)
            rows.append((name, len(graphs), f"{losses[-1]:.4f}"))
            return losses, len(graphs)

        alone = build()
        expected = train(alone, build_optimizer(alone), batches)
        losses, num_graphs = run_case("each block", compile_blocks)
        report.check("graphs of all blocks", num_graphs, 1, 0)
        error = relative_error(losses, expected)
        report.check("error of the losses", error, 0, TOLERANCE)
        num_graphs = run_case("each block, three lengths", compile_blocks, lengths)[1]
        report.check("graphs of three lengths", num_graphs, 2, 0)
        run_case("the whole model", compile_whole_model)
        run_case("a hook reads a number", read_in_hooks)
        report.table(rows, ("compiled", "graphs", "last loss"))
        refused = 0
        for mistake in (compile_whole_model, read_in_hooks):
            model = mistake(build(), mesh, backend, fullgraph=True)
            try:
                train(model, build_optimizer(model), steps)
            except torch._dynamo.exc.Unsupported:
                refused += 1
        report.check("mistakes that fullgraph=True refuses", refused, 2, 0)
        compare_speed(report, build, mesh, steps)
        return report.finish(f"loss {losses[-1]:.4f} after step {NUM_STEPS}")


if __name__ == "__main__":
    cli.run(main)
