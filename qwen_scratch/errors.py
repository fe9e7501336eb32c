"""The one exception for wrong input. A file of its own, so that commands can use it before torch is imported."""


class InputError(ValueError):
    """What the caller gave is wrong; the message is one or two lines that name it and the remedy."""
