"""Errors for operators: what happened, what changed, what to do next, and the exit code."""

from enum import IntEnum

from installer.base.i18n import reason, t


class ExitCode(IntEnum):
    """Exit codes of `atoll`; scripts may rely on them."""

    OK = 0
    BUG = 1
    USAGE = 2              # wrong flags or answers file
    PREFLIGHT_FAIL = 3
    PREFLIGHT_WARN = 4     # only with --strict
    UNTRUSTED = 10         # signature missing, broken or by an unknown key
    CONTENT_MISMATCH = 11  # bytes differ from what was signed
    DOWNGRADE = 12
    MEDIA = 13             # bundle or a part of it is not there
    LICENCE = 20
    IO = 30                # no space, read-only, unreadable state
    UNHEALTHY = 40         # the service did not answer; the previous one was put back
    ROLLBACK_FAILED = 41
    BUSY = 75
    INTERRUPTED = 130


PORT_IN_USE = "port-in-use"   # by a program that is not ours: it answers in the place of the service


class InstallError(Exception):
    """An error for operators.

    `message` says what happened, `why` the likely cause, `changed` what was and was not touched, `hint` what to do
    next; `log_tail` holds the last lines of the service's log if they explain it. `error_id` is for programs: the id of
    the engine's error (engine/errors.py), if one ended the service, or PORT_IN_USE.
    """

    def __init__(
        self,
        message: str,
        *,
        exit_code: int = ExitCode.BUG,
        why: str = "",
        changed: str = "",
        hint: str = "",
        log_tail: list[str] | None = None,
        error_id: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = int(exit_code)
        self.why = why
        self.changed = changed
        self.hint = hint
        self.log_tail = log_tail or []
        self.error_id = error_id

    def to_json(self) -> dict[str, object]:
        """The same facts for `--json`."""
        return {
            "error": self.message,
            "exit_code": self.exit_code,
            "why": self.why,
            "changed": self.changed,
            "next": self.hint,
            "log_tail": self.log_tail,
        }


def usage_error(message: str, hint: str = "") -> InstallError:
    """An InstallError (usage) for a request that is refused before anything was changed."""
    return InstallError(message, exit_code=ExitCode.USAGE, changed=t("Nothing was changed."), hint=hint)


def io_error(action: str, error: OSError) -> InstallError:
    """An InstallError for an OSError during `action` (full disk, read-only file system, permission, other).

    `action` completes "Could not …"; its Korean is a noun phrase.
    """
    import errno

    causes = {
        errno.ENOSPC: (t("the disk is full"), t("Free some space (df -h) and run the same command again.")),
        errno.EDQUOT: (t("the disk quota is used up"), t("Raise the quota and run the same command again.")),
        errno.EFBIG: (t("a file-size limit was reached"), t("Raise it (ulimit -f unlimited), then run again.")),
        errno.EROFS: (t("the file system is read-only"), t("Choose a writable --prefix, or remount it read-write.")),
        errno.EACCES: (t("permission denied"), t("Choose a --prefix that this user may write to.")),
        errno.EPERM: (t("operation not permitted"), t("Choose a --prefix that this user may write to.")),
        errno.EIO: (
            t("the device reported a read or write error"),
            t("Check disk and medium (dmesg), then run again."),
        ),
    }
    other = (reason(error), t("Correct this and run the same command again."))
    why, hint = causes.get(error.errno or 0, other)
    message = t("Could not {action}: {why}.", action=action, why=why)
    if error.filename:
        message = t("Could not {action} ({file}): {why}.", action=action, file=error.filename, why=why)
    return InstallError(
        message,
        exit_code=ExitCode.IO,
        why=t("The operating system answered: {why}.", why=reason(error)),
        hint=hint,
    )
