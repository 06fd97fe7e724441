"""How many users a service level allows: closed loops of more and more clients until it is missed, then bisection."""

from collections.abc import Callable
from dataclasses import dataclass, field

from appliance.load.generator import OnProgress, run_load
from appliance.load.profile import TrafficProfile
from appliance.load.result import LoadResult
from appliance.load.slo import Slo
from appliance.load.target import Target

MOST_USERS = 1024
_PRECISION = 0.15   # relative precision of the answer; at least one user


@dataclass(slots=True)
class UsersAtSlo:
    """`users`: the most clients whose requests met the targets; 0: not even one. `capped`: more were not tried."""

    users: int = 0
    capped: bool = False
    points: list[tuple[int, float, LoadResult]] = field(default_factory=list)   # clients, share within the SLO, result


def find_users(
    target: Target, profile: TrafficProfile, slo: Slo, *, share: float = 0.95, most: int = MOST_USERS,
    rounds: int = 4, on_point: Callable[[int], OnProgress | None] = lambda clients: None,
) -> UsersAtSlo:  # fmt: skip
    """Measure it on `target`: for each number of clients, `rounds` requests per client. `on_point` gets the number and
    returns what shows the progress. Raises as `run_load` does."""

    def measure(clients: int) -> LoadResult:
        closed = profile.with_clients(clients)
        return run_load(target, closed, requests=max(8, clients * rounds), slo=slo, on_progress=on_point(clients))

    return users_at_slo(measure, share=share, most=most)


def users_at_slo(
    measure: Callable[[int], LoadResult], *, share: float = 0.95, start: int = 1, most: int = MOST_USERS
) -> UsersAtSlo:
    """`measure(clients)` runs the load with an SLO, which at least `share` of its requests must meet."""
    found = UsersAtSlo()

    def good(clients: int) -> bool:
        result = measure(clients)
        met = result.slo_share or 0.0
        found.points.append((clients, met, result))
        return met >= share

    below, above, clients = 0, None, max(1, min(start, most))
    while above is None:
        if good(clients):
            below = clients
            if clients == most:
                found.users, found.capped = most, True
                return found
            clients = min(most, clients * 2)
        else:
            above = clients
    while above - below > max(1, int(below * _PRECISION)):
        middle = (below + above) // 2
        if good(middle):
            below = middle
        else:
            above = middle
    found.users = below
    return found
