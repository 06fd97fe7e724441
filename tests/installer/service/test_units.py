"""The unit templates, filled in: their content, that systemd accepts them without a warning, and how exposed they
are."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from installer.base.errors import InstallError
from installer.base.layout import Layout
from installer.service import units

GOLDEN = Path(__file__).parent / "data" / "units"
MODELS = ["chat", "qwen3-8b"]


def rendered(root: Path, **options: object) -> dict[str, str]:
    """name → content of everything that is rendered for a server at `root`."""
    files = units.render(Layout.server(root), MODELS, **options)  # type: ignore[arg-type]
    return {file.path.relative_to(root).as_posix(): file.content for file in files}


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """A server's tree with all files, and an `atoll` for the units to name."""
    layout = Layout.server(tmp_path)
    (tmp_path / "opt/atoll/current/bin").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    for program in ("opt/atoll/current/bin/atoll", "bin/rm", "bin/kill"):
        shutil.copy("/bin/true", tmp_path / program)
    shutil.copytree("/lib/systemd/system", tmp_path / "lib/systemd/system", symlinks=True)  # what ours refer to
    units.write(units.render(layout, MODELS, host="0.0.0.0"))
    return tmp_path


@pytest.mark.parametrize("name", ["atoll-engine@.service", "atoll-gateway.service", "atoll-gateway.socket"])
def test_what_stands_in_them_is_what_was_agreed(tmp_path: Path, name: str):
    """Word for word: a change of a sandbox is meant, or it is a mistake. `UPDATE_GOLDEN=1` writes it anew."""
    import os

    content = rendered(tmp_path, host="0.0.0.0")[f"etc/systemd/system/{name}"]
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.mkdir(parents=True, exist_ok=True)
        (GOLDEN / name).write_text(content)
    assert content == (GOLDEN / name).read_text()


def test_all_engines_share_one_limit_of_memory(tmp_path: Path):
    """Two engines with 90 % of the memory each could take the machine down."""
    files = rendered(tmp_path)
    limits = {name: re.findall(r"^MemoryMax=(.*)$", text, re.MULTILINE) for name, text in files.items()}
    assert limits["etc/systemd/system/atoll-engines.slice"] == ["90%"]
    assert limits["etc/systemd/system/atoll-engine@.service"] == []
    assert "\nSlice=atoll-engines.slice\n" in files["etc/systemd/system/atoll-engine@.service"]


def test_the_same_input_gives_the_same_bytes(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert rendered(tmp_path / "a") == rendered(tmp_path / "b")  # nor does the tree's own place show


def test_no_word_is_left_unfilled(tmp_path: Path):
    for name, content in {**rendered(tmp_path), **rendered(tmp_path, gpu=False, tls=False)}.items():
        lines = [line for line in content.splitlines() if not line.startswith("#")]
        assert not re.search(r"@[A-Z_]+@", "\n".join(lines)), name


def test_a_word_without_a_value_is_an_error():
    with pytest.raises(KeyError):
        units.fill("ExecStart=@TYPO@", {})


def test_a_list_repeats_its_line_or_takes_it_away():
    text = "a\nDeviceAllow=@DEVICE@ # @NAME@\nb"
    assert units.fill(text, {"DEVICE": ["x", "y"], "NAME": "n"}) == "a\nDeviceAllow=x # n\nDeviceAllow=y # n\nb\n"
    assert units.fill(text, {"DEVICE": [], "NAME": "n"}) == "a\nb\n"


def test_without_a_gpu_nothing_asks_for_one(tmp_path: Path):
    files = rendered(tmp_path, gpu=False)
    assert not any("gpu-ready" in name or "modules-load" in name for name in files)
    engine = files["etc/systemd/system/atoll-engine@.service"]
    assert "nvidia" not in engine
    assert "DevicePolicy=closed" in engine


def test_without_tls_no_key_is_loaded(tmp_path: Path):
    gateway = rendered(tmp_path, tls=False)["etc/systemd/system/atoll-gateway.service"]
    assert "server.key" not in gateway
    assert "--ssl" not in gateway


@pytest.mark.parametrize("host, listens", [
    ("127.0.0.1", "127.0.0.1:8443"), ("localhost", "127.0.0.1:8443"), ("0.0.0.0", "0.0.0.0:8443"), ("::", "8443"),
    ("", "8443"), ("fd00::1", "[fd00::1]:8443"), ("[::1]", "[::1]:8443"),
])  # fmt: skip
def test_addresses(tmp_path: Path, host: str, listens: str):
    socket = rendered(tmp_path, host=host)["etc/systemd/system/atoll-gateway.socket"]
    assert f"\nListenStream={listens}\n" in socket


@pytest.mark.parametrize("host", ["llm.corp.example", "1.2.3", "0.0.0.0\nExecStart=/bin/sh"])
def test_what_is_no_address_is_refused(tmp_path: Path, host: str):
    with pytest.raises(InstallError, match="is not an IP address") as refused:
        rendered(tmp_path, host=host)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("name", ["", "Chat", "a b", "../x", "a/b", "a%i", "-a", "x" * 64, "chat\n"])
def test_a_name_that_is_no_instance_is_refused(tmp_path: Path, name: str):
    with pytest.raises(InstallError, match="cannot be used for a service"):
        units.render(Layout.server(tmp_path), [name])


def test_systemd_reads_them_without_a_word(server: Path):
    names = [*units.enabled(MODELS), units.VERIFY, units.GPU_READY]
    assert verify(server, *names) == []
    gateway = server / "etc/systemd/system/atoll-gateway.service"
    gateway.write_text(gateway.read_text().replace("PrivateUsers=yes", "PrivateUser=yes"))
    assert any("PrivateUser" in line for line in verify(server, *names)), "the check sees nothing"


def verify(root: Path, *names: str) -> list[str]:
    """What systemd-analyze reports about these units or anything else of ours."""
    done = subprocess.run(["systemd-analyze", "verify", f"--root={root}", *names], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "atoll" in line]
    assert done.returncode == 0 or said, done.stderr
    return said


@pytest.mark.parametrize("name, most", [("atoll-engine@.service", 1.0), ("atoll-gateway.service", 1.5)])
@pytest.mark.parametrize("gpu", [True, False])
def test_exposure(tmp_path: Path, name: str, most: float, gpu: bool):
    units.write(units.render(Layout.server(tmp_path), MODELS, host="0.0.0.0", gpu=gpu))
    path = tmp_path / "etc/systemd/system" / name
    threshold = f"--threshold={round(most * 10)}"
    done = subprocess.run(["systemd-analyze", "security", "--offline=true", "--no-pager", threshold, str(path)],
                          capture_output=True, text=True)  # fmt: skip
    score = re.search(r"Overall exposure level for .*?: ([\d.]+)", done.stdout)
    assert score, done.stdout + done.stderr
    assert float(score[1]) <= most, done.stdout
    assert done.returncode == 0


def test_the_check_of_exposure_can_fail(tmp_path: Path):
    unit = tmp_path / "loose.service"
    unit.write_text("[Service]\nExecStart=/bin/true\n")
    done = subprocess.run(["systemd-analyze", "security", "--offline=true", "--threshold=15", str(unit)],
                          capture_output=True)  # fmt: skip
    assert done.returncode


def test_users_and_directories_are_made_from_them(server: Path):
    """By systemd's own tools, in a tree of its own."""
    (server / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (server / "etc/group").write_text("root:x:0:\n")
    subprocess.run(["systemd-sysusers", f"--root={server}", "atoll.conf"], check=True, capture_output=True)
    users = [line.split(":") for line in (server / "etc/passwd").read_text().splitlines()]
    ours = {user[0]: user for user in users if user[0].startswith("atoll-")}
    assert ours.keys() == {"atoll-engine", "atoll-gateway"}
    assert all(user[6].endswith("nologin") and int(user[2]) < 1000 for user in ours.values())
    assert "atoll-api:" in (server / "etc/group").read_text()
    subprocess.run(["systemd-tmpfiles", f"--root={server}", "--create", "atoll.conf"], check=True, capture_output=True)
    assert (server / "run/atoll/engine").stat().st_mode & 0o777 == 0o755


def test_only_what_differs_is_written_and_reported(tmp_path: Path):
    layout = Layout.server(tmp_path)
    first = units.render(layout, MODELS)
    assert units.write(first) == first
    assert units.write(first) == []
    again = units.write(units.render(layout, MODELS, port=9443))
    assert [file.path.name for file in again] == ["atoll-gateway.socket"]
    (layout.units / "atoll-engine@.service").write_text("[Unit]\nDescr")  # half of one
    mended = units.write(units.render(layout, MODELS, port=9443))
    assert [file.path.name for file in mended] == ["atoll-engine@.service"]
    assert units.to_restart(again) == {"gateway"}
    assert units.to_restart(first) == {"gateway", "engine"}
    assert units.to_restart([layout.tmpfiles]) == set()


def test_a_link_in_the_place_of_a_unit_is_replaced(tmp_path: Path):
    layout = Layout.server(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    files = units.render(layout, MODELS)
    elsewhere.write_text(files[0].content)
    layout.units.mkdir(parents=True)
    files[0].path.symlink_to(elsewhere)
    assert files[0] in units.write(files)
    assert not files[0].path.is_symlink()


def test_removal_takes_ours_and_leaves_the_operators(tmp_path: Path):
    layout = Layout.server(tmp_path)
    files = units.render(layout, MODELS)
    units.write(files)
    drop_in = layout.units / "atoll-engine@chat.service.d/10-more-memory.conf"
    other = layout.units / "sshd.service"
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nMemoryMax=50%\n")
    other.write_text("")
    assert set(units.remove(units.owned_files(layout))) == {file.path for file in files}
    assert units.remove(units.owned_files(layout)) == []
    assert drop_in.exists()
    assert other.exists()
