"""Launch lines that people use elsewhere start here unchanged, except for the model's folder.

Variables that are not part of the line put the ranks on the CPU and give them a small cache.
"""
import fcntl
import json
import os
import re
import tempfile

import pytest

from conftest import EDGE_ONLY, FOLDER, PROGRAM, TOP, gauge, wait_idle
from server_process import RouterProcess, ServerProcess

# vllm-project/vllm 34795, of 8 GPUs, with the flag that its author adds for more cache; and the sizes of that request's own
# test, on 4.
LINE_8 = (
    "NCCL_P2P_LEVEL=SYS VLLM_LOG_STATS_INTERVAL=1 NCCL_GRAPH_FILE=/mnt/nccl_graph_opt.xml VLLM_TEST_FORCE_FP8_MARLIN=1 "
    "VLLM_MARLIN_USE_ATOMIC_ADD=1 VLARLIN_INPUT_DTYPE=fp8 vllm serve moonshotai/Kimi-K2.5 --served-model-name Kimi-K2.5 "
    "--trust-remote-code --host 0.0.0.0 --port 5000 --tensor-parallel-size 8 --pipeline-parallel-size 1 "
    "--enable-chunked-prefill --enable-prefix-caching --load-format fastsafetensors --tool-call-parser kimi_k2 "
    "--enable-auto-tool-choice --reasoning-parser kimi_k2 --async-scheduling --gpu-memory-utilization 0.93 "
    "--max-num-batched-tokens 4096 --mm-processor-cache-gb 0 --mm-encoder-tp-mode weights --language-model-only "
    "--attention-backend TRITON_MLA --kv-cache-dtype fp8 --decode-context-parallel-size 8")
LINE_4 = (
    "vllm serve deepseek-ai/DeepSeek-V2-Lite-Chat --served-model-name DeepSeek-V2-Lite-Chat --trust-remote-code "
    "--port 5000 --tensor-parallel-size 4 --decode-context-parallel-size 4 --kv-cache-dtype fp8")


# vllm-project/vllm 40608: its two launch lines, on 8 GPUs.
LINE_K25 = (
    "VLLM_SPECULATIVE_DISABLE_ABOVE_SEQ_LEN=7000 VLLM_ENABLE_PCIE_ALLREDUCE=1 NCCL_P2P_LEVEL=SYS "
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1 NCCL_GRAPH_FILE=/path/to/nccl_graph_opt.xml "
    "VLLM_LOG_STATS_INTERVAL=1 VLLM_TEST_FORCE_FP8_MARLIN=1 VLLM_MARLIN_USE_ATOMIC_ADD=1 "
    "VLLM_MARLIN_INPUT_DTYPE=fp8 python -m vllm.entrypoints.openai.api_server --model moonshotai/Kimi-K2.5 "
    "--served-model-name Kimi-K2.5 --trust-remote-code --host 0.0.0.0 --port 5000 --tensor-parallel-size 8 "
    "--pipeline-parallel-size 1 --enable-chunked-prefill --enable-prefix-caching --load-format fastsafetensors "
    "--async-scheduling --gpu-memory-utilization 0.90 --max-num-batched-tokens 32768 --max-num-seqs 128 "
    "--mm-processor-cache-gb 0 --mm-encoder-tp-mode weights --attention-backend TRITON_MLA --kv-cache-dtype fp8 "
    "--decode-context-parallel-size 4 --tool-call-parser kimi_k2 --enable-auto-tool-choice "
    "--reasoning-parser kimi_k2 "
    r"""--speculative-config '{"model":"lightseekorg/kimi-k2.5-eagle3-mla","method":"eagle3","num_speculative_tokens":3,"draft_attention_backend":"TRITON_MLA","""
    r""""draft_kv_cache_dtype":"fp8","rejection_sample_method":"probabilistic"}'""")
LINE_K26 = (
    "VLLM_SPECULATIVE_DISABLE_ABOVE_SEQ_LEN=16384 VLLM_ENABLE_PCIE_ALLREDUCE=1 NCCL_P2P_LEVEL=SYS "
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1 NCCL_GRAPH_FILE=/path/to/nccl_graph_opt.xml "
    "VLLM_LOG_STATS_INTERVAL=1 VLLM_TEST_FORCE_FP8_MARLIN=1 VLLM_MARLIN_USE_ATOMIC_ADD=1 "
    "VLLM_MARLIN_INPUT_DTYPE=fp8 python -m vllm.entrypoints.openai.api_server --model moonshotai/Kimi-K2.6 "
    "--served-model-name Kimi-K2.6 --trust-remote-code --host 0.0.0.0 --port 5000 --tensor-parallel-size 8 "
    "--pipeline-parallel-size 1 --enable-chunked-prefill --enable-prefix-caching --load-format fastsafetensors "
    "--async-scheduling --gpu-memory-utilization 0.94 --max-num-batched-tokens 4096 --max-num-seqs 128 "
    "--mm-processor-cache-gb 0 --mm-encoder-tp-mode weights --language-model-only --attention-backend TRITON_MLA "
    "--kv-cache-dtype fp8 --decode-context-parallel-size 8 --tool-call-parser kimi_k2 --enable-auto-tool-choice "
    "--reasoning-parser kimi_k2 "
    r"""--speculative-config '{"model":"lightseekorg/kimi-k2.6-eagle3","method":"eagle3","num_speculative_tokens":3,"draft_attention_backend":"FLASH_ATTN","""
    r""""draft_kv_cache_dtype":"bfloat16","use_local_argmax_reduction":true,"rejection_sample_method":"probabilistic"}'""")
# vllm-project/vllm 44848: a prefill server, a decode server and their router. Only the router's line has hosts, of its author's
# machine.
LINES_PD = (
    r"""CUDA_VISIBLE_DEVICES=0,1,2,3 \
VLLM_SSM_CONV_STATE_LAYOUT=DS \
VLLM_KV_CACHE_LAYOUT=HND \
VLLM_NIXL_SIDE_CHANNEL_PORT=5560 \
UCX_NET_DEVICES=all \
vllm serve moonshotai/Kimi-Linear-48B-A3B-Instruct \
  --trust-remote-code \
  --port 8100 \
  --host 0.0.0.0 \
  --tensor-parallel-size 4 \
  --gpu-memory-utilization 0.9 \
  --no-disable-hybrid-kv-cache-manager \
  --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}' \
  --served-model-name kimi \
  --no-async-scheduling""",
    r"""CUDA_VISIBLE_DEVICES=4,5,6,7 \
VLLM_SSM_CONV_STATE_LAYOUT=DS \
VLLM_KV_CACHE_LAYOUT=HND \
VLLM_NIXL_SIDE_CHANNEL_PORT=5660 \
UCX_NET_DEVICES=all \
vllm serve moonshotai/Kimi-Linear-48B-A3B-Instruct \
  --trust-remote-code \
  --port 8200 \
  --host 0.0.0.0 \
  --tensor-parallel-size 4 \
  --gpu-memory-utilization 0.9 \
  --no-disable-hybrid-kv-cache-manager \
  --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}' \
  --served-model-name kimi \
  --no-async-scheduling""",
    "vllm-router --policy round_robin  --vllm-pd-disaggregation   --prefill http://10.1.50.70:8100     "
    "--decode http://10.1.50.70:8200     --host 0.0.0.0     --port 8000     --intra-node-data-parallel-size 1")
LINE_TP8 = r"""vllm serve moonshotai/Kimi-Linear-48B-A3B-Instruct/ \
  --tensor-parallel 8 \
  --served-model-name kimi \
  --trust-remote-code \
  --gpu-memory-utilization 0.9 \
  --port 8000 \
  --host 0.0.0.0"""
# The bundled draft with latent attention has 4 heads, too few for 8 ranks.
DRAFTS = {name: f"{FOLDER}-eagle3" for name in ("lightseekorg/kimi-k2.5-eagle3-mla", "lightseekorg/kimi-k2.6-eagle3")}


class LineServer(ServerProcess):
    """The server of a shell's line, in which `vllm`, or `python -m` with vLLM's module, is perigee."""

    def __init__(self, line, folder):
        os.symlink(PROGRAM, folder / "vllm")
        python = folder / "python"
        python.write_text(f'#!/bin/bash\n[ "$1 $2" = "-m vllm.entrypoints.openai.api_server" ] && exec {PROGRAM} serve "${{@:3}}"\n')
        python.chmod(0o755)
        plain = {name: value for name, value in os.environ.items() if not name.startswith("PERIGEE_")}
        environment = {**plain, "PATH": f"{folder}:{os.environ['PATH']}", "PERIGEE_DEVICE": "cpu", "PERIGEE_THREADS": "1",
                       "PERIGEE_KV_CACHE_MEMORY_BYTES": "16M"}
        self.start(["bash", "-c", f"exec env {line}"], str(folder / "log"), environment)


@EDGE_ONLY
@pytest.mark.parametrize("line, tp, dcp", [(LINE_8, 8, 8), (LINE_4, 4, 4), (LINE_K25, 8, 4), (LINE_K26, 8, 8)])
def test_a_line_starts_and_answers(tmp_path, line, tp, dcp):
    name = re.search(r"--served-model-name (\S+)", line)[1]
    model = re.search(r"(?:vllm serve|--model) (\S+)", line)[1]
    drafts = "speculative-config" in line
    for draft, folder in DRAFTS.items():
        line = line.replace(f'"{draft}"', f'"{folder}"')
    # The line names its port: one test at a time has it.
    with open(os.path.join(tempfile.gettempdir(), "perigee-seed-lines.lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with LineServer(line.replace(f" {model} ", f" {FOLDER} ", 1), tmp_path) as server:
            assert server.port == 5000
            messages = [{"role": "user", "content": "What is 3 plus 4?"}]
            body = {"model": name, "messages": messages, "temperature": 0, "max_tokens": 24, "return_token_ids": True}
            status, reply = server.post("/v1/chat/completions", body)
            assert status == 200 and reply["usage"]["completion_tokens"] > 0, reply
            # Over more blocks than there are ranks, and again from the cache.
            prompt = list(range(300, 300 + 64 * tp + 40))
            body = {"model": name, "prompt": prompt, "temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
            replies = [server.post("/v1/completions", body) for _ in range(2)]
            assert [status for status, _ in replies] == [200, 200], replies
            assert [len(reply["choices"][0]["token_ids"]) for _, reply in replies] == [8, 8]
            assert replies[1][1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64 * tp
            metrics = server.get("/metrics")[1]
            assert f'dcp_world_size="{dcp}"' in metrics.decode()
            if drafts:
                rows, accepted = (gauge(metrics, f"vllm:spec_decode_num_{what}_total") for what in ("drafts", "accepted_tokens"))
                assert rows > 0 and accepted > 0, (rows, accepted)
            assert json.loads(server.get("/v1/models")[1])["data"][0]["id"] == name
            assert wait_idle(server)
            log = server.text()
            server.process.terminate()
            assert server.process.wait(300) == 0
    assert "fp8 (e4m3)" in log and f"blocks of 64 on each of {dcp} ranks" in log, log
    if drafts:
        assert "VLLM_SPECULATIVE_DISABLE_ABOVE_SEQ_LEN (--speculation-max-context does this)" in log, log
        assert log.count("use_local_argmax_reduction has no effect") == line.count("use_local_argmax_reduction"), log
    for flag in re.findall(r"--(?:trust\S*|attention-backend|mm-\S*|\S*-parser|async-scheduling|enable-auto\S*|gpu-memory\S*)", line):
        assert f"{flag} has no effect" in log, log


@EDGE_ONLY
def test_the_lines_of_44848_start_and_answer(tmp_path):
    def with_model(line):
        return line.replace("moonshotai/Kimi-Linear-48B-A3B-Instruct", str(TOP / "models/tiny-kimi-linear"))

    def folder(name):
        (tmp_path / name).mkdir()
        return tmp_path / name

    program = tmp_path / "vllm-router"
    program.write_text(f'#!/bin/bash\nexec {PROGRAM} router "$@"\n')
    program.chmod(0o755)
    line = LINES_PD[2].replace("10.1.50.70", "127.0.0.1")
    body = {"model": "kimi", "prompt": list(range(300, 500)), "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    with open(os.path.join(tempfile.gettempdir(), "perigee-seed-lines.lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with LineServer(with_model(LINES_PD[0]), folder("prefill")) as prefill, \
                LineServer(with_model(LINES_PD[1]), folder("decode")) as decode, \
                RouterProcess(["bash", "-c", f"exec env PATH={tmp_path}:{os.environ['PATH']} {line}"], str(tmp_path / "log")) as router:
            assert [each.port for each in (prefill, decode, router)] == [8100, 8200, 8000]
            status, reply = router.post("/v1/completions", body)
            assert status == 200 and reply["usage"]["completion_tokens"] == 8, reply
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 199, reply
            assert "listening on 127.0.0.1:5560" in prefill.text()
            assert gauge(prefill.get("/metrics")[1], "perigee:kv_leases_granted_total") == 1
            metrics = decode.get("/metrics")[1]
            assert gauge(metrics, "perigee:kv_transfers_total") == 1 and gauge(metrics, "perigee:nixl_num_failed_transfers_total") == 0
        with LineServer(LINE_TP8.replace("moonshotai/Kimi-Linear-48B-A3B-Instruct", FOLDER), folder("one")) as one:
            assert one.port == 8000
            assert one.post("/v1/completions", body)[1]["usage"]["completion_tokens"] == 8
