#!/usr/bin/env python3
"""PyTorch training as others write it; prints a checksum of all losses and parameters.

A small transformer, AdamW, sequences of varying length, bf16 autocast, a side stream that reads
what the main stream made, and a captured CUDA graph where the allocator allows it.
"""
import os
import sys
import time
import zlib

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
import torch
from torch import nn


def make_model():
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(512, 256), nn.TransformerEncoder(layer, 4),
                         nn.Linear(256, 512)).cuda()


def train(model, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    side = torch.cuda.Stream()
    crc = 0
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        length = int(torch.randint(32, 512, (1,), generator=generator))
        tokens = torch.randint(0, 512, (8, length + 1), generator=generator).cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1),
                                               tokens[:, 1:].flatten())
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.current_stream())
            logits.record_stream(side)
            copied = logits.detach().float().sum(dim=(0, 1)).cpu()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        crc = zlib.crc32(copied.numpy().tobytes(), crc)
        crc = zlib.crc32(loss.detach().cpu().numpy().tobytes(), crc)
        if step % 10 == 9:
            torch.cuda.empty_cache()
    return crc


def graph(crc):
    """Not with PYTORCH_NO_CUDA_MEMORY_CACHING, which has no graphs."""
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        return crc
    x = torch.full((256, 256), 0.01, device="cuda")
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        y = x
        for _ in range(8):
            y = torch.tanh(y * 1.5 + x)
    for _ in range(5):
        captured.replay()
        x.add_(y * 0.1)
    torch.cuda.synchronize()
    return zlib.crc32(x.cpu().numpy().tobytes(), crc)


def main():
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    for switch in (torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.enable_cudnn_sdp,
                   torch.backends.cuda.enable_mem_efficient_sdp):
        switch(False)  # their gradients may differ from run to run
    model = make_model()
    start = time.time()
    crc = train(model, 30)
    crc = graph(crc)
    for parameter in model.parameters():
        crc = zlib.crc32(parameter.detach().cpu().numpy().tobytes(), crc)
    print(f"allocator {torch.cuda.get_allocator_backend()}, {time.time() - start:.1f} s, peak "
          f"{torch.cuda.max_memory_allocated() >> 20} MiB")
    print(f"checksum {crc:08x}")


if __name__ == "__main__":
    sys.exit(main())
