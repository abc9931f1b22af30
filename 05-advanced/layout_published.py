"""Published runs beside what the formulas predict for them, and checks that hold the two together.

Throughput: Grattafiori et al. (2024), table 4 (in its third version: the first prints dp 4 in the
last row, which is not 16,384 GPUs). Narayanan et al. (SC 2021), table 1; interleaving from the
authors' scripts. Korthikanti et al. (2022), table 5, and figure 1 for memory.
"""

from dataclasses import dataclass

from dist_common.measure import GIB
from dist_common.models import TransformerConfig
from dist_common.report import Report
from layout_model import LLAMA3_405B, Cluster, Job, Layout, memory_of_stage
from layout_traffic import Prediction, predict

# Matmuls at 0.6 of the data sheet's peak: between the 0.80 (H100) and 0.86 (A100) that one large
# matmul reaches (ml-engineering) and the 0.43 and 0.52 of the best whole runs below.
OF_PEAK = 0.6
H100 = Cluster(8, round(OF_PEAK * 989.4), 350, 45, 20, 80)  # sources: combining.py --help
# NVLink: all-reduce of 1 GiB on 8 A100s (vTrain, MICRO 2024). Network: 0.9 of 200 Gb/s (Selene).
A100 = Cluster(8, round(OF_PEAK * 312), 229, 22.5, 20, 80)
# One rate for all sizes: matrices of width 20,480 run faster than 0.6, those of width 2,304 slower;
# what the formulas leave out makes a prediction high. Operations counted twice leave the band;
# smaller terms are held by pairs of runs and by layout_counts.py.
LOWEST, HIGHEST = 0.85, 1.4  # predicted over published


def gpt(layers: int, dim: int, heads: int) -> TransformerConfig:
    """Return GPT's shape: its two matrices of 4 D hold what SwiGLU's three of 8/3 D do."""
    sizes = dim, layers, heads, heads, round(8 / 3 * dim), 2048
    return TransformerConfig(51_200, *sizes, tied_embeddings=True)


@dataclass(frozen=True)
class Run:
    """A published run; `tflops` or `step_s` is what its authors measured."""

    name: str
    billions: float  # weights
    config: TransformerConfig
    cluster: Cluster
    layout: Layout
    global_batch: int
    micro_batch: int = 1
    virtual_stages: int = 1
    seq_len: int = 2048
    tflops: float = 0  # per GPU
    counts_recompute: bool = False
    step_s: float = 0

    @property
    def job(self) -> Job:
        flash = self.config is LLAMA3_405B
        schedule = "interleaved" if self.virtual_stages > 1 else "1f1b"
        batch = self.global_batch, self.micro_batch
        options = {"causal_share": 0.5 if flash else 1.0}
        return Job(self.config, self.seq_len, *batch, schedule, self.virtual_stages, **options)

    def predict(self) -> Prediction:
        return predict(self.job, self.cluster, self.layout)

    def published(self, prediction: Prediction) -> float:
        """Return TFLOP/s per GPU; from a step time by the prediction's own count of operations."""
        flops = prediction.executed_flops if self.counts_recompute else prediction.model_flops
        return self.tflops or flops / self.step_s / 1e12

    def predicted(self, prediction: Prediction) -> float:
        flops = prediction.executed_flops if self.counts_recompute else prediction.model_flops
        return flops / prediction.step_s / 1e12


def llama(gpus: int, cp: int, dp: int, seq_len: int, batch: int, tflops: float) -> Run:
    """8 virtual stages: the authors' first one holds the embedding only, so one holds one layer."""
    layout = Layout(8, cp, dp, 16, "grad-op", "swiglu")
    name = f"Llama 3 405B, {gpus:,} GPUs, T {seq_len:,}"
    return Run(name, 405, LLAMA3_405B, H100, layout, batch, 1, 8, seq_len, tflops)


def narayanan(billions, shape, tp, pp, dp, batch, micro, virtual, tflops) -> Run:
    layout = Layout(tp, 1, dp, pp, "none", "full")
    name = f"SC21 {billions}B, {layout.gpus:,} GPUs"
    sizes = batch, micro, virtual, 2048
    return Run(name, billions, gpt(*shape), A100, layout, *sizes, tflops, True)


def korthikanti(billions, shape, pp, batch, recompute, step_s) -> Run:
    """Its selective recomputation repeats attention's scores only: here, none."""
    layout = Layout(8, 1, 1, pp, "none", recompute)
    name = f"Korthikanti {billions}B, recompute {recompute}"
    return Run(name, billions, gpt(*shape), A100, layout, batch, 1, 3, step_s=step_s)


RUNS = (
    llama(8192, 1, 64, 8192, 2048, 430),
    llama(16_384, 1, 128, 8192, 2048, 400),
    llama(16_384, 16, 8, 131_072, 128, 380),
    narayanan(1.7, (24, 2304, 24), 1, 1, 32, 512, 16, 1, 137),
    narayanan(18.4, (40, 6144, 48), 8, 1, 32, 1024, 8, 1, 135),
    narayanan(39.1, (48, 8192, 64), 8, 2, 32, 1536, 4, 1, 138),
    narayanan(310.1, (96, 16_384, 128), 8, 16, 15, 2160, 1, 2, 155),
    narayanan(529.6, (105, 20_480, 128), 8, 35, 9, 2520, 1, 3, 163),
    narayanan(1008, (128, 25_600, 160), 8, 64, 6, 3072, 1, 1, 163),
    korthikanti(175, (96, 12_288, 96), 8, 64, "full", 18.13),
    korthikanti(175, (96, 12_288, 96), 8, 64, "none", 13.75),
    korthikanti(530, (105, 20_480, 128), 35, 280, "full", 49.05),
    korthikanti(530, (105, 20_480, 128), 35, 280, "none", 37.83),
)


def compare(report: Report) -> list[tuple[Run, Prediction]]:
    """Check all published runs against their predictions, and return both."""
    both = [(run, run.predict()) for run in RUNS]
    middle, half = (LOWEST + HIGHEST) / 2, (HIGHEST - LOWEST) / 2
    for run, prediction in both:
        weights = run.config.num_parameters() / 1e9
        paper = f"published, {run.name}"
        rounding = 0.05 + 0.003 * run.billions  # 1.7B, 405B
        report.check(f"{run.name}: weights, 1e9", weights, run.billions, rounding, paper)
        ratio = run.predicted(prediction) / run.published(prediction)
        report.check(f"{run.name}: predicted over published", ratio, middle, half, paper)
    check_operations(report, both)
    check_ratios(report, both)
    check_memory(report)
    return both


def check_operations(report: Report, both) -> None:
    """Narayanan's closed form: 96 B s l h^2 (1 + s / 6h + V / 16 l h), with recomputation."""
    for run, prediction in both:
        if run.counts_recompute:
            l, h, s = run.config.num_layers, run.config.dim, run.seq_len  # noqa: E741
            form = 1 + s / (6 * h) + run.config.vocab_size / (16 * l * h)
            form *= 96 * run.global_batch * s * l * h**2 / run.layout.gpus
            name = f"{run.name}: operations over closed form"
            ratio = prediction.executed_flops / form
            report.check(name, ratio, 1, 1e-3, "Narayanan, 2021, equation 3")


def check_ratios(report: Report, both) -> None:
    """Two runs that differ in one thing: rates cancel, so the band is narrow."""

    def faster(first: int, second: int) -> tuple[float, float]:
        pairs = [both[first], both[second]]
        predicted, published = (
            [getattr(run, kind)(prediction) for run, prediction in pairs]
            for kind in ("predicted", "published")
        )
        return predicted[0] / predicted[1], published[0] / published[1]

    # Without a bubble the prediction would be 1.01.
    report.check("Llama 3: 32 over 16 micro-batches", *faster(0, 1), 0.03, "bubble, table 4")
    for first, name in ((10, "175B"), (12, "530B")):
        ratio = faster(first, first - 1)
        source = "recomputation, Korthikanti, table 5"
        report.check(f"{name}: recompute none over full", *ratio, 0.1, source)


def check_memory(report: Report) -> None:
    """Korthikanti's figure 1 has 18 bytes per weight, without embeddings."""
    published = ((48, 6144, 64, 1, 4, 45.5625), (105, 20_480, 128, 35, 280, 31.640625))
    for layers, dim, heads, pp, batch, gib in published:
        shape = TransformerConfig(0, dim, layers, heads, heads, round(8 / 3 * dim), 2048)
        parts = memory_of_stage(Job(shape, 2048, batch, 1), Layout(8, 1, 1, pp, "none"), 0)
        states = sum(parts[name] for name in ("weights", "gradients", "optimizer")) / GIB
        name = f"Korthikanti, {layers} layers: GiB of weights, gradients, optimizer"
        report.check(name, states, gib, 0.005 * gib, "Korthikanti, 2022, figure 1")
