"""Train from Python, stop early with a callback, generate, and open the adapter with PEFT.

python examples/train.py [MODEL]
"""

import sys
from pathlib import Path

import crosstune

DATA = Path(__file__).parent / "chats.jsonl"


def stop_when_learned(metrics):
    if metrics["loss"] is not None and metrics["loss"] < 0.05:
        return crosstune.STOP
    return None


def main(model_name="smollm2-135m"):
    run = crosstune.train(
        model_name=model_name,
        dataset=str(DATA),
        train_type="lora",
        lr=5e-4,
        batch_size=4,
        max_steps=60,
        name="from-python",
        callbacks=[stop_when_learned],
    )
    print(run.status, run.summary["eval_before"], run.summary["eval_after"])
    print(run.generate("How much is the red lamp?", max_new_tokens=20))
    print(f'peft: PeftModel.from_pretrained(base_model, "{run.result}")')


if __name__ == "__main__":
    main(*sys.argv[1:])
