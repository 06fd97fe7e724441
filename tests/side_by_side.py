"""Runs the tests as several processes side by side, so that both waiting and computing tests fill a small machine.

    python tests/side_by_side.py [SUITE ...] [PROCESSES]

The suites are those of the make targets; without a name it is `make test`. `.ci/run` names all of them: their parts
then share one set of processes, and no core waits for the end of a suite. Three processes if nobody says otherwise,
three more for the parts that mostly wait, and one for what only fills the time that all others leave. Each part is a
process of its own and starts as soon as one is free, in the order of the suites. A part that passes prints its last
line, one that fails everything. Its CPU seconds include the processes that it has waited for; services that outlived
the command that started them are not counted.
The exit status is 1 if any part failed.
"""

import compileall
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WAITING_PROCESSES = 3
# Triton's interpreter is one thread of Python. Steps of tiny models are too short to divide, and the threads of three
# processes wait for one another. Engines with several threads run in the other parts, and in the suite of CPUs.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Part:
    """A process of a suite. `waits`: it takes several times more seconds than CPU seconds, so it starts at once and
    takes no place from those that compute. `fills`: it is long, and nothing in it looks at the clock, so it starts at
    once and gives way to all others. `shown`: its output matters even if it passes."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    waits: bool = False
    fills: bool = False
    shown: bool = False


def pytest(*arguments: str, schemathesis: bool = False) -> list[str]:
    """Without the plugin that takes a second to import; only the server's tests use it."""
    plugins = [] if schemathesis else ["-p", "no:schemathesis"]
    return [sys.executable, "-m", "pytest", *plugins, *arguments]


def without(paths: Iterable[str]) -> list[str]:
    return [f"--ignore={path}" for path in paths]


def files(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


KERNELS = "tests/engine/kernels"
OF_TRITON = files(f"{KERNELS}/**/test_triton_*.py")
SELFTEST = f"{KERNELS}/selftest"
KILLED_INSTALLS = [f"tests/installer/operate/test_{name}.py"
                   for name in ("install_kill", "install_server_kill", "boot_recovery", "settings_trial")]  # fmt: skip
PROCESSES = ["tests/engine/server/process", "tests/engine/server/cli"]
CONNECTIONS = "tests/engine/server/http"
SCREENS = [f"tests/tui/test_{name}.py" for name in ("screens", "snapshots", "trouble_screens")]
NOT_ENGINE = [f"tests/engine/{name}" for name in ("kernels", "models", "server", "test_oracle.py")]
TUNING = "tests/appliance/service/test_tune_real.py"
KILLED = f"{TUNING}::test_killed_at_every_recorded_point_it_goes_on_and_the_service_stays"
VERIFIED = ["tests/appliance/service/test_checklist_real.py", "tests/appliance/service/verification"]

# Parts whose fixtures are dear and shared (engines, bundles, installs) stay whole. The longest come first, and a short
# part at the end lets all processes end at about the same time.
TESTS = {
    "screens": Part(pytest(*SCREENS), ONE_THREAD, waits=True),
    "terminal": Part(pytest("tests/tui", *without(SCREENS)), ONE_THREAD, waits=True),
    "connections": Part(pytest(CONNECTIONS), ONE_THREAD, waits=True),
    "checklist": Part(pytest("tests/appliance/service")),
    "installer": Part(pytest("tests/installer", *without(KILLED_INSTALLS))),
    "engine": Part(pytest("tests/engine", *without(NOT_ENGINE)), ONE_THREAD),
    "processes": Part(pytest(*PROCESSES), ONE_THREAD),
    "bundles": Part(pytest("tests/offline_bundle")),
    "models": Part(pytest("tests/engine/models", "tests/engine/test_oracle.py"), ONE_THREAD),
    "server": Part(pytest("tests/engine/server", *without([*PROCESSES, CONNECTIONS]), schemathesis=True), ONE_THREAD),
    "appliance": Part(pytest("tests/appliance", "--ignore=tests/appliance/service", "tests/test_imports.py")),
    "killed installs": Part(pytest(*KILLED_INSTALLS), waits=True),
    "fuzzers": Part(pytest("tests/fuzz")),
}
# GPU kernels and the steps around them, in Triton's interpreter.
OF_KERNELS = {
    "kernels' other tests": Part(pytest(KERNELS, *without([*OF_TRITON, SELFTEST])), ONE_THREAD),
    "kernels in Triton's interpreter": Part(pytest(*OF_TRITON), ONE_THREAD),
    "kernels' self-test": Part(pytest(SELFTEST), ONE_THREAD),
}
# Real installations, tuned, verified, piloted, and killed in between.
INSTALLATIONS = {
    "installations, tuned": Part(pytest("-m", "slow", TUNING, f"--deselect={KILLED}"), waits=True),
    "installations, killed while tuning": Part(pytest("-m", "slow", KILLED), waits=True),
    "installations, verified and piloted": Part(pytest("-m", "slow", *VERIFIED), waits=True),
    "installations, in a terminal": Part(pytest("-m", "slow", "tests/tui/test_wizard_real.py"), waits=True),
}
COMPILED = {"kernels, compiled": Part(pytest("-m", "slow", f"{KERNELS}/test_triton_compile.py"), fills=True)}
# What a model answers, as kinds of CPUs compute it. Variables limit oneDNN, PyTorch's own kernels and FBGEMM.
ANSWERS = os.environ.get("PYTEST", "").split() or [
    f"tests/engine/{name}.py" for name in ("layers/test_fp16_weight", "test_llm", "server/openai/test_openai_client")
]
AMX = "amx_tile" in Path("/proc/cpuinfo").read_text("utf-8")  # `make test` runs without it
CPUS = {
    **({"with every instruction of this CPU": {"ONEDNN_MAX_CPU_ISA": "DEFAULT"}} if AMX else {}),
    "as a CPU without bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "as a CPU with AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2",
                           "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2"},
    "with PyTorch's portable kernels": {"ATEN_CPU_CAPABILITY": "default"},
}  # fmt: skip
# Of `make test-appliance` the part for which there is time: one distribution, and no kills.
LIFE, KILLS = "tests/boot/test_boot_life.py", "tests/boot/test_boot_kill.py"
MACHINES = {
    name: Part(pytest("-m", "boot", "-rs", "-v", "--timeout=2400", *paths), {"ATOLL_BOOT_SUITES": "bookworm"},
               waits=True, shown=True)
    for name, paths in {
        "machines that boot, a server's life": [LIFE],
        "machines that boot, all else": ["tests/boot", *without([LIFE, KILLS])],
    }.items()
}  # fmt: skip
SUITES: dict[str, dict[str, Part]] = {
    "lint": {"lint": Part(["make", "lint"])},
    "tests": TESTS,
    "installations": INSTALLATIONS,
    "machines": MACHINES,
    "compile": COMPILED,
    "kernels": OF_KERNELS,
    "cpus": {name: Part(pytest(*ANSWERS), variables) for name, variables in CPUS.items()},
}  # fmt: skip


class Run:
    """The processes of one call."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen] = set()
        self._lock, self._stopped = threading.Lock(), threading.Event()

    def part(self, name: str, part: Part) -> bool:
        """Whether it passed."""
        start = time.monotonic()
        with self._lock:
            if self._stopped.is_set():
                return False
            process = subprocess.Popen(
                [*(["nice", "-n", "19"] if part.fills else []), *part.command], cwd=ROOT,
                env=os.environ | part.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            self._running.add(process)
        assert process.stdout is not None
        with process.stdout:
            output = process.stdout.read()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a child that can be terminated
        with self._lock:
            self._running.discard(process)
            if self._stopped.is_set():
                return False
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            passed = process.returncode == 0
            lines = output.strip().splitlines() or [""]
            cpu = used.ru_utime + used.ru_stime
            print(f"{name}: {time.monotonic() - start:.0f} s, {cpu:.0f} s CPU", flush=True)
            print("\n".join(lines[-1:] if passed and not part.shown else lines), flush=True)
        return passed

    def stop(self) -> None:
        self._stopped.set()
        with self._lock:
            for process in self._running:
                process.terminate()  # fixtures end what they started


def main() -> int:
    asked = sys.argv[1:]
    processes = int(asked.pop()) if asked and asked[-1].isdecimal() else 3
    suites = asked or ["tests"]
    if unknown := [suite for suite in suites if suite not in SUITES]:
        sys.exit(f"There is no suite {', '.join(unknown)}. There are: {', '.join(SUITES)}.")
    # Services write no bytecode, and would compile their code at each start.
    for room in ("appliance", "engine", "installer", "offline_bundle", "tui"):
        compileall.compile_dir(ROOT / room, quiet=2, workers=processes)
    began, run = time.monotonic(), Run()
    computing, waiting, filling = map(ThreadPoolExecutor, (processes, WAITING_PROCESSES, 1))
    begun = {}
    for suite in suites:
        for name, part in SUITES[suite].items():
            pool = waiting if part.waits else filling if part.fills else computing
            begun[suite, name] = pool.submit(run.part, name, part)
    try:
        results = {key: part.result() for key, part in begun.items()}
    except KeyboardInterrupt:
        run.stop()
        for pool in (computing, waiting, filling):
            pool.shutdown(cancel_futures=True)
        return 130
    failed = [name for (_, name), passed in results.items() if not passed]
    print(f"{len(begun) - len(failed)} of {len(begun)} parts passed in {time.monotonic() - began:.0f} s"
          + "".join(f"\nFAILED: {name}" for name in failed))  # fmt: skip
    if len(suites) > 1:
        for suite in suites:
            passed = all(passed for (each, _), passed in results.items() if each == suite)
            print(f"{suite}: {'passed' if passed else 'FAILED'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
