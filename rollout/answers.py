"""Final answers of mathematical text: found in a response, read as an exact fraction or as plain text, compared.

Nothing is evaluated: a number is matched by a grammar, an exponent has at most three digits, `9**9**9` is only text.
Every pattern takes time linear in the length of its text, and an answer is cut to a bound before it is read.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_ANSWER_CHARS = 1000  # a longer answer is compared as it stands


@dataclass(frozen=True)
class Answer:
    text: str  # in canonical form
    value: Fraction | None = None  # None: not a number
    unit: str = ""  # canonical; "" where there is none, or money


DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*[$€£]?\s*(?P<inner_sign>[-+]?)\s*(?:"
    rf"(?:(?P<whole>\d+)\s*)?\\frac\s*\{{\s*(?P<top>-?{DECIMAL})\s*\}}\s*\{{\s*(?P<bottom>-?{DECIMAL})\s*\}}"
    rf"|(?:(?P<whole_>\d+)\s+)?(?P<top_>{DECIMAL})\s*/\s*(?P<bottom_>{DECIMAL})"
    rf"|(?P<decimal>{DECIMAL})(?:[eE](?P<exponent>[-+]?\d{{1,3}}))?"
    rf")(?P<unit>[^\n]*)"
)
UNIT = re.compile(r"[^\W\d_°²³](?:[^\W\d_]|[ ./'-]|[²³]|\^\{?[23]\}?)*|°[CF]?")
# Units that may follow without a space. Other words may with one. No letter that is usually a variable is here.
CLOSE_UNITS = set(
    "m cm mm km g kg mg l ml s ms h min hr hrs am pm in ft lb lbs oz mph mi yd w v j kw kwh gb mb kb px".split()
)
SCALES = {"hundred", "thousand", "million", "billion", "trillion", "dozen", "half"}
NOT_UNITS = SCALES | {"and", "or", "not", "plus", "minus", "times", "pi", "sqrt", "over", "if", "to"}

MARK = re.compile(r"####|answer\*{0,2}\s{0,4}(?:is\b|[:=])\s{0,4}:?", re.IGNORECASE)
SENTENCE_END = re.compile(r"\.(?=\s|$)|(?<!\\)[!?;]|\n")
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# A number as it stands in running text: a fraction, or all digits, points and commas that hang together.
TOKEN = re.compile(
    r"(?:(?<![\w)}\]$])-)?[$€£]?-?(?:(?:\d++\s?)?\\frac\{-?[\d.,]++\}\{-?[\d.,]++\}|(?:\d++ )?\d++/\d++|\.?\d[\d,.]*+)"
)
WORD_AFTER = re.compile(r"(\s*)([^\W\d_]+)")
OPERATOR_AFTER = re.compile(r"\s*[-+*/^=×÷(\\]")

DRESSING = [
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\frac\s?(\d)\s?(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox)\s?\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\(?:left|right)(?![a-zA-Z])|\\!"), ""),
    (re.compile(r"\{,\}|(?<=\d)\\,(?=\d{3}(?!\d))"), ","),
    (re.compile(r"\\[,;: ]|~|\\q?quad(?![a-zA-Z])|\u00a0|\u202f"), " "),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"[−–]"), "-"),
    (re.compile(r"\^\{?\\circ\}?"), "°"),
]
EQUATION = re.compile(
    r"(?:\\?[A-Za-z]+(?:_\w|_\{\w+\})?(?:\([a-z]\))?|(?:[\d\s+\-*/.,$()×÷]|\\times|\\cdot|\\div)+)\s*=([^=]+)"
)


def plain(text: str) -> str:
    """The answer without the LaTeX, Markdown and punctuation around it."""
    for pattern, replacement in DRESSING:
        text = pattern.sub(replacement, text)
    before = None
    while text != before:
        before = text
        text = text.strip().strip('*`"').rstrip(".,;:!").strip()
        for opening, closing in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("{", "}")):
            if len(text) > len(opening) and text.startswith(opening) and text.endswith(closing):
                inner = text[len(opening) : -len(closing)]
                if opening != "{" or closing_brace(text, 1) == len(text) - 1:
                    text = inner
    equation = EQUATION.fullmatch(text)
    return equation[1].strip() if equation else text


def read_answer(text: str) -> Answer:
    """An answer that stands alone, such as the content of a box."""
    if len(text) > MAX_ANSWER_CHARS:
        return Answer(text.strip())
    text = plain(text)
    canonical = re.sub(r"\{(\w)\}", r"\1", re.sub(r"\s+", "", text)).casefold()
    number = NUMBER.fullmatch(text)
    unit = read_unit(number["unit"].removeprefix("$")) if number else None
    if number is None or unit is None:
        return Answer(canonical)
    value = read_value(number)
    return Answer(canonical, value, unit if value is not None else "")


def read_value(number: re.Match[str]) -> Fraction | None:
    def fraction(text: str) -> Fraction:
        return Fraction(text.replace(",", ""))

    if number["decimal"]:
        value = fraction(number["decimal"]) * Fraction(10) ** int(number["exponent"] or 0)
    else:
        bottom = fraction(number["bottom"] or number["bottom_"])
        if bottom == 0:
            return None
        value = fraction(number["top"] or number["top_"]) / bottom + int(number["whole"] or number["whole_"] or 0)
    return -value if (number["sign"] == "-") != (number["inner_sign"] == "-") else value


def read_unit(tail: str) -> str | None:
    """What follows a number, in canonical form; None where it makes the number another thing: 2x, 3 million."""
    unit = tail.strip().casefold()
    if unit in ("", "$", "€", "£"):
        return ""
    if unit in ("%", "percent"):
        return "%"
    words = re.findall(r"[^\W\d_]+", unit)
    glued = not tail[:1].isspace() and unit[0] != "°"
    if not UNIT.fullmatch(tail.strip()) or NOT_UNITS & set(words):
        return None
    if words and words[0] not in CLOSE_UNITS and (glued or len(words[0]) == 1):
        return None
    if words and words[0] in ("dollar", "dollars", "euro", "euros", "pound", "pounds", "usd"):
        return ""
    return re.sub(r"[\s.{}^]", "", unit).rstrip("s")


def closing_brace(text: str, start: int) -> int | None:
    """Where the brace opened just before `start` closes."""
    depth = 1
    for brace in BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return None


def last_box(text: str) -> tuple[int, int | None] | None:
    """Start and end of the content of the last box; the end is None where it is not closed."""
    box = last_of(BOX, text)
    return None if box is None else (box.end(), closing_brace(text, box.end()))


def last_of(pattern: re.Pattern[str], text: str, start: int = 0) -> re.Match[str] | None:
    matches = list(pattern.finditer(text, start))
    return matches[-1] if matches else None


def expected_answer(target: str) -> Answer:
    box = last_box(target)
    if box is not None:
        target = target[box[0] : box[1]]
    elif "####" in target:
        target = target.rpartition("####")[2]
    if not target.strip():
        raise ValueError("the target is empty: set dataset.target to the column with the answer")
    return read_answer(target)


def given_answer(response: str, expected: Answer) -> Answer | None:
    """The one answer that counts; None where there is none. `expected` tells only whether to look for a number."""
    text = response.rpartition("</think>")[2]
    box = last_box(text)
    start, end = box or (0, 0)
    if end is None:
        return None
    mark = last_of(MARK, text, end)
    if mark is not None:
        said = read_marked(text[mark.end() : mark.end() + MAX_ANSWER_CHARS], mark[0], expected)
        if said is not None:
            return said
    if box is not None:
        return read_answer(text[start:end])
    whole = read_answer(text)
    return whole if expected.value is None or whole.value is not None else last_number(text)


def read_marked(text: str, mark: str, expected: Answer) -> Answer | None:
    """The answer in the line after ####, or in the rest of the sentence after `answer is`; None where there is none."""
    sentence = text.lstrip().partition("\n")[0] if mark == "####" else SENTENCE_END.split(text.lstrip(), maxsplit=1)[0]
    said = read_answer(sentence)
    if expected.value is None or said.value is not None:
        return said
    sentence = plain(sentence)
    first = TOKEN.match(sentence)
    if first and not OPERATOR_AFTER.match(sentence, first.end()):
        return number_at(sentence, first)
    return None if mark == "####" else last_number(sentence)


def last_number(text: str) -> Answer | None:
    text = text.replace("{,}", ",").replace("\\$", "$").replace("\\dfrac", "\\frac").replace("−", "-")
    token = last_of(TOKEN, text)
    return None if token is None else number_at(text, token)


def number_at(text: str, token: re.Match[str]) -> Answer | None:
    """The number that stands there; None where it is part of an expression (9**9) or of a larger number (3 million)."""
    head = text[max(token.start() - 8, 0) : token.start()]
    after = WORD_AFTER.match(text, token.end())
    word = after[2].casefold() if after else ""
    in_expression = re.search(r"[\w)}\]](?:[*^/]+|[+-])$", head)
    if in_expression or word in SCALES or (after and not after[1] and word not in CLOSE_UNITS):
        return None
    answer = read_answer(token[0].rstrip(".,"))
    return answer if answer.value is not None else None


def same_answer(given: Answer | None, expected: Answer) -> bool:
    if given is None or (given.value is None) != (expected.value is None):
        return False
    if given.value is None:
        return given.text == expected.text
    return given.value == expected.value and (not given.unit or not expected.unit or given.unit == expected.unit)
