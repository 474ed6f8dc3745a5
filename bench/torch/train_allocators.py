"""Training with PyTorch under its own allocators and under Tenure, in one run: how much memory is
held at the most, and what a step takes.

usage: train_allocators.py BUILD [--steps N] [--jobs llama_varlen,lora]
                           [--allocators native,expandable,tenure]

CSV on standard output: a line for each job and allocator. peak_allocated and peak_reserved are the
allocator's, device_used is what the driver says is taken after the last step; steps are timed after
the first quarter. `losses` is a hash of all losses: the same in each line of a job. Each pair runs
in a process of its own, one after the other; only what they import they import at the same time.
Needs torch, transformers and, for lora, peft; nothing is downloaded.
"""
import argparse
import hashlib
import os
import random
import statistics
import subprocess
import sys
import time

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
FIELDS = ("job,allocator,steps,peak_allocated_mib,peak_reserved_mib,utilization_percent,"
          "device_used_mib,median_step_ms,total_s,losses")


def llama(hidden, layers, heads, intermediate):
    import torch
    import transformers
    config = transformers.LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, intermediate_size=intermediate, vocab_size=32000,
        max_position_embeddings=8192, attn_implementation="sdpa")
    torch.manual_seed(1)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    return model


def make_llama_varlen():
    """All weights train; sequences of 512 to 8192 tokens."""
    return llama(2048, 8, 16, 5632), lambda step: (1, step.randrange(512, 8193))


def make_lora():
    """Adapters on a frozen model; batches and lengths vary."""
    import peft
    model = llama(4096, 8, 32, 11008)
    config = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear",
                             task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config), lambda step: (step.randrange(1, 5),
                                                             step.randrange(256, 2049))


def train(model, shape_of, steps):
    import torch
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4,
                                  fused=True)
    numbers = random.Random(5)
    losses, times = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        batch, length = shape_of(numbers)
        generator = torch.Generator("cuda").manual_seed(batch * 10000 + length)
        tokens = torch.randint(0, 32000, (batch, length), device="cuda", generator=generator)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return losses, times


def run_job(job, allocator, steps):
    if allocator == "tenure":
        import tenure.pytorch
        tenure.pytorch.install()
    import torch
    import transformers.models.llama  # noqa: F401
    if job == "lora":
        import peft  # noqa: F401
    sys.stdin.readline()  # our turn on the GPU
    torch.use_deterministic_algorithms(True)  # flash attention's backward, too
    torch.utils.deterministic.fill_uninitialized_memory = False
    model, shape_of = {"llama_varlen": make_llama_varlen, "lora": make_lora}[job]()
    try:
        losses, times = train(model, shape_of, steps)
    except RuntimeError as error:  # an operation that this torch has in no such form
        if "deterministic" not in str(error):
            raise
        print(f"{job},{allocator}: losses need not be equal: {error}", file=sys.stderr)
        torch.use_deterministic_algorithms(False)
        losses, times = train(model, shape_of, steps)
    free, total = torch.cuda.mem_get_info()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(f"{job},{allocator},{steps},{allocated >> 20},{reserved >> 20},"
          f"{100 * allocated / reserved:.1f},{(total - free) >> 20},"
          f"{1e3 * statistics.median(times[steps // 4:]):.1f},{sum(times):.2f},"
          f"{hashlib.sha256(repr(losses).encode()).hexdigest()[:12]}", flush=True)


def environment_of(allocator, build):
    environment = dict(os.environ, TENURE_LIBRARY_DIR=os.path.abspath(build),
                       PYTHONPATH=os.path.join(ROOT, "python"), TRANSFORMERS_OFFLINE="1",
                       CUBLAS_WORKSPACE_CONFIG=":4096:8", PYTHONWARNINGS="ignore")
    environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    if allocator == "expandable":
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return environment


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("build")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--jobs", default="llama_varlen,lora")
    parser.add_argument("--allocators", default="native,expandable,tenure")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        run_job(*given.one.split(","), given.steps)
        return 0
    print(FIELDS, flush=True)
    runs = [subprocess.Popen([sys.executable, __file__, given.build, "--steps", str(given.steps),
                              "--one", f"{job},{allocator}"], stdin=subprocess.PIPE,
                             env=environment_of(allocator, given.build))
            for job in given.jobs.split(",") for allocator in given.allocators.split(",")]
    for run in runs:
        run.communicate(b"\n")
    return 1 if any(run.returncode for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
