"""What the services of a server are told: one file, the sockets of systemd, secrets as credentials, GPUs by name."""

import json
import os
import socket
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.server.access import credentials
from engine.server.http import listening
from engine.server.http.exposure import check_exposure
from engine.server.process import gpu_ready
from engine.server.process.heartbeat import MAX_FAILED_STEPS, Heartbeat
from engine.server.process.notify import Notifier
from engine.server.settings.commands import model_config, parse_engine, parse_gateway, parse_serve
from engine.server.settings.server_file import check_gpus, model_names

SETTINGS = """
schema_version = 2

[gateway]
host = "192.0.2.1"
port = 9443
shutdown-timeout = 5

[engine]
max-model-len = 4096
max-num-seqs = 8

[models.chat]
model = "/m/chat"
max_model_len = 1024
gpus = [1]

[models.code-2]
model = "/m/code"
served-model-name = ["code", "coder"]
enable-prefix-caching = false
gpus = ["GPU-5d1c3a8e-0000-1111-2222-333344445555"]
"""


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "atoll.toml"
    path.write_text(SETTINGS)
    return path


def engine(settings: Path, name: str, *flags: str):
    return parse_engine(["--model", name, "--config", str(settings), "--uds", "/s", *flags])


# -- the file


def test_each_engine_reads_its_own_table(settings: Path):
    assert model_names(settings) == ["chat", "code-2"]
    chat, code = engine(settings, "chat"), engine(settings, "code-2")
    assert (chat.engine.model, chat.engine.served_model_name) == (Path("/m/chat"), ["chat"])
    assert (chat.engine.max_model_len, code.engine.max_model_len) == (1024, 4096)  # its own wins, in any spelling
    assert chat.engine.max_num_seqs == code.engine.max_num_seqs == 8
    assert code.engine.served_model_name == ["code", "coder"]
    assert not code.engine.enable_prefix_caching
    assert engine(settings, "chat", "--max-model-len", "77").engine.max_model_len == 77  # and the line over all


def test_gpus_by_index_or_uuid(settings: Path):
    chat, code = engine(settings, "chat"), engine(settings, "code-2")
    assert (chat.gpus, chat.engine.device) == ("1", "cuda")  # never a silent fall-back to the CPU
    assert code.gpus == "GPU-5d1c3a8e-0000-1111-2222-333344445555"
    assert check_gpus(["0", "1,2"]) == "0,1,2"
    assert check_gpus(["MIG-5d1c3a8e-0000-1111-2222-333344445555"]).startswith("MIG-")
    assert check_gpus([]) == ""


@pytest.mark.parametrize("gpus", [["-1"], ["0", "0"], ["GPU-x y"], ["all"], ["0;rm"], [""]])
def test_gpus_that_are_none(gpus: list[str]):
    with pytest.raises(ConfigError, match="--gpus"):
        check_gpus(gpus)


def test_a_gpu_and_the_cpu_exclude_each_other(settings: Path):
    with pytest.raises(ConfigError, match="exclude"):
        engine(settings, "chat", "--device", "cpu")


def test_the_gateway_knows_the_same_names(settings: Path):
    assert model_config("code-2", settings).served_model_name == ["code", "coder"]
    options = parse_gateway(["--config", str(settings)])
    assert (options.host, options.port, options.shutdown_timeout) == ("192.0.2.1", 9443, 5.0)
    assert parse_gateway(["--config", str(settings), "--port", "1"]).port == 1


@pytest.mark.parametrize("text, words", [
    ("[models.Chat]\nmodel = '/m'", "A name has"),
    ("[models]\nchat = 1", "A name has"),
    ("models = 3", "must be a table"),
    ("[models.chat]\n", "lacks 'model'"),
    ("[models.chat]\nmodel = '/m'\nno-such = 1", "Unknown flag --no-such"),
    ("[models.chat]\nmodel = '/m'\nmax-model-len = {}", "must be a string"),
    ("[models.other]\nmodel = '/m'", "has no \\[models.chat\\]"),
    ("[models.chat", "is not TOML"),
])  # fmt: skip
def test_a_file_that_makes_no_sense_is_refused_with_the_place(tmp_path: Path, text: str, words: str):
    path = tmp_path / "atoll.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        engine(path, "chat")


def test_a_flag_of_serve_may_be_switched_off_in_the_file(tmp_path: Path):
    path = tmp_path / "a.toml"
    path.write_text('[serve]\nmodel = "/m"\nallow-plain-http = false\n')
    assert not parse_serve(["--config", str(path), "--device", "cpu"]).allow_plain_http


def test_origins_are_a_list_in_the_file_and_json_on_the_line(tmp_path: Path):
    path, origins = tmp_path / "a.toml", ["https://chat.example", "https://b.example"]
    path.write_text(f"[gateway]\nallowed-origins = {json.dumps(origins)}\n")
    assert parse_gateway(["--config", str(path)]).allowed_origins == origins
    assert parse_gateway(["--config", str(path), "--allowed-origins", '["https://c"]']).allowed_origins == ["https://c"]
    path.write_text("[gateway]\nallowed-origins = [1]\n")
    with pytest.raises(ConfigError, match="--allowed-origins"):
        parse_gateway(["--config", str(path)])


@pytest.mark.parametrize("argv, words", [
    (["--publish", "/a"], "needs --to"), (["--port", "70000"], "--port"), (["--ssl-certfile", "/a"], "belong together"),
    (["/some/model"], "Unexpected argument"), (["--no-such"], "Unknown flag"),
])  # fmt: skip
def test_gateway_flags_that_make_no_sense(settings: Path, argv: list[str], words: str):
    with pytest.raises(ConfigError, match=words):
        parse_gateway(["--config", str(settings), *argv])


# -- sockets


INHERIT = """
import json, os, sys
os.environ["LISTEN_PID"] = sys.argv[1] or str(os.getpid())
from engine.errors import ConfigError
from engine.server.http.listening import inherited_sockets
try:
    print(json.dumps([[s.getsockname()[1], s.get_inheritable()] for s in inherited_sockets()] + sorted(
        name for name in os.environ if name.startswith("LISTEN_"))))
except ConfigError as error:
    print(json.dumps(str(error)))
"""


def inherit(fd: int, *, pid: str = "", count: str = "1") -> object:
    """What a process makes of the descriptor 3."""
    command = f'exec 3<&{fd}; exec "$0" -c "$1" "$2"'
    done = subprocess.run(["bash", "-c", command, sys.executable, INHERIT, pid], capture_output=True, text=True,
                          pass_fds=[fd], env=os.environ | {"LISTEN_FDS": count, "LISTEN_FDNAMES": "http"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_sockets_come_from_systemd_and_are_meant_for_us_alone():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert inherit(listener.fileno()) == [[port, False]]
        assert inherit(listener.fileno(), pid="1") == []
        assert inherit(listener.fileno(), count="x") == []


def test_a_descriptor_that_is_no_listening_socket_is_refused(tmp_path: Path):
    with (tmp_path / "f").open("w") as file:
        assert "is not a socket" in str(inherit(file.fileno()))
    with socket.socket() as sock:
        assert "not a listening stream socket" in str(inherit(sock.fileno()))


def test_who_can_reach_a_socket(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as local, socket.create_server(("0.0.0.0", 0)) as all_of_them:
        assert listening.is_local(local)
        assert not listening.is_local(all_of_them)
        assert listening.url_of(all_of_them, tls=True) == f"https://127.0.0.1:{all_of_them.getsockname()[1]}"
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "s"))
        assert listening.is_local(unix)


@pytest.mark.parametrize("host, tls, allowed, fine", [
    ("127.0.0.1", False, False, True), ("::1", False, False, True), ("0.0.0.0", False, False, False),
    ("0.0.0.0", True, False, True), ("0.0.0.0", False, True, True), ("gpu1", False, False, False),
])  # fmt: skip
def test_plain_http_only_on_loopback(host: str, tls: bool, allowed: bool, fine: bool):
    if fine:
        check_exposure(host, None, tls, allowed)
    else:
        with pytest.raises(ConfigError, match="Plain HTTP"):
            check_exposure(host, None, tls, allowed)


# -- secrets

DIGEST = {"a": "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb",
          "b": "3e23e8160039594a33894f6564e1b1348bbd7a0088d42c4acb73eeaed59c009d"}  # fmt: skip


def key_file(path: Path, *keys: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"keys": [{"id": key, "sha256": DIGEST[key]} for key in keys]}))
    return path


def test_a_published_key_file_wins_and_never_gives_way_again(tmp_path: Path):
    start, published = key_file(tmp_path / "start.json", "a"), tmp_path / "run" / "api-keys.json"
    keys = credentials.GatewayKeys(start, published)
    assert keys.check("a")
    assert not keys.check("b")
    key_file(published, "b")
    assert keys.check("b")
    assert not keys.check("a")
    published.unlink()
    assert not keys.check("a")
    assert not keys.check("b")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_publishing_makes_copies_that_only_the_user_can_read(tmp_path: Path):
    source, target = tmp_path / "etc", tmp_path / "run"
    key_file(source / "api-keys.json", "a")
    (source / "server.key").write_text("secret")
    (source / "ca.key").write_text("never leaves")
    credentials.publish(source, target, "nobody")
    assert sorted(path.name for path in target.iterdir()) == ["api-keys.json", "server.key"]
    assert (target.stat().st_uid, stat.S_IMODE(target.stat().st_mode)) == (0, 0o711)
    for path in target.iterdir():
        assert path.owner() == "nobody"
        assert stat.S_IMODE(path.stat().st_mode) == 0o400
    (source / "api-keys.json").unlink()  # the last key was removed: nobody is admitted
    credentials.publish(source, target, "nobody")
    assert json.loads((target / "api-keys.json").read_text()) == {"keys": []}


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_publishing_follows_no_link_and_trusts_no_foreign_directory(tmp_path: Path):
    source = tmp_path / "etc"
    key_file(source / "api-keys.json", "a")
    victim = tmp_path / "victim"
    victim.mkdir()
    (tmp_path / "link").symlink_to(victim)
    with pytest.raises(ConfigError):
        credentials.publish(source, tmp_path / "link", "nobody")
    assert not list(victim.iterdir())
    os.chown(victim, 65534, 65534)
    with pytest.raises(ConfigError, match="does not belong"):
        credentials.publish(source, victim, "nobody")
    with pytest.raises(ConfigError, match="no such user"):
        credentials.publish(source, tmp_path / "x", "no-such-user-here")


def test_a_pair_that_does_not_fit_is_refused(tmp_path: Path):
    (tmp_path / "x").write_text("no PEM")
    with pytest.raises(ConfigError, match="cannot be used together"):
        listening.check_tls(tmp_path / "x", tmp_path / "x")
    listening.check_tls(None, None)
    assert issubclass(ssl.SSLError, OSError)


# -- the watchdog


class Told(Notifier):
    """A notifier that counts its pings."""

    def __init__(self, patience: float) -> None:
        super().__init__()
        self.watchdog_seconds, self.pings = patience, 0

    def watchdog(self) -> None:
        self.pings += 1


def test_a_loop_that_turns_without_moving_anything_falls_silent(monkeypatch: pytest.MonkeyPatch):
    now = 1000.0
    monkeypatch.setattr("engine.server.process.heartbeat.time.monotonic", lambda: now)
    told = Told(10)
    pulse = Heartbeat(told)
    for _ in range(20):
        now += 1
        pulse.step_done(moved=False, failed=False, succeeded=False)
        pulse.beat(idle=False)
    assert told.pings == 9  # as long as the watchdog itself is patient, and not once more
    pulse.step_done(moved=True, failed=False, succeeded=True)
    pulse.beat(idle=False)
    assert told.pings == 10
    now += 100
    pulse.beat(idle=True)  # nothing to do is no fault
    assert told.pings == 11


def test_failures_in_a_row_make_it_doubt_the_device():
    pulse = Heartbeat(Told(10))
    for _ in range(MAX_FAILED_STEPS - 1):
        pulse.step_done(moved=True, failed=True, succeeded=False)
    pulse.step_done(moved=True, failed=True, succeeded=True)  # one request's own fault among good ones
    for _ in range(MAX_FAILED_STEPS):
        assert not pulse.doubtful
        pulse.step_done(moved=True, failed=True, succeeded=False)
    assert pulse.doubtful
    pulse.device_works()
    assert not pulse.doubtful


# -- the GPU at boot

NVML = """
#include <string.h>
typedef unsigned int u;
static int started;
int nvmlInit_v2(void) { started = 1; return %(init)d; }
int nvmlShutdown(void) { started = 0; return 0; }
int nvmlDeviceGetCount_v2(u *n) { *n = %(count)d; return started ? 0 : 1; }
int nvmlDeviceGetHandleByIndex_v2(u i, void **d) { *d = (void *)(long)(i + 1); return 0; }
int nvmlDeviceGetUUID(void *d, char *s, u n) { strncpy(s, "GPU-0", n); s[4] += (long)d; return %(uuid)d; }
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A root with the traces of a driver."""
    for name in ("proc/driver/nvidia", "dev"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12\n")
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0"):
        (tmp_path / "dev" / name).touch()
    return tmp_path


def nvml(directory: Path, *, init: int = 0, count: int = 2, uuid: int = 0) -> str:
    """A libnvidia-ml that answers as it is told."""
    source, library = directory / "nvml.c", directory / f"nvml-{init}-{count}-{uuid}.so"
    source.write_text(NVML % {"init": init, "count": count, "uuid": uuid})
    done = subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], capture_output=True)
    if done.returncode:
        pytest.skip("no C compiler here")
    return str(library)


def test_a_gpu_that_can_be_used(machine: Path, tmp_path: Path):
    found = gpu_ready.inspect_gpu(machine, nvml(tmp_path))
    assert (found.problem, found.driver, found.gpus) == ("", "580.95.05", ["GPU-1", "GPU-2"])


@pytest.mark.parametrize("gone, words", [
    ("proc/driver/nvidia/version", "driver is not loaded"), ("dev/nvidiactl", "/dev/nvidiactl"),
    ("dev/nvidia-uvm", "/dev/nvidia-uvm"),
])  # fmt: skip
def test_what_is_missing_is_named_with_a_command(machine: Path, tmp_path: Path, gone: str, words: str):
    (machine / gone).unlink()
    found = gpu_ready.inspect_gpu(machine, nvml(tmp_path))
    assert words in found.problem
    assert found.fix


@pytest.mark.parametrize("faults, words", [
    ({"init": 18}, "different versions"), ({"init": 9}, "not loaded"), ({"uuid": 15}, "fallen off the bus"),
    ({"init": 4242}, "error 4242"), ({"count": 0}, "finds no GPU"),
])  # fmt: skip
def test_what_nvml_says_is_told_in_words(machine: Path, tmp_path: Path, faults: dict[str, int], words: str):
    assert words in gpu_ready.inspect_gpu(machine, nvml(tmp_path, **faults)).problem


def test_no_library_is_told(machine: Path):
    assert "cannot be loaded" in gpu_ready.inspect_gpu(machine, "libno-such-thing.so.1").problem


def test_the_command_waits_and_then_gives_up(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                                             machine: Path, tmp_path: Path):  # fmt: skip
    library, look = nvml(tmp_path), gpu_ready.inspect_gpu
    looks: list[int] = []

    def later(*_: object) -> gpu_ready.Readiness:
        looks.append(1)
        return look(machine, library) if len(looks) > 2 else gpu_ready.Readiness("Not yet.", "wait")

    monkeypatch.setattr(gpu_ready, "inspect_gpu", later)
    monkeypatch.setattr(gpu_ready, "POLL_SECONDS", 0.01)
    assert gpu_ready.main(["--timeout", "5"]) == 0
    assert "2 GPUs ready, driver 580.95.05" in capsys.readouterr().out
    looks.clear()
    assert gpu_ready.main(["--timeout", "0"]) == 1
    assert "Not yet." in capsys.readouterr().err
    looks.clear()
    assert gpu_ready.main(["--timeout", "0", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problem"] == "Not yet."
