"""Text for tests: made of a seed, with everything in it that tokenizers stumble over."""

from __future__ import annotations

import random

_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def tricky_texts() -> list[str]:
    """Short texts in many scripts, with odd spaces, controls, marks and punctuation."""
    letters = "".join(chr(code) for code in (*range(0x4E00, 0x4F80), *range(0x391, 0x3CE)))
    rng = random.Random(0)
    many = ["".join(rng.choices(letters, k=9)) for _ in range(300)]
    return [
        *many,
        *(plain_text(rng.randrange(10**6), 300) for _ in range(200)),
        "Ünïcödé Straße ΣΊΣΥΦΟΣ ΑΣ. naïve e\u0301a\u0308! ﬁ Ⅷ ½",
        "a\x0bb\x0cc\x00d\u00a0e\u2003f\u200bg\u2028h\x85i\rj\r\nk\tl",
        "中文,テスト。「引用」 한국어 🙂🙂👩‍👩‍👧 x²",
        "don't (stop) it's 3.14-15, e.g. foo_bar{baz}[0] != `x` ~ \"q\" <unk> @-@ 1,000",
        "word" * 60,
        "    indented\n\n\n  more   \n",
        " ",
        "",
        "x",
    ]


def plain_text(seed: int, size: int) -> str:
    """About `size` characters of words and sentences that look a little like English."""
    rng = random.Random(seed)
    words = [
        "".join(rng.choices(_LETTERS, range(26, 0, -1), k=rng.randint(1, 9))) for _ in range(200)
    ]
    text: list[str] = []
    length = 0
    while length < size:
        sentence = " ".join(rng.choices(words, k=rng.randint(3, 20))).capitalize() + ". "
        text.append(sentence)
        length += len(sentence)
    return "".join(text).strip()
