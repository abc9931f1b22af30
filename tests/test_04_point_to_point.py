"""point_to_point.py: messages arrive, all-reduces of messages send what the theory says."""

import re
import time
import types

import pytest
import torch
import torch.distributed as dist
from conftest import REPO, assert_one_line, load_script, results_of
from helpers_04 import first_is_quick, full

from nccl_parts import point_to_point as part

P2P = "04-nccl-operations/point_to_point.py"


@pytest.mark.parametrize("world_size", [3, pytest.param(4, marks=full)])
def test_written_out_all_reduces_equal_the_librarys_in_steps_of_the_theory(
    run_script, tmp_path, world_size
):
    ended = run_script(P2P, "--mib", 1, "--output-dir", tmp_path / "run", world_size=world_size)
    assert ended.codes == [0] * world_size, ended.stdout + ended.stderr
    results = results_of(tmp_path / "run")
    assert ended.stderr == "" and len(results["checks"]) == 25
    assert results["metrics"]["alpha_us"] > 0
    assert (tmp_path / "run/messages.png").exists()


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
    assert part.theory(name, ranks) == (steps, sends, in_a_step)


MS = 1e-3


@pytest.mark.parametrize(
    ("small_ms", "large_ms", "alpha_ms", "mb_s"),  # of 1 MB
    [
        ([1, 1, 1, 1], [5, 5, 5, 5], 1, 250),
        ([1, 3, 1, 1], [5, 7, 9, 5], 1, 250),  # one pair was disturbed, one message too
        ([1, 9, 1, 1], [5, 5, 5, 5], 1, 250),
        ([2, 2, 2, 2], [2, 2, 2, 2], 2, None),
        ([5, 5, 5, 5], [1, 1, 1, 1], 5, None),  # by the difference of two medians -250 MB/s
        ([1, 5, 1, 5], [5, 1, 5, 2], 3, None),
        ([1, 1, 1, 1], [1, 9, 2, 12], 1, None),
    ],
)
def test_a_rate_is_told_only_where_the_bytes_outlast_the_noise(small_ms, large_ms, alpha_ms, mb_s):
    small, large = ([MS * t for t in times] for times in (small_ms, large_ms))
    cost = load_script(P2P).cost_of(small, large, 10**6)
    assert cost.alpha == pytest.approx(alpha_ms * MS)
    assert (cost.rate and cost.rate / 1e6) == pytest.approx(mb_s)
    assert cost.predict(6, 256) == pytest.approx(6 * alpha_ms * MS, rel=0.01)
    assert (cost.predict(6, 10**6) is None) == (mb_s is None)


def hide_the_rate(script):
    time_once()
    cost_of = script.cost_of
    script.cost_of = lambda small, large, nbytes: cost_of(large, large, nbytes)


def test_without_a_rate_the_script_says_so_in_words(run_script, tmp_path):
    argv = ("--mib", 1, "--output-dir", tmp_path / "run")
    ended = run_script(P2P, *argv, world_size=2, before=hide_the_rate)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    assert "then no rate: the large message takes longer by no more than noise" in ended.stdout
    assert re.search(r"ring +1,048,576 bytes +2 +1 +unknown +[\d.]+ ms *$", ended.stdout, re.M)
    assert results_of(tmp_path / "run")["metrics"]["link_mb_s"] is None


def receive_first(script):
    script.both_send_first = lambda peer, group: None


def forget_the_second_half(script):
    whole = script.ALGORITHMS["ring"]

    def half(x, move):
        kept = part.Mover(move.rate, move.latency_s)
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
        plain(x.clone(), part.Mover())
        plain(x, move)

    script.ALGORITHMS["tree"] = broken


def whole_buffers_around_the_ring(script):
    script.ALGORITHMS["ring"] = script.doubling_all_reduce


def receive_nothing(script):
    script.isend_irecv = lambda mine, received, to, source: None
    script.isend_irecv.__name__ = "isend_irecv"


def time_once():
    part.WARM_UP, part.ROUNDS = 0, 2


@pytest.mark.parametrize(
    ("sabotage", "fails"),
    first_is_quick([
        (forget_the_second_half, "ring, 1,048,576 bytes: steps"),
        (receive_first, "both send first: ranks whose send did not end"),
        (receive_nothing, "isend_irecv: ranks with another number than the previous rank's"),
        (skip_an_addition, "recursive doubling, 1,048,576 bytes: numbers unlike dist.all_reduce's"),
        (whole_buffers_around_the_ring, "ring, 1,048,576 bytes: bytes that one step sends"),
        (send_twice, "tree, 1,048,576 bytes: bytes that the busiest rank sends"),
    ]),
)  # fmt: skip
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
    part.time = types.SimpleNamespace(
        perf_counter=time.perf_counter, sleep=lambda seconds: print(f"sleep {seconds:.6f}")
    )


def test_an_emulated_link_holds_each_message_back(run_script):
    argv = ("--mib", 1, "--link", "100mbit", "--latency-ms", 5)
    ended = run_script(P2P, *argv, world_size=2, before=say_instead_of_sleeping)
    assert ended.codes == [0, 0], ended.stdout + ended.stderr
    slept = {float(seconds) for seconds in re.findall(r"^sleep (.*)$", ended.stdout, re.M)}
    messages = (256, 256 // 2, 2**20, 2**20 // 2)  # bytes: the ring sends halves
    assert slept == {round(0.005 + size / 12.5e6, 6) for size in messages}


# the picture, and the page's table of the ring


def messages(rank, ranks, name):
    return part.messages_of(load_script(P2P).ALGORITHMS[name], torch.full((ranks,), 2.0**rank))


def held(rank, ranks):
    """Return what this rank holds before and after each step: sums of powers of two."""
    x, seen = torch.full((ranks,), 2.0**rank), []

    def move(*given):
        seen.append(x.int().tolist())
        part.Mover()(*given)

    load_script(P2P).ring_all_reduce(x, move)
    return [*seen, x.int().tolist()]


def test_the_table_of_the_ring_is_what_the_ranks_hold(on_ranks):
    """Halfway each rank has one whole sum, at the end all."""
    rows = re.findall(r"^\| rank \d \| (.*) \|$", (REPO / P2P).with_suffix(".md").read_text(), re.M)
    told = [[cell.split(", ") for cell in row.split(" | ")] for row in rows]

    def ranks_in(number):
        found = [str(rank) for rank in range(3) if number >> rank & 1]
        return "all" if len(found) == 3 else "+".join(found)

    assert told == [[[*map(ranks_in, step)] for step in own] for own in on_ranks(held, 3)]
    assert [own[2].count("all") for own in told] == [1] * 3


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=full)])
def test_the_ring_sends_to_the_next_rank_in_every_step(on_ranks, ranks):
    assert on_ranks(messages, ranks, "ring")[0] == [
        (time, r, (r + 1) % ranks, 4) for time in range(2 * (ranks - 1)) for r in range(ranks)
    ]


@pytest.mark.parametrize(
    ("name", "ranks", "sent"),  # (time, from, to)
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
def test_messages_are_placed_in_time(on_ranks, name, ranks, sent):
    assert [message[:3] for message in on_ranks(messages, ranks, name)[0]] == sent


def test_no_picture_of_more_ranks_than_it_can_show(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: part.LARGEST_DRAWN + 1)
    part.draw(None, {"ring": None})  # needs neither


@pytest.mark.parametrize(
    ("world_size", "argv", "says"),
    first_is_quick([
        (1, (), "one rank has nobody to send to: start 2 or more"),
        (1, ("--mib", "0"), "argument --mib: must be a whole number of at least 1, not '0'"),
        (1, ("--link", "fast"), "argument --link: must be like 100mbit or 1gbit, not 'fast'"),
        (2, ("--latency-ms", "-1"), "argument --latency-ms: must be a number above 0, not '-1'"),
    ]),
)  # fmt: skip
def test_point_to_point_refuses_bad_input(run_script, world_size, argv, says):
    assert_one_line(run_script(P2P, *argv, world_size=world_size), says, "point_to_point.py")
