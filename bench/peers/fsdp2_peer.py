#!/usr/bin/env python3
"""A training step of transformer layers under PyTorch FSDP2, with the columns of
tenure-bench-sharded, which has the same layers (bench/sharded/sharded_bench.h).

usage: fsdp2_peer.py [--ranks N] [--layers N] [--hidden N] [--heads N] [--ffn N] [--tokens N]
                     [--sequence N] [--gradients bf16|fp32] [--prefetch on|off|both] [--rounds N]
                     [--device cuda|cpu]

    h = h + Wo mix(Wqkv norm(h))        mix: silu(a) * b, or causal attention with --sequence
    h = h + Wdown (silu(g) * u)         (g, u) = Wup norm(h)

One process a GPU, NCCL; fp32 parameters, AdamW (fused), fully_shard of each layer and of the stack
with MixedPrecisionPolicy(bf16 parameters, reductions in --gradients). Layers are resharded after
forward, the last one excepted, as is FSDP2's custom. prefetch on: each layer names the next one
(set_modules_to_forward_prefetch, ..._backward_prefetch); off: FSDP2's default, which gathers one
layer ahead in backward, and in forward as far as the host runs ahead.

Backward begins with a fixed gradient, as there. layers_us: forward and backward of the same layers
in bf16 on one GPU without FSDP, which leaves bf16 gradients. live_bytes: allocated between steps
with gradients set to None; peak_bytes, reserved_bytes: the allocator's own peaks; driver_bytes: of
the device, as the driver says. wire_bytes: what the collectives have to send, of the shapes.
"""
import argparse
import gc
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn as nn
import torch.nn.functional as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WARM_STEPS = 3
COLUMNS = ("side,weights,mix,prefetch,layout,shards,update,rank,ranks,device,engine,layers,hidden,"
           "ffn,tokens,gradients,step_us,layers_us,update_us,exposed_us,live_bytes,peak_bytes,"
           "reserved_bytes,driver_bytes,wire_bytes,planned_live_bytes,planned_peak_bytes,"
           "planned_wire_bytes")


class Layer(nn.Module):
    def __init__(self, options):
        super().__init__()
        hidden, ffn = options.hidden, options.ffn
        self.heads, self.sequence = options.heads, options.sequence
        self.norm_1 = nn.RMSNorm(hidden, eps=1e-5)
        self.qkv = nn.Linear(hidden, 2 * hidden, bias=False)
        self.projection = nn.Linear(hidden, hidden, bias=False)
        self.norm_2 = nn.RMSNorm(hidden, eps=1e-5)
        self.up = nn.Linear(hidden, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def mix(self, qkv):
        if not self.sequence:
            a, b = qkv.chunk(2, -1)
            return functional.silu(a) * b
        tokens, width = qkv.shape
        heads, size = self.heads, width // 2 // self.heads
        parts = qkv.view(tokens // self.sequence, self.sequence, 2 * heads, size).transpose(1, 2)
        q, k, v = parts.split((heads, heads // 2, heads // 2), 1)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).reshape(tokens, heads * size)

    def forward(self, h):
        h = h + self.projection(self.mix(self.qkv(self.norm_1(h))))
        g, u = self.up(self.norm_2(h)).chunk(2, -1)
        return h + self.down(functional.silu(g) * u)


class Stack(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.layers = nn.ModuleList(Layer(options) for _ in range(options.layers))

    def forward(self, h):
        for layer in self.layers:
            h = layer(h)
        return h


def shard(model, mesh, options, has_prefetch):
    reduced = torch.bfloat16 if options.gradients == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    layers = model.layers
    for i, layer in enumerate(layers):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=i + 1 < len(layers))
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if not has_prefetch:
        return model
    for i, layer in enumerate(layers):
        if i + 1 < len(layers):
            layer.set_modules_to_forward_prefetch([layers[i + 1]])
        if i > 0:
            layer.set_modules_to_backward_prefetch([layers[i - 1]])
    return model


class Bench:
    def __init__(self, rank, options):
        self.rank, self.options = rank, options
        self.is_cuda = options.device == "cuda"
        self.device = torch.device("cuda", rank) if self.is_cuda else torch.device("cpu")
        torch.manual_seed(1)
        self.mesh = init_device_mesh(options.device, (options.ranks,))
        generator = torch.Generator(self.device).manual_seed(rank)
        shape = (options.tokens, options.hidden)
        self.x = torch.randn(shape, generator=generator, device=self.device,
                             dtype=torch.bfloat16)
        self.dy = torch.randn(shape, generator=generator, device=self.device,
                              dtype=torch.bfloat16) * 2.0**-10

    def synchronize(self):
        if self.is_cuda:
            torch.cuda.synchronize()

    def timed(self, work):
        self.synchronize()
        dist.barrier()
        self.synchronize()
        start = time.perf_counter()
        work()
        self.synchronize()
        return (time.perf_counter() - start) * 1e6

    def median(self, work):
        return statistics.median(self.timed(work) for _ in range(self.options.rounds))

    def passes(self, model):
        model(self.x).backward(self.dy)

    def layers_alone(self):
        """Without FSDP: nothing travels."""
        with torch.device(self.device):
            model = Stack(self.options).to(torch.bfloat16)

        def work():
            self.passes(model)
            model.zero_grad(set_to_none=True)

        for _ in range(WARM_STEPS):
            work()
        return self.median(work)

    def memory(self):
        if not self.is_cuda:
            return (0, 0, 0)
        free, total = torch.cuda.mem_get_info()
        return (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), total - free)

    def measure(self, layers_us, has_prefetch):
        with torch.device(self.device):
            model = Stack(self.options)
        model = shard(model, self.mesh, self.options, has_prefetch)
        if self.is_cuda:
            torch.cuda.empty_cache()  # of the whole parameters
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

        def step():
            self.passes(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        def update():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        for _ in range(WARM_STEPS):
            step()
        self.synchronize()
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        step_us = self.median(step)
        peak, reserved, taken = self.memory()
        live = torch.cuda.memory_allocated() if self.is_cuda else 0
        updates = []
        for _ in range(self.options.rounds):
            self.passes(model)
            updates.append(self.timed(update))
        update_us = statistics.median(updates)
        self.report(model, has_prefetch, (step_us, layers_us, update_us),
                    (live, peak, reserved, taken))

    def wire_bytes(self, model):
        """All layers but the last are gathered twice, in bf16; all are reduced once."""
        reduced = 2 if self.options.gradients == "bf16" else 4
        of_layer = sum(p.numel() for p in model.layers[0].parameters())
        gathers = 2 * len(model.layers) - 1
        elements = gathers * of_layer * 2 + len(model.layers) * of_layer * reduced
        return elements * (self.options.ranks - 1) // self.options.ranks

    def report(self, model, has_prefetch, times, memory):
        o = self.options
        step_us, layers_us, update_us = times
        mix = f"attention {o.sequence}" if o.sequence else "gate"
        name = torch.cuda.get_device_name() if self.is_cuda else "host"
        row = ["fsdp2", "bf16", mix, "on" if has_prefetch else "off", "rows", "made", "end",
               self.rank, o.ranks, name, "NCCL" if self.is_cuda else "gloo", o.layers, o.hidden,
               o.ffn, o.tokens, o.gradients]
        row += [f"{v:.1f}" for v in (*times, step_us - layers_us - update_us)]
        row += [*memory, self.wire_bytes(model), "", "", ""]
        rows = [None] * o.ranks
        dist.all_gather_object(rows, ",".join(str(v) for v in row))
        if self.rank == 0:
            print("\n".join(rows), flush=True)


def run_rank(rank, options):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29463")
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    place = torch.device("cuda", rank) if options.device == "cuda" else None
    dist.init_process_group("nccl" if place else "gloo", rank=rank, world_size=options.ranks,
                            device_id=place)
    bench = Bench(rank, options)
    layers_us = bench.layers_alone()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    if rank == 0:
        print(COLUMNS, flush=True)
    for has_prefetch in (True, False):
        if options.prefetch in ("both", "on" if has_prefetch else "off"):
            bench.measure(layers_us, has_prefetch)
            gc.collect()  # FSDP2's modules and hooks are cycles
            if options.device == "cuda":
                torch.cuda.empty_cache()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 2), ("layers", 8), ("hidden", 4096), ("heads", 32),
                        ("ffn", 14336), ("tokens", 8192), ("sequence", 0), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--gradients", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--prefetch", choices=("on", "off", "both"), default="both")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    multiprocessing.spawn(run_rank, (options,), nprocs=options.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
