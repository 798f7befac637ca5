"""Grade-school word problems (standard library only).

A template is one line of data: the numbers' ranges, the question and the
worked answer. `[a+b]` in an answer prints `12 + 7 = 19` and names the result
r1 (then r2, ...); the last result is the problem's answer, and the count of
brackets is its number of steps.
"""

import re
import zlib

import words

# Every tenth (template, numbers) pair, chosen by hash, belongs to evaluation.
EVAL_SHARE = 10
MAX_VALUE = 999

TRAIN_TEMPLATES = {
    # one step
    "more": ("a:3-90 b:3-90", "{n} has {a} {i}. {n} buys {b} more {i}. How many {i} does {n} have now?",
             "{n} has [a+b] {i}."),
    "gave": ("a:20-99 b:2-60", "{n} had {a} {i}. {n} gave {b} {i} to {m}. How many {i} does {n} have left?",
             "{n} has [a-b] {i} left."),
    "rows": ("a:2-12 b:2-20", "There are {a} {P} with {b} {i} in each {u}. How many {i} are there?",
             "There are [a*b] {i}."),
    "share": ("b:2-12 q:2-20 a=b*q", "{n} shares {a} {i} equally among {b} friends. How many {i} does each friend get?",
              "Each friend gets [a/b] {i}."),
    "fewer": ("a:20-99 b:2-60", "{n} has {a} {i}. {m} has {b} fewer {i} than {n}. How many {i} does {m} have?",
              "{m} has [a-b] {i}."),
    "times": ("a:2-40 b:2-9", "{n} has {a} {i}. {m} has {b} times as many {i} as {n}. How many {i} does {m} have?",
              "{m} has [a*b] {i}."),
    "pack": ("b:2-12 q:2-20 a=b*q", "{n} packs {a} {i} into {P} of {b} {i} each. How many {P} does {n} need?",
             "{n} needs [a/b] {P}."),
    "walk": ("a:5-95 b:5-95", "{n} walks {a} miles in May and {b} miles in June. How many miles does {n} walk in total?",
             "{n} walks [a+b] miles."),
    "differ": ("a:30-99 b:5-60", "{n} is {a} years old and {m} is {b} years old. How many years older is {n} than {m}?",
               "{n} is [a-b] years older."),
    "wage": ("a:5-30 b:2-12", "{n} earns {a} dollars per hour and works {b} hours. How many dollars does {n} earn?",
             "{n} earns [a*b] dollars."),
    # two steps
    "buy_give": ("a:10-80 b:5-60 c:2-50", "{n} has {a} {i}. {n} buys {b} more {i} and then gives {c} {i} to {m}. How many {i} does {n} have left?",
                 "{n} has [a+b] {i} after buying. {n} has [r1-c] {i} left."),
    "box_loose": ("a:2-12 b:2-12 c:2-50", "{n} has {a} {P} with {b} {i} each and {c} loose {i}. How many {i} does {n} have in total?",
                  "The {P} hold [a*b] {i}. In total there are [r1+c] {i}."),
    "box_eat": ("a:2-12 b:3-12 c:2-40", "{n} buys {a} {P} of {b} {i}. {n} loses {c} {i}. How many {i} are left?",
                "{n} buys [a*b] {i}. There are [r1-c] {i} left."),
    "pool_share": ("d:2-9 q:3-15 a:3-60 s=d*q b=s-a", "{n} has {a} {i} and {m} has {b} {i}. They put them together and share them equally among {d} friends. How many {i} does each friend get?",
                   "Together they have [a+b] {i}. Each friend gets [r1/d] {i}."),
    "more_total": ("a:5-80 b:2-60", "{n} has {a} {i}. {m} has {b} more {i} than {n}. How many {i} do they have together?",
                   "{m} has [a+b] {i}. Together they have [a+r1] {i}."),
    "fewer_total": ("a:20-90 b:2-60", "{n} has {a} {i}. {m} has {b} fewer {i} than {n}. How many {i} do they have in total?",
                    "{m} has [a-b] {i}. In total they have [a+r1] {i}."),
    "times_total": ("a:2-30 b:2-9", "{n} has {a} {i}. {m} has {b} times as many. How many {i} do they have together?",
                    "{m} has [a*b] {i}. Together they have [a+r1] {i}."),
    "price_change": ("a:2-9 b:2-12 p:50-99", "{n} buys {a} {i} for {b} dollars each and pays with {p} dollars. How many dollars does {n} get back?",
                     "The {i} cost [a*b] dollars. {n} gets [p-r1] dollars back."),
    "pages": ("a:100-300 b:3-15 c:2-9", "A book has {a} pages. {n} reads {b} pages per day for {c} days. How many pages are left?",
              "{n} reads [b*c] pages. There are [a-r1] pages left."),
    "half_used": ("h:5-45 a=h*2 b:2-40", "{n} has {a} {i}. {n} uses half of them and then finds {b} {i}. How many {i} does {n} have now?",
                  "Half of them is [a/2] {i}. {n} has [r1+b] {i} now."),
    "share_rest": ("d:2-9 q:2-15 c:2-30 r=d*q a=r+c", "{n} has {a} {i}. {n} keeps {c} {i} and shares the rest equally among {d} friends. How many {i} does each friend get?",
                   "The rest is [a-c] {i}. Each friend gets [r1/d] {i}."),
    "week": ("a:2-20 b:2-20 c:2-9", "Each day {n} picks {a} {i} and {m} picks {b} {i}. How many {i} do they pick in {c} days?",
             "They pick [a+b] {i} each day. In {c} days they pick [r1*c] {i}."),
    "seats": ("a:3-12 b:3-12 c:2-60", "A hall has {a} rows of {b} seats. {c} seats are taken. How many seats are free?",
              "The hall has [a*b] seats. There are [r1-c] seats free."),
    "two_gifts": ("a:40-99 b:2-40 c:2-40", "{n} had {a} {i}. {n} gave {b} {i} to {m} and lost {c} {i}. How many {i} are left?",
                  "After the gift {n} has [a-b] {i}. There are [r1-c] {i} left."),
    # three steps
    "shop3": ("a:2-9 b:2-12 c:2-9 d:2-12", "{n} buys {a} {i} for {b} dollars each and {c} {j} for {d} dollars each. How many dollars does {n} pay in total?",
              "The {i} cost [a*b] dollars. The {j} cost [c*d] dollars. In total {n} pays [r1+r2] dollars."),
    "box3": ("a:2-9 b:2-12 c:2-40 d:2-40", "{n} fills {a} {P} with {b} {i} each. {n} then finds {c} {i} and gives {d} {i} to {m}. How many {i} does {n} have?",
             "The {P} hold [a*b] {i}. With the found ones there are [r1+c] {i}. {n} has [r2-d] {i}."),
    "chain3": ("a:5-40 b:2-30 c:2-30", "{n} has {a} {i}. {m} has {b} more {i} than {n}. {k} has {c} more {i} than {m}. How many {i} do {m} and {k} have together?",
               "{m} has [a+b] {i}. {k} has [r1+c] {i}. Together they have [r1+r2] {i}."),
    "earn3": ("a:5-20 b:2-9 c:2-40 d:2-30", "{n} earns {a} dollars per hour and works {b} hours. {n} had {c} dollars before and spends {d} dollars. How many dollars does {n} have?",
              "{n} earns [a*b] dollars. With the money from before that is [r1+c] dollars. {n} has [r2-d] dollars."),
    "trip3": ("a:3-30 b:3-30 c:2-9 d:200-400", "{n} drives {a} miles in the morning and {b} miles in the evening each day for {c} days. The trip is {d} miles long. How many miles are left?",
              "{n} drives [a+b] miles each day. In {c} days that is [r1*c] miles. There are [d-r2] miles left."),
    "team3": ("d:2-6 q:3-12 a:2-9 s=d*q b:2-9 x=a*b c=s-x", "{n} has {a} {P} of {b} {i} and {c} loose {i}. {n} shares all {i} equally among {d} friends. How many {i} does each friend get?",
              "The {P} hold [a*b] {i}. In total there are [r1+c] {i}. Each friend gets [r2/d] {i}."),
    "half3": ("h:3-40 a=h*2 b:2-40 c:2-30", "{n} has {a} {i}. {n} gives half of them to {m}. Then {n} buys {b} {i} and loses {c} {i}. How many {i} does {n} have now?",
              "{n} keeps [a/2] {i}. After buying {n} has [r1+b] {i}. {n} has [r2-c] {i} now."),
    "double3": ("a:5-30 b:2-5 c:2-40", "{n} has {a} {i}. {m} has {b} times as many {i} as {n}. {m} gives {c} {i} away. How many {i} do they have together now?",
                "{m} has [a*b] {i}. After giving {m} has [r1-c] {i}. Together they have [a+r2] {i}."),
    "sell3": ("a:2-12 b:3-12 c:2-40 p:2-6", "{n} bakes {a} trays of {b} muffins and eats {c} muffins. {n} sells the rest for {p} dollars each. How many dollars does {n} get?",
              "{n} bakes [a*b] muffins. There are [r1-c] muffins left. {n} gets [r2*p] dollars."),
    "save3": ("a:20-60 b:3-15 c:2-9 d:2-40", "{n} has {a} dollars. {n} saves {b} dollars each week for {c} weeks and then buys a toy for {d} dollars. How many dollars are left?",
              "{n} saves [b*c] dollars. Then {n} has [a+r1] dollars. There are [r2-d] dollars left."),
    "school3": ("a:2-9 b:5-15 c:2-9 d:5-15", "A school has {a} small rooms with {b} seats each and {c} large rooms with {d} seats each. How many seats are there?",
                "The small rooms have [a*b] seats. The large rooms have [c*d] seats. In total there are [r1+r2] seats."),
    # four steps
    "shop4": ("a:2-9 b:2-9 c:2-9 d:2-9 p:150-250", "{n} has {p} dollars. {n} buys {a} {i} for {b} dollars each and {c} {j} for {d} dollars each. How many dollars are left?",
              "The {i} cost [a*b] dollars. The {j} cost [c*d] dollars. In total that is [r1+r2] dollars. There are [p-r3] dollars left."),
    "farm4": ("a:2-9 b:2-12 c:2-9 d:2-12 e:2-40", "{n} picks {a} {P} of {b} {i} and {m} picks {c} {P} of {d} {i}. They lose {e} {i}. How many {i} are left?",
              "{n} picks [a*b] {i}. {m} picks [c*d] {i}. Together they pick [r1+r2] {i}. There are [r3-e] {i} left."),
    "chain4": ("a:5-40 b:2-30 c:2-30 d:2-60", "{n} has {a} {i}. {m} has {b} more {i} than {n}. {k} has {c} fewer {i} than {m}. {m} and {k} give away {d} {i} together. How many {i} do {m} and {k} have left?",
               "{m} has [a+b] {i}. {k} has [r1-c] {i}. Together they have [r1+r2] {i}. After giving they have [r3-d] {i}."),
    "week4": ("a:2-15 b:2-15 c:2-9 d:5-60 e:2-40", "Each day {n} makes {a} {i} and {m} makes {b} {i}. They work for {c} days and already had {d} {i}. Then they sell {e} {i}. How many {i} are left?",
              "They make [a+b] {i} each day. In {c} days they make [r1*c] {i}. With the old ones there are [r2+d] {i}. There are [r3-e] {i} left."),
    "share4": ("d:2-6 q:3-15 a:2-9 b:2-9 x=a*b s=d*q e:2-30 t=s+e c=t-x", "{n} has {a} {P} of {b} {i} and {c} loose {i}. {n} gives {e} {i} to {m} and shares the rest equally among {d} friends. How many {i} does each friend get?",
               "The {P} hold [a*b] {i}. In total there are [r1+c] {i}. The rest is [r2-e] {i}. Each friend gets [r3/d] {i}."),
    "earn4": ("a:5-20 b:2-9 c:5-20 d:2-9 e:2-60", "{n} works {b} hours for {a} dollars per hour and {m} works {d} hours for {c} dollars per hour. They spend {e} dollars. How many dollars do they have left?",
              "{n} earns [a*b] dollars. {m} earns [c*d] dollars. Together they earn [r1+r2] dollars. They have [r3-e] dollars left."),
    "garden4": ("a:3-9 b:3-9 c:2-30 h:2-6 d:2-30", "A garden has {a} rows of {b} flowers. {n} plants {c} more flowers. Each flower needs {h} cups of water and {d} cups are already used. How many cups are still needed?",
                "The rows have [a*b] flowers. With the new ones there are [r1+c] flowers. They need [r2*h] cups. There are [r3-d] cups still needed."),
    "half4": ("h:5-40 a=h*2 b:2-30 c:2-20 d:2-4", "{n} has {a} {i}. {n} gives half of them to {m}, buys {b} {i} and loses {c} {i}. {k} has {d} times as many {i} as {n} now. How many {i} does {k} have?",
              "{n} keeps [a/2] {i}. After buying {n} has [r1+b] {i}. Then {n} has [r2-c] {i}. {k} has [r3*d] {i}."),
    "train4": ("a:2-9 b:5-20 c:2-60 d:2-60 e:2-60", "A train has {a} cars with {b} people each. At the first stop {c} people get off and {d} people get on. At the next stop {e} people get off. How many people are on the train?",
               "The train has [a*b] people. After {c} get off there are [r1-c] people. After {d} get on there are [r2+d] people. At the end there are [r3-e] people."),
}

HELD_OUT_TEMPLATES = {
    "h_found": ("a:3-90 b:3-90", "{n} finds {a} {i} in the morning and {b} {i} in the evening. How many {i} does {n} find in total?",
                "{n} finds [a+b] {i}."),
    "h_weeks": ("a:2-12 b:2-20", "{n} reads {b} pages each day. How many pages does {n} read in {a} days?",
                "{n} reads [b*a] pages."),
    "h_sold": ("a:40-99 b:2-40 c:2-40", "A shop has {a} {i}. It sells {b} {i} in the morning and {c} {i} in the evening. How many {i} are left?",
               "After the morning there are [a-b] {i}. There are [r1-c] {i} left."),
    "h_bags": ("a:2-12 b:3-12 c:2-40", "{n} has {a} {P} of {b} {i} and gives {c} {i} to {m}. How many {i} does {n} have left?",
               "The {P} hold [a*b] {i}. {n} has [r1-c] {i} left."),
    "h_two_shops": ("a:2-9 b:2-12 c:2-9 d:2-12", "{n} fills {a} {P} with {b} {i} each and {m} fills {c} {P} with {d} {i} each. How many {i} do they have together?",
                    "{n} has [a*b] {i}. {m} has [c*d] {i}. Together they have [r1+r2] {i}."),
    "h_spend": ("a:5-20 b:2-9 c:2-30 d:2-30", "{n} works {b} hours for {a} dollars per hour. {n} spends {c} dollars on {i} and {d} dollars on {j}. How many dollars are left?",
                "{n} earns [a*b] dollars. After the {i} there are [r1-c] dollars. There are [r2-d] dollars left."),
    "h_bus": ("a:20-80 b:2-40 c:2-40 d:2-40", "A bus has {a} people. At the first stop {b} people get off and {c} people get on. At the next stop {d} people get off. How many people are on the bus?",
              "After {b} get off there are [a-b] people. After {c} get on there are [r1+c] people. At the end there are [r2-d] people."),
    "h_market": ("a:2-9 b:2-9 c:2-9 d:2-9 e:2-60", "{n} sells {a} {i} for {b} dollars each and {c} {j} for {d} dollars each. {n} had {e} dollars before. How many dollars does {n} have now? First count what each sale gives.",
                 "The {i} give [a*b] dollars. The {j} give [c*d] dollars. In total that is [r1+r2] dollars. {n} has [r3+e] dollars now."),
}

_BRACKET = re.compile(r"\[(\w+)([-+*/])(\w+)\]")


def _compile(spec, answer):
    draws = []
    for part in spec.split():
        if ":" in part:
            name, low_high = part.split(":")
            low, high = low_high.split("-")
            draws.append((name, int(low), int(high), None))
        else:
            name, expr = part.split("=")
            left, op, right = re.match(r"(\w+)([-+*])(\w+)", expr).groups()
            draws.append((name, left, right, op))
    return draws, _BRACKET.findall(answer), _BRACKET.split(answer)


_COMPILED = {}
for _table in (TRAIN_TEMPLATES, HELD_OUT_TEMPLATES):
    for _tid, (_spec, _question, _answer) in _table.items():
        _COMPILED[_tid] = (_question, _answer) + _compile(_spec, _answer)

STEPS = {tid: len(entry[3]) for tid, entry in _COMPILED.items()}


def _value(env, token):
    return int(token) if token.isdigit() else env[token]


def _apply(op, x, y):
    if op == "+":
        return x + y
    if op == "-":
        return x - y
    if op == "*":
        return x * y
    return x // y if y and x % y == 0 else -1


def _draw_numbers(rng, tid):
    """Numbers and step results, or None when a value leaves 1..MAX_VALUE."""
    _, _, draws, brackets, _ = _COMPILED[tid]
    env = {}
    for name, low, high, op in draws:
        env[name] = rng.randint(low, high) if op is None else _apply(
            op, _value(env, low), _value(env, high))
        if env[name] < 1:
            return None
    for k, (left, op, right) in enumerate(brackets, 1):
        result = _apply(op, _value(env, left), _value(env, right))
        if not 1 <= result <= MAX_VALUE:
            return None
        env["r%d" % k] = result
    return env


def number_key(tid, env):
    """The (template, numbers) pair as text: what the split hashes."""
    letters = sorted(k for k in env if len(k) == 1)
    return tid + "|" + ",".join("%s=%d" % (k, env[k]) for k in letters)


def is_eval_key(key):
    return zlib.crc32(key.encode()) % EVAL_SHARE == 0


def _fill_answer(tid, env, slots):
    """Expands [x op y] to `x op y = r` and the {slots}."""
    parts = _COMPILED[tid][4]
    out, k = [], 0
    for at in range(0, len(parts), 4):
        out.append(parts[at].format(**slots))
        if at + 3 < len(parts):
            k += 1
            left, op, right = parts[at + 1:at + 4]
            out.append("%d %s %d = %d" % (_value(env, left), op, _value(env, right), env["r%d" % k]))
    return "".join(out)


def draw(rng, tid, evaluation):
    """One problem of template `tid` from the asked side of the split."""
    while True:
        env = _draw_numbers(rng, tid)
        if env is None:
            continue
        key = number_key(tid, env)
        if is_eval_key(key) == evaluation:
            break
    n, m, k = rng.sample(words.NAMES, 3)
    i, j = rng.sample(words.ITEMS, 2)
    single, plural = rng.choice(words.CONTAINERS)
    slots = dict(env, n=n, m=m, k=k, i=i, j=j, u=single, P=plural)
    steps = STEPS[tid]
    return {"template": tid, "key": key, "steps": steps,
            "question": _COMPILED[tid][0].format(**slots),
            "reasoning": _fill_answer(tid, env, slots),
            "answer": str(env["r%d" % steps])}


TRAIN_IDS = sorted(TRAIN_TEMPLATES)
HELD_OUT_IDS = sorted(HELD_OUT_TEMPLATES)
# Long problems are harder, so training draws them more often.
_WEIGHTS = [(1, 2, 3, 4)[STEPS[tid] - 1] for tid in TRAIN_IDS]


def draw_train(rng):
    return draw(rng, rng.choices(TRAIN_IDS, _WEIGHTS)[0], False)


def full_answer(problem):
    return " %s\n#### %s" % (problem["reasoning"], problem["answer"])


def few_shot_prompt(shots, problem):
    """lm_eval's form: worked shots and the open question, blank-line separated."""
    text = ""
    for shot in shots:
        text += "Question: %s\nAnswer:%s\n\n" % (shot["question"], full_answer(shot))
    return text + "Question: %s\nAnswer:" % problem["question"]
