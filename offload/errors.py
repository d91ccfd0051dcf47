"""Every error that this package raises on purpose.

    OffloadError
    ├── SettingsError      what the user asked for is not allowed; names field, value and what is  (also ValueError)
    ├── PlanError          this model cannot be offloaded in the way asked for                     (also ValueError)
    ├── WeightAwayError    a streamed weight was used while it was not on the device
    ├── GradientsError     a streamed block was called where autograd would record it
    ├── SlotError          a device slot was read or written in the wrong phase
    ├── RankMismatchError  the ranks do not agree on the plan
    ├── PictureError       one of the pictures could not be made; names it
    └── PeerFailedError    another rank failed, so this one stops at the same pass

The first two are the user's to mend: a command that meets one prints its sentence and exits with
`USER_ERROR_EXIT_CODE`.
"""

from __future__ import annotations

USER_ERROR_EXIT_CODE = 2


class OffloadError(Exception):
    """Base of every error raised on purpose."""


class SettingsError(OffloadError, ValueError):
    """A setting has a value that is not allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}={value!s} cannot be used: {allowed}.")
        self.field, self.value, self.allowed = field, value, allowed

    def __reduce__(self) -> tuple[type, tuple[str, object, str]]:
        return type(self), (self.field, self.value, self.allowed)


class PlanError(OffloadError, ValueError):
    """The model cannot be offloaded in the way asked for."""


class WeightAwayError(OffloadError, RuntimeError):
    """A streamed weight was used while it was not on the device."""


class GradientsError(OffloadError, RuntimeError):
    """A streamed block was called where autograd would record it."""


class SlotError(OffloadError, RuntimeError):
    """A device slot was read or written in the wrong phase."""


class RankMismatchError(OffloadError, RuntimeError):
    """The ranks do not agree on the plan."""


class PictureError(OffloadError, RuntimeError):
    """One of the pictures could not be made."""


class PeerFailedError(OffloadError, RuntimeError):
    """Another rank failed, so this one stops at the same pass."""
