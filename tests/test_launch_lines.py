"""A printed line of each launcher starts a large model that fits its GPUs.

The script builds its model and takes its steps on tensors without content, as one rank of as many
as the line starts.
"""

import os
import re
import shlex
import sys
import weakref
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import REPO, load_script, results_of
from page_reader import PAGES
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dist_common import checkpoint, data, hf, job, measure, models, report, runtime

FSDP = "02-fsdp/fsdp_transformer.py"
DEEPSPEED = "03-deepspeed/deepspeed_train.py"
HYBRID = "05-advanced/hybrid_parallelism.py"
KINDS = [("torchrun", FSDP), ("sbatch", HYBRID), ("deepspeed", DEEPSPEED)]
GPU_GB = 80  # of the GPUs that the pages mean
OF_TENSORS = 0.9  # of a GPU's memory: the rest is the context's, kernels' and the allocator's
CPU = torch.device("cpu")
full = pytest.mark.full
pytestmark = pytest.mark.gpu_ready

# lines

START = re.compile(
    r"\b(torchrun|sbatch|deepspeed) [^\n`'|]*?(\d\d-[\w-]+/\w+\.py)"
    r"([^\n`'|]* --preset [^\n`'|]*)"
)


@dataclass
class Line:
    """What starts a large model on GPUs."""

    script: str
    ranks: int
    flags: list[str]


def lines_of(text):
    """Yield (launcher, line) for the lines in a text that start 8 ranks or more."""
    text = text.replace("\\\n", " ")
    for found in START.finditer(text):
        nodes = re.search(r"--(?:nnodes|nodes)=(?:\d+:)?(\d+)", found[0])
        on_each = re.search(r"--(?:nproc-per-node|ntasks-per-node)=(\d+)", found[0])
        if on_each:
            ranks = int(on_each[1]) * int(nodes[1] if nodes else 1)
        else:  # of --hostfile
            ranks = sum(int(slots) for slots in re.findall(r"node\d+ slots=(\d+)", text))
        if ranks >= 8 and "--preset tiny" not in found[3]:
            flags = re.sub(r" --resume\b| --output-dir \S+", "", found[3])
            yield found[1], Line(found[2], ranks, shlex.split(flags))


def printed_line(launcher, script):
    """Return the first line of this launcher that a page prints for a script."""
    pages = ((REPO / page).read_text() for page in PAGES)
    found = (line for text in pages for kind, line in lines_of(text) if kind == launcher)
    return next(line for line in found if line.script == script)


# memory


class Memory(TorchDispatchMode):
    """Count the bytes of tensors without content: `alive` now, `peak` at most.

    What is on the host stays real, with content: batches, ranks of a mesh.
    """

    def __init__(self):
        super().__init__()
        self.sizes = {}  # by storage
        self.alive = self.peak = 0
        resize = torch.UntypedStorage.resize_

        def resized(storage, size):  # so FSDP frees what it gathers
            resize(storage, size)
            if storage._cdata in self.sizes:
                self.set_size(storage._cdata, size)
            return storage

        torch.UntypedStorage.resize_ = resized

    def set_size(self, storage, size):
        self.alive += size - self.sizes.get(storage, 0)
        self.sizes[storage] = size
        self.peak = max(self.peak, self.alive)

    def free(self, storage):
        self.alive -= self.sizes.pop(storage)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:  # it calls what it is made of, which then comes here
            return NotImplemented
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if given and not any(isinstance(x, FakeTensor) or x.is_meta for x in given):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0  # DeepSpeed's engine asks whether a norm is a number
        result = func(*args, **kwargs)
        for x in tree_leaves(result):
            if isinstance(x, FakeTensor) and x.device.type != "meta":
                storage = x.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.set_size(storage._cdata, storage.nbytes())
                    weakref.finalize(storage, self.free, storage._cdata)
        return result


def without_content_from(holder, name, memory):
    """Make no more content from the first call of this function on, for the rest of the fork."""
    function = getattr(holder, name)

    def entered(*given, **options):
        setattr(holder, name, function)
        FakeTensorMode(allow_non_fake_inputs=True).__enter__()
        memory.__enter__()
        norm = models.FusedNorm.apply
        torch.nn.RMSNorm.forward = lambda self, x: norm(x, self.weight)
        return function(*given, **options)

    setattr(holder, name, entered)


def two_steps(memory):
    """Return what stands for Job.steps: the first makes Adam's state, the second one counts."""

    def steps(self, **_):
        args = self.args
        for number in (1, 2):
            with unset_fake_temporarily():
                batch = torch.zeros(2, args.micro_batch_size, args.seq_len, dtype=torch.int64)
            memory.peak = memory.alive
            yield job.Step(number, 1e-3, [tuple(batch)] * args.grad_accum_steps)

    return steps


# what stands for what is not there


def convert_anew(self, fn, recurse=True):
    """Module._apply, which swaps what has no content, and refuses to where a memo refers to it."""
    for module in self.modules():
        for name, weight in module._parameters.items():
            made = None if weight is None else fn(weight)
            if made is not weight:  # tied weights stay tied
                module._parameters[name] = torch.nn.Parameter(made)
        for name, buffer in module._buffers.items():
            module._buffers[name] = fn(buffer)
    return self


def set_up_deepspeed(script):
    models.Transformer._apply = convert_anew
    script.draw_weights = lambda *_: None
    script.EngineFiles = lambda run: None

    def set_up(parsed, the_report):
        run = script.Run(*parsed, the_report)
        script.set_up(run)
        return run

    return set_up


def peak_of_template(script, parsed, world, memory):
    args = parsed[0] if isinstance(parsed, tuple) else parsed
    args.output_dir = args.export = args.export_to = args.tokens = None
    if args.global_batch_size:  # of more micro-batches a step holds no more at a time
        args.global_batch_size = None
        args.grad_accum_steps = 2 * getattr(args, "pp", 1)
    built = (script, "build") if hasattr(script, "build") else (models.Transformer, "__init__")
    without_content_from(*built, memory)
    text = torch.zeros(40 * world.world_size * args.seq_len, dtype=torch.uint8)
    data.load_text = lambda *_, **__: text
    report.default_precision = lambda device: "bf16-mixed"
    report.Report.start = lambda *_: None
    measure.require_memory = lambda *_: None  # of this machine
    hf.first_weights = lambda *_: None
    checkpoint.Sharded = mock.Mock()
    torch._fused_adamw_ = lambda *_, **__: None  # has no shapes; needs no memory beside its state
    job.Job.steps = two_steps(memory)
    script.proofs = lambda: None
    set_up = set_up_deepspeed(script) if hasattr(script, "EngineFiles") else script.set_up
    run = set_up(parsed, report.Report("", args, world, CPU))
    script.train(run)


def peak_of(line):
    """Return the most bytes of tensors that a line's script holds on rank 0. In a fork."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=line.ranks, store=FakeStore())
    launched = {"RANK": 0, "WORLD_SIZE": line.ranks, "LOCAL_RANK": 0,
                "LOCAL_WORLD_SIZE": 8, "MASTER_ADDR": "here", "MASTER_PORT": 1}  # fmt: skip
    os.environ.update({name: str(value) for name, value in launched.items()})
    script = load_script(line.script)
    sys.argv = [line.script, *line.flags]
    memory = Memory()
    peak_of_template(script, script.parse_args(), runtime.discover(), memory)
    return memory.peak


@pytest.fixture
def peak(on_ranks):
    return lambda line: on_ranks(lambda *_: peak_of(line), 1, timeout_s=900)[0]


@full
@pytest.mark.parametrize(("launcher", "script"), [KINDS[0], KINDS[2]])
def test_a_printed_line_fits_its_gpus(peak, launcher, script):
    """Not the line of 70 billion weights in a pipeline, which takes minutes."""
    line = printed_line(launcher, script)
    assert 0 < peak(line) < OF_TENSORS * GPU_GB * 1e9, line


def test_lines_are_found():
    found = [printed_line(*kind) for kind in KINDS]
    ranks = {FSDP: 16, HYBRID: 64, DEEPSPEED: 16}
    assert {line.script: line.ranks for line in found} == ranks
    text = "On GPUs:\n\n    torchrun --nnodes=2 \\\n --nproc-per-node=8 {} --preset 124m"
    assert list(lines_of(text.format(FSDP))) == [("torchrun", Line(FSDP, 16, ["--preset", "124m"]))]


@full
def test_a_pipeline_holds_no_more_for_more_micro_batches(peak):
    """PyTorch's own stages have buffers for each of them, all the time: 19 MB more here."""
    flags = "--preset tiny --seq-len 128 --pp 2 --schedule interleaved --grad-accum-steps "
    few, many = (peak(Line(HYBRID, 2, (flags + number).split())) for number in ("8", "32"))
    assert many == few


@full
def test_what_does_not_fit_is_seen(peak):
    """All states of 8 billion weights on one GPU, 16 bytes each."""
    flags = ["--preset", "llama3-8b", "--seq-len", "16", "--precision", "bf16-mixed"]
    held = peak(Line(FSDP, 1, flags))
    weights = models.PRESETS["llama3-8b"].num_parameters()
    assert held > 16 * weights > OF_TENSORS * GPU_GB * 1e9


@full
def test_the_count_is_that_of_pytorchs_own_tracker(peak, run_script, tmp_path):
    flags = shlex.split("--preset 124m --seq-len 512 --activation-checkpointing full")
    flags += shlex.split("--precision bf16-mixed --micro-batch-size 2")
    counted = peak(Line(FSDP, 8, flags))
    folder = tmp_path / "run"
    argv = (*flags, "--world-size", 8, "--output-dir", folder)
    ended = run_script("02-fsdp/fsdp_memory.py", *argv, environ={})
    assert ended.codes == [0], ended.stderr
    tracked = results_of(folder)["metrics"]["Total_gib"] * 2**30
    assert counted == pytest.approx(tracked, rel=1e-3)
