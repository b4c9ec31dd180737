"""Every exception that WiSP raises on purpose.

WispError
├── ConfigurationError   the operator can fix it; names the setting and the value that works (also a ValueError)
│   └── UnsupportedModelError   a model, quantization or kernel that paging cannot serve exactly
├── CapacityError        a request or plan that can never fit (also a ValueError)
├── RetryableError       nothing was done; the same call may succeed later or elsewhere
│   ├── EngineUnavailableError   the engine is dead or does not answer
│   └── StoreUnavailableError    Redis does not answer
└── IntegrityError       a conservation check failed: a bug, never retried
"""


class WispError(Exception):
    """Base of every error that WiSP raises on purpose."""


class ConfigurationError(WispError, ValueError):
    """A setting is wrong; the message names it and a value that works."""


class UnsupportedModelError(ConfigurationError):
    """The model cannot be paged exactly; the message names what is unsupported."""


class CapacityError(WispError, ValueError):
    """A request or a plan can never fit the budget, with the numbers."""


class RetryableError(WispError):
    """Nothing was done; the same call may succeed later or elsewhere."""


class EngineUnavailableError(RetryableError):
    """The engine is dead or does not answer."""


class StoreUnavailableError(RetryableError):
    """Redis does not answer, or cannot do what it is asked.

    ``may_have_run``: the command was sent, and nobody knows what became of it.
    """

    def __init__(self, message: str = "", *, may_have_run: bool = False) -> None:
        super().__init__(message)
        self.may_have_run = may_have_run


class IntegrityError(WispError):
    """A conservation check (free + used = total) failed: a bug."""
