"""Print which fraction of the held-out answers of a run has at most 20 words, at each evaluation.

python examples/short_answers.py runs/short
"""

import json
import sys
from pathlib import Path

MOST_WORDS = 20

for line in (Path(sys.argv[1]) / "events.jsonl").read_text().splitlines():
    event = json.loads(line)
    if event["kind"] == "evaluation":
        words = [len(sample["answer"].split()) for sample in event["samples"]]
        short = sum(count <= MOST_WORDS for count in words) / len(words)
        print(f"step {event['step']}: {short:.2f} of {len(words)} answers have at most {MOST_WORDS} words")
