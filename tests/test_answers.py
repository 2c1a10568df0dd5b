"""Which final answers of mathematical text are right, however they are written."""

import random

import pytest

from rollout.rewards import MathReward

grade = MathReward()

CASES = [
    # thousands: a comma only between groups of three digits (open-compass/opencompass#2647)
    (r"\boxed{8,000}", "8000", 1),
    (r"\boxed{9{,}500}", "9500", 1),
    ("She pays $80,000.", "80000", 1),
    ("#### 1,234", "1234", 1),
    (r"\boxed{1,2}", "12", 0),
    (r"\boxed{12,34}", "1234", 0),
    (r"\boxed{1\,234\,567}", "1234567", 1),
    (r"\boxed{1\,2}", "12", 0),
    ("the pair 1,2", "12", 0),
    ("the pair 1,2", "2", 0),
    # braces (modelscope/ms-swift#10147)
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1),
    (r"\boxed{\frac{1}{3}}", r"\frac{1}{2}", 0),
    (r"\boxed{\frac{1}{2}", r"\frac{1}{2}", 0),
    (r"\boxed{{\frac{1}{2}}}", r"\frac{1}{2}", 1),
    (r"\boxed{\dfrac12}", r"\frac{1}{2}", 1),
    (r"\boxed{x^{2}}", "x^2", 1),
    (r"\boxed{\{1, 2\}}", r"\{1,2\}", 1),
    # equal as exact rationals
    (r"\boxed{12.0}", "12", 1),
    (r"\boxed{0.5}", "1/2", 1),
    (r"\boxed{\frac{-3}{6}}", "-0.5", 1),
    (r"\boxed{-\frac{1}{2}}", "-1/2", 1),
    (r"\boxed{1\frac{1}{2}}", "1.5", 1),
    (r"\boxed{1 1/2}", "3/2", 1),
    (r"\boxed{0.33}", "1/3", 0),
    (r"\boxed{.5}", "0.5", 1),
    (r"\boxed{5/0}", "5", 0),
    (r"\boxed{1.2e3}", "1200", 1),
    (r"\boxed{-7}", "-7", 1),
    (r"\boxed{−7}", "-7", 1),
    (r"\boxed{7}", "-7", 0),
    (r"\boxed{-\$5}", "-5", 1),
    # units, money, percent
    (r"\boxed{\$18}", "18", 1),
    (r"\boxed{18\text{ dollars}}", "18", 1),
    (r"\boxed{18\text{cm}}", "18", 1),
    (r"\boxed{18 cm^2}", "18", 1),
    (r"\boxed{18\ \mathrm{km/h}}", "18", 1),
    (r"\boxed{50\%}", "50", 1),
    (r"\boxed{50\%}", "50%", 1),
    (r"\boxed{50\%}", "0.5", 0),
    (r"\boxed{5 hours}", "5 minutes", 0),
    (r"\boxed{5 hours}", "5 hour", 1),
    (r"\boxed{45^\circ}", "45", 1),
    (r"\boxed{2x}", "2", 0),
    (r"\boxed{2 million}", "2", 0),
    (r"\boxed{2\pi}", "2", 0),
    (r"\boxed{2\pi}", r"2 \pi", 1),
    # the last answer counts, and only that
    (r"\boxed{1} no, \boxed{2}", "2", 1),
    (r"\boxed{1} no, \boxed{2}", "1", 0),
    (r"\boxed{5} for 5 apples on 3 trees", "5", 1),
    (r"\boxed{5}. So the answer is 6.", "6", 1),
    ("The answer is 6. Or #### 7", "7", 1),
    ("The answer is 5 of the 10 apples.", "5", 1),
    ("The answer is 5 + 3 = 8.", "8", 1),
    ("**Answer:** 42", "42", 1),
    ("The final answer is: **$1,250.50**", "1250.5", 1),
    ("The answer is not clear yet; 3 + 4 = 7", "7", 1),
    ("She has 3 left and sells 18", "18", 1),
    ("She has 3 left and sells 18", "3", 0),
    ("16 - 3 - 4 = 9 eggs.", "9", 1),
    ("which makes 118", "18", 0),
    ("which makes 18.5", "18", 0),
    ("about 3 million", "3", 0),
    ("so it is $\\frac{1}{2}$.", "1/2", 1),
    ("so it is $\\frac{1}{2}$.", "2", 0),
    ("it is x^2", "2", 0),
    ("<think>so \\boxed{5}</think> I do not know", "5", 0),
    ("<think>5 or 6</think> 6", "6", 1),
    ("", "5", 0),
    ("I do not know", "5", 0),
    # text
    (r"\boxed{\text{Paris}}", "paris", 1),
    ("The answer is Paris.", "Paris", 1),
    ("Not Paris but Rome", "Paris", 0),
    (r"\boxed{x = 5}", "5", 1),
    (r"\boxed{x=1, y=2}", "2", 0),
    (r"\boxed{1}", "x^2+y^2=1", 0),
    (r"\boxed{\left(1, 2\right)}", "(1,2)", 1),
    # targets as data sets write them
    ("#### 72", "48 / 2 = <<48/2=24>>24 and 48 + 24 = 72\n#### 72", 1),
    (r"\boxed{3}", r"We find $x = 3$, so \boxed{3}.", 1),
]


@pytest.mark.parametrize("response, target, right", CASES)
def test_an_answer_is_right_or_wrong(response, target, right):
    assert grade("", response, target) == right


def written(value: int, rng: random.Random) -> str:
    """One of the many ways to write a whole number."""
    digits = f"{abs(value)}"
    grouped = f"{abs(value):,}"
    sign = rng.choice(["-", "−"]) if value < 0 else rng.choice(["", "", "+"])
    body = rng.choice(
        [
            digits,
            grouped,
            grouped.replace(",", "{,}"),
            grouped.replace(",", r"\,"),
            grouped.replace(",", r",\!"),
            digits + ".0",
            grouped + ".00",
            r"\$" + grouped,
            "$" + digits,
            f"{2 * abs(value)}/2",
            rf"\frac{{{3 * abs(value)}}}{{3}}",
            rf"\dfrac{{{grouped}}}{{1}}",
            digits + r"\%",
            digits + r"\text{ apples}",
            grouped + " dollars",
            digits + r"\,\mathrm{kg}",
        ]
    )
    return rng.choice(
        ["{}", "{{{}}}", "{}.", " {} ", r"\text{{{}}}" if "\\" not in body and "{" not in body else "{}"]
    ).format(sign + body)


@pytest.mark.parametrize(
    "frame", [r"so \boxed{%s}", r"first \boxed{1}, then $\boxed{%s}$.", "it is %%\n#### %s", "The answer is %s"]
)
def test_a_number_is_right_however_it_is_written_and_its_neighbour_is_wrong(frame):
    rng = random.Random(frame)
    for _ in range(400):
        value = rng.randrange(-(10 ** rng.randrange(1, 10)), 10 ** rng.randrange(1, 10))
        response = frame % written(value, rng)
        assert grade("", response, str(value)) == 1.0, (response, value)
        assert grade("", response, f"{value:,}") == 1.0, (response, value)
        assert grade("", response, str(value + rng.choice([-1, 1, 10]))) == 0.0, (response, value)


def test_a_number_that_only_occurs_inside_the_answer_earns_nothing():
    rng = random.Random(0)
    for _ in range(400):
        value = rng.randrange(10, 10**6)
        for other in (
            f"{value}{rng.randrange(10)}",
            f"{rng.randrange(1, 10)}{value}",
            f"{value}.5",
            f"1{value}/7",
            f"{value}x",
        ):
            for frame in (r"\boxed{%s}", "#### %s", "%s", "the answer is %s"):
                assert grade("", frame % other, str(value)) == 0.0, (frame % other, value)


def test_every_text_equals_itself():
    for text in [
        "5",
        "-1/2",
        r"\frac{a}{b}",
        "x^2+1",
        "(3, 4)",
        "May 5",
        r"\sqrt{2}",
        "A",
        "1,2",
        "y=2x",
        "3:30",
        "∞",
        "5 m",
        "x",
        "$",
    ]:
        assert grade("", rf"\boxed{{{text}}}", text) == 1.0, text
