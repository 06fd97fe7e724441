"""Jobs by themselves: the unit's way to start one, their files, and what a front that comes late can still do."""

import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from checklist_kit import Desk, Front, forked, statuses
from typer.testing import CliRunner

from appliance.service import checklist, jobs
from appliance.service.installing import decode_options, encode_options, with_absolute_paths
from appliance.service.jobs import launch, spool
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import joined, t, told
from installer.base.layout import Layout
from installer.base.messages import decode, encode
from installer.decide.install_options import InstallOptions, ModelChoice, TlsChoice

SYSTEMD_RUN = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
start = next(i for i, word in enumerate(words) if not word.startswith("-"))
flags, command = words[:start], words[start:]
given = dict(flag.split("=", 1)[1].split("=", 1) for flag in flags if flag.startswith("--setenv="))
where = next(flag.split("=", 1)[1] for flag in flags if flag.startswith("--working-directory="))
open({log!r}, "w").write("\\n".join(words))
subprocess.Popen(command, env=given, cwd=where, start_new_session=True, stdin=subprocess.DEVNULL,
                 stdout=subprocess.DEVNULL, stderr=open({log!r} + ".err", "w"))
"""


@pytest.fixture
def systemd_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `systemd-run` that starts the command in a clean environment, as the unit would have it."""
    said = tmp_path / "systemd-run.words"
    script = tmp_path / "bin/systemd-run"
    script.parent.mkdir()
    script.write_text(SYSTEMD_RUN.format(python=sys.executable, log=str(said)))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(launch, "_booted", lambda layout: True)
    return said


def test_a_unit_does_the_same_work_from_its_spec_alone(desk: Desk, systemd_run: Path) -> None:
    with pytest.raises(InstallError, match="was not accepted") as caught:
        desk.run(accept_licenses=[])
    assert caught.value.exit_code == ExitCode.LICENCE
    assert desk.statuses() == statuses(gpu="green", model="failed")
    words = systemd_run.read_text().splitlines()
    assert "--collect" in words
    assert any(word.startswith("--unit=atoll-job-checklist-") for word in words)
    assert not [word for word in words if "KEY" in word.upper() and "key" not in word]


def test_an_install_of_a_unit_is_refused_with_the_same_words(desk: Desk, systemd_run: Path) -> None:
    from appliance.service.installing import run_install

    options = InstallOptions(desk.bundle, desk.site.prefix, trust_keys=[desk.site.key], port=desk.site.port)
    with pytest.raises(InstallError, match="The licence LicenseRef-Test of tiny") as caught:
        run_install(options, desk.layout, Front(), interactive=False)
    assert caught.value.exit_code == ExitCode.LICENCE
    assert not desk.site.prefix.exists()


def test_without_systemd_run_the_job_is_forked(desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch, "_booted", lambda layout: True)
    monkeypatch.setenv("PATH", str(tmp_path))
    desk.run("gpu")
    assert desk.statuses()["gpu"] == "green"


def test_a_job_is_done_once(desk: Desk) -> None:
    """A second process for a job that runs, or has ended, does nothing."""
    from appliance.service.jobs.process import run_process

    def never(frontend: object) -> dict:
        raise AssertionError

    seen: list[int] = []

    def second(step: str, status: str) -> None:
        job = jobs.newest(desk.layout)
        assert job is not None
        seen.append(run_process(job, never))

    desk.run("gpu", front=Front(at=second))
    second("", "")
    assert set(seen) == {int(ExitCode.BUSY)}
    assert desk.statuses()["gpu"] == "green"


def test_options_survive_the_way_to_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = with_absolute_paths(InstallOptions(
        bundle=Path("usb/model"), prefix=tmp_path, trust_keys=[Path("vendor.pub")], media=[Path("usb")],
        models=[ModelChoice(Path("usb/a"), "a", (0, "GPU-1234"), "cpu", {"max-model-len": 8192, "x": True, "y": 0.5}),
                ModelChoice("named", None)],
        tls=TlsChoice(Path("server.crt"), Path("server.key"), ("llm.example",), True), waivers={"egress": "known"},
    ))  # fmt: skip
    assert options.bundle == tmp_path / "usb/model"
    assert options.trust_keys == [tmp_path / "vendor.pub"]
    again = decode_options(json.loads(json.dumps(encode_options(options))))
    assert again == options


def test_a_message_keeps_its_id_over_the_file() -> None:
    inner = t("process {pid}", pid=812)
    text = joined([t("{port} is in use by {who}", port=8443, who=inner), "as it stands"], "; ")
    again = decode(json.loads(json.dumps(encode({"text": text, "n": 3, "list": [True, None, 1.5]}))))
    assert again["text"] == text
    assert told(again["text"], "ko") == told(text, "ko") != str(text)
    assert (again["n"], again["list"]) == (3, [True, None, 1.5])


def test_a_directory_that_others_may_write_to_is_refused(desk: Desk) -> None:
    root = spool.root_of(desk.layout)
    root.mkdir(parents=True)
    root.chmod(0o777)
    root.parent.chmod(0o700)
    with pytest.raises(InstallError, match="does not belong to this user alone"):
        desk.run("gpu")


def test_old_jobs_are_forgotten(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "KEPT", 2)
    for _ in range(4):
        desk.run("gpu")
    assert len(jobs.jobs(desk.layout)) == 3
    assert {job.state() for job in jobs.jobs(desk.layout)} == {"ended"}


def test_a_purge_leaves_no_job_of_this_installation(tmp_path: Path) -> None:
    ours, theirs = Layout.at(tmp_path / "ours"), Layout.at(tmp_path / "theirs")
    for layout in (ours, theirs):
        spool.make(layout, {"purpose": "install", "kind": "install"})
    spool.remove(ours)
    assert (jobs.jobs(ours), len(jobs.jobs(theirs))) == ([], 1)
    spool.remove(theirs)
    assert not spool.root_of(theirs).parent.exists()
    spool.remove(theirs)  # nothing is there any more


def test_progress_on_a_full_disk_costs_the_progress_only(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance.service.jobs.frontend import JobFrontend

    def full(self: JobFrontend, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JobFrontend, "_write_whole", full)
    result, _ = desk.run("gpu")
    assert result["steps"]["gpu"] == "green"


def test_a_question_waits_for_a_front_that_comes_back(desk: Desk) -> None:
    """The terminal is lost in front of the licence; another one attaches and answers."""

    class Gone(Front):
        def accept_licence(self, request: object) -> bool:
            os.kill(os.getpid(), 9)
            return True

    forked(lambda: desk.run(front=Gone(), interactive=True, accept_licenses=[]))
    job = jobs.newest(desk.layout)
    assert job is not None
    result, secrets = jobs.attach(job, front := Front())
    assert [request.model.split()[0] for request in front.asked] == ["atoll", "tiny"]
    assert result["done"]
    assert desk.site.ask(secrets["api_key"]) == 200


def test_an_install_goes_on_without_its_terminal(desk: Desk) -> None:
    """kill -9 of `atoll install` while it copies: the job installs to the end."""
    import functools

    from installer_kit import FAKE_SERVE

    from appliance.service.installing import run_install
    from installer.operate.install import Installer

    class Gone(Front):
        def step(self, name: str, status: str, detail: str = "") -> None:
            if (name, status) == ("stage", "begin"):
                os.kill(os.getpid(), 9)

    make = functools.partial(Installer, release_command=(sys.executable, "-S", "-E", str(FAKE_SERVE), "good"))
    options = InstallOptions(
        desk.bundle, desk.site.prefix, trust_keys=[desk.site.key], port=desk.site.port, device="cpu", confirmed=True,
        accept_licenses=desk.answers()["accept_licenses"], start_timeout=20.0,
    )  # fmt: skip
    forked(lambda: run_install(options, desk.layout, Gone(), interactive=False, make=make))
    assert desk.wait().state() == "ended"
    assert desk.site.serving()["mode"] == "good"
    result = run_install(options, desk.layout, Front(), interactive=False, make=make)
    assert result.outcome == "already-installed"
    assert result.api_key is not None  # nobody had seen the first one
    assert desk.site.ask(result.api_key) == 200


def test_the_commands_of_an_operator(tmp_path: Path) -> None:
    """`atoll checklist` and `atoll jobs` as programs, on an empty prefix."""
    prefix = tmp_path / secrets.token_hex(4)  # jobs of an earlier run are kept by the prefix's path
    environment = {**os.environ, "ATOLL_PREFIX": str(prefix), "COLUMNS": "120", "ATOLL_LANG": "en"}

    def atoll(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "appliance.cli", *words], capture_output=True, text=True,
                              timeout=60, env=environment, stdin=subprocess.DEVNULL)  # fmt: skip

    shown = json.loads(atoll("checklist", "show", "--json").stdout)
    assert {step["id"]: step["status"] for step in shown["steps"]} == statuses()
    assert shown["next_step"] == "gpu"
    assert "Next: atoll checklist run" in atoll("checklist").stdout
    assert atoll("checklist", "step", "nothing").returncode == ExitCode.USAGE
    assert atoll("jobs", "watch").returncode == ExitCode.USAGE
    assert not prefix.exists()
    began = time.monotonic()
    ran = atoll("checklist", "run", "--json")  # no medium: the machine is checked, then the model is asked for
    assert ran.returncode == ExitCode.USAGE, ran.stderr
    assert "Which bundle?" in json.loads(ran.stdout)["error"]
    assert time.monotonic() - began < 30
    (job,) = json.loads(atoll("jobs", "list", "--json").stdout)["jobs"]
    assert (job["state"], job["exit_code"]) == ("ended", ExitCode.USAGE)
    assert atoll("jobs", "watch", job["id"]).returncode == ExitCode.USAGE
    assert "already ended" in atoll("jobs", "cancel").stdout
    assert "Open again: gpu, model, install" in atoll("checklist", "reset").stdout
    assert atoll("checklist", "export").stdout.startswith("schema_version")
    assert checklist.show(Layout.at(prefix)).first is not None


@pytest.mark.parametrize("name", ["install", "upgrade"])
def test_a_job_is_named_after_its_command(desk: Desk, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance.cli.install import install

    purposes: list[str] = []

    def run_install(*_: object, purpose: str, **__: object) -> None:
        purposes.append(purpose)
        raise InstallError("enough seen", exit_code=ExitCode.USAGE)

    monkeypatch.setattr(install, "run_install", run_install)
    monkeypatch.setattr(install, "history_of", lambda layout: SimpleNamespace(committed={}))
    app = typer.Typer()
    install.register(app)
    CliRunner().invoke(app, [name, "--bundle", str(desk.bundle), "--prefix", str(desk.site.prefix)])
    assert purposes == [name]
