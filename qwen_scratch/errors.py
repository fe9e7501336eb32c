"""The one exception for wrong input. A file of its own, so that commands can use it before torch is imported."""


class InputError(ValueError):
    """What the caller gave is wrong; the message is one or two lines that name it and the remedy."""


def is_out_of_memory(error: Exception) -> bool:
    """torch says it with a class of its own on a GPU, and on a CPU only in words."""
    return (
        isinstance(error, MemoryError) or "OutOfMemoryError" in type(error).__name__ or "allocate memory" in str(error)
    )
