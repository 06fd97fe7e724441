"""Runs the tests as several processes side by side, so that both waiting and computing tests fill a small machine.

    python tests/side_by_side.py [kernels|installations] [PROCESSES]

Without a name these are the tests of `make test`. `kernels`: GPU kernels and the steps around them, in Triton's
interpreter. `installations`: those that take whole installations through their lives.
Three processes if nobody says otherwise, and two more for the parts that mostly wait. Each part is a pytest of its
own, the longest first. A part that passes prints its last line, one that fails everything. Its CPU seconds include the
processes that it has waited for; services that outlived the command that started them are not counted.
The exit status is 1 if any part failed.
"""

import compileall
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNELS = "tests/engine/kernels"
OF_TRITON = sorted(str(path.relative_to(ROOT)) for path in (ROOT / KERNELS).glob("test_triton_*.py"))
SELFTEST = sorted(str(path.relative_to(ROOT)) for path in (ROOT / KERNELS).glob("test_selftest*.py"))

KILLED_INSTALLS = [f"tests/installer/operate/test_{name}.py"
                   for name in ("install_kill", "install_server_kill", "boot_recovery", "settings_trial")]  # fmt: skip
PROCESSES = ["tests/engine/server/process", "tests/engine/server/cli"]
CONNECTIONS = ["tests/engine/server/http"]
SCREENS = [f"tests/tui/test_{name}.py" for name in ("screens", "snapshots", "trouble_screens")]


def without(paths: list[str]) -> list[str]:
    return [f"--ignore={path}" for path in paths]


# Parts whose fixtures are dear and shared (engines, bundles, installs) stay whole. A short part at the end lets both
# cores end at about the same time.
PARTS = {
    "screens": SCREENS,
    "terminal": ["tests/tui", *without(SCREENS)],
    "connections": CONNECTIONS,
    "checklist": ["tests/appliance/service"],
    "installer": ["tests/installer", *without(KILLED_INSTALLS)],
    "engine": ["tests/engine", *without([f"tests/engine/{name}" for name in
               ("kernels", "models", "server", "test_oracle.py")])],
    "processes": PROCESSES,
    "bundles": ["tests/offline_bundle"],
    "models": ["tests/engine/models", "tests/engine/test_oracle.py"],
    "killed installs": KILLED_INSTALLS,
    "server": ["tests/engine/server", *without([*PROCESSES, *CONNECTIONS])],
    "appliance": ["tests/appliance", "--ignore=tests/appliance/service", "tests/test_imports.py"],
    "fuzzers": ["tests/fuzz"],
}  # fmt: skip
KERNELS_PARTS = {
    "kernels' other tests": [KERNELS, *without([*OF_TRITON, *SELFTEST])],
    "kernels in Triton's interpreter": OF_TRITON,
    "kernels' self-test": SELFTEST,
}  # fmt: skip
TUNING = "tests/appliance/service/test_tune_real.py"
KILLED = f"{TUNING}::test_killed_at_every_recorded_point_it_goes_on_and_the_service_stays"
# Real installations, tuned, verified, piloted, and killed in between.
INSTALLATIONS = {
    "tuning, killed": [KILLED],
    "tuning": [TUNING, f"--deselect={KILLED}"],
    "terminal": ["tests/tui/test_wizard_real.py"],
    "checklist": ["tests/appliance/service/test_checklist_real.py", "tests/appliance/service/verification"],
}
# Several times more seconds than CPU seconds: they start at once, and take no place from those that compute.
WAITING = {"screens", "terminal", "connections"}
WAITING_PROCESSES = 2
# Its plugin takes a second to import; only the server's tests use it.
NO_SCHEMATHESIS = ["-p", "no:schemathesis"]
# Triton's interpreter is one thread of Python. Steps of tiny models are too short to divide, and the threads of three
# processes wait for one another. Engines with several threads run in the other parts, and in `make test-cpus`.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
WITH_ONE_THREAD = {*KERNELS_PARTS, "models", "server", "processes", "connections", "screens", "terminal"}


def main() -> int:
    asked = sys.argv[1:]
    parts, slow = PARTS, []
    if asked[:1] == ["kernels"]:
        asked, parts = asked[1:], KERNELS_PARTS
    elif asked[:1] == ["installations"]:
        asked, parts, slow = asked[1:], INSTALLATIONS, ["-m", "slow"]
    processes = int(asked[0]) if asked else 3
    # Services write no bytecode, and would compile their code at each start.
    for room in ("appliance", "engine", "installer", "offline_bundle", "tui"):
        compileall.compile_dir(ROOT / room, quiet=2, workers=processes)
    running: set[subprocess.Popen] = set()
    lock, stopped, began = threading.Lock(), threading.Event(), time.monotonic()

    def run(name: str) -> bool:
        environment = os.environ | (ONE_THREAD if parts is not INSTALLATIONS and name in WITH_ONE_THREAD else {})
        plugins = [] if name == "server" else NO_SCHEMATHESIS
        command = [sys.executable, "-m", "pytest", *plugins, *slow, *parts[name]]
        start = time.monotonic()
        with lock:
            if stopped.is_set():
                return False
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            running.add(process)
        assert process.stdout is not None
        with process.stdout:
            output = process.stdout.read()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a child that can be terminated
        with lock:
            running.discard(process)
            if stopped.is_set():
                return False
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            passed = process.returncode == 0
            lines = output.strip().splitlines() or [""]
            cpu = used.ru_utime + used.ru_stime
            print(f"{name}: {time.monotonic() - start:.0f} s, {cpu:.0f} s CPU", flush=True)
            print("\n".join(lines[-1:] if passed else lines), flush=True)
        return passed

    waiting = WAITING if parts is PARTS else set()
    computing, beside = ThreadPoolExecutor(processes), ThreadPoolExecutor(WAITING_PROCESSES)
    begun = {name: (beside if name in waiting else computing).submit(run, name) for name in parts}
    try:
        results = {name: part.result() for name, part in begun.items()}
    except KeyboardInterrupt:
        stopped.set()
        with lock:
            for process in running:
                process.terminate()  # fixtures end what they started
        for pool in (computing, beside):
            pool.shutdown(cancel_futures=True)
        return 130
    failed = [name for name, passed in results.items() if not passed]
    print(f"{len(parts) - len(failed)} of {len(parts)} parts passed in {time.monotonic() - began:.0f} s"
          + "".join(f"\nFAILED: {name}" for name in failed))  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
