"""The errors a caller can meet. Every one says what was expected and what came."""

from __future__ import annotations


class ReplayError(Exception):
    """Base class of every error this package raises on purpose."""


class ArgumentError(ReplayError, ValueError):
    """An argument breaks the contract; no tensor has been touched.

    Attributes:
        name: the argument's name in the public signature.
        expected: what the contract asks for.
        got: what came.
    """

    def __init__(self, name: str, expected: str, got: object) -> None:
        self.name, self.expected, self.got = name, expected, got
        super().__init__(f"{name}: expected {expected}, got {got}")


class UnsupportedError(ReplayError, NotImplementedError):
    """A backend asked for by name cannot serve the problem, or the configuration is refused.

    Attributes:
        subject: the backend, model or option that cannot serve.
        reason: why.
    """

    def __init__(self, subject: str, reason: str) -> None:
        self.subject, self.reason = subject, reason
        super().__init__(f"{subject}: {reason}")


class RegistryError(ReplayError):
    """A registry file is malformed; the message names the file and the field."""
