"""The section `fence` of tools/gpu_checks.py: what kernels touch before they wait for the kernel in front.

Kernels are launched so that they may start while the one in front still runs (src/ops/cuda/launch.h). Ahead of its
dependency_wait() a kernel may read weights; and what was complete before the kernel in front began, but from L2 ("STRONG"
loads, copies that pass L1 by), since nothing says that its L1 has forgotten what lay there before. Here the machine code
of each kernel is followed from its entry to its waits along all branches, and the accesses of global memory met on the way
must be those that AHEAD lists. Needs cuobjdump.
"""
import re
import subprocess

WEIGHTS, FROM_L2 = r"LDG\.(?!.*STRONG)", r"LDG\..*STRONG\.GPU"
AHEAD = {  # kernel, by mangled name: kinds of accesses that it may have there, of each at most so many
    r"elementwise_cu.*11norm_kernel|combine_cu.*19combine_norm_kernel": {WEIGHTS: 4},
    r"reduce_norm_cu.*18reduce_norm_kernel": {WEIGHTS: 4},
    r"scatter_norm_cu.*16push_norm_kernel": {WEIGHTS: 1},
    r"route_cu.*16score_few_kernel": {WEIGHTS: 8},
    r"route_cu.*13select_kernel": {WEIGHTS: 2},  # the router's bias
    r"mla_plan_cu.*15mla_join_kernel": {FROM_L2: 2},
    r"kda_step_cu.*11step_kernel": {WEIGHTS: 5},
    # Products: weights by copies into shared memory, lists of experts.
    r"skinny_cu.*13skinny_kernel|skinny15one_tile_kernel": {r"LDGSTS": 99, FROM_L2: 10},
    # Beside another's carry it does not wait at all: inputs, and outputs that the carry does not touch.
    r"kda_relate_cu.*13relate_kernel": {WEIGHTS: 29, FROM_L2: 999, r"STG": 999},
}
# Launched plainly, after all that was launched before: they need no wait.
PLAIN = re.compile(r"nccl_kernels_cu|step_kernels_cu|unit_kernels_cu|sampling_kernels_cu.*12score_kernel|packed_cu")
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@\S+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", re.M)
MEMORY = re.compile(r"(LD|LDG|LDGSTS|LDGMC|ST|STG|ATOM|ATOMG|RED|REDG|UBLKCP|UBLKRED|UTMALDG|UTMASTG|UTMAREDG|SULD|SUST|TEX|TLD)(\.|$)")


def kernels(sass):
    """-> name and instructions (address, guarded, opcode, operands) of each kernel that cuobjdump prints."""
    for part in re.split(r"^\s*Function : ", sass, flags=re.M)[1:]:
        yield part.split("\n", 1)[0].strip(), [(int(a, 16), bool(g), op, rest) for a, g, op, rest in INSTRUCTION.findall(part)]


def ahead_of_wait(code):
    """-> opcodes of the accesses of global memory that some path meets before a wait, or before the end without one."""
    at = {address: i for i, (address, *_) in enumerate(code)}
    found, seen, todo = set(), set(), [(0, ())]  # an instruction, and where the threads of each barrier meet again
    while todo:
        i, joins = state = todo.pop()
        if state in seen or i >= len(code):
            continue
        seen.add(state)
        _, guarded, opcode, rest = code[i]
        base, goes_on = opcode.split(".")[0], True
        if base == "ACQBULK":
            continue
        if MEMORY.match(opcode):
            found.add(i)
        if base in ("EXIT", "RET"):
            goes_on = guarded
        elif base in ("BRA", "CALL"):
            todo.append((at[int(re.search(r"0x([0-9a-f]+)$", rest).group(1), 16)], joins))
            goes_on = guarded or base == "CALL" or "," in rest  # a condition of a whole warp is an operand
        elif base == "BSSY":
            barrier, target = re.match(r"(\w+), 0x([0-9a-f]+)$", rest).groups()
            joins = (*((b, t) for b, t in joins if b != barrier), (barrier, at[int(target, 16)]))
        elif base == "BSYNC":
            todo += [(target, joins) for barrier, target in joins if barrier == rest]
        elif base in ("BRX", "JMX", "JMP"):
            raise ValueError(f"{opcode} {rest}: where it leads is not known")
        if goes_on:
            todo.append((i + 1, joins))
    return [code[i][2] for i in sorted(found)]


def complaints(name, code):
    """-> a line if a kernel touches what it may not."""
    opcodes = ahead_of_wait(code)
    if not opcodes or PLAIN.search(name):
        return []
    allowed = next((rules for kernel, rules in AHEAD.items() if re.search(kernel, name)), {})
    counts = {kind: sum(bool(re.match(kind, opcode)) for opcode in opcodes) for kind in allowed}
    others = [opcode for opcode in opcodes if not any(re.match(kind, opcode) for kind in allowed)]
    if not others and all(counts[kind] <= most for kind, most in allowed.items()):
        return []
    return [f"{name}: {len(opcodes)} accesses ahead of its wait ({', '.join(sorted(set(opcodes)))}); it may have {allowed}"]


def fence(program):
    """-> whether no kernel of the program touches what it may not."""
    output = subprocess.run(["cuobjdump", "-sass", program], capture_output=True, text=True, check=True).stdout
    all_kernels = list(kernels(output))
    lines = [line for name, code in all_kernels for line in complaints(name, code)]
    print("\n".join([*lines, f"{len(all_kernels)} kernels followed to their waits"]), flush=True)
    return bool(all_kernels) and not lines
