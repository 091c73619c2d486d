"""The errors a user can meet. Each message is one line: what, the value, where, and what to do.

The console script prints the message of a ``TbaError`` without a traceback and exits with its ``exit_code``. Any
other exception is a fault of this project and keeps its traceback.
"""

from reprlib import repr as short


def shown(value: object, most: int = 80) -> str:
    """What a file or a peer calls something, fit for one line: at most ``most`` characters, all of them printable.

    The middle of a longer text is left out, since names that differ mostly do so at one of their ends.
    """
    text = value if isinstance(value, str) else short(value)
    if not text.isprintable():
        text = repr(text)[1:-1]
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


class TbaError(Exception):
    """Something went wrong that the user can understand and act on."""

    exit_code = 1


class ConfigError(TbaError):
    """The configuration cannot be used. ``problems`` holds one line for each thing that is wrong."""

    exit_code = 2

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class RunFolderError(TbaError):
    """The run folder cannot be used: it belongs to another configuration, or cannot be written."""

    exit_code = 2


class ModelError(TbaError):
    """A model folder cannot be read: unknown architecture, missing or unexpected weights, wrong shapes."""

    exit_code = 2


class KernelError(TbaError):
    """A kernel was given what it cannot compute: a temperature, a label, dtypes or shapes."""


class CheckpointError(TbaError):
    """A checkpoint cannot be written or read."""


class TransportError(TbaError):
    """A peer cannot be reached, or an address cannot be bound."""


class KeyFileError(TransportError):
    """The file with the secret of trainer and searchers is not what it must be."""

    exit_code = 2


class NoTrainerError(TransportError):
    """A searcher found no trainer for too long; it may be started again."""

    exit_code = 75


class WeightTransferError(TbaError):
    """A version of the weights did not arrive whole: names the version, the sender, the bucket and the reason."""


class EngineError(TbaError):
    """The inference engine is unusable and its process has to be restarted."""


class TaskError(TbaError):
    """A task cannot supply prompts or scores."""


class RoleFailedError(TbaError):
    """A process that the launcher started ended in failure."""
