"""GPU facts from a scripted nvidia-smi and from a library that looks like NVML, healthy and broken."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from preflight_kit import DATA, FakeSmi, on_path, without_nvml

from installer import gpu
from installer.base import proc
from installer.gpu import nvml, smi, smi_xml, values
from installer.gpu.command import MAX_OUTPUT, clean, run
from installer.gpu.facts import Gpu, GpuFacts, GpuProcess, merge

MIB = 1 << 20


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSmi:
    made = FakeSmi(tmp_path / "bin")
    monkeypatch.setenv("PATH", on_path(made.directory))
    without_nvml(tmp_path, monkeypatch)
    return made


# -- what a real H100 says


def test_the_report_of_a_real_h100() -> None:
    facts = smi_xml.parse((DATA / "h100.xml").read_text())
    assert (facts.driver, facts.cuda, len(facts.gpus)) == ("580.159.04", (13, 0), 1)
    found = facts.gpus[0]
    assert found == Gpu(
        index=0, uuid="GPU-00000000-1111-2222-3333-444444444444", pci="0000:00:06.0", minor=0,
        name="NVIDIA H100 80GB HBM3", memory_total=81559 * MIB, memory_used=0, memory_free=81079 * MIB,
        persistence=True, compute_mode="default", mig=False, ecc=True, ecc_corrected=0, ecc_uncorrected=0,
        remap_pending=False, remap_failed=False, pcie_gen=5, pcie_width=16, pcie_width_max=16,
        power_draw=102.17, power_limit=700.0, power_default=700.0, temperature=34,
    )  # fmt: skip


def test_the_query_of_a_real_h100() -> None:
    header, line = (DATA / "h100.csv").read_text().splitlines()
    names = [column.partition(" ")[0] for column in header.split(", ")]
    known = [name for name in names if name in smi.FIELDS]
    cells = [cell for name, cell in zip(names, line.split(", "), strict=True) if name in smi.FIELDS]
    facts = smi.parse_csv(", ".join(cells), known)
    assert facts.driver == "580.159.04"
    found = facts.gpus[0]
    assert (found.compute_cap, found.memory_total, found.pcie_width) == ((9, 0), 81559 * MIB, 16)
    assert (found.mig, found.ecc, found.ecc_uncorrected) == (False, True, 0)
    assert (found.power_draw, found.power_limit) == (96.99, 700.0)


def test_a_healthy_nvidia_smi(fake: FakeSmi) -> None:
    facts = gpu.collect()
    assert facts.sources == ("nvidia-smi",)
    assert "not installed" in facts.nvml_error
    assert facts.smi_error == ""
    assert (facts.driver, facts.cuda) == ("580.159.04", (13, 0))
    assert facts.gpus[0].compute_cap == (9, 0)
    assert facts.gpus[0].remap_pending is False
    json.dumps(facts.to_json())


# -- what goes wrong


def test_no_such_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    without_nvml(tmp_path, monkeypatch)
    monkeypatch.setattr(smi, "_PLACES", ())
    facts = gpu.collect()
    assert not facts.answered
    assert facts.smi_error == "nvidia-smi: command not found"


def test_a_field_that_this_version_does_not_know_is_left_out(fake: FakeSmi) -> None:
    fake.plan(unknown_fields=["power.default_limit", "pcie.link.width.max"])
    facts = smi.query()
    assert facts.gpus[0].compute_cap == (9, 0)
    assert facts.gpus[0].power_default == 700.0  # from the report
    queries = [arguments for arguments, _ in fake.calls if "--query-gpu" in arguments]
    assert len(queries) == 3
    assert "power.default_limit" not in queries[-1]


@pytest.mark.parametrize(("fault", "knows"), [("no-csv", "name"), ("no-xml", "compute_cap")])
def test_one_form_of_output_is_enough(fake: FakeSmi, fault: str, knows: str) -> None:
    fake.plan(fault=fault)
    facts = smi.query()
    assert getattr(facts.gpus[0], knows) is not None
    assert facts.gpus[0].memory_total == 81559 * MIB


@pytest.mark.parametrize("said", ["[N/A]", "[Not Supported]", "[Unknown Error]", "ERR!", "", "N/A", "[GPU is lost]"])
def test_values_that_are_none(fake: FakeSmi, said: str) -> None:
    fake.change(
        fb_memory_usage__total=said, mig_mode__current_mig=said, compute_mode=said, ecc_mode__current_ecc=said,
        gpu_power_readings__current_power_limit=said, product_name=said,
    )  # fmt: skip
    found = smi.query().gpus[0]
    given = (found.memory_total, found.mig, found.compute_mode, found.ecc, found.power_limit, found.name)
    assert given == (None,) * 6
    assert found.uuid


@pytest.mark.parametrize(
    ("fault", "word"),
    [("mismatch", "Driver/library version mismatch"), ("unknown-error", "Unknown Error"), ("die", "exit status -11")],
)
def test_a_driver_that_does_not_answer(fake: FakeSmi, fault: str, word: str) -> None:
    fake.plan(fault=fault)
    facts = smi.query()
    assert not facts.answered
    assert word in facts.smi_error


def test_a_hung_nvidia_smi_is_killed_and_not_asked_again(fake: FakeSmi) -> None:
    fake.plan(fault="hang")
    began = time.monotonic()
    facts = smi.query(budget=3.0)
    assert time.monotonic() - began < 10
    assert "no answer" in facts.smi_error
    assert len(fake.calls) == 1
    assert not Path(f"/proc/{fake.calls[0][1]}").exists()


def test_endless_output_is_cut_off(fake: FakeSmi) -> None:
    fake.plan(fault="endless")
    began = time.monotonic()
    assert smi.query().smi_error == "nvidia-smi: endless output"
    assert time.monotonic() - began < 20


def test_a_command_that_leaves_a_child_behind_is_gone_with_it(tmp_path: Path) -> None:
    pidfile = tmp_path / "pid"
    output = run(["sh", "-c", f"sleep 300 & echo $! > {pidfile}; sleep 300"], 2.0)
    assert output.problem
    pid = int(pidfile.read_text())
    deadline = time.monotonic() + 30
    while proc.start_time(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert proc.start_time(pid) is None


def test_names_cannot_write_to_the_terminal(fake: FakeSmi) -> None:
    assert clean("GPU\x1b[2J\r\nevil\u202e" + "x" * 5000) == ("GPU [2J evil " + "x" * 5000)[:160]


# -- garbage


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=2000))
def test_garbage_never_breaks_a_parser(text: str) -> None:
    assert isinstance(smi.parse_csv(text, list(smi.FIELDS)), GpuFacts)
    assert isinstance(smi_xml.parse(text), GpuFacts)
    assert isinstance(nvml.parse(text), GpuFacts)
    for read in (values.word, values.number, values.count, values.size, values.switch, values.pair, values.driver,
                 values.pci, values.uuid, values.compute_mode):  # fmt: skip
        read(text)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=30), st.sampled_from(["[N/A]", "580.1", "1e999", "-5", "9" * 40, "0x10"])),
                min_size=len(smi.FIELDS), max_size=len(smi.FIELDS)))  # fmt: skip
def test_garbage_in_the_cells(cells: list[str]) -> None:
    facts = smi.parse_csv(", ".join(cells), list(smi.FIELDS))
    for found in facts.gpus:
        assert found.memory_total is None or 0 <= found.memory_total < 1 << 50
        assert found.index is None or 0 <= found.index <= 1024
    json.dumps(facts.to_json())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=20,
)
gpu_like = st.dictionaries(st.sampled_from(["uuid", "index", "memory_total", "processes", "compute_cap", "mig",
                                            "power_limit", "name", "pci"]), json_values)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.fixed_dictionaries(
    {},
    optional={"gpus": st.lists(gpu_like, max_size=3) | json_values, "cuda": json_values, "driver": json_values,
              "problems": json_values, "error": json_values},
))  # fmt: skip
def test_garbage_from_a_library(data: dict[str, object]) -> None:
    facts = nvml.parse(json.dumps(data))
    json.dumps(facts.to_json(), allow_nan=False)


@pytest.mark.parametrize("seed", range(6))
def test_random_bytes_from_the_program(fake: FakeSmi, seed: int) -> None:
    import random

    (fake.directory / "garbage").write_bytes(random.Random(seed).randbytes(20_000))
    fake.plan(fault="garbage")
    began = time.monotonic()
    facts = gpu.collect()
    assert time.monotonic() - began < 20
    assert facts.gpus == ()
    assert facts.smi_error


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 27_000), st.binary(min_size=1, max_size=8))
def test_a_report_with_flipped_bytes(at: int, junk: bytes) -> None:
    data = bytearray((DATA / "h100.xml").read_bytes())
    data[at : at + len(junk)] = junk
    smi_xml.parse(data.decode("utf-8", "replace"))


def test_entities_depth_and_length_are_refused() -> None:
    bomb = '<!DOCTYPE a [<!ENTITY x "ha"><!ENTITY y "&x;&x;">]>'
    assert smi_xml.parse(f"{bomb}<nvidia_smi_log><gpu id='0'><uuid>&y;</uuid></gpu></nvidia_smi_log>") == GpuFacts()
    outside = '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]>'
    assert smi_xml.parse(f"{outside}<nvidia_smi_log><gpu><uuid>&x;</uuid></gpu></nvidia_smi_log>") == GpuFacts()
    assert smi_xml.parse("<a>" * 50 + "</a>" * 50) == GpuFacts()
    many = "<nvidia_smi_log>" + "<gpu id='00000000:00:06.0'/>" * 5000 + "</nvidia_smi_log>"
    assert len(smi_xml.parse(many).gpus) == 64
    assert smi_xml.parse("<nvidia_smi_log>" + "<x/>" * (smi_xml.MAX_ELEMENTS + 1) + "</nvidia_smi_log>") == GpuFacts()
    assert 64 * len((DATA / "h100.xml").read_bytes()) < MAX_OUTPUT


# -- both sources together


def test_merge_believes_the_first_and_fills_from_the_second() -> None:
    first = GpuFacts((Gpu(index=0, uuid="GPU-aaaaaaaa", memory_total=5, processes=(GpuProcess(7, used=3),)),),
                     driver="580.1", sources=("NVML",))  # fmt: skip
    second = GpuFacts(
        (Gpu(index=0, uuid="GPU-aaaaaaaa", memory_total=9, name="H100", processes=(GpuProcess(7, "python", 4),)),
         Gpu(index=1, uuid="GPU-bbbbbbbb")),
        driver="570.1", cuda=(13, 0), sources=("nvidia-smi",),
    )  # fmt: skip
    both = merge(first, second)
    assert (both.driver, both.cuda, both.sources) == ("580.1", (13, 0), ("NVML", "nvidia-smi"))
    assert [found.memory_total for found in both.gpus] == [5, None]
    assert both.gpus[0].name == "H100"
    assert both.gpus[0].processes == (GpuProcess(7, "python", 3),)
    assert replace(both.gpus[0], uuid=None, pci=None).is_the_same_as(Gpu(index=0))


# -- NVML: a library that answers as a script says


needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the fake NVML with")


@pytest.fixture(scope="session")
def fake_nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("nvml")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", directory / "libnvidia-ml.so.1", DATA / "fake_nvml.c"], check=True
    )  # fmt: skip
    return directory


@pytest.fixture
def nvml_says(fake_nvml: Path, monkeypatch: pytest.MonkeyPatch):
    def says(**plan: str) -> GpuFacts:
        monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_nvml))
        for name, value in plan.items():
            monkeypatch.setenv(f"FAKE_NVML_{name.upper()}", value)
        return nvml.query(budget=float(plan.get("budget", "6")))

    return says


@needs_compiler
def test_nvml_of_a_healthy_gpu(nvml_says) -> None:
    facts = nvml_says()
    assert (facts.driver, facts.cuda, facts.nvml_error, facts.sources) == ("580.159.04", (13, 0), "", ("NVML",))
    assert facts.gpus == (
        Gpu(
            index=0, uuid="GPU-00000000-1111-2222-3333-444444444444", pci="0000:00:06.0", minor=0,
            name="NVIDIA H100 80GB HBM3", compute_cap=(9, 0), memory_total=81559 * MIB, memory_used=1024 * MIB,
            memory_free=80055 * MIB, persistence=True, compute_mode="default", mig=False, ecc=True, ecc_corrected=2,
            ecc_uncorrected=0, remap_pending=True, remap_failed=False, pcie_gen=5, pcie_width=16, pcie_width_max=16,
            power_draw=96.99, power_limit=700.0, power_default=700.0, temperature=34,
            processes=(GpuProcess(4242, used=1024 * MIB),),
        ),
    )  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(
    ("plan", "word"),
    [
        ({"init": "18"}, "Driver/library version mismatch"),
        ({"init": "999"}, "Unknown Error"),
        ({"init": "9"}, "Driver Not Loaded"),
        ({"crash": "1"}, "signal 11"),
        ({"hang": "1", "budget": "0.7"}, "no answer within"),
        ({"lost": "1"}, "GPU is lost"),
    ],
)
def test_nvml_that_fails(nvml_says, plan: dict[str, str], word: str) -> None:
    began = time.monotonic()
    facts = nvml_says(**plan)
    assert word in facts.nvml_error
    assert time.monotonic() - began < 15


@needs_compiler
def test_nvml_with_an_older_library(nvml_says) -> None:
    """What a GPU does not support is missing, not an error."""
    found = nvml_says(old="1").gpus[0]
    assert (found.ecc, found.mig, found.remap_pending, found.power_default) == (None, None, None, None)
    assert found.memory_total == 81559 * MIB


def test_the_probe_needs_nothing_but_python() -> None:
    output = run([sys.executable, "-I", "-S", str(Path(nvml.__file__).with_name("nvml_probe.py"))], 10)
    assert output.code == 0
    assert ("error" in json.loads(output.stdout)) is not os.path.exists("/dev/nvidiactl")
