"""The errors a user can meet. Each message says what was got, what was wanted and what to do."""


class JaxpageError(ValueError):
    """Any mistake that the caller can correct."""


class ConfigError(JaxpageError):
    """A setting of the engine or of a call is wrong, or names something that is not available."""


class RequestError(JaxpageError):
    """One request is wrong; the other requests go on."""


class CapacityError(JaxpageError):
    """Something can never fit; the message gives the need and what there is."""


class PromptCapacityError(RequestError, CapacityError):
    """A prompt that the pool can never hold: one request's mistake, and a matter of room."""


class CheckpointError(JaxpageError):
    """Model files are missing, half-written, damaged or do not match their config."""
