"""Prompt lookup: how many drafted tokens are accepted, and how much faster that is, on two kinds of prompts.

    python tests/bench/lookup.py smol.w4 qwen-coder.w4 [--drafts 0,4,8,16] [--rounds 3] [--tokens 160]

The output of all is compared with that of no drafts. Rates are medians; alternately in one run.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from w4conv.runtime.chat import ChatTemplate
from w4conv.runtime.engine import Model
from w4conv.runtime.generation import Generation, TextStream, generate_text
from w4conv.runtime.tokenizer import Tokenizer

ARTICLE = """\
The harbour of Lind was built in three stages. The first pier, finished in 1871, was made of oak piles driven into the
clay by hand, and it served the herring fleet for nearly forty years. When steam trawlers replaced sailing boats, the
pier was too short and the water beside it too shallow, so that the larger ships had to wait for high tide. The second
stage began in 1909: a stone breakwater of four hundred metres, behind which the basin was dredged to six metres. The
work was interrupted twice, once by a strike of the quarrymen and once by the storm of November 1911, which carried away
sixty metres of the unfinished wall. The third stage came after the railway. From 1926 on, the harbour company laid two
tracks along the quay, bought four electric cranes, and built a cold store for eight hundred tonnes of fish. For a short
time Lind landed more herring than any other harbour of the coast. The decline was slow. The shoals moved north in the
fifties, the cold store closed in 1963, and the tracks were lifted ten years later. Today the basin holds some ninety
yachts, the last electric crane is a monument, and the stone breakwater is repaired each spring by the town."""
CODE = """\
def summarize_orders(orders, currency):
    total = 0
    count = 0
    largest = None
    for order in orders:
        if order.currency != currency:
            continue
        total = total + order.amount
        count = count + 1
        if largest is None or order.amount > largest.amount:
            largest = order
    if count == 0:
        return {"total": 0, "count": 0, "mean": None, "largest": None}
    return {"total": total, "count": count, "mean": total / count, "largest": largest.name}
"""
PROMPTS = {
    "summary": f"Summarize the following text in three sentences, and quote the figures.\n\n{ARTICLE}",
    "code edit": "Rename the variable `total` to `amount_sum` in this function and return the whole function, without "
    f"any explanation.\n\n```python\n{CODE}```",
}


def answer(model: Model, tokenizer: Tokenizer, prompt: str, lookup: int, n_tokens: int) -> Generation:
    template = ChatTemplate.from_blobs(model.container.blobs)
    text = template.render([{"role": "user", "content": prompt}], special_tokens=tokenizer.special_tokens)
    stream = TextStream(
        model,
        tokenizer,
        tokenizer.encode(text, add_bos=False),
        max_tokens=n_tokens,
        stop_ids=tokenizer.stop_ids(chat=True),
        at_start=True,
        lookup=lookup,
    )
    return generate_text(stream, on_piece=lambda _: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--drafts", default="0,4,8,16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=160)
    args = parser.parse_args()
    drafts = [int(n) for n in args.drafts.split(",")]
    for file in args.files:
        with Model(file) as model:
            tokenizer = Tokenizer(model.container.blobs)
            for kind, prompt in PROMPTS.items():
                runs: dict[int, list[Generation]] = {n: [] for n in drafts}
                for _ in range(args.rounds):
                    for n in drafts:
                        runs[n].append(answer(model, tokenizer, prompt, n, args.tokens))
                first = runs[drafts[0]][0]
                print(f"{file.name}, {kind}: {first.n_prompt} tokens, {first.n_generated} generated ({first.finish})")
                base = statistics.median(g.decode_per_second or 0 for g in runs[drafts[0]])
                for n in drafts:
                    g, rate = runs[n][0], statistics.median(g.decode_per_second or 0 for g in runs[n])
                    same = "same text" if g.text == first.text else "OTHER TEXT"
                    words = f"{g.n_accepted:3} of {g.n_drafted:3} drafted, {rate:6.1f} tokens/s, {rate / base:.2f} x"
                    print(f"  N = {n:2}: {words}, {same}")


if __name__ == "__main__":
    main()
