"""How a command ends: exit statuses, and the two errors that end one without a traceback."""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class UserError(Exception):
    """Something that the user can mend; exit status 2. `hint` says how, where the message does not."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Failed(Exception):
    """Something went wrong that is not the user's doing; exit status 1."""
