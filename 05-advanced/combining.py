"""Predict what a layout of GPUs holds, sends and takes; or list all layouts and show the best five.

    CPU   python 05-advanced/combining.py --model llama2-7b --gpus 8
    also  python 05-advanced/combining.py --model llama3-70b --gpus 64 --tp 8 --dp 8
          python 05-advanced/combining.py plan --model llama3-70b --gpus 64

No GPU is needed, now or later: everything is computed from formulas (layout_memory.py and
layout_traffic.py in advanced_parts/); tests/test_05_combining.py counts on layers of the real size.
`--published` sets predictions beside what the authors of 13 large runs measured. The verbs `plan`
and `predict` (planner.md) are the planner for real jobs, on the formulas of dist_common/costs and
without torch: advanced_parts/planner.py, with plan_args.py, plan_rules.py, plan_search.py,
plan_finetune.py, plan_resnet.py, plan_text.py, plan_explain.py and plan_launch.py. `simulate`
(simulate.md) is simulate.py, with simulate_picture.py, and simulate_measured.py, which runs what is
simulated.

Look for: which axis crosses which link, whether the memory fits, and which axis is exposed.
Sources: Korthikanti et al. (2022) for memory, Narayanan et al. (SC 2021) for pipelines and order.
"""

import functools
import sys
from itertools import permutations

from advanced_parts import planner
from dist_common import cli

if __name__ == "__main__" and planner.asked():  # before torch, whose import takes seconds
    cli.run(planner.main)

from advanced_parts import combining as part
from advanced_parts import layout_memory as memory
from advanced_parts import simulate
from advanced_parts.layout_memory import MODELS, RECOMPUTE, SHARDINGS, Cluster, Job, Layout
from advanced_parts.layout_traffic import RESERVE, Prediction, predict
from dist_common import models, runtime
from dist_common.lab.figure import figure
from dist_common.measure import GIB
from dist_common.report import Report

SHOWN = 5
AXES = ("tp", "cp", "dp", "pp")
SPLITS = {
    "tp": "matrices; tokens in between",
    "cp": "each sequence",
    "dp": "batch (and states)",
    "pp": "layers",
}
# What each axis sends from a GPU, in words: the formulas of layout_traffic.
SENDS = {
    "tp": "{calls} all-gathers and reduce-scatters of (tp-1)/tp x tokens x D x 2 bytes,"
    " per layer and micro-batch",
    "cp": "(cp-1) hops of keys and values, tokens x 2 kv_dim / tp x {width} bytes in all"
    " passes, per layer and micro-batch",
    "dp": "(n-1)/n x {per_weight} bytes per weight on the GPU, n = dp x cp = {n}, per step",
    "pp": "activations and their gradient, 2 x tokens x D / tp x 2 bytes,"
    " per boundary of stages and micro-batch",
}
HOLDS = {
    "weights": "bfloat16: {gathered}",
    "gradients": "float32: {gradients}",
    "optimizer": "float32 master copy and two moments, 12 bytes per weight{shared}",
    "activations": "{kept}; micro-batches in flight: {flying:.4g}",
    "logits": "bfloat16 and twice float32, of the last stage's micro-batch",
}
COLORS = ("#4477aa", "#ee6677", "#ccbb44", "#228833", "#aa3377", "#bbbbbb")  # Paul Tol, bright


def ranked(job: Job, cluster: Cluster, gpus: int, *choices) -> list[Prediction]:
    """Return all layouts' predictions: those that fit by step time, then the others by memory.

    `choices` as in layouts_of. Raises: UsageError when no layout divides the job.
    """
    found = [predict(job, cluster, layout) for layout in part.layouts_of(job, gpus, *choices)]
    if not found:
        batch = f"--global-batch-size {job.global_batch_size} in sequences"
        hint = f"change --gpus, {batch}, or --virtual-stages"
        raise cli.UsageError(f"no layout of {gpus} GPUs divides heads, layers and batch: {hint}")
    return sorted(found, key=lambda p: (not p.fits, p.step_s if p.fits else p.memory_gib))


def describe_traffic(report: Report, job: Job, prediction: Prediction) -> None:
    """Print what each axis splits, sends and costs; in words below the table."""
    layout, rows = prediction.layout, []
    for axis, each in prediction.traffic.items():
        if each.size == 1:
            continue
        sizes = f"{each.layer_bytes / 1e6:,.1f} MB", f"{each.step_bytes / 1e9:,.1f} GB"
        times = (f"{seconds:.3f} s" for seconds in (each.seconds, each.behind_s, each.exposed_s))
        link = f"{each.link}, {each.rate_gb_s:g} GB/s"
        rows.append((f"{axis} {each.size}", SPLITS[axis], link, *sizes, *times))
    headers = ("axis", "splits", "link", "per layer", "per step", "takes", "beside", "exposed")
    report.table(rows, headers, names=3)
    again = layout.recompute == "full"
    per_weight = {"none": 8, "grad-op": 6, "full": 8 * job.micro_batches(layout)}
    words = {
        "calls": 14 if again else 10,
        "width": 10 if again else 8,
        "per_weight": per_weight[layout.sharding],
        "n": layout.replicas,
    }
    for axis, each in prediction.traffic.items():
        if each.size > 1:
            report.say(f"{axis}: {SENDS[axis].format(**words)}")


def describe_memory(report: Report, job: Job, prediction: Prediction) -> None:
    """Print what a GPU of the fullest stage holds, part by part."""
    layout = prediction.layout
    full = layout.sharding == "full"
    at_once = full or (layout.sharding == "grad-op" and job.micro_batches(layout) == 1)
    kept = {
        "none": "all that backward needs",
        "swiglu": "all but SiLU and product",
        "full": "each layer's input",
    }
    words = {
        "gathered": "two layers and the tables" if full else "all of the stage",
        "gradients": "1/n, and one layer whole" if at_once else "all of the stage",
        "shared": " / n" * (layout.sharding != "none"),
        "kept": kept[layout.recompute],
        "flying": prediction.in_flight,
    }
    rows = [
        (part, HOLDS[part].format(**words), f"{size / GIB:.1f} GiB")
        for part, size in prediction.memory.items()
        if size
    ]
    stage = f"on a GPU of stage {prediction.stage}"
    total = ("sum", "", f"{prediction.memory_gib:.1f} GiB")
    report.table([*rows, total], ("part", stage, "memory"), names=2)


def describe_template(report: Report, job: Job, prediction: Prediction) -> None:
    """Say in a line what hybrid_parallelism.py holds, and what it lacks of the plan."""
    layout, stage = prediction.layout, prediction.stage
    lacks = {
        "second all-gather of norms in backward": layout.tp > 1 and layout.recompute != "full",
        "ring of keys and values": layout.cp > 1,
        "--recompute swiglu": layout.recompute == "swiglu",
    }
    missing = [name for name, needed in lacks.items() if needed]
    held = sum(memory.of_the_template(job, layout, stage).values()) / GIB
    report.metrics["template_memory_gib"] = held
    room = f"{held:.1f} of {prediction.memory_limit / GIB:.1f} GiB"
    why = f", without {', without '.join(missing)}" if missing else ""
    report.say(f"hybrid_parallelism.py would hold {room}{why}")


def describe_step(report: Report, cluster: Cluster, prediction: Prediction) -> None:
    """Print the step's parts and the verdict: fits or not, and what is exposed."""
    step = prediction.step_s
    parts = {name: seconds for name, seconds in prediction.seconds.items() if seconds > 0}
    rows = [(name, f"{s:.3f} s", f"{s / step:.1%}") for name, s in parts.items()]
    report.table([*rows, ("step", f"{step:.3f} s", "100%")], ("step", "seconds", "share"))
    limit = prediction.memory_limit / GIB
    room = f"{prediction.memory_gib:.1f} of {limit:.1f} GiB"
    verdict = "fits" if prediction.fits else "DOES NOT FIT"
    report.say(f"{verdict}: {room} ({cluster.gpu_memory_gib:g} less {RESERVE:.0%} in reserve)")
    exposed = [f"{name} {parts[name] / step:.1%}" for name in parts if name != "compute"]
    report.say(
        f"exposed: {', '.join(exposed) or 'nothing'}; {prediction.tflops:.0f} TFLOP/s per GPU"
    )


def list_best(report: Report, found: list[Prediction]) -> list[Prediction]:
    """Print the best layouts, one row for each way to cut the axes; return them."""
    best = {}
    for prediction in found:  # the first of its axes: fastest that fits, simplest among equals
        best.setdefault(str(prediction.layout), prediction)
    fitting = sum(p.fits for p in found)
    kinds = f"{len(best)} ways to cut the axes, {len(found)} with sharding and recomputation"
    report.say(f"{kinds}: {fitting} fit" + " (the five smallest:)" * (not fitting))
    shown = list(best.values())[:SHOWN]
    rows = []
    for p in shown:
        layout, lost = p.layout, [f"{p.seconds[part] / p.step_s:.1%}" for part in (*AXES, "bubble")]
        choice = str(layout), layout.sharding, layout.recompute
        sizes = f"{p.memory_gib:.1f} GiB", f"{p.step_s:.2f} s", f"{p.tflops:.0f}"
        rows.append((*choice, *sizes, *lost))
    headers = ("layout", "sharding", "recompute", "memory", "step", "TFLOP/s", *AXES, "bubble")
    report.table(rows, headers, names=3)
    return shown


def list_published(report: Report) -> None:
    """Print 13 published runs beside their predictions."""
    rows, errors = [], []
    for name, layout, measured, predicted in part.compare(report):
        errors.append(predicted / measured - 1)
        numbers = f"{measured:.0f}", f"{predicted:.0f}", f"{errors[-1]:+.0%}"
        rows.append((name, str(layout), *numbers))
    headers = ("run", "layout", "published", "predicted", "error")
    report.table(rows, headers, names=2)
    report.say("published and predicted: TFLOP/s per GPU")
    report.metrics |= {"lowest_error": min(errors), "highest_error": max(errors)}


def draw(path, shown: list[Prediction]) -> None:
    """Draw each layout's step time and memory, part by part."""
    names = []
    for p in shown:
        layout = p.layout
        cut = " ".join(
            f"{axis}{getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1
        )
        names.append(f"{cut}\n{layout.sharding}, {layout.recompute}")
    with figure(path, 1, 2, figsize=(11, 1.6 + 0.62 * len(shown))) as (left, right):
        panels = (
            (left, [p.seconds for p in shown], "seconds per step", 1),
            (right, [p.memory for p in shown], "GiB on the fullest GPU", GIB),
        )
        for axes, parts, label, unit in panels:
            start = [0.0] * len(shown)
            for part, color in zip(parts[0], COLORS, strict=False):
                widths = [each[part] / unit for each in parts]
                axes.barh(names, widths, left=start, label=part, color=color)
                start = [a + b for a, b in zip(start, widths, strict=True)]
            axes.invert_yaxis()
            axes.set_xlabel(label)
            axes.legend(ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1), fontsize=7)
        right.axvline(shown[0].memory_limit / GIB, color="black", linestyle="--")
        right.set_yticks([])


def parse_order(text: str) -> tuple[str, ...]:
    order = tuple(text.split("-"))
    if order not in permutations(AXES):
        raise cli.UsageError(f"--order must name tp, cp, dp and pp once each, not {text!r}")
    return order


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    add, count, rate = parser.add_argument, cli.positive_int, cli.positive_float
    add("--published", action="store_true", help="compare predictions with published runs")
    add("--cheaper", action="store_true", help="show what the module's cheaper steps would change")
    add("--model", type=functools.partial(models.preset_or_file, MODELS), default="llama2-7b",
        metavar="NAME",
        help=f"{', '.join(MODELS)}, or a config.json of a Llama (llama2-7b)")  # fmt: skip
    add("--gpus", type=count, default=8, help="GPUs of the job (8)")
    add("--gpus-per-node", type=count, default=8, help="that NVLink connects (8)")
    one = "ranks (1 where another axis is given; without any: all layouts)"
    add("--tp", type=count, help=f"tensor parallel {one}")
    add("--cp", type=count, help=f"context parallel {one}")
    add("--dp", type=count, help=f"data parallel {one}")
    add("--pp", type=count, help=f"pipeline parallel {one}")
    add("--fsdp", choices=SHARDINGS, help="what replicas shard (full with a layout; else all)")
    add("--recompute", choices=RECOMPUTE,
        help="activations that backward computes again (none with a layout; else all)")  # fmt: skip
    add("--order", default="tp-cp-dp-pp", help="of ranks, innermost first (tp-cp-dp-pp)")
    add("--seq-len", type=count, default=4096, help="tokens per sequence (4096)")
    add("--global-batch-size", type=count, default=128, help="sequences per step (128)")
    add("--micro-batch-size", type=count, default=1, help="sequences per replica at a time (1)")
    schedules = ("1f1b", "interleaved", "gpipe")
    add("--schedule", choices=schedules, default="1f1b", help="of the pipeline (1f1b)")
    add("--virtual-stages", type=count, help="stages per rank of pp (2 if interleaved, else 1)")
    add("--gpu-tflops", type=rate, default=part.H100.gpu_tflops,
        help="TFLOP/s that matmuls reach (594: 0.6 of an H100's 989, see --published)")  # fmt: skip
    add("--nvlink-gb-s", type=rate, default=part.H100.nvlink_gb_s,
        help="GB/s per GPU in a node (350: all-reduce of 64 MiB, ml-engineering)")  # fmt: skip
    add("--network-gb-s", type=rate, default=part.H100.network_gb_s,
        help="GB/s of each GPU's network card (45: 0.9 of 400 Gb/s)")  # fmt: skip
    add("--latency-us", type=rate, default=part.H100.latency_us,
        help="us of a tiny collective (20: half an all-reduce of 32 KiB, same page)")  # fmt: skip
    add("--gpu-memory-gib", type=rate, default=part.H100.gpu_memory_gib, help="GiB per GPU (80)")
    return parser.parse_args()


def read_job(args) -> tuple[Job, Cluster]:
    """Return what is trained and on what. Raises: UsageError when flags contradict each other."""
    config = MODELS.get(args.model) or models.shape_of(args.model)
    nodes = args.gpus_per_node
    if args.seq_len > config.max_seq_len:
        raise cli.UsageError(f"--seq-len must be at most {config.max_seq_len} for {args.model}")
    if args.gpus > nodes and args.gpus % nodes:
        raise cli.UsageError(f"--gpus {args.gpus} must be a multiple of --gpus-per-node {nodes}")
    interleaved = args.schedule == "interleaved"
    virtual = args.virtual_stages or (2 if interleaved else 1)
    if interleaved != (virtual > 1):
        raise cli.UsageError("--virtual-stages above 1 and --schedule interleaved go together")
    sizes = args.seq_len, args.global_batch_size, args.micro_batch_size
    job = Job(config, *sizes, args.schedule, virtual, parse_order(args.order))
    rates = args.gpu_tflops, args.nvlink_gb_s, args.network_gb_s, args.latency_us
    return job, Cluster(nodes, *rates, args.gpu_memory_gib)


def predict_all(report: Report, args, job: Job, cluster: Cluster) -> list[Prediction]:
    """Return the prediction of the layout that was given, or of the best ones."""
    if any(getattr(args, axis) for axis in AXES):
        sizes = {axis: getattr(args, axis) or 1 for axis in AXES}
        layout = Layout(**sizes, sharding=args.fsdp or "full", recompute=args.recompute or "none")
        why_not = part.refusal(job, layout, args.gpus)
        if why_not:
            raise cli.UsageError(why_not)
        return [predict(job, cluster, layout)]
    shardings = (args.fsdp,) if args.fsdp else SHARDINGS
    recompute = (args.recompute,) if args.recompute else RECOMPUTE
    return list_best(report, ranked(job, cluster, args.gpus, shardings, recompute))


def main():
    if planner.asked():
        return planner.main()
    if sys.argv[1:2] == ["simulate"]:
        return simulate.simulate(sys.argv[2:])
    args = parse_args()
    with runtime.init(args.device, args.timeout) as (world, device):
        report = Report("05-advanced/combining.py", args, world, device)
        if args.published:
            report.start()
            list_published(report)
            return report.finish("predictions lie in their band around what was measured")

        job, cluster = read_job(args)
        weights = f"{job.config.num_parameters():,} weights"
        report.start(f"{args.model}: {weights}, {args.gpus:,} GPUs, {cluster.gpus_per_node} a node")
        shown = predict_all(report, args, job, cluster)
        best = shown[0]
        micro = f"{job.micro_batch_size} x {job.micro_batches(best.layout)} micro-batches"
        batch = f"global batch {job.global_batch_size} = {micro} x dp {best.layout.dp}"
        report.say(f"{best.layout}: {batch}")
        describe_traffic(report, job, best)
        describe_memory(report, job, best)
        describe_step(report, cluster, best)
        describe_template(report, job, best)
        if args.cheaper:
            part.list_changes(report, job, cluster, best.layout)
        report.metrics |= {
            "layout": str(best.layout), "step_time_s": best.step_s, "tflops_per_gpu": best.tflops,
            "memory_gib": best.memory_gib, "fits": best.fits, "seconds": best.seconds,
            "bytes_per_step": {axis: each.step_bytes for axis, each in best.traffic.items()},
        }  # fmt: skip
        if report.output and world.is_rank0:
            draw(report.output / "combining.png", shown)
        verdict = "fits" if best.fits else "does not fit"
        return report.finish(f"{best.layout} {verdict}, {best.step_s:.2f} s a step predicted")


if __name__ == "__main__":
    cli.run(main)
