"""Recognize out-of-memory errors of every library, and turn them into one error with advice."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Callable, Iterator

from crosstune.core.errors import UserError

# Only CUDA's allocator has its own exception. Torch's CPU allocator, MPS, cuBLAS, XPU and MLX raise a RuntimeError that is
# recognized by its message.
_MESSAGE = re.compile(
    r"DefaultCPUAllocator|out ?of ?memory|attempting to allocate|cannot allocate memory|can't allocate memory|unable to allocate|failed to allocate"
    r"|out_of_(device|host)_memory|insufficient memory|_STATUS_ALLOC_FAILED|std::bad_alloc|malloc or resource limit"
    r"|failed to map segment|can't start new thread",
    re.IGNORECASE,
)
_FAILED_CHECK = re.compile(r"^\[enforce fail at [^\]]*\]\s*[^.]*\.\s+")
"""The start of a message of torch's CPU allocator: a place in its source and the failed condition."""
_LOST_ERROR = re.compile(r"without (setting an exception|exception set)|without an exception set")
"""Python's message when it lacks the memory to create a MemoryError."""

STEP, UPDATING = "a step", "an update of the optimizer"
"""The passes of a step, repeatable with fewer rows at a time, and the optimizer update after them, not repeatable."""
LOADING, EVALUATING, GENERATING = "loading the model", "an evaluation", "generating text"


class OutOfMemory(UserError):
    """Something does not fit into memory. In a step, it is raised before the optimizer update."""

    def __init__(self, why: str, *, doing: str = STEP, do: str = "") -> None:
        """`do` is advice; empty means generic advice. A caller that knows the options replaces it with `with_advice`."""
        super().__init__(
            f"There is not enough memory for {doing}.",
            why=f"{why}; no step that was completed is lost.",
            do=do or "free memory, or use a smaller model",
        )
        self.reason, self.doing = why, doing
        self.shared = False
        """True if every process of the run raises it, so that all can recover together."""

    def with_advice(self, do: str) -> OutOfMemory:
        advised = OutOfMemory(self.reason, doing=self.doing, do=do)
        advised.shared = self.shared
        return advised


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError):
        return True
    if isinstance(error, SystemError):
        return _LOST_ERROR.search(str(error)) is not None
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # The system's loader raises an ImportError when it has no memory to map a library.
    return (
        isinstance(error, (RuntimeError, ValueError, ImportError)) and _MESSAGE.search(str(error)) is not None
    )


@contextlib.contextmanager
def memory_errors(*, doing: str, release: Callable[[], None] | None = None) -> Iterator[None]:
    """Convert every out-of-memory error in the `with` block to OutOfMemory; call `release` first, to free cached memory."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError, ValueError, SystemError, ImportError) as error:
        if not is_out_of_memory(error):
            raise
        if release is not None:
            release()
        text = "" if isinstance(error, SystemError) else str(error)  # its text does not mention memory
        first = _FAILED_CHECK.sub("", text.strip()).partition(". ")[0].splitlines()
        raise OutOfMemory(first[0].rstrip(".") if first else "an allocation failed", doing=doing) from error
