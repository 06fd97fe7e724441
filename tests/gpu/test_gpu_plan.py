"""`atoll plan` without a GPU against the plan of an engine that starts on this one, for every model we measure with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import engine
from engine.config import EngineConfig
from engine.plan import PlannedGpu, plan_engine

pytestmark = [pytest.mark.gpu, pytest.mark.alone]  # each engine takes its share of the whole GPU

CONFIGS = sorted((Path(engine.__file__).parent / "bench" / "configs").iterdir())
FLAGS = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 4096, "gpu_memory_utilization": 0.9}
STARTED = """
import json, logging, sys
from pathlib import Path
from engine.config import EngineConfig
from engine.worker.startup.build import build_engine
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
build_engine(EngineConfig(Path(sys.argv[1]), **json.loads(sys.argv[2])))
"""


@pytest.mark.parametrize("model", CONFIGS, ids=lambda path: path.name)
def test_the_planners_pages_are_within_three_percent_of_the_engines(model: Path) -> None:
    if torch.cuda.get_device_properties(0).total_memory < 70 << 30:
        pytest.skip("needs a GPU of 80 GB")
    large = sum(size in model.name for size in ("26b", "27b", "30b", "31b", "35b", "8x7b"))
    flags = FLAGS | ({"quantization": "fp8"} if large else {})
    ended = subprocess.run(
        [sys.executable, "-c", STARTED, str(model), json.dumps(flags)], capture_output=True, text=True, timeout=300,
        env=os.environ,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    line = next(line for line in ended.stdout.splitlines() if line.startswith("Planned memory in numbers: "))
    found = json.loads(line.partition(": ")[2])
    gpu = PlannedGpu(torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1], torch.cuda.get_device_capability())
    planned = plan_engine(EngineConfig(model, **flags), gpu).numbers()
    print(model.name, "planned", planned["parts"], "found", found["parts"])
    assert planned["parts"]["weights"] == pytest.approx(found["parts"]["weights"], rel=0.001)
    assert planned["kv_cache"] == pytest.approx(found["kv_cache"], rel=0.03)
