"""The ISA tier in use, how the native module was built, and its handler of SIGBUS."""

from __future__ import annotations

from w4conv import _native
from w4conv.errors import UsageError


def isa_tiers() -> tuple[str, ...]:
    """Tiers of this build that this CPU can run, lowest first."""
    return tuple(_native.isa_tiers())


def isa_tier() -> str:
    """The tier in use: the highest, or the one that W4CONV_ISA names. Raises UsageError when that cannot run here."""
    try:
        return _native.isa_tier()
    except ValueError as error:
        raise UsageError(str(error)) from None


def dot_instruction() -> str:
    """The dot product that the tier in use was compiled to, such as "vpdpwssd zmm"."""
    return _native.dot_instruction()


def build_info() -> str:
    """Compiler and build type of the native module."""
    return _native.BUILD


def explain_sigbus() -> None:
    """Install a handler for SIGBUS after truncation: the process ends with a message and exit code 3.

    The kernel sends SIGBUS on access to a mapped page beyond the new end of a file. A process has one handler, so
    programs call this, libraries do not.
    """
    _native.explain_lost_pages()
