"""What vLLM reads and writes, in tokens per second. `bench/cpu.py decode --vllm PYTHON` runs this
in vLLM's own environment, with what to do as JSON on its input; the last line is the answer.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main() -> None:
    from vllm import LLM, SamplingParams

    asked = json.load(sys.stdin)
    tokens = asked["tokens"]
    prompt = asked["prompt"]
    model = LLM(
        model=asked["model"],
        dtype=asked["dtype"],
        max_model_len=1024,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )

    def seconds(count: int, batch: int, turns: int) -> float:
        how = SamplingParams(
            temperature=0.0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False
        )
        given = [{"prompt_token_ids": [*prompt[:-1], 100 + i]} for i in range(batch)]
        found = []
        for turn in range(turns + 1):  # the first warms up
            start = time.perf_counter()
            model.generate(given, how, use_tqdm=False)
            if turn:
                found.append(time.perf_counter() - start)
        return statistics.median(found)

    reading = seconds(1, 1, 3)
    one = seconds(1 + tokens, 1, 3) - reading
    eight = seconds(1 + tokens, 8, 1) - seconds(1, 8, 1)
    answer = {
        "reads": round(len(prompt) / reading, 1),
        "batch 1": round(tokens / one, 1),
        "batch 8": round(8 * tokens / eight, 1),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
