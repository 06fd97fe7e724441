"""What is wrong with an installation, each finding with its next command; and what this user could not see."""

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from installer.base.errors import InstallError
from installer.base.i18n import t
from offline_bundle.errors import BundleError

T = TypeVar("T")
Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding. An error makes the installation unhealthy; a warning will become one if nothing is done."""

    what: str
    next: str = ""
    severity: Severity = "error"


@dataclass(slots=True)
class Findings:
    """Collects findings while the parts of a status are read. A part that fails does not hide the others."""

    problems: list[Problem] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)

    def error(self, what: str, next: str = "") -> None:
        self.problems.append(Problem(what, next))

    def warn(self, what: str, next: str = "") -> None:
        self.problems.append(Problem(what, next, "warning"))

    def try_read(self, what: str, read: Callable[[], T], default: T) -> T:
        """The result of `read`. If this user may not read it, returns `default` and lists `what`; if it fails, notes
        the error."""
        try:
            return read()
        except PermissionError:
            self.unseen.append(what)
        except (InstallError, BundleError) as error:
            if isinstance(error.__cause__, PermissionError):
                self.unseen.append(what)
            else:
                self.error(error.message, error.hint)
        except OSError as error:
            if error.errno == errno.EACCES:
                self.unseen.append(what)
            else:
                self.error(t("{what} cannot be read: {why}.", what=what, why=error.strerror or error))
        return default

    @property
    def healthy(self) -> bool:
        return not any(problem.severity == "error" for problem in self.problems)

    def to_json(self) -> list[dict[str, Any]]:
        """Errors first. The texts are still `Text`s: English in JSON, translated on a screen."""
        ordered = sorted(self.problems, key=lambda problem: problem.severity != "error")
        return [{"what": problem.what, "next": problem.next, "severity": problem.severity} for problem in ordered]
