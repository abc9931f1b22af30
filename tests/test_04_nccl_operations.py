"""Module 04: each collective does what its definition says; what each one costs is measured."""

import pytest
from conftest import assert_one_line, load_script, results_of

OPS = "04-nccl-operations/collective_ops.py"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_collective_is_as_defined(run_script, tmp_path, world_size):
    ended = run_script(OPS, "--output-dir", tmp_path / "run", world_size=world_size)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    assert ended.stderr == "" and len(results_of(tmp_path / "run")["checks"]) == 25


def skip(name):
    """Return a sabotage in which a collective of torch.distributed is not called at all."""

    def sabotage(script):
        setattr(script.dist, name, lambda *args, **kwargs: None)

    return sabotage


def into_another_order(script):
    gathered = script.all_gather_single

    def broken(whole, part):
        gathered(whole, part)
        whole.copy_(whole.roll(len(part)))

    script.all_gather_single = broken


def keep_own_part(script):
    script.reduce_scatter_single = lambda own, mine: own.copy_(mine[script.dist.get_rank()])


def one_group_of_all(script):
    script.dist.new_group = lambda ranks: script.dist.group.WORLD


@pytest.mark.parametrize(
    ("sabotage", "op"),
    [
        (skip("broadcast"), "broadcast"),
        (skip("reduce"), "reduce"),
        (skip("all_reduce"), "all_reduce SUM"),
        (skip("all_reduce"), "all_reduce BXOR"),
        (skip("barrier"), "barrier"),
        (into_another_order, "all_gather_into_tensor"),
        (keep_own_part, "reduce_scatter_tensor"),
        (one_group_of_all, "all_reduce_of_a_group"),
        (skip("scatter_object_list"), "scatter_object_list"),
    ],
)
def test_sabotage_of_a_collective_fails_its_check(run_script, tmp_path, sabotage, op):
    ended = run_script(
        OPS, "--op", op, "--output-dir", tmp_path / "run", world_size=3, before=sabotage
    )
    assert any(ended.codes), ended.stdout + ended.stderr
    failed = [c["name"] for c in results_of(tmp_path / "run")["checks"] if not c["ok"]]
    assert failed == [f"{op}: elements not as defined"]


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    [
        (1, (), "one rank has nobody to talk to: start 2 or more"),
        (2, ("--op", "all_reduce PREMUL_SUM"), "gloo has it not; nccl has"),
        (2, ("--op", "allreduce"), "argument --op: invalid choice: 'allreduce'"),
    ],
)
def test_collective_ops_refuses_bad_input(run_script, world_size, argv, says):
    assert_one_line(run_script(OPS, *argv, world_size=world_size), says, "collective_ops.py")


# point_to_point.py

P2P = "04-nccl-operations/point_to_point.py"


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_written_out_all_reduces_equal_the_librarys_in_steps_of_the_theory(
    run_script, tmp_path, world_size
):
    ended = run_script(P2P, "--mib", 1, "--output-dir", tmp_path / "run", world_size=world_size)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    results = results_of(tmp_path / "run")
    assert ended.stderr == "" and len(results["checks"]) == 19
    assert results["metrics"]["alpha_us"] > 0


@pytest.mark.parametrize(
    ("ranks", "name", "steps", "sends"),  # counted by hand
    [
        (2, "ring", 2, 1),
        (2, "recursive doubling", 1, 1),
        (2, "tree", 2, 1),
        (4, "ring", 6, 1.5),
        (4, "recursive doubling", 2, 2),
        (5, "recursive doubling", 4, 3),
        (5, "tree", 6, 3),
        (8, "tree", 6, 3),
    ],
)
def test_theory_of_an_all_reduce(ranks, name, steps, sends):
    assert load_script(P2P).theory(name, ranks)[:2] == (steps, sends)


def receive_first(script):
    script.both_send_first = lambda peer, group: None


def forget_the_second_half(script):
    whole = script.ALGORITHMS["ring"]

    def half(x, move):
        kept = script.Mover(move.rate, move.latency_s)
        whole(x, kept)
        move.steps, move.bytes = kept.steps // 2, kept.bytes // 2

    script.ALGORITHMS["ring"] = half


def skip_an_addition(script):
    plain = script.doubling_all_reduce

    def broken(x, move):
        plain(x, move)
        x[-1] -= 1

    script.ALGORITHMS["recursive doubling"] = broken


def send_twice(script):
    plain = script.tree_all_reduce

    def broken(x, move):
        plain(x.clone(), script.Mover())
        plain(x, move)

    script.ALGORITHMS["tree"] = broken


def receive_nothing(script):
    script.isend_irecv = lambda mine, received, to, source: None
    script.isend_irecv.__name__ = "isend_irecv"


@pytest.mark.parametrize(
    ("sabotage", "fails"),
    [
        (receive_first, "both send first: ranks whose send did not end"),
        (receive_nothing, "isend_irecv: ranks with another number than the previous rank's"),
        (forget_the_second_half, "ring, 1,048,576 bytes: steps"),
        (skip_an_addition, "recursive doubling, 1,048,576 bytes: numbers unlike dist.all_reduce's"),
        (send_twice, "tree, 1,048,576 bytes: bytes that the busiest rank sends"),
    ],
)
def test_sabotage_of_point_to_point_fails_its_check(run_script, tmp_path, sabotage, fails):
    ended = run_script(
        P2P, "--mib", 1, "--output-dir", tmp_path / "run", world_size=2, before=sabotage
    )
    assert any(ended.codes), ended.stdout + ended.stderr
    assert fails in [c["name"] for c in results_of(tmp_path / "run")["checks"] if not c["ok"]]


def test_an_emulated_link_takes_its_time(run_script, tmp_path):
    ended = run_script(
        P2P, "--mib", 1, "--link", "1gbit", "--latency-ms", 2, "--output-dir", tmp_path / "run",
        world_size=2,
    )  # fmt: skip
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    metrics = results_of(tmp_path / "run")["metrics"]
    # A message cannot be sooner than its link; how much later is this machine's.
    assert metrics["alpha_us"] >= 2000 and metrics["link_mb_s"] < 200
    assert metrics["ring 1,048,576 bytes ms"] >= 2 * (2 + 4.194)


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    [
        (1, (), "one rank has nobody to send to: start 2 or more"),
        (2, ("--mib", "0"), "argument --mib: must be a whole number of at least 1, not '0'"),
        (2, ("--link", "fast"), "argument --link: must be like 100mbit or 1gbit, not 'fast'"),
        (2, ("--latency-ms", "-1"), "argument --latency-ms: must be a number above 0, not '-1'"),
    ],
)
def test_point_to_point_refuses_bad_input(run_script, world_size, argv, says):
    assert_one_line(run_script(P2P, *argv, world_size=world_size), says, "point_to_point.py")
