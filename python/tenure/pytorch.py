"""Tenure as PyTorch's allocator.

    import tenure.pytorch
    tenure.pytorch.install()            before torch's first use of CUDA

Then all CUDA memory of torch is Tenure's: in stream order, with record_stream, CUDA graphs,
empty_cache and set_per_process_memory_fraction. Without memory torch.OutOfMemoryError is raised.
torch's own statistics functions (torch.cuda.memory_allocated and its like) answer, too: torch has
no way to ask another allocator, so install() puts functions in the place of those of torch._C.

mem_pool() is for programs that keep torch's allocator and want one pool of it to be Tenure's.
"""
import ctypes

import torch

import tenure

_HOOKS = {"set_reset_fn": "tn_torch_empty_cache",
          "set_record_stream_fn": "tn_torch_record_stream",
          "set_memory_fraction_fn": "tn_torch_memory_fraction",
          "set_base_alloc_fn": "tn_torch_base_allocation",
          "set_begin_allocate_to_pool": "tn_torch_begin_allocate_to_pool",
          "set_end_allocate_to_pool_fn": "tn_torch_end_allocate_to_pool",
          "set_release_pool": "tn_torch_release_pool"}

# What torch.cuda.memory_stats tells of, and where Tenure has it: current, peak.
_BYTES = {"allocated_bytes": ("live_bytes", "peak_live_bytes"),
          "active_bytes": ("live_bytes", "peak_live_bytes"),
          "requested_bytes": ("live_bytes", "peak_live_bytes"),
          "reserved_bytes": ("reserved_bytes", "peak_reserved_bytes"),
          "allocation": ("live_blocks", None), "active": ("live_blocks", None),
          "segment": (None, None), "inactive_split": (None, None),
          "inactive_split_bytes": (None, None)}

_path = tenure.library_path("tenure-torch")
_library = ctypes.CDLL(_path)
_allocator = None  # torch keeps none of them alive
_segment_allocator = None


def install():
    """Makes Tenure torch's allocator. RuntimeError if torch has used CUDA memory already."""
    global _allocator
    if _allocator is not None:
        return
    allocator = torch.cuda.memory.CUDAPluggableAllocator(_path, "tn_torch_malloc", "tn_torch_free")
    for setter, function in _HOOKS.items():
        getattr(allocator.allocator(), setter)(tenure.address(_library, function))
    torch.cuda.memory.change_current_allocator(allocator)
    _allocator = allocator
    for name, function in (("_cuda_memoryStats", memory_stats),
                           ("_cuda_resetPeakMemoryStats", tenure.reset_peaks),
                           ("_cuda_resetAccumulatedMemoryStats", lambda device: None),
                           ("_accelerator_getDeviceStats", memory_stats),
                           ("_accelerator_resetPeakStats", tenure.reset_peaks),
                           ("_accelerator_resetAccumulatedStats", lambda device: None)):
        if hasattr(torch._C, name):
            setattr(torch._C, name, function)


def mem_pool(**options):
    """A torch.cuda.MemPool of torch's own allocator whose segments come from Tenure."""
    global _segment_allocator
    if _segment_allocator is None:
        _segment_allocator = torch.cuda.memory.CUDAPluggableAllocator(
            _path, "tn_torch_segment_malloc", "tn_torch_segment_free")
    return torch.cuda.MemPool(_segment_allocator.allocator(), **options)


def memory_stats(device=0):
    """Tenure's statistics in the shape of torch.cuda.memory_stats_as_nested_dict."""
    numbers = tenure.statistics(device)
    numbers[None] = 0
    nothing = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
    stats = {}
    for name, (current, peak) in _BYTES.items():
        both = {"current": numbers[current], "peak": numbers[peak or current],
                "allocated": 0, "freed": 0}
        if name in ("allocation", "active"):
            both.update(allocated=numbers["allocs"], freed=numbers["frees"])
        stats[name] = {"all": both, "small_pool": dict(nothing), "large_pool": dict(nothing)}
    stats["num_ooms"] = numbers["out_of_memory"]
    for name in ("num_alloc_retries", "num_sync_all_streams", "num_device_alloc",
                 "num_device_free", "max_split_size"):
        stats[name] = 0
    for name in ("oversize_allocations", "oversize_segments"):
        stats[name] = dict(nothing)
    return stats
