"""The exceptions that wgattn raises. Each message is a sentence that holds the numbers and says what to do."""


class WgattnError(Exception):
    """Base of all errors raised by wgattn."""


class ArgumentError(WgattnError, ValueError):
    """A value that no call could accept, such as a token id outside the vocabulary."""


class ShapeError(ArgumentError):
    """Arrays whose shapes disagree with each other or with what the call needs."""


class CapacityError(WgattnError):
    """The work does not fit: a KV cache, a buffer or a workgroup would have to be larger."""


class Unsupported(WgattnError):
    """Valid work that this device or this version cannot do; the message names what is missing."""


class DeviceError(WgattnError):
    """No adapter was found, or the device failed."""


class FormatError(WgattnError, ValueError):
    """A file that is not what its name promises: not GGUF, truncated, or inconsistent."""


class ModelNotFound(WgattnError, FileNotFoundError):
    """A model file that does not exist."""
