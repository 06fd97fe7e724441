"""Framing, messages, peer credentials, and a socket server that outlives whatever its clients do."""

import os
import socket
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.params import SamplingParams
from engine.core.request import EngineRequest, EngineStats, FinishReason, RequestTimes, StepOutput, TokenLogprobs
from engine.errors import ConfigError
from engine.server.ipc import messages as m
from engine.server.ipc import server as ipc_server
from engine.server.ipc.framing import FrameError, FrameReader, PeerCredentials, PeerPolicy, frame, listen
from engine.server.ipc.server import Connected, Disconnected, IpcServer


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=20), st.lists(st.integers(1, 64), min_size=1))
def test_frames_survive_any_chunking(payloads: list[bytes], sizes: list[int]) -> None:
    stream, reader, got, i = b"".join(map(frame, payloads)), FrameReader(300), [], 0
    while stream:
        size = sizes[i % len(sizes)]
        got += reader.feed(stream[:size])
        stream, i = stream[size:], i + 1
    assert got == payloads


@pytest.mark.parametrize("length", [0, 301, 2**32 - 1])
def test_a_frame_of_forbidden_length_is_refused_before_its_bytes_are_awaited(length: int) -> None:
    with pytest.raises(FrameError):
        list(FrameReader(300).feed(struct.pack(">I", length)))


def test_messages_round_trip() -> None:
    params = SamplingParams(temperature=0.5, logit_bias={7: -1.5}, stop_token_ids=[3], seed=2**63 + 5, logprobs=2)
    submit = m.Submit(EngineRequest("r", [1, 2, 3], params, priority=-1, cache_salt="tenant"))
    assert m.decode_command(m.encode(submit)) == submit
    output = StepOutput("r", [5], [TokenLogprobs(5, -0.5, 1, [(5, -0.5)])], [None, TokenLogprobs(1, -9.0, 77)],
                        FinishReason.STOP, 3, 16, None, RequestTimes(1, 2, 3, 4))
    outputs = m.Outputs([output], EngineStats(num_running=1))
    assert m.decode_event(m.encode(outputs)) == outputs


@pytest.mark.parametrize("data", [
    b"", b"\xc1", b"\x80", b"not msgpack", b"\x81\xa4type\xa6Submit", b"\x91" * 5000,
    b"\x82\xa4type\xa5Hello\xa8protocol\xa1x",
    m.encode(m.Welcome(1, "x", 1)),                                              # an event is not a command
    m.encode(m.Submit(EngineRequest("r", [1], SamplingParams(top_p=0.5)))).replace(
        b"\xa5top_p\xcb" + struct.pack(">d", 0.5), b"\xa5top_p\xcb" + struct.pack(">d", float("nan"))),
])
def test_what_is_no_command_raises_one_kind_of_error(data: bytes) -> None:
    with pytest.raises(m.MessageError):
        m.decode_command(data)


def test_the_kernel_tells_who_the_peer_is() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = PeerCredentials.of(ours)
    assert (peer.pid, peer.uid) == (os.getpid(), os.geteuid())
    assert os.getegid() in peer.gids


def test_only_our_user_root_and_listed_users_and_groups_are_admitted() -> None:
    policy = PeerPolicy(frozenset({1001}), frozenset({55}), own_uid=1000)

    def allows(uid: int, *gids: int) -> bool:
        return policy.allows(PeerCredentials(1, uid, frozenset(gids)))

    assert allows(1000, 9)
    assert allows(0, 9)
    assert allows(1001, 9)
    assert allows(65534, 9, 55)
    assert not allows(1002, 1000, 1001)
    assert not allows(65534, 65534)


def test_policies_are_written_with_names_or_numbers() -> None:
    assert PeerPolicy.parse(["root", "12"], ["root", "34"]) == PeerPolicy(frozenset({0, 12}), frozenset({0, 34}))
    with pytest.raises(ConfigError, match="no-such-user"):
        PeerPolicy.parse(["no-such-user"], [])


class TestListen:
    def test_mode_is_private_unless_shared(self, tmp_path: Path) -> None:
        with listen(tmp_path / "a"), listen(tmp_path / "b", shared_with_group=True):
            assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
            assert (tmp_path / "b").stat().st_mode & 0o777 == 0o660

    def test_a_dead_socket_is_replaced_and_a_living_one_is_not(self, tmp_path: Path) -> None:
        path = tmp_path / "s"
        listen(path).close()  # leaves the file, as kill -9 does
        with listen(path), pytest.raises(ConfigError, match="already serves"):
            listen(path)

    def test_what_is_no_socket_is_never_removed(self, tmp_path: Path) -> None:
        path = tmp_path / "precious"
        path.write_text("data")
        with pytest.raises(ConfigError, match="not a socket"):
            listen(path)
        assert path.read_text() == "data"

    def test_unusable_paths_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="longer than"):
            listen(tmp_path / ("x" * 120))
        with pytest.raises(ConfigError, match="does not exist"):
            listen(tmp_path / "no" / "s")


class _Peer:
    """A raw client: sends what a test likes."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(5)
        self.sock.connect(str(path))
        self.reader = FrameReader(m.MAX_EVENT_BYTES)
        self.events: list[m.AnyEvent] = []

    def send(self, message: m.Command) -> None:
        self.sock.sendall(frame(m.encode(message)))

    def event(self) -> m.AnyEvent:
        while not self.events:
            data = self.sock.recv(65536)
            if not data:
                raise EOFError
            self.events += map(m.decode_event, self.reader.feed(data))
        return self.events.pop(0)


@pytest.fixture
def server(tmp_path: Path):
    server = IpcServer(listen(tmp_path / "s"), PeerPolicy(), pid=7)
    yield server
    server.close()


def _settle(server: IpcServer) -> list:
    return [item for _ in range(6) for item in server.poll(0.02)]


class TestServer:
    def test_hello_is_answered_and_commands_arrive(self, server: IpcServer, tmp_path: Path) -> None:
        peer = _Peer(tmp_path / "s")
        peer.send(m.Hello(m.PROTOCOL, "gateway"))
        peer.send(m.Abort(["a"]))
        incoming = [what for _, what in _settle(server)]
        assert incoming == [Connected(), m.Abort(["a"])]
        assert peer.event() == m.Welcome(m.PROTOCOL, ipc_server.__version__, 7)

    @pytest.mark.parametrize("data", [
        b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"GET / HTTP/1.1\r\n\r\n", frame(b"junk"),
        frame(m.encode(m.Ping())),                                      # before Hello
        frame(m.encode(m.Hello(m.PROTOCOL + 1))),                       # another protocol
        frame(m.encode(m.Hello(m.PROTOCOL))) * 2,                       # twice
    ])
    def test_bad_bytes_close_that_connection_only(self, server: IpcServer, tmp_path: Path, data: bytes) -> None:
        good, bad = _Peer(tmp_path / "s"), _Peer(tmp_path / "s")
        good.send(m.Hello(m.PROTOCOL, "good"))
        bad.sock.sendall(data)
        _settle(server)
        with pytest.raises((EOFError, ConnectionResetError)):
            while True:
                bad.event()
        good.send(m.Ping(5))
        assert [what for _, what in _settle(server)] == [m.Ping(5)]
        assert [c.name for c in server.clients] == ["good"]

    def test_a_stranger_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        root = os.geteuid() == 0
        server = IpcServer(listen(tmp_path / "x"), PeerPolicy(own_uid=0 if root else os.geteuid() + 1), pid=1)
        monkeypatch.chdir(tmp_path)
        if root:  # root is always admitted, so connect as somebody else
            tmp_path.chmod(0o755)
            Path("x").chmod(0o666)
            os.seteuid(65534)
        try:
            peer = _Peer(Path("x"))
        finally:
            if root:
                os.seteuid(0)
        _settle(server)
        with pytest.raises((EOFError, ConnectionResetError)):
            peer.event()
        server.close()

    def test_disconnects_are_reported(self, server: IpcServer, tmp_path: Path) -> None:
        peer = _Peer(tmp_path / "s")
        peer.send(m.Hello(m.PROTOCOL))
        _settle(server)
        peer.sock.close()
        assert [what for _, what in _settle(server)] == [Disconnected()]

    def test_a_client_that_does_not_read_gets_everything_later_or_is_dropped(
        self, server: IpcServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        peer = _Peer(tmp_path / "s")
        peer.send(m.Hello(m.PROTOCOL))
        ((connection, _),) = _settle(server)
        for i in range(200):  # far more than the socket's buffer
            server.send(connection, m.Progress("x" * 10_000, i))
        assert connection.backlog
        peer.event()  # Welcome
        for i in range(200):
            server.poll(0)
            assert peer.event() == m.Progress("x" * 10_000, i)

        monkeypatch.setattr(ipc_server, "MAX_BACKLOG_BYTES", 1_000_000)
        for i in range(300):
            server.send(connection, m.Progress("x" * 10_000, i))
        assert connection.closed
        assert server.clients == []

    def test_silent_connections_and_crowds_are_dropped(
        self, server: IpcServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ipc_server, "MAX_CONNECTIONS", 2)
        peers = [_Peer(tmp_path / "s") for _ in range(3)]
        _settle(server)
        with pytest.raises((EOFError, ConnectionResetError)):
            peers[2].event()
        monkeypatch.setattr(ipc_server, "HELLO_SECONDS", 0.0)
        _settle(server)
        with pytest.raises((EOFError, ConnectionResetError)):
            peers[0].event()
