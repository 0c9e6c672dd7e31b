"""The one exception a user is meant to read: what is wrong, where, and what to do."""


class UserError(Exception):
    """Bad input, told in one sentence. The command line prints it and exits with code 2.

    told: of several processes, whether another one tells it to the user; None where that is not agreed.
    """

    def __init__(self, message: str = "", *, told: bool | None = None):
        super().__init__(message)
        self.told = told
