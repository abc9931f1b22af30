"""Run every lesson of lessons.toml: it ends well, and its checks pass."""

import tomllib

import pytest
from conftest import REPO, results_of

LESSONS = tomllib.loads((REPO / "tests" / "lessons.toml").read_text())


@pytest.mark.parametrize("script", LESSONS)
def test_a_lesson_passes_its_checks(run_script, tmp_path, script):
    lesson = LESSONS[script]
    words = (*lesson["flags"].split(), "--output-dir", tmp_path / "run")
    ended = run_script(script, *words, world_size=lesson["ranks"])
    assert ended.codes == [0] * lesson["ranks"], ended.stdout + ended.stderr
    checks = results_of(tmp_path / "run")["checks"]
    assert len(checks) == lesson["checks"]
    assert all(check["ok"] for check in checks), checks
    last = ended.stdout.splitlines()[-1]
    assert last.startswith(f"OK: {len(checks)} check")
