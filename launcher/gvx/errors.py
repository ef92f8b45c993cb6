"""The exceptions of gvx: one small tree. A class's docstring says when it is raised; each knows its exit code.

Exit codes of ``gvx-launch`` (docker's, so that scripts written for ``docker run`` go on working):

=====  ==================================================================
0–123  the guest's own
124    the episode was ended by ``--timeout`` (:class:`SandboxTimeout`)
125    gvx itself failed, the guest's command did not run or its end is unknown (every other :class:`GvxError`)
126    the guest's command exists, but cannot be executed (:class:`CommandNotExecutable`)
127    the guest's command was not found (:class:`CommandNotFound`)
128+n  the guest was ended by signal n
=====  ==================================================================
"""

from __future__ import annotations


class GvxError(Exception):
    """Base of all errors of gvx: what went wrong, where, and what to do."""

    exit_code = 125

    def __init__(self, what: str, *, where: str = "", hint: str = "", reported: bool = False) -> None:
        """Keep the parts; ``reported`` says that the supervisor already wrote this line to the episode's stderr."""
        self.what, self.where, self.hint, self.reported = what, where, hint, reported
        super().__init__(what)

    def __str__(self) -> str:
        """One line: ``where: what (hint)``."""
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text} ({self.hint})" if self.hint else text


class ConfigError(GvxError):
    """A setting is malformed, contradicts another one, or asks for something that does not exist."""


class ImageError(GvxError):
    """The container image is missing, damaged or of an unknown kind."""


class VolumeError(GvxError):
    """A volume cannot be used: missing, busy, damaged, or not clean."""


class InfraError(GvxError):
    """gvx-sentry is missing, could not start, or died."""


class SandboxTimeout(GvxError):
    """The episode did not end, or did not start, in the time given."""

    exit_code = 124


class CommandNotExecutable(GvxError):
    """The guest's command exists, but is no program that may be executed."""

    exit_code = 126


class CommandNotFound(GvxError):
    """The guest's command does not exist in the image."""

    exit_code = 127
