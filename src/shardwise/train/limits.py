"""Errors that come from what this process may use (`ulimit`) or write: told as such, since another
start would end alike."""

from __future__ import annotations

import errno
import resource

from shardwise.errors import ConfigError

_LIMITS = {
    errno.EFBIG: ("size of a file", "-f", resource.RLIMIT_FSIZE, 1024),
    errno.EMFILE: ("number of open files", "-n", resource.RLIMIT_NOFILE, 1),
    errno.ENOMEM: ("address space", "-v", resource.RLIMIT_AS, 1024),
    errno.EAGAIN: (
        "number of processes and threads",
        "-u",
        getattr(resource, "RLIMIT_NPROC", 0),
        1,
    ),
}
_PLACES = {
    errno.ENOSPC: "too little space is left there; make room, or use another folder",
    errno.EDQUOT: "the quota there is used up; make room, or use another folder",
    errno.EROFS: "it is mounted read-only; use another folder",
    errno.EACCES: "there is no permission to write there; use another folder",
}
# What C++ and loaders say in words of their own.
_WORDS = {
    "file too large": errno.EFBIG,
    "too many open files": errno.EMFILE,
    "cannot allocate memory": errno.ENOMEM,
    "not enough memory: you tried to allocate": errno.ENOMEM,
    "failed to map segment": errno.ENOMEM,
    "unable to mmap": errno.ENOMEM,
    "no address space": errno.ENOMEM,
    "can't start new thread": errno.EAGAIN,
    "are free on the disk": errno.ENOSPC,  # ours, before a checkpoint is written
}


def explain(error: BaseException | None) -> str:
    """Which limit or folder an error, or one of its causes, comes from; empty where it is none of
    these, or where nothing was limited."""
    while error is not None and not isinstance(error, ConfigError):  # which says it itself
        if found := _of_number(_number(error)):
            return found
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return ""


def _number(error: BaseException) -> int | None:
    if isinstance(error, OSError) and error.errno not in (None, errno.EAGAIN):
        return error.errno
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    text = str(error).lower()
    return next((number for words, number in _WORDS.items() if words in text), None)


def _of_number(number: int | None) -> str:
    if number in _PLACES:
        return _PLACES[number]
    if number not in _LIMITS:
        return ""
    what, option, limit, unit = _LIMITS[number]
    allowed = resource.getrlimit(limit)[0]
    if allowed == resource.RLIM_INFINITY:
        return ""
    return (
        f"the {what} is limited here (ulimit {option} is {allowed // unit}); raise the limit in "
        "the shell that starts the job"
    )
