#!/bin/sh
# Train a judge of translations on the bundled data, test it, and score new answers.
#   MODEL=ORG/MODEL sh examples/judge.sh [options of `crosstune judge train`]
set -eu
model=${MODEL:-smollm2-135m}

crosstune judge train --model "$model" --dataset judge_translations --name judge "$@"
cat > answers.jsonl <<'ROWS'
{"task": "Translate into Spanish: The cat sleeps.", "answer": "El gato duerme."}
{"task": "Translate into Spanish: The cat sleeps.", "answer": "El perro come."}
ROWS
crosstune judge predict runs/judge --input answers.jsonl --output verdicts.jsonl
cat verdicts.jsonl
