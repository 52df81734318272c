"""The one exception that means "the user can fix this"."""


class UserError(Exception):
    """Bad input: a file, a flag or a checkpoint that cannot be used as given.

    The message is one sentence that names the file, line and field where there are such. The
    command line prints it on stderr and exits with code 2, without a traceback.
    """
