"""`scanl quantize RUN|FOLDER OUT`: the same model with weights of whole numbers of 8 or 4 bits."""

from collections.abc import Sequence
from pathlib import Path

from scanl.cli.parser import Parser
from scanl.errors import ConfigError
from scanl.files import check_folder, check_new_folder
from scanl.layers.parts.quantized import BITS
from scanl.learning import RunFolder
from scanl.models import Saved, quantize

NOTES = {
    "what is read, and what OUT is": {
        "a run": "a run too, for generate, eval, serve and bench-decode; it cannot be trained",
        "a folder of `save`, or a checkpoint of transformers": "another, which `load` reads, and `scanl serve`",
    }
}


def run(argv: Sequence[str]) -> int:
    """Write the folder, and print what became of the weights."""
    parser = Parser("quantize", "Write a model with weights of whole numbers, which it reads faster.", notes=NOTES)
    parser.add_argument("path", type=str, metavar="RUN|FOLDER", help="run, or folder of a model")
    parser.add_argument("out", type=str, metavar="OUT", help="folder to write")
    parser.add("--weights", str, "kind of whole numbers", "int8", metavar="|".join(BITS))
    args = parser.parse(argv)
    path, out = Path(args.path), Path(args.out)
    check_folder("quantize", path)
    check_new_folder("quantize", "out", out)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"quantize: out is {out}, which is not empty, expected a new folder")
    if (path / "config.json").is_file():
        from scanl.hub.checkpoints import language_model, save

        model = language_model(path)
        report = quantize(model, args.weights)
        save(model, out, like=path)
    elif (path / "config.yaml").is_file():
        folder, copy = RunFolder.open(path), RunFolder(out)
        model, about = folder.load_model(), folder.stored()[1]
        report = quantize(model, args.weights)
        out.mkdir(parents=True, exist_ok=True)
        copy.write_text(copy.config_file, folder.config_file.read_text(encoding="utf-8"))
        copy.save_model(model, about["corpus"])
    else:
        model = Saved.load(path)
        report = quantize(model, args.weights)
        model.save(out)
    print(f"{out}: {report}")
    return 0
