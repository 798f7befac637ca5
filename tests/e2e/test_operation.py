"""What an operator relies on: disconnects, drains, keys, clear refusals."""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from conftest import EDGE_ONLY, FLAGS, FOLDER, ON_GPU, PROGRAM, drafting, gauge, rank_flags, wait_idle
from server_process import ServerProcess

MODEL = os.path.basename(FOLDER)
HANG_S = 300  # ends what hangs, no claim about speed
ON_A_GPU = pytest.mark.skipif(not ON_GPU, reason="drafts are a graph of their own on a GPU")
NOT_ON_A_GPU = pytest.mark.skipif(ON_GPU, reason="several ranks that each hold the whole model are on the CPU")
# The tests' own PERIGEE_MODEL would be --model to the program.
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith("PERIGEE_")}


def disconnect_midway(server, prompt, max_tokens, events):
    connection = server.connection()
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    if events:
        reply = connection.getresponse()
        for _ in range(events):
            reply.readline()
    connection.close()


def test_disconnect_frees_blocks(server):
    def generated():
        return gauge(server.get("/metrics")[1], "vllm:generation_tokens_total")

    before = generated()
    disconnect_midway(server, list(range(300, 900)), 5000, 3)
    assert wait_idle(server)
    assert generated() - before < 5000, "it ran on to its last token"


def test_sigterm_drains(launch):
    server = launch("--drain-seconds", "300")
    events = server.stream("/v1/completions", {"model": MODEL, "prompt": [300, 301], "max_tokens": 200, "temperature": 0,
                                               "ignore_eos": True, "return_token_ids": True})
    ids = next(events)["choices"][0]["token_ids"]
    server.process.send_signal(signal.SIGTERM)
    for event in events:
        ids += event["choices"][0]["token_ids"]
    assert len(ids) == 200
    assert server.process.wait(HANG_S) == 0


# At once: not a second later, in which the rest of the loading would say how far it is.
@EDGE_ONLY
def test_sigterm_while_loading_ends_at_once(tmp_path):
    source = pathlib.Path(FOLDER).parent / "tiny-k2"
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = 400  # seconds of loading
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    server = ServerProcess(PROGRAM, str(tmp_path), ["--device", "cpu", "--load-format", "dummy"], str(tmp_path / "log"))
    deadline = time.monotonic() + HANG_S
    while json.loads(server.get("/readyz")[1]).get("percent") == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(HANG_S) == 0
    said = server.text()
    assert "SIGTERM while loading" in said, said
    after = said.split("SIGTERM while loading", 1)[1]
    assert after.count("weights:") <= 1 and "(100 %)" not in after, said
    server.stop()


@EDGE_ONLY
def test_a_snapshot_of_the_cache_is_served_by_its_name(tmp_path):
    model = tmp_path / "models--org--name"
    revision = model / "snapshots" / "0123"
    (model / "blobs").mkdir(parents=True)
    revision.mkdir(parents=True)
    for file in pathlib.Path(FOLDER).iterdir():
        if file.is_file():
            (model / "blobs" / f"{file.name}.hash").write_bytes(file.read_bytes())
            (revision / file.name).symlink_to(f"../../blobs/{file.name}.hash")
    with ServerProcess(PROGRAM, str(revision), FLAGS, str(tmp_path / "log")) as server:
        assert json.loads(server.get("/v1/models")[1])["data"][0]["id"] == "org/name"


def until_cut(stream):
    """The events of a stream that ends without its [DONE]."""
    with pytest.raises(RuntimeError, match="without"):
        for event in stream:
            yield event


def test_a_lost_device_ends_streams_with_an_error_and_the_process_with_70(launch):
    fault = 3000 if ON_GPU else 500  # long after the last of them has begun
    server = launch("--fail-at-step", str(fault), "--threads", "1")
    body = {"model": MODEL, "prompt": [300, 301], "max_tokens": 4000, "ignore_eos": True}
    streams = [server.stream("/v1/completions", body) for _ in range(3)]
    for stream in streams:
        assert "choices" in next(stream)
    # Of a GPU, two steps are in flight, and the wait for the first may be what sees the second's fault.
    steps = f"({fault - 1}|{fault})" if ON_GPU else fault
    for stream in streams:
        message = [event for event in until_cut(stream) if "error" in event][-1]["error"]["message"]
        assert re.search(f"device_lost: .+, in step {steps} of rank 0", message), message
    assert server.process.wait(HANG_S) == 70


# A rank of a group hangs for ever, and is noticed by those that do not; one alone is noticed by the limit of a step.
# Ranks that draft have more exchanges, after a result is there.
@pytest.mark.parametrize("kind, ranks, lost, mode", [
    ("tensor-parallel", 2, 1, "error"), ("tensor-parallel", 2, 0, "hang"), ("drafting", 2, 1, "error"), ("drafting", 2, 0, "hang"),
    pytest.param("drafting", 1, 0, "error", marks=ON_A_GPU), pytest.param("drafting", 1, 0, "hang", marks=ON_A_GPU),
    pytest.param("tensor-parallel", 4, 2, "hang", marks=EDGE_ONLY),
    pytest.param("replicated", 2, 0, "hang", marks=[EDGE_ONLY, NOT_ON_A_GPU]),
    pytest.param("replicated", 1, 0, "hang", marks=[EDGE_ONLY, NOT_ON_A_GPU])])
def test_a_lost_rank_ends_streams_with_an_error_and_the_process_with_70(launch, kind, ranks, lost, mode):
    # Long after the last of them has begun; a row that drafts may keep four tokens of the 4,000.
    fault = 900 if ON_GPU and kind == "drafting" else 3000 if ON_GPU else 200
    kind_flags = ["--replicated-ranks", str(ranks)] if kind == "replicated" else rank_flags(ranks)
    kind_flags += drafting() if kind == "drafting" else []
    server = launch(*kind_flags, "--fail-rank", str(lost), "--fail-at-step", str(fault), "--fail-mode", mode,
                    "--threads", "1", *(["--step-timeout-seconds", "3"] if ranks == 1 else []))
    body = {"model": MODEL, "prompt": [300, 301], "max_tokens": 4000, "ignore_eos": True}
    streams = [server.stream("/v1/completions", body) for _ in range(3)]
    for stream in streams:
        assert "choices" in next(stream)
    last_token = time.monotonic()
    messages = []
    for stream in streams:
        for event in until_cut(stream):
            if "error" in event:
                messages.append(event["error"]["message"])
            elif not messages:
                last_token = time.monotonic()
    seconds = time.monotonic() - last_token
    assert len(messages) == 3
    steps = "|".join(str(step) for step in range(fault - 2, fault + 1)) if ON_GPU else fault  # two are in flight
    named = r"\d" if ON_GPU and mode == "error" else lost  # the driver reports a GPU's fault to all that reach its memory
    for message in messages:
        assert re.search(f"device_lost: .+, in step ({steps}) of rank {named}", message), message
    try:
        assert server.get("/readyz")[0] == 503
    except OSError:
        pass  # it has ended already
    assert server.process.wait(HANG_S) == 70
    print(f"{kind} {ranks}, {mode}: {seconds:.2f} s from the last token to the last error")
    assert seconds < 30, "the limit is 3 s; the rest is for a busy machine"


@EDGE_ONLY
def test_api_key_guards_every_route(launch):
    server = launch("--api-key", "secret")
    for path in ("/v1/models", "/version", "/tokenizer_info"):
        assert server.get(path)[0] == 401, path
    assert server.get("/livez")[0] == 200 and server.get("/readyz")[0] == 200
    connection = server.connection()
    connection.request("GET", "/v1/models", headers={"Authorization": "Bearer secret"})
    assert connection.getresponse().status == 200
    words = [PROGRAM, "bench", "prefill", "--port", str(server.port), "--lengths", "64"]
    wrong = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, env=PLAIN, check=False)
    assert wrong.returncode != 0 and "401" in wrong.stderr
    subprocess.run([*words, "--api-key", "secret"], timeout=HANG_S, env=PLAIN, check=True)


def test_keys_do_not_share_the_prefix_cache(launch):
    server = launch("--api-key", "alpha", "beta")

    def cached(key, **members):
        body = json.dumps({"prompt": "one two three four " * 60, "max_tokens": 1, "temperature": 0, **members})
        connection = server.connection()
        connection.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {key}",
                                                             "Content-Type": "application/json"})
        reply = connection.getresponse()
        assert reply.status == 200
        return json.loads(reply.read())["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("alpha") == 0
    assert cached("alpha") > 0
    assert cached("beta") == 0, "the second key sees what the first one sent"
    assert cached("beta") > 0
    assert cached("alpha", cache_salt="apart") == 0


def refuse(*arguments):
    done = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=HANG_S, env=PLAIN)
    assert done.returncode in (1, 2), done
    return done.stderr


@EDGE_ONLY
def test_bad_flags_and_folders_are_refused_with_a_way_out(tmp_path):
    assert 'did you mean "--max-model-len"?' in refuse("serve", FOLDER, "--max-model-length", "100")
    draft = json.dumps({"method": "eagle3", "model": str(tmp_path / "draft"), "num_speculative_tokens": 3})
    for command in ("serve", "plan"):
        assert f'--speculative-config: "model" is {tmp_path}/draft, which does not exist' in refuse(command, FOLDER, "--speculative-config", draft)
    too_long = refuse("serve", FOLDER, "--port", "0", "--max-model-len", "100000")
    assert "--max-model-len 100000 is over the model's 16384 positions" in too_long and "weights:" not in too_long
    assert "--tensor-parallel-size 3" in refuse("serve", FOLDER, "-tp", "3", "--port", "0")
    assert "config.json" in refuse("serve", str(tmp_path), "--port", "0")
    assert "--port" in refuse("serve", FOLDER, "--port", "99999999")
    assert "name the model's folder before them" in refuse("serve", "--served-model-name", "a", FOLDER)
    assert "--port needs a value" in refuse("serve", FOLDER, "--port")
    assert "there is no key" in refuse("serve", FOLDER, "--port", "0", "--require-key")
    assert "--api-key is empty" in refuse("serve", FOLDER, "--port", "0", "--api-key", "")
    assert "--host must be an IP address" in refuse("serve", FOLDER, "--port", "0", "--host", "example.org")
    assert "no model given" in refuse("inspect")
    assert "the model folder moonshotai/Kimi-K2.6 does not exist" in refuse("inspect", "moonshotai/Kimi-K2.6")


@pytest.mark.parametrize("size, why", [("6G", "is over the memory that this process may have"),
                                       ("1408M", "the system does not give")])
def test_a_cache_over_or_just_under_the_shells_limit_is_refused(size, why):
    # Less than any machine has, and one thread: those of many cores would be over the limit themselves.
    words = f"ulimit -v 1500000; exec {PROGRAM} serve {FOLDER} --device cpu --threads 1 --port 0 --kv-cache-memory-bytes {size}"
    process = subprocess.run(["bash", "-c", words], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert process.returncode == 1 and "lower --kv-cache-memory-bytes" in process.stderr and why in process.stderr


@EDGE_ONLY
def test_a_decode_cell_without_a_figure_says_why(server):
    done = subprocess.run([PROGRAM, "bench", "decode", "--port", str(server.port), "--contexts", "60000", "--concurrencies", "1"],
                          capture_output=True, text=True, timeout=HANG_S, env=PLAIN)
    assert done.returncode == 1 and "| 60000 | - |" in done.stdout
    assert "context is 16384 tokens" in done.stderr, done.stderr


@EDGE_ONLY
def test_streams_that_never_decode_together_have_no_figure(launch):
    server = launch("--max-num-seqs", "1")
    done = subprocess.run([PROGRAM, "bench", "decode", "--port", str(server.port), "--contexts", "64", "--concurrencies", "1,2",
                           "--output-len", "8"], capture_output=True, text=True, timeout=HANG_S, env=PLAIN)
    assert done.returncode == 1 and re.search(r"\| 64 \| [0-9.]+ \| - \|", done.stdout), done.stdout
    assert "2 streams never decoded all at once" in done.stderr and "--max-num-seqs" in done.stderr


@EDGE_ONLY
def test_streams_of_one_cached_prompt_have_a_prefill_table_too(server):
    done = subprocess.run([PROGRAM, "bench", "decode", "--same-prompt", "--port", str(server.port), "--contexts", "200,60000",
                           "--concurrencies", "1,3", "--output-len", "24"], capture_output=True, text=True, timeout=HANG_S, env=PLAIN)
    assert re.search(r"\| 200 \| [0-9.]+ \| [0-9.]+ \|\n\| 60000 \| - \| - \|\n\nPrefill.*\| 200 \| [0-9]+ \|\n\| 60000 \| - \|",
                     done.stdout, re.DOTALL), done.stdout
    assert done.returncode == 1 and "context is 16384 tokens" in done.stderr


@EDGE_ONLY
def test_one_command_draws_what_sharing_a_cache_costs(tmp_path):
    picture = tmp_path / "curves.svg"
    done = subprocess.run([sys.executable, "tools/dcp_bench.py", "curves", FOLDER, "--program", PROGRAM, "--tp", "2", "--dcp", "1,2",
                           "--flags", "--device cpu --threads 1 --kv-cache-memory-bytes 64M", "--contexts", "128,256,99999",
                           "--batches", "1,2", "--steps", "2", "--exchange-us", "1:5,2:6", "--layers", "4", "--svg", str(picture)],
                          capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"\| [12] \| (128|256) \| [0-9.]+ \| [0-9.]+ \|", done.stdout)) == 8, done.stdout
    assert done.stdout.count("the model has 16384") == 4 and done.stdout.count("predicted") == 2
    assert picture.read_text().count("<polyline") == 4


@EDGE_ONLY
def test_a_full_disk_is_no_success(server):
    with open("/dev/full", "w", encoding="utf-8") as full:
        for words in (["inspect", FOLDER], ["serve", FOLDER, "--print-config"], ["--version"]):
            done = subprocess.run([PROGRAM, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=HANG_S, check=False)
            assert done.returncode == 1 and "is the disk full?" in done.stderr, (words, done)
    bench = ("bench", "serve", "--port", str(server.port), "--num-prompts", "1", "--random-output-len", "2", "--save-result")
    assert "--save-result /dev/full cannot be written: No space left" in refuse(*bench, "/dev/full")
    assert "--save-result /nowhere/result cannot be written: No such" in refuse(*bench, "/nowhere/result")


@EDGE_ONLY
def test_files_that_the_caller_closed_are_not_taken_for_connections():
    words = f"exec {PROGRAM} serve {FOLDER} --device cpu --port 0 <&- >&- 2>&-"
    process = subprocess.Popen(["bash", "-c", words])
    try:
        of_process = pathlib.Path(f"/proc/{process.pid}")
        folder = of_process / "fd"
        while "perigee" not in (of_process / "comm").read_text(encoding="utf-8") or len(os.listdir(folder)) < 5:
            assert process.poll() is None
            time.sleep(0.01)
        assert [os.readlink(folder / str(i)) for i in range(3)] == ["/dev/null"] * 3
    finally:
        process.terminate()
        assert process.wait(HANG_S) == 0


@EDGE_ONLY
def test_a_benchmark_of_nothing_is_refused(server):
    for flag in ("--contexts", "--concurrencies"):
        assert f"{flag} must be numbers from 1 on" in refuse("bench", "decode", "--port", str(server.port), flag, "4,0")


def plan(*words):
    done = subprocess.run([PROGRAM, "plan", *words], capture_output=True, text=True, timeout=HANG_S, env=PLAIN)
    return done.returncode, done.stdout, done.stderr


def logged_number(pattern, server):
    found = re.search(pattern, server.text())
    assert found, f"{pattern} is not in {server.text()}"
    return float(found[1].replace(",", ""))


# What is predicted is what the server then has, and says in vLLM's words.
@pytest.mark.parametrize("tp, dcp", [(1, 1), (2, 2)])
def test_a_plan_is_what_a_server_reserves(launch, tp, dcp):
    flags = [*rank_flags(tp), f"-dcp={dcp}", "--max-model-len", "3200"]
    server = launch(*flags)
    code, out, err = plan(FOLDER, *FLAGS, *flags, "--json")
    assert code == 0, err
    figures = json.loads(out)
    assert figures["tokens"] == logged_number(r"(?:CPU|GPU) KV cache size: ([\d,]+) tokens ", server)
    assert figures["pages"] == logged_number(r" tokens \((\d+) blocks of 64", server)
    concurrency = logged_number(r"Maximum concurrency for 3,200 tokens per request: (\d+\.\d\d)x\n", server)
    assert figures["sequences"] == int(concurrency)
    info = server.get("/metrics")[1].decode()
    assert f'dcp_world_size="{dcp}"' in info and f'num_gpu_blocks="{figures["pages"]}"' in info
    took = re.search(r"Model loading took ([\d.]+) (MiB|GiB)", server.text())
    bytes_taken = float(took[1]) * (1 << (20 if took[2] == "MiB" else 30))
    assert abs(figures["weight_bytes"] / bytes_taken - 1) < 0.03
    assert figures["fits"] and (figures["ranks"], figures["dcp_size"]) == (tp, dcp)


@EDGE_ONLY
def test_a_plan_for_gpus_needs_neither_them_nor_weights(tmp_path):
    shutil.copy(os.path.join(FOLDER, "config.json"), tmp_path)
    code, out, err = plan(str(tmp_path), "--gpus", "2xH200")
    assert code == 0 and "2 on 2 x H200, 139.0 GiB each" in out, err
    code, out, err = plan(str(tmp_path), "--gpus", "2xH200", "--tensor-parallel-size", "4")
    assert code == 2 and "needs 4 GPUs, and there are 2" in err
    code, out, err = plan(str(tmp_path), "--gpus", "4xH200", "--dcp", "4", "--json")
    assert code == 0 and (json.loads(out)["ranks"], json.loads(out)["dcp_size"]) == (4, 4), err
    code, out, err = plan(str(tmp_path), "--gpus", "4xH200", "--dcp", "3")
    assert code == 2 and "--decode-context-parallel-size 3 does not divide --tensor-parallel-size 4" in err
    code, out, err = plan(str(tmp_path), "--gpus", "4xH200", "-tp", "2", "--dcp", "4")
    assert code == 2 and "--decode-context-parallel-size 4 does not divide --tensor-parallel-size 2" in err
    code, out, err = plan(str(tmp_path), "--gpus", "2xT1000")
    assert code == 2 and "known are H100, H200" in err
    transfers = ["--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}', "--kv-side-channel-host", "10.1.50.70"]
    for secret in ([], ["--kv-secret-file", str(tmp_path / "none")]):
        code, out, err = plan(str(tmp_path), "--gpus", "2xH200", *transfers, *secret)
        assert code == 0 and "cache transfers" in out, err


@EDGE_ONLY
def test_what_does_not_fit_is_refused_before_weights_are_read_with_three_ways_out():
    words = (FOLDER, "--device", "cpu", "--kv-cache-memory-bytes", "100000G")
    code, out, err = plan(*words)
    assert code == 1 and "page pool" in out
    for text in (err, refuse("serve", *words, "--port", "0")):
        assert "over the memory that this process may have" in text and text.split("Ways out: ")[1].count(";") == 2
        assert "lower --kv-cache-memory-bytes to" in text and "weights:" not in text


@EDGE_ONLY
def test_a_server_takes_the_scales_of_calibrate(tmp_path, launch):
    scales = tmp_path / "scales.json"
    with open(pathlib.Path(__file__).parents[1] / "data/tiny_tasks/gsm_0shot.jsonl", encoding="utf-8") as tasks:
        (tmp_path / "prompts.jsonl").write_text("".join(next(tasks) for _ in range(50)), encoding="utf-8")
    words = ("calibrate", FOLDER, "--prompts", str(tmp_path / "prompts.jsonl"))
    done = subprocess.run([PROGRAM, *words, "-o", str(scales)], capture_output=True, text=True, timeout=HANG_S, env=PLAIN)
    assert done.returncode == 0 and "tokens/s, 0 s left" in done.stderr, done
    with open(scales, encoding="utf-8") as file:
        read = json.load(file)
    assert len(read["scales"]) == 4 and all(1e-4 < scale < 1 for scale in read["scales"].values()), read
    assert "--prompts names the file" in refuse("calibrate", FOLDER, "-o", str(scales))
    assert "--output names the file" in refuse(*words)
    flags = ("--threads", "1", "--device", "cpu", "--kv-cache-dtype", "fp8")
    assert f"fp8 (e4m3) with the scales of {scales}" in launch(*flags, "--kv-scale", str(scales)).text()
    assert launch(*flags).text().count("uncalibrated") == 1
    assert "fp8_ds_mla (656 bytes" in launch(*flags[:-1], "fp8_ds_mla").text()


def test_inspect():
    done = subprocess.run([PROGRAM, "inspect", FOLDER], capture_output=True, text=True, check=True)
    with open(os.path.join(FOLDER, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    assert config["architectures"][0] in done.stdout
    assert ("INT4" in done.stdout) == ("quantization_config" in config)
    assert ("a checkpoint of it" in done.stdout) == ("linear_attn_config" in config)


@EDGE_ONLY
def test_inspect_sees_what_loading_would_refuse(tmp_path):
    for name in os.listdir(FOLDER):
        shutil.copy(os.path.join(FOLDER, name), tmp_path)
    weights = tmp_path / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1000)
    done = subprocess.run([PROGRAM, "inspect", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "architecture" in done.stdout, done
    assert f"{weights}: the file is truncated" in done.stderr and " 1000 are missing" in done.stderr, done.stderr
    assert "the file is truncated" in refuse("serve", str(tmp_path), "--port", "0", "--device", "cpu")
    weights.unlink()
    subprocess.run([PROGRAM, "inspect", str(tmp_path)], capture_output=True, check=True)  # config.json is enough
