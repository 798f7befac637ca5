"""The section `sanitize` of tools/gpu_checks.py: compute-sanitizer's four tools over every CUDA kernel.

First each tool is run on a kernel with the fault that it is there for, and must report it (tests/sanitize). Every job
below runs once by itself, under a list of the kernels that it launches, and under each tool, many at a time, on all GPUs
that CUDA shows. A kernel that the programs hold and no job launches is a failure.

The jobs run with PERIGEE_GPU_SANITIZER set (src/base/soak.h): few, small cases. What the tools can see:
memcheck   each temporary array is an allocation of its own, with room after it: a read beyond an array is seen.
initcheck  the same arrays, read before they are written. Not what cuBLASLt wrote: its bulk stores are not followed, so it
           stays unused.
racecheck  shared memory alone, without cuBLASLt.
synccheck  barriers that not all threads reach.
No engine runs under a tool: what a tool keeps of a graph's launches grows until it has taken the GPU's whole memory. An
engine's arena, pages and lists are one allocation each anyway, inside which nothing would be seen.
"""
import concurrent.futures
import os
import queue
import re
import signal
import subprocess
import time

OPS, MLA, GOLDEN, EQUALITY = ("tests/conformance/conformance_test", "tests/conformance/cuda_mla_test", "tests/golden/golden_test",
                              "tests/equality/equality_test")
UNITS = "src/kv/cuda/kv_cuda_test"
COMM, PEER_OPS = "src/comm/cuda/comm_cuda_test", "src/ops/cuda/ops_cuda_test"
JOBS = {  # name: (program, tests); long ones first
    "ops": (OPS, "Conformance.*-*Mla*:*Linear*:*Moe*:*Full*"),
    "moe": (OPS, "Conformance.Moe*"),
    "mla-portable": (MLA, "*/bf16_portable"),
    "mla-portable-fp8": (MLA, "*/fp8_portable"),
    "attention": (OPS, "Conformance.MlaAttend"),
    "attention-fp8": (OPS, "Conformance.MlaAttendOverAnFp8Cache"),
    "attention-tiles": (OPS, "Conformance.MlaAttendOverRecords*"),
    "attention-full": (OPS, "Conformance.Full*"),
    "attention-shared": (OPS, "SharedAttention.SequencesOfBoth*:SharedAttention.NoKey*"),
    "experts-bf16": (OPS, "Experts.*/bf16:DummyWeights.*"),
    "experts-int4": (OPS, "Experts.*/int4"),
    "experts-fp8": (OPS, "Experts.*/fp8"),
    "kda-steps": (OPS, "Kda.Rejected*:Kda.AnyMixture*:Kda.SequencesOf*"),
    "kda": (OPS, "Kda.*-*.Rejected*:*.AnyMixture*:*.SequencesOf*"),
    "passes": (EQUALITY, "Composition.*Cuda"),
    "golden": (GOLDEN, "*.Cuda/v3_groups"),
    "golden-int4": (GOLDEN, "*.Cuda/int4"),
    "golden-fp8": (GOLDEN, "*.Cuda/fp8_block"),
    "golden-kimi-linear": (GOLDEN, "*.Cuda/kimi_linear"),
    "linear": (OPS, "Conformance.*Linear*"),
    "mla-bf16": (MLA, "*/bf16"),
    "mla-fp8": (MLA, "*/fp8"),
    "mla-records": (MLA, "*/fp8_ds_mla-*ManySequences/*:*ManyQueries*:*ExtendOn*:*AnyHeads*"),  # the kernel of mla-bf16
    "mla": (MLA, "*-*/bf16*:*/fp8*"),
    "steps": ("src/exec/cuda/exec_cuda_test", "*"),
    "memory": ("src/tensor/cuda/tensor_cuda_test", "*-*AReport*"),
    # Memory of another process is what the tools do not follow; AreasAre* asks CUDA for memory that is not there.
    "units": (UNITS, "*-*Process*:*AreasAre*"),
    "nccl": (COMM, "NcclKernels.*"),
    "peers": (COMM, "*/OnOneGpu-*MemoryCanBe*"),
    "peers-ops": (PEER_OPS, "*/OnOneGpu"),
}
TOOLS = {  # name: (the fault it must see, arguments on jobs)
    "racecheck": ("missing_barrier", ["--racecheck-num-workers", "2"]),
    "initcheck": ("uninitialised", []),
    "memcheck": ("out_of_bounds", ["--kernel-name", "kns=perigee"]),
    "synccheck": ("divided_barrier", []),
}
# Whole models under racecheck take minutes and have no kernel with shared memory that the jobs of operations lack.
SKIPPED = {("racecheck", name) for name in JOBS if name == "passes" or name.startswith("golden")}
# Kernels of ranks wait for each other, which a tool that runs one after the other never lets them.
SKIPPED |= {(tool, name) for tool in TOOLS for name in JOBS if name.startswith("peers")}
# Kernels that no job launches, by mangled name: they break the device on purpose, run where a block has less shared
# memory, deal single bytes, which nobody does, or are those of more than four ranks.
NOT_LAUNCHED = re.compile(r"trap_kernel|carry_kernelILi1E|deal_kernelILi1E|Li8E(LNS_3BoxE\dE)?EEvNS_8PeerView")
# Reports of racecheck whose places all match and that are none.
KNOWN = [
    # The scales of a stage that comes round again: a lane gives it back for its warp, after __syncwarp. Bulk copies,
    # which the other formats use alone, are not checked that way.
    r"copy_async4\(.* in mma.cuh|__nv_bfloat162\(.* in cuda_bf16.hpp",
    # The same of latent attention's tiles and weights: with an arrival of every lane none of them is left but the sums of
    # finish_rows(), which two barriers of both warpgroups keep from those of the next item. Tiles of records are stored by
    # threads; what clear_tokens() writes over is full, and is given back by warps that have waited for its weights.
    r"in mla_decode_wgmma.cu|in mla_wgmma_tiles.cuh|in mla_records.cuh|store_matrix_x4\(.* in mma.cuh",
    # Rows that are stored from where the next item's queries go, after a barrier of both warpgroups. Not yet tried with an
    # arrival of every lane.
    r"copy_async16\(.* in mma.cuh|store_output\(.* in mla_decode_wgmma.cu",
    # The same of its kernel for an fp8 cache, whose values are loaded by a wrapper; with an arrival of every lane, none.
    r"in mla_(decode_)?wgmma_fp8\.cuh?|load_matrix_x4_transposed\(.* in mma.cuh",
]
# A run that reaches the tool's own limit says so in a report, and what comes after is not seen.
MOST_HAZARDS = {"NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS": "1000000"}
JOB_LIMIT_S = 120
MOST_OF_A_GPU, CORES_LEFT = 8, 4  # jobs at once; cores for others
REPORT = re.compile(r"^=+ +(?:Error|Warning|Invalid|Uninitialized|Barrier|Host API|Program hit|Race|Internal|Unsupported|Fatal)", re.M)
PLACE = re.compile(r"(?:access|^=+ +) ?at (.+)$", re.M)


def reports(tool, output):
    """-> each report of a tool as its lines, without the known ones, and how many of these there were."""
    pieces = [piece for piece in re.split(r"^=+ *$", output, flags=re.M) if REPORT.search(piece)]
    known = [tool == "racecheck" and any(all(re.search(pattern, place) for place in PLACE.findall(piece)) for pattern in KNOWN)
             and bool(PLACE.search(piece)) for piece in pieces]
    return [piece.strip() for piece, is_known in zip(pieces, known) if not is_known], sum(known)


def visible_gpus():
    """-> the GPUs that CUDA shows, as CUDA_VISIBLE_DEVICES names them."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return visible.split(",")
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    return [str(i) for i in range(listed.count("UUID: GPU-"))]


class Sanitizer:
    def __init__(self, build, folder, limit_s):
        self.build, self.folder, self.end = os.path.abspath(build), os.path.abspath(folder), time.monotonic() + limit_s
        os.makedirs(self.folder, exist_ok=True)
        gpus = visible_gpus()
        self.at_once = max(2, min(MOST_OF_A_GPU * len(gpus), os.cpu_count() - CORES_LEFT))
        self.free = queue.SimpleQueue()  # a place on a GPU for each job that may run
        for i in range(self.at_once):
            self.free.put(gpus[i % len(gpus)])

    def run(self, name, command, env):
        """-> (exit code, output, seconds); the output is in the folder as NAME.log, too."""
        gpu = self.free.get()
        try:
            return self.run_on(gpu, name, command, env)
        finally:
            self.free.put(gpu)

    def run_on(self, gpu, name, command, env):
        begin = time.monotonic()
        path = f"{self.folder}/{name}.log"
        with open(path, "w", encoding="utf-8") as log:
            process = subprocess.Popen(command, env={**os.environ, **env, **MOST_HAZARDS, "CUDA_VISIBLE_DEVICES": gpu}, stdout=log,
                                       stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code = process.wait(timeout=max(1, min(JOB_LIMIT_S, self.end - begin)))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # the program under the tool, too
                process.wait()
                code = 124
        with open(path, encoding="utf-8", errors="replace") as log:
            return code, log.read(), time.monotonic() - begin

    def checked(self, name, tool, arguments, program, words, env):
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "2000", "--show-backtrace", "device"]
        if tool == "memcheck":
            command += ["--padding", "512"]
        return self.run(f"{tool}.{name}", [*command, *arguments, f"{self.build}/{program}", *words], env)

    def sees_fault(self, tool):
        fault = TOOLS[tool][0]
        code, output, _ = self.checked("fault", tool, [], "tests/sanitize/faulty_kernels", [fault], {})
        found, _ = reports(tool, output)
        return code == 9 and bool(found), f"{tool} on {fault}: exit {code}, {len(found)} reports"

    def job(self, tool, name):
        program, tests = JOBS[name]
        code, output, seconds = self.checked(name, tool, TOOLS[tool][1], program, [f"--gtest_filter={tests}", "--gtest_brief=1"], {"PERIGEE_GPU_SANITIZER": tool})
        found, known = reports(tool, output)
        good = code in (0, 9) and passed(output) and not found and (code == 0 or known > 0)
        line = f"{tool} on {name}: exit {code}, {seconds:.0f} s" + (f", {known} known reports" if known else "")
        return good, line if good else f"{line}, {len(found)} reports: {self.folder}/{tool}.{name}.log" + "".join("\n" + text for text in found[:2])

    def alone(self, name):
        program, tests = JOBS[name]
        env = {"PERIGEE_GPU_SANITIZER": "none", "CUDA_INJECTION64_PATH": f"{self.build}/tests/sanitize/liblaunched_kernels.so",
               "PERIGEE_LAUNCHED_KERNELS": f"{self.folder}/{name}.kernels"}
        code, output, seconds = self.run(f"alone.{name}", [f"{self.build}/{program}", f"--gtest_filter={tests}", "--gtest_brief=1"], env)
        good = code == 0 and passed(output)
        return good, f"{name} alone: exit {code}, {seconds:.0f} s" + ("" if good else f": {self.folder}/alone.{name}.log")

    def launched_all(self):
        there, ran = set(), set()
        for program in {program for program, _ in JOBS.values()}:
            output = subprocess.run(["cuobjdump", "-res-usage", f"{self.build}/{program}"], capture_output=True, text=True, check=False)
            there |= set(re.findall(r"Function (\w+):", output.stdout + output.stderr))
        for name in JOBS:
            path = f"{self.folder}/{name}.kernels"
            if os.path.exists(path):
                with open(path, encoding="utf-8") as file:
                    ran |= set(file.read().split())
        missing = sorted(kernel for kernel in there - ran if not NOT_LAUNCHED.search(kernel))
        readable = subprocess.run(["c++filt"], input="\n".join(missing), capture_output=True, text=True, check=False).stdout
        print(f"{len(there & ran)} of {len(there)} kernels were launched" + (f"; missing:\n{readable}" if missing else ""), flush=True)
        return bool(there) and not missing


def passed(output):
    """Whether a GoogleTest program ran at least one test, skipped none and failed none."""
    ran = re.search(r"^\[  PASSED  \] [1-9]", output, re.M)
    return bool(ran) and "[  FAILED  ]" not in output and "[  SKIPPED ]" not in output


def sanitize(build, folder, limit_s, tools=tuple(TOOLS), jobs=tuple(JOBS)):
    """-> whether every tool sees its fault and reports nothing else, and every kernel was launched."""
    checker = Sanitizer(build, folder, limit_s)
    good = True
    with concurrent.futures.ThreadPoolExecutor(checker.at_once) as pool:
        calls = [pool.submit(checker.sees_fault, tool) for tool in tools]
        calls += [pool.submit(checker.alone, name) for name in JOBS]
        calls += [pool.submit(checker.job, tool, name) for tool in tools for name in jobs if (tool, name) not in SKIPPED]
        for call in calls:
            fine, line = call.result()
            print(line, flush=True)
            good &= fine
    return checker.launched_all() and good
