"""Errors a user can cause. Each message is one sentence: the value, the rule it breaks, what to do instead."""


class RayfedError(Exception):
    """Base of every error rayfed raises on purpose; the commands print it and exit with ``exit_code``."""

    exit_code = 1


class OptionError(RayfedError):
    """An option has an unknown name, a wrong type, a value out of range, or contradicts another one."""

    exit_code = 2


class DataError(RayfedError):
    """A data set, class list or partition is missing, damaged or impossible."""

    exit_code = 2


class BackboneError(RayfedError):
    """A backbone, checkpoint or tokenizer cannot be used as asked."""

    exit_code = 2


class AdapterError(RayfedError):
    """An adapter target matches nothing, or a saved adapter does not fit the model."""

    exit_code = 2


class ResourceError(RayfedError):
    """The machine or cluster can never provide what was asked for."""

    exit_code = 2


class RoundError(RayfedError):
    """A round cannot be completed: too few good updates were left."""


class NonFiniteError(RayfedError):
    """A loss, an update or a private parameter became infinite, undefined, or larger than any trained adapter."""


class DivergedError(RoundError):
    """A round cannot be completed because numbers ran away: every update that is missing was not finite."""


class SweepError(RayfedError):
    """A sweep has no valid trial, or failed ones where none may fail."""


class CheckpointError(RayfedError):
    """A saved run is missing a part, damaged, or belongs to other options."""

    exit_code = 2


class StorageError(CheckpointError):
    """A state cannot be written (a full disk): the run stops, what was saved before is whole."""

    exit_code = 1


def first_line(error: BaseException) -> str:
    """The first line of what ``error`` says, or its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def kind_and_line(error: BaseException, limit: int = 500) -> str:
    """The type and the first line of ``error``, at most ``limit`` characters."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:limit]
