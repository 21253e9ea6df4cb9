"""The stages in which numba compiles kernels and their helpers.

numba's own sequence has stages for what kernels do not use, such as object mode and parallel loops, and after most of
them it looks at the whole function again. It searches all that is registered for each `+`. It optimizes each helper and
makes machine code of it, and does so again for each function that has the helper inside. Here the type of an operation
is found once, and a helper is optimized as a part of kernels alone.
"""

import functools
from typing import Any, Literal

from numba import _dynfunc, types  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
from numba.core import compiler, typed_passes, untyped_passes
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.registry import cpu_target
from numba.core.targetconfig import ConfigStack
from numba.core.typing.context import Context

_DEFAULTS = {name: option.default for name, option in compiler.Flags.options.items()}
_HASH = hash(compiler.Flags())


class _Flags(compiler.Flags):
    """numba's flags, which it compares thousands of times for each kernel."""

    def values(self) -> dict[str, Any]:
        return _DEFAULTS | self._values

    def __hash__(self) -> int:
        return _HASH  # numba's own, which is that of the names


class _Types(Context):
    """numba's types of operations, which are kept: what it has registered is searched once for each set of types."""

    def __init__(self) -> None:
        vars(self).update(vars(cpu_target.typing_context))
        self._found: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def resolve_function_type(self, func: Any, args: Any, kws: Any) -> Any:
        function: Any = func if isinstance(func, types.Function) else self._lookup_global(func)
        if kws or type(function) is not types.Function:
            return super().resolve_function_type(func, args, kws)
        chosen: dict[Any, Any] = vars(function)["_impl_keys"]
        key = function, args, ConfigStack.top_or_none()  # functions that numba compiles for it inherit its flags
        if key not in self._found:
            signature = super().resolve_function_type(func, args, kws)
            if signature is None or signature.args not in chosen:
                return signature
            self._found[key] = signature, chosen[signature.args]
        signature, chosen[signature.args] = self._found[key]
        return signature


_types = functools.cache(_Types)


class KernelCompiler(compiler.CompilerBase):
    lowering: type = typed_passes.NativeLowering

    def __init__(self, typingctx: Any, targetctx: Any, library: Any, args: Any, return_type: Any, flags: Any,
                 variables: Any) -> None:  # fmt: skip
        super().__init__(_types(), targetctx, library, args, return_type, _Flags(flags), variables)

    def define_pipelines(self) -> list[PassManager]:
        stages = PassManager("kernel")
        for stage in (
            untyped_passes.TranslateByteCode, untyped_passes.FixupArgs, untyped_passes.IRProcessing,
            untyped_passes.GenericRewrites, untyped_passes.ReconstructSSA, typed_passes.NopythonTypeInference,
            typed_passes.PreLowerStripPhis, typed_passes.InlineOverloads, typed_passes.IRLegalization,
            typed_passes.AnnotateTypes, self.lowering, typed_passes.NoPythonBackend,
        ):  # fmt: skip
            stages.add_pass(stage, stage.__name__)
        stages.finalize()
        return [stages]


class _HelperLibrary(JITCodeLibrary):
    """The code of a helper, with that of the helpers that it calls, for kernels to take in."""

    def finalize(self) -> None:
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True

    def get_llvm_str(self) -> str:
        self._ensure_finalized()  # without it, what other helpers define is only declared
        return super().get_llvm_str()


@register_pass(mutates_CFG=True, analysis_only=False)
class _HelperLowering(typed_passes.NativeLowering):
    _name = "helper_lowering"

    def run_pass(self, state: Any) -> Literal[True]:
        context = state.targetctx
        state.library = library = _HelperLibrary(context.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        described, called, _, environment = state.cr
        name = described.qualname.rpartition(".")[2]
        function = _dynfunc.make_function(described.lookup_module(), name, "", 0, environment, (library,))
        context.insert_user_function(function, described, [library])
        state.cr = compiler._LowerResult(described, called, function, environment)
        return True


class HelperCompiler(KernelCompiler):
    lowering = _HelperLowering
