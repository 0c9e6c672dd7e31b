"""The one exception a user is meant to read: what is wrong, where, and what to do."""


class UserError(Exception):
    """Bad input, told in one sentence. The command line prints it and exits with code 2.

    shared: every process of the run raises it, so that only the first one needs to say it.
    """

    def __init__(self, message: str = "", *, shared: bool = False):
        super().__init__(message)
        self.shared = shared
