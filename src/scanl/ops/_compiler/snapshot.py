"""Whether dicts and tensors are as they were: a look at thousands of entries, which machine code takes for a few
microseconds.
"""

import ctypes
import functools
import pathlib
from array import array
from collections.abc import Iterable, Iterator, Set
from typing import Any

import torch
from torch import Tensor

from scanl.ops._compiler.machine_code import address
from scanl.ops._compiler.print_llvm import KERNEL, KernelSource

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
# Functions that the code calls, in this order: those of Python, and those by which C reads torch's tensors.
_OF_PYTHON = ("PyDict_Size", "PyDict_Next")
_OF_TORCH = ("get_data_ptr", "get_dtype", "get_dim", "get_sizes", "get_strides")


class Snapshot:
    """What dicts have, by identity, and the addresses, dtypes, shapes and strides of tensors, at one moment.

    It keeps the dicts, their keys and values, and the tensors alive, so that no two things have one address.
    unread: keys whose values are not looked at.
    """

    def __init__(
        self, dicts: Iterable[dict[Any, Any]], tensors: Iterable[Tensor], unread: Set[Any] = frozenset()
    ) -> None:
        kept = [(each, [(key, value) for key, value in each.items() if key not in unread]) for each in dicts]
        tensors = list(tensors)
        plain = [tensor for tensor in tensors if type(tensor) in _PLAIN_TYPES]
        self._all_plain = len(plain) == len(tensors)
        self._kept, self._handles = (kept, tensors), list(map(_handle, plain))
        self.items = [[id(each), *(id(one) for item in items for one in item)] for each, items in kept]
        self.forms = list(map(_form, tensors))
        parts = [part for each, _ in kept for part in _parts(each, unread)]
        table = array("q", [*_functions(), len(parts), len(plain)])
        for part in parts:
            table.extend(part)
        for tensor, handle in zip(plain, self._handles, strict=True):
            _, sizes, strides, _ = _form(tensor)
            table.extend([handle, tensor.data_ptr(), _number(handle, "get_dtype"), len(sizes), *sizes, *strides])
        self._table, self._holds, self._at = table, _check(), table.buffer_info()[0]

    def __del__(self) -> None:
        for handle in vars(self).get("_handles", []):
            _torch().aoti_torch_delete_tensor_object(ctypes.c_void_p(handle))

    def holds(self) -> bool:
        """Return whether all is as it was. It runs for every token."""
        return self._holds(self._at) == 1 and self._all_plain

    def equals(self, other: "Snapshot") -> bool:
        """Return whether all is as it was in another one, but for the addresses of numbers."""
        return self.items == other.items and self.forms == other.forms


def _parts(items: dict[Any, Any], unread: Set[Any]) -> Iterator[list[int]]:
    """Yield each run of items that are looked at, as a table has it: the dict, its size, where the run begins in it,
    the number of its items, and their keys and values.
    """
    following = ctypes.pythonapi.PyDict_Next
    begin, run, place = 0, list[int](), ctypes.c_ssize_t(0)
    for key, value in items.items():
        if key not in unread:
            run += [id(key), id(value)]
        elif run:
            yield [id(items), len(items), begin, len(run) // 2, *run]
            run = []
        following(ctypes.py_object(items), ctypes.byref(place), None, None)
        begin = begin if run else place.value
    if run or not items:
        yield [id(items), len(items), begin, len(run) // 2, *run]


def _form(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], str]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device.type


@functools.cache
def _torch() -> ctypes.CDLL:
    """Return the library that has torch's tensors, whose functions for C are the same in all versions."""
    folder = pathlib.Path(torch._C.__file__).parent / "lib"
    return ctypes.CDLL(
        str(next(path for pattern in ("libtorch_cpu.*", "torch_cpu.dll") for path in folder.glob(pattern)))
    )


def _handle(tensor: Tensor) -> int:
    """Return what C has for a tensor."""
    read = ctypes.pythonapi.PyCapsule_GetPointer
    read.restype, read.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    c: Any = torch._C
    return read(c._aoti.unsafe_alloc_void_ptr_from_tensor(tensor), None)


def _number(handle: int, function: str) -> int:
    value = ctypes.c_int32()
    getattr(_torch(), f"aoti_torch_{function}")(ctypes.c_void_p(handle), ctypes.byref(value))
    return value.value


@functools.cache
def _functions() -> list[int]:
    functions = [getattr(ctypes.pythonapi, name) for name in _OF_PYTHON]
    functions += [getattr(_torch(), f"aoti_torch_{name}") for name in _OF_TORCH]
    return [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]


@functools.cache
def _check() -> Any:
    """Return the function of the address of a table. It holds Python's lock."""
    return ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(address(KernelSource(_source(), frozenset())))


def _source() -> str:
    """Return the code that returns 1 if all in a table is as it was, and 0 otherwise."""
    names = [*_OF_PYTHON, *_OF_TORCH]
    slots = [line for at, name in enumerate([*names, "dicts", "tensors"]) for line in (
        f"  %{name}.at = getelementptr i64, ptr %table, i64 {at}",
        f"  %{name} = load {'ptr' if name in names else 'i64'}, ptr %{name}.at",
    )]  # fmt: skip
    return _TEXT.format(name=KERNEL, slots="\n".join(slots), first=len(names) + 2)


_TEXT = """
define i64 @{name}(ptr %table) nounwind {{
entry:
  %number = alloca i64
  %one = alloca ptr
  %other = alloca ptr
{slots}
  %first = getelementptr i64, ptr %table, i64 {first}
  br label %dict.head

dict.head:
  %d = phi i64 [0, %entry], [%d.next, %dict.end]
  %at = phi ptr [%first, %entry], [%item, %dict.end]
  %d.more = icmp slt i64 %d, %dicts
  br i1 %d.more, label %dict, label %tensor.head
dict:
  %object = load ptr, ptr %at
  %size.was.of = getelementptr i64, ptr %at, i64 1
  %dict.size.was = load i64, ptr %size.was.of
  %begin.at = getelementptr i64, ptr %at, i64 2
  %begin = load i64, ptr %begin.at
  %count.at = getelementptr i64, ptr %at, i64 3
  %count = load i64, ptr %count.at
  %dict.size = call i64 %PyDict_Size(ptr %object)
  %same.size = icmp eq i64 %dict.size, %dict.size.was
  store i64 %begin, ptr %number
  %items = getelementptr i64, ptr %at, i64 4
  br i1 %same.size, label %item.head, label %changed
item.head:
  %i = phi i64 [0, %dict], [%i.next, %item.same]
  %item = phi ptr [%items, %dict], [%item.next, %item.same]
  %i.more = icmp slt i64 %i, %count
  br i1 %i.more, label %item.read, label %dict.end
item.read:
  %more = call i32 %PyDict_Next(ptr %object, ptr %number, ptr %one, ptr %other)
  %has = icmp ne i32 %more, 0
  br i1 %has, label %item.look, label %changed
item.look:
  %key = load i64, ptr %one
  %value = load i64, ptr %other
  %key.was = load i64, ptr %item
  %value.at = getelementptr i64, ptr %item, i64 1
  %value.was = load i64, ptr %value.at
  %same.key = icmp eq i64 %key, %key.was
  %same.value = icmp eq i64 %value, %value.was
  %same.item = and i1 %same.key, %same.value
  br i1 %same.item, label %item.same, label %changed
item.same:
  %item.next = getelementptr i64, ptr %item, i64 2
  %i.next = add i64 %i, 1
  br label %item.head
dict.end:
  %d.next = add i64 %d, 1
  br label %dict.head

tensor.head:
  %t = phi i64 [0, %dict.head], [%t.next, %tensor.end]
  %place = phi ptr [%at, %dict.head], [%place.next, %tensor.end]
  %t.more = icmp slt i64 %t, %tensors
  br i1 %t.more, label %tensor, label %same
tensor:
  %handle = load ptr, ptr %place
  %address.at = getelementptr i64, ptr %place, i64 1
  %address.was = load i64, ptr %address.at
  %dtype.at = getelementptr i64, ptr %place, i64 2
  %dtype.was = load i32, ptr %dtype.at
  %dim.at = getelementptr i64, ptr %place, i64 3
  %dim.was = load i64, ptr %dim.at
  %error0 = call i32 %get_data_ptr(ptr %handle, ptr %one)
  %address = load i64, ptr %one
  %error1 = call i32 %get_dtype(ptr %handle, ptr %number)
  %dtype = load i32, ptr %number
  %error2 = call i32 %get_dim(ptr %handle, ptr %number)
  %dim = load i64, ptr %number
  %error3 = call i32 %get_sizes(ptr %handle, ptr %one)
  %sizes = load ptr, ptr %one
  %error4 = call i32 %get_strides(ptr %handle, ptr %other)
  %strides = load ptr, ptr %other
  %error01 = or i32 %error0, %error1
  %error23 = or i32 %error2, %error3
  %error34 = or i32 %error23, %error4
  %error = or i32 %error01, %error34
  %good = icmp eq i32 %error, 0
  %same.address = icmp eq i64 %address, %address.was
  %same.dtype = icmp eq i32 %dtype, %dtype.was
  %same.dim = icmp eq i64 %dim, %dim.was
  %same01 = and i1 %good, %same.address
  %same23 = and i1 %same.dtype, %same.dim
  %same.tensor = and i1 %same01, %same23
  %sizes.was = getelementptr i64, ptr %place, i64 4
  %strides.was = getelementptr i64, ptr %sizes.was, i64 %dim
  br i1 %same.tensor, label %axis.head, label %changed
axis.head:
  %axis = phi i64 [0, %tensor], [%axis.next, %axis.read]
  %axis.more = icmp slt i64 %axis, %dim
  br i1 %axis.more, label %axis.read, label %tensor.end
axis.read:
  %size.at = getelementptr i64, ptr %sizes, i64 %axis
  %size.now = load i64, ptr %size.at
  %size.was.at = getelementptr i64, ptr %sizes.was, i64 %axis
  %size.was = load i64, ptr %size.was.at
  %stride.at = getelementptr i64, ptr %strides, i64 %axis
  %stride.now = load i64, ptr %stride.at
  %stride.was.at = getelementptr i64, ptr %strides.was, i64 %axis
  %stride.was = load i64, ptr %stride.was.at
  %same.axis.size = icmp eq i64 %size.now, %size.was
  %same.stride = icmp eq i64 %stride.now, %stride.was
  %same.axis = and i1 %same.axis.size, %same.stride
  %axis.next = add i64 %axis, 1
  br i1 %same.axis, label %axis.head, label %changed
tensor.end:
  %place.next = getelementptr i64, ptr %strides.was, i64 %dim
  %t.next = add i64 %t, 1
  br label %tensor.head

same:
  ret i64 1
changed:
  ret i64 0
}}
"""
