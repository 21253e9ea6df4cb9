"""The loops of a recorded function, which are written in Python, as functions in C99."""

import ast
import re
from collections.abc import Iterator

FUNCTIONS = {"abs": "fabs", **{name: name for name in (
    "exp", "expm1", "log", "log1p", "sin", "cos", "tanh", "erf", "sqrt", "atan2", "pow", "sigmoid", "log_sigmoid",
)}}  # fmt: skip
HELPERS = {  # that math.h lacks: REAL is the type, and S the suffix of its functions
    "sigmoid": "x >= 0 ? 1 / (1 + expS(-x)) : expS(x) / (1 + expS(x))",
    "log_sigmoid": "(x < 0 ? x : 0) - log1pS(expS(-fabsS(x)))",
}
COMPARISONS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.BitAnd: "&", ast.BitOr: "|"}
REALS = {"32": ("float", "f"), "64": ("double", "")}
PRODUCT = """\
for (int row = 0; row < {rows}; row++) {{
    for (int column = 0; column < {columns}; column++) {{
        {kind} sum = 0;
        for (int k = 0; k < {terms}; k++) {{
            sum += {x}[row * {x_row} + k] * {w}[column * {w_row} + k];
        }}
        {y}[row * {y_row} + column] = sum;
    }}
}}"""  # what `times` computes
TEAM = "00"  # the type of the pointer to the other threads, which C has not


def real(value: float, kind: str) -> str:
    """Return a number as a literal of "float" or "double"."""
    if value != value:
        return "NAN"
    if value in (float("inf"), float("-inf")):
        return "-INFINITY" if value < 0 else "INFINITY"
    return f"{value:.8e}f" if kind == "float" else f"{value:.16e}"


class Function:
    """A loop as a function in C. text: of `Loops.functions`.   helpers: what it calls that math.h lacks.

    The pointers that it writes to overlap no others.
    """

    def __init__(self, name: str, text: str) -> None:
        (definition,) = ast.parse(text).body
        assert isinstance(definition, ast.FunctionDef)
        match = re.search(r"# (\d+)", text)
        assert match, "the types of the pointers follow the arguments"
        types = re.findall("..", match[1])
        self.kind, self._suffix = REALS[max(types)]  # TEAM is the least
        self.helpers: set[tuple[str, str]] = set()
        written = {
            node.value.id
            for node in ast.walk(definition)
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name)
        }
        written |= {ast.unparse(call.args[1]) for node in ast.walk(definition) if (call := _product(node)) is not None}
        pointers = [
            f"{REALS[of][0]} *restrict {arg.arg}" if arg.arg in written else f"const {REALS[of][0]} *{arg.arg}"
            for arg, of in zip(definition.args.args, types, strict=True)
            if of != TEAM
        ]
        body = "\n".join(self._block(definition.body[1:], set(), "    "))  # the first line is for numba alone
        self.text = f"static void {name}({', '.join(pointers)})\n{{\n{body}\n}}"

    def _block(self, statements: list[ast.stmt], outer: set[str], indent: str) -> Iterator[str]:
        """Yield the lines of statements. outer: the names that are declared around them."""
        declared = set(outer)
        for statement in statements:
            if isinstance(statement, ast.For):
                assert isinstance(statement.target, ast.Name)
                assert isinstance(statement.iter, ast.Call)
                i, count = statement.target.id, self._of(statement.iter.args[0])
                yield f"{indent}for (int {i} = 0; {i} < {count}; {i}++) {{"
                yield from self._block(statement.body, declared, indent + "    ")
                yield f"{indent}}}"
                continue
            if (call := _product(statement)) is not None:
                names = ("y", "y_row", "x", "x_row", "w", "w_row", "rows", "columns", "terms")
                values = dict(zip(names, map(self._of, call.args[1:]), strict=True))
                yield from (indent + line for line in PRODUCT.format(kind=self.kind, **values).splitlines())
                continue
            assert isinstance(statement, ast.Assign | ast.AugAssign)
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            sign = "=" if isinstance(statement, ast.Assign) else f"{OPERATORS[type(statement.op)]}="
            new = isinstance(target, ast.Name) and target.id not in declared
            if isinstance(target, ast.Name):
                declared.add(target.id)
            yield f"{indent}{f'{self.kind} ' if new else ''}{self._of(target)} {sign} {self._of(statement.value)};"

    def _of(self, node: ast.expr) -> str:
        """Return an expression."""
        match node:
            case ast.Name(id=name):
                return {"inf": "INFINITY", "nan": "NAN"}.get(name, name)
            case ast.Constant(value=value):
                return str(value)
            case ast.Subscript(value=value, slice=index):
                return f"{self._of(value)}[{self._of(index)}]"
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return f"(!{self._of(operand)})"
            case ast.UnaryOp(operand=operand):
                return f"(-{self._of(operand)})"
            case ast.IfExp(test=test, body=body, orelse=other):
                return f"({self._of(test)} ? {self._of(body)} : {self._of(other)})"
            case ast.Compare(left=left, ops=[sign], comparators=[right]):
                return f"({self._of(left)} {COMPARISONS[type(sign)]} {self._of(right)})"
            case ast.BinOp(op=ast.Pow(), left=left, right=right):
                return f"pow{self._suffix}({self._of(left)}, {self._of(right)})"
            case ast.BinOp(left=left, op=sign, right=right):
                return f"({self._of(left)} {OPERATORS[type(sign)]} {self._of(right)})"
            case ast.Call(func=ast.Name(id="int"), args=[value]):
                return f"(int)({self._of(value)})"
            case ast.Call(func=ast.Name(id=name), args=args):
                if name in HELPERS:
                    self.helpers.add((name, self.kind))
                return f"{FUNCTIONS[name]}{self._suffix}({', '.join(map(self._of, args))})"
            case ast.Call(args=[value]):  # np.float32(number)
                text = ast.unparse(value)
                return real(float(text), self.kind)
        raise AssertionError(f"a loop has {ast.dump(node)}")


def _product(node: ast.AST) -> ast.Call | None:
    """Return the call if the node is one of the kernel that multiplies rows by a weight."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "times":
        return node.value
    return None


def helper(name: str, kind: str) -> str:
    """Return the definition of a function that math.h lacks."""
    suffix = dict(REALS.values())[kind]
    body = re.sub(r"S\(", f"{suffix}(", HELPERS[name])
    return f"static {kind} {name}{suffix}({kind} x)\n{{\n    return {body};\n}}"
