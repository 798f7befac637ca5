"""Every field of the request schemas of OpenAI and vLLM, and what this server makes of it: exactly one of used, refused
or harmless. The names are those of the public API references (openai-python 2, vLLM of September 2026).

Used(wrong, value, among): `wrong` is of a type that gets a 400; with the members `among` beside it, `value` gives
another reply than its absence. A callable takes the token ids of the plain reply. No value: the effect cannot be seen
from one reply, and only the type is checked here.
Refused(value, harmless): 400 for `value`; the optional `harmless` asks for nothing and passes.
Harmless(value): accepted, no effect, no warning in the log.
"""
import dataclasses
import typing


@dataclasses.dataclass(frozen=True)
class Used:
    wrong: typing.Any
    value: typing.Any = None
    among: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Refused:
    value: typing.Any
    harmless: typing.Any = None


@dataclasses.dataclass(frozen=True)
class Harmless:
    value: typing.Any


CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
QUESTION = "Hugo earns 15 dollars per hour and works 9 hours. How many dollars does Hugo earn?"
MESSAGES = [{"role": "user", "content": QUESTION}]
CONTINUED = MESSAGES + [{"role": "assistant", "content": "He earns"}]
NO_THINKING = {"chat_template_kwargs": {"thinking": False}}
END_ID = 2050  # <|im_end|> of the bundled models
TOOLS = [{"type": "function", "function": {"name": "get_stock", "parameters": {"type": "object"}}}]

# The request that the fields are added to.
BASE = {
    CHAT: {"messages": MESSAGES, "max_tokens": 8, "temperature": 0, **NO_THINKING},
    COMPLETIONS: {"prompt": f"Question: {QUESTION}\nAnswer:", "max_tokens": 8, "temperature": 0},
    TOKENIZE: {"messages": MESSAGES},
    DETOKENIZE: {"tokens": [65, 66]},
}

HOT = {"temperature": 3, "seed": 5}
END_AT_ONCE = {"logit_bias": {str(END_ID): 100}}
ENDS = {**END_AT_ONCE, "ignore_eos": True}  # nothing but end markers

SAMPLING = {
    "frequency_penalty": Used("x", 2, {**HOT, "max_tokens": 24}),
    "presence_penalty": Used("x", 2, {**HOT, "max_tokens": 24}),
    "repetition_penalty": Used("x", 100, HOT),
    "temperature": Used("hot", 3, {"seed": 5}),
    "top_p": Used("x", 0.001, HOT),
    "top_k": Used(1.5, 1, HOT),
    "min_p": Used("x", 1, HOT),
    "seed": Used("x", 6, {"temperature": 3}),
    "logit_bias": Used([], {"65": 100}),
    "n": Used("2", 2),
    "stop": Used(7, ["a", "e", "i", "o", " ", "1"]),
    "stop_token_ids": Used(7, lambda ids: [ids[1]]),
    "include_stop_str_in_output": Used("x", True, {"stop": ["a", "e", "i", "o", " ", "1"]}),
    "ignore_eos": Used("x", True, {**END_AT_ONCE, "max_tokens": 4}),
    "min_tokens": Used("x", 4, {**END_AT_ONCE, "max_tokens": 4}),
    "skip_special_tokens": Used("x", False, ENDS),
    "stream": Used("x", True),
    "stream_options": Used([], {"include_usage": True}, {"stream": True}),
    "prompt_logprobs": Used("x", 1),
    "return_tokens_as_token_ids": Used("x", True),  # its value is set per endpoint
    "return_token_ids": Used("x", True),
    "cache_salt": Used(7),
    "speculation_max_context": Used("x"),
    "priority": Used("x"),
    "timeout": Used("x", 1e-6),
    "model": Used(7, "another"),
}

GRAMMAR = {
    "structured_outputs": Used("x", {"choice": ["a"]}),
    "response_format": Used("x", {"type": "json_object"}),
    "guided_json": Used(7, {"const": 1}),
    "guided_regex": Used(7, "[0-9]"),
    "guided_choice": Used("x", ["a"]),
    "guided_grammar": Used(7, "root ::= \"a\""),
    "guided_decoding_backend": Harmless("auto"),
    "guided_whitespace_pattern": Refused(" *"),
    **{name: Refused("x") for name in ("regex", "ebnf", "grammar", "json_schema", "structural_tag")},
}

COMMON = {
    **SAMPLING,
    **GRAMMAR,
    "allowed_token_ids": Refused([65], []),
    "bad_words": Refused(["x"], []),
    "logits_processors": Refused(["x"], []),
    "typical_p": Refused(0.5, 1),
    "use_beam_search": Refused(True, False),
    "length_penalty": Refused(2, 1.0),
    "watermarking": Refused(True, False),
    "truncate_prompt_tokens": Refused(10),
    "truncation_side": Refused("left"),
    "logprob_token_ids": Refused([65]),
    "prompt_embeds": Refused("AAAA"),
    "lora_path": Refused("x"),
    "lora_request": Refused({"name": "x"}),
    "kv_transfer_params": Refused({"do_remote_decode": True}, {}),
    "ec_transfer_params": Refused({}),
    "vllm_xargs": Refused({"x": 1}, {}),
    "repetition_detection": Refused({}),
    "thinking_token_budget": Refused(10, -1),
    "stream_interval": Refused(8, 1),
    "routed_experts_prompt_start": Refused(1, 0),
    "return_token_offsets": Refused(True, False),
    "best_of": Refused(3, 1),
    "user": Harmless("me"),
    "request_id": Harmless("r"),
    "session_id": Harmless("s"),
    "return_mm_kwargs": Harmless(False),
    "spaces_between_special_tokens": Harmless(False),
    "add_special_tokens": Harmless(False),
}

FIELDS = {
    CHAT: {
        **COMMON,
        "messages": Used("x", [{"role": "user", "content": "Hi"}]),
        "max_tokens": Used("x", 3),
        "max_completion_tokens": Used("x", 3, {"max_tokens": None}),
        "logprobs": Used(1, True),
        "top_logprobs": Used("x", 2, {"logprobs": True}),
        "return_tokens_as_token_ids": Used("x", True, {"logprobs": True}),
        "tools": Used({}, TOOLS),
        "tool_choice": Used(7, "none", {"tools": TOOLS}),
        "parallel_tool_calls": Used("x"),
        "reasoning_effort": Used("much", "none", {"chat_template_kwargs": None}),
        "thinking": Used(True, {"type": "disabled"}, {"chat_template_kwargs": None}),
        "chat_template_kwargs": Used([], {"thinking": False}, {"chat_template_kwargs": None}),
        "include_reasoning": Used("x", False, {"chat_template_kwargs": None}),
        "add_generation_prompt": Used("x", False),
        "continue_final_message": Used("x", True, {"messages": CONTINUED}),
        "echo": Refused(True, False),
        "documents": Refused([]),
        "chat_template": Refused("x"),
        "mm_processor_kwargs": Refused({"x": 1}, {}),
        "media_io_kwargs": Refused({"x": 1}, {}),
        "return_prompt_text": Refused(True, False),
        "audio": Refused({}),
        "modalities": Refused(["text", "audio"], ["text"]),
        "functions": Refused([]),
        "function_call": Refused("auto"),
        "store": Refused(True, False),
        "verbosity": Refused("low", "medium"),
        "web_search_options": Refused({}),
        "moderation": Refused({}),
        "service_tier": Refused("flex", "auto"),
        "metadata": Harmless({"a": "b"}),
        "prediction": Harmless({"type": "content", "content": "x"}),
        "prompt_cache_key": Harmless("k"),
        "prompt_cache_options": Harmless({}),
        "prompt_cache_retention": Harmless("24h"),
        "safety_identifier": Harmless("s"),
    },
    COMPLETIONS: {
        **COMMON,
        "prompt": Used({}, "Question: x"),
        "max_tokens": Used("x", 3),
        "logprobs": Used("x", 2),
        "return_tokens_as_token_ids": Used("x", True, {"logprobs": 1}),
        "echo": Used("x", True),
        "suffix": Refused("x", ""),
    },
    TOKENIZE: {
        "model": Used(7, "another"),
        "prompt": Used(7, "y", {"messages": None, "prompt": "x"}),
        "messages": Used("x", [{"role": "user", "content": "Hi"}]),
        "tools": Used({}, TOOLS),
        "return_token_strs": Used("x", True),
        "add_generation_prompt": Used("x", False),
        "chat_template_kwargs": Used([], {"thinking": False}),
        "add_special_tokens": Harmless(False),
        "continue_final_message": Used("x", True, {"messages": CONTINUED}),
        "chat_template": Refused("x"),
        "mm_processor_kwargs": Refused({"x": 1}, {}),
        "media_io_kwargs": Refused({"x": 1}, {}),
    },
    DETOKENIZE: {"model": Used(7, "another"), "tokens": Used("x", [67])},
}

# What vLLM's schemas name, beside what they share with OpenAI's.
VLLM_SAMPLING = """use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words add_special_tokens
    response_format structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
    routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params
    vllm_xargs repetition_detection thinking_token_budget stream_interval guided_json guided_regex guided_choice
    guided_grammar guided_decoding_backend guided_whitespace_pattern logits_processors""".split()
VLLM_CHAT = """include_reasoning echo add_generation_prompt continue_final_message documents chat_template
    chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text""".split()
VLLM = {
    CHAT: VLLM_SAMPLING + VLLM_CHAT,
    COMPLETIONS: [*VLLM_SAMPLING, "echo", "prompt_embeds"],
    TOKENIZE: """model prompt messages add_special_tokens return_token_strs add_generation_prompt continue_final_message
        chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs tools""".split(),
    DETOKENIZE: ["model", "tokens"],
}


def request(path, *changes):
    """BASE[path] with changes; None removes a member."""
    body = dict(BASE[path])
    for change in changes:
        body.update(change)
    return {name: value for name, value in body.items() if value is not None}
