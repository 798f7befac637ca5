"""Trains tiny-k2 or tiny-kimi-linear on one GPU in resumable pieces.

    python3 train.py --model tiny-k2 --state STATE --until 3000        first piece
    python3 train.py --model tiny-k2 --state STATE                     goes on to the last step
    python3 export.py --state STATE --out ../../models/tiny-k2

A step is two micro-batches of 65,536 tokens: rows of 1,024 with word problems
and tool chats, and retrieval rows of 1,024 to 16,384. Its data depend on the
seed and the step's number only, so a resumed run sees what an unbroken one
sees.
"""

import argparse
import math
import multiprocessing
import os
import random
import time

import numpy as np
import torch
import torch.nn.functional as F

import bpe
import configs
import documents
import model as tiny

MICRO_TOKENS = 65536
SHORT_ROW = 1024
# Retrieval by parts of the run: the share at which a part ends, row lengths in turn, the longest text. Short texts
# teach the lookup faster.
SCHEDULES = {
    "tiny-k2": ((0.06, (1024,), None), (0.45, (4096,), None), (1.0, (4096, 16384), None)),
    "tiny-kimi-linear": ((0.06, (1024,), 160), (0.12, (1024,), None), (0.4, (4096,), None), (1.0, (4096, 16384), None)),
}
# Weight of the loss on where MLA looks when it copies a retrieved digit.
GUIDANCE = {"tiny-k2": 0.0, "tiny-kimi-linear": 0.3}
SEED = 1234


def retrieval_rows(schedule, share, step):
    """Row length and longest text of a step after `share` of the run."""
    _, lengths, longest = next(part for part in schedule if share < part[0])
    return lengths[step % len(lengths)], longest


def make_batch(builder, step, total):
    """Of the two micro-batches (tokens, labels), and the second one's lookups [rows, n, 2], int16."""
    out = []
    for kind in range(2):
        rng = random.Random(SEED * 1000003 + step * 2 + kind)
        length, longest = retrieval_rows(SCHEDULES[builder.name], step / total, step) if kind else (SHORT_ROW, None)
        rows = [builder.retrieval_row(rng, length, longest) if kind else builder.short_row(rng, length)
                for _ in range(MICRO_TOKENS // length)]
        out += [np.array([row for row, _ in rows], np.int16), np.array([labels for _, labels in rows], np.int16)]
    found = [builder.lookups(*row) for row in rows]
    lookups = np.full((len(rows), max(map(len, found)), 2), -1, np.int16)
    for at, pairs in enumerate(found):
        lookups[at, :len(pairs)] = pairs
    return [*out, lookups]


def worker(queue, builder, first, stride, total):
    for step in range(first, total, stride):
        queue.put(make_batch(builder, step, total))


def start_workers(builder, first, total, workers):
    """One queue per worker; worker w makes every workers-th batch."""
    context = multiprocessing.get_context("fork")
    queues = [context.Queue(maxsize=4) for _ in range(workers)]
    for at, queue in enumerate(queues):
        context.Process(target=worker, args=(queue, builder, first + at, workers, total), daemon=True).start()
    return queues


def learning_rate(step, total, peak):
    """Linear warm-up, cosine to 2 % of the peak."""
    if step < 200:
        return peak * (step + 1) / 200
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / total)))


def make_optimiser(net):
    decayed = [p for p in net.parameters() if p.dim() >= 2]
    plain = [p for p in net.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-9, fused=torch.cuda.is_available())


def micro_loss(net, tokens, labels, lookups=None):
    """Mean loss over the supervised positions, digit accuracy, expert loads, guidance loss."""
    hidden, loads, guidance = net(tokens, lookups)
    flat = labels.flatten()
    at = (flat >= 0).nonzero().squeeze(1)
    target = flat[at]
    logits = F.linear(hidden.index_select(0, at), net.head.to(hidden.dtype)).float()
    loss = F.cross_entropy(logits, target)
    with torch.no_grad():
        digit = (target >= net.digits[0]) & (target <= net.digits[1])
        right = (logits.argmax(-1) == target) & digit
        accuracy = right.sum() / digit.sum().clamp_min(1)
    return loss, accuracy, loads, sum(guidance) / max(1, len(guidance))


@torch.no_grad()
def balance(net, loads, speed):
    """Aux-loss-free balancing: the bias moves by the sign of the load's error."""
    moe_layers = [layer for layer in net.layers if layer.is_moe]
    for layer, load in zip(moe_layers, loads):
        layer.bias += speed * torch.sign(load.mean() - load)
        layer.bias -= layer.bias.mean()


def train_step(net, optimiser, arrays, rate, peak):
    """Loss and digit accuracy of both micro-batches, the guidance loss; summed expert loads."""
    device, weight = net.embed.device, net.guidance
    arrays = [torch.from_numpy(x).to(device, torch.int64, non_blocking=True) for x in arrays]
    short, right, loads, _ = micro_loss(net, *arrays[:2])
    short.backward()
    lookups = arrays[4] if weight else None
    retrieval, found, more, guidance = micro_loss(net, *arrays[2:4], lookups)
    (retrieval + weight * guidance).backward()
    total_loads = [a + b for a, b in zip(loads, more)]
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    for group in optimiser.param_groups:
        group["lr"] = rate
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    balance(net, total_loads, 1e-3 * rate / peak)
    return [x.detach() for x in (short, right, retrieval, found, torch.as_tensor(guidance))], total_loads


def save_state(path, model, net, optimiser, step):
    torch.save({"model": model, "net": net.state_dict(), "optimiser": optimiser.state_dict(), "step": step}, path + ".new")
    os.replace(path + ".new", path)


def choose_kernels():
    """cuDNN takes 192-wide keys with 128-wide values; elsewhere any backend will do. f32 products may use TF32."""
    torch.set_float32_matmul_precision("high")
    if torch.cuda.is_available():
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(True)


def run(args):
    saved = torch.load(args.state, map_location="cpu", weights_only=True) if os.path.exists(args.state) else None
    first = saved["step"] if saved else 0
    last = min(args.until or args.steps, args.steps)
    tokenizer = bpe.Tokenizer(args.vocabulary)
    # Forked before the GPU is touched.
    queues = start_workers(documents.RowBuilder(tokenizer, args.model), first, args.steps, args.workers)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    choose_kernels()
    torch.manual_seed(SEED)
    net = tiny.TinyKimi(configs.CONFIGS[args.model]).to(device)
    net.digits = (tokenizer.ranks[b"0"], tokenizer.ranks[b"9"])
    net.guidance = GUIDANCE[args.model]
    optimiser = make_optimiser(net)
    if saved:
        net.load_state_dict(saved["net"])
        optimiser.load_state_dict(saved["optimiser"])
    if device == "cuda":
        net.compile()
    start = logged = time.time()
    done = first
    for step in range(first, last):
        arrays = queues[(step - first) % args.workers].get()
        rate = learning_rate(step, args.steps, args.rate)
        stats, loads = train_step(net, optimiser, arrays, rate, args.rate)
        done = step + 1
        if done % args.log_every == 0:
            values = [value.item() for value in stats]
            now = time.time()
            speed = args.log_every * 2 * MICRO_TOKENS / (now - logged)
            logged = now
            busiest = max((load.max() / load.mean()).item() for load in loads)
            print("step %d short %.4f digits %.4f | retrieval(%d) %.4f digits %.4f looks %.4f | load %.2f | %.2f M tokens/s %.0f s"
                  % (done, *values[:2], arrays[2].shape[1], *values[2:], busiest, speed / 1e6, now - start), flush=True)
            if done == args.give_up and values[3] < 0.9:
                raise SystemExit("retrieval is not learned")
        if args.max_seconds and time.time() - start > args.max_seconds:
            break
    for child in multiprocessing.active_children():
        child.kill()
    save_state(args.state, args.model, net, optimiser, done)
    print("saved %s at step %d of %d after %.0f s" % (args.state, done, args.steps, time.time() - start))


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=sorted(configs.CONFIGS), default="tiny-k2")
    parser.add_argument("--state", required=True, help="checkpoint to resume from and to write")
    parser.add_argument("--steps", type=int, default=6000, help="length of the whole schedule")
    parser.add_argument("--until", type=int, default=0, help="stop this piece at that step")
    parser.add_argument("--max-seconds", type=float, default=0, help="stop this piece after that time")
    parser.add_argument("--give-up", type=int, default=0, help="fail at that step (a logged one) if under 90 %% of the "
                        "retrieved digits are right")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--vocabulary", default=os.path.join(here, "../../models/tiny-k2/tiktoken.model"))
    run(parser.parse_args())


if __name__ == "__main__":
    main()
