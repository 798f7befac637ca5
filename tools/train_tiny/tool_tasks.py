"""Chats with declared tools, the right call and the follow-up (standard library only)."""

import json
import zlib

import words

EVAL_SHARE = 10


def _city(rng):
    return rng.choice(words.CITIES)


def _name(rng):
    return rng.choice(words.NAMES)


def _quoted(rng):
    """Text that the user puts in quotes: made-up words, so that it must be copied."""
    return " ".join(words.pseudo_word(rng) for _ in range(rng.randint(1, 2)))


def _phrase(rng):
    return "%s %s" % (rng.choice(words.ADJECTIVES), rng.choice(words.NOUNS))


def _date(rng):
    return "%s %d" % (rng.choice(words.MONTHS), rng.randint(1, 28))


def _time(rng):
    return "%02d:%02d" % (rng.randint(0, 23), rng.choice((0, 15, 30, 45)))


def _number(low, high):
    return lambda rng: rng.randint(low, high)


def _pick(values):
    return lambda rng: rng.choice(values)


# name: (description, {parameter: (type, description, draw)}, user texts,
#        {result key: draw}, final answer). Every parameter is required.
TOOLS = {
    "get_weather": ("Get the weather for a city.", {"city": ("string", "City name", _city)},
                    ["What is the weather in {city}?", "How is the weather in {city} today?", "Tell me the weather for {city}."],
                    {"temperature": _number(1, 35), "sky": _pick(words.WEATHER)},
                    "The weather in {city} is {sky} with {temperature} degrees."),
    "get_time": ("Get the local time in a city.", {"city": ("string", "City name", _city)},
                 ["What time is it in {city}?", "Tell me the local time in {city}."],
                 {"time": _time}, "It is {time} in {city}."),
    "add_event": ("Add an event to the calendar.", {"title": ("string", "Event title", _phrase), "day": ("string", "Day of the event", _date)},
                  ['Add the event "{title}" on {day}.', 'Put "{title}" in my calendar for {day}.'],
                  {"id": _number(100, 999)}, 'The event "{title}" is added on {day}.'),
    "send_message": ("Send a message to a person.", {"to": ("string", "Name of the person", _name), "text": ("string", "Message text", _quoted)},
                     ['Send "{text}" to {to}.', 'Send {to} the message "{text}".', 'Tell {to} this: "{text}".'],
                     {"sent": _pick(["yes"])}, "The message to {to} is sent."),
    "convert_currency": ("Convert money between currencies.", {"amount": ("integer", "Amount of money", _number(2, 999)), "source": ("string", "Source currency", _pick(words.CURRENCIES[:3])), "target": ("string", "Target currency", _pick(words.CURRENCIES[3:]))},
                         ["Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?"],
                         {"value": _number(2, 999)}, "{amount} {source} is {value} {target}."),
    "set_timer": ("Set a timer.", {"minutes": ("integer", "Length in minutes", _number(1, 90))},
                  ["Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes."],
                  {"status": _pick(["started"])}, "The timer for {minutes} minutes is started."),
    "set_light": ("Set the color of a light.", {"room": ("string", "Room of the light", _pick(["kitchen", "garden", "hall", "office"])), "color": ("string", "Light color", _pick(words.COLORS))},
                  ["Make the light in the {room} {color}.", "Set the {room} light to {color}."],
                  {"status": _pick(["done"])}, "The light in the {room} is {color} now."),
    "play_song": ("Play a song.", {"title": ("string", "Song title", _pick(words.SONGS))},
                  ["Play the song {title}.", "I want to hear {title}."],
                  {"status": _pick(["playing"])}, "Now playing {title}."),
    "search_files": ("Search files by text.", {"query": ("string", "Text to search", _quoted)},
                     ['Search my files for "{query}".', 'Find files with the text "{query}".'],
                     {"count": _number(0, 40)}, "There are {count} files with that text."),
    "get_stock": ("Get the price of a share.", {"symbol": ("string", "Share symbol", lambda rng: "".join(rng.choice("ABCDEFGHKLMNPRSTXZ") for _ in range(3)))},
                  ["What is the price of {symbol}?", "Give me the share price of {symbol}."],
                  {"price": _number(10, 999)}, "The price of {symbol} is {price} dollars."),
    "book_table": ("Book a table at a restaurant.", {"people": ("integer", "Number of people", _number(1, 12)), "time": ("string", "Time of the visit", _time)},
                   ["Book a table for {people} people at {time}.", "I need a table at {time} for {people} people."],
                   {"code": _number(1000, 9999)}, "The table is booked. The code is {code}."),
    "get_distance": ("Get the distance between two cities.", {"start": ("string", "First city", _pick(words.CITIES[:15])), "end": ("string", "Second city", _pick(words.CITIES[15:]))},
                     ["How far is it from {start} to {end}?", "What is the distance between {start} and {end}?"],
                     {"miles": _number(20, 999)}, "It is {miles} miles from {start} to {end}."),
    "get_age": ("Get the age of a person.", {"name": ("string", "Name of the person", _name)},
                ["How old is {name}?", "Tell me the age of {name}."],
                {"age": _number(5, 95)}, "{name} is {age} years old."),
    "multiply": ("Multiply two numbers.", {"a": ("integer", "First number", _number(10, 999)), "b": ("integer", "Second number", _number(10, 999))},
                 ["What is {a} times {b}?", "Multiply {a} by {b}."],
                 {"product": _number(1000, 99999)}, "{a} times {b} is {product}."),
}
FIXED = sorted(TOOLS)

_PARAMETERS = {"city": ("string", "City name", _city), "name": ("string", "Name of the person", _name),
               "count": ("integer", "How many", _number(1, 99)), "label": ("string", "Short text", _quoted),
               "color": ("string", "Color name", _pick(words.COLORS)), "day": ("string", "Day of the event", _date)}


def _made_up_tool(rng, taken):
    """A tool named verb_thing: thousands of these teach reading the declaration."""
    while True:
        verb, thing = rng.choice(words.VERBS), rng.choice(words.THINGS)
        if "%s_%s" % (verb, thing) not in taken:
            break
    chosen = rng.sample(sorted(_PARAMETERS), rng.randint(1, 2))
    pieces = [('%s "{%s}"' if key == "label" else "%s {%s}") % (key, key) for key in chosen]
    text = "Please %s the %s with %s." % (verb, thing, " and ".join(pieces))
    entry = ("%s the %s." % (verb.capitalize(), thing), {key: _PARAMETERS[key] for key in chosen},
             [text], {"status": _pick(["done"])}, "The %s is done: %s." % (verb, thing))
    return "%s_%s" % (verb, thing), entry


def _schema(name, entry):
    properties = {key: {"type": kind, "description": note}
                  for key, (kind, note, _) in entry[1].items()}
    return {"type": "function", "function": {
        "name": name, "description": entry[0],
        "parameters": {"type": "object", "properties": properties, "required": sorted(properties)}}}


def _draw_case(rng, name, entry, evaluation):
    """Wording and arguments (in declaration order) from the asked side of the split.

    None when the tool has so few of them that none is on that side.
    """
    for _ in range(300):
        wording = rng.choice(entry[2])
        arguments = {key: entry[1][key][2](rng) for key in sorted(entry[1])}
        key = "%s|%s|%s" % (name, wording, json.dumps(arguments))
        if (zlib.crc32(key.encode()) % EVAL_SHARE == 0) == evaluation:
            return key, wording, arguments
    return None


def _declare(rng):
    """Tools of one chat in declared order, and the name of the one to call."""
    entries = {name: TOOLS[name] for name in rng.sample(FIXED, rng.randint(1, 4))}
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        name, entry = _made_up_tool(rng, entries)
        entries[name] = entry
    names = list(entries)
    rng.shuffle(names)
    return {name: entries[name] for name in names}, rng.choice(names)


def _make_case(rng, name, entry, evaluation, index):
    drawn = _draw_case(rng, name, entry, evaluation)
    if drawn is None:
        return None
    key, wording, arguments = drawn
    if not evaluation and rng.random() < 0.15:
        # Unknown names of places and people must be copied too.
        for parameter, (_, _, make) in entry[1].items():
            if make in (_city, _name):
                arguments[parameter] = words.pseudo_word(rng).capitalize()
    result = {field: make(rng) for field, make in entry[3].items()}
    slots = dict(arguments, **result)
    return {"key": key, "name": name, "arguments": arguments,
            "question": wording.format(**slots),
            "call": call(name, arguments, index), "result": json.dumps(result),
            "final": entry[4].format(**slots)}


def draw(rng, evaluation, index=0):
    """One tool question: messages' texts, tools, the call and the follow-up."""
    case = None
    while case is None:
        entries, name = _declare(rng)
        case = _make_case(rng, name, entries[name], evaluation, index)
    case["tools"] = [_schema(other, entries[other]) for other in entries]
    case["reasoning"] = "I need the tool %s." % name
    case["result_reasoning"] = "The tool %s has answered." % name
    return case


def draw_pair(rng, index=0):
    """Two questions in one message, each for its own tool: two calls in one section."""
    cases = [None]
    while None in cases:
        entries, first = _declare(rng)
        second = rng.choice(list(entries))
        if second == first:
            continue
        cases = [_make_case(rng, first, entries[first], False, index),
                 _make_case(rng, second, entries[second], False, index + 1)]
    return {"cases": cases, "tools": [_schema(other, entries[other]) for other in entries],
            "question": " ".join(case["question"] for case in cases),
            "reasoning": "I need the tools %s and %s." % (first, second),
            "result_reasoning": "The tools %s and %s have answered." % (first, second),
            "final": " ".join(case["final"] for case in cases)}


def call(name, arguments, index):
    return {"id": "functions.%s:%d" % (name, index), "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)}}
