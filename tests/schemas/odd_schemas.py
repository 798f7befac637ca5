"""JSON schemas that are odd, or as clients export them: pydantic, zod, OpenAPI, schemars. Each has a finite shortest instance;
judge.py draws replies of all of them and asks jsonschema."""


def thing(properties, required=None, **more):
    return {"type": "object", "properties": properties, "required": list(properties) if required is None else required,
            "additionalProperties": False, **more}


TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
SAFE = {"minimum": -9007199254740991, "maximum": 9007199254740991}
CAT = thing({"kind": {"const": "cat"}, "lives": {"type": "integer", "minimum": 1, "maximum": 9}})
DOG = thing({"kind": {"const": "dog"}, "good": {"type": "boolean"}})
ZOD_EMAIL = "^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$"
ZOD_UUID = ("^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}|"
            "00000000-0000-0000-0000-000000000000|ffffffff-ffff-ffff-ffff-ffffffffffff)$")
ZOD_DAY = ("^((\\d\\d[2468][048]|\\d\\d[13579][26]|\\d\\d0[48]|[02468][048]00|[13579][26]00)-02-29|"
           "\\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\\d|3[01])|(0[469]|11)-(0[1-9]|[12]\\d|30)|(02)-(0[1-9]|1\\d|2[0-8])))$")

NUMBERS = [
    {"type": "integer", "multipleOf": 86400, "minimum": 0, "maximum": 604800}, {"type": "number", "multipleOf": 12345, "exclusiveMinimum": -50000, "maximum": 1e5},
    {"type": "integer", "multipleOf": 1024, "minimum": 1024, "maximum": 65536}, {"multipleOf": 1001.5, "minimum": 0, "maximum": 99999},
    {"type": "integer", "minimum": 10**15}, {"type": "integer", "maximum": -10**15}, {"exclusiveMinimum": 10**15, "type": "number"},
    {"type": "integer", **SAFE}, {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
    {"type": "integer", "minimum": 0, "maximum": 18446744073709551615, "format": "uint64"},
    {"type": "integer", "minimum": -9223372036854775808, "maximum": 9223372036854775807, "format": "int64"},
    {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308, "format": "double"},
    {"type": "number", "minimum": 0.1234567890123, "maximum": 0.2}, {"type": "number", "exclusiveMinimum": 0},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-6}, {"type": "number", "minimum": 1e-12},
    {"type": "integer", "minimum": 0.5, "maximum": 3.5}, {"type": "integer", "minimum": -3.0, "maximum": -1.0},
    {"type": "integer", "multipleOf": 3}, {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 100},
    {"type": "integer", "multipleOf": 5, "minimum": 0}, {"type": "integer", "multipleOf": 25, "maximum": 1000000},
    {"type": "number", "multipleOf": 0.5}, {"type": "number", "multipleOf": 0.01, "minimum": 0}, {"type": "number", "multipleOf": 0.1},
    {"type": "number", "multipleOf": 100, "minimum": 0, "maximum": 1000}, {"type": "number", "multipleOf": 2.5, "minimum": 0, "maximum": 50},
    {"type": "integer", "not": {"const": 0}, "minimum": -5, "maximum": 5}, {"type": "integer", "not": {"enum": [1, 2, 3]}},
    {"type": "number", "not": {"type": "integer"}}, {"type": "integer", "not": {"minimum": 10}},
    {"type": ["number", "string"], "minimum": 3, "maxLength": 2}, {"minimum": 5}, {"type": "integer", "minimum": 100, "maximum": 10**14},
    {"type": "number", "minimum": 900000, "not": {"type": "integer"}}, {"type": "number", "minimum": 123456788, "not": {"const": 123456789}},
    {"type": "number", "minimum": 4, "maximum": 6, "not": {"const": 5.0}}, {"type": "integer", "minimum": 4, "maximum": 6, "not": {"const": 5.0}},
    {"type": "number", "multipleOf": 2.5, "minimum": 999999999}, {"type": "number", "minimum": 10**6, "maximum": 10**6 + 1, "not": {"type": "integer"}},
    {"anyOf": [{"type": "string", "maxLength": 1}, {"type": "integer", "minimum": 5, "maximum": 3}]}, {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 3.2, "maximum": 3.8}]},
    {"type": "integer", "minimum": 0, "maximum": 5, "if": {"minimum": 10}, "then": {"multipleOf": 2}}, {"type": ["number", "null"], "multipleOf": 2, "minimum": 5, "maximum": 3},
    {"type": "integer", "multipleOf": 12, "minimum": 1000, "maximum": 10**9}, {"type": "integer", "multipleOf": 1000000},
]
TEXTS = [
    {"type": "string", "format": "email", "pattern": ZOD_EMAIL}, {"type": "string", "format": "uuid", "pattern": ZOD_UUID},
    {"type": "string", "format": "date", "pattern": ZOD_DAY}, {"type": "string", "format": "email", "maxLength": 30},
    {"type": "string", "pattern": "^(?=.*[A-Z])(?=.*[0-9])[A-Za-z0-9]{8,12}$"}, {"type": "string", "pattern": "^(?!admin$)[a-z]{1,8}$"},
    {"type": "string", "pattern": "^[a-z0-9]+(?:-[a-z0-9]+)*$", "maxLength": 12, "minLength": 2},
    {"type": "string", "pattern": "^[a-z]+$", "minLength": 3, "maxLength": 10}, {"type": "string", "pattern": "^[0-9a-f]{200}$"},
    {"type": "string", "pattern": "^.{1,500}$"}, {"type": "string", "pattern": "^[\\s\\S]{0,300}$"}, {"type": "string", "pattern": "\\S"},
    {"type": "string", "pattern": "^\\S+$"}, {"type": "string", "pattern": "^\\s*\\S.*$"}, {"type": "string", "pattern": "^(?P<year>[0-9]{4})-(?P<month>[0-9]{2})$"},
    {"type": "string", "pattern": "^(a|^b)c$"}, {"type": "string", "pattern": "^\\d{3}-\\d{4}$|^none$"}, {"type": "string", "pattern": "^[^@\\s]+@[^@\\s]+$"},
    {"type": "string", "pattern": "^#(?:[0-9a-fA-F]{3}){1,2}$"}, {"type": "string", "pattern": "^\\+?[1-9]\\d{1,14}$"},
    {"type": "string", "pattern": "^\\$?[A-Z_a-z]\\w*$"}, {"type": "string", "pattern": ""}, {"type": "string", "pattern": "^$"},
    {"type": "string", "pattern": "[\\u4e00-\\u9fa5]{2}"}, {"type": "string", "pattern": "^\\u00e9+$"}, {"type": "string", "pattern": "^[^\\x00-\\x1f]*$"},
    {"allOf": [{"type": "string", "pattern": "^[a-m]"}, {"pattern": "[0-9]$"}]}, {"type": "string", "not": {"pattern": "[0-9]"}},
    {"type": "string", "not": {"const": ""}}, {"type": "string", "not": {"enum": ["a", "b"]}}, {"type": "string", "minLength": 1, "not": {"enum": ["none", "null"]}},
    *[{"type": "string", "format": name} for name in (
        "date", "time", "date-time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri", "uri-reference", "iri",
        "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex", "password", "byte", "binary", "uuid4", "path",
        "file-path", "multi-host-uri", "cuid2", "color", "char", "int64", "base64", "base64url", "jwt", "cidrv4", "emoji", "no-such-format")],
    {"type": "string", "format": "date-time", "minLength": 1}, {"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083},
    {"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png"}, {"type": "string", "minLength": 1, "maxLength": 1},
    {"type": "string", "maxLength": 100000}, {"type": "string", "pattern": "^[a-z]*$", "maxLength": 50000}, {"type": "string", "minLength": 300},
    {"type": "string", "pattern": "^[A-Z]{2}[0-9]{2}[A-Z0-9]{1,30}$"}, {"type": "string", "pattern": "^(?:25[0-5]|2[0-4]\\d|1?\\d?\\d)(?:\\.(?:25[0-5]|2[0-4]\\d|1?\\d?\\d)){3}$"},
    {"type": "string", "pattern": "^[a-z0-9]+(?:-[a-z0-9]+)*$", "maxLength": 100}, {"type": "string", "pattern": "^[a-z]+@[a-z]+$", "maxLength": 128},
    {"type": "object", "patternProperties": {"^[0-9]+$": WHOLE, "^[a-z]+$": TEXT}, "additionalProperties": False, "minProperties": 2},
    {"type": "object", "minProperties": 2, "maxProperties": 4, "patternProperties": {"^x-": TEXT}, "additionalProperties": False},
    {"type": "object", "minProperties": 3, "patternProperties": {"^a": False}, "additionalProperties": WHOLE, "required": ["b"]},
    {"type": "object", "minProperties": 2, "propertyNames": {"pattern": "^id_[a-z]{2}$"}, "additionalProperties": WHOLE},
    {"items": {"properties": {"id": WHOLE}, "type": "object"}, "uniqueItems": True, "minItems": 2}, {"items": {"items": WHOLE, "type": "array"}, "uniqueItems": True, "minItems": 3},
    {"items": {"items": TEXT, "minItems": 2, "maxItems": 2, "type": "array"}, "uniqueItems": True, "minItems": 2},
    {"items": {"type": "object", "additionalProperties": WHOLE}, "uniqueItems": True, "minItems": 2}, {"items": {"type": ["integer", "string"]}, "contains": WHOLE, "uniqueItems": True},
    {"contains": {"const": 5}, "items": WHOLE, "uniqueItems": True, "minItems": 3}, {"contains": WHOLE, "items": WHOLE, "uniqueItems": True, "minContains": 2, "maxContains": 4},
    {"prefixItems": [TEXT, WHOLE], "items": {"type": "boolean"}, "uniqueItems": True}, {"prefixItems": [TEXT, TEXT, TEXT], "items": False, "uniqueItems": True, "minItems": 2},
    {"prefixItems": [WHOLE, WHOLE], "maxItems": 2, "uniqueItems": True}, {"allOf": [{"contains": {"const": 1}}, {"contains": {"const": 2}, "minContains": 2}, {"contains": TEXT}]},
    {"items": WHOLE, "allOf": [{"contains": {"minimum": 10}}, {"contains": {"maximum": -10}}]}, {"items": TEXT, "contains": {"pattern": "^a"}, "minContains": 0, "maxContains": 0, "uniqueItems": True, "minItems": 2},
    {"type": "string", "pattern": "^(?=.{3,20}$)(?![_.])(?!.*[_.]{2})[a-zA-Z0-9._]+(?<![_.])$"}, {"type": "string", "pattern": "(?<=\\$)[0-9]+$"},
    {"type": "string", "pattern": "^(?:(?!-)[a-z0-9-]{1,12}(?<!-)\\.)+[a-z]{2,6}$"},
    {"type": "string", "pattern": "\\bword\\b"}, {"type": "string", "pattern": "^[a-z ]{1,12}\\b!$"}, {"type": "string", "pattern": "(?i)^(?:yes|no)$"},
    {"type": "string", "pattern": "(?i)^[^aeiou]{2,6}$"}, {"type": "string", "pattern": "(?=.*[A-Z])(?=.*[0-9]).{4,}", "maxLength": 12},
    {"type": "string", "pattern": "^[a-z\\d](?:[a-z\\d]|-(?=[a-z\\d])){0,38}$"}, {"type": "string", "pattern": "^[a-z](?!.*--)[a-z-]{0,9}[a-z]$"},
    {"type": "string", "not": {"pattern": "\\bno\\b"}, "maxLength": 8}, {"type": "string", "pattern": "\\Bing\\b", "maxLength": 20},
    {"type": "string", "pattern": "^\\S$"}, {"type": "string", "pattern": "^[^\\s]$"}, {"type": "string", "pattern": "^[\\S\\d]{3}$"},
    {"type": "string", "minLength": 70, "not": {"const": "a"}}, {"type": "string", "pattern": "^(?!x)[a-z]{1,100}$"},
    {"type": "string", "pattern": "^[\\w.+-]+@[\\w-]+\\.[\\w.-]+$"}, {"type": "string", "pattern": "^https?://"}, {"type": "string", "pattern": "^(?!\\s*$).+"},
]
ARRAYS = [
    {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True}, {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
    {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 6}, "uniqueItems": True, "minItems": 2},
    {"type": "array", "items": {"anyOf": [{"const": "x"}, {"type": "null"}, {"enum": [1, 2]}]}, "uniqueItems": True},
    {"type": "array", "contains": {"const": 7}, "items": WHOLE}, {"type": "array", "contains": {"type": "string"}, "minContains": 2, "maxContains": 3},
    {"type": "array", "contains": {"type": "integer"}, "items": {"type": ["integer", "string"]}, "minItems": 3, "maxItems": 5},
    {"type": "array", "contains": {"type": "object", "required": ["id"]}, "minContains": 0}, {"contains": {"type": "null"}},
    {"type": "array", "prefixItems": [TEXT, WHOLE]}, {"type": "array", "prefixItems": [TEXT, WHOLE], "items": {"type": "boolean"}, "maxItems": 4},
    {"type": "array", "contains": {"const": 1}, "unevaluatedItems": False}, {"type": "array", "prefixItems": [TEXT], "contains": {"const": 1}, "minContains": 2, "unevaluatedItems": {"type": "null"}},
    {"type": "array", "contains": {"const": 1}, "maxContains": 2, "unevaluatedItems": {"type": "string"}}, {"type": "array", "prefixItems": [WHOLE, TEXT], "contains": {"const": "a"}, "items": WHOLE},
    {"type": "array", "prefixItems": [WHOLE], "contains": {"const": "z"}}, {"type": "array", "items": False}, {"type": "array", "items": True, "maxItems": 2},
    {"type": "array", "items": {}, "minItems": 1, "maxItems": 20000}, {"type": "array", "items": {"type": "null"}, "minItems": 20, "maxItems": 25},
    {"type": "array", "prefixItems": [TEXT, {"type": "null"}], "minItems": 2, "maxItems": 2},
    {"allOf": [{"type": "array", "prefixItems": [WHOLE, TEXT]}, {"items": {"maxLength": 2, "maximum": 4}}]},
    {"allOf": [{"type": "array", "prefixItems": [WHOLE]}, {"prefixItems": [{"minimum": 3}, TEXT], "items": False}]},
    {"type": "array", "prefixItems": [{"const": 1}], "unevaluatedItems": False}, {"type": "array", "items": {"type": "array", "items": WHOLE, "minItems": 2, "maxItems": 2}},
    {"type": "array", "items": {"not": {"type": ["object", "array"]}}}, {"type": "array", "items": {"enum": [1]}, "not": {"const": []}},
    {"type": "array", "items": {"enum": [1]}, "maxItems": 2, "not": {"enum": [[], [1, 1, 1], ["a"]]}}, {"not": {"enum": [{}, []]}},
]
SETS = [{"type": "array", "uniqueItems": True, **more} for more in (
    {}, {"items": TEXT}, {"items": TEXT, "minItems": 3}, {"items": WHOLE, "minItems": 2, "maxItems": 4}, {"items": {"type": "number"}, "minItems": 2}, {"items": {"type": "number", "minimum": 0, "maximum": 1}},
    {"items": {"type": "integer", "minimum": 10**9}}, {"items": {"type": "string", "format": "uuid"}, "minItems": 2}, {"items": {"type": "string", "format": "date"}, "minItems": 2},
    {"items": {"type": "string", "format": "date-time"}}, {"items": {"type": "string", "format": "email"}, "minItems": 4}, {"items": {"type": "string", "maxLength": 3}, "minItems": 8},
    {"items": {"type": "string", "pattern": "^[A-Z]{3}$"}, "minItems": 2}, {"items": {"type": "string", "minLength": 1}, "maxItems": 3}, {"items": {"anyOf": [WHOLE, TEXT]}, "minItems": 2},
    {"items": {"type": ["integer", "null"]}}, {"items": {"enum": ["z", "b", 1, None, [2], {"a": 1}]}, "minItems": 4}, {"items": {"enum": [f"v{i}" for i in range(20)]}, "minItems": 5},
    {"items": thing({"n": {"type": "null"}, "id": TEXT}), "minItems": 3}, {"items": thing({"id": WHOLE, "t": {"type": "array", "uniqueItems": True, "items": TEXT}})},
    {"items": {"type": "array", "prefixItems": [WHOLE, TEXT], "minItems": 2, "maxItems": 2}, "minItems": 2}, {"items": {"$ref": "#/$defs/s"}, "$defs": {"s": {"type": "string"}}},
    {"items": {"type": "string", "format": "time"}, "minItems": 2}, {"items": {"type": "string", "format": "uri"}, "minItems": 2}, {"items": {"type": "string", "format": "ipv4"}, "minItems": 3},
    {"items": {"enum": list(range(100))}, "minItems": 3}, {"items": {"enum": [f"k{i}" for i in range(300)]}}, {"items": {"enum": [f"k{i}" for i in range(80)]}, "minItems": 2, "maxItems": 9},
    {"items": thing({"at": {"type": "string", "format": "time"}}), "minItems": 2})]
OBJECTS = [
    {"$id": "https://example.com/root.json", "$ref": "root.json#/$defs/a", "$defs": {"a": {"type": "integer"}}},
    {"$id": "https://example.com/root.json", "$ref": "#/$defs/a", "$defs": {"a": {"$ref": "item.json"}, "b": {"$id": "item.json", "type": "string", "maxLength": 3}}},
    {"$id": "https://example.com/root.json", "$ref": "b/item", "$defs": {"a": {"$id": "a/item", "type": "string"}, "b": {"$id": "b/item", "type": "integer", "maximum": 9}}},
    {"type": "array", "uniqueItems": True, "prefixItems": [{"const": 1}, {"const": 2}, TEXT], "items": False, "minItems": 2},
    {"type": "object", "unevaluatedProperties": False, "oneOf": [{"properties": {"k": {"const": 1}, "x": WHOLE}, "required": ["k", "x"]}, {"properties": {"k": {"const": 2}, "y": WHOLE}, "required": ["k", "y"]}]},
    {"$defs": {"X": {"properties": {"next": {"$ref": "#/$defs/X"}}, "required": ["next"], "type": "object"}}, "properties": {"node": {"$ref": "#/$defs/X"}}, "type": "object"},
    {"type": "object", "propertyNames": False}, {"type": "object", "properties": {f"p{i}": TEXT for i in range(120)}},
    {"enum": [f"value {i * 37 % 500}" for i in range(500)]}, {"enum": ["", "a", "ab", "abc", "b", "\u00e9", "\u00e8", "\u00e8\u00e9", "\"", "\\", "\n", 1, 12, 123, -1, 1.5, None, True, [], [1], {}, {"a": 1}]},
    {"type": "object", "patternProperties": {"^S_": TEXT, "^I_": WHOLE}, "additionalProperties": False},
    {"type": "object", "patternProperties": {"^[a-z]+$": WHOLE, "s$": {"minimum": 5}}, "additionalProperties": False},
    {"type": "object", "properties": {"name": TEXT}, "patternProperties": {"^x-": {}}, "additionalProperties": False, "required": ["name"]},
    {"type": "object", "properties": {"a": WHOLE}, "patternProperties": {"^b": TEXT}, "additionalProperties": {"type": "null"}},
    {"type": "object", "patternProperties": {"^.*$": WHOLE}}, {"type": "object", "patternProperties": {"^[0-9]+$": thing({"v": TEXT})}, "additionalProperties": False},
    {"type": "object", "propertyNames": {"pattern": "^[A-Z]{1,4}$"}, "additionalProperties": WHOLE}, {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": WHOLE},
    {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "properties": {"ab": TEXT}, "additionalProperties": WHOLE},
    {"type": "object", "propertyNames": {"maxLength": 4}, "additionalProperties": {"type": "boolean"}}, {"type": "object", "propertyNames": {"format": "uuid"}, "additionalProperties": TEXT},
    {"type": "object", "minProperties": 1, "additionalProperties": WHOLE}, {"type": "object", "minProperties": 2, "additionalProperties": WHOLE},
    {"type": "object", "minProperties": 1, "maxProperties": 2}, {"type": "object", "maxProperties": 0}, {"type": "object", "minProperties": 3, "maxProperties": 4, "additionalProperties": TEXT},
    thing({"a": TEXT, "b": TEXT, "c": TEXT}, [], minProperties=1, maxProperties=2), {"type": "object", "properties": {"a": TEXT}, "minProperties": 2, "additionalProperties": WHOLE},
    {"type": "object", "required": ["x", "y"]}, {"type": "object", "required": ["x"], "additionalProperties": WHOLE}, {"required": ["a"]},
    {"type": "object", "properties": {"a": TEXT, "b": False}}, {"type": "object", "properties": {"a": True}}, {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "object", "properties": {"card": TEXT, "zip": TEXT}, "dependentRequired": {"card": ["zip"]}}, {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "properties": {"a": WHOLE}, "dependentSchemas": {"a": {"properties": {"b": {"const": 1}}, "required": ["b"]}}},
    {"allOf": [{"type": "object", "properties": {"a": WHOLE, "b": TEXT}, "dependentRequired": {"a": ["b"]}}, {"properties": {"c": TEXT}, "dependentRequired": {"b": ["c"]}}]},
    {"type": "object", "properties": {"a": WHOLE}, "dependencies": {"a": ["b"]}}, {"type": "object", "properties": {"a": WHOLE}, "unevaluatedProperties": False},
    {"allOf": [{"properties": {"a": WHOLE}}, {"properties": {"b": TEXT}}], "unevaluatedProperties": False, "type": "object"},
    thing({"__proto__": TEXT, "constructor": WHOLE, "a/b~c": TEXT, "%41": TEXT, "\u0000": WHOLE, "\ud7ff": WHOLE}, []), {"type": "object", "properties": {str(i): WHOLE for i in range(40)}},
    {"type": "object", "additionalProperties": {"type": "object", "additionalProperties": {"type": "array", "items": WHOLE}}},
    {"type": "object", "properties": {"id": TEXT, "idx": TEXT}, "additionalProperties": WHOLE},
    {"type": "object", "required": ["a"], "minProperties": 2, "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"const": 1}},
    {"type": "object", "additionalProperties": {"const": 1}, "not": {"enum": [{}, {"a": 2}]}},
]
LOGIC = [
    {"oneOf": [WHOLE, {"type": "number"}]}, {"oneOf": [CAT, DOG]}, {"oneOf": [{"type": "integer", "multipleOf": 3}, {"type": "integer", "multipleOf": 5}]},
    {"oneOf": [{"type": "string", "maxLength": 5}, {"type": "string", "minLength": 3}]}, {"oneOf": [thing({"a": WHOLE}, []), thing({"b": WHOLE}, [])]},
    {"oneOf": [thing({"a": WHOLE}), thing({"a": WHOLE, "b": TEXT})]}, {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object", "properties": {"a": WHOLE, "b": WHOLE}},
    {"oneOf": [TEXT, {"type": "string", "format": "date"}, {"type": "null"}]}, {"oneOf": [{"type": "object"}, {"type": "array"}, {"type": "string"}, {"type": "null"}]},
    {"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object", "properties": {"a": WHOLE, "b": WHOLE}, "additionalProperties": False},
    {"allOf": [{"anyOf": [{"type": "integer"}, {"type": "string"}]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}]},
    {"allOf": [{"oneOf": [{"const": 1}, {"const": 2}]}, {"oneOf": [{"const": 2}, {"const": 3}]}]}, {"allOf": [{"not": {"const": 1}}, {"not": {"const": 2}}], "enum": [1, 2, 3]},
    {"if": {"properties": {"kind": {"const": "a"}}, "required": ["kind"]}, "then": {"required": ["x"]}, "else": {"required": ["y"]}, "type": "object",
     "properties": {"kind": {"enum": ["a", "b", "c"]}, "x": WHOLE, "y": TEXT}},
    {"type": "object", "properties": {"country": {"enum": ["US", "CA", "NL"]}, "zip": TEXT}, "required": ["country", "zip"], "allOf": [
        {"if": {"properties": {"country": {"const": "US"}}}, "then": {"properties": {"zip": {"pattern": "^[0-9]{5}$"}}}},
        {"if": {"properties": {"country": {"const": "CA"}}}, "then": {"properties": {"zip": {"pattern": "^[A-Z][0-9][A-Z]$"}}}}]},
    {"if": {"type": "string"}, "then": {"maxLength": 3}, "else": {"type": "integer"}}, {"if": {"minimum": 10}, "then": {"multipleOf": 10}, "type": "integer"}, {"if": True, "then": {"type": "null"}},
    {"then": {"type": "null"}, "type": "boolean"}, {"not": {"type": "string"}}, {"not": {"required": ["a"]}, "type": "object"}, {"not": {}, "anyOf": [{}]} and {"not": False},
    {"not": {"anyOf": [{"type": "object"}, {"type": "array"}, {"type": "number"}]}}, {"not": {"not": {"type": "integer"}}}, {"type": "object", "not": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "properties": {"a": {"enum": [1, 2]}}},
    {"not": {"allOf": [{"type": "integer"}, {"minimum": 3}]}, "type": "integer"}, {"enum": [1, "a", None, {"k": [1]}], "not": {"type": "string"}},
    {"$ref": "#node", "$defs": {"n": {"$anchor": "node", **thing({"v": WHOLE, "next": {"anyOf": [{"$ref": "#node"}, {"type": "null"}]}})}}},
    {"$id": "https://example.com/tree", "type": "object", "properties": {"sub": {"$ref": "https://example.com/tree"}, "n": {"$ref": "#/$defs/n"}}, "$defs": {"n": WHOLE}},
    {"$dynamicAnchor": "node", **thing({"v": WHOLE, "sub": {"type": "array", "items": {"$dynamicRef": "#node"}}}, ["v"])},
    {"definitions": {"A": thing({"b": {"$ref": "#/definitions/B"}}, []), "B": thing({"a": {"$ref": "#/definitions/A"}}, [])}, "$ref": "#/definitions/A"},
    {"$ref": "#/properties/x/items", "properties": {"x": {"items": WHOLE}}}, {"type": "object", "properties": {"a": {"$ref": "#/$defs/A", "description": "d", "default": None}}, "$defs": {"A": TEXT}},
    {"allOf": [{"$ref": "#/$defs/Base"}, {"type": "object", "properties": {"extra": WHOLE}, "required": ["extra"]}], "$defs": {"Base": {"type": "object", "properties": {"id": TEXT}, "required": ["id"]}}},
    {"anyOf": [{"$ref": "#/$defs/X"}, {"type": "null"}], "default": None, "$defs": {"X": {"enum": ["p", "q"], "title": "X", "type": "string"}}}, {"anyOf": [True, False]}, {"anyOf": [False, WHOLE]},
    {"allOf": [{}, True, {"type": "integer"}, {"maximum": 3}, {"minimum": 1}]}, {"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}, {"not": {"const": 3}}]}, {"type": ["string", "null"], "enum": ["a", None]},
    {"type": "string", "enum": ["a", "b", 3]}, {"const": {"a": 1.0, "b": [True, {"c": "\u2028"}]}}, {"type": "string", "nullable": True}, True, {"title": "empty"},
    {"oneOf": [{"type": "object", "properties": {"op": {"const": "add"}, "l": {"$ref": "#"}, "r": {"$ref": "#"}}, "required": ["op", "l", "r"], "additionalProperties": False},
               {"type": "object", "properties": {"op": {"const": "num"}, "v": {"type": "number"}}, "required": ["op", "v"], "additionalProperties": False}], "discriminator": {"propertyName": "op"}},
    {"$defs": {"L": {"oneOf": [{"type": "null"}, {"type": "array", "prefixItems": [WHOLE, {"$ref": "#/$defs/L"}], "minItems": 2, "maxItems": 2}]}}, "$ref": "#/$defs/L"},
    {"$defs": {"E": {"anyOf": [{"$ref": "#/$defs/T"}, {"type": "array", "items": {"$ref": "#/$defs/E"}, "minItems": 1}]}, "T": {"anyOf": [WHOLE, {"type": "string", "maxLength": 3}]}}, "$ref": "#/$defs/E"},
    thing({"a": {"anyOf": [thing({"b": {"anyOf": [thing({"c": {"anyOf": [thing({"d": {"type": ["array", "null"], "items": {"$ref": "#"}}}), {"type": "null"}]}}), {"type": "null"}]}}), {"type": "null"}]}}),
]
A_IS_1, B_IS_2 = {"properties": {"a": {"const": 1}}, "required": ["a"]}, {"properties": {"b": {"const": 2}}}
UNEVALUATED = [
    {"type": "object", "properties": {"a": WHOLE}, "not": A_IS_1, "unevaluatedProperties": False},
    {"type": "object", "if": A_IS_1, "else": {"maxProperties": 3}, "unevaluatedProperties": False},
    {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "if": A_IS_1, "then": {"properties": {"b": WHOLE}, "required": ["b"]},
     "else": {"properties": {"c": WHOLE}}, "unevaluatedProperties": False},
    {"properties": {"a": {"const": 1}}, "dependentSchemas": {"a": B_IS_2}, "unevaluatedProperties": False},
    {"type": "object", "properties": {"a": {"const": 1}}, "dependentSchemas": {"a": {"unevaluatedProperties": False}}},
    {"type": "array", "items": WHOLE, "allOf": [{"unevaluatedItems": False}]}, {"type": "array", "items": WHOLE, "anyOf": [{"unevaluatedItems": False}, {"maxItems": 0}]},
    {"type": "array", "prefixItems": [WHOLE], "allOf": [{"prefixItems": [True, WHOLE], "unevaluatedItems": False}]},
]
SIBLINGS = [
    {"$ref": "#/$defs/a", "$dynamicRef": "#/$defs/b", "$defs": {"a": WHOLE, "b": {"maximum": 3, "minimum": 1}}},
    thing({"a": WHOLE, "b": WHOLE, "c": WHOLE}, ["a"], dependentRequired={"a": ["b"]}, dependencies={"a": ["c"]}),
    thing({"a": WHOLE, "b": WHOLE, "c": WHOLE}, ["a"], dependentSchemas={"a": {"required": ["b"]}}, dependencies={"a": {"required": ["c"]}, "b": ["c"]}),
    {"contains": {"const": 1}, "allOf": [{"minContains": 0}]}, {"type": "array", "contains": {"const": 1}, "allOf": [{"contains": {"const": 1}, "minContains": 0}]},
    {"type": "array", "contains": {"const": 1}, "allOf": [{"contains": {"const": 1}, "minContains": 2}]}, {"type": "array", "minContains": 3},
    {"example": {"a": 1}, "xml": {"name": "y"}, "x-a": 1, "nullable": True, "allOf": [{"$ref": "#/$defs/X"}],
     "$defs": {"X": {"type": "integer", "example": {"b": 1}, "xml": {"name": "x"}, "x-a": 2, "nullable": False}}},
    {"type": "object", "required": ["x1"], "patternProperties": {"^x": WHOLE}, "additionalProperties": False},
    {"type": "object", "required": ["x1", "y"], "patternProperties": {"^x": WHOLE}, "additionalProperties": {"type": "null"}},
    {"oneOf": [{"type": "array", "items": {"enum": [1]}, "minItems": 2, "maxItems": 2}, {"not": {"type": "array", "uniqueItems": True}}]},
]
EXPORTS = [
    # pydantic
    {"$defs": {"Item": {"properties": {"sku": {"maxLength": 12, "minLength": 1, "title": "Sku", "type": "string"}, "qty": {"exclusiveMinimum": 0, "title": "Qty", "type": "integer"},
                                       "price": {"anyOf": [{"minimum": 0.0, "type": "number"}, {"pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$", "type": "string"}], "title": "Price"}},
                        "required": ["sku", "qty", "price"], "title": "Item", "type": "object"},
               "Status": {"enum": ["new", "paid"], "title": "Status", "type": "string"}},
     "properties": {"id": {"format": "uuid", "title": "Id", "type": "string"}, "items": {"items": {"$ref": "#/$defs/Item"}, "minItems": 1, "title": "Items", "type": "array"},
                    "status": {"$ref": "#/$defs/Status", "default": "new"}, "placed": {"anyOf": [{"format": "date-time", "type": "string"}, {"type": "null"}], "default": None},
                    "meta": {"additionalProperties": {"type": "string"}, "title": "Meta", "type": "object"}, "pair": {"maxItems": 2, "minItems": 2, "prefixItems": [{"type": "integer"}, {"type": "string"}], "type": "array"},
                    "blob": {"format": "binary", "type": "string"}, "any": {"title": "Any"}}, "required": ["id", "items"], "title": "Order", "type": "object"},
    {"$defs": {"Cat": {"properties": {"kind": {"const": "cat", "title": "Kind", "type": "string"}}, "required": ["kind"], "type": "object"},
               "Dog": {"properties": {"kind": {"const": "dog", "title": "Kind", "type": "string"}}, "required": ["kind"], "type": "object"}},
     "properties": {"pet": {"discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"}, "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]}}, "required": ["pet"], "type": "object"},
    # zod
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": {
        "n": {"type": "integer", **SAFE}, "e": {"type": "string", "format": "email", "pattern": ZOD_EMAIL}, "t": {"type": "array", "items": TEXT}, "r": {"type": "object", "propertyNames": TEXT, "additionalProperties": {"type": "number"}},
        "u": {"anyOf": [TEXT, {"type": "number"}]}, "l": {"type": "string", "const": "x"}}, "required": ["n", "e", "t", "r", "u", "l"], "additionalProperties": False},
    # OpenAPI
    {"type": "object", "properties": {"id": {"type": "integer", "format": "int64"}, "name": {"type": "string", "example": "doggie"}, "photoUrls": {"type": "array", "xml": {"wrapped": True}, "items": TEXT},
                                      "status": {"type": "string", "description": "s", "enum": ["available", "sold"]}, "price": {"type": "number", "format": "float", "minimum": 0, "multipleOf": 0.01},
                                      "created": {"type": "string", "format": "date-time"}, "avatar": {"type": "string", "format": "byte"}}, "required": ["name", "photoUrls"], "xml": {"name": "pet"}},
    # schemars
    {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Config", "type": "object", "required": ["mode", "port"], "properties": {
        "mode": {"oneOf": [{"description": "Fast", "type": "string", "enum": ["fast"]}, {"type": "object", "required": ["custom"], "properties": {"custom": {"type": "integer", "format": "uint8", "minimum": 0.0, "maximum": 255.0}}, "additionalProperties": False}]},
        "port": {"type": "integer", "format": "uint16", "minimum": 0.0}, "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3}, "opt": {"type": ["string", "null"]},
        "either": {"anyOf": [{"$ref": "#/definitions/E"}, {"type": "null"}]}}, "definitions": {"E": {"type": "object", "additionalProperties": {"$ref": "#/definitions/E"}}}},
    # MCP servers
    {"type": "object", "properties": {"path": TEXT, "edits": {"type": "array", "items": {"type": "object", "properties": {"oldText": {"type": "string", "description": "x"}, "newText": TEXT},
                                                                                      "required": ["oldText", "newText"], "additionalProperties": False}}, "dryRun": {"type": "boolean", "default": False}},
     "required": ["path", "edits"], "additionalProperties": False, "$schema": "http://json-schema.org/draft-07/schema#"},
]

SCHEMAS = NUMBERS + TEXTS + ARRAYS + SETS + OBJECTS + LOGIC + UNEVALUATED + SIBLINGS + EXPORTS
