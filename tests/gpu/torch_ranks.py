"""PyTorch's data-parallel training over NCCL with Tenure as its allocator: two GPUs, a process
each, once by DDP and once by FSDP2 (whose gathers run on streams of their own). The losses must be
those of torch's own allocator, to the bit.

usage: torch_ranks.py BUILD      exit status 1 if something is wrong, 77 without two GPUs
"""
import hashlib
import os
import socket
import subprocess
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
STEPS = 12


def make_model(kind, rank):
    import torch
    torch.manual_seed(11)
    blocks = [torch.nn.Sequential(torch.nn.LayerNorm(1024), torch.nn.Linear(1024, 4096),
                                  torch.nn.GELU(), torch.nn.Linear(4096, 1024)) for _ in range(4)]
    model = torch.nn.Sequential(*blocks).to(f"cuda:{rank}")
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    from torch.distributed.fsdp import fully_shard
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def train(kind, rank):
    import torch
    model = make_model(kind, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator(f"cuda:{rank}").manual_seed(100 * step + rank)
        x = torch.randn(256 + 128 * (step % 5), 1024, device=f"cuda:{rank}", generator=generator)
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    return losses


def run_rank(allocator):
    rank = int(os.environ["RANK"])
    if allocator == "tenure":
        import tenure.pytorch
        tenure.pytorch.install()
    import torch
    torch.cuda.set_device(rank)
    torch.use_deterministic_algorithms(True)
    torch.distributed.init_process_group("nccl", device_id=torch.device(f"cuda:{rank}"))
    for kind in ("ddp", "fsdp"):
        losses = train(kind, rank)
        if rank == 0:
            digest = hashlib.sha256(repr(losses).encode()).hexdigest()[:16]
            print(f"{kind} {digest} {losses[0]:.4f} {losses[-1]:.4f}", flush=True)
    if allocator == "tenure":
        assert tenure.statistic("allocs", rank) > 1000
    torch.distributed.destroy_process_group()


def run_ranks(build, allocator):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        environment = dict(os.environ, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                           MASTER_PORT=str(port), TENURE_LIBRARY_DIR=os.path.abspath(build),
                           PYTHONPATH=os.path.join(ROOT, "python"),
                           CUBLAS_WORKSPACE_CONFIG=":4096:8")
        ranks.append(subprocess.Popen([sys.executable, __file__, build, allocator], text=True,
                                      env=environment, stdout=subprocess.PIPE))
    words = [rank.communicate(timeout=240)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        print(f"torch_ranks: {allocator}: a rank failed")
        sys.exit(1)
    print(f"torch_ranks: {allocator}: {words[0].strip()}".replace("\n", ", "), flush=True)
    return words[0]


def main():
    if len(sys.argv) == 3:
        run_rank(sys.argv[2])
        return 0
    import torch
    if torch.cuda.device_count() < 2:
        print("torch_ranks: skipped: two GPUs are needed")
        return 77
    native, ours = (run_ranks(sys.argv[1], allocator) for allocator in ("native", "tenure"))
    print(f"torch_ranks: {'ok' if native == ours else 'FAILED: losses differ'}")
    return int(native != ours)


if __name__ == "__main__":
    sys.exit(main())
