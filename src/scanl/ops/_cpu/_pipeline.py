"""The stages in which numba compiles kernels and their helpers.

numba's own sequence has stages for what kernels do not use, such as object mode and parallel loops, and after most of
them it looks at the whole function again. It searches all that is registered for each `+`. It optimizes each helper and
makes machine code of it, and does so again for each function that has the helper inside. Here the type of an operation
is found once, a helper is optimized as a part of kernels alone, and the lives of variables are looked at only where
memory is counted.
"""

import functools
from typing import Any, Literal

from numba import _dynfunc, types  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
from numba.core import compiler, typed_passes, untyped_passes
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_machinery import PassManager, _pass_registry, register_pass
from numba.core.ir_utils import build_definitions
from numba.core.registry import cpu_target
from numba.core.ssa import reconstruct_ssa
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


class _Stages(PassManager):
    """Stages that run one after the other; numba's own manager looks at the whole function again after each."""

    def run(self, state: Any) -> None:
        for stage, _ in self.passes:
            _pass_registry.get(stage).pass_inst.run_pass(state)


@register_pass(mutates_CFG=True, analysis_only=False)
class _SingleAssignment(untyped_passes.ReconstructSSA):
    _name = "kernel_ssa"

    def run_pass(self, state: Any) -> Literal[True]:
        if state.func_ir.is_generator:  # of which more is to be known
            return super().run_pass(state)
        state.func_ir = reconstruct_ssa(state.func_ir)
        state.func_ir._definitions = build_definitions(state.func_ir.blocks)
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class _NoPhis(typed_passes.PreLowerStripPhis):
    _name = "kernel_phis"

    def run_pass(self, state: Any) -> Literal[True]:
        if state.func_ir.is_generator:
            return super().run_pass(state)
        state.func_ir = self._strip_phi_nodes(state.func_ir)
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class _Deletions(typed_passes.IRLegalization):
    """Deletions of variables, where one of them holds memory that is counted."""

    _name = "kernel_deletions"

    def run_pass(self, state: Any) -> Literal[True]:
        models = state.targetctx.data_model_manager
        if state.func_ir.is_generator or any(
            models[kind].contains_nrt_meminfo() for kind in set(state.typemap.values())
        ):
            return super().run_pass(state)
        return True


class _Compiler(compiler.CompilerBase):
    lowering: type

    def __init__(self, typingctx: Any, targetctx: Any, library: Any, args: Any, return_type: Any, flags: Any,
                 variables: Any) -> None:  # fmt: skip
        super().__init__(_types(), targetctx, library, args, return_type, _Flags(flags), variables)

    def define_pipelines(self) -> list[PassManager]:
        stages = _Stages("kernel")
        for stage in (
            untyped_passes.TranslateByteCode, untyped_passes.FixupArgs, untyped_passes.IRProcessing,
            untyped_passes.GenericRewrites, _SingleAssignment, typed_passes.NopythonTypeInference, _NoPhis, _Deletions,
            typed_passes.AnnotateTypes, self.lowering, typed_passes.NoPythonBackend,
        ):  # fmt: skip
            stages.add_pass(stage, stage.__name__)
        stages.finalize()
        return [stages]


class _Library(JITCodeLibrary):
    """The code of a function, which is optimized once: numba optimizes it alone, then with others, and again."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout


class _KernelLibrary(_Library):
    """The code of a kernel."""

    def __init__(self, codegen: Any, name: str) -> None:
        super().__init__(codegen, name)
        self.enable_object_caching()

    def _optimize_final_module(self) -> None:
        passes, builder = self._codegen._module_pass_manager()
        passes.run(self._final_module, builder)


class _HelperLibrary(_Library):
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
class _KernelLowering(typed_passes.NativeLowering):
    _name = "kernel_lowering"

    def run_pass(self, state: Any) -> Literal[True]:
        state.library = _KernelLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        super().run_pass(state)
        return True


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


class KernelCompiler(_Compiler):
    lowering = _KernelLowering


class HelperCompiler(_Compiler):
    lowering = _HelperLowering
