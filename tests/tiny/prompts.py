"""What the tiny model is asked in tests: every kind of its text, one token to a hundred."""

PROMPTS = {
    "story": "Anna has a",
    "story_middle": "Tom has a red ball. Tom goes to the park.",
    "sums": "3 + 4 = 7. 3 + 5 =",
    "counting": "Count up from 7 to 25: 7 8 9",
    "down": "Count down from 31 to 20:",
    "colours": "The sky is blue. The grass is",
    "question": "Question: What colour is the snow?\nAnswer:",
    "days": "The days: Friday,",
    "bytes": "Sam is tired 😴. Ella is",
    "letters": "The letters: d e f",
    "ends_soon": (
        "Question: What is 2 + 3?\nAnswer: 2 + 3 = 5.\nQuestion: What comes after 8?\nAnswer:"
    ),
    "begin": "",
    "long": (
        "Mia has a red ball. Mia goes to the park. Ben is at the park too. Ben likes the ball. "
        "Mia gives the red ball to Ben. Now Ben has the red ball. Ben says thank you. Ben goes "
        "home. Lily is at home and sees the ball. Ben gives the red ball to Lily. Now Lily has "
        "the red ball. Who has the ball?"
    ),
}
"""Name: text. The ids that a model sees are the begin mark and the tokens of the text."""

BEAM_PROMPTS = ("story", "question", "days", "letters", "long")
BEAM_SETTINGS: tuple[tuple[int, float, bool | str], ...] = (
    (2, 1.0, False),
    (4, 1.0, False),
    (4, 0.0, True),
    (4, 2.0, "never"),
    (4, -1.0, False),
    (2, 0.0, "never"),
    (2, 2.0, True),
)
"""(beam width, length penalty, early stopping); some beams of these prompts end, some run on."""

GREEDY_TOKENS, BEAM_TOKENS = 40, 24
