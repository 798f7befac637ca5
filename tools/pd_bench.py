#!/usr/bin/env python3
"""What separating prefill and decode gives on GPUs: tools/pd_bench.py [--build build] [--shared | --nodes P,D] [--layers N].

One node, and then a prefill and a decode node behind the router, get the same load: Kimi-Linear-48B of dummy weights, whole on
P and D GPUs (--nodes, by default 1,1; the one node has P GPUs), or cut to so many layers that both nodes fit one GPU (--shared).
Prints for both: time to the first token of prompts of 32k tokens, and the gaps between the tokens of eight streams without and
with a steady stream of such prompts beside them. On a shared GPU only the first figure says anything. The bars are those of
nodes with GPUs of their own: a first token within 1.05 times one node's plus 5 ms; with prompts beside, a p99 of gaps within 1.1
times that without.

On CPU ranks of one machine, only the time to the first token, of a model with weights:
    tools/pd_bench.py --device cpu --model models/tiny-k2 --context 4096 --backends TCP --flags='--threads 1' --outputs 0
"""
import argparse
import concurrent.futures
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time

from server_process import TOP, RouterProcess, ServerProcess

VOCAB = 160000
STREAMS, GAP_PROMPT = 8, 512
MOST_OUTPUTS_OF_ONE = 400  # one node takes a fifth of a second for a token beside prompts


class Prompts(random.Random):
    """Of token ids below `vocab`."""

    def __init__(self, seed, vocab=VOCAB):
        super().__init__(seed)
        self.vocab = vocab


class Node(ServerProcess):
    """A server on `size` GPUs from the first-th on."""

    def __init__(self, program, model, flags, first, size, log_path):
        self.model = os.path.basename(os.path.normpath(model))
        gpus = ",".join(str(first + i) for i in range(size))
        command = [program, "serve", model, "--port", "0", "--tensor-parallel-size", str(size), *flags]
        self.start(command, log_path, {**os.environ, "CUDA_VISIBLE_DEVICES": gpus})


def cut_model(folder, layers):
    """A folder with the configuration of Kimi-Linear-48B's first layers."""
    with open(f"{TOP}/bench/models/kimi-linear-48b/config.json", encoding="utf-8") as file:
        config = json.load(file)
    config["num_hidden_layers"] = layers
    for kind in ("kda_layers", "full_attn_layers"):
        config["linear_attn_config"][kind] = [layer for layer in config["linear_attn_config"][kind] if layer <= layers]
    path = os.path.join(folder, f"kimi-linear-{layers}l")
    os.makedirs(path)
    with open(f"{path}/config.json", "w", encoding="utf-8") as file:
        json.dump(config, file)
    return path


def request(rng, tokens, outputs):
    return {"prompt": [rng.randrange(rng.vocab) for _ in range(tokens)], "max_tokens": outputs, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True}


def times(server, body):
    """When each event of tokens came, after the request was sent."""
    begin = time.monotonic()
    came = []
    for event in server.stream("/v1/completions", body):
        if "choices" not in event:
            raise RuntimeError(event)
        if event["choices"][0]["token_ids"]:
            came.append(time.monotonic() - begin)
    return came


def quantile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))]


def first_tokens(server, rng, context, turns):
    times(server, request(rng, min(2048, context), 2))
    return [times(server, request(rng, context, 2))[0] for _ in range(turns)]


def send_prompts(server, rng, context, stop, sent):
    """Prompts one after the other, until told to stop."""
    while not stop.is_set():
        times(server, request(rng, context, 1))
        sent.value += 1


def gaps(server, rng, context, outputs, loaded):
    """-> the gaps of all streams, and how many prompts were computed meanwhile. Prompts come from a process of their own: making
    one holds the interpreter for longer than a token takes."""
    fork = multiprocessing.get_context("fork")
    stop, sent = fork.Event(), fork.Value("i", 0)
    if not loaded:
        stop.set()
    prompts = fork.Process(target=send_prompts, args=(server, Prompts(rng.random(), rng.vocab), context, stop, sent))
    bodies = [request(rng, GAP_PROMPT, outputs) for _ in range(STREAMS)]
    prompts.start()
    try:
        with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
            streams = list(pool.map(lambda body: times(server, body), bodies))
    finally:
        stop.set()  # also where a stream fails
        prompts.join()
    if prompts.exitcode != 0:
        raise RuntimeError("the prompts beside the streams failed")
    return [b - a for stream in streams for a, b in zip(stream, stream[1:])], sent.value


def measure(name, server, arguments, vocab, outputs):
    rng = Prompts(5, vocab)  # the same load for every server
    context = arguments.context
    firsts = first_tokens(server, rng, context, arguments.turns)
    figures = {"first_s": statistics.median(firsts)}
    print(f"{name}: first token of {context} after {1e3 * figures['first_s']:.1f} ms (median; {', '.join(f'{1e3 * s:.1f}' for s in firsts)})")
    for loaded in (False, True) if outputs > 0 else ():
        found, prompts = gaps(server, rng, context, outputs, loaded)
        figures["p99_loaded_s" if loaded else "p99_s"] = quantile(found, 0.99)
        print(f"{name}: gaps of {STREAMS} streams {'beside ' + str(prompts) + ' prompts' if loaded else 'alone'}: "
              f"p50 {1e3 * quantile(found, 0.5):.2f} ms, p90 {1e3 * quantile(found, 0.9):.2f} ms, p98 {1e3 * quantile(found, 0.98):.2f} ms, "
              f"p99 {1e3 * quantile(found, 0.99):.2f} ms, most {1e3 * max(found):.1f} ms", flush=True)
    return figures


def verdicts(one, pair):
    """-> a line for each bar."""
    most = 1.05 * one["first_s"] + 0.005
    first = f"first token: {1e3 * pair['first_s']:.1f} ms, bar {1e3 * most:.1f} ms: {'met' if pair['first_s'] <= most else 'MISSED'}"
    if "p99_s" not in pair:
        return [first]
    ratio = pair["p99_loaded_s"] / pair["p99_s"]
    return [first, f"p99 of gaps beside prompts: {ratio:.2f} of that without (one node {one['p99_loaded_s'] / one['p99_s']:.2f}), "
            f"bar 1.1: {'met' if ratio <= 1.1 else 'MISSED'}"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--nodes", type=lambda text: [int(size) for size in text.split(",")], default=[1, 1], help="GPUs of each")
    parser.add_argument("--shared", action="store_true", help="one GPU for both")
    parser.add_argument("--layers", type=int, help="default: 27, all, or 12 on a shared GPU")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--outputs", type=int, default=400, help="tokens of each stream whose gaps are measured; 0: none are")
    parser.add_argument("--turns", type=int, default=5, help="prompts whose first token is measured")
    parser.add_argument("--backends", default="CUDA_IPC,TCP")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cache", default="8G")
    parser.add_argument("--model", help="a folder with weights, in place of Kimi-Linear-48B's layers")
    parser.add_argument("--flags", default="", help="further flags of every server")
    arguments = parser.parse_args()
    program = os.path.abspath(f"{arguments.build}/perigee")
    layers = arguments.layers or (12 if arguments.shared else 27)
    prefill_size, decode_size = arguments.nodes
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or cut_model(folder, layers)
        with open(f"{model}/config.json", encoding="utf-8") as file:
            vocab = min(VOCAB, json.load(file)["vocab_size"])
        flags = [*([] if arguments.model else ["--load-format", "dummy"]), "--device", arguments.device, "--max-model-len",
                 str(arguments.context + 1024), "--kv-cache-memory-bytes", arguments.cache, *arguments.flags.split()]
        print(f"$ perigee serve {os.path.basename(model)} {' '.join(flags)}, prefill on {prefill_size} ranks, decode on {decode_size}")
        with Node(program, model, flags, 0, prefill_size, f"{folder}/one") as server:
            one = measure("one node", server, arguments, vocab, min(arguments.outputs, MOST_OUTPUTS_OF_ONE))

        def role(name):
            return ["--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": name,
                                                        "kv_connector_extra_config": {"backends": arguments.backends.split(",")}})]
        first = 0 if arguments.shared else prefill_size
        producer = [*flags, *role("kv_producer"), "--kv-side-channel-port", "0"]
        with Node(program, model, producer, 0, prefill_size, f"{folder}/prefill") as prefill, \
                Node(program, model, [*flags, *role("kv_consumer")], first, decode_size, f"{folder}/decode") as decode:
            router = [program, "router", "--port", "0", "--vllm-pd-disaggregation", "--prefill", f"http://127.0.0.1:{prefill.port}",
                      "--decode", f"http://127.0.0.1:{decode.port}"]
            with RouterProcess(router, f"{folder}/router") as pair:
                figures = measure("pair", pair, arguments, vocab, arguments.outputs)
            for server in (prefill, decode):
                print("\n".join(line for line in server.text().splitlines() if "cache transfers from" in line or "did not arrive" in line))
    print("\n".join(verdicts(one, figures)))


if __name__ == "__main__":
    main()
