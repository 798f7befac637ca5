"""The cases of make_template_goldens.py: (name, template, context)."""

import glob
import os

CONTEXT = {
    "s": "Hello, W\u00f6rld", "blank": " \t pad \n", "empty": "", "n": 7, "neg": -3, "f": 2.5, "yes": True, "no": False,
    "nil": None, "list": [3, 1, 2], "names": ["b", "A", "c"], "none_list": [],
    "d": {"a": 1, "b": [1, 2], "c": {"x": "y"}}, "words": "one two  three",
    "people": [{"name": "Ann", "age": 30, "tags": ["x", "y"]}, {"name": "bob", "age": 25, "tags": []}, {"name": "Cy"}],
    "quotes": "it's \"q\"", "emoji": "a\U0001F642\u4e2d", "html": "<a href='x'>&</a>", "lines": "a\nb\n\nc",
}

# One line each: name, template.
EXPRESSIONS = """
int {{ n }} {{ neg }} {{ 0x1F }} {{ 1_000 }} {{ 0b11 }} {{ 0o17 }} {{ 00 }}
float {{ f }} {{ 1.0 }} {{ 1e20 }} {{ 1e-7 }} {{ 0.1 + 0.2 }} {{ 1e16 }} {{ 123456789012345.6 }} {{ 1.5e3 }}
bool {{ yes }} {{ no }} {{ true }} {{ False }} {{ none }} {{ None }} {{ nil }}
undefined [{{ missing }}] {{ missing is defined }} {{ missing | default("d") }} {{ missing == nothing }} {{ missing == none }}
undefined_attribute {{ missing.x }}
undefined_item {{ missing["x"] }}
undefined_nested {{ d.zzz.x }}
undefined_member [{{ d.zzz }}] [{{ n.x }}] [{{ nil.x }}] [{{ s.nothing }}] [{{ list.x }}]
undefined_call {{ missing() }}
undefined_add {{ missing + 1 }}
undefined_less {{ missing < 1 }}
undefined_iterate {% for x in missing %}x{% else %}none{% endfor %}
undefined_length {{ missing | length }} {{ missing | join }} [{{ missing | trim }}] {{ missing | list }} {{ [missing] }}
undefined_tojson {{ missing | tojson }}
undefined_in {{ 1 in missing }} {{ missing in [1] }} {{ missing ~ "x" }} {{ not missing }}
undefined_int {{ missing | int }}
repr_list {{ list }} {{ names }} {{ [1, "a", none, true, 1.0] }} {{ [] }} {{ [[]] }}
repr_dict {{ d }} {{ {} }} {{ {"k": "v", 1: 2, none: [1]} }}
repr_tuple {{ (1, 2) }} {{ (1,) }} {{ () }} {{ 1, 2 }}
repr_strings {{ [quotes, "it's", 'say "x"', "back\\\\slash", "new\\nline", "\\t", "\\x00\\x7f\\xa0\\xad", emoji, "\\u200b\\u2028\\ue000\\ufeff"] }}
concat {{ "a" ~ 1 ~ none ~ true ~ 1.5 ~ [1] }} {{ "a" "b" 'c' }}
escapes {{ "\\n\\t\\\\\\'\\"\\a\\b\\f\\v\\r|\\x41\\u00e9\\U0001F642\\101\\q\\0" }}
escape_bad {{ "\\x4" }}
arithmetic {{ 7 + 2 }} {{ 7 - 2 }} {{ 7 * 2 }} {{ 7 / 2 }} {{ 7 // 2 }} {{ 7 % 3 }} {{ 2 ** 10 }} {{ 6 / 3 }}
arithmetic_negative {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 7 // -2 }} {{ -7.5 // 2 }} {{ -7.5 % 2 }} {{ 7.5 % -2 }} {{ 2 ** -1 }}
arithmetic_order {{ 2 + 3 * 4 ** 2 }} {{ (2 + 3) * 4 }} {{ -2 ** 2 }} {{ 2 ** 3 ** 2 }} {{ "a" ~ 2 * 3 }} {{ - 3 + + 4 }}
arithmetic_bool {{ true + 1 }} {{ -true }} {{ +true }} {{ true * 3 }} {{ true / 2 }}
concat_before_sum {{ 1 ~ 2 + 3 }}
power_of_text {{ 2 ** 3 | string }}
divide_zero {{ 1 / 0 }}
modulo_zero {{ 1 % 0 }}
floor_zero {{ 1.0 // 0 }}
add_kinds {{ 1 + "a" }}
add_none {{ none + 1 }}
subtract_strings {{ "a" - "b" }}
add_strings {{ "a" + "b" }} {{ [1] + [2] }} {{ (1,) + (2,) }}
add_mixed {{ [1] + (2,) }}
repeat {{ "ab" * 3 }} {{ 2 * "x" }} {{ [1, 2] * 2 }} {{ "x" * -1 }}| {{ "x" * 0 }}|
compare {{ 1 < 2 }} {{ 2 <= 2 }} {{ 3 > 4 }} {{ 3 >= 3 }} {{ 1 == 1.0 }} {{ 1 != 2 }} {{ "a" < "b" }} {{ "Z" < "a" }} {{ true == 1 }}
compare_chain {{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 1 == 1 == 1 }} {{ 3 > 2 != 1 }}
compare_lists {{ [1, 2] < [1, 3] }} {{ [1] < [1, 0] }} {{ [1, 2] == [1, 2] }} {{ (1, 2) == [1, 2] }} {{ {"a": 1} == {"a": 1.0} }}
compare_kinds {{ 1 < "a" }}
compare_none {{ none < 1 }}
in {{ 1 in [1, 2] }} {{ "a" in "cat" }} {{ "a" in {"a": 1} }} {{ 3 not in list }} {{ "ell" in s }} {{ "" in "" }} {{ (1, 2) in [(1, 2)] }}
in_wrong {{ 1 in "abc" }}
in_number {{ 1 in 2 }}
in_unhashable {{ [1] in {"a": 1} }}
logic {{ 1 and 2 }} {{ 0 or "x" }} {{ "" or none }} {{ not 0 }} {{ not not 1 }} {{ 0 and missing.x }} {{ 1 or missing.x }}
ternary {{ "a" if yes else "b" }} {{ "a" if no else "b" }} [{{ "a" if no }}] {{ 1 if no else 2 if no else 3 }}
ternary_nested {{ ("x" if n > 5 else "y") ~ "z" }} {{ "a" if n is odd else "b" }}
index {{ list[0] }} {{ list[-1] }} [{{ list[9] }}] {{ s[1] }} {{ emoji[1] }} {{ s[-1] }} {{ d["a"] }} {{ list[true] }} [{{ list["x"] }}] {{ list.0 }}
index_unhashable [{{ d[[1]] }}] [{{ n[0] }}] [{{ nil[0] }}] [{{ list[1.0] }}]
slices {{ list[1:] }} {{ list[:1] }} {{ list[::-1] }} {{ list[-2:] }} {{ list[5:] }} {{ list[::2] }} {{ list[2:0:-1] }} {{ list[:] }} {{ list[-9:9] }}
slices_text {{ s[1:4] }} {{ s[::-1] }} {{ emoji[1:] }} {{ s[-3:] }} {{ s[10:2] }}| {{ s[::3] }} {{ "abc"[none:2] }} {{ (1,2,3)[1:] }}
slice_zero {{ list[::0] }}
slice_number {{ n[1:] }}
slice_none {{ nil[1:] }}
slice_dict {{ d[1:] }}
slice_text_bound {{ list["a":] }}
slice_undefined_bound {{ list[missing:] }}
slice_undefined {{ missing[1:] }}
dict_methods {{ d.get("a") }} {{ d.get("z") }} {{ d.get("z", 5) }} {{ d.keys() | list }} {{ d.values() | list }} {{ d.items() | list }} {{ d.get(key="a") if no }}
dict_get_unhashable {{ d.get([1]) }}
dict_update {{ d.update({"z": 1}) }}
dict_pop {{ d.pop("a") }}
dict_clear {{ d.clear() }}
list_append {{ list.append(1) }}
list_methods {{ list.index(1) }} {{ [1, 1, 2].count(1) }}
list_index_missing {{ list.index(99) }}
dict_literal {{ {"a": 1, "a": 2} }} {{ {"x": {"y": [1]}}.x.y[0] }} {{ {1: "i", true: "b"} }} {{ {"a": 1,} }}
dict_function {{ dict(a=1, b="x") }} {{ dict({"a": 1}, a=2) }}
dict_iterate {% for k in d %}{{ k }}{% endfor %} {% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}
string_strip [{{ blank.strip() }}] [{{ blank.lstrip() }}] [{{ blank.rstrip() }}] [{{ "xxaxx".strip("x") }}] [{{ "abcba".lstrip("ab") }}] [{{ "\\u00a0\\u3000x\\u2003".strip() }}]
string_split {{ words.split() }} {{ words.split(" ") }} {{ "a,b,c".split(",", 1) }} {{ "a,b,c".rsplit(",", 1) }} {{ "".split() }} {{ "".split(",") }} {{ " a  b ".split(none, 1) }} {{ " a  b c ".rsplit(none, 1) }}
string_split_named {{ "a-b-c".split("-", maxsplit=1) }} {{ "a-b-c".split(sep="-") }} {{ "<think>r</think>x".split("</think>")[-1] }}
string_split_empty {{ "a".split("") }}
string_lines {{ lines.splitlines() }} {{ "a\\r\\nb\\r".splitlines() }} {{ "".splitlines() }}
string_edges {{ s.startswith("He") }} {{ s.endswith("rld") }} {{ s.startswith(("x", "H")) }} {{ s.endswith("") }}
string_edges_wrong {{ s.startswith(1) }}
string_replace {{ s.replace("l", "L") }} {{ s.replace("l", "L", 1) }} {{ "ab".replace("", "-") }} {{ "aaa".replace("aa", "b") }} {{ "x".replace("y", "z") }} {{ "".replace("", "-") }}
string_replace_wrong {{ s.replace("a", 1) }}
string_case {{ "heLLo wOrld".upper() }} {{ "HeLLo".lower() }} {{ "hello wORLD it's".title() }} {{ "hELLO x".capitalize() }} {{ "a-b c_d 1e".title() }}
string_find {{ s.find("W") }} {{ s.find("zz") }} {{ "banana".count("an") }} {{ "aaa".count("") }} {{ "12".isdigit() }} {{ "1a".isdigit() }} {{ emoji.find("\u4e2d") }}
string_join {{ ", ".join(names) }} {{ "".join([]) }} {{ "-".join("abc") }}
string_join_wrong {{ "-".join(list) }}
string_unknown_method {{ s.encode_all() }}
string_attribute_call {{ s.__class__() }}
string_no_class [{{ s.x }}]
filter_length {{ s | length }} {{ emoji | length }} {{ list | length }} {{ d | length }} {{ "" | count }}
filter_length_wrong {{ n | length }}
filter_tojson {{ d | tojson }} {{ s | tojson }} {{ nil | tojson }} {{ yes | tojson }} {{ f | tojson }} {{ (1, 2) | tojson }} {{ html | tojson }} {{ {1: 2, none: 3, true: 4, 1.5: 5} | tojson }} {{ 1e400 | tojson }}
filter_tojson_separators {{ d | tojson(separators=(",", ":")) }} {{ d | tojson(separators=[" ; ", " = "]) }}
filter_tojson_indent {{ d | tojson(indent=2) }} {{ [] | tojson(indent=2) }} {{ [{}] | tojson(indent=1) }} {{ [1] | tojson(indent=0) }} {{ [1] | tojson(indent="--") }} {{ [1, 2] | tojson(indent=none) }}
filter_tojson_sort {{ {"b": 1, "a": {"d": 1, "c": 2}} | tojson(sort_keys=true) }}
filter_tojson_sort_mixed {{ {"b": 1, 2: 3} | tojson(sort_keys=true) }}
filter_tojson_ascii {{ emoji | tojson(ensure_ascii=true) }} {{ emoji | tojson(ensure_ascii=false) }} {{ "\\u00e9\\x7f" | tojson(true) }}
filter_tojson_controls {{ "\\n\\t\\x01\\x1f\\x7f\\\\\\"/" | tojson }}
filter_tojson_macro {% macro m() %}{% endmacro %}{{ m | tojson }}
filter_tojson_range {{ range(3) | tojson }}
filter_trim [{{ blank | trim }}] [{{ "xxaxx" | trim("x") }}] [{{ 5 | trim }}] [{{ none | trim }}]
filter_join {{ names | join }} {{ names | join(", ") }} {{ list | join("-") }} {{ people | join(",", attribute="name") }} {{ "abc" | join(".") }} {{ d | join }} {{ [1, none, "x"] | join(" ") }} {{ names | join(d=";") }}
filter_join_wrong {{ n | join }}
filter_default {{ none | default("x") }} {{ "" | default("x", true) }} {{ missing | d }}| {{ none | default("x", boolean=true) }} {{ d.q | default([]) }} {{ 0 | default(9, true) }}
filter_first {{ list | first }} {{ list | last }} {{ "abc" | first }} {{ "abc" | last }} [{{ [] | first }}] [{{ [] | last }}] {{ d | first }} {{ d | last }}
filter_first_wrong {{ n | first }}
filter_case {{ "aB" | upper }} {{ "aB" | lower }} {{ "hello wORLD-x (y z" | title }} {{ "hELLO" | capitalize }} {{ none | upper }} {{ 1.5 | string }}
filter_replace {{ s | replace("l", "L") }} {{ s | replace("l", "L", 2) }} {{ 1213 | replace(1, 9) }} {{ "a" | replace("", "-") }}
filter_items {% for k, v in d | items %}{{ k }}={{ v }},{% endfor %} {{ missing | items | list }}
filter_items_wrong {{ list | items | list }}
filter_list {{ "abc" | list }} {{ d | list }} {{ range(3) | list }} {{ (1, 2) | list }} {{ d.items() | list }}
filter_list_wrong {{ 5 | list }}
filter_int {{ "42" | int }} {{ "4.9" | int }} {{ "x" | int }} {{ "x" | int(5) }} {{ 3.9 | int }} {{ -3.9 | int }} {{ none | int }} {{ true | int }} {{ " 7 " | int }} {{ "" | int(default=1) }} {{ [] | int }} {{ "+3" | int }}
filter_float {{ "1.5" | float }} {{ "x" | float }} {{ 3 | float }} {{ "x" | float(2.5) }} {{ none | float }} {{ "1e3" | float }}
filter_abs {{ -3 | abs }} {{ (-3) | abs }} {{ -2.5 | abs }} {{ true | abs }}
filter_map {{ people | map(attribute="name") | list }} {{ names | map("upper") | list }} {{ people | map(attribute="age", default=0) | list }} {{ people | map(attribute="tags.0", default="-") | list if no }} {{ list | map("string") | join("+") }} {{ names | map("replace", "b", "X") | list }}
filter_map_unknown {{ names | map("nonsense") | list }}
filter_map_nested {{ [{"a": {"b": 1}}, {"a": {"b": 2}}] | map(attribute="a.b") | list }} {{ [[1, 2], [3, 4]] | map(attribute=1) | list }}
filter_select {{ list | select("odd") | list }} {{ list | reject("odd") | list }} {{ [0, 1, "", "a"] | select | list }} {{ list | select("gt", 1) | list }} {{ [1, "a", none] | select("string") | list }}
filter_selectattr {{ people | selectattr("age") | map(attribute="name") | list }} {{ people | selectattr("name", "equalto", "bob") | list }} {{ people | rejectattr("age", "defined") | list }} {{ people | selectattr("name", "in", ["Ann"]) | map(attribute="age") | first }}
filter_selectattr_error {{ people | selectattr("age", "gt", 26) | list }}
filter_generator_length {{ list | select | length }}
filter_sort {{ list | sort }} {{ names | sort }} {{ names | sort(case_sensitive=true) }} {{ list | sort(reverse=true) }} {{ people[:2] | sort(attribute="age") | map(attribute="name") | list }}
filter_sort_mixed {{ [1, "a"] | sort }}
filter_dictsort {{ {"b": 1, "A": 3, "c": 2} | dictsort }} {{ {"b": 1, "A": 3} | dictsort(true) }} {{ {"b": 1, "a": 3} | dictsort(by="value", reverse=true) }}
filter_unique {{ [1, 2, 1, "a", "A"] | unique | list }}
filter_reverse {{ list | reverse | list }} {{ "abc" | reverse }}
filter_indent {{ lines | indent }} {{ lines | indent(2, true) }} {{ lines | indent("> ", blank=true) }} {{ "x" | indent }}
filter_safe {{ html | safe }} {{ html }} {{ html | string }}
filter_chain {{ blank | trim | upper | replace("P", "_") | length }}
filter_unknown {{ s | nonsense }}
filter_arguments {{ s | upper(1, 2) }}
filter_precedence {{ -1 | abs }} {{ 1 + 2 | string | length }} {{ "a" ~ "b" | upper }} {{ not "" | length }}
test_defined {{ s is defined }} {{ missing is undefined }} {{ d.a is defined }} {{ d.z is defined }} {{ s is not defined }}
test_kinds {{ s is string }} {{ d is mapping }} {{ list is iterable }} {{ list is sequence }} {{ n is number }} {{ n is integer }} {{ f is float }} {{ yes is boolean }} {{ nil is none }} {{ n is none }} {{ yes is number }} {{ yes is integer }}
test_kinds_more {{ s is iterable }} {{ s is sequence }} {{ d is sequence }} {{ d.items() is sequence }} {{ d.items() is iterable }} {{ n is iterable }} {{ s is mapping }} {{ missing is iterable }} {{ none is iterable }} {{ (1,) is sequence }} {{ range(2) is sequence }} {{ list is string }}
test_constants {{ yes is true }} {{ 1 is true }} {{ no is false }} {{ 0 is false }} {{ none is false }} {{ yes is not false }}
test_equal {{ n is equalto 7 }} {{ n is eq(7) }} {{ n is ne 7 }} {{ n is gt 3 }} {{ n is lt(3) }} {{ n is ge 7 }} {{ n is le 6 }} {{ n is greaterthan 6 }} {{ n is lessthan 9 }}
test_in {{ 1 is in [1, 2] }} {{ "a" is in("abc") }} {{ 9 is not in list }} {{ n is divisibleby 7 }} {{ n is odd }} {{ n is even }} {{ none is sameas none }} {{ 1 is sameas true }} {{ "ab" is lower }} {{ "AB" is upper }}
test_logic {{ s is string and n is number }} {{ s is defined or missing.x }} {{ not s is string }} {{ "x" if s is string else "y" }}
test_list_argument {{ "a" is in ["a"] }} {{ d is in [d] }}
test_unknown {{ s is nonsense }}
test_chain {{ s is string is string }}
test_callable {% macro m() %}{% endmacro %}{{ m is callable }} {{ s is callable }} {{ range is callable }}
range {{ range(3) | list }} {{ range(1, 4) | list }} {{ range(5, 0, -2) | list }} {{ range(0) | list }} {{ range(3)[1] }} {{ range(10)[2:4] | list }} {{ 2 in range(3) }} {{ range(4) | length }}
range_zero {{ range(1, 2, 0) | list }}
range_text {{ range("a") | list }}
range_large {{ range(200000) | length }}
for_simple {% for x in list %}{{ x }},{% endfor %}
for_loop {% for x in names %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }}{{ loop.depth0 }};{% endfor %}
for_neighbours {% for x in names %}[{{ loop.previtem }}<{{ x }}<{{ loop.nextitem }}]{{ loop.previtem is defined }}{{ loop.nextitem is defined }}{% endfor %}
for_cycle {% for x in list %}{{ loop.cycle("a", "b") }}{% endfor %} {% for x in [1, 1, 2] %}{{ loop.changed(x) }}{% endfor %}
for_loop_item {% for x in list %}{{ loop["index"] }}{{ loop.nothing }}{% endfor %}
for_else {% for x in [] %}x{% else %}empty{% endfor %} {% for x in list if x > 9 %}x{% else %}none{% endfor %} {% for x in [1] %}x{% else %}no{% endfor %}
for_filter {% for x in list if x > 1 %}{{ loop.index }}/{{ loop.length }}:{{ x }} {% endfor %}
for_unpack {% for a, b in [(1, 2), [3, 4]] %}{{ a + b }} {% endfor %} {% for (a, b), c in [((1, 2), 3)] %}{{ a }}{{ b }}{{ c }}{% endfor %}
for_unpack_wrong {% for a, b in [(1, 2, 3)] %}{{ a }}{% endfor %}
for_unpack_number {% for a, b in [1] %}{{ a }}{% endfor %}
for_text {% for c in "a\u00e9\U0001F642" %}{{ c }}-{% endfor %}
for_number {% for x in 5 %}{% endfor %}
for_tuple {% for x in 1, 2, 3 %}{{ x }}{% endfor %}
for_nested {% for x in [1, 2] %}{% for y in [3, 4] %}{{ x }}{{ y }}{{ loop.index }} {% endfor %}{{ loop.index }};{% endfor %}
for_scope {% set x = 1 %}{% for i in [1, 2] %}{% set x = x + i %}{{ x }} {% endfor %}{{ x }}
for_variable_ends {% for i in [1, 2] %}{% endfor %}[{{ i }}][{{ loop }}]
for_shadow {% set i = "out" %}{% for i in [1] %}{{ i }}{% endfor %}{{ i }}
for_set_fresh {% for i in [1, 2] %}[{{ y }}]{% set y = i %}{{ y }}{% endfor %}
for_break {% for x in [1, 2, 3, 4] %}{% if x == 3 %}{% break %}{% endif %}{{ x }}{% endfor %}!
for_continue {% for x in [1, 2, 3, 4] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}!
for_break_else {% for x in [1] %}{% break %}{% else %}e{% endfor %}.
for_break_inner {% for x in [1, 2] %}{% for y in [1, 2, 3] %}{% if y == 2 %}{% break %}{% endif %}{{ x }}{{ y }} {% endfor %}{% endfor %}
break_outside {% break %}
for_reverse {% for m in people[::-1] %}{{ m.name }}{% endfor %} {% for i in range(2, -1, -1) %}{{ i }}{% endfor %}
for_ternary {% for x in (list if yes else []) %}{{ x }}{% endfor %}
for_dict {% for k in d if k != "b" %}{{ k }}{% endfor %}
if_chain {% if n > 9 %}a{% elif n > 5 %}b{% else %}c{% endif %} {% if no %}a{% elif no %}b{% else %}c{% endif %} {% if no %}x{% endif %}
if_values {% if list %}1{% endif %}{% if [] %}2{% endif %}{% if "" %}3{% endif %}{% if 0.0 %}4{% endif %}{% if {} %}5{% endif %}{% if none %}6{% endif %}{% if " " %}7{% endif %}{% if missing %}8{% endif %}
if_set {% if yes %}{% set x = 5 %}{% endif %}{{ x }}
if_tuple {% if (1, 2) %}t{% endif %}
set_simple {% set x = 5 %}{{ x }} {% set x = x + 1 %}{{ x }}
set_tuple {% set a, b = 1, 2 %}{{ a }}{{ b }} {% set t = 1, 2 %}{{ t }} {% set (c, e) = [3, 4] %}{{ c }}{{ e }}
set_block {% set x %}a {{ n }} b{% endset %}[{{ x }}] {% set y | upper %}abc{% endset %}{{ y }} {% set z | replace("a", "b") | upper %}aaa{% endset %}{{ z }}
set_block_scope {% set x = 1 %}{% set y %}{% set x = 2 %}{{ x }}{% endset %}{{ x }}{{ y }}
set_context {{ n }}{% set n = 8 %}{{ n }}
set_constant {% set true = 1 %}
set_attribute_wrong {% set d.a = 5 %}
namespace {% set ns = namespace(x=1, y="a") %}{{ ns.x }}{{ ns.y }}[{{ ns.z }}] {% for i in [1, 2, 3] %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }} {{ ns["x"] }}
namespace_new {% set ns = namespace() %}{% set ns.found = true %}{{ ns.found }} {% set m = namespace({"a": 1}) %}{{ m.a }}
namespace_list {% set ns = namespace(items=[]) %}{% for x in list %}{% set ns.items = ns.items + [x * 2] %}{% endfor %}{{ ns.items }}
namespace_undefined {% set ns = namespace() %}{{ ns.x.y }}
macro {% macro m(a, b=2, c="x") %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(1) }} {{ m(1, 3) }} {{ m(1, c="z") }} {{ m(b=5, a=4) }} {{ m() }}
macro_default_uses {% macro m(a, b=a) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }} {{ m(1, 2) }}
macro_extra {% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}
macro_unknown_name {% macro m(a) %}{{ a }}{% endmacro %}{{ m(z=2) }}
macro_twice {% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, a=2) }}
macro_globals {% set g = "G" %}{% macro m() %}{{ g }}{{ n }}{% endmacro %}{{ m() }}{% set g = "H" %}{{ m() }}
macro_no_caller_scope {% macro m() %}[{{ x }}]{% endmacro %}{% for x in [1] %}{{ m() }}{% endfor %}
macro_recursive {% macro f(k) %}{{ k }}{% if k > 0 %}{{ f(k - 1) }}{% endif %}{% endmacro %}{{ f(5) }}
macro_text {% macro m() %} a {% endmacro %}[{{ m() }}] {{ m() | trim | upper }} {{ m() ~ "x" }} {{ m() is string }} {{ m() | length }}
macro_set {% macro m() %}{% set q = 1 %}{{ q }}{% endmacro %}{{ m() }}[{{ q }}]
macro_default_order {% macro m(a=1, b) %}{% endmacro %}
macro_in_namespace {% macro m(ns) %}{% set ns.x = 5 %}{% endmacro %}{% set ns = namespace(x=1) %}{{ m(ns) }}{{ ns.x }}
with {% with a = 1, b = n %}{{ a }}{{ b }}{% endwith %}[{{ a }}] {% with %}{% set z = 1 %}{{ z }}{% endwith %}[{{ z }}]
raise {{ raise_exception("bad " ~ n) }}
raise_in_if {% if no %}{{ raise_exception("x") }}{% endif %}ok
raise_in_branch {% if yes %}{{ raise_exception("x") }}{% endif %}ok
comment a{# b #}c {#- d -#} e {# {{ x }} {% if %} #}f {#+ g +#} h
comment_open {# never ends
raw {% raw %}{{ x }} {% if %}{% endraw %}! {%- raw -%}  {{ y }}  {%- endraw -%}  ?
raw_open {% raw %} x
braces {{ "}}" }} {{ "%}" }} { } {x} {{ {"a": {"b": 1}}["a"]["b"] }} }} %} #}
unclosed {{ n
unclosed_block {% if n
unclosed_if {% if n %}x
unknown_tag {% nonsense %}
end_alone {% endif %}
else_alone {% else %}
empty_output {{ }}
bad_operator {{ 1 $ 2 }}
bad_dot {{ d. }}
bad_bracket {{ list[1) }}
bad_call {{ m(a b) }}
bad_positional {{ dict(a=1, 2) }}
bad_integer {{ 1x }}
lone_not {{ not }}
call_number {{ n() }}
call_string {{ "a"() }}
parentheses {{ ((((1)))) }} {{ (1 + 2) * 3 }} {{ ("a") }}
member_chain {{ d.c.x }} {{ d["c"]["x"] }} {{ d.c["x"] | upper }} {{ people[0].tags[1] }} {{ people[0]["tags"][-1] }}
whitespace_control   {%- if yes -%}   a   {%- endif -%}   b   {{- n -}}   c   {{ n -}}   d   {{- n }}
unicode_text \u4f60\u597d {{ "\u4f60\u597d"[0] }} \U0001F642 {{ emoji | upper }}
continue_else {% for x in [1, 2] %}{% continue %}{% else %}e{% endfor %} {% for x in [1, 2] %}{% if x == 2 %}{% break %}{% endif %}{% else %}e{% endfor %}.
kwargs_trailing {{ dict(a=1,) }} {{ [1,] }}
attribute_item_key {{ {"items": 5}["items"] }} {{ {"get": 5}["get"] }}
loop_length_in_if {% for m in people %}{% if not loop.last %}{{ m.name }}, {% else %}and {{ m.name }}{% endif %}{% endfor %}
string_multiply_join {{ ["-"] * 3 | length if no }}{{ ("-" * 3) | length }}
compare_undefined_string {{ missing == "" }} {{ missing != "" }} {{ missing is none }}
numbers_repr {{ 1e22 }} {{ 1.0e-5 }} {{ 0.0001 }} {{ -0.0 }} {{ 3.14159 }} {{ 1/3 }} {{ 2.0 ** 0.5 }} {{ 10 / 4 }} {{ 7 // 2.0 }} {{ 1e308 * 10 }}
int_text_methods {{ (5).x }}|{{ 5 | string ~ "x" }}
strftime {{ strftime_now("%Y-%m-%d") }}
"""

# Several lines, so blanks and line ends around tags matter.
BLOCKS = {
    "trim_blocks": "{% if yes %}\n  yes\n{% endif %}\nafter\n{% for x in list %}\n{{ x }}\n{% endfor %}\nend\n",
    "lstrip_blocks": "a\n    {% if yes %}\n    b\n    {% endif %}\n  {{ n }}\n  {# c #}\n d {% if yes %}x{% endif %}\n",
    "lstrip_plus": "a\n   {%+ if yes %}b{%+ endif %}\n   {%+ set x = 1 +%}\nc",
    "minus_lines": "a\n\n  {%- if yes %}\n\n  b\n  {%- endif -%}\n\n\n c\n {{- n -}} \n d",
    "trailing_newline": "a\n", "trailing_newlines": "a\n\n\n", "only_newline": "\n", "carriage": "a\r\nb\rc\n{% if yes %}\r\nd{% endif %}\r\n",
    "comment_lines": "a\n{# one #}\nb\n  {# two #}  \nc\n{#- three -#}\nd", "raw_lines": "  {% raw %}\n  {{ x }}\n  {% endraw %}\nend",
    "tag_over_lines": "{%\n  if\n yes\n%}x{% endif %}{{\n n\n+ 1 }}", "empty": "", "text_only": "just text {\n % } #",
    "output_lines": "{{ n }}\n{{ n }}\n\n{{ n }}", "indent_tabs": "x\n\t \t{% if yes %}\n\ty{% endif %}\n",
    "for_lines": "{% for m in people %}\n    {% if m.age is defined %}\n        {{ m.name }}: {{ m.age }}\n    {% else %}\n        {{ m.name }}\n    {% endif %}\n{% endfor %}\n",
    "macro_lines": "{% macro m(x) %}\n  <{{ x }}>\n{% endmacro %}\n{{ m(1) }}\n{{ m(2) }}",
    "set_lines": "{% set x = 1 %}\n{% set y %}\n  a\n{% endset %}\n{{ x }}[{{ y }}]",
    "line_after_raw": "{% raw %}a{% endraw %}\n   {% if yes %}b{% endif %}", "minus_first": "   {%- if yes %}a{% endif %}",
    "unicode_blanks": "a\u00a0\u3000{%- if yes -%}\u2003b{% endif %}", "plus_output": "a {{+ n }} b {{ +n }}", "minus_number": "{{-1}} {{ -1}} {{ - 1 }}",
    "string_lines": "{{ 'a\nb' }}{{ \"x\\\ny\" }}", "colon": "{% if yes: %}a{% endif %}", "comment_plus": "a\n  {#+ x +#}\nb",
}


def message(role, content, **more):
    return dict({"role": role, "content": content}, **more)


def conversations():
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}
    parsed = {"id": "functions.g:1", "type": "function", "function": {"name": "g", "arguments": {"a": [1, "\u00e9"], "b": None}}}
    tools = [{"type": "function", "function": {"name": "f", "description": "Does <it>.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}]
    user, named = message("user", "Hi"), message("user", "a", name="Bob")
    loop = [message("system", "Be brief."), user, message("assistant", None, tool_calls=[call, parsed], reasoning_content="think\nhard"),
            message("tool", "18C", tool_call_id="functions.f:0"), message("tool", [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}], tool_call_id="functions.g:1", name="g")]
    plain = message("assistant", "It is 18C.", reasoning_content="done")
    yield "hi", {"messages": [user]}
    yield "hi_prompt", {"messages": [user], "add_generation_prompt": True}
    yield "instant", {"messages": [user], "add_generation_prompt": True, "thinking": False}
    yield "tool_loop", {"messages": loop, "tools": tools, "add_generation_prompt": True}
    yield "tool_text", {"messages": loop, "tools": tools, "tools_ts_str": "# Tools\n", "add_generation_prompt": True}
    yield "closed_loop", {"messages": loop + [plain, named], "tools": tools, "add_generation_prompt": True}
    yield "kept", {"messages": loop + [plain, named], "preserve_thinking": True, "add_generation_prompt": True}
    yield "null_reasoning", {"messages": [user, message("assistant", "x", reasoning_content=None)]}
    yield "image", {"messages": [message("user", [{"type": "image_url", "image_url": "u"}, {"type": "text", "text": "a"}])]}
    yield "no_messages", {"messages": [], "add_generation_prompt": True}
    yield "odd_role", {"messages": [message("critic", "x"), message("assistant", "", name="")]}
    yield "bad_messages", {"messages": [{"content": "x"}]}


def all_cases(folder):
    for line in EXPRESSIONS.strip().splitlines():
        name, _, template = line.partition(" ")
        yield name, template, CONTEXT
    for name, template in BLOCKS.items():
        yield "block_" + name, template, CONTEXT
    yield "strftime_given", "{{ strftime_now('%d') }}", {"strftime_now": "2026-11-21"}
    files = ["chat_template.jinja"] + sorted(os.path.basename(path) for path in glob.glob(os.path.join(folder, "*.jinja")))
    for file in files:
        for name, context in conversations():
            yield "%s/%s" % (file.split(".")[0], name), file, context
