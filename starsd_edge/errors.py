"""The tree of errors, and the exit code of each.

    StarSDError                  anything this project says in one line
    ├── UsageError               the caller asked for something that makes no sense
    ├── ConfigError              a file the user wrote is wrong: file, key, what is allowed
    ├── BundleError              a model, bundle or head file is missing, damaged or of the wrong kind
    ├── ResourceError            the machine has too little of something: disk, memory, a free port
    ├── MissingDependencyError   a package of an extra is not installed, or two exclude each other
    ├── LinkError                the draft service cannot be used from here
    │   ├── UnreachableError     no route, nothing listens, or it stopped answering
    │   ├── AuthenticationError  a key is unknown, revoked or not the pinned one
    │   └── IncompatibleError    the two ends do not fit together: the message names the field
    ├── ProtocolError
    │   ├── LocalProtocolError   our own code used a state machine wrongly: a bug here
    │   └── RemoteProtocolError  the peer sent what the protocol does not allow
    └── DeployError              a step on a device failed

A message says what happened, where, and what to do next. The command line prints it as one line and leaves
with `exit_code`; a traceback appears only with --debug.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AuthenticationError",
    "BundleError",
    "ConfigError",
    "DeployError",
    "IncompatibleError",
    "LinkError",
    "LocalProtocolError",
    "MissingDependencyError",
    "ProtocolError",
    "RemoteProtocolError",
    "ResourceError",
    "StarSDError",
    "UnreachableError",
    "UsageError",
]


class StarSDError(Exception):
    """Base of every error a user may see."""

    exit_code: ClassVar[int] = 1


class UsageError(StarSDError):
    """Raised when arguments make no sense together."""

    exit_code = 2


class ConfigError(StarSDError):
    """Raised when a file the user wrote is wrong; names file, key and what is allowed."""

    exit_code = 3


class BundleError(StarSDError):
    """Raised when a model, bundle or head file is missing, damaged or of an unsupported kind."""

    exit_code = 4


class ResourceError(StarSDError):
    """Raised when the machine has too little of something: disk, memory, a free port."""

    exit_code = 5


class MissingDependencyError(StarSDError):
    """Raised when an extra's package is not installed, or when two installed ones exclude each other."""

    exit_code = 6


class LinkError(StarSDError):
    """Raised when the draft service cannot be used from here."""

    exit_code = 7


class UnreachableError(LinkError):
    """Raised when there is no route, nothing listens, or the service stopped answering."""


class AuthenticationError(LinkError):
    """Raised when a key is unknown, revoked, or not the pinned one."""


class IncompatibleError(LinkError):
    """Raised when version or compatibility hash differ; names the differing field."""


class ProtocolError(StarSDError):
    """Base of protocol errors."""

    exit_code = 8


class LocalProtocolError(ProtocolError):
    """Raised when our own code uses a state machine wrongly: a bug here."""


class RemoteProtocolError(ProtocolError):
    """Raised when the peer sends what the protocol does not allow."""


class DeployError(StarSDError):
    """Raised when a step on a device fails."""

    exit_code = 9
