"""What the host side of a compiled kernel launches, read in its code as the DSL has it (LLVM's dialect of MLIR)."""
import re

# Of cudaLaunchConfig_t, the dynamic shared memory is field 2. A pointer to it goes through an array of one pointer.
_CONFIG = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
_FIELD = re.compile(r"(%\w+) = llvm\.getelementptr (%\w+)\[0, 2\] : .*" + _CONFIG)
_SLOT = re.compile(r"(%\w+) = llvm\.getelementptr (%\w+)\[0, 0\] : .*!llvm\.array<1 x ptr>")
_STORE = re.compile(r"llvm\.store (%\w+), (%\w+) ")
_LOAD = re.compile(r"(%\w+) = llvm\.load (%\w+) ")
_NUMBER = re.compile(r"(%\w+) = llvm\.mlir\.constant\((-?\d+) : i\d+\)")
_ADDRESS = re.compile(r'(%\w+) = llvm\.mlir\.addressof @"?kernels_([^\s"]+)"?')
_AS_WIDE = re.compile(r"(%\w+) = llvm\.[sz]ext (%\w+) ")
_LAUNCHES = "@_cudaLaunchKernelEx"
_LAUNCH = re.compile(rf"llvm\.call {_LAUNCHES}\((%\w+), (%\w+), ")
_ELF = b"\x7fELF"


def dynamic_smem(compiled) -> dict:
    """{kernel: bytes of dynamic shared memory, None where a call decides} of each launch of what ``cute.compile``
    returned."""
    found = {}
    for function in compiled.ir_module.body.operations:
        if function.operation.name == "llvm.func" and _launches(function.operation):
            found |= of_function(str(function))
    return found


def _launches(function) -> bool:
    """Has its code a launch? The function that checks a call's arguments, the longest by far, is not written out."""
    calls = (one.operation.attributes for region in function.regions for block in region for one in block
             if one.operation.name == "llvm.call")
    return any("callee" in call and str(call["callee"]) == _LAUNCHES for call in calls)


def machine_code(compiled) -> bytes:
    """The machine code in what ``cute.compile`` returned: that of its object file, which takes longer to make."""
    values = (one.operation.attributes["value"] for one in compiled.ir_module.body.operations
              if one.operation.name == "llvm.mlir.global" and "value" in one.operation.attributes)
    return b"".join(code for code in (getattr(value, "value_bytes", b"") for value in values) if _ELF in code)


def of_function(body: str) -> dict:
    """Likewise, of one function's code."""
    if f"{_LAUNCHES}(" not in body:
        return {}
    numbers = {name: int(value) for name, value in _NUMBER.findall(body)}
    numbers |= {wide: numbers[name] for wide, name in _AS_WIDE.findall(body) if name in numbers}
    loads, kernels, slots = (dict(one.findall(body)) for one in (_LOAD, _ADDRESS, _SLOT))
    fields, stores = dict(_FIELD.findall(body)), [(to, value) for value, to in _STORE.findall(body)]
    configs = {slots[to]: value for to, value in stores if to in slots}  # array: the config that it points to
    sizes = {fields[to]: numbers.get(value) for to, value in stores if to in fields}
    found = {}
    for config, kernel in _LAUNCH.findall(body):
        name = kernels.get(loads.get(kernel))
        if name is not None:
            found[name] = sizes.get(configs.get(slots.get(loads.get(config))))
    return found
