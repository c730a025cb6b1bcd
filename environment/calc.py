"""A tool: arithmetic. The policy's text is parsed and never run as Python."""
import ast
import operator
import re

LONGEST_TEXT = 100      # characters of an expression, which bounds its depth as well
LARGEST = 10 ** 30      # of every number, also on the way
LARGEST_POWER = 100     # of an exponent: no power takes noticeable time
OPERATIONS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Pow: operator.pow, ast.USub: operator.neg, ast.UAdd: operator.pos}


def calc(expression):
    """Compute an expression of numbers, + - * / // % ** and brackets."""
    if len(expression) > LONGEST_TEXT:
        raise ValueError(f"longer than {LONGEST_TEXT} characters")
    if not re.fullmatch(r"[0-9.+*/%() -]+", expression):
        raise ValueError("only numbers, + - * / // % ** and brackets")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError("not an expression") from None
    value = value_of_node(tree.body)
    return value if isinstance(value, int) else f"{value:.10g}"


def value_of_node(node):
    """The number that a node of the tree stands for. ValueError for what is no arithmetic."""
    if isinstance(node, ast.Constant):
        return in_range(node.value)
    if isinstance(node, ast.UnaryOp):
        numbers = [value_of_node(node.operand)]
    elif isinstance(node, ast.BinOp):
        numbers = [value_of_node(node.left), value_of_node(node.right)]
    else:
        raise ValueError("not an expression")
    if isinstance(node.op, ast.Pow) and abs(numbers[1]) > LARGEST_POWER:
        raise ValueError(f"an exponent above {LARGEST_POWER}")
    return in_range(OPERATIONS[type(node.op)](*numbers))


def in_range(value):
    """The value, if it is a real number of a size that a text can hold; else ValueError."""
    if type(value) not in (int, float):
        raise ValueError("not a real number")
    if not abs(value) <= LARGEST:
        raise ValueError(f"a number above {LARGEST:.0e}")
    return value
