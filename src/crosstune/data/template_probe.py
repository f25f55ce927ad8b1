"""The child process that tries a chat template: reads it from standard input, renders it under the system's limits."""

from __future__ import annotations

import sys

from crosstune.data.template import FAULTS, ChatTemplate, Refused
from crosstune.data.template_limits import OverLimit

CPU_SECONDS = 4
MEMORY_BYTES = 1 << 30
EXIT_OVER_LIMIT = 3

TURNS = [
    {"role": "user", "content": "Hello, what is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And 3 + 3?\n"},
    {"role": "assistant", "content": "<think>\n3 + 3\n</think>\n\nIt is 6."},
]


def main() -> int:
    source = sys.stdin.buffer.read().decode()
    limit()
    try:
        template = ChatTemplate(source)
        for turns, asks in ((TURNS, False), (TURNS[:2], False), (TURNS[:3], True)):
            template.render(turns, add_generation_prompt=asks, bos_token="<s>", eos_token="</s>")
    except OverLimit as error:
        print(error, file=sys.stderr)
        return EXIT_OVER_LIMIT
    except MemoryError:
        print("it takes more memory than allowed.", file=sys.stderr)
        return EXIT_OVER_LIMIT
    except (*FAULTS, Refused):
        # Not a matter of limits: the conversation at hand will say what is wrong, and where.
        return 0
    return 0


def limit() -> None:
    """Nothing on Windows, where the parent's clock is the only limit."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


if __name__ == "__main__":
    sys.exit(main())
