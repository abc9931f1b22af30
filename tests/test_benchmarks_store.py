"""The folder of a sweep: nothing is lost when it is killed, nothing is mixed with another sweep."""

import json

import pytest

import bench_store
from bench_store import Store, load
from dist_common import cli


def record(identity, **more):
    return {"id": identity, "point": {"strategy": "ddp"}, "status": "ok", **more}


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "sweep", {"repeats": 3, "points": ["a#1", "b#1"]})
    yield store
    store.close()


def lines_of(store):
    return (store.folder / "results.jsonl").read_text().splitlines()


def test_records_come_back_in_order_and_the_later_of_two_counts(store):
    for identity, seconds in (("a#1", 1), ("b#1", 2), ("a#1", 3)):
        store.append(record(identity, seconds=seconds))
    sweep = load(store.folder)
    assert [(r["id"], r["seconds"]) for r in sweep.records] == [("a#1", 3), ("b#1", 2)]
    assert sweep.settings == {"repeats": 3, "points": ["a#1", "b#1"]} and not sweep.warnings
    assert len(lines_of(store)) == 3


@pytest.mark.parametrize(
    ("last", "line", "damage"),
    [
        ('{"id": "c#1", "poi', 2, "truncated"),
        ('{"id": "c#1"}\n', 2, "truncated"),
        ("null\n" + json.dumps(record("c#1")) + "\n", 2, "damaged"),
        ("\xff\xfe\n" + json.dumps(record("c#1")) + "\n", 2, "damaged"),
    ],
)
def test_a_damaged_line_is_named_and_left_out(store, last, line, damage):
    store.append(record("a#1"))
    with (store.folder / "results.jsonl").open("a", encoding="latin-1") as file:
        file.write(last)
    sweep = load(store.folder)
    assert [r["id"] for r in sweep.records] == ["a#1", "c#1"][: 1 + (damage == "damaged")]
    path = store.folder / "results.jsonl"
    assert sweep.warnings == [f"{path} line {line} is {damage}: left out"]


def test_a_killed_sweep_s_half_line_is_cut_before_the_next_one(store):
    store.append(record("a#1"))
    store.close()
    with (store.folder / "results.jsonl").open("a") as file:
        file.write('{"id": "b#1", "poi')
    again = Store(store.folder, store.settings)
    path = store.folder / "results.jsonl"
    cut = f"{path} line 2 was truncated: cut, its point runs again"
    assert again.sweep.warnings == [cut] and [r["id"] for r in again.sweep.records] == ["a#1"]
    again.append(record("b#1"))
    again.close()
    sweep = load(store.folder)
    assert [r["id"] for r in sweep.records] == ["a#1", "b#1"] and not sweep.warnings


def test_each_machine_on_which_points_ran_is_kept(tmp_path):
    """The one on which the folder was opened, but nothing ran, is not."""
    one, two = {"GPUs": "8 x H100"}, {"GPUs": "8 x H200"}
    for machine, name in ((one, "a#1"), (one, "b#1"), (two, None), (two, "c#1")):
        store = Store(tmp_path / "sweep", {}, machine)
        if name:
            store.append(record(name))
        store.close()
        assert load(tmp_path / "sweep").machines == [one, two][: 1 + (name == "c#1")]
    assert len(load(tmp_path / "sweep").records) == 3


def test_a_whole_line_without_its_end_is_kept(store):
    store.append(record("a#1"))
    store.close()
    path = store.folder / "results.jsonl"
    path.write_text(path.read_text().rstrip("\n"))
    again = Store(store.folder, store.settings)
    again.append(record("b#1"))
    again.close()
    assert [r["id"] for r in load(store.folder).records] == ["a#1", "b#1"]


def test_another_sweep_s_folder_is_refused_naming_what_differs(store):
    store.append(record("a#1"))
    store.close()
    with pytest.raises(cli.UsageError, match=r"repeats \(3 there, 5 here\), lr \(null there, 0.1"):
        Store(store.folder, {"repeats": 5, "points": ["a#1"], "lr": 0.1})
    assert [r["id"] for r in load(store.folder).records] == ["a#1"]


def test_a_folder_in_which_a_sweep_runs_is_refused(store, monkeypatch):
    monkeypatch.setattr(bench_store, "LOCK_PATIENCE_S", 0.1)
    with pytest.raises(cli.UsageError, match="another sweep is running in"):
        Store(store.folder, store.settings)
    store.close()
    Store(store.folder, store.settings).close()


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("\\chapter")
    with pytest.raises(cli.UsageError, match="holds other files than a sweep's"):
        Store(tmp_path, {})
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_sweep_that_was_killed_before_it_wrote_its_settings_begins_anew(tmp_path):
    for name in (bench_store.LOCK, bench_store.PARTIAL):
        (tmp_path / name).write_text('{"sett')
    Store(tmp_path, {"repeats": 1}).close()
    assert load(tmp_path).settings == {"repeats": 1}


@pytest.mark.parametrize("content", ['{"settings"', "[]", '{"settings": {}}'])
def test_damaged_settings_are_refused(tmp_path, content):
    (tmp_path / "sweep.json").write_text(content)
    for read in (load, lambda folder: Store(folder, {})):
        with pytest.raises(cli.UsageError, match=r"sweep.json is damaged"):
            read(tmp_path)


def test_what_is_no_sweep_is_said_so(tmp_path):
    with pytest.raises(cli.UsageError, match="holds no sweep"):
        load(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(cli.UsageError, match="cannot be written"):
        Store(tmp_path / "file", {})
