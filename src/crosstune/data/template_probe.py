"""Try a chat template in a child process: read it from standard input, render it under system limits."""

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
        # Not about limits: rendering the actual conversation reports this error.
        return 0
    return 0


def limit() -> None:
    """Limit the CPU time and memory of this process; on Windows only the parent's timeout applies."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


if __name__ == "__main__":
    sys.exit(main())
