"""Replicas in the settings of a server: an install enables their units, and what it does to a model it does to them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from server_kit import RootedService, Server

from installer.base.errors import InstallError
from installer.decide.install_options import ModelChoice, ReplicaChoice
from installer.operate.status import status

Bundles = Callable[..., Path]
REPLICA = '\n[models.tiny-b]\nreplica-of = "tiny"  # on the second GPU\ngpus = ["1"]\n'


@pytest.fixture
def replicated(server: Server, bundle: Bundles) -> Server:
    """A server of which one model has a replica."""
    server.install(models=[ModelChoice(bundle(), "tiny", gpus=("0",))])
    with server.layout.config.open("a") as file:
        file.write(REPLICA)
    server.install(bundle())
    return server


def test_a_replica_gets_a_unit_and_the_model_stays_up(server: Server, bundle: Bundles) -> None:
    server.install(models=[ModelChoice(bundle(), "tiny", gpus=("0",))])
    before = server.service.named_pids()
    with server.layout.config.open("a") as file:
        file.write(REPLICA)
    assert server.install(bundle()).outcome == "installed"
    assert server.service.models() == ["tiny", "tiny-b"]
    after = server.service.named_pids()
    assert after["tiny"] == before["tiny"]
    assert "tiny-b" in after
    assert server.serving()["models"].keys() == {"tiny"}
    assert server.install(bundle()).outcome == "already-installed"
    assert status(server.layout, service=server.service)["replicas"] == {"tiny-b": "tiny"}


def test_an_upgrade_and_a_rollback_take_the_replica_along(replicated: Server, bundle: Bundles) -> None:
    before = replicated.service.named_pids()
    two = replicated.install(bundle(2))
    after = replicated.service.named_pids()
    assert after["tiny"] != before["tiny"]
    assert after["tiny-b"] != before["tiny-b"]
    assert REPLICA.strip() in replicated.layout.config.read_text()
    replicated.rollback()
    again = replicated.service.named_pids()
    assert again["tiny-b"] != after["tiny-b"]
    assert replicated.service.models() == ["tiny", "tiny-b"]
    assert replicated.serving()["models"]["tiny"] != two.model_dir


def test_a_replica_that_crashes_undoes_the_install(replicated: Server, bundle: Bundles) -> None:
    text = replicated.layout.config.read_text()
    with pytest.raises(Exception, match="ended while it was starting"):
        replicated.install(bundle(2), mode="crash")
    assert replicated.layout.config.read_text() == text
    assert replicated.service.models() == ["tiny", "tiny-b"]
    assert replicated.service.named_pids().keys() == {"gateway", "tiny", "tiny-b"}


def test_it_goes_with_its_model(replicated: Server, bundle: Bundles) -> None:
    replicated.install(models=[ModelChoice(bundle(2), "second")], media=[])
    replicated.install(models=[], remove=["tiny"])
    assert replicated.service.models() == ["second"]
    assert "tiny-b" not in replicated.layout.config.read_text()
    assert "tiny-b" not in replicated.service.named_pids()


def test_replicas_come_and_go_without_a_restart(server: Server, bundle: Bundles) -> None:
    server.install(models=[ModelChoice(bundle(), "tiny", gpus=("0",))])
    before = server.service.named_pids()
    server.install(models=[], replicas=[ReplicaChoice("tiny-b", "tiny", ("1",))])
    assert REPLICA.splitlines()[-1] in server.layout.config.read_text()
    assert server.service.models() == ["tiny", "tiny-b"]
    assert before.items() <= server.service.named_pids().items(), "the gateway and the model were not touched"
    assert "tiny-b" in server.service.named_pids()
    again = server.install(models=[], replicas=[ReplicaChoice("tiny-b", "tiny", ("1",))])
    assert again.outcome == "already-installed"
    server.install(models=[], remove=["tiny-b"])
    assert server.service.models() == ["tiny"]
    assert server.service.named_pids() == before
    assert "tiny-b" not in server.layout.config.read_text()


@pytest.mark.parametrize(("choice", "said"), [
    (ReplicaChoice("tiny-b", "other"), "No model called other"),
    (ReplicaChoice("tiny", "tiny"), "called tiny already"),
    (ReplicaChoice("Tiny B", "tiny"), "cannot be used for a service"),
])  # fmt: skip
def test_a_replica_needs_a_model_and_a_name(server: Server, bundle: Bundles, choice: ReplicaChoice, said: str) -> None:
    server.install(bundle())
    before = server.layout.config.read_text()
    with pytest.raises(InstallError, match=said):
        server.install(models=[], replicas=[choice])
    assert server.layout.config.read_text() == before


def test_a_gateway_that_cannot_read_again_is_restarted(
    server: Server, bundle: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be of an older release."""
    server.install(bundle())
    before = server.service.named_pids()
    monkeypatch.setattr(RootedService, "reload_models", lambda *_: False)
    server.install(models=[ModelChoice(bundle(2), "second")])
    after = server.service.named_pids()
    assert after["gateway"] != before["gateway"]
    assert after["tiny"] == before["tiny"]
    assert server.serving()["models"].keys() == {"second", "tiny"}
