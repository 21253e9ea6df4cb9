"""Files that were made to do harm: whole, with a right digest, and one field missing, of another type, or huge.

A reader takes the file, or refuses it in one line that names it. It raises nothing else, and takes no memory that the
file does not have. Nothing is unpickled, but where a reason stands here.
"""

import copy
import itertools
import json
import os
import re
from array import array
from pathlib import Path

import pytest
import torch
import yaml

from scanl import hub
from scanl.data import Shards
from scanl.digests import load_tensors, save_tensors
from scanl.errors import CheckpointError, DataError, ScanlError
from scanl.learning.run.checkpoint import OWN_PARTS, PARTS, read_checkpoint, write_checkpoint
from scanl.learning.run.config import TrainConfig, build_model
from scanl.learning.run.folder import RunFolder
from scanl.learning.run.shards import read_shards
from scanl.models import LanguageModel, Session, Stack, StateStore
from scanl.ops._frame import cache

SOURCE = Path(__file__).parents[1] / "src" / "scanl"
GONE = object()
HARMFUL = (None, -1, 2**40, 2**70, 0.5, float("nan"), "text", [[1]], {"class": "Stack"}, GONE)


def paths(value, path=()):
    """Yield the path of every field of nested values."""
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from paths(entry, (*path, key))


def changed(value, path, harm):
    """Return a copy with another value, or none, at a path."""
    value = owner = copy.deepcopy(value)
    *way, last = path
    for key in way:
        owner = owner[key]
    if harm is GONE:
        del owner[last]
    else:
        owner[last] = harm
    return value


def check_every_field(about, write, read, file):
    """Three kinds of harm to each field, which take turns."""
    kinds = itertools.cycle(HARMFUL)
    for path in paths(about):
        for harm in itertools.islice(kinds, 3):
            write(changed(about, path, harm))
            try:
                read()
            except ScanlError as error:
                line = str(error)
                assert str(file) in line, f"{path} = {harm!r}: {line}"
                assert "\n" not in line, f"{path} = {harm!r}: {line}"
                assert len(line) < 800, f"{path} = {harm!r}: {line}"


def model():
    torch.manual_seed(0)
    return LanguageModel(9, Stack(8, 2, "gru", channel_mixer="none")).eval()


def test_the_header_of_a_model(tmp_path):
    model().save(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, about = load_tensors(file, "test")
    about.pop("sha256")
    check_every_field(about, lambda a: save_tensors(tensors, file, a), lambda: LanguageModel.load(tmp_path), file)


def test_the_fields_of_a_text(tmp_path):
    """What a session that was read draws is drawn too: an odd length is found out at once, not then."""
    small, file = model(), tmp_path / "session.safetensors"
    session = Session(small, torch.arange(5))
    session.read()
    session.save(file)
    tensors, about = load_tensors(file, "test")
    about.pop("sha256")

    def read():
        next(small.generate(torch.zeros(1, 1, dtype=torch.long), session=Session.load(file, small)))

    check_every_field(about, lambda a: save_tensors(tensors, file, a), read, file)
    name = next(name for name in tensors if name != "tokens")
    texts = [torch.full((5,), value, dtype=torch.int32) for value in (-7, 9)]
    texts += [torch.ones(5), torch.full((5,), 2**40), texts[0][:0], texts[0][None]]
    odd = [{"tokens": tokens} for tokens in texts]
    for more in [*odd, {name: torch.zeros(2, 8)}, {name: torch.zeros(1, 9)}, {name: torch.zeros(())}]:
        save_tensors({**tensors, **more}, file, about)
        with pytest.raises(CheckpointError, match=re.escape(str(file))):
            read()
        store = StateStore(small, folder=tmp_path)
        save_tensors({**tensors, **more}, store.folder / "0.safetensors", about)
        with pytest.warns(UserWarning, match="is removed, and the state is computed again"):
            assert StateStore(small, folder=tmp_path).longest(array("i", range(5))) == (0, None)


def checkpoint():
    """Return the entries of a small checkpoint."""
    examples = {dict: {}, list: [], int: 1, str: "text", float: 0.5}
    own = {name: examples[kinds[0]] for name, kinds in OWN_PARTS.items()} | {
        "plan": {"steps": 3},
        "place": {"batch": 0, "step": 0},
    }
    return {
        **{name: examples[kinds[0]] for name, kinds in PARTS.items()},
        "state_dict": {"model.weight": torch.zeros(2)},
        "metrics": {"size": 0, "sha256": ""},
        "scanl": own,
        "shards": {"folder": "shards-1", "digests": {"a.safetensors": "0"}},
    }


def test_the_fields_of_a_checkpoint(tmp_path):
    file, stored = tmp_path / "checkpoint.ckpt", checkpoint()
    write_checkpoint(stored, file)
    assert read_checkpoint(file).keys() == stored.keys()
    check_every_field(stored, lambda a: write_checkpoint(a, file), lambda: read_checkpoint(file), file)
    for path, harm in (
        (("scanl",), 1), (("scanl", "plan"), {}), (("scanl", "rows"), True), (("state_dict", "model.weight"), 0.5),
        (("metrics", "size"), "0"), (("shards",), None), (("shards", "folder"), "../other"),
        (("shards", "digests"), {"../a": "0"}),
    ):  # fmt: skip
        write_checkpoint(changed(stored, path, harm), file)
        with pytest.raises(CheckpointError, match=re.escape(str(file))):
            read_checkpoint(file)


def test_a_checkpoint_asks_for_no_more_memory_than_its_shards(tmp_path):
    file = tmp_path / "checkpoint.ckpt"
    stored = changed(checkpoint(), ("state_dict", "model.weight"), torch.empty(2**43, device="meta"))
    write_checkpoint(stored, file)
    with pytest.raises(CheckpointError, match=r"needs 35184372088832 bytes of .*shards-1, which has 0"):
        read_shards(file)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 2_000,
        "a: " + "[" * 2_000,
        "{" * 2_000,
        "a: 2024-13-45",
        "!!python/name:os.system",
        "&a [*a]",
        "{source: {data: {a: b}}}",
        "{stack: {layer: [[[]]]}}",
    ],
)
def test_a_configuration(text, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(CheckpointError, match=re.escape(str(file))) as caught:
        TrainConfig.from_yaml(file)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("name", "value"), [("depth", 2**40), ("dim", 2**40), ("channel_mixer", None), ("layer", "grru")]
)
def test_the_model_of_a_run(name, value, tmp_path):
    config = TrainConfig.from_values({"source": {"data": ["adding"]}, "stack": {"layer": "gru", "dim": 8}}, tmp_path)
    run = RunFolder(tmp_path)
    run.write_text(run.config_file, config.to_yaml())
    run.save_model(build_model(config, run.source.question), run.source.digest())
    run.load_model()
    values = yaml.safe_load(run.config_file.read_text())
    run.config_file.write_text(yaml.safe_dump(changed(values, ("stack", name), value)))
    with pytest.raises(ScanlError, match=re.escape(str(run.config_file))):
        run.load_model()


@pytest.mark.parametrize("line", ["[" * 100_000, '{"text": ' + "[" * 100_000])
def test_deep_brackets_in_a_shard(line, tmp_path):
    file = tmp_path / "0.jsonl"
    file.write_text(f'{{"text": "a"}}\n{line}\n')
    with pytest.raises(DataError, match=rf"{re.escape(str(file))}.*too many brackets"):
        list(Shards(str(tmp_path), columns=["text"], batch_size=1))


def test_the_options_of_a_checkpoint_of_another_program(tmp_path):
    origin = Path(__file__).parent / "hub" / "originals" / "delta_net"
    for file in origin.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((origin / "config.json").read_text())
    check_every_field(
        {name: config[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size")},
        lambda a: (tmp_path / "config.json").write_text(json.dumps({**config, **a})),
        lambda: hub.load(tmp_path),
        tmp_path,
    )


WAYS = re.compile(
    r"\b(pickle|cloudpickle|dill|joblib|shelve|marshal|jsonpickle)\.\w*(load|Unpickler)\w*|\bUnpickler\b|"
    r"\b(import|from) (cloudpickle|dill|joblib|shelve|marshal|jsonpickle)\b|from pickle import|read_pickle\(|"
    r"torch\.load\(|torch\.jit\.load|load_from_checkpoint|\b_rebuild\(|"
    r"allow_pickle=True|np\.load\((?!.*allow_pickle=False)|yaml\.(?!safe_)\w*load\w*\("
)
REASONS = {  # of each place that unpickles, or reads what could be a pickle
    "ops/_cpu/_cache.py": "machine code in the user's own cache, as numba keeps it; whoever writes there runs code",
    "data/readers/pickles.py": "a reader that looks no name up, for published pickles",
    "hub/weights.py": "weights_only=True",
    "learning/run/checkpoint.py": "weights_only=True",
    "learning/online/online.py": "weights_only=True",
    "learning/forecasting/pretraining.py": "weights_only=True",
}


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="the system has no owners of files")
def test_machine_code_that_others_can_write_is_not_read(tmp_path, monkeypatch):
    file = tmp_path / "kernel.nbc"
    cache.write(file, b"code")
    assert cache.read(file) == b"code"
    file.chmod(0o666)
    with pytest.raises(PermissionError, match="every user may write it"):
        cache.read(file)
    file.chmod(0o644)
    os_getuid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: os_getuid + 1)
    monkeypatch.setattr(os, "fstat", lambda _: os.stat_result((0o100644, 0, 0, 1, os_getuid + 2, 0, 4, 0, 0, 0)))
    with pytest.raises(PermissionError, match="belongs to another user"):
        cache.read(file)


def test_nothing_is_unpickled_without_a_reason():
    places = {}
    for path in sorted(SOURCE.rglob("*.py")):
        lines = [line for line in path.read_text("utf-8").splitlines() if WAYS.search(line)]
        if lines:
            places[path.relative_to(SOURCE).as_posix()] = lines
    assert places.keys() == REASONS.keys(), places
    for path, reason in REASONS.items():
        for line in places.get(path, ()):
            assert reason != "weights_only=True" or "weights_only=True" in line, f"{path}: {line}"
    for line in ("torch.load(path)", "pickle.load(file)", "np.load(path)", "yaml.load(text)", "pd.read_pickle(path)"):
        assert WAYS.search(line)
    assert not WAYS.search("np.load(path, allow_pickle=False)")
