"""A server's whole life with Atoll, on a machine that boots and has no network: from the medium to the last file gone.

The tests of the class are chapters of one story on one machine, in this order; after one fails, the rest is skipped.
"""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from desk import NAME, Desk, Stream, Watcher, facts
from machine import Machine
from measures import Measures
from rootfs import ensure_root
from snapshot import differences, snapshot
from test_boot_harness import prove_bare, prove_no_network
from vendor import ensure_vendor

INSTALL_LIMIT, PREFLIGHT_LIMIT = 90.0, 10.0
USERS = "/etc/passwd", "/etc/shadow", "/etc/group", "/etc/gshadow"


@pytest.fixture(scope="class")
def desk(suite: str, work: Path) -> Iterator[Desk]:
    vendor = ensure_vendor()
    with Machine(suite, work) as machine:
        machine.boot()
        desk = Desk(machine, vendor)
        desk.prepare()
        if suite != "bookworm":  # the packages on the medium are for Debian 12's Python: bring it along
            carried = machine.path("/opt/python311")
            _carry_python(ensure_root("bookworm"), carried)
            desk.python = "--python /opt/python311"
        yield desk


def _carry_python(root: Path, to: Path) -> None:
    """A Python as an operator would unpack it on a server whose own is too old or too new: DIR/bin/python3."""
    (to / "bin").mkdir(parents=True)
    shutil.copy2(root / "usr/bin/python3.11", to / "bin/python3")
    shutil.copytree(root / "usr/lib/python3.11", to / "lib/python3.11", symlinks=True)


@pytest.fixture(scope="class")
def memory() -> dict[str, object]:
    """What later chapters need of earlier ones."""
    return {}


@pytest.mark.incremental
class TestLife:
    def test_it_is_bare_and_alone(self, desk: Desk, memory: dict) -> None:
        prove_no_network(desk.machine)
        prove_bare(desk.machine)
        desk.proved = {f"{a.kind} {a.address}:{a.port}" for a in desk.machine.connects.outbound()}
        assert len(desk.proved) == 4
        memory["before"] = snapshot(desk.machine.root)
        memory["users"] = {path: desk.machine.path(path).read_text() for path in USERS}

    def test_a_dry_run_leaves_nothing(self, desk: Desk, memory: dict) -> None:
        desk.plug(desk.vendor.first)
        shown = desk.machine.run(desk.command("--dry-run"), timeout=300).check()
        for word in ("atoll-engine@", "atoll-gateway", "8443", "/opt/atoll", "/var/lib/atoll"):
            assert word in shown.out, (word, shown.out)
        assert differences(memory["before"], snapshot(desk.machine.root)) == []

    def test_install(self, desk: Desk, memory: dict, suite: str, measure: Measures) -> None:
        if desk.python:
            refused = desk.machine.run("sh /media/atoll/install.sh --answers /root/answers.toml").check(3)
            assert "--python" in refused.err, refused.err
        done = desk.install().check()
        memory["first"] = desk.live()
        assert desk.key.startswith("sk-"), done.out.replace(desk.key, "…")
        state = desk.status()
        assert state["state"] == "serving", desk.trouble()
        own = done.seconds - done.waited - _seconds_of_the_copy(desk)
        measure(f"{suite}: install from the medium by the clock", done.seconds)
        measure(f"{suite}: the same without the model's copy, and without waiting for the host", own, INSTALL_LIMIT)

    def test_what_runs_is_what_was_meant(self, desk: Desk) -> None:
        run = desk.machine.run
        for unit in ("atoll.target", f"atoll-engine@{NAME}.service", "atoll-gateway.socket", "atoll-gateway.service"):
            assert run(f"systemctl is-active {unit}").out == "active\n", desk.trouble()
        assert run("systemctl --failed --no-legend").out == ""
        for unit, user in ((f"atoll-engine@{NAME}", "atoll-engine"), ("atoll-gateway", "atoll-gateway")):
            pid = run(f"systemctl show -P MainPID {unit}").out.strip()
            assert run(f"ps -o user:32= -p {pid}").out.strip() == user
        engine = run(f"systemctl show -P MainPID atoll-engine@{NAME}").out.strip()
        assert run(f"readlink /proc/{engine}/ns/net").out != run("readlink /proc/1/ns/net").out
        listening = run("ss -H -tln").out.split()
        assert [word for word in listening if word.endswith(":8443")], listening
        assert run("find /etc/atoll/credentials -type f -perm /0007").out == ""

    def test_the_journal_vouches_for_the_audit_log(self, desk: Desk) -> None:
        """journald has the head of each entry; a log that is cut short, though its chain holds, is found out."""
        whole = facts(desk.atoll("audit verify --json").check())
        assert (whole["state"], whole["journal"], whole["unanchored"]) == ("intact", True, 0), whole
        assert whole["anchors"] == whole["entries"] > 0, whole
        log = desk.machine.path("/var/lib/atoll/state/audit.jsonl")
        kept = log.read_bytes()
        log.write_bytes(b"".join(kept.splitlines(keepends=True)[:-1]))
        cut = desk.atoll("audit verify --json")
        assert (cut.code, facts(cut)["state"]) == (11, "cut"), str(cut)
        assert any("cut short" in problem["what"] for problem in desk.status()["problems"])
        log.write_bytes(kept)
        desk.atoll("audit verify").check()

    def test_preflight_is_quick(self, desk: Desk, suite: str, measure: Measures) -> None:
        done = desk.atoll("preflight --json")
        assert done.code in (0, 3, 4), str(done)
        assert len(facts(done)["checks"]) >= 20
        measure(f"{suite}: preflight", done.seconds - done.waited, PREFLIGHT_LIMIT)

    def test_chat_over_tls(self, desk: Desk) -> None:
        assert desk.ask(list=True)["models"] == [NAME]
        desk.assert_serves()
        streamed = desk.ask(stream=True)
        assert "Paris" in streamed["text"]
        assert streamed["pieces"] > 2
        assert desk.ask(key="atoll-not-a-key")["status"] == 401
        assert "CERTIFICATE_VERIFY_FAILED" in desk.ask(ca="")["error"]
        assert desk.ask(url="http://127.0.0.1:8443/v1")["status"] in (0, 400)

    def test_daemon_reload_while_serving(self, desk: Desk) -> None:
        """A stream that is under way when systemd reads its units again goes on to its end."""
        stream = Stream(desk)
        for _ in range(3):
            desk.machine.run("systemctl daemon-reload").check()
        assert stream.under_way, "the answer was over too soon to show anything"
        stream.assert_whole()
        desk.machine.run("systemctl daemon-reexec").check()
        desk.assert_serves()

    def test_reboot(self, desk: Desk, suite: str, measure: Measures) -> None:
        pid = desk.machine.run(f"systemctl show -P MainPID atoll-engine@{NAME}").out
        measure(f"{suite}: reboot until every unit is up, engine included", desk.machine.reboot(timeout=240))
        assert desk.machine.run(f"systemctl show -P MainPID atoll-engine@{NAME}").out != pid
        desk.assert_serves(wait=60)
        assert desk.status()["state"] == "serving"

    def test_power_cut_while_serving(self, desk: Desk) -> None:
        desk.machine.power_cut()
        desk.machine.boot(timeout=240)
        desk.assert_serves(wait=60)
        assert desk.install().check().code == 0
        assert "already" in facts(desk.install().check())["outcome"]

    def test_power_cut_in_the_middle_of_an_upgrade(self, desk: Desk, memory: dict) -> None:
        """Between switch and commit: the next boot puts the release back that had proved itself, and says so."""
        desk.plug(desk.vendor.later)
        desk.cut_power_after("switch", desk.command())
        assert desk.live() != memory["first"]
        # Should that fail, for whatever reason, there is a service all the same, and a person is told.
        broken = desk.machine.path("/etc/systemd/system/atoll-settle.service.d/broken.conf")
        broken.parent.mkdir()
        broken.write_text("[Service]\nExecStart=\nExecStart=/bin/false\n")
        desk.machine.boot(timeout=240)
        desk.assert_serves(wait=60)
        assert desk.live() != memory["first"]
        assert desk.status()["state"] == "interrupted"
        shutil.rmtree(broken.parent)
        desk.machine.power_cut()
        desk.machine.boot(timeout=240)
        desk.assert_serves(wait=60)
        assert desk.live() == memory["first"]
        assert desk.machine.run("systemctl --failed --no-legend").out == ""
        engine = desk.machine.run(f"systemctl show -P ExecMainPID atoll-engine@{NAME}").out.strip()
        opened = desk.machine.run(f"readlink -f /opt/atoll/current/lib; grep -cF 'code/{desk.vendor.later.version}-' "
                                  f"/proc/{engine}/maps").out.split()  # fmt: skip
        assert opened[1] == "0", opened
        status = desk.status()
        assert status["state"] == "serving"
        assert status["recovery"]["put_back"] == memory["first"]
        told = desk.atoll("status").out
        assert "A power cut or a crash interrupted" in told, told
        assert "atoll upgrade" in told, told

    def test_an_upgrade_that_cannot_be_prepared_interrupts_nobody(self, desk: Desk, memory: dict, suite: str) -> None:
        """Settings that cannot serve, found when the new engine reads them: the old one has long read its own, and goes
        on, and with it an answer that it is giving. Started anew, it could not serve with them either."""
        desk.plug(desk.vendor.later)
        config = desk.machine.path("/etc/atoll/atoll.toml")
        good, table = config.read_text(), f"[models.{NAME}]\n"
        assert table in good
        units = [f"atoll-engine@{NAME}", "atoll-gateway"]
        pids = [desk.machine.run(f"systemctl show -P MainPID {unit}").out for unit in units]
        config.write_text(good.replace(table, f"{table}max-num-seqs = 0\n"))
        streams = 0
        process = desk.machine.popen(desk.command(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        while process.poll() is None:  # one after another, so that one is under way whenever it may hurt
            Stream(desk).assert_whole()
            streams += 1
        done = process.communicate()[0]
        assert process.returncode == 40, done
        assert "nothing was restarted" in done, done
        assert "max-num-seqs" in done, done
        assert [desk.machine.run(f"systemctl show -P MainPID {unit}").out for unit in units] == pids
        assert streams, "nothing was asked meanwhile"
        assert desk.live() == memory["first"]
        config.write_text(good)
        desk.assert_serves()
        assert desk.status()["state"] == "serving", desk.trouble()

    def test_upgrade(self, desk: Desk, memory: dict, suite: str, measure: Measures) -> None:
        """The medium of a later release; the key of the first install is still trusted, the old API key still good."""
        desk.plug(desk.vendor.later)
        watcher = Watcher(desk.machine)
        done = desk.install().check()
        downtime = watcher.stop()
        desk.assert_serves()
        memory["later"] = desk.live()
        assert desk.live().startswith(desk.vendor.later.version)
        assert desk.atoll("--version").out.strip() == desk.vendor.later.version
        releases = {path.name for path in desk.machine.path("/opt/atoll/releases").iterdir()}
        assert releases == {memory["first"], memory["later"]}
        assert desk.status()["recovery"] is None
        measure(f"{suite}: upgrade in all", done.seconds)
        memory["pairs"] = [(downtime, desk.startup())]

    def test_downtime_is_less_than_a_start(self, desk: Desk, memory: dict, suite: str, measure: Measures) -> None:
        """The switch against a start of the same engine right after it. A host that others use too may give one of the
        two less of its processors; then there and back again is measured as well, and the best pair counts."""
        pairs: list[tuple[float, float]] = memory["pairs"]
        if pairs[0][0] > pairs[0][1]:
            for _ in range(2):
                watcher = Watcher(desk.machine)
                desk.atoll("rollback --yes").check()
                pairs.append((watcher.stop(), desk.startup()))
        downtime, startup = min(pairs, key=lambda pair: pair[0] / pair[1])
        measure(f"{suite}: engine start-up", startup)
        measure(f"{suite}: downtime of the upgrade", downtime, startup)
        assert desk.live() == memory["later"]

    def test_a_bad_release_is_rolled_back(self, desk: Desk, memory: dict, suite: str, measure: Measures) -> None:
        desk.plug(desk.vendor.bad)
        watcher = Watcher(desk.machine)
        refused = desk.install("--start-timeout 60").check(40)
        measure(f"{suite}: longest silence around a bad release", watcher.stop())
        assert desk.live() == memory["later"]
        desk.assert_serves()
        assert desk.status()["state"] == "serving", desk.trouble()
        text = refused.out + refused.err
        assert "smoke" in text or "500" in text, text

    def test_an_older_medium_is_refused(self, desk: Desk, memory: dict) -> None:
        desk.plug(desk.vendor.first)
        refused = desk.machine.run(desk.command()).check(12)
        assert "allow-downgrade" in refused.err + refused.out
        assert desk.live() == memory["later"]
        desk.assert_serves()

    def test_rollback_without_a_medium(self, desk: Desk, memory: dict) -> None:
        desk.vendor.unplug(desk.machine.media)
        desk.atoll("rollback --yes").check()
        assert desk.live() == memory["first"]
        desk.assert_serves()
        desk.plug(desk.vendor.later)
        desk.install().check()
        assert desk.live() == memory["later"]
        desk.assert_serves()

    def test_uninstall_keeps_data(self, desk: Desk) -> None:
        kept = [*desk.machine.path("/var/lib/atoll/models").iterdir()]
        assert kept
        desk.atoll("uninstall --yes").check()
        assert not desk.machine.path("/opt/atoll/current").is_symlink()
        assert desk.machine.run("systemctl list-units --all --no-legend 'atoll*'").out == ""
        assert desk.machine.run("systemctl list-unit-files --no-legend 'atoll*'").out == ""
        assert [path for path in kept if path.exists()] == kept
        assert desk.machine.path("/etc/atoll/atoll.toml").exists()
        assert desk.ask()["status"] == 0

    def test_reinstall_finds_its_data(self, desk: Desk) -> None:
        weights = desk.machine.path("/var/lib/atoll/models").rglob("*.safetensors")
        before = {path: path.stat().st_ino for path in weights}
        assert before
        key = desk.key
        desk.install().check()
        assert desk.key == key, "the old key is still good: no new one was to be made"
        desk.assert_serves()
        assert {path: path.stat().st_ino for path in before} == before

    def test_purge_leaves_nothing(self, desk: Desk, memory: dict) -> None:
        assert desk.atoll("uninstall --purge --confirm somebody-else").code == 2
        desk.assert_serves()
        desk.atoll(f"uninstall --purge --confirm {desk.machine.hostname}").check()
        assert differences(memory["before"], snapshot(desk.machine.root)) == []
        assert {path: desk.machine.path(path).read_text() for path in USERS} == memory["users"]
        for look in ("list-units --all", "list-unit-files", "list-timers --all", "list-sockets --all"):
            assert "atoll" not in desk.machine.run(f"systemctl {look} --no-legend --no-pager").out
        for look in ("find /run /tmp /dev/shm -name '*atoll*'", "getent passwd atoll-engine atoll-gateway",
                     "getent group atoll-api", "pgrep -u atoll-engine", "ss -H -tlnx | grep atoll"):  # fmt: skip
            assert desk.machine.run(look).out == "", look
        desk.machine.reboot()
        assert desk.machine.state == "running"
        assert differences(memory["before"], snapshot(desk.machine.root)) == []

    def test_nothing_ever_tried_to_leave(self, desk: Desk) -> None:
        """All that time no process tried to reach an address outside; and the counter counts still."""
        assert desk.outbound() == []
        try_once = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect_ex((\"198.51.100.7\", 53))"
        desk.machine.run(f"python3 -c '{try_once}'").check()
        assert desk.outbound() == ["UDP 198.51.100.7:53"]

    def test_the_promised_times_were_kept(self, suite: str, measure: Measures) -> None:
        assert measure.broken(suite) == []


def _seconds_of_the_copy(desk: Desk) -> float:
    """What the model's copy took, as the journal tells it; a small model's copy is within the stage step."""
    for record in reversed(desk.journal()):
        if "copy_s" in record:
            return float(record["copy_s"])
    return 0.0
