"""point_to_point.py: messages arrive, all-reduces of messages send what the theory says."""

import re
import time
import types

import pytest
import torch
import torch.distributed as dist
from conftest import assert_one_line, load_script, results_of

import p2p_checks
import p2p_pictures

P2P = "04-nccl-operations/point_to_point.py"
full = pytest.mark.full


@pytest.mark.parametrize("world_size", [2, 3, *(pytest.param(n, marks=full) for n in (4, 5))])
def test_written_out_all_reduces_equal_the_librarys_in_steps_of_the_theory(
    run_script, tmp_path, world_size
):
    ended = run_script(P2P, "--mib", 1, "--output-dir", tmp_path / "run", world_size=world_size)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    results = results_of(tmp_path / "run")
    assert ended.stderr == "" and len(results["checks"]) == 25
    assert results["metrics"]["alpha_us"] > 0
    assert all((tmp_path / "run" / name).exists() for name in ("messages.png", "ring.png"))


@pytest.mark.parametrize(
    ("ranks", "name", "steps", "sends", "in_a_step"),  # counted by hand
    [
        (2, "ring", 2, 1, 0.5),
        (2, "recursive doubling", 1, 1, 1),
        (2, "tree", 2, 1, 1),
        (4, "ring", 6, 1.5, 0.25),
        (4, "recursive doubling", 2, 2, 1),
        (5, "recursive doubling", 4, 3, 1),
        (5, "tree", 6, 3, 1),
        (8, "tree", 6, 3, 1),
    ],
)
def test_theory_of_an_all_reduce(ranks, name, steps, sends, in_a_step):
    assert p2p_checks.theory(name, ranks) == (steps, sends, in_a_step)


def receive_first(script):
    script.both_send_first = lambda peer, group: None


def forget_the_second_half(script):
    whole = script.ALGORITHMS["ring"]

    def half(x, move):
        kept = p2p_checks.Mover(move.rate, move.latency_s)
        whole(x, kept)
        move.steps, move.bytes, move.largest = kept.steps // 2, kept.bytes // 2, kept.largest

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
        plain(x.clone(), p2p_checks.Mover())
        plain(x, move)

    script.ALGORITHMS["tree"] = broken


def whole_buffers_around_the_ring(script):
    script.ALGORITHMS["ring"] = script.doubling_all_reduce


def receive_nothing(script):
    script.isend_irecv = lambda mine, received, to, source: None
    script.isend_irecv.__name__ = "isend_irecv"


def time_once():
    p2p_checks.WARM_UP, p2p_checks.ROUNDS = 0, 1


@pytest.mark.parametrize(
    ("sabotage", "fails"),
    [
        (receive_first, "both send first: ranks whose send did not end"),
        (receive_nothing, "isend_irecv: ranks with another number than the previous rank's"),
        (forget_the_second_half, "ring, 1,048,576 bytes: steps"),
        (skip_an_addition, "recursive doubling, 1,048,576 bytes: numbers unlike dist.all_reduce's"),
        (whole_buffers_around_the_ring, "ring, 1,048,576 bytes: bytes that one step sends"),
        (send_twice, "tree, 1,048,576 bytes: bytes that the busiest rank sends"),
    ],
)
def test_sabotage_of_point_to_point_fails_its_check(run_script, tmp_path, sabotage, fails):
    def before(script):
        time_once()
        sabotage(script)

    argv = ("--mib", 1, "--output-dir", tmp_path / "run")
    ended = run_script(P2P, *argv, world_size=2, before=before)
    assert any(ended.codes), ended.stdout + ended.stderr
    assert fails in [c["name"] for c in results_of(tmp_path / "run")["checks"] if not c["ok"]]


def say_instead_of_sleeping(script):
    time_once()
    p2p_checks.time = types.SimpleNamespace(
        perf_counter=time.perf_counter, sleep=lambda seconds: print(f"sleep {seconds:.6f}")
    )


def test_an_emulated_link_holds_each_message_back(run_script):
    argv = ("--mib", 1, "--link", "100mbit", "--latency-ms", 5)
    ended = run_script(P2P, *argv, world_size=2, before=say_instead_of_sleeping)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    slept = {float(seconds) for seconds in re.findall(r"^sleep (.*)$", ended.stdout, re.M)}
    messages = (256, 256 // 2, 2**20, 2**20 // 2)  # bytes: the ring sends halves
    assert slept == {round(0.005 + size / 12.5e6, 6) for size in messages}


# the pictures


def watched(rank, ranks, name):
    all_reduce = load_script(P2P).ALGORITHMS[name]
    return p2p_pictures.watch(all_reduce, torch.full((ranks,), 2.0**rank))


@pytest.mark.parametrize("ranks", [2, 3, *(pytest.param(n, marks=full) for n in (4, 8))])
def test_halfway_around_the_ring_each_rank_has_one_whole_sum(on_ranks, ranks):
    steps, held = on_ranks(watched, ranks, "ring")[0]
    whole = 2**ranks - 1
    assert [own[ranks - 1].count(whole) for own in held] == [1] * ranks
    assert [own[-1] for own in held] == [[whole] * ranks] * ranks
    messages = p2p_pictures.messages_of(steps)
    sent = [(m.time, m.source, m.to, m.sent) for m in messages]
    assert sent == [(time, r, (r + 1) % ranks, 4) for time in range(2 * (ranks - 1))
                    for r in range(ranks)]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "ranks", "messages"),  # (time, from, to)
    [
        ("recursive doubling", 2, [(0, 0, 1), (0, 1, 0)]),
        ("tree", 3, [(0, 1, 0), (0, 2, 0), (1, 0, 2), (2, 0, 1)]),
        pytest.param(
            "tree", 4, [(0, 1, 0), (0, 3, 2), (1, 2, 0), (2, 0, 2), (3, 0, 1), (3, 2, 3)],
            marks=full,
        ),
        pytest.param(
            "recursive doubling", 3, [(0, 1, 0), (0, 2, 0), (1, 0, 1), (2, 0, 2)], marks=full
        ),
    ],
)  # fmt: skip
def test_messages_are_placed_in_time(on_ranks, name, ranks, messages):
    steps, _ = on_ranks(watched, ranks, name)[0]
    assert [(m.time, m.source, m.to) for m in p2p_pictures.messages_of(steps)] == messages


def test_no_picture_of_more_ranks_than_it_can_show(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: p2p_pictures.LARGEST_DRAWN + 1)
    p2p_pictures.draw_all(None, {"ring": None})  # needs neither


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    [
        (1, (), "one rank has nobody to send to: start 2 or more"),
        (1, ("--mib", "0"), "argument --mib: must be a whole number of at least 1, not '0'"),
        (1, ("--link", "fast"), "argument --link: must be like 100mbit or 1gbit, not 'fast'"),
        (2, ("--latency-ms", "-1"), "argument --latency-ms: must be a number above 0, not '-1'"),
    ],
)
def test_point_to_point_refuses_bad_input(run_script, world_size, argv, says):
    assert_one_line(run_script(P2P, *argv, world_size=world_size), says, "point_to_point.py")
