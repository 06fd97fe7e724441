"""Times that were measured on the machines, and what is promised about them."""


class Measures:
    """Times that were measured and what was promised; printed in a table at the end."""

    def __init__(self, rows: list[tuple[str, float, float | None]]) -> None:
        self._rows = rows

    def __call__(self, what: str, seconds: float, limit: float | None = None) -> None:
        self._rows.append((what, seconds, limit))

    def broken(self, about: str) -> list[str]:
        """Promises about a suite that were not kept."""
        return [
            f"{what}: {seconds:.1f} s, and at most {limit:.1f} s are promised"
            for what, seconds, limit in self._rows
            if what.startswith(about) and limit is not None and seconds > limit
        ]
