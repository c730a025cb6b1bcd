"""
Makes lesson.ipynb from lesson.py: runs its cells and keeps what they print and draw.

    python -m explain.notebook
"""
import base64
import contextlib
import io
import json
import os

import matplotlib
import matplotlib.pyplot as plt

from run.files import replacing
from run.script import run_script


def picture(name, xlabel, ylabel):
    """Names the axes of lesson.py's figure and writes it to out/lesson."""
    plt.xlabel(xlabel)
    plt.ylabel(ylabel)
    if plt.gca().get_legend_handles_labels()[0]:
        plt.legend(fontsize="small")
    plt.tight_layout()
    os.makedirs("out/lesson", exist_ok=True)
    plt.savefig(f"out/lesson/{name}.png", dpi=100)


def cells_of(text):
    """[(is it markdown?, its text)] of a script whose cells begin with `# %%`."""
    cells = []
    for part in text.split("# %%")[1:]:
        kind, _, body = part.partition("\n")
        if kind:
            body = "\n".join(line.removeprefix("#").removeprefix(" ") for line in body.split("\n"))
        cells.append((bool(kind), body.strip("\n")))
    return cells


def run_cell(code, names):
    """A cell's outputs, as a notebook holds them."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "lesson.py", "exec"), names)
    outputs = [dict(output_type="stream", name="stdout", text=printed.getvalue())]
    for number in plt.get_fignums():
        png = io.BytesIO()
        plt.figure(number).savefig(png, format="png", dpi=80, metadata={"Software": None})
        image = base64.b64encode(png.getvalue()).decode()
        outputs.append(dict(output_type="display_data", metadata={}, data={"image/png": image}))
    plt.close("all")
    return outputs


def notebook_of(text):
    names = {"__name__": "lesson"}
    cells = []
    for is_markdown, body in cells_of(text):
        cell = dict(cell_type="markdown", metadata={}, source=body)
        if not is_markdown:
            outputs = run_cell(body, names)
            cell |= dict(cell_type="code", execution_count=None, outputs=outputs)
        cells.append(cell)
    metadata = dict(language_info=dict(name="python"))
    return dict(cells=cells, metadata=metadata, nbformat=4, nbformat_minor=4)


def main(argv):
    matplotlib.use("Agg")
    with open("lesson.py", encoding="utf-8") as f:
        notebook = notebook_of(f.read())
    with replacing("lesson.ipynb") as tmp, open(tmp, "w", encoding="utf-8") as f:
        json.dump(notebook, f, indent=1, ensure_ascii=False)


if __name__ == "__main__":
    run_script(main)
