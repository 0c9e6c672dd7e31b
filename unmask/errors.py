"""The one exception a user is meant to read: what is wrong, where, and what to do."""


class UserError(Exception):
    """Bad input, told in one sentence. The command line prints it and exits with code 2."""
