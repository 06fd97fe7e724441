"""Which steps run before they are recorded, and what follows a failed recording. (On the device: tests/gpu.)"""

import contextlib

import pytest
import torch

from engine.worker import cuda_graphs
from engine.worker.cuda_graphs import Graphs


@pytest.fixture
def driver(monkeypatch):
    """In place of CUDA. Recording one of `refused` fails, as often as it is listed."""
    state = Driver()
    monkeypatch.setattr(cuda_graphs, "_failed", [])
    monkeypatch.setattr(cuda_graphs, "graph_pool_handle", state.new_pool)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", state.new_graph)
    monkeypatch.setattr(torch.cuda, "graph", state.recording)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "usual")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", state.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: state.released.append(pool), raising=False)
    return state


class Driver:
    def __init__(self):
        self.pools, self.open, self.released = 0, set(), []
        self.into, self.ran, self.recorded, self.refused = None, [], [], []
        self.ends_anyway = False

    def new_pool(self):
        self.pools += 1
        return self.pools

    def new_graph(self):
        return Graph()

    @contextlib.contextmanager
    def recording(self, graph, pool):
        assert pool not in self.open, "PyTorch refuses a pool that is being recorded into"
        self.open.add(pool)
        self.into = pool
        try:
            yield
        except RuntimeError:
            if self.ends_anyway:
                self.open.remove(pool)
            raise
        else:
            self.open.remove(pool)
        finally:
            self.into = None

    def end(self, device, pool):
        if pool not in self.open:
            raise RuntimeError("not currently recording to mempool_id")
        # The other allocator's part stays open: the pool is not to be used any more.

    def step(self, key):
        if self.into is None:
            self.ran.append(key)
        elif key in self.refused:
            self.refused.remove(key)
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        else:
            self.recorded.append((key, self.into))
        return torch.tensor(key)


class Graph:
    was_reset = False

    def reset(self):
        self.was_reset = True


def test_only_the_first_step_runs_before_it_is_recorded(driver):
    filled = []
    graphs = Graphs(driver.step, [8, 4, 2], None, fill=filled.append)
    assert (driver.ran, driver.recorded, filled) == ([8], [(8, 1), (4, 1), (2, 1)], [8, 4, 2])
    assert Graphs(driver.step, [3, 1], graphs.pool).pool == 1
    assert driver.ran == [8, 3]
    assert not driver.released


def test_after_a_failed_recording_steps_run_first_and_use_another_pool(driver, caplog):
    caplog.set_level("INFO")
    driver.refused = [4]
    graphs = Graphs(driver.step, [8, 4, 2], None)
    assert driver.ran == [8, 4, 2]
    assert driver.recorded == [(8, 1), (4, 2), (2, 2)]
    assert (len(graphs), graphs.pool, driver.released) == (3, 2, [1])
    [failed] = cuda_graphs._failed
    assert failed.was_reset
    assert failed not in [graph for graph, _ in graphs._graphs.values()]
    assert "not permitted when stream is capturing" in caplog.text
    assert "more" not in caplog.text.partition("capturing")[2]
    Graphs(driver.step, [3, 1], graphs.pool)
    assert driver.ran == [8, 4, 2, 3, 1]


def test_a_recording_that_ended_keeps_its_pool(driver):
    driver.refused, driver.ends_anyway = [4], True
    assert Graphs(driver.step, [8, 4], None).pool == 1
    assert not driver.released


@pytest.mark.parametrize("key", [8, 4])
def test_a_step_that_fails_again_after_it_ran_raises(driver, key):
    driver.refused = [key, key]
    with pytest.raises(RuntimeError, match="not permitted"):
        Graphs(driver.step, [8, 4, 2], None)
    assert len(cuda_graphs._failed) == 2
    assert driver.released == [1, 2], "the memory is given back"
