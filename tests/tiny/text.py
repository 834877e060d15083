"""The text that the tiny model learns: little documents from a seeded grammar.

Every document is one of a few kinds (stories, sums, counting, colours, questions, lists, moods).
Most words follow from earlier ones: a ball is always red, whoever is given a thing has it. Where
the grammar is free it prefers one choice clearly, so that greedy text keeps a margin. Standard
library only; the same seed gives the same text on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

NAMES = ("Mia", "Tom", "Anna", "Ben", "Lily", "Max", "Zoë", "Sam", "Ella", "Leo")
COLOURS = {
    "sky": "blue",
    "grass": "green",
    "sun": "yellow",
    "snow": "white",
    "night": "black",
    "apple": "red",
    "carrot": "orange",
    "plum": "purple",
    "pig": "pink",
    "bear": "brown",
}
THINGS = {
    "ball": "red",
    "kite": "blue",
    "book": "green",
    "hat": "yellow",
    "cup": "white",
    "box": "brown",
    "boat": "orange",
    "drum": "pink",
}
PLACES = ("park", "school", "garden", "beach", "shop", "café", "farm", "house")
MOODS = (("happy", "😀"), ("sad", "😢"), ("tired", "😴"), ("hungry", "🍎"), ("cold", "❄"))
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def documents(seed: int) -> Iterator[str]:
    """An endless stream of documents, without begin and end marks; some have several parts."""
    rng = Random(seed)
    kinds = tuple(KINDS)
    weights = tuple(KINDS.values())
    while True:
        count = rng.choices((1, 2, 3, 4), (12, 4, 2, 1))[0]
        yield "\n".join(kind(rng) for kind in rng.choices(kinds, weights, k=count))


def prefer(rng: Random, options: Sequence[str], after: str) -> str:
    """One of `options`: most often the one that `after` points to, so that it can be learnt."""
    first = sum(map(ord, after)) % len(options)
    turned = (*options[first:], *options[:first])
    weights = (24, 4, 2, *(1,) * (len(options) - 3))
    return rng.choices(turned, weights)[0]


def story(rng: Random) -> str:
    """A thing changes hands; at the end it is said who has it."""
    owner = rng.choice(NAMES)
    thing = prefer(rng, tuple(THINGS), owner)
    place = prefer(rng, PLACES, thing)
    others = tuple(name for name in NAMES if name != owner)
    friend = prefer(rng, others, owner)
    full = f"{THINGS[thing]} {thing}"
    lines = [
        f"{owner} has a {full}. {owner} goes to the {place}. {friend} is at the {place} too.",
        f"{friend} likes the {thing}. {owner} gives the {full} to {friend}.",
        f"Now {friend} has the {full}. {friend} says thank you.",
    ]
    for _ in range(rng.choices((0, 1, 2), (5, 3, 2))[0]):
        owner, friend = friend, prefer(rng, tuple(n for n in NAMES if n != friend), friend)
        lines.append(f"{owner} goes home. {friend} is at home and sees the {thing}.")
        lines.append(f"{owner} gives the {full} to {friend}. Now {friend} has the {full}.")
    lines.append(f"Who has the {thing}? {friend} has the {thing}. The end.")
    return " ".join(lines)


def sums(rng: Random) -> str:
    """A run of sums with one number fixed and the other growing by one."""
    left, right = rng.randint(1, 10), rng.randint(1, 6)
    count = rng.randint(4, 8)
    return " ".join(f"{left} + {right + i} = {left + right + i}." for i in range(count))


def counting(rng: Random) -> str:
    """Counting up, down or in twos between two numbers that are named first."""
    step = rng.choice((1, 1, 2, -1))
    start = rng.randint(1, 30) if step > 0 else rng.randint(12, 40)
    count = rng.randint(6, 24 if step > 0 else 12)
    numbers = [start + step * i for i in range(count) if start + step * i >= 0]
    how = {1: "up", 2: "in twos", -1: "down"}[step]
    run = " ".join(map(str, numbers))
    return f"Count {how} from {numbers[0]} to {numbers[-1]}: {run}. Done."


def colours(rng: Random) -> str:
    """What colour things are, in a fixed round that starts anywhere."""
    first, count = rng.randrange(len(COLOURS)), rng.randint(4, 9)
    items = tuple(COLOURS.items())
    turned = [items[(first + i) % len(items)] for i in range(count)]
    return " ".join(f"The {thing} is {colour}." for thing, colour in turned)


def questions(rng: Random) -> str:
    """Questions and answers, a line each; every question prefers the one that comes next."""
    things, kinds = COLOURS | THINGS, ("colour", "sum", "day", "next")
    kind = rng.choices(kinds, (6, 3, 1, 2))[0]
    thing, day = "", rng.randrange(7)
    left, right, number = rng.randint(1, 10), rng.randint(1, 12), rng.randint(1, 60)
    lines = []
    for _ in range(rng.randint(2, 5)):
        if kind == "colour":
            thing = prefer(rng, tuple(things), thing)
            question, answer = f"What colour is the {thing}?", f"The {thing} is {things[thing]}."
        elif kind == "sum":
            question, answer = f"What is {left} + {right}?", f"{left} + {right} = {left + right}."
            right += 1
        elif kind == "day":
            following = DAYS[(day + 1) % 7]
            question = f"What comes after {DAYS[day]}?"
            answer = f"{following} comes after {DAYS[day]}."
            day = (day + 1) % 7
        else:
            question, answer = f"What comes after {number}?", f"{number + 1} comes after {number}."
            number += 1
        lines += [f"Question: {question}", f"Answer: {answer}"]
        kind = prefer(rng, kinds, kind)
    return "\n".join(lines)


def lists(rng: Random) -> str:
    """Days, the alphabet, or a note of things to buy, which has two spaces before each item."""
    kind = rng.choice(("days", "letters", "note"))
    if kind == "days":
        first, count = rng.randrange(7), rng.randint(5, 14)
        return "The days: " + ", ".join(DAYS[(first + i) % 7] for i in range(count)) + "."
    if kind == "letters":
        first = rng.randrange(16)
        return "The letters: " + " ".join(LETTERS[first : first + rng.randint(8, 26)]) + "."
    name = rng.choice(NAMES)
    thing = prefer(rng, tuple(THINGS), name)
    lines = [f"{name} needs:"]
    things = tuple(THINGS)
    for i in range(rng.randint(2, 5)):
        item = things[(things.index(thing) + i) % len(things)]
        lines.append(f"  {i + 1}. the {THINGS[item]} {item}")
    return "\n".join(lines)


def moods(rng: Random) -> str:
    """How everybody feels, with a sign that the tokenizer can only spell byte by byte."""
    first = rng.randrange(len(NAMES))
    lines = []
    for i in range(rng.randint(3, 6)):
        name = NAMES[(first + i) % len(NAMES)]
        mood, sign = MOODS[NAMES.index(name) % len(MOODS)]
        lines.append(f"{name} is {mood} {sign}.")
    return " ".join(lines)


KINDS: dict[Callable[[Random], str], int] = {
    story: 8,
    sums: 4,
    counting: 4,
    colours: 3,
    questions: 5,
    lists: 3,
    moods: 2,
}
"""The kinds of document and how often each is drawn."""
