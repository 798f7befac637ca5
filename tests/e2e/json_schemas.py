"""200 JSON schemas, recursive and odd, each with a finite shortest instance. Made here: the first ones by hand, the others
drawn from a fixed seed."""
import json
import random

LETTER, WORD = {"type": "string", "pattern": "^[A-Z]$"}, {"type": "string"}
NODE = {"type": "object", "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Node"}]}},
        "required": ["value", "next"], "additionalProperties": False}
TREE = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8},
                                         "children": {"type": "array", "items": {"$ref": "#/$defs/Tree"}, "maxItems": 3}},
        "required": ["name", "children"], "additionalProperties": False}
EXPRESSION = {"anyOf": [{"type": "number"},
                        {"type": "object", "properties": {"op": {"enum": ["+", "-", "×", "÷"]}, "left": {"$ref": "#/$defs/Expression"},
                                                          "right": {"$ref": "#/$defs/Expression"}},
                         "required": ["op", "left", "right"], "additionalProperties": False}]}


def thing(properties, required=None, **more):
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False, **more}


BY_HAND = [
    # Every type, alone and together.
    {"type": "object"}, {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"},
    {"type": "array"}, {}, {"type": ["string", "null"]}, {"type": ["integer", "boolean", "null"]}, {"type": ["object", "array"]},
    # Constants and lists of values of every type, Han and escapes among them.
    {"const": "北京"}, {"const": 42}, {"const": -0.5}, {"const": None}, {"const": {"a": [1, {"b": None}]}}, {"const": ""},
    {"enum": ["红", "绿", "蓝"]}, {"enum": [1, 2.5, -3, 0]}, {"enum": [None, True, "x", 7]}, {"enum": [[1, 2], {"k": "v"}]},
    {"enum": ["a\"b", "c\\d", "e\nf", "g\th", "/", "\u0001", "😀"]}, {"enum": [""]}, {"type": "string", "enum": ["only"]},
    {"type": "integer", "enum": [-1, 0, 1]}, {"enum": ["a", "ab", "abc", "abcd"]},
    # Ranges of numbers.
    {"type": "integer", "minimum": 0, "maximum": 9}, {"type": "integer", "minimum": -17, "maximum": 230},
    {"type": "integer", "minimum": 1000}, {"type": "integer", "maximum": -1000}, {"type": "integer", "exclusiveMinimum": 5},
    {"type": "integer", "exclusiveMaximum": 0}, {"type": "integer", "minimum": 99, "maximum": 101}, {"type": "integer", "minimum": 7, "maximum": 7},
    {"type": "number", "minimum": 0, "maximum": 1}, {"type": "number", "minimum": -10.5, "maximum": 20.25}, {"type": "number", "minimum": 100},
    {"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 3}, {"type": "integer", "minimum": 0, "maximum": 4294967296},
    # Texts.
    {"type": "string", "minLength": 3}, {"type": "string", "maxLength": 5}, {"type": "string", "minLength": 2, "maxLength": 2},
    {"type": "string", "minLength": 0, "maxLength": 0}, {"type": "string", "pattern": "^[a-z]{3}-[0-9]{2}$"},
    {"type": "string", "pattern": "^(foo|bar)+$"}, {"type": "string", "pattern": "^[0-9]{4}-(0[1-9]|1[0-2])$"}, {"type": "string", "pattern": "^[一-龥]{1,4}$"},
    {"type": "string", "pattern": "^a?b*c+$"}, LETTER,
    # Arrays.
    {"type": "array", "items": {"type": "integer"}}, {"type": "array", "items": {"type": "string"}, "minItems": 2},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}, {"type": "array", "items": {"type": "null"}, "minItems": 4, "maxItems": 4},
    {"type": "array", "items": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}}, {"type": "array", "maxItems": 0},
    {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [{"const": "tag"}], "items": {"type": "boolean"}, "minItems": 1},
    {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"enum": ["n/a", "?"]}]}, "minItems": 1, "maxItems": 5},
    # Objects: odd keys, optional and required ones, other members.
    thing({"城市": WORD, "温度": {"type": "number"}}), thing({"a\"b": {"type": "integer"}, "c\\d": {"type": "integer"}}),
    thing({"": {"type": "null"}}), thing({" leading": {"type": "boolean"}, "trailing ": {"type": "boolean"}}),
    thing({"line\nbreak": {"type": "null"}, "tab\there": {"type": "null"}}), thing({"😀": {"enum": ["😀", "é"]}}),
    thing({"\\n": {"type": "integer"}, "\\uFACD": {"type": "integer"}}), thing({"a.b": WORD, "a/b": WORD, "a~b": WORD, "$ref": {"type": "null"}}),
    thing({"first": {"type": "integer"}, "second": {"type": "integer"}}, required=[]), thing({}, required=[]),
    thing({"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {"type": "integer"}}, required=["b"]),
    thing({"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {"type": "integer"}}, required=["c"]),
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    {"type": "object", "additionalProperties": {"type": "integer"}}, {"type": "object", "additionalProperties": False},
    {"type": "object", "properties": {"known": {"type": "boolean"}}, "additionalProperties": {"type": "array", "items": {"type": "null"}}},
    thing({f"field_{i}": {"type": "boolean"} for i in range(12)}), thing({f"f{i}": {"type": "null"} for i in range(8)}, required=[]),
    thing({"title": {"type": "string", "title": "Title", "description": "a \"quoted\" one", "default": "x", "examples": ["y"]}}, title="T"),
    # anyOf and references.
    {"anyOf": [{"type": "string"}, {"type": "number"}]}, {"anyOf": [{"const": 1}, {"const": "1"}, {"const": True}]},
    {"anyOf": [thing({"kind": {"const": "a"}, "x": {"type": "integer"}}), thing({"kind": {"const": "b"}, "y": WORD})]},
    thing({"from": {"$ref": "#/$defs/Place"}, "to": {"$ref": "#/$defs/Place"}}, **{"$defs": {"Place": thing({"lat": {"type": "number"}, "lon": {"type": "number"}})}}),
    {"$ref": "#/$defs/Colour", "$defs": {"Colour": {"enum": ["red", "green"]}}},
    thing({"size": {"$ref": "#/$defs/a~1b"}}, **{"$defs": {"a/b": {"type": "integer", "minimum": 1, "maximum": 3}}}),
    thing({"list": {"type": "array", "items": {"$ref": "#/$defs/X"}, "maxItems": 2}}, **{"$defs": {"X": {"$ref": "#/$defs/Y"}, "Y": {"type": "boolean"}}}),
    # Recursion.
    {"$ref": "#/$defs/Node", "$defs": {"Node": NODE}}, {"$ref": "#/$defs/Tree", "$defs": {"Tree": TREE}},
    {"$ref": "#/$defs/Expression", "$defs": {"Expression": EXPRESSION}},
    thing({"list": {"$ref": "#/$defs/Node"}, "tree": {"$ref": "#/$defs/Tree"}}, **{"$defs": {"Node": NODE, "Tree": TREE}}),
    thing({"formula": {"$ref": "#/$defs/Expression"}, "unit": {"enum": ["°C", "K"]}}, **{"$defs": {"Expression": EXPRESSION}}),
    {"type": "object", "properties": {"more": {"$ref": "#"}}, "additionalProperties": False},
    {"type": "object", "properties": {"id": {"type": "integer"}, "sub": {"type": "array", "items": {"$ref": "#"}}}, "required": ["id"], "additionalProperties": False},
    {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1, "maxItems": 2}]},
    {"$ref": "#/$defs/A", "$defs": {"A": thing({"b": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/B"}]}}), "B": thing({"a": {"$ref": "#/$defs/A"}})}},
    {"$ref": "#/$defs/Json", "$defs": {"Json": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"type": "string", "maxLength": 4},
                                                         {"type": "array", "items": {"$ref": "#/$defs/Json"}, "maxItems": 2},
                                                         {"type": "object", "additionalProperties": {"$ref": "#/$defs/Json"}}]}}},
]

NAMES = ["name", "值", "x y", "a\"b", "back\\slash", "id", "_", "日本語", "k\n", "é", "0", "true", "items", "type", "A.B", "#", "😀"]


class Drawn:
    """Random schemas of the same keywords, some with definitions that refer to each other."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.defs = []

    def scalar(self):
        pick = self.random
        low = pick.randint(-500, 500)
        return pick.choice([
            {"type": "integer"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}, {"type": "string"},
            {"type": "integer", "minimum": low, "maximum": low + pick.randint(0, 2000)}, {"type": "integer", "minimum": low},
            {"type": "number", "minimum": low, "maximum": low + pick.choice([0.5, 1, 10.25])},
            {"type": "string", "minLength": pick.randint(0, 3), "maxLength": pick.randint(3, 6)},
            {"type": "string", "pattern": pick.choice(["^[a-f0-9]{2,4}$", "^v[0-9]+(\\.[0-9]+)?$", "^(甲|乙|丙)$", "^[^\"\\\\]{1,3}$", "^x{2}|y$"])},
            {"enum": pick.sample(["a", "b\"", "北", 1, 2.5, None, True, [], {"q": 1}], pick.randint(1, 5))},
            {"const": pick.choice(["k", "中文", 0, -7, False, None, [1, "2"]])}, {"type": pick.sample(["string", "integer", "null", "boolean"], 2)}])

    def schema(self, depth):
        pick = self.random
        if depth == 0:
            return self.scalar()
        kind = pick.choice(["scalar", "array", "tuple", "object", "object", "object", "map", "any", "ref"])
        if kind == "scalar" or (kind == "ref" and not self.defs):
            return self.scalar()
        if kind == "array":
            low = pick.randint(0, 2)
            return {"type": "array", "items": self.schema(depth - 1), "minItems": low, "maxItems": low + pick.randint(0, 3)}
        if kind == "tuple":
            first = [self.schema(depth - 1) for _ in range(pick.randint(1, 3))]
            return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}
        if kind == "map":
            return {"type": "object", "additionalProperties": self.schema(depth - 1)}
        if kind == "any":
            return {"anyOf": [self.schema(depth - 1) for _ in range(pick.randint(2, 3))]}
        if kind == "ref":
            return {"$ref": "#/$defs/" + pick.choice(self.defs)}
        names = pick.sample(NAMES, pick.randint(1, 5))
        return thing({name: self.schema(depth - 1) for name in names}, required=[name for name in names if pick.random() < 0.6])

    def whole(self):
        count = self.random.choice([0, 0, 1, 2])
        self.defs = [f"D{i}" for i in range(count)]
        # A definition may refer to any other, where null is a way out.
        defs = {name: {"anyOf": [{"type": "null"}, self.schema(2)]} for name in self.defs}
        root = thing({name: self.schema(2) for name in self.random.sample(NAMES, self.random.randint(1, 3))})
        return {**root, "$defs": defs} if defs else root


def as_parameters(schema):
    """The schema of a function's one argument `value`: its definitions move to the root, and so do references to it."""
    inner = json.loads(json.dumps(schema).replace('"$ref": "#"', '"$ref": "#/$defs/Root"'))
    defs = inner.pop("$defs", {})
    if inner != {key: value for key, value in schema.items() if key != "$defs"}:
        defs["Root"] = inner
        inner = {"$ref": "#/$defs/Root"}
    return thing({"value": inner}, **({"$defs": defs} if defs else {}))


SCHEMAS = BY_HAND + [Drawn(seed).whole() for seed in range(200 - len(BY_HAND))]
