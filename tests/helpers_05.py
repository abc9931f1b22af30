"""What tests of module 05 share: a small run of tensor parallelism."""

from conftest import results_of

SMALL = ("--num-layers", 1, "--seq-len", 32, "--batch-size", 2, "--max-steps", 2)
L, D, TOKENS = 1, 128, 64  # of SMALL


def run_small(script, run_script, tmp_path, world_size, before=None, codes=(0,)):
    folder = tmp_path / "run"
    flags = (*SMALL, "--num-kv-heads", max(2, world_size), "--output-dir", folder)
    ended = run_script(script, *flags, world_size=world_size, before=before)
    assert set(ended.codes) & set(codes), ended.stdout + ended.stderr
    assert "Warning" not in ended.stderr
    return results_of(folder)


def failing(content):
    return {check["name"] for check in content["checks"] if not check["ok"]}


def counted(content, name):
    """Return the calls of a step by kind, and the bytes that a rank sends in it."""
    found = {check["name"]: check["measured"] for check in content["checks"]}
    start = f"{name}, a step: "
    own = {key.removeprefix(start): found[key] for key in found if key.startswith(start)}
    return own, own.pop("bytes sent")
