"""Tenure for Python programs: what the tests beside this need of the public C API, with ctypes.

Structs and enum values are read from the public headers, so that there is one definition of them.
Objects with __dlpack__ give planes to other libraries; import_dlpack takes tensors from them.
"""
import ctypes
import os
import re

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
HEADERS = ("alloc/tenure_alloc.h", "tensor/tenure_tensor.h", "tensor/tenure_lifetime.h",
           "ops/tenure_ops.h", "ops/tenure_gemm.h")
SCALARS = {"int": ctypes.c_int, "unsigned": ctypes.c_uint, "size_t": ctypes.c_size_t,
           "float": ctypes.c_float, "double": ctypes.c_double, "int32_t": ctypes.c_int32,
           "uint32_t": ctypes.c_uint32, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64,
           "char": ctypes.c_char}


# ---- the headers ---------------------------------------------------------------------------------

def read_headers():
    text = "".join(open(os.path.join(SOURCE, name), encoding="ascii").read() for name in HEADERS)
    return re.sub(r"/\*.*?\*/", " ", text, flags=re.S)


def read_enums(text):
    """Every enumerator's value; enums that macros make are of no concern here."""
    values, types = {}, set()
    for body, name in re.findall(r"enum\s*\w*\s*\{([^{}#]*)\}\s*(\w*)\s*;", text):
        types.add(name)
        value = 0
        for entry in filter(None, (part.strip() for part in body.split(","))):
            match = re.fullmatch(r"(\w+)(?:\s*=\s*(\w+))?", entry)
            if not match:
                break
            if match.group(2):
                value = int(values.get(match.group(2), match.group(2)))
            values[match.group(1)] = value
            value += 1
    for name, value in re.findall(r"#define\s+(TN_\w+)\s+(\d+)\s*\n", text):
        values[name] = int(value)
    return values, types


def field_of(declaration, values, enums, structs):
    """(name, type) of each member in a declaration such as 'int64_t shape[TN_RANK_MAX]'."""
    if "(*" in declaration:
        yield re.search(r"\(\*\s*(\w+)\)", declaration).group(1), ctypes.c_void_p
        return
    plain = re.sub(r"\b(const|struct|unsigned(?= char))\s+", "", declaration)
    base, members = re.fullmatch(r"(\w+)\s*(.*)", plain, re.S).groups()
    for member in members.split(","):
        star, name, count = re.fullmatch(r"\s*(\**)\s*(\w+)\s*(?:\[(\w+)\])?\s*", member).groups()
        kind = ctypes.c_int if base in enums else SCALARS.get(base) or structs.get(base)
        if star:
            kind = ctypes.c_char_p if base == "char" else ctypes.c_void_p
        elif base in ("tn_stream", "tn_release_function"):
            kind = ctypes.c_void_p
        yield name, kind * int(values.get(count, count)) if count else kind


def read_structs(text, values, enums):
    structs = {}
    for name, body in re.findall(r"struct (\w+)\s*\{([^{}]*)\}\s*\w*;", text):
        if re.search(r"TN_\w+\(", body):  # made by a macro, and of no concern here
            continue
        fields = [field for declaration in body.split(";") if declaration.strip()
                  for field in field_of(declaration.strip(), values, enums, structs)]
        structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return structs


TEXT = read_headers()
VALUES, ENUMS = read_enums(TEXT)
STRUCTS = read_structs(TEXT, VALUES, ENUMS)


def new(name, /, **members):
    """A struct of the API as its INIT macro makes it, but for the members that are given."""
    made = STRUCTS[name]()
    if hasattr(made, "size"):
        made.size = ctypes.sizeof(made)
    for member, value in members.items():
        setattr(made, member, value)
    return made


# ---- DLPack's structs and Python's capsules ------------------------------------------------------

class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32),
                ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8),
                ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p),
                ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64)]


class Managed(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class Versioned(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32),
                ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
                ("flags", ctypes.c_uint64), ("tensor", Tensor)]


KINDS = {b"dltensor": Managed, b"dltensor_versioned": Versioned}
DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)

python = ctypes.pythonapi
python.PyCapsule_New.restype = ctypes.py_object
python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, DESTRUCTOR]
python.PyCapsule_IsValid.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
python.PyCapsule_GetPointer.restype = ctypes.c_void_p
python.PyCapsule_GetPointer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
python.PyCapsule_SetName.argtypes = [ctypes.c_void_p, ctypes.c_char_p]

USED = {name: b"used_" + name for name in KINDS}  # capsules keep the address of their name
NAMES = {name: name for name in KINDS}


def destroy_capsule(capsule):
    """A capsule that nobody took the tensor of: its deleter is ours to call. A consumer that failed
    has an exception pending, with which no call from here would work."""
    python.PyErr_Fetch(*(ctypes.byref(ctypes.c_void_p()) for _ in range(3)))
    for name, kind in KINDS.items():
        if python.PyCapsule_IsValid(capsule, name):
            address = python.PyCapsule_GetPointer(capsule, name)
            DELETER(kind.from_address(address).deleter)(address)


destroy_capsule_c = DESTRUCTOR(destroy_capsule)


class Counted:
    """Puts itself before a tensor's deleter and counts its calls."""

    def __init__(self, managed):
        self.calls = 0
        self.original = DELETER(managed.deleter)
        self.callback = DELETER(self.call)
        managed.deleter = ctypes.cast(self.callback, ctypes.c_void_p).value

    def call(self, address):
        self.calls += 1
        self.original(address)


# ---- the library ---------------------------------------------------------------------------------

class Error(Exception):
    def __init__(self, status, text):
        super().__init__(f"{status}: {text}")
        self.status = status


class Library:
    def __init__(self, folder):
        self.c = ctypes.CDLL(os.path.join(folder, "libtenure.so"))
        self.c.tn_error_last.restype = ctypes.c_char_p
        self.c.tn_status_name.restype = ctypes.c_char_p

    def call(self, name, *arguments):
        status = getattr(self.c, name)(*arguments)
        if status != 0:
            raise Error(self.c.tn_status_name(status).decode(), self.c.tn_error_last().decode())


class Device:
    """A device with a pool, a stream and a root scope."""

    def __init__(self, library, driver):
        self.library = library
        config = new("tn_device_config", driver=VALUES[driver])
        pool_config = new("tn_pool_config")
        self.device, self.pool, self.stream = (ctypes.c_void_p() for _ in range(3))
        library.call("tn_device_create", ctypes.byref(config), ctypes.byref(self.device))
        library.call("tn_pool_create", self.device, ctypes.byref(pool_config),
                     ctypes.byref(self.pool))
        library.call("tn_stream_create", self.device, ctypes.byref(self.stream))
        info = new("tn_device_info")
        library.call("tn_device_info_get", self.device, ctypes.byref(info))
        self.is_cuda = info.driver == VALUES["TN_DRIVER_CUDA"]
        self.dlpack_device = (2, info.ordinal) if self.is_cuda else (1, 0)
        self.name = info.name.decode()

    def close(self):
        self.library.call("tn_stream_destroy", self.device, self.stream)
        self.library.call("tn_pool_destroy", self.pool)
        self.library.call("tn_device_destroy", self.device)

    def synchronize(self):
        self.library.call("tn_stream_synchronize", self.device, self.stream)


class Scope:
    def __init__(self, device):
        self.device, self.library = device, device.library
        self.handle = STRUCTS["tn_scope"]()
        config = new("tn_scope_config", pool=device.pool, name=b"round trips")
        self.library.call("tn_scope_create", ctypes.byref(config), ctypes.byref(self.handle))

    def close(self):
        self.library.call("tn_scope_close", self.handle)

    def ledger(self):
        ledger = new("tn_ledger")
        self.library.call("tn_scope_ledger", self.handle, ctypes.byref(ledger))
        self.library.call("tn_ledger_check", self.device.pool)
        return ledger

    def tensor(self, dtype, shape, tensor_format="TN_FORMAT_PLAIN"):
        handle = STRUCTS["tn_tensor"]()
        config = new("tn_tensor_config", dtype=VALUES[dtype], format=VALUES[tensor_format],
                     rank=len(shape), name=b"ours")
        config.shape[:len(shape)] = shape
        self.library.call("tn_tensor_create", self.handle, ctypes.byref(config),
                          ctypes.byref(handle))
        return TensorHandle(self, handle)

    def import_dlpack(self, producer, stream, scale=None, **config):
        """Takes producer's tensor (and scales); the deleters are counted."""
        parts = [producer] + ([] if scale is None else [scale])
        managed = [take(part, self.device, stream) for part in parts]
        version = "_versioned" if managed[0][0] is Versioned else ""
        handle = STRUCTS["tn_tensor"]()
        options = new("tn_dlpack_import_config", name=b"theirs", **config)
        if len(managed) > 1:
            setattr(options, "scale" + version, managed[1][1])
        counted = [Counted(kind.from_address(address)) for kind, address in managed]
        self.library.call("tn_dlpack_import" + version, self.handle,
                          ctypes.c_void_p(managed[0][1]), ctypes.byref(options),
                          ctypes.c_void_p(stream), ctypes.byref(handle))
        return TensorHandle(self, handle), counted


def take(producer, device, stream):
    """(struct, address) of a tensor that is now the caller's."""
    arguments = {"stream": stream or 1} if device.is_cuda else {}
    try:
        capsule = producer.__dlpack__(max_version=(1, 0), **arguments)
    except TypeError:  # a producer from before DLPack 1.0
        capsule = producer.__dlpack__(**arguments)
    for name, kind in KINDS.items():
        if python.PyCapsule_IsValid(id(capsule), name):
            address = python.PyCapsule_GetPointer(id(capsule), name)
            python.PyCapsule_SetName(id(capsule), USED[name])
            return kind, address
    raise ValueError("no DLPack capsule")


class TensorHandle:
    def __init__(self, scope, handle):
        self.scope, self.library, self.handle = scope, scope.library, handle
        self.device = scope.device

    def write(self, data, scale=None, plane="TN_PLANE_DATA"):
        self.library.call("tn_plane_write", self.handle, VALUES[plane], data,
                          ctypes.c_size_t(len(data)), scale,
                          ctypes.c_size_t(len(scale) if scale else 0), self.device.stream)
        self.device.synchronize()  # the bytes may go

    def read(self, scale_bytes=0, data_bytes=0, plane="TN_PLANE_DATA"):
        data = ctypes.create_string_buffer(max(data_bytes, 1))
        scale = ctypes.create_string_buffer(max(scale_bytes, 1))
        self.library.call("tn_plane_read", self.handle, VALUES[plane], data,
                          ctypes.c_size_t(data_bytes), scale if scale_bytes else None,
                          ctypes.c_size_t(scale_bytes), self.device.stream)
        self.device.synchronize()
        return data.raw[:data_bytes], scale.raw[:scale_bytes]

    def lease(self, access, plane="TN_PLANE_DATA"):
        return Lease(self, VALUES[access], VALUES[plane])

    def address(self, plane="TN_PLANE_DATA"):
        with self.lease("TN_READ", plane) as view:
            return view.data

    def layout(self, plane):
        layout = new("tn_plane_layout")
        self.library.call("tn_plane_layout_get", self.handle, VALUES[plane], ctypes.byref(layout))
        return layout

    def destroy(self):
        self.library.call("tn_tensor_destroy", self.handle, self.device.stream)

    def export(self, plane="TN_PLANE_DATA", part="TN_DLPACK_DATA", access="TN_READ", pairs=0):
        return Export(self, plane, part, access, pairs)


class Lease:
    def __init__(self, tensor, access, plane):
        self.tensor, self.access, self.plane = tensor, access, plane
        self.handle, self.view = STRUCTS["tn_lease"](), STRUCTS["tn_plane_view"]()

    def __enter__(self):
        self.tensor.library.call("tn_lease_begin", self.tensor.handle, self.plane, self.access,
                                 self.tensor.device.stream, ctypes.byref(self.handle),
                                 ctypes.byref(self.view))
        return self.view

    def __exit__(self, *_):
        self.tensor.library.call("tn_lease_end", self.handle)


class Export:
    """What consumers see: the protocol of DLPack for Python. counted: its exports' deleters."""

    def __init__(self, tensor, plane, part, access, pairs):
        self.tensor, self.counted = tensor, []
        self.config = new("tn_dlpack_export_config", plane=VALUES[plane], part=VALUES[part],
                          access=VALUES[access], pairs=pairs)

    def __dlpack_device__(self):
        return self.tensor.device.dlpack_device

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        device = self.tensor.device
        if copy or dl_device not in (None, device.dlpack_device):
            raise BufferError("no copies are made")
        name = b"dltensor_versioned" if max_version and max_version[0] >= 1 else b"dltensor"
        if not device.is_cuda or stream == -1:  # -1: the consumer sees to the order itself
            self.config.stream = device.stream
        else:  # None and 1 are the legacy default stream
            self.config.stream = None if stream in (None, 1) else stream
        address = ctypes.c_void_p()
        function = "tn_dlpack_export" + ("_versioned" if KINDS[name] is Versioned else "")
        device.library.call(function, self.tensor.handle, ctypes.byref(self.config),
                            ctypes.byref(address))
        self.counted.append(Counted(KINDS[name].from_address(address.value)))
        return python.PyCapsule_New(address.value, NAMES[name], destroy_capsule_c)
