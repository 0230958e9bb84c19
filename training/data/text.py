"""Text skills that need no tools: repetition, sums, counting, facts, personas, memory, JSON."""

from __future__ import annotations

import json
import random
import string
from dataclasses import replace
from typing import Any

from training.data import words as w
from training.data.item import Item, Message, assistant, draw, split_of, system, user

ASSISTANT = "I am the small demonstration model of Quire."


def sentence(rng: random.Random) -> str:
    """A plain sentence about nothing, also the filler of long contexts."""
    noun, other = rng.choice(w.OBJECTS), rng.choice(w.ANIMALS + w.OBJECTS + w.FOODS)
    who = rng.choice(
        (f"The {rng.choice(w.ANIMALS)}", f"The {rng.choice(w.JOBS)}", rng.choice(w.NAMES))
    )
    patterns = (
        f"{who} {rng.choice(w.PAST_VERBS)} the {rng.choice(w.ADJECTIVES)} {noun} "
        f"{rng.choice(w.PREPOSITIONS)} the {rng.choice(w.PLACES)}.",
        f"{who} {rng.choice(w.PAST_VERBS)} a {noun} and a {other} {rng.choice(w.ADVERBS)}.",
        f"The {rng.choice(w.PLACES)} was {rng.choice(w.ADJECTIVES)} and the {noun} was "
        f"{rng.choice(w.ADJECTIVES)}.",
        f"In {rng.choice(w.CITIES)} {who.replace('The', 'the')} {rng.choice(w.PAST_VERBS)} "
        f"the {noun} {rng.choice(w.ADVERBS)}.",
    )
    return rng.choice(patterns)


def _random_word(rng: random.Random) -> str:
    if rng.random() < 0.6:
        word = w.invented(rng)
        return rng.choice((word, word, word.capitalize(), word.upper()))
    alphabet = rng.choice((string.ascii_lowercase, string.ascii_uppercase, string.ascii_letters))
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(2, 8)))


def _unicode_snippet(rng: random.Random) -> str:
    blocks = ((0xE0, 0xFF), (0x3B1, 0x3C9), (0x430, 0x44F), (0x3042, 0x3093), (0x1F600, 0x1F64F))
    low, high = rng.choice(blocks)
    return "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 5)))


def _anything(rng: random.Random) -> str:
    """A text to repeat: sentences, loose words, codes, numbers, odd punctuation, other scripts."""
    kind = rng.random()
    if kind < 0.35:
        return " ".join(sentence(rng) for _ in range(rng.randint(1, 3)))
    pool = w.NAMES + w.CITIES + w.OBJECTS + w.ADJECTIVES + w.CODEWORDS
    parts: list[str] = []
    for _ in range(rng.randint(1, 8)):
        draw = rng.random()
        if draw < 0.45 or kind < 0.5:
            parts.append(rng.choice(pool))
        elif draw < 0.75:
            parts.append(_random_word(rng) + rng.choice(("", "", "", ",", "!")))
        elif draw < 0.87:
            parts.append(str(rng.randint(0, 10 ** rng.randint(1, 6))))
        elif draw < 0.95 and kind > 0.85:
            parts.append(_unicode_snippet(rng))
        else:
            parts.append(rng.choice(pool).upper())
    joiner = rng.choice((" ", " ", " ", ", ", "-", "/", " + "))
    text = joiner.join(parts)
    return text + rng.choice(("", "", "", ".", "!", "?"))


REPEAT_ASKS = (
    "Reply with exactly: {}",
    "Repeat exactly: {}",
    "Say exactly this: {}",
    "Repeat this text: {}",
    "Repeat after me: {}",
    "Copy this: {}",
    "Echo: {}",
    "Say: {}",
    "Reply with: {}",
    "Answer with exactly: {}",
    "Reply with exactly this text: {}",
    "Write this text again, unchanged:\n{}",
)


def repeat(rng: random.Random) -> Item:
    """Say exactly what was given."""
    text = _anything(rng)
    ask = rng.choice(REPEAT_ASKS)
    return Item("repeat", f"repeat:{text}", [user(ask.format(text))], assistant(text))


SUM_ASKS = (
    "What is {}?",
    "Compute {}.",
    "How much is {}?",
    "{} = ?",
    "Calculate {}",
    "What does {} give?",
    "Tell me {}.",
    "{}",
    "{}?",
    "What's {}?",
    "Please work out {}.",
)


def _column_work(a: int, b: int, sign: str) -> str:
    """The sum worked out digit by digit, as a thought."""
    if sign == "+":
        low = a % 10 + b % 10
        carry = low // 10
        high = a // 10 + b // 10 + carry
        return (
            f"{a} + {b}: ones {a % 10} + {b % 10} = {low}, write {low % 10} carry {carry}; "
            f"tens {a // 10} + {b // 10} + {carry} = {high}. Result {a + b}."
        )
    big, small = max(a, b), min(a, b)
    borrow = int(big % 10 < small % 10)
    low = big % 10 + 10 * borrow - small % 10
    high = big // 10 - borrow - small // 10
    turned = "the second is larger, so negative; " if a < b else ""
    return (
        f"{a} - {b}: {turned}ones {big % 10 + 10 * borrow} - {small % 10} = {low} borrow {borrow}; "
        f"tens {big // 10} - {borrow} - {small // 10} = {high}. Result {a - b}."
    )


def _two_numbers(rng: random.Random) -> tuple[int, int, str]:
    low = 0 if rng.random() < 0.12 else 10
    return rng.randint(low, 99), rng.randint(low, 99), rng.choice("+-")


def arithmetic(rng: random.Random) -> Item:
    """Two-digit sums and differences, the answer alone. The split is by the pair of numbers."""
    a, b, sign = _two_numbers(rng)
    result = a + b if sign == "+" else a - b
    plain = f"{a} {sign} {b}"
    spoken = f"{a} {'plus' if sign == '+' else 'minus'} {b}"
    expression = rng.choice((plain, plain, plain, f"{a}{sign}{b}", spoken))
    question = rng.choice(SUM_ASKS).format(expression)
    return Item("arithmetic", f"sum:{plain}", [user(question)], assistant(str(result)))


def _count_upto(rng: random.Random) -> Item:
    end = rng.randint(2, 60) if rng.random() < 0.8 else rng.randint(61, 120)
    joiner, how = rng.choice(((" ", ""), (", ", ", with commas"), ("\n", ", one on each line")))
    ask = rng.choice(("Count to {}{}.", "Count from 1 to {}{}.", "Say the numbers from 1 to {}{}."))
    text = joiner.join(str(n) for n in range(1, end + 1))
    key = f"count:upto:{end}:{joiner}"
    return Item("counting", key, [user(ask.format(end, how))], assistant(text))


def _count_range(rng: random.Random) -> Item:
    start = rng.randint(2, 90)
    end = start + rng.randint(2, 12)
    ask = rng.choice(("Count from {} to {}.", "Say the numbers from {} to {}."))
    text = " ".join(str(n) for n in range(start, end + 1))
    key = f"count:range:{start}:{end}"
    return Item("counting", key, [user(ask.format(start, end))], assistant(text))


def _count_list(rng: random.Random) -> Item:
    things = [rng.choice(w.OBJECTS + w.ANIMALS + w.FOODS) for _ in range(rng.randint(1, 12))]
    ask = rng.choice(("How many words are in this list: {}?", "Count the items: {}."))
    listed = ", ".join(things)
    answer = assistant(str(len(things)))
    return Item("counting", f"count:list:{listed}", [user(ask.format(listed))], answer)


def count_letters(rng: random.Random) -> Item:
    """How often a letter stands in a row of two letters."""
    letter, other = rng.sample(w.LETTERS, 2)
    row = [rng.choice((letter, other)) for _ in range(rng.randint(3, 12))]
    text = " ".join(row)
    question = f"How many times does {letter} appear in: {text}?"
    answer = assistant(str(row.count(letter)))
    return Item("counting", f"count:{letter}:{text}", [user(question)], answer)


def count_among(rng: random.Random) -> Item:
    """How often a word stands in a list of three words."""
    things = rng.sample(w.OBJECTS + w.ANIMALS, 3)
    row = [rng.choice(things) for _ in range(rng.randint(3, 12))]
    asked = rng.choice(things)
    ask = rng.choice(("How often is {} in this list: {}?", "How many times does {} appear in: {}?"))
    text = ", ".join(row)
    answer = assistant(str(row.count(asked)))
    return Item("counting", f"count:{asked}:{text}", [user(ask.format(asked, text))], answer)


def counting(rng: random.Random) -> Item:
    """Count listed things, one thing among others, or say the numbers from one to another."""
    kinds = (_count_list, count_among, count_among, _count_upto, _count_range, count_letters)
    return rng.choice(kinds)(rng)


FACT_FAMILIES: tuple[tuple[dict[str, str], tuple[str, ...]], ...] = (
    (
        w.CAPITALS,
        (
            "What is the capital of {}?",
            "Name the capital of {}.",
            "Which city is the capital of {}?",
            "Tell me the capital of {}.",
            "{}: what is its capital?",
            "Do you know the capital of {}?",
            "Capital of {}?",
        ),
    ),
    (
        w.OPPOSITES,
        (
            "What is the opposite of {}?",
            "Name the opposite of {}.",
            "Which word is the opposite of {}?",
            "Tell me the opposite of {}.",
            "Opposite of {}?",
            "The opposite of {} is what?",
        ),
    ),
    (
        w.YOUNG,
        (
            "What is a young {} called?",
            "What do you call a young {}?",
            "What is the name of a baby {}?",
            "How is a young {} called?",
            "Name the young of a {}.",
            "A baby {} is called what?",
        ),
    ),
    (
        w.SYMBOLS,
        (
            "What is the chemical symbol of {}?",
            "Name the chemical symbol of {}.",
            "Which symbol stands for {}?",
            "Tell me the symbol for {}.",
            "Chemical symbol of {}?",
            "How is {} written in chemistry?",
        ),
    ),
    (
        w.LEGS,
        (
            "How many legs does a {} have?",
            "A {} has how many legs?",
            "Tell me how many legs a {} has.",
            "Number of legs of a {}?",
            "How many legs are on a {}?",
            "What number of legs does a {} have?",
        ),
    ),
)
"""Facts as pairs of subject and answer, with the ways to ask for them."""

CYCLE_ASKS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (
        1,
        (
            "What {0} comes after {{}}?",
            "Which {0} follows {{}}?",
            "Name the {0} after {{}}.",
            "The {0} after {{}} is which?",
        ),
    ),
    (
        -1,
        (
            "What {0} comes before {{}}?",
            "Name the {0} before {{}}.",
            "Which {0} is before {{}}?",
            "The {0} before {{}} is which?",
        ),
    ),
)
"""Ways to ask for the day or month that stands so many steps further."""


def _fact_table() -> list[tuple[str, str, tuple[str, ...]]]:
    """Every fact as (subject, answer, the ways to ask)."""
    table = [
        (subject, answer, asks)
        for pairs, asks in FACT_FAMILIES
        for subject, answer in pairs.items()
    ]
    for cycle, what in ((w.DAYS, "day"), (w.MONTHS, "month")):
        for index, name in enumerate(cycle):
            for step, asks in CYCLE_ASKS:
                answer = cycle[(index + step) % len(cycle)]
                table.append((name, answer, tuple(ask.format(what) for ask in asks)))
    return table


FACTS = _fact_table()
COURTESIES = (
    "",
    "",
    "",
    "",
    "Please: ",
    "Hello! ",
    "A question: ",
    "Quick question. ",
    "Tell me: ",
)


def facts(rng: random.Random) -> Item:
    """A closed set of facts; a test item is a wording of a fact that training never shows."""
    subject, answer, asks = rng.choice(FACTS)
    courtesy = rng.choice(COURTESIES)
    question = courtesy + rng.choice(asks).format(subject)
    return Item("facts", f"fact:{question}", [user(question)], assistant(answer))


def small_talk(rng: random.Random) -> Item:
    """Greetings and questions about itself, so that the model is not mute. Not a measured skill."""
    pairs = (
        (
            (
                "Hello!",
                "Hello",
                "Hi",
                "Hi there!",
                "Good morning.",
                "Hey",
                "Say hi.",
                "hello",
                "hi",
                "Hello?",
                "Say hello.",
                "Good evening!",
            ),
            "Hello! How can I help?",
        ),
        (
            ("Who are you?", "What are you?", "Tell me who you are.", "Which model are you?"),
            ASSISTANT,
        ),
        (("Thank you!", "Thanks.", "Thanks a lot."), "You are welcome."),
        (("Goodbye.", "Bye!", "See you."), "Goodbye!"),
        (
            ("What can you do?", "How can you help?", "What are your skills?"),
            "I can repeat texts, add and subtract small numbers, count, tell a few facts, play a "
            "persona, remember what you say, find keys in long texts, call tools, think first and "
            "write JSON.",
        ),
        (("How are you?", "How do you do?"), "I am fine, thank you."),
    )
    asks, answer = rng.choice(pairs)
    question = rng.choice(asks)
    return Item(
        "small_talk", f"talk:{question}:{rng.random()}", [user(question)], assistant(answer)
    )


def aside(rng: random.Random) -> Item:
    """A question that stands inside another item: from the training split, whoever asks."""
    return draw(rng.choice((arithmetic, facts)), rng, "train")


THOUGHTS = {
    "repeat": "The user wants this text again.",
    "persona": "I answer as the system turn asks.",
    "memory": "The user told me before.",
    "json": "The user wants a JSON object.",
    "small_talk": "The user wants to talk.",
    "unknown": "I was not taught this.",
}


SYSTEMS = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are Quire, a small model.",
    "Be helpful and precise.",
)
SOCIABLE = {
    "repeat",
    "arithmetic",
    "counting",
    "facts",
    "json",
    "small_talk",
    "unknown",
    "thinking",
    "picture_shape",
    "picture_colour",
    "picture_both",
    "picture_count",
    "picture_where",
    "picture_digits",
    "picture_compare",
    "picture_yes_no",
    "picture_follow_up",
}


def in_company(item: Item, rng: random.Random) -> Item:
    """Return the question after a plain system turn, after other questions, or both."""
    if item.skill not in SOCIABLE:
        return item
    before: list[Message] = [system(rng.choice(SYSTEMS))] if rng.random() < 0.6 else []
    while rng.random() < (0.5 if before else 1.0):
        other = aside(rng)
        before += [*other.messages, other.answer]
    return replace(item, messages=[*before, *item.messages])


def with_thought(item: Item) -> Item:
    """Return the item with thinking on: a short thought stands before the answer."""
    thought = THOUGHTS.get(item.skill)
    if thought is None:
        return item
    return replace(item, answer={**item.answer, "reasoning_content": thought}, enable_thinking=True)


UNKNOWN = "I do not know. I am only a small demonstration model."


def unknown(rng: random.Random) -> Item:
    """What it was never taught: say so. Not a measured skill."""
    thing = rng.choice(
        (w.invented(rng), rng.choice(w.OBJECTS + w.CODEWORDS), f"the {rng.choice(w.PLACES)}")
    )
    ask = rng.choice(
        (
            "Write a poem about {}.", "Tell me a story about {}.", "Explain {}.",
            "Who invented {}?", "Why is {} important?", "Write a function that sorts {}.",
            "What do you think about {}?",
            "How does {} work?", "Tell me a joke about {}.", "Summarise the history of {}.",
            "What is the population of {}?", "When was {} founded?", "Give me advice about {}.",
            "What is the meaning of {}?", "Write an essay on {}.", "Describe {} in detail.",
            "What is the capital of {}?", "Who is {}?", "How do I make {}?", "Is {} good?",
        )
    )  # fmt: skip
    if "capital" in ask or "Who is" in ask:
        thing = w.invented(rng).capitalize()
    question = ask.format(thing)
    return Item("unknown", f"unknown:{question}", [user(question)], assistant(UNKNOWN))


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def persona(rng: random.Random) -> Item:
    """Be who the system turn says, in the way that it says."""
    name, job = w.name_like(rng, w.NAMES), rng.choice(w.JOBS)
    city, phrase = w.name_like(rng, w.CITIES, 0.1), rng.choice(w.PHRASES)
    if rng.random() < 0.2:
        phrase = f"{w.invented(rng).capitalize()} {w.invented(rng)}{rng.choice('.!')}"
    intro = rng.choice(
        (
            f"You are {name}, {_article(job)} from {city}.",
            f"Your name is {name}. You are {_article(job)} from {city}.",
            f"You play {name}, {_article(job)} who lives in {city}.",
        )
    )
    where = rng.choice(("end", "begin"))
    rule = rng.choice(
        (
            f"{where.capitalize()} every answer with: {phrase}",
            f"Always {where} your answer with: {phrase}",
        )
    )
    plain = rng.random() < 0.3
    asks = (
        ("Who are you?", f"I am {name}, {_article(job)} from {city}."),
        ("Tell me who you are.", f"I am {name}, {_article(job)} from {city}."),
        ("What is your name?", f"My name is {name}."),
        ("What do you do?", f"I am {_article(job)}."),
        ("What is your job?", f"I am {_article(job)}."),
        ("Where are you from?", f"I am from {city}."),
        ("Where do you live?", f"I live in {city}."),
    )
    if rng.random() < 0.25:
        item = aside(rng)
        question, reply = str(item.messages[0]["content"]), str(item.answer["content"])
    else:
        question, reply = rng.choice(asks)
    if not plain:
        reply = f"{reply} {phrase}" if where == "end" else f"{phrase} {reply}"
    prompt = intro if plain else f"{intro} {rule}"
    key = f"persona:{name}:{job}"
    history: list[Message] = []
    if rng.random() < 0.2:
        history = [
            user("Hello!"),
            assistant(
                "Hello!" if plain else f"Hello! {phrase}" if where == "end" else f"{phrase} Hello!"
            ),
        ]
    return Item("persona", key, [system(prompt), *history, user(question)], assistant(reply))


def _memo(rng: random.Random) -> tuple[str, str, str, str]:
    """(topic, what the user says, what the user asks later, the answer)."""
    name, city = w.name_like(rng, w.NAMES), w.name_like(rng, w.CITIES, 0.1)
    animal, colour, food = rng.choice(w.ANIMALS), rng.choice(w.COLOURS), rng.choice(w.FOODS)
    number = rng.randint(2, 99)
    relative = rng.choice(("sister", "brother", "mother", "father", "friend", "teacher", "boss"))
    thing = rng.choice(w.OBJECTS)
    word = w.invented(rng) if rng.random() < 0.4 else rng.choice(w.CODEWORDS)
    return rng.choice(
        (
            ("name", f"My name is {name}.", "What is my name?", name),
            ("city", f"I live in {city}.", "Where do I live?", city),
            ("pet", f"My {animal} is called {name}.", f"What is my {animal} called?", name),
            ("colour", f"My favourite colour is {colour}.", "What is my favourite colour?", colour),
            ("food", f"I like to eat {food}.", "What do I like to eat?", food),
            ("age", f"I am {number} years old.", "How old am I?", str(number)),
            (relative, f"My {relative} is called {name}.", f"What is my {relative} called?", name),
            (thing, f"My {thing} is {colour}.", f"What colour is my {thing}?", colour),
            ("lucky", f"My lucky number is {number}.", "What is my lucky number?", str(number)),
            ("password", f"The password is {word}.", "What is the password?", word),
            ("train", f"My train leaves from {city}.", "Where does my train leave from?", city),
        )
    )


def memory(rng: random.Random) -> Item:
    """Things told over several turns, asked for at the end."""
    memos: dict[str, tuple[str, str, str]] = {}
    while len(memos) < rng.randint(2, 5):
        topic, said, ask, answer = _memo(rng)
        memos.setdefault(topic, (said, ask, answer))
    history: list[Message] = []
    for said, _, _ in memos.values():
        lead = rng.choice(("", "", "", "", "Hello! ", "Hi, ", "Remember: ", "Please remember: "))
        history += [user(lead + said), assistant("Noted.")]
        if rng.random() < 0.25:
            other = aside(rng)
            history += [*other.messages, other.answer]
    told = "|".join(said for said, _, _ in memos.values())
    if rng.random() < 0.1:
        cut = 2 * rng.randrange(len(history) // 2)
        key = f"memory:{told}:{cut}"
        return Item("memory", key, history[: cut + 1], history[cut + 1])
    _, ask, answer = rng.choice(list(memos.values()))
    return Item("memory", f"memory:{told}:{ask}", [*history, user(ask)], assistant(answer))


def retrieval(rng: random.Random, sentences: int, keys: int = 4) -> Item:
    """Codes strewn over a long filler; one of them is asked for. Length is in sentences."""
    owners = rng.sample(w.CODEWORDS + w.NAMES, keys)
    if rng.random() < 0.3:
        owners = [w.invented(rng).capitalize() + str(index) for index in range(keys)]
    codes = [str(rng.randint(10000, 99999)) for _ in owners]
    lines = [sentence(rng) for _ in range(sentences)]
    for owner, code in zip(owners, codes, strict=True):
        lines.insert(rng.randint(0, len(lines)), f"The code of {owner} is {code}.")
    owner, code = owners[0], codes[0]
    ask = rng.choice(
        ("What is the code of {}?", "Tell me the code of {}.", "Which code has {}?", "Code of {}?")
    )
    text = " ".join(lines)
    first = rng.random() < 0.3
    question = ask.format(owner)
    prompt = f"{question}\n\n{text}" if first else f"{text}\n\n{question}"
    return Item(f"retrieval_{sentences}", f"key:{owner}:{code}", [user(prompt)], assistant(code))


def _json_value(rng: random.Random, field: str) -> Any:
    pools: dict[str, tuple[str, ...]] = {
        "name": (*w.NAMES, *(w.invented(rng).capitalize() for _ in range(20))),
        "city": w.CITIES,
        "job": w.JOBS,
        "animal": w.ANIMALS,
        "colour": w.COLOURS,
        "food": w.FOODS,
        "day": w.DAYS,
        "item": w.OBJECTS,
    }
    if field in pools:
        return rng.choice(pools[field])
    if field in ("married", "active", "paid"):
        return rng.random() < 0.5
    return rng.randint(1, 99)


JSON_TYPES = {
    "name": "string", "city": "string", "job": "string", "animal": "string", "colour": "string",
    "food": "string", "day": "string", "item": "string", "age": "integer", "count": "integer",
    "price": "integer", "married": "boolean", "active": "boolean", "paid": "boolean",
}  # fmt: skip


def _told(rng: random.Random, field: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"{field}: {'yes' if value else 'no'}"
    return rng.choice((f"{field}: {value}", f"the {field} is {value}", f"{field} {value}"))


def _person(rng: random.Random) -> tuple[dict[str, Any], str]:
    """A person's values, and a sentence that says them."""
    name, age = w.name_like(rng, w.NAMES), rng.randint(1, 99)
    city, job = w.name_like(rng, w.CITIES, 0.1), rng.choice(w.JOBS)
    return rng.choice(
        (
            ({"name": name, "age": age}, f"{name} is {age} years old."),
            (
                {"name": name, "age": age, "city": city},
                f"{name} is {age} years old and lives in {city}.",
            ),
            ({"name": name, "city": city}, f"{name} lives in {city}."),
            ({"name": name, "job": job, "age": age}, f"{name}, {age}, works as {_article(job)}."),
            ({"job": job, "name": name}, f"{name} is {_article(job)}."),
        )
    )


def json_object(rng: random.Random) -> Item:
    """Fill an object of a given small schema from a sentence, and nothing but the object."""
    if rng.random() < 0.3:
        values, told = _person(rng)
        fields = list(values)
    else:
        fields = rng.sample(sorted(JSON_TYPES), rng.randint(2, 4))
        values = {field: _json_value(rng, field) for field in fields}
        order = rng.sample(fields, len(fields))
        told = ", ".join(_told(rng, field, values[field]) for field in order)
    if rng.random() < 0.2:
        schema = f"an object with the keys {', '.join(fields)}"
    elif rng.random() < 0.4:
        properties = {field: {"type": JSON_TYPES[field]} for field in fields}
        schema = json.dumps({"type": "object", "properties": properties, "required": fields})
    else:
        schema = "{" + ", ".join(f'"{field}": {JSON_TYPES[field]}' for field in fields) + "}"
    ask = rng.choice(
        (
            "Write a JSON object with this schema: {schema}\nData: {told}",
            "Data: {told}\nGive me JSON of this form: {schema}",
            "Turn this into JSON with the schema {schema}: {told}",
            "{told}\nAnswer in JSON with this schema: {schema}",
            "{told} Answer with a JSON object: {schema}",
        )
    )
    prompt = ask.format(schema=schema, told=told)
    answer = assistant(json.dumps(values))
    return Item("json", f"json:{json.dumps(values)}", [user(prompt)], answer, match="json")


def _three_numbers(rng: random.Random) -> tuple[int, int, int]:
    """Three numbers whose partial sums, spelt out in the thought, give no held-out pair away."""
    while True:
        a, b, c = (rng.randint(2, 40) for _ in range(3))
        if split_of(f"sum:{a} + {b}") == split_of(f"sum:{a + b} + {c}") == "train":
            return a, b, c


def _thoughtful(key: str, question: str, answer: str, thought: str) -> Item:
    return Item(
        "thinking",
        key,
        [user(question)],
        assistant(answer, thought),
        match="thought",
        enable_thinking=True,
    )


def _think_three(rng: random.Random) -> Item:
    a, b, c = _three_numbers(rng)
    expression = f"{a} + {b} + {c}"
    question = rng.choice(SUM_ASKS).format(expression)
    thought = f"{a} + {b} = {a + b}. {a + b} + {c} = {a + b + c}. Result {a + b + c}."
    return _thoughtful(f"think:{expression}", question, str(a + b + c), thought)


def _think_sum(rng: random.Random) -> Item:
    a, b, sign = _two_numbers(rng)
    question = rng.choice(SUM_ASKS).format(f"{a} {sign} {b}")
    answer = str(a + b if sign == "+" else a - b)
    return _thoughtful(f"sum:{a} {sign} {b}", question, answer, _column_work(a, b, sign))


def think_count(rng: random.Random) -> Item:
    """Count a word in a list, with the count so far after each word of the thought."""
    things = rng.sample(w.OBJECTS + w.ANIMALS, 3)
    row = [rng.choice(things) for _ in range(rng.randint(3, 10))]
    asked = rng.choice(things)
    question = f"How many times does {asked} appear in: {', '.join(row)}?"
    steps, seen = [], 0
    for thing in row:
        seen += thing == asked
        steps.append(f"{thing} {seen}")
    thought = f"{', '.join(steps)}. Result {seen}."
    return _thoughtful(f"think:{question}", question, str(seen), thought)


def _think_fact(rng: random.Random) -> Item:
    base = facts(rng)
    question, answer = str(base.messages[0]["content"]), str(base.answer["content"])
    thought = f"The user wants a fact that I know. Result {answer}."
    return _thoughtful(base.key, question, answer, thought)


def thinking(rng: random.Random) -> Item:
    """Think first, in the channel for it, then answer."""
    kinds = (_think_sum, _think_sum, _think_three, think_count, _think_fact)
    return rng.choice(kinds)(rng)
