#!/usr/bin/env python3
"""Writes HellaSwag's questions as token ids, for `train_gpt eval --hellaswag` (the format: llmc/hellaswag.h).

    make_hellaswag.py hellaswag_val.jsonl hellaswag_val.bin                                  GPT-2's tokens, by tiktoken
    make_hellaswag.py --tokenizer meta-llama/Meta-Llama-3-8B hellaswag_val.jsonl out.bin     any other, by transformers

The questions: https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl (10,042 of them). A
completion is tokenized apart from its context and with a space before it, as llm.c does, whose file this reproduces:
version 1, 16-bit words. Where an id needs more, version 2 with 32-bit words.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

MAGIC = 20240522
Encode = Callable[[str], list[int]]


def load_tokenizer(name: str) -> Encode:
    if name == "gpt2":
        import tiktoken

        return tiktoken.get_encoding("gpt2").encode_ordinary
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def encode_question(question: dict, encode: Encode) -> tuple[int, list[int], list[list[int]]]:
    """Label, tokens of the context, tokens of each completion."""
    return question["label"], encode(question["ctx"]), [encode(" " + ending) for ending in question["endings"]]


def to_bytes(questions: Iterable[tuple[int, list[int], list[list[int]]]]) -> bytes:
    questions = list(questions)
    largest = max(max(context + sum(completions, [])) for _, context, completions in questions)
    version, word = (1, np.uint16) if largest < 2**16 - 1 else (2, np.uint32)
    marker, width = np.iinfo(word).max, np.dtype(word).itemsize
    body: list[int] = []
    longest = 0
    for index, (label, context, completions) in enumerate(questions):
        words = [marker, 0, index, label, len(completions), len(context), *context]
        for completion in completions:
            words += [len(completion), *completion]
        words[1] = len(words) * width
        if max(words[1:]) >= marker:
            raise ValueError(f"question {index}: too long for {8 * width}-bit words")
        longest = max(longest, words[1])
        body += words
    header = np.zeros(256, np.int32)
    header[:4] = MAGIC, version, len(questions), longest
    return header.tobytes() + np.array(body, word).tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="gpt2", help="gpt2, or a name that transformers knows")
    parser.add_argument("--count", type=int, help="only the first so many questions")
    parser.add_argument("jsonl", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    encode = load_tokenizer(arguments.tokenizer)
    lines = [line for line in arguments.jsonl.read_text(encoding="utf-8").split("\n") if line][: arguments.count]
    data = to_bytes(encode_question(json.loads(line), encode) for line in lines)
    arguments.output.write_bytes(data)
    print(f"{arguments.output}: {len(lines)} questions, {len(data)} bytes")


if __name__ == "__main__":
    main()
