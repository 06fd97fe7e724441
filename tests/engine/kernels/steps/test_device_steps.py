"""Whole steps of the GPU's runner, of prompts and of answers, give what the CPU's gives."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent


@pytest.fixture
def said_by(interpreting):
    def said(script, *arguments):
        done = interpreting.run(HERE / script, *arguments)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    return said


def assert_alike(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]
        assert [score for _, score in one] == pytest.approx([score for _, score in other], abs=1e-3)


@pytest.mark.parametrize("family", ["qwen3", "gemma4-e2b"])  # the second has layers that go on with the last tokens
def test_steps_score_as_on_the_cpu(said_by, family):
    said = said_by("run_steps.py", family)
    assert [len(request) for request in said["cpu"]] == [2, 3, 4]
    assert_alike(said["gpu"], said["cpu"])


def test_answers_do_not_depend_on_whether_a_shared_prefix_is_read_once(said_by):
    said = said_by("run_shared_prefix.py")
    assert [len(request) for request in said["cpu"]] == list(range(14, 2, -1))
    assert_alike(said["gpu"], said["cpu"])
    assert_alike(said["gpu"], said["alone"])
    shared = [step for step in said["shared"] if step is not None]
    assert {tokens for step in shared for tokens in step} == {0, 48}, "three whole pages, or nothing"
    assert max(map(sum, shared)) == 48 * 10
    assert min(map(len, shared)) >= 8
    assert any(0 in step for step in shared)
