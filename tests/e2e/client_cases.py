"""What agent authors run, each against a server at URL: `client_cases.py CASE URL MODEL`. On random weights: only the form
that a client asks for makes its reply valid. Needs the packages of clients.txt.
"""
import asyncio
import json
import sys
import typing

import pydantic

ASK = "Who won the race?"
MAX_TOKENS = 200


class Lap(pydantic.BaseModel):
    number: int = pydantic.Field(ge=1, le=99)
    seconds: float


class Runner(pydantic.BaseModel):
    """A runner of the race."""

    name: str = pydantic.Field(max_length=20)
    club: typing.Literal["红队", "blue", "green"]
    age: typing.Optional[int]
    laps: list[Lap]


def openai_client(url, kind="OpenAI"):
    import openai

    return getattr(openai, kind)(base_url=url, api_key="none", max_retries=0, timeout=120)


def instructor_mode(url, model, mode, response_model=Runner):
    import instructor

    client = instructor.from_openai(openai_client(url), mode=getattr(instructor.Mode, mode))
    return client.chat.completions.create(model=model, response_model=response_model, max_retries=0, max_tokens=MAX_TOKENS, seed=1,
                                          messages=[{"role": "user", "content": ASK}])


class Anything(pydantic.BaseModel):
    """Any object: JSON mode promises no more."""

    model_config = pydantic.ConfigDict(extra="allow")


def instructor_tools(url, model):
    return instructor_mode(url, model, "TOOLS")


def instructor_tools_strict(url, model):
    return instructor_mode(url, model, "TOOLS_STRICT")


def instructor_json(url, model):
    assert isinstance(instructor_mode(url, model, "JSON", Anything), Anything)


def instructor_json_schema(url, model):
    return instructor_mode(url, model, "JSON_SCHEMA")


def langchain_of(url, model):
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=url, api_key="none", model=model, max_tokens=MAX_TOKENS, max_retries=0, seed=2)


def langchain_json_schema(url, model):
    return langchain_of(url, model).with_structured_output(Runner, method="json_schema").invoke(ASK)


def langchain_function_calling(url, model):
    return langchain_of(url, model).with_structured_output(Runner, method="function_calling").invoke(ASK)


def langchain_strict(url, model):
    return langchain_of(url, model).with_structured_output(Runner, method="function_calling", strict=True).invoke(ASK)


def langchain_json_mode(url, model):
    assert isinstance(langchain_of(url, model).with_structured_output(None, method="json_mode").invoke(ASK + " Answer in JSON."), dict)


def langchain_streamed(url, model):
    return list(langchain_of(url, model).with_structured_output(Runner, method="json_schema").stream(ASK))[-1]


def langchain_any_tool(url, model):
    from langchain_core.tools import tool

    @tool
    def get_weather(city: str, days: int) -> str:
        """The weather of a city."""
        return city * days

    calls = langchain_of(url, model).bind_tools([get_weather], tool_choice="any").invoke(ASK).tool_calls
    assert calls and all(call["name"] == "get_weather" and set(call["args"]) == {"city", "days"} for call in calls), calls


def llama_index_of(url, model):
    from llama_index.core.base.llms.types import LLMMetadata
    from llama_index.llms.openai import OpenAI

    class Served(OpenAI):
        """The class looks models up in a list of OpenAI's own; this one is not in it."""

        @property
        def metadata(self):
            return LLMMetadata(context_window=16384, num_output=MAX_TOKENS, is_chat_model=True, is_function_calling_model=True, model_name=self.model)

    return Served(api_base=url, api_key="none", model=model, max_tokens=MAX_TOKENS, max_retries=0)


def llama_index_tools(url, model):
    from llama_index.core.prompts import PromptTemplate

    return llama_index_of(url, model).structured_predict(Runner, PromptTemplate(ASK))


def llama_index_chat(url, model):
    from llama_index.core.llms import ChatMessage

    return llama_index_of(url, model).as_structured_llm(Runner).chat([ChatMessage(role="user", content=ASK)]).raw


def pydantic_ai_run(url, model, output):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    served = OpenAIChatModel(model, provider=OpenAIProvider(base_url=url, api_key="none"))
    return asyncio.run(Agent(served, output_type=output, retries=0).run(ASK, model_settings={"max_tokens": MAX_TOKENS, "seed": 3})).output


def pydantic_ai_tool(url, model):
    return pydantic_ai_run(url, model, Runner)


def pydantic_ai_native(url, model):
    from pydantic_ai import NativeOutput

    return pydantic_ai_run(url, model, NativeOutput(Runner))


def openai_parse(url, model):
    reply = openai_client(url).chat.completions.parse(model=model, messages=[{"role": "user", "content": ASK}], response_format=Runner,
                                                      max_tokens=MAX_TOKENS)
    return reply.choices[0].message.parsed


def openai_parse_tools(url, model):
    import openai

    reply = openai_client(url).chat.completions.parse(model=model, messages=[{"role": "user", "content": ASK}], max_tokens=MAX_TOKENS,
                                                      tools=[openai.pydantic_function_tool(Runner)], tool_choice="required")
    return reply.choices[0].message.tool_calls[0].function.parsed_arguments


def openai_stream_parse(url, model):
    with openai_client(url).chat.completions.stream(model=model, messages=[{"role": "user", "content": ASK}], response_format=Runner,
                                                    max_tokens=MAX_TOKENS) as stream:
        return stream.get_final_completion().choices[0].message.parsed


def litellm_ask(url, model, **members):
    import litellm

    reply = litellm.completion(model=f"openai/{model}", api_base=url, api_key="none", max_tokens=MAX_TOKENS, num_retries=0,
                               messages=[{"role": "user", "content": ASK}], **members)
    return json.loads(reply.choices[0].message.content)


def litellm_json_mode(url, model):
    assert isinstance(litellm_ask(url, model, response_format={"type": "json_object"}), dict)


def litellm_model(url, model):
    return Runner.model_validate(litellm_ask(url, model, response_format=Runner))


CASES = {name: case for name, case in list(globals().items())
         if callable(case) and name.split("_")[0] in ("instructor", "langchain", "llama", "pydantic", "openai", "litellm")
         and name not in ("openai_client", "instructor_mode", "langchain_of", "llama_index_of", "pydantic_ai_run", "litellm_ask")}


def main(names, url, model):
    for name in names.split(","):
        got = CASES[name](url, model)
        assert got is None or isinstance(got, Runner), f"{name} gave {got!r}"
        print(name, "ok", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
