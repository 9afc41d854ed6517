"""Errors the library raises on purpose. A command turns any `VenusError` into one line and exit code 2."""


class VenusError(Exception):
    """Base of all errors caused by input, files or configuration rather than by a bug here."""


class ConfigError(VenusError):
    """A configuration key or value that cannot be used; the message names it."""


class MediaError(VenusError):
    """A sound, picture or clip that cannot be read; the message names the file and what was expected."""


class TokenizerError(VenusError):
    """Tokenizer files that are missing or inconsistent with the model."""


class CheckpointError(VenusError):
    """A checkpoint that cannot be read or written; the message names tensor and file."""


class CapacityError(VenusError):
    """More was asked of a cache of fixed size than it holds."""


class GoldenError(VenusError):
    """A set of recorded numbers that is incomplete or not of the expected layout."""


class ShardingError(VenusError):
    """A mesh or sharding rule that does not fit the devices or the parameter tree."""


class GrammarError(VenusError):
    """A stretch of a session that is not laid out as the grammar says; the message names the position."""
