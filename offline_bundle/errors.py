"""The one error of this package, and its exit codes. A part of install.sh."""

USAGE = 2  # an argument or answer is wrong
UNTRUSTED = 10  # signature missing, broken, or made by a key that is not trusted here
CONTENT = 11  # the medium's content differs from what was signed, or is of a kind that we refuse
REPLAY = 12  # older than what is already installed
MISSING = 13  # a medium, directory or file is not there
SPACE_IO = 30  # no space, or the disk failed
BUSY = 75  # another process holds the lock


class BundleError(Exception):
    """A bundle, key or store operation was refused or failed. Its text is for the operator.

    Attributes:
        message: what happened and why, in one or two sentences.
        hint: what to do next.
        exit_code: the process exit code that this error maps to (the constants of this module).
    """

    def __init__(self, message: str, hint: str = "", exit_code: int = CONTENT) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()
