"""Tools, requests that need them, and the answers that come of what they return."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from training.data import words as w
from training.data.item import Item, Message, Tool, assistant, calls, system, user
from training.data.text import aside, sentence, small_talk

Draw = Callable[[random.Random], Any]


@dataclass(frozen=True)
class Parameter:
    """One argument of a tool: its schema and where its values come from."""

    name: str
    type: str
    description: str
    draw: Draw
    enum: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """Tools that do one thing, under several names, and how people ask for it."""

    names: tuple[str, ...]
    description: str
    parameters: tuple[Parameter, ...]
    asks: tuple[str, ...]
    result: Draw
    reply: str
    """The answer made of the arguments and `{result}`."""


def _of(pool: tuple[str, ...]) -> Draw:
    return lambda rng: rng.choice(pool)


def _between(low: int, high: int) -> Draw:
    return lambda rng: rng.randint(low, high)


def _topic(rng: random.Random) -> str:
    shape = rng.randrange(5)
    if shape > 2:
        words = [
            w.invented(rng) if rng.random() < 0.6 else rng.choice(w.OBJECTS)
            for _ in range(shape - 1)
        ]
        return " ".join(word.capitalize() if rng.random() < 0.2 else word for word in words)
    if shape == 0:
        return f"{rng.choice(w.ADJECTIVES)} {rng.choice(w.OBJECTS)}"
    if shape == 1:
        return f"{rng.choice(w.ANIMALS)} in {rng.choice(w.CITIES)}"
    return f"{rng.choice(w.CODEWORDS)} {rng.choice(w.PLACES)}"


def _clock(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.choice((0, 15, 30, 45)):02d}"


def _message(rng: random.Random) -> str:
    return rng.choice(
        (sentence(rng), f"see you at {_clock(rng)}", f"bring the {rng.choice(w.OBJECTS)}")
    )


def _path(rng: random.Random) -> str:
    folder, name = rng.choice(w.PLACES), rng.choice(w.CODEWORDS)
    return f"/{folder}/{name}.{rng.choice(('txt', 'md', 'py', 'json'))}"


def _text(name: str, description: str, draw: Draw) -> Parameter:
    return Parameter(name, "string", description, draw)


def _number(name: str, description: str, low: int, high: int) -> Parameter:
    return Parameter(name, "integer", description, _between(low, high))


def _choice(name: str, description: str, values: tuple[str, ...]) -> Parameter:
    return Parameter(name, "string", description, _of(values), values)


_city = _text("city", "The city", lambda rng: w.name_like(rng, w.CITIES, 0.15))
_count = _number

FAMILIES: tuple[Family, ...] = (
    Family(
        ("get_weather", "weather", "current_weather"),
        "Get the current weather of a city",
        (_city,),
        (
            "What is the weather in {city}?",
            "How is the weather in {city}?",
            "Tell me the weather in {city}.",
            "Weather in {city}?",
            "Is it raining in {city}?",
            "What's the weather in {city}?",
            "What's the weather like in {city}?",
            "weather {city}",
            "What is the weather like in {city} today?",
            "Get the weather for {city}.",
            "Check the weather in {city}, please.",
        ),
        lambda rng: f"{rng.choice(w.WEATHER)}, {rng.randint(1, 35)} degrees",
        "The weather in {city} is {result}.",
    ),
    Family(
        ("search_web", "web_search", "search"),
        "Search the web",
        (_text("query", "What to search for", _topic),),
        (
            "Search the web for {query}.",
            "Look up {query} on the web.",
            "Search for {query}.",
            "Find pages about {query}.",
            "Please search for {query}.",
            "Google {query}",
            "Can you look up {query}?",
            "Search the web for: {query}",
            "Find information about {query}.",
        ),
        lambda rng: f"{rng.randint(2, 90)} pages",
        "I found {result} about {query}.",
    ),
    Family(
        ("get_time", "current_time", "clock"),
        "Get the local time of a city",
        (_city,),
        (
            "What time is it in {city}?",
            "Tell me the time in {city}.",
            "Time in {city}?",
            "What's the time in {city}?",
            "Current time in {city}?",
        ),
        _clock,
        "It is {result} in {city}.",
    ),
    Family(
        ("send_email", "email", "send_mail"),
        "Send an email to a person",
        (
            _text("to", "Who gets it", lambda rng: w.name_like(rng, w.NAMES)),
            _text("text", "The text", _message),
        ),
        (
            "Send an email to {to}: {text}",
            "Email {to} this: {text}",
            "Write a mail to {to} saying: {text}",
        ),
        _of(("sent", "delivered")),
        "The email to {to} was {result}.",
    ),
    Family(
        ("set_alarm", "alarm", "create_alarm"),
        "Set an alarm",
        (_text("time", "When, as HH:MM", _clock),),
        ("Set an alarm for {time}.", "Wake me at {time}.", "Alarm at {time} please."),
        _of(("set", "active")),
        "The alarm for {time} is {result}.",
    ),
    Family(
        ("set_timer", "timer", "start_timer"),
        "Start a timer",
        (_count("minutes", "How many minutes", 1, 90),),
        (
            "Set a timer for {minutes} minutes.",
            "Start a timer of {minutes} minutes.",
            "Timer: {minutes} minutes.",
        ),
        _of(("running", "started")),
        "The timer of {minutes} minutes is {result}.",
    ),
    Family(
        ("convert_currency", "exchange", "currency_converter"),
        "Convert money into another currency",
        (
            _count("amount", "How much", 1, 999),
            _choice("source", "Currency to convert from", w.CURRENCIES),
            _choice("target", "Currency to convert to", w.CURRENCIES),
        ),
        (
            "Convert {amount} {source} to {target}.",
            "How much is {amount} {source} in {target}?",
            "Change {amount} {source} into {target}.",
        ),
        lambda rng: str(rng.randint(1, 9999)),
        "{amount} {source} is {result} {target}.",
    ),
    Family(
        ("translate", "translate_text", "translator"),
        "Translate a text into another language",
        (_text("text", "The text", _message), _choice("language", "Target language", w.LANGUAGES)),
        (
            "Translate into {language}: {text}",
            "Translate this to {language}: {text}",
            "Put this into {language}: {text}",
        ),
        lambda rng: " ".join(rng.sample(w.CODEWORDS, 2)),
        "In {language}: {result}",
    ),
    Family(
        ("book_table", "reserve_table", "restaurant_booking"),
        "Book a table in a restaurant",
        (
            _city,
            _count("people", "How many people", 1, 12),
            _text("time", "When, as HH:MM", _clock),
        ),
        (
            "Book a table in {city} for {people} people at {time}.",
            "Reserve a table for {people} people in {city} at {time}.",
            "At {time} I need a table for {people} people in {city}.",
        ),
        _of(("booked", "reserved")),
        "Your table in {city} for {people} people at {time} is {result}.",
    ),
    Family(
        ("play_music", "play_song", "music_player"),
        "Play music of an instrument",
        (_choice("instrument", "The instrument", w.INSTRUMENTS),),
        (
            "Play some {instrument} music.",
            "I want to hear the {instrument}.",
            "Play the {instrument}.",
        ),
        _of(("playing", "on")),
        "The {instrument} music is {result}.",
    ),
    Family(
        ("find_route", "directions", "get_route"),
        "Find the way between two cities",
        (
            _text("start", "Where it begins", _of(w.CITIES)),
            _text("end", "Where it ends", _of(w.CITIES)),
        ),
        (
            "How do I get from {start} to {end}?",
            "Find a route from {start} to {end}.",
            "Directions from {start} to {end}.",
        ),
        lambda rng: f"{rng.randint(10, 999)} km",
        "The way from {start} to {end} is {result}.",
    ),
    Family(
        ("add_task", "create_todo", "todo_add"),
        "Add a task to the list",
        (
            _text(
                "task",
                "What to do",
                lambda rng: (
                    f"{rng.choice(('buy', 'clean', 'repair', 'paint'))} the {rng.choice(w.OBJECTS)}"
                ),
            ),
            _choice("day", "Which day", w.DAYS),
        ),
        (
            "Add a task for {day}: {task}",
            "Put this on my list for {day}: {task}",
            "Remind me on {day} to {task}",
        ),
        _of(("added", "saved")),
        "The task for {day} is {result}.",
    ),
    Family(
        ("get_stock", "stock_level", "check_stock"),
        "Look up how many pieces of an item are in stock",
        (_text("item", "The item", _of(w.OBJECTS)),),
        (
            "How many pieces of {item} are in stock?",
            "Check the stock of {item}.",
            "Stock of {item}?",
        ),
        lambda rng: str(rng.randint(0, 500)),
        "There are {result} pieces of {item} in stock.",
    ),
    Family(
        ("order_food", "order", "place_order"),
        "Order food",
        (_text("food", "Which food", _of(w.FOODS)), _count("quantity", "How many", 1, 20)),
        (
            "Order {quantity} portions of {food}.",
            "I want {quantity} portions of {food}.",
            "Get me {quantity} portions of {food}.",
        ),
        _of(("ordered", "on its way")),
        "Your {food} is {result}.",
    ),
    Family(
        ("turn_light", "set_light", "light_switch"),
        "Switch the light of a room",
        (_text("room", "Which room", _of(w.PLACES)), _choice("state", "On or off", ("on", "off"))),
        (
            "Turn {state} the light in the {room}.",
            "Switch the light in the {room} {state}.",
            "Light {state} in the {room}.",
        ),
        _of(("done", "changed")),
        "The light in the {room} is {state}.",
    ),
    Family(
        ("get_price", "price_of", "lookup_price"),
        "Look up the price of an item",
        (_text("item", "The item", _of(w.OBJECTS)),),
        ("What does the {item} cost?", "Price of the {item}?", "How expensive is the {item}?"),
        lambda rng: f"{rng.randint(1, 900)} {rng.choice(w.CURRENCIES)}",
        "The {item} costs {result}.",
    ),
    Family(
        ("read_file", "open_file", "cat_file"),
        "Read a file",
        (
            _text(
                "path",
                "Path of the file",
                _path,
            ),
        ),
        ("Read the file {path}.", "Show me {path}.", "What is in {path}?", "Open {path}."),
        sentence,
        "The file {path} says: {result}",
    ),
    Family(
        ("call_phone", "phone_call", "dial"),
        "Call a person",
        (_text("person", "Who to call", _of(w.NAMES)),),
        ("Call {person}.", "Phone {person} please.", "Give {person} a call."),
        _of(("connected", "busy")),
        "The call to {person} is {result}.",
    ),
    Family(
        ("set_heating", "thermostat", "set_temperature"),
        "Set the temperature of a room",
        (_text("room", "Which room", _of(w.PLACES)), _count("degrees", "Degrees", 10, 30)),
        (
            "Heat the {room} to {degrees} degrees.",
            "Set the {room} to {degrees} degrees.",
            "Make it {degrees} degrees in the {room}.",
        ),
        _of(("set", "heating")),
        "The {room} is set to {degrees} degrees.",
    ),
    Family(
        ("find_match", "sport_result", "get_score"),
        "Get the score of a team in a sport",
        (_choice("sport", "The sport", w.SPORTS), _city),
        (
            "How did {city} do in {sport}?",
            "Score of {city} in {sport}?",
            "What is the {sport} result of {city}?",
        ),
        lambda rng: f"{rng.randint(0, 9)} to {rng.randint(0, 9)}",
        "{city} played {sport}: {result}.",
    ),
)

NO_TOOL = "None of my tools can do that."
THOUGHT = "The user needs {names}. Result: call."


@dataclass(frozen=True)
class Offer:
    """A family under the name that this conversation gives it."""

    family: Family
    name: str
    described: bool = True
    """Whether the schema says what each argument means."""

    def schema(self) -> Tool:
        properties: dict[str, Any] = {}
        for parameter in self.family.parameters:
            described = {"type": parameter.type}
            if self.described:
                described["description"] = parameter.description
            properties[parameter.name] = described | (
                {"enum": list(parameter.enum)} if parameter.enum else {}
            )
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.family.description,
                "parameters": {
                    "type": "object",
                    "properties": properties,
                    "required": [parameter.name for parameter in self.family.parameters],
                },
            },
        }


@dataclass(frozen=True)
class Request:
    """One thing that the user wants from one tool."""

    offer: Offer
    arguments: dict[str, Any]
    words: str

    @property
    def key(self) -> str:
        return f"{self.offer.family.names[0]}:{json.dumps(self.arguments, sort_keys=True)}"


def _offers(rng: random.Random, count: int) -> list[Offer]:
    families = rng.sample(FAMILIES, count)
    described = rng.random() < 0.75
    offers = [
        Offer(
            family, family.names[0] if rng.random() < 0.6 else rng.choice(family.names), described
        )
        for family in families
    ]
    if rng.random() < 0.3:
        offers[rng.randrange(count)] = Offer(*_made_up(rng), described)
    return offers


def _made_up(rng: random.Random) -> tuple[Family, str]:
    """A tool that no list holds, asked for by its name."""
    name = f"{w.invented(rng)}_{rng.choice((w.invented(rng), rng.choice(w.OBJECTS)))}"
    names = rng.sample(("value", "amount", "target", "label", "key", "level", "size", "id"), 2)
    parameters = [_text(names[0], f"The {names[0]}", w.invented)]
    if rng.random() < 0.6:
        parameters.append(_number(names[1], f"The {names[1]}", 0, 999))
    told = " and ".join(f"{p.name} {{{p.name}}}" for p in parameters)
    asks = (f"Call {name} with {told}.", f"Use {name} with {told}.", f"Run {name}: {told}")
    family = Family(
        (name,),
        f"Do the {name}",
        tuple(parameters),
        asks,
        _of(("ok", "done")),
        "The result is {result}.",
    )
    return family, name


def _request(rng: random.Random, offer: Offer) -> Request:
    arguments = {parameter.name: parameter.draw(rng) for parameter in offer.family.parameters}
    return Request(offer, arguments, rng.choice(offer.family.asks).format(**arguments))


def _opening(rng: random.Random) -> list[Message]:
    """Now and then a system turn before the tools."""
    if rng.random() < 0.7:
        return []
    return [system(rng.choice(("You may use tools.", "Use the tools when they help.",
                               "You are a helpful assistant.")))]  # fmt: skip


def _thought(rng: random.Random, names: list[str]) -> str | None:
    return THOUGHT.format(names=" and ".join(names)) if rng.random() < 0.15 else None


def one_call(rng: random.Random) -> Item:
    """Choose among three or more tools and fill in the arguments."""
    offers = _offers(rng, rng.randint(3, 6))
    request = _request(rng, rng.choice(offers))
    thought = _thought(rng, [request.offer.name])
    return Item(
        "tool_call",
        f"call:{request.key}",
        [*_opening(rng), user(request.words)],
        calls((request.offer.name, request.arguments), reasoning=thought),
        "tools",
        [offer.schema() for offer in offers],
        thought is not None,
    )


def several_calls(rng: random.Random) -> Item:
    """Two or three calls in one turn, of one tool or of several."""
    offers = _offers(rng, rng.randint(3, 5))
    count = rng.choice((2, 2, 2, 3))
    chosen = [rng.choice(offers)] * count if rng.random() < 0.4 else rng.sample(offers, count)
    requests = [_request(rng, offer) for offer in chosen]
    joined = rng.choice((" And: ", " Then: ", " Also: ", " ", "\n"))
    text = joined.join(request.words for request in requests)
    city = [request for request in requests if "city" in request.arguments]
    if len(city) == count == 2 and city[0].offer == city[1].offer and len(city[0].arguments) == 1:
        first, second = (str(request.arguments["city"]) for request in city)
        if first != second and rng.random() < 0.7:
            ask = rng.choice(city[0].offer.family.asks)
            text = ask.format(city=f"{first} and {rng.choice(('', 'in '))}{second}")
    thought = _thought(rng, [request.offer.name for request in requests])
    return Item(
        "tool_several",
        "calls:" + "|".join(request.key for request in requests),
        [*_opening(rng), user(text)],
        calls(
            *((request.offer.name, request.arguments) for request in requests), reasoning=thought
        ),
        "tools",
        [offer.schema() for offer in offers],
        thought is not None,
    )


def no_call(rng: random.Random) -> Item:
    """Tools are there but none fits: say so, or answer what needs no tool."""
    offers = _offers(rng, rng.randint(4, 7))
    missing, offered = offers[0], offers[1:]
    if rng.random() < 0.6:
        inner = aside(rng) if rng.random() < 0.8 else small_talk(rng)
        question, answer = inner.messages[0]["content"], str(inner.answer["content"])
        key = f"nocall:{inner.key}:{missing.family.names[0]}:{offered[0].family.names[0]}"
    else:
        request = _request(rng, missing)
        question, answer, key = request.words, NO_TOOL, f"nocall:{request.key}"
    return Item(
        "tool_none",
        key,
        [*_opening(rng), user(question)],
        assistant(answer),
        tools=[offer.schema() for offer in offered],
    )


def answer_from_result(rng: random.Random) -> Item:
    """Answer in words from what one tool or two returned."""
    offers = _offers(rng, rng.randint(3, 5))
    requests = [_request(rng, offer) for offer in rng.sample(offers, rng.choice((1, 1, 1, 2)))]
    results = [str(request.offer.family.result(rng)) for request in requests]
    messages = [
        *_opening(rng),
        user(" ".join(request.words for request in requests)),
        calls(*((request.offer.name, request.arguments) for request in requests)),
    ]
    replies = []
    for index, (request, result) in enumerate(zip(requests, results, strict=True)):
        messages.append({"role": "tool", "tool_call_id": f"call_{index}", "content": result})
        replies.append(request.offer.family.reply.format(result=result, **request.arguments))
    key = "|".join(
        f"{request.key}:{result}" for request, result in zip(requests, results, strict=True)
    )
    return Item(
        "tool_answer",
        f"answer:{key}",
        messages,
        assistant(" ".join(replies)),
        tools=[offer.schema() for offer in offers],
    )
