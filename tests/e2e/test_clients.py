"""What agent authors run, against random weights: instructor, LangChain, LlamaIndex, pydantic-ai, openai and litellm ask for
objects and calls, and get valid ones. The clients have an environment of their own (clients.txt), which `make check`
installs: some of them pin an older openai than the other tests use."""
import os
import pathlib
import subprocess

import pytest

from conftest import EDGE_ONLY, FOLDER, TOP, start

PYTHON = TOP / ".venv-clients" / "bin" / "python"
CASES = pathlib.Path(__file__).with_name("client_cases.py")
CLIENTS = {
    "instructor": "instructor_tools,instructor_tools_strict,instructor_json,instructor_json_schema",
    "langchain": "langchain_json_schema,langchain_function_calling,langchain_strict,langchain_json_mode,langchain_streamed,langchain_any_tool",
    "llama_index": "llama_index_tools,llama_index_chat",
    "pydantic_ai": "pydantic_ai_tool,pydantic_ai_native",
    "openai": "openai_parse,openai_parse_tools,openai_stream_parse",
    "litellm": "litellm_json_mode,litellm_model",
}
pytestmark = [EDGE_ONLY, pytest.mark.skipif(not PYTHON.exists() and not os.environ.get("CI"), reason="tools/setup check installs the clients")]


@pytest.fixture(scope="module")
def random_server(tmp_path_factory):
    with start(tmp_path_factory, "--threads", "1", "--load-format", "dummy") as running:
        running.wait_ready()
        yield running


@pytest.mark.parametrize("client", CLIENTS)
def test_client(random_server, client):
    command = [str(PYTHON), str(CASES), CLIENTS[client], random_server.url, os.path.basename(FOLDER)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False,
                          env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"})
    assert told.returncode == 0, told.stdout + told.stderr[-4000:]
    assert told.stdout.count(" ok\n") == len(CLIENTS[client].split(","))
