"""What a user reads of an exception: its message, and where it was raised, without what lies around it.

JAX wraps what a host function raises into a message of its own, with the whole traceback as text. What helps is at the
end of that text: the exception, and the last lines that led to it.
"""

import traceback

_TRACEBACK = "Traceback (most recent call last):"
_NUM_FRAMES = 3
_MAX_LETTERS = 2_000


def error_text(error: BaseException) -> str:
    """Type and message of the exception, of the innermost one where JAX tells it, and its last frames, one per line."""
    try:
        _, wrapped, told = str(error).rpartition(_TRACEBACK)
    except Exception:  # a user's own exception may fail to make its text; the traceback module says so
        wrapped = told = ""
    if wrapped:
        frames, message = _told(told)
    else:
        message = "".join(traceback.format_exception_only(error)).strip()
        frames = traceback.format_list(traceback.extract_tb(error.__traceback__))
    if len(message) > _MAX_LETTERS:
        message = f"{message[:_MAX_LETTERS]} ... ({len(message) - _MAX_LETTERS:,} more letters)"
    return "\n".join([message, *(line.rstrip() for frame in frames[-_NUM_FRAMES:] for line in frame.splitlines())])


def _told(text: str) -> tuple[list[str], str]:
    """The frames of a traceback that is told as text, and the exception that it ends with."""
    frames: list[str] = []
    lines = text.strip("\n").splitlines()
    for number, line in enumerate(lines):
        if line.startswith("  File "):
            frames.append(line)
        elif line.startswith("    ") and frames:
            frames[-1] += f"\n{line}"
        elif line.strip():
            return frames, "\n".join(lines[number:]).strip()
    return frames, ""
