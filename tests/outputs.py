"""Compare a command's output with the page: claims exactly, measured times not at all.

- Words that only measure speed, or name a machine, a process, a date or a version, are
  masked.
- A row of a check table with a tolerance is compared by its name and its verdict:
  numbers within a tolerance differ from processor to processor. A row whose tolerance
  is 0 is compared digit by digit.
- Elsewhere numbers with a decimal point may differ by 3 percent. A rounding error
  (1e-7, or a number below 0.01 where the line or the table's header names an error) may
  have any value.
- Losses on text may differ by 15 percent, on the few sequences of a test set by 30.
- Lines that name a rank may come in any order: ranks print when they get there.
- A line `...` of a page stands for any lines.
"""

from __future__ import annotations

import difflib
import itertools
import re
import tempfile
from dataclasses import dataclass
from functools import cache

ELISION = "..."
# Losses on text differ most: the text is the sources of Python's library, another one
# in each of its versions, patches too.
TOLERANCE, ON_TEXT, ON_A_LITTLE_TEXT = 0.03, 0.15, 0.3
ERROR_BELOW = 0.01  # a smaller number in a line about an error is a rounding error

NUMBER = r"\d[\d,]*(?:\.\d+)?"
SPEEDS = r"(?: +[\d.e+]+){3}"  # time, algbw and busbw
TEMPORARY = rf"(?:{re.escape(tempfile.gettempdir())}|/tmp|/var/folders)/[^\s:;,)'\"]+"
MASKS = [
    (re.compile(pattern), mask)
    for pattern, mask in (
        (
            r"(?i)\b(torch|python|deepspeed|nccl|cuda|transformers) v?\d+\.\d+\S*",
            r"\1 VERSION",
        ),
        (r"^(python +ok: )\d\S+,", r"\1VERSION,"),
        (
            r"\d{4}-\d\d-\d\d"
            r"(?:[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?)?",
            "DATE",
        ),
        (r"\b\d{8}-\d{6}\b", "DATE"),
        (r"\b\d\d:\d\d:\d\d(?:\.\d+)?\b", "CLOCK"),
        (r"(?i)(?<![a-z])(pid|port)(?: is|:|=)? ?\d+", r"\1 NUMBER"),
        (r"((?:127\.0\.0\.1|localhost|\[::1?\]):)\d+", r"\1PORT"),
        (r"\bon host \S+", "on host NAME"),
        (TEMPORARY, "TEMPORARY"),
        (r"(runs/\S*?)\btmp\w+", r"\1TEMPORARY"),
        (
            r"\bb(['\"]).*\1",
            "TEXT",
        ),  # generated text: one rounding error changes the rest
        (rf"-?{NUMBER} (?:ms|us|µs|s)\b", "TIME"),
        (r"\b\d+\.\d+s\b", "TIME"),
        (
            rf"[+-]{NUMBER}%|(?<![\d.])\d+%",
            "RATIO",
        ),  # of times: others have a decimal, no sign
        (rf"\bmfu {NUMBER}%", "mfu RATIO"),
        (rf"{NUMBER} (?:KB\b|[KMG]i?B/s|[KMG]bit/s|[GTP]FLOPS?(?:/s)?)(?!\w)", "RATE"),
        (rf"{NUMBER} (?:samples|sequences|steps|it|tok(?:ens)?)/s", "RATE"),
        (r"(Avg bus bandwidth +: ).*", r"\1RATE"),
        # nccl-tests' line: time and bandwidths, out of place and in place; sizes and
        # #wrong stay
        (
            rf"^(\S* +\d+ +\d+ +\w+ +\w+ +-?\d+){SPEEDS} +(\d+){SPEEDS} +(\d+)$",
            r"\1 \2 \3",
        ),
        (r"\d[\d,]*\.\d+ GiB\b", "MEMORY"),
        (r"\b\d+\.\d+x(?=[ ,]|$)", "RATIO"),
        (r"\b\d+ cores", "CORES"),
        (r"more than [\d,]+ such ranks", "RANKS"),  # of this machine's memory
        (r" {2,}|-{3,}", " "),  # column widths follow the numbers in them
    )
]
WORD_WITH_NUMBER = re.compile(r"(\D*?)(-?[\d,]*\.?\d+(?:e[+-]\d+)?)(\D*)")
ABOUT_AN_ERROR = re.compile(r"\b(errors?|drift\w*|differences?|rounding)\b", re.I)
ABOUT_A_LOSS = re.compile(r"\bloss(es)?\b(?! error)", re.I)
LOSS_OF_A_FEW = re.compile(r"\b(test|held-out|validation) loss", re.I)

DASHES = re.compile(r"-+( {2,}-+)+")
CHECK_HEADER = re.compile(r"check +measured +expected +tolerance +ok")
CHECK_ROW = re.compile(r"(\S.*?) {2,}(\S+) {2,}(\S+) {2,}(\S+) {2,}(yes|NO)")


@dataclass(frozen=True)
class Line:
    """A printed line, the header of its table, and whether its losses are of text."""

    text: str
    header: str = ""
    on_text: bool = True

    def tolerance(self) -> float:
        about = f"{self.text} {self.header}"
        if not (self.on_text and ABOUT_A_LOSS.search(about)):
            return TOLERANCE
        return ON_A_LITTLE_TEXT if LOSS_OF_A_FEW.search(about) else ON_TEXT


def by_rank(texts: list[str]) -> list[int]:
    """Return the indexes of lines; neighbours that name a rank are sorted by rank."""
    named = [re.search(r"\brank (\d+)\b", text) for text in texts]
    order: list[int] = []
    for _, run in itertools.groupby(
        range(len(texts)), lambda index: named[index] is not None
    ):
        order += sorted(
            run, key=lambda index: int(named[index][1]) if named[index] else 0
        )
    return order


def lines_of(printed: str) -> list[Line]:
    """Split what was printed; a table ends at the first line that does not fit its
    columns.
    """
    texts = printed.splitlines()
    texts = [texts[index] for index in by_rank(texts)]
    lines, header, gaps = [], "", []
    on_text = not re.search(r"digits|MNIST", printed)
    for number, text in enumerate(texts):
        if number and DASHES.fullmatch(text.strip()):
            header = texts[number - 1]
            gaps = [match.span() for match in re.finditer(" {2,}", text.rstrip())]
        elif not text.strip() or any(text[slice(*gap)].strip() for gap in gaps):
            header, gaps = "", []
        lines.append(Line(text, header, on_text))
    return lines


@cache
def words_of(text: str) -> tuple[str, ...]:
    for pattern, mask in MASKS:
        text = pattern.sub(mask, text)
    return tuple(text.split())


def same_word(
    expected: str, printed: str, tolerance: float, about_an_error: bool = False
) -> bool:
    if expected == printed:
        return True
    one, two = (WORD_WITH_NUMBER.fullmatch(word) for word in (expected, printed))
    if not (one and two and one[1] == two[1] and one[3] == two[3]):
        return False
    texts = (one[2], two[2])
    a, b = (float(text.replace(",", "")) for text in texts)
    if max(abs(a), abs(b)) < ERROR_BELOW and (
        about_an_error or any("e-" in t for t in texts)
    ):
        return True
    if not any("." in text for text in texts):  # whole numbers are counts
        return False
    return abs(a - b) <= tolerance * max(abs(a), abs(b)) + 0.002


def differing_words(expected: str, printed: Line) -> list[tuple[str, str]]:
    """Return the pairs that tell a page's line from a printed one: none where they are
    the same.
    """
    pairs = []
    about_an_error = bool(ABOUT_AN_ERROR.search(f"{printed.text} {printed.header}"))
    one, two = (CHECK_ROW.fullmatch(text.strip()) for text in (expected, printed.text))
    if one and two and CHECK_HEADER.fullmatch(printed.header.strip()):
        # name, measured, expected, tolerance, ok
        compared = (2, 3, 4, 5) if "0" in (one[4], two[4]) else (5,)
        pairs = [(one[cell], two[cell]) for cell in compared if one[cell] != two[cell]]
        expected, printed = one[1], Line(two[1], on_text=printed.on_text)
    a, b = words_of(expected), words_of(printed.text)
    if len(a) == len(b):
        return pairs + [
            (x, y)
            for x, y in zip(a, b, strict=True)
            if not same_word(x, y, printed.tolerance(), about_an_error)
        ]
    changes = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    return pairs + [
        (" ".join(a[i:j]), " ".join(b[k:m]))
        for kind, i, j, k, m in changes
        if kind != "equal"
    ]


def find(shown: list[str], printed: list[Line]) -> tuple[dict[int, int], int | None]:
    """Place a page's lines among the printed ones; return the places and the first line
    with none.

    Each run of lines between elisions is placed as early as it can be; the first and
    the last have to be at the ends. With a place for each line, the index len(shown)
    means that more was printed.
    """
    places: dict[int, int] = {}
    at = index = 0
    while index < len(shown):
        if shown[index].strip() == ELISION:
            index += 1
            continue
        end = index
        while end < len(shown) and shown[end].strip() != ELISION:
            end += 1
        starts = range(at, max(at, len(printed) - (end - index)) + 1)
        if index == 0:
            starts = starts[:1]
        elif end == len(shown):
            starts = starts[-1:]
        most = {}
        for start in starts:
            fitting = {}
            for line, place in zip(
                range(index, end), range(start, len(printed)), strict=False
            ):
                if differing_words(shown[line], printed[place]):
                    break
                fitting[line] = place
            most = max(most, fitting, key=len)
            if len(fitting) == end - index:
                break
        places |= most
        if len(most) < end - index:
            return places, index + len(most)
        index, at = end, max(most.values()) + 1
    ends_open = bool(shown) and shown[-1].strip() == ELISION
    return places, None if ends_open or at == len(printed) else len(shown)


def difference(shown: str, *printed: str, first_line: int = 1) -> str | None:
    """Return None where a page shows what was printed, or the first line that it shows
    wrongly.

    Of several orders in which it may have been printed, the best counts.
    """
    written, misses = shown.splitlines(), []
    numbers = by_rank(written)
    kept = [written[number] for number in numbers]
    for order in printed:
        places, miss = find(kept, lines_of(order))
        if miss is None:
            return None
        misses.append((miss, max(places.values(), default=-1) + 1, lines_of(order)))
    miss, at, lines = max(misses, key=lambda candidate: candidate[0])
    where, rest = f"line {first_line + [*numbers, len(kept)][miss]}", lines[at:]
    if miss == len(kept):
        return f"{where}: the page shows no more, but printed was\n  {rest[0].text}\n"
    if (
        rest and miss > 0 and kept[miss - 1].strip() == ELISION
    ):  # it may be anywhere in the rest
        beside = max(rest, key=lambda line: likeness(kept[miss], line))
    else:
        beside = rest[0] if rest else None
    pairs = differing_words(kept[miss], beside) if beside else []
    return (
        f"{where} of the page was not printed:\n"
        f"  page:    {kept[miss]}\n"
        f"  printed: {beside.text if beside else '(nothing more)'}\n"
        + "".join(
            f"  differs: {one or '(nothing)'} | {two or '(nothing)'}\n"
            for one, two in pairs
        )
    )


def likeness(shown: str, line: Line) -> float:
    words = words_of(shown), words_of(line.text)
    return difflib.SequenceMatcher(None, *words, autojunk=False).ratio()


def shown_like(shown: str, printed: str) -> tuple[list[str], bool]:
    """Return the printed lines, left out where the page left lines out, and whether all
    could be.

    An elision is kept where the line before it and the line after it are still printed.
    """
    written, lines = shown.splitlines(), lines_of(printed)
    kept = [written[number] for number in by_rank(written)]
    places, miss = find(kept, lines)
    if miss is not None:
        places = common_lines(kept, lines)
    new, at, whole = [], 0, True
    for index, text in enumerate(kept):
        if text.strip() != ELISION:
            continue
        before = places.get(index - 1) if index else -1
        after = places.get(index + 1) if index + 1 < len(kept) else len(lines)
        if before is None or after is None or after <= before:
            whole = False
            continue
        new += [line.text for line in lines[at : before + 1]] + [ELISION]
        at = after
    return new + [line.text for line in lines[at:]], whole


def common_lines(kept: list[str], lines: list[Line]) -> dict[int, int]:
    """Return the longest series of page lines in printed order, with their places."""
    same = [[not differing_words(text, line) for line in lines] for text in kept]
    longest = [[0] * (len(lines) + 1) for _ in range(len(kept) + 1)]
    for i in reversed(range(len(kept))):
        for j in reversed(range(len(lines))):
            skip = max(longest[i + 1][j], longest[i][j + 1])
            longest[i][j] = max(skip, longest[i + 1][j + 1] + 1 if same[i][j] else 0)
    places, i, j = {}, 0, 0
    while i < len(kept) and j < len(lines):
        if same[i][j] and longest[i][j] == longest[i + 1][j + 1] + 1:
            places[i] = j
            i, j = i + 1, j + 1
        elif longest[i + 1][j] >= longest[i][j + 1]:
            i += 1
        else:
            j += 1
    return places
