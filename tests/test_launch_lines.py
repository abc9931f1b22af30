"""Each printed line that starts a large model on GPUs fits them: by that script's own step.

The script builds its model and takes its steps on tensors without content, as one rank of as many
as the line starts.
"""

import math
import os
import re
import shlex
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import REPO, load_script, results_of, run_command
from page_reader import PAGES, read
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dist_common import checkpoint, data, hf, job, measure, models, report, runtime
from planner.hardware import GPUS
from planner.memory import memory_limit
from planner.models import MODELS

DDP = "01-ddp-basics/ddp_training.py"
FSDP = "02-fsdp/fsdp_transformer.py"
FINETUNE = "02-fsdp/fsdp_finetune.py"
DEEPSPEED = "03-deepspeed/deepspeed_train.py"
HYBRID = "05-advanced/hybrid_parallelism.py"
TEMPLATES = (DDP, FSDP, FINETUNE, DEEPSPEED, HYBRID)
GPU_GB = 80  # where the page names no other right before
OF_TENSORS = 0.9  # of a GPU's memory: the rest is the context's, kernels' and the allocator's
# A plan says itself how much of the GPU tensors may take.
PLANNED_GB = memory_limit(GPUS["h100"]) / OF_TENSORS / 1e9
CPU = torch.device("cpu")
full = pytest.mark.full
pytestmark = pytest.mark.gpu_ready

# lines

START = re.compile(
    r"\b(?:torchrun|sbatch|deepspeed|mpirun) [^\n`'|]*?(\d\d-[\w-]+/\w+\.py)"
    r"([^\n`'|]* --(?:preset|model) [^\n`'|]*)"
)
# A dry run of which a page shows a part.
CUT = re.compile(r"^(python \S+ sweep [^|\n]*--dry-run[^|\n]*?) *\|", re.M)


@dataclass
class Line:
    """What starts a large model on GPUs."""

    script: str
    ranks: int
    flags: list[str]
    gpu_gb: float
    shown_by: str | None = None  # of a line that is cut: what prints it whole

    @property
    def weights(self):
        preset = self.flags[self.flags.index("--preset") + 1] if "--preset" in self.flags else None
        return models.PRESETS[preset].num_parameters() if preset else math.inf


def lines_of(text):
    """Yield the lines in a text. `gpu` is taken for 8; fewer ranks are for this machine's CPU."""
    text = text.replace("\\\n", " ")
    for found in START.finditer(text):
        nodes = re.search(r"--(?:nnodes|nodes)=(?:\d+:)?(\d+)", found[0])
        on_each = re.search(
            r"(?:--(?:nproc-per-node|ntasks-per-node|num_gpus)=|mpirun -np )(\w+)", found[0]
        )
        if on_each:
            ranks = int({"gpu": 8}.get(on_each[1], on_each[1])) * int(nodes[1] if nodes else 1)
        else:  # of --hostfile
            ranks = sum(int(slots) for slots in re.findall(r"node\d+ slots=(\d+)", text))
        if ranks < 8 or re.search("--preset tiny|--model runs/", found[2]):
            continue
        gpus = re.findall(r"GPUs? of (\d+) GB", text[max(0, found.start() - 600) : found.start()])
        flags = re.sub(r" --resume\b| --(?:output-dir|export) \S+", "", found[2])
        room = int(gpus[-1]) if gpus else GPU_GB
        if planned := re.findall(r"plan.py plan --model (\S+)", text[: found.start()]):
            flags = flags.replace("MODEL_DIR", planned[-1])
            room = room if gpus else PLANNED_GB
        line = Line(found[1], ranks, shlex.split(flags), room)
        if line.flags[-1] == "..." or found[0].startswith("mpirun"):
            line.shown_by = [cut[1] for cut in CUT.finditer(text, 0, found.start())][-1]
        # A lesson's batches are small; some hold two models, and one that neither is cut nor ends.
        if line.script in TEMPLATES or 3 * 16 * line.weights > OF_TENSORS * line.gpu_gb * 1e9:
            yield line


def printed_lines():
    """Return the lines of all pages and lessons, by a name of each."""
    texts = [(REPO / page).read_text() for page in PAGES]
    texts += load_script("benchmarks/gpu_smoke.py").lines_of("GPU").values()
    found = {}
    for line in (line for text in texts for line in lines_of(text)):
        alike = sum(name.startswith(f"{Path(line.script).stem}-{line.ranks}-") for name in found)
        if line not in found.values():
            found[f"{Path(line.script).stem}-{line.ranks}-{alike + 1}"] = line
    return found


LINES = printed_lines()


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


def set_up_ddp(script, args):
    from ddp_parts import ddp_training as part

    class OneOrder:
        """A reducer that does not ask other ranks in which order gradients came."""

        def __init__(self, reducer):
            self.reducer = reducer

        def __getattr__(self, name):
            return getattr(self.reducer, name)

        def _rebuild_buckets(self):
            return False

    def reduce_alone(state, bucket):
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def wrapped(*given, **options):
        model = wrap(*given, **options)
        model.register_comm_hook(None, reduce_alone)
        model.reducer = OneOrder(model.reducer)
        return model

    wrap, script.DDP = script.DDP, wrapped
    part.proven_steps = lambda run, steps, *_: steps
    models.Transformer._apply = convert_anew
    torch.nn.parallel.distributed._verify_param_shape_across_processes = lambda *_: True
    return script.set_up


def set_up_finetune(script, args):
    """Of Llama 2 7B or what was planned, and of answers as long as a row."""
    from transformers import LlamaConfig

    config = LlamaConfig()
    if shape := MODELS.get(args.model):
        config = LlamaConfig(
            vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads, max_position_embeddings=args.seq_len,
        )  # fmt: skip
    turns = [{"role": role, "content": ""} for role in ("user", "assistant")]
    tokens = args.seq_len + 1
    script.load = lambda args, kind, what: config if what == "config.json" else None
    script.load_chats = lambda path: [("", turns)] * 2000
    script.chat_ids = lambda tokenizer, messages: ([0] * tokens, [True] * tokens)
    script.find_weights = lambda model, _: ({name: name for name in script.weights_of(model)}, {})
    script.dcp = mock.Mock()
    return script.set_up


def set_up_deepspeed(script, args):
    models.Transformer._apply = convert_anew
    script.draw_weights = lambda *_: None
    script.EngineFiles = lambda run: None

    def set_up(parsed, the_report):
        run = script.Run(*parsed, the_report)
        script.set_up(run)
        return run

    return set_up


SET_UP = {DDP: set_up_ddp, FINETUNE: set_up_finetune, DEEPSPEED: set_up_deepspeed}


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
    find = SET_UP.get(script.__file__.removeprefix(f"{REPO}/"), lambda script, _: script.set_up)
    run = find(script, args)(parsed, report.Report("", args, world, CPU))
    script.train(run)


def peak_of_lesson(script, args, world, memory):
    """One of those that save and load: each trains what `checkpoint_job` builds, or builds it."""
    part = script.checkpoint_job
    the_job = mock.Mock(args=args, world=world, device=CPU)
    the_job.config = models.preset(args.preset, part.SEQ_LEN)
    the_job.text = data.Sequences(data.load_text(), part.SEQ_LEN)
    part.draw_weights = lambda *_: None
    without_content_from(part, "materialize", memory)
    args.global_batch_size = 2 * world.world_size
    if not hasattr(script, "start"):
        part.build(the_job, 0, script.shard)
        return
    run = script.start(the_job, getattr(args, "strategy", 0))
    run.optimizer.param_groups[0]["foreach"] = False
    for _ in range(2):
        memory.peak = memory.alive
        part.train(the_job, run, 1)


def peak_of(line, rank):
    """Return the most bytes of tensors that a line's script holds on one rank. In a fork."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=line.ranks, store=FakeStore())
    launched = {"RANK": rank, "WORLD_SIZE": line.ranks, "LOCAL_RANK": rank % 8,
                "LOCAL_WORLD_SIZE": 8, "MASTER_ADDR": "here", "MASTER_PORT": 1}  # fmt: skip
    os.environ.update({name: str(value) for name, value in launched.items()})
    script = load_script(line.script)
    sys.argv = [line.script, *line.flags]
    memory = Memory()
    take = peak_of_template if line.script in TEMPLATES else peak_of_lesson
    take(script, script.parse_args(), runtime.discover(), memory)
    return memory.peak


@pytest.fixture
def peak(on_ranks):
    return lambda line, rank=0: on_ranks(lambda *_: peak_of(line, rank), 1, timeout_s=900)[0]


@full
@pytest.mark.parametrize("name", LINES)
def test_every_printed_line_fits_its_gpus(peak, name):
    line = LINES[name]
    if line.shown_by:
        whole = run_command(shlex.split(line.shown_by), REPO, 60).stdout
        start = " ".join(line.flags[:-1])
        line.flags = shlex.split(whole[whole.index(start) :].splitlines()[0])
    # Of a pipeline the first stage holds most activations, the last one the logits.
    for rank in {0, line.ranks - 1} if "--pp" in line.flags else {0}:
        held = peak(line, rank)
        print(f"{held / 1e9:.1f} of {line.gpu_gb:.1f} GB on rank {rank} of {line.ranks}: {line}")
        assert 0 < held < OF_TENSORS * line.gpu_gb * 1e9


def test_lines_are_found():
    found = sorted((Path(line.script).stem, line.ranks) for line in LINES.values())
    assert found == [
        ("ddp_training", 8),
        ("deepspeed_train", 8), ("deepspeed_train", 16),
        ("fsdp_checkpoint", 16),
        ("fsdp_finetune", 8), ("fsdp_finetune", 8), ("fsdp_finetune", 8),
        ("fsdp_reshard", 48), ("fsdp_to_hf", 16),
        ("fsdp_transformer", 8), ("fsdp_transformer", 16),
        ("fsdp_transformer", 64), ("fsdp_transformer", 64),
        ("hybrid_parallelism", 8), ("hybrid_parallelism", 8),
        ("hybrid_parallelism", 16), ("hybrid_parallelism", 64),
    ]  # fmt: skip
    text = (
        "On 16 GPUs of 24 GB:\n\n    torchrun --nnodes=2 \\\n --nproc-per-node=8 {} --preset 124m"
    )
    assert list(lines_of(text.format(DDP))) == [Line(DDP, 16, ["--preset", "124m"], 24)]


def test_pages_print_what_a_launcher_of_a_large_model_starts():
    """Else its line would not be found."""
    for page in PAGES:
        blocks = read(page).blocks
        for block, after in zip(blocks, [*blocks[1:], None], strict=False):
            if re.search(r"launch_\w+\.sh .*--preset .*|launch_\w+\.sh .*--model ", block.text):
                assert after and after.language == "text", f"{page}:{block.line}"


@full
def test_a_pipeline_holds_no_more_for_more_micro_batches(peak):
    """PyTorch's own stages have buffers for each of them, all the time: 19 MB more here."""
    flags = "--preset tiny --seq-len 128 --pp 2 --schedule interleaved --grad-accum-steps "
    few, many = (peak(Line(HYBRID, 2, (flags + number).split(), GPU_GB)) for number in ("8", "32"))
    assert many == few


@full
def test_what_does_not_fit_is_seen(peak):
    """All states of 8 billion weights on each GPU, 16 bytes, and 4 of DDP's buckets."""
    large = Line(DDP, 8, ["--preset", "llama3-8b", "--seq-len", "16"], GPU_GB)
    held = peak(large)
    assert 20 * large.weights < held < 21 * large.weights
    assert held > OF_TENSORS * GPU_GB * 1e9


@full
def test_the_count_is_that_of_pytorchs_own_tracker(peak, run_script, tmp_path):
    flags = shlex.split("--preset 124m --seq-len 512 --activation-checkpointing full")
    flags += shlex.split("--precision bf16-mixed --micro-batch-size 2")
    counted = peak(Line(FSDP, 8, flags, GPU_GB))
    folder = tmp_path / "run"
    argv = (*flags, "--world-size", 8, "--output-dir", folder)
    ended = run_script("02-fsdp/fsdp_memory.py", *argv, environ={})
    assert ended.codes == [0], ended.stderr
    tracked = results_of(folder)["metrics"]["Total_gib"] * 2**30
    assert counted == pytest.approx(tracked, rel=1e-3)
